"""The sharing paper's figures and its term: laws of machines that are the model, and what recordings say."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.resources import Resources
from ddlkit.core.workload import LayerProfile
from ddlkit.report import source
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.figures import gpu_own, sharing, sharing_model
from ddlkit.report.papers.sharing import DEFAULT, throughput
from ddlkit.report.source import Source

LINK = "lab:4gbit"
WAYS = {
    "t1-free-idle": Resources("t1-free-idle", AlphaBeta(1e-4, 3e-9), 0.0, 1.0),
    "t1-free-nice10": Resources("t1-free-nice10", AlphaBeta(1e-4, 2e-9), 0.1, 0.5),
    "t2-free-normal": Resources("t2-free-normal", AlphaBeta(1e-4, 1.5e-9), 0.6, 0.2),
    "t2-free-raised": Resources("t2-free-raised", AlphaBeta(1e-4, 1e-9), 1.0, 0.0),
}
KNOWN = {(LINK, name): way for name, way in WAYS.items()}
TRAINED = (*WAYS, "t1-free-nice10+t2-free-raised")
NETWORKS = {"resnet18_64": 4, "vgg16_cifar": 6, "squeezenet1_1": 5}
COPY_S_PER_BYTE = 5e-10


def profile(network: str, batch: int) -> LayerProfile:
    n = NETWORKS[network]
    sizes = np.arange(1, n + 1) * 1_000_000
    return LayerProfile.from_flops(
        network, batch, [f"t{i}" for i in range(n)], sizes, np.full(n, 1e6 * n),
        peak_flops_per_s=1e9, utilisation=0.5,
    )  # fmt: skip


def messages(bits_per_s: float = 0.0) -> pd.DataFrame:
    rows = [
        {"link": LINK, "configuration": name, "bytes": size, "parts": 1, "ranks": 2,
         "link_bits_per_s": bits_per_s, "seconds": float(way.cost(size))}
        for name, way in WAYS.items()
        for size in (4_000_000, 64_000_000)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def kernels() -> pd.DataFrame:
    rows = [
        {"link": LINK, "configuration": name, "overlap_share": 1.0, "kernel_alone_s": 0.01,
         "kernel_beside_s": 0.01 * (1 + way.slowdown), "messages_alone_s": 0.1,
         "messages_beside_s": 0.1 * (1 + way.message_slowdown)}
        for name, way in WAYS.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def trained(share: float = 0.0) -> pd.DataFrame:
    """Iterations of a machine that is the model, but lasts longer by a share; rounds have other speeds."""
    rows = []
    known, speeds = sharing_model.known_resources(messages(), kernels()), (1.0, 1.02, 0.97, 1.1)
    profiles = [profile(*case) for case in itertools.product(NETWORKS, (2, 4))]
    for one, (repeat, slower), name in itertools.product(profiles, [*enumerate(speeds)], TRAINED):
        work = one.workload().scaled(slower)
        told = sharing_model.shared(work, ("ddp", LINK, name), known)
        assert told is not None
        told = replace(told, copy_s_per_byte=COPY_S_PER_BYTE)
        copies_s = 2 * COPY_S_PER_BYTE * float(work.bytes.sum())
        rows.append(
            {"network": one.network, "batch": one.batch, "plan": "ddp", "link": LINK,
             "configuration": name, "repeat": repeat, "empty_s": work.compute_s + copies_s,
             "iteration_s": (1 + share) * told.iteration_s}
        )  # fmt: skip
    return pd.DataFrame(rows)


class Session:
    """What such a machine recorded."""

    def __init__(self, share: float) -> None:
        rows = [(name, 10**6, 0.1, 0.1 + 2e6 * COPY_S_PER_BYTE) for name in NETWORKS]
        copies = pd.DataFrame(rows, columns=["network", "bytes", "alone_s", "bucketed_s"])
        self.tables = {"messages": messages(), "kernels": kernels(), "copies": copies}
        self.tables["periods"] = trained(share)

    def profiles(self) -> dict[str, LayerProfile]:
        cases = itertools.product(NETWORKS, (2, 4))
        return {f"{name}-{batch}": profile(name, batch) for name, batch in cases}

    def table(self, name: str) -> pd.DataFrame:
        return self.tables[name.removeprefix("sharing_")]

    rounds = table


@pytest.mark.parametrize("share", [0.0, 0.03])
def test_a_session_that_is_the_model_is_predicted_without_error(share: float) -> None:
    """Whatever the rounds' speeds; without slowdowns predictions are too short."""
    off = sharing_model.training(cast(Source, Session(share)))
    held_out = len(NETWORKS) - len(sharing_model.NOT_HELD_OUT)
    assert len(off) == held_out * 2 * len(TRAINED)
    # A round's baseline is of two speeds where the last configuration of a round is not met.
    np.testing.assert_allclose(off["term"], 1 / (1 + share) - 1, atol=2e-4)
    assert (off["none"] <= off["term"] + 1e-12).all()
    assert (off["no overlap"] > off["none"]).all()


