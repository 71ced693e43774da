"""Collectives on real ranks: values, sizes, bandwidths, and the threads that carry them."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.jobs.launch import Loopback, launch
from ddlkit.jobs.rank import Rank
from ddlkit.measure.collectives import (
    POSTINGS,
    CheckedCollective,
    CollectivesSettings,
    collectives_job,
    random_integers,
    whole_size,
)
from places import free_port


def rank(number: int, ranks: int) -> Rank:
    """One of several ranks, without the others."""
    return Rank(number, ranks, number, torch.device("cpu"), "gloo", 1)


@given(
    st.sampled_from([*COLLECTIVES]),
    st.integers(1, 6),
    st.integers(1, 300),
    st.integers(0, 9),
)
def test_every_rank_expects_what_all_contribute(
    name: str, n: int, size: int, seed: int
) -> None:
    whole = whole_size(size, n)
    assert whole % (4 * n) == 0 and size <= whole < size + 4 * n
    everyone = [CheckedCollective(rank(r, n), name, whole, seed) for r in range(n)]
    mine = [one.mine.double() for one in everyone]
    result = torch.cat(mine) if name == "all_gather" else torch.as_tensor(sum(mine))
    parts = result.chunk(n) if name == "reduce_scatter" else [result] * n
    known = COLLECTIVES[name]
    for one, part in zip(everyone, parts, strict=True):
        assert torch.equal(one.expected.double(), part)
        assert one.mine.nbytes * known.input_parts(n) == whole
        assert one.expected.nbytes * known.output_parts(n) == whole


class FakeLibrary:
    """Does what a library of collectives does for one rank, and notes the tensors."""

    def __init__(self, apart: CheckedCollective) -> None:
        self.apart = apart
        self.posted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def post(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        assert torch.equal(source, self.apart.mine)
        self.posted.append((target, source))
        target.copy_(self.apart.expected)
        return SimpleNamespace(wait=lambda: None)


@given(st.sampled_from([*COLLECTIVES]), st.integers(1, 6), st.integers(1, 300))
def test_in_place_the_input_and_the_result_share_a_buffer(
    name: str, n: int, size: int
) -> None:
    """What NCCL's benchmarks call in place, with a fake of the library's calls."""
    whole = whole_size(size, n)
    for r in range(n):
        me = replace(rank(r, n), backend="nccl")
        checked = CheckedCollective(me, name, whole, seed=3, count=2)
        apart = CheckedCollective(rank(r, n), name, whole, seed=3)
        assert torch.equal(checked.expected, apart.expected)
        checked.reset()
        library = FakeLibrary(apart)
        checked._posting = replace(checked._posting, post=library.post)
        checked.run()
        checked.check()
        for row, (target, source) in zip(checked.buffers, library.posted, strict=True):
            assert row.nbytes == whole
            for part, parts in (
                (target, COLLECTIVES[name].output_parts(n)),
                (source, COLLECTIVES[name].input_parts(n)),
            ):
                offset = part.data_ptr() - row.data_ptr()
                assert part.nbytes * parts == whole
                assert offset == (r * part.nbytes if parts > 1 else 0)
        checked.reset()
        if n > 1:
            with pytest.raises(UserError, match="came out wrong"):
                checked.check()


def test_integers_of_a_seed_are_spread_evenly_and_differ_between_seeds() -> None:
    vectors = [random_integers(100_000, seed) for seed in range(4)]
    for vector in vectors:
        assert vector.min() == -4096 and vector.max() == 4095
        assert torch.equal(vector, vector.round())
        counts = torch.histc(vector, bins=16)
        assert (counts - 100_000 / 16).abs().max() < 5 * (100_000 / 16) ** 0.5
    # Two vectors of independent integers agree in one of 8192 places.
    for first, second in itertools.combinations(vectors, 2):
        assert (first == second).float().mean() < 10 / 8192
    assert (vectors[0][:-1] == vectors[0][1:]).float().mean() < 10 / 8192


def test_what_is_known_can_be_posted_and_the_other_way_round() -> None:
    assert [*POSTINGS] == [*COLLECTIVES]


@given(st.sampled_from([*COLLECTIVES]), st.integers(0, 63), st.integers(0, 99))
def test_one_wrong_element_is_refused(name: str, at: int, seed: int) -> None:
    one = CheckedCollective(rank(1, 4), name, 1024, seed)
    one.buffers.copy_(one.expected)
    one.check()
    one.buffers.view(-1)[at] += 1
    with pytest.raises(UserError, match="1 of (256|64) elements came out wrong"):
        one.check()
    one.reset()
    with pytest.raises(UserError, match="came out wrong"):
        one.check()


def test_two_real_ranks(tmp_path: Path) -> None:
    budget = Budget(warmup=1, min_repeats=5, max_repeats=20, max_s=0.2)
    settings = CollectivesSettings(sizes=[1000, 65536, 4 << 20], budget=budget)
    run = functools.partial(
        launch, ranks=2, place=Loopback(), join={"torch_threads": 1}
    )
    frame = run(collectives_job, settings, out=tmp_path / "out")["collectives"]
    assert set(frame["collective"]) == set(COLLECTIVES)
    counts = frame.groupby(["collective", "bytes"])["sample"].agg(["count", "max"])
    assert len(counts) == 3 * len(COLLECTIVES) and counts["count"].between(5, 20).all()
    assert (counts["max"] == counts["count"] - 1).all() and (frame["seconds"] > 0).all()
    assert (frame["fastest_s"] <= frame["seconds"]).all()
    assert (frame["fastest_s"] > 0).all()
    assert set(frame["nodes"]) == {1} and set(frame["ranks_per_node"]) == {2}
    columns = ["backend", "algorithm", "link", "link_bits_per_s", "ranks", "in_flight"]
    labels = frame[columns].drop_duplicates()
    assert labels.to_numpy().tolist() == [["gloo", "ring", "loopback", 0.0, 2, 1]]
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["collectives.csv", "collectives.json", "job.json"], "and no logs"
    for arguments in (
        (["all_to_all"],),
        (["all_reduce"], [1024, 0]),
        (["all_reduce"], []),
    ):
        with pytest.raises(UserError):
            CollectivesSettings(*arguments)


def test_ranks_that_start_apart_are_timed_from_the_last_start() -> None:
    budget = Budget(warmup=0, min_repeats=3, max_repeats=3, max_s=9.0)
    settings = CollectivesSettings(["all_gather"], [1024], budget, apart_s=0.5)
    rows = launch(collectives_job, settings, ranks=2, place=Loopback(), join={})[
        "collectives"
    ]
    assert (rows["apart_s"] == 0.5).all() and (rows["seconds"] > 0).all()
    assert rows["seconds"].median() < 0.5, (
        "nothing of what the first rank waited for the last"
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of the only rank of a job."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    wanted = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    for name, value in wanted.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_messages_of_a_gpu_are_timed_by_its_clock_once_all_are_queued(
    backend: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that says it is NCCL's, on the processor: what is done for each sample, in which order."""
    did: list[str] = []

    def noting(word: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            did.append(word)
            return action(*arguments)

        return note

    me = Rank.join("gloo")
    try:
        monkeypatch.setattr(clock, "hold", noting("hold", clock.hold))
        monkeypatch.setattr(dist, "all_reduce", noting("meet", dist.all_reduce))
        monkeypatch.setattr(Marks, "mark", noting("mark", Marks.mark))
        monkeypatch.setattr(
            CheckedCollective, "run", noting("run", CheckedCollective.run)
        )
        monkeypatch.setattr(
            CheckedCollective, "reset", noting("reset", CheckedCollective.reset)
        )
        twice = Budget(warmup=1, min_repeats=2, max_repeats=2)
        settings = CollectivesSettings(["all_gather"], [1000], twice)
        (tables,) = collectives_job.part(replace(me, backend=backend), settings)
    finally:
        me.leave()
    each = (
        ["reset", "run"]
        if backend == "gloo"
        else ["reset", "hold", "meet", "mark", "run", "mark"]
    )
    assert did == 3 * each
    assert set(tables["collectives"]["clock"]) == {
        "wall" if backend == "gloo" else "device"
    }


def test_an_incomplete_environment_is_one_line(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        ("RANK=first", "gloo", "RANK is first"),
        ("WORLD_SIZE=", "gloo", "WORLD_SIZE is not set"),
        ("WORLD_SIZE=2", "gloo", "ranks did not meet at 127.0.0.1 port"),
        ("LOCAL_WORLD_SIZE=99", "nccl", "nccl needs a GPU for each rank"),
    ]
    for setting, backend, complaint in cases:
        with monkeypatch.context() as patch, pytest.raises(UserError, match=complaint):
            patch.setenv(*setting.split("="))
            Rank.join(backend, timeout_s=1.0)
