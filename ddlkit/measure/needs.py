"""What each kind of point needs of a machine, and how long it is expected to take.

`NEEDS` has a row for each kind that `ddlkit.measure.parts` makes. A session asks the row
whether this machine can measure a point at all, and keeps to its time by the expected
durations. These only have to be of the right order: they decide which points a budget
still has time for, and when a point that does not end is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec

import torch

from ddlkit.jobs.clock import Budget
from ddlkit.measure import networks, training
from ddlkit.measure.session import Point, Tables, Unavailable

LAUNCH_S = 10.0
"""How long ranks are expected to take to start and to build a network, in seconds.

Ranks with a GPU take as long without a network."""
GLOO_LAUNCH_S = 2.0
"""How long ranks without a GPU are expected to take to start, in seconds.

Two ranks on two cores of a virtual machine took 1.3 to 6 s."""
SINGLE_LAUNCH_S = 0.3
"""How long a single rank without a GPU is expected to take to start, in seconds."""
MESSAGE_S = 1e-3
"""How long a message of no bytes is expected to take within a machine, in seconds.

That includes what surrounds it: the ranks meet, and the buffers are filled again."""
GLOO_BYTES_PER_S = 5e8
"""The rate of messages that gloo is expected to send within a machine, in bytes/s.

Two cores of a virtual machine sent 0.8 to 1.5 GB/s of 64 MiB messages. Less is expected, so that
a busy machine is not given up.
"""
NCCL_BYTES_PER_S = 1e10
"""The rate of messages that NCCL is expected to send within a machine, in bytes/s.

GPUs that PCI Express joins reach about this rate, and NVLink is faster."""
BUILD_S = 2.0
"""Seconds to build a network, move it to the device and count its FLOPs."""
LEAST_BUILD_S = 0.2
"""Seconds to build the smallest network on a processor."""
BUILD_BYTES_PER_S = 3e8
"""The bytes of weights that a processor is expected to draw and to set up in a second."""
POOL_BYTES_PER_S = 1.5e9
"""The rate at which the pools are expected to be filled, from and to which copies are timed."""
WARMTH = 1.2
"""Repeats are expected to take this many times the ``max_s`` of a budget, because they also
warm up."""
LAB_ITERATION_S = 2.0
"""Seconds that one iteration is expected to take in a lab."""
CORE_FLOPS_PER_S = 1e11
"""The FLOPs per second that a core of a processor is expected to compute in training.

A core of a virtual machine trained ResNet-50 and VGG-16 at 0.8e11 to 1.0e11 FLOP/s."""
GPU_FLOPS_PER_S = 2e13
"""The FLOPs per second that a GPU is expected to compute in training.

An H200 trained ResNet-50 in fp32 at 3e13 FLOP/s. Less is expected of other GPUs."""
PASSES = 3
"""An iteration has this many times the FLOPs of its forward pass, because backward has about
twice as many as forward."""
LEAST_BATCH_S = 0.01
"""Seconds that forward, backward and update of the smallest batch are expected to take."""
UNKNOWN_BATCH_S = 1.0
"""Seconds that a batch is expected to take if its FLOPs cannot be counted."""
ITERATIONS_BEFORE_SLOWDOWN = 15
"""How many iterations take as long as all that precedes the first round of slowdowns.

The model is wrapped in DDP twice and warmed up, and messages are tried."""
ITERATIONS_OF_SLOWDOWN = 15
"""How many iterations take as long as a round of slowdowns, without slow messages."""
MESSAGES_OF_SLOWDOWN = 3
"""How many messages of all gradients a round of slowdowns sends at least, about."""
COPY_KINDS = {"cpu": 1, "cuda": 5}
"""How many kinds of copies a device has: a GPU has those to and from pinned and pageable
memory of the host, and those within itself."""

Settings = ParamSpec("Settings")


class Gpus(Enum):
    """How many GPUs a point needs, in the words of the table in the documentation."""

    NONE = "the processor"
    AS_SESSION = "the processor or a GPU"
    ONE = "a GPU"
    EACH_RANK = "the processor, or a GPU for each rank"
    """In a lab, ranks use no GPU, because the messages of a lab are those of gloo."""


class Lab(Enum):
    """Whether a point needs a lab, and thus Linux, root and iproute2."""

    NO = "no"
    AT_A_RATE = "with a rate"
    """Only if the settings of the point name the rate of a lab's links."""
    YES = "yes"


