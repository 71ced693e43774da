"""Evidence for data/papers/sharing/errata.md: one test an entry, from the transcribed numbers."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest

from workbook.common import claims
from workbook.common.claims import paper_table
from workbook.sharing import equations as sharing
from workbook.sharing.fig03 import slowdowns
from workbook.sharing.printed import DEFAULT, throughput

BATCHES = (16, 32, 64, 128)

TABLE_2 = paper_table("sharing", "tab02").set_index("network")
ALL_REDUCE = paper_table("sharing", "fig02").set_index(["blocks", "threads"])[
    "relative_time"
]
prose = functools.partial(claims.prose, "sharing")


def resnet18_saved_ms(batch: int, half: float = 0.0) -> float:
    row = throughput().loc[("ResNet-18", batch)]
    images = row[DEFAULT] - half, row.max() + half
    default_s, best_s = (sharing.iteration_s(batch, each) for each in images)
    return 1e3 * (default_s - best_s)


def test_01_eighteen_per_cent_is_time_saved() -> None:
    places = {"fig02-1x256-speedup": (1, 256), "fig02-2x128-faster": (2, 128)}
    for key, configuration in places.items():
        ratio = ALL_REDUCE[configuration]
        assert 100 * (1 - ratio) == pytest.approx(prose()[key])
        assert 100 * sharing.gain(1.0, ratio) > prose()[key] + 1


def test_02_more_resources_are_mostly_slower() -> None:
    grid = ALL_REDUCE
    by_threads = [
        grid[b, 2 * t] > grid[b, t] for b in (1, 2, 3, 4) for t in (64, 128, 256)
    ]
    by_blocks = [
        grid[2 * b, t] > grid[b, t] for b in (1, 2) for t in (64, 128, 256, 512)
    ]
    assert (sum(by_threads), len(by_threads)) == (9, 12)
    assert (sum(by_blocks), len(by_blocks)) == (5, 8)
    assert grid.idxmax() == (4, 512)
    assert (grid[4, 512] / grid.drop((4, 512))).between(1.14, 2.0).all()


def test_03_one_extra_warp_explains_the_instructions() -> None:
    numbers = prose()

    def off(extra_warps: int) -> float:
        """Largest deviation from the printed values, in instructions a warp."""
        whole = numbers["fig02-total-instructions"]
        return max(
            abs(
                whole / (b * (t // 32 + extra_warps))
                - numbers[f"fig02-{b}x{t}-instructions"]
            )
            for b, t in ((2, 256), (2, 128), (1, 256))
        )

    assert off(1) < 500 < min(off(0) - 1000, off(2))  # within rounding to a thousand


def test_04_batch_norm_stands_at_ten_per_cent() -> None:
    least = slowdowns(1, 64).sort_values(ascending=False)
    bound = 1 + prose()["fig03-1x64-all"] / 100
    assert least.index[0] == "batch_norm"
    assert least.iloc[0] - 0.005 < bound < least.iloc[0] + 0.005
    assert (least.iloc[1:] + 0.005 < bound).all()


def test_05_figures_4_and_8_disagree_on_resnet18() -> None:
    row, frame = (
        throughput().loc[("ResNet-18", prose()["fig04-batch"])],
        paper_table("sharing", "fig04"),
    )
    names = frame["blocks"].astype(str) + "x" + frame["threads"].astype(str)
    figure4 = frame["gain_percent"].set_axis(names)
    more = (100 * (row / row[DEFAULT] - 1) - figure4).drop(DEFAULT)
    assert len(more) == 15 and more.between(2.3, 9.4).all()
    assert (figure4.idxmax(), row.idxmax()) == ("1x256", "4x64")


def test_06_starved_configuration_is_near_the_best() -> None:
    grid, numbers = throughput(), prose()
    row = grid.loc[("ResNet-18", numbers["fig05-batch"])]
    assert row["1x64"] / row.max() > 0.975
    busy_ms = numbers["fig05c-computation"] + numbers["fig05c-communication"]
    iteration_ms = 1e3 * sharing.iteration_s(int(numbers["fig05-batch"]), row["1x64"])
    assert iteration_ms - (busy_ms - numbers["fig05c-overlap"]) == pytest.approx(
        4.8, abs=0.05
    )


def test_07_saved_time_is_not_constant() -> None:
    saved = [resnet18_saved_ms(batch) for batch in BATCHES]
    assert saved == sorted(saved)
    assert saved[-1] / saved[0] == pytest.approx(2.3, abs=0.05)


def profiled_over_figure_8(which: str) -> float:
    """AlexNet's iteration by figure 7's profile, over that by figure 8."""
    row, keys = (
        throughput().loc[("AlexNet", 64)],
        (f"communication-{which}", "computation-only"),
    )
    images = row[DEFAULT] if which == "default" else row.max()
    profiled_ms = sum(prose()[f"fig07-alexnet-{key}"] for key in keys)
    return profiled_ms / (1e3 * sharing.iteration_s(64, images))


def test_08_saved_time_at_batch_16_is_outside_rounding_but_not_far() -> None:
    numbers = prose()
    short_ms = resnet18_saved_ms(16) - numbers["fig06-saved-16"]
    assert numbers["fig06-saved-16"] < resnet18_saved_ms(16, -0.5)
    default_ms = 1e3 * sharing.iteration_s(
        16, throughput().loc[("ResNet-18", 16), DEFAULT]
    )
    off = [1 - profiled_over_figure_8(which) for which in ("default", "best")]
    assert off == pytest.approx([0.013, 0.0145], abs=5e-4)
    assert short_ms / default_ms == pytest.approx(
        0.006, abs=5e-4
    ) and short_ms / default_ms < min(off)
    assert resnet18_saved_ms(16, -0.5) * (1 - 0.0235) > numbers["fig06-saved-16"]
    assert (
        resnet18_saved_ms(64, -0.5)
        < numbers["fig06-saved-256"]
        < resnet18_saved_ms(64, 0.5)
    )


def in_order(intensity: pd.Series) -> bool:
    """Whether 1x64 is best from an ever smaller batch as intensity grows."""
    best, names = TABLE_2, intensity.sort_values().index
    first = [
        min((b for b in BATCHES if best.loc[n, f"best_{b}"] == "1x64"), default=np.inf)
        for n in names
    ]
    return first == sorted(first, reverse=True)


def test_09_vit_contradicts_the_order_by_intensity() -> None:
    intensity = TABLE_2["intensity"].astype(float)
    assert intensity.idxmax() == "ViT-Base/16" and sharing.vit_flops() / 86.6e6 > 400
    assert not in_order(intensity) and in_order(intensity.drop("ViT-Base/16"))
    row = throughput().loc[("ViT-Base/16", 32)]
    assert (row["1x64"], row.max()) == (76, 77)


def test_10_vit_has_35_gflop() -> None:
    counted = sharing.vit_flops() / 1e9
    assert counted == pytest.approx(35.1, abs=0.05)
    assert TABLE_2.loc["ViT-Base/16", "gflop"] / counted == pytest.approx(
        5 / 3, rel=0.002
    )
    tokens = (np.array([224, 272, 288]) // 16) ** 2 + 1
    added = (tokens - 1) * 768**2 + 768 * 1000  # patches in, classes out
    sizes = 2e-9 * (added + 12 * tokens * (12 * 768**2 + 2 * tokens * 768))
    assert sizes == pytest.approx([counted, 52.7, 59.5], abs=0.05)


def test_11_all_gains_follow_from_figure_8() -> None:
    grid, table = throughput(), TABLE_2
    printed = paper_table("sharing", "fig08").set_index(["network", "batch"])[
        "speedup_percent"
    ]
    assert len(grid) == 28
    for (network, batch), row in grid.iterrows():
        gain = table.loc[network, f"gain_{batch}_percent"]
        least, most = sharing.gain_range(row.max(), row[DEFAULT])
        assert 100 * least - 0.05 <= gain <= 100 * most + 0.05
        assert gain == printed[network, batch]


def test_12_best_configurations_are_the_largest_of_their_rows() -> None:
    table, ties = TABLE_2, []
    for (network, batch), row in throughput().iterrows():
        assert row[table.loc[network, f"best_{batch}"]] == row.max()
        if (row == row.max()).sum() > 1:
            ties.append((network, batch))
    assert ties == [("VGG-19", 32)]


def test_13_missing_cells_are_no_best_ones() -> None:
    missing = throughput().isna().stack()
    places = [place for place, absent in missing.items() if absent]
    assert len(places) == 4
    for network, batch, configuration in places:
        assert TABLE_2.loc[network, f"best_{batch}"] != configuration


def test_14_headline_rests_on_a_slow_default() -> None:
    grid = throughput()
    more = grid[DEFAULT] / grid["3x256"] - 1
    assert more.idxmin() == ("ResNet-101", 64) and (more < -0.05).sum() == 1
    assert more.median() == pytest.approx(0.024, abs=0.001)
    row = grid.loc[("ResNet-101", 64)]
    assert sharing.gain(row.max(), row["3x256"]) == pytest.approx(0.11, abs=0.002)


def test_15_allreduce_is_affected_by_blocks() -> None:
    numbers = prose()
    best, default = (
        numbers[f"fig07-alexnet-communication-{c}"] for c in ("best", "default")
    )
    assert ALL_REDUCE[1, 256] < 0.85
    assert 1 - best / default == pytest.approx(0.14, abs=0.005)


def test_16_vgg16_communicates_as_long_as_before() -> None:
    keys = [f"fig07-vgg16-{part}" for part in ("overlap", "communication-only")]
    totals = [sum(prose()[f"{key}-{c}"] for key in keys) for c in ("default", "best")]
    assert totals == [318, 315]


def test_17_two_gpus_send_d_parameters_each() -> None:
    gpus = int(prose()["gpus"])
    share = (
        2 * (gpus - 1) / gpus
    )  # of D parameters, sent by each GPU of a ring; as many arrive
    assert share == 1 and 2 * share == prose()["sent-received"]


def test_18_intensities_follow_within_rounding() -> None:
    for network, row in TABLE_2.iterrows():
        half = (
            0.5 if str(row["gflop"]).endswith(".0") else 0.05
        )  # VGG-16's 31 has no decimals
        smallest, largest = (
            sharing.model_intensity(
                1e3 * (row["gflop"] + f), row["parameters_millions"] + p
            )
            for f, p in ((-half, 0.05), (half, -0.05))
        )
        assert smallest - 0.5 <= row["intensity"] <= largest + 0.5, network


def test_19_throughput_is_of_one_gpu() -> None:
    grid, numbers = throughput(), prose()
    batch = int(numbers["fig07-batch"])
    keys = "communication-default", "computation-only"
    busy_ms = sum(numbers[f"fig07-alexnet-{key}"] for key in keys)
    per_gpu = grid.loc[("AlexNet", batch), DEFAULT]
    assert 1e3 * sharing.iteration_s(batch, per_gpu) == pytest.approx(busy_ms, rel=0.02)


def test_20_table_1_lacks_a_definition_and_a_shape() -> None:
    table = paper_table("sharing", "tab01").set_index("kernel")
    assert table.index[table["definition"].isna()].tolist() == ["Average Pooling"]
    assert table.index[table["input_shape"].isna()].tolist() == ["Batch Norm"]


def test_21_threads_never_grow_with_the_batch() -> None:
    names = TABLE_2[[f"best_{batch}" for batch in BATCHES]].map(
        lambda name: name.split("x")
    )
    best = {
        network: [int(blocks) * int(each) for blocks, each in row]
        for network, row in zip(names.index, names.to_numpy(), strict=True)
    }
    assert all(
        a >= b for row in best.values() for a, b in zip(row, row[1:], strict=False)
    )
    assert [network for network, row in best.items() if row[0] == row[-1]] == [
        "AlexNet"
    ]


def test_22_default_slowdowns_are_figure_3s() -> None:
    default = slowdowns(2, 256)
    numbers = prose()
    assert default.min() == numbers["fig03-default-min"] == default["relu"]
    assert default.max() == numbers["fig03-default-max"] == default["average_pooling"]


def test_23_most_of_alexnet_s_communication_does_not_overlap() -> None:
    numbers = prose()
    for which, of_sent, of_computed in (("default", 0.26, 0.85), ("best", 0.19, 0.79)):
        computed, sent = (
            numbers[f"fig07-alexnet-{x}-{which}"]
            for x in ("computation", "communication")
        )
        overlap = computed - numbers["fig07-alexnet-computation-only"]
        assert overlap / sent == pytest.approx(of_sent, abs=5e-3)
        assert overlap / computed == pytest.approx(of_computed, abs=7e-3)
