"""The sharing paper's figures and its term: laws of machines that are the model, and what recordings say."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Resources, packed
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.workload import LayerProfile
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.figures import (
    gpu_own,
    sharing_measured,
    sharing_paper,
    sharing_predicted,
    sharing_shown,
)
from ddlkit.report.figures.sharing_measured import Recording
from ddlkit.report.panels import numbers as heat_map_numbers
from ddlkit.report.papers.sharing import DEFAULT, throughput
from ddlkit.report.source import Source

LINK = "lab:4gbit"
WAYS = {
    "t1-free-idle": (3e-9, 0.0, 1.0),
    "t1-free-nice10": (2e-9, 0.1, 0.5),
    "t2-free-normal": (1.5e-9, 0.6, 0.2),
    "t2-free-raised": (1e-9, 1.0, 0.0),
}
"""Seconds a byte, slowdown of computing and of messages."""
TRAINED = (*WAYS, "t1-free-nice10+t2-free-raised")
NETWORKS = {"resnet18_64": 4, "vgg16_cifar": 6, "squeezenet1_1": 5}
BATCHES = (2, 4, 8)
ROUNDS = range(6)


def profile(network: str, batch: int) -> LayerProfile:
    n = NETWORKS[network]
    sizes = np.arange(1, n + 1) * 1_000_000
    return LayerProfile.from_flops(
        network, batch, [f"t{i}" for i in range(n)], sizes, np.full(n, 1e6 * n),
        peak_flops_per_s=1e9, utilisation=0.5,
    )  # fmt: skip


def ways() -> dict[tuple[str, str], Resources]:
    return {
        (LINK, name): Resources(name, AlphaBeta(1e-4, per_byte), s, m)
        for name, (per_byte, s, m) in WAYS.items()
    }


def messages() -> pd.DataFrame:
    rows = [
        {"link": LINK, "configuration": name, "bytes": size, "parts": parts, "repeat": repeat,
         "seconds": float(way.cost(size)) * (1 + 0.01 * repeat)}
        for (_, name), way in ways().items()
        for size, parts in ((4e6, 1), (25e6, 4), (64e6, 1))
        for repeat in ROUNDS
    ]  # fmt: skip
    return pd.DataFrame(rows).astype({"bytes": int}).assign(ranks=2, link_bits_per_s=0.0)


def kernels() -> pd.DataFrame:
    rows = [
        {"link": LINK, "kernel": kernel, "configuration": name, "repeat": repeat, "overlap_share": 1.0,
         "kernel_alone_s": 0.01, "kernel_beside_s": 0.01 * (1 + s),
         "messages_alone_s": 0.1, "messages_beside_s": 0.1 * (1 + m)}
        for name, (_, s, m) in WAYS.items()
        for kernel in ("relu", "linear")
        for repeat in ROUNDS
    ]  # fmt: skip
    return pd.DataFrame(rows)


COPY_S_PER_BYTE = 5e-10


@dataclass
class Session:
    """A session on a machine that is the model, but for a share by which training lasts longer.

    sway : by which baselines are too long and too short in turn
    """

    share: float = 0.0
    sway: float = 0.0

    def has(self, name: str) -> bool:
        return True

    def profiles(self) -> dict[tuple[str, int], LayerProfile]:
        return {(name, batch): profile(name, batch) for name in NETWORKS for batch in BATCHES}

    def table(self, name: str) -> pd.DataFrame:
        if name == "sharing_messages":
            return messages()
        if name == "sharing_kernels":
            return kernels()
        if name == "sharing_copies":
            rows = [(name, 10**6, 0.1, 0.1 + 2e6 * COPY_S_PER_BYTE) for name in NETWORKS]
            return pd.DataFrame(rows, columns=["network", "bytes", "alone_s", "bucketed_s"])
        return self.trained

    rounds = table

    @cached_property
    def trained(self) -> pd.DataFrame:
        """Iterations, each with its baseline; rounds compute at other speeds."""
        rows = []
        known = sharing_predicted.known_resources(messages(), kernels())
        speeds = enumerate((1.0, 1.02, 0.97, 1.0, 1.1))
        profiles = self.profiles().values()
        for one, (repeat, slower), name in itertools.product(profiles, [*speeds], TRAINED):
            work = one.workload().scaled(slower)
            told = sharing_predicted.shared(work, "ddp", name, LINK, known)
            assert told is not None
            told = replace(told, copy_s_per_byte=COPY_S_PER_BYTE)
            swaying = 1 + self.sway * (1 - 2 * (TRAINED.index(name) % 2))
            both_s = 2 * COPY_S_PER_BYTE * float(work.bytes.sum())
            begins, ends = told.played_s
            sent_s, exposed_s = float((ends - begins).sum()), 0.1 * work.compute_s
            rows.append(
                {"network": one.network, "batch": one.batch, "plan": "ddp", "link": LINK,
                 "configuration": name, "repeat": repeat, "iteration": 0, "openmp": 1,
                 "compute_s": work.compute_s, "empty_s": swaying * (work.compute_s + both_s),
                 "iteration_s": (1 + self.share) * told.iteration_s, "communication_s": sent_s,
                 "exposed_communication_s": exposed_s, "overlap_s": sent_s - exposed_s}
            )  # fmt: skip
        return pd.DataFrame(rows)


# -- prediction ----------------------------------------------------------------------------------


def test_what_messages_and_kernels_show_is_what_a_configuration_takes() -> None:
    known = sharing_predicted.known_resources(messages(), kernels())
    for key, way in ways().items():
        assert known[key].slowdown == pytest.approx(way.slowdown)
        assert known[key].message_slowdown == pytest.approx(way.message_slowdown)
        assert known[key].cost(4e6) == pytest.approx(float(way.cost(4e6)) * 1.025)


@pytest.mark.parametrize("share", [0.0, 0.03])
def test_a_session_that_is_the_model_is_predicted_without_error(share: float) -> None:
    """Whatever the rounds' speeds; without slowdowns predictions are too short."""
    off = sharing_predicted.final_errors(cast(Source, Session(share)))
    held_out = len(NETWORKS) - len(sharing_predicted.NOT_HELD_OUT)
    assert len(off) == held_out * len(BATCHES) * len(TRAINED)
    np.testing.assert_allclose(off["term"], 1 / (1 + share) - 1, atol=2e-4)
    assert (off["none"] <= off["term"] + 1e-12).all()
    assert (off["no_overlap"] > off["none"]).all()


