"""The checks of osf's claims: importing this module registers them all.

Those of a figure or of a table stand in its module; here are those that belong to neither.
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
    return own(scaling_factor(9, 1.25, 8), "Eq 1")
