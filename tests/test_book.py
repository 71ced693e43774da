"""The book, on tiny notebooks: strict, resumable, one line for what fails, nothing left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from ddlkit.core.errors import UserError
from ddlkit.store.files import scratch
from places import alive, wait_for
from workbook.common import claims, outputs, places
from workbook.site import book, sources, verdicts, website

LAYERS = [
    (
        "markdown",
        "# How layers become ready (core)\n\n* **Objective:** A toy of three layers\n"
        "* **Prerequisites:** none\n* **Time:** 75 minutes; 90 with the exercises\n\n"
        "If $x < y$, then\n\n$$t = \\max_i \\sum_{k=1}^{n} \\frac{a_k}{b}$$",
    ),
    ("parameters", "# What this notebook may be told\nhere = ''\nscale = 1.5"),
    (
        "code",
        "# Draw two bars\n"
        "import sys\nimport pandas as pd\nfrom workbook import plots\nfrom workbook.common import outputs\n"
        "frame = pd.DataFrame({'plan': ['none', 'single'], 'seconds': [scale, int(here) / 3]})\n"
        "fig, ax = plots.canvas(height=2.4)\n"
        "plots.bars(ax, frame.set_index('plan'), label='model')\n"
        "plots.save_figure(fig, 'wb-layers', frame);",
    ),
    (
        "code",
        "outputs.record_summary('01_layers', {'longest_s': frame['seconds'].max()})",
    ),
    ("code", "print(sys.executable)"),
    ("code", "frame"),
]
PLAIN = [("markdown", "# Fit"), ("parameters", "here = ''"), ("code", "int(here)")]


def write(path: Path, cells: Sequence[tuple[str, str]]) -> Path:
    v4 = nbformat.v4
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = v4.new_notebook(metadata={"kernelspec": kernel})
    for number, (kind, source) in enumerate(cells):
        cell = (
            v4.new_markdown_cell(source)
            if kind == "markdown"
            else v4.new_code_cell(source)
        )
        cell["id"] = f"cell-{number}"
        if kind == "parameters":
            cell["metadata"]["tags"] = ["parameters"]
        notebook.cells.append(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook))
    return path


@dataclass(frozen=True)
class Book:
    """A small book in a folder."""

    folder: Path

    def run(
        self, here: str = "", *, timeout_s: float = book.TIMEOUT_S, at_once: int = 1
    ) -> list[bool]:
        return book.run(
            book.notebooks(folder=self.folder / "notebooks"),
            here,
            executed=self.folder / "executed",
            reports=self.folder / "reports",
            inputs=(self.folder / "data",),
            timeout_s=timeout_s,
            at_once=at_once,
        )

    def add(self, name: str, *cells: tuple[str, str]) -> Path:
        return write(self.folder / "notebooks" / name, cells)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """One that has been run."""
    made = Book(tmp_path_factory.mktemp("book"))
    made.add("01_layers.ipynb", *LAYERS)
    made.add("02_fit.ipynb", *PLAIN)
    made.run("6", at_once=2)
    return made


def outputs_of(copy: Path) -> str:
    cells = nbformat.read(str(copy), as_version=4).cells
    return json.dumps([cell.get("outputs", []) for cell in cells])


def test_notebooks_run_here_with_their_parameters_and_no_notice_and_are_kept(
    small: Book,
) -> None:
    said = outputs_of(small.folder / "executed" / "01_layers.ipynb")
    assert sys.executable in said
    assert "stderr" not in said, (
        "ipykernel's notice about unencrypted TCP, or another warning"
    )
    summary = outputs.read_summaries(small.folder / "reports")["01_layers"]
    assert summary == {"longest_s": 2.0}
    assert '"6"' in outputs_of(small.folder / "executed" / "02_fit.ipynb")
    assert small.run("6") == [True, True]


PLAYED = """#!/bin/sh
cp "$3" copy.ipynb
mkdir -p reports/summaries
echo '{"x": 1}' > reports/summaries/$(basename "$3" .ipynb).json
case $3 in *bad*) exit 3 ;; esac
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """One whose notebooks a script plays: which of them are run does not depend on kernels."""
    script = tmp_path / "played.sh"
    script.write_text(PLAYED)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(book, "PACKAGES", (tmp_path / "package",))
    for folder in ("package", "data"):
        (tmp_path / folder).mkdir()
    return Book(tmp_path)


