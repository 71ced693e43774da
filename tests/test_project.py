"""The project keeps its own rules: pins, rooms, style, notebooks, README."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import json
import os
import re
import shlex
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

import conftest
import ddlkit
from ddlkit import cli
from ddlkit.report import manual
from ddlkit.report.site import Page

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "ddlkit").rglob("*.py"))
}
# A module may import from its own floor and from those below; store and machine are one room.
FLOORS = {
    "core": 0,
    "store": 1,
    "machine": 1,
    "papers": 2,
    "formats": 3,
    "model": 4,
    "run": 5,
    "report": 6,
    "cli": 7,
    "__main__": 8,
}
MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 50, 500
MOST_LINES, MOST_FILES, MOST_OTHER_BYTES = 34_800, 158, 106_000
NAMES_A_MODULE = re.compile(r"ddlkit(\.\w+)+(:\w+)?")  # a string such as "ddlkit.cli:main"
NEEDED_TO_RUN = {"numpy", "pandas", "psutil", "scipy", "torch", "tqdm"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|Users|mnt|work)/[A-Za-z]")
PACKAGE_INDEX = re.compile(r"--(?:extra-)?index-url|--find-links|https?://\S*(?:pypi|whl)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# ---------------------------------------------------------------- packaging


def pins(name: str = "requirements.txt") -> list[str]:
    lines = (line.split("#")[0].strip() for line in read(name).splitlines())
    return [line for line in lines if line]


def project() -> Any:
    return tomllib.loads(read("pyproject.toml"))["project"]


def test_every_requirement_is_pinned_exactly_and_once_everywhere() -> None:
    names = [re.fullmatch(r"([A-Za-z0-9-]+)==\d+(\.\d+)+", pin) for pin in pins()]
    assert names and all(names)
    assert len({name[1].lower() for name in names if name}) == len(names)
    environment = yaml.safe_load(read("environment.yml"))
    assert environment["dependencies"] == ["python=3.11", "pip", {"pip": pins()}]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    chosen = pins("requirements-read.txt")
    assert {*chosen} < {*pins()}
    assert not [pin for pin in chosen if pin.startswith("torch")], "reading on a binder"
    assert read("binder/requirements.txt") == "-r ../requirements-read.txt\n"
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


def test_the_pins_are_the_packages_own_requirements() -> None:
    """Each thing ddlkit asks for is pinned, within the range it asks for; nothing else is.

    NCCL's own package and the CUDA compiler, which few need, are in no environment, but pinned where named.
    """
    extras = dict(project()["optional-dependencies"])
    for extra in ("nvrtc",):
        assert re.fullmatch(r"==\d+(\.\d+)+", str(Requirement(extras.pop(extra)[0]).specifier))
    asked = [Requirement(line) for line in sum(extras.values(), project()["dependencies"])]
    pinned = {Requirement(pin).name.lower(): pin.split("==")[1] for pin in pins()}
    for requirement in asked:
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
    # reproduce.sh installs ddlkit without build isolation, so its build backend is pinned too.
    assert pinned.keys() - {requirement.name.lower() for requirement in asked} == {"setuptools"}
    plain = {Requirement(line).name for line in project()["dependencies"]}
    assert plain == NEEDED_TO_RUN, "what measuring needs"


def test_what_is_not_python_is_installed_too() -> None:
    """Templates, styles and lists beside the modules are declared as data of their package."""
    data = tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["package-data"]
    declared = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    others = {path for path in (ROOT / "ddlkit").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert {path.suffix for path in others} >= {".html", ".css"}
    assert others - declared == set()


def test_the_version_and_the_licence_are_one() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    versions = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == ddlkit.__version__ == citation["version"]
    assert run(sys.executable, "-m", "ddlkit", "--version").stdout.split()[1] == ddlkit.__version__
    assert read("LICENSE").startswith("MIT License\n") and "The ddlkit authors" in read("LICENSE")
    assert project()["license"] == citation["license"] == "MIT"


# ---------------------------------------------------------------- style


def test_files_that_share_a_worker_are_there() -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    named = {name for names in conftest.TOGETHER.values() for name in names.split()}
    assert files > named


@pytest.mark.parametrize("checker", [["ruff", "check", "."], ["mypy"]], ids=["ruff", "mypy"])
def test_checkers_find_nothing(checker: list[str]) -> None:
    done = run(sys.executable, "-m", *checker)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["reproduce.sh", ".ci/run", "examples/gpu_day.sh"])
def test_shell_scripts_are_executable_and_parse(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111 == 0o111
    assert run("bash", "-n", script).stderr == ""


def text_files() -> list[Path]:
    """What git holds or would hold, without pictures and tables; papers' data may quote anything."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    if listed.returncode:  # an exported tree has no git
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    kinds = {".cff", ".ipynb", ".md", ".py", ".sh", ".toml", ".txt", ".yml", ""}
    return [path for path in paths if path.suffix in kinds and path.is_file()]


