"""The book: run the notebooks in reading order, and build from them the site and reports.

Papermill runs each notebook in a process of its own, with a kernel of the same Python.
The results of a notebook are kept as long as its inputs are the same: all notebooks up
to this one, its parameter, the packages and the data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import nbformat
import psutil

import ddlkit
from ddlkit import store
from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.store.files import atomic_write, scratch
from workbook.common import outputs, places
from workbook.course import exercises

PACKAGES = Path(ddlkit.__file__).parent, Path(__file__).parents[1]
"""The library and the workbook. A notebook is run again if either changes."""
TIMEOUT_S = 600.0
"""The time that a notebook may take."""
AT_ONCE = 4
"""How many notebooks run at the same time, if there are as many cores."""
MEASURING = ("01",)
"""Notebooks that measure while they run, unless they show recordings only.

No other notebook runs meanwhile."""
COPY = "copy.ipynb"
"""The executed copy in the directory of a process."""
INSERTED = {"injected-parameters", "papermill-error-cell-tag"}
"""The tags of cells that papermill inserts."""
FILES = 128
"""How many files a kernel opens at once: it has an event loop and a dozen sockets."""
POLL_S = 0.02
"""How long the loop that waits for notebooks sleeps."""
KERNEL_ENDS_S = 10.0
"""A kernel that was killed has ended after this time at the latest."""


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
        Whether to show recordings only, and nothing that was measured on this machine.
    data : Path, optional
        The directory of what was measured on this machine, which notebooks show under
        *On this machine*. It is their parameter ``here``.
    reports : Path, optional
        The directory for figures, key numbers and the two reports. By default reports/, the
        published record, if only recordings are shown, or else build/reports.
    only : sequence of str
        The numbers of the notebooks to run. Empty means all of them.

    Returns
    -------
    Path
        The front page.

    Raises
    ------
    UserError
        If a notebook fails, or if no notebook has one of the numbers in ``only``.
    """
    default_reports = places.REPORTS if recorded else places.BUILD / "reports"
    reports = (reports or default_reports).resolve()
    executed = places.BUILD / "executed"
    measured = (data or places.BUILD / "measured").resolve()
    # The empty parameter tells notebooks to show recordings only. Then nothing in ``measured``
    # is an input of theirs.
    here = "" if recorded else str(measured)
    inputs = (places.DATA,) if recorded else (places.DATA, measured)
    chosen = notebooks(only)
    alone = []
    if not recorded:
        # A notebook that measures would be disturbed by others. A file's name begins with the
        # two digits of its number.
        alone = [path for path in chosen if path.name[:2] in MEASURING]
    # The last notebooks take the longest. They begin first, so that none of them is left to run
    # alone at the end.
    together = [path for path in reversed(chosen) if path not in alone]
    run_group = partial(
        run, here=here, executed=executed, reports=reports, inputs=inputs
    )
    if alone:
        run_group(alone, at_once=1)
    if together:
        run_group(together, at_once=min(AT_ONCE, os.cpu_count() or 1))
    # The import is here because it takes longer than running a small notebook.
    from workbook.site import website

    # The site has all notebooks. Those not chosen have a copy if they were run earlier, and are
    # shown without results if not.
    all_notebooks = notebooks()
    copies = [executed / notebook.name for notebook in all_notebooks]
    existing = [copy for copy in copies if copy.is_file()]
    _print("writing the reports and the site, which takes a minute or two")
    front_page = website.write(existing, places.BUILD / "site", reports, all_notebooks)
    _print(f"the reports are in {reports}")
    return front_page


