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
from workbook.record.grammar import CAMPAIGN, SUITES, Suite, points, read

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

    A suite is a list of points, each a measurement with tables of its own.

    Parameters
    ----------
    what : str
        The name of a suite, a file of points, or one of `PARTS`, which is a part of the suite
        ``suite``.
    suite : str, optional
        The suite of which a part is measured. It has no effect if ``what`` is no part.
    device : str, optional
        "cpu" or "cuda", in place of the suite's own.
    out : Path, optional
        The directory of the tables, in place of the suite's own.
    dry_run : bool, optional
        Whether to measure nothing, and only say which points are missing.
    networks : sequence of str, optional
        Networks with batch sizes, as in "resnet50:32", in place of the suite's own. Only the part
        "layers" can be measured of them.
    predict : bool, optional
        Whether cases of campaigns and trainings are only predicted by models, and not measured.
    budget_s, pack, ignore_load
        As of `run_session`.

    Returns
    -------
    Path or str
        The directory of the tables. For a dry run, a text that says what is missing.

    Raises
    ------
    UserError
        As `run_session` does. Also for a wrong file, for networks with anything but layers, for
        short tables in the directory of the suite full, and where a lab or a GPU is needed and
        lacking.
    """
    if networks and what != "layers":
        raise UserError(
            f"--networks has an effect on the part layers only, not on {what}: leave it "
            f"out, or run python -m workbook record layers --networks {','.join(networks)}"
        )
    part = what if what in PARTS else "all"
    measured_suite = suite_of(what, suite)
    device = _checked_device(measured_suite, device)
    out = out or _default_out(measured_suite, device)
    # The session calls this function with its directory and its number (1, 2, ...).
    make_points = partial(
        points,
        name=str(measured_suite.file),
        part=part,
        device=device,
        networks=networks,
        predict=predict,
    )
    is_full = measured_suite.file == read("full").file
    if is_full:
        # Short tables of the suite quick must not stand for those of full.
        _refuse_short_tables(out)
    is_campaign = measured_suite.is_campaign or part == CAMPAIGN
    if dry_run:
        plan = estimate(make_points, out, budget_s)
        # A campaign is replayed in a lab, but can be planned without one. `lacking` builds none to
        # find out whether it works, and returns "" if nothing is known to be lacking.
        lacking = network.lacking() if is_campaign else ""
        if lacking:
            return f"{plan}\nnothing of this can be measured here: {lacking}"
        return plan
    if is_campaign:
        # `why_unavailable` builds a lab, and returns "" if it works.
        lacking = network.why_unavailable()
        if lacking:
            raise UserError(f"no campaign here: {lacking}")
    return run_session(
        make_points,
        out,
        isolate=measured_suite.isolate,
        gpu=device == "cuda",
        budget_s=budget_s,
        pack=pack,
        ignore_load=ignore_load,
        # `_refuse_short_tables` knows the tables of full by this remark in their stamps.
        remark=LONG if is_full else "",
        strict=measured_suite.strict,
        # The tables in data/recorded are put into one file for each schema. Others stay in files
        # of their own.
        pack_tables=out.resolve().is_relative_to(places.RECORDED.resolve()),
    )


def suite_of(what: str, suite: str = "quick") -> Suite:
    """Return the suite that is measured, or to which the measured part belongs.

    Parameters
    ----------
    what : str
        The name of a suite, a file of points, or one of `PARTS`.
    suite : str, optional
        The suite of a part.

    Raises
    ------
    UserError
        If there is no such suite, file or part, or if the file is wrong.
    """
    name = suite if what in PARTS else what
    # An error for an unknown name lists all that the command can record. Straggling is in no suite,
    # and is recorded by another function.
    return read(name, parts=PARTS, others=("straggling",))


def remedy_without_gpu(suite: Suite) -> str:
    """Return what to do if GPUs are asked for and there are none, as an error says it."""
    if suite.device == "cuda" and suite.file.parent == SUITES:
        # The sizes of the suites of GPUs take far too long on a processor.
        return "measure the suite cpu, or run this on a machine with a GPU"
    return "use --device cpu"


def _checked_device(suite: Suite, device: str) -> str:
    """Return the device for a suite: "cpu", "cuda", or "" for a device that is decided later.

    ``device`` is what the user asks for, and may be "". If it is "" and the points of the suite run
    in processes of their own (``isolate``), the suite decides, and then whether the machine has a
    GPU. For other suites it stays "". Raises UserError if the device is a GPU and there is none.
    """
    has_gpus = bool(machine.describe()["gpus"])
    is_of_file = not device and suite.file.parent != SUITES
    if suite.isolate:
        device = device or suite.device or ("cuda" if has_gpus else "cpu")
    if device == "cuda" and not has_gpus:
        asked, remedy = "", remedy_without_gpu(suite)
        if is_of_file:
            asked = f"{suite.file}: device: cuda: "
            remedy = "write device: cpu, or run this on a machine with a GPU"
        raise UserError(f"{asked}no GPU here: nvidia-smi lists none; {remedy}")
    return device


def _refuse_short_tables(out: Path) -> None:
    """Raise UserError if the directory holds tables that the suite full did not measure."""
    # Tables without a stamp were not recorded. The stamps of the tables of full have the remark
    # `LONG`.
    for path in filter(is_stamped, store.list_tables(out)):
        if LONG not in store.load_stamp(path).get("remark", ""):
            raise UserError(
                f"{out} holds tables that the suite full did not measure, as {path.name}: "
                "choose another directory by --out, or remove them"
            )


def _default_out(suite: Suite, device: str) -> Path:
    """Return the directory of a suite's tables if the user names none.

    The directory of a machine is named after its GPU, or after its processor with the ending
    "-suite". Without the ending, the name is that of the directory of recordings in a lab.
    """
    # Campaigns that name no directory go to data/recorded.
    if suite.is_campaign and not suite.out:
        return places.recorded_dir() / suite.folder
    if device == "cuda":
        name = machine.name()
    else:
        name = f"{machine.name('cpu')}-suite"
    if suite.out == "recorded":
        return places.recorded_dir(name)
    # The tables of all other suites lie in the folder build, which is no part of the repository.
    directory = places.BUILD / (suite.out or "measured")
    # Suites whose points have processes of their own have a directory for each machine. The others
    # have one for all machines: `reproduce.sh` reads the tables of quick and full by its name.
    return directory / name if suite.isolate else directory
