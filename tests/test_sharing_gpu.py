"""What GPUs record of sharing fills the paper's figures: with a stand-in on one, with NCCL on several."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.report.figures import sharing_gpu, sharing_measured, sharing_panels, sharing_predicted
from ddlkit.report.panels import Panel, judged, numbers
from ddlkit.report.source import Source, open_sharing

SHAPES = ((1, 64), (2, 256), (4, 512))
RATES = (0.0, 10e9)
NETWORKS = (("resnet18", 16), ("resnet18", 32), ("vgg16", 32))
ROUNDS = 6


def took_s(batch: int, shape: tuple[int, int], rate: float) -> tuple[float, float]:
    """Of an iteration, and of its messages alone: more threads take more of one, less of the other."""
    return batch / 1000 * (1 + shape[0] / 10), 0.002 / shape[0] * (1 if rate else 0.5)


def beside_stand_in() -> pd.DataFrame:
    """A ``sharing`` table of two networks; later rounds are slower, all alike."""
    rows = []
    for (network, batch), k in itertools.product(NETWORKS, range(ROUNDS)):
        slower = 1 + 0.05 * k
        cell = {
            "network": network,
            "device": "cuda",
            "batch": batch,
            "precision": "fp32",
            "sample": k,
        }
        cell |= {
            "taken_threads": 0,
            "buckets": 2,
            "bytes": 10**6,
            "bytes_per_s": 1e9,
            "overlap_share": 0.5,
        }
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


def kernels_beside(company: str, ranks: int, threads: int) -> pd.DataFrame:
    """A ``contention`` table: a block more of company makes a kernel a tenth longer."""
    rows = []
    for kernel, blocks, k in itertools.product(("relu", "linear"), (0, 1, 2), range(ROUNDS)):
        alone = {
            "kernel": kernel,
            "shape": "1",
            "dtype": "float32",
            "device": "cuda",
            "ranks": ranks,
        }
        alone |= {"registers": 0, "shared_bytes": 0, "cluster": 0, "fifo_bytes": 0, "sample": k}
        beside = {"communication": company if blocks else "none", "blocks": blocks}
        beside |= {"threads": threads if blocks else 0, "taken_blocks": blocks, "taken_threads": 0}
        beside |= {"bytes_per_s_asked": 0.0, "bytes_per_s": 1e9 * blocks}
        seconds = {"overlap_share": min(1.0, float(blocks)), "seconds": 0.01 * (1 + blocks / 10)}
        rows.append(alone | beside | seconds)
    return pd.DataFrame(rows)


@pytest.fixture
def one_gpu(tmp_path: Path) -> sharing_gpu.OneGpu:
    store.save_table(
        beside_stand_in(), tmp_path, "sharing-made-up", schema="sharing", command=["made up"]
    )
    copies = kernels_beside("copy_engine_h2d", 1, 0).query("blocks > 0").assign(blocks=0)
    copies = copies.drop_duplicates(["kernel", "sample"])
    both = [kernels_beside("standin", 1, 64), kernels_beside("nccl", 2, 64), copies]
    store.save_table(
        pd.concat(both), tmp_path, "contention-made-up", schema="contention", command=["made up"]
    )
    return sharing_gpu.recorded(str(tmp_path))


def test_one_gpu_fills_the_figures_with_the_times_that_it_recorded(
    one_gpu: sharing_gpu.OneGpu,
) -> None:
    rates = ["stand-in, full speed", "stand-in, 10 GB/s"]
    times, gains, grid = one_gpu.figure2(), one_gpu.figure4(), one_gpu.figure8()
    assert set(times) == set(gains) == set(grid) == set(rates)
    for name, rate in zip(rates, RATES, strict=True):
        whole_s, sent_s = took_s(32, sharing_gpu.DEFAULT, rate)
        for shape in SHAPES:
            own_s = took_s(32, shape, rate)
            assert times[name].grid.loc[shape] == pytest.approx(own_s[1] / sent_s)
            assert gains[name].grid.loc[shape] == pytest.approx(100 * (whole_s / own_s[0] - 1))
            cell = grid[name].grid.loc["vgg16, 32", f"{shape[0]}x{shape[1]}"]
            assert cell == pytest.approx(gains[name].grid.loc[shape])
        assert gains[name].default == sharing_gpu.DEFAULT and not gains[name].unsure().any()
    for parts in (one_gpu.figure6(), one_gpu.figure7()):
        assert set(parts) == {f"here, {name}" for name in rates}
        for bars in parts.values():
            assert len(bars) == 4 and (bars.to_numpy() >= 0).all()


def test_kernels_beside_a_stand_in_are_shown_and_those_beside_nccl_are_the_model_s(
    one_gpu: sharing_gpu.OneGpu,
) -> None:
    panels = one_gpu.figure3()
    assert set(panels) == {"stand-in, full speed", "copy engine"}
    np.testing.assert_allclose(panels["copy engine"].grid["h2d"], 1.1)
    panel = panels["stand-in, full speed"]
    assert panel.grid.columns.tolist() == ["1x64", "2x64"] and panel.default is None
    np.testing.assert_allclose(panel.grid, [[1.1, 1.2]] * 2)
    messages = pd.DataFrame(
        [("nvlink", name, 2, size, 1, k, size / 2e9) for name in ("b1-t64", "b2-t64")
         for size in (10**6, 10**8) for k in range(ROUNDS)],
        columns=["link", "configuration", "ranks", "bytes", "parts", "repeat", "seconds"],
    )  # fmt: skip
    assert one_gpu.source is not None
    rows = sharing_measured.beside_nccl(one_gpu.source.table("contention"), messages)
    known = sharing_predicted.known_resources(messages, rows)
    assert set(known) == {("nvlink", "b1-t64"), ("nvlink", "b2-t64")}
    for blocks in (1, 2):
        one = known["nvlink", f"b{blocks}-t64"]
        assert one.slowdown == pytest.approx(blocks / 10)
        assert one.message_slowdown == pytest.approx(2e9 / (1e9 * blocks) - 1)


def test_what_nccl_took_of_what_its_environment_asked_for_is_in_the_table_of_controls(
    tmp_path: Path,
) -> None:
    """Of what was asked in vain, and was not seen, nothing is said."""
    asked = [(2, 0, 2, 512), (4, 0, 4, 512), (4, 256, 5, 256), (8, 0, 0, 0)]
    columns = ["asked_blocks", "asked_threads", "taken_blocks", "taken_threads"]
    channels = pd.DataFrame(asked, columns=columns)
    names = ("NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_ALGO")
    controls = pd.DataFrame(
        {"level": "environment", "control": names, "outcome": "offered", "reason": "none"}
    )
    control = pd.DataFrame({"outcome": "applied", "taken_threads": [0], "taken_cores": "", "taken_policy": "",
                            "taken_nice": 0, "blocks": 2})  # fmt: skip
    here = sharing_panels.Recording(Source((tmp_path,)))
    here.__dict__["tables"] = {"channels": channels, "controls": controls, "control": control}
    seen = sharing_panels.figure1(here).set_index("control")["read_back"]
    assert seen["NCCL_MAX_CTAS"] == "2 asked: 2; 4 asked: 4, 5"
    assert seen["NCCL_NTHREADS"] == "256 asked: 256" and seen["NCCL_ALGO"] == ""


def test_no_gpu_adds_nothing() -> None:
    nothing = sharing_gpu.OneGpu(None)
    every = (
        nothing.figure2,
        nothing.figure3,
        nothing.figure4,
        nothing.figure6,
        nothing.figure7,
        nothing.figure8,
    )
    assert not any(figure() for figure in every) and nothing.machine == ""


def test_a_gpu_s_training_is_found_among_its_other_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before a processor's, which has a directory of its own; both by their names, too."""
    monkeypatch.setattr(store, "RECORDED", tmp_path)
    assert open_sharing() is None
    processor, gpu = tmp_path / "a-processor" / "sharing", tmp_path / "some-gpu"
    for directory in (processor, gpu):
        directory.mkdir(parents=True)
        assert open_sharing() != Source((directory,))
        (directory / "sharing_iterations-x.csv").touch()
        assert open_sharing() == Source((directory,))
    assert open_sharing("a-processor") == Source((processor,))
    assert open_sharing("some-gpu") == open_sharing(str(gpu)) == Source((gpu,))


