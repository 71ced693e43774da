"""The book: run the notebooks in reading order, and build from them the site and REPRODUCTION.md.

Papermill runs each in a process of its own, with a kernel of this very Python. What a notebook made is kept
as long as its inputs are the same: all notebooks up to it, its parameter, the packages and the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat

import ddlkit
from ddlkit import store
from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.store.files import atomic_write, scratch
from workbook.common import outputs, places
from workbook.course import exercises

PACKAGES = Path(ddlkit.__file__).parent, Path(__file__).parents[1]
"""The library and the workbook: a notebook is run again when either changes."""
TIMEOUT_S = 600.0
AT_ONCE = 4
"""Notebooks that run at the same time, where there are as many cores."""
MEASURING = ("01",)
"""Notebooks that measure while they run, unless all is from recordings: nothing runs beside them."""
COPY = "copy.ipynb"
INSERTED = {
    "injected-parameters",
    "papermill-error-cell-tag",
}  # tags of papermill's own cells
FILES = 128  # open at once in a kernel, which has a loop and a dozen sockets
POLL_S = 0.02


def build(
    *,
    recorded: bool = False,
    data: Path | None = None,
    reports: Path | None = None,
    only: Sequence[str] = (),
) -> Path:
    """Run the notebooks, and write the site, REPRODUCTION.md and GOALS.md.

    Parameters
    ----------
    recorded : bool
        Whether nothing that was measured on this machine is shown. Then ``reports`` is reports/, the
        published record, by default; else it is build/reports.
    data : Path, optional
        The directory of what was measured on this machine, which notebooks show under *On this machine*.
        It is their parameter ``here``.
    reports : Path, optional
        The directory for figures, key numbers and the two reports.
    only : sequence of str
        The numbers of the notebooks to run. Empty means all of them.

    Returns
    -------
    Path
        The front page.

    Raises
    ------
    UserError
        If a notebook fails, or if there is none of a number.
    """
    published = places.REPORTS if recorded else places.BUILD / "reports"
    reports = (reports or published).resolve()
    executed = places.BUILD / "executed"
    measured = (data or places.BUILD / "measured").resolve()
    here = "" if recorded else str(measured)
    inputs = (places.DATA,) if recorded else (places.DATA, measured)
    chosen = notebooks(only)
    alone = [] if recorded else [path for path in chosen if path.name[:2] in MEASURING]
    together = [
        path for path in reversed(chosen) if path not in alone
    ]  # the long ones first
    for group, at_once in ((alone, 1), (together, min(AT_ONCE, os.cpu_count() or 1))):
        if group:
            run(
                group,
                here,
                executed=executed,
                reports=reports,
                inputs=inputs,
                at_once=at_once,
            )
    stored = notebooks()
    copies = [executed / notebook.name for notebook in stored]
    # Importing it takes longer than running a small notebook.
    from workbook.site import website

    there = [copy for copy in copies if copy.is_file()]
    return website.write(there, places.BUILD / "site", reports, stored)


def notebooks(only: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Return the notebooks in reading order, or those whose number is in ``only``. Raises UserError."""
    folder = folder or places.NOTEBOOKS
    paths = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    for number in only:
        if number not in paths:
            raise UserError(
                f"no notebook {number!r} in {folder}: there are {', '.join(paths)}"
            )
    return [path for number, path in paths.items() if not only or number in only]


