"""sharing: Tables 1 and 2 counted anew, and the checks of its claims."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.core.workload import Floats
from workbook.common import claims, places, source, specs
from workbook.common.claims import CHECKS, Evidence, Result, check, counted, own
from workbook.sharing import equations as sharing
from workbook.validate import compare

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
    convolved, weights = (
        elements / 4,
        outputs * channels * kernel,
    )  # stride 2 in both directions
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
    names = [specs.network_named(name) for name in throughput().index.levels[0]]
    tables = (each.table("layers") for each in source.recordings("layers").values())
    rows = pd.concat(tables).query("ranks == 1 and flops > 0")
    rows = rows[rows["network"].isin(names)]
    by = rows.groupby(["network", "machine", "precision"])["flops"]
    ratios = 2 - by.first() / by.sum()
    counts = ", ".join(ratios.index.unique("network"))
    return counted(ratios, f"matrix products, as PyTorch counts them in {counts}")


@check("sharing-slower-kernels")
def _slower_kernels() -> Result:
    beside = {}
    for machine, each in source.recordings("contention").items():
        rows = compare.slowdowns(each.table("contention")).query(
            "communication == 'gloo'"
        )
        beside[machine] = rows["slowdown"]
    for place in sorted(places.RECORDED.glob("*/sharing*")):
        if (grid := source.Source((place,))).has("sharing_kernels"):
            rows = grid.table("sharing_kernels").eval(
                "ratio = kernel_beside_s / kernel_alone_s"
            )
            medians = rows.groupby(["kernel", "link", "configuration"])[
                "ratio"
            ].median()
            beside[f"{place.parent.name}, {place.name}"] = medians
    ends = (
        f"{x.min():.2f} to {x.max():.2f} ({at}; n = {len(x)})"
        for at, x in beside.items()
    )
    note = f"Fig 3, by 1x64 up to {slowdowns(1, 64).max():.2f}; processor cores beside a real all-reduce: "
    return own(slowdowns(2, 256), note + ", ".join(ends))


def _relative_time(configuration: str) -> Floats:
    """Return the ends, within rounding, of the time of the all-reduce over the default's, sharing Fig 2."""
    times = claims.paper_table("sharing", "fig02").set_index(CASE)["relative_time"]
    return float(times[tuple(map(int, configuration.split("x")))]) + ROUNDING


@check("sharing-fig02-speedup", "1x256")
@check("sharing-fig02-2x128", "2x128")
def _allreduce_speedup(configuration: str) -> Result:
    ends = _relative_time(configuration)
    wording = (
        f"{1 - ends.mean():.0%} are the time saved: an error of wording (erratum 1)"
    )
    note = f"{ends.mean():.2f} of the time is a speedup of {sharing.gain(1.0, ends.mean()):.1%}; {wording}"
    return own([[100 * sharing.gain(1.0, time) for time in ends]], note)


@check("sharing-conclusion-last")
def _last_allreduce() -> Result:
    times = claims.paper_table("sharing", "fig02").set_index(CASE)["relative_time"]
    most, others = times.loc[(4, 512)], times.drop((4, 512))
    note = "from Fig 2, 25 MB; Section 4.3.1 wants what 'finishes fastest': {}x{}"
    ends = [(most + half) / (others - half) for half in ROUNDING]
    return own(np.transpose(ends), note.format(*times.idxmin()))


@check("sharing-fig03-default-min", 0)
@check("sharing-fig03-default-max", -1)
def _kernel_extreme(place: int) -> Result:
    grid = slowdowns(2, 256).sort_values()
    return own(
        [grid.iloc[place] + ROUNDING], f"from the cells of Fig 3: {grid.index[place]}"
    )


@check(
    "sharing-fig03-least",
    "convolution",
    "average_pooling",
    "linear",
    "relu",
    "batch_norm",
)
@check("sharing-fig03-three", "average_pooling", "linear", "relu")
def _kernel_bound(*kernels: str) -> Result:
    grid = slowdowns(1, 64)[list(kernels)]
    ends = " to ".join(f"{end:.1%}" for end in grid.max() + ROUNDING - 1)
    largest = " and ".join(grid.index[grid == grid.max()])
    note = f"the largest, {largest}, prints {grid.max():.2f}, as all from {ends} would"
    return own([100 * (grid.max() + ROUNDING - 1)], note)


