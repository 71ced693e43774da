"""How things look: one theme, and one colour, marker, line and hatch per role, plan, cost form or span kind.

Marker, line and hatch tell things apart without colour, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from ddlkit.core.errors import UserError
from ddlkit.papers.planners import PLANNERS

WIDTH = 7.2
INK, SOFT, FAINT = "#1b1b1b", "#6f6f6f", "#e4e4e4"
_RC = mpl.rc_params_from_file(
    Path(__file__).with_name("theme.mplstyle"), use_default_template=False
)


@dataclass(frozen=True)
class Style:
    """How one name looks wherever it appears."""

    label: str
    color: str
    marker: str = ""
    line: Any = "-"  # a matplotlib line style
    hatch: str = ""
    hollow: bool = False

    @property
    def face(self) -> str:
        """The colour inside its markers."""
        return "none" if self.hollow else self.color


ROLES = {
    "measured": Style("measured", INK, "o", "-", hollow=True),
    "model": Style("model", "#00588f", "D", "--", "///"),
    "paper": Style("paper", "#d55e00", "s", ":", "...", hollow=True),
    "no_overlap": Style("no overlap", "#e0a000", "v", "-.", "\\\\\\", hollow=True),
    "perfect_overlap": Style("perfect overlap", "#7fc4ee", "^", (0, (1, 1, 4, 1)), "xxx", True),
    "linear": Style("linear cost", "#009e73", "P", (0, (5, 1)), "---", hollow=True),
    "osf": Style("OSF", "#b3568a", "X", (0, (3, 1, 1, 1)), "+++", hollow=True),
}
PLANS = {name: Style(planner.label, *planner.look) for name, planner in PLANNERS.items()}
FORMS = {
    "ring_all_reduce": Style("ring, Eq 7", "#b3568a", "v", "--"),
    "alpha_beta": Style("alpha-beta", "#d55e00", "s", ":"),
    "piecewise": Style("log / linear", "#e0a000", "^", "-."),
    "segments": Style("linear pieces", "#00588f", "D", "-"),
    "table": Style("table", INK, "o", "--"),
}
SELECTIONS = {
    "density_log": Style("gamma rho d log d", "#d55e00", "s", ":"),
    "log": Style("gamma d log d", "#e0a000", "^", "-."),
    "scan": Style("start-up + passes", "#00588f", "D", "-"),
}
SPANS = {
    "io": Style("input", "#bdbdbd", hatch="||||"),
    "h2d": Style("copy to device", "#8f8f8f", hatch="----"),
    "forward": Style("forward", "#a9d3f0"),
    "backward": Style("backward", "#4a94c8"),
    "sparsify": Style("sparsify", "#b3568a", hatch="..."),
    "negotiate": Style("negotiate", "#f0c9e0", hatch="++++"),
    "wait": Style("wait", "#f2f2f2"),
    "all_reduce": Style("all-reduce", "#c14d00", hatch="////"),
    "all_gather": Style("all-gather", "#e0a000", hatch="\\\\\\\\"),
    "update": Style("update", "#00664b", hatch="xxxx"),
}
VERDICTS = {
    "reproduced": Style("reproduced", INK, "o"),
    "differs": Style("differs", INK, "X", hollow=True),
}
LOOKS = {**ROLES, **PLANS, **FORMS, **SELECTIONS, **SPANS, **VERDICTS}
_SERIES = (
    ("#00588f", "D", "-", ""),
    ("#d55e00", "s", "--", "///"),
    (INK, "o", "-.", "..."),
    ("#e0a000", "^", ":", "xxx"),
    ("#009e73", "v", "-", "\\\\\\"),
    ("#b3568a", "P", "--", "|||"),
)
"""Looks of names that are none of LOOKS, by their place among others."""


@contextmanager
def theme() -> Iterator[None]:
    """The workbook's look, as a context (``with theme():``) or a decorator; restored on leaving."""
    with mpl.rc_context(_RC):
        yield


def look(name: str) -> Style:
    """The style of a role, plan ("buffer:25MB" looks like "buffer"), cost form or span kind.

    Raises UserError for an unknown name.

    >>> look("buffer:25MB").label, look("buffer:25MB").color == look("buffer").color
    ('buffer 25MB', True)
    """
    head, _, argument = name.partition(":")
    if head not in LOOKS:
        raise UserError(f"no style for {name!r}: use a role, plan, cost form or span kind")
    style = LOOKS[head]
    return replace(style, label=f"{style.label} {argument}") if argument else style


def looks(names: Sequence[str]) -> list[Style]:
    """The styles of series: known names in their own look, others by their place.

    Of two names with one look ("adafusion" and "adafusion:repaired") the second is darker.
    """
    styles: list[Style] = []
    heads = [name.partition(":")[0] for name in names]
    for place, (name, head) in enumerate(zip(names, heads, strict=True)):
        style = Style(name, *_SERIES[place % len(_SERIES)])
        if head in LOOKS:
            style = look(name)
            if head in heads[:place]:
                red, green, blue = to_rgb(style.color)
                darker = to_hex((0.55 * red, 0.55 * green, 0.55 * blue))
                style = replace(style, color=darker, line=(0, (3, 1)), hatch="|||")
        styles.append(style)
    return styles
