"""What `ddlkit measure` can measure.

Each function here makes the points of one part, such as ``layers`` or ``copies``. A
point is measured on its own and resumed on its own (`ddlkit.measure.session.Point`).
Where an argument is a list, there is a point for each of its values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import one_way_delay_s
from ddlkit.core.plan import make_plan
from ddlkit.core.units import KIB
from ddlkit.core.workload import Workload
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import MEETING_S, Loopback, launch
from ddlkit.lab import Conditions
from ddlkit.lab import network as lab
from ddlkit.measure import collectives as messages_alone
from ddlkit.measure import copies, needs, slowdown, training
from ddlkit.measure import layers as layer_times
from ddlkit.measure import networks as networks_by_name
from ddlkit.measure.given import dtype_name
from ddlkit.measure.session import Point, PointList, Tables, table_path
from ddlkit.store import machine

MEETING_OF_MANY_S = 60.0
"""Seconds after which more than two ranks of one machine will never meet."""
LAYERS_S = 300.0
"""The least duration that the time limit of layers on several ranks is made from, in seconds.

It takes the place of a shorter estimate. It was chosen, and not measured."""
IN_LAB_S = 900.0
"""Seconds that ranks in a lab may always take, however little was expected."""
PATIENCE = 3.0
"""Ranks are ended after this many times the expected duration, and `PATIENCE_AT_START_S`."""
PATIENCE_AT_START_S = 60.0
"""Seconds that ranks may take in any case, because a busy machine starts them slowly."""
SLOWDOWN = Budget(warmup=0, min_repeats=5, max_repeats=100, max_s=10.0)
"""How many rounds of compute with messages are run. What warms up precedes them."""
SMALL_BYTES = 64 * KIB
"""The size of a message whose time is nearly all start-up latency."""

Networks = Sequence[tuple[str, int]]
"""Names of networks, each with its batch size."""


class Here(NamedTuple):
    """Where a session measures.

    Attributes
    ----------
    device : str
        ``"cpu"`` or ``"cuda"``.
    session : int
        The number of the session, which is part of the names of its own tables.
    out : Path
        The directory of the session.
    """

    device: str
    session: int
    out: Path

    @property
    def on_gpu(self) -> bool:
        """Return whether GPUs are measured."""
        return self.device == "cuda"


# -- ranks -----------------------------------------------------------------------------


def rank_counts(here: Here) -> list[int]:
    """Return the numbers of ranks between which messages are measured by default.

    Two ranks are always among them. With more than two GPUs there is also the number of
    GPUs, for one rank on each. The numbers are in ascending order.
    """
    if not here.on_gpu:
        return [2]
    # With fewer than two GPUs the result is still [2], and not [1]: a single rank has
    # nobody to send to. `Needs.offer` then refuses the measurement between two ranks and
    # says what the machine lacks. With exactly two GPUs the set has a single number.
    return sorted({2, torch.cuda.device_count()} - {0, 1})


@dataclass(frozen=True)
class Ranks:
    """Several ranks in a place that is made anew for each measurement.

    Attributes
    ----------
    count : int
        How many ranks there are.
    place : callable
        Returns a new place, a `ddlkit.jobs.launch.Place`: the machine's loopback
        interface, or a lab, which is also a context manager. A lab joins network
        namespaces by links of a limited rate.
    join : mapping
        Arguments of `ddlkit.jobs.rank.Rank.join`, by which the ranks meet: the backend,
        and optionally ``timeout_s`` and ``on_gpu``.
    lab_shape : LabShape, optional
        The lab in which the ranks are. None outside of a lab.
    """

    count: int
    place: Callable[[], Any]
    join: Mapping[str, Any]
    lab_shape: lab.LabShape | None = None

    @classmethod
    def of(
        cls,
        count: int,
        device: str,
        link: str = "",
        *,
        on_gpu: bool | None = None,
    ) -> Ranks:
        """Return ranks on this machine that are in no lab.

        The ranks meet on the loopback interface. Between GPUs their messages take the
        link that joins the GPUs. The backend follows from the measured device alone,
        not from what else the machine has: a recording of the CPU on a machine with
        GPUs uses gloo.

        Parameters
        ----------
        count : int
            How many ranks there are.
        device : str
            The measured device, ``"cpu"`` or ``"cuda"``.
        link : str, optional
            How tables name the link. By default it is "loopback" between processors,
            and between GPUs "nvlink" or "pcie", as nvidia-smi says of the first ``count``
            GPUs that CUDA may use. It is "nccl" if nvidia-smi does not say.
        on_gpu : bool, optional
            Whether the tensors that are sent lie on a GPU. By default they do with NCCL,
            and do not with gloo.

        Returns
        -------
        Ranks
        """
        backend = "nccl" if device == "cuda" else "gloo"
        # More processes that start at the same time need longer until all have met.
        timeout_s = MEETING_OF_MANY_S if count > 2 else MEETING_S
        # Arguments of `Rank.join`.
        join: dict[str, Any] = {"backend": backend, "timeout_s": timeout_s}
        if not link:
            link = _link_of_first_gpus(count) if backend == "nccl" else "loopback"
        if on_gpu is not None:
            join["on_gpu"] = on_gpu
        return cls(count, partial(Loopback, name=link), join)

    def run(
        self, job: Any, settings: Any, estimate_s: float, out: Path | None = None
    ) -> Tables:
        """Run a job in all ranks and return the tables that it leaves.

        Parameters
        ----------
        job : ddlkit.jobs.rank.Job
            What each rank does.
        settings : dataclass
            The settings of the job.
        estimate_s : float
            How long the job is expected to take, in seconds. Ranks that take longer than
            `PATIENCE` times this duration plus `PATIENCE_AT_START_S` are ended, but in a lab
            not before `IN_LAB_S`.
        out : Path, optional
            The directory into which the tables are also written.

        Returns
        -------
        mapping of str to DataFrame
            The tables by their schema.

        Raises
        ------
        UserError
            If a rank dies, if the ranks take too long, and if the lab cannot be made.
        """
        place = self.place()
        # `launch` ends ranks that take longer than the timeout, because they probably hang.
        timeout_s = PATIENCE * estimate_s + PATIENCE_AT_START_S
        lab_or_nothing: AbstractContextManager[Any] = nullcontext()
        # All places but the loopback interface are labs. In a lab the ranks get at least
        # `IN_LAB_S`, because its links may be slow, and most estimates ignore their rate.
        if not isinstance(place, Loopback):
            timeout_s = max(IN_LAB_S, timeout_s)
            lab_or_nothing = place
        # The network of a lab is made when the block begins, and removed when it ends.
        with lab_or_nothing:
            return launch(
                job,
                settings,
                ranks=self.count,
                place=place,
                join=self.join,
                timeout_s=timeout_s,
                out=out,
            )


def _link_of_first_gpus(count: int) -> str:
    """Return the name of what joins the first ``count`` GPUs that CUDA may use.

    The name is "nvlink" or "pcie", or "nccl" if nvidia-smi does not say.
    """
    uuids = machine.gpu_uuids()
    # Each rank takes the GPU of its own number among those that CUDA may use.
    visible = machine.visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    links = machine.links_between_gpus(machine.topology(), uuids)
    return machine.gpu_link(visible[:count], links)


def ranks_in_lab(count: int, rate: float, delay_s: float = 0.0) -> tuple[Ranks, str]:
    """Return ranks between which the links of a lab have a limited rate.

    Parameters
    ----------
    count : int
        How many ranks there are.
    rate : float
        The rate of each link in bit/s.
    delay_s : float, optional
        The delay of each link in seconds. With a delay the links are emulated.

    Returns
    -------
    ranks : Ranks
        The ranks, which meet over gloo.
    name : str
        The name of their table of collectives, such as ``"lab-p2-1gbit"``.

    Examples
    --------
    >>> ranks_in_lab(2, 1e9)[1], ranks_in_lab(4, 5e8, delay_s=0.002)[1]
    ('lab-p2-1gbit', 'lab-p4-500mbit-delay2ms')
    """
    # Without conditions the kernel limits the rate, and adds no delay.
    conditions = Conditions(delay_s) if delay_s else None
    shape = lab.LabShape(count, rate, conditions=conditions)
    # The names of tables do not say that links are emulated, because a delay in the name
    # implies it.
    name = f"lab-{shape.name.replace('emulated-', '')}"
    join = {"backend": "gloo"}
    return Ranks(count, partial(lab.Lab, shape), join, lab_shape=shape), name


def place_of(
    here: Here, count: int, bits_per_s: float, delay_s: float = 0.0
) -> tuple[Ranks, str]:
    """Return ranks, and how tables name the place where they are.

    With a rate the place is a lab. Without one it is the machine's own link.

    Parameters
    ----------
    here : Here
        Where the session measures.
    count : int
        How many ranks there are.
    bits_per_s : float
        The rate of a lab's links; 0 for no lab.
    delay_s : float, optional
        The delay of a lab's links in seconds.

    Returns
    -------
    ranks : Ranks
        The ranks.
    name : str
        The name of the place in tables, such as ``"p2-1gbit"`` or ``"p2-loopback"``.
    """
    if bits_per_s:
        members, name = ranks_in_lab(count, bits_per_s, delay_s)
        # Only tables of collectives have "lab-" in their names.
        return members, name.removeprefix("lab-")
    return Ranks.of(count, here.device), f"p{count}-{_own_link(here)}"


def _own_link(here: Here) -> str:
    """Return how tables name the link between devices that are in no lab."""
    if here.on_gpu:
        return "nccl"
    return "loopback"


# -- layers ----------------------------------------------------------------------------


def _refuse_arguments_of_layers(
    networks: Networks, precisions: Sequence[str], ranks: Sequence[int]
) -> None:
    """Raise UserError if `layers` cannot take these arguments.

    ``networks`` are names and batch sizes, and ``ranks`` are numbers of ranks.
    """
    # With numbers of ranks, everything is computed in fp32. Several precisions are refused
    # then, because the caller surely wants each of them. A single one is ignored without an
    # error, even if it is not the default.
    if ranks and len(precisions) > 1:
        raise UserError(
            "layers: leave out either the precisions or the numbers of ranks, because several "
            "ranks compute in fp32"
        )
    for name, _ in networks:
        networks_by_name.find(name)  # refuses an unknown name


def layers(
    here: Here,
    networks: Networks,
    budget: Budget,
    precisions: Sequence[str] = ("fp32",),
    ranks: Sequence[int] = (),
) -> Iterator[Point]:
    """Yield points that measure the layers of networks.

    A point is a measurement with tables of its own. Where the machine lacks something that
    a point needs, a refusal takes its place.

    Parameters
    ----------
    here : Here
        Where the session measures.
    networks : sequence of (str, int)
        Names and batch sizes.
    budget : Budget
        How long to measure each network.
    precisions : sequence of str, optional
        ``"fp32"``, ``"tf32"`` or ``"bf16"``. Several ranks always compute in fp32,
        whatever is given here.
    ranks : sequence of int, optional
        How many ranks measure at the same time, and share all cores. One rank runs in
        the session's process. Without this argument each network is measured alone,
        with the number of threads that torch chooses.

    Yields
    ------
    Point
        A point for each number of ranks, precision and network.

    Raises
    ------
    UserError
        If a network is unknown, or if several precisions are given together with numbers of
        ranks.
    """
    # Wrong arguments are refused before anything is measured.
    _refuse_arguments_of_layers(networks, precisions, ranks)
    # The count 0 means that no number of ranks is given, and that each network is measured
    # alone. Its tables are then named by the precision instead of the number of ranks.
    counts = ranks or [0]
    for count, precision, (name, batch) in product(counts, precisions, networks):
        iteration_s = needs.batch_s(name, batch, here.device, _cores_of_rank(count))
        start_s = needs.starting_s(name, here.device, count)
        estimate_s = needs.LAYERS.seconds(budget, iteration_s, start_s)
        # More ranks than cores take turns, and everything then takes longer.
        estimate_s *= _longer_on_shared_cores(here, count)
        measure: Callable[[], Any]
        if count > 1:
            settings = layer_times.LayersSettings({name: batch}, budget=budget)
            members = Ranks.of(count, here.device)
            # `Ranks.run` ends the ranks after a multiple of the expected duration. This
            # duration is generous, because ranks that share the cores may take much longer
            # than one rank.
            generous_s = max(LAYERS_S, estimate_s)
            measure = partial(members.run, layer_times.layers_job, settings, generous_s)
        else:
            # One rank has a thread on each core. Without a number of ranks, torch chooses
            # the number of threads.
            threads = machine.cores() if count else None
            measure = partial(
                layer_times.layer_tables,
                name,
                batch,
                device=here.device,
                precision=precision,
                budget=budget,
                threads=threads,
            )
        suffix = f"r{count}" if count else precision
        key = f"{name}-b{batch}-{suffix}"
        tables = ["layers", "samples"]
        point = Point("layers", key, measure, estimate_s, tables)
        # If the machine lacks what the point needs, `offer` returns a point in its place
        # whose measurement only raises `Unavailable`. A network that is measured alone, for
        # which `count` is 0, needs what one rank needs.
        yield needs.LAYERS.offer(point, here.on_gpu, max(1, count), network=name)


# -- collectives -----------------------------------------------------------------------

# On a machine with one device no ranks can exchange messages between devices. What can
# be measured there is labelled as a link of its own: two ranks on the processor, one
# rank that sends to itself, and two ranks whose gloo sends tensors that lie on a GPU.
# Each function takes the measured device and returns the ranks.
LINKS: dict[str, Callable[[str], Ranks]] = {
    "loopback-p2": lambda device: Ranks.of(2, "cpu"),
    "one-rank": lambda device: Ranks.of(1, device, "one-rank"),
    "gloo-cuda-p2": lambda device: Ranks.of(2, "cpu", "host", on_gpu=True),
}
"""The links that a point of collectives may name, and the ranks on each."""


def collectives(
    here: Here,
    budget: Budget,
    link: str = "",
    collectives: Sequence[str] = tuple(COLLECTIVES),
    sizes: Sequence[int] = (),
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (),
    delay: Sequence[float] = (0.0,),
    messages: int = 16,
    tries: int = 1,
    apart: float = 0.0,
) -> Iterator[Point]:
    """Yield points that measure collectives by size.

    A point is a measurement with tables of its own. It measures the sizes that its table
    still lacks. If there are rates, the ranks are in labs, which have links of a limited
    rate. Otherwise they are joined by ``link``, or, by default, as the devices are.

    Parameters
    ----------
    here : Here
        Where the session measures.
    budget : Budget
        How long to measure each size of each collective.
    link : str, optional
        What can be measured on a machine with one device: ``"loopback-p2"`` for two ranks
        on the processor, ``"one-rank"`` for a rank on the device that sends to itself, and
        ``"gloo-cuda-p2"`` for two ranks whose gloo sends tensors that lie on a GPU. An
        empty string stands for the link that joins the devices.
    collectives : sequence of str, optional
        Names of collectives.
    sizes : sequence of int, optional
        Sizes of messages in bytes. By default they reach 1 GiB between GPUs, and 64 MiB
        elsewhere.
    ranks : sequence of int, optional
        Numbers of ranks; by default 2 in a lab, and else those of `rank_counts`.
    rate : sequence of float, optional
        Rates of a lab's links in bit/s. Without rates there is no lab.
    delay : sequence of float, optional
        Delays of a lab's links in seconds.
    messages : int, optional
        How many messages are posted at once in a lab, or between GPUs. Elsewhere it is
        one.
    tries : int, optional
        How often a size is measured at most in a lab, if others disturb the machine.
        Elsewhere it is measured once.
    apart : float, optional
        By how many seconds each rank starts a message later than the rank before it.

    Yields
    ------
    Point
        A point for each table: one for ``link``, or one for each number of ranks, rate and
        delay.
    """
    in_lab = bool(rate)
    # NCCL sends between GPUs, and from a GPU to itself. In a lab, and over the other two
    # links, gloo does.
    on_nccl = here.on_gpu and link in ("", "one-rank") and not in_lab
    # Only a size that is measured in a lab is measured again if others disturb the machine.
    if not in_lab:
        tries = 1
    # gloo gets several messages at once only in a lab.
    if not (in_lab or on_nccl):
        messages = 1
    default_sizes = messages_alone.NCCL_SIZES if on_nccl else messages_alone.SIZES
    sizes = sizes or default_sizes
    # The constructor of the settings refuses wrong ones. It is called when a point is
    # measured, so that a mistake fails one point only, and not the list of all points.
    make_settings = partial(
        messages_alone.CollectivesSettings,
        budget=budget,
        messages_per_sample=messages,
        tries=tries,
        apart_s=apart,
    )
    # For each table the `Ranks` that measure it, which know their number and their link.
    ranks_by_table = _ranks_by_table(here, link, ranks, rate, delay)
    for name, members in ranks_by_table.items():
        # For each size, the expected seconds of a sample with all its messages.
        samples_s = [
            messages_alone.messages_at(size, messages)
            * _expected_message_s(size, members, on_nccl)
            for size in sizes
        ]
        estimate_s = needs.COLLECTIVES.seconds(
            budget, len(collectives), samples_s, on_nccl, members.count
        )
        path = table_path(here.out, "collectives", name)
        # This function reads from the table which sizes it lacks. An earlier session may have
        # been interrupted after some of them.
        to_measure = partial(
            _collectives_to_measure, path, collectives, sizes, members.count
        )
        # `run` calls the function only when the point is measured, and so measures what the
        # table lacks at that time. The session calls it as `left`, to see whether the point is
        # done.
        run = partial(_measure_lacking, to_measure, make_settings, members, estimate_s)
        point = Point("collectives", name, run, estimate_s, left=to_measure)
        # Ranks need a GPU each if they are joined by the link between the GPUs. A link
        # of `LINKS` needs one device only.
        ranks_with_gpus = 1 if link else members.count
        # If the machine lacks what the point needs, `offer` returns a point in its place
        # whose measurement only raises `Unavailable`.
        yield needs.COLLECTIVES.offer(point, here.on_gpu, ranks_with_gpus, in_lab)


def _expected_message_s(size: int, members: Ranks, on_nccl: bool) -> float:
    """Return the seconds that a message of ``size`` bytes is expected to take between ranks.

    The message is an all-reduce, which takes the longest of all collectives.
    """
    start_up_s = needs.MESSAGE_S
    bytes_per_s = needs.NCCL_BYTES_PER_S if on_nccl else needs.GLOO_BYTES_PER_S
    if members.lab_shape is not None:
        # A single rank sends nothing. It counts as two, so that `steps` is not 0.
        ranks = max(2, members.count)
        # A ring of P ranks takes 2(P-1) steps, and each one costs the delay of a link.
        steps = 2 * (ranks - 1)
        start_up_s += steps * one_way_delay_s(members.lab_shape.link)
        link_bytes_per_s = members.lab_shape.rate_bits_per_s / 8
        # In each step a link carries 1/P of the message, and so steps/P of it in all.
        bytes_per_s = min(bytes_per_s, link_bytes_per_s * ranks / steps)
    return start_up_s + size / bytes_per_s


def _ranks_by_table(
    here: Here,
    link: str,
    ranks: Sequence[int],
    rates_bits_per_s: Sequence[float],
    delays_s: Sequence[float],
) -> dict[str, Ranks]:
    """Return which ranks measure each table of collectives, by the name of the table.

    There are these tables:

    * One for ``link``, a key of `LINKS`, unless ``link`` is empty. Such a link has its own
      number of ranks, whatever ``ranks`` says.
    * One for each lab: for each combination of a number of ranks (by default 2), a rate
      and a delay.
    * With neither a link nor rates, one for each number of ranks (by default those of
      `rank_counts`) on the machine's own link.
    """
    ranks_by_table: dict[str, Ranks] = {}
    if link:
        # The number of ranks is fixed by the link, so `ranks` is not used.
        ranks_by_table[link] = LINKS[link](here.device)
    elif not rates_bits_per_s:
        for count in ranks or rank_counts(here):
            name = f"{_own_link(here)}-p{count}"
            ranks_by_table[name] = Ranks.of(count, here.device)
    # Without rates the product is empty, and there are no labs.
    for count, bits_per_s, delay_s in product(
        ranks or (2,), rates_bits_per_s, delays_s
    ):
        members, name = ranks_in_lab(count, bits_per_s, delay_s)
        ranks_by_table[name] = members
    return ranks_by_table


CollectivesBySizes = dict[tuple[int, ...], list[str]]
"""Names of collectives, by the sizes in bytes that are not measured yet."""


def _collectives_to_measure(
    path: Path, collectives: Sequence[str], sizes: Sequence[int], ranks: int
) -> CollectivesBySizes:
    """Return which collectives a table lacks, grouped by the sizes that it lacks of them.

    ``path`` is the table, which need not exist, and ``ranks`` the number of ranks. The result
    is empty if the table has all ``sizes`` of all ``collectives``.
    """
    rows = pd.DataFrame()
    if store.has_table(path):
        rows = store.load_table(path)
    to_measure: CollectivesBySizes = {}
    for collective in collectives:
        missing_sizes = messages_alone.missing_sizes(rows, collective, sizes, ranks)
        if missing_sizes:
            # Collectives that lack the same sizes are later measured by one launch.
            to_measure.setdefault(missing_sizes, []).append(collective)
    return to_measure


def _measure_lacking(
    to_measure: Callable[[], CollectivesBySizes],
    make_settings: Callable[..., messages_alone.CollectivesSettings],
    members: Ranks,
    estimate_s: float,
) -> pd.DataFrame:
    """Measure each collective at the sizes that its table lacks, and return the rows.

    ``to_measure`` reads the table, and returns the collectives by missing sizes.
    ``make_settings`` takes the names of collectives and their sizes. ``estimate_s`` is the
    expected duration of each launch of the ranks ``members``.
    """
    # At least one frame follows, because the session calls this only if sizes are missing.
    frames = []
    # A launch of ranks takes seconds. Collectives that lack the same sizes share one.
    for sizes, names in to_measure().items():
        settings = make_settings(names, sizes)
        tables = members.run(messages_alone.collectives_job, settings, estimate_s)
        frames.append(tables["collectives"])
    return pd.concat(frames, ignore_index=True)


# -- slowdown --------------------------------------------------------------------------


def slowdowns(
    here: Here,
    networks: Networks,
    ranks: Sequence[int] = (2,),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    budget: Budget = SLOWDOWN,
) -> Iterator[Point]:
    """Yield points that measure how much compute and messages slow each other down.

    A point is a measurement with tables of its own. Its messages have three sizes: the
    smallest and the largest of DDP's buckets, and one that is nearly all start-up latency.

    Parameters
    ----------
    here : Here
        Where the session measures.
    networks : sequence of (str, int)
        Names and batch sizes.
    ranks : sequence of int, optional
        Numbers of ranks.
    rate : sequence of float, optional
        Rates in bit/s of the links of a lab, an artificial network on this machine; 0 for
        no lab.
    delay : sequence of float, optional
        Delays of a lab's links in seconds. They have no effect without a lab.
    budget : Budget, optional
        How many rounds to measure, and for how long.

    Yields
    ------
    Point
        A point for each number of ranks, rate, delay and network.
    """
    for count, bits_per_s, delay_s, (name, batch) in product(
        ranks, rate, delay, networks
    ):
        members, place = place_of(here, count, bits_per_s, delay_s)
        iteration_s, message_s = _expected_iteration_s(here, members, name, batch)
        start_s = needs.starting_s(name, _device_of(here, members), count)
        estimate_s = needs.SLOWDOWNS.seconds(budget, iteration_s, message_s, start_s)
        # More ranks than cores take turns, and everything then takes longer.
        estimate_s *= _longer_on_shared_cores(here, count)
        run = partial(_measure_slowdown, members, name, batch, budget, estimate_s)
        point = Point("slowdown", f"{name}-b{batch}-{place}", run, estimate_s)
        # If the machine lacks what the point needs, `offer` returns a point in its place
        # whose measurement only raises `Unavailable`.
        yield needs.SLOWDOWNS.offer(
            point, here.on_gpu, count, in_lab=bool(bits_per_s), network=name
        )


def _cores_of_rank(count: int) -> int:
    """Return how many cores each of ``count`` ranks on this machine has, at least 1."""
    return max(1, machine.cores() // max(1, count))


def _device_of(here: Here, members: Ranks) -> str:
    """Return the device on which ranks compute: that of the session, but the CPU in a lab."""
    return here.device if members.lab_shape is None else "cpu"


def _expected_iteration_s(
    here: Here, members: Ranks, network: str, batch: int
) -> tuple[float, float]:
    """Return the seconds that an iteration is expected to take, in two parts.

    The parts are the compute of a batch, and a message with all gradients. If there are more
    ranks than cores, both have yet to be multiplied by `_longer_on_shared_cores`. If the size
    of the network is not known, the message counts as empty.
    """
    cores = _cores_of_rank(members.count)
    device = _device_of(here, members)
    compute_s = needs.batch_s(network, batch, device, cores)
    size = networks_by_name.size_of(network)
    gradient_bytes = size.gradient_bytes if size else 0
    message_s = _expected_message_s(gradient_bytes, members, on_nccl=device == "cuda")
    return compute_s, message_s


def expected_training_s(
    here: Here,
    case: TrainingCase,
    plans: int,
    repeats: int,
    iterations: int,
    accumulate: int,
) -> float:
    """Return how long the training of a case is expected to take, in seconds.

    Parameters
    ----------
    here : Here
        Where the session measures.
    case : TrainingCase
        The network, its batch size and its ranks.
    plans : int
        How many plans are trained under.
    repeats : int
        How many rounds there are.
    iterations : int
        How many iterations with exchange of gradients a plan has in each round.
    accumulate : int
        How many batches an iteration has.

    Returns
    -------
    float
        Seconds.
    """
    batch_s, message_s = _expected_iteration_s(
        here, case.members, case.network, case.batch
    )
    compute_s = accumulate * batch_s
    start_s = needs.starting_s(
        case.network, _device_of(here, case.members), case.members.count
    )
    estimate_s = needs.TRAININGS.seconds(
        compute_s, message_s, start_s, plans, repeats, iterations
    )
    # More ranks than cores take turns, and the iterations then take longer.
    return estimate_s * _longer_on_shared_cores(here, case.members.count)


def _longer_on_shared_cores(here: Here, count: int) -> float:
    """Return the factor by which ``count`` ranks compute longer because they share cores.

    On processors, more ranks than cores take turns. The result is at least 1, and 1 on GPUs.
    """
    if here.on_gpu:
        return 1.0
    return max(1.0, count / machine.cores())


def _measure_slowdown(
    members: Ranks, network: str, batch: int, budget: Budget, estimate_s: float
) -> Tables:
    """Run the job that measures the slowdown of a network, and return its tables.

    ``members`` are the ranks, which are expected to take ``estimate_s`` seconds.
    """
    # The sizes are in ascending order.
    bucket_bytes = bucket_sizes(network)
    smallest = bucket_bytes[0]
    largest = bucket_bytes[-1]
    # The sizes of DDP's messages lie between those of its smallest and largest bucket.
    # A message that is nearly all start-up latency shows what posting any message
    # costs. For a small network some of the three sizes are equal.
    start_up = min(SMALL_BYTES, smallest)
    settings = slowdown.SlowdownSettings(
        network=network,
        batch=batch,
        sizes=sorted({start_up, smallest, largest}),
        max_s=budget.max_s,
        min_repeats=budget.min_repeats,
    )
    return members.run(slowdown.slowdown_job, settings, estimate_s)


def bucket_sizes(network: str) -> list[int]:
    """Return the sizes of the buckets that DDP makes of a network by default.

    Parameters
    ----------
    network : str
        The name of a network.

    Returns
    -------
    list of int
        Bytes of each bucket, from the smallest to the largest.
    """
    # Only shapes are needed. On the device "meta" tensors have no memory and no values.
    with torch.device("meta"):
        model = networks_by_name.build(network)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Gradients become ready in the reverse order of definition.
    parameters.reverse()
    no_times_s = [0.0] * len(parameters)
    sizes = [p.nbytes for p in parameters]
    # Buckets depend on sizes and types alone, not on times. The plan "ddp" groups tensors
    # as DDP fills its buckets.
    work = replace(
        Workload.from_arrays(forward_s=0.0, backward_s=no_times_s, n_bytes=sizes),
        dtype=tuple(dtype_name(p) for p in parameters),
    )
    return sorted(make_plan("ddp", work).group_bytes(work).tolist())


# -- copies ----------------------------------------------------------------------------


def memory_copies(
    here: Here, budget: Budget, sizes: Sequence[int] = copies.SIZES
) -> Iterator[Point]:
    """Yield the point that measures copies of memory.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    here : Here
        Where the session measures.
    budget : Budget
        How long to measure each size of each kind of copy.
    sizes : sequence of int, optional
        Bytes of the copies.

    Yields
    ------
    Point
        The only point.
    """
    # `Needs.offer` is not asked, because copies need no GPU, package or network besides
    # the device itself. `measure_copies` refuses sizes for which memory is lacking.
    measure = partial(copies.measure_copies, here.device, sizes, budget)
    estimate_s = needs.MEMORY_COPIES.seconds(budget, here.device, sizes)
    yield Point("copies", here.device, measure, estimate_s)


# -- training --------------------------------------------------------------------------


class TrainingCase(NamedTuple):
    """A network that is to be trained on the ranks of one place.

    Attributes
    ----------
    network, batch : str, int
        The name of the network and its batch size.
    members : Ranks
        The ranks.
    place : str
        The name of the place in tables, such as ``"p2-1gbit"``, which `place_of` gives.
    in_lab : bool
        Whether the ranks are in a lab.
    """

    network: str
    batch: int
    members: Ranks
    place: str
    in_lab: bool


def training_cases(
    here: Here,
    networks: Networks,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
) -> Iterator[TrainingCase]:
    """Yield each network with each number of ranks and each link to train it on.

    Parameters
    ----------
    here : Here
        Where the session measures.
    networks : sequence of (str, int)
        Names and batch sizes.
    ranks : sequence of int, optional
        Numbers of ranks, by default those of `rank_counts`.
    rate : sequence of float, optional
        Rates in bit/s of the links of a lab, an artificial network on this machine; 0 for
        no lab.
    delay : sequence of float, optional
        Delays of a lab's links in seconds.

    Yields
    ------
    TrainingCase
        A case for each number of ranks, rate, delay and network.
    """
    counts = ranks or rank_counts(here)
    for count, bits_per_s, delay_s, (name, batch) in product(
        counts, rate, delay, networks
    ):
        members, place = place_of(here, count, bits_per_s, delay_s)
        yield TrainingCase(name, batch, members, place, in_lab=bool(bits_per_s))


def training_point(
    here: Here,
    case: TrainingCase,
    key: str,
    make_settings: Callable[[], training.TrainingSettings],
    estimate_s: float,
    predicted: Any = None,
) -> Point:
    """Return the point that trains the network of a case on the ranks of the case.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    here : Here
        Where the session measures.
    case : TrainingCase
        The network, its ranks and the name of their place.
    key : str
        The name of the point's tables.
    make_settings : callable
        Returns the settings when the point is measured. They may depend on tables that
        other points of the session leave.
    estimate_s : float
        How long the point is expected to take, in seconds.
    predicted : optional
        The value for `Point.predicted`: what a model is to predict before the point is
        measured. With None nothing is predicted.

    Returns
    -------
    Point
    """
    point = Point(
        "training",
        key,
        partial(_train, case.members, make_settings, estimate_s),
        estimate_s,
        training.training_job.tables,
        predicted=predicted,
    )
    # If the machine lacks what the point needs, `offer` returns a point in its place whose
    # measurement only raises `Unavailable`.
    return needs.TRAININGS.offer(
        point,
        here.on_gpu,
        case.members.count,
        in_lab=case.in_lab,
        network=case.network,
    )


def _train(
    members: Ranks,
    make_settings: Callable[[], training.TrainingSettings],
    estimate_s: float,
) -> Tables:
    """Make the settings, run the job that trains, and return its tables.

    A point, which is a measurement with tables of its own, calls this when it is measured.
    The settings are made only then, because they may depend on tables that other points
    leave. ``members`` are the ranks, which are expected to take ``estimate_s`` seconds.
    """
    settings = make_settings()
    return members.run(training.training_job, settings, estimate_s)


def training_by_own_rule(
    here: Here, case: TrainingCase, repeats: int, iterations: int, accumulate: int = 1
) -> Point:
    """Return the point that trains with the buckets that DDP chooses itself.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    here : Here
        Where the session measures.
    case : TrainingCase
        The network, its ranks and the name of their place.
    repeats : int
        How many rounds there are.
    iterations : int
        How many iterations a round has.
    accumulate : int, optional
        How many batches an iteration has.

    Returns
    -------
    Point
    """
    key = f"{case.network}-b{case.batch}-p{case.members.count}"
    if case.in_lab:
        # The place of a lab begins with the number of ranks, as in "p2-1gbit".
        key = f"{case.network}-b{case.batch}-{case.place}"
    # An empty list of bucket sizes leaves the buckets to DDP.
    own_plan: Mapping[str, Sequence[int]] = {training.OWN_PLAN: []}
    make_settings = partial(
        training.TrainingSettings,
        network=case.network,
        batch=case.batch,
        plans=own_plan,
        repeats=repeats,
        iterations=iterations,
        accumulate=accumulate,
    )
    estimate_s = expected_training_s(
        here, case, len(own_plan), repeats, iterations, accumulate
    )
    return training_point(here, case, key, make_settings, estimate_s)


def trainings(
    here: Here,
    networks: Networks,
    repeats: int,
    iterations: int,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    accumulate: int = 1,
) -> Iterator[Point]:
    """Yield points that train networks with the buckets that DDP chooses itself.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    here : Here
        Where the session measures.
    networks : sequence of (str, int)
        Names and batch sizes.
    repeats : int
        How many rounds there are.
    iterations : int
        How many iterations a round has.
    ranks : sequence of int, optional
        Numbers of ranks, by default those of `rank_counts`.
    rate : sequence of float, optional
        Rates in bit/s of the links of a lab, an artificial network on this machine; 0 for
        no lab.
    delay : sequence of float, optional
        Delays of a lab's links in seconds.
    accumulate : int, optional
        How many batches an iteration has.

    Yields
    ------
    Point
        A point for each number of ranks, rate, delay and network.
    """
    for case in training_cases(here, networks, ranks, rate, delay):
        yield training_by_own_rule(here, case, repeats, iterations, accumulate)


# -- the points of a session -----------------------------------------------------------

PARTS = ("layers", "collectives", "slowdown", "copies", "training")
"""Parts that can be asked for by name; "quick" is all of them."""
DEFAULT_NETWORKS: Networks = (("resnet50", 4),)
# How long ``ddlkit measure`` takes for each network, message size and copy: a few
# minutes for all parts together.
_LAYERS = Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=2.0)
_MESSAGES = Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=0.3)
_COPIES = Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=0.3)


def points(
    *,
    out: Path,
    session: int,
    part: str,
    device: str = "",
    networks: Networks = DEFAULT_NETWORKS,
    ranks: int = 0,
    rate_bits_per_s: float = 0.0,
    delay_s: float = 0.0,
    sizes: Sequence[int] = (),
) -> PointList:
    """Return the points of one of `PARTS`, or of all parts.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    out : Path
        The directory of the session, in which points look for what is measured already.
    session : int
        The number of the session, by which its own tables are named.
    part : str
        One of `PARTS`, or ``"quick"`` for all of them.
    device : str, optional
        ``"cpu"`` or ``"cuda"``. By default it is CUDA where torch sees a GPU.
    networks : sequence of (str, int), optional
        Names and batch sizes, for layers, slowdown and training.
    ranks : int, optional
        How many ranks exchange messages. By default there are two, or one on each GPU.
    rate_bits_per_s : float, optional
        The rate of a lab's links between network namespaces (Linux, root); 0 for no
        lab, but loopback or NCCL.
    delay_s : float, optional
        The delay of each of these links in seconds.
    sizes : sequence of int, optional
        Sizes of messages in bytes, for collectives. By default they reach 1 GiB between
        GPUs, and 64 MiB elsewhere.

    Returns
    -------
    PointList
        The points, all in its body: none has to be measured before or after the others.

    Raises
    ------
    UserError
        If a network is unknown or needs a package that is not installed.
    """
    if not device:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = Here(device, session, out)
    # These lists are empty if the caller gave no number of ranks and no rate. `collectives`
    # takes empty lists for its own defaults. `slowdowns` and `trainings` are given the
    # defaults here: the numbers of `rank_counts`, and the rate 0 for no lab.
    counts = [ranks] if ranks else []
    rates = [rate_bits_per_s] if rate_bits_per_s else []
    counts_or_default = counts or rank_counts(here)
    rates_or_no_lab = rates or [0.0]
    wanted = PARTS if part == "quick" else (part,)
    # Only these parts build networks. A network that cannot be built is refused before
    # anything is measured.
    if {*wanted} & {"layers", "slowdown", "training"}:
        for name, _ in networks:
            networks_by_name.require(name)
    body: list[Point] = []
    if "collectives" in wanted:
        body += collectives(
            here, _MESSAGES, sizes=sizes, ranks=counts, rate=rates, delay=[delay_s]
        )
    if "layers" in wanted:
        # One rank measures alone, with all cores.
        body += layers(here, networks, _LAYERS, ranks=[1])
    if "copies" in wanted:
        body += memory_copies(here, _COPIES)
    if "slowdown" in wanted:
        body += slowdowns(here, networks, counts_or_default, rates_or_no_lab, [delay_s])
    if "training" in wanted:
        # Two rounds of three iterations keep all parts together within a few minutes.
        body += trainings(
            here,
            networks,
            repeats=2,
            iterations=3,
            ranks=counts_or_default,
            rate=rates_or_no_lab,
            delay=[delay_s],
        )
    return PointList(body)