@pytest.mark.parametrize("bits_per_s", [0.0, 1e9])
def test_no_message_is_faster_than_its_link(bits_per_s: float) -> None:
    rows = messages().assign(link_bits_per_s=bits_per_s)
    known = sharing_predicted.known_resources(rows, kernels())
    limited = sharing_predicted.known_resources(rows, kernels(), line_rate=True)
    for key, way in known.items():
        for size in (4e6, 64e6):
            least_s = wire_s_per_byte("all_reduce", 2, bits_per_s) * size if bits_per_s else 0.0
            assert limited[key].cost(size) == pytest.approx(max(least_s, float(way.cost(size))))
        assert limited[key].slowdown == way.slowdown


def test_what_is_not_known_is_not_predicted() -> None:
    work = profile("vgg16_cifar", 2).workload()
    assert sharing_predicted.shared(work, "ddp", "t4-one-idle", LINK, ways()) is None
    assert sharing_predicted.shared(work, "ddp", "t1-free-idle+t4-one-idle", LINK, ways()) is None
    told = sharing_predicted.shared(work, "none", "t1-free-nice10+t2-free-raised", LINK, ways())
    assert told is not None and set(told.names[:-1]) == {"t1-free-nice10"}
    assert told.names[-1] == "t2-free-raised"
    copied = replace(told, copy_s_per_byte=1e-9)
    assert (
        packed(work, 1e-9).compute_s - work.compute_s <= copied.iteration_s - told.iteration_s + 1
    )


def test_recorded_training_is_judged() -> None:
    here = sharing_measured.recorded()
    trained = sharing_predicted.training(here)
    final = trained.loc["final"]
    assert (
        abs(final.loc["term", "mean error"]) <= 0.01 and final.loc["term", "median error"] <= 0.02
    )
    assert (trained["largest error"] >= trained["median error"]).all()
    short = sharing_predicted.recorded_training().eval("1 - none / measured_s")
    assert (short > 0).all() and len(short) == 5


# -- rounds and grids ----------------------------------------------------------------------------


def test_a_round_s_drift_cancels_and_the_default_gains_nothing() -> None:
    rows = Session().trained
    slower = rows.assign(iteration_s=rows["iteration_s"] * (1 + 0.1 * rows["repeat"]))
    for first, second in zip(
        sharing_measured.throughputs(rows).itertuples(),
        sharing_measured.throughputs(slower).itertuples(),
        strict=True,
    ):
        assert first.gain == pytest.approx(second.gain) and first.lower <= first.gain
        assert first.configuration != "t2-free-normal" or first.gain == 0


