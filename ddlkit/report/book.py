"""The book: run the notebooks in reading order, and build from them the site and REPRODUCTION.md.

Notebooks run one after another (parallel ones would disturb each other's timing), each in a kernel of
this very Python. An executed copy is kept as long as its inputs are the same; data moves one way, so
the inputs of a notebook are all notebooks up to it, its parameters, the package and the data.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddlkit
from ddlkit import store
from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.report import outputs, reproduction, site
from ddlkit.report.source import default_recording
from ddlkit.store.files import writing_in

PACKAGE = Path(ddlkit.__file__).parent
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Executed:
    """A notebook that has run: its executed copy, how long it took, whether that was an earlier run."""

    notebook: Path
    copy: Path
    seconds: float
    kept: bool


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
    published = store.REPORTS if recorded else store.BUILD / "reports"
    reports = (reports or published).resolve()
    chosen = notebooks(only)
    known = {name for notebook in chosen for name in known_parameters(notebook)}
    tables = default_recording().name if recorded else str(data.resolve()) if data else ""
    given = {"data": tables} if tables and "data" in known else {}
    executed, inputs = store.BUILD / "executed", (store.DATA, data or store.BUILD / "measured")
    run(chosen, given, executed=executed, reports=reports, inputs=inputs)
    every = [executed / notebook.name for notebook in notebooks()]
    index = site.write([copy for copy in every if copy.is_file()], store.BUILD / "site", reports)
    reproduction.write(reports)
    return index


def notebooks(only: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """The notebooks in reading order, or those whose number is in ``only``. Raises UserError.

    >>> [notebook.name for notebook in notebooks(["00"])]
    ['00_start_here.ipynb']
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
        raise UserError(f"no notebook in {folder}: expected names such as 20_fit.ipynb")
    return [n for n, number in zip(every, numbers, strict=True) if not only or number in only]


def known_parameters(notebook: Path) -> dict[str, Any]:
    """Name and default of everything assigned in the notebook's cell tagged ``parameters``.

    A default that is not a literal is None. Raises UserError for a file that is no notebook.
    """
    import papermill

    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
        if content["nbformat"] != 4 or not isinstance(content["cells"], list):
            raise ValueError("not in notebook format 4")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read notebook {notebook}: {reason}") from error
    found = papermill.inspect_notebook(str(notebook))
    return {name: _literal(parameter["default"]) for name, parameter in found.items()}


def run(
    chosen: Sequence[Path],
    parameters: Mapping[str, Any] | None = None,
    *,
    executed: Path,
    reports: Path,
    inputs: Sequence[Path] = (store.DATA,),
    timeout_s: float = TIMEOUT_S,
) -> list[Executed]:
    """Run notebooks one after another; executed copies go to ``executed``, figures to ``reports``.

    Each gets those ``parameters`` that it knows. One that is kept from an earlier run must have had
    the same inputs and have written what is still in ``reports``. ``timeout_s`` is per notebook.
    Progress, with times, goes to stderr. Ctrl-C and SIGTERM end the kernel too.

    Raises UserError for a parameter that no notebook knows or whose type is not its default's, for
    a notebook that fails (naming it, the cell and the exception), and for one that takes too long.
    """
    values = dict(parameters or {})
    known = {notebook: known_parameters(notebook) for notebook in chosen}
    _check_parameters(values, known)
    common = _digest(PACKAGE.rglob("*.py"), *map(_files, inputs))
    results = []
    with _terminated_like_interrupted():
        for number, notebook in enumerate(chosen, 1):
            mine = {name: value for name, value in values.items() if name in known[notebook]}
            made_of = json.dumps([common, _digest(_earlier(notebook)), mine], sort_keys=True)
            state = hashlib.sha256(made_of.encode()).hexdigest()
            one = _Run(notebook, mine, executed / notebook.name, reports.resolve(), state)
            progress = f"[{number}/{len(chosen)}] {notebook.stem}"
            result = one.kept()
            if result is None:
                _say(f"{progress} ...")
                result = one.made(timeout_s)
            verb = "kept, ran in" if result.kept else "done in"
            _say(f"{progress} {verb} {units.format_seconds(result.seconds)}")
            results.append(result)
    return results


