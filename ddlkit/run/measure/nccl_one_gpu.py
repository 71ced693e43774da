"""Kernels beside NCCL itself where there is one GPU: two ranks in one process, both on it.

What one GPU can show of the real thing, and a check of the stand-in: the same kernels beside the same blocks
and threads, in the same table ``contention``. Each of the two ranks runs a kernel of its own, so twice the
blocks are taken. Nothing crosses a link: messages pass through the GPU's memory.

NCCL allows it from 2.30.3 on, as an experiment (NCCL_MULTI_RANK_GPU_ENABLE); where both kernels do not find
room at the same time, it hangs. So every setting has a process of its own, which is ended when its time is
up. The library is the one that DDLKIT_NCCL names, or else torch's, which may be too old; both may be loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path

import torch

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.run.instruments.clock import Budget, synchronizer
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import channels, contention
from ddlkit.run.measure.contention import ContentionSettings, Exchange
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.standin import Compute
from ddlkit.run.sessions.session import Unavailable, all_or_partial

RANKS = 2
OLDEST = 23003  # 2.30.3
LIBRARY = "DDLKIT_NCCL"
LIMIT_S = 60.0  # for each setting: more is a hang
SETTINGS = ((1, 64), (2, 256), (4, 512), (8, 512))
VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
}

_FLOAT32, _SUM = 7, 0  # ncclDataType_t, ncclRedOp_t
_TEXT = c_char_p
# As in nccl.h: the type that is returned (a status, or words), then those of the arguments.
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "ncclGetVersion": (c_int, POINTER(c_int)),
    "ncclGetErrorString": (_TEXT, c_int),
    "ncclGetLastError": (_TEXT, c_void_p),
    "ncclCommInitAll": (c_int, POINTER(c_void_p), c_int, POINTER(c_int)),
    "ncclGroupStart": (c_int,),
    "ncclGroupEnd": (c_int,),
    "ncclAllReduce": (
        *(c_int, c_void_p, c_void_p, c_size_t),  # from, to, elements
        *(c_int, c_int, c_void_p, c_void_p),  # type, operation, communicator, stream
    ),
}


class Nccl:
    """One libnccl, by its path, bound to itself even where torch has loaded another.

    Raises Unavailable where there is none that has all functions.
    """

    def __init__(self, path: str) -> None:
        mode = os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
        try:
            self._library = ctypes.CDLL(path, mode=mode)
            for name, (result, *arguments) in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise Unavailable(f"no NCCL that can be used: {error}") from None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function. Raises UserError with NCCL's words where it fails."""
        status = getattr(self._library, name)(*arguments)
        if status:
            words = self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)
            what, why = ((text or b"no reason given").decode(errors="replace") for text in words)
            raise UserError(f"{name}: {what}: {why}")

    @property
    def version(self) -> int:
        """As NCCL counts: 23003 is 2.30.3."""
        found = c_int()
        self.call("ncclGetVersion", byref(found))
        return found.value


def library() -> str:
    """Path of the library that DDLKIT_NCCL names, or else of the one in torch's wheels, or its plain name."""
    wheels = importlib.util.find_spec("nvidia")
    places = (wheels.submodule_search_locations if wheels else None) or ()
    brought = [path for place in places for path in Path(place).glob("nccl/lib/libnccl.so.2")]
    return os.environ.get(LIBRARY) or next(map(str, brought), "libnccl.so.2")


