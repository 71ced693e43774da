"""The book, on tiny notebooks: strict, resumable, one line for what fails, nothing left running, offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import nbformat
import psutil
import pytest

from ddlkit import papers, store
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
    (
        "code",
        "# And once more: every figure is shown, not only a notebook's first\n"
        "fig, ax = plots.canvas(height=2.4)\n"
        "plots.bars(ax, frame.set_index('plan'), label='measured', seconds=True)\n"
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


def execute_here(source: str, copy: str, *, kernel_manager_class: Any, **_: object) -> None:
    """The cells of a notebook in this process: which notebooks are run does not depend on the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kernel_manager_class()._kernel_spec.env.items():
            patch.setenv(name, value)
        for cell in nbformat.read(source, as_version=4).cells:
            exec(cell.source, {})
    Path(copy).write_bytes(Path(source).read_bytes())


def test_what_changed_is_run_again_and_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, package = Book(tmp_path), tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(book, "PACKAGE", package)
    monkeypatch.setattr("papermill.execute_notebook", execute_here)
    writes = "from ddlkit.report import outputs\noutputs.record_summary('a', {'x': 1})"
    first = write(
        tmp_path / "notebooks" / "10_a.ipynb", [("parameters", "data = 1"), ("code", writes)]
    )
    write(tmp_path / "notebooks" / "20_b.ipynb", [("parameters", "other = 1")])
    (tmp_path / "data").mkdir()

    kept = made.run
    assert kept() == [False, False]
    assert kept("2") == [False, True], "its parameter changed"
    write(first, [("parameters", "data = 2")])
    assert kept("2") == [False, False], "an earlier notebook changed"
    (tmp_path / "data" / "new.csv").write_text("a\n1\n")
    assert kept("2") == [False, False], "the data changed"
    (package / "new.py").write_text("")
    assert kept("2") == [False, False], "the package changed"
    assert kept("2") == [True, True]
    monkeypatch.setattr(book, "_installed", lambda: ["another Python"])
    assert kept("2") == [False, False], "the Python changed"
    assert kept("2") == [True, True]


@pytest.mark.parametrize("harm", ["nothing", "published", "copy", "damaged", "cut", "note"])
def test_what_is_kept_is_laid_out_whole_or_made_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was made: what is laid out is byte for byte what the run wrote, or it is run again."""
    monkeypatch.setattr("papermill.execute_notebook", execute_here)
    writes = "from ddlkit.report import outputs\noutputs.record_summary('a', {'x': 1})"
    notebook = write(tmp_path / "10_a.ipynb", [("code", writes)])
    shelf, summary = tmp_path / "shelf", Path("summaries") / "a.json"

    def kept(name: str) -> bool:
        executed, reports = tmp_path / f"{name}-executed", tmp_path / name
        (found,) = book.run([notebook], executed=executed, reports=reports, shelf=shelf, inputs=())
        assert (executed / notebook.name).read_bytes() == notebook.read_bytes()
        assert json.loads((reports / summary).read_text()) == {"x": 1}
        return found

    assert not kept("one")
    (place,) = (shelf / notebook.stem).iterdir()
    if harm == "published":
        (tmp_path / "one" / summary).unlink()
    elif harm == "copy":
        (tmp_path / "one-executed" / notebook.name).write_text("{}")
    elif harm == "damaged":
        (place / "reports" / summary).write_text("{}")
    elif harm == "cut":
        (place / "reports" / summary).unlink()
    elif harm == "note":
        (place / book.NOTE).unlink()
    assert kept("one") == (harm in ("nothing", "published", "copy"))
    assert kept("other"), "what one run made another may have"
    assert len([*shelf.iterdir()]) == len([*(shelf / notebook.stem).iterdir()]) == 1


def test_of_the_runs_of_a_notebook_the_last_two_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from the recordings, one from what was measured here: going to and fro runs nothing again."""
    monkeypatch.setattr("papermill.execute_notebook", execute_here)
    made = Book(tmp_path)
    write(tmp_path / "notebooks" / "10_a.ipynb", [("parameters", "data = 1")])
    assert [made.run(data) for data in "12121"] == [[False], [False], [True], [True], [True]]
    assert [made.run(data) for data in "313"] == [[False], [False], [True]]