@dataclass(frozen=True)
class _Run:
    """One notebook to run with its own parameters; ``state`` is the hash of all that it is made of.

    Beside the executed ``copy`` lies a note: state, seconds, and the hash of each file that was written.
    """

    notebook: Path
    parameters: Mapping[str, Any]
    copy: Path
    reports: Path
    state: str

    @property
    def note(self) -> Path:
        return self.copy.with_suffix(".json")

    def kept(self) -> Executed | None:
        """The earlier run, if it had the same inputs and what it wrote is still there unchanged."""
        try:
            record = json.loads(self.note.read_text(encoding="utf-8"))
            newer = self.copy.stat().st_mtime >= self.notebook.stat().st_mtime
            same = newer and record["state"] == self.state
            written, seconds = dict(record["written"]), float(record["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for name, sha256 in written.items():
            path = self.reports / name
            same = same and path.is_file() and store.sha256_file(path) == sha256
        return Executed(self.notebook, self.copy, seconds, kept=True) if same else None

    def made(self, timeout_s: float) -> Executed:
        """Run it, and note what it was made of and what it wrote."""
        with writing_in(self.copy.parent):
            self.note.unlink(missing_ok=True)
        before, start = _stamps(self.reports), time.monotonic()
        self._execute(timeout_s, start)
        seconds = time.monotonic() - start
        after = _stamps(self.reports)
        written = sorted(path for path in after if after[path] != before.get(path))
        hashes = {
            path.relative_to(self.reports).as_posix(): store.sha256_file(path) for path in written
        }
        record = {"state": self.state, "seconds": seconds, "written": hashes}
        store.atomic_write_text(self.note, json.dumps(record, indent=1) + "\n")
        return Executed(self.notebook, self.copy, seconds, kept=False)

    def _execute(self, timeout_s: float, start: float) -> None:
        import papermill
        from nbclient.exceptions import CellTimeoutError, DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        name = f"notebook {self.notebook.name}"
        try:
            papermill.execute_notebook(
                str(self.notebook.resolve()),
                str(self.copy.resolve()),
                parameters=dict(self.parameters),
                kernel_name="python3",
                progress_bar=False,
                cwd=str(self.notebook.resolve().parent),
                kernel_manager_class=_kernel_manager({outputs.REPORTS_VARIABLE: str(self.reports)}),
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


def _check_parameters(values: Mapping[str, Any], known: Mapping[Path, Mapping[str, Any]]) -> None:
    names = sorted({name for parameters in known.values() for name in parameters})
    for name, value in values.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names) or 'none'}"
            raise UserError(f"unknown parameter {name!r}: {hint}")
        for notebook, parameters in known.items():
            if name in parameters and not _fits(value, parameters[name]):
                kind = type(parameters[name]).__name__
                raise UserError(
                    f"parameter {name} of {notebook.name} is {value!r}: must be a {kind}"
                )


def _fits(value: Any, default: Any) -> bool:
    """Whether a value may stand for a default: its type, or a whole number for a fractional one."""
    if default is None:
        return True
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _literal(source: str) -> Any:
    try:
        return ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return None


def _earlier(notebook: Path) -> list[Path]:
    """The notebook and those before it in reading order."""
    return [path for path in sorted(notebook.parent.glob("*.ipynb")) if path.name <= notebook.name]


def _files(path: Path) -> Iterable[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _digest(*groups: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files."""
    digest = hashlib.sha256()
    for group in groups:
        for path in sorted(p for p in group if p.is_file()):
            digest.update(f"{path} {store.sha256_file(path)}\n".encode())
    return digest.hexdigest()


def _stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Inode and modification time of every file below a folder."""
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def _say(line: str) -> None:
    print(f"book: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that the running kernel is ended on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _kernel_manager(environment: Mapping[str, str]) -> type:
    """A kernel manager whose kernels run this interpreter and this package, with ``environment``."""
    import zmq
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    extra = {**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    class ThisPython(AsyncKernelManager):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            # Otherwise ipykernel 7 writes a notice about unencrypted TCP into the first cell.
            if self.has_trait("transport_encryption") and zmq.has("curve"):
                self.transport_encryption = "auto"
            # A kernel named python3 elsewhere on the search path may belong to another Python.
            self._kernel_spec = KernelSpec(resource_dir="", env=extra, **get_kernel_dict())

    return ThisPython
