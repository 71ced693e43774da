"""The book: run the notebooks in reading order, and build from them the site and REPRODUCTION.md.

Notebooks that measure run one after another (parallel ones would disturb each other's timing), each in a
kernel of this very Python; of the others several run at once. What a notebook made is
kept as long as its inputs are the same; data moves one way, so the inputs of a notebook are all notebooks
up to it, its parameters, the package and the data.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from ddlkit.store.files import atomic_write, scratch

PACKAGE = Path(ddlkit.__file__).parent
TIMEOUT_S = 600.0
AT_ONCE = 4
"""Notebooks that run at the same time, where there are as many cores."""
MEASURING = ("01",)
"""Notebooks that measure while they run, unless all is from recordings: nothing runs beside them."""
GIVEN = "injected-parameters"  # id and tag of the cell that sets a parameter
FILES = 128  # open at once in this process, and in a kernel: a loop and a dozen sockets each


def build(
    *,
    recorded: bool = False,
    data: Path | None = None,
    reports: Path | None = None,
    only: Sequence[str] = (),
) -> Path:
    """Run the notebooks, write the site and REPRODUCTION.md; return the site's index page.

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
    chosen = notebooks(only)
    alone = [] if recorded else [path for path in chosen if path.name[:2] in MEASURING]
    together = [path for path in chosen if path not in alone]
    for group, at_once in ((alone, 1), (together, min(AT_ONCE, os.cpu_count() or 1))):
        if group:
            run(group, tables, executed=executed, reports=reports, inputs=inputs, at_once=at_once)
    copies = [executed / notebook.name for notebook in notebooks()]
    store.atomic_write_text(reports / "REPRODUCTION.md", site.reproduction(reports))
    return site.write([copy for copy in copies if copy.is_file()], store.BUILD / "site", reports)


