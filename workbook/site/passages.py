"""The computed passages of README.md and docs/.

Each passage is written from the data that its numbers come from.

A passage stands between two marks, which Markdown does not show:

    <!-- computed: NAME -->
    ...
    <!-- end of NAME -->
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ddlkit import store
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from workbook.common import places, source
from workbook.common.catalog import REFERENCE
from workbook.course import example
from workbook.site.pages import Page, format_minutes
from workbook.validate import accuracy

FILES = (
    "README.md",
    "docs/teaching.md",
    "docs/citing.md",
    "docs/studies.md",
)
"""The files that hold passages, from the root of the project."""

PASSAGES: dict[str, Callable[[], str]] = {}
"""The text of each passage, by its name."""

_PASSAGE = re.compile(
    r"^<!-- computed: (?P<name>[a-z-]+) -->\n.*?^<!-- end of (?P=name) -->$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^<!-- (?:computed:|end of) .*-->$", re.MULTILINE)
_NO_ADDRESS = "REPOSITORY"
"""What stands for the address of the repository while CITATION.cff has none."""
_WIDTH = 120


def _passage(function: Callable[[], str]) -> Callable[[], str]:
    """Register a function as the passage of its name, with dashes for underscores."""
    PASSAGES[function.__name__.replace("_", "-")] = function
    return function


# -- files ---------------------------------------------------------------------------


def filled(text: str) -> str:
    """Return a text with every passage in it computed anew.

    Parameters
    ----------
    text : str
        Markdown. Everything outside the marks stays as it is.

    Raises
    ------
    UserError
        If a passage has a name that nothing computes, or if a mark has no counterpart.
    """
    # A complete passage has a mark before and a mark after it. Any further mark has no
    # counterpart.
    n_paired_marks = 2 * len(_PASSAGE.findall(text))
    if len(_MARK.findall(text)) != n_paired_marks:
        raise UserError(
            "a mark of a computed passage has no counterpart: each passage needs "
            "'<!-- computed: NAME -->' before and '<!-- end of NAME -->' after it"
        )
    return _PASSAGE.sub(_computed, text)


def _computed(match: re.Match[str]) -> str:
    name = match["name"]
    if name not in PASSAGES:
        known = ", ".join(sorted(PASSAGES))
        raise UserError(f"nothing computes the passage {name!r}: name one of {known}")
    text = PASSAGES[name]().strip("\n")
    return f"<!-- computed: {name} -->\n\n{text}\n\n<!-- end of {name} -->"


def outdated(root: Path = places.ROOT) -> list[str]:
    """Return the files under ``root`` in which a passage differs from what is computed."""
    return [name for name in FILES if _read(root / name) != _filled(root / name)]


def write(root: Path = places.ROOT) -> list[str]:
    """Write the computed passages of all files under ``root``, and return what changed."""
    changed = outdated(root)
    for name in changed:
        store.atomic_write_text(root / name, _filled(root / name))
    return changed


def _read(path: Path) -> str:
    if not path.is_file():
        raise UserError(
            f"there is no file {path}: run this in a complete clone of the project"
        )
    return path.read_text(encoding="utf-8")


def _filled(path: Path) -> str:
    try:
        return filled(_read(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _paragraph(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters, without breaking a link."""
    return textwrap.fill(
        " ".join(text.split()),
        _WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )


# -- how long the notebooks take -----------------------------------------------------


def notebooks() -> list[Page]:
    """Return all notebooks of the course, in the order of their numbers."""
    return [Page(path) for path in sorted(places.NOTEBOOKS.glob("*.ipynb"))]


def _core_and_whole(pages: list[Page]) -> tuple[list[Page], list[Page]]:
    """Return the notebooks of the core path, and all that are read and not looked up."""
    core = [page for page in pages if page.core]
    return core, [page for page in pages if page.number != REFERENCE]


def _title(page: Page) -> str:
    return page.title.removesuffix(" (core)")


def _reading(pages: list[Page]) -> str:
    return format_minutes(sum(page.minutes for page in pages))


def _working(pages: list[Page]) -> str:
    return format_minutes(sum(page.working for page in pages))


