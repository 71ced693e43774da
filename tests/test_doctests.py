"""The examples in docstrings run and are true, and the public names are there, without torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import ddlkit

# In a process of its own, in which torch cannot be imported.
PROGRAM = """
import sys
sys.modules["torch"] = None
import ddlkit
assert not {"numpy", "pandas"} & set(sys.modules), "not light"
from ddlkit import *
import doctest, importlib, pkgutil
assert all(getattr(ddlkit, name).__name__ == name for name in ddlkit.__all__)
assert set(ddlkit.__all__) <= set(dir(ddlkit)) and AlphaBeta is ddlkit.AlphaBeta
import workbook
for package in ddlkit, workbook:
    tried = failed = 0
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None)
    for name in (package.__name__, *(module.name for module in found)):
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            continue
        result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        tried, failed = tried + result.attempted, failed + result.failed
    print(package.__name__, tried, failed)
"""
LEAST = {"ddlkit": 25, "workbook": 20}
"""Examples of a package, at least: fewer would mean that most modules were not imported."""


def test_every_example_is_true_and_public_names_are_there_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"^(ddlkit|workbook) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    tried = {package: int(number) for package, number, _ in counts}
    assert all(failed == "0" for _, _, failed in counts), done.stdout
    assert tried.keys() == LEAST.keys()
    assert all(tried[package] >= LEAST[package] for package in LEAST), tried
    assert {"Workload", "fit", "make_plan", "predict", "UserError"} <= set(
        ddlkit.__all__
    )
    with pytest.raises(
        AttributeError, match="module 'ddlkit' has no attribute 'nothing'"
    ):
        getattr(ddlkit, "nothing")  # noqa: B009
