"""Layer profiles and timelines, whether recorded or a user's own CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.core.cost import from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.fit import AUTO, fit
from ddlkit.core.sparse import SELECTION_FORMS, SelectionCost, SelectionTimes
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile
from ddlkit.store import files
from ddlkit.store.documents import read_json
from ddlkit.store.sheet import SCHEMAS, read_sheet
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

BYTES_PER_PARAMETER = 4  # of a gradient in single precision
MOST_SPANS = 200_000
"""Of one timeline: a recorded one has some thousands, and Perfetto becomes slow."""
PROFILE_KEYS = ("network", "device", "batch", "precision", "ranks", "threads")
SELECTOR = "topk_unsorted"  # of the table selection: what a replay that really selects does
MOST_LISTED = 20  # values of which one is to be chosen
# What a user's own layer profile may leave out, and what is then assumed.
_ASSUMED = {
    "device": "unknown",
    "batch": "1",
    "precision": "fp32",
    "ranks": "1",
    "threads": "0",
    "layer": "its tensor",
    "parameters": "1",
    "flops": "0",
    "update_s": "0",
}


def read_profile(
    path: Path,
    network: str | None = None,
    batch: int | None = None,
    *,
    forward_s: float | None = None,
    assumed: list[str] | None = None,
    **wanted: Any,
) -> LayerProfile:
    """The one profile in a ``layers`` table, or the one chosen.

    A table without a stamp is a user's own: it needs only columns tensor, gradient_bytes, backward_s
    and forward_s. What else it leaves out is assumed (a network named as the file, gradients of four
    bytes per parameter, no update).
    wanted : which profile, by device, precision, ranks, threads
    forward_s : seconds of the whole forward pass, in place of the column of that name
    assumed : a list to which every assumption is added, one phrase each

    Raises UserError for a wrong file, naming row and column, and where several profiles remain.
    """
    if is_stamped(path):
        frame = load_table(path, "layers")
    else:
        frame = _own_profile(path, forward_s is not None, [] if assumed is None else assumed)
    wanted |= {"network": network, "batch": batch}
    frame, chosen = choose(frame, PROFILE_KEYS, wanted, path)
    if forward_s is not None:
        if not 0 < forward_s < math.inf:
            raise UserError(f"forward_s is {forward_s}: must be a time above zero")
        if frame["forward_s"].any():
            raise UserError(
                f"{path}: column forward_s: it has times, so give no forward_s beside it"
            )
        frame = frame.assign(forward_s=[forward_s] + [0.0] * (len(frame) - 1))
    return _profile(frame, chosen, path)


def _own_profile(path: Path, forward_is_given: bool, assumed: list[str]) -> DataFrame:
    """A user's own rows, with every column of schema ``layers``."""
    sheet = read_sheet(files.read_text(path), str(path))
    defaults = {"network": path.name.partition(".")[0] or "unknown", **_ASSUMED}
    if forward_is_given:
        defaults["forward_s"] = "0"
    elif "forward_s" not in sheet.header and "backward_s" in sheet.header:
        problem = "missing: add it, or give the seconds of the whole forward pass"
        sheet.fail(None, "forward_s", problem)
    schema = SCHEMAS["layers"]
    columns = [replace(column, default=defaults.get(column.name)) for column in schema.columns]
    frame = replace(schema, columns=tuple(columns)).frame(sheet, exact=False)
    missing = [name for name in defaults if name not in (*sheet.header, "forward_s")]
    if "layer" in missing:
        frame["layer"] = frame["tensor"]
    if "parameters" in missing:
        frame["parameters"] = -(-frame["gradient_bytes"] // BYTES_PER_PARAMETER)
        defaults["parameters"] = f"gradient_bytes / {BYTES_PER_PARAMETER}"
    assumed.extend(f"{name} = {defaults[name]}" for name in missing)
    return frame


def _profile(frame: DataFrame, chosen: dict[str, Any], path: Path) -> LayerProfile:
    """The profile of rows that agree in what was chosen."""
    for name in ("forward_s", "backward_s"):
        if not frame[name].sum() > 0:
            raise UserError(f"{path}: column {name}: all times are zero: measure the layers again")
    if frame["update_s"].nunique() > 1:
        raise UserError(f"{path}: column update_s: differs between rows of one profile")
    arrays = ("parameters", "gradient_bytes", "forward_s", "backward_s", "flops")
    return LayerProfile(
        **{name: chosen[name] for name in ("network", "device", "batch")},
        tensor=tuple(frame["tensor"]),
        layer=tuple(frame["layer"]),
        **{name: frame[name].to_numpy() for name in arrays},
        update_s=float(frame["update_s"].iloc[0]),
    )


def profile_frame(
    profile: LayerProfile, precision: str = "fp32", ranks: int = 1, threads: int = 0
) -> DataFrame:
    """The profile as a table of schema ``layers``: forward order, one row per tensor. Reads back equal."""
    from pandas import DataFrame

    given = {"precision": precision, "ranks": ranks, "threads": threads}
    names = SCHEMAS["layers"].names
    return DataFrame(
        {name: given[name] if name in given else getattr(profile, name) for name in names}
    )


def read_timeline(path: Path, case: str | None = None, repeat: int | None = None) -> Timeline:
    """The one timeline in a ``timeline`` table, or the one chosen by its case's key and its repeat.

    Raises UserError for a wrong file, naming row and column, and where several timelines remain.
    """
    if is_stamped(path):
        frame = load_table(path, "timeline")
    else:
        sheet = read_sheet(files.read_text(path), str(path))
        frame = SCHEMAS["timeline"].frame(sheet, exact=False)
    frame, _ = choose(frame, ("case", "repeat"), {"case": case, "repeat": repeat}, path)
    if len(frame) > MOST_SPANS:
        raise UserError(f"{path}: {len(frame)} spans in one timeline: at most {MOST_SPANS}")
    return Timeline(**{name: frame[name].to_numpy() for name in TIMELINE_COLUMNS})


def choose(
    frame: DataFrame, keys: tuple[str, ...], wanted: dict[str, Any], path: Path
) -> tuple[DataFrame, dict[str, Any]]:
    """Rows that are as wanted, and the one value that each key then has."""
    assert wanted.keys() <= set(keys), wanted
    chosen = {}
    for key in keys:
        if key not in frame.columns:
            continue
        found = frame[key].drop_duplicates().tolist()
        listed = ", ".join(map(str, found[:MOST_LISTED])) + ", ..." * (len(found) > MOST_LISTED)
        want = wanted.get(key)
        if want is not None and want not in found:
            raise UserError(f"{path}: no row with {key} {want}: it has {listed}")
        if want is None and len(found) > 1:
            raise UserError(f"{path}: several values of {key} ({listed}): choose one by {key}")
        chosen[key] = found[0] if want is None else want
        frame = frame[frame[key] == chosen[key]]
    return frame, chosen


def read_selection_times(path: Path, density: float | None = None) -> SelectionTimes:
    """The times of SELECTOR in a ``selection`` table at one density: the median of each size.

    density : may be left out where the table has but one

    Raises UserError for a damaged table, and where that density, or a single one, was not measured.
    """
    rows = _selector_rows([path])
    known = rows["density"].unique().tolist()
    wanted = known if density is None else [density]
    if len(wanted) != 1 or wanted[0] not in known:
        asked = "a single density" if density is None else f"density {density}"
        raise UserError(f"{path}: {SELECTOR} was not measured at {asked}")
    return selection_table(rows[rows["density"] == wanted[0]])


def read_selection(
    paths: Sequence[Path], density: float, form: str = SelectionTimes.form
) -> SelectionCost:
    """What selecting takes: recorded tables' times about that density, or a cost described as JSON.

    form : fitted to what was measured, or "auto" for the one that does best at sizes left out

    Raises UserError for a damaged file, and where what was measured does not reach that density.
    """
    if [path.suffix for path in paths] != [".json"]:
        rows = _selector_rows(paths)
        least, most = rows["density"].min(), rows["density"].max()
        if not least <= density <= most:
            reach = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            raise UserError(f"{paths[0]}: {SELECTOR} was measured at {reach}, not at {density:g}")
        if form == SelectionTimes.form:
            return selection_table(rows)
        columns = (rows[name].to_numpy() for name in ("elements", "density", "seconds"))
        return fit(form, *columns, draws=0).cost
    if form not in (SelectionTimes.form, AUTO):
        raise UserError(f"{paths[0]}: has a form of its own: give --selection-form with tables")
    return from_dict(read_json(paths[0], "a selection cost, or give tables"), SELECTION_FORMS)


def selection_table(rows: DataFrame) -> SelectionTimes:
    """The medians of rows of schema ``selection``, at sizes that were measured at every density."""
    wide = rows.groupby(["density", "elements"])["seconds"].median().unstack().dropna(axis=1)
    return SelectionTimes(wide.columns.to_numpy(float), wide.index.to_numpy(float), wide.to_numpy())


def _selector_rows(paths: Sequence[Path]) -> DataFrame:
    import pandas as pd

    rows = pd.concat([load_table(one, "selection") for one in paths], ignore_index=True)
    rows = rows[(rows["operation"] == SELECTOR) & (rows["distribution"] == "normal")]
    if rows.empty:
        raise UserError(f"{paths[0]}: {SELECTOR} was not measured")
    return rows