@_passage
def course_in_brief() -> str:
    """Return with which notebook to begin, and how long the core path and the course take.

    The notebook that is only looked up does not count as part of the course.
    """
    core, whole = _core_and_whole(notebooks())
    return _paragraph(
        "**Learn it.** The core path, which begins with "
        f"[{_title(core[0]).lower()}](notebooks/{core[0].name}.ipynb), has "
        f"{len(core)} notebooks and takes {_reading(core)} to read. The whole course of "
        f"{len(whole)} notebooks takes {_reading(whole)}, and one more notebook is for looking up. "
        "[Teaching](docs/teaching.md) has a plan for a class."
    )


@_passage
def reading_times() -> str:
    """Return the sums of the reading times, and below them the table of all notebooks.

    The sums leave out the notebook REFERENCE, which is not read but looked up.
    """
    pages = notebooks()
    core, whole = _core_and_whole(pages)
    sums = _paragraph(
        f"The core path takes {_reading(core)} to read, and {_working(core)} with the "
        f"exercises. All notebooks but {REFERENCE} take {_reading(whole)}, and "
        f"{_working(whole)} with the exercises. Notebook {REFERENCE} is a reference, "
        "which is looked up."
    )
    head = (
        "| notebook | after it a student can | reading, min | with exercises, min |\n"
        "|---|---|--:|--:|"
    )
    rows = []
    for page in pages:
        link = f"[{page.number} {_title(page)}](../notebooks/{page.name}.ipynb)"
        if page.core:
            link += ", core"
        # The objective of a notebook says what a student can do after it.
        ability = _in_a_table(page.line)
        rows.append(f"| {link} | {ability} | {page.minutes} | {page.working} |")
    return "\n".join([sums, "", head, *rows])


def _in_a_table(sentence: str) -> str:
    """Return a sentence as a cell of a table: it begins small and ends without a full stop."""
    text = sentence.rstrip(".").replace("|", "\\|")
    return text[0].lower() + text[1:]


# -- the running example -------------------------------------------------------------


@_passage
def default_and_best() -> str:
    """Return what PyTorch's default costs GoogLeNet, and what it costs ResNet-50.

    The default is the plan "ddp", and the best plan "exact". The lines break where those of
    docs/teaching.md do. `_paragraph` is not used, because it would break them at 120 characters.
    """
    # The running example is GoogLeNet. Both networks send over its link.
    running = example.load()
    resnet50 = source.open_source().profile("resnet50").workload()
    googlenet_s = _steps_s(running.profiled, running.cost, "ddp", "exact")
    resnet_s = _steps_s(resnet50, running.cost, "ddp", "exact")
    apart = resnet_s["ddp"] / resnet_s["exact"] - 1
    return (
        f"On `buckets.html` the step of GoogLeNet takes {_ms(googlenet_s['ddp'])} under "
        f"PyTorch's default and {_ms(googlenet_s['exact'])} under the best plan. "
        f"With ResNet-50 the two are {apart:.1%}\n"
        "apart. Ask why before you show it: GoogLeNet's last bucket holds nearly all "
        "bytes and can leave only when the backward pass\n"
        "is over."
    )


@_passage
def answer_plans() -> str:
    """Return the third question for a class with its answer, on plans of the running example.

    The plans are PyTorch's default, that of the greedy algorithm MG-WFBP, and the best one.
    """
    plans = ("ddp", "mg_wfbp", "exact")
    running = example.load()
    step_s = _steps_s(running.profiled, running.cost, *plans)
    default, greedy, best = (_ms(step_s[plan]) for plan in plans)
    return (
        "3. **Compute.** Take GoogLeNet as on `buckets.html`. How long is the step under `ddp`, `mg_wfbp` "
        f"and `exact`?\n   *({default}, {greedy} and {best}.)*"
    )


