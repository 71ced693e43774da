"""The book: run the notebooks in reading order, and build from them the site and REPRODUCTION.md.

Notebooks that measure run one after another (parallel ones would disturb each other's timing), each in a
kernel of this very Python; of the others several run at once. What a notebook made is
kept as long as its inputs are the same; data moves one way, so the inputs of a notebook are all notebooks
up to it, its parameters, the package and the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat

import ddlkit
from ddlkit import store
from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.report import exercises, outputs
from ddlkit.report.source import default_recording
from ddlkit.run.jobs.launch import end
from ddlkit.run.jobs.protocol import unwinding
from ddlkit.run.sessions.session import one_line
from ddlkit.store.files import atomic_write, scratch, writing_in

PACKAGE = Path(ddlkit.__file__).parent
TIMEOUT_S = 600.0
EXECUTED, REPORTS, NOTE = "executed", "reports", "note.json"
"""What lies on the shelf of one run of a notebook."""
AT_ONCE = 4
"""Notebooks that run at the same time, where there are as many cores."""
MEASURING = ("01",)
"""Notebooks that measure while they run, unless all is from recordings: nothing runs beside them."""
KEPT = 2
"""Runs of a notebook that the shelf keeps: from the recordings, and from what was measured here."""
FILES = 128  # open at once in this process, and in a kernel: a loop and a dozen sockets each


def build(
    *,
    recorded: bool = False,
    data: Path | None = None,
    reports: Path | None = None,
    only: Sequence[str] = (),
) -> Path:
    """Run the notebooks, write the site and REPRODUCTION.md; returns the site's index page.

    A notebook's parameter ``data`` is set to the directory ``data``, or with ``recorded`` to the name
    of this machine's recording (or the first one, if there is none of this machine); otherwise the
    notebooks look for tables themselves. ``reports`` is by default reports/, the published record, with
    ``recorded``, else build/reports: what one machine measured today replaces nothing that is published.
    ``only`` selects notebooks by number. Raises UserError.
    """
    from ddlkit.report import site  # takes longer to import than to run a small notebook

    published = store.REPORTS if recorded else store.BUILD / "reports"
    reports = (reports or published).resolve()
    tables = default_recording().name if recorded else str(data.resolve()) if data else ""
    executed, inputs = store.BUILD / "executed", (store.DATA, data or store.BUILD / "measured")
    chosen, at_once = notebooks(only), min(AT_ONCE, os.cpu_count() or 1)
    alone = [] if recorded else [one for one in chosen if one.name[:2] in MEASURING]
    for some, beside in ((alone, 1), ([one for one in chosen if one not in alone], at_once)):
        if some:
            run(some, tables, executed=executed, reports=reports, inputs=inputs, at_once=beside)
    every = [executed / notebook.name for notebook in notebooks()]
    store.atomic_write_text(reports / "REPRODUCTION.md", site.reproduction(reports))
    return site.write([copy for copy in every if copy.is_file()], store.BUILD / "site", reports)


def notebooks(only: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """The notebooks in reading order, or those whose number is in ``only``. Raises UserError.

    >>> [notebook.name for notebook in notebooks(["00"])]
    ['00_a_step_on_paper.ipynb']
    """
    folder = folder or store.NOTEBOOKS
    every = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    numbers = [notebook.name[:2] for notebook in every]
    for number in only:
        if number not in numbers:
            raise UserError(
                f"no notebook {number!r} in {folder}: there are {', '.join(numbers) or 'none'}"
            )
    if not every:
        raise UserError(f"no notebook in {folder}: expected names such as 02_fitting_costs.ipynb")
    return [n for n, number in zip(every, numbers, strict=True) if not only or number in only]


def takes_data(notebook: Path) -> bool:
    """Whether a parameter ``data`` is in the notebook's cell tagged ``parameters``.

    Raises UserError for a file that is no notebook.
    """
    import papermill

    try:
        content = nbformat.read(str(notebook), as_version=nbformat.NO_CONVERT)
        nbformat.validate(content, version=4)
    except Exception as error:  # nbformat raises whatever the content leads to
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read notebook {notebook}: {reason}") from error
    return "data" in papermill.inspect_notebook(str(notebook))


def run(
    chosen: Sequence[Path],
    data: str = "",
    *,
    executed: Path,
    reports: Path,
    shelf: Path | None = None,
    inputs: Sequence[Path] = (store.DATA,),
    timeout_s: float = TIMEOUT_S,
    at_once: int = 1,
) -> list[bool]:
    """Run notebooks in their order; executed copies go to ``executed``, figures to ``reports``.

    ``at_once``: how many may be at work at a time. Those with a parameter ``data`` get it; exercises are
    answered by their own solutions. What they make is kept on the ``shelf``, by default a folder in
    ``executed``: a run with the same inputs, packages and Python takes it from there, whole or not at all.
    ``timeout_s`` is per notebook. Progress, with times, goes to stderr. Ctrl-C and SIGTERM end the kernels
    too. Returns which were kept.

    Raises UserError for a notebook that fails (naming it, the cell and the exception), for one that takes too
    long, and where too few files may be open.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < FILES:
        few = f"{allowed} open files are allowed, kernels of notebooks need up to {FILES}"
        raise UserError(f"{few}: ulimit -n {FILES}")
    at_once = min(at_once, allowed // FILES) if allowed >= 0 else at_once
    parameters = [{"data": data} if data and takes_data(one) else {} for one in chosen]
    package = (path for path in _files(PACKAGE) if path.suffix != ".pyc")
    common = [*_installed(), _digest(package, *map(_files, inputs))]
    shelf, runs = shelf or executed / "kept", []
    for number, (notebook, mine) in enumerate(zip(chosen, parameters, strict=True), 1):
        earlier = [p for p in notebook.parent.glob("*.ipynb") if p.name <= notebook.name]
        solved = exercises.SOLUTIONS / notebook.name
        made_of = json.dumps([common, _digest([*earlier, solved]), mine], sort_keys=True)
        state = hashlib.sha256(made_of.encode()).hexdigest()
        name = f"book: [{number}/{len(chosen)}] {notebook.stem}"
        runs.append(_Run(notebook, mine, executed, reports, shelf, state, name))
    return _done(runs, timeout_s, at_once)


def _done(runs: Sequence[_Run], timeout_s: float, at_once: int) -> list[bool]:
    """Do them all, each in a thread that waits for its kernel; which were kept.

    The first that fails ends the others, and so does a signal: no kernel outlives the call.
    """
    kernels: list[Any] = []
    doing: list[Future[bool]] = []
    with unwinding(signal.SIGTERM):
        pool = ThreadPoolExecutor(at_once)
        try:
            for one in runs:
                doing.append(pool.submit(one.is_kept, timeout_s, kernels))
            wait(doing, return_when=FIRST_EXCEPTION)
            failed = [each for each in doing if each.done() and each.exception()]
            return [each.result() for each in failed or doing]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(each.done() for each in doing):
                _end(kernels)
                time.sleep(0.02)


@dataclass(frozen=True)
class _Run:
    """One notebook to run with its own parameters; ``state`` is the hash of all that it is made of.

    What it makes is put on the ``shelf`` by that hash: the executed copy and what it wrote, with a note of
    their hashes. From there it is laid out in ``executed`` and ``reports``, whosever run it was.
    """

    notebook: Path
    parameters: Mapping[str, Any]
    executed: Path
    reports: Path
    shelf: Path
    state: str
    name: str

    def is_kept(self, timeout_s: float, kernels: list[Any]) -> bool:
        """Lay out what there is or else make it, and tell how long that took; whether it was there."""
        seconds = self.kept_s()
        kept = seconds is not None
        if seconds is None:
            print(f"{self.name} ...", file=sys.stderr, flush=True)
            seconds = self.made_s(timeout_s, kernels)
        verb = "kept, ran in" if kept else "done in"
        print(f"{self.name} {verb} {units.format_seconds(seconds)}", file=sys.stderr, flush=True)
        return kept

    @property
    def copy(self) -> Path:
        """Where it is executed."""
        return self.executed / self.notebook.name

    @property
    def place(self) -> Path:
        """On the shelf: below it ``executed`` and ``reports``, and the note beside them."""
        return self.shelf / self.notebook.stem / self.state

    def kept_s(self) -> float | None:
        """Lay out what an earlier run made of the same; returns how long that took, None if there is none."""
        if not self.place.is_dir():
            return None
        with writing_in(self.place.parent):
            try:
                record = json.loads((self.place / NOTE).read_text(encoding="utf-8"))
                made, seconds = dict(record["made"]), float(record["seconds"])
                if made != _hashes(self.place) or f"{EXECUTED}/{self.notebook.name}" not in made:
                    return None
            except (OSError, ValueError, KeyError, TypeError):
                return None
            self._lay_out(made)
            return seconds

    def _lay_out(self, made: Iterable[str]) -> None:
        for name in made:
            kind, _, rest = name.partition("/")
            path = (self.executed if kind == EXECUTED else self.reports) / rest
            content = (self.place / name).read_bytes()
            if not path.is_file() or path.read_bytes() != content:
                atomic_write(path, content)

    def made_s(self, timeout_s: float, kernels: list[Any]) -> float:
        """Run it, put on the shelf what it made and lay that out; returns how long it took."""
        start = time.monotonic()
        with writing_in(self.executed), writing_in(self.shelf):
            pass  # they are there now, or it is told that they cannot be
        with scratch(self.shelf) as made:
            self._execute(made / REPORTS, timeout_s, start, kernels)
            seconds = time.monotonic() - start
            atomic_write(made / EXECUTED / self.notebook.name, self.copy.read_bytes())
            hashes = _hashes(made)
            record = {"seconds": seconds, "made": hashes}
            store.atomic_write_text(made / NOTE, json.dumps(record, indent=1) + "\n")
            with writing_in(self.place.parent):
                shutil.rmtree(self.place, ignore_errors=True)
                made.rename(self.place)
                self._lay_out(hashes)
                for old in sorted(self.place.parent.iterdir(), key=_time_ns)[:-KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
        return seconds

    def _execute(self, reports: Path, timeout_s: float, start: float, made: list[Any]) -> None:
        import papermill
        import zmq
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        name = f"notebook {self.notebook.name}"
        told = {outputs.REPORTS_VARIABLE: str(reports), exercises.SOLVED_VARIABLE: "1"}
        try:
            with _kernels(self.notebook.resolve().parent, told, made) as kernels:
                papermill.execute_notebook(
                    str(self.notebook.resolve()),
                    str(self.copy.resolve()),
                    parameters=dict(self.parameters),
                    kernel_name="python3",
                    progress_bar=False,
                    kernel_manager_class=kernels,
                    # Per cell in nbclient: each cell gets what is left of the notebook's time.
                    timeout_func=lambda cell: max(1.0, start + timeout_s - time.monotonic()),
                    shutdown_kernel="immediate",
                )
        except PapermillExecutionError as error:
            # Counted from 1 in the notebook; the copy has one more cell where parameters are given.
            number = error.cell_index + 1 - bool(self.parameters)
            lines = [line.strip() for line in str(error.evalue).splitlines() if line.strip()]
            what = ": ".join([error.ename, *lines[-1:]])
            raise UserError(f"{name} failed in cell {number}: {what} (see {self.copy})") from None
        except CellTimeoutError:
            limit = units.format_seconds(timeout_s)
            raise UserError(f"{name} took longer than {limit}: its kernel was ended") from None
        except DeadKernelError:
            raise UserError(f"{name}: its kernel died (out of memory?)") from None
        except (RuntimeError, zmq.ZMQError) as error:
            why = f"{one_line(error)} (out of memory?)"
            raise UserError(f"{name}: its kernel did not start: {why}") from error


def _files(path: Path) -> Iterable[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _digest(*groups: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for group in groups:
        for path in sorted(p for p in group if p.is_file()):
            digest.update(f"{path} {store.sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _installed() -> list[str]:
    """This Python, and every package that it finds with its version."""
    found = {f"{one.name} {one.version}" for one in metadata.distributions()}
    return [sys.version, *sorted(found)]


def _hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file below a place on the shelf by its name there, but of the note."""
    files = sorted(path for path in _files(place) if path != place / NOTE)
    return {path.relative_to(place).as_posix(): store.sha256_file(path) for path in files}


def _time_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


@contextmanager
def _kernels(folder: Path, environment: Mapping[str, str], made: list[Any]) -> Iterator[type]:
    """A kernel manager whose kernels run this interpreter and this package, with ``environment``.

    They run in ``folder``: papermill would change this process's own, which threads have in common. Each
    manager is added to ``made``. Neither kernels nor the file by which they are found outlive the block,
    even if they are about to start.
    """
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    extra = {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    mine: list[Any] = []

    class ThisPython(AsyncKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options, connection_file=str(place / "kernel.json"))
            mine.append(self)
            made.append(self)
            # Otherwise ipykernel 7 writes a notice about unencrypted TCP into the first cell.
            if self.has_trait("transport_encryption") and zmq.has("curve"):
                self.transport_encryption = "auto"
            # A kernel named python3 elsewhere on the search path may belong to another Python.
            self._kernel_spec = KernelSpec(resource_dir="", env=extra, **get_kernel_dict())

        def start_kernel(self, **options: Any) -> Any:
            return super().start_kernel(**options, cwd=str(folder))

    with scratch() as place:
        try:
            yield ThisPython
        finally:
            _end(mine)


def _end(managers: Sequence[Any]) -> None:
    """End the kernels that these have started."""
    started = [getattr(one.provisioner, "process", None) for one in managers]
    end([process for process in started if process])
