"""Collectives in a job of torchrun or Slurm: who a rank is, what it measures, and what is refused."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import failing_rank
import few_sizes
from ddlkit import cli, jobs, store
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.jobs import assignment, machines
from ddlkit.jobs import rank as peers
from ddlkit.jobs.rank import Layout, Rank, everyones_text, joined, layout
from ddlkit.measure import cluster, parts
from ddlkit.measure import collectives as messages
from ddlkit.measure.session import engine
from ddlkit.store import machine
from forked import two_ranks
from places import PATIENCE_S, ROOT, free_port

MODELS = Path(__file__).with_name("given_models.py")

# What srun sets in the 11th of 16 tasks, 8 on each of two nodes, however it was asked for them.
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "10",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "8(x2)",
}
TORCHRUN = {
    "RANK": "10",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "8",
}


# -- who a rank is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "gpus", "backend", "gpu"),
    [
        (SRUN, 8, "nccl", 2),
        # --gpus-per-task=1: each task sees its own GPU only.
        (SRUN, 1, "nccl", 0),
        # --gpus-per-task=2, and GPUs that are bound by socket.
        (SRUN, 2, "nccl", 0),
        (SRUN | {"SLURM_LOCALID": "7"}, 4, "nccl", 3),
        (SRUN | {"SLURM_NTASKS_PER_NODE": "8"}, 8, "nccl", 2),
        (SRUN | {"SLURM_TASKS_PER_NODE": "12,8,4(x3)"}, 8, "nccl", 2),
        (SRUN, 0, "gloo", None),
        # A step of 16 tasks in a job of 32.
        (SRUN | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "32"}, 8, "nccl", 2),
        (TORCHRUN, 8, "nccl", 2),
        # torchrun in a Slurm job of two launchers.
        (
            {**SRUN, "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", **TORCHRUN},
            8,
            "nccl",
            2,
        ),
    ],
)
def test_variables_of_launchers_decide_backend_and_gpu(
    environment: Mapping[str, str], gpus: int, backend: str, gpu: int | None
) -> None:
    mine = assignment.numbers(environment)
    local_rank = int(environment.get("SLURM_LOCALID", 2))
    assert mine[:4] == (10, 16, local_rank, 8)
    assert assignment.ranks_started(environment) == 16
    assert assignment.is_started_by_launcher(environment)
    chosen = assignment.choose_backend(
        None, mine.ranks_on_node, gpus, by_slurm=mine.by_slurm
    )
    assert chosen == backend
    if gpu is not None:
        assert assignment.gpu_of(mine.local_rank, gpus) == gpu


def test_gloo_is_never_chosen_unasked_on_a_node_with_gpus() -> None:
    for gpus in range(1, 9):
        for ranks in range(1, 17):
            for by_slurm in (False, True):
                try:
                    chosen = assignment.choose_backend(
                        None, ranks, gpus, by_slurm=by_slurm
                    )
                except UserError as error:
                    assert ranks > gpus and "needs a GPU for each rank" in str(error)
                else:
                    assert chosen == "nccl"
                asked = assignment.choose_backend(
                    "gloo", ranks, gpus, by_slurm=by_slurm
                )
                assert asked == "gloo"


@pytest.mark.parametrize("by_slurm", [False, True])
def test_gpus_that_torch_does_not_see_are_not_replaced_by_processors_unasked(
    by_slurm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old driver, a torch without CUDA, or srun without GPUs, on a node that has eight."""
    monkeypatch.setattr(machine, "gpus_of_node", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in (SRUN if by_slurm else TORCHRUN).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"GPUs \(8\), but torch sees none: .*CUDA"):
        Rank.join()
    # Who asks for gloo, or hides the GPUs, means the processors: the next thing that is
    # missing is where to meet.
    no_address = "MASTER_ADDR or MASTER_PORT is not set"
    with pytest.raises(UserError, match=no_address):
        Rank.join("gloo")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        with pytest.raises(UserError, match=no_address):
            Rank.join()


