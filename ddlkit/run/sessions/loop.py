"""The one loop that measures: what is there is left out, the rest saved point by point. No torch here."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB, format_bytes
from ddlkit.run.sessions.session import (
    FAILED,
    IN_USE,
    MEASURED,
    NO_TIME,
    OUT_OF_MEMORY,
    PARTIAL,
    STARTED,
    THERE,
    UNAVAILABLE,
    Partial,
    Point,
    PointList,
    Tables,
    Unavailable,
    ran_out_of_memory,
)

PRIOR_S = 30.0
COMPANY_BYTES = 2 * GIB  # others that take more GPU memory than this are at work, not just there

Emit = Callable[[dict[str, Any]], None]


@dataclass
class Pace:
    """How much longer points have taken than estimated, by what they belong to.

    Estimates count as if they had held for PRIOR_S seconds: one point proves little.
    """

    estimated_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    taken_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, point: Point, seconds: float) -> None:
        """A point took that long."""
        for what in (point.tables.what, ""):
            self.estimated_s[what] += point.estimate_s
            self.taken_s[what] += seconds

    def expected_s(self, point: Point) -> float:
        """How long it will take if it differs from its estimate as those of its kind did so far."""
        known = point.tables.what if self.estimated_s[point.tables.what] else ""
        return (
            point.estimate_s * (self.taken_s[known] + PRIOR_S) / (self.estimated_s[known] + PRIOR_S)
        )


def measure_points(
    points: PointList,
    out: Path,
    emit: Emit,
    *,
    deadline_s: float = float("inf"),
    skip: Sequence[str] = (),
    last: Sequence[str] = (),
) -> bool:
    """Measure what is not there yet; returns whether this process can still use the GPU.

    emit : called with the list of all points and what of them is there, then with what becomes of each
    deadline_s : by `time.time`; a point that will probably not end before it is left out, and so are
        all but the shorter ones after it
    skip, last : keys of points that are not tried (again), and that are tried after all others
    """
    body = sorted(points.body, key=lambda point: point.key in last)
    before = {point.key: found for point in body if (found := look(point, out))}
    missing = [point for point in body if point.key not in {*skip, *before}]
    # What can only be refused, such as a second GPU's points where there is one, makes no session.
    session = bool(skip) or any(point.estimate_s > 0 for point in missing)
    opening, closing = (points.opening, points.closing) if session else ((), ())
    described = [_described(point) for point in (*opening, *body, *closing)]
    emit(
        {"points": described, "before": {k: found for k, found in before.items() if k not in skip}}
    )
    damaged = {key for key, found in before.items() if found["outcome"] == FAILED}
    rest_s = deadline_s - sum(point.estimate_s for point in closing)
    here, pace = machine.describe(), Pace()
    for point in (*opening, *body, *closing):
        if point.key in {*skip, *damaged}:
            continue
        if point.done(out):  # which may depend on what has just been measured
            if point.key not in before:
                emit({"point": point.key, "outcome": MEASURED, "reason": "", "seconds": 0.0})
            continue
        until_s = deadline_s if point in closing else rest_s
        _take(point, out, emit, pace, until_s, here)
        if not _gpu_is_usable():
            return False
    return True


def _take(
    point: Point, out: Path, emit: Emit, pace: Pace, until_s: float, here: dict[str, Any]
) -> None:
    """Measure one point, if it will probably end in time."""
    left_s = until_s - time.time()
    expected_s = pace.expected_s(point)
    if expected_s > left_s:
        reason = f"would take about {expected_s:.0f} s, {max(0.0, left_s):.0f} s were left"
        emit({"point": point.key, "outcome": NO_TIME, "reason": reason, "seconds": 0.0})
        return
    emit({"point": point.key, "outcome": STARTED, "expected_s": expected_s})
    start_s = time.monotonic()
    outcome, reason = attempt(point, out, here)
    seconds = time.monotonic() - start_s
    if outcome in THERE:
        pace.note(point, seconds)
    emit({"point": point.key, "outcome": outcome, "reason": reason, "seconds": seconds})


def _described(point: Point) -> dict[str, Any]:
    return {"what": point.tables.what, "point": point.name, "estimate_s": point.estimate_s}


def look(point: Point, out: Path) -> dict[str, Any]:
    """What to say of a point that is there, or whose table is damaged and must be looked at first."""
    try:
        return {"outcome": MEASURED} if point.done(out) else {}
    except UserError as error:
        return {"outcome": FAILED, "reason": one_line(error)}


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
