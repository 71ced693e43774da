"""The recipes of docs/recipes.md run as they stand, and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from ddlkit import cli

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
TITLE = re.compile(r"^## (.+)\n", re.MULTILINE)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


SHORTER = "--budget 2s", "--budget 0.2s"
"""What a command of the page says, and what it says here."""


class Block(NamedTuple):
    """A block of the page: the file as which to save it, if any, its language and text."""

    file: str
    language: str
    text: str


def recipes() -> dict[str, list[Block]]:
    """Return the blocks of each recipe by its title."""
    _, *parts = TITLE.split(PAGE)
    blocks: dict[str, list[Block]] = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        blocks[title] = []
        for found in FENCE.finditer(text):
            before = text[: found.start()].rstrip()
            saved_as = re.search(r"`([\w.]+)`:$", before)
            file = saved_as[1] if saved_as else ""
            blocks[title].append(Block(file, found[1], found[2]))
    return blocks


def run(block: Block) -> str:
    """Return what a block prints, run in this process, where its packages are imported."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if block.language == "bash":
            program, *words = shlex.split(block.text.replace(*SHORTER))
            assert program == "ddlkit"
            assert cli.main(words) == 0
        else:
            exec(compile(block.text, block.file, "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("title", recipes())
def test_a_recipe_runs_and_prints_what_the_page_shows(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What depends on this machine is not on the page: there the plans are ranked, the exact one first."""
    monkeypatch.chdir(tmp_path)
    printed = ""
    programs = 0
    for block in recipes()[title]:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            assert block.text == printed
        else:
            printed = run(block)
            programs += block.language == "python"
    assert programs == 1 and printed
    assert len(list(tmp_path.iterdir())) > programs
    if title == "Compare plans for my model":
        lines = [line.split() for line in printed.splitlines()]
        times_ms = {name: float(time_ms) for name, _, _, time_ms, _ in lines}
        assert min(times_ms.values()) == times_ms["exact"]
