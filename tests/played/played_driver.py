"""The played CUDA driver: driver.cpp with ddlkit's own kernels, compiled for the processor."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import played_profiler

HERE = Path(__file__).parent
THREADS = 2  # of the operating system, at most, that play a block
SHARED_BYTES = 232_448  # that a block may ask for on sm_90
SLOWNESS = 8  # of the GPU's timer
COPY_BYTES_PER_S = (
    1_000_000_000  # of the copy engines: what computes beside them finds them at work
)

_TIMER = re.compile(r'asm volatile\("mov\.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\);')
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')

# What may be passed for each parameter: a pointer (p) or 32 bits (i). ctypes passes a bare int as 32 bits
# wherever it stands, which the real driver takes for half an address.
_SIGNATURES = {
    "cuInit": "i",
    "cuDeviceGetCount": "p",
    "cuDeviceGetName": "pii",
    "cuDeviceTotalMem_v2": "pi",
    "cuDeviceGetAttribute": "pii",
    "cuModuleLoadData": "pp",
    "cuModuleGetFunction": "ppp",
    "cuFuncGetAttribute": "pip",
    "cuFuncSetAttribute": "pii",
    "cuLaunchKernelEx": "pppp",
    "cuGetErrorString": "ip",
    "nvrtcCreateProgram": "pppipp",
    "nvrtcCompileProgram": "pip",
    "nvrtcGetProgramLogSize": "pp",
    "nvrtcGetProgramLog": "pp",
    "nvrtcGetCUBINSize": "pp",
    "nvrtcGetCUBIN": "pp",
    "nvrtcDestroyProgram": "p",
}
_POINTERS = (ctypes.c_void_p, ctypes.c_char_p, ctypes.Array, ctypes._Pointer, bytes, type(None))
_BY_REFERENCE = type(ctypes.byref(ctypes.c_int()))


def build(directory: Path, source: str, options: tuple[str, ...], *, nvrtc: str = "") -> None:
    """Compile libcuda.so.1 into ``directory``, and let it play NVRTC of that file name, too.

    source : ddlkit's CUDA C++; options : what it is compiled with, of which the definitions count here

    Raises subprocess.CalledProcessError when g++ refuses the source.
    """
    kernels = _KERNEL.findall(source)
    table = ", ".join(f'{{"{name}", function({name})}}' for name in kernels)
    for_processor = _TIMER.sub(r"\1 = globaltimer();", source)
    (directory / "kernels.inc").write_text(f"{for_processor}\n#define KERNELS {table}\n")
    library = directory / "libcuda.so.1"
    definitions = [option for option in options if option.startswith("-D")]
    definitions += [f"-DPLAYED_THREADS={THREADS}u", f"-DPLAYED_SHARED_BYTES={SHARED_BYTES}"]
    definitions += [
        f"-DPLAYED_SLOWNESS={SLOWNESS}",
        f"-DPLAYED_COPY_BYTES_PER_S={COPY_BYTES_PER_S}",
    ]
    how = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{directory}"]
    command = ["g++", *how, *definitions, str(HERE / "driver.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    if nvrtc:
        (directory / nvrtc).symlink_to(library.name)


def library() -> ctypes.CDLL:
    """The played driver, for what is played of torch above it."""
    found = ctypes.CDLL("libcuda.so.1")
    found.played_stream_create.restype = ctypes.c_void_p
    for name in ("stream_wait", "record"):
        getattr(found, f"played_{name}").argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.played_stream_synchronize.argtypes = [ctypes.c_void_p]
    found.played_copy.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t]
    return found


def check_calls() -> None:
    """From now on refuse a call of the driver or of NVRTC with an argument of the wrong size."""
    real = ctypes.CDLL.__getitem__

    def find(self: ctypes.CDLL, name: Any) -> Any:
        found = real(self, name)
        library = Path(str(self._name)).name
        if library.startswith(("libcuda.so", "libnvrtc.so")) and name in _SIGNATURES:
            return _checked(name, found)
        if name == "ncclGroupEnd":  # where a played NCCL sums
            return _in_streams(found, real(self, "played_summed"))
        if library.startswith("libcuda.so") and not str(name).startswith("played_"):
            raise AttributeError(f"{name} of the driver is not played: add it to driver.cpp")
        return found

    ctypes.CDLL.__getitem__ = find  # type: ignore[method-assign]


def _in_streams(sum_now: Callable[[], int], summed: Callable[..., int]) -> Callable[[], int]:
    """The end of a group whose messages are still under way in their streams, as the profiler sees."""
    summed.restype = ctypes.c_size_t  # type: ignore[attr-defined]

    def end() -> int:
        status, stream, ends = sum_now(), ctypes.c_void_p(), []
        driver = library()
        for rank in itertools.count():
            if not (n_bytes := summed(rank, ctypes.byref(stream))):
                break
            if stream.value:
                ends.append((ctypes.c_double(), ctypes.c_double()))
                driver.played_record(stream, ctypes.addressof(ends[-1][0]))
                driver.played_copy(stream, None, None, n_bytes)
                driver.played_record(stream, ctypes.addressof(ends[-1][1]))
        played_profiler.note_messages(ends)
        return status

    return end


def _checked(name: str, call: Callable[..., int]) -> Callable[..., int]:
    def checked(*arguments: Any) -> int:
        kinds = _SIGNATURES[name]
        fit = [_fits(kind, one) for kind, one in zip(kinds, arguments, strict=True)]
        assert all(fit), f"{name}{arguments}: wrong in size, {kinds} is expected"
        return call(*arguments)

    return checked


def _fits(kind: str, argument: Any) -> bool:
    if kind == "p":
        return isinstance(argument, (*_POINTERS, _BY_REFERENCE))
    if isinstance(argument, ctypes.c_int | ctypes.c_uint):
        return True
    return isinstance(argument, int) and -(2**31) <= argument < 2**31
