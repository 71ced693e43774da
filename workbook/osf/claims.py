"""The checks of osf's claims. Importing this module registers them all.

The checks of a figure or of a table are in its module. Those that belong to neither are
here.
"""

from __future__ import annotations

from workbook.common.claims import Result, check, own
from workbook.osf import (
    fig01,
    fig02,
    fig03,
    fig04,
    fig05,
    fig06,
    fig07,
    fig08,
    fig09,
    fig10,
    fig11,
    settings,
    tables,
)
from workbook.osf.equations import scaling_factor

FIGURES = fig01, fig02, fig03, fig04, fig05, fig06, fig07, fig08, fig09, fig10, fig11
REGISTERING = (*FIGURES, tables)
"""Modules whose import registers the checks of their figure or tables."""

check("osf-vgg16-one-layer", "VGG-16: share of one layer", 100)(settings.by_model)


@check("osf-sf-example")
def _worked_example() -> Result:
    factor = scaling_factor(alone_s=9, together_s=1.25, workers=8)
    return own(factor, "Eq 1")
