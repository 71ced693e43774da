"""The equations and algorithms of omgs agree with each other, and with the limits they must have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import Log, Scan
from ddlkit.papers import omgs
from mergings import optimal


@st.composite
def instances(draw: st.DrawFn, smallest: int = 1, largest: int = 7) -> omgs.Instance:
    """Networks under Eq 10, of times and sizes that differ widely or not at all."""
    n = draw(st.integers(smallest, largest))
    backward_s = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    elements = draw(st.lists(st.integers(2, 10**7), min_size=n, max_size=n))
    costs = [draw(st.floats(0, bound)) for bound in (0.1, 1e-7, 1.0)]
    gamma = draw(st.floats(1e-12, 1e-8))
    return omgs.Instance(np.array(backward_s), np.array(elements), Log(gamma), *costs)


@st.composite
def mergings(draw: st.DrawFn) -> tuple[omgs.Instance, np.ndarray]:
    instance = draw(instances())
    flags = draw(st.lists(st.booleans(), min_size=instance.layers, max_size=instance.layers))
    return instance, np.array([False, *flags[1:]])


def test_eq_1_is_a_step_against_the_gradient() -> None:
    assert omgs.sgd_step([1.0, 2.0], [0.5, -1.0], 0.1) == pytest.approx([0.95, 2.1])


@given(instances())
def test_eqs_2_and_3_end_backward_together(instance: omgs.Instance) -> None:
    begun = omgs.backward_start_s(instance.forward_s, instance.backward_s)
    assert begun[-1] == pytest.approx(instance.forward_s, abs=1e-12)
    whole = omgs.sgd_iteration_s(instance.forward_s, instance.backward_s)
    assert begun[0] + instance.backward_s[0] == pytest.approx(whole)


@given(instances())
def test_merging_all_layers_is_topk_sgd(instance: omgs.Instance) -> None:
    everything = np.arange(instance.layers) > 0
    size = instance.elements.sum()
    costs = float(instance.selection_s(size)), float(instance.communication_s(size))
    topk = omgs.topk_iteration_s(instance.forward_s, instance.backward_s, *costs)
    assert float(omgs.merged_iteration_s(instance, everything)) == pytest.approx(topk)


@given(instances(largest=12), st.sets(st.sampled_from(sorted(omgs.REPAIRS))), st.booleans())
def test_one_pass_merges_what_algorithm_1_merges(
    instance: omgs.Instance, repairs: set[str], by_code: bool
) -> None:
    """With any of its repairs, and by the rule of its published code: as printed it takes many passes."""
    both = [
        find(instance, frozenset(repairs), by_code=by_code).tolist()
        for find in (omgs.merged_in_one_pass, omgs.find_merged_layers)
    ]
    assert both[0] == both[1]


@given(mergings())
def test_many_mergings_at_once_are_eqs_5_to_9_of_the_merged_network(
    drawn: tuple[omgs.Instance, np.ndarray],
) -> None:
    instance, flags = drawn
    merged = omgs.merge(instance, flags)
    assert merged.elements.sum() == instance.elements.sum()
    assert merged.backward_s.sum() == pytest.approx(instance.backward_s.sum())
    _, computed, _, sending, sent = omgs.timeline(merged)
    selecting = merged.selection_s(merged.elements)
    shown = omgs.exposed_s(sending, sent, computed, selecting)
    eq5 = omgs.lags_iteration_s(merged.forward_s, merged.backward_s, selecting, shown)
    assert float(omgs.merged_iteration_s(instance, flags)) == pytest.approx(eq5)


@given(instances(smallest=2, largest=2))
def test_two_layers_are_merged_optimally(instance: omgs.Instance) -> None:
    best_s = optimal(instance)[1]
    for planner in (omgs.find_merged_layers, omgs.merge_by_theorem):
        found = float(omgs.merged_iteration_s(instance, planner(instance)))
        assert found == pytest.approx(best_s, rel=1e-9)


@given(instances())
def test_the_best_merging_is_no_worse_than_any_algorithm(instance: omgs.Instance) -> None:
    best, best_s = optimal(instance)
    assert best_s == pytest.approx(float(omgs.merged_iteration_s(instance, best)))
    for repairs in (omgs.REPAIRS, frozenset[str]()):
        merged = omgs.find_merged_layers(instance, repairs)
        assert best_s <= float(omgs.merged_iteration_s(instance, merged)) * (1 + 1e-12)


@given(instances())
def test_without_start_up_time_no_merging_helps(instance: omgs.Instance) -> None:
    free = replace(instance, alpha_s=0.0)
    apart_s = float(omgs.merged_iteration_s(free, np.zeros(free.layers, bool)))
    assert optimal(free)[1] == pytest.approx(apart_s)


def test_free_selection_and_a_long_start_up_time_merge_everything() -> None:
    instance = omgs.Instance(np.full(6, 1e-3), np.full(6, 1e3), Scan(0.0, 0.0), 1.0, 1e-9)
    assert omgs.find_merged_layers(instance).tolist() == [False, *[True] * 5]


@given(mergings())
def test_algorithm_2_sends_every_layer_once_and_in_ready_order(
    drawn: tuple[omgs.Instance, np.ndarray],
) -> None:
    _, flags = drawn
    sent = omgs.messages(flags)
    assert [layer for message in sent for layer in message] == list(range(len(flags), 0, -1))
    assert len(sent) == int((~flags).sum())


def test_all_mergings_are_listed_once_and_keep_layer_1_normal() -> None:
    every = omgs.combinations(5)
    assert len({tuple(row) for row in every}) == len(every) == 2**4
    assert not every[:, 0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward_s": [1.0]}, "1 backward times, 2 sizes"),
        ({"elements": [1.0, 0.0]}, "sizes of layers must be above zero"),
        ({"alpha_s": -1.0}, "alpha_s, beta_s and forward_s must be at least zero"),
    ],
)
def test_impossible_networks_are_refused(change: dict[str, object], message: str) -> None:
    plain = {"backward_s": [1.0, 1.0], "elements": [2.0, 2.0], "alpha_s": 0.0, "beta_s": 0.0}
    with pytest.raises(UserError, match=message):
        omgs.Instance(selection=Log(1.0), **{**plain, **change})  # type: ignore[arg-type]


def test_a_merged_first_layer_and_too_many_layers_are_refused() -> None:
    instance = omgs.Instance(np.ones(21), np.full(21, 2.0), Log(1.0), 0.0, 0.0)
    with pytest.raises(UserError, match="needs 21 layers, the first not merged"):
        omgs.merged_iteration_s(instance, np.ones(21, bool))
    with pytest.raises(UserError, match="21 layers: trying every merging is for 20 at most"):
        optimal(instance)