@dataclass(frozen=True)
class Needs(Generic[Settings]):
    """What a kind of point needs, and how long it takes.

    A point is a measurement with tables of its own.

    Attributes
    ----------
    seconds : callable
        Takes settings of a point, and returns its expected duration in seconds.
    why : str
        What the duration consists of, as a sentence.
    gpus : Gpus
        On which device the point is measured, and how many GPUs it needs.
    ranks : str
        How many ranks there are, in words.
    lab : Lab
        Whether a lab is needed, in which ranks are joined by links of a limited rate.
    packages : mapping of str to str
        What else must be installed: the package by the module that is imported.
    needs_network : bool
        Whether a network is built, which may need a package of its own.
    memory : str
        What takes the memory, in words. How much a network takes is known only once it
        is trained, so no point is refused for it. A point that runs out of memory is
        recorded as such, and the session goes on.
    """

    seconds: Callable[Settings, float]
    why: str
    gpus: Gpus = Gpus.AS_SESSION
    ranks: str = "1"
    lab: Lab = Lab.NO
    packages: Mapping[str, str] | None = None
    needs_network: bool = False
    memory: str = "little"

    def is_in_lab(self, rates_bits_per_s: Sequence[float] = ()) -> bool:
        """Return whether a point needs a lab.

        Parameters
        ----------
        rates_bits_per_s : sequence of float, optional
            The rates of a lab's links for which the settings of the point ask. A rate of
            0 means outside a lab.
        """
        if self.lab is Lab.AT_A_RATE:
            return any(rates_bits_per_s)
        return self.lab is Lab.YES

    def lacking(
        self, on_gpu: bool, ranks: int = 1, in_lab: bool = False, network: str = ""
    ) -> str:
        """Return which GPUs or packages this machine lacks for a point.

        Whether a lab can be made here is asked elsewhere, by `ddlkit.lab.network`.

        Parameters
        ----------
        on_gpu : bool
            Whether the session measures GPUs. A session of the processor has no GPU.
        ranks : int, optional
            How many ranks the point has.
        in_lab : bool, optional
            Whether the ranks are in a lab.
        network : str, optional
            The name of the network that is built, if there is one.

        Returns
        -------
        str
            What is needed and lacking, as part of a sentence. It is empty if the machine
            has all that the point needs.

        Raises
        ------
        UserError
            If the network is unknown.
        """
        # How many GPUs the point needs. A point that is measured on the session's own
        # device, or on the processor, lacks none.
        n_needed = 0
        if self.gpus is Gpus.ONE:
            n_needed = 1
        # Over a lab's links, gloo sends messages between processors, also in a session of
        # GPUs.
        elif self.gpus is Gpus.EACH_RANK and on_gpu and not in_lab:
            n_needed = ranks
        n_present = torch.cuda.device_count() if on_gpu else 0
        if n_present < n_needed:
            needed = "a GPU" if n_needed == 1 else f"{n_needed} GPUs"
            return f"needs {needed}, and there are {n_present} to measure here"
        for module, package in (self.packages or {}).items():
            if find_spec(module) is None:
                return f"needs {package}, which is not installed: pip install {package}"
        if network:
            # The package is "" if the network needs none besides torch.
            package = networks.find(network).package
            if package and find_spec(package) is None:
                return f"{network} needs {package}; {networks.INSTALL_IT}"
        return ""

    def offer(
        self,
        point: Point,
        on_gpu: bool,
        ranks: int = 1,
        in_lab: bool = False,
        network: str = "",
    ) -> Point:
        """Return a point, or a refusal in its place if the machine lacks something.

        Parameters
        ----------
        point : Point
            The point.
        on_gpu : bool
            Whether the session measures GPUs.
        ranks : int, optional
            How many ranks the point has.
        in_lab : bool, optional
            Whether the ranks are in a lab.
        network : str, optional
            The name of the network that is built, if there is one.

        Returns
        -------
        Point
            The point itself if the machine has all that it needs. Otherwise a point that
            is expected to take no time, whose note says why, and whose measurement
            raises `Unavailable`.

        Raises
        ------
        UserError
            If the network is unknown.
        """
        reason = self.lacking(on_gpu, ranks, in_lab, network)
        if not reason:
            return point

        def refuse() -> Tables:
            raise Unavailable(reason)

        return replace(
            point, measure=refuse, estimate_s=0.0, note=f"will be skipped: {reason}"
        )


# -- how long each kind takes ----------------------------------------------------------


