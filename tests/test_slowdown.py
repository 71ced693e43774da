"""What compute and messages take from each other: laws of the term, its measurement, its predictions."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan, improved
from ddlkit.core.units import format_seconds
from ddlkit.core.workload import Workload
from ddlkit.jobs import vitals
from ddlkit.jobs.launch import Loopback, launch
from ddlkit.jobs.rank import Rank, joined
from ddlkit.measure import slowdown
from ddlkit.measure.given import load
from ddlkit.measure.slowdown import PHASES, SlowdownSettings, slowdown_job
from ddlkit.model import Calibration, Communication, forecast, make_plan
from ddlkit.model.contention import BUCKETS, COMPUTE, MESSAGES, NOTHING, Contention
from ddlkit.model.predictor import plan_with_contention
from places import PATIENCE_S, wait_for
from strategies import random_workload
from workbook.common import places
from workbook.record import zoo as zoo  # makes lenet5 known to the ranks, too

SIZES, SLOWER, DRAG = (64_000, 4_000_000), (0.3, 0.9), (0.0, 0.5)
COPY_S, BUCKET_S, GRADIENTS, BYTES = 2e-10, 3e-5, 62, 46_000_000
PHASES_S = dict(zip(PHASES, (0.05, 0.1, 0.01), strict=True))
COST = AlphaBeta(2e-4, 1e-9, workers=2)
WORKLOAD = random_workload(np.random.default_rng(5), 40)
SHARES = st.floats(0, 2)


def rows(noise: float = 0.0, **labels: Any) -> pd.DataFrame:
    """A table of a machine that follows the model."""
    rng, made = np.random.default_rng(0), []
    whole_s = sum(PHASES_S.values()) + 2 * COPY_S * BYTES
    for repeat in range(9):
        made += [("copy", NOTHING, BYTES, 1, repeat, COPY_S * BYTES)]
        made += [(phase, NOTHING, 0, 0, repeat, s) for phase, s in PHASES_S.items()]
        for n, slower, drag in zip(SIZES, SLOWER, DRAG, strict=True):
            made += [
                (
                    "backward",
                    MESSAGES,
                    n,
                    7,
                    repeat,
                    PHASES_S["backward"] * (1 + slower),
                )
            ]
            made += [("message", NOTHING, n, 7, repeat, float(COST(n)))]
            made += [("message", COMPUTE, n, 7, repeat, float(COST(n)) * (1 + drag))]
        for buckets in (1, GRADIENTS):
            made += [
                (
                    "backward",
                    BUCKETS,
                    BYTES,
                    buckets,
                    repeat,
                    whole_s + buckets * BUCKET_S,
                )
            ]
    frame = pd.DataFrame(
        made, columns=["quantity", "beside", "bytes", "messages", "repeat", "seconds"]
    )
    frame["seconds"] *= np.exp(rng.normal(0, noise, len(frame)))
    known = {
        "network": "net",
        "batch": 4,
        "device": "cpu",
        "precision": "fp32",
        "backend": "gloo",
    }
    known |= {"link": "loopback", "link_bits_per_s": 0.0, "ranks": 2}
    return frame.assign(**{**known, **labels})


def test_what_a_machine_takes_is_found_in_its_table() -> None:
    """To the digit without noise; with it, draws hold the truth. In between in between, beyond as there."""
    found = Contention.of(rows())
    assert found.slowdowns == pytest.approx(np.array([SLOWER, DRAG]))
    assert found.copy_s_per_byte == pytest.approx(
        COPY_S
    ) and found.bucket_s == pytest.approx(BUCKET_S)
    between = found.of_messages([1, 64_000, 506_000, 4_000_000, 10**9])
    assert between[0] == pytest.approx([0.3, 0.3, 0.6, 0.9, 0.9], abs=1e-3)
    noisy = Contention.of(rows(0.02)).of_messages(SIZES, drawn=400)
    assert noisy.shape == (2, 400, 2)
    low, high = np.quantile(noisy[0], [0.005, 0.995], axis=0)
    assert np.all((low < SLOWER) & (high > SLOWER)) and np.all(high - low < 0.2)
    assert Contention.of(rows(0.3)).bucket_s == 0, "not in every round"
    with pytest.raises(UserError, match="one network"):
        Contention.of(pd.concat([rows(), rows(network="other")]))


@pytest.mark.parametrize("fails", [False, True])
def test_training_does_not_wait_for_the_posts_of_a_gpus_messages(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library whose posts block stands for thousands of small messages."""
    may_post = threading.Event()

    def post(buffer: torch.Tensor, async_op: bool) -> Any:
        assert may_post.wait(PATIENCE_S)
        if fails:
            raise RuntimeError("the link is down")
        future: Any = torch.futures.Future()
        future.set_result(buffer)
        return SimpleNamespace(wait=lambda: None, get_future=lambda: future)

    monkeypatch.setattr(torch.distributed, "all_reduce", post)
    me = Rank(0, 2, 0, torch.device("cpu"), "nccl", 1)
    sending = slowdown._Sending(me, torch.zeros(4), count=5, while_training=True)
    assert not sending.done()
    may_post.set()
    assert wait_for(sending.done)
    if fails:
        with pytest.raises(RuntimeError, match="the link is down"):
            sending.seconds()
    else:
        assert sending.seconds() > 0


