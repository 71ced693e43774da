"""What data/papers/osf/errata.md says is shown here, one test per entry."""

from __future__ import annotations

import functools
import math
from itertools import product

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.units import MB, MIB
from ddlkit.core.workload import Workload
from strategies import workloads
from workbook.common import networks, places
from workbook.common.claims import paper_table, prose
from workbook.osf import cluster, fig11
from workbook.osf import equations as osf
from workbook.osf.cluster import PaperSetting
from workbook.osf.settings import Grid, setting_search

TABLE_2 = paper_table("osf", "tab02").set_index("network")
TABLE_3 = paper_table("osf", "tab03").set_index("layer")["size_mb"]
SCANNED = yaml.safe_load((places.DATA / "papers/osf/settings.yml").read_text())[
    "scanned"
]
PROSE = prose("osf")
ZOO = (*networks.RESNET_BLOCKS, *networks.VGG_CONVOLUTIONS)

Gains = tuple[np.ndarray, np.ndarray]
SLOW_TO_START = AlphaBeta(alpha_s=0.3, beta_s_per_byte=0.125)


def test_sizes_are_binary_megabytes() -> None:
    for network in ZOO:
        printed, counted = (
            TABLE_2["size_mb"][network],
            4 * sum(networks.parameters(network)),
        )
        assert abs(counted / MIB - printed) < 1 and abs(counted / MB - printed) > 4
    layers = (
        networks.layers("VGG16")[-3:] + cluster.network_layers(cluster.REPLACED)[-2:]
    )
    weights = [4 * layer.tensors[0] / MIB for layer in layers]
    assert TABLE_3.iloc[:5].tolist() == pytest.approx(weights, rel=0.005)


def test_gflops_are_multiply_adds_of_one_image() -> None:
    for network in ZOO:
        counted = networks.multiply_adds(network)
        assert 1e9 * TABLE_2["gflops"][network] == pytest.approx(counted, rel=0.05)


def test_operations_are_of_a_sample_not_of_a_mini_batch() -> None:
    batch, c, rate = 32, 0.5, 13e12
    per_sample = [2 * layer.multiply_adds for layer in networks.layers("ResNet50")]
    by_table_1 = [batch * flops for flops in per_sample]
    true = 3 * 2 * networks.multiply_adds("ResNet50") * batch / (c * rate)
    assert osf.compute_s(per_sample, batch, c, rate) == pytest.approx(true)
    assert osf.compute_s(by_table_1, batch, c, rate) == pytest.approx(batch * true)


def test_resnets_tensor_counts_are_layers_of_keras() -> None:
    for network, blocks in networks.RESNET_BLOCKS.items():
        # Stem: 2 paddings, convolution, norm, ReLU, pool. Block: 3 convolutions, norms and ReLUs
        # and a sum; 2 more where the shortcut is projected. Top: pool, dense.
        printed = 6 + 10 * sum(blocks) + 2 * len(blocks) + 2
        assert (
            len(networks.parameters(network)) < printed == TABLE_2["tensors"][network]
        )


def test_vggs_tensor_counts_differ_by_too_little() -> None:
    printed = TABLE_2["tensors"]
    keras = {name: len(networks.layers(name)) + 5 + 1 for name in ("VGG16", "VGG19")}
    assert keras["VGG16"] == printed["VGG16"] and keras["VGG19"] == printed["VGG19"] + 1


def test_share_below_bdp_depends_on_the_buffer() -> None:
    sizes = 4 * np.array(networks.parameters("VGG16"))
    for kilo in (1000, 1024):
        bdp = PROSE["fig10-bdp"] * kilo
        assert PROSE["fig10-below-bdp"] == pytest.approx(
            100 * np.mean(sizes < bdp), abs=0.05
        )
        shares = []
        for size in (0, MB, 10 * MB, 100 * MB):  # of all five networks' messages
            fused = [
                cluster.fused(name, 1.0, size, math.inf, "tensor")
                for name in cluster.FIVE
            ]
            sent = np.concatenate([plan.group_bytes(work) for work, plan, _ in fused])
            shares.append(100 * np.mean(sent < bdp))
        assert shares == pytest.approx([66.2, 46.9, 6.7, 0], abs=0.1)


