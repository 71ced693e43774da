"""Kernels beside NCCL itself where there is one GPU: two ranks in one process, both on it.

The same kernels beside the same blocks and threads as of the stand-in, in the same table ``contention``.
Each rank runs a kernel of its own, so twice the blocks are taken. Nothing crosses a link.

NCCL allows it from 2.30.3 on, as an experiment (NCCL_MULTI_RANK_GPU_ENABLE); where both kernels do not find
room at the same time, it hangs. So every setting has a process of its own, which is ended when its time is
up. The library is the one that DDLKIT_NCCL names, or else torch's, which may be too old.
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

import numpy as np
import pandas as pd
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.timeline import merge
from ddlkit.core.units import MIB
from ddlkit.formats import kineto
from ddlkit.run import clock
from ddlkit.run.clock import Budget, Marks
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank, Tables, job
from ddlkit.run.measure import contention
from ddlkit.run.measure.contention import Scale, kernel_rows, taking_turns
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.standin import Compute, in_wheels
from ddlkit.run.sessions import Unavailable, all_or_partial

RANKS = 2
OLDEST = 23003  # 2.30.3
LIBRARY = "DDLKIT_NCCL"
LIMIT_S = 60.0  # for each setting: more is a hang
SETTINGS = ((1, 64), (2, 256), (4, 512), (8, 512))
VARIABLES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_ALGO": "Ring",  # threads count for its ring and Simple protocol only
    "NCCL_PROTO": "Simple",
}
AS_LONG = 4.0  # how long messages beside a kernel last, over its time alone
LEAST_OVERLAP = 0.1  # of a kernel: less is the end of one beside the begin of the other

_FLOAT32, _SUM = 7, 0  # ncclDataType_t, ncclRedOp_t


class Nccl:
    """One libnccl, bound to itself even where torch has loaded another. Raises Unavailable without it."""

    def __init__(self, path: str) -> None:
        mode = os.RTLD_NOW | os.RTLD_LOCAL | getattr(os, "RTLD_DEEPBIND", 0)
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


def library() -> str:
    """Return the library that DDLKIT_NCCL names, or else the one in torch's wheels, or its plain name."""
    brought = map(str, in_wheels("nccl/lib/libnccl.so.2"))
    return os.environ.get(LIBRARY) or next(brought, "libnccl.so.2")


