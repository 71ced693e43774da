"""Layer profiles and timelines, whether recorded or a user's own CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import SelectionTimes
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile
from ddlkit.store import files
from ddlkit.store.schema import SCHEMAS
from ddlkit.store.sheet import Sheet, read_sheet
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

SELECTOR = "topk_unsorted"  # of the table selection: what a replay that really selects does
_PROFILE_KEYS = ("network", "device", "batch", "precision", "ranks", "threads")


def read_profile(
    path: Path,
    network: str | None = None,
    batch: int | None = None,
    *,
    device: str | None = None,
    precision: str | None = None,
    ranks: int | None = None,
    threads: int | None = None,
) -> LayerProfile:
    """The one profile in a ``layers`` table, or the one chosen.

    A table without a stamp is a user's own: it may leave out precision (fp32), ranks (1), threads
    and update_s (0).
    Raises UserError for a wrong file, naming row and column, and where several profiles remain.
    """
    if is_stamped(path):
        frame = load_table(path, "layers")
    else:
        frame = SCHEMAS["layers"].frame(own_sheet(path), exact=False)
    wanted = {
        "network": network,
        "device": device,
        "batch": batch,
        "precision": precision,
        "ranks": ranks,
        "threads": threads,
    }
    frame, chosen = choose(frame, _PROFILE_KEYS, wanted, path)
    for name in ("forward_s", "backward_s"):
        if not frame[name].sum() > 0:
            raise UserError(f"{path}: column {name}: all times are zero: measure the layers again")
    if frame["update_s"].nunique() > 1:
        raise UserError(f"{path}: column update_s: differs between rows of one profile")
    arrays = ("parameters", "gradient_bytes", "forward_s", "backward_s", "flops")
    return LayerProfile(
        network=chosen["network"],
        device=chosen["device"],
        batch=chosen["batch"],
        tensor=tuple(frame["tensor"]),
        layer=tuple(frame["layer"]),
        **{name: frame[name].to_numpy() for name in arrays},
        update_s=float(frame["update_s"].iloc[0]),
    )


def profile_frame(
    profile: LayerProfile, precision: str = "fp32", ranks: int = 1, threads: int = 0
) -> DataFrame:
    """The profile as a table of schema ``layers``: forward order, one row a tensor. Reads back equal."""
    from pandas import DataFrame

    return DataFrame(
        {
            "network": profile.network,
            "device": profile.device,
            "batch": profile.batch,
            "precision": precision,
            "ranks": ranks,
            "threads": threads,
            "tensor": profile.tensor,
            "layer": profile.layer,
            "parameters": profile.parameters,
            "gradient_bytes": profile.gradient_bytes,
            "forward_s": profile.forward_s,
            "backward_s": profile.backward_s,
            "flops": profile.flops,
            "update_s": profile.update_s,
        }
    )


def read_timeline(path: Path, case: str | None = None, repeat: int | None = None) -> Timeline:
    """The one timeline in a ``timeline`` table, or the one chosen by its case's key and its repeat.

    Raises UserError for a wrong file, naming row and column, and where several timelines remain.
    """
    if is_stamped(path):
        frame = load_table(path, "timeline")
    else:
        frame = SCHEMAS["timeline"].frame(own_sheet(path), exact=False)
    frame, _ = choose(frame, ("case", "repeat"), {"case": case, "repeat": repeat}, path)
    return Timeline(**{name: frame[name].to_numpy() for name in TIMELINE_COLUMNS})


def own_sheet(path: Path) -> Sheet:
    return read_sheet(files.text_of(files.read(path), path), str(path))


def choose(
    frame: DataFrame, keys: tuple[str, ...], wanted: dict[str, Any], path: Path
) -> tuple[DataFrame, dict[str, Any]]:
    """Rows that are as wanted, and the one value that each key then has."""
    chosen = {}
    for key in keys:
        if key not in frame.columns:
            continue
        found = frame[key].drop_duplicates().tolist()
        listed = ", ".join(map(str, found))
        want = wanted.get(key)
        if want is not None and want not in found:
            raise UserError(f"{path}: no row with {key} {want}: it has {listed}")
        if want is None and len(found) > 1:
            raise UserError(f"{path}: several values of {key} ({listed}): choose one by {key}")
        chosen[key] = found[0] if want is None else want
        frame = frame[frame[key] == chosen[key]]
    return frame, chosen


def read_selection_times(path: Path, density: float | None = None) -> SelectionTimes:
    """The times of SELECTOR in a ``selection`` table: the median of each size.

    density : may be left out where the table has but one

    Raises UserError for a damaged table, and where that density, or a single one, was not measured.
    """
    rows = load_table(path, "selection")
    rows = rows[rows["operation"] == SELECTOR]
    known = rows["density"].unique().tolist()
    wanted = known if density is None else [density]
    if len(wanted) != 1 or wanted[0] not in known:
        asked = "a single density" if density is None else f"density {density}"
        raise UserError(f"{path}: {SELECTOR} was not measured at {asked}")
    medians = rows[rows["density"] == wanted[0]].groupby("elements")["seconds"].median()
    return SelectionTimes(medians.index.to_numpy(), medians.to_numpy(), float(wanted[0]))