def _steps_s(workload: Workload, cost: MessageCost, *plans: str) -> dict[str, float]:
    """Return the predicted step of a workload under each plan, in seconds by plan."""
    return {
        plan: predict(workload, make_plan(plan, workload, cost), cost).iteration_s
        for plan in plans
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


# -- goals ---------------------------------------------------------------------------


@_passage
def goals_met() -> str:
    """Return how many preset goals were met, and where the most were missed."""
    counts = accuracy.goal_counts()
    # By the name of each set (campaign) that met less than half of its goals, a text such as
    # "1 of 7". The paragraph names the two on sharing a processor.
    poor = counts["poor_sets"]
    missed = counts["sharded_intervals"] - counts["sharded_intervals_met"]
    return _paragraph(
        f"**{counts['preset_met']} of {counts['preset']} preset goals were met.** A goal "
        "is preset if it was committed, with the model and the statistic, before the "
        f"first run. Two sets on sharing a processor met {poor['sharing']} and "
        f"{poor['sharing-again']}, and "
        f"intervals of sharded training missed their goal in {missed} of "
        f"{counts['sharded_intervals']} sets. [The goals page](reports/GOALS.md) lists "
        "all, and how often intervals covered the measurement."
    )


@_passage
def goals_by_standing() -> str:
    """Return how many preset and how many exploratory goals were met.

    A goal is preset if it was committed before the first run. Campaigns that met less than
    half of their preset goals are named, with a link to them.
    """
    counts = accuracy.goal_counts()
    preset = counts["preset"]
    met = counts["preset_met"]
    # A quote is a text such as "1 of 7".
    poor_sets = ", ".join(
        f"`{name}` [{quote}](../reports/GOALS.md#{name})"
        for name, quote in counts["poor_sets"].items()
    )
    return _paragraph(
        f"Of {preset + counts['exploratory']} goals with a number, "
        f"{met + counts['exploratory_met']} were met. "
        f"Of the {preset} preset goals among them, {met} were met and {preset - met} were "
        f"missed. These campaigns met less than half of theirs: {poor_sets}. "
        "The goal that intervals of sharded training (FSDP2) contain the measured medians "
        f"was met in {counts['sharded_intervals_met']} of {counts['sharded_intervals']} "
        "campaigns. Goals that ask only how much was to be measured are listed and not "
        "counted, met or not."
    )


# -- the repository, and how to cite -------------------------------------------------


def citation() -> dict[str, Any]:
    """Return CITATION.cff as a mapping."""
    text = (places.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@_passage
def colab() -> str:
    """Return the cell that installs the workbook in a hosted notebook, such as on Colab."""
    # Without an address, a word stands in its place.
    address = citation().get("repository-code", _NO_ADDRESS)
    return (
        "```python\n"
        f"!git clone -q {address} ddlkit\n"
        "%cd ddlkit/notebooks\n"
        "%pip install -q -r ../requirements-read.txt\n"
        "%pip install -q --no-deps -e ..\n"
        "```"
    )


@_passage
def cite_workbook() -> str:
    """Return the workbook's own entry for BibTeX, in a block of code."""
    cff = citation()
    # The inner braces keep the capitals of the title, and the author's name in one piece.
    fields = {
        "title": f"{{{cff['title']}}}",
        "author": f"{{{cff['authors'][0]['name']}}}",
        "version": cff["version"],
        "url": cff.get("repository-code", ""),
        "note": f"{cff['license']} licence",
    }
    return _fenced([_bibtex("software", "ddlkit", fields)])


@_passage
def cite_papers() -> str:
    """Return the entries for BibTeX of what the workbook reproduces or examines."""
    return _fenced([_reference(entry) for entry in citation()["references"]])


def _reference(entry: dict[str, Any]) -> str:
    """Return one reference of CITATION.cff as an entry for BibTeX."""
    # BibTeX keeps the capitals of a title in braces. `_bibtex` drops the fields that the
    # reference lacks, which are empty here.
    fields = {
        "title": f"{{{entry['title']}}}",
        "author": " and ".join(_author(author) for author in entry["authors"]),
        "booktitle": entry.get("conference", {}).get("name", ""),
        "journal": entry.get("journal", ""),
        "year": entry.get("year", ""),
        "version": entry.get("version", ""),
        "doi": entry.get("doi", ""),
        "url": entry.get("url", ""),
    }
    # The kind follows from where the reference was published.
    if entry["type"] == "software":
        kind = "software"
    elif "conference" in entry:
        kind = "inproceedings"
    elif "journal" in entry:
        kind = "article"
    else:
        kind = "misc"
    return _bibtex(kind, entry["abbreviation"], fields)


def _author(author: dict[str, str]) -> str:
    if "name" in author:  # an organisation, which BibTeX must not split into names
        return f"{{{author['name']}}}"
    return f"{author['family-names']}, {author['given-names']}"


def _bibtex(kind: str, key: str, fields: dict[str, Any]) -> str:
    """Return an entry for BibTeX, without fields that have no value."""
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])


def _fenced(entries: list[str]) -> str:
    return "```bibtex\n" + "\n\n".join(entries) + "\n```"
