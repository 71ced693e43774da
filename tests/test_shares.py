"""What communication may take of a machine: named, applied, witnessed, and training under each of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import shared_kernels, shares
from ddlkit.run.measure.contention import TINY
from ddlkit.run.measure.shared_kernels import SharedKernelsSettings, shared_kernels_job
from ddlkit.run.measure.shared_messages import SharedMessagesSettings, shared_messages_job
from ddlkit.run.measure.shared_training import (
    Passage,
    Router,
    SharedTrainingSettings,
    breakdown,
    shared_training_job,
)
from ddlkit.run.measure.shares import (
    PRIORITIES,
    REFUSED,
    Configuration,
    Policy,
    witness,
)
from two_groups_job import TwoGroupsSettings, two_groups_job

TWO = "t1-free-nice10+t2-free-raised"
POLICIES = ["t2-free-normal", "t1-free-idle", "t4-free-raised", TWO]
# Beside other tests, threads that wait for everybody may wait for minutes.
idle_threads = pytest.mark.alone
GLOO: dict[str, Any] = {"ranks": 2, "place": Loopback(), "timeout_s": 110}
GLOO |= {"join": {"backend": "gloo", "torch_threads": 1}}


# -- names -------------------------------------------------------------------------------------

configurations = st.builds(Configuration, st.integers(1, 64), st.sampled_from(PRIORITIES))


@given(configurations, configurations)
def test_a_name_says_all_of_a_configuration(one: Configuration, other: Configuration) -> None:
    assert Configuration.parse(one.name) == one
    both = Policy(one, other)
    assert Policy.parse(both.name) == both
    assert both.two == (one != other) == bool(both.columns()["last"])


@pytest.mark.parametrize(
    "name",
    ["", "t2", "t0-free-normal", "t65-free-normal", "t1-own-normal", "t1-free-high", "b2"],
)
def test_what_is_no_configuration_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError) as refused:
        Policy.parse(name)
    assert "\n" not in str(refused.value)


# -- an iteration's times ----------------------------------------------------------------------


@st.composite
def passages(draw: st.DrawFn) -> Passage:
    """Messages that leave in order while computation goes on, and end by some time after."""
    steps = draw(st.lists(st.floats(0.001, 1), min_size=1, max_size=6))
    posted = 1.0 + np.cumsum(steps)
    done = posted + np.array(
        draw(st.lists(st.floats(0.001, 4), min_size=len(steps), max_size=len(steps)))
    )
    waited = float(max(done.max(), posted[-1]))
    return Passage(1.0, waited, waited + 0.5, posted, done)


@given(passages(), st.integers(1, 3), st.integers(0, 2))
def test_an_iteration_is_computation_messages_and_both(
    passage: Passage, last: int, hidden: int
) -> None:
    sizes = [4] * len(passage.posted_s)
    spans = passage.timeline(1, sizes, (hidden, last))
    times = breakdown(passage, spans)
    whole = times["overlap_s"] + times["exposed_communication_s"]
    assert whole == pytest.approx(times["communication_s"])
    assert times["forward_s"] + times["backward_s"] == pytest.approx(passage.posted_s[-1])
    assert spans.duration_s == pytest.approx(passage.end_s)
    sent = spans.select(spans.kind == "all_reduce")
    assert (sent.start_s >= passage.posted_s - 1e-12).all() and sent.bytes.tolist() == sizes
    if not hidden:  # one group carries no more at once than it has threads
        for start in sent.start_s:
            assert ((sent.start_s <= start) & (sent.end_s > start)).sum() <= last


# -- on this system ----------------------------------------------------------------------------


@pytest.fixture
def another_thread() -> Iterator[int]:
    """Id of a thread that waits."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield int(thread.native_id or 0)
    ended.set()
    thread.join()


