"""Evidence for data/papers/sharing/errata.md: one test an entry, from the transcribed numbers."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest

from ddlkit.papers import sharing
from ddlkit.report import claims
from ddlkit.report.claims import paper_table
from ddlkit.report.papers.sharing import DEFAULT, slowdowns, throughput

BATCHES = (16, 32, 64, 128)
WARP_THREADS = 32


prose = functools.partial(claims.prose, "sharing")


def table2() -> pd.DataFrame:
    return paper_table("sharing", "tab02").set_index("network")


def allreduce() -> pd.Series:
    return paper_table("sharing", "fig02").set_index(["blocks", "threads"])["relative_time"]


def figure4() -> pd.Series:
    frame = paper_table("sharing", "fig04")
    names = frame["blocks"].astype(str) + "x" + frame["threads"].astype(str)
    return frame["gain_percent"].set_axis(names)


def resnet18_saved_ms(batch: int, half: float = 0.0) -> float:
    row = throughput().loc[("ResNet-18", batch)]
    return 1e3 * sharing.saved_s(batch, row.max() + half, row[DEFAULT] - half)


def threads(network: str) -> list[int]:
    """Threads in all of the best configuration, by batch."""
    best = [table2().loc[network, f"best_{batch}"].split("x") for batch in BATCHES]
    return [int(blocks) * int(each) for blocks, each in best]


def test_01_eighteen_per_cent_is_time_saved() -> None:
    for configuration, said in (
        ((1, 256), "fig02-1x256-speedup"),
        ((2, 128), "fig02-2x128-faster"),
    ):
        ratio = allreduce()[configuration]
        assert 100 * (1 - ratio) == pytest.approx(prose()[said])
        assert 100 * sharing.speedup(ratio) > prose()[said] + 1
    assert sharing.speedup(0.82) == pytest.approx(0.2195, abs=1e-4)


def test_02_more_resources_are_mostly_slower() -> None:
    grid = allreduce()
    by_threads = [grid[b, 2 * t] > grid[b, t] for b in (1, 2, 3, 4) for t in (64, 128, 256)]
    by_blocks = [grid[2 * b, t] > grid[b, t] for b in (1, 2) for t in (64, 128, 256, 512)]
    assert (sum(by_threads), len(by_threads)) == (9, 12)
    assert (sum(by_blocks), len(by_blocks)) == (5, 8)
    assert grid.idxmax() == (4, 512)


def test_03_one_extra_warp_explains_the_instructions() -> None:
    numbers = prose()

    def off(extra_warps: int) -> float:
        """Largest deviation from the printed values, in instructions a warp."""
        warps = {
            (b, t): b * (t // WARP_THREADS + extra_warps) for b, t in ((2, 256), (2, 128), (1, 256))
        }
        whole = numbers["fig02-total-instructions"]
        return max(
            abs(whole / n - numbers[f"fig02-{b}x{t}-instructions"]) for (b, t), n in warps.items()
        )

    assert off(1) < 500 < min(off(0) - 1000, off(2))  # within rounding to a thousand


def test_04_batch_norm_stands_at_ten_per_cent() -> None:
    least = slowdowns(1, 64).sort_values(ascending=False)
    assert least.index[0] == "batch_norm"
    bound = 1 + prose()["fig03-1x64-all"] / 100
    assert least.iloc[0] - 0.005 < bound < least.iloc[0] + 0.005
    assert (least.iloc[1:] + 0.005 < bound).all()
    three = least[["average_pooling", "linear", "relu"]]
    assert (three < 1 + prose()["fig03-1x64-three"] / 100).all()


def test_05_figures_4_and_8_disagree_on_resnet18() -> None:
    row = throughput().loc[("ResNet-18", prose()["fig04-batch"])]
    more = (100 * (row / row[DEFAULT] - 1) - figure4()).drop(DEFAULT)
    assert len(more) == 15 and more.between(2.3, 9.4).all()
    assert more.mean() == pytest.approx(5.9, abs=0.1)
    ranges = [sharing.gain_range(value, row[DEFAULT]) for value in row.drop(DEFAULT)]
    assert more.min() > 5 * (100 * max(most - least for least, most in ranges) / 2 + 0.05)
    assert (figure4().idxmax(), row.idxmax()) == ("1x256", "4x64")


def test_06_starved_configuration_is_near_the_best() -> None:
    grid, numbers = throughput(), prose()
    row = grid.loc[("ResNet-18", numbers["fig05-batch"])]
    assert sharing.gain(row["1x64"], row[DEFAULT]) > 0.09
    assert row["1x64"] / row.max() > 0.975
    for batch in (64, 128):
        assert grid.loc[("ResNet-18", batch)].idxmax() == "1x64"
    computation, communication, overlap = (
        numbers[f"fig05c-{part}"] for part in ("computation", "communication", "overlap")
    )
    busy_ms = computation + communication - overlap  # computing or communicating or both
    iteration_ms = 1e3 * sharing.iteration_s(int(numbers["fig05-batch"]), row["1x64"])
    assert iteration_ms - busy_ms == pytest.approx(4.8, abs=0.05)


def test_07_saved_time_is_not_constant() -> None:
    numbers = prose()
    assert numbers["fig06-saved-256"] / numbers["fig06-saved-16"] > 1.7
    saved = [resnet18_saved_ms(batch) for batch in BATCHES]
    assert saved == sorted(saved)
    assert saved[-1] / saved[0] == pytest.approx(2.3, abs=0.05)


def test_08_saved_time_at_batch_16_is_outside_rounding() -> None:
    numbers = prose()
    assert numbers["fig06-saved-16"] < resnet18_saved_ms(16, -0.5)
    assert resnet18_saved_ms(16) / numbers["fig06-saved-16"] - 1 == pytest.approx(0.06, abs=0.005)
    assert resnet18_saved_ms(64, -0.5) < numbers["fig06-saved-256"] < resnet18_saved_ms(64, 0.5)


def first_batch_at_1x64(network: str) -> float:
    at = [batch for batch in BATCHES if table2().loc[network, f"best_{batch}"] == "1x64"]
    return min(at, default=np.inf)


def in_order(intensity: pd.Series) -> bool:
    """Whether 1x64 is best from an ever smaller batch as intensity grows."""
    first = [first_batch_at_1x64(network) for network in intensity.sort_values().index]
    return all(a >= b for a, b in zip(first, first[1:], strict=False))


def test_09_vit_contradicts_the_order_by_intensity() -> None:
    intensity = table2()["intensity"].astype(float)
    counted = intensity.copy()
    counted["ViT-Base/16"] = sharing.vit_flops() / 86.6e6
    for one in (intensity, counted):
        assert one.idxmax() == "ViT-Base/16"
        assert not in_order(one)
        assert in_order(one.drop("ViT-Base/16"))
    assert counted["ViT-Base/16"] == pytest.approx(406, abs=1)


def test_10_vit_has_35_gflop() -> None:
    counted = sharing.vit_flops() / 1e9
    assert counted == pytest.approx(35.1, abs=0.05)
    assert table2().loc["ViT-Base/16", "gflop"] / counted == pytest.approx(5 / 3, rel=0.002)


def test_11_all_gains_follow_from_figure_8() -> None:
    grid, table = throughput(), table2()
    printed = paper_table("sharing", "fig08").set_index(["network", "batch"])["speedup_percent"]
    assert len(grid) == 28
    for (network, batch), row in grid.iterrows():
        gain = table.loc[network, f"gain_{batch}_percent"]
        least, most = sharing.gain_range(row.max(), row[DEFAULT])
        assert 100 * least - 0.05 <= gain <= 100 * most + 0.05
        assert gain == printed[network, batch]


def test_12_best_configurations_are_the_largest_of_their_rows() -> None:
    grid, table = throughput(), table2()
    ties = 0
    for (network, batch), row in grid.iterrows():
        best = table.loc[network, f"best_{batch}"]
        assert row[best] == row.max()
        ties += (row == row.max()).sum() > 1
    assert ties == 1
    tied = grid.loc[("VGG-19", 32)]
    assert (tied == tied.max()).sum() == 4
    least, most = sharing.gain_range(tied.max(), tied[DEFAULT])
    assert least < 0.005 < most < 0.023


def test_13_missing_cells_are_no_best_ones() -> None:
    grid = throughput()
    missing = grid.isna().stack()
    where = [cell for cell, absent in missing.items() if absent]
    assert where == [
        ("ResNet-50", 32, "4x256"),
        ("ResNet-50", 64, "4x512"),
        ("ResNet-50", 128, "2x512"),
        ("ResNet-50", 128, "3x512"),
    ]
    for network, batch, configuration in where:
        assert table2().loc[network, f"best_{batch}"] != configuration


def test_14_headline_rests_on_a_slow_default() -> None:
    grid, numbers = throughput(), prose()
    beside = grid[DEFAULT] / grid["3x256"] - 1
    assert beside.idxmin() == ("ResNet-101", 64) and (beside < -0.05).sum() == 1
    assert beside.median() == pytest.approx(0.024, abs=0.001)
    keys = ("alexnet", "resnet18", "resnet50", "resnet101")
    sent = [numbers[f"fig07-{key}-communication-default"] for key in keys]
    names = ["AlexNet", "ResNet-18", "ResNet-50", "ResNet-101"]
    *others, suspect = np.array(sent) / table2()["parameters_millions"][names]
    assert suspect > 1.4 * max(others)
    row = grid.loc[("ResNet-101", 64)]
    assert sharing.gain(row.max(), row["3x256"]) == pytest.approx(0.11, abs=0.002)


def test_15_allreduce_is_affected_by_blocks() -> None:
    numbers = prose()
    best, default = (numbers[f"fig07-alexnet-communication-{c}"] for c in ("best", "default"))
    assert allreduce()[1, 256] < 0.85
    assert 1 - best / default == pytest.approx(0.14, abs=0.005)


def test_16_vgg16_communicates_as_long_as_before() -> None:
    numbers = prose()
    before, after = (
        numbers[f"fig07-vgg16-overlap-{c}"] + numbers[f"fig07-vgg16-communication-only-{c}"]
        for c in ("default", "best")
    )
    assert (before, after) == (318, 315)
    exposed = [numbers[f"fig07-vgg16-communication-only-{c}"] for c in ("default", "best")]
    assert exposed[1] > 4 * exposed[0]


def test_17_two_gpus_send_d_parameters_each() -> None:
    def sent(gpus: int) -> float:
        """Of D parameters, the share that each GPU of a ring all-reduce sends; as many arrive."""
        return 2 * (gpus - 1) / gpus

    assert sent(int(prose()["gpus"])) == 1
    said = prose()["sent-received"]
    assert 2 * sent(2) == said
    assert sent(10**9) == pytest.approx(said)


def test_18_intensities_follow_within_rounding() -> None:
    for network, row in table2().iterrows():
        text = str(row["gflop"])
        half = 0.5 if text.endswith(".0") else 0.05  # VGG-16's 31 has no decimals
        smallest, largest = (
            sharing.model_intensity(
                1e9 * (row["gflop"] + f), 1e6 * (row["parameters_millions"] + p)
            )
            for f, p in ((-half, 0.05), (half, -0.05))
        )
        assert smallest - 0.5 <= row["intensity"] <= largest + 0.5, network


def test_19_throughput_is_of_one_gpu() -> None:
    grid, numbers = throughput(), prose()
    batch = int(numbers["fig07-batch"])
    for configuration, which in ((DEFAULT, "default"), ("1x256", "best")):
        busy = numbers[f"fig07-alexnet-communication-{which}"]
        busy += numbers["fig07-alexnet-computation-only"]
        per_gpu = grid.loc[("AlexNet", batch), configuration]
        assert 1e3 * sharing.iteration_s(batch, per_gpu) == pytest.approx(busy, rel=0.02)
        assert 1e3 * sharing.iteration_s(2 * batch, per_gpu) > 1.9 * busy


def test_20_table_1_lacks_a_definition_and_a_shape() -> None:
    table = paper_table("sharing", "tab01").set_index("kernel")
    assert table.index[table["definition"].isna()].tolist() == ["Average Pooling"]
    assert table.index[table["input_shape"].isna()].tolist() == ["Batch Norm"]


def test_21_threads_never_grow_with_the_batch() -> None:
    best = {network: threads(network) for network in table2().index}
    assert all(a >= b for row in best.values() for a, b in zip(row, row[1:], strict=False))
    assert [network for network, row in best.items() if row[0] == row[-1]] == ["AlexNet"]


def test_22_default_slowdowns_are_figure_3s() -> None:
    default = slowdowns(2, 256)
    numbers = prose()
    assert default.min() == numbers["fig03-default-min"] == default["relu"]
    assert default.max() == numbers["fig03-default-max"] == default["average_pooling"]
