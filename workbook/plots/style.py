"""The looks of what is drawn (looks.yml), and the axes of cases and of groups of bars.

A look belongs to a role, a plan, a form of cost or a kind of span. It can also be told
apart without colour. Looks with which the library draws, too, come from `ddlkit.show`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from ddlkit import show
from ddlkit.show import SOFT as SOFT
from ddlkit.show import WIDTH as WIDTH
from ddlkit.show import Style as Style
from ddlkit.show import add_legend as add_legend
from ddlkit.show import has_look as has_look
from ddlkit.show import look as look
from ddlkit.show import looks as looks
from ddlkit.show import plain_log_ticks as plain_log_ticks
from ddlkit.show import set_log as set_log
from ddlkit.show import time_unit as time_unit
from ddlkit.store.files import own_yaml

INK = "#1b1b1b"
FAINT = "#e4e4e4"
_FOLDER = Path(__file__).parent
mpl.rcParams.update(mpl.rc_params_from_file(show.THEME, use_default_template=False))


def _style(listed: Mapping[str, Any]) -> Style:
    """Return a style as looks.yml lists it."""
    line = listed.get("line", "-")
    if not isinstance(line, str):
        # The lengths of dashes are listed. Matplotlib takes them as a tuple.
        line = tuple(line)
    return Style(**{**listed, "line": line})


_LISTED = own_yaml((_FOLDER / "looks.yml").read_text(encoding="utf-8"))
FAMILIES = {
    family: {name: _style(listed) for name, listed in styles.items()}
    for family, styles in _LISTED.items()
}
FAMILIES["roles"] = {**show.ROLES, **FAMILIES["roles"]}
FAMILIES["forms"] = show.FORMS
FAMILIES["spans"] = show.SPANS
"""Every look by family: those of looks.yml, and those that the library draws with."""

for _styles in FAMILIES.values():
    show.LOOKS.update(_styles)


def case_rows(ax: Axes, names: Sequence[str], reference: float | None) -> None:
    """Name a row for each case, the first on top.

    The rows are at y = 0, 1 and so on, where the caller draws.

    Parameters
    ----------
    ax : Axes
        The axes.
    names : sequence of str
        The names of the rows, which are written without "emulated:".
    reference : float or None
        The x value at which a vertical line is drawn. None for no line.
    """
    if reference is not None:
        ax.axvline(reference, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(names)), [name.replace("emulated:", "") for name in names])
    # The axis runs downwards, from a little above the first row to a little below the last.
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")


LETTER_INCHES = 0.085
"""The mean width of a letter of a name below bars."""


def name_bars(ax: Axes, places: ArrayLike, names: Sequence[str]) -> None:
    """Name groups of bars, aslant if the names together would be longer than the axis.

    Parameters
    ----------
    ax : Axes
        The axes.
    places : ndarray, shape (n,)
        The middles of the groups.
    names : sequence of str
        The n names.
    """
    # An estimate. Each name needs the room of one letter more, as a gap to the next.
    names_inches = LETTER_INCHES * sum(len(name) + 1 for name in names)
    axis_inches = ax.bbox.width / ax.figure.dpi
    aslant: dict[str, Any] = {}
    if names_inches > axis_inches:
        aslant = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(places, names, **aslant)
    ax.tick_params(axis="x", length=0)