def test_what_was_applied_is_what_the_system_says(another_thread: int) -> None:
    why = shares.apply(Configuration.parse("t1-free-nice10"), [another_thread], None)
    assert why or witness([another_thread])["taken_nice"] >= 10
    assert os.getpriority(os.PRIO_PROCESS, 0) == witness([os.getpid()])["taken_nice"]


def test_a_priority_that_is_not_permitted_is_said(
    monkeypatch: pytest.MonkeyPatch, another_thread: int
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    idle, normal = (Configuration.parse(f"t1-free-{order}") for order in ("idle", "normal"))
    said = shares.apply(idle, [another_thread], None)
    assert said == "priority idle not permitted: Operation not permitted"
    assert not shares.apply(normal, [another_thread], None)
    monkeypatch.delattr(os, "sched_setscheduler")
    assert "this system" in shares.apply(idle, [another_thread], None)


# -- messages over two groups ------------------------------------------------------------------


def test_two_groups_fed_in_one_order_do_not_hang_however_late_ranks_are() -> None:
    settings = TwoGroupsSettings("t1-free-normal+t1-free-nice10", 60)
    found = launch(two_groups_job, settings, **GLOO)["facts"]
    assert found["value"].tolist() == ["0"]


def test_a_bucket_out_of_order_is_refused() -> None:
    router = Router(2)
    with pytest.raises(UserError, match="bucket 1 came after 0 others"):
        router.hook(None, SimpleNamespace(index=lambda: 1))


# -- on real ranks -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> dict[str, pd.DataFrame]:
    """Training on two ranks under policies of all sorts, and a plan that DDP does not make."""
    counts: dict[str, Any] = {"repeats": 2, "iterations": 2, "empty": 1}
    plans = {"ddp": [], "uneven": [4, 4 * 61_702]}
    settings = SharedTrainingSettings("lenet5", [8], POLICIES, plans, **counts)
    return launch(shared_training_job, settings, **GLOO)


ROUND = ["network", "batch", "plan", "configuration", "repeat"]


def rounds_of(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Each cell's in each round, once, in the order of measuring."""
    return list(dict.fromkeys(rows[ROUND].itertuples(index=False, name=None)))


@idle_threads
def test_what_passes_between_iterations_is_no_longer_than_the_slowest_rank_s(
    trained: dict[str, pd.DataFrame],
) -> None:
    """And as often with empty messages as with whole ones: one row for each cell and round."""
    periods, rows = trained["sharing_periods"], trained["sharing_iterations"]
    slowest_s = rows.groupby(ROUND, sort=False)["iteration_s"].mean()
    assert periods.set_index(ROUND).index.tolist() == rounds_of(rows)
    assert (periods["iteration_s"].to_numpy() <= slowest_s.to_numpy() * (1 + 1e-9)).all()
    assert (periods["first_post_s"] > 0).all()
    # Of two ranks' mean, which the last post can be later than: the other may have begun, and ended, late.
    assert (periods["first_post_s"] < GLOO["ranks"] * periods["empty_s"]).all()


@idle_threads
def test_each_configuration_took_effect_or_says_why_not(trained: dict[str, pd.DataFrame]) -> None:
    control = trained["sharing_control"]
    names = {one.name for text in POLICIES for one in vars(Policy.parse(text)).values()}
    assert set(control["configuration"]) == names and set(control["rank"]) == {0, 1}
    for row in control.itertuples():
        one = Configuration.parse(str(row.configuration))
        if row.outcome == REFUSED:
            assert row.reason != "none"
            continue
        assert row.taken_threads == 2 * one.threads
        expected = {"raised": "SCHED_RR", "idle": "SCHED_IDLE"}.get(one.priority)
        assert expected in (None, row.taken_policy)


@idle_threads
def test_what_can_be_is_measured_and_its_times_fit_together(
    trained: dict[str, pd.DataFrame],
) -> None:
    rows, control = trained["sharing_iterations"], trained["sharing_control"]
    refused = set(control.loc[control["outcome"] == REFUSED, "configuration"])
    possible = [name for name in POLICIES if not refused & set(name.split("+"))]
    assert set(rows["configuration"]) == set(possible) and len(possible) >= 2
    assert set(rows["plan"]) == {"ddp"}, "no bucket ends within a tensor"
    counts = rows.groupby("configuration").size()
    assert (counts == 4).all() and set(rows["repeat"]) == {0, 1}
    exposed = rows["communication_s"] - rows["overlap_s"]
    assert np.allclose(rows["exposed_communication_s"], exposed)
    assert (rows["communication_s"] > 0).all()
    parts = rows["forward_s"] + rows["backward_s"] + rows["update_s"]
    assert (parts <= rows["iteration_s"] + 1e-9).all()
    assert set(rows["bytes"]) == {4 * 61_706}


@idle_threads
def test_messages_are_timed_under_each_configuration() -> None:
    messages = [(MIB, 4), (4096, 1)]
    settings = SharedMessagesSettings(["t2-free-normal", "t1-free-idle"], messages, repeats=2)
    rows = launch(shared_messages_job, settings, **GLOO)["sharing_messages"]
    assert rows.groupby(["configuration", "bytes", "parts"]).size().tolist() == [2] * 4
    assert set(zip(rows["bytes"], rows["parts"], strict=True)) == set(messages)


@idle_threads
def test_kernels_and_messages_are_timed_alone_and_together() -> None:
    policies, names = ["t2-free-normal", "t1-free-nice10"], ["relu", "attention"]
    settings = SharedKernelsSettings(policies, names, TINY, MIB, repeats=1)
    rows = launch(shared_kernels_job, settings, **GLOO)["sharing_kernels"]
    assert rows.groupby("kernel").size().to_dict() == dict.fromkeys(names, 2)
    assert (rows["messages"] * rows["messages_alone_s"] > 0).all() and (rows["calls"] >= 1).all()
    assert ((rows["overlap_share"] > 0) & (rows["overlap_share"] <= 1)).all()
    assert ((rows["calls"] == 1) | (rows["overlap_share"] == 1)).all()


@given(
    st.lists(st.floats(0.001, 1), min_size=1, max_size=8),
    st.lists(st.floats(0.001, 4), min_size=1, max_size=4),
)
def test_calls_that_outlast_messages_do_not_count_but_the_first(
    steps: list[float], messages_s: list[float]
) -> None:
    calls_s = np.cumsum(steps).tolist()
    both = shared_kernels.together(0.0, calls_s, messages_s)
    assert both.messages_s == max(messages_s)
    assert both.calls * both.kernel_s == pytest.approx(calls_s[both.calls - 1])
    assert (both.overlap_share == 1) or both.calls == 1
    assert both.calls == len(calls_s) or calls_s[both.calls] > max(messages_s)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SharedTrainingSettings("lenet5", [], ["t1-free-normal"]), "needs a batch"),
        (lambda: SharedTrainingSettings("lenet5", [1], ["fast"]), "configuration 'fast'"),
        (
            lambda: SharedTrainingSettings("lenet5", [1], ["t1-free-normal"], empty=-1),
            "an iteration in each",
        ),
        (lambda: SharedMessagesSettings(["t1-free-normal"], [(3, 1)]), "3 bytes do not make"),
        (lambda: SharedMessagesSettings([TWO], [(64, 1)]), "one group"),
        (lambda: SharedKernelsSettings([TWO], ["relu"], TINY, 64), "one group"),
        (lambda: SharedKernelsSettings(["t1-free-normal"], ["sort"], TINY, 64), "unknown kernel"),
    ],
)
def test_settings_that_ask_for_nothing_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_configurations_of_gloo_are_not_tried_on_a_gpu() -> None:
    gpu = Rank(0, 1, 0, torch.device("cuda"), "nccl", 0, 1)
    with pytest.raises(UserError, match="on a GPU use contention"):
        shares.Groups(gpu)
