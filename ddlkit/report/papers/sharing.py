"""sharing: Tables 1 and 2 counted anew, and the checks of its claims."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.papers import networks, sharing
from ddlkit.report import compare, source
from ddlkit.report.claims import (
    Result,
    at_least,
    at_most,
    check,
    counted,
    measured,
    own,
    paper_table,
    percent,
    prose,
    recomputed,
)

BATCHES = (16, 32, 64, 128)
SHAPE = (64, 64, 224, 224)
"""Of every kernel's input; Tab 1 leaves batch norm's out, and flattens the last two for the linear layer."""
DEFAULT = "2x256"
_CONFIGURATION = r"^\d+x\d+$"


def throughput() -> pd.DataFrame:
    """Images per second, sharing Fig 8: one row per network and batch, one column per configuration."""
    return (
        paper_table("sharing", "fig08").set_index(["network", "batch"]).filter(regex=_CONFIGURATION)
    )


def _allreduce(blocks: int, threads: int) -> float:
    """Time of the all-reduce relative to the default, sharing Fig 2."""
    grid = paper_table("sharing", "fig02").set_index(["blocks", "threads"])["relative_time"]
    return float(grid[blocks, threads])


def slowdowns(blocks: int, threads: int) -> pd.Series:
    """Slowdown of each kernel beside an all-reduce of that configuration, sharing Fig 3."""
    grid = paper_table("sharing", "fig03")
    chosen = grid[(grid["blocks"] == blocks) & (grid["threads"] == threads)]
    return chosen.set_index("kernel")["slowdown"]


HALF = 0.005
"""Figures 2 and 3 print two decimals."""


@check("sharing-fig02-speedup", "1x256", "18%")
@check("sharing-fig02-2x128", "2x128", "11%")
def _allreduce_speedup(configuration: str, saved: str) -> Result:
    ratio = _allreduce(*map(int, configuration.split("x")))
    low, high = (percent(sharing.speedup(ratio + half)) for half in (HALF, -HALF))
    return own(low, high, f"{ratio} of the default's time: {saved} is the time saved, no speedup")


@check("sharing-fig02-slowest")
def _allreduce_slowest() -> Result:
    more = percent(_allreduce(4, 512) - 1)
    note = "from the cells of Fig 2; more resources take longer here"
    return own(more - 100 * HALF, more + 100 * HALF, note)


@check("sharing-fig02-1x64")
def _allreduce_least() -> Result:
    least = _allreduce(1, 64)
    low, high = (percent(least / _allreduce(*other) - 1) for other in ((2, 64), (1, 128)))
    return own(low, high, "from Fig 2: against 2x64, and against 1x128")


@check("sharing-fig03-default-min", 0)
@check("sharing-fig03-default-max", -1)
def _kernel_extreme(place: int) -> Result:
    grid = slowdowns(2, 256).sort_values()
    value = float(grid.iloc[place])
    return own(value - HALF, value + HALF, f"from the cells of Fig 3: {grid.index[place]}")


@check("sharing-fig03-least")
@check("sharing-fig03-three", "average_pooling", "linear", "relu")
def _kernel_bound(*kernels: str) -> Result:
    grid = slowdowns(1, 64)
    grid = grid[list(kernels)] if kernels else grid
    more = percent(float(grid.max()) - 1)
    note = f"the largest, {grid.idxmax()}, prints {grid.max():.2f}"
    return own(more - 100 * HALF, more + 100 * HALF, note)


def _gain(network: str, batch: int, configuration: str = "") -> Result:
    """Gain over the default in Fig 8 within its rounding: of the best, if no configuration is named."""
    row = throughput().loc[(network, batch)]
    name = configuration or str(row.idxmax())
    low, high = map(percent, sharing.gain_range(row[name], row[DEFAULT]))
    note = f"from Fig 8: {network}, batch {batch}, {name}; best there {row.idxmax()}"
    return own(low, high, note)


check("sharing-fig04-best", "ResNet-18", 32, "1x256")(_gain)
check("sharing-fig07-vgg16", "VGG-16", 64)(_gain)


@check("sharing-best-gain")
def _best_gain() -> Result:
    gains = throughput().max(axis=1) / throughput()[DEFAULT] - 1
    return _gain(*gains.idxmax())


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    def saved_ms(batch: int, half: float = 0.0) -> float:
        row = throughput().loc[("ResNet-18", batch)]
        return 1e3 * sharing.saved_s(batch, row.max() + half, row[DEFAULT] - half)

    note = f"from Fig 8 within its rounding; {saved_ms(128):.1f} ms at batch 128: not constant"
    return own(saved_ms(16, -0.5), saved_ms(16, 0.5), note)


@check("sharing-tab2-vit-flops")
def _vit_flops() -> Result:
    note = "count of all matrix products; the printed value is 5/3 of it"
    return counted(sharing.vit_flops() / 1e9, note)


def table1() -> pd.DataFrame:
    """Five kernels: as printed, with the FLOP of matrix products (2 per multiply-add) and least bytes.

    Average pooling is not defined, so only the bytes that it reads are counted; what does no matrix
    product has no FLOP here. float32 is assumed: the paper states no precision.
    """
    rows, channels, *sides = SHAPE
    elements, pixels, kernel, outputs = math.prod(SHAPE), math.prod(sides), 7 * 7, 64
    convolved, weights = elements / 4, outputs * channels * kernel  # stride 2 in both directions
    summed = rows * channels * outputs
    work = {  # multiply-adds, and elements read or written
        "Average Pooling": (math.nan, elements),
        "Batch Norm": (math.nan, 2 * elements),
        "Convolution": (convolved * channels * kernel, elements + convolved + weights),
        "Linear": (summed * pixels, elements + summed + pixels * outputs + outputs),
        "ReLU": (math.nan, 2 * elements),
    }
    printed = paper_table("sharing", "tab01")
    multiply_adds, moved = np.array([work[kernel] for kernel in printed["kernel"]]).T
    return printed.assign(flops_computed=2 * multiply_adds, bytes_computed=4 * moved)


def table2() -> pd.DataFrame:
    """Seven networks at four batch sizes: best configuration and gain, as printed and from Fig 8.

    best_from_fig08 names all configurations that share the largest throughput.
    """
    printed = paper_table("sharing", "tab02")
    grid = throughput()
    rows = []
    for network, batch in product(printed.to_dict("records"), BATCHES):
        row = grid.loc[(network["network"], batch)]
        best = " = ".join(row.index[row == row.max()])
        cells = network[f"best_{batch}"], best, network[f"gain_{batch}_percent"]
        rows.append(
            (network["network"], batch, *cells, percent(sharing.gain(row.max(), row[DEFAULT])))
        )
    columns = ["network", "batch", "best", "best_from_fig08", "gain_percent", "computed"]
    table = pd.DataFrame(rows, columns=columns)
    return recomputed(table, gain_percent=table.pop("computed"))


@check("sharing-fig07-alexnet-communication-default", DEFAULT)
@check("sharing-fig07-alexnet-communication-best", "1x256")
def _alexnet_communication(configuration: str) -> Result:
    images = throughput().loc[("AlexNet", 64)][configuration]
    longest_ms = 1e3 * sharing.iteration_s(64, images - 0.5)
    alone_ms = prose("sharing")["fig07-alexnet-computation-only"] - 0.5
    note = f"{longest_ms:.1f} ms an iteration by Fig 8, less computation alone"
    return at_most(longest_ms - alone_ms, note)


@check("sharing-slower-kernels")
def _slower_kernels() -> Result:
    found = source.recordings("contention")
    rows = pd.concat([compare.slowdowns(one.table("contention")) for one in found.values()])
    busy = rows[(rows["kernel"] != "idle") & (rows["communication"] != "standin")]
    note = (
        f"kernels of Table 1 on CPU cores that a real all-reduce shares, no GPU: {', '.join(found)}"
    )
    return measured(busy["slowdown"], "recorded", note)


@check("sharing-backward-flop")
def _backward_flop() -> Result:
    """Each layer's two gradients cost as much as its forward, but the first layer needs only one."""
    ratios = {}
    for network in ("AlexNet", "VGG16", "VGG19", "ResNet50", "ResNet101"):
        work = [layer.multiply_adds for layer in networks.layers(network)]
        ratios[network] = 2 - work[0] / sum(work)
    return counted(ratios.values(), f"of {', '.join(ratios)}, five of the seven: matrix products")


