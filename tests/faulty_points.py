"""Lists of points that go wrong, each in its own way, for `ddlkit.measure.session.engine`.

Most need no torch, and a process that measures only these loads none.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.measure.session import Partial, Point, PointList, Tables, Unavailable

LONG_S = 1000.0
"""An estimate beyond any budget of a test."""


def drift(moment: str = "now") -> Tables:
    """The smallest table there is a schema for."""
    rows = {
        "moment": moment,
        "work": "none",
        "device": "cpu",
        "sample": 0,
        "seconds": [1e-3],
    }
    return {"drift": pd.DataFrame(rows)}


def point(name: str, measure: Callable[[], Tables], estimate_s: float = 0.1) -> Point:
    return Point("test", name, measure, estimate_s, ["drift"])


def fine(name: str, estimate_s: float = 0.1) -> Point:
    return point(name, lambda: drift(name), estimate_s)


def raising(error: Exception) -> Callable[[], Tables]:
    def measure() -> Tables:
        raise error

    return measure


def _killed() -> Tables:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _slow() -> Tables:
    time.sleep(60)
    return drift("slow")


def _seen() -> Tables:
    """What cannot be measured where CUDA may see a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise UserError("GPUs can be seen")
    return drift("blind")


def _steady(name: str) -> Tables:
    time.sleep(0.1)
    return drift(name)


FAULTS: dict[str, Callable[[], Any]] = {
    "torch-memory": lambda: importlib.import_module("torch").empty(10**15),
    "numpy-memory": lambda: np.empty(10**15),
    "bug": raising(KeyError("drift")),
    "lacking": raising(Unavailable("needs 2 GPUs, here are 0")),
    "half": raising(Partial(drift("half"), "out of memory: the other half")),
    "wrong-rows": lambda: {"drift": drift()["drift"].assign(seconds=-1.0)},
    "nothing": dict,
}


def faults(out: Path, session: int) -> PointList:
    body = []
    for name, measure in FAULTS.items():
        body += [point(name, measure), fine(f"after-{name}")]
    return PointList(body, [fine(f"s{session}-start")], [fine(f"s{session}-end")])


def deadly(out: Path, session: int) -> PointList:
    body = [
        fine("first", LONG_S),
        point("killed", _killed, LONG_S),
        point("blind", _seen, LONG_S),
    ]
    return PointList(
        [*body, point("hung", _slow)], closing=[fine(f"s{session}-end", LONG_S)]
    )


def long(out: Path, session: int) -> PointList:
    return PointList([fine("first"), point("slow", _slow, LONG_S), fine("last")])


def pair(out: Path, session: int) -> PointList:
    return PointList([fine("a"), fine("b")])


def steady(out: Path, session: int) -> PointList:
    return PointList([point(f"p{n}", partial(_steady, f"p{n}")) for n in range(20)])
