"""The library alone: its wheel holds nothing else, and runs where there is no clone of the project.

The wheel is installed into a virtual environment of its own. What it depends on is torch and
others, gigabytes that are not installed again: a ``.pth`` file adds the folder of packages that
the tests run with. Python reads ``.pth`` files of an environment's own folder only, not those of a
folder that is added so. Hence the editable installation of this project, which is a ``.pth`` file
there, stays out, as it would not with ``venv --system-site-packages``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

import ddlkit
from ddlkit import store
from places import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {".git", ".venv", "build", "ddlkit.egg-info"}  # what a build must not see
ALPHA_S, BETA_S_PER_BYTE = 1e-3, 8e-9
FORWARD_S, BACKWARD_S, TENSORS, TENSOR_BYTES = 0.01, 0.02, 5, 3_000_000

MINE = """
from torch import nn, randint, randn

def net(device):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    inputs, labels = randn(8, 64), randint(64, (8,))
    return model, lambda: nn.functional.cross_entropy(model(inputs), labels)
"""
TRACE = """Id Name Forward Backward Comm. Size
0 data 9 0 0 0
1 a 20 30 40 4000
2 b 5 6 70 80
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree; a build writes beside what it builds, so that is a folder of links."""
    base = tmp_path_factory.mktemp("wheel")
    (base / "tree").mkdir()
    for path in ROOT.iterdir():
        if path.name not in OUTSIDE:
            (base / "tree" / path.name).symlink_to(path)
    run_pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--wheel-dir", str(base / "made"), str(base / "tree")),
    )
    (made,) = (base / "made").iterdir()
    return made


ANSWER = """
import contextlib, io, json, sys
from ddlkit import cli
answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = cli.main(words)
    if status:
        sys.exit(status)
    answers.append(printed.getvalue())
