"""The book, on tiny notebooks: strict, resumable, one line for what fails, nothing left running, offline."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import nbformat
import psutil
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import book, catalog, claims, outputs, site
from ddlkit.report import papers as verdicts
from places import PATIENCE_S, alive, wait_for

LAYERS = [
    (
        "markdown",
        "# How layers become ready (core)\n\n* **Objective:** A toy of three layers\n"
        "* **Prerequisites:** none\n* **Time:** 75 minutes; 90 with the exercises\n\n"
        "If $x < y$, then\n\n$$t = \\max_i \\sum_{k=1}^{n} \\frac{a_k}{b}$$",
    ),
    ("parameters", "# What this notebook may be told\ndata = ''\nscale = 1.5"),
    (
        "code",
        "# Draw two bars\n"
        "import sys\nimport pandas as pd\nfrom ddlkit.report import outputs, plots\n"
        "frame = pd.DataFrame({'plan': ['none', 'single'], 'seconds': [scale, int(data) / 3]})\n"
        "fig, ax = plots.canvas(height=2.4)\n"
        "plots.bars(ax, frame.set_index('plan'), label='model', seconds=True)\n"
        "plots.save_figure(fig, 'wb-layers', frame);",
    ),
    ("code", "outputs.record_summary('01_layers', {'longest_s': frame['seconds'].max()})"),
    ("code", "print(sys.executable)"),
    ("code", "frame"),
]
PLAIN = [("markdown", "# Fit"), ("parameters", "data = ''"), ("code", "int(data)")]


def write(path: Path, cells: Sequence[tuple[str, str]]) -> Path:
    v4 = nbformat.v4
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = v4.new_notebook(metadata={"kernelspec": kernel})
    for number, (kind, source) in enumerate(cells):
        cell = v4.new_markdown_cell(source) if kind == "markdown" else v4.new_code_cell(source)
        cell["id"] = f"cell-{number}"
        if kind == "parameters":
            cell["metadata"]["tags"] = ["parameters"]
        notebook.cells.append(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook))
    return path


@dataclass(frozen=True)
class Book:
    """A small book that has been run and exported."""

    folder: Path

    @property
    def notebooks(self) -> list[Path]:
        return book.notebooks(folder=self.folder / "notebooks")

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    @property
    def pages(self) -> Path:
        return self.folder / "site"

    def run(self, data: str = "", at_once: int = 1) -> list[bool]:
        return book.run(
            self.notebooks,
            data,
            executed=self.folder / "executed",
            reports=self.reports,
            inputs=(self.folder / "data",),
            at_once=at_once,
        )

    def export(self) -> Path:
        executed = [self.folder / "executed" / notebook.name for notebook in self.notebooks]
        return site.write(executed, self.pages, self.reports)


@pytest.fixture(scope="module", autouse=True)
def few_claims() -> Iterator[list[claims.Claim]]:
    """Some claims stand for all, whose checks take a minute."""
    few = [claim for claim in claims.load_claims() if claim.id.startswith(("osf-sf", "dag-tab"))]
    evaluated = verdicts.evaluate(few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verdicts, "evaluate", lambda: evaluated)
        yield few


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Book:
    made = Book(tmp_path_factory.mktemp("book"))
    write(made.folder / "notebooks" / "01_layers.ipynb", LAYERS)
    write(made.folder / "notebooks" / "02_fit.ipynb", PLAIN)
    made.run("6", at_once=2)
    made.export()
    return made


def outputs_of(copy: Path) -> str:
    cells = nbformat.read(str(copy), as_version=4).cells
    return json.dumps([cell.get("outputs", []) for cell in cells])


def test_notebooks_run_here_with_their_parameters_and_no_notice(small: Book) -> None:
    said = outputs_of(small.folder / "executed" / "01_layers.ipynb")
    assert sys.executable in said
    assert "stderr" not in said, "ipykernel's notice about unencrypted TCP, or another warning"
    summary = outputs.read_summaries(small.reports)["01_layers"]
    assert summary == {"longest_s": 2.0}
    assert '"6"' in outputs_of(small.folder / "executed" / "02_fit.ipynb")


def test_a_run_with_the_same_inputs_is_kept(
    small: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.run("6") == [True, True]
    assert "book: [2/2] 02_fit kept, ran in" in capsys.readouterr().err


async def execute_here(run: Any, reports: Path) -> None:
    """Run cells in this process: which notebooks are run does not depend on the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(outputs.REPORTS_VARIABLE, str(reports))
        for cell in run.content.cells:
            exec(cell.source, {})


