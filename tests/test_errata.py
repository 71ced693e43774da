"""Every erratum has its test, and every test of errata its erratum."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ddlkit import store

VERDICT = re.compile(r"\*(Proven|Refuted|[Cc]annot\s+be\s+decided)\.?\*")


@pytest.mark.parametrize("paper", ["osf", "dag"])
def test_errata_and_their_tests_belong_together(paper: str) -> None:
    text = (store.DATA / "papers" / paper / "errata.md").read_text(encoding="utf-8")
    entries = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    numbers, bodies = entries[::2], entries[1::2]
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    named = [re.findall(r"`(test_\w+)`", body) for body in bodies]
    assert all(len(names) == 1 for names in named), numbers
    assert all(VERDICT.search(body) for body in bodies)
    source = Path(__file__).with_name(f"test_errata_{paper}.py").read_text(encoding="utf-8")
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    tests = [name for name in functions if name.startswith("test_")]
    assert sorted(tests) == sorted(name for names in named for name in names)
