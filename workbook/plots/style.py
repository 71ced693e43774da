"""How things look (looks.yml), also without colour: a look per role, plan, form or span kind; axes, units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.plan import PLANNERS
from ddlkit.store.files import own_yaml

WIDTH = 7.2  # inches of a figure
INK, SOFT, FAINT = "#1b1b1b", "#6f6f6f", "#e4e4e4"
_FOLDER = Path(__file__).parent
mpl.rcParams.update(
    mpl.rc_params_from_file(_FOLDER / "theme.mplstyle", use_default_template=False)
)


@dataclass(frozen=True)
class Style:
    """How one name looks wherever it appears; ``line`` is a matplotlib line style."""

    label: str
    color: str
    marker: str = ""
    line: Any = "-"
    hatch: str = ""
    hollow: bool = False

    @property
    def face(self) -> str:
        """Return the colour inside its markers."""
        return "white" if self.hollow else self.color


def _style(listed: Mapping[str, Any]) -> Style:
    """Return a style as looks.yml lists it; matplotlib wants a tuple for dashes."""
    line = listed.get("line", "-")
    return Style(**{**listed, "line": line if isinstance(line, str) else tuple(line)})


_LISTED = own_yaml((_FOLDER / "looks.yml").read_text(encoding="utf-8"))
_SERIES = _LISTED.pop("series")
FAMILIES = {
    family: {k: _style(v) for k, v in looks.items()}
    for family, looks in _LISTED.items()
}
FAMILIES["spans"] |= {
    name: Style(kind.label, kind.color, hatch=kind.hatch)
    for name, kind in COLLECTIVES.items()
}
FAMILIES["plans"] = {
    name: Style(each.label, *each.look) for name, each in PLANNERS.items()
}
_LOOKS = {name: style for family in FAMILIES.values() for name, style in family.items()}


def known(name: str) -> bool:
    """Return whether a name has a look of its own, as `look` finds it."""
    return name in _LOOKS or name.partition(":")[0] in _LOOKS


def look(name: str) -> Style:
    """Return the style of a role, plan, cost form or span kind; with its argument it may have its own.

    >>> look("buffer:25MB").label, look("buffer:25MB").color == look("buffer").color
    ('buffer 25MB', True)
    """
    head, _, argument = name.partition(":")
    if name in _LOOKS:
        return _LOOKS[name]
    if head not in _LOOKS:
        raise UserError(
            f"no style for {name!r}: use a role, plan, cost form or span kind"
        )
    style = _LOOKS[head]
    return replace(style, label=f"{style.label} {argument}") if argument else style


def looks(names: Sequence[str]) -> list[Style]:
    """Return styles of series, by look or place; of two with one look the second is darker and hollow."""
    styles: list[Style] = []
    heads = [name if name in _LOOKS else name.partition(":")[0] for name in names]
    for place, (name, head) in enumerate(zip(names, heads, strict=True)):
        style = (
            look(name) if known(name) else Style(name, *_SERIES[place % len(_SERIES)])
        )
        if known(name) and head in heads[:place]:
            red, green, blue = to_rgb(style.color)
            darker = to_hex((0.55 * red, 0.55 * green, 0.55 * blue))
            style = replace(
                style, color=darker, line=(0, (3, 1)), hatch="|||", hollow=True
            )
        styles.append(style)
    return styles


def time_unit(seconds: ArrayLike) -> tuple[float, str]:
    """Return factor and name of the unit in which the largest time reads best.

    >>> time_unit([2e-3, 0.5e-3])
    (1000.0, 'ms')
    """
    largest = float(np.nanmax(np.abs(np.asarray(seconds, dtype=float))))
    units_by_size = {1.0: "s", 1e3: "ms", 1e6: "µs"}
    return next((u for u in units_by_size.items() if largest * u[0] >= 1), (1e6, "µs"))


def set_log(ax: Axes, log: str) -> None:
    """Make axes logarithmic: "x", "y" or both; "b" for an x axis of message sizes in bytes."""
    for axis, letter in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if letter in log:
            getattr(ax, f"set_{letter}scale")("log")
            plain_log_ticks(axis)
    if "b" in log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(
            FuncFormatter(lambda size, _: units.format_bytes(size))
        )


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: evenly spaced if it is short, else 1, 2, 5, or decades."""
    low, high = axis.get_view_interval()
    many = LogLocator() if high > 1e3 * low else LogLocator(subs=(1.0, 2.0, 5.0))
    axis.set_major_locator(MaxNLocator(6) if 0 < high < 6 * low else many)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def add_legend(ax: Axes, place: str) -> None:
    """Name what is drawn: "above" the axes, to the "right" of them, "inside", or not ("")."""
    columns = min(4, len(ax.get_legend_handles_labels()[1]))
    places: dict[str, dict[str, Any]] = {
        "above": {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns},
        "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
        "inside": {"loc": "upper left"},
    }
    if place:
        ax.legend(**places[place])


def case_rows(ax: Axes, names: Sequence[str], reference: float) -> None:
    """Name one row per case, the first on top, and draw a line where values are as the reference."""
    ax.axvline(reference, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(names)), [name.replace("emulated:", "") for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")


def name_bars(ax: Axes, places: ArrayLike, names: Sequence[str]) -> None:
    """Name groups of bars, aslant where the names together are longer than the axis."""
    long = (
        0.085 * sum(len(name) + 1 for name in names) > ax.bbox.width / ax.figure.dpi
    )  # inches
    leant: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(places, names, **(leant if long else {}))
    ax.tick_params(axis="x", length=0)
