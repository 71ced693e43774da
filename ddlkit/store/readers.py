"""Layer profiles, timelines and selection times, recorded or a user's own.

A wrong file, and one in which several things remain to choose from, raises a UserError.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.plan import DDP_BUCKET_BYTES
from ddlkit.core.sparse import SELECTION_FORMS, SelectionCost, SelectionTimes
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile
from ddlkit.store import files
from ddlkit.store.files import read_json
from ddlkit.store.sheet import SCHEMAS, read_sheet
from ddlkit.store.tables import expand_tables, is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

BYTES_PER_PARAMETER = 4  # of a gradient in single precision
MOST_SPANS = 200_000
"""Of a timeline: recorded ones have some thousands; of more, Perfetto becomes slow."""
PROFILE_KEYS = ("network", "device", "batch", "precision", "ranks", "threads")
SELECTOR = (
    "topk_unsorted"  # of the table selection: what a replay that really selects does
)
# What a user's own layer profile may leave out, and what is then assumed.
_ASSUMED = {
    **{
        "device": "unknown",
        "batch": "1",
        "precision": "fp32",
        "ranks": "1",
        "threads": "0",
    },
    **{"layer": "its tensor", "parameters": "1", "flops": "0", "update_s": "0"},
}


def choose(
    frame: DataFrame, keys: tuple[str, ...], wanted: dict[str, Any], path: Path
) -> tuple[DataFrame, dict[str, Any]]:
    """Return rows that are as wanted, and the one value that each key then has."""
    chosen = {}
    for key in keys:
        if key not in frame.columns:
            continue
        values = frame[key].drop_duplicates().tolist()
        listed = ", ".join(map(str, values))
        want = wanted.get(key)
        if want is None and len(values) > 1:
            raise UserError(
                f"{path}: several values of {key} ({listed}): choose one by {key}"
            )
        chosen[key] = values[0] if want is None else want
        if chosen[key] not in values:
            raise UserError(f"{path}: no row with {key} {want}: it has {listed}")
        frame = frame[frame[key] == chosen[key]]
    return frame, chosen


def read_profile(
    path: Path,
    network: str | None = None,
    batch: int | None = None,
    *,
    forward_s: float | None = None,
    assumed: list[str] | None = None,
    device: str | None = None,
    precision: str | None = None,
    ranks: int | None = None,
    threads: int | None = None,
) -> LayerProfile:
    """Return the one profile in a ``layers`` table, or the one that is wanted by its PROFILE_KEYS.

    A user's own, without a stamp, needs only columns tensor, gradient_bytes, backward_s and forward_s.
    forward_s : seconds of the whole forward pass, in place of the column of that name
    assumed : a list to which is added what else a user's own leaves out, one phrase each
    """
    if is_stamped(path):
        frame = load_table(path, "layers")
    else:
        frame = _own_profile(
            path, forward_s is not None, [] if assumed is None else assumed
        )
    wanted = {
        "network": network,
        "device": device,
        "batch": batch,
        "precision": precision,
        "ranks": ranks,
        "threads": threads,
    }
    frame, chosen = choose(frame, PROFILE_KEYS, wanted, path)
    if forward_s is not None:
        if not 0 < forward_s < math.inf:
            raise UserError(f"forward_s is {forward_s}: must be a time above zero")
        frame = frame.assign(forward_s=[forward_s] + [0.0] * (len(frame) - 1))
    for name in ("forward_s", "backward_s"):
        if not frame[name].sum() > 0:
            raise UserError(
                f"{path}: column {name}: all times are zero: measure the layers again"
            )
    if frame["update_s"].nunique() > 1:
        raise UserError(f"{path}: column update_s: differs between rows of one profile")
    return LayerProfile(
        network=chosen["network"],
        device=chosen["device"],
        batch=chosen["batch"],
        tensor=tuple(frame["tensor"]),
        layer=tuple(frame["layer"]),
        parameters=frame["parameters"].to_numpy(),
        gradient_bytes=frame["gradient_bytes"].to_numpy(),
        forward_s=frame["forward_s"].to_numpy(),
        backward_s=frame["backward_s"].to_numpy(),
        flops=frame["flops"].to_numpy(),
        update_s=float(frame["update_s"].iloc[0]),
    )


def read_copy_s_per_byte(path: Path) -> float:
    """Return seconds to copy a byte in memory, by a table ``copies``: of those about as large as a bucket."""
    rows = load_table(path, "copies")
    inside = rows[rows["copy"].isin(["memcpy", "d2d"])]
    if inside.empty:
        raise UserError(f"{path}: no copies in memory: run ddlkit measure copies again")
    nearest = (
        np.abs(np.log(inside["bytes"] / DDP_BUCKET_BYTES))
        .groupby(inside["bytes"])
        .first()
    )
    same = inside[inside["bytes"] == nearest.idxmin()]
    return float((same["seconds"] / same["bytes"]).median())


def _own_profile(path: Path, forward_is_given: bool, assumed: list[str]) -> DataFrame:
    """Return a user's rows, a tensor each, all columns of ``layers``; what lacked is added to ``assumed``."""
    sheet = read_sheet(files.read_text(path), str(path))
    defaults = {"network": path.name.partition(".")[0] or "unknown", **_ASSUMED}
    schema, given = SCHEMAS["layers"], {"forward_s": "0"} if forward_is_given else {}
    columns = [
        replace(c, default=(defaults | given).get(c.name)) for c in schema.columns
    ]
    frame = replace(schema, columns=tuple(columns)).frame(sheet, exact=False)
    if "layer" not in sheet.header:
        frame["layer"] = frame["tensor"]
    if "parameters" not in sheet.header:
        frame["parameters"] = -(-frame["gradient_bytes"] // BYTES_PER_PARAMETER)
        defaults["parameters"] = f"gradient_bytes / {BYTES_PER_PARAMETER}"
    missing = [name for name in defaults if name not in sheet.header]
    assumed.extend(f"{name} = {defaults[name]}" for name in missing)
    return frame


def profile_frame(
    profile: LayerProfile, precision: str = "fp32", ranks: int = 1, threads: int = 0
) -> DataFrame:
    """Return the profile as a table of schema ``layers``, a row per tensor in forward order."""
    from pandas import DataFrame

    given = {
        **vars(profile),
        "precision": precision,
        "ranks": ranks,
        "threads": threads,
    }
    return DataFrame({name: given[name] for name in SCHEMAS["layers"].names})


def read_timeline(
    path: Path, case: str | None = None, repeat: int | None = None
) -> Timeline:
    """Return the one timeline in a ``timeline`` table, or the one chosen by its case's key and its repeat."""
    if is_stamped(path):
        frame = load_table(path, "timeline")
    else:
        frame = SCHEMAS["timeline"].read(files.read_text(path), str(path), exact=False)
    frame, _ = choose(frame, ("case", "repeat"), {"case": case, "repeat": repeat}, path)
    if len(frame) > MOST_SPANS:
        raise UserError(
            f"{path}: {len(frame)} spans in one timeline: at most {MOST_SPANS}"
        )
    return Timeline.from_columns(frame)


def read_selection_times(path: Path, density: float | None = None) -> SelectionTimes:
    """Return median times of SELECTOR in a ``selection`` table at one density, its only one by default."""
    rows, _ = choose(_selector_rows([path]), ("density",), {"density": density}, path)
    return _medians(rows)


def read_selection(paths: Sequence[Path], density: float) -> SelectionCost:
    """Return what selecting takes: recorded tables' times about that density, or a cost described as JSON."""
    if [path.suffix for path in paths] == [".json"]:
        return from_dict(
            read_json(paths[0], "a selection cost, or give tables"), SELECTION_FORMS
        )
    rows = _selector_rows(expand_tables([*paths]))
    if not rows["density"].min() <= density <= rows["density"].max():
        there = ", ".join(f"{value:g}" for value in sorted(set(rows["density"])))
        raise UserError(
            f"{paths[0]}: {SELECTOR} was measured at {there}, not at {density:g}"
        )
    return _medians(rows)


def _selector_rows(paths: Sequence[Path]) -> DataFrame:
    import pandas as pd

    rows = pd.concat([load_table(path, "selection") for path in paths])
    rows = rows[(rows["operation"] == SELECTOR) & (rows["distribution"] == "normal")]
    if rows.empty:
        raise UserError(f"{paths[0]}: {SELECTOR} was not measured")
    return rows


def _medians(rows: DataFrame) -> SelectionTimes:
    """Return medians at sizes that were measured at every density."""
    wide = (
        rows.groupby(["density", "elements"])["seconds"]
        .median()
        .unstack()
        .dropna(axis=1)
    )
    return SelectionTimes(
        wide.columns.to_numpy(float), wide.index.to_numpy(float), wide.to_numpy()
    )


INPUTS = {"io_s": "read", "decode_s": "decode", "h2d_s": "h2d"}
"""Task of training's graph -> quantity of the table of inputs."""
BEST = ("cold files", "one core", "pinned")
"""Of several ways that were measured the one that training takes: a file a picture, pinned memory."""


def read_inputs(path: Path, batch: int) -> dict[str, float]:
    """Return median seconds of io_s, decode_s and h2d_s for ``batch`` JPEGs, as far as they were measured."""
    rows = load_table(path, "inputs")
    rows = rows[(rows["ranks"] == 1) | (rows["quantity"] == "decode")]
    rows = rows[rows["how"].isin(BEST) & (rows["stored"] != "raw")]
    each_s = (rows["seconds"] / rows["batch"]).groupby(rows["quantity"]).median()
    if each_s.empty:
        raise UserError(
            f"{path}: no reading, decoding or copying: give inputs-alone-*.csv"
        )
    return {
        name: batch * float(each_s[of]) for name, of in INPUTS.items() if of in each_s
    }
