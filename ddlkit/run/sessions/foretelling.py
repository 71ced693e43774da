"""What every model says of a lab's cases, before they are replayed: rows of a table ``predicted``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import SelectionTimes
from ddlkit.model import Calibration, forecast_case, predictor
from ddlkit.model.calibration import POOLED, pooled
from ddlkit.model.rings import LAW, TABLE, by_law, transferred
from ddlkit.run.lab.network import LabShape
from ddlkit.run.lab.script import PlannedCase
from ddlkit.run.sessions.session import say


def foretell(
    planned: Iterable[PlannedCase],
    collectives: pd.DataFrame,
    cost: str,
    carried: Calibration,
    selection_times: Callable[[float], SelectionTimes],
    together: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """What models say of each case of a lab: rows of a table ``predicted``.

    collectives : the lab's calibration; cost : of `rings.COSTS`: ours, over emulated links
    carried : `carried_from`, for `predictor.CARRIED`, which says nothing of what cannot be carried
    together : rows of all labs of the campaign, which together tell how sessions drift (`pooled`);
        None: each lab's own rows do

    Where ours is by the law, `predictor.MEASURED` is ours by the table.
    """
    table = Calibration.of(collectives, also=predictor.TRIAL_COSTS)
    if together is not None:
        table = pooled(table, together)
    ours = by_law(table, collectives, machine.cores()) if cost == LAW else table
    frames = []
    for one in planned:
        case = one.case
        known = {case.profile_sha256: one.workload}
        selections = {case.selection_sha256: selection_times(case.density)}
        lab = case.link, case.workers, case.collective
        by = {predictor.OURS: ours, predictor.MEASURED: table, predictor.CARRIED: carried}
        if ours.known[lab] is table.known[lab]:
            del by[predictor.MEASURED]
        told = {
            name: forecast_case(case, known, calibration, selections)
            for name, calibration in by.items()
            if lab in calibration.known
        }
        said = predictor.predicted_times(told[predictor.OURS], ours.of_case(case).others)
        said |= {name: predictor.times(one.prediction) for name, one in told.items()}
        rows = said_rows(said, {name: one.interval_s for name, one in told.items()})
        costs = {
            predictor.OURS: LAW if predictor.MEASURED in by else TABLE,
            predictor.MEASURED: TABLE,
        }
        rows["cost"] = rows["model"].map(costs).fillna("")
        told_by = "own" if together is None else POOLED
        rows["drift"] = rows["model"].map(dict.fromkeys(costs, told_by)).fillna("")
        frames.append(rows.assign(case=case.key))
    return pd.concat(frames, ignore_index=True)


def said_rows(
    said: Mapping[str, tuple[float, float]],
    intervals: Mapping[str, tuple[float, float] | None],
) -> pd.DataFrame:
    """Rows of a table ``predicted``, without the case: what models say, where they say anything."""
    rows = [
        (model, quantity, seconds)
        for model, times in said.items()
        for quantity, seconds in zip(("iteration", "exposed"), times, strict=True)
        if np.isfinite(seconds)
    ]
    for model, ends in intervals.items():
        rows += [(model, end, at) for end, at in zip(("lower", "upper"), ends or (), strict=False)]
    return pd.DataFrame(rows, columns=["model", "quantity", "seconds"])


def carried_from(directory: Path, shape: LabShape) -> Calibration:
    """A lab's all-reduces by other recorded labs of this machine; nothing where there is none.

    directory : of the campaign's own tables, which are left out
    """
    paths = store.list_tables(store.recorded_dir(), "*/collectives-*.csv")
    others = [store.load_table(path) for path in paths if path.parent.resolve() != directory]
    if not others:
        return Calibration({})
    rows = pd.concat(others)
    rows = rows[(rows["link"] != shape.link) | (rows["ranks"] != shape.workers)]
    try:
        return transferred(rows, [(shape.link, shape.workers)], cores=machine.cores())
    except UserError as error:
        say(f"{shape.name}: not told from other labs: {error}")
        return Calibration({})