def _best_threads() -> pd.DataFrame:
    """Threads in all of the best configuration of Table 2, by network and batch; one column a batch."""
    table = paper_table("sharing", "tab02").set_index("network")
    best = table[[f"best_{batch}" for batch in BATCHES]]
    return best.map(lambda name: math.prod(map(int, name.split("x"))))


@check("sharing-threads-fall")
def _threads_fall() -> Result:
    falling = (_best_threads().diff(axis=1).iloc[:, 1:] <= 0).all(axis=1).sum()
    return own(int(falling), int(falling), "from the configurations of Table 2")


@check("sharing-intensity-order")
def _intensity_order() -> Result:
    least = _best_threads() == 64
    reached = np.where(least.any(axis=1), least.to_numpy().argmax(axis=1), len(BATCHES))
    order = np.argsort(paper_table("sharing", "tab02")["intensity"].to_numpy(), kind="stable")
    earliest = np.minimum.accumulate(reached[order])
    late = least.index[order][reached[order] > earliest]
    fitting, note = len(order) - len(late), "from Table 2; later than one of lower intensity: "
    return own(fitting, fitting, note + ", ".join(late))


@check("sharing-fig06-constant")
def _constant_saving() -> Result:
    said = prose("sharing")
    ratio = said["fig06-saved-256"] / said["fig06-saved-16"]
    return own(ratio, ratio, "6.92 ms over 3.97 ms, both printed beside the claim")


