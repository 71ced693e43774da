"""The project keeps its own rules: pins, rooms, style, notebooks, manual."""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement

import ddlkit
from ddlkit import cli
from ddlkit.cli.command import IN_THE_WORKBOOK
from workbook.cli import PROGRAM
from workbook.common.papers import PAPERS
from workbook.site.pages import Page

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = ("ddlkit", "workbook")
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
ELSEWHERE = r"(?<![\w.~-])/(home|root|Users|mnt|work)/[A-Za-z]|-index-url|--find-links|//\S*(pypi|whl)"
NEEDED_TO_RUN = {"numpy", "pandas", "psutil", "scipy", "torch"}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def pins(name: str = "requirements.txt") -> list[str]:
    lines = (line.split("#")[0].strip() for line in read(name).splitlines())
    return [line for line in lines if line]


def project() -> Any:
    return tomllib.loads(read("pyproject.toml"))["project"]


def test_every_requirement_is_pinned_exactly_and_once_everywhere() -> None:
    """What ddlkit asks for, within the range it asks for, and nothing else but the build backend."""
    pinned = dict(pin.split("==") for pin in pins())
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in pinned.values())
    assert len({name.lower() for name in pinned}) == len(pins())
    environment = yaml.safe_load(read("environment.yml"))
    assert environment["dependencies"] == ["python=3.11", "pip", {"pip": pins()}]
    assert {*pins("requirements-read.txt")} < {*pins()}
    extras = {
        name: to
        for name, to in project()["optional-dependencies"].items()
        if name != "nvrtc"
    }
    asked = [
        Requirement(line) for line in sum(extras.values(), project()["dependencies"])
    ]
    versions = {name.lower(): version for name, version in pinned.items()}
    assert all(each.specifier.contains(versions[each.name.lower()]) for each in asked)
    assert versions.keys() - {each.name.lower() for each in asked} == {"setuptools"}
    plain = {Requirement(line).name for line in project()["dependencies"]}
    assert plain == NEEDED_TO_RUN, "what measuring needs"


def test_what_is_not_python_is_installed_too() -> None:
    """Templates, styles and lists beside the modules are declared as data of their package."""
    data = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["package-data"]
    globs = [
        (name.replace(".", "/"), one)
        for name, patterns in data.items()
        for one in patterns
    ]
    declared = {
        path for folder, pattern in globs for path in (ROOT / folder).glob(pattern)
    }
    others = {
        path
        for path in (ROOT / "ddlkit").rglob("*.*")
        if path.suffix not in (".py", ".pyc")
    }
    assert others and others - declared == set()


def test_the_version_is_one() -> None:
    heads = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    versions = [head for head in heads if head != "Unreleased"]
    assert heads in (versions, ["Unreleased", *versions]), "at most one, and on top"
    citation = yaml.safe_load(read("CITATION.cff"))
    assert versions[0] == ddlkit.__version__ == citation["version"]


def test_every_paper_is_cited_under_its_key() -> None:
    """The references of CITATION.cff are the papers, in the same order."""
    references = yaml.safe_load(read("CITATION.cff"))["references"]
    assert [reference["abbreviation"] for reference in references] == [*PAPERS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker", [["ruff", "check", "."], ["mypy"]], ids=["ruff", "mypy"]
)
def test_checkers_find_nothing(checker: list[str]) -> None:
    done = run(sys.executable, "-m", *checker)
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_import_only_what_the_contracts_in_pyproject_allow() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = run(str(program), "--no-logo", "--cache-dir", "build/import-linter")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


def test_no_file_names_a_place_of_one_machine_or_a_package_index() -> None:
    """Of what git holds or would hold; papers' tables may quote anything."""
    kinds = [
        f"*.{kind}" for kind in ("cff", "ipynb", "md", "py", "sh", "toml", "txt", "yml")
    ]
    found = run(
        "git", "grep", "-nPI", "--untracked", ELSEWHERE, "--", ".ci/run", *kinds
    )
    own = Path(__file__).relative_to(ROOT).as_posix()
    assert [
        line for line in found.stdout.splitlines() if not line.startswith(own)
    ] == []
    assert found.returncode == 0 or not (ROOT / ".git").exists(), found.stderr