def test_numbers_of_panels_say_how_sure_they_are() -> None:
    grid, off = pd.DataFrame([[1.0, 2.0]], ["a"], ["x", "y"]), 0.5
    sure = Panel(grid, None, grid - off, grid + off, neutral=1.0)
    assert sure.unsure().tolist() == [[True, False]] and not Panel(grid).unsure().any()
    assert judged({"here": sure, "paper": Panel(grid)}) == {"here": (0, 1, 1)}
    table = numbers({"here": sure, "paper": Panel(grid)}).set_index(["panel", "column"])
    assert table.loc["here", ["lower", "upper"]].to_numpy().tolist() == [[0.5, 1.5], [1.5, 2.5]]
    assert table.loc["paper", "lower"].isna().all() and table["value"].tolist() == [1, 2] * 2


def test_two_links_have_parts_of_their_own() -> None:
    here = sharing_panels.recorded("")
    assert here is not None
    for figure in (sharing_panels.figure6, sharing_panels.figure7):
        own = {name: bars for name, bars in figure(here).items() if name.startswith("here")}
        assert len(own) == 2
        for bars in own.values():
            roles = [name.split(", ")[1].split(":")[0] for name in bars.index]
            assert roles == ["default", "best"] * (len(bars) // 2)
            same = bars.index.str.endswith("best: default")
            before = np.roll(same, -1)
            np.testing.assert_array_equal(bars[same], bars[before])


def test_parts_are_shown_of_what_needed_a_process_of_its_own_and_of_what_ended_early() -> None:
    """NCCL's threads are told by the environment; a recording may end between an odd round and an even."""
    took_s = {"b0": (1.0, range(6)), "b1-t64": (0.8, range(6, 12)), "b2": (0.5, [1])}
    rows = [
        {"network": network, "batch": batch, "plan": "ddp", "link": "nvlink", "openmp": 1, "repeat": repeat,
         "configuration": name, "iteration_s": seconds, "communication_s": 0.3, "overlap_s": 0.2,
         "exposed_communication_s": 0.1}
        for network, batch in (("resnet18", 16), ("resnet18", 32))
        for name, (seconds, rounds) in took_s.items()
        for repeat in rounds
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    assert sharing_panels.parts(table, "batch") == {}, "the best of odd rounds is in no even one"
    (bars,) = sharing_panels.parts(table[table["configuration"] != "b2"], "batch").values()
    assert bars.loc["16, default"].sum() == pytest.approx(1.0)
    assert bars.loc["16, best: b1-t64"].sum() == pytest.approx(0.8)