def unavailable() -> str:
    """Why NCCL cannot have two ranks on one GPU here; "" if it may."""
    try:
        version = Nccl(library()).version
    except UserError as error:
        return str(error)
    if version >= OLDEST:
        return ""
    named = ".".join(map(str, (version // 10000, version // 100 % 100, version % 100)))
    return (
        f"NCCL {named} has no two ranks on one GPU, 2.30.3 does: name its libnccl.so.2 by {LIBRARY}"
    )


class TwoRanks:
    """Two ranks of NCCL on one device: a communicator, a stream and a message each.

    Raises UserError where NCCL fails, and where its sums are wrong.
    """

    def __init__(self, nccl: Nccl, device: torch.device, message_bytes: int) -> None:
        self._nccl, self._device = nccl, device
        on_gpu = device.type == "cuda"
        synchronizer(device)()  # makes torch's context, which NCCL then finds
        self._streams = [torch.cuda.Stream(device) for _ in range(RANKS)] if on_gpu else []
        self.messages = [
            torch.full((message_bytes // 4,), float(rank + 1), device=device)
            for rank in range(RANKS)
        ]
        self._communicators = (c_void_p * RANKS)()
        devices = (c_int * RANKS)(*[device.index or 0] * RANKS)
        nccl.call("ncclCommInitAll", self._communicators, RANKS, devices)
        self.post()()
        synchronizer(device)()
        if not all(bool((message == 1 + RANKS).all()) for message in self.messages):
            raise UserError("two ranks of NCCL on one GPU: their sums are wrong")

    def post(self) -> Compute:
        """Put an all-reduce on its way, in both ranks' streams; returns what makes the current one wait."""
        handles = [stream.cuda_stream for stream in self._streams] or [0] * RANKS
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        self._nccl.call("ncclGroupStart")
        for message, communicator, handle in zip(
            self.messages, self._communicators, handles, strict=True
        ):
            place = message.data_ptr()
            how = message.numel(), _FLOAT32, _SUM, communicator, handle
            self._nccl.call("ncclAllReduce", place, place, *how)
        self._nccl.call("ncclGroupEnd")
        return self._join

    def reset(self) -> None:
        """Sums of sums grow: begin anew."""
        for message in self.messages:
            message.fill_(1.0)

    def _join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


def measure_on_one_gpu(
    pairs: Sequence[tuple[int, int]],
    settings: ContentionSettings,
    *,
    on_gpu: bool = True,
    limit_s: float = LIMIT_S,
) -> Tables:
    """Table ``contention``: kernels alone and beside all-reduces of two ranks of NCCL on the same GPU.

    pairs : (blocks, threads) that NCCL is asked for, instead of those in ``settings``; each has a process
        of its own, which is ended after ``limit_s``

    Raises Unavailable where NCCL is too old; UserError when the first pair fails, or hangs; Partial with
    what there is when a later one does.
    """
    if reason := unavailable():
        raise Unavailable(reason)

    def one(blocks: int, threads: int) -> Tables:
        with launch.workspace(None) as out, contention.keeping(out):
            variables = {**channels.environment(blocks, threads, out), **VARIABLES}
            return launch.launch(
                one_gpu_job,
                replace(settings, blocks=blocks, threads=threads),
                ranks=1,
                place=Loopback(name="one-gpu", variables=variables),
                join={"backend": "gloo", "on_gpu": on_gpu},
                timeout_s=limit_s,
                out=out,
            )

    frames = (one(*pair)["contention"] for pair in pairs)
    return {"contention": all_or_partial("contention", frames)}


@job(ContentionSettings, "contention")
def one_gpu_job(me: Rank, settings: ContentionSettings) -> Iterator[Tables]:
    """One kernel after the other, in the one process that is both ranks."""
    with computing("two ranks of NCCL", me.device), torch.no_grad():
        ranks = TwoRanks(Nccl(library()), me.device, settings.message_bytes)
    exchange = Exchange("nccl_one_gpu", RANKS, ranks.post, ranks.reset)
    return contention.beside_each(me, settings, lambda: exchange)


def case(brief: bool) -> tuple[Sequence[tuple[int, int]], ContentionSettings]:
    """Arguments of `measure_on_one_gpu`: kernels at the paper's sizes, as beside the stand-in."""
    scale = contention.TINY if brief else contention.PAPER
    names = ("convolution", "attention") if brief else tuple(contention.kernels(scale))
    most_s = 0.1 if brief else 1.0
    budget = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=most_s)
    message_bytes = 4 * MIB if brief else contention.MESSAGE_BYTES
    settings = ContentionSettings(0, scale, budget, names, message_bytes)
    return SETTINGS[: 1 if brief else None], settings
