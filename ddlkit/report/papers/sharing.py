"""sharing: Tables 1 and 2 counted anew, and the checks of its claims."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.papers import networks, sharing
from ddlkit.report import claims, compare, source
from ddlkit.report.claims import CHECKS, Result, at_least, at_most, check, counted, measured, own

BATCHES = (16, 32, 64, 128)
SHAPE = (64, 64, 224, 224)
"""Of every kernel's input; Tab 1 leaves batch norm's out, and flattens the last two for the linear layer."""
DEFAULT = "2x256"
CASE = ["blocks", "threads"]
ROUNDING = np.array([-0.005, 0.005])  # of figures 2 and 3, which print two decimals


def throughput() -> pd.DataFrame:
    """Return images per second, sharing Fig 8: a row per network and batch, a column per configuration."""
    rows = claims.paper_table("sharing", "fig08").set_index(["network", "batch"])
    return rows.filter(regex=r"^\d+x\d+$")


def slowdowns(blocks: int, threads: int) -> pd.Series:
    """Return the slowdown of each kernel beside an all-reduce of that configuration, sharing Fig 3."""
    rows = claims.paper_table("sharing", "fig03").set_index("kernel")
    return rows.query("blocks == @blocks and threads == @threads")["slowdown"]


def table1() -> pd.DataFrame:
    """Return five kernels, and FLOP of their matrix products (2 per multiply-add) and least bytes in float32.

    Average pooling is not defined: only the bytes that it reads are counted.
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
    printed = claims.paper_table("sharing", "tab01")
    multiply_adds, moved = np.array([work[kernel] for kernel in printed["kernel"]]).T
    return printed.assign(flops_computed=2 * multiply_adds, bytes_computed=4 * moved)


def table2() -> pd.DataFrame:
    """Return best configurations and gains by network and batch, as printed and from Fig 8 (all that tie)."""
    printed, rows, gains = claims.paper_table("sharing", "tab02"), [], []
    for stated, batch in product(printed.to_dict("records"), BATCHES):
        row = throughput().loc[(stated["network"], batch)]
        best = " = ".join(row.index[row == row.max()])
        gains.append(100 * sharing.gain(row.max(), row[DEFAULT]))
        cells = stated[f"best_{batch}"], best, stated[f"gain_{batch}_percent"]
        rows.append((stated["network"], batch, *cells))
    columns = ["network", "batch", "best", "best_from_fig08", "gain_percent"]
    return claims.recomputed(pd.DataFrame(rows, columns=columns), gain_percent=gains)


@check("sharing-backward-flop")
def _backward_flop() -> Result:
    """Each layer's two gradients cost as much as its forward, but the first layer needs only one."""
    ratios = {}
    for network in ("AlexNet", "VGG16", "VGG19", "ResNet50", "ResNet101"):
        work = [layer.multiply_adds for layer in networks.layers(network)]
        ratios[network] = 2 - work[0] / sum(work)
    return counted(ratios.values(), f"of {', '.join(ratios)}, five of the seven: matrix products")


@check("sharing-slower-kernels")
def _slower_kernels() -> Result:
    recorded = source.recordings("contention")
    rows = pd.concat(compare.slowdowns(each.table("contention")) for each in recorded.values())
    busy = rows.query("kernel != 'idle' and communication != 'standin'")
    note = f"kernels of Table 1 on CPU cores that a real all-reduce shares: {', '.join(recorded)}"
    return measured(busy["slowdown"], note, "recorded")


def _relative_time(configuration: str) -> float:
    """Return the time of the all-reduce over the default's, sharing Fig 2."""
    times = claims.paper_table("sharing", "fig02").set_index(CASE)["relative_time"]
    return float(times[tuple(map(int, configuration.split("x")))])


def _above_1(ratio: float, note: str) -> Result:
    return own([100 * (ratio + ROUNDING - 1)], note)


@check("sharing-fig02-speedup", "1x256")
@check("sharing-fig02-2x128", "2x128")
def _allreduce_speedup(configuration: str) -> Result:
    ratio = _relative_time(configuration)
    note = f"{ratio} of the default's time: {1 - ratio:.0%} is the time saved, no speedup"
    return own([[100 * sharing.gain(1.0, time) for time in ratio + ROUNDING]], note)


@check("sharing-fig03-default-min", 0)
@check("sharing-fig03-default-max", -1)
def _kernel_extreme(place: int) -> Result:
    grid = slowdowns(2, 256).sort_values()
    return own([grid.iloc[place] + ROUNDING], f"from the cells of Fig 3: {grid.index[place]}")


@check("sharing-fig03-least", "convolution", "average_pooling", "linear", "relu", "batch_norm")
@check("sharing-fig03-three", "average_pooling", "linear", "relu")
def _kernel_bound(*kernels: str) -> Result:
    grid = slowdowns(1, 64)[list(kernels)]
    return _above_1(grid.max(), f"the largest, {grid.idxmax()}, prints {grid.max():.2f}")


