"""Sparsified exchange on real ranks: nothing is lost, they agree to the bit, all say what is wrong on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import exchange_job
from ddlkit.core.sparse import selected
from ddlkit.run.jobs.launch import Loopback, run_ranks
from exchange_job import PLANS, STEPS
from places import PATIENCE_S, ROOT, free_port

Seen = list[dict[str, NDArray[Any]]]
EPS = float(np.finfo(np.float32).eps)
EVERYTHING = ["dense", "steps", "accumulated", "unused", "refused"]
HERE = str(Path(exchange_job.__file__).parent)


def loaded(out: Path, ranks: int) -> Seen:
    return [dict(np.load(out / f"rank{rank}.npz")) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[2, 3])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each of 2 and of 3 ranks saw, in one launch."""
    out = tmp_path_factory.mktemp("exchange")
    config = {"out": str(out), "join": {"backend": "gloo", "timeout_s": 20.0}, "parts": EVERYTHING}
    run_ranks("exchange_job", config, ranks=request.param, place=Loopback(), timeout_s=PATIENCE_S)
    return loaded(out, request.param)


def below(found: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """What was kept below a prefix, by the rest of its name."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): value for name, value in found.items() if name.startswith(start)
    }


def same(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    """Whether all values are equal to the last bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("plan", PLANS)
def test_density_1_is_dense_training_to_rounding(seen: Seen, plan: str) -> None:
    for found in seen:
        dense, ours = below(found, "dense/ddp"), below(found, f"dense/{plan}")
        assert dense.keys() == ours.keys() and len(dense) == 6
        for name in dense:
            largest = float(np.abs(dense[name]).max())
            np.testing.assert_allclose(ours[name], dense[name], rtol=0, atol=4 * EPS * largest)


@pytest.mark.parametrize("plan", PLANS)
def test_residual_and_sent_are_the_gradients_bit_for_bit(seen: Seen, plan: str) -> None:
    for found in seen:
        for step in range(STEPS):
            before, gradient, after, sent = (
                below(found, f"steps/{plan}/{step}/{what}")
                for what in ("before", "gradient", "after", "sent")
            )
            for name in gradient:
                assert np.array_equal(after[name] + sent[name], before[name] + gradient[name])
                assert not np.any((after[name] != 0) & (sent[name] != 0))


@pytest.mark.parametrize("plan", PLANS)
def test_no_group_keeps_a_larger_element_than_it_sends(seen: Seen, plan: str) -> None:
    names = list(reversed(below(seen[0], "steps/none/0/gradient")))
    starts = (0, *PLANS[plan][:-1])
    for found in seen:
        for step in range(STEPS):
            after, sent = (
                below(found, f"steps/{plan}/{step}/{what}") for what in ("after", "sent")
            )
            counts = below(found, f"steps/{plan}/{step}/k")
            for group, (first, end) in enumerate(zip(starts, PLANS[plan], strict=True)):
                mine = [np.abs(sent[name]).ravel() for name in names[first:end]]
                kept = [np.abs(after[name]).ravel() for name in names[first:end]]
                magnitudes = np.concatenate(mine)
                assert magnitudes[magnitudes > 0].min() >= np.concatenate(kept).max()
                assert int(counts[str(group)]) == selected(magnitudes.size, 0.07)


@pytest.mark.parametrize("plan", PLANS)
def test_the_gradient_is_the_mean_of_what_ranks_sent_in_their_order(seen: Seen, plan: str) -> None:
    for step in range(STEPS):
        sent = [below(found, f"steps/{plan}/{step}/sent") for found in seen]
        mean = below(seen[0], f"steps/{plan}/{step}/mean")
        for name in mean:
            whole = np.zeros_like(mean[name])
            for theirs in sent:
                whole += theirs[name]
            assert np.array_equal(mean[name], whole / np.float32(len(seen)))


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_agree_bit_for_bit_after_every_step(seen: Seen, plan: str) -> None:
    for step in range(STEPS):
        weights = [below(found, f"steps/{plan}/{step}/weights") for found in seen]
        assert all(same(weights[0], theirs) for theirs in weights)
        if step:
            assert not same(weights[0], below(seen[0], f"steps/{plan}/{step - 1}/weights"))


def test_accumulated_gradients_leave_with_the_last_pass(seen: Seen) -> None:
    for found in seen:
        halves, whole = (below(found, f"accumulated/{way}") for way in ("halves", "whole"))
        for name in whole:
            largest = float(np.abs(whole[name]).max())
            np.testing.assert_allclose(halves[name], whole[name], rtol=0, atol=8 * EPS * largest)


@pytest.mark.parametrize("tied", [False, True])
def test_unused_and_shared_tensors_are_exchanged_as_dense_ones(seen: Seen, tied: bool) -> None:
    for step in range(2):
        alone = [below(found, f"unused/{tied}/{step}/alone") for found in seen]
        for found in seen:
            mean = below(found, f"unused/{tied}/{step}/mean")
            assert len(mean) == (5 if tied else 6)
            for name in mean:
                expected = np.mean([theirs[name] for theirs in alone], axis=0, dtype=np.float64)
                np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-7)
    if not tied:
        assert np.all(below(seen[1], "unused/False/0/alone")["spare.weight"] == 0)
        assert np.any(below(seen[1], "unused/False/0/mean")["spare.weight"] != 0)


