"""Kernels beside NCCL itself where there is one GPU: two ranks in one process, both on it.

Each rank runs a kernel of its own, so twice the blocks are taken. NCCL hangs where both do not find room at
the same time: every setting has a process of its own, which is ended when its time is up.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.units import MIB
from ddlkit.formats import kineto
from ddlkit.run import clock
from ddlkit.run.clock import Budget
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank, Tables, job
from ddlkit.run.measure import contention
from ddlkit.run.measure.contention import BOTH, Queues, in_turn
from ddlkit.run.measure.layers import compute_on
from ddlkit.run.measure.standin import in_wheels
from ddlkit.run.sessions import Unavailable, all_or_partial

RANKS = 2
WHO = ("first", "second")
OLDEST = 23003  # 2.30.3
LIBRARY = "DDLKIT_NCCL"  # names one; else that of torch's wheels is taken, or of the system
LIMIT_S = 60.0  # for each setting: more is a hang
SETTINGS = ((1, 64), (2, 256), (4, 512), (8, 512))
VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",  # threads count for its ring and Simple protocol only
    "NCCL_PROTO": "Simple",
}

_FLOAT32, _SUM = 7, 0  # ncclDataType_t, ncclRedOp_t


class Nccl:
    """One libnccl, bound to itself even where torch has loaded another. Raises Unavailable without it."""

    def __init__(self) -> None:
        mode = os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
        in_torchs = map(str, in_wheels("nccl/lib/libnccl.so.2"))
        path = os.environ.get(LIBRARY) or next(in_torchs, "libnccl.so.2")
        try:
            self._library = ctypes.CDLL(path, mode=mode)
            for words in (self._library.ncclGetErrorString, self._library.ncclGetLastError):
                words.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise Unavailable(f"no NCCL that can be used: {error}") from None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function. Raises UserError with NCCL's words where it fails."""
        if status := getattr(self._library, name)(*arguments):
            words = self._library.ncclGetErrorString(status), self._library.ncclGetLastError(None)
            what, why = ((text or b"no reason given").decode(errors="replace") for text in words)
            raise UserError(f"{name}: {what}: {why}")


def unavailable() -> str:
    """Return why NCCL cannot have two ranks on one GPU here; "" if it may."""
    number = c_int()
    try:
        Nccl().call("ncclGetVersion", byref(number))
    except UserError as error:
        return str(error)
    if number.value >= OLDEST:
        return ""
    lacks = f"NCCL {number.value} has no two ranks on one GPU"
    return f"{lacks}, {OLDEST} (2.30.3) does: name its libnccl.so.2 by {LIBRARY}"