@check("sharing-fig04-like-fig03")
def _alike() -> Result:
    gain = claims.paper_table("sharing", "fig04").set_index(CASE)["gain_percent"]
    slower = claims.paper_table("sharing", "fig03").groupby(CASE)["slowdown"].mean()
    alike = -float(gain.rank().corr(slower.reindex(gain.index).rank()))
    return own(alike, f"Spearman's, over {len(gain)} configurations, of the kernels' mean")


@check("sharing-fig04-best", "ResNet-18", 32, "1x256")
@check("sharing-fig07-vgg16", "VGG-16", 64)
def _gain(network: str, batch: int, configuration: str = "") -> Result:
    """Gain over the default within Fig 8's rounding: of the best, if no configuration is named."""
    row = throughput().loc[(network, batch)]
    name = configuration or str(row.idxmax())
    ends = [100 * gain for gain in sharing.gain_range(row[name], row[DEFAULT])]
    return own([ends], f"from Fig 8: {network}, batch {batch}, {name}; best there {row.idxmax()}")


@check("sharing-fig06-gain-falls")
def _gain_falls() -> Result:
    first, last = (_gain("ResNet-18", batch) for batch in (BATCHES[0], BATCHES[-1]))
    return own(
        [(last.low / first.high, last.high / first.low)], "from Fig 8: batch 128 over batch 16"
    )


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    most, default = throughput().loc[("ResNet-18", 16)].agg(["max", DEFAULT])
    ends = [1e3 * sharing.saved_s(16, most + half, default - half) for half in (-0.5, 0.5)]
    return own([ends], "from Fig 8 within its rounding")


def _longest_ms(network: str, batch: int, configuration: str) -> float:
    """Return an iteration by Fig 8's images per second, half of one fewer."""
    images = throughput().loc[(network, batch)][configuration]
    return 1e3 * sharing.iteration_s(batch, images - 0.5)


@check("sharing-fig07-alexnet-communication-default", DEFAULT)
@check("sharing-fig07-alexnet-communication-best", "1x256")
def _alexnet_communication(configuration: str) -> Result:
    longest_ms = _longest_ms("AlexNet", 64, configuration)
    alone_ms = claims.prose("sharing")["fig07-alexnet-computation-only"] - 0.5
    note = f"{longest_ms:.1f} ms an iteration by Fig 8, less computation alone"
    return at_most(longest_ms - alone_ms, note)


@check("sharing-fig05c-overlap")
def _overlap_of_starved() -> Result:
    printed, longest_ms = claims.prose("sharing"), _longest_ms("ResNet-18", 32, "1x64")
    both_ms = printed["fig05c-computation"] + printed["fig05c-communication"]
    sum_ms = both_ms - printed["fig05c-overlap"]
    note = f"an iteration takes {longest_ms:.1f} ms by Fig 8, {sum_ms:.0f} ms by Fig 5c's own sum"
    return at_least(both_ms - 1 - longest_ms, note)


def _best_threads() -> pd.DataFrame:
    """Return threads in all of Table 2's best configurations, by network; one column a batch."""
    table = claims.paper_table("sharing", "tab02").set_index("network")
    best = table[[f"best_{batch}" for batch in BATCHES]]
    return best.map(lambda name: math.prod(map(int, name.split("x"))))


@check("sharing-intensity-order")
def _intensity_order() -> Result:
    """Networks that reach the least threads at no larger batch than any of lower intensity."""
    intensity = claims.paper_table("sharing", "tab02").set_index("network")["intensity"]
    least = _best_threads().loc[intensity.sort_values(kind="stable").index] == 64
    reached = np.where(least.any(axis=1), least.to_numpy().argmax(axis=1), len(BATCHES))
    late = reached > np.minimum.accumulate(reached)
    note = f"from Table 2; later than one of lower intensity: {', '.join(least.index[late])}"
    return own(int((~late).sum()), note)


CHECKS |= {
    "sharing-fig02-1x64": lambda: own(
        [100 * (_relative_time("1x64") / _relative_time(n) - 1) for n in ("2x64", "1x128")],
        "from Fig 2: against 2x64, against 1x128",
    ),
    "sharing-tab2-vit-flops": lambda: counted(
        sharing.vit_flops() / 1e9, "all matrix products; the printed value is 5/3 of it"
    ),
    "sharing-fig02-slowest": lambda: _above_1(
        _relative_time("4x512"), "from Fig 2; more resources take longer here"
    ),
    "sharing-best-gain": lambda: _gain(
        *(throughput().max(axis=1) / throughput()[DEFAULT]).idxmax()
    ),
    "sharing-fig06-constant": lambda: own(
        claims.prose("sharing")["fig06-saved-256"] / claims.prose("sharing")["fig06-saved-16"],
        "milliseconds at batch 256 over those at 16, both printed beside the claim",
    ),
    "sharing-threads-fall": lambda: own(
        (_best_threads().diff(axis=1).iloc[:, 1:] <= 0).all(axis=1).sum(), "from Table 2"
    ),
}
