"""The built site: every link leads somewhere, nothing is loaded from a network, formulas are MathML."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import PIL.Image
import pytest

import ddlkit
from ddlkit.core.errors import UserError
from workbook.common import catalog, claims, places
from workbook.course import example, exercises
from workbook.plots.shown import figure_html
from workbook.site import (
    book,
    buckets,
    extension,
    sources,
    website,
)

pytestmark = pytest.mark.slow
V4 = nbformat.v4
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
LOADS = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
    ("form", "action"),
}
"""Attributes whose address a browser asks for without being told to by a reader."""
NARROW, WIDE = 400, 1200
"""Widths of a window in pixels."""


# -- what is built --------------------------------------------------------------------------------


def probe() -> Any:
    """An executed notebook with one of everything that notebooks have."""
    image = places.REPORTS / "figures" / "wb-start.png"
    figure = V4.new_output("display_data", {"text/html": figure_html(image, 720)})
    printed = V4.new_output("stream", name="stdout", text="A step takes 1 s.\n")
    path = V4.new_output("execute_result", {"text/plain": "PosixPath('a.png')"})
    table = V4.new_output(
        "execute_result",
        {"text/html": "<table><tr>" + "<td>0.12345678</td>" * 30 + "</tr></table>"},
    )
    hidden = {"jupyter": {"outputs_hidden": True}}
    cells = [
        V4.new_markdown_cell(
            "# A probe\n\n* **Objective:** To probe $x < y$.\n* **Prerequisites:** none\n"
            "* **Time:** 5 minutes; 6 with the exercises\n\n$$t = \\max_i \\sum_{k=1}^{n} \\frac{a_k}{b}$$"
        ),
        V4.new_code_cell("import numpy", execution_count=1),
        V4.new_code_cell(
            "def algorithm():\n    return bucket_cap_mb", execution_count=2
        ),
        V4.new_code_cell("plot()", execution_count=3, outputs=[figure, printed, path]),
        V4.new_code_cell("table", execution_count=4, outputs=[table], metadata=hidden),
    ]
    return V4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


@dataclass
class Site:
    """Pages of a folder, read as a browser reads them."""

    folder: Path
    notebooks: list[Path] = field(default_factory=list)

    @cached_property
    def pages(self) -> dict[Path, Elements]:
        """The pages by their files, without the templates that themes leave in _static."""
        files = self.folder.rglob("*.html")
        return {
            path: Elements(path.read_text(encoding="utf-8"))
            for path in sorted(files)
            if "_static" not in path.parts
        }

    def page(self, name: str) -> str:
        return (self.folder / f"{name}.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the ids that a link may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.ids = {given["id"] for _, given in self.found if "id" in given}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The real site, but for outputs: its notebooks as they are stored, and one that was executed."""
    folder = tmp_path_factory.mktemp("site")
    reports = folder / "reports"
    shutil.copytree(places.REPORTS, reports)
    written = folder / "executed" / "99_probe.ipynb"
    written.parent.mkdir()
    written.write_text(nbformat.writes(probe()), encoding="utf-8")
    notebooks = [*book.notebooks(), written]
    built = folder / "built" / "site"
    # Other tests use the other cores meanwhile.
    start = website.write([written], built, reports, notebooks, jobs="1")
    return Site(start.parent, notebooks)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of a site of two pages, to be built with other settings or with faults."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "_extra").mkdir()
    (folder / "notebooks").mkdir()
    start = "# Start\n\n[to it](notebooks/99_probe.ipynb)\n\n```{toctree}\nnotebooks/99_probe\n```\n"
    (folder / "index.md").write_text(start, encoding="utf-8")
    made = V4.new_notebook(
        cells=[V4.new_markdown_cell("# A probe\n\n## A part\n\n[up](#a-part)")],
        metadata={"kernelspec": KERNEL},
    )
    (folder / "notebooks" / "99_probe.ipynb").write_text(nbformat.writes(made))
    return folder