class TwoRanks(Queues):
    """Two ranks of NCCL on one device, and their all-reduces; labels : what NCCL was asked for."""

    def __init__(self, device: torch.device, message_bytes: int) -> None:
        sent_bytes = message_bytes * bus_factor("all_reduce", RANKS)  # by each rank
        on_gpu = device.type == "cuda"
        super().__init__(device, WHO if on_gpu else (), sent_bytes / RANKS)
        self._nccl, wait = Nccl(), clock.synchronizer(device)
        wait()  # makes torch's context, which NCCL then finds
        first = torch.arange(1.0, RANKS + 1, device=device)
        self.messages = [*first[:, None].repeat(1, message_bytes // 4)]
        self._communicators = (c_void_p * RANKS)()
        devices = (c_int * RANKS)(*[device.index or 0] * RANKS)
        self._nccl.call("ncclCommInitAll", self._communicators, RANKS, devices)
        self.put(WHO)
        wait()
        if not all(bool((message == 1 + RANKS).all()) for message in self.messages):
            raise UserError("two ranks of NCCL on one GPU: their sums are wrong")
        blocks, threads = (int(os.environ[name]) for name in ("NCCL_MAX_CTAS", "NCCL_NTHREADS"))
        self.labels = {"ranks": RANKS, "blocks": blocks, "threads": threads}
        if on_gpu:
            self.taken = taken(json.loads(clock.chrome_trace(partial(self.put, WHO), device)))
            self.time()

    def columns(self, way: str) -> dict[str, Any]:
        """Return what communicates, as columns of table ``contention``."""
        return {"communication": "nccl_one_gpu", **self.taken}

    def put(self, ways: Sequence[str]) -> None:
        """Put an all-reduce on its way, in both ranks' streams; sums of sums grow, and are as fast."""
        handles = [stream.cuda_stream for stream in self.streams.values()] or [0] * RANKS
        self._nccl.call("ncclGroupStart")
        for message, *who in zip(self.messages, self._communicators, handles, strict=True):
            place, elements = c_void_p(message.data_ptr()), c_size_t(message.numel())
            how = _FLOAT32, _SUM, *map(c_void_p, who)
            self._nccl.call("ncclAllReduce", place, place, elements, *how)
        self._nccl.call("ncclGroupEnd")


def taken(trace: Mapping[str, Any]) -> dict[str, int]:
    """Return what NCCL's kernels took of a GPU, as columns of ``contention``, from a Chrome trace."""
    seen = [event for event in kineto.spans(trace) if event.category == "kernel"]
    how = next((event.args for event in seen if event.collective), {})
    return {
        "taken_blocks": math.prod(how.get("grid", [0])),
        "taken_threads": math.prod(how.get("block", [0])),
        "registers": int(how.get("registers per thread", 0)),
        "shared_bytes": int(how.get("shared memory", 0)),
    }


@dataclass(frozen=True)
class OneGpuSettings:
    """What CONFIG.json of the job may hold; names : of kernels, each of which has the budget."""

    tiny: bool
    budget: Budget
    names: Sequence[str]
    message_bytes: int


def measure_on_one_gpu(
    pairs: Sequence[tuple[int, int]], settings: OneGpuSettings, on_gpu: bool = True
) -> Tables:
    """Measure ``contention`` beside all-reduces of two ranks on one GPU, asked for (blocks, threads)."""
    if reason := unavailable():
        raise Unavailable(reason)

    def under(blocks: int, threads: int) -> pd.DataFrame:
        asked = {"NCCL_MIN_CTAS": blocks, "NCCL_MAX_CTAS": blocks, "NCCL_NTHREADS": threads}
        variables = VARIABLES | {name: str(count) for name, count in asked.items()}
        how: Any = {"place": Loopback(name="one-gpu", variables=variables), "timeout_s": LIMIT_S}
        how |= {"join": {"backend": "gloo", "on_gpu": on_gpu}}
        rows: pd.DataFrame = launch.launch(one_gpu_job, settings, ranks=1, **how)["contention"]
        return rows

    return {"contention": all_or_partial("contention", (under(*pair) for pair in pairs))}


@job(OneGpuSettings, "contention")
def one_gpu_job(me: Rank, settings: OneGpuSettings) -> Iterator[Tables]:
    """Yield one kernel after the other, without those that took turns; raise UserError where all did."""
    refused: list[UserError] = []
    how = settings.tiny, me.device
    with compute_on("two ranks of NCCL", me.device), torch.no_grad():
        ranks = TwoRanks(me.device, settings.message_bytes)
        for name in settings.names:
            try:
                rows = pd.concat(in_turn(name, *how, ranks, [BOTH], settings.budget))
            except UserError as error:
                refused.append(error)
                me.say(f"{name}: {error}")
            else:
                yield {"contention": rows}
    if len(refused) == len(settings.names):
        raise refused[-1]


def case(brief: bool) -> tuple[Sequence[tuple[int, int]], OneGpuSettings]:
    """Return arguments of `measure_on_one_gpu`: kernels at the paper's sizes, as beside the stand-in."""
    budget = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.1 if brief else 1.0)
    if brief:
        return SETTINGS[:1], OneGpuSettings(brief, budget, contention.FEW, 4 * MIB)
    return SETTINGS, OneGpuSettings(brief, budget, tuple(contention.kernels(brief)), 256 * MIB)
