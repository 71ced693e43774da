"""The papers that the workbook reproduces, and what their published code states."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cache

from workbook.common import places, transcribed


@dataclass(frozen=True)
class Paper:
    """One paper, or other source, whose claims are judged.

    Its title and its authors are in CITATION.cff, where ``key`` is the abbreviation.

    Parameters
    ----------
    key : str
        The name of its folders ``workbook/<key>`` and ``data/papers/<key>``, and the
        beginning of the ids of its claims, figures and tables.
    figures, tables : int
        How many figures and tables data/figures.yml must list for this paper.
    """

    key: str
    figures: int = 0
    tables: int = 0


PAPERS = {
    paper.key: paper
    for paper in (
        Paper("osf", figures=11, tables=3),
        Paper("sharing", figures=8, tables=2),
        Paper("dag", figures=4, tables=6),
        Paper("omgs", figures=4, tables=6),
        Paper("pytorch"),
    )
}
"""Every paper by its key, in the order in which lists show them."""


@cache
def published_code(paper: str) -> dict[str, float]:
    """Return the numbers that the published code of a paper states.

    Parameters
    ----------
    paper : str
        The key of the paper.

    Returns
    -------
    dict of str to float
        The numbers of data/papers/<paper>/code.csv by id, in the units that this file gives.

    Raises
    ------
    UserError
        If the file is missing, or if it was changed since it was transcribed.
    """
    path = places.DATA / "papers" / paper / "code.csv"
    text = transcribed.read_transcribed(path).decode()
    rows = csv.DictReader(io.StringIO(text))
    return {row["id"]: float(row["value"]) for row in rows}