WRITES = "from ddlkit.report import outputs\noutputs.record_summary('a', {'x': 1})"


def test_what_changed_is_run_again_and_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, package = Book(tmp_path), tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(book, "PACKAGE", package)
    monkeypatch.setattr(book._Run, "_execute", execute_here)
    cells = [("parameters", "data = 1"), ("code", WRITES)]
    first = write(tmp_path / "notebooks" / "10_a.ipynb", cells)
    write(tmp_path / "notebooks" / "20_b.ipynb", [("parameters", "other = 1")])
    (tmp_path / "data").mkdir()

    kept = made.run
    assert kept() == [False, False]
    assert kept("2") == [False, True], "its parameter changed"
    write(first, [("parameters", "data = 2"), ("code", WRITES)])
    assert kept("2") == [False, False], "an earlier notebook changed"
    (tmp_path / "data" / "new.csv").write_text("a\n1\n")
    assert kept("2") == [False, False], "the data changed"
    (package / "new.py").write_text("")
    assert kept("2") == [False, False], "the package changed"
    assert kept("2") == [True, True]
    summary = tmp_path / "reports" / "summaries" / "a.json"
    summary.write_text("{}")
    assert kept("2") == [False, True] and json.loads(summary.read_text()) == {"x": 1}
    summary.unlink()
    assert kept("2") == [False, True] and summary.is_file()
    monkeypatch.setattr(book, "_installed", lambda: ["another Python"])
    assert kept("2") == [False, False], "the Python changed"


def test_what_a_failed_notebook_wrote_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book._Run, "_execute", execute_here)
    write(tmp_path / "notebooks" / "10_a.ipynb", [("code", WRITES), ("code", "1 / 0")])
    with pytest.raises(ZeroDivisionError):
        Book(tmp_path).run()
    assert (tmp_path / "executed" / "10_a.ipynb").is_file()
    assert not (tmp_path / "reports").exists()


def test_a_file_that_may_not_grow_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book._Run, "_execute", execute_here)
    write(tmp_path / "notebooks" / "10_a.ipynb", [("code", "1")] * 30)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*10_a\.ipynb: File too large"):
            Book(tmp_path).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_reproduction_tells_numbers_figures_and_verdicts(small: Book) -> None:
    text = site.reproduction(small.reports)
    assert "### 01_layers\n\n| quantity | value |\n|---|--:|\n| longest_s | 2 |" in text
    assert "![wb-layers](figures/wb-layers.png)" in text
    assert "### osf-fig01" not in text
    assert "| osf-sf-example |" in text


def test_a_failing_cell_is_named_and_leaves_its_copy(tmp_path: Path) -> None:
    notebook = write(
        tmp_path / "10_bad.ipynb",
        [
            ("markdown", "# Bad"),
            ("parameters", "data = 1"),
            ("code", "from ddlkit.core.errors import UserError"),
            ("code", "raise ValueError('first line\\nno table of runs in build/measured')"),
            ("code", "print('never')"),
        ],
    )
    with pytest.raises(UserError) as raised:
        book.run([notebook], "2", executed=tmp_path / "e", reports=tmp_path / "r", inputs=())
    copy = tmp_path / "e" / "10_bad.ipynb"
    assert str(raised.value) == (
        "notebook 10_bad.ipynb failed in cell 4: ValueError: no table of runs in build/measured"
        f" (see {copy})"
    )
    assert "first line" in outputs_of(copy)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("import sys\nsys.exit(0)", "failed in cell 2: SystemExit: 0"),
        ("import os\nos._exit(0)", "failed in cell 2: its kernel ended with exit status 0$"),
    ],
)
def test_a_notebook_that_ends_half_way_is_not_done(tmp_path: Path, cell: str, said: str) -> None:
    notebook = write(tmp_path / "10_half.ipynb", [("code", "1"), ("code", cell), ("code", "2")])
    with pytest.raises(UserError, match=said):
        book.run([notebook], executed=tmp_path / "e", reports=tmp_path / "r", inputs=())


