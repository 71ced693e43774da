"""The public names of ddlkit: grouped, complete, found by help and completion, and typed."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import ddlkit
from workbook.site import sources

ROOT = Path(__file__).resolve().parent.parent
IMPORT_S = 0.3
NAMES = [name for names in ddlkit.GROUPS.values() for name in names]


def test_the_groups_are_those_of_the_reference_and_have_every_public_name() -> None:
    listed = {
        group: [*page["functions"], *page["classes"]]
        for group, page in sources.REFERENCE.items()
    }
    public = {
        group: [f"ddlkit.{name}" for name in names]
        for group, names in ddlkit.GROUPS.items()
    }
    assert listed == public
    assert ddlkit.__all__ == NAMES and len({*NAMES}) == len(NAMES)
    assert {*NAMES} <= {*dir(ddlkit)}


# A See Also section, and an example or a longer summary of everything, are not asked for. That the
# parameters of a class are documented is looked at below: those of a data class may be
# Attributes, and may stand in the docstring of the class that it is derived from.
NOT_ASKED = {"SA01", "ES01", "EX01"}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_of_a_public_name_has_its_numpydoc_sections(name: str) -> None:
    public = getattr(ddlkit, name)
    found = validate(f"{public.__module__}.{public.__qualname__}")["errors"]
    not_asked = NOT_ASKED | ({"PR01"} if inspect.isclass(public) else set())
    assert [error for error in found if error[0] not in not_asked] == []
    if inspect.isclass(public):
        documented = set()
        for base in inspect.getmro(public)[:-1]:
            sections = NumpyDocString(inspect.getdoc(base) or "")
            for entry in (*sections["Parameters"], *sections["Attributes"]):
                documented |= set(entry.name.split(", "))
        if not issubclass(public, BaseException):  # built-in: without a signature
            assert {*inspect.signature(public).parameters} <= documented


def test_type_checkers_see_the_same_names_as_python() -> None:
    module = ast.parse(inspect.getsource(ddlkit))
    (block,) = (
        node
        for node in module.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name, "else it is not exported"
        typed[alias.name] = node.module
    homes: dict[str, str] = {}
    for modules in ddlkit._MODULES.values():
        homes |= modules
    assert typed == homes


def test_help_has_a_line_for_each_group_and_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(ddlkit))
    for group, names in ddlkit.GROUPS.items():
        (line,) = re.findall(rf"^ +\* {group}: (.+)$", text, re.MULTILINE)
        examples = re.findall(r"``(\w+)``", line)
        assert examples and {*examples} <= {*names}
    for name in NAMES:
        assert re.search(rf"^ +(class )?{name}\b", text, re.MULTILINE), name


def test_without_pytorch_only_the_names_that_measure_are_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import ddlkit; "
        "from ddlkit import *; help(ddlkit); print(*ddlkit.__all__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    there = done.stdout.splitlines()[-1].split()
    assert [name for name in NAMES if name not in there] == [*ddlkit.GROUPS["measure"]]


SCRIPT = """
from pathlib import Path

import ddlkit
from ddlkit import AlphaBeta, Workload, fit, make_plan, predict

workload = Workload.from_arrays(forward_s=3.0, backward_s=[2.0], n_bytes=[100])
cost = AlphaBeta(alpha_s=1.5, beta_s_per_byte=0.02)
reveal_type(workload)
reveal_type(make_plan("exact", workload, cost))
reveal_type(predict(workload, make_plan("none", workload, cost), cost).iteration_s)
reveal_type(fit("alpha_beta", [1, 2, 3], [1.0, 2.0, 3.0]))
reveal_type(ddlkit.read_profile(Path("profile.csv")))
reveal_type(ddlkit.Advice.of(workload, ddlkit.Communication(cost)))
AlphaBeta(alpha="one")
ddlkit.predicted
"""
REVEALED = (
    "Workload",
    "FusionPlan",
    "float",
    "Fit",
    "LayerProfile",
    "Advice",
)


@pytest.mark.slow
def test_the_types_of_a_users_script_resolve(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    settings = tmp_path / "mypy.ini"
    # What ddlkit itself imports is not the user's concern, and takes a minute to read.
    settings.write_text(
        f"[mypy]\ncache_dir = {tmp_path / 'cache'}\nfollow_imports = silent\n"
        "[mypy-torch.*,scipy.*,pandas.*,psutil.*]\nfollow_imports = skip\n"
        "ignore_missing_imports = True\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    notes = re.findall(r'Revealed type is "(.*)"', done.stdout)
    types = tuple(note.partition("[")[0].rpartition(".")[2] for note in notes)
    assert types == REVEALED, done.stdout + done.stderr
    errors = re.findall(r"error: (.*)", done.stdout)
    assert len(errors) == 2, done.stdout
    assert "alpha" in errors[0] and "predicted" in errors[1]


@pytest.mark.alone
def test_importing_the_library_takes_a_moment() -> None:
    """Beyond what a bare interpreter takes; medians of fresh ones, taken in turn."""
    took_s: dict[str, list[float]] = {"pass": [], "import ddlkit": []}
    for _ in range(7):
        for code, times_s in took_s.items():
            begin_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            times_s.append(time.perf_counter() - begin_s)
    bare_s, imported_s = map(statistics.median, took_s.values())
    assert imported_s - bare_s < IMPORT_S
