"""Evidence for data/papers/pytorch/errata.md: one test an entry, by calling the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from workbook.common import claims
from workbook.pytorch.claims import KEYS, recorded
from workbook.pytorch.equations import VERSION
from workbook.record.estimators import measure_estimators

Flaw = Callable[..., None]


@pytest.fixture(scope="module")
def installed() -> tuple[str, pd.Series]:
    """Version, and what its functions say, as `recorded`."""
    rows = measure_estimators()
    return rows["torch"][0], rows.set_index(
        rows[KEYS].astype(str).agg(" ".join, axis=1)
    )["estimate"]


@pytest.fixture
def flaw(installed: tuple[str, pd.Series], record_property: Any) -> Flaw:
    """What a claim's numbers must be under the torch of the claim; of another they are only recorded."""
    version, now = installed
    listed = {claim.id: claim for claim in claims.load_claims()}
    pairs = claims.paper_table("pytorch", "called", keep_default_na=False)

    def check(claim: str, *expected: float) -> None:
        assert f"in {VERSION}" in listed[claim].condition
        rows = pairs[pairs["claim"] == claim]
        values = [
            now[row.of] / (now[row.over] if row.over else 1) / row.unit
            for row in rows.itertuples()
        ]
        record_property(f"{claim}, torch {version}", [float(value) for value in values])
        if version == VERSION:
            assert values == pytest.approx(expected, rel=1e-3)
            outcome = listed[claim].verdict(claims.counted(values, "")).outcome
            assert outcome == "differs"

    return check


def test_what_was_recorded_is_what_the_installed_torch_says(
    installed: tuple[str, pd.Series],
) -> None:
    version, now = installed
    if version == VERSION:
        was, now = recorded().sort_index(), now.sort_index()
        pd.testing.assert_series_equal(was, now, rtol=1e-9, check_dtype=False)


def test_01_a_graph_prices_what_goes_in_and_what_comes_out(flaw: Flaw) -> None:
    flaw("pytorch-reduce-bytes", 8)


def test_02_two_paths_price_one_all_gather_nine_fold_apart(flaw: Flaw) -> None:
    flaw("pytorch-gather-paths", 9)


def test_03_below_the_smallest_size_a_message_has_no_start_up(flaw: Flaw) -> None:
    flaw("pytorch-below-smallest", 1 / 1024)


def test_04_of_a_size_seen_thrice_the_first_sample_is_taken(flaw: Flaw) -> None:
    flaw("pytorch-first-sample", 900)


def test_05_a_longer_message_takes_half_as_long_beside_an_all_gather(
    flaw: Flaw,
) -> None:
    flaw("pytorch-beyond-twice", 0.5)


def test_06_one_nvlink_has_three_bandwidths(flaw: Flaw) -> None:
    flaw("pytorch-nvlink", 370 / 36, 370 / 87.7)


def test_07_a_product_runs_at_half_again_the_peak(flaw: Flaw) -> None:
    flaw("pytorch-roofline", 1.5)


def test_08_fp32_is_halved_for_a_sparsity_that_it_has_not(flaw: Flaw) -> None:
    flaw("pytorch-fp32-peak", 33.5)


def test_09_no_gpu_is_found_by_its_full_name(flaw: Flaw) -> None:
    flaw("pytorch-names", 0)


def test_10_sixteen_ranks_take_longer_than_sixty_four(flaw: Flaw) -> None:
    flaw("pytorch-more-ranks", 1.3038, 1.2620, 1.1902)


def test_11_two_of_eight_ranks_share_eight_links(flaw: Flaw) -> None:
    flaw("pytorch-point-to-point", 7.748)


def test_12_eight_nodes_cost_as_much_as_one(flaw: Flaw) -> None:
    flaw("pytorch-placement", 1)


def test_13_four_bytes_more_take_less_time(flaw: Flaw) -> None:
    flaw("pytorch-longer", 0.8852)


def test_14_the_penalty_does_not_favour_the_all_gather(flaw: Flaw) -> None:
    flaw("pytorch-all-to-all", 0.1356)


def test_15_a_gib_is_sent_as_a_gb(flaw: Flaw) -> None:
    flaw("pytorch-gib", 94.167)