@pytest.mark.parametrize(
    ("ends", "said"),
    [("os._exit(3)", "exit status 3$"), ("os.kill(os.getpid(), 9)", "out of memory")],
)
def test_only_a_kernel_that_was_killed_may_have_run_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, said: str
) -> None:
    spec = {
        "display_name": "",
        "language": "",
        "argv": [sys.executable, "-c", f"import os; {ends}"],
    }
    monkeypatch.setattr("ipykernel.kernelspec.get_kernel_dict", lambda: spec)
    notebook = write(tmp_path / "10_a.ipynb", [("code", "1")])
    with pytest.raises(UserError, match=f"10_a.ipynb: its kernel did not start: .*{said}"):
        book.run([notebook], executed=tmp_path / "e", reports=tmp_path / "r", inputs=())


@pytest.mark.fault(
    fault="a notebook never ends",
    injected="a cell that sleeps for a minute, half a second allowed",
    holds="its kernel is ended, one line",
)
def test_a_notebook_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    notebook = write(tmp_path / "10_slow.ipynb", [("code", "import time\ntime.sleep(60)")])
    with pytest.raises(UserError, match=r"10_slow\.ipynb took longer than 500 ms"):
        book.run(
            [notebook], executed=tmp_path / "e", reports=tmp_path / "r", inputs=(), timeout_s=0.5
        )
    assert not [child for child in psutil.Process().children(recursive=True) if _is_kernel(child)]


@pytest.mark.fault(
    fault="a notebook's kernel is killed",
    injected="a cell that sends its kernel SIGKILL",
    holds="one line names the notebook",
)
def test_a_kernel_that_dies_is_one_line(tmp_path: Path) -> None:
    suicide = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    notebook = write(tmp_path / "10_dead.ipynb", [("code", suicide)])
    with pytest.raises(UserError, match=r"10_dead\.ipynb failed in cell 1: its kernel was killed"):
        book.run([notebook], executed=tmp_path / "e", reports=tmp_path / "r", inputs=())