@pytest.fixture(scope="module")
def published(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of two pages, built with an address of a repository."""
    folder = tmp_path_factory.mktemp("published") / "site"
    website.build(tiny, folder, "https://github.com/someone/workbook")
    return folder


# -- links ----------------------------------------------------------------------------------------


def test_the_front_page_has_one_line_on_this_machine_only_if_something_was_run() -> (
    None
):
    assert sources.measured_here({}) == ""
    line = sources.measured_here(
        {
            "training_cases": 8,
            "training_median_paired_error": 0.017,
            "replay_cases": 24,
            "replay_median_error": 0.003,
        }
    )
    assert "1.7% over 8 real trainings and 0.3% over 24 replays" in line


def test_every_link_within_the_site_leads_to_a_page_and_to_a_place_on_it(
    site: Site,
) -> None:
    lost = []
    seen = 0
    for path, page in site.pages.items():
        for tag, given in page.found:
            for name in ("href", "src", "action"):
                address = urlsplit(given.get(name, ""))
                if name not in given or address.scheme or address.netloc:
                    continue
                seen += 1
                target = path
                if address.path:
                    target = (path.parent / unquote(address.path)).resolve()
                place = unquote(address.fragment)
                if not target.exists():
                    lost.append((path.name, tag, given[name]))
                elif target.name == "buckets.html" and place:
                    assert place in buckets.cases()  # its script reads the address
                elif (
                    place
                    and target in site.pages
                    and place not in site.pages[target].ids
                ):
                    lost.append((path.name, tag, given[name]))
    assert lost == []
    assert seen > 1000


def test_a_page_loads_nothing_from_a_network(site: Site) -> None:
    outside = [
        (path.name, given[name])
        for path, page in site.pages.items()
        for tag, given in page.found
        for name in given
        if (tag, name) in LOADS and re.match(r"(?!data:)(\w+:)?//|\w+://", given[name])
    ]
    assert outside == []
    styles = [*site.folder.rglob("*.css")]
    assert styles
    for style in styles:
        text = style.read_text(encoding="utf-8")
        assert re.findall(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", text) == []


def test_links_and_formulas_that_are_wrong_fail_the_build_and_name_their_page(
    tiny: Path, published: Path, tmp_path: Path
) -> None:
    shutil.copytree(published, tmp_path / "site")
    source = tmp_path / "source"
    shutil.copytree(tiny, source)
    wrong = "# Wrong\n\n[a](other.ipynb) [b](99_probe.ipynb#no-part) [c](../data.csv) [d](#none)\n\n$\\foo x$"
    bad = V4.new_notebook(cells=[V4.new_markdown_cell(wrong)])
    (source / "notebooks" / "10_bad.ipynb").write_text(nbformat.writes(bad))
    with (source / "index.md").open("a") as start:
        start.write("\n```{toctree}\nnotebooks/10_bad\n```\n")
    with pytest.raises(UserError) as failed:
        website.build(source, tmp_path / "site")
    line = str(failed.value)
    assert "\n" not in line
    for what in (
        "other.ipynb",
        "no-part",
        "data.csv",
        "none",
        "cannot show the formula",
    ):
        assert re.search(rf"notebooks/10_bad\.ipynb:\d+: WARNING: [^;]*{what}", line), (
            what
        )
    assert "A probe" in (tmp_path / "site" / "index.html").read_text(), (
        "the old one stays"
    )


# -- what a page shows ----------------------------------------------------------------------------


def test_formulas_are_mathml_on_every_page(site: Site) -> None:
    page = html.unescape(site.page("notebooks/99_probe"))
    assert "<mrow><mi>x</mi><mo><</mo>" in page and "<munderover><mo>∑</mo>" in page
    glossary = site.pages[site.folder / "docs" / "GLOSSARY.html"].found
    assert [tag for tag, _ in glossary].count("math") > 10
    for path in site.pages:
        text = re.sub(
            r"<(pre|code|script)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL
        )
        assert re.findall(r"\\(?:alpha|beta|frac|sum|max|cdot|le)\b", text) == [], path


def test_exercises_have_closed_solutions_without_what_checks_them(site: Site) -> None:
    for notebook in site.notebooks[:-1]:
        page = site.pages[site.folder / "notebooks" / f"{notebook.stem}.html"]
        folds = [
            given
            for tag, given in page.found
            if tag == "details" and given.get("class") == "solution"
        ]
        solutions = exercises.read(notebook.stem)
        assert len(folds) == 2 * len(solutions) > 0
        assert all("open" not in given for given in folds)
        text = re.sub(r"<[^>]*>", "", site.page(f"notebooks/{notebook.stem}"))
        assert all(f"answer_{number}" in text for number in solutions)
        assert re.search(r"\b(wrong|fault)_\d\b", text) is None


def test_a_notebook_can_be_downloaded_as_it_is_stored(site: Site) -> None:
    for notebook in site.notebooks:
        name = f"_sources/notebooks/{notebook.name}"
        assert (site.folder / name).read_bytes() == notebook.read_bytes()
        assert f'href="../{name}"' in site.page(f"notebooks/{notebook.stem}")


def test_the_probe_shows_its_algorithm_and_figure_and_collapses_the_rest(
    site: Site,
) -> None:
    page = site.page("notebooks/99_probe")
    assert "hide above-input" in page
    assert "PosixPath" not in page and "base64" not in page
    assert 'src="../reports/figures/wb-start.png"' in page
    assert '<meta name="description" content="To probe' in page
    assert '<meta property="og:title" content="A probe">' in page


def test_the_front_page_opens_on_the_running_example_and_leads_to_the_course(
    site: Site,
) -> None:
    text = site.page("index")
    assert f'src="buckets.html#{example.NETWORK}"' in text
    for plan in ("ddp", "exact"):
        assert f"{1e3 * example.load().iteration_s(plan):.0f} ms" in text
    page = site.pages[site.folder / "index.html"]
    targets = {given.get("href") for tag, given in page.found if tag == "a"}
    assert {f"notebooks/{path.stem}.html" for path in site.notebooks} <= targets
    assert any(tag == "img" for tag, _ in page.found)
    other = site.page("notebooks/00_a_step_on_paper")
    assert 'href="../buckets.html"' in other, "in the sidebar"


def test_the_gallery_and_the_verdicts_have_everything(site: Site) -> None:
    gallery = site.pages[site.folder / "gallery.html"]
    assert {entry.id for entry in catalog.load()} <= gallery.ids
    for entry in catalog.load():
        thumbnail = site.folder / "_images" / f"{entry.id}-small.png"
        assert PIL.Image.open(thumbnail).width == sources.THUMBNAIL_WIDTH
    judged = site.pages[site.folder / "verdicts.html"]
    assert {f"claim-{one.id}" for one in claims.load_claims()} <= judged.ids


def test_the_reference_explains_every_name_that_the_library_exports(site: Site) -> None:
    ids = set[str]()
    for name in sources.REFERENCE:
        ids |= site.pages[site.folder / "reference" / f"{name}.html"].ids
    assert {f"ddlkit.{name}" for name in ddlkit.__all__} <= ids
    listed = (
        group["classes"] + group["functions"] for group in sources.REFERENCE.values()
    )
    assert {name for names in listed for name in names} <= ids


def test_pages_link_to_binder_colab_and_issues_only_with_an_address(
    site: Site, published: Path
) -> None:
    services = re.compile('href="[^"]*(mybinder|colab|/issues/new)')
    address = website.repository_address()
    for path in site.pages:
        assert bool(services.search(path.read_text(encoding="utf-8"))) == bool(address)
    page = (published / "notebooks" / "99_probe.html").read_text()
    assert "mybinder.org/v2/gh/someone/workbook/main" in page
    assert "notebooks/99_probe.ipynb" in page.partition("mybinder")[2][:200]
    assert (
        "colab.research.google.com/github/someone/workbook/blob/main/notebooks/99_probe.ipynb"
        in page
    )
    assert "github.com/someone/workbook/issues/new" in page


def test_colab_opens_what_is_on_github_alone() -> None:
    sphinx: Any = None
    buttons = {}
    for host in ("github", "gitlab"):
        config: Any = SimpleNamespace(
            repository_address=f"https://{host}.com/someone/workbook",
            html_theme_options={},
        )
        extension.link_to_repository(sphinx, config)
        buttons[host] = {*config.html_theme_options["launch_buttons"]}
    assert buttons == {
        "github": {"binderhub_url", "colab_url"},
        "gitlab": {"binderhub_url"},
    }


# -- in a browser ---------------------------------------------------------------------------------

TOO_WIDE = """
const scrolls = (element) => {
  for (let e = element; e && e !== document.body; e = e.parentElement)
    if (/auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX)) return true;
  return false;
};
const outside = [...document.querySelectorAll("main *")].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !scrolls(element);
});
const width = document.documentElement.scrollWidth;
return outside.map((e) => e.outerHTML.slice(0, 100)).concat(width > innerWidth + 1 ? [`page: ${width}`] : []);
"""
SHOW = """
const [text, done] = arguments;
const page = new DOMParser().parseFromString(text, "text/html");
for (const image of page.images) image.loading = "eager";
document.body.replaceWith(document.importNode(page.body, true));
const ends = (image) => new Promise((end) => { image.onload = image.onerror = end; });
const loading = [...document.images].filter((image) => !image.complete);
Promise.all(loading.map(ends)).then(() => done());
"""
"""Replaces the body of a page by that of another page of its folder."""
IS_READ = """
return document.readyState === "complete" && document.querySelector("main *") !== null;
"""
CONTRASTS = """
const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const found = [], text = "p, li, td, th, h1, h2, summary, figcaption, pre, math";
for (const element of document.querySelectorAll(`article :is(${text})`)) {
  if (!element.textContent.trim()) continue;
  const pair = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
  found.push([(pair[0] + 0.05) / (pair[1] + 0.05), element.outerHTML.slice(0, 120)]);
}
return found;
"""


@pytest.fixture
def browser(fresh_browser: Any) -> Iterator[Any]:
    yield fresh_browser
    said = [line["message"] for line in fresh_browser.get_log("browser")]
    # Where a page is read from a disk, no script may read another file for a summary of what it found.
    assert [line for line in said if "SEVERE" in line and "CORS" not in line] == []


def resize(driver: Any, width: int) -> None:
    size = {
        "width": width,
        "height": 900,
        "deviceScaleFactor": 1,
        "mobile": width < 500,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def by_folder(pages: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the pages of each folder by the last of them, which comes first.

    A page that is no page of Sphinx, with a layout of its own, is in no folder.
    """
    folders: dict[Path, list[Path]] = {}
    for path in pages:
        folder = path if path.name == "buckets.html" else path.parent
        folders[folder] = [path, *folders.get(folder, [])]
    return {paths[0]: paths for paths in folders.values()}