def test_two_scaling_factors_for_one_replacement() -> None:
    assert PROSE["intro-replacement-before"] == PROSE["fig08-before"]
    assert PROSE["intro-replacement-after"] != PROSE["fig08-after"]
    kept = TABLE_2["size_mb"]["VGG16"] - TABLE_3.iloc[:3].sum() + TABLE_3.iloc[3:].sum()
    communication = (1 / PROSE["fig08-before"] - 1) * kept / TABLE_2["size_mb"]["VGG16"]
    assert osf.csf(1, communication) == pytest.approx(0.748, abs=5e-4)
    factor = "VGG-16 replaced: scaling factor"
    ends = setting_search().range_of(factor)
    assert ends == pytest.approx((0.754, 0.975), abs=5e-4)
    stands = setting_search().alone().set_index("statement")["best_settings"]
    assert stands[factor] == pytest.approx(0.375, abs=5e-4)
    fused = setting_search(cluster.WORKERS, (0, 100 * MB))
    ends = fused.range_of(factor)
    assert ends == pytest.approx((0.69, 0.694), abs=5e-4)


def test_losses_say_nothing_of_accuracy() -> None:
    assert PROSE["fig09-after"] < PROSE["fig09-before"]
    quantities = paper_table("osf", "prose")["quantity"]
    assert not quantities.str.contains("accuracy|validation").any()


def test_eq8_starts_its_sum_too_late() -> None:
    forward_s, backward_s, nothing = 3.0, [2.0, 2.0, 2.0], [0.0] * 3
    assert osf.osf(forward_s, backward_s, nothing) == pytest.approx(9 / 7)
    assert osf.osf(forward_s, backward_s, nothing, first=0) == pytest.approx(1)


@given(workloads(), st.floats(0, 1))
def test_overlap_never_hurts_but_messages_do(
    workload: Workload, delta_s: float
) -> None:
    sizes, backward_s = osf.of_workload(workload)
    forward_s, cost = workload.forward_s + 0.1, AlphaBeta(delta_s, 1e-6)
    sent_s, compute = [cost(size) for size in sizes], forward_s + math.fsum(backward_s)
    overlapped = osf.osf(forward_s, backward_s, sent_s, first=0)
    assert overlapped >= osf.csf(compute, math.fsum(sent_s)) * (1 - 1e-12)
    one_message = osf.csf(compute, cost(sum(sizes)))
    if one_message > overlapped * (1 + 1e-9):
        saved = (len(sizes) - 1) * delta_s
        assert saved >= compute / overlapped - compute / one_message - 1e-9


def test_eq13_loses_bytes_and_sends_some_twice() -> None:
    rng = np.random.default_rng(0)
    lost = twice = 0
    for _ in range(2000):
        n = int(rng.integers(2, 12))
        sizes, backward_s = rng.integers(1, 100, n), rng.uniform(0, 1, n)
        buffer = (
            sizes.tolist(),
            backward_s.tolist(),
            float(rng.integers(0, 300)),
            rng.uniform(0, 1),
        )
        sent, whole = osf.sent_bytes(*buffer).sum(), sizes.sum()
        lost += sent < whole
        twice += sent > whole
        assert osf.sent_bytes(*buffer, literal=False).sum() == whole
    assert lost > 500 and twice > 300


def test_eqs_12_and_13_disagree_when_the_timeout_is_just_met() -> None:
    sizes, backward_s = [4.0, 3.0, 2.0, 1.0], [0.5] * 4
    just_met = sizes, backward_s, math.inf, 0.5
    assert osf.buffered_bytes(*just_met).tolist() == sizes
    # All backward times are equal: the index that Eq 13 confuses makes no difference here.
    assert osf.sent_bytes(*just_met).tolist() == [4, 0, 0, 0]
    assert osf.sent_bytes(*just_met, literal=False).tolist() == sizes
    assert osf.sent_bytes(sizes, backward_s, math.inf, 0.5 - 1e-9).tolist() == sizes


@given(workloads(), st.floats(0, 1))
def test_eqs_14_and_15_with_no_buffer_are_csf(
    workload: Workload, delta_s: float
) -> None:
    sizes, backward_s = osf.of_workload(workload)
    forward_s, cost = workload.forward_s + 0.1, AlphaBeta(delta_s, 1e-6)
    sent_s, example = (
        [cost(size) for size in sizes],
        (forward_s, sizes, backward_s, cost, 0),
    )
    compute = forward_s + math.fsum(backward_s)
    assert osf.osf_fused(*example) == pytest.approx(osf.csf(compute, math.fsum(sent_s)))
    repaired = osf.osf(forward_s, backward_s, sent_s, first=0)
    assert osf.osf_fused(*example, literal=False) == pytest.approx(repaired)


