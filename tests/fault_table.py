"""docs/RELIABILITY.md from the tests' own marks: ``python tests/fault_table.py`` writes it anew.

A row is a mark of a test, ``@pytest.mark.fault(fault=..., injected=..., holds=...)``, each a literal text.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
MARK = "pytest.mark.fault"
PAGE = TESTS.parent / "docs" / "RELIABILITY.md"
HEAD = """# Reliability

Measurements cost hours, so the tests cause on purpose what may go wrong around them. Each row of this
table is a test that really injects the fault. After each of these tests the same fixture
(`tests/leftovers.py`) asserts that nothing is left behind: no process, no network namespace, no
interface, no lock that is held, no temporary file and no half-written file.

    python -m pytest -m fault                    # all of them
    python -m pytest -m fault --shuffle 7        # in another order: no test needs another before it
    python tests/fault_table.py                  # write this page anew, from the marks of the tests

After every fault, recorded tables are undamaged, an interrupted run continues where it stopped, and one
line reports what could not be done. Ctrl-C ends a command with status 130, SIGTERM with 143. Numbers
are published with six significant digits, which processors of different generations compute alike.

Three faults are not tested: a power cut (files are synced before they are renamed, but no test cuts the
power), a damaged file system, and two machines that write into one folder over a network file system.

"""


class Mark(NamedTuple):
    """A test's mark: what goes wrong, how that is done, what must hold nevertheless, and the test."""

    fault: str
    injected: str
    holds: str
    test: str


def marks() -> list[Mark]:
    """All marks by file, in the order of its tests. Raises ValueError for a text that is no literal."""
    listed = []
    for path in sorted(TESTS.glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"{MARK}(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in function.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == MARK:
                    words = {
                        str(word.arg): ast.literal_eval(word.value)
                        for word in call.keywords
                    }
                    listed.append(Mark(**words, test=f"{path.name}::{function.name}"))
    return listed


def page(listed: Sequence[Mark]) -> str:
    """The page, with one row a mark."""
    rows = ["| fault | how injected | what must hold | test |", "|---|---|---|---|"]
    for mark in listed:
        file, _, name = mark.test.partition("::")
        law = name.removeprefix("test_").replace("_", " ")
        rows.append(
            f"| {mark.fault} | {mark.injected} | {mark.holds} | [{law}](../tests/{file}) |"
        )
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(marks()), encoding="utf-8")
