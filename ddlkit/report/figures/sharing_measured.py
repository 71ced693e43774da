"""Sharing, measured: messages, kernels and training under configurations of what carries the messages.

The tables are those of one machine, whatever carried messages there: threads of gloo on a processor, blocks
of NCCL on GPUs. A configuration is compared with the default of the same round, so that what drifts from
round to round cancels; the median over rounds is shown, with its interval.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ddlkit.core.doubt import median_interval
from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.timeline import COLUMNS, Timeline

DEFAULTS = ("t2-free-normal", "b0", "2x256")
"""What a library takes by itself: two threads of gloo; as many blocks as NCCL likes, two in the paper."""
LEAST_FIRST = (
    *("t1-free-idle", "t1-free-nice10", "t1-free-normal", "t2-free-normal", "t4-free-normal"),
    "t2-free-raised",
)
"""Configurations of the grid by what they take from computing, the least first."""
CELL = ["network", "batch", "plan", "link"]
LARGE_BYTES = 25_000_000
"""Of figure 2's message, which is sent in parts so that every thread has some."""


def default_of(rows: pd.DataFrame) -> str:
    """The default configuration among rows with a column ``configuration``. Raises UserError without one."""
    there = set(rows["configuration"])
    for name in DEFAULTS:
        if name in there:
            return name
    raise UserError(f"sharing: measure a default too: {' or '.join(DEFAULTS)}")


def has_default(rows: pd.DataFrame) -> bool:
    """Whether `default_of` finds one: a recording may have ended before."""
    return not set(DEFAULTS).isdisjoint(rows["configuration"])


def least_first(names: Sequence[str]) -> list[str]:
    """Configurations of one group by what they take: of gloo as LEAST_FIRST, of NCCL by their blocks.

    Those whose threads are limited too are left out; b0, as many blocks as NCCL likes, is the last.
    """
    blocks = [name for name in names if name[:1] == "b" and name[1:].isdigit()]
    ordered = sorted(blocks, key=lambda name: int(name[1:]) or sys.maxsize)
    return ordered or [name for name in LEAST_FIRST if name in names]


def over_default(rows: pd.DataFrame, value: str, within: Sequence[str]) -> pd.DataFrame:
    """``value`` over the default's of the same round: one row for each of ``within`` and configuration.

    Columns: ratio (median over rounds), lower, upper (its 95% interval), rounds.
    """
    return summed(rounds_over_default(rows, value, within), [*within, "configuration"], "ratio")


def rounds_over_default(rows: pd.DataFrame, value: str, within: Sequence[str]) -> pd.DataFrame:
    """The same before the median: one row a round (``repeat``), with its ``ratio``.

    What was in no round with the default (NCCL's threads are told by the environment, so they need a process
    of their own) is compared with the median of its rounds; whose own scatter no interval holds then.
    """
    keys, default = [*within, "repeat"], default_of(rows)
    each = rows.groupby([*keys, "configuration"], sort=False)[value].mean().reset_index()
    own = each[each["configuration"] == default]
    ratios = each.join(own.set_index(keys)[value].rename("default"), on=keys)
    median = each[[*within]].join(own.groupby([*within])[value].median(), on=[*within])[value]
    cells = [ratios[key] for key in (*within, "configuration")]
    apart = ratios["default"].isna().groupby(cells).transform("all")
    ratio = ratios[value] / ratios["default"].where(~apart, median)
    return ratios.assign(ratio=ratio).dropna(subset="ratio")