def batch_s(network: str, batch: int, device: str, cores: int) -> float:
    """Return how long forward, backward and update are expected to take, in seconds.

    Parameters
    ----------
    network : str
        The name of the network.
    batch : int
        The number of samples.
    device : str
        ``"cpu"`` or ``"cuda"``.
    cores : int
        How many cores compute, if the device is a processor.

    Returns
    -------
    float
        Seconds.
    """
    size = networks.size_of(network)
    if size is None:
        return UNKNOWN_BATCH_S
    flops_per_s = GPU_FLOPS_PER_S
    if device == "cpu":
        flops_per_s = cores * CORE_FLOPS_PER_S
    return max(LEAST_BATCH_S, PASSES * batch * size.flops_of_sample / flops_per_s)


def timing_s(budget: Budget, action_s: float) -> float:
    """Return how long an action is expected to be timed, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure.
    action_s : float
        The expected seconds of the action.

    Returns
    -------
    float
        Seconds, with those of the warm-up.
    """
    # The fewest repeats may take longer than the budget, and the most may take less.
    fewest_s = budget.min_repeats * action_s
    most_s = budget.max_repeats * action_s
    return budget.warmup * action_s + min(max(budget.max_s, fewest_s), most_s)


def starting_s(network: str, device: str, ranks: int) -> float:
    """Return how long ranks are expected to take to start and to build a network, in seconds.

    Parameters
    ----------
    network : str
        The name of the network.
    device : str
        ``"cpu"`` or ``"cuda"``.
    ranks : int
        The number of ranks. A single rank is the process of the session itself.

    Returns
    -------
    float
        Seconds.
    """
    if device == "cuda":
        launch_s = LAUNCH_S if ranks > 1 else 0.0
        return launch_s + BUILD_S
    launch_s = GLOO_LAUNCH_S if ranks > 1 else 0.0
    size = networks.size_of(network)
    if size is None:
        return launch_s + BUILD_S
    return launch_s + LEAST_BUILD_S + size.gradient_bytes / BUILD_BYTES_PER_S


def layers_s(budget: Budget, iteration_s: float, start_s: float) -> float:
    """Return how long the layers of a network are expected to take, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure.
    iteration_s : float
        The expected seconds of an iteration.
    start_s : float
        The expected seconds until the network is built.

    Returns
    -------
    float
        Seconds.
    """
    # Each repeat has an iteration with hooks and one without. Before the repeats, a first
    # iteration shows the order of the layers and counts their FLOPs, which slows it down. It
    # is expected to take as long as two.
    repeat_s = 2 * iteration_s
    first_s = 2 * iteration_s
    return start_s + first_s + timing_s(budget, repeat_s)


def collectives_s(
    budget: Budget,
    collectives: int,
    samples_s: Sequence[float],
    on_gpu: bool,
    ranks: int = 2,
) -> float:
    """Return how long collectives of several sizes are expected to take, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure each size of each collective.
    collectives : int
        How many collectives there are.
    samples_s : sequence of float
        For each size, the seconds that a sample of it is expected to take.
    on_gpu : bool
        Whether the messages are sent between GPUs.
    ranks : int, optional
        The number of ranks.

    Returns
    -------
    float
        Seconds.
    """
    sizes_s = []
    for sample_s in samples_s:
        # Small messages reach the largest number of repeats before the budget is over. Large
        # messages take longer than the budget, because there is a least number of repeats.
        fitting = budget.max_s / sample_s
        repeats = min(max(fitting, budget.min_repeats), budget.max_repeats)
        sizes_s.append((budget.warmup + repeats) * sample_s)
    # The ranks start once, and then measure each size of each collective.
    launch_s = SINGLE_LAUNCH_S if ranks == 1 else GLOO_LAUNCH_S
    if on_gpu:
        launch_s = LAUNCH_S
    return launch_s + collectives * sum(sizes_s)


def slowdowns_s(
    budget: Budget, iteration_s: float, message_s: float, start_s: float
) -> float:
    """Return how long the slowdown of a network is expected to take, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure.
    iteration_s : float
        The expected seconds of an iteration without messages.
    message_s : float
        The expected seconds of a message with all gradients.
    start_s : float
        The expected seconds until the ranks have built the network.

    Returns
    -------
    float
        Seconds.
    """
    messages_s = MESSAGES_OF_SLOWDOWN * message_s
    # The messages that are tried at the start are about as many as those of a round.
    warm_up_s = ITERATIONS_BEFORE_SLOWDOWN * iteration_s + messages_s
    round_s = ITERATIONS_OF_SLOWDOWN * iteration_s + messages_s
    rounds_s = max(budget.max_s, budget.min_repeats * round_s)
    return start_s + warm_up_s + rounds_s


