"""Figures 9 and 10 of osf from what is recorded: nothing predicts what it has seen."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.errors import UserError
from ddlkit.papers import networks, osf
from ddlkit.report.figures import osf_measured
from ddlkit.report.source import Source, default_recording

RECORDING = Source((default_recording(),))
SIZES = tuple(1024 << k for k in range(17))
OWN_SIZES = sorted({4 * count for count in networks.parameters("ResNet101")})


@pytest.fixture(scope="module")
def trained() -> pd.DataFrame:
    if not RECORDING.has("convergence"):
        pytest.skip("no training to convergence is recorded yet")
    return RECORDING.table("convergence")


@pytest.fixture(scope="module")
def losses(trained: pd.DataFrame) -> pd.DataFrame:
    return osf_measured.fig09(trained)


# -- figure 9 ----------------------------------------------------------------------------------


def test_all_networks_were_trained_alike(trained: pd.DataFrame) -> None:
    alike = ["data_sha256", "classes", "images", "batch", "learning_rate", "epochs", "threads"]
    assert (trained[alike].nunique() == 1).all()
    seeds = trained.groupby("network")["seed"].agg(lambda column: tuple(sorted(set(column))))
    assert set(seeds.index) == set(osf_measured.VARIANTS)
    assert seeds.nunique() == 1 and len(seeds.iloc[0]) >= 2


def test_every_training_left_the_guess_behind(losses: pd.DataFrame) -> None:
    at_the_end = losses[losses["epoch"] == losses["epoch"].max()]
    assert (at_the_end["accuracy"] > 5 / 24).all()
    seen = (
        at_the_end["measured_on"] != "held_out"
    )  # others are judged too boldly: their loss grows again
    assert (at_the_end["share_of_guess"][seen] < 0.5).all()


def test_the_papers_losses_stand_at_the_end_of_its_two_networks(losses: pd.DataFrame) -> None:
    told = losses.dropna(subset="paper")
    assert set(told["network"]) == {"published", "replaced"}
    assert set(told["measured_on"]) == {"running"}
    assert set(told["epoch"]) == {losses["epoch"].max()}
    assert told["paper"].max() == pytest.approx(1.82 / math.log(1000))


def test_of_several_lengths_the_longest_is_drawn(trained: pd.DataFrame) -> None:
    shorter = trained[trained["epoch"] < 3].assign(epochs=2)
    both = osf_measured.fig09(pd.concat([shorter, trained]))
    pd.testing.assert_frame_equal(both.reset_index(drop=True), osf_measured.fig09(trained))


def test_dense_layers_have_the_papers_share(trained: pd.DataFrame) -> None:
    shares = osf_measured.parameter_shares(trained)["dense_share"]
    assert shares["published"] == pytest.approx(shares["VGG-16 of the paper"], abs=0.005)
    assert shares["replaced"] == 0


def test_the_final_table_is_the_mean_of_the_seeds(losses: pd.DataFrame) -> None:
    table = osf_measured.final(losses)
    assert (table["min"] <= table["mean"]).all(axis=None)
    assert (table["mean"] <= table["max"]).all(axis=None)


# -- figure 10 ---------------------------------------------------------------------------------


def samples(sizes: tuple[int, ...] | list[int], factor: float = 1.0) -> pd.DataFrame:
    """All-reduces of 4 ranks over a link that is exactly a ring."""
    repeated = np.repeat(sizes, 3)
    seconds = factor * osf.update_s(repeated, 4, 125e6, overhead_s=9e-4)
    columns = {"bytes": repeated, "seconds": seconds, "collective": "all_reduce"}
    return pd.DataFrame({**columns, "link": "lab:1gbit", "ranks": 4, "stolen": 0.0, "in_flight": 1})


def test_a_true_ring_is_predicted_by_all_but_the_logarithm() -> None:
    tensors = samples(OWN_SIZES).assign(network="ResNet101")
    frame = osf_measured.fig10(samples(SIZES), tensors, "ResNet101")
    assert set(frame["model"]) == set(osf_measured.MODELS)
    assert frame["bandwidth_delay_bytes"].iloc[0] == pytest.approx(125e6 * 9e-4 / 3)
    worst = frame.groupby("model")["error"].agg(lambda column: column.abs().max())
    assert worst[list(osf_measured.LINE_MODELS)].max() < 1e-9
    assert worst["piecewise:BDP"] > 0.01
    assert frame["repeated"].abs().max() < 1e-12
    per_tensor = frame[frame["model"] == "alpha_beta"]["tensors"]
    assert per_tensor.sum() == len(networks.parameters("ResNet101"))


def test_another_day_shows_as_repeatability_and_as_error() -> None:
    tensors = samples(OWN_SIZES, factor=1.25).assign(network="ResNet101")
    frame = osf_measured.fig10(samples(SIZES), tensors, "ResNet101")
    assert frame["repeated"].dropna().to_numpy() == pytest.approx(-0.2)
    summary = osf_measured.error_summary(frame)
    assert summary.loc[("lab:1gbit", 4, "alpha_beta"), "sum"] == pytest.approx(-0.2)


def test_forms_are_told_apart_only_where_runs_differ_by_less() -> None:
    """A true ring: on one day the line beats Eq 18 on small tensors, on another nothing is decided."""
    for factor, decided in ((1.0, True), (1.5, False)):
        tensors = samples(OWN_SIZES, factor).assign(network="ResNet101")
        told = osf_measured.decided(osf_measured.fig10(samples(SIZES), tensors, "ResNet101"))
        small = told[told["tensors"] == "small"].iloc[0]
        assert small["line"] in osf_measured.LINE_MODELS and small["decided"] == decided
        assert small["runs_differ"] == pytest.approx(1 - 1 / factor)
        assert (small["line_error"] < small["eq18_error"]) or not decided


def test_a_link_that_was_not_measured_before_is_told() -> None:
    tensors = samples(OWN_SIZES).assign(network="ResNet101", link="lab:2gbit")
    with pytest.raises(UserError, match="no link with all-reduces of ResNet101"):
        osf_measured.fig10(samples(SIZES), tensors, "ResNet101")


def test_no_model_has_seen_the_size_that_it_predicts() -> None:
    known, tensors = samples(SIZES), samples(OWN_SIZES).assign(network="ResNet101")
    poisoned = known["bytes"] == 65536  # in both tables: its time must count for nothing there
    spoiled = known.assign(seconds=known["seconds"].where(~poisoned, 10.0))
    at_it = [
        frame[frame["bytes"] == 65536].set_index("model")["error"]
        for frame in (osf_measured._errors(part, tensors) for part in (known, spoiled))
    ]
    pd.testing.assert_series_equal(*at_it)


@pytest.mark.skipif(not RECORDING.has("tensors"), reason="no table of tensors is recorded yet")
def test_recorded_tensors_are_all_sizes_of_the_network() -> None:
    rows = RECORDING.table("tensors")
    for _, part in rows.groupby(osf_measured.LINK):
        assert sorted(set(part["bytes"])) == OWN_SIZES


def test_left_out_errors_of_a_line_are_none() -> None:
    few = samples(SIZES[:3]).assign(link="short")
    table = osf_measured.left_out_by_link({"here": pd.concat([samples(SIZES), few])})
    row = table[table["link"] == "lab:1gbit"].iloc[0]
    assert row[[form for form in osf_measured.FORMS if form.startswith("alpha")]].max() < 1e-9
    assert table[table["link"] == "short"]["segments"].isna().all()