def unavailable() -> str:
    """Return why NCCL cannot have two ranks on one GPU here; "" if it may."""
    number = c_int()
    try:
        Nccl(library()).call("ncclGetVersion", byref(number))
    except UserError as error:
        return str(error)
    if (version := number.value) >= OLDEST:
        return ""
    named = ".".join(map(str, (version // 10000, version // 100 % 100, version % 100)))
    return (
        f"NCCL {named} has no two ranks on one GPU, 2.30.3 does: name its libnccl.so.2 by {LIBRARY}"
    )


class TwoRanks:
    """Two ranks of NCCL on one device. Raises UserError where it fails, and where its sums are wrong."""

    def __init__(self, nccl: Nccl, device: torch.device, message_bytes: int) -> None:
        self._nccl, self._device = nccl, device
        self.wait = clock.synchronizer(device)
        self.wait()  # makes torch's context, which NCCL then finds
        count = RANKS if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        first = torch.arange(1.0, RANKS + 1, device=device)
        self.messages = [*first[:, None].repeat(1, message_bytes // 4)]
        self._communicators = (c_void_p * RANKS)()
        devices = (c_int * RANKS)(*[device.index or 0] * RANKS)
        nccl.call("ncclCommInitAll", self._communicators, RANKS, devices)
        self.post()()
        self.wait()
        if not all(bool((message == 1 + RANKS).all()) for message in self.messages):
            raise UserError("two ranks of NCCL on one GPU: their sums are wrong")

    def post(self) -> Compute:
        """Put an all-reduce on its way, in both ranks' streams; return what makes the current one wait."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        handles = [stream.cuda_stream for stream in self._streams] or [0] * RANKS
        self._nccl.call("ncclGroupStart")
        for message, *who in zip(self.messages, self._communicators, handles, strict=True):
            place, count = c_void_p(message.data_ptr()), c_size_t(message.numel())
            how = _FLOAT32, _SUM, *map(c_void_p, who)
            self._nccl.call("ncclAllReduce", place, place, count, *how)
        self._nccl.call("ncclGroupEnd")
        return self._join

    def reset(self) -> None:
        """Begin anew: sums of sums grow."""
        for message in self.messages:
            message.fill_(1.0)
        self.wait()

    def _join(self) -> None:
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


@dataclass(frozen=True)
class OneGpuSettings:
    """What CONFIG.json of the job ``one_gpu`` may hold: a budget for each kernel of these names."""

    scale: Scale
    budget: Budget
    names: Sequence[str]
    message_bytes: int


def measure_on_one_gpu(
    pairs: Sequence[tuple[int, int]],
    settings: OneGpuSettings,
    *,
    on_gpu: bool = True,
    limit_s: float = LIMIT_S,
) -> Tables:
    """Measure table ``contention``: kernels alone and beside all-reduces of two ranks on the same GPU.

    pairs : (blocks, threads) that NCCL is asked for; each has a process of its own, ended after ``limit_s``

    Raises Unavailable where NCCL is too old; UserError when the first pair fails, or hangs; Partial with
    what there is when a later one does.
    """
    if reason := unavailable():
        raise Unavailable(reason)

    def under(blocks: int, threads: int) -> pd.DataFrame:
        asked = {"NCCL_MIN_CTAS": blocks, "NCCL_MAX_CTAS": blocks, "NCCL_NTHREADS": threads}
        variables = VARIABLES | {name: str(count) for name, count in asked.items()}
        how: Any = {"place": Loopback(name="one-gpu", variables=variables), "timeout_s": limit_s}
        how |= {"join": {"backend": "gloo", "on_gpu": on_gpu}}
        rows: pd.DataFrame = launch.launch(one_gpu_job, settings, ranks=1, **how)["contention"]
        return rows

    return {"contention": all_or_partial("contention", (under(*pair) for pair in pairs))}


@job(OneGpuSettings, "contention")
def one_gpu_job(me: Rank, settings: OneGpuSettings) -> Iterator[Tables]:
    """Yield one kernel after the other, in the one process that is both ranks.

    Kernels that did not run at the same time as the messages are said and left out. Raises UserError where
    none did.
    """
    measured = 0
    with computing("two ranks of NCCL", me.device), torch.no_grad():
        ranks = TwoRanks(Nccl(library()), me.device, settings.message_bytes)
        for name in settings.names:
            rows = beside(me.device, name, settings, ranks)
            alone_s, beside_s = rows.groupby("communication", sort=False)["seconds"].median()
            share = float(rows["overlap_share"].max())
            if share < LEAST_OVERLAP:
                why = taking_turns(name, "two ranks", beside_s, alone_s, share)
                me.say(str(why))
            else:
                measured += 1
                yield {"contention": rows}
    if not measured:
        raise why


def beside(
    device: torch.device, name: str, settings: OneGpuSettings, ranks: TwoRanks
) -> pd.DataFrame:
    """Measure rows of one kernel, alone and beside all-reduces that outlast it.

    ``overlap_share`` and ``bytes_per_s`` (what each rank sends while messages are under way), and what NCCL
    took, are seen once a kernel, by profiling one more repeat.
    """
    kernel = contention.kernels(settings.scale)[name]
    compute = kernel.on(device)
    compute()
    alone = clock.timed(compute, device)
    measure = partial(clock.measure_interleaved, synchronize=ranks.wait, setup=ranks.reset)
    once = {"kernel": alone, "message": lambda: ranks.post()()}
    few = measure(once, Budget(warmup=1, min_repeats=3, max_repeats=3))
    kernel_s, message_s = (float(np.median(seconds)) for seconds in few.values())
    count = 1 + math.ceil(AS_LONG * kernel_s / message_s)

    def both() -> Marks:
        waits = [ranks.post() for _ in range(count)]
        if device.type == "cuda":
            torch.cuda._sleep(contention.HOLD_CYCLES)
        marks = alone()
        for wait in waits:
            wait()
        return marks

    samples = measure({"none": alone, "both": both}, settings.budget)
    ranks.reset()
    seen = read_trace(json.loads(clock.chrome_trace(both, device)))
    sent_bytes = count * settings.message_bytes * bus_factor("all_reduce", RANKS)
    seen |= {"communication": "nccl_one_gpu", "bytes_per_s": sent_bytes / seen.pop("messages_s")}
    blocks, threads = (int(os.environ[name]) for name in ("NCCL_MAX_CTAS", "NCCL_NTHREADS"))
    asked = {"ranks": RANKS, "blocks": blocks, "threads": threads}
    each = {"none": asked, "both": asked | seen}
    frames = [kernel_rows(name, kernel, device, each[who], samples[who]) for who in each]
    return pd.concat(frames, ignore_index=True)


def read_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of ``contention`` from a Chrome trace of a computation and NCCL's kernels beside it.

    Also messages_s, from the first one's start to the last one's end. Raises UserError without either.
    """
    seen = [event for event in kineto.spans(trace) if event.category == "kernel"]
    messages = [event for event in seen if event.collective]
    computed = [event for event in seen if not event.collective and "spin_kernel" not in event.name]
    if not (messages and computed):
        seen_both = f"{len(messages)} messages and {len(computed)} computations"
        raise UserError(f"the profiler saw {seen_both}: that they ran together is not proven")
    message, compute = (
        np.array([(event.start_s, event.end_s) for event in of]) for of in (messages, computed)
    )
    union = np.concatenate([message, compute])
    sent_s, computed_s, either_s = (np.diff(merge(of)).sum() for of in (message, compute, union))
    how = messages[0].args
    return {
        "overlap_share": max(0.0, float((sent_s + computed_s - either_s) / computed_s)),
        "messages_s": float(message[:, 1].max() - message[:, 0].min()),
        "taken_blocks": math.prod(how.get("grid", [0])),
        "taken_threads": math.prod(how.get("block", [0])),
        "registers": int(how.get("registers per thread", 0)),
        "shared_bytes": int(how.get("shared memory", 0)),
    }


def case(brief: bool) -> tuple[Sequence[tuple[int, int]], OneGpuSettings]:
    """Return arguments of `measure_on_one_gpu`: kernels at the paper's sizes, as beside the stand-in."""
    scale = contention.TINY if brief else contention.PAPER
    names = contention.FEW if brief else tuple(contention.kernels(scale))
    budget = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.1 if brief else 1.0)
    settings = OneGpuSettings(scale, budget, names, (4 if brief else 256) * MIB)
    return SETTINGS[: 1 if brief else None], settings
