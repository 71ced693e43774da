"""torch.profiler played: the processor's own trace, in which operators have launched kernels.

Each operator that calls no other one becomes a kernel at the same time on stream 7, with a launch of the same
correlation. What real kernels would be called is not played, nor that they run later than their launch.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_SHAPE = {"grid": [1, 1, 1], "block": [64, 1, 1], "registers per thread": 32, "shared memory": 0}

Span = dict[str, Any]


def install() -> None:
    """Play the profiler wherever CUDA is among its activities."""
    profile: Any = torch.profiler.profile
    start, export = profile.__init__, profile.export_chrome_trace

    @functools.wraps(start)
    def on_host(self: Any, *, activities: Any = (), **how: Any) -> None:
        self.played = ProfilerActivity.CUDA in activities
        start(self, activities={*activities} - {ProfilerActivity.CUDA}, **how)

    @functools.wraps(export)
    def with_kernels(self: Any, path: str) -> None:
        export(self, path)
        if self.played:
            trace = json.loads(Path(path).read_text())
            trace["traceEvents"] += kernels(trace["traceEvents"])
            Path(path).write_text(json.dumps(trace))

    profile.__init__, profile.export_chrome_trace = on_host, with_kernels


def kernels(events: list[Span]) -> list[Span]:
    """The launches and kernels of a processor's trace."""
    made: list[Span] = []
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for number, event in enumerate(_leaves(operators), 10**6):
        launched: Span = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "dur": 0}
        made.append({**event, **launched, "args": {"correlation": number}})
        kernel: Span = {"name": f"played_{event['name']}", "cat": "kernel", "pid": 0, "tid": 7}
        made.append({**event, **kernel, "args": {**_SHAPE, "correlation": number}})
    return made


def _leaves(spans: list[Span]) -> list[Span]:
    """Those that no other of their thread lies in."""
    last: dict[Any, Span] = {}
    leaves = []
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        before = last.get(span["tid"])
        if before is not None and before["ts"] + before["dur"] <= span["ts"]:
            leaves.append(before)
        last[span["tid"]] = span
    return leaves + list(last.values())