def test_eqs_14_and_15_in_numbers() -> None:
    example = 2.0, [4.0] * 4, [1.0] * 4, SLOW_TO_START
    assert osf.osf_fused(*example, capacity=0) == pytest.approx(0.652, abs=5e-4)
    repaired = osf.osf_fused(*example, capacity=0, literal=False)
    assert repaired == pytest.approx(0.882, abs=5e-4)
    workload = Workload.from_arrays(2.0, [1.0] * 4, [4] * 4)
    leave_s = np.array(
        [4.0, 5.0, 6.0, 6.0]
    )  # the other repair: when the next layer is there
    waiting = Iteration(workload, plan.none(workload), SLOW_TO_START, leave_s=leave_s)
    assert workload.compute_s / waiting.played_s[1][-1] == pytest.approx(
        0.789, abs=5e-4
    )


def test_eq7_charges_for_sending_nothing() -> None:
    cost = AlphaBeta(alpha_s=2.0, beta_s_per_byte=0.025)
    assert cost(0) == float(osf.update_s(0, 2, 1e9, overhead_s=2.0)) == 2.0
    example = 2.0, [4.0] * 8, [0.5] * 8, cost, math.inf
    assert osf.osf_fused(*example) == pytest.approx(0.311, abs=5e-4)
    repaired = osf.osf_fused(*example, literal=False)
    assert (
        repaired
        == pytest.approx(osf.csf(6.0, cost(32)))
        == pytest.approx(0.682, abs=5e-4)
    )


@given(
    st.floats(1, 1e9),
    st.floats(1, 1e9),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
    st.integers(2, 64),
)
def test_eq17_under_eq7_forgets_the_sizes(
    buffered: float, size: float, waited_s: float, delta_s: float, workers: int
) -> None:
    cost = AlphaBeta(delta_s, float(osf.update_s(1, workers, 3.125e9)))
    if abs(waited_s - delta_s) > 1e-6:
        assert osf.fusing_pays(cost, buffered, size, waited_s) == (waited_s < delta_s)


def test_eq17_with_eq14_always_fuses() -> None:
    workload = Workload.from_arrays(2.0, [100.0] * 4, [4] * 4)
    for spec, ends in (("adafusion", (4,)), ("adafusion:repaired", (1, 2, 3, 4))):
        assert plan.make_plan(spec, workload, SLOW_TO_START).ends == ends
    example = 2.0, *osf.of_workload(workload), SLOW_TO_START
    together, apart = (
        osf.osf_fused(*example, size, literal=False) for size in (math.inf, 0)
    )
    assert together < apart


def test_one_layers_share_is_its_share_of_bytes() -> None:
    share = TABLE_3["Fully Connected Layer 1"] / TABLE_2["size_mb"]["VGG16"]
    assert 100 * share == pytest.approx(PROSE["fig04b-one-layer"], abs=0.05)
    sizes = 4 * np.array(networks.parameters("VGG16"))
    sent_s = osf.update_s(sizes, 32, 25e9 / 8, overhead_s=1e-4)
    assert 100 * sent_s.max() / sent_s.sum() < PROSE["fig04b-one-layer"] - 0.4


def test_eight_per_cent_more_communication_cannot_cost_nine() -> None:
    most = 100 * osf.largest_scaling_loss(PROSE["fig07b-growth"] / 100)
    assert most == pytest.approx(7.41, abs=0.01)
    assert most < PROSE["fig06-vgg16-loss"] - 0.5  # not even if 9 is rounded


def test_the_reduction_is_a_ratio_of_maxima() -> None:
    ratio = 1 - PROSE["fig03-osf-error-max"] / PROSE["fig03-csf-error-max"]
    assert 100 * ratio == pytest.approx(PROSE["fig03-error-reduction"], abs=0.05)
    # The printed extremes allow one network to have OSF's largest and CSF's smallest error.
    assert PROSE["fig03-osf-error-max"] > PROSE["fig03-csf-error-min"]


