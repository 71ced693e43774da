"""The papers as numbered functions: each a module or package here that holds a ``PAPER``."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache


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
    ['osf', 'sharing', 'dag', 'omgs']
    """
    names = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    papers = (module.PAPER for module in modules if hasattr(module, "PAPER"))
    return {paper.key: paper for paper in sorted(papers, key=lambda paper: paper.place)}
