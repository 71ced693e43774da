"""Found by every Python that has this directory on its PYTHONPATH: plays GPUs.

PLAYED_GPUS : how many; torch is patched as soon as it has been imported, by `played_cuda.install`. Without
it nothing happens, but for the sitecustomize that this one hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)


class _Loader(importlib.abc.Loader):
    """Loads torch, then has it played."""

    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        import played_cuda

        played_cuda.install(int(os.environ["PLAYED_GPUS"]))

    def __getattr__(self, name: str) -> Any:  # such as get_source
        return getattr(self._real, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch where it is, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_hidden() -> None:
    elsewhere = [path for path in sys.path if str(Path(path).resolve()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_hidden()
if os.environ.get("PLAYED_GPUS"):
    sys.meta_path.insert(0, _Finder())
