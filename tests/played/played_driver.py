"""The played CUDA driver: driver.cpp with ddlkit's own kernels, compiled for the processor."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
THREADS = 2  # of the operating system, at most, that play a block
SHARED_BYTES = 232_448  # that a block may ask for on sm_90
SLOWNESS = 8  # of the GPU's timer
COPY_BYTES_PER_S = (
    1_000_000_000  # of the copy engines: what computes beside them finds them at work
)

_TIMER = re.compile(r'asm volatile\("mov\.u64 %0, %%globaltimer;" : "=l"\((\w+)\)\);')
_KERNEL = re.compile(
    r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\('
)


def build(
    directory: Path, source: str, options: tuple[str, ...], *, nvrtc: str = ""
) -> None:
    """Compile libcuda.so.1 into ``directory``, and let it play NVRTC of that file name, too.

    source : ddlkit's CUDA C++; options : what it is compiled with, of which the definitions count here

    Raises subprocess.CalledProcessError when g++ refuses the source.
    """
    kernels = _KERNEL.findall(source)
    table = ", ".join(f'{{"{name}", function({name})}}' for name in kernels)
    for_processor = _TIMER.sub(r"\1 = globaltimer();", source)
    (directory / "kernels.inc").write_text(
        f"{for_processor}\n#define KERNELS {table}\n"
    )
    library = directory / "libcuda.so.1"
    definitions = [option for option in options if option.startswith("-D")]
    definitions += [
        f"-DPLAYED_THREADS={THREADS}u",
        f"-DPLAYED_SHARED_BYTES={SHARED_BYTES}",
    ]
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
    driver = ctypes.CDLL("libcuda.so.1")
    driver.played_stream_create.restype = ctypes.c_void_p
    for name in ("stream_wait", "record"):
        getattr(driver, f"played_{name}").argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    driver.played_stream_synchronize.argtypes = [ctypes.c_void_p]
    driver.played_copy.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_size_t]
    return driver