def test_no_file_names_a_place_of_one_machine_or_a_package_index() -> None:
    files = text_files()
    assert ROOT / "README.md" in files and ROOT / "reproduce.sh" in files
    assert [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path != Path(__file__).resolve()
        for pattern in (ABSOLUTE_PATH, PACKAGE_INDEX)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ] == []


# ---------------------------------------------------------------- rooms


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(node: ast.AST, *, lazy: bool) -> Iterator[str]:
    """Dotted names that a module imports; without `lazy` only those that its own import runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute here"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif lazy or not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        ):
            yield from imports(child, lazy=lazy)


def named_in_strings(module: str) -> Iterator[str]:
    """Modules of ddlkit that a string names: one that is started or imported by name is imported, too."""
    for node in ast.walk(tree(module)):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and NAMES_A_MODULE.fullmatch(text):
            yield text.partition(":")[0]


def own_modules(module: str) -> set[str]:
    """Other modules of ddlkit that a module imports or names, at any time."""
    named = {*imports(tree(module), lazy=True), *named_in_strings(module)}
    return {module_of(name) for name in named} - {"", "ddlkit", module}


def module_of(name: str) -> str:
    """The module of ours that holds ``name``; "" if it is none of ours."""
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


def floor(module: str) -> int:
    return FLOORS[module.split(".")[1]]


def test_rooms_import_only_from_the_rooms_before_them() -> None:
    upwards = [
        f"{module} imports {other}"
        for module in SOURCES
        if module != "ddlkit"
        for other in own_modules(module)
        if floor(other) > floor(module)
    ]
    assert upwards == []


def test_the_report_needs_neither_torch_nor_what_measures() -> None:
    """Also where a function imports: whoever reads has no torch."""
    unwanted = [
        f"{module} imports {name}"
        for module in SOURCES
        if module.startswith("ddlkit.report")
        for name in (*imports(tree(module), lazy=True), *named_in_strings(module))
        if re.match(r"torch|ddlkit\.run(\.|$)", name)
    ]
    assert unwanted == []


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {module: own_modules(module) for module in SOURCES}
    assert "ddlkit.run.jobs.worker" in graph["ddlkit.run.jobs.launch"], "started by its name"
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) >= len(FLOORS)


def test_the_house_is_small() -> None:
    """At most so many lines and files, none above 500, every function on a screen, and no hiding place."""
    functions = [
        (f"{module}.{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for module in SOURCES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, n) for name, n in functions if n > MOST_LINES_OF_A_FUNCTION] == []
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert [name for name, n in lines.items() if n > MOST_LINES_OF_A_FILE] == []
    assert sum(lines.values()) <= MOST_LINES and len(lines) <= MOST_FILES
    others = [path for path in (ROOT / "ddlkit").rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in others) <= MOST_OTHER_BYTES
    style = tomllib.loads(read("pyproject.toml"))["tool"]["ruff"]
    assert style["line-length"] == 100 and style["format"] == {
        "exclude": ["notebooks/*", "solutions/*"]
    }
    assert style["lint"]["pycodestyle"] == {"max-line-length": 110}
    assert [name for name, path in SOURCES.items() if "fmt: " in path.read_text()] == []


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (("core", "papers"), {"torch", "pandas", "matplotlib", "IPython"}),
        (("core", "papers", "store", "machine"), {"torch", "matplotlib", "IPython"}),
        (("core", "report"), {"torch", "seaborn"}),
        (
            ("cli", "run.lab.network", "run.jobs.launch", "run.sessions.engine", "report.book"),
            {"torch"},
        ),
    ],
)
def test_light_rooms_load_nothing_heavy(modules: tuple[str, ...], unwanted: set[str]) -> None:
    """What starts and watches others is one: importing torch takes seconds of a processor that measures."""
    rooms = tuple(f"ddlkit.{name}" for name in modules)
    names = [name for name in SOURCES if name.startswith(rooms)]
    done = run(sys.executable, "-c", f"import sys, {', '.join(names)}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "ddlkit.core.units" in loaded and unwanted.isdisjoint(loaded)


# ---------------------------------------------------------------- notebooks


def cells(notebook: Path, kind: str = "code") -> list[dict[str, Any]]:
    listed = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in listed if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def python(cell: dict[str, Any]) -> ast.Module:
    """A cell's statements; a line magic counts as none."""
    return ast.parse(re.sub(r"^(\s*)[%!].*", r"\1pass", source(cell), flags=re.MULTILINE))