def notebooks(only: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Return the notebooks in reading order, or those whose number is in ``only``. Raises UserError.

    >>> [notebook.name for notebook in notebooks(["00"])]
    ['00_a_step_on_paper.ipynb']
    """
    folder = folder or store.NOTEBOOKS
    paths = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if not paths:
        raise UserError(f"no notebook in {folder}: expected names such as 02_fitting_costs.ipynb")
    for number in only:
        if number not in paths:
            raise UserError(f"no notebook {number!r} in {folder}: there are {', '.join(paths)}")
    return [path for number, path in paths.items() if not only or number in only]


def read(notebook: Path) -> Any:
    """Return the content of a notebook. Raises UserError for a file that is none."""
    try:
        content = nbformat.read(str(notebook), as_version=nbformat.NO_CONVERT)
        nbformat.validate(content, version=4)
    except Exception as error:  # nbformat raises whatever the content leads to
        reason = str(error).partition("\n")[0]
        raise UserError(f"cannot read notebook {notebook}: {reason}") from error
    return content


def _give(content: Any, data: str) -> None:
    """Set a notebook's parameter ``data``, if its cell tagged "parameters" has one."""
    for place, cell in enumerate(content.cells if data else ()):
        tagged = "parameters" in cell.metadata.get("tags", ())
        if tagged and re.search(r"^data\s*=", cell.source, re.MULTILINE):
            given = nbformat.v4.new_code_cell(f"# Parameters\ndata = {data!r}", id=GIVEN)
            given.metadata["tags"] = [GIVEN]
            content.cells.insert(place + 1, given)
            break


def run(
    chosen: Sequence[Path],
    data: str = "",
    *,
    executed: Path,
    reports: Path,
    inputs: Sequence[Path] = (store.DATA,),
    timeout_s: float = TIMEOUT_S,
    at_once: int = 1,
) -> list[bool]:
    """Run notebooks in their order; executed copies go to ``executed``, figures to ``reports``.

    ``at_once``: how many may be at work at a time. Those with a parameter ``data`` get it; exercises are
    answered by their own solutions. What an earlier run made of the same inputs, packages and Python is kept,
    whole or not at all. ``timeout_s`` is per notebook. Progress, with times, goes to stderr. Ctrl-C and
    SIGTERM end the kernels too. Returns which were kept.

    Raises UserError for a notebook that fails (naming it, the cell and the exception), for one that takes too
    long, and where too few files may be open.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= allowed < FILES:
        few = f"{allowed} open files are allowed, kernels of notebooks need up to {FILES}"
        raise UserError(f"{few}: ulimit -n {FILES}")
    at_once = min(at_once, allowed // FILES) if allowed >= 0 else at_once
    package = (path for path in _files(PACKAGE) if path.suffix != ".pyc")
    common = [*_installed(), _digest(package, *map(_files, inputs))]
    runs = []
    for number, notebook in enumerate(chosen, 1):
        content = read(notebook)
        _give(content, data)
        earlier = [p for p in notebook.parent.glob("*.ipynb") if p.name <= notebook.name]
        made_of = [*common, _digest([*earlier, exercises.SOLUTIONS / notebook.name])]
        made_of += [cell.source for cell in content.cells]
        state = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
        name = f"book: [{number}/{len(chosen)}] {notebook.stem}"
        runs.append(_Run(notebook, content, executed, reports, state, name, timeout_s))
    return _finish(runs, at_once)


def _finish(runs: Sequence[_Run], at_once: int) -> list[bool]:
    """Do them all; return which were kept. The first that fails ends the others, and so does a signal.

    The loop has a thread of its own: in the main one, clients of kernels would take the signals.
    """
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def finish() -> list[bool]:
        slots, task = asyncio.Semaphore(at_once), asyncio.current_task()
        assert task is not None
        loops.append((asyncio.get_running_loop(), task))
        return await asyncio.gather(*(run.is_kept(slots) for run in runs))

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, finish())
        try:
            return future.result()
        finally:
            signal.signal(signal.SIGTERM, before)
            if not future.done():  # a signal: kernels are ended on the way out
                for loop, task in loops:
                    loop.call_soon_threadsafe(task.cancel)


@dataclass(frozen=True)
class _Run:
    """One notebook to run; ``state`` is the hash of all that it is made of.

    A note beside its executed copy has the state, how long it took, and the hashes of all that it wrote.
    """

    notebook: Path
    content: Any
    executed: Path
    reports: Path
    state: str
    name: str
    timeout_s: float

    async def is_kept(self, slots: asyncio.Semaphore) -> bool:
        """Make what is not there, and tell how long that took; return whether it was there."""
        async with slots:
            seconds = self.kept_s()
            if kept := seconds is not None:
                verb = "kept, ran in"
            else:
                print(f"{self.name} ...", file=sys.stderr, flush=True)
                verb, seconds = "done in", await self.made_s()
            print(
                f"{self.name} {verb} {units.format_seconds(seconds)}", file=sys.stderr, flush=True
            )
            return kept

    def _path(self, name: str) -> Path:
        """Return where a file that it makes lies: its copy, or a file in reports."""
        return (self.executed if name == self.notebook.name else self.reports) / name

    def kept_s(self) -> float | None:
        """Return how long an earlier run of the same took, None where what it made is not all there."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            made = all(_digest([self._path(n)], names=False) == h for n, h in note["made"].items())
            return float(note["seconds"]) if made and note["state"] == self.state else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def _note(self) -> Path:
        return self.executed / f"{self.notebook.stem}.json"

    async def made_s(self) -> float:
        """Run it, then move to its place what it wrote; return how long that took."""
        start, name = time.monotonic(), self.notebook.name
        atomic_write(self._note, b"{}")
        with scratch(self.executed) as written:
            try:
                await self._execute(written)
            finally:
                atomic_write(self._path(name), nbformat.writes(self.content).encode())
            names = [path.relative_to(written).as_posix() for path in _files(written)]
            for each in names:
                content = (written / each).read_bytes()
                if not self._path(each).is_file() or self._path(each).read_bytes() != content:
                    atomic_write(self._path(each), content)
        seconds = time.monotonic() - start
        made = {each: _digest([self._path(each)], names=False) for each in (name, *names)}
        note = {"state": self.state, "seconds": seconds, "made": made}
        store.atomic_write_text(self._note, json.dumps(note, indent=1) + "\n")
        return seconds

    async def _execute(self, reports: Path) -> None:
        """Run the cells in a kernel of this interpreter and package. Raises UserError unless all complete.

        Neither the kernel nor the file by which it is found outlives the call.
        """
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        paths = [path for path in (str(PACKAGE.parent), os.environ.get("PYTHONPATH")) if path]
        own = {outputs.REPORTS_VARIABLE: str(reports), exercises.SOLVED_VARIABLE: "1"}
        environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}
        with scratch() as place:
            # By TCP, ipykernel 7 writes a notice about encryption into the first cell. A kernel named python3
            # elsewhere on the search path may belong to another Python.
            specs, connection = KernelSpecManager(kernel_dirs=[]), str(place / "kernel.json")
            kernel = AsyncKernelManager(
                kernel_spec_manager=specs, connection_file=connection, transport="ipc"
            )
            begun, given = [0], any(cell.get("id") == GIVEN for cell in self.content.cells)
            client = NotebookClient(
                self.content,
                km=kernel,
                record_timing=False,
                on_cell_execute=lambda cell_index, **_: begun.append(cell_index + 1 - given),
            )
            folder = str(self.notebook.resolve().parent)
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    await client.async_execute(cleanup_kc=True, cwd=folder, env=environment)
                return
            except CellExecutionError as error:
                words = [error.ename, *str(error.evalue).strip().splitlines()[-1:]]
                copy = self._path(self.notebook.name)
                what = f"failed in cell {begun[-1]}: {': '.join(words)} (see {copy})"
            except (TimeoutError, DeadKernelError):
                what = f"failed in cell {begun[-1]}: its kernel {_ending(kernel)}"
                if limit.expired():
                    most = units.format_seconds(self.timeout_s)
                    what = f"took longer than {most}: its kernel was ended"
                elif (task := asyncio.current_task()) and task.cancelling():
                    raise asyncio.CancelledError from None  # which nbclient takes for a dead kernel
            except (RuntimeError, OSError) as error:
                why = " ".join(str(error).split())
                why = f"its kernel did not start: {why}; it {_ending(kernel)}"
                raise UserError(f"notebook {self.notebook.name}: {why}") from error
            finally:
                atexit.unregister(client._cleanup_kernel)  # left behind where none starts
                await kernel.shutdown_kernel(now=True)
        raise UserError(f"notebook {self.notebook.name} {what}")


def _ending(kernel: Any) -> str:
    """Return how the process of a kernel came to an end."""
    process = getattr(kernel.provisioner, "process", None)
    status = process.poll() if process is not None else None
    killed = status == -signal.SIGKILL
    return "was killed (out of memory?)" if killed else f"ended with exit status {status}"


def _files(path: Path) -> Iterable[Path]:
    """Return the files below a directory, or the file itself."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _digest(*groups: Iterable[Path], names: bool = True) -> str:
    """Return the SHA-256 over the contents of files, and their names."""
    digest = hashlib.sha256()
    for group in groups:
        for path in sorted(p for p in group if p.is_file()):
            digest.update(f"{path if names else ''} {store.sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _installed() -> list[str]:
    """Return this Python, and every package that it finds with its version."""
    return [sys.version, *sorted({f"{p.name} {p.version}" for p in metadata.distributions()})]
