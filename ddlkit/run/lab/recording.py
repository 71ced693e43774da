"""What comes back of a replay: the ranks' recordings, as a timeline and as rows in two files.

Rank 0 appends each iteration as soon as it is complete, so that a kill loses only the one under way.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.errors import UserError
from ddlkit.core.link import turn_s
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.run.instruments.vitals import Usage
from ddlkit.run.lab.script import Script

Floats = NDArray[np.float64]

ITERATIONS, TIMELINE = "replay.csv", "timeline.csv"
KEY = ["case", "repeat"]


@dataclass(frozen=True)
class Recording:
    """One iteration of one rank, in seconds from the common start.

    awake_s, selected_s, agreed_s, posted_s, done_s : (G,) when the rank woke with the gradients of group
        k, when it had selected, when its messages might be posted, when it went on computing, and when
        its messages were seen to be complete
    forward_end_s : when the rank woke at the end of forward
    wait_s, waited_s, end_s : start and end of the wait for the last collective; end of the update
    """

    awake_s: Floats
    selected_s: Floats
    agreed_s: Floats
    posted_s: Floats
    done_s: Floats
    forward_end_s: float
    wait_s: float
    waited_s: float
    end_s: float

    @classmethod
    def from_array(cls, values: Floats) -> Recording:
        """The recording whose fields follow one another in an array (5 G + 4,): so ranks exchange them."""
        return cls(*values[:-4].reshape(5, -1), *values[-4:].tolist())


class Replayed(NamedTuple):
    """Frames of a replay. All times are as they passed: those of the dilated workload.

    runs : rows of the ``runs`` schema, origin "replayed", one per iteration
    timeline : rows of the ``timeline`` schema, of every rank, for the first rounds
    """

    runs: pd.DataFrame
    timeline: pd.DataFrame


# -- one iteration -----------------------------------------------------------------------------


def make_timeline(script: Script, everyone: Sequence[Recording]) -> Timeline:
    """Spans of all ranks, in seconds from the common start; ``bytes`` is what a rank contributes.

    A collective begins when it may be posted or when those before it leave room for it, whichever is
    later: if one is in flight at a time, when its predecessor ends. "wait" is from the last post until
    the last collective has ended. Of a group of several gradients, the backward pass is two spans: until
    the first is ready, and until the last.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, recording in enumerate(everyone)
        for span in _spans(script.played_by(rank), recording)
    )


def _spans(script: Script, seen: Recording) -> Iterable[dict[str, Any]]:
    def span(kind: str, group: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        task = kind if group < 0 else f"{kind} {group}"
        times = {"start_s": start_s, "end_s": max(start_s, end_s)}
        return {"task": task, "kind": kind, "stream": "compute", "group": group, **times, **more}

    yield span("forward", -1, 0.0, seen.forward_end_s)
    begin_s = seen.forward_end_s
    free_s = turn_s(seen.done_s, script.case.in_flight)
    for group, n_bytes in enumerate(script.bytes):
        awake_s, selected_s, agreed_s, done_s = (
            float(times[group])
            for times in (seen.awake_s, seen.selected_s, seen.agreed_s, seen.done_s)
        )
        first_s = max(begin_s, awake_s - script.buffered_s[group])
        if first_s < awake_s:
            yield span("backward", group, begin_s, first_s, task=f"backward {group}, first")
            begin_s = first_s
        yield span("backward", group, begin_s, awake_s, bytes=n_bytes)
        if script.kept:
            yield span("sparsify", group, awake_s, selected_s, bytes=n_bytes)
        if script.case.negotiated:
            yield span("negotiate", group, selected_s, agreed_s, stream="negotiation")
        sent = {"stream": "communication", "bytes": script.sent_bytes[group]}
        start_s = max(agreed_s, float(free_s[group]))
        yield span(script.case.collective, group, start_s, done_s, **sent)
        begin_s = float(seen.posted_s[group])
    yield span("wait", -1, seen.wait_s, seen.waited_s)
    yield span("update", -1, seen.waited_s, seen.end_s)


def _row(script: Script, everyone: Sequence[Recording], used: Usage) -> dict[str, Any]:
    """What the runs table says of one iteration: that of the slowest rank."""
    iteration_s = max(seen.end_s for seen in everyone)
    compute_s = max(_compute_s(script.played_by(rank), seen) for rank, seen in enumerate(everyone))
    return {
        "iteration": 0,
        "iteration_s": iteration_s,
        "compute_s": compute_s,
        "exposed_communication_s": iteration_s - compute_s,
        "processor_load": used.busy,
        "processor_limited": used.limited,
        "stolen": used.stolen,
    }


def _compute_s(script: Script, seen: Recording) -> float:
    """The rank's iteration without communication; selections count as planned, or as they passed."""
    real_s = 0.0 if script.selection_s else float((seen.selected_s - seen.awake_s).sum())
    return script.compute_s + real_s


# -- the files ---------------------------------------------------------------------------------


def append_iteration(
    out: Path,
    script: Script,
    repeat: int,
    everyone: Sequence[Recording],
    used: Usage,
    *,
    with_timeline: bool,
) -> None:
    """Add one iteration to the files in ``out``: its spans first, then the row that says it is complete."""
    key = pd.DataFrame({"case": [script.case.key], "repeat": [repeat]})
    if with_timeline:
        spans = make_timeline(script, everyone).to_frame()
        _append(out / TIMELINE, key.merge(spans, how="cross"))
    _append(out / ITERATIONS, key.assign(**_row(script, everyone, used)))


def keep_complete(out: Path) -> list[tuple[str, int]]:
    """(case's key, repeat) of the complete iterations in ``out``; the rest of the files is removed."""
    rows, spans = _read_complete(out)
    for name, frame in ((ITERATIONS, rows), (TIMELINE, spans)):
        if frame.empty:
            (out / name).unlink(missing_ok=True)
        else:
            frame.to_csv(out / name, index=False)
    return list(zip(rows["case"].tolist(), rows["repeat"].tolist(), strict=True))


def read_replayed(out: Path, cases: Iterable[Case]) -> Replayed:
    """The iterations of ``cases`` that a replay into ``out`` has completed, whether it still runs or not.

    Raises UserError where there is none.
    """
    rows, spans = _read_complete(out)
    described = pd.DataFrame(
        [{"case": case.key, **asdict(case)} for case in cases], columns=["case", *CASE_COLUMNS]
    )
    runs = rows.merge(described, on="case").assign(origin="replayed")
    if runs.empty:
        raise UserError(f"replay: no iteration was completed in {out}")
    return Replayed(runs, spans[spans["case"].isin(runs["case"])].reset_index(drop=True))


def _append(path: Path, frame: pd.DataFrame) -> None:
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def _read_complete(out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows and spans of the iterations that have both, of files that may have been cut anywhere."""
    rows, spans = _read(out / ITERATIONS, KEY), _read(out / TIMELINE, [*KEY, *TIMELINE_COLUMNS])
    return rows, spans.merge(rows[KEY], on=KEY)


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    """The complete lines of a CSV file; without any, a frame with these columns and no row."""
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if not complete:
        return pd.DataFrame(columns=columns).astype({"repeat": int})
    return pd.read_csv(io.StringIO(complete), dtype={"case": str})
