"""CUDA C++ compiled while the program runs and launched through the driver, in clusters where wanted.

It needs what every CUDA build of torch brings along (NVRTC) and the driver, no toolkit and no headers.
torch's own ``torch.cuda._compile_kernel`` (2.9 and later) insists on a toolkit, passes whole numbers
as 32 bits, and cannot ask for a cluster.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import torch

from ddlkit.core.errors import UserError

Argument = torch.Tensor | int | float
"""A tensor goes as its address, an int as 64 bits without sign, a float as double."""

_REGISTERS, _DYNAMIC_SHARED_BYTES = 4, 8  # CUfunction_attribute
_CLUSTER, _CLUSTER_POLICY, _SPREAD = 4, 5, 1  # CUlaunchAttributeID, CUclusterSchedulingPolicy


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a value of up to 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", c_uint),
    )


class Kernel:
    """A function that runs on the current GPU.

    registers : that the compiler gave to each thread
    """

    def __init__(self, function: c_void_p) -> None:
        self._function = function
        found = c_int()
        _driver("cuFuncGetAttribute", byref(found), _REGISTERS, function)
        self.registers = found.value

    def allow_shared(self, n_bytes: int) -> None:
        """Let a block ask for up to ``n_bytes`` of dynamic shared memory: without this, for 48 KiB."""
        _driver("cuFuncSetAttribute", self._function, _DYNAMIC_SHARED_BYTES, n_bytes)

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Put ``blocks`` blocks of ``threads`` threads into torch's current stream.

        cluster : blocks that must run at the same time and near each other, yet spread over
            multiprocessors, as NCCL asks for; divides ``blocks``, above 1 from Hopper on

        Tensors must live until the kernel has ended. Raises UserError when the driver refuses.
        """
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[:3] = _CLUSTER, (cluster, 1, 1)
        attributes[1].id, attributes[1].value[0] = _CLUSTER_POLICY, _SPREAD
        how = _Launch(
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=attributes,
            n_attributes=len(attributes) if cluster > 1 else 0,
        )
        values = [_c_value(argument) for argument in arguments]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        _driver("cuLaunchKernelEx", byref(how), self._function, places, None)


def _c_value(argument: Argument) -> c_void_p | c_uint64 | c_double:
    if isinstance(argument, torch.Tensor):
        return c_void_p(argument.data_ptr())
    return c_uint64(argument) if isinstance(argument, int) else c_double(argument)


def load(source: str, names: Sequence[str], options: Sequence[str] = ()) -> list[Kernel]:
    """Compile ``source`` for the current GPU and load its ``extern "C"`` kernels of these names.

    Raises UserError for a torch without CUDA, source that does not compile, and a driver that refuses.
    """
    torch.cuda.synchronize()  # makes torch's context the current one, where modules belong
    major, minor = torch.cuda.get_device_capability()
    image = cubin(source, f"sm_{major}{minor}", options)
    module = c_void_p()
    _driver("cuModuleLoadData", byref(module), c_char_p(image))
    kernels = []
    for name in names:
        function = c_void_p()
        _driver("cuModuleGetFunction", byref(function), module, c_char_p(name.encode()))
        kernels.append(Kernel(function))
    return kernels


def cubin(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code for an architecture such as "sm_90"; no GPU is needed to make it.

    Raises UserError, with the compiler's first complaint, when the source does not compile.
    """
    nvrtc = _nvrtc()
    words = [f"--gpu-architecture={architecture}", *options]
    program, size = c_void_p(), c_size_t()
    create = nvrtc.nvrtcCreateProgram(
        byref(program), c_char_p(source.encode()), c_char_p(b"ddlkit.cu"), 0, None, None
    )
    _check_nvrtc(create, "")
    try:
        given = (c_char_p * len(words))(*(word.encode() for word in words))
        failed = nvrtc.nvrtcCompileProgram(program, len(words), given)
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = (c_char * size.value)()
        nvrtc.nvrtcGetProgramLog(program, log)
        _check_nvrtc(failed, log.value.decode(errors="replace"))
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "")
        image = (c_char * size.value)()
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, image), "")
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return image.raw


def _check_nvrtc(status: int, log: str) -> None:
    if status:
        complaint = next((line for line in log.splitlines() if "error" in line), f"status {status}")
        raise UserError(f"CUDA source does not compile: {complaint}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version: where the loader finds it, or as torch's wheels bring it along."""
    if torch.version.cuda is None:
        raise UserError("this torch has no CUDA, so no NVRTC: install a CUDA build of torch")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    home = Path(torch.__file__).parent
    brought = (*home.parent.glob(f"nvidia/*/lib/{name}"), *home.glob("lib/libnvrtc-[0-9]*.so*"))
    for candidate in (name, *map(str, brought)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UserError(f"{name} is neither where the loader looks nor beside torch in {home.parent}")


def _driver(call: str, *arguments: object) -> None:
    """One call of the CUDA driver. Raises UserError with the driver's words when it fails."""
    library = ctypes.CDLL("libcuda.so.1")
    status = getattr(library, call)(*arguments)
    if status:
        words = c_char_p()
        library.cuGetErrorString(status, byref(words))
        raise UserError(f"{call}: {(words.value or b'unknown error').decode()} ({status})")
