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
        The name or the directory of a recording, which comes before all others. The first
        recording that has training of several ranks is joined with the first one that has
        training on a single GPU.

    Returns
    -------
    mapping of str to DataFrame
        The table of each of KINDS that is recorded.
    """
    tables = {}
    # None if no recording at all has training of several ranks.
    source = open_sharing(data)
    for kind in KINDS:
        # Recordings call "kernels" sharing_kernels, and so on. Only "controls" has no prefix.
        name = kind if kind == "controls" else f"sharing_{kind}"
        if not (source and source.has(name)):
            continue
        # Iterations are compared round by round. Several files may number their rounds from 0.
        # `rounds` renumbers them, so that no two rounds have the same number.
        if kind == "iterations":
            tables[kind] = source.rounds(name)
        else:
            tables[kind] = source.table(name)
    # A single GPU has no link to others. What communicates beside its work, such as a stand-in, is
    # added as one more link.
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
        "iterations", and "kernels" if they are recorded, of the first recording that has
        training on a GPU. The dict is empty if there is none.
    """
    directories = list(places.list_recorded())
    if data:
        # A text with a slash is a directory. Any other text is the name of a recorded machine.
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
    """Return the iterations of a single GPU's table ``sharing``, in the form of "iterations".

    On a single GPU a stand-in, a kernel that occupies the GPU as an all-reduce would, takes the
    place of the messages of several ranks. The result has the iterations in single precision
    with a stand-in for two ranks, as many as the paper has. Its columns are those of table
    "iterations" that figures read. Each sample counts as a round.
    """
    # The table also has iterations with a stand-in for more ranks, and rows without messages.
    # The latter, which include all rows of one rank, have other quantities than "iteration".
    rows = sharing.query(
        "precision == 'fp32' and ranks <= 2 and quantity == 'iteration'"
    )
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    # By a policy such as "last_1x64" the last message has blocks and threads of its own. By the
    # policy "same" it has those of all others, and ``last`` is empty.
    last = rows["policy"].str.partition("_")[2]
    # The exposed time goes from the end of the backward pass to the update. If it is longer
    # than all communication, nothing overlaps, and the negative difference becomes 0.
    overlap_s = rows["communication_s"] - rows["exposed_communication_s"]
    return rows.assign(
        plan="ddp",
        link=[_link(SENDERS["standin"], rate) for rate in rows["bytes_per_s_asked"]],
        # Such as "2x256", or "2x256+1x64" with the last message after the "+".
        configuration=shape.where(last == "", shape + "+" + last),
        overlap_s=overlap_s.clip(lower=0),
    )


def _kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return the kernels of a single GPU's table ``contention``, in the form of "kernels".

    Table "kernels" is recorded by several ranks, and the result has those of its columns that
    figures read.

    Parameters
    ----------
    contention : DataFrame
        Times of kernels, alone (the communication "none") and during communication.

    Returns
    -------
    DataFrame
        The rows during communication by a stand-in or a copy engine. ``kernel_beside_s`` is
        the time of a kernel during it, and ``kernel_alone_s`` its median time alone. The
        ``configuration`` is the blocks and threads of the stand-in, or the direction of the
        copy engine's copies. The ``link`` is what communicates, and how fast.
    """
    # The kernel "idle" stands for no kernel at all, only communication. A stand-in with a limit
    # on its buffers (fifo_bytes above 0) stays in a cache, unlike real messages.
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    # The time alone of a kernel is that with the same number of ranks. Only the rows of one rank
    # are needed. Those of several ranks, alone or beside gloo's messages, are dropped below.
    same_kernel = ["kernel", "ranks"]
    is_alone = rows["communication"] == "none"
    alone_s = rows[is_alone].groupby(same_kernel)["seconds"].median()
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=same_kernel)

    # "copy_engine_h2d" becomes the sender "copy engine" and the direction "h2d". A stand-in has
    # no direction, which is NaN.
    direction = rows["communication"].str.extract(DIRECTION, expand=False)
    sender = rows["communication"].str.replace(DIRECTION, "", regex=True).map(SENDERS)
    rows = rows.assign(
        sender=sender, direction=direction, kernel_beside_s=rows["seconds"]
    )
    # The sender is NaN for kernels alone and for other communication, such as that of the
    # processor, which figures do not show.
    rows = rows.dropna(subset="sender")
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        configuration=rows["direction"].fillna(shape),
        link=list(map(_link, rows["sender"], rows["bytes_per_s_asked"])),
    )


def _link(sender: str, bytes_per_s: float) -> str:
    """Return how figures call a link of a single GPU.

    ``sender`` is one of the values of SENDERS. ``bytes_per_s`` is the rate that a stand-in
    was asked to keep, 0 for no limit.
    """
    # A copy engine is never limited.
    if sender != SENDERS["standin"]:
        return sender
    if bytes_per_s:
        return f"{sender}, {bytes_per_s / 1e9:g} GB/s"
    return f"{sender}, full speed"


# -- which rows ----------------------------------------------------------------------


def by_link(tables: Tables, kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each link on which one of KINDS was measured, and its rows."""
    if kind in tables:
        for link, rows in tables[kind].groupby("link"):
            yield str(link), rows