# Calls of our own that may take keywords from a mapping: each with what checks the keywords instead.
MAY_SPREAD = {
    "ddlkit/core/case.py: cls": "a row of a table by the fields of the class itself",
    "ddlkit/core/cost.py: kind": "JSON, whose names are compared with the form's own first",
    "ddlkit/core/fit.py: kind": "what the fitter of this form returns, and what is not None",
    "ddlkit/formats/transformer_shapes.py: Decoder": "rows of a table with a schema",
    "ddlkit/jobs/launch.py: Rank.join": "JSON of a job, in another process",
    "ddlkit/jobs/rank.py: annotation": "JSON of a job, in another process",
    "ddlkit/lab/__init__.py: Conditions": "JSON of a job, in another process",
    "ddlkit/lab/tunnel.py: Conditions": "JSON, in another process",
    "ddlkit/measure/session/engine.py: Row": "rows of a table with a schema",
    "workbook/common/catalog.py: Entry": "YAML; a wrong key is told",
    "workbook/common/claims.py: Claim": "rows of a table that is checked by its hash",
    "workbook/course/exercises.py: Key": "what a solution defines, by the fields of the class",
    "workbook/course/exercises.py: Solution": "the kinds of cells, by the fields of the class itself",
    "workbook/dag/settings.py: Setting": "the axes of a grid, each named as its field",
    "workbook/omgs/tables.py: claims.recomputed": "takes any column, by its name",
    "workbook/plots/style.py: Style": "YAML, read at import",
    "workbook/record/contention.py: kind": "modules of torch",
    "workbook/record/grammar.py: Budget": "a suite; a wrong key is told",
    "workbook/record/grammar.py: Described": "a suite, by the signature: read_keys",
    "workbook/record/grammar.py: Grid": "a suite, by the signature: read_keys",
    "workbook/record/grammar.py: Suite": "a suite, by the signature: read_keys",
    "workbook/record/grammar.py: make": "a suite, by the signature: read_keys",
    "workbook/record/kinds.py: make": "a suite, by the signature: read_keys",
    "workbook/validate/accuracy.py: Goal": "YAML; a test reads every goal",
    "workbook/validate/clusters/__init__.py: Rows": "parts of a table, by the fields of the class itself",
    "tests/test_figures_dag.py: Setting": "every field of the class, from such an object",
    "tests/test_kineto.py: gpu.launch": "of this test; names of a trace's arguments have blanks",
    "tests/test_kineto.py: self.add": "of this test, likewise",
    "tests/test_parameters.py: parameters.validate": "takes any parameter of a notebook",
}


@cache
def defined() -> set[str]:
    """The names of all functions, methods and classes of ours."""
    definition = re.compile(r"^ *(?:async )?(?:def|class) (\w+)", re.MULTILINE)
    return {
        name
        for path in SOURCES.values()
        for name in definition.findall(path.read_text(encoding="utf-8"))
    }


