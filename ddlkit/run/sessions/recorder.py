"""The process that measures for ``ddlkit record``: ``python -m ddlkit.run.sessions.recorder CONFIG``.

It measures point after point and tells its parent, line by line, what became of each. When a fault
leaves the GPU unusable it ends, and its parent starts another one for the rest.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB, format_bytes
from ddlkit.run.jobs.protocol import MISTAKE, die_with_parent, trap
from ddlkit.run.sessions.outcomes import (
    FAILED,
    IN_USE,
    MEASURED,
    NO_TIME,
    OUT_OF_MEMORY,
    PARTIAL,
    STARTED,
    UNAVAILABLE,
    ran_out_of_memory,
)
from ddlkit.run.sessions.session import Partial, Plan, Point, Tables, Unavailable

SPENT = 75  # exit status: the GPU cannot be used any more by this process
PRIOR_S = 30.0
COMPANY_BYTES = 2 * GIB  # others that take more GPU memory than this are at work, not just there

Emit = Callable[[dict[str, Any]], None]


@dataclass
class Pace:
    """How much longer points have taken than estimated, by what they belong to.

    Estimates count as if they had held for PRIOR_S seconds: one point proves little.
    """

    estimated_s: dict[str, float] = field(default_factory=dict)
    taken_s: dict[str, float] = field(default_factory=dict)

    def note(self, point: Point, seconds: float) -> None:
        """A point took that long."""
        for name in (point.what, ""):
            self.estimated_s[name] = self.estimated_s.get(name, 0.0) + point.estimate_s
            self.taken_s[name] = self.taken_s.get(name, 0.0) + seconds

    def expected_s(self, point: Point) -> float:
        """How long it will take if it differs from its estimate as those of its kind did so far."""
        known = point.what if self.estimated_s.get(point.what) else ""
        taken_s = self.taken_s.get(known, 0.0) + PRIOR_S
        return point.estimate_s * taken_s / (self.estimated_s.get(known, 0.0) + PRIOR_S)


def work(
    plan: Plan,
    out: Path,
    emit: Emit,
    *,
    deadline_s: float = float("inf"),
    skip: Sequence[str] = (),
    last: Sequence[str] = (),
) -> bool:
    """Measure what is not there yet; returns whether this process can still use the GPU.

    deadline_s : by `time.time`; a point that will probably not end before it is left out, and so are
        all but the shorter ones after it
    skip, last : keys of points that are not tried (again), and that are tried after all others
    """
    body = sorted(plan.body, key=lambda point: key_of(point) in last)
    known = {key_of(p): found for p in body if key_of(p) not in skip if (found := _there(p, out))}
    missing = [point for point in body if key_of(point) not in {*skip, *known}]
    # What can only be refused, such as a second GPU's points where there is one, makes no session.
    session = bool(skip) or any(point.estimate_s > 0 for point in missing)
    opening, closing = (plan.opening, plan.closing) if session else ((), ())
    emit({"plan": [_described(point) for point in (*opening, *body, *closing)]})
    for key, found in known.items():
        emit({"point": key, **found})
    rest_s = deadline_s - sum(point.estimate_s for point in closing)
    described, pace = machine.describe(), Pace()
    for point in (*opening, *missing, *closing):
        if key_of(point) in skip or point.done(out):
            continue
        left_s = (deadline_s if point in closing else rest_s) - time.time()
        expected_s = pace.expected_s(point)
        if expected_s > left_s:
            reason = f"would take about {expected_s:.0f} s, {max(0.0, left_s):.0f} s were left"
            emit({"point": key_of(point), "outcome": NO_TIME, "reason": reason, "seconds": 0.0})
            continue
        emit({"point": key_of(point), "outcome": STARTED, "expected_s": expected_s})
        start_s = time.monotonic()
        outcome, reason = attempt(point, out, described)
        seconds = time.monotonic() - start_s
        if outcome in (MEASURED, PARTIAL):
            pace.note(point, seconds)
        emit({"point": key_of(point), "outcome": outcome, "reason": reason, "seconds": seconds})
        if not _gpu_is_usable():
            return False
    return True


def key_of(point: Point) -> str:
    """A point's name among all points of a recording."""
    return f"{point.what}/{point.name}"