def copies_s(budget: Budget, device: str, sizes: Sequence[int]) -> float:
    """Return how long copies are expected to take, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure each size of each kind of copy.
    device : str
        ``"cpu"`` or ``"cuda"``. A GPU has more kinds of copies.
    sizes : sequence of int
        The bytes of the copies.

    Returns
    -------
    float
        Seconds.
    """
    # The two pools are the memory from and to which all copies go. They are as large as the
    # largest copy, and are filled once, before the first size of the first kind.
    fill_s = 2 * max(sizes) / POOL_BYTES_PER_S
    return fill_s + COPY_KINDS[device] * len(sizes) * budget.max_s


def trainings_s(
    compute_s: float,
    message_s: float,
    start_s: float,
    plans: int,
    repeats: int,
    iterations: int,
) -> float:
    """Return how long training under several plans is expected to take, in seconds.

    Parameters
    ----------
    compute_s : float
        The expected seconds of an iteration without exchange of gradients.
    message_s : float
        The expected seconds of a message with all gradients.
    start_s : float
        The expected seconds until the ranks have built the network.
    plans : int
        How many plans are trained under.
    repeats : int
        How many rounds there are.
    iterations : int
        How many iterations with exchange of gradients a plan has in each round.

    Returns
    -------
    float
        Seconds.
    """
    # Messages are expected to overlap with little of the compute.
    iteration_s = compute_s + message_s
    # In a round, as many iterations without exchange precede those that exchange gradients,
    # and as many follow them. Each plan warms up once, before its first round.
    round_s = iterations * (iteration_s + 2 * compute_s)
    plan_s = training.WARMUP * iteration_s + repeats * round_s
    return start_s + plans * plan_s


# -- the table -------------------------------------------------------------------------

_OF_NETWORK = "the network, its gradients and momentum, and its activations"

LAYERS = Needs(
    layers_s,
    "The network is built in a time that follows from its size. Repeats take the budget, or "
    "as long as the fewest iterations, whose time follows from the FLOPs of the network. "
    f"Several ranks start in {GLOO_LAUNCH_S:g} s, and in {LAUNCH_S:g} s on GPUs.",
    gpus=Gpus.EACH_RANK,
    ranks="1 or more",
    needs_network=True,
    memory=_OF_NETWORK,
)
COLLECTIVES = Needs(
    collectives_s,
    f"Ranks start in {GLOO_LAUNCH_S:g} s, and in {LAUNCH_S:g} s on GPUs. Each size of each "
    "collective has a budget of its own. Small messages need only a part of it, and large "
    "messages through gloo exceed it.",
    gpus=Gpus.EACH_RANK,
    ranks="1 or more",
    lab=Lab.AT_A_RATE,
    memory="five times the largest message, on each rank",
)
SLOWDOWNS = Needs(
    slowdowns_s,
    f"Ranks start in {GLOO_LAUNCH_S:g} s, and in {LAUNCH_S:g} s on GPUs, and build the "
    "network. Before the first round, the model is wrapped in DDP twice and messages are tried. The "
    "rounds take the budget, or as long as the fewest rounds, whose time follows from the FLOPs and the "
    "gradients of the network.",
    gpus=Gpus.EACH_RANK,
    ranks="2 or more",
    lab=Lab.AT_A_RATE,
    needs_network=True,
    memory=f"{_OF_NETWORK}, and buckets for all gradients twice",
)
MEMORY_COPIES = Needs(
    copies_s,
    f"Two pools are filled at {POOL_BYTES_PER_S / 1e9:g} GB/s. Each size of each kind of copy "
    f"has a budget of its own. A GPU has {COPY_KINDS['cuda']} kinds.",
    memory="two pools as large as the largest copy, each at most an eighth of what the "
    "host has free; on a GPU two more",
)
TRAININGS = Needs(
    trainings_s,
    f"Ranks start in {GLOO_LAUNCH_S:g} s, and in {LAUNCH_S:g} s on GPUs, and build the "
    "network. Each round has the iterations and twice as many without exchange. Their time "
    "follows from the FLOPs and the gradients of the network.",
    gpus=Gpus.EACH_RANK,
    ranks="2 or more",
    lab=Lab.AT_A_RATE,
    needs_network=True,
    memory=f"{_OF_NETWORK}, for each plan",
)

NEEDS: dict[str, Needs[Any]] = {
    "layers": LAYERS,
    "collectives": COLLECTIVES,
    "slowdowns": SLOWDOWNS,
    "memory_copies": MEMORY_COPIES,
    "trainings": TRAININGS,
}
"""What each kind of point needs, by the name of the function of `parts` that makes it."""
