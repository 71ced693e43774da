"""Recordings: a suite, a part of a suite or a file of points is measured into its directory."""

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
"""Remark of tables of the suite full, by its earlier name, which recorded stamps have.

Such tables may stand for those of quick, but not the other way round.
"""


def record(
    what: str,
    *,
    suite: str = "quick",
    device: str = "",
    out: Path | None = None,
    dry_run: bool = False,
    networks: Sequence[str] = (),
    predict: bool = False,
    budget_s: float = math.inf,
    pack: Path | None = None,
    ignore_load: bool = False,
) -> Path | str:
    """Measure a suite, a file of points, or a part of a suite.

    Parameters
    ----------
    what : str
        The name of a suite, a file of points, or one of `PARTS` of the suite ``suite``.
    suite : str, optional
        The suite of which a part is measured.
    device : str, optional
        "cpu" or "cuda", in place of the suite's own.
    out : Path, optional
        The directory of the tables, in place of the suite's own.
    dry_run : bool, optional
        Whether to say only what is missing.
    networks : sequence of str, optional
        Networks with batch sizes, as in "resnet50:32", in place of the suite's own. Only layers can be
        measured of them.
    predict : bool, optional
        Whether to write down what models say of the cases of a campaign, and to replay none.
    budget_s, pack, ignore_load
        As of `run_session`.

    Returns
    -------
    Path or str
        The directory of the tables, or of a dry run what is missing.

    Raises
    ------
    UserError
        As `run_session` does, for a wrong file, and where a lab or a GPU is needed and lacking.
    """
    name = suite if what in PARTS else what
    part = what if what in PARTS else "all"
    # The command also records straggling, which is in no suite, and does so without this
    # function.
    listed = read(name, parts=PARTS, others=("straggling",))
    device = _checked_device(listed, device)
    out = out or _default_out(listed, device)
    make_points = partial(
        points,
        name=str(listed.file),
        part=part,
        device=device,
        networks=networks,
        predict=predict,
    )
    # Tables of the suite full may stand for those of quick, but not the other way round.
    is_full = listed.file == read("full").file
    if is_full:
        _refuse_short_tables(out)
    if dry_run:
        return estimate(make_points, out, budget_s)
    if listed.is_campaign or part == CAMPAIGN:
        lacking = network.why_unavailable()
        if lacking:
            raise UserError(f"no campaign here: {lacking}")
    return run_session(
        make_points,
        out,
        isolate=listed.isolate,
        gpu=device == "cuda",
        budget_s=budget_s,
        pack=pack,
        ignore_load=ignore_load,
        remark=LONG if is_full else "",
        strict=listed.strict,
        # Only recorded tables are put into one file for each schema.
        pack_tables=out.resolve().is_relative_to(places.RECORDED.resolve()),
    )


def _checked_device(suite: Suite, device: str) -> str:
    """Return the device of a suite, which may be left open as "".

    If the points of the suite run in processes of their own (``isolate``), an open device is decided here.
    For other suites, torch decides later. Raises UserError if a GPU is asked for and there is none.
    """
    has_gpus = bool(machine.describe()["gpus"])
    if suite.isolate:
        device = device or suite.device or ("cuda" if has_gpus else "cpu")
    if device == "cuda" and not has_gpus:
        raise UserError("no GPU here: nvidia-smi lists none; use --device cpu")
    return device


def _refuse_short_tables(out: Path) -> None:
    """Raise UserError if the directory holds tables that the suite full did not measure."""
    for path in filter(is_stamped, store.list_tables(out)):
        if LONG not in store.load_stamp(path).get("remark", ""):
            raise UserError(
                f"{out} holds tables that the suite full did not measure, as {path.name}: "
                "choose another directory by --out, or remove them"
            )


def _default_out(suite: Suite, device: str) -> Path:
    """Return the directory of a suite's tables.

    A recording is named after the GPU, or after the processor with the ending "-suite".
    """
    # Campaigns are recorded by default.
    if suite.is_campaign and not suite.out:
        return places.recorded_dir() / suite.folder
    if device == "cuda":
        name = machine.name()
    else:
        name = f"{machine.name('cpu')}-suite"
    if suite.out == "recorded":
        return places.recorded_dir(name)
    # All other suites are measured into the folder of builds, which is not recorded.
    directory = places.BUILD / (suite.out or "measured")
    return directory / name if suite.isolate else directory