def default_of(rows: pd.DataFrame) -> str:
    """Return the one of DEFAULTS that is a configuration of rows, or "" if none is."""
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
        A configuration: blocks and threads of an all-reduce ("2x256"), or threads, cores
        and priority of gloo ("t2-free-normal"), of which the threads may be left out. If the
        last message has other resources than the messages before it, these follow after a "+".

    Returns
    -------
    tuple of int
        The key is smaller for fewer resources. For blocks and threads its fields are whether
        the last message has other resources, the blocks, and the threads. For gloo they are
        whether the last message has other resources, whether a rank computes with two threads
        ("-omp2"), the cores, the priority, and the threads of gloo. The two kinds are never
        sorted together. The order of the fields is a choice.
    """
    first, plus, _ = name.partition("+")
    has_other_last = bool(plus)
    # The ending "-omp2" says that a rank computes with two threads.
    words = re.fullmatch(
        r"(?:t(?P<threads>\d)-)?(?P<cores>free|own|one)-(?P<priority>\w+)(?P<omp>-omp2)?",
        first,
    )
    if words is None:
        # Blocks and threads, such as "2x256", sort by blocks first.
        numbers = re.findall(r"\d+", first)
        return (has_other_last, *map(int, numbers))
    # Threads of gloo run on any core, on the core of their rank, or on one core for all ranks. Any
    # core is taken to slow compute down least, and one core for all ranks most. This is a choice,
    # and was not measured.
    cores = ("free", "own", "one").index(words["cores"])
    # From the lowest priority to the highest.
    priorities = ("idle", "nice10", "normal", "raised")
    priority = priorities.index(words["priority"])
    # A name without a number of threads comes first.
    threads = int(words["threads"] or 0)
    computes_with_two_threads = bool(words["omp"])
    return (has_other_last, computes_with_two_threads, cores, priority, threads)


# -- medians over rounds -------------------------------------------------------------


def over_default(rows: pd.DataFrame, value: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return a quantity divided by that of the default in the same round.

    Parameters
    ----------
    rows : DataFrame
        Samples with columns ``configuration`` and ``repeat``, the number of the round.
    value : str
        The column of the quantity.
    keys : sequence of str
        The columns that tell cases apart, such as "network". Without any, all rows are one
        case.

    Returns
    -------
    DataFrame
        A row for each case, round and configuration, with ``keys``, ``repeat`` and the
        ``ratio``: the mean of the configuration's samples in the round, divided by the mean
        of the default's. Rounds without the default are left out.
    """
    in_round = [*keys, "repeat"]
    by_configuration = rows.groupby([*in_round, "configuration"], sort=False)
    means = by_configuration[value].mean().reset_index()
    is_default = means["configuration"] == default_of(rows)
    default = means[is_default].set_index(in_round)[value]
    ratios = means.join(default.rename("default"), on=in_round)
    ratios = ratios.assign(ratio=ratios[value] / ratios["default"])
    # The ratio is NaN in a round without the default.
    return ratios.dropna(subset="ratio")


def summed(rows: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """Return the median of a quantity over the rows of each case, with its 95% interval.

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
        A row for each case, with the keys, the median under the name ``value``, and the ends
        of the interval, ``lower`` and ``upper``. They are infinite for too few samples.
    """
    medians = []
    # Each case is a tuple with the values of the keys.
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
        A row for each network, batch, plan and link (CELL) and configuration. It has the
        median ``gain`` over rounds and its 95% interval from ``lower`` to ``upper``, in per
        cent.
    """
    ratios = over_default(iterations, "iteration_s", CELL)
    # An iteration of r times the default's has 1 / r times its throughput.
    ratios = ratios.assign(gain=1 / ratios["ratio"] - 1)
    # The median gain over the rounds, with its interval.
    medians = summed(ratios, [*CELL, "configuration"], "gain")
    return medians.assign(**{name: 100 * medians[name] for name in ("gain", *ENDS)})


def resnet_gains(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the gains of ResNet-18 (OURS) at the batch with the most configurations.

    They are gains in throughput over the default, in per cent, as `throughputs` returns them.
    Only iterations count that `plain` keeps: those of DDP's own plan, in which each rank
    computes with one thread.
    """
    resnet = iterations[iterations["network"].isin(OURS)]
    gains = throughputs(plain(resnet))
    # Without any row there is no batch to choose.
    if gains.empty:
        return gains
    # Each row is a configuration, so that the most frequent batch has the most of them.
    most_configurations = gains["batch"].value_counts().idxmax()
    return gains[gains["batch"] == most_configurations]
