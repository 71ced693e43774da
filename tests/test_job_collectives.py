"""Collectives in a job of torchrun or Slurm: who a rank is, what it measures, and what is refused."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import few_sizes
from ddlkit import cli, store
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.jobs import assignment, machines
from ddlkit.jobs.rank import Layout, Rank, everyones_text, joined, layout
from ddlkit.measure import cluster, parts
from ddlkit.measure import collectives as messages
from ddlkit.store import machine
from places import PATIENCE_S
from test_models import two_agents

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
        (SRUN | {"SLURM_NTASKS_PER_NODE": "8"}, 8, "nccl", 2),
        (SRUN | {"SLURM_TASKS_PER_NODE": "12,8,4(x3)"}, 8, "nccl", 2),
        (SRUN, 0, "gloo", None),
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
    assert mine[:4] == (10, 16, 2, 8)
    assert assignment.ranks_started(environment) == 16
    own_gpu = mine.by_slurm and gpus == 1
    chosen = assignment.choose_backend(None, mine.ranks_on_node, gpus, own_gpu)
    assert chosen == backend
    if gpu is not None:
        assert assignment.gpu_of(mine.local_rank, gpus) == gpu


def test_gloo_is_never_chosen_unasked_on_a_node_with_gpus() -> None:
    for gpus in range(1, 9):
        for ranks in range(1, 17):
            for own_gpu in (False, True):
                try:
                    chosen = assignment.choose_backend(None, ranks, gpus, own_gpu)
                except UserError as error:
                    assert ranks > gpus and "needs a GPU for each rank" in str(error)
                else:
                    assert chosen == "nccl"
                asked = assignment.choose_backend("gloo", ranks, gpus, own_gpu)
                assert asked == "gloo"


def test_the_script_of_a_slurm_job_is_no_rank() -> None:
    script = {name: text for name, text in SRUN.items() if name != "SLURM_STEP_ID"}
    assert assignment.ranks_started(script) == 1
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE is 8x2: start ranks"):
        assignment.numbers(SRUN | {"SLURM_TASKS_PER_NODE": "8x2"})


# -- what is measured ------------------------------------------------------------------


@pytest.mark.slow
def test_two_agents_of_torchrun_measure_collectives_in_one_job(tmp_path: Path) -> None:
    command = ("measure", "collectives", "--minutes", "1s", "--out", tmp_path)
    said = two_agents(*command, module="few_sizes")
    path = tmp_path / "collectives-gloo-loopback-p2-n1.csv"
    assert [str(path) in each for each in said] == [True, False], "rank 0 alone saves"
    assert "gloo between 2 ranks on 1 node" in said[0] and "not NCCL" in said[0]
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
    assert described["clocks"] == [{}, {}]
    assert platform.node() not in json.dumps(described | {"kernel": ""})


def test_ranks_of_gpus_post_many_small_messages_up_to_a_gigabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank that says it is NCCL's: the host's logic, with a fake at the boundary to CUDA."""
    asked: list[messages.CollectivesSettings] = []
    monkeypatch.setattr(messages, "NCCL_SIZES", (1024, 4096))
    monkeypatch.setattr(machine, "topology", lambda: "GPU0 X NV18\nGPU1 NV18 X")
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
        assert len(asked) == n_asked == len(COLLECTIVES)
        monkeypatch.setattr(messages, "NCCL_SIZES", (1024, 4096, 8192))
        cluster.measure_collectives(of_nccl, tmp_path, minutes=0.01)
    rows = store.load_table(path, "collectives")
    assert path.name == "collectives-nccl-nvlink-p1-n1.csv"
    assert set(rows["clock"]) == {"device"} and set(rows["link"]) == {"nvlink"}
    assert {settings.messages_per_sample for settings in asked} == {16}
    assert set(rows["messages_per_sample"]) == {16}
    assert [settings.sizes for settings in asked[n_asked:]] == 3 * [(8192,)]
    assert set(rows["bytes"]) == {1024, 4096, 8192}


def test_messages_between_gpus_reach_a_gigabyte() -> None:
    assert messages.NCCL_SIZES[0] == 2**10 and messages.NCCL_SIZES[-1] == 2**30


def test_links_are_named_by_what_joins_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "topology", lambda: "GPU0 X NV18\nGPU1 NV18 X")
    me = Rank(0, 16, 0, torch.device("cpu"), "nccl", 1)
    assert cluster.link_of(me, Layout(2, 8)) == "network"
    assert cluster.link_of(me, Layout(1, 16)) == "nvlink"
    assert cluster.link_of(replace(me, backend="gloo"), Layout(1, 16)) == "loopback"
    assert cluster.link_of(replace(me, backend="gloo"), Layout(2, 8)) == "network"


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


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["quick"], "started 2 processes, and each would measure this part for itself"),
        (["collectives", "--lab", "1gbit"], "--lab has no effect under torchrun"),
        (["collectives", "--minutes", "0"], "--minutes 0: give a finite time"),
    ],
)
def test_what_a_job_cannot_measure_is_refused_before_ranks_meet(
    argv: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["measure", *argv]) == 2
    assert complaint in capsys.readouterr().err


def test_the_time_of_a_job_is_no_option_without_one(capsys: Any) -> None:
    assert cli.main(["measure", "collectives", "--minutes", "1"]) == 2
    assert (
        "--minutes has an effect under torchrun or srun only" in capsys.readouterr().err
    )