@pytest.mark.browser
def test_nothing_is_wider_than_the_page_unless_it_scrolls(
    site: Site, browser: Any, request: pytest.FixtureRequest
) -> None:
    """Each page is in a narrow window, which is made wide for one page of each folder.

    One page of each folder is loaded, and the bodies of the others follow in its place: their
    folder has the same styles and scripts, which take most of the time to load. With ``--long``
    every page is loaded, and the window is made wide for each. What fits a narrow window fits a
    wide one, unless the layout of its folder is another one there.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    alone = request.config.getoption("--long")
    read = WebDriverWait(browser, 20)
    wide = {}
    resize(browser, NARROW)
    for first, paths in by_folder(site.pages).items():
        for path in paths:
            if alone or path == first:
                browser.get(path.as_uri())
            else:
                browser.execute_async_script(SHOW, path.read_text(encoding="utf-8"))
            # The browser may say that it has loaded a page of which it has read the head only.
            read.until(lambda driver: driver.execute_script(IS_READ), str(path))
            if found := browser.execute_script(TOO_WIDE):
                wide[path.name, NARROW] = found[:3]
            if alone or path == first:
                resize(browser, WIDE)
                if found := browser.execute_script(TOO_WIDE):
                    wide[path.name, WIDE] = found[:3]
                resize(browser, NARROW)
            loaded = browser.execute_script(
                "return performance.getEntriesByType('resource').map((one) => one.name)"
            )
            assert all(name.startswith(("file:", "data:")) for name in loaded)
    assert wide == {}


@pytest.mark.browser
def test_the_search_finds_a_word_of_code(site: Site, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site.folder / "search.html").as_uri() + "?q=bucket_cap_mb")
    found = WebDriverWait(browser, 20).until(
        lambda driver: driver.find_elements("css selector", "#search-results li a")
    )
    assert any("99_probe" in (link.get_attribute("href") or "") for link in found)


@pytest.mark.browser
def test_text_can_be_read_in_the_light_and_in_the_dark(
    site: Site, browser: Any
) -> None:
    for name in (
        "index",
        "notebooks/99_probe",
        "notebooks/04_choosing_buckets",
        "verdicts",
    ):
        browser.get((site.folder / f"{name}.html").as_uri())
        for theme in ("light", "dark"):
            browser.execute_script(
                "document.documentElement.dataset.theme = arguments[0];"
                "document.querySelectorAll('details').forEach((one) => one.open = true)",
                theme,
            )
            contrasts = browser.execute_script(CONTRASTS)
            assert len(contrasts) > 5
            assert min(contrasts)[0] >= 4.5, (theme, name, min(contrasts))


@pytest.mark.browser
def test_open_all_opens_folds_and_leaves_solutions_closed(
    site: Site, browser: Any
) -> None:
    page = site.folder / "notebooks" / "00_a_step_on_paper.html"
    browser.get(page.as_uri())
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.execute_script(count, "details.answer[open]") == 0
    browser.find_element("css selector", ".open-all").click()
    assert browser.execute_script(count, "details.answer[open], details.hide[open]") > 3
    assert browser.execute_script(count, "details.answer:not([open])") == 0
    assert browser.execute_script(count, "details.solution") > 0
    assert browser.execute_script(count, "details.solution[open]") == 0


@pytest.mark.browser
def test_the_front_page_plays_a_network_and_gives_it_the_colours_of_the_page(
    site: Site, browser: Any
) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site.folder / "index.html").as_uri())
    frame = browser.find_element("css selector", "iframe.buckets")
    browser.execute_script("arguments[0].scrollIntoView()", frame)
    browser.execute_script("document.documentElement.dataset.theme = 'dark'")
    browser.switch_to.frame(frame)
    running = example.load()
    wait = WebDriverWait(browser, 20)

    def step_s() -> str:
        return str(browser.find_element("id", "iteration").text)

    for planner, button in (("ddp", "ddp"), ("exact", "exact")):
        wait.until(lambda driver: driver.find_elements("id", "ddp"))
        browser.find_element("id", button).click()
        seconds = running.iteration_s(planner)
        assert step_s() == f"{1e3 * seconds:.3g} ms"
    theme = "return document.documentElement.dataset.theme"
    wait.until(lambda driver: driver.execute_script(theme) == "dark")
    higher = browser.execute_script(
        "return document.documentElement.scrollHeight - innerHeight"
    )
    assert higher <= 0, "the frame is as high as what is in it"


def test_whoever_builds_no_site_does_not_wait_for_sphinx() -> None:
    code = "import sys, workbook.cli, workbook.site.book, workbook.site.website; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "workbook" in loaded
    assert loaded.isdisjoint({"sphinx", "docutils", "myst_nb", "latex2mathml"})


def test_the_index_of_the_search_is_of_all_pages(site: Site) -> None:
    text = (site.folder / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert {f"notebooks/{path.stem}" for path in site.notebooks} <= {*index["docnames"]}