@check("sharing-fig04-like-fig03")
def _alike() -> Result:
    gain = claims.paper_table("sharing", "fig04").set_index(CASE)["gain_percent"]
    slower = claims.paper_table("sharing", "fig03").pivot(index=CASE, columns="kernel")
    alike = -slower["slowdown"].corrwith(gain, method="spearman")
    each = ", ".join(f"{kernel} {value:.2f}" for kernel, value in alike.items())
    return own(
        alike,
        f"Spearman's, over {len(gain)} cells; {(alike < 0.5).sum()} fall short: {each}",
    )


@check("sharing-fig04-best", "ResNet-18", 32, "1x256")
@check("sharing-fig07-vgg16", "VGG-16", 64)
def _gain(network: str, batch: int, configuration: str = "") -> Result:
    """Gain over the default within Fig 8's rounding: of the best, if no configuration is named."""
    row = throughput().loc[(network, batch)]
    name = configuration or str(row.idxmax())
    ends = [100 * gain for gain in sharing.gain_range(row[name], row[DEFAULT])]
    saved = " to ".join(f"{end / (100 + end):.1%}" for end in ends)
    note = f"from Fig 8: {network}, batch {batch}, {name} (best: {row.idxmax()}); as time saved {saved}"
    return own([ends], note)


@check("sharing-best-gain")
def _best_gain() -> Result:
    return _gain(*(throughput().max(axis=1) / throughput()[DEFAULT]).idxmax())


@check("sharing-fig06-gain-falls")
def _gain_falls() -> Result:
    each = [_gain("ResNet-18", batch) for batch in BATCHES]
    middles = ", ".join(f"{(result.low + result.high) / 2:.1f}%" for result in each)
    ends = each[-1].low / each[0].high, each[-1].high / each[0].low
    return own(
        [ends], f"from Fig 8: batch 128 over 16; batches 16 to 128 gain {middles}"
    )


def _iteration_ms(network: str, batch: int, name: str) -> Floats:
    """Return the shortest and the longest iteration of a configuration that Fig 8's images per s allow."""
    row = throughput().loc[(network, batch)]
    images = row[{"default": DEFAULT, "best": row.idxmax()}.get(name, name)]
    return np.array(
        [1e3 * sharing.iteration_s(batch, images + half) for half in (0.5, -0.5)]
    )


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    text, ratios = claims.prose("sharing"), list[float]()
    default, best = (
        _iteration_ms("ResNet-18", 16, which) for which in ("default", "best")
    )
    for which in ("default", "best"):
        keys = (
            f"fig07-alexnet-{part}"
            for part in ("computation-only", f"communication-{which}")
        )
        profiled_ms = sum(text[key] for key in keys) + np.array([1, -1])
        ratios += [*(profiled_ms / _iteration_ms("AlexNet", 64, which))]
    factor = np.array([min(ratios), max(ratios)])
    saved = " to ".join(f"{each:.2f}" for each in default - best[::-1])
    off = (
        f"iterations {factor[0]:.3f} to {factor[1]:.3f} of it, as AlexNet's at batch 64"
    )
    return own(
        [default * factor - (best * factor)[::-1]], f"from Fig 8 ({saved} ms), {off}"
    )


@check("sharing-fig07-vgg19-computation-only-default", "best", 1)
@check("sharing-fig07-vgg19-computation-only-best", "default", -1)
def _same_communication(other: str, sign: int) -> Result:
    default, best = (
        _iteration_ms("VGG-19", 64, which) for which in ("default", "best")
    )
    least, most = default - best[::-1] + [-0.5, 0.5]
    other_ms = claims.prose("sharing")[f"fig07-vgg19-computation-only-{other}"]
    note = f"communication is the same, so from {other_ms:.0f} ms by Fig 8's iterations, one identity of both"
    return own([(other_ms + sign * least, other_ms + sign * most)], note)


# Which of computation alone, both at once and communication alone a printed time has.
PARTS = {"computation": (1, 1, 0), "communication": (0, 1, 1), "overlap": (0, 1, 0)}
PARTS |= {"computation-only": (1, 0, 0), "communication-only": (0, 0, 1)}
TIMED = {"fig05c": ("ResNet-18", 32, "computation communication overlap")}
TIMED |= {"fig07-alexnet": ("AlexNet", 64, "computation communication")}
TIMED |= {"fig07-vgg16": ("VGG-16", 64, "overlap communication-only")}
TIMED |= {"fig07-vit": ("ViT-Base/16", 64, "computation")}
TIMED |= {
    f"fig07-resnet{n}": (f"ResNet-{n}", 64, "communication") for n in (18, 50, 101)
}


