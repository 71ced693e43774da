"""The papers that the workbook reproduces, and what their published code states."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cache

from workbook.common import places, transcribed


@dataclass(frozen=True)
class Paper:
    """One paper: ``key`` names its folder in workbook/ and data/papers/, and its rows everywhere."""

    key: str
    title: str


PAPERS = {
    paper.key: paper
    for paper in (
        Paper(
            "osf",
            "Modeling and Optimizing the Scaling Performance in Distributed Deep Learning Training",
        ),
        Paper("sharing", "Resource Sharing between Computation and Communication"),
        Paper(
            "dag",
            "A DAG Model of Synchronous Stochastic Gradient Descent in Distributed Deep Learning",
        ),
        Paper(
            "omgs",
            "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs",
        ),
        Paper(
            "pytorch",
            "PyTorch 2.13.0: cost models of communication in its source",
        ),
    )
}
"""Every paper by its key, in the order in which lists show them."""


@cache
def published_code(paper: str) -> dict[str, float]:
    """Return what a paper's published code states (data/papers/<paper>/code.csv), by id, in its unit."""
    table = transcribed.read_transcribed(
        places.DATA / "papers" / paper / "code.csv"
    ).decode()
    return {
        row["id"]: float(row["value"]) for row in csv.DictReader(io.StringIO(table))
    }
