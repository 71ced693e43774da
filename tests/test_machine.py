"""What a machine says of itself is complete, stable and free of names that identify a person's host."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    both = ["GPU-a", "GPU-b"]
    links = machine.links_between_gpus(matrix, both)
    assert links == {"GPU-a": {"GPU-b": "NV18"}, "GPU-b": {"GPU-a": "NV18"}}
    assert machine.gpu_link(both, links) == "nvlink"
    over_pcie = machine.links_between_gpus(matrix.replace("NV18", "PHB"), both)
    assert machine.gpu_link(both, over_pcie) == "pcie"
    # Slurm shows each task its own GPU only, so nothing says what joins two of them.
    for alone in ("", "     GPU0 NIC0\nGPU0  X   PXB\nNIC0 PXB  X"):
        links = machine.links_between_gpus(alone, ["GPU-a"])
        assert machine.gpu_link(["GPU-a"], links) == "nccl"
        assert machine.gpu_link(both, links) == "nccl"


def test_only_the_gpus_that_are_used_decide_what_joins_them() -> None:
    """Two pairs of GPUs, each joined by NVLink, of which CUDA may use one pair."""
    names = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
    matrix = """\
        GPU0 GPU1 GPU2 GPU3 CPU Affinity
    GPU0  X   NV4  SYS  SYS  0-31
    GPU1 NV4   X   SYS  SYS  0-31
    GPU2 SYS  SYS   X   NV4  32-63
    GPU3 SYS  SYS  NV4   X   32-63
    """
    links = machine.links_between_gpus(matrix, names)
    for visible, link in (
        ("2,3", "nvlink"),
        ("1,2", "pcie"),
        ("GPU-c,GPU-d", "nvlink"),
        (None, "pcie"),
        # CUDA ignores what follows an entry that it does not know.
        ("0,9,1", "nccl"),
        ("", "nccl"),
    ):
        assert machine.gpu_link(machine.visible_gpus(visible, names), links) == link


def test_a_driver_tells_of_gpus_that_a_process_may_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_glob = Path.glob

    def glob(path: Path, pattern: str) -> Any:
        if path == Path("/proc/driver/nvidia/gpus"):
            return iter([path / "0000:18:00.0", path / "0000:2a:00.0"])
        return real_glob(path, pattern)

    monkeypatch.setattr(machine, "_gpus", tuple)
    monkeypatch.setattr(Path, "glob", glob)
    assert machine.gpus_of_node() == 2


@pytest.mark.parametrize("number", [91002, 8907, 90100, 0])
def test_cudnn_has_one_form_whether_or_not_torch_is_loaded(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = {91002: "9.10.2", 8907: "8.9.7", 90100: "9.1.0", 0: "none"}[number]
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number or None)
    assert machine.versions()["cudnn"] == version
    package = version if version == "none" else f"{version}.21"
    monkeypatch.setattr(machine, "installed", lambda name: package)
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.versions()["cudnn"] == version


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


@pytest.mark.parametrize(
    ("variable", "value", "kept"),
    [
        ("NCCL_RAS_ADDR", "node17.site.edu:28028", "(set)"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0/16", "(set)"),
        ("NCCL_IB_ADDR_FAMILY", "AF_INET", "AF_INET"),
        ("NCCL_NEW_PEER", "10.12.0.3:4000", "(address):4000"),
        ("NCCL_NEW_PEER", "fe80::1:2/64", "(address)"),
        ("NCCL_NEW_PEER", "gpu3.cluster.site.org", "(host)"),
        # The nodes of a cluster differ in the digits of their names.
        ("NCCL_NEW_PEER", "node0018,node0017.local", "(host),(host).local"),
        ("NCCL_DEBUG_FILE", "/tmp/nccl_node0018.log", "nccl_(host).log"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_SOCKET_IFNAME", "eth0,ib0", "eth0,ib0"),
        ("NCCL_TOPO_FILE", "/opt/site/h200.xml", "h200.xml"),
        ("NCCL_ALGO", "allreduce:tree,ring;all:^nvls", "allreduce:tree,ring;all:^nvls"),
    ],
)
def test_names_of_hosts_and_addresses_are_replaced_and_settings_are_kept(
    variable: str, value: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: f"{HOST}.local")
    assert machine.nccl_variables({variable: value}) == {variable: kept}


def test_files_of_nccl_are_read_as_nccl_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_site, of_user = tmp_path / "site.conf", tmp_path / "user.conf"
    of_site.write_text("# site\nNCCL_ALGO=Ring\nNCCL_PROTO=Simple\nNCCL_NTHREADS=256\n")
    of_user.write_text("NCCL_PROTO=LL\nNCCL_NTHREADS=128\nno variable\n")
    monkeypatch.setattr(machine, "NCCL_CONF", of_site)
    monkeypatch.setenv("NCCL_CONF_FILE", str(of_user))
    monkeypatch.setenv("NCCL_NTHREADS", "512")
    kept = machine.describe()["nccl_variables"]
    assert kept["NCCL_ALGO"] == "Ring", "of the site alone"
    assert kept["NCCL_PROTO"] == "LL", "the user's file comes before that of the site"
    assert kept["NCCL_NTHREADS"] == "512", "the environment comes before all files"
    assert kept["NCCL_CONF_FILE"] == "user.conf"


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
