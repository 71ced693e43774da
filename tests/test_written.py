"""What is published under reports/ is what the notebooks write."""

from __future__ import annotations

import difflib

import pytest

from conftest import Executed
from ddlkit import store
from ddlkit.report import book, site


@pytest.mark.timeout(1800)  # where no other test has run the notebooks before, all of them
def test_the_committed_report_is_what_the_notebooks_write(executed: Executed) -> None:
    """Compared line by line, and only what differs is shown: the whole would hide the line that does."""
    committed = (store.REPORTS / "REPRODUCTION.md").read_text(encoding="utf-8").splitlines()
    written = site.reproduction(executed(book.notebooks()) / "reports").splitlines()
    assert not [line for line in difflib.unified_diff(committed, written, "committed", "now", n=0)]