def summed(rows: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """Median of ``value`` for each of ``keys``, its interval over rows, and how many rows there are."""
    found = []
    for key, own in rows.groupby(list(keys), sort=False):
        lower, upper = median_interval(own[value].to_numpy())
        found.append((*key, float(own[value].median()), lower, upper, len(own)))
    return pd.DataFrame(found, columns=[*keys, value, "lower", "upper", "rounds"])


def figure2(messages: pd.DataFrame) -> pd.DataFrame:
    """Time of an all-reduce of LARGE_BYTES over the default's, by link and configuration (sharing Fig 2)."""
    large = messages[messages["bytes"] == LARGE_BYTES]
    return over_default(large, "seconds", ["link"]) if has_default(large) else large[:0]


def beside(kernels: pd.DataFrame) -> pd.DataFrame:
    """A row of a kernels table each: how much longer computing took beside messages, and they beside it.

    slowdown : of what was computed while messages were under way, all that the kernel lost being lost then
    message_slowdown : likewise of all messages; both as shares, 0.1 for a tenth longer
    """
    took_s, alone_s = kernels["kernel_beside_s"], kernels["kernel_alone_s"]
    overlap_s = kernels["overlap_share"] * took_s
    kept_s = (overlap_s - (took_s - alone_s)).clip(lower=0)
    slowdown = overlap_s / kept_s.where(overlap_s > 0) - 1
    of_messages = kernels["messages_beside_s"] / kernels["messages_alone_s"] - 1
    return kernels.assign(slowdown=slowdown, message_slowdown=of_messages)


def beside_nccl(contention: pd.DataFrame, messages: pd.DataFrame) -> pd.DataFrame:
    """Kernels beside NCCL, as a kernels table, from a ``contention`` table and messages with nothing beside.

    Of messages rates are compared, of the largest alone with those beside the kernel: their "times" are of a
    byte. Columns: those that `beside` and `figure3` read.
    """
    own = contention[contention["ranks"] > 1]
    alone_s = own[own["communication"] == "none"].groupby("kernel")["seconds"].median()
    largest = messages[messages["bytes"] == messages["bytes"].max()]
    sent = largest["ranks"].map(lambda ranks: bus_factor("all_reduce", ranks)) * largest["bytes"]
    each_s = (largest["seconds"] / sent).groupby([largest["link"], largest["configuration"]])
    rows = own[own["communication"] == "nccl"]
    threads = ("-t" + rows["threads"].astype(str)).where(rows["threads"] > 0, "")
    rows = rows.assign(
        configuration="b" + rows["blocks"].astype(str) + threads,
        kernel_alone_s=rows["kernel"].map(alone_s),
        messages_beside_s=1 / rows["bytes_per_s"].replace(0, np.nan),
    )
    rows = rows.rename(columns={"seconds": "kernel_beside_s", "sample": "repeat"})
    return rows.merge(each_s.median().rename("messages_alone_s").reset_index(), on="configuration")


def figure3(kernels: pd.DataFrame) -> pd.DataFrame:
    """Time of each kernel beside messages over its time alone, by link and configuration (sharing Fig 3)."""
    ratio = kernels["kernel_beside_s"] / kernels["kernel_alone_s"]
    keys = ["link", "kernel", "configuration"]
    return summed(kernels.assign(ratio=ratio), keys, "ratio")


def throughputs(iterations: pd.DataFrame) -> pd.DataFrame:
    """Training by cell and configuration: gain over the default of the same round (sharing Figs 4 and 8).

    Columns: those of CELL, configuration, gain, lower, upper (shares), rounds, and images_per_s of one rank.
    """
    each = rounds_over_default(iterations, "iteration_s", CELL)
    gains = summed(each.assign(gain=1 / each["ratio"] - 1), [*CELL, "configuration"], "gain")
    keys = [*CELL, "configuration"]
    took_s = each.groupby(keys)["iteration_s"].median().rename("iteration_s")
    gains = gains.join(took_s, on=keys)
    return gains.assign(images_per_s=gains["batch"] / gains["iteration_s"])


def breakdown(iterations: pd.DataFrame) -> pd.DataFrame:
    """Computation only, overlap and communication only, by cell and configuration (sharing Figs 6 and 7).

    Means of the slowest rank's, in seconds, whose differences over the same rounds are those of each round;
    what is neither, waiting among it, counts as computation.
    """
    keys = [*CELL, "configuration"]
    parts = iterations.assign(
        computation_only_s=iterations["iteration_s"] - iterations["communication_s"],
        communication_only_s=iterations["exposed_communication_s"],
    )
    columns = ["computation_only_s", "overlap_s", "communication_only_s", "iteration_s"]
    return parts.groupby(keys, sort=False)[columns].mean().reset_index()


def best_of(gains: pd.DataFrame, *, groups: bool = False) -> pd.DataFrame:
    """The row of each cell with the largest gain, by `throughputs`; ``groups``: also policies of two."""
    rows = gains if groups else gains[~gains["configuration"].str.contains("+", regex=False)]
    return rows.loc[rows.groupby(CELL, sort=False)["gain"].idxmax()]


def halves(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Odd rounds and even ones: what is chosen in the first is not judged by its own luck in the second."""
    odd = rows["repeat"] % 2 == 1
    return rows[odd], rows[~odd]


def first_of(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans of one iteration of each cell: the first one, where several sessions recorded it."""
    return spans[spans.groupby([*CELL, "configuration", "task", "rank"]).cumcount() == 0]


def timelines(
    spans: pd.DataFrame, cell: Sequence[object], names: Sequence[str]
) -> dict[str, Timeline]:
    """The measured timeline of a cell under each of the configurations that were kept (sharing Fig 5)."""
    rows = first_of(spans[(spans[CELL] == list(cell)).all(axis=1)])
    found = {}
    for name in names:
        own = rows[rows["configuration"] == name]
        if len(own):
            found[name] = Timeline(**{column: own[column].to_numpy() for column in COLUMNS})
    return found


def as_grid(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Configurations of one group as rows (threads or blocks) and columns (where and how urgently they run).

    "t2-free-normal" stands in row "t2", column "free-normal"; what was not measured is NaN.
    """
    one = rows[~rows["configuration"].str.contains("+", regex=False)]
    parts = one["configuration"].str.partition("-")
    table = one.assign(row=parts[0], column=parts[2]).pivot(
        index="row", columns="column", values=value
    )
    columns = sorted(table.columns, key=_urgency)
    rows = sorted(table.index, key=lambda name: int(name[1:]))
    what = "blocks" if rows[0][0] == "b" else "threads"
    return table.reindex(index=rows, columns=columns).rename_axis(index=what, columns="")


def _urgency(column: str) -> tuple[int, ...]:
    """Order of columns: unpinned before pinned, one computing thread before two, the least urgent first."""
    order = ("idle", "nice10", "normal", "raised")
    cores, _, rest = column.partition("-")
    priority, _, openmp = rest.partition("-")
    places = ("free", "own", "one")
    return (
        int(bool(openmp)),
        places.index(cores) if cores in places else len(places),
        order.index(priority) if priority in order else len(order),
    )


def paper_grid(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Blocks x threads, of a transcribed figure with columns blocks, threads and ``value``."""
    return rows.pivot(index="blocks", columns="threads", values=value)


def share_of_communication(iterations: pd.DataFrame) -> pd.Series:
    """By CELL: messages under way under the default, over what computing takes without them."""
    own = iterations[iterations["configuration"] == default_of(iterations)]
    medians = own.groupby(CELL)[["communication_s", "compute_s"]].median()
    return medians["communication_s"] / medians["compute_s"]


def intensities(layers: pd.DataFrame) -> pd.Series:
    """By network: forward FLOP of an image over parameters, I = C / D (sharing 4.4.1)."""
    sums = layers.groupby(["network", "batch"])[["flops", "parameters"]].sum().reset_index()
    per_image = sums["flops"] / sums["batch"] / sums["parameters"]
    return per_image.groupby(sums["network"]).median()


def hidden(spans: pd.DataFrame) -> pd.Series:
    """By CELL and configuration: whether all messages but the last had arrived when computing was done."""
    keys = [*CELL, "configuration"]
    rows = first_of(spans[spans["rank"] == 0])
    done_s = rows[rows["kind"] == "backward"].groupby(keys)["end_s"].max().rename("done_s")
    messages = rows[rows["kind"] == "all_reduce"].join(done_s, on=keys)
    late = (messages["end_s"] > messages["done_s"]).groupby([messages[key] for key in keys]).sum()
    return late <= 1


def bootstrap(values: np.ndarray, draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Interval, as sure as ``level``, of the median of ``values`` (n,), each drawn anew with equal chance."""
    drawn = np.random.default_rng(0).choice(values, (draws, len(values)))
    lower, upper = np.quantile(np.median(drawn, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(lower), float(upper)
