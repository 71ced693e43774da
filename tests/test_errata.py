"""Every erratum has a verdict and a test of its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from workbook.common import places

ENTRY = re.compile(r"^(?:## )?(\d+)\. ", re.MULTILINE)
VERDICT = re.compile(r"\*(proven|refuted|cannot\s+be\s+decided)", re.IGNORECASE)
ERRATA = sorted((places.DATA / "papers").glob("*/errata.md"))


@pytest.mark.parametrize("path", ERRATA, ids=lambda path: str(path.parent.name))
def test_every_erratum_has_its_test(path: Path) -> None:
    entries = ENTRY.split(path.read_text(encoding="utf-8"))[1:]
    numbers, bodies = entries[::2], entries[1::2]
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    named = [name for body in bodies for name in re.findall(r"`(test_\w+)`", body)]
    assert len(set(named)) == len(named) == len(bodies)
    assert all(VERDICT.search(body) for body in bodies)
    if not entries:
        return
    tests_file = Path(__file__).with_name(f"test_errata_{path.parent.name}.py")
    source = tests_file.read_text(encoding="utf-8")
    functions = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert set(named) <= set(functions)