def test_what_changed_is_run_again_and_what_follows_it(
    played: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = played.folder, played.run
    played.add("10_a.ipynb", ("code", "1"))
    played.add("20_b.ipynb", ("code", "1"))
    assert run() == [False, False] and run() == [True, True]
    counted = re.findall(r"\[(\d)/2\] \d", capsys.readouterr().err)
    assert counted == ["1", "2", "1", "2"], "in the order in which they ended"
    assert run("2") == [False, False], "their parameter changed"
    played.add("20_b.ipynb", ("code", "2"))
    assert run("2") == [True, False], "the second one changed"
    played.add("10_a.ipynb", ("code", "2"))
    assert run("2") == [False, False], "an earlier notebook changed"
    for path in (folder / "data" / "new.csv", folder / "package" / "new.py"):
        path.write_text("a")
        assert run("2") == [False, False] and run("2") == [True, True], path
    summary = folder / "reports" / "summaries" / "10_a.json"
    summary.write_text("{}")
    assert run("2") == [False, True] and json.loads(summary.read_text()) == {"x": 1}


def test_what_a_failed_notebook_wrote_is_not_published_but_its_copy(
    played: Book,
) -> None:
    played.add("10_bad.ipynb", ("code", "1"))
    with pytest.raises(UserError, match="10_bad.ipynb: ended with exit status 3"):
        played.run()
    assert (played.folder / "executed" / "10_bad.ipynb").is_file()
    assert not (played.folder / "reports").exists()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        pytest.param(
            "raise ValueError('first\\nno table')",
            "failed in cell 3: ValueError: no table",
            marks=pytest.mark.rehearsal,
        ),
        ("import sys\nsys.exit(0)", "failed in cell 3: SystemExit: 0"),
        pytest.param(
            "import os\nos._exit(0)",
            "failed in cell 3: .*; it ended with exit status 0",
            marks=pytest.mark.rehearsal,
        ),
    ],
)
def test_a_notebook_that_ends_half_way_is_not_done(
    tmp_path: Path, cell: str, said: str
) -> None:
    made = Book(tmp_path)
    made.add(
        "10_half.ipynb",
        ("parameters", "here = 1"),
        ("code", "1"),
        ("code", cell),
        ("code", "2"),
    )
    with pytest.raises(
        UserError, match=rf"10_half.ipynb: {said} \(see .*executed/10_half"
    ):
        made.run("2")
    assert "outputs" in (tmp_path / "executed" / "10_half.ipynb").read_text()


def test_the_cell_where_a_notebook_failed_is_read_from_its_copy() -> None:
    v4 = nbformat.v4
    failed = v4.new_output("error", ename="ValueError", evalue="first\nno table\n")
    cells = [v4.new_code_cell("1"), v4.new_code_cell("2", outputs=[failed])]
    for cell in [*cells, v4.new_code_cell("3")]:
        cell.metadata.update({"tags": [], "papermill": {"start_time": None}})
    for cell in cells:
        cell.metadata.papermill = nbformat.from_dict({"start_time": "12:00"})
    assert book._failure(cells, "") == "failed in cell 2: ValueError: no table"
    died = f"kernel died; it {book._ending(0)}"
    line = "failed in cell 2: kernel died; it ended with exit status 0"
    assert book._failure(cells, died) == line


@pytest.mark.fault(
    fault="a notebook never ends",
    injected="a cell that sleeps for a minute, half a second allowed",
    holds="its kernel is ended, one line",
)
def test_a_notebook_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    # A test before this one may have left the process from which ranks are forked.
    others = set(psutil.Process().children(recursive=True))
    Book(tmp_path).add("10_slow.ipynb", ("code", "import time\ntime.sleep(60)"))
    with pytest.raises(UserError, match=r"10_slow\.ipynb: took longer than 500 ms"):
        Book(tmp_path).run(timeout_s=0.5)
    assert wait_for(lambda: others >= {*psutil.Process().children(recursive=True)})


