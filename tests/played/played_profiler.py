"""torch.profiler played: the processor's own trace, in which operators have launched kernels.

Each operator that calls no other one becomes a kernel at the same time on stream 7, and gloo's messages, and
those of the played NCCL in their streams, become NCCL's kernels; each has a launch of the same correlation.
What real kernels would be called is not played, nor that they run later than their launch.
"""

from __future__ import annotations

import ctypes
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_KINDS = {"all_reduce": "AllReduce_Sum_f32", "reduce_scatter": "ReduceScatter_Sum_f32"}
_SHAPE = {"grid": [1, 1, 1], "block": [64, 1, 1], "registers per thread": 32, "shared memory": 0}
_NCCL = {"grid": [2, 1, 1], "block": [160, 1, 1], "registers per thread": 96}

_NCCL_SPAN = "played nccl:"

Span = dict[str, Any]
Ends = tuple[ctypes.c_double, ctypes.c_double]  # by the host's monotonic clock

_messages: list[tuple[float, list[Ends]]] = []  # with the time when each group was noted


def install() -> None:
    """Play the profiler wherever CUDA is among its activities."""
    profile: Any = torch.profiler.profile
    start, export = profile.__init__, profile.export_chrome_trace

    @functools.wraps(start)
    def on_host(self: Any, *, activities: Any = (), **how: Any) -> None:
        self.played = ProfilerActivity.CUDA in activities
        start(
            self, activities=[one for one in activities if one is not ProfilerActivity.CUDA], **how
        )

    @functools.wraps(export)
    def with_kernels(self: Any, path: str) -> None:
        export(self, path)
        if self.played:
            trace = json.loads(Path(path).read_text())
            trace["traceEvents"] = as_on_gpu(trace["traceEvents"])
            Path(path).write_text(json.dumps(trace))

    profile.__init__, profile.export_chrome_trace = on_host, with_kernels


def note_messages(ends: list[Ends]) -> None:
    """Messages that are under way from now on: a trace shows each when it began and ended in its stream."""
    now_s = time.perf_counter()
    with torch.profiler.record_function(f"{_NCCL_SPAN}{len(_messages)}"):
        _messages.append((now_s, ends))


def _in_streams(span: Span) -> list[Span]:
    """The spans of the messages that were noted by that one."""
    noted_s, ends = _messages[int(str(span["name"]).rpartition(":")[2])]
    return [
        {
            **span,
            "ts": span["ts"] + 1e6 * (begin.value - noted_s),
            "dur": 1e6 * (end.value - begin.value),
        }
        for begin, end in ends
    ]


def as_on_gpu(events: list[Span]) -> list[Span]:
    """The events of a processor's trace with launches and kernels; messages become NCCL's kernels."""
    found: list[Span] = []
    spans = [event for event in events if event.get("ph") == "X"]
    home = next((s for s in spans if s.get("cat") == "cpu_op"), {})
    inner = {id(span) for span in _leaves([s for s in spans if s.get("cat") == "cpu_op"])}
    for event in events:
        name = str(event.get("name"))
        noted = event.get("ph") == "X" and name.startswith(_NCCL_SPAN)
        message = noted or (event.get("ph") == "X" and name.startswith("gloo:"))
        found += [] if message else [event]
        kind = "all_reduce" if noted else name.rpartition(":")[2]
        called = f"ncclDevKernel_{_KINDS.get(kind, kind)}_RING_LL" if message else f"played_{name}"
        shape = _SHAPE | (_NCCL if message else {})
        for span in _in_streams(event) if noted else [event] * (message or id(event) in inner):
            number = len(found)
            launch = {**(home if message else event), "ts": event["ts"], "dur": 0}
            found.append(_kernel(launch, "cudaLaunchKernel", "cuda_runtime", number, {}))
            kernel = {**span, "pid": 0, "tid": 20 if message else 7}
            found.append(_kernel(kernel, called, "kernel", number, shape))
    return found


def _kernel(span: Span, name: str, category: str, number: int, shape: Span) -> Span:
    return {**span, "name": name, "cat": category, "args": {**shape, "correlation": 10**6 + number}}


def _leaves(spans: list[Span]) -> list[Span]:
    """Those that no other of their thread lies in."""
    found: dict[Any, Span] = {}
    leaves = []
    for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        before = found.get(span["tid"])
        if before is not None and before["ts"] + before["dur"] <= span["ts"]:
            leaves.append(before)
        found[span["tid"]] = span
    return leaves + list(found.values())