def spread(path: Path) -> Iterator[str]:
    """Yield the callees of ours, or that may be ours, which a file gives keywords from a mapping.

    What nobody imports from elsewhere may be ours, and so may a method with the name of one of ours; in
    tests a bare name that is not imported is a helper of the tests.
    """
    text = path.read_text(encoding="utf-8")
    # To parse a file takes most of the time, and half of them have no such argument.
    if not re.search(r"[(,]\s*(?:#[^\n]*\s*)*\*\*", text):
        return
    nodes = [*ast.walk(ast.parse(text))]
    ours, others = set[str](), {*dir(builtins)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            of = getattr(node, "module", None)
            for alias in node.names:
                mine = (of or alias.name).split(".")[0] in (*PACKAGES, "sharded")
                (ours if mine else others).add(alias.asname or alias.name.split(".")[0])
    for node in nodes:
        if not isinstance(node, ast.Call) or all(each.arg for each in node.keywords):
            continue
        callee = node.func
        if ast.unparse(callee) in ("partial", "functools.partial"):
            callee = node.args[0]
        name, last = ast.unparse(callee), getattr(callee, "attr", None)
        root = name.partition(".")[0]
        in_tests = path.is_relative_to(ROOT / "tests")
        helper = in_tests and last is None and root not in ours
        if root in ours or not (
            root in others or helper or last not in (None, *defined())
        ):
            yield f"{path.relative_to(ROOT).as_posix()}: {name}"


def test_our_own_functions_get_keywords_that_mypy_can_check() -> None:
    """Where they come from a mapping of anything, a wrong one is found when it is too late."""
    files = [*SOURCES.values(), *sorted((ROOT / "tests").glob("*.py"))]
    files.append(ROOT / "examples" / "sharded.py")
    found = [each for path in files for each in spread(path)]
    assert {*found} == MAY_SPREAD.keys()


LIGHT: list[tuple[tuple[str, ...], set[str]]] = [
    (("ddlkit.core",), {"torch", "pandas", "matplotlib", "IPython"}),
    (
        ("ddlkit.store", "ddlkit.formats", "ddlkit.model"),
        {"torch", "matplotlib", "jinja2", "IPython"},
    ),
    (("ddlkit.cli", "ddlkit.show"), {"torch", "matplotlib", "jinja2"}),
    (
        (
            "ddlkit.lab.network",
            "ddlkit.jobs.launch",
            "ddlkit.measure.session.engine",
        ),
        {"torch"},
    ),
    (
        (
            "workbook.common",
            "workbook.plots",
            "workbook.validate",
            "workbook.course",
            "workbook.site",
        ),
        {"torch", "seaborn"},
    ),
]
"""Packages in an order in which one process loads them, and what is not loaded by then."""


def test_light_rooms_load_nothing_heavy() -> None:
    """What starts and watches others is one: importing torch takes seconds of a processor that measures."""
    lines = ["import sys"]
    for packages, _ in LIGHT:
        names = [name for name in SOURCES if name.startswith(packages)]
        lines += [f"import {', '.join(names)}", "print(*sys.modules)"]
    done = run(sys.executable, "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    for (packages, unwanted), loaded in zip(
        LIGHT, done.stdout.splitlines(), strict=True
    ):
        assert "ddlkit.core.units" in loaded.split()
        assert unwanted.isdisjoint(loaded.split()), packages


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: str(path.stem))
def test_notebooks_are_stored_as_they_should_be(notebook: Path) -> None:
    """Without outputs; title and three lines first; where numbers are from last; a time to read."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert all(not cell.get("outputs") for cell in content["cells"])
    assert all(not cell.get("execution_count") for cell in content["cells"])
    first, *_, last = ["".join(cell["source"]) for cell in content["cells"]]
    lines = [line for line in first.splitlines() if line.strip()]
    heads = ("# ", "* **Objective:** ", "* **Prerequisites:** ", "* **Time:** ")
    assert all(line.startswith(head) for line, head in zip(lines, heads, strict=True))
    assert "Reads:" in last and "Grade of truth" in last
    page = Page(notebook)
    assert 5 <= page.minutes < page.working <= 60 and page.core == (page.number <= "05")


@pytest.mark.parametrize(
    ("program", "prefix"), [(cli.DDLKIT, ""), (PROGRAM, "workbook ")]
)
def test_the_manual_has_each_command_and_its_options(
    program: cli.Program, prefix: str
) -> None:
    """Each as its help says it. A command of the workbook is headed "workbook NAME"."""
    parts = re.findall(
        r"^## ([a-z -]+)\n(.*?)(?=^##? |\Z)", read("docs/commands.md"), re.M | re.S
    )
    sections = dict(parts)
    for name, parser in commands_of(program).items():
        section = sections[prefix + name]
        lines = section.splitlines()
        described = {
            cells[1].strip(" `").split()[0]: cells[2].strip()
            for line in lines
            if len(cells := re.split(r"(?<!\\)\|", line)) == 4 and "`" in cells[1]
        }
        explained = {}
        for action in parser._actions:
            word = [*action.option_strings, str(action.metavar)][0].replace("|", "\\|")
            if word != "-h":
                text = (str(action.help) % {}).replace("|", "\\|")
                explained[word] = " ".join(text.split())
        assert described == explained, name
        # The indented example ends the text of what the command does.
        text = section.partition("\n\n    ")[0]
        assert text.split() == program.commands[name].text.split(), name
        headings = [line[2:-4] for line in lines if line.endswith(" | |")]
        groups = [group.title for group in parser._action_groups[2:]]
        assert headings == groups, name
        usage = parser.format_usage().removeprefix("usage: ").strip()
        assert f"Usage: `{usage}`" in lines, name
        assert f"    {program.commands[name].example}" in lines, name


@pytest.mark.parametrize("program", [cli.DDLKIT, PROGRAM])
def test_every_help_begins_with_an_example_that_parses_and_groups_its_options(
    program: cli.Program,
) -> None:
    for name, parser in commands_of(program).items():
        words = program.commands[name].example.partition(">")[0].split()
        called = words.index(program.called.split()[-1])
        assert words[called + 1] == name
        arguments = parser.parse_args(words[called + 2 :])
        assert arguments.run is program.commands[name].run
        head = parser.format_help().partition("options:")[0].split("\n\n")
        assert head[1] == f"example:\n  {program.commands[name].example}", name
        grouped = [
            action
            for group in parser._action_groups[2:]  # of our own headings
            for action in group._group_actions
        ]
        assert len(grouped) == len(program.commands[name].arguments), name
        for action in grouped:
            text = " ".join((action.help or "").split())
            assert re.search(r"\.( \[default: [^]]+\])?$", text), f"{name}: {text}"


def commands_of(program: cli.Program) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a program's commands by name."""
    (commands,) = (
        action
        for action in cli._parser(program)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


def test_the_manual_says_where_commands_went() -> None:
    """Each in one line, which names the old command and the new one."""
    lines = read("docs/commands.md").splitlines()
    gone = {f"ddlkit {name}": to for name, to in cli.DDLKIT.moved.items()}
    gone |= {
        f"ddlkit measure {part}": f"python -m workbook record {part}"
        for part in IN_THE_WORKBOOK
    }
    for old, new in gone.items():
        assert any(f"`{old}`" in line and f"`{new}`" in line for line in lines), old


def test_the_architecture_says_what_each_dependency_is_for() -> None:
    """The first column of its table, under "Dependencies", names what pyproject.toml asks for."""
    text = read("docs/ARCHITECTURE.md").partition("## Dependencies\n")[2]
    named = re.findall(r"^\| `([\w.-]+)` \|", text.partition("\n## ")[0], re.MULTILINE)
    extras = project()["optional-dependencies"]
    asked = [
        Requirement(line).name
        for line in sum(extras.values(), project()["dependencies"])
    ]
    assert {name.lower() for name in asked} - {name.lower() for name in named} == set()