@pytest.mark.parametrize("bits_per_s", [0.0, 1e9])
def test_messages_and_kernels_show_what_a_configuration_takes(bits_per_s: float) -> None:
    """No message is faster than its link."""
    known = sharing_model.known_resources(messages(bits_per_s), kernels())
    for key, way in KNOWN.items():
        found = known[key]
        assert (found.slowdown, found.message_slowdown) == pytest.approx(
            (way.slowdown, way.message_slowdown)
        )
        for size in (4e6, 64e6):
            least_s = wire_s_per_byte("all_reduce", 2, bits_per_s) * size if bits_per_s else 0.0
            assert found.cost(size) == pytest.approx(max(least_s, float(way.cost(size))))


def test_what_is_not_known_is_not_predicted_and_the_last_message_has_its_own() -> None:
    work = profile("vgg16_cifar", 2).workload()
    for name in ("t4-one-idle", "t1-free-idle+t4-one-idle"):
        assert sharing_model.shared(work, ("ddp", LINK, name), KNOWN) is None
    told = sharing_model.shared(work, ("none", LINK, TRAINED[-1]), KNOWN)
    assert told is not None and {way.name for way in told.given[:-1]} == {"t1-free-nice10"}
    assert told.given[-1].name == "t2-free-raised"
    assert cast(Any, told.in_flight).tolist() == [1] * (len(told.given) - 1) + [2]


def test_recorded_training_is_predicted_as_well_as_was_asked_for() -> None:
    final = Source((store.RECORDED / "cpu-2x-intel-xeon" / f"{source.SHARING}-steady",))
    off = sharing_model.training(final)
    assert len(off) == 78
    assert abs(off["term"].mean()) <= 0.01 and off["term"].abs().median() <= 0.02


# -- rounds and grids ----------------------------------------------------------------------------


def test_a_round_s_drift_cancels_and_the_default_gains_nothing() -> None:
    rows = trained()
    slower = rows.assign(iteration_s=rows["iteration_s"] * (1 + 0.1 * rows["repeat"]))
    first, second = map(sharing.throughputs, (rows, slower))
    assert len(first) and (first["lower"] <= first["gain"]).all()
    np.testing.assert_allclose(first["gain"], second["gain"])
    assert (first.loc[first["configuration"] == "t2-free-normal", "gain"] == 0).all()
    assert sharing.throughputs(rows[rows["configuration"] == "t1-free-idle"]).empty


def test_grids_keep_every_number_and_order_by_what_is_taken() -> None:
    printed = paper_table("sharing", "fig02")
    grid = sharing.maps(sharing.figure2({}), 1.0)["Paper, 25 MB"].grid
    for row in printed.itertuples():
        assert grid.loc[row.blocks, row.threads] == row.relative_time
    names = [*WAYS, "t2-own-normal", "t1-free-normal-omp2", TRAINED[-1]]
    rows = pd.DataFrame({"configuration": names, "ratio": range(len(names))})
    table = sharing.cells("here", rows, "ratio")
    told = table["column"] + "-" + table["row"]
    assert dict(zip(told, table["value"], strict=True)) == dict(
        zip(names[:-1], range(6), strict=True)
    )
    order = ["free-idle", "free-nice10", "free-normal", "free-raised", "own-normal"]
    assert table["row"].tolist() == [*order, "free-normal-omp2"]
    panel = sharing.maps(table, 1.0)["here"]
    assert panel.default == ("normal", "t2") and panel.grid.loc["normal", "t2"] == 2
    shapes = ["2x64", "1x512", "1x64+2x64", "1x64"]
    assert sorted(shapes, key=sharing.least_first) == ["1x64", "1x512", "2x64", "1x64+2x64"]


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
    assert sharing.parts("nvlink", table, "batch") == {}, "the odd rounds' best is in no even one"
    bars = sharing.parts("nvlink", table[table["configuration"] != "1x128"], "batch")
    assert bars["here, nvlink"].loc["16, default"].tolist() == pytest.approx([0.7, 0.2, 0.1])
    assert bars["here, nvlink"].loc["16, best: 1x64"].sum() == pytest.approx(0.8)


# -- the paper's ---------------------------------------------------------------------------------


def test_the_paper_s_figures_are_drawn_without_any_recording() -> None:
    for table in (sharing.figure2({}), *sharing.figure3({}), sharing.figure4({})):
        assert table["value"].notna().all() and table["default"].any()
    again = sharing.figure8({})
    assert (
        len(again) == throughput().count().sum() and (again["value"][again["default"]] == 0).all()
    )
    (panel,) = sharing.maps(again, 0.0).values()
    assert panel.default == (None, DEFAULT) and panel.grid.shape == throughput().shape


