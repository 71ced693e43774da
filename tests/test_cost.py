"""Laws of the cost forms: points, JSON, other worker counts, refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.cost import (
    FORMS,
    REPLACED,
    AlphaBeta,
    Chords,
    MessageCost,
    Piecewise,
    Segments,
    Table,
    from_dict,
)
from ddlkit.core.errors import UserError
from ddlkit.core.fit import SIMPLE_FIRST, fit
from ddlkit.core.pieces import METHODS
from workbook.osf import equations as osf

SIZES = np.geomspace(1, 1e9, 200)
COSTS: dict[str, MessageCost] = {
    "alpha_beta": AlphaBeta(1e-3, 8e-9, workers=4, algorithm="ring"),
    "table": Table(
        np.array([1e3, 1e6, 1e8]), np.array([1e-4, 1e-2, 0.9]), collective="all_gather"
    ),
    "chords": Chords(np.array([1e3, 1e5, 1e6, 1e8]), np.array([1e-4, 2e-3, 1e-2, 0.9])),
    "piecewise": Piecewise(45e3, 1e-5, 1e-4, 8e-9, 3e-4),
    "segments": Segments(
        *map(np.array, ([1e5, 1e7], [1e-4, 2e-4, 3e-4], [1e-8, 8e-9, 9e-9]))
    ),
}


@pytest.mark.parametrize("form", SIMPLE_FIRST)
def test_a_registered_form_is_read_back_and_the_same_for_one_size_and_many(
    form: str,
) -> None:
    """A form that is registered has an example here, or these laws would not run over it."""
    assert {name for name, kind in FORMS.items() if kind in METHODS} == set(COSTS)
    cost = COSTS[form]
    again = from_dict(json.loads(json.dumps(cost.to_dict())), FORMS)
    np.testing.assert_array_equal(again(SIZES), cost(SIZES))
    assert [cost(float(size)) for size in SIZES] == cost(SIZES).tolist()
    use = (cost.collective, cost.workers, cost.algorithm)
    assert (again.collective, again.workers, again.algorithm) == use


def test_a_number_in_the_place_of_a_list_is_a_list_of_one_number() -> None:
    """As a file may have it: of two pieces between which there is one break, and of one piece."""
    two = {"form": "segments", "breaks_bytes": 10.0, "alpha_s": [1.0, 2.0]}
    cost = from_dict({**two, "beta_s_per_byte": [1.0, 1.0]}, FORMS)
    assert [cost(9.0), cost(10.0)] == [10.0, 12.0]
    one = {"form": "segments", "breaks_bytes": [], "alpha_s": 1.0}
    assert from_dict({**one, "beta_s_per_byte": 2.0}, FORMS)(3.0) == 7.0


@pytest.mark.parametrize("form", REPLACED)
def test_a_form_that_is_no_more_names_what_replaces_it(form: str) -> None:
    told = re.escape(f"{form!r} is no more: use {REPLACED[form]}, and fit again")
    with pytest.raises(UserError, match=told):
        fit(form, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    with pytest.raises(UserError, match=told):
        from_dict({"form": form, "bytes": [1, 2], "seconds": [1, 2]}, FORMS)


@pytest.mark.parametrize("kind", [Table, Chords])
@given(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3))
def test_tables_pass_through_their_points_and_extrapolate_with_the_last_slope(
    kind: type[Table], seconds: list[float]
) -> None:
    table = kind(np.array([1e3, 1e5, 1e6]), np.sort(seconds))
    np.testing.assert_allclose(table(table.bytes), table.seconds, rtol=1e-12)
    assert table(1.0) == pytest.approx(table.seconds[0]) == table.startup_s()
    slope = (table.seconds[2] - table.seconds[1]) / 9e5
    assert table(3e6) == pytest.approx(table.seconds[2] + slope * 2e6)


def test_between_its_points_a_table_is_a_power_and_chords_are_a_line() -> None:
    sizes, middle = np.geomspace(1e3, 1e9, 12), np.geomspace(1e3, 1e9, 500)
    np.testing.assert_allclose(
        Table(sizes, 1e-6 * sizes**0.7)(middle), 1e-6 * middle**0.7
    )
    line = AlphaBeta(1e-3, 1e-9)
    np.testing.assert_allclose(
        Chords(sizes, line(sizes))(middle), line(middle), rtol=1e-12
    )


def test_a_ring_is_taken_to_other_worker_counts_and_is_osf_eq_7() -> None:
    def ring(n: int) -> AlphaBeta:
        per_byte_s, latency_s = 2 * (n - 1) / n * 1e-9, 2 * (n - 1) * 1e-5
        return AlphaBeta(latency_s, per_byte_s, workers=n, algorithm="ring")

    for name, known in COLLECTIVES.items():
        four, six = (
            AlphaBeta(
                1e-5 * known.steps(n),
                1e-9 * known.bus_factor(n),
                collective=name,
                workers=n,
                algorithm="ring",
            )
            for n in (4, 6)
        )
        np.testing.assert_allclose(four.at_workers(6)(SIZES), six(SIZES), rtol=1e-12)
    with pytest.raises(UserError, match="unknown collective 'barrier'"):
        replace(four, collective="barrier").at_workers(6)
    for n in (2, 4, 16):
        moved = ring(4).at_workers(n)
        np.testing.assert_allclose(moved(SIZES), ring(n)(SIZES), rtol=1e-12)
        printed = osf.update_s(SIZES, n, 1e9, overhead_s=getattr(moved, "alpha_s"))  # noqa: B009
        np.testing.assert_allclose(moved(SIZES), printed, rtol=1e-12)
        sizes = np.array([1e3, 1e8])
        ends = osf.ring_from_ends(sizes, ring(n)(sizes), n)
        np.testing.assert_allclose(ends(SIZES), ring(n)(SIZES), rtol=1e-9)
    for other, n in (
        (AlphaBeta(1e-3, 8e-9, workers=4), 8),
        (COSTS["table"], 8),
        (ring(4), 1),
    ):
        with pytest.raises(UserError, match="number of workers|at least 2 workers"):
            other.at_workers(n)


LINE = {"form": "alpha_beta", "alpha_s": 1, "beta_s_per_byte": 1}
PIECES = {"form": "segments", "alpha_s": [1, 2], "beta_s_per_byte": [1, 2]}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"form": "quadratic"}, "unknown cost form 'quadratic'"),
        ({"form": "alpha_beta", "alpha_s": 1}, "lacks beta_s_per_byte"),
        ({**LINE, "gamma": 1}, "has the unknown parameters gamma"),
        ({**LINE, "alpha_s": "x"}, "must be a finite number"),
        ({**LINE, "alpha_s": True}, "must be a finite number"),
        ({**LINE, "alpha_s": [1.0]}, "must be a finite number"),
        ({**LINE, "alpha_s": 1e31}, "finite number up to"),
        ({"form": "table", "bytes": [1, 1], "seconds": [1, 2]}, "increasing"),
        ({"form": "chords", "bytes": [1, 2], "seconds": [1, 0]}, "above zero"),
        ({"form": "table", "bytes": [1, 2], "seconds": [1]}, "equal length"),
        ({**PIECES, "breaks_bytes": []}, "k-1"),
        ({**LINE, "workers": 0}, "ranks is 0: must be a whole number"),
        (3, "names no form"),
        ({"form": 3}, "unknown cost form 3"),
    ],
)
def test_bad_descriptions_are_refused(description: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(description, FORMS)
