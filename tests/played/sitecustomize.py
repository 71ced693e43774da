"""Run by every Python that has this directory on its PYTHONPATH: plays PLAYED_GPUS in place of torch's."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch where it is, and has it played after it was loaded.

    Whoever only asks whether torch is there does not load it, so the finder stays until it is loaded.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = spec and spec.loader
        load = loader.exec_module

        def load_and_play(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            load(module)
            import played_cuda

            played_cuda.install(int(os.environ["PLAYED_GPUS"]))

        loader.exec_module = load_and_play
        return spec


if os.environ.get("PLAYED_GPUS"):
    sys.meta_path.insert(0, _Finder())