def _described(point: Point) -> dict[str, Any]:
    return {"what": point.what, "point": point.name, "estimate_s": point.estimate_s}


def _there(point: Point, out: Path) -> dict[str, Any]:
    """What to tell of a point that is there, or whose table is damaged and must be looked at first."""
    try:
        return {"outcome": MEASURED, "before": True} if point.done(out) else {}
    except UserError as error:
        return {"outcome": FAILED, "reason": one_line(error), "seconds": 0.0}


def attempt(point: Point, out: Path, described: dict[str, Any] | None = None) -> tuple[str, str]:
    """Measure and save one point: its outcome, and why if it is not simply measured.

    Times that were taken while others came to the GPU are not kept.
    """
    company = _foreign_bytes()
    outcome, reason, tables = _measured(point, out)
    _release()
    grown = _foreign_bytes() - company if company else 0
    if grown > COMPANY_BYTES:
        return IN_USE, f"others took {format_bytes(grown)} of GPU memory meanwhile"
    try:
        point.save(out, tables, described)
    except UserError as error:
        return FAILED, one_line(error)
    return outcome, reason


def _measured(point: Point, out: Path) -> tuple[str, str, Tables]:
    """Outcome, reason, and what there is of the point's tables."""
    try:
        return MEASURED, "", point.measure(out)
    except Partial as error:
        return PARTIAL, one_line(error), error.tables
    except Exception as error:
        outcome, reason = verdict(error)
        if outcome == FAILED and not isinstance(error, UserError):
            traceback.print_exc()
        return outcome, reason, {}


def verdict(error: Exception) -> tuple[str, str]:
    """What an exception means for the point that raised it: outcome and reason."""
    if isinstance(error, Unavailable):
        return UNAVAILABLE, one_line(error)
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY, one_line(error)
    if isinstance(error, UserError):
        return FAILED, one_line(error)
    return FAILED, f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException, most: int = 300) -> str:
    """What an exception says, fit for a cell of a table."""
    text = " ".join(str(error).split())
    return "".join(letter for letter in text if letter.isprintable())[:most]


def _cuda() -> Any:
    """torch.cuda once this process uses a GPU, else None: no point here may have needed torch at all."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _release() -> None:
    """Give back the GPU memory that nothing refers to."""
    gc.collect()
    if (cuda := _cuda()) and _gpu_is_usable():
        cuda.empty_cache()


def _gpu_is_usable() -> bool:
    """False after a fault such as an illegal address: CUDA then refuses all further work."""
    if not (cuda := _cuda()):
        return True
    try:
        cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _foreign_bytes() -> int:
    """GPU memory that is neither free nor torch's own here; 0 while this process uses no GPU."""
    if not (cuda := _cuda()) or not _gpu_is_usable():
        return 0
    free, total = cuda.mem_get_info()
    return int(total - free - cuda.memory_reserved())


# -- as a process ------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, SPENT, or MISTAKE with the reason told to the parent."""
    die_with_parent()
    trap(signal.SIGTERM)
    config = json.loads(argv[0])
    with os.fdopen(config["events"], "w") as stream:

        def emit(event: dict[str, Any]) -> None:
            stream.write(json.dumps(event) + "\n")
            stream.flush()

        try:
            module, function = config["points"].split(":")
            make = getattr(importlib.import_module(module), function)
            plan = make(config["suite"], config["profile"], config["session"])
            usable = work(
                plan,
                Path(config["out"]),
                emit,
                deadline_s=config["deadline_s"],
                skip=config["skip"],
                last=config["last"],
            )
        except UserError as error:
            emit({"failure": one_line(error)})
            return MISTAKE
    return 0 if usable else SPENT


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: after a fault, CUDA's own clean-up may hang.
    os._exit(status)
