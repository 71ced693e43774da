"""The papers as numbered functions: each a module or package here that holds a ``PAPER``."""

from __future__ import annotations

import csv
import importlib
import io
import pkgutil
from dataclasses import dataclass
from functools import cache

from ddlkit import store
from ddlkit.store import readers


@dataclass(frozen=True)
class Paper:
    """One paper: its key in module, folder and rows everywhere; place : where it stands in lists, from 1."""

    key: str
    place: int
    title: str


@cache
def load() -> dict[str, Paper]:
    """Return the papers by key, in order, once all modules of this room and their planners are imported.

    >>> list(load())
    ['osf', 'sharing', 'dag', 'omgs', 'pytorch']
    """
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    papers = (module.PAPER for module in modules if hasattr(module, "PAPER"))
    return {paper.key: paper for paper in sorted(papers, key=lambda paper: paper.place)}


@cache
def published_code(paper: str) -> dict[str, float]:
    """Return what a paper's published code states (data/papers/<paper>/code.csv), by id, in its unit."""
    table = readers.read_transcribed(
        store.DATA / "papers" / paper / "code.csv"
    ).decode()
    return {
        row["id"]: float(row["value"]) for row in csv.DictReader(io.StringIO(table))
    }
