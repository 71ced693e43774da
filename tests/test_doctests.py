"""The examples in docstrings run and are true, and the public names are there, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ddlkit

PACKAGE = Path(ddlkit.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__main__.py"
]
# In a process of its own, in which torch cannot be imported.
PROGRAM = """
import doctest, importlib, json, sys
sys.modules["torch"] = None
results = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        continue
    report = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    results[name] = {"tried": runner.tries, "report": "".join(report)}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, object]]:
    """Of each module that needs no torch: how many examples were tried, and what was wrong."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *MODULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_example_in_a_docstring_is_true(results: dict[str, dict[str, object]]) -> None:
    assert [str(result["report"]) for result in results.values() if result["report"]] == []


def test_public_names_are_there_and_load_no_torch() -> None:
    program = (
        "import sys, ddlkit\n"
        "assert not {'numpy', 'pandas', 'torch'} & set(sys.modules), 'not light'\n"
        "from ddlkit import *\n"
        "assert all(getattr(ddlkit, name).__name__ == name for name in ddlkit.__all__)\n"
        "assert set(ddlkit.__all__) <= set(dir(ddlkit)) and AlphaBeta is ddlkit.AlphaBeta\n"
        "print(*ddlkit.__all__)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"Workload", "fit", "make_plan", "predict", "UserError"} <= set(done.stdout.split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ddlkit' has no attribute 'nothing'"):
        getattr(ddlkit, "nothing")  # noqa: B009
