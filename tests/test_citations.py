"""Where a campaign is cited, what it held of its goals is linked to, and quoted as it is."""

from __future__ import annotations

import re
from pathlib import Path

from workbook.common import catalog, outputs, places, source
from workbook.site import pages as site
from workbook.validate import accuracy

TABLES = [accuracy.frozen(name) for name in ("goals", "coverage")]
ANCHORS = {
    re.sub(", | ", "-", name): name for table in TABLES for name in table["campaign"]
}
PAGES = [
    *places.ROOT.glob("*.md"),
    *places.ROOT.glob("docs/*.md"),
    *places.NOTEBOOKS.glob("*.ipynb"),
]


def sections(page: Path) -> list[str]:
    """What stands under each heading; of a notebook all, with campaigns for their names in code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        return re.split(r"^#+ ", text, flags=re.MULTILINE)
    return [
        re.sub(
            r"source\.([A-Z_]+)", lambda name: str(getattr(source, name[1], "")), text
        )
    ]


def cited(text: str) -> set[str]:
    """Campaigns that a text names, but for links and paths, and whatever else is called so."""
    words = {*re.findall(r"(?<![\w/#-])[a-z]+(?:-[a-z]+)+(?![\w/-])", text)}
    return {word for word in words if word in ANCHORS or word.startswith("campaign-")}


def misquoted(words: str, anchor: str) -> bool:
    """Whether a link says another number of goals than the table."""
    quote = re.match(r"\d+ of \d+(?: preset| exploratory)?|(?i:no goal was set)", words)
    return (
        quote is not None
        and quote[0].lower() not in accuracy.outcome(ANCHORS[anchor]).lower()
    )


def test_a_campaign_is_cited_beside_a_link_to_its_goals_and_quoted_as_it_is() -> None:
    drawn = [
        (entry.notebook, name)
        for entry in catalog.load()
        for name in site.recorded_for(entry)
    ]
    met = set()
    for page, text in (
        (path, " ".join(text.split())) for path in PAGES for text in sections(path)
    ):
        links = re.findall(r"\[([^][]*)\]\([^)]*GOALS\.md#(?!coverage)([\w-]+)\)", text)
        wanted = cited(text) | {
            name for notebook, name in drawn if notebook == page.stem
        }
        assert wanted <= {anchor for _, anchor in links}, page
        assert [link for link in links if misquoted(*link)] == []
        met |= wanted
    assert {name for name in ANCHORS if name.startswith("campaign")} <= met
    assert misquoted("3 of 6 preset goals", "campaign-links")


def test_goals_stand_on_their_page_and_live_coverage_where_it_is() -> None:
    page, told = (
        (places.REPORTS / f"{name}.md").read_text()
        for name in ("GOALS", "REPRODUCTION")
    )
    held = outputs.read_summaries(places.REPORTS)
    assert page == site.render("goals.md", {"summaries": held}), (
        "run: python -m workbook build --recorded"
    )
    rows = re.findall(r"^\| (?!goal \||campaign \| replayed or)", page, re.MULTILINE)
    assert len(rows) == sum(map(len, TABLES))
    for campaigns in map(site.recorded_for, catalog.load()):
        assert all(
            f"\n* [{name}](GOALS.md#{name}): {accuracy.outcome(name)}.\n" in told
            for name in campaigns
        )
    held["on-this-machine"] = {
        "training_cases": 4,
        "training_interval_coverage": 0.75,
        "training_half_width_share": 0.1,
    }
    rendered = site.render("goals.md", {"summaries": held})
    assert "| measured here | real | 0.95 | 0.75 | 4 | 0.1 |" in rendered