def test_grids_keep_every_number() -> None:
    printed = paper_table("sharing", "fig02")
    grid = sharing_measured.paper_grid(printed, "relative_time")
    for row in printed.itertuples():
        assert grid.loc[row.blocks, row.threads] == row.relative_time
    rows = pd.DataFrame({"configuration": [*WAYS], "ratio": range(len(WAYS))})
    table = sharing_measured.as_grid(rows, "ratio")
    assert table.notna().to_numpy().sum() == len(WAYS)
    for row in rows.itertuples():
        threads, _, rest = str(row.configuration).partition("-")
        assert table.loc[rest, threads] == row.ratio


def test_without_a_default_there_is_nothing_to_compare_with() -> None:
    rows = Session().trained
    assert sharing_measured.throughputs(rows[rows["configuration"] == "t1-free-idle"]).empty


def test_parts_are_shown_of_even_rounds_that_have_both() -> None:
    """A recording may end between an odd round and an even."""
    took_s = {"2x256": (1.0, range(6)), "1x64": (0.8, range(6)), "1x128": (0.5, [1])}
    rows = [
        {"network": network, "batch": batch, "plan": "ddp", "link": "nvlink", "openmp": 1, "repeat": repeat,
         "configuration": name, "iteration_s": seconds, "communication_s": 0.3, "overlap_s": 0.2,
         "exposed_communication_s": 0.1}
        for network, batch in (("resnet18", 16), ("resnet18", 32))
        for name, (seconds, rounds) in took_s.items()
        for repeat in rounds
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    assert sharing_measured.parts(table, "batch") == {}, "the best of odd rounds is in no even one"
    (bars,) = sharing_measured.parts(table[table["configuration"] != "1x128"], "batch").values()
    assert bars.loc["16, default"].sum() == pytest.approx(1.0)
    assert bars.loc["16, best: 1x64"].sum() == pytest.approx(0.8)


# -- the paper's ---------------------------------------------------------------------------------


def test_the_paper_s_figures_are_drawn_without_any_recording() -> None:
    for figure in (sharing_measured.figure2, sharing_measured.figure4, sharing_measured.figure8):
        panels = figure(None)
        numbers = heat_map_numbers(panels)
        assert set(numbers["panel"]) == set(panels) and numbers["value"].notna().all()
    assert len(sharing_measured.figure3(None)[0]) == 5
    again = sharing_measured.figure8(None)["paper"].grid
    assert again[DEFAULT].eq(0).all() and again.shape == throughput().shape


def test_what_is_learned_on_two_batches_is_judged_on_the_others() -> None:
    """Slowdowns explain what is fitted better; every model is judged on the same configurations."""
    rows = sharing_paper.judged()
    assert set(rows.loc[rows["fitted"], "batch"]) == set(sharing_paper.FITTED)
    assert len(rows) <= int(throughput().notna().to_numpy().sum())
    for fitted in (True, False):
        found = sharing_paper.errors(rows[rows["fitted"] == fitted]).set_index("model")
        assert found["cells"].nunique() == 1
        assert (
            found.loc["both", "regret"] < found.loc["none", "regret"] < found.loc["mean", "regret"]
        )
        assert found.loc["both", "median"] < found.loc["none", "median"]


def test_a_model_s_timeline_is_as_long_as_its_grid_says() -> None:
    grid = sharing_paper.fitted("both")
    names = list(sharing_paper.relative_times().index)
    all_s = grid.iteration_s("ResNet-18", np.array([32.0]))[0]
    for name, seconds in zip(names, all_s, strict=True):
        told = grid.iteration("ResNet-18", 32, name)
        assert told.prediction.iteration_s == pytest.approx(seconds)
        assert told.timeline().duration_s == pytest.approx(seconds)


def test_every_time_that_the_text_prints_stands_beside_the_model_in_figures_5_to_7() -> None:
    printed = {key: value for key, value in prose("sharing").items() if key.startswith("fig0")}
    told = sharing_paper.printed()
    kept = sharing_shown.with_printed(sharing_measured.figure7(None), told)
    columns = [name for name in kept if name.startswith("printed ")]
    values = sorted(kept[columns].stack().dropna())
    wanted = [value for key, value in printed.items() if re.match(r"fig07-.+-(default|best)$", key)]
    assert values == sorted([*wanted, *2 * [printed["fig07-alexnet-computation-only"]]])
    saved = sharing_paper.saved()
    kept = sharing_shown.with_saved(sharing_measured.figure6(None), saved)
    assert kept["saved printed [ms]"].dropna().tolist() == [3.97, 6.92]
    assert saved.loc[16, "model"] == pytest.approx(
        1e3 * (kept.iloc[0, 2:5].sum() - kept.iloc[1, 2:5].sum()), rel=1e-6
    )
    parts = sharing_paper.printed_parts().set_index("task")["printed_s"]
    assert {f"fig05c-{name}": 1e3 * value for name, value in parts.items()} == pytest.approx(
        {
            key: value
            for key, value in printed.items()
            if key in {f"fig05c-{name}" for name in parts.index}
        }
    )


# -- one GPU -------------------------------------------------------------------------------------

SHAPES = ((1, 64), (2, 256), (4, 512))
RATES = (0.0, 10e9)
GPU_NETWORKS = (("resnet18", 16), ("resnet18", 32), ("vgg16", 32))
GPU_ROUNDS = 6


def took_s(batch: int, shape: tuple[int, int], rate: float) -> tuple[float, float]:
    """Of an iteration, and of its messages alone: more threads take more of one, less of the other."""
    return batch / 1000 * (1 + shape[0] / 10), 0.002 / shape[0] * (1 if rate else 0.5)


def beside_stand_in() -> pd.DataFrame:
    """A ``sharing`` table of two networks; later rounds are slower, all alike."""
    rows = []
    for (network, batch), k in itertools.product(GPU_NETWORKS, range(GPU_ROUNDS)):
        slower = 1 + 0.05 * k
        cell = {"network": network, "batch": batch, "device": "cuda", "precision": "fp32"}
        cell |= {"taken_threads": 0, "buckets": 2, "bytes": 10**6, "bytes_per_s": 1e9}
        cell |= {"overlap_share": 0.5, "sample": k}
        none = {"ranks": 1, "policy": "none", "blocks": 0, "threads": 0, "bytes_per_s_asked": 0.0}
        times = {"communication_s": 0.0, "exposed_communication_s": 0.0}
        rows.append(cell | none | times | {"quantity": "compute", "seconds": slower * batch / 1000})
        for shape, rate in itertools.product(SHAPES, RATES):
            whole_s, sent_s = (slower * one for one in took_s(batch, shape, rate))
            way = {"ranks": 2, "policy": "same", "blocks": shape[0], "threads": shape[1]}
            way |= {"bytes_per_s_asked": rate, "communication_s": sent_s}
            for what, seconds in (("iteration", whole_s), ("communication", sent_s)):
                exposed = {"exposed_communication_s": sent_s / 4}
                rows.append(cell | way | exposed | {"quantity": what, "seconds": seconds})
    return pd.DataFrame(rows)


@pytest.fixture
def one_gpu(tmp_path: Path) -> Recording:
    how: dict[str, Any] = {"command": ["made up"]}
    store.save_table(beside_stand_in(), tmp_path, "sharing-made-up", schema="sharing", **how)
    found = gpu_own.one_gpu(str(tmp_path))
    assert found is not None
    return found


def test_one_gpu_fills_the_figures_with_the_times_that_it_recorded(one_gpu: Recording) -> None:
    rates = ["stand-in, full speed", "stand-in, 10 GB/s"]
    gains, grid = sharing_measured.figure4(one_gpu), sharing_measured.figure8(one_gpu)
    assert set(gains) - set(sharing_measured.figure4(None)) == set(rates)
    for name, rate in zip(rates, RATES, strict=True):
        whole_s, _ = took_s(32, (2, 256), rate)
        for shape in SHAPES:
            gain = 100 * (whole_s / took_s(32, shape, rate)[0] - 1)
            assert gains[name].grid.loc[shape] == pytest.approx(gain)
            assert grid[name].grid.loc["vgg16, 32", f"{shape[0]}x{shape[1]}"] == pytest.approx(gain)
        assert gains[name].default == (2, 256) and not gains[name].unsure().any()
    for figure in (sharing_measured.figure6, sharing_measured.figure7):
        bars = {name: parts for name, parts in figure(one_gpu).items() if name.startswith("here")}
        assert set(bars) == {f"here, {name}" for name in rates}
        assert all(len(parts) == 4 and (parts.to_numpy() >= 0).all() for parts in bars.values())
