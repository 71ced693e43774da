"""The examples in docstrings run and are true, and the public names are there, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ddlkit

# In a process of its own, in which torch cannot be imported.
PROGRAM = """
import sys, ddlkit
assert not {'numpy', 'pandas', 'torch'} & set(sys.modules), 'not light'
sys.modules["torch"] = None
from ddlkit import *
import doctest, importlib, pkgutil
assert all(getattr(ddlkit, name).__name__ == name for name in ddlkit.__all__)
assert set(ddlkit.__all__) <= set(dir(ddlkit)) and AlphaBeta is ddlkit.AlphaBeta
tried = failed = 0
for found in pkgutil.walk_packages(ddlkit.__path__, "ddlkit.", onerror=lambda name: None):
    try:
        module = importlib.import_module(found.name) if "__main__" not in found.name else ddlkit
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        continue
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    tried, failed = tried + result.attempted, failed + result.failed
print(tried, failed)
"""


def test_every_example_is_true_and_public_names_are_there_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tried, failed = map(int, done.stdout.split()[-2:])
    assert tried > 30 and failed == 0, done.stdout
    assert {"Workload", "fit", "make_plan", "predict", "UserError"} <= set(
        ddlkit.__all__
    )
    with pytest.raises(
        AttributeError, match="module 'ddlkit' has no attribute 'nothing'"
    ):
        getattr(ddlkit, "nothing")  # noqa: B009