@given(SHARES, SHARES, st.floats(0, 3))
def test_one_message_has_a_closed_form(
    slowdown: float, drag: float, left_s: float
) -> None:
    """It travels beside what is left of compute: both are longer until either ends."""
    work = Workload.from_arrays(0.0, [1.0, left_s], [1000, 1])
    one = Iteration(
        work, FusionPlan("cuts", (1, 2)), AlphaBeta(0.5, 0.0), Link(slowdown=slowdown)
    )
    ends = replace(one, link=Link(slowdown=slowdown, message_slowdown=drag)).played_s[1]
    beside_s = left_s * (1 + slowdown)
    whole_s = 0.5 * (1 + drag)
    expected_s = (
        whole_s if whole_s <= beside_s else beside_s + 0.5 - beside_s / (1 + drag)
    )
    assert ends[0] == pytest.approx(1.0 + expected_s)


@given(
    st.lists(SHARES, min_size=4, max_size=4), st.sampled_from(["none", "ddp", "single"])
)
def test_more_is_never_faster_and_nothing_is_what_it_was(
    shares: list[float], spec: str
) -> None:
    plan, burst = (
        make_plan(spec, WORKLOAD, COST),
        Link(burst_s=1e-3, wire_s_per_byte=1e-9),
    )
    for link in (Link(), burst):
        bare = Iteration(WORKLOAD, plan, COST, link)
        least, most = (
            np.minimum(shares[:2], shares[2:]),
            np.maximum(shares[:2], shares[2:]),
        )
        times = [
            replace(
                bare, link=replace(link, slowdown=s, message_slowdown=m)
            ).prediction.iteration_s
            for s, m in ((0.0, 0.0), least, most)
        ]
        assert times[0] == bare.prediction.iteration_s, "to the last digit"
        assert times[0] <= times[1] * (1 + 1e-12) and times[1] <= times[2] * (1 + 1e-12)


def test_draws_of_slowdowns_are_iterations_by_each_of_them() -> None:
    """Vectorised over draws as one by one, for one and two messages in flight; without them as before."""
    plan, rng = make_plan("ddp", WORKLOAD), np.random.default_rng(1)
    for link in (Link(), Link(2), Link(burst_s=1e-3, wire_s_per_byte=1e-9)):
        step = Iteration(WORKLOAD, plan, COST, link)
        drawn = rng.uniform(0, 1, (2, 5, len(plan.ends)))
        together = step.draws([COST] * 5, slowdowns=drawn)
        for each, s, m in zip(together, *drawn, strict=True):
            alone = replace(step, link=replace(link, slowdown=s, message_slowdown=m))
            assert each == pytest.approx(alone.prediction.iteration_s)


def test_real_compute_is_predicted_with_it_and_a_replay_is_not() -> None:
    sizes = np.repeat(np.geomspace(1e3, 1e8, 9), 4)
    known = {
        "link": "loopback",
        "ranks": 2,
        "collective": "all_reduce",
        "algorithm": "ring",
    }
    known |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}
    table = pd.DataFrame(
        {"bytes": sizes, "seconds": COST(sizes), "link_bits_per_s": 0.0, **known}
    )
    calibration = Calibration.of(table, slowdown=rows(0.01))
    beside = calibration.contention["net", 4, 2, "loopback"]
    messages, plan = calibration.between("loopback", 2), make_plan("ddp", WORKLOAD)
    bare = forecast(WORKLOAD, plan, messages)
    real = forecast(WORKLOAD, plan, replace(messages, contention=beside))
    assert real.prediction.iteration_s > bare.prediction.iteration_s
    assert real.iteration.bucket_s == beside.bucket_s
    lower_s, upper_s = real.interval_s or (np.nan, np.nan)
    assert lower_s <= real.prediction.iteration_s <= upper_s