each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: str(path.stem))


@each_notebook
def test_notebooks_are_stored_as_they_should_be(notebook: Path) -> None:
    """Without outputs; title and three lines first; where numbers are from last; a time to read."""
    assert re.fullmatch(r"\d\d_[a-z_]+\.ipynb", notebook.name)
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["outputs"] == [] for cell in cells(notebook))
    assert all(cell["execution_count"] is None for cell in cells(notebook))
    first, *_, last = content["cells"]
    lines = [line for line in source(first).splitlines() if line.strip()]
    heads = ("# ", "* **Objective:** ", "* **Prerequisites:** ", "* **Time:** ")
    assert all(line.startswith(head) for line, head in zip(lines, heads, strict=True))
    assert "Reads:" in source(last) and "Grade of truth:" in source(last)
    page = Page(notebook)
    assert 20 < len(page.line) < 200 and 5 <= page.minutes < page.working <= 60
    assert page.core == (page.number <= "05")


@each_notebook
def test_notebooks_have_one_cell_of_parameters_and_use_each(notebook: Path) -> None:
    (parameters,) = [
        cell for cell in cells(notebook) if "parameters" in cell["metadata"].get("tags", ())
    ]
    names = {
        ast.unparse(statement.targets[0])
        for statement in python(parameters).body
        if isinstance(statement, ast.Assign)
    }
    read_names = {
        node.id
        for cell in cells(notebook)
        for node in ast.walk(python(cell))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert names and names <= read_names


@each_notebook
def test_cells_can_be_read_and_write_the_algorithm(notebook: Path) -> None:
    """An algorithm is 5 to 15 lines, asserted equal to ddlkit's; what takes more belongs into the package."""
    nodes = []
    for cell in cells(notebook):
        assert len(source(cell).splitlines()) <= 18, source(cell)
        for node in ast.walk(python(cell)):
            assert not isinstance(node, ast.ClassDef), node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno < 15, node.name
            nodes += [] if "exercise-1" in cell["metadata"].get("tags", ()) else [node]
    if notebook.name[:2] not in {"11", "12", "13"}:
        assert any(isinstance(node, ast.FunctionDef) for node in nodes)
        assert any(isinstance(node, ast.Assert) for node in nodes)


# ---------------------------------------------------------------- README and docs


def shown_commands(page: str) -> list[list[str]]:
    """Words of every `ddlkit ...` line in a page's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", read(page), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line[:1] == ["ddlkit"]]


def test_the_manual_of_commands_is_that_of_the_parsers() -> None:
    assert read("docs/commands.md") == manual.page(cli._parser()), "run ddlkit figures --write"


def test_what_pages_link_to_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    missing = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert len(pages) >= 8 and missing == []


def test_the_main_result_in_the_readme_is_what_was_recorded() -> None:
    """Replays and real training in the same sentence and of the same size, and what was missed."""
    held = json.loads(read("reports/summaries/05-is-it-true.json"))
    text = " ".join(read("README.md").split())
    replays, training = (
        {key.removeprefix(kind): value for key, value in held.items() if key.startswith(kind)}
        for kind in ("campaign_", "training_")
    )
    assert (
        f"In {replays['cases']:.0f} replays, where compute is waited out and not done, the prediction is off "
        f"by {replays['median_error']:.1%} in the median ({replays['max_error']:.1%} at most). "
        f"In {training['cases']:.0f} cases of real training, all of ResNet-18 on two workers, it is off by "
        f"{training['median_error']:.1%} in the median ({training['max_error']:.1%} at most)."
    ) in text
    assert (
        f"that is {replays['median_exposed_error']:.1%} and {training['median_exposed_error']:.1%}. A model "
        f"without overlap is off by {replays['no_overlap_median_error']:.1%} and "
        f"{training['no_overlap_median_error']:.1%}."
    ) in text
    assert replays["standing"] == "exploratory"
    assert (
        f"Of the {held['goals']} goals that were preset for {held['fresh_plans_cases']:.0f} further "
        f"replays, {held['fresh_plans_goals_missed']} were missed."
    ) in text


def test_the_commands_that_pages_show_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (*shown_commands("README.md"), *shown_commands("docs/commands.md")):
        with contextlib.suppress(SystemExit):
            cli.main([words[1], "--help"])
        usage = capsys.readouterr().out
        assert usage.startswith(f"usage: ddlkit {words[1]}")
        assert [word for word in words if word.startswith("--") and word not in usage] == []


LAYERS = """network,device,batch,tensor,layer,parameters,gradient_bytes,forward_s,backward_s,flops
toy,cpu,8,a.weight,a,250000,1000000,0.010,0.020,5e8
toy,cpu,8,b.weight,b,2500000,10000000,0.010,0.020,5e8
toy,cpu,8,c.weight,c,5000000,20000000,0.010,0.020,5e8
"""


def test_the_manual_leads_from_own_tables_to_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its fit, predict and plan commands, as printed, on tables with the columns it names."""
    assert LAYERS.splitlines()[0] in read("docs/commands.md")
    commands = {words[1]: words[2:] for words in shown_commands("docs/commands.md")}
    tables = tmp_path / commands["fit"][0], tmp_path / commands["plan"][1]
    tables[0].parent.mkdir()
    rows = [f"{size},{1e-3 + 1e-9 * size}\n" * 3 for size in (2**k for k in range(10, 27))]
    tables[0].write_text("bytes,seconds\n" + "".join(rows))
    tables[1].write_text(LAYERS)
    monkeypatch.chdir(tmp_path)
    printed = {}
    for name in ("fit", "predict", "plan"):
        arguments, _, target = " ".join(commands[name]).partition(" > ")
        assert cli.main([name, *arguments.split()]) == 0
        output = capsys.readouterr().out
        printed[name] = json.loads(output)
        if target:
            Path(target).write_text(output)
    assert printed["predict"]["compute_s"] == pytest.approx(0.09)
    assert printed["predict"]["exposed_communication_s"] > 0
    assert printed["plan"]["iteration_s"] <= printed["predict"]["iteration_s"] * (1 + 1e-9)
    assert sorted(sum(printed["plan"]["groups"], [])) == [0, 1, 2]