@pytest.mark.fault(
    fault="a notebook's kernel is killed",
    injected="a cell that sends its kernel SIGKILL",
    holds="one line names the notebook",
)
def test_a_kernel_that_dies_is_one_line(tmp_path: Path) -> None:
    Book(tmp_path).add("10_dead.ipynb", ("code", "import os\nos.kill(os.getpid(), 9)"))
    with pytest.raises(
        UserError, match=r"10_dead\.ipynb: failed in cell 1: .* it was killed \(out of"
    ):
        Book(tmp_path).run()


@pytest.mark.fault(
    fault="the book is interrupted or terminated",
    injected="SIGINT, then SIGKILL while cells of two notebooks sleep",
    holds="the kernels are ended; the book can be begun again",
)
def test_an_interrupted_book_leaves_no_kernel(tmp_path: Path) -> None:
    """Of two at once, by Ctrl-C, and begun again, by SIGKILL."""
    cell = f"import os, pathlib, time\nos.chdir({str(tmp_path)!r})\n"
    cell += "pathlib.Path(f'{os.getpid()}.pid').touch()\ntime.sleep(60)"
    for name in ("10_slow", "20_slow"):
        write(tmp_path / f"{name}.ipynb", [("code", cell)])
    program = (
        "from pathlib import Path\nfrom workbook.site import book\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "how = {'executed': folder / 'e', 'reports': folder / 'r', 'inputs': (), 'at_once': 2}\n"
        "try:\n    book.run(book.notebooks(folder=folder), **how)\n"
        "except KeyboardInterrupt:\n    book.run(book.notebooks(folder=folder), **how)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(book.PACKAGES[0].parent)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            kernels = _running_kernels(tmp_path, 2)
            process.send_signal(number)
            assert wait_for(lambda: not alive(kernels))  # noqa: B023 # asked at once
    finally:
        process.kill()
        process.wait()
    with scratch():
        pass  # of what was killed, the next one sweeps


def _running_kernels(folder: Path, count: int) -> list[psutil.Process]:
    """So many kernels that have left their numbers there, which are removed."""
    assert wait_for(lambda: len([*folder.glob("*.pid")]) == count)
    paths = [*folder.glob("*.pid")]
    for path in paths:
        path.unlink()
    return [psutil.Process(int(path.stem)) for path in paths]


def test_notebooks_are_chosen_by_number_in_reading_order(small: Book) -> None:
    folder = small.folder / "notebooks"
    assert [path.stem for path in book.notebooks(["02", "01"], folder)] == [
        "01_layers",
        "02_fit",
    ]
    with pytest.raises(UserError, match="no notebook '30' in .*: there are 01, 02"):
        book.notebooks(["30"], folder)


def test_build_tells_notebooks_what_was_measured_here_and_writes_everything(
    played: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published report shows nothing that was measured on this machine.

    A few claims stand for all, whose checks take a minute.
    """
    few = [one for one in claims.load_claims() if one.id.startswith("dag-tab")]
    evaluated = verdicts.evaluate(few)
    folder, ran = played.folder, []
    monkeypatch.setattr(verdicts, "evaluate", lambda: evaluated)
    monkeypatch.setattr(sources, "assemble", lambda *given: None)
    monkeypatch.setattr(website, "build", lambda *given: None)
    for name in ("NOTEBOOKS", "BUILD", "REPORTS"):
        monkeypatch.setattr(places, name, folder / name.lower())
    played.add("10_a.ipynb", ("parameters", "here = ''"))
    run = book.run

    def noted(chosen: Any, here: str, **options: Any) -> list[bool]:
        ran.append((here, options["reports"]))
        return run(chosen, here, **options)

    monkeypatch.setattr(book, "run", noted)
    assert book.build(recorded=True) == folder / "build" / "site" / "index.html"
    book.build()
    book.build(data=folder / "mine")
    book.build(recorded=True, reports=folder / "other")
    assert ran == [
        ("", folder / "reports"),
        (str(folder / "build" / "measured"), folder / "build" / "reports"),
        (str(folder / "mine"), folder / "build" / "reports"),
        ("", folder / "other"),
    ]
    assert (folder / "reports" / "REPRODUCTION.md").is_file()
    assert str(folder / "other") in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_notebooks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{tmp_path}: holds no notebooks"):
        book.notebooks(["02"], tmp_path)