def test_forty_per_cent_is_at_the_edge_of_figure_4() -> None:
    largest = PROSE["fig04a-csf-error-max"] / 100
    # CSF is one number: (1 + e) SF(1 KB) where it lies above, (1 - e) SF(1 GB) where below.
    most = 100 * ((1 + largest) / (1 - largest) - 1)
    assert most == pytest.approx(38.4, abs=0.05)
    assert 35 < most < PROSE["fig06-resnet101-gain"]


def possible(network: str, grid: Grid) -> np.ndarray:
    """What the best plan gains at most over the constant buffer.

    It is `fig11.possible_gains` of every setting of a grid.
    """
    family = 4 if network.startswith("VGG") else 3
    slope = PaperSetting(1.0, 1.0, 0.0).cost().beta_s_per_byte
    alphas, shape = grid.free["overhead_s"], list(grid.shape)
    shape[7 - family] = 1
    gained = np.empty(shape)
    for u, k, t in product(range(shape[0]), range(shape[1]), range(shape[family])):
        setting = grid.setting((u, k, 0, t, t))
        compute_s, timing = (
            setting.compute_s(network),
            (setting.timeout_s, setting.unit),
        )
        work, plan, waited = cluster.fused(
            network, compute_s, fig11.CONSTANT_BYTES, *timing
        )
        taken_s = cluster.fused_iteration_s(work, plan, waited, alphas, slope)
        after_s = work.compute_s + slope * work.bytes[-1]
        first_s = work.forward_s + work.backward_s[0] + slope * work.bytes.sum()
        least_s = alphas + max(after_s, first_s)
        place = (u, k, slice(None), t, 0) if family == 3 else (u, k, slice(None), 0, t)
        gained[place] = taken_s / least_s - 1
    return gained


@pytest.fixture(scope="module")
def possible_gains() -> Gains:
    """Over all settings: the most that any plan gains over 100 MB, of the five networks least and largest."""
    grid = setting_search().grid
    gained = [
        np.broadcast_to(possible(name, grid), grid.shape) for name in cluster.FIVE
    ]
    return functools.reduce(np.minimum, gained), functools.reduce(np.maximum, gained)


def holding(statement: str) -> np.ndarray:
    search = setting_search()
    return search.holds[[each.name for each in search.stated].index(statement)]


def test_150_per_cent_contradicts_section_3_3(possible_gains: Gains) -> None:
    claimed, (_, largest) = PROSE["fig11-constant-max"] / 100, possible_gains
    # Without the paper's other statements the model allows it: a timeout makes many messages of 100 MB.
    alone = PaperSetting(0.15, 0.1, 2.8e-3, 0.5e-3)
    assert fig11.possible_gains(alone, "ResNet101")["over_constant"] > 1.59
    agreeing = holding("ResNet-101: gain of 100 MB over 1 GB")
    assert (
        agreeing.sum() == pytest.approx(3.02e6, rel=0.01) and agreeing.size == 4_993_582
    )
    assert largest[agreeing].max() == pytest.approx(0.529, abs=1e-3)
    assert 0.53 < claimed < largest.max()


def test_32_per_cent_contradicts_section_3_3(possible_gains: Gains) -> None:
    wanted = PROSE["fig11-constant-min"] / 100
    (least, _), search = possible_gains, setting_search()
    agreeing = holding("ResNet-101: gain of 100 MB over 1 GB")
    assert least[agreeing].max() == pytest.approx(0.214, abs=1e-3)
    assert 0.215 < wanted < least.max()
    assert (search.most().sum(), search.count.max(), len(search.stated)) == (144, 9, 13)
    assert least[search.most()].max() == pytest.approx(0.007, abs=1e-3)
    alone = least >= 0.95 * wanted, possible_gains[1] >= 0.95 * 1.5
    assert [search.count[allowing].max() for allowing in alone] == [6, 6]
    for name, (low, high, n) in SCANNED.items():
        assert search.grid.free[name][:n] == pytest.approx(np.geomspace(low, high, n))


def test_the_worked_example_holds() -> None:
    hours = (
        PROSE["example-alone"],
        PROSE["example-together"],
        int(PROSE["example-workers"]),
    )
    assert osf.scaling_factor(*hours) == pytest.approx(PROSE["example-sf"])
