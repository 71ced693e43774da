"""What a machine says of itself is complete, stable and free of names that identify a person's host."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

import smi
from ddlkit.core.errors import UserError
from ddlkit.store import machine

SMI = """\
NVIDIA H200, 570.86.15, 143771, 9.0
NVIDIA H200, 570.86.15, 143771, 9.0
"""


def test_the_description_is_complete_plain_data() -> None:
    said = machine.describe()
    assert json.loads(json.dumps(said)) == said
    assert said["name"] == machine.name()
    assert said["cpu"]["model"] and said["cpu"]["cores"] >= 1
    assert said["memory_bytes"] > 2**27
    assert said["os"] and platform.release() in said["kernel"]
    assert all(
        {"model", "driver", "memory_bytes"} <= gpu.keys() for gpu in said["gpus"]
    )
    assert platform.node() not in json.dumps(
        [said[key] for key in ("cpu", "os", "gpus")]
    )


def test_names_keep_what_tells_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpus", tuple)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    slugs = {"Intel(R) Xeon(R) Platinum 8488C": "intel-xeon-8488c", "@": "unknown"}
    slugs["AMD EPYC 7B13 64-Core Processor"] = "amd-epyc-7b13"
    for model, slug in slugs.items():
        monkeypatch.setattr(machine, "_cpu_model", lambda model=model: model)
        assert machine.name() == f"cpu-2x-{slug}"


def test_gpus_name_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = machine.parse_gpus(SMI)
    assert gpus[0] == gpus[1] and gpus[0]["driver"] == "570.86.15"
    assert (
        gpus[0]["memory_bytes"] == 143771 * 2**20
        and gpus[0]["compute_capability"] == "9.0"
    )
    monkeypatch.setattr(machine, "_gpus", lambda: gpus)
    assert machine.name() == "2x-nvidia-h200"
    monkeypatch.setattr(machine, "_gpus", lambda: gpus[:1])
    assert machine.name() == machine.name("cuda") == "nvidia-h200"
    assert machine.name("cpu").startswith("cpu-")
    assert machine.parse_gpus("") == () == machine.parse_gpus("No devices were found\n")


# As printed by nvidia-smi 580 of two GPUs with NVLink and an adapter.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPXB\t0-47\t0
GPU1\tNV18\t X \tSYS\t48-95\t1
NIC0\tPXB\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def test_what_joins_gpus_is_read_from_their_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "output", lambda *command: f"{TOPOLOGY}{HOST}")
    monkeypatch.setattr(platform, "node", lambda: HOST)
    matrix = machine.topology.__wrapped__()
    assert "\x1b" not in matrix and HOST not in matrix and "mlx5_0" in matrix
    assert machine.gpu_link(matrix) == "nvlink"
    assert machine.gpu_link(matrix.replace("NV18\t X", "PHB\t X")) == "pcie"
    assert machine.gpu_link("") == "nccl"


def test_settings_of_gpus_are_kept_whatever_the_driver_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "clocks.max.sm": "1980",
        "power.limit": "700.00",
        "clocks_throttle_reasons.active": "0x0000000000000001",
    }
    smi.install(tmp_path, monkeypatch, known, known)
    settings = machine.gpu_settings()
    assert settings == 2 * [
        {
            "power_limit_w": "700.00",
            "sm_clock_mhz": "345",
            "most_sm_clock_mhz": "1980",
            "memory_clock_mhz": "3201",
            "throttle_reasons": "0x0000000000000001",
        }
    ]
    others = {
        "clocks_event_reasons.active": "0x4",
        "ecc.mode.current": "Enabled",
        "pcie.link.gen.max": "5",
        "pcie.link.width.max": "16",
    }
    smi.write(tmp_path, [known | others])
    (all_known,) = machine.gpu_settings()
    assert all_known["throttle_reasons"] == "0x4"
    assert all_known["ecc"] == "Enabled" and all_known["pcie_generation"] == "5"


HOST = "node0017"


def test_no_variable_of_nccl_names_a_host_or_a_folder() -> None:
    environment = {
        "NCCL_ALGO": "Ring,Tree",
        "NCCL_COMM_ID": f"{HOST}:4000",
        "NCCL_DEBUG_FILE": f"/opt/somebody/{HOST}.log",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PATH": "/bin",
    }
    kept = machine.nccl_variables(environment)
    assert kept.keys() == environment.keys() - {"PATH"}
    assert kept["NCCL_ALGO"] == "Ring,Tree"
    assert "somebody" not in str(kept) and f"{HOST}:" not in str(kept)


def _git(directory: Path, *arguments: str) -> str:
    who = (
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "commit.gpgsign=false",
    )
    done = subprocess.run(
        ["git", *who, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_commit_says_when_the_code_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, data = tmp_path / "code", tmp_path / "data"
    for directory in (code, data):
        directory.mkdir()
    monkeypatch.setenv("DDLKIT_COMMIT", "")
    _git(tmp_path, "init", "--quiet")
    assert machine.commit(code) == "unknown", "no commit yet"
    (code / "a.py").write_text("1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "-m", "one")
    head = _git(tmp_path, "rev-parse", "HEAD")[:12]
    monkeypatch.setenv("DDLKIT_COMMIT", "0" * 12)  # git knows better
    assert machine.commit(code) == head
    (data / "rows.csv").write_text("recorded\n")
    assert machine.commit(code) == head, "new rows are not new code"
    (code / "a.py").write_text("2\n")
    assert machine.commit(code) == head + "+dirty"
    installed = tmp_path / "venv"
    installed.mkdir()
    (installed / "a.py").write_text("1\n")
    monkeypatch.setenv("DDLKIT_COMMIT", "")
    assert machine.commit(installed) == "unknown", "the repository is another's"


def test_a_copied_tree_takes_its_commit_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = "0123456789abcdef" * 2
    for said, commit in (("", "unknown"), (digits + "+dirty", "0123456789ab+dirty")):
        monkeypatch.setenv("DDLKIT_COMMIT", said)
        assert machine.commit(tmp_path) == commit
    monkeypatch.setenv("DDLKIT_COMMIT", "main")
    with pytest.raises(
        UserError, match="^DDLKIT_COMMIT is '.*: give 7 to 40 hex digits"
    ):
        machine.commit(tmp_path)