def test_search_is_near_the_best_of_all_plans_under_contention() -> None:
    """By brute force on 60 small instances, every other with a term per size; exact alone is not."""
    rng, regrets = np.random.default_rng(7), []
    for _ in range(60):
        n = int(rng.integers(4, 10))
        seconds, sizes = rng.exponential(1e-3, n), rng.integers(1_000, 8_000_000, n)
        work = Workload.from_arrays(2e-3, seconds, sizes)
        term = rng.uniform(0, 1.5, (2, 2))
        beside = Contention(np.array(SIZES, float), term, term[None], 0.0, 5e-5)
        known = Communication(COST, contention=beside)

        def seconds_of(
            plan: FusionPlan, work: Workload = work, known: Communication = known
        ) -> float:
            return forecast(work, plan, known).prediction.iteration_s

        every = [
            FusionPlan("all", (*cuts, n))
            for k in range(n)
            for cuts in itertools.combinations(range(1, n), k)
        ]
        best_s = min(map(seconds_of, every))
        regrets.append(
            [
                seconds_of(plan_with_contention(s, work, known)) / best_s - 1
                for s in ("search", "exact")
            ]
        )
        assert seconds_of(improved(every[0], seconds_of)) <= seconds_of(every[0])
    search, exact = np.array(regrets).T
    assert search.min() >= -1e-12 and np.median(search) < 1e-9 and search.max() < 0.02
    assert search.mean() < exact.mean()
    bare = Communication(COST)
    assert (
        plan_with_contention("search", WORKLOAD, bare).ends
        == make_plan("exact", WORKLOAD, COST).ends
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(3, 8), st.sampled_from([0.0, 1e-3, 5e-3]))
def test_search_is_no_slower_than_exact_and_the_default_over_links_with_a_burst(
    seed: int, n: int, burst_s: float
) -> None:
    """What a message costs alone has the whole burst, which an iteration uses up."""
    rng = np.random.default_rng(seed)
    seconds, sizes = rng.exponential(1e-3, n), rng.integers(1_000, 8_000_000, n)
    work = Workload.from_arrays(2e-3, seconds, sizes)
    link = Link(burst_s=burst_s, wire_s_per_byte=1e-9)
    known = Communication(COST, link=link)

    def seconds_of(name: str) -> float:
        plan = plan_with_contention(name, work, known)
        return forecast(work, plan, known).prediction.iteration_s

    assert seconds_of("search") <= min(seconds_of("exact"), seconds_of("ddp")) + 1e-12


