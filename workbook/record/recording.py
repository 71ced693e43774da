"""Recordings: a suite, a part of one, or a file of points is measured into the directory it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.lab import network
from ddlkit.measure.session.engine import estimate, run_session
from ddlkit.store import machine
from ddlkit.store.tables import is_stamped
from workbook.common import places
from workbook.record.grammar import CAMPAIGN, Suite, points, read

PARTS = (
    "layers",
    "collectives",
    "slowdown",
    "copies",
    "training",
    "replay",
    CAMPAIGN,
    "convergence",
    "input",
    "estimators",
    "all",
)
"""What can be asked for by itself, of the suites quick and full."""
LONG = "profile full"
"""Remark of tables of the suite full: they may stand for those of quick, but not the other way round."""


def record(
    what: str,
    *,
    profile: str = "quick",
    device: str = "",
    out: Path | None = None,
    dry_run: bool = False,
    networks: Sequence[str] = (),
    predict: bool = False,
    budget_s: float = math.inf,
    pack: Path | None = None,
    ignore_load: bool = False,
) -> Path | str:
    """Measure a suite, a file of points, or one of `PARTS`; return where, or of a dry run what is missing.

    Parameters
    ----------
    what : name of a suite, a file of points, or one of `PARTS` of the suite ``profile``
    device : "cpu" or "cuda", in place of the suite's own
    networks : with batch sizes, as in "resnet50:32", in place of the suite's own; for layers only
    predict : of a campaign: write down what models say of its cases, and replay none
    budget_s, pack, ignore_load : as of `run_session`

    Raises
    ------
    UserError
        As `run_session` does, for a wrong file, and where a lab or a GPU is needed and lacking.
    """
    name, part = what, "all"
    if what in PARTS:
        name, part = profile, what
    suite = read(name)
    gpus = bool(machine.describe()["gpus"])
    if suite.isolate:
        device = device or suite.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise UserError(
            "no GPU here: nvidia-smi lists none: record the processor by python -m "
            "workbook record cpu, or give --device cpu"
        )
    out = out or _default_out(suite, device)
    make = partial(
        points,
        name=str(suite.file),
        part=part,
        device=device,
        networks=networks,
        predict=predict,
    )
    remark = ""
    if suite.file == read("full").file:
        remark = LONG
        _refuse_short_tables(out)
    if dry_run:
        return estimate(make, out)
    if suite.is_campaign or part == CAMPAIGN:
        if reason := network.available():
            raise UserError(f"no campaign here: {reason}")
    return run_session(
        make,
        out,
        isolate=suite.isolate,
        gpu=device == "cuda",
        budget_s=budget_s,
        pack=pack,
        ignore_load=ignore_load,
        remark=remark,
        pack_tables=out.resolve().is_relative_to(places.RECORDED.resolve()),
    )


def _refuse_short_tables(out: Path) -> None:
    """Raise UserError where the directory holds tables that the suite full did not measure."""
    for path in filter(is_stamped, store.list_tables(out)):
        if LONG not in store.load_stamp(path).get("remark", ""):
            raise UserError(
                f"{out} holds tables that profile full did not measure, as {path.name}: "
                "choose another directory by --out, or remove them"
            )


def _default_out(suite: Suite, device: str) -> Path:
    """Return where a suite measures: a recording has its GPU's name or, of processors, one of its own."""
    if suite.is_campaign and not suite.out:
        return places.recorded_dir() / suite.folder
    name = machine.name() if device == "cuda" else f"{machine.name('cpu')}-suite"
    if suite.out == "recorded":
        return places.recorded_dir(name)
    return places.BUILD / (suite.out or "measured") / (name if suite.isolate else "")
