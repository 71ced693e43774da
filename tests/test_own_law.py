"""A lab's cost by gloo's law: right where messages follow it, near its table where links do otherwise."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.workload import Floats
from ddlkit.model import Calibration
from ddlkit.model.extrapolation import ring_at
from ddlkit.model.own_law import LAW, LEAST_SIZES, TABLE, by_law, named_cost, smoothed
from ddlkit.model.trials import OWN

LINK = "emulated:500mbit-delay2ms"
SIZES: Floats = 1024 * 4.0 ** np.arange(8.0)
BETWEEN: Floats = SIZES[2:-1] * 2


def rows(seconds: Floats, link: str = LINK, **known: object) -> pd.DataFrame:
    """A calibration, each size four times."""
    table = {"bytes": np.repeat(SIZES, 4).astype(int), "seconds": np.repeat(seconds, 4)}
    one = {"link": link, "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
    one |= {"in_flight": 1, "session": 0, "messages_per_sample": 1, "stolen": 0.0}
    return pd.DataFrame(table).assign(**one, link_bits_per_s=5e8, sample=0).assign(**known)


def law(software_s: float = 2e-4, over: float = 1.02) -> Floats:
    return np.asarray(ring_at(np.log([software_s, over, 0.5]), LINK, 4)(SIZES))


@settings(max_examples=10, deadline=None)
@given(st.floats(3e-5, 1e-3), st.floats(0.97, 1.3))
def test_between_sizes_it_is_right_where_messages_follow_the_law(
    software_s: float, over: float
) -> None:
    messages = rows(law(software_s, over))
    table = Calibration.of(messages, draws=0)
    told = by_law(table, messages, cores=2).between(LINK, 4).cost(BETWEEN)
    truth = ring_at(np.log([software_s, over, 0.5]), LINK, 4)(BETWEEN)
    assert np.abs(np.log(told / truth)).max() < 2e-3
    straight = np.abs(np.log(table.between(LINK, 4).cost(BETWEEN) / truth))
    assert straight.max() > 0.02, "a table that runs straight is not"


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_what_the_law_misses_is_kept(factor: float) -> None:
    """A link on which messages of 1 MiB and more take otherwise, as where packets are lost."""
    seconds = law() * np.where(SIZES >= 2**20, factor, 1.0)
    messages = rows(seconds, f"{LINK}-loss0.01")
    known = by_law(Calibration.of(messages, draws=0), messages, cores=2)
    error = np.log(known.between(f"{LINK}-loss0.01", 4).cost(SIZES) / seconds)
    fitted = np.log(seconds / law())
    assert np.abs(error).max() < np.abs(fitted).max() / 2
    assert np.abs(error[[0, -1]]).max() < 0.1


def test_intervals_hold_what_lies_between_sizes() -> None:
    """Where the law fits, draws differ as resampled medians do; where not, as sizes that are left out."""
    messages = rows(law())
    scattered = rows(law() * np.exp(0.1 * (-1.0) ** np.arange(SIZES.size)))
    spread = []
    for one in (messages, scattered):
        known = by_law(Calibration.of(one), one, cores=2).between(LINK, 4)
        drawn = np.log([draw(BETWEEN) for draw in known.draws] / known.cost(BETWEEN))
        spread.append(drawn.std(axis=0).max())
        assert np.abs(np.median(drawn, axis=0)).max() < max(0.02, spread[-1])
    assert spread[0] < 0.01 < 0.05 < spread[1]


@pytest.mark.parametrize(
    "known",
    [
        {"link": "lab:500mbit"},
        {"collective": "all_gather"},
        {"bytes": np.repeat(SIZES // 4**4 * 4**4, 4).clip(min=4**4).astype(int)},
    ],
    ids=["tbf", "all_gather", "few sizes"],
)
def test_what_the_law_does_not_tell_keeps_its_table(known: dict[str, object]) -> None:
    messages = rows(law()).assign(**known)
    if "bytes" in known:
        messages = messages[messages["bytes"].isin(messages["bytes"].unique()[: LEAST_SIZES - 1])]
    table = Calibration.of(messages, draws=0)
    found = by_law(table, messages, cores=2)
    assert found.known == table.known
    assert {named_cost(found, key) for key in found.known} == {TABLE}


def test_models_on_trial_keep_the_measured_table() -> None:
    messages = rows(law())
    table = Calibration.of(messages, draws=0, also=["alpha_beta:ends"])
    found, key = by_law(table, messages, cores=2), (LINK, 4, "all_reduce")
    assert found.known[key].others[OWN] is table.known[key].cost
    assert found.known[key].others["alpha_beta:ends"] is table.known[key].others["alpha_beta:ends"]
    assert named_cost(found, key) == LAW
    assert found.known[key].noise is table.known[key].noise


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12))
def test_smoothing_keeps_the_sum_and_what_is_constant(values: list[float]) -> None:
    found = smoothed(np.array(values))
    assert found.sum() == pytest.approx(sum(values), abs=1e-9)
    assert smoothed(np.full(5, 0.3)) == pytest.approx(np.full(5, 0.3))