def test_slowdowns_explain_what_is_fitted_and_what_is_not() -> None:
    for fitted in (True, False):
        by = sharing_model.errors(fitted)
        assert by["cases"].dropna().nunique() == 1
        assert by.loc["both", "regret"] < by.loc["none", "regret"] < by.loc["default", "regret"]
        assert by.loc["both", "median"] < by.loc["none", "median"]


def test_a_model_s_timeline_is_as_long_as_its_grid_says() -> None:
    model, names = sharing_model.fitted("both"), sharing_model.relative_times().index
    all_s = model.iteration_s("ResNet-18", np.array([32.0]))[0]
    for name, seconds in zip(names, all_s, strict=True):
        told = model.iteration("ResNet-18", 32, name)
        assert told.prediction.iteration_s == pytest.approx(seconds)
        assert told.timeline().duration_s == pytest.approx(seconds)


def test_every_time_that_the_text_prints_stands_beside_the_model_in_figures_5_to_7() -> None:
    printed = prose("sharing")
    kept = sharing.with_printed(sharing.figure7({}), sharing_model.printed())
    values = sorted(kept.filter(like="printed ").stack().dropna())
    wanted = [value for key, value in printed.items() if re.match(r"fig07-.+-(default|best)$", key)]
    assert values == sorted([*wanted, *2 * [printed["fig07-alexnet-computation-only"]]])
    saved = sharing_model.saved()
    kept = sharing.with_saved(sharing.figure6({}), saved)
    assert kept["saved printed [ms]"].dropna().tolist() == [3.97, 6.92]
    bars_ms = 1e3 * kept.loc[:1, sharing_model.PARTS].sum(axis=1)
    assert saved.loc[16, "model"] == pytest.approx(bars_ms[0] - bars_ms[1], rel=1e-6)
    parts = sharing_model.printed_parts()["printed_s"]
    assert len(parts) == 3
    for name, seconds in parts.items():
        assert printed[f"fig05c-{name}"] == pytest.approx(1e3 * seconds)


# -- one GPU -------------------------------------------------------------------------------------

SHAPES, RATES = ((1, 64), (2, 256), (4, 512)), (0.0, 10e9)


def took_s(batch: int, shape: tuple[int, int]) -> float:
    """More blocks take longer."""
    return batch / 1000 * (1 + shape[0] / 10)


def beside_stand_in() -> pd.DataFrame:
    """A ``sharing`` table of two networks; later rounds are slower, all alike."""
    networks = (("resnet18", 16), ("resnet18", 32), ("vgg16", 32))
    same = {"device": "cuda", "precision": "fp32", "taken_threads": 0, "buckets": 2, "bytes": 10**6}
    same |= {"bytes_per_s": 1e9, "overlap_share": 0.5, "ranks": 2, "policy": "same"}
    same |= {"communication_s": 0.002, "exposed_communication_s": 0.0005, "quantity": "iteration"}
    rows = [
        {**same, "network": network, "batch": batch, "sample": k, "blocks": shape[0],
         "threads": shape[1], "bytes_per_s_asked": rate,
         "seconds": (1 + 0.05 * k) * took_s(batch, shape)}
        for (network, batch), k, shape, rate in itertools.product(networks, range(6), SHAPES, RATES)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_one_gpu_fills_the_figures_with_the_times_that_it_recorded(tmp_path: Path) -> None:
    store.save_table(beside_stand_in(), tmp_path, "sharing-x", schema="sharing", command=["made"])
    one_gpu = gpu_own.one_gpu(str(tmp_path))
    rates = ["stand-in, full speed", "stand-in, 10 GB/s"]
    gains, grid = (sharing.maps(of(one_gpu), 0.0) for of in (sharing.figure4, sharing.figure8))
    assert set(gains) - set(sharing.maps(sharing.figure4({}), 0.0)) == {*rates}
    for name, shape in itertools.product(rates, SHAPES):
        gain = 100 * (took_s(32, (2, 256)) / took_s(32, shape) - 1)
        assert gains[name].grid.loc[shape] == pytest.approx(gain)
        assert grid[name].grid.loc["VGG-16, 32", f"{shape[0]}x{shape[1]}"] == pytest.approx(gain)
        assert gains[name].default == (2, 256) and not gains[name].unsure().any()
    for figure in (sharing.figure6, sharing.figure7):
        bars = {name: parts for name, parts in figure(one_gpu).items() if name.startswith("here")}
        assert set(bars) == {f"here, {name}" for name in rates}
        assert all(len(parts) == 4 and (parts.to_numpy() >= 0).all() for parts in bars.values())