def run(
    chosen: Sequence[Path],
    here: str = "",
    *,
    executed: Path,
    reports: Path,
    inputs: Sequence[Path] = (places.DATA,),
    timeout_s: float = TIMEOUT_S,
    at_once: int = 1,
) -> list[bool]:
    """Run notebooks, ``at_once`` at a time, and return which were kept as an earlier run had made them.

    Copies go to ``executed``, figures to ``reports``; exercises are answered by their own solutions. However
    the call ends, no process outlives it. Raises UserError for the first notebook that fails (naming it, the
    cell and the exception) or takes longer than ``timeout_s``, and where too few files may be open.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < FILES:
        few = (
            f"{allowed} open files are allowed, kernels of notebooks need up to {FILES}"
        )
        raise UserError(f"{few}: ulimit -n {FILES}")
    files = chain(*map(_files, PACKAGES))
    package = (path for path in files if path.suffix != ".pyc")
    common = [
        sys.version,
        *sorted({f"{p.name} {p.version}" for p in metadata.distributions()}),
    ]
    common += [_digest(*package, *chain(*map(_files, inputs))), here]
    with scratch() as folder:
        runs = []
        for number, notebook in enumerate(chosen, 1):
            earlier = [
                p for p in notebook.parent.glob("*.ipynb") if p.name <= notebook.name
            ]
            others = _digest(*earlier, exercises.SOLUTIONS / notebook.name)
            state = hashlib.sha256(json.dumps([*common, others]).encode()).hexdigest()
            name = f"book: [{number}/{len(chosen)}] {notebook.stem}"
            runs.append(
                _Run(notebook, executed, reports, state, name, folder / str(number))
            )
        kept = [run.is_kept() for run in runs]
        waiting = [
            run for run, is_there in zip(runs, kept, strict=True) if not is_there
        ]
        working: list[_Run] = []
        try:
            while waiting or working:
                while waiting and len(working) < at_once:
                    waiting[0].start(here)
                    working.append(waiting.pop(0))
                time.sleep(POLL_S)
                working = [run for run in working if not run.is_done(timeout_s)]
        finally:
            for run in working:
                run.process.kill()  # a kernel ends when its parent has
                run.process.communicate()
    return kept


@dataclass
class _Run:
    """One notebook to run; ``state`` is the hash of all that it is made of, as in the note by its copy."""

    notebook: Path
    executed: Path
    reports: Path
    state: str
    name: str
    place: Path

    def __post_init__(self) -> None:
        self.copy = self.executed / self.notebook.name
        self.note = self.copy.with_suffix(".json")

    def _tell(self, words: str) -> None:
        print(f"{self.name} {words}", file=sys.stderr, flush=True)

    def _made(self, names: Iterable[str]) -> dict[str, str]:
        paths = {name: self.reports / name if name else self.copy for name in names}
        return {
            name: store.sha256_file(path)
            for name, path in paths.items()
            if path.is_file()
        }

    def is_kept(self) -> bool:
        """Return whether all that an earlier run of the same made is there."""
        note = (
            json.loads(self.note.read_text(encoding="utf-8"))
            if self.note.is_file()
            else {}
        )
        if note.get("state") != self.state or note["made"] != self._made(note["made"]):
            return False
        self._tell(f"kept, ran in {units.format_seconds(float(note['seconds']))}")
        return True

    def start(self, here: str) -> None:
        """Begin a process that runs it by `execute`, and ends when this one does."""
        self._tell("...")
        atomic_write(self.note, b"{}")
        (self.place / "reports").mkdir(parents=True)
        paths = filter(None, (str(PACKAGES[0].parent), os.environ.get("PYTHONPATH")))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            outputs.REPORTS_VARIABLE: f"{self.place}/reports",
            exercises.SOLVED_VARIABLE: "1",
        }
        command = [sys.executable, "-m", __name__, str(self.notebook.resolve()), here]
        self.begun_s = time.monotonic()
        with open(self.place / "log", "wb") as log:
            how: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": log,
                "stderr": log,
            }
            self.process = subprocess.Popen(
                command, cwd=self.place, env=environment, **how
            )

    def is_done(self, timeout_s: float) -> bool:
        """Return whether it has ended; all it wrote is then in place. Raises UserError where it failed."""
        seconds, status = time.monotonic() - self.begun_s, self.process.poll()
        if status is None and seconds <= timeout_s:
            return False
        if (copied := self.place / COPY).is_file():
            atomic_write(self.copy, copied.read_bytes())
        if status != 0:
            log = (
                (self.place / "log")
                .read_text(encoding="utf-8", errors="replace")
                .split("\n")
            )
            what = next(
                (line for line in reversed(log) if line.strip()), _ending(status)
            )
            if status is None:
                what = (
                    f"took longer than {units.format_seconds(timeout_s)}: it was ended"
                )
            raise UserError(f"notebook {self.notebook.name}: {what} (see {self.copy})")
        written = self.place / "reports"
        files = {path.relative_to(written).as_posix(): path for path in _files(written)}
        for name, path in files.items():
            atomic_write(self.reports / name, path.read_bytes())
        note = {
            "state": self.state,
            "seconds": seconds,
            "made": self._made(["", *files]),
        }
        store.atomic_write_text(self.note, json.dumps(note, indent=1) + "\n")
        self._tell(f"done in {units.format_seconds(seconds)}")
        return True


def execute(notebook: str, here: str) -> str:
    """Run a notebook by papermill, with its copy in the working directory.

    Parameters
    ----------
    notebook : str
        The path of the notebook.
    here : str
        The value of the parameter ``here``, for a notebook that has one.

    Returns
    -------
    str
        Why the notebook failed, or an empty string.
    """
    import papermill
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    # By TCP, ipykernel 7 writes a notice about encryption into the first cell. A kernel named python3
    # elsewhere on the search path may belong to another Python.
    how: dict[str, Any] = {"kernel_spec_manager": KernelSpecManager(kernel_dirs=[])}
    file = os.path.abspath("kernel.json")
    kernel = AsyncKernelManager(connection_file=file, transport="ipc", **how)
    content, died = nbformat.read(notebook, as_version=4), ""
    has_here = "here" in papermill.inspect_notebook(content)
    given = {"here": here} if has_here else None
    how = {
        "cwd": str(Path(notebook).parent),
        "kernel_name": "python3",
        "progress_bar": False,
    }
    try:
        # A cell's error is read from the copy, as an exit is, of which papermill says nothing.
        with suppress(papermill.PapermillExecutionError):
            papermill.execute_notebook(content, COPY, given, km=kernel, **how)
    except RuntimeError as error:
        process = getattr(kernel.provisioner, "process", None)
        died = f"{' '.join(str(error).split())}; it {_ending(process.poll() if process else None)}"
    finally:
        run_sync(kernel.shutdown_kernel)(now=True)
    copied = nbformat.read(COPY, as_version=4).cells
    cells = [cell for cell in copied if not INSERTED & {*cell.metadata.tags}]
    begun = [n for n, cell in enumerate(cells, 1) if cell.metadata.papermill.start_time]
    if not begun:
        return f"its kernel did not start: {died}"
    errors = [
        out
        for out in cells[begun[-1] - 1].get("outputs", ())
        if out.output_type == "error"
    ]
    words = [
        f"{error.ename}: {error.evalue.strip().splitlines()[-1]}" for error in errors
    ]
    return f"failed in cell {begun[-1]}: {died or words[0]}" if died or words else ""


def _ending(status: int | None) -> str:
    """Return how a process came to an end."""
    killed = status == -signal.SIGKILL
    return (
        "was killed (out of memory?)" if killed else f"ended with exit status {status}"
    )


def _files(path: Path) -> Iterable[Path]:
    return (
        sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    )


def _digest(*paths: Path) -> str:
    """Return the SHA-256 over the contents of files, and their names."""
    lines = [
        f"{path} {store.sha256_file(path)}" for path in sorted(paths) if path.is_file()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    # Ends with its parent, which holds the other end of the pipe that is read here.
    threading.Thread(
        target=lambda: os._exit(1 + len(os.read(0, 1))), daemon=True
    ).start()
    reason = execute(*sys.argv[1:])
    print(reason, file=sys.stderr, flush=True)
    os._exit(bool(reason))  # sockets to a kernel that was killed are not waited for