def notebooks(only: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Return notebooks in reading order.

    Parameters
    ----------
    only : sequence of str, optional
        The numbers of the notebooks, of two digits each. By default all.
    folder : Path, optional
        The folder of notebooks. By default notebooks/.

    Raises
    ------
    UserError
        If no notebook has one of the numbers in ``only``.
    """
    folder = folder or places.NOTEBOOKS
    paths = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if only and not paths:
        raise UserError(
            f"{folder}: holds no notebooks: run this in a whole clone of the repository"
        )
    for number in only:
        if number not in paths:
            raise UserError(
                f"no notebook {number!r} in {folder}: there are {', '.join(paths)}: "
                "give two digits each, with commas between, as in 02,04"
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
    """Run those notebooks whose results of an earlier run cannot be kept.

    However the call ends, no process outlives it.

    Parameters
    ----------
    chosen : sequence of Path
        The notebooks. Their exercises are answered by their solutions.
    here : str, optional
        The value of the notebooks' parameter ``here``, the directory of what was measured on
        this machine. Empty means that nothing was.
    executed : Path
        The directory for executed copies.
    reports : Path
        The directory for figures and key numbers.
    inputs : sequence of Path, optional
        The directories of data that notebooks read. If a file in them changes, all notebooks
        are run again.
    timeout_s : float, optional
        The time that a notebook may take.
    at_once : int, optional
        How many notebooks run at the same time.

    Returns
    -------
    list of bool
        For each notebook, whether the results of an earlier run were kept.

    Raises
    ------
    UserError
        If a notebook fails (the error names it, the cell and the exception), if it
        takes longer than ``timeout_s``, or if too few files may be open.
    """
    _check_open_files()
    common = _common_state(here, inputs)
    # Notebooks that run at the same time end in any order. The lines of progress number them in
    # the order in which they end, so that the last line says that all have ended.
    ended = itertools.count(1)
    with scratch() as folder:
        runs = []
        for number, notebook in enumerate(chosen, 1):
            runs.append(
                _Run(
                    notebook=notebook,
                    executed=executed,
                    reports=reports,
                    state=_state(notebook, common),
                    ended=ended,
                    total=len(chosen),
                    directory=folder / str(number),
                )
            )
        # `is_kept` prints a line for each notebook that is kept.
        kept = [run.is_kept() for run in runs]
        pending = [run for run, is_kept in zip(runs, kept, strict=True) if not is_kept]
        _run_all(pending, here, timeout_s, at_once)
    return kept


def _check_open_files() -> None:
    """Raise UserError if a process may not open as many files as a kernel needs."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A negative number means that there is no limit.
    if 0 <= allowed < FILES:
        raise UserError(
            f"{allowed} open files are allowed, but kernels of notebooks need up to {FILES}: "
            f"run ulimit -n {FILES} first"
        )


def _common_state(here: str, inputs: Sequence[Path]) -> list[str]:
    """Return what the results of every notebook depend on, as texts.

    They are the version of Python, the versions of installed distributions, a hash of the
    files of PACKAGES and of the data in ``inputs``, and ``here``, the directory of what was
    measured on this machine, or "". Notebooks take ``here`` as a parameter.
    """
    versions = {f"{dist.name} {dist.version}" for dist in metadata.distributions()}
    files: list[Path] = []
    for package in PACKAGES:
        # Python writes .pyc files while it runs, which must not change the state.
        files += [path for path in _files(package) if path.suffix != ".pyc"]
    for directory in inputs:
        files += _files(directory)
    return [sys.version, *sorted(versions), _digest(*files), here]


def _state(notebook: Path, common: Sequence[str]) -> str:
    """Return the hash of everything that the results of a notebook depend on.

    ``common`` is what `_common_state` returns.
    """
    folder = notebook.parent
    # A notebook may read what the notebooks before it wrote. Names begin with numbers, so that
    # those before it have smaller names.
    up_to_it = [path for path in folder.glob("*.ipynb") if path.name <= notebook.name]
    # Its exercises are answered by its solutions, if it has any.
    notebooks_hash = _digest(*up_to_it, exercises.SOLUTIONS / notebook.name)
    text = json.dumps([*common, notebooks_hash])
    return hashlib.sha256(text.encode()).hexdigest()


def _run_all(
    pending: Sequence[_Run], here: str, timeout_s: float, at_once: int
) -> None:
    """Run notebooks, ``at_once`` at a time in their order, and wait for them.

    ``here`` is the directory of what was measured on this machine, as for `run`.

    Raises
    ------
    UserError
        If one of them fails. All others are ended.
    """
    waiting = [*pending]
    running: list[_Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                waiting[0].start(here)
                running.append(waiting.pop(0))
            time.sleep(POLL_S)
            running = [run for run in running if not run.is_done(timeout_s)]
    finally:
        # If a notebook is still running here, another one failed, or there was an interrupt.
        for run in running:
            run.end()


def _print(line: str) -> None:
    """Print a line of progress on standard error."""
    print(f"workbook: {line}", file=sys.stderr, flush=True)


@dataclass
class _Run:
    """The run of one notebook.

    Attributes
    ----------
    notebook : Path
        The notebook.
    executed, reports : Path
        The directories for its copy, and for its figures and key numbers.
    state : str
        The hash of everything that the results depend on.
    ended : iterator of int
        The next number of a notebook that ends, from 1 on. All runs share this iterator.
    total : int
        How many notebooks there are.
    directory : Path
        The working directory of the process.
    copy, note : Path
        The executed copy in ``executed``, and the JSON file next to it. The note has the
        ``state`` of the last run, the ``seconds`` that it took, and under ``made`` the
        hashes of its results by name.
    """

    notebook: Path
    executed: Path
    reports: Path
    state: str
    ended: Iterator[int]
    total: int
    directory: Path

    def __post_init__(self) -> None:
        self.copy = self.executed / self.notebook.name
        self.note = self.copy.with_suffix(".json")

    def _print_end(self, words: str) -> None:
        """Print how many notebooks have ended with this one, and how it did."""
        progress = f"[{next(self.ended)}/{self.total}]"
        _print(f"{progress} {self.notebook.stem} {words}")

    def _hashes(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hashes of those results that exist, by name.

        Parameters
        ----------
        names : iterable of str
            Names of files in the reports directory, or "" for the executed copy.
        """
        hashes = {}
        for name in names:
            path = self.reports / name if name else self.copy
            if path.is_file():
                hashes[name] = store.sha256_file(path)
        return hashes

    def is_kept(self) -> bool:
        """Return whether the results of an earlier run are kept, and print it if so.

        They are kept if that run had the same inputs and none of its results was changed.
        """
        if not self.note.is_file():
            return False
        note = json.loads(self.note.read_text(encoding="utf-8"))
        # The state is missing if the run failed or was interrupted.
        if note.get("state") != self.state:
            return False
        # The hashes differ if a result was changed or removed since that run.
        if note["made"] != self._hashes(note["made"]):
            return False
        self._print_end(f"kept, ran in {units.format_seconds(float(note['seconds']))}")
        return True

    def start(self, here: str) -> None:
        """Start a process that runs the notebook, and that ends when this process ends.

        Parameters
        ----------
        here : str
            The directory of what was measured on this machine, or "" if nothing was. It
            becomes the notebook's parameter of this name.
        """
        _print(f"running {self.notebook.stem}")
        # Until the run has ended, a note without a state says that results may be incomplete.
        atomic_write(self.note, b"{}")
        # The notebook writes into a directory of its own, which is published if it succeeds.
        (self.directory / "reports").mkdir(parents=True)
        # The process runs `execute`, whose arguments are the last two words of the command.
        command = [sys.executable, "-m", __name__, str(self.notebook.resolve()), here]
        self.begun_s = time.monotonic()
        with open(self.directory / "log", "wb") as log:
            # The process waits for the end of its standard input, which comes when this process
            # ends.
            self.process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the process that runs the notebook."""
        # The process runs in another directory, where it must import the same packages.
        search_path = [str(PACKAGES[0].parent)]
        if os.environ.get("PYTHONPATH"):
            search_path.append(os.environ["PYTHONPATH"])
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(search_path),
            outputs.REPORTS_VARIABLE: f"{self.directory}/reports",
            # Exercises are answered by their solutions.
            exercises.SOLVED_VARIABLE: "1",
        }

    def end(self) -> None:
        """End the process and its kernel, and wait until both have ended.

        The kernel would end by itself some time after its parent. But while the kernel
        still writes, the folder of the run cannot be removed.
        """
        kernels: list[psutil.Process] = []
        # The process may have ended by itself meanwhile. Then it has no children.
        with suppress(psutil.NoSuchProcess):
            kernels = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        # This waits for the process, and closes its standard input.
        self.process.communicate()
        for kernel in kernels:
            # The kernel may have ended by itself, too.
            with suppress(psutil.NoSuchProcess):
                kernel.kill()
        psutil.wait_procs(kernels, timeout=KERNEL_ENDS_S)

    def is_done(self, timeout_s: float) -> bool:
        """Return whether the process has ended, and publish its results if so.

        Raises
        ------
        UserError
            If the notebook failed, or takes longer than ``timeout_s``. In the second case the
            process is still running, and `_run_all` ends it.
        """
        seconds = time.monotonic() - self.begun_s
        # The exit status is None while the process is running.
        status = self.process.poll()
        if status is None and seconds <= timeout_s:
            return False
        # The copy is also kept if the notebook failed, because it shows where.
        copied = self.directory / COPY
        if copied.is_file():
            atomic_write(self.copy, copied.read_bytes())
        if status is None:
            limit = units.format_seconds(timeout_s)
            self._fail(f"took longer than {limit}: it was ended")
        if status != 0:
            # The log is empty if the process was killed.
            self._fail(self._last_line() or _ending(status))
        self._publish(seconds)
        self._print_end(f"done in {units.format_seconds(seconds)}")
        return True

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(f"notebook {self.notebook.name}: {reason} (see {self.copy})")

    def _last_line(self) -> str:
        """Return the last line of the log, which says why the notebook failed."""
        log = (self.directory / "log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in log.split("\n") if line.strip()]
        return lines[-1] if lines else ""

    def _publish(self, seconds: float) -> None:
        """Copy what the notebook wrote to the reports, and write the note.

        ``seconds`` is how long the run took.
        """
        written = self.directory / "reports"
        names = []
        for path in _files(written):
            name = path.relative_to(written).as_posix()
            atomic_write(self.reports / name, path.read_bytes())
            names.append(name)
        note = {
            "state": self.state,
            "seconds": seconds,
            # The empty name is the executed copy.
            "made": self._hashes(["", *names]),
        }
        store.atomic_write_text(self.note, json.dumps(note, indent=1) + "\n")


def execute(notebook: str, here: str) -> str:
    """Run a notebook by papermill, which writes the executed copy into the working directory.

    Parameters
    ----------
    notebook : str
        The path of the notebook.
    here : str
        The directory of what was measured on this machine, or "" if nothing was. It becomes
        the notebook's parameter of this name, if the notebook has one.

    Returns
    -------
    str
        Why the notebook failed, or an empty string.
    """
    import papermill
    from jupyter_core.utils import run_sync

    content = nbformat.read(notebook, as_version=4)
    # Papermill would warn of a parameter that the notebook does not have.
    has_here = "here" in papermill.inspect_notebook(content)
    # An installed kernel "python3" may belong to another Python.
    kernel = _own_kernel()
    died = ""
    try:
        # The exception is dropped, because _failure reads the error of a cell from the copy.
        with suppress(papermill.PapermillExecutionError):
            papermill.execute_notebook(
                content,
                COPY,
                {"here": here} if has_here else None,
                km=kernel,
                cwd=str(Path(notebook).parent),
                # The name of the kernel that ``kernel`` manages.
                kernel_name="python3",
                progress_bar=False,
            )
    except RuntimeError as error:
        # The kernel died, or did not start.
        process = getattr(kernel.provisioner, "process", None)
        # A kernel that did not start may have no process, and one that no longer answers may
        # still run. Both have no exit status, and the message says "exit status None".
        status = process.poll() if process else None
        died = f"{' '.join(str(error).split())}; it {_ending(status)}"
    finally:
        run_sync(kernel.shutdown_kernel)(now=True)
    return _failure(nbformat.read(COPY, as_version=4).cells, died)


def _own_kernel() -> Any:
    """Return the manager of a kernel "python3" that runs this Python.

    "python3" is the name that a manager uses by default. An installed kernel of this name may
    belong to another Python.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    return AsyncKernelManager(
        # With the transport TCP, ipykernel 7 would write a notice about encryption into the first
        # cell.
        transport="ipc",
        # The sockets of ipc are files whose names begin with this path. It is in the working
        # directory, which belongs to this run alone. It must be absolute, because the kernel is
        # started in another directory.
        connection_file=os.path.abspath("kernel.json"),
        # Without any kernel_dirs, no installed kernel is found, and "python3" stands for the
        # ipykernel of this Python.
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
    )


def _failure(copied: Sequence[Any], died: str) -> str:
    """Return why an executed notebook failed, or an empty string if it did not fail.

    Parameters
    ----------
    copied : sequence of NotebookNode
        The cells of the executed copy.
    died : str
        How the kernel died, or an empty string if it did not die.
    """
    # Cells are counted as in the stored notebook, which lacks those that papermill inserted.
    cells = [cell for cell in copied if INSERTED.isdisjoint(cell.metadata.tags)]
    # Papermill notes when it begins a cell, and begins none after a failure. If the notebook
    # failed, it did so in the cell that was begun last. Numbers of cells start at 1.
    begun = [n for n, cell in enumerate(cells, 1) if cell.metadata.papermill.start_time]
    if not begun:
        return f"its kernel did not start: {died}"
    number = begun[-1]
    if died:
        return f"failed in cell {number}: {died}"
    for output in cells[number - 1].get("outputs", ()):
        if output.output_type == "error":
            # The last line of a message says most.
            last_line = output.evalue.strip().splitlines()[-1]
            return f"failed in cell {number}: {output.ename}: {last_line}"
    return ""


def _ending(status: int | None) -> str:
    """Return how a process with an exit status ended."""
    if status == -signal.SIGKILL:
        return "was killed (out of memory?)"
    return f"ended with exit status {status}"


def _files(path: Path) -> Iterable[Path]:
    """Return all files of a directory in order, or the path itself if it is a file."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _digest(*paths: Path) -> str:
    """Return the SHA-256 of the names and the contents of those files that exist."""
    lines = []
    for path in sorted(paths):
        if path.is_file():
            lines.append(f"{path} {store.sha256_file(path)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _end_with_parent() -> None:
    """Wait until the parent has ended, and end this process."""
    # The parent holds the other end of this pipe, and writes nothing into it.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reason = execute(*sys.argv[1:])
    print(reason, file=sys.stderr, flush=True)
    # A normal exit would wait for sockets to a kernel that was killed.
    os._exit(1 if reason else 0)
