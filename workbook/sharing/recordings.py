"""What machines measured of the sharing paper's figures, as several of them read it.

A configuration is compared with the default of the same round, so that drift cancels.
Figures show the median over rounds with its 95% interval. On a single GPU, training runs
during a stand-in for messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from ddlkit.core.fit import median_interval
from workbook.common import places
from workbook.common.source import Source, open_sharing
from workbook.sharing.printed import DEFAULT

Tables = Mapping[str, pd.DataFrame]
"""What a machine measured, by one of KINDS."""
KINDS = ("controls", "control", "messages", "kernels", "iterations", "spans")
DEFAULTS = ("t2-free-normal", DEFAULT)
"""The default configurations: two threads of gloo, and two blocks of the paper's NCCL."""
OURS = ("resnet18", "resnet18_64")
"""The network of figures 4 to 6, on a GPU, and with small images on a processor."""
ENDS = ["lower", "upper"]
"""The columns with the ends of an interval."""
CELL = ["network", "batch", "plan", "link"]
"""The columns that tell apart the cases in which configurations are compared."""
SENDERS = {"standin": "stand-in", "copy_engine": "copy engine"}
"""What communicates on a single GPU, by its name in recordings."""
# The direction of a copy engine's copies, after the name of the engine.
DIRECTION = r"_(h2d|d2h|both)$"


# -- what is recorded ----------------------------------------------------------------


def recorded(data: str = "") -> Tables:
    """Return what a machine measured, with several ranks and on a single GPU.

    Parameters
    ----------
    data : str, optional
        The name or the directory of a recording. By default, the first recording that has
        training of several ranks, and the first one that has a single GPU, are joined.

    Returns
    -------
    mapping of str to DataFrame
        Those of KINDS that are recorded.
    """
    tables = {}
    source = open_sharing(data)
    for kind in KINDS:
        # All tables but "controls" have a prefix in recordings.
        name = kind if kind == "controls" else f"sharing_{kind}"
        if not (source and source.has(name)):
            continue
        # Iterations are compared round by round. Several files may number rounds alike, which
        # `rounds` tells apart.
        if kind == "iterations":
            tables[kind] = source.rounds(name)
        else:
            tables[kind] = source.table(name)
    # The links of a single GPU are added to those of several ranks.
    for kind, rows in one_gpu(data).items():
        if kind in tables:
            rows = pd.concat([tables[kind], rows])
        tables[kind] = rows
    return tables


def one_gpu(data: str = "") -> dict[str, pd.DataFrame]:
    """Return the iterations and the kernels of a single GPU.

    Parameters
    ----------
    data : str, optional
        The name or the directory of a recording. It comes before all other recordings.

    Returns
    -------
    dict of str to DataFrame
        "iterations", and "kernels" if they are recorded. It is empty if no recording has
        a single GPU.
    """
    directories = list(places.list_recorded())
    if data:
        # A text with a slash is a directory, and any other text is a name.
        named = Path(data) if "/" in data else places.RECORDED / data
        directories = [named, *directories]
    for directory in directories:
        source = Source((directory,))
        if source.has("sharing") and "cuda" in set(source.table("sharing")["device"]):
            tables = {"iterations": _iterations(source.table("sharing"))}
            if source.has("contention"):
                tables["kernels"] = _kernels(source.table("contention"))
            return tables
    return {}


def _iterations(sharing: pd.DataFrame) -> pd.DataFrame:
    """Return the iterations of a single GPU's table ``sharing``, as several ranks have them.

    They are of single precision, with a stand-in for the all-reduce of at most two ranks.
    Each sample counts as a round.
    """
    rows = sharing.query(
        "precision == 'fp32' and ranks <= 2 and quantity == 'iteration'"
    )
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    # A policy such as "last_1x64" sends the last message with these blocks and threads. By the
    # policy "same" all messages have the same, and ``last`` is empty.
    last = rows["policy"].str.partition("_")[2]
    # The exposed time goes from the end of the backward pass to the update, which may be
    # longer than messages were under way. Then nothing overlaps.
    overlap_s = rows["communication_s"] - rows["exposed_communication_s"]
    return rows.assign(
        plan="ddp",
        link=[_link("stand-in", rate) for rate in rows["bytes_per_s_asked"]],
        configuration=shape.where(last == "", shape + "+" + last),
        overlap_s=overlap_s.clip(lower=0),
    )


def _kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return the kernels of a ``contention`` table with their times alone.

    The configuration is the blocks and threads of the stand-in, or the direction of a copy
    engine's copies. The link is what communicates, and how fast.
    """
    # "idle" is no kernel, but communication alone. A stand-in with a limit on its buffers
    # (fifo_bytes) stays in a cache, unlike real messages.
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    same_kernel = ["kernel", "ranks"]
    is_alone = rows["communication"] == "none"
    alone_s = rows[is_alone].groupby(same_kernel)["seconds"].median()
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=same_kernel)

    direction = rows["communication"].str.extract(DIRECTION, expand=False)
    sender = rows["communication"].str.replace(DIRECTION, "", regex=True).map(SENDERS)
    rows = rows.assign(
        sender=sender, direction=direction, kernel_beside_s=rows["seconds"]
    )
    # Other communication, such as that of the processor, is not shown.
    rows = rows.dropna(subset="sender")
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        configuration=rows["direction"].fillna(shape),
        link=list(map(_link, rows["sender"], rows["bytes_per_s_asked"])),
    )


def _link(sender: str, bytes_per_s: float) -> str:
    """Return how figures call a link of a single GPU. A rate of 0 is unlimited."""
    if sender != SENDERS["standin"]:
        return sender
    if bytes_per_s:
        return f"{sender}, {bytes_per_s / 1e9:g} GB/s"
    return f"{sender}, full speed"


# -- which rows ----------------------------------------------------------------------


def by_link(tables: Tables, kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each link on which a kind was measured, and its rows."""
    if kind in tables:
        for link, rows in tables[kind].groupby("link"):
            yield str(link), rows


