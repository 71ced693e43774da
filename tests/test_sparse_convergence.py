"""Sparsified convergence: played ranks are real ones to the bit, plans and texts are what they should be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.report.figures import omgs_convergence
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.measure import sparse_convergence as convergence
from ddlkit.run.measure.convergence import Recipe
from ddlkit.run.measure.sparse_convergence import (
    DENSE,
    SCHEDULES,
    TASKS,
    SparseConvergenceSettings,
    sparse_convergence_job,
    train,
    trainings,
)
from ddlkit.run.measure.sparse_exchange import PlayedExchange
from ddlkit.run.nets import datasets, sentences, zoo
from ddlkit.run.sessions.engine import measure

TINY: dict[str, Any] = {"epochs": 2, "batch": 8, "training_images": 24, "held_out_images": 8}
LSTM = "lstm_sentences"


def tiny(network: str = LSTM, method: str = "lags", **how: Any) -> SparseConvergenceSettings:
    """One short training of a network under one of its methods."""
    made = {one.method: one for one in trainings(network, 0, TINY)}
    chosen = next(one for name, one in made.items() if method in name.split("+"))
    return replace(chosen, **how)


# -- what is trained -------------------------------------------------------------------------------


@pytest.mark.parametrize("network", TASKS)
def test_plans_hold_all_tensors_and_none_is_trained_twice(network: str) -> None:
    tensors = len(list(convergence.started(network, 0).parameters()))
    plans = convergence.planned(network)
    assert len({plan.ends for plan in plans.values()}) == len(plans)
    assert sorted("+".join(plans).split("+")) == sorted(convergence.METHODS)
    by_method = {method: plan for name, plan in plans.items() for method in name.split("+")}
    assert by_method["topk"].ends == (tensors,)
    assert by_method["lags"].ends == tuple(range(1, tensors + 1))
    assert 1 < len(by_method["omgs"].ends) < tensors


def test_networks_have_the_tensors_of_those_they_stand_for() -> None:
    narrow, whole = (
        [tuple(p.shape) for p in network.parameters()]
        for network in (zoo.vgg16_cifar_eighth(10), zoo.vgg16_cifar())
    )
    assert len(narrow) == len(whole) == 54  # omgs Tab V
    assert all(8 * a[0] == b[0] for a, b in zip(narrow[:-2], whole[:-2], strict=True))
    wide = zoo.resnet20_half(10)
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in wide.modules()) == 19
    assert len(list(convergence.started(LSTM, 0).parameters())) == 11  # omgs Tab V


def test_a_step_down_in_width_keeps_what_the_shortcut_carries() -> None:
    block = zoo.resnet20_half(10).get_submodule("blocks.3").eval()
    for norm in ("norm1", "norm2"):
        torch.nn.init.zeros_(block.get_parameter(f"{norm}.weight"))
    x = torch.rand(2, 8, 6, 6)
    with torch.no_grad():
        y = block(x)
    assert torch.equal(y[:, :8], x[:, :, ::2, ::2]) and not y[:, 8:].any()


# -- text ------------------------------------------------------------------------------------------


def test_a_text_is_its_seed_and_a_longer_one_begins_alike() -> None:
    one, longer, other = sentences.draw(400, 3), sentences.draw(900, 3), sentences.draw(400, 4)
    assert np.array_equal(one.words, longer.words[:400])
    assert one.sha256 == sentences.draw(400, 3).sha256 != other.sha256
    assert len(sentences.WORDS) == len(set(sentences.WORDS)) == 215
    words, following = one.sequences(20)
    assert words.shape == following.shape == (19, 20)
    assert np.array_equal(words.ravel()[1:], following.ravel()[:-1])


def test_verbs_agree_with_their_subjects_and_keep_to_a_topic() -> None:
    text = " ".join(sentences.WORDS[word] for word in sentences.draw(20_000, 0).words)
    assert "verb" in text
    for sentence in text.split(" . ")[:-1]:
        subject, *rest = sentence.split(" that ")[0].split(" verb")[0].split()[-1:]
        assert subject.startswith("noun") and not rest
        last = [word for word in sentence.split() if word.startswith("verb")]
        first = last[0] if " that " in sentence else last[-1]
        assert subject.endswith("s") != first.endswith("s")
        topics = {word.strip("nouverbs").split(".")[0] for word in sentence.split() if "." in word}
        assert len(topics) == 1


# -- played ranks ----------------------------------------------------------------------------------


def of_ranks(settings: SparseConvergenceSettings, ranks: int) -> pd.DataFrame:
    """The rows of real ranks."""
    join = {"backend": "gloo", "timeout_s": 20.0}
    found = launch(sparse_convergence_job, settings, ranks=ranks, place=Loopback(), join=join)
    return found["sparse_convergence"]


@pytest.mark.parametrize(("method", "schedule"), [("omgs", "constant"), ("topk", "warm-up")])
def test_played_ranks_learn_what_real_ones_learn_to_the_bit(
    method: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(method=method, schedule=schedule)
    monkeypatch.setitem(TASKS, LSTM, TASKS[LSTM]._replace(ranks=2))
    played, real = train(settings), of_ranks(settings, 2)
    running = played["measured_on"] == "running"
    assert set(played["backend"]) == {"played"} and set(real["backend"]) == {"gloo"}
    for name in ("loss", "accuracy"):
        # Sums over ranks are those of float64; held out, each rank sums its own share in float32.
        np.testing.assert_allclose(played[name][running], real[name][running], rtol=1e-14)
        np.testing.assert_allclose(played[name], real[name], rtol=1e-6)


def test_played_dense_training_is_that_of_ddp_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    network = "vgg16_cifar_eighth"  # whose ranks have statistics of their own
    monkeypatch.setitem(TASKS, network, TASKS[network]._replace(ranks=2))
    settings = tiny(network, DENSE)
    played, real = train(settings), of_ranks(settings, 2)
    np.testing.assert_allclose(played["loss"], real["loss"], rtol=2e-3)


def test_at_density_1_every_plan_learns_what_dense_training_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = train(tiny(method=DENSE))
    monkeypatch.setitem(TASKS, LSTM, TASKS[LSTM]._replace(density=1.0))
    for method in ("topk", "lags"):
        whole = train(tiny(method=method))
        assert (whole["selected"] == whole["parameters"]).all()
        np.testing.assert_allclose(whole["loss"], dense["loss"], rtol=1e-4)


def test_a_schedule_sends_more_at_first_and_then_the_same() -> None:
    warm = tiny(method="omgs", schedule="warm-up")
    densities = [warm.density(epoch) for epoch in range(6)]
    assert densities == [*SCHEDULES["warm-up"][:3], 0.005, 0.005, 0.005]
    assert {tiny(method="omgs").density(epoch) for epoch in range(6)} == {0.005}
    with pytest.raises(UserError, match="unknown schedule 'none': use one of constant, warm-up"):
        tiny(schedule="none")


def test_a_played_fault_is_said() -> None:
    model = torch.nn.Linear(3, 2)
    exchange = PlayedExchange(model, FusionPlan("single", (2,)), 0.5, 2)
    for rank in range(2):
        value = math.nan if rank else 1.0
        (model(torch.ones(1, 3)).sum() * value).backward()
        exchange.take(rank)
    with pytest.raises(UserError, match="the gradient of bias is not finite on rank 1"):
        exchange.finish()
    with pytest.raises(UserError, match="density 0 is not above 0 and at most 1"):
        PlayedExchange(model, FusionPlan("single", (2,)), 0, 2)


def test_the_same_seed_trains_the_same_and_a_lost_loss_is_said() -> None:
    one, again, other = train(tiny()), train(tiny()), train(tiny(seed=1))
    same = one.drop(columns="seconds"), again.drop(columns="seconds")
    pd.testing.assert_frame_equal(*same)
    assert not np.allclose(one["loss"], other["loss"])
    hopeless = Recipe(**{**TINY, "learning_rate": 1e30, "largest_gradient": math.inf})
    with pytest.raises(UserError, match=r"lstm_sentences|not finite"):
        train(tiny(recipe=hopeless))


def test_trainings_are_points_that_are_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "tiny.json"
    point = {"measure": "sparse_convergences", "recipe": TINY, "seeds": 0, "networks": LSTM}
    suite.write_text(json.dumps({"points": [point]}))
    out = tmp_path / "out"
    measure(str(suite), out=out)
    names = {path.name for path in out.glob("*.csv")}
    words = ("dense", "topk", "lags", "omgs-exact")
    assert names == {
        *(f"sparse_convergence-{LSTM}-{word}-e2-s0.csv" for word in words),
        f"sparse_convergence-{LSTM}-omgs-exact-e2-s0-warm-up.csv",
    }
    tables = [store.load_table(out / name, "sparse_convergence") for name in names]
    shown = omgs_convergence.final(omgs_convergence.fig03(pd.concat(tables)))
    assert len(shown) == 6 and shown["mean"].between(0, 1).all()
    capsys.readouterr()
    measure(str(suite), out=out)
    assert "5 of 5 points are there" in capsys.readouterr().err


def real_data(directory: Path, pictures: int = 40) -> Path:
    """Files as those of CIFAR-10 and of the Penn Treebank, much smaller."""
    random = np.random.default_rng(0)
    for name in (*datasets.BATCHES[0], *datasets.BATCHES[1]):
        rows = random.integers(0, 256, (pictures, datasets.RECORD_BYTES), dtype=np.uint8)
        rows[:, 0] %= datasets.KINDS
        (directory / name).write_bytes(rows.tobytes())
    for name in datasets.TEXTS:
        words = random.choice(["old", "new", "<unk>"], (300, 4))
        (directory / name).write_text("\n".join(map(" ".join, words)) + "\n")
    return directory


@pytest.mark.parametrize(("network", "kind"), [(LSTM, "ptb"), ("resnet20_half", "cifar10")])
def test_real_data_are_trained_on_where_a_directory_is_given(
    tmp_path: Path, network: str, kind: str
) -> None:
    rows = train(tiny(f"{network}@{real_data(tmp_path)}"))
    drawn = train(tiny(network))
    assert set(rows["network"]) == {f"{network}-{kind}"}
    assert rows["data_sha256"].iloc[0] != drawn["data_sha256"].iloc[0]
    assert np.isfinite(rows["loss"]).all() and len(rows) == len(drawn)
    frame = omgs_convergence.fig03(rows)
    assert frame["network"].iloc[0].endswith("PTB" if kind == "ptb" else "CIFAR-10")


def test_real_data_are_read_as_they_are_published(tmp_path: Path) -> None:
    directory = real_data(tmp_path)
    found = datasets.cifar10(directory, 55, held_out=False)
    second = (directory / "data_batch_2.bin").read_bytes()
    assert found.images.shape == (55, 3, 32, 32) and found.labels[40] == second[0]
    assert found.images[40].tobytes() == second[1 : datasets.RECORD_BYTES]
    (directory / "ptb.valid.txt").write_text("new never <unk>\n")
    words = datasets.vocabulary(directory)
    seen = datasets.penn_treebank(directory, 4, held_out=True).words
    assert [words[place] for place in seen] == ["new", "<unk>", "<unk>", "<eos>"]


@pytest.mark.parametrize(
    ("spoil", "network", "told"),
    [
        (
            lambda d: (d / "test_batch.bin").unlink(),
            "resnet20_half",
            "cannot be read: No such file",
        ),
        (
            lambda d: (d / "test_batch.bin").write_bytes(b"1234"),
            "resnet20_half",
            "no whole records",
        ),
        (lambda d: real_data(d, 1), "resnet20_half", "5 pictures, 24 are asked for"),
        (lambda d: (d / "ptb.train.txt").write_bytes(b"\xff"), LSTM, "is not text"),
        (lambda d: (d / "ptb.valid.txt").write_text("new\n"), LSTM, "2 words, 21 are asked for"),
        (lambda d: (d / "ptb.train.txt").write_text("old " * 999), LSTM, "'new' is not among"),
    ],
)
def test_data_that_cannot_be_trained_on_are_one_line(
    tmp_path: Path, spoil: Callable[[Path], object], network: str, told: str
) -> None:
    spoil(real_data(tmp_path))
    with pytest.raises(UserError, match=told) as caught:
        train(tiny(f"{network}@{tmp_path}"))
    assert "\n" not in str(caught.value)


# -- what is told from it --------------------------------------------------------------------------


def made_up(scores: dict[str, list[float]]) -> pd.DataFrame:
    """Trainings that end with these scores, by method, one a seed."""
    rows = [
        (method, seed, epoch, epoch * score / 2)
        for method, seeds in scores.items()
        for seed, score in enumerate(seeds)
        for epoch in (0, 1, 2)
    ]
    frame = pd.DataFrame(rows, columns=["method", "seed", "epoch", "accuracy"])
    return frame.assign(
        **{"network": "resnet20_half", "schedule": "constant", "measured_on": "held_out"},
        **{"epochs": 2, "loss": 1.0, "images": 64, "batch": 32, "ranks": 4, "parameters": 1000},
        **{"selected": 10, "messages": 1, "ends": frame["method"]},
    )


@pytest.mark.parametrize(
    ("short", "judged"),
    [({}, 5), ({"omgs": [0.8, 0.8]}, 0), ({"exact": []}, 0), ({"dense": [0.9] * 4}, 5)],
)
def test_a_network_is_judged_when_every_method_has_three_seeds(
    short: dict[str, list[float]], judged: int
) -> None:
    every = {name: [0.7, 0.8, 0.9] for name in omgs_convergence.LABELS}
    frame = omgs_convergence.fig03(made_up({**every, **short}))
    assert omgs_convergence.complete(frame)["method"].nunique() == judged
    warm = made_up({"omgs": [0.9, 0.9]}).assign(schedule="warm-up")
    both = pd.concat([made_up({**every, **short}), warm])
    kept = omgs_convergence.complete(omgs_convergence.fig03(both))
    assert kept["method"].nunique() == judged  # a schedule of two seeds is not shown


def test_of_a_network_that_is_not_judged_its_trainings_are_counted() -> None:
    """One that serves two methods counts for both; a schedule that somebody trained is wanted, too."""
    every = {name: [0.7, 0.8, 0.9] for name in omgs_convergence.LABELS}
    assert omgs_convergence.waiting(omgs_convergence.fig03(made_up(every))) == {}
    some = made_up({"dense": [0.9, 0.9, 0.9], "topk": [0.8], "omgs+exact": [0.7, 0.7]})
    found = omgs_convergence.waiting(omgs_convergence.fig03(some))
    assert [*found.values()] == ["8 of 15 trainings"]
    warm = made_up({"omgs": [0.9]}).assign(schedule="warm-up")
    found = omgs_convergence.waiting(omgs_convergence.fig03(pd.concat([some, warm])))
    assert [*found.values()] == ["9 of 18 trainings"]


def test_what_seeds_spread_over_is_undecided() -> None:
    frame = omgs_convergence.fig03(
        made_up({"dense": [0.9, 0.8], "topk": [0.82, 0.8], "omgs+exact": [0.5, 0.45]})
    )
    told = omgs_convergence.compared(frame).set_index(["first", "second"])["told"]
    assert told["dense", "TopK"] == "undecided"  # 0.04 apart, 0.1 between two seeds
    assert told["dense", "OMGS"] == "dense" and told["TopK", "exact merging"] == "TopK"
    assert told["OMGS", "exact merging"] == "the same training"
    single = omgs_convergence.fig03(made_up({"dense": [0.9], "topk": [0.1]}))
    assert omgs_convergence.compared(single)["told"].tolist() == [
        "undecided"
    ]  # one seed has no spread
    ratios = omgs_convergence.ratios(frame)
    assert ratios.tolist() == pytest.approx([0.5 / 0.9, 0.45 / 0.8])
    assert omgs_convergence.final(frame)["sends"].to_list()[1:] == pytest.approx([0.16] * 3)
    with pytest.raises(UserError, match="no sparsified training"):
        omgs_convergence.fig03(made_up({"dense": [1.0]}).iloc[:0])
