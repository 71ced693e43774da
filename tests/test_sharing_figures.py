"""The sharing paper's figures: what is printed, what its model says, and what recordings do."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from workbook.common.claims import paper_table, prose
from workbook.sharing import fig02, fig04, fig05, fig06, fig07, fig08, recordings, shown
from workbook.sharing import model as sharing_model
from workbook.sharing.parts import measured_parts, pairs
from workbook.sharing.printed import DEFAULT, relative_times, throughput

WAYS = {
    "t1-free-idle": 1.2,
    "t1-free-nice10": 1.1,
    "t2-free-normal": 1.0,
    "t2-free-raised": 0.9,
}
TRAINED = {**WAYS, "t1-free-nice10+t2-free-raised": 0.95}
"""Seconds of an iteration."""


def trained() -> pd.DataFrame:
    rows = [
        {"network": network, "batch": 2, "plan": "ddp", "link": "lab:4gbit", "repeat": repeat,
         "configuration": name, "iteration_s": seconds * slower}
        for network in ("vgg16_cifar", "squeezenet1_1")
        for repeat, slower in enumerate((1.0, 1.02, 0.97, 1.0, 1.1))
        for name, seconds in TRAINED.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_round_s_drift_cancels_and_the_default_gains_nothing() -> None:
    rows = trained()
    slower = rows.assign(iteration_s=rows["iteration_s"] * (1 + 0.1 * rows["repeat"]))
    first, second = map(recordings.throughputs, (rows, slower))
    assert len(first) == 2 * len(TRAINED) and (first["lower"] <= first["gain"]).all()
    np.testing.assert_allclose(first["gain"], second["gain"])
    gains = [100 * (1 / seconds - 1) for seconds in TRAINED.values()]
    assert first["gain"][: len(gains)].tolist() == pytest.approx(gains)
    assert (first.loc[first["configuration"] == "t2-free-normal", "gain"] == 0).all()


def test_grids_keep_every_number_and_order_by_what_is_taken() -> None:
    printed = paper_table("sharing", "fig02")
    grid = shown.maps(fig02.panels({}))["Paper, 25 MB"].grid
    unsure = {"panel": ["here"], "value": [1.2], "lower": [0.9], "upper": [1.5]}
    both = pd.concat([fig02.panels({}), pd.DataFrame(unsure)], ignore_index=True)
    assert shown.largest(both) == [printed["relative_time"].max(), 1.2]
    for row in printed.itertuples():
        assert grid.loc[row.blocks, row.threads] == row.relative_time
    names = [*WAYS, "t2-own-normal", "t1-free-normal-omp2", [*TRAINED][-1]]
    rows = pd.DataFrame({"configuration": names, "ratio": range(len(names))})
    table = shown.cells("here", rows, "ratio")
    told = table["column"] + "-" + table["row"]
    assert dict(zip(told, table["value"], strict=True)) == dict(
        zip(names[:-1], range(6), strict=True)
    )
    order = ["free-idle", "free-nice10", "free-normal", "free-raised", "own-normal"]
    assert table["row"].tolist() == [*order, "free-normal-omp2"]
    assert shown.maps(table)["here"].grid.loc["normal", "t2"] == 2
    shapes = ["2x64", "1x512", "1x64+2x64", "1x64"]
    assert sorted(shapes, key=recordings.least_first) == [
        "1x64",
        "1x512",
        "2x64",
        "1x64+2x64",
    ]


def test_parts_are_shown_of_even_rounds_that_have_both() -> None:
    """A recording may end between an odd round and an even."""
    took_s = {"2x256": (1.0, range(6)), "1x64": (0.8, range(6)), "1x128": (0.5, [1])}
    rows = [
        {"network": "resnet18", "batch": batch, "plan": "ddp", "link": "nvlink", "repeat": repeat,
         "configuration": name, "iteration_s": seconds, "communication_s": 0.3, "overlap_s": 0.2,
         "exposed_communication_s": 0.1}
        for batch in (16, 32)
        for name, (seconds, rounds) in took_s.items()
        for repeat in rounds
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    assert measured_parts("nvlink", table, "batch") == {}, (
        "the odd rounds' best is in no even one"
    )
    bars = measured_parts("nvlink", table[table["configuration"] != "1x128"], "batch")
    assert bars["here, nvlink"].loc["16, default"].tolist() == pytest.approx(
        [0.7, 0.2, 0.1]
    )
    assert bars["here, nvlink"].loc["16, best: 1x64"].sum() == pytest.approx(0.8)


def test_the_paper_s_figures_are_drawn_without_any_recording() -> None:
    again = fig08.panels({})
    assert len(again) == throughput().count().sum()
    ((heading, texts),) = fig08.texts({}).items()
    others = again[again["column"] != DEFAULT]["value"]
    counts = others.size, (others > 0).sum(), (others < 0).sum()
    assert heading == (
        "Paper, two V100S GPUs: of {} gains, {} are above zero and {} are below zero"
    ).format(*counts)
    assert (texts[f"{DEFAULT} (default)"] == "+0").all()
    assert texts.shape == throughput().shape


def test_the_best_of_each_case_is_the_largest_gain_that_is_printed() -> None:
    table, images = fig08.best({}), throughput()
    assert len(table) == len(images) and table["lower"].isna().all()
    for row in table.itertuples():
        every = images.loc[(row.network, row.batch)]
        assert every[row.configuration] == every.max()
        assert row.gain == pytest.approx(100 * (every.max() / every[DEFAULT] - 1))


def test_luck_does_not_choose_what_the_best_configuration_gains() -> None:
    """Each of two configurations is fast in one round alone: the other round chooses the wrong one."""
    seconds = {"t2-free-normal": (1.0, 1.0), "t1-free-idle": (0.5, 2.0)}
    seconds["t1-free-nice10"] = seconds["t1-free-idle"][::-1]
    rows = trained().query("repeat < 2 and configuration in @seconds.keys()")
    rows = rows.assign(
        iteration_s=[
            seconds[name][repeat]
            for name, repeat in rows[["configuration", "repeat"]].to_numpy()
        ]
    )
    ours = fig08.best({"iterations": rows}).query("panel == 'lab:4gbit'")
    assert len(ours) == 2 and ours["gain"].tolist() == pytest.approx([-50, -50])
    steady = fig08.best({"iterations": trained()}).query("panel == 'lab:4gbit'")
    assert steady["configuration"].tolist() == 2 * ["t2-free-raised"]
    assert steady["gain"].tolist() == pytest.approx(2 * [100 * (1 / 0.9 - 1)])


def test_every_time_that_figure_7_draws_is_printed_or_the_model_s() -> None:
    times = fig07.printed()
    figure = fig07.draw()
    for role in ("paper", "model"):
        drawn = [
            seconds
            for ax in figure.axes
            for line in ax.get_lines()
            if line.get_label() == role
            for seconds in np.asarray(line.get_xdata())
        ]
        assert sorted(drawn) == pytest.approx(sorted(times[role]))
    plt.close(figure)


def test_slowdowns_explain_what_is_not_fitted() -> None:
    by = sharing_model.errors()
    assert by["cases"].dropna().nunique() == 1
    assert (
        by.loc["both", "regret"]
        < by.loc["none", "regret"]
        < by.loc["default", "regret"]
    )
    assert by.loc["both", "median"] < by.loc["none", "median"]


def test_a_model_s_timeline_is_as_long_as_its_grid_says() -> None:
    model, names = sharing_model.fitted("both"), relative_times().index
    all_s = model.iteration_s("ResNet-18", np.array([32.0]))[0]
    for name, seconds in zip(names, all_s, strict=True):
        told = model.iteration("ResNet-18", 32, name)
        assert told.prediction.iteration_s == pytest.approx(seconds)
        assert told.timeline().duration_s == pytest.approx(seconds)


def test_every_time_that_the_text_prints_stands_beside_the_model_in_figures_5_to_7() -> (
    None
):
    printed = prose("sharing")
    kept = fig07.numbers({})
    values = sorted(kept.filter(like="printed ").stack().dropna())
    wanted = [
        value
        for key, value in printed.items()
        if re.match(r"fig07-.+-(default|best)$", key)
    ]
    assert values == sorted([*wanted, *2 * [printed["fig07-alexnet-computation-only"]]])
    saved, kept = fig06.saved_ms(), fig06.numbers({})
    assert kept["saved printed [ms]"].dropna().tolist() == [3.97, 6.92]
    bars_ms = 1e3 * kept.loc[:1, sharing_model.PARTS].sum(axis=1)
    assert saved.loc[16, "model"] == pytest.approx(bars_ms[0] - bars_ms[1], rel=1e-6)
    for name, seconds in fig05.printed()["printed_s"].items():
        assert printed[f"fig05c-{name}"] == pytest.approx(1e3 * seconds)


def test_one_gpu_fills_the_figures_with_the_times_that_it_recorded(
    tmp_path: Path,
) -> None:
    """Times of one batch and rate are 1.1, 1.2 and 1.4; later rounds are slower, all alike."""
    rows = [
        {"device": "cuda", "precision": "fp32", "taken_threads": 0, "buckets": 2, "bytes": 10**6,
         "bytes_per_s": 1e9, "overlap_share": 0.5, "ranks": 2, "policy": "same",
         "communication_s": 0.002, "exposed_communication_s": 0.0005, "quantity": "iteration",
         "network": "resnet18", "batch": batch, "sample": k, "blocks": blocks,
         "threads": 256 if blocks == 2 else 64, "bytes_per_s_asked": rate,
         "seconds": (1 + 0.05 * k) * batch / 1000 * (1 + blocks / 10)}
        for batch, k, blocks, rate in itertools.product((16, 32), range(6), (1, 2, 4), (0.0, 10e9))
    ]  # fmt: skip
    store.save_table(
        pd.DataFrame(rows), tmp_path, "sharing-x", schema="sharing", command=["made"]
    )
    one_gpu = recordings.one_gpu(str(tmp_path))
    assert one_gpu["iterations"]["overlap_s"].to_numpy() == pytest.approx(0.0015)
    gains, bars = shown.maps(fig04.panels(one_gpu)), fig06.bars(one_gpu)
    assert "stand-in, full speed: the best is faster in 2 of 2" in pairs(bars)
    for name in ("stand-in, full speed", "stand-in, 10 GB/s"):
        for blocks, threads in ((1, 64), (2, 256), (4, 64)):
            gain = 100 * (1.2 / (1 + blocks / 10) - 1)
            assert gains[name].grid.loc[blocks, threads] == pytest.approx(gain)
        parts = bars[f"here, {name}"]
        assert len(parts) == 4 and (parts.to_numpy() >= 0).all()
    assert len(fig05.timelines(one_gpu)) == 1, "no spans of a GPU"
