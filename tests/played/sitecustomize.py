"""Found by every Python that has this directory on its PYTHONPATH: plays GPUs, and notes lines that run.

PLAYED_GPUS : how many; torch is patched as soon as it has been imported, by `played_cuda.install`
PLAYED_LINES : a file to which each line of the package PLAYED_PACKAGE is added once, as "file:line", by
    each process when it first runs there: so nothing is lost however a process ends

Without these variables nothing happens, but for the sitecustomize that this one hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
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


def _note_lines(file: str, package: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    left: dict[int, tuple[CodeType, set[int]]] = {}  # by identity: codes of two files may be equal

    def line(frame: FrameType, event: str, _: object) -> Any:
        lines, number = left[id(frame.f_code)][1], frame.f_lineno
        if number in lines:
            lines.discard(number)
            os.write(descriptor, f"{frame.f_code.co_filename}:{number}\n".encode())
        frame.f_trace_lines = bool(lines)  # no event any more where every line has been noted
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if id(code) not in left:
            ours = code.co_filename.startswith(package)
            lines = {number for *_, number in code.co_lines() if number} if ours else set()
            left[id(code)] = code, lines
        return line(frame, event, argument) if left[id(code)][1] else None

    threading.settrace(call)
    sys.settrace(call)


def _run_the_hidden() -> None:
    elsewhere = [path for path in sys.path if str(Path(path).resolve()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_hidden()
if os.environ.get("PLAYED_LINES"):
    _note_lines(os.environ["PLAYED_LINES"], os.environ["PLAYED_PACKAGE"])
if os.environ.get("PLAYED_GPUS"):
    sys.meta_path.insert(0, _Finder())