def test_rounds_that_are_disturbed_on_a_gpu_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor that is taken for a GPU when it is asked how often to repeat."""
    asked = list[str]()

    def on(device: str, say: object) -> vitals.Retries:
        asked.append(device)
        return on_device("cuda")

    on_device = vitals.Retries.on
    disturbed = vitals.Usage(busy=1.0, stolen=0.5)
    monkeypatch.setattr(vitals.Retries, "on", on)
    monkeypatch.setattr(slowdown, "usage_of_all", lambda used: disturbed)
    monkeypatch.setattr(
        time, "sleep", lambda seconds: pytest.fail("a round is repeated")
    )
    with joined(PATIENCE_S) as me:
        training = load(
            f"{Path(__file__).with_name('given_models.py')}:tied", me.device, []
        )
        rounds = slowdown.slowdown_rounds(
            me, training, [1024], max_s=0.0, min_repeats=2
        )
        repeats = [int(tables["slowdown"]["repeat"].iloc[0]) for tables in rounds]
    assert repeats == [0, 1] and asked == ["cpu"]


def test_two_ranks_time_a_network_beside_their_messages(tmp_path: Path) -> None:
    settings = SlowdownSettings("lenet5", 64, SIZES, max_s=0.1, min_repeats=2)
    table = launch(slowdown_job, settings, ranks=2, place=Loopback(), out=tmp_path)[
        "slowdown"
    ]
    counts = table.groupby(["quantity", "beside"]).size()
    assert counts["backward", MESSAGES] == counts["message", COMPUTE] == 2 * len(SIZES)
    assert counts["backward", NOTHING] == 2 and counts["backward", BUCKETS] == 4
    found = Contention.of(table)
    assert np.isfinite(found.slowdowns).all() and (found.slowdowns >= 0).all()


PROFILE = "layers-resnet18-b4-r1.csv"


def test_the_command_says_what_it_takes_compute_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a table it predicts as ever, and says so; with one it names what differs."""
    (profile,) = [
        path
        for path in store.list_tables(places.RECORDED, f"cpu-2x-amd-epyc/{PROFILE}")
    ]
    cost, table = tmp_path / "cost.json", tmp_path / "slowdown-net.csv"
    cost.write_text(json.dumps(COST.to_dict()))
    whole = rows(network="resnet18")
    store.save_table(
        whole,
        tmp_path,
        "slowdown-net",
        schema="slowdown",
        command=["test"],
        machine={"name": "cpu-made-up"},
    )
    answers = []
    for words in ([], ["--slowdown", str(table)]):
        asked = [
            "predict",
            "--profile",
            str(profile),
            "--cost",
            str(cost),
            *words,
            "--json",
        ]
        assert cli.main(asked) == 0
        page = capsys.readouterr()
        answers.append(json.loads(page.out))
        assert ("not to slow each other down" in page.err) == (not words)
    assert (
        answers[0]["contention"] is None
        and answers[1]["contention"]["compute_factor"] > 1
    )
    assert answers[1]["iteration_s"] > answers[0]["iteration_s"]
    assert any(
        "the slowdown was measured on" in line for line in answers[1]["warnings"]
    )
    # A list of other buckets has messages of its own, and so has the default.
    given = ["--profile", str(profile), "--cost", str(cost), "--slowdown", str(table)]
    assert cli.main(["export", "--to", "ddp", *given, "--planner", "none"]) == 0
    default_s = answers[1]["iteration_s"]
    assert (
        f"{format_seconds(default_s)} under PyTorch's default"
        in capsys.readouterr().err
    )
    store.save_table(
        rows(network="resnet18", device="NVIDIA H200", backend="nccl"),
        tmp_path,
        "slowdown-net",
        schema="slowdown",
        command=["test"],
    )
    assert cli.main(asked) == 0
    (of_device,) = [
        line
        for line in json.loads(capsys.readouterr().out)["warnings"]
        if "on the device NVIDIA H200, but the profile on cpu" in line
    ]
    assert str(table) in of_device
    store.save_table(
        rows(ranks=4), tmp_path, "slowdown-net", schema="slowdown", command=["test"]
    )
    assert cli.main([*asked[:-1]]) == 2
    # No option of this command chose a number of ranks, so the error names the table's.
    refused = capsys.readouterr().err
    assert f"--slowdown {table}: was measured with ranks 4" in refused
    assert "ddlkit measure slowdown --ranks 2" in refused


def test_a_slowdown_whose_compute_took_longer_than_the_profile_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The factor that the warning names makes the two agree, so that it ends the warning."""
    (profile_path,) = store.list_tables(places.RECORDED, f"cpu-2x-amd-epyc/{PROFILE}")
    profile = store.read_profile(profile_path)
    profile_s = profile.forward_s.sum() + profile.backward_s.sum() + profile.update_s
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST.to_dict()))
    table = rows(network="resnet18", batch=profile.batch)
    # All ranks at once take 1.5 times as long as the rank of the profile.
    table["seconds"] *= 1.5 * profile_s / sum(PHASES_S.values())
    store.save_table(
        table, tmp_path, "slowdown-net", schema="slowdown", command=["test"]
    )
    asked = ["predict", "--profile", str(profile_path), "--cost", str(cost), "--json"]
    asked += ["--slowdown", str(tmp_path / "slowdown-net.csv")]

    def doubts(*words: str) -> list[str]:
        assert cli.main([*asked, *words]) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        return [line for line in warnings if "on all ranks at once" in line]

    (doubt,) = doubts()
    assert "--dilation 1.5," in doubt
    assert not doubts("--dilation", "1.5")