def test_equal_recordings_give_equal_bytes(small: Book, tmp_path: Path) -> None:
    book.run(small.notebooks[:1], "6", executed=tmp_path / "e", reports=tmp_path / "r", inputs=())
    for reports in (small.reports, tmp_path / "r"):
        store.atomic_write_text(reports / "REPRODUCTION.md", site.reproduction(reports))
    one, other = (
        {path.relative_to(r): path.read_bytes() for path in r.rglob("*") if path.is_file()}
        for r in (small.reports, tmp_path / "r")
    )
    assert one == other
    assert {path.name for path in one} >= {"wb-layers.png", "wb-layers.csv", "REPRODUCTION.md"}


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
    assert not (tmp_path / "e" / "10_bad.json").exists()


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
    with pytest.raises(UserError, match=r"10_dead\.ipynb: its kernel died"):
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


@pytest.mark.parametrize(
    "content", ["", "not json", "[]", '{"cells": 3}', '{"nbformat": 3, "cells": []}']
)
def test_a_file_that_is_no_notebook_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "10_bad.ipynb"
    path.write_text(content)
    with pytest.raises(UserError, match="cannot read notebook .*10_bad.ipynb"):
        book.takes_data(path)


def test_executed_copies_need_a_place_to_write(small: Book, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file"):
        book.run(small.notebooks, executed=tmp_path / "file", reports=tmp_path / "r", inputs=())


def test_build_gives_the_notebooks_their_tables_and_writes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = verdicts.evaluate(), site.bucket_page()  # from what is recorded, not from what follows
    monkeypatch.setattr(verdicts, "evaluate", lambda: known[0])
    monkeypatch.setattr(site, "bucket_page", lambda: known[1])
    for name in ("DATA", "RECORDED"):
        monkeypatch.setattr(store.files, name, tmp_path / name.lower())
    monkeypatch.setattr(store, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(store, "BUILD", tmp_path / "build")
    write(
        tmp_path / "notebooks" / "10_a.ipynb",
        [("parameters", "data = ''"), ("code", "print('from', data)")],
    )
    with pytest.raises(UserError, match="holds no recording"):
        book.build(recorded=True, reports=tmp_path / "reports")
    recorded = tmp_path / "recorded" / "cpu-here" / "runs-replay-p2.csv"
    recorded.parent.mkdir(parents=True)
    recorded.write_text("x\n1\n")
    index = book.build(recorded=True, reports=tmp_path / "reports")
    assert "from cpu-here" in outputs_of(tmp_path / "build" / "executed" / "10_a.ipynb")
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
    assert names == sorted([*notebooks, *own, *(f"slides-{name}" for name in notebooks)])
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
    assert '<math display="inline"><mrow><mi>x</mi><mo>&lt;</mo>' in text
    assert "<munderover><mo>∑</mo>" in text and "<munder><mo>max</mo>" in text
    assert text.count("data:image/png;base64,") == 2, "both figures"


def test_a_figure_on_a_page_has_its_caption_as_text_and_for_those_who_cannot_see(
    small: Book,
) -> None:
    text = (small.pages / "01_layers.html").read_text()
    (entry,) = [entry for entry in catalog.load() if entry.id == "wb-layers"]
    assert text.count(f'alt="{entry.caption}"') == 2
    assert text.count(f'<figcaption class="caption">{entry.caption}') == 2
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


def test_the_papers_are_cited_by_their_keys_and_titles() -> None:
    cited = {paper["abbreviation"]: paper["title"] for paper in site.cited_papers()}
    assert cited == {paper.key: paper.title for paper in papers.load().values()}


def test_every_verdict_stands_on_a_page_of_its_own(small: Book) -> None:
    text = (small.pages / "verdicts.html").read_text()
    assert '<span class="verdict differs">differs</span>' in text
    assert all(f'id="claim-{claim.id}"' in text for claim in claims.load_claims())


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
    for page in ("index.html", "gallery.html", "slides-01_layers.html", "01_layers.html"):
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
