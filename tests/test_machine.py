"""What a machine says of itself is complete, stable and free of names that identify a person's host."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddlkit import machine

SMI = """\
NVIDIA H200, 570.86.15, 143771, 9.0
NVIDIA H200, 570.86.15, 143771, 9.0
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tNODE\tPIX\t0-31\t0
GPU2\tSYS\tNODE\t X \tSYS\t32-63\t1
NIC0\tPIX\tPIX\tSYS\t X
"""


def test_the_description_is_complete_plain_data() -> None:
    said = machine.describe()
    assert json.loads(json.dumps(said)) == said
    assert said["name"] == machine.name()
    assert said["cpu"]["model"] and said["cpu"]["cores"] >= 1
    assert said["memory_bytes"] > 2**27
    assert said["os"] and platform.release() in said["kernel"]
    assert all({"model", "driver", "memory_bytes"} <= gpu.keys() for gpu in said["gpus"])
    assert all(link["bits_per_s"] >= 0 and link["kind"] for link in said["links"])
    assert "lo" not in [link["name"] for link in said["links"]]
    assert platform.node() not in json.dumps([said[key] for key in ("cpu", "os", "gpus")])


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8488C", "intel-xeon-8488c"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "intel-core-i7-8650u"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13"),
        ("AMD EPYC", "amd-epyc"),
        ("Apple M2 Pro", "apple-m2-pro"),
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("@", "unknown"),
    ],
)
def test_names_keep_what_tells_machines_apart(
    monkeypatch: pytest.MonkeyPatch, model: str, slug: str
) -> None:
    monkeypatch.setattr(machine, "_gpus", tuple)
    monkeypatch.setattr(machine, "_cpu_model", lambda: model)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.name() == f"cpu-2x-{slug}"


def test_gpus_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = machine.parse_gpus(SMI)
    assert gpus[0] == gpus[1] and gpus[0]["driver"] == "570.86.15"
    assert gpus[0]["memory_bytes"] == 143771 * 2**20 and gpus[0]["compute_capability"] == "9.0"
    monkeypatch.setattr(machine, "_gpus", lambda: gpus)
    assert machine.name() == "2x-nvidia-h200"
    monkeypatch.setattr(machine, "_gpus", lambda: gpus[:1])
    assert machine.name() == "nvidia-h200"
    assert machine.parse_gpus("") == () == machine.parse_gpus("No devices were found\n")


def test_each_pair_of_gpus_has_one_link() -> None:
    links = machine.parse_gpu_links(TOPOLOGY)
    assert {link["name"]: link["type"] for link in links} == {
        "GPU0-GPU1": "NV18",
        "GPU0-GPU2": "SYS",
        "GPU1-GPU2": "NODE",
    }
    assert machine.parse_gpu_links("") == []


def test_versions_are_the_same_with_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = machine.versions()
    assert loaded["torch"] == torch.__version__ and loaded["python"] == platform.python_version()
    assert all(loaded[name] for name in ("numpy", "pandas", "cuda", "nccl"))
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.versions() == loaded
    assert "torch" not in sys.modules


def _git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *who, *arguments], cwd=directory, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_says_when_the_code_differs_from_it(tmp_path: Path) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    for directory in (code, data):
        directory.mkdir()
    assert machine.commit(code) == "unknown"
    _git(tmp_path, "init", "--quiet")
    assert machine.commit(code) == "unknown", "no commit yet"
    (code / "a.py").write_text("1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "-m", "one")
    head = _git(tmp_path, "rev-parse", "HEAD")[:12]
    assert machine.commit(code) == head
    (data / "rows.csv").write_text("recorded\n")
    assert machine.commit(code) == head, "new rows are not new code"
    (code / "a.py").write_text("2\n")
    assert machine.commit(code) == head + "+dirty"


def test_missing_programs_and_files_are_silence() -> None:
    assert machine.output("no-such-program-anywhere") == ""
    assert machine.output(sys.executable, "-c", "print(1); raise SystemExit(1)") == ""
    assert machine.content(Path("/no/such/file")) == ""