REFUSED = {
    "density 0.0": "density 0.0 is not above 0 and at most 1 (rank 0)",
    "density 1.5": "density 1.5 is not above 0 and at most 1 (rank 0)",
    "density nan": "density nan is not above 0 and at most 1 (rank 0)",
    "other density": "rank 0 has density 0.25, rank 1 has density 0.5",
    "other shape": "rank 0 has weight of shape (3, 6), rank 1 has weight of shape (3, 7)",
    "other model": "rank 0 has 2 tensors, rank 1 has 4 tensors",
    "other weights": "rank 0 has weights of digest",
    "other plan": "rank 0 has groups 2, rank 1 has groups 1;2",
    "short plan": "plan 'x' is of 1 tensors, the module trains 2",
    "empty": "extra has no elements: nothing can be selected from it",
    "half": "is float16: only float32 is sparsified (rank 1)",
    "order": "the order names other tensors than the module trains: bias",
    "frozen": "the order names other tensors than the module trains: none",
    "ddp": "the module is a DistributedDataParallel",
    "later density": "density 2.0 is not above 0 and at most 1 (rank 1)",
    "nan": "iteration 1: the gradient of bias is not finite on rank 1",
    "inf": "iteration 1: the gradient of bias is not finite on rank 1",
    "later half": "iteration 1: the gradient of bias is not float32 on rank 1",
    "twice": "iteration 1: the gradient of weight came twice: use no_sync()",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line_and_the_same_on_every_rank(seen: Seen, case: str) -> None:
    said = [str(found[f"refused/{case}"]) for found in seen]
    assert len(set(said)) == 1
    assert REFUSED[case] in said[0] and "\n" not in said[0]
    assert said[0].startswith("sparsified training")


@pytest.mark.slow
def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps({"out": str(tmp_path), "join": {"backend": "gloo"}, "parts": ["steps"]})
    )
    port = f"--master-port={free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port]
    worker = ["-m", "ddlkit.run.jobs.worker", "exchange_job", str(settings)]
    paths = os.pathsep.join([str(ROOT), str(Path(exchange_job.__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, *worker], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    weights = [below(found, f"steps/pairs/{STEPS - 1}/weights") for found in loaded(tmp_path, 2)]
    assert same(*weights)


@pytest.mark.gpu
def test_ranks_on_gpus_agree_and_say_the_same(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    config = {"out": str(tmp_path), "join": {"backend": "nccl"}, "parts": ["steps", "refused"]}
    run_ranks("exchange_job", config, ranks=2, place=Loopback(), timeout_s=PATIENCE_S)
    found = loaded(tmp_path, 2)
    assert same(*(below(one, f"steps/pairs/{STEPS - 1}/weights") for one in found))
    said = [str(one["refused/nan"]) for one in found]
    assert len(set(said)) == 1 and REFUSED["nan"] in said[0]