def default_of(rows: pd.DataFrame) -> str:
    """Return the default among the configurations of rows, or "" if they lack it."""
    measured = set(rows["configuration"])
    return next((name for name in DEFAULTS if name in measured), "")


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of DDP's own plan in which each rank computes with one thread."""
    has_two_threads = rows["configuration"].str.contains("-omp", regex=False)
    return rows[(rows["plan"] == "ddp") & ~has_two_threads]


def one_group(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows in which all messages have the same resources.

    Others have a "+" in their configuration, before the resources of the last message.
    """
    return rows[~rows["configuration"].str.contains("+", regex=False)]


def of_cell(rows: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """Return the rows with the network, batch, plan and link (CELL) of another row."""
    return rows[(rows[CELL] == [cell[key] for key in CELL]).all(axis=1)]


def least_first(name: str) -> tuple[int, ...]:
    """Return a key that sorts configurations by how much they take from compute.

    Parameters
    ----------
    name : str
        A configuration: blocks and threads ("2x256"), or threads, cores and priority
        ("t2-free-normal"), of which the threads may be left out. After a "+" stand the
        resources of the last message.

    Returns
    -------
    tuple of int
        The key is smaller for fewer resources. Configurations that give the last message
        other resources are the last.
    """
    first, plus, _ = name.partition("+")
    has_other_last = bool(plus)
    words = re.fullmatch(
        r"(?:t(?P<threads>\d)-)?(?P<cores>free|own|one)-(?P<priority>\w+)(?P<omp>-omp2)?",
        first,
    )
    if words is None:
        # Blocks and threads, such as "2x256".
        numbers = re.findall(r"\d+", first)
        return (has_other_last, *map(int, numbers))
    cores = ("free", "own", "one").index(words["cores"])
    priorities = ("idle", "nice10", "normal", "raised")
    priority = priorities.index(words["priority"])
    # A name without a number of threads comes first.
    threads = int(words["threads"] or 0)
    computes_with_two_threads = bool(words["omp"])
    return (has_other_last, computes_with_two_threads, cores, priority, threads)


# -- medians over rounds -------------------------------------------------------------


def over_default(rows: pd.DataFrame, value: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return a quantity over that of the default in the same round.

    Parameters
    ----------
    rows : DataFrame
        Samples with columns ``configuration`` and ``repeat``, the number of the round.
    value : str
        The column of the quantity.
    keys : sequence of str
        The columns that tell cases apart, or none if all rows are one case.

    Returns
    -------
    DataFrame
        A row for each case, round and configuration, with the ``ratio``. It lacks rounds
        without the default. The samples of a configuration in a round count as their mean.
    """
    in_round = [*keys, "repeat"]
    by_configuration = rows.groupby([*in_round, "configuration"], sort=False)
    means = by_configuration[value].mean().reset_index()
    is_default = means["configuration"] == default_of(rows)
    default = means[is_default].set_index(in_round)[value]
    ratios = means.join(default.rename("default"), on=in_round)
    ratios = ratios.assign(ratio=ratios[value] / ratios["default"])
    return ratios.dropna(subset="ratio")


def summed(rows: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """Return the median of a quantity over rows, and its 95% interval.

    Parameters
    ----------
    rows : DataFrame
        The samples.
    keys : sequence of str
        The columns that tell cases apart.
    value : str
        The column of the quantity.

    Returns
    -------
    DataFrame
        A row for each case, with the keys, ``value``, ``lower`` and ``upper``.
    """
    medians = []
    for case, samples in rows.groupby(list(keys), sort=False)[value]:
        lower, upper = median_interval(samples.to_numpy())
        medians.append((*case, float(samples.median()), lower, upper))
    return pd.DataFrame(medians, columns=[*keys, value, *ENDS])


def throughputs(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the gain in throughput over the default of the same round.

    Parameters
    ----------
    iterations : DataFrame
        Iterations, as `recorded` returns them.

    Returns
    -------
    DataFrame
        A row for each of CELL and configuration, with the ``gain``, ``lower`` and
        ``upper`` in per cent.
    """
    ratios = over_default(iterations, "iteration_s", CELL)
    # Throughput is inversely proportional to the time of an iteration.
    ratios = ratios.assign(gain=1 / ratios["ratio"] - 1)
    gains = summed(ratios, [*CELL, "configuration"], "gain")
    return gains.assign(**{name: 100 * gains[name] for name in ("gain", *ENDS)})


def resnet_gains(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the `throughputs` of OURS at the batch with the most configurations.

    They are of DDP's own plan (`plain`).
    """
    resnet = iterations[iterations["network"].isin(OURS)]
    gains = throughputs(plain(resnet))
    if gains.empty:
        return gains
    return gains[gains["batch"] == gains["batch"].value_counts().idxmax()]