@pytest.mark.fault(
    fault="the book is interrupted or terminated",
    injected="SIGINT, then SIGTERM while a cell sleeps",
    holds="the kernel is ended; the book can be begun again",
)
def test_an_interrupted_book_leaves_no_kernel(tmp_path: Path) -> None:
    """Of two at once, by Ctrl-C, and begun again in the same process, by SIGTERM."""
    pid = "pathlib.Path(str(os.getpid()))"
    tell = (
        f"import os, pathlib, time\nos.chdir({str(tmp_path)!r})\n{pid}.with_suffix('.pid').touch()"
    )
    for name in ("10_slow", "20_slow"):
        write(tmp_path / f"{name}.ipynb", [("code", tell + "\ntime.sleep(60)")])
    program = (
        "import sys\nfrom pathlib import Path\nfrom ddlkit.report import book\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "for turn in range(2):\n"
        "    try:\n"
        "        book.run(book.notebooks(folder=folder), executed=folder / 'e', reports=folder / 'r',"
        " inputs=(), at_once=2)\n"
        "    except (KeyboardInterrupt, SystemExit):\n"
        "        print(turn, flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(book.PACKAGE.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        for turn, number in enumerate((signal.SIGINT, signal.SIGTERM)):
            kernels = _running_kernels(tmp_path, 2)
            process.send_signal(number)
            assert process.stdout is not None and process.stdout.readline() == b"%d\n" % turn
            assert wait_for(lambda: not alive(kernels))  # noqa: B023 # asked at once
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def _running_kernels(folder: Path, count: int) -> list[psutil.Process]:
    """So many kernels that have left their numbers there, which are removed."""
    assert wait_for(lambda: len([*folder.glob("*.pid")]) == count)
    told = [*folder.glob("*.pid")]
    for path in told:
        path.unlink()
    return [psutil.Process(int(path.stem)) for path in told]


def _is_kernel(process: psutil.Process) -> bool:
    try:
        return "ipykernel_launcher" in process.cmdline()
    except psutil.Error:
        return False


def test_a_notebook_that_fails_ends_those_beside_it(tmp_path: Path) -> None:
    """The failing one starts once the other is at work, which would take longer than the test may."""
    told = tmp_path / "at-work"
    slow = f"import pathlib, time\npathlib.Path({str(told)!r}).touch()\ntime.sleep(500)"
    waits = (
        f"import pathlib, time\nwhile not pathlib.Path({str(told)!r}).exists(): time.sleep(0.02)"
    )
    chosen = [
        write(tmp_path / "10_slow.ipynb", [("code", slow)]),
        write(tmp_path / "20_bad.ipynb", [("code", waits), ("code", "1 / 0")]),
    ]
    with pytest.raises(UserError, match=r"20_bad\.ipynb failed in cell 2: ZeroDivisionError"):
        book.run(chosen, executed=tmp_path / "e", reports=tmp_path / "r", inputs=(), at_once=2)
    assert not [child for child in psutil.Process().children(recursive=True) if _is_kernel(child)]


def test_notebooks_are_chosen_by_number_in_reading_order(small: Book, tmp_path: Path) -> None:
    folder = small.folder / "notebooks"
    assert [path.stem for path in small.notebooks] == ["01_layers", "02_fit"]
    assert [path.stem for path in book.notebooks(["02", "01"], folder)] == ["01_layers", "02_fit"]
    with pytest.raises(UserError, match="no notebook '30' in .*: there are 01, 02"):
        book.notebooks(["30"], folder)
    with pytest.raises(UserError, match="no notebook in"):
        book.notebooks(folder=tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"nbformat": 3, "cells": []}'])
def test_a_file_that_is_no_notebook_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "10_bad.ipynb"
    path.write_text(content)
    with pytest.raises(UserError, match="cannot read notebook .*10_bad.ipynb"):
        book.read(path)


def test_executed_copies_need_a_place_to_write(small: Book, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file"):
        book.run(small.notebooks, executed=tmp_path / "file", reports=tmp_path / "r", inputs=())


def test_build_gives_the_notebooks_their_tables_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "bucket_page", lambda: "")
    monkeypatch.setattr(book._Run, "_execute", execute_here)
    for name in ("DATA", "RECORDED"):
        monkeypatch.setattr(store.files, name, tmp_path / name.lower())
    monkeypatch.setattr(store, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(store, "BUILD", tmp_path / "build")
    write(
        tmp_path / "notebooks" / "10_a.ipynb",
        [("parameters", "data = ''")],
    )
    with pytest.raises(UserError, match="holds no recording"):
        book.build(recorded=True, reports=tmp_path / "reports")
    recorded = tmp_path / "recorded" / "cpu-here" / "runs-replay-p2.csv"
    recorded.parent.mkdir(parents=True)
    recorded.write_text("x\n1\n")
    index = book.build(recorded=True, reports=tmp_path / "reports")
    copy = tmp_path / "build" / "executed" / "10_a.ipynb"
    assert "data = 'cpu-here'" in nbformat.read(str(copy), as_version=4).cells[1].source
    assert index == tmp_path / "build" / "site" / "index.html"
    assert (tmp_path / "reports" / "REPRODUCTION.md").is_file()


class _Links(HTMLParser):
    """Tags of a page, what it loads and where it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.loads += [str(given["src"])] if "src" in given else []
        self.loads += [str(given["href"])] if tag == "link" else []
        self.links += [str(given["href"])] if tag == "a" and "href" in given else []


def test_pages_load_nothing_from_elsewhere_and_every_local_link_leads_somewhere(
    small: Book,
) -> None:
    pages = sorted(small.pages.glob("*.html"))
    names = [page.name for page in pages]
    notebooks = ["01_layers.html", "02_fit.html"]
    own = ["buckets", "equations", "gallery", "glossary", "index", "verdicts"]
    own = [f"{name}.html" for name in own]
    assert names == sorted([*notebooks, *own])
    for page in pages:
        found = _Links(page.read_text())
        assert ("script" in found.tags) == (page.name == "buckets.html")
        for target in [*found.loads, *found.links]:
            url = urlparse(target)
            if target not in found.loads and target.startswith("https://doi.org/"):
                continue  # a paper's; nothing is loaded from there
            assert url.scheme in ("", "data"), target
            if url.scheme == "" and url.path:
                assert (small.pages / unquote(url.path)).is_file(), target
    assert "@import" not in (small.pages / "style.css").read_text()


def test_pages_fold_code_and_show_formulas_as_mathml(small: Book) -> None:
    text = (small.pages / "01_layers.html").read_text()
    assert "<summary>Draw two bars</summary>" in text
    assert text.count('<details class="code">') == text.count('class="input_area"')
    assert "$" not in re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    assert "<mrow><mi>x</mi><mo>&lt;</mo>" in text
    assert "<munderover><mo>∑</mo>" in text
    assert text.count("data:image/png;base64,") == 1


def test_a_figure_on_a_page_has_its_caption_as_text_and_for_those_who_cannot_see(
    small: Book,
) -> None:
    text = (small.pages / "01_layers.html").read_text()
    (entry,) = [entry for entry in catalog.load() if entry.id == "wb-layers"]
    assert text.count(f'alt="{entry.caption}"') == 1
    assert text.count(f'<figcaption class="caption">{entry.caption}') == 1
    assert '<a href="figures/wb-layers.csv">numbers</a>' in text


def test_the_start_page_lists_notebooks_with_their_line_and_minutes_papers_and_figures(
    small: Book,
) -> None:
    text = (small.pages / "index.html").read_text()
    assert '01 <a href="01_layers.html">How layers become ready (core)</a>' in text
    assert '<span class="minutes">1 h 15</span><br>A toy of three layers' in text
    assert '<a href="01_layers.html">The core path<small>75 minutes' in text
    for paper in site.cited_papers():
        assert f"<b>{paper['abbreviation']}</b>: {paper['names']}, <i>{paper['title']}</i>" in text
    gallery = (small.pages / "gallery.html").read_text()
    assert '<a href="gallery.html">' in text and '<a href="figures/wb-layers.csv">' in gallery
    images = re.findall("<img[^>]*>", gallery)
    assert images and all(re.search(r'alt="[^"]', image) for image in images)


def test_the_findings_are_the_numbers_of_the_summaries(tmp_path: Path) -> None:
    """With the committed report; each number changes on the page when it changes in its file."""
    summaries = tmp_path / "reports" / "summaries"
    shutil.copytree(store.REPORTS / "summaries", summaries)
    text = site.write([], tmp_path / "site", tmp_path / "reports").read_text()
    template = (Path(site.__file__).parent / "index.html").read_text()
    findings = text.count('<article class="finding">')
    assert findings == template.count('<article class="finding">') == 3
    held = json.loads((summaries / "05-is-it-true.json").read_text())
    changed = {"campaign_cases": 7, "training_median_error": 0.123, "fresh_plans_goals_missed": 4}
    (summaries / "05-is-it-true.json").write_text(json.dumps({**held, **changed}))
    text = site.write([], tmp_path / "site", tmp_path / "reports").read_text()
    assert "real training within 12.3%" in text and "Over\n7 recorded cases" in text
    assert "4 were missed" in text


def test_every_verdict_stands_on_a_page_of_its_own(
    small: Book, few_claims: list[claims.Claim]
) -> None:
    text = (small.pages / "verdicts.html").read_text()
    assert re.search(r'<span class="verdict (\w+)">\1</span>', text)
    assert few_claims and all(f'id="claim-{claim.id}"' in text for claim in few_claims)


def test_what_jupyterlab_hides_is_one_fold(tmp_path: Path) -> None:
    told = ["# T", "**Predict first.** How?", "so", "it is", "## Next", "so too"]
    path = write(tmp_path / "10_a.ipynb", [("markdown", text) for text in told])
    notebook = nbformat.read(str(path), as_version=4)
    for place in (2, 3, 5):
        notebook.cells[place].metadata["jupyter"] = {"source_hidden": True}
    path.write_text(nbformat.writes(notebook))
    body = site.Page(path).body()
    folds = re.findall(r'<details class="answer">.*?</details>', body, re.DOTALL)
    assert ["so" in fold and "it is" in fold for fold in folds] == [True, False]
    assert not any("How?" in fold or "Next" in fold for fold in folds)


@pytest.mark.parametrize("path", book.notebooks(), ids=lambda path: path.stem)
def test_nothing_is_hidden_in_a_notebook_but_what_answers_a_prediction(path: Path) -> None:
    """From behind a cell that asks for one to the next heading, exercise, question or the end."""
    cells, inside = nbformat.read(str(path), as_version=4).cells, False
    for cell in cells:
        text = cell.source if cell.cell_type == "markdown" else ""
        asks = "**Predict first" in text
        tagged = any("exercise-" in tag for tag in cell.metadata.get("tags", ()))
        inside = inside and not (asks or tagged or text.startswith(("#", "**Next:**")))
        hidden = {"code": "outputs_hidden", "markdown": "source_hidden"}[cell.cell_type]
        assert cell.metadata.get("jupyter", {}) == ({hidden: True} if inside else {}), cell.source
        inside = inside or asks


def test_a_notebook_that_someone_works_in_changes_nothing_that_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(outputs.REPORTS_VARIABLE, raising=False)
    assert outputs.reports_dir() == store.BUILD / "reports" != store.REPORTS
    monkeypatch.setenv(outputs.REPORTS_VARIABLE, "elsewhere")
    assert outputs.reports_dir() == Path("elsewhere")


def test_only_a_book_of_recordings_writes_the_published_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPORTS", "BUILD", "NOTEBOOKS"):
        monkeypatch.setattr(store, name, tmp_path / name.lower())
    write(tmp_path / "notebooks" / "10_a.ipynb", [("parameters", "data = ''"), ("code", "data")])
    ran_in: list[Path] = []
    monkeypatch.setattr(book, "run", lambda *_, reports, **__: ran_in.append(reports))
    book.build()
    book.build(recorded=True)
    book.build(recorded=True, reports=tmp_path / "other")
    assert ran_in == [tmp_path / "build" / "reports", tmp_path / "reports", tmp_path / "other"]


def test_the_equations_are_a_page_that_the_index_leads_to(small: Book) -> None:
    assert '<a href="equations.html">' in (small.pages / "index.html").read_text()
    text = (small.pages / "equations.html").read_text()
    for paper in claims.PAPERS:
        assert f'<h2 id="{paper}">' in text
    assert re.search(
        r"<code>ddlkit\.core\.cost\.Piecewise</code> <small>ddlkit/core/cost\.py:\d+", text
    )


@pytest.mark.parametrize("formula", ["\\frac{", "\\foo x", "}", "a & b"])
def test_a_formula_that_cannot_be_shown_is_named(tmp_path: Path, formula: str) -> None:
    notebook = write(tmp_path / "10_math.ipynb", [("markdown", f"# Math\n\nSee ${formula}$.")])
    with pytest.raises(UserError, match="notebook 10_math: cannot show the formula"):
        site.write([notebook], tmp_path / "site", tmp_path / "reports", [])


@pytest.mark.parametrize(
    "html",
    [
        "<script>alert(1)</script>",
        '<img src="https://example.org/a.png">',
        '<link href="//example.org/a.css">',
    ],
)
def test_output_that_would_need_a_network_is_refused(tmp_path: Path, html: str) -> None:
    notebook = write(tmp_path / "10_net.ipynb", [("markdown", f"# Net\n\n{html}\n")])
    with pytest.raises(UserError, match="notebook 10_net would load"):
        site.write([notebook], tmp_path / "site", tmp_path / "reports", [])


@pytest.mark.browser
def test_a_browser_shows_every_image_without_a_console_error(
    small: Book, start_browser: Callable[[], Any]
) -> None:
    driver = start_browser()
    for page in ("index.html", "gallery.html", "01_layers.html"):
        driver.get((small.pages / page).as_uri())
        widths = driver.execute_script("return [...document.images].map(i => i.naturalWidth)")
        # The start page has images of the findings alone, which this book did not make.
        assert (widths or page == "index.html") and min(widths, default=1) > 0, page
        assert driver.get_log("browser") == [], page
        for width in (400, 1200):
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            )
            wide = driver.execute_script(
                "return document.documentElement.scrollWidth - window.innerWidth"
            )
            assert wide <= 0, f"{page} is wider than a window of {width} pixels"
    formula = driver.execute_script(
        "return document.querySelector('math').getBoundingClientRect().width"
    )
    assert formula > 0