@check("sharing-fig06-gain-falls")
def _gain_falls() -> Result:
    first, last = (_gain("ResNet-18", batch) for batch in (BATCHES[0], BATCHES[-1]))
    rows = throughput().loc["ResNet-18"]
    by_batch = 100 * (rows.max(axis=1) / rows[DEFAULT] - 1)
    each = ", ".join(f"{gain:.1f}%" for gain in by_batch)
    note = f"from Fig 8 within its rounding; by batch {each}"
    return own(last.low / first.high, last.high / first.low, note)


@check("sharing-fig04-like-fig03")
def _alike() -> Result:
    slower = paper_table("sharing", "fig03").groupby(["blocks", "threads"])["slowdown"].mean()
    gain = paper_table("sharing", "fig04").set_index(["blocks", "threads"])["gain_percent"]
    alike = -float(gain.rank().corr(slower.reindex(gain.index).rank()))
    kernels = paper_table("sharing", "fig03").pivot(
        index=["blocks", "threads"], columns="kernel", values="slowdown"
    )
    each = -kernels.reindex(gain.index).rank().corrwith(gain.rank())
    note = f"Spearman's, over {len(gain)} configurations; {each.idxmin()} alone {each.min():.2f}"
    return own(alike, alike, note)


@check("sharing-fig05c-overlap")
def _overlap_of_starved() -> Result:
    said, images = prose("sharing"), throughput().loc[("ResNet-18", 32)]["1x64"]
    both_ms = said["fig05c-computation"] + said["fig05c-communication"]
    least_ms = both_ms - 1 - 1e3 * sharing.iteration_s(32, images - 0.5)
    long_ms, union_ms = 1e3 * sharing.iteration_s(32, images), both_ms - said["fig05c-overlap"]
    note = f"an iteration takes {long_ms:.1f} ms by Fig 8, {union_ms:.0f} ms by Fig 5c's own sum"
    return at_least(least_ms, note)