print(json.dumps(answers))
"""
"""Gives several commands to ddlkit in one process: each would import pandas and others anew."""


class Installed(NamedTuple):
    """An environment that holds the wheel alone, and where its user works."""

    environment: Path
    work: Path
    home: Path
    scratch: Path
    cache: Path

    def run(self, program: str, *words: object) -> str:
        """Return what a program of the environment prints, run where the user works."""
        # No PYTHONPATH, above all. Bytecode of torch stays where it is found, because to
        # compile torch takes longer than all that is run here.
        kept = ("PATH", "LANG", "OMP_NUM_THREADS", "PYTHONPYCACHEPREFIX")
        variables = {name: os.environ[name] for name in kept if name in os.environ}
        variables |= {"HOME": str(self.home), "TMPDIR": str(self.scratch)}
        # Where matplotlib and torch keep what they have found out about this machine.
        caches = ("MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")
        variables |= dict.fromkeys(caches, str(self.cache))
        done = subprocess.run(
            [str(self.environment / "bin" / program), *map(str, words)],
            cwd=self.work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def hear(self, *commands: Sequence[object]) -> list[str]:
        """Return what commands of ddlkit print."""
        asked = json.dumps([[*map(str, words)] for words in commands])
        return list(json.loads(self.run("python", "-c", ANSWER, asked)))

    def ask(self, *commands: Sequence[object]) -> list[dict[str, Any]]:
        """Return what commands of ddlkit answer, of which export always writes JSON."""
        asked = []
        for words in commands:
            options = [] if words[0] == "export" else ["--json"]
            asked.append([*words, *options])
        return [dict(json.loads(text)) for text in self.hear(*asked)]


def run_pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    base = tmp_path_factory.mktemp("alone")
    environment = base / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    install = ("install", "--no-deps", "--no-index", str(wheel))
    run_pip("--python", str(python), *install)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folders = [base / name for name in ("work", "home", "scratch", "cache")]
    for folder in folders:
        folder.mkdir()
    made = Installed(environment, *folders)
    (made.work / "mine.py").write_text(MINE)
    (made.work / "trace.txt").write_text(TRACE)
    sizes = np.repeat(2 ** np.arange(10, 26), 5)
    seconds = ALPHA_S + BETA_S_PER_BYTE * sizes
    times = pd.DataFrame({"bytes": sizes, "seconds": seconds})
    times.to_csv(made.work / "times.csv", index=False)
    profile: dict[str, Any] = {
        "tensor": [f"t{place}" for place in range(TENSORS)],
        "gradient_bytes": TENSOR_BYTES,
        "forward_s": FORWARD_S,
        "backward_s": BACKWARD_S,
    }
    pd.DataFrame(profile).to_csv(made.work / "profile.csv", index=False)
    return made


@pytest.fixture
def writes_only_where_it_works(installed: Installed) -> Any:
    """Nothing else is written: no home, no temporary folder that stays, nothing beside the library."""
    before = snapshot(installed.environment)
    yield
    assert [*installed.home.iterdir()] == []
    assert [*installed.scratch.iterdir()] == []
    assert snapshot(installed.environment) == before


def snapshot(folder: Path) -> dict[str, int]:
    """Return when each file was last written."""
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("writes_only_where_it_works"),
]


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("/METADATA"))
        wanted = archive.read(metadata).decode()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"ddlkit", metadata.partition("/")[0]}
    sources = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "ddlkit").rglob("*.py")
    }
    held = {name for name in names if name.startswith("ddlkit/")}
    assert {name for name in held if name.endswith(".py")} == sources
    assert {"ddlkit/show.html", "ddlkit/show.mplstyle"} < held
    assert "Provides-Extra: plot" in wanted and "Provides-Extra: lab" not in wanted


def test_it_is_found_where_it_is_installed_and_the_workbook_nowhere(
    installed: Installed,
) -> None:
    code = "import ddlkit, importlib.util as u; print(ddlkit.__file__, u.find_spec('workbook'))"
    place, workbook = installed.run("python", "-c", code).split()
    assert Path(place).is_relative_to(installed.environment) and workbook == "None"
    assert ddlkit.__version__ in installed.run("ddlkit", "--version")


@pytest.fixture(scope="module")
def answers(installed: Installed) -> list[dict[str, Any]]:
    """What the library says of times and of a trace."""
    return installed.ask(
        ["fit", "times.csv", "--form", "alpha_beta", "--ranks", 4],
        ["fit", "times.csv", "--compare", "--ranks", 4],
        ["import", "trace.txt", "--out", "p.csv", "--batch", 4],
    )


def test_from_times_to_a_plan_and_an_advice(
    installed: Installed, answers: list[dict[str, Any]]
) -> None:
    fitted, _, _ = answers
    assert fitted["alpha_s"] == pytest.approx(ALPHA_S, rel=1e-3)
    assert fitted["beta_s_per_byte"] == pytest.approx(BETA_S_PER_BYTE, rel=1e-3)
    (installed.work / "cost.json").write_text(json.dumps(fitted))
    of = ("--profile", "profile.csv", "--cost", "cost.json")
    single, best, advised, caps = installed.ask(
        ["predict", *of, "--plan", "single"],
        ["plan", *of, "--planner", "exact"],
        ["advise", *of, "--html", "page.html"],
        ["export", "--to", "ddp", *of],
    )

    compute_s = TENSORS * (FORWARD_S + BACKWARD_S)
    message_s = ALPHA_S + BETA_S_PER_BYTE * TENSORS * TENSOR_BYTES
    assert single["compute_s"] == pytest.approx(compute_s)
    assert single["iteration_s"] == pytest.approx(compute_s + message_s, rel=1e-3)

    # A message of one gradient takes 25 ms, which is longer than a layer's backward pass: the
    # first one begins after a layer, and then each follows the one before.
    none_s = TENSORS * (FORWARD_S + ALPHA_S + BETA_S_PER_BYTE * TENSOR_BYTES)
    assert best["iteration_s"] <= none_s + BACKWARD_S
    assert best["iteration_s"] < single["iteration_s"]
    assert sorted(sum(best["groups"], [])) == [*range(TENSORS)]

    assert advised["ranks"] == 4 and advised["snippet"].startswith("Distributed")
    assert advised["best_plan"]["predicted_iteration_s"] >= best["iteration_s"]
    page = (installed.work / "page.html").read_text()
    assert "on 4 ranks" in page and ";base64," in page and "http" not in page

    assert len(caps["bucket_cap_mb_list"]) == len(best["groups"])


def test_forms_are_compared_and_drawn(
    installed: Installed, answers: list[dict[str, Any]]
) -> None:
    _, compared, _ = answers
    assert compared["drawing"] == "times-fits.png"
    image = (installed.work / "times-fits.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert compared["forms"]["alpha_beta"]["worst_error"] < 1e-6


def test_a_trace_becomes_a_profile(
    installed: Installed, answers: list[dict[str, Any]]
) -> None:
    _, _, imported = answers
    assert (imported["kind"], imported["tensors"]) == ("trace", 2)
    assert imported["backward_s"] == pytest.approx(36e-6)
    assert (installed.work / "p.csv").is_file()


def test_layers_are_measured_in_the_working_directory(installed: Installed) -> None:
    """Without --out the tables go to ``measured``; of networks by name the plan is made only.

    Both commands run in one process, because each would import torch.
    """
    measure = ["measure", "layers"]
    by_name = ["--networks", "squeezenet1_1:1", "--dry-run"]
    _, planned = installed.hear(
        [*measure, "--model", "mine.py:net", "--budget", "0.5s"], [*measure, *by_name]
    )
    (table,) = (installed.work / "measured").glob("layers*.csv")
    layers = store.load_table(table, "layers")
    assert layers["parameters"].sum() == 3 * 65 * 64
    assert (layers["backward_s"] >= 0).all()
    assert store.load_stamp(table)["commit"] == "unknown", "there is no clone"
    assert "squeezenet1_1-b1" in planned