@pytest.mark.parametrize(
    "words",
    [
        ["trace", "--model", f"{MODELS}:batch_normalized"],
        ["advise", "--model", f"{MODELS}:batch_normalized"],
        ["measure", "collectives"],
    ],
)
def test_ranks_of_a_laptop_whose_gpu_torch_does_not_see_run_on_processors(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under no launcher gloo is chosen, and a line says so. No rank starts here."""
    backends = []

    def end(members: parts.Ranks, *arguments: Any, **options: Any) -> None:
        backends.append(members.join["backend"])
        raise UserError("no rank starts")

    def end_session(*arguments: Any, **options: Any) -> None:
        raise UserError("no rank starts")

    monkeypatch.setattr(machine, "gpus_of_node", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(parts.Ranks, "run", end)
    monkeypatch.setattr(engine, "run_session", end_session)
    command = [*words, "--ranks", "2", "--out", str(tmp_path / "out")]
    for visible in (None, "-1"):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cli.main(command) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].endswith("no rank starts")
        told = [line for line in lines if "GPUs (1), but torch sees none" in line]
        assert len(told) == (visible is None)
    # A session asks for the backend later, in a process of its own.
    assert set(backends) <= {"gloo"}


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")
def test_ranks_of_a_launcher_meet_under_the_policy_of_ranks_that_are_started_here(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise times of gloo's messages would depend on who started the ranks."""
    policies = []

    def meet(*arguments: Any, **options: Any) -> None:
        policies.append(os.sched_getscheduler(0))
        raise RuntimeError("no other rank")

    def refuse(*arguments: Any) -> None:
        raise PermissionError("by the administrator")

    monkeypatch.setattr(dist, "init_process_group", meet)
    monkeypatch.setattr(machine, "gpus_of_node", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    before = os.sched_getscheduler(0)
    if not allowed:
        monkeypatch.setattr(os, "sched_setscheduler", refuse)
    for name, value in {**TORCHRUN, "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(UserError, match="did not meet at ::1 port 1: no other rank"),
        joined(PATIENCE_S),
    ):
        pass
    assert policies == [os.SCHED_BATCH if allowed else before]
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_alone_says_so_and_can_be_ended(rank: int) -> None:
    port = str(free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    numbers = {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    waits_alone = (
        "import sys\nfrom ddlkit import cli\nfrom ddlkit.jobs import rank\n"
        "rank.SILENT_S = 0.5\nsys.exit(cli.main(['measure', 'collectives']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waits_alone],
        env={**os.environ, **meeting, **numbers},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        # torch may print lines of its own.
        line = next(each for each in process.stderr if each.startswith("ddlkit: "))
        assert "127.0.0.1" in line and port in line
        process.terminate()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGTERM


def test_two_ranks_on_one_gpu_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of NCCL 2.28, which torch prints behind many others."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
            "details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects "
            "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : "
            "rank 1 and rank 0 both on CUDA device 1b000"
        )

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^two ranks have the same GPU: ") as caught:
        Rank.join("gloo")
    assert "--gpus-per-task=1" in str(caught.value) and "port" not in str(caught.value)


def test_the_script_of_a_slurm_job_is_no_rank() -> None:
    script = {name: text for name, text in SRUN.items() if name != "SLURM_STEP_ID"}
    assert assignment.ranks_started(script) == 1
    assert not assignment.is_started_by_launcher(script)
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE is 8x2: start ranks"):
        assignment.numbers(SRUN | {"SLURM_TASKS_PER_NODE": "8x2"})
    of_step = {"SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "8x2"}
    with pytest.raises(UserError, match="^SLURM_STEP_TASKS_PER_NODE is 8x2"):
        assignment.numbers(SRUN | of_step)


def test_the_shell_of_salloc_is_one_rank() -> None:
    """Also where SLURM_NTASKS is the number of the job there."""
    shell = {
        **SRUN,
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_PROCID": "0",
    }
    assert assignment.ranks_started(shell) == 1
    assert assignment.numbers(shell).world_size == 1


# -- what is measured ------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The table of a job of two ranks with the variables of torchrun, and what each says."""
    folder = tmp_path_factory.mktemp("job")
    words = ["measure", "collectives", "--minutes", "1s", "--out", str(folder)]
    statuses, said = two_ranks(partial(few_sizes.main, words), folder)
    assert statuses == [0, 0], said
    return folder / "collectives-gloo-loopback-p2-n1.csv", said


def test_two_agents_of_torchrun_measure_collectives_in_one_job(
    job: tuple[Path, list[str]],
) -> None:
    """By the variables that torchrun gives each of two ranks."""
    path, said = job
    assert [str(path) in each for each in said] == [True, False], "rank 0 alone saves"
    assert "gloo between 2 ranks on 1 node" in said[0] and "not NCCL" in said[0]
    # Each message of the whole measurement is counted once.
    progress = re.findall(r"(\d+) of (\d+) messages", said[0])
    n_messages = len(COLLECTIVES) * len(few_sizes.SIZES)
    counted = range(1, n_messages + 1)
    assert progress == [(str(number), str(n_messages)) for number in counted]
    rows = store.load_table(path, "collectives")
    assert set(rows["collective"]) == set(COLLECTIVES)
    assert set(rows["bytes"]) == set(few_sizes.SIZES)
    labels = rows[["backend", "link", "ranks", "nodes", "ranks_per_node", "clock"]]
    assert labels.drop_duplicates().to_numpy().tolist() == [
        ["gloo", "loopback", 2, 1, 2, "wall"]
    ]
    assert (rows["fastest_s"] > 0).all()
    assert (rows["fastest_s"] <= rows["seconds"]).all()
    described = store.load_stamp(path)["machine"]
    assert described["ranks"]["torch"] == machine.versions()["torch"]
    clocks = described["clocks"]
    assert [entry["collective"] for entry in clocks] == [*COLLECTIVES]
    assert all(entry["bytes"] == [*few_sizes.SIZES] for entry in clocks)
    assert all(entry["ranks"] == [{}, {}] for entry in clocks)
    assert platform.node() not in json.dumps(described | {"kernel": ""})


def test_ranks_of_gpus_post_many_small_messages_up_to_a_gigabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank that says it is NCCL's: the host's logic, with a fake at the boundary to CUDA."""
    asked: list[messages.CollectivesSettings] = []
    monkeypatch.setattr(messages, "NCCL_SIZES", (1024, 4096))
    monkeypatch.setattr(cluster, "link_of", lambda me, layout: "nvlink")
    real_part = messages.collectives_job.part

    def part(me: Rank, settings: messages.CollectivesSettings) -> Any:
        asked.append(settings)
        return real_part(me, settings)

    noting = replace(messages.collectives_job, part=part)
    monkeypatch.setattr(cluster, "collectives_job", noting)
    with joined(PATIENCE_S) as me:
        of_nccl = replace(me, backend="nccl")
        path = cluster.measure_collectives(of_nccl, tmp_path, minutes=0.01)
        n_asked = len(asked)
        # A second call finds nothing to do, and one with a further size measures that.
        assert cluster.measure_collectives(of_nccl, tmp_path, minutes=0.01) == path
        assert len(asked) == n_asked == 1, "collectives that lack the same share a job"
        monkeypatch.setattr(messages, "NCCL_SIZES", (1024, 4096, 8192))
        cluster.measure_collectives(of_nccl, tmp_path, minutes=0.01)
    rows = store.load_table(path, "collectives")
    assert path.name == "collectives-nccl-nvlink-p1-n1.csv"
    assert set(rows["clock"]) == {"device"} and set(rows["link"]) == {"nvlink"}
    assert {settings.messages_per_sample for settings in asked} == {16}
    assert set(rows["messages_per_sample"]) == {16}
    assert [settings.sizes for settings in asked[n_asked:]] == [(8192,)]
    assert all([*settings.collectives] == [*COLLECTIVES] for settings in asked)
    assert set(rows["bytes"]) == {1024, 4096, 8192}
    # The clocks after each measurement stay, also those of the earlier ones.
    clocks = store.load_stamp(path)["machine"]["clocks"]
    sizes = [entry["bytes"] for entry in clocks]
    assert sizes == 3 * [[1024, 4096]] + 3 * [[8192]]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"NCCL_ALGO": "Ring"}, "the NCCL_ALGO is none, and here it is Ring"),
        ({"driver": "570.86"}, "the driver is 580.65, and here it is 570.86"),
        ({}, "holds a recording of nvidia-h200, this is 8x-nvidia-b200"),
    ],
)
def test_rows_of_other_machines_or_settings_are_not_mixed_into_a_table(
    changed: dict[str, str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "SIZES", (1024,))
    monkeypatch.setattr(machine, "name", lambda: "nvidia-h200")
    monkeypatch.setattr(cluster, "this_machine", lambda: {"name": machine.name()})
    monkeypatch.setattr(cluster, "shared_facts", lambda me: dict(FACTS))
    with joined(PATIENCE_S) as me:
        path = cluster.measure_collectives(me, tmp_path, minutes=0.01)
        before = path.read_text()
        monkeypatch.setattr(messages, "SIZES", (1024, 2048))
        monkeypatch.setattr(cluster, "shared_facts", lambda me: FACTS | changed)
        if not changed:
            monkeypatch.setattr(machine, "name", lambda: "8x-nvidia-b200")
    with pytest.raises(UserError, match=complaint), joined(PATIENCE_S) as me:
        cluster.measure_collectives(me, tmp_path, minutes=0.01)
    assert path.read_text() == before


def test_messages_between_gpus_reach_a_gigabyte() -> None:
    assert messages.NCCL_SIZES[0] == 2**10 and messages.NCCL_SIZES[-1] == 2**30


def test_links_are_named_by_what_joins_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = Rank(0, 16, 0, torch.device("cpu"), "nccl", 1)
    assert cluster.link_of(me, Layout(2, 8)) == "network"
    assert cluster.link_of(replace(me, backend="gloo"), Layout(1, 16)) == "loopback"
    assert cluster.link_of(replace(me, backend="gloo"), Layout(2, 8)) == "network"
    # Between GPUs of one node, the ranks exchange which GPU each has and what joins it to
    # others. This rank has GPU-a, and the other one, whose text is added, has GPU-b.
    monkeypatch.setattr(cluster, "_gpu_uuid", lambda me: "GPU-a")
    all_gpus = "GPU0 X SYS NV18\nGPU1 SYS X SYS\nGPU2 NV18 SYS X"
    for other, matrix, names, link in (
        ("GPU-b", all_gpus, ("GPU-a", "GPU-c", "GPU-b"), "nvlink"),
        ("GPU-c", all_gpus, ("GPU-a", "GPU-c", "GPU-b"), "pcie"),
        # --gpus-per-task=1 hides the other GPU.
        ("GPU-b", "GPU0 X", ("GPU-a",), "nccl"),
        ("GPU-b", "", (), "nccl"),
    ):
        of_other = json.dumps({"gpu": other, "links": {}})
        monkeypatch.setattr(machine, "topology", lambda matrix=matrix: matrix)
        monkeypatch.setattr(machine, "gpu_uuids", lambda names=names: names)
        monkeypatch.setattr(
            peers, "everyones_text", lambda text, more=of_other: [text, more]
        )
        assert cluster.link_of(me, Layout(1, 2)) == link
        monkeypatch.undo()
        monkeypatch.setattr(cluster, "_gpu_uuid", lambda me: "GPU-a")


def test_ranks_of_this_machine_are_joined_by_what_joins_the_gpus_that_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = "GPU0 X SYS NV18\nGPU1 SYS X SYS\nGPU2 NV18 SYS X"
    monkeypatch.setattr(machine, "topology", lambda: matrix)
    monkeypatch.setattr(machine, "gpu_uuids", lambda: ("GPU-a", "GPU-c", "GPU-b"))
    for visible, link in ((None, "pcie"), ("0,2", "nvlink"), ("2,0,1", "nvlink")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert parts.Ranks.of(2, "cuda").place().name == link


def test_more_ranks_have_more_time_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "topology", lambda: "")
    two, eight = (parts.Ranks.of(count, "cuda") for count in (2, 8))
    assert two.join == {"backend": "nccl", "timeout_s": 20.0}
    assert eight.join == {"backend": "nccl", "timeout_s": 60.0}
    assert (
        two.place().name == "nccl"
        and parts.Ranks.of(2, "cpu").place().name == "loopback"
    )


def test_texts_of_any_length_are_exchanged_whole() -> None:
    with joined(PATIENCE_S):
        for text in ("", "a", "Überlänge " * 100):
            assert everyones_text(text) == [text]
        assert layout() == (1, 1)
    assert not dist.is_initialized()


# -- what is refused -------------------------------------------------------------------

FACTS = {
    "processor": "Xeon",
    "gpu": "NVIDIA H200",
    "driver": "580.65",
    "nccl": "2.28.9",
}


@pytest.mark.parametrize("fact", [*FACTS])
def test_a_mix_of_machines_is_refused_and_named(fact: str) -> None:
    same = json.dumps(FACTS)
    assert machines.equal_machines([same] * 3) == FACTS
    other = json.dumps(FACTS | {fact: "other"})
    with pytest.raises(
        UserError,
        match=f"the {fact} of rank 0 is {FACTS[fact]}, that of rank 2 is other",
    ):
        machines.equal_machines([same, same, other])


def test_variables_of_nccl_that_differ_between_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = Rank(0, 2, 0, torch.device("cpu"), "nccl", 1)
    texts = []
    for value in ("Ring", "Tree"):
        monkeypatch.setenv("NCCL_ALGO", value)
        monkeypatch.setenv("NCCL_DEBUG_FILE", f"log-{value}")
        monkeypatch.setenv("NCCL_TOPO_DUMP_FILE", f"topology-{value}")
        monkeypatch.setenv("NCCL_IB_HCA", f"mlx5_{value}")
        texts.append(json.dumps(machines.facts_of(me)))
    with pytest.raises(UserError, match="NCCL_ALGO of rank 0 is Ring, .* is Tree"):
        machines.equal_machines(texts)
    # The names of adapters may differ, and are kept for the table.
    others = [text.replace("Tree", "Ring") for text in texts]
    others[1] = others[1].replace("mlx5_Ring", "mlx5_Tree")
    assert machines.equal_machines(others)["NCCL_IB_HCA"] == "mlx5_Ring"
    # Where logs and dumps go may differ, and gloo obeys none of these variables.
    assert not {"NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE"} & {*json.loads(texts[0])}
    assert "NCCL_ALGO" not in machines.facts_of(replace(me, backend="gloo"))


def test_gpus_do_not_start_apart() -> None:
    settings = messages.CollectivesSettings(["all_gather"], [1024], apart_s=0.005)
    with joined(PATIENCE_S) as me:
        rows = messages.collectives_job.part(replace(me, backend="nccl"), settings)
        with pytest.raises(UserError, match="GPUs start together with NCCL"):
            next(iter(rows))


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["quick"], "started 2 processes, and each would measure this part for itself"),
        (["collectives", "--lab", "1gbit"], "--lab has no effect under torchrun"),
        (["collectives", "--minutes", "0"], "--minutes 0: give a finite time"),
        (["collectives", "--link", "a/../../up"], "is not the name of a link"),
        (["collectives", "--link", ".."], "is not the name of a link"),
    ],
)
def test_what_a_job_cannot_measure_is_refused_before_ranks_meet(
    argv: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["measure", *argv]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("trace", "--ranks", "2"),
        ("advise", "--ranks", "2"),
        ("advise", "--lab", "1gbit"),
    ],
)
def test_the_ranks_of_a_job_are_not_asked_for_again(
    command: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    # The machine of the test may have no lab.
    monkeypatch.setattr("ddlkit.cli.advising.require_lab", lambda lab: None)
    model = "torchvision:resnet18:1"
    argv = [command, "--model", model, "--out", str(tmp_path / "new"), option, value]
    assert cli.main(argv) == 2
    assert f"{option} has no effect under torchrun" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_time_of_a_job_is_no_option_without_one(capsys: Any) -> None:
    assert cli.main(["measure", "collectives", "--minutes", "1"]) == 2
    complaint = capsys.readouterr().err
    assert "--minutes has an effect only" in complaint
    assert "under torchrun or srun" in complaint


@pytest.mark.parametrize("started_by", ["WORLD_SIZE", "SLURM_STEP_ID"])
def test_a_job_of_one_process_is_told_that_it_needs_more(
    started_by: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(started_by, "1")
    assert cli.main(["measure", "collectives", "--minutes", "1"]) == 2
    complaint = "between two or more ranks, and torchrun or srun started one process"
    assert complaint in capsys.readouterr().err


# -- what ends all ranks ---------------------------------------------------------------


@pytest.mark.fault(
    fault="one rank of torchrun or Slurm fails, and the others wait for it",
    injected="a wrong sum on rank 1 of 2, or a damaged table that rank 0 alone reads; parting from "
    "the others would take for ever, as with NCCL",
    holds="both ranks end within seconds, each with the same line",
)
@pytest.mark.parametrize("wrong", ["sum", "table"])
def test_a_failure_of_one_rank_ends_all_with_one_line(
    wrong: str, tmp_path: Path
) -> None:
    if wrong == "table":
        (tmp_path / "collectives-gloo-loopback-p2-n1.csv").write_text("damaged")
    words = ["measure", "collectives", "--minutes", "1s", "--out", str(tmp_path)]
    statuses, said = two_ranks(
        partial(failing_rank.main, wrong, words), tmp_path, on_one_node=True
    )
    assert statuses == [2, 2], said
    last_lines = [each.splitlines()[-1] for each in said]
    complaint = {
        "sum": "all_reduce of 1 KiB on rank 1: 1 of 256 elements came out wrong",
        "table": "collectives-gloo-loopback-p2-n1",
    }[wrong]
    assert last_lines[0] == last_lines[1] and complaint in last_lines[0]


def test_a_file_in_the_place_of_the_directory_ends_all_ranks_with_a_line(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tables"
    file.touch()
    words = ["measure", "collectives", "--out", str(file)]
    statuses, said = two_ranks(partial(cli.main, words), tmp_path, on_one_node=True)
    assert statuses == [2, 2], said
    for rank, line in enumerate(each.splitlines()[-1] for each in said):
        assert line.count(str(file)) == 1
        assert ("rank 0 cannot use it" in line) == (rank == 1)


def test_a_command_does_not_end_its_process_for_an_earlier_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(jobs, "end_at_once", ends.append)
    jobs.note_failure_of_rank()
    assert cli.main(["measure", "unknown"]) == 2
    assert not ends and not jobs.rank_has_failed()


# -- the example for Slurm -------------------------------------------------------------

# Plays srun: checks its options, and starts the command twice with the variables of Slurm.
SRUN_PROGRAM = """\
#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 && $2 == --cpus-per-task=4 ]] || exit 9
shift 2
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $!
"""
# Play python and ddlkit: the same commands, with few sizes and little time.
PYTHON_PROGRAM = """\
#!/bin/bash
[[ "$1 $2 $3 $4 $5 $6" == "-m ddlkit measure collectives --minutes 5" ]] || exit 8
shift 6
exec {python} -m few_sizes measure collectives --minutes 1s "$@"
"""
DDLKIT_PROGRAM = """\
#!/bin/bash
exec {python} -m ddlkit "$@"
"""


# Plays python for each rank: it notes its variables, and rank 0 has the table of a job.
NOTING_PROGRAM = """\
#!/bin/bash
[[ "$1 $2 $3 $4 $5 $6 $7" == "-m ddlkit measure collectives --minutes 5 --out" ]] || exit 8
env > "variables-$SLURM_PROCID"
((SLURM_PROCID == 0)) || exit 0
mkdir "$8" && cp "$TABLE"* "$8"
"""


def run_example(folder: Path, python: str, **variables: str) -> str:
    """The command that the example prints last, run by programs that play Slurm and python."""
    programs = {
        "scontrol": "#!/bin/bash\necho 127.0.0.1\n",
        "srun": SRUN_PROGRAM,
        "python": python.format(python=sys.executable),
        "ddlkit": DDLKIT_PROGRAM.format(python=sys.executable),
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = ROOT / "examples" / "slurm_collectives.sh"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.M))
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        **variables,
    }
    done = subprocess.run(
        [script, "my tables"],
        timeout=PATIENCE_S,
        env=environment,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1].partition(": ")[2]
    table = Path("my tables", "collectives-gloo-loopback-p2-n1.csv")
    assert Path(shlex.split(command)[2]) == table
    return command


def test_the_example_for_slurm_numbers_its_ranks_and_prints_a_command_that_fits(
    job: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That ranks with these variables meet and measure is tested in test_launch.py."""
    command = run_example(tmp_path, NOTING_PROGRAM, TABLE=str(job[0]))
    for rank in range(2):
        lines = (tmp_path / f"variables-{rank}").read_text().splitlines()
        noted = dict(line.split("=", 1) for line in lines if "=" in line)
        assert assignment.numbers(noted)[:4] == (rank, 2, rank, 2)
        assert noted["MASTER_ADDR"] == "127.0.0.1"
        assert 20000 <= int(noted["MASTER_PORT"]) < 30000
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    assert program == "ddlkit" and cli.main(words) == 0


@pytest.mark.rehearsal
@pytest.mark.slow
def test_the_example_for_slurm_measures_and_prints_a_command_that_fits(
    tmp_path: Path,
) -> None:
    command = run_example(tmp_path, PYTHON_PROGRAM)
    path = f"{tmp_path}:{os.environ['PATH']}"
    fitted = subprocess.run(
        ["bash", "-c", command],
        timeout=PATIENCE_S,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert fitted.returncode == 0, fitted.stderr
