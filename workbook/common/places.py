"""The directories of the workbook: data, recordings, the build and the reports."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.store import machine

ROOT = Path(os.environ.get("DDLKIT_ROOT") or Path(__file__).parents[2]).resolve()
DATA = ROOT / "data"
RECORDED = DATA / "recorded"
BUILD = ROOT / "build"
REPORTS = ROOT / "reports"
NOTEBOOKS = ROOT / "notebooks"


def recorded_dir(machine_name: str | None = None) -> Path:
    """Return the directory of the recorded tables of a machine, which may not exist.

    Parameters
    ----------
    machine_name : str, optional
        The name of the machine. By default it is this machine.

    Raises
    ------
    UserError
        If the name has other characters than lower-case letters, digits, dots and
        dashes, or begins with a dot or a dash.
    """
    name = machine_name
    if name is None:
        name = machine.name()
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise UserError(
            f"machine name {name!r}: use lower-case letters, digits, dots and dashes"
        )
    return RECORDED / name


def list_recorded() -> list[Path]:
    """Return the directories under data/recorded that hold at least one recorded table, by name."""
    return sorted({path.parent for path in RECORDED.glob("*/*.csv*")})