def _left(text: str, part: str, which: str) -> Result:
    """What an iteration by Fig 8, which its parts cannot outlast, and its other printed times leave."""
    from scipy.optimize import linprog

    sums, most_ms = [(1, 1, 1)], [_iteration_ms(*TIMED[text][:2], which)[1]]
    given = list[str]()
    for key, ms in claims.prose("sharing").items():
        name = key.removeprefix(f"{text}-").removesuffix(f"-{which}")
        if key.startswith(text) and name in PARTS and name != part:
            sums += [PARTS[name], tuple(-np.array(PARTS[name]))]
            most_ms += [ms + 0.5, 0.5 - ms]
            given += [f"{ms:.0f} ms of {name}"]
    wanted = np.array(PARTS[part])
    ends = [linprog(sign * wanted, sums, most_ms) for sign in (1, -1)]
    beside = f", with {' and '.join(given)}, half a ms either way" if given else ""
    note = f"what fits into an iteration of at most {most_ms[0]:.1f} ms (Fig 8){beside}"
    if not any(end.ineqlin.marginals[0] for end in ends):
        note += (
            "; Fig 8 does not bind, only that no more overlaps than is computed or sent"
        )
    return replace(own([[ends[0].fun, -ends[1].fun]], note), evidence=Evidence.BOUND)


for _text, (*_, _parts) in TIMED.items():
    for _part, _which in product(
        _parts.split(), [""] if _text == "fig05c" else ["-default", "-best"]
    ):
        check(f"sharing-{_text}-{_part}{_which}", _text, _part, _which[1:] or "1x64")(
            _left
        )
check(
    "sharing-fig07-alexnet-computation-only",
    "fig07-alexnet",
    "computation-only",
    "best",
)(_left)


def _best_threads() -> pd.DataFrame:
    """Return threads in all of Table 2's best configurations, by network; one column a batch."""
    table = claims.paper_table("sharing", "tab02").set_index("network")
    best = table[[f"best_{batch}" for batch in BATCHES]]
    return best.map(lambda name: math.prod(map(int, name.split("x"))))


@check("sharing-threads-fall")
def _threads_fall() -> Result:
    steps = _best_threads().diff(axis=1).iloc[:, 1:]
    stay = ", ".join(steps.index[(steps == 0).all(axis=1)])
    note = f"from Table 2: all fall but {stay}; by two of three ties of VGG-19 at batch 32 it would be 6"
    return own((steps <= 0).all(axis=1).sum(), note)


@check("sharing-intensity-order")
def _intensity_order() -> Result:
    """Networks that reach the least threads at no larger batch than any of lower intensity."""
    intensity = claims.paper_table("sharing", "tab02").set_index("network")["intensity"]
    least = _best_threads().loc[intensity.sort_values(kind="stable").index] == 64
    reached = np.where(least.any(axis=1), least.to_numpy().argmax(axis=1), len(BATCHES))
    late = reached > np.minimum.accumulate(reached)
    rows = throughput().xs(32, level="batch").loc[least.index[late]]
    by = [
        f"{name}, {x['1x64']:.0f} against {x.max():.0f} images/s"
        for name, x in rows.iterrows()
    ]
    note = f"from Table 2; later than others of lower intensity (batch 32, Fig 8): {', '.join(by)}"
    return own(int((~late).sum()), note)


CHECKS |= {
    "sharing-tab2-vit-flops": lambda: counted(
        sharing.vit_flops() / 1e9,
        "all matrix products at 224 x 224 pixels, not stated; no square gives what is printed, 5/3 of it",
    ),
    "sharing-fig02-slowest": lambda: own(
        [100 * (_relative_time("4x512") - 1)], "from Fig 2"
    ),
    "sharing-fig02-1x64": lambda: own(
        [
            100 * (_relative_time("1x64") / _relative_time(n)[::-1] - 1)
            for n in ("1x128", "2x64")
        ],
        "from Fig 2, against 1x128 and against 2x64, as rounded",
    ),
    "sharing-fig06-constant": lambda: own(
        claims.prose("sharing")["fig06-saved-256"]
        / claims.prose("sharing")["fig06-saved-16"],
        "milliseconds at 256 over those at 16, both printed beside it; Fig 8's grow by more (erratum 7)",
    ),
}
