"""Fully sharded data-parallel training (ZeRO-3), as FSDP2 of PyTorch does it.

Each rank keeps a shard of the parameters. The parameters of a unit are gathered before
the unit computes: before its forward and, if they were resharded after forward, again
before its backward. After its backward, its gradients are scattered.

Unit 0 is the root. It has the parameters that no other unit has, is gathered first, and
stays whole. Its gradients leave when the backward pass has ended. A unit that takes the
input of the network sends its gradients after the root.

One unit is gathered ahead of the one that computes. If a processor is ahead of its GPU,
forward of FSDP2 may gather two units ahead, and it may gather the last unit anew while
that unit still computes. The model leaves this out. It does not cover mixed sharding
(HSDP), activation checkpointing and tensor parallelism either.

References
----------
S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, NoReturn

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import LEVEL, interval
from ddlkit.core.iteration import Prediction
from ddlkit.core.units import is_small_number, parse_bytes
from ddlkit.core.workload import Floats, LayerProfile
from ddlkit.model.calibration import Communication

GATHER = "all_gather"
"""The collective that makes the parameters of a unit whole."""

SCATTER = "reduce_scatter"
"""The collective that sums the gradients of a unit and leaves each rank its shard."""

SENT = (GATHER, SCATTER)
"""The collectives of sharded training."""

ELEMENT_BYTES = 4
"""Bytes of a parameter and of a gradient."""

SIZE = "size:"
"""The beginning of a specification of units by their size."""

COMPUTE = "compute"
"""A step in which a rank computes."""

POST = "post"
"""A step in which a rank starts a message, and goes on."""

WAIT = "wait"
"""A step in which a rank waits until a message has ended."""

INTERVAL_HOLDS = (
    "the scatter and drift of messages, the uncertainty of their fitted cost, and the errors "
    "of message times that were predicted in ddlkit's own experiments; not included: "
    "contention with compute and the drift of compute"
)
"""What intervals of sharded training hold, in words: too little for intervals of 95%.

See `ddlkit.model.predictor.interval_includes`, which says why they are not widened.
"""

COMMON_ERROR = 0.023
"""The error that all messages of an iteration have in common, beyond noise.

This is the standard deviation of the logarithm of measured over predicted time. It was
estimated from 84 replays between two ranks.
"""

ROOT = 0
"""The unit with the parameters that no other unit has."""


class Step(NamedTuple):
    """What a rank does next.

    Attributes
    ----------
    action : {"compute", "post", "wait"}
        What the rank does.
    operand : float
        Seconds to compute, or the number of the message to post or to wait for.
    """

    action: str
    operand: float


class Message(NamedTuple):
    """A collective of the parameters or the gradients of a unit.

    Attributes
    ----------
    collective : {"all_gather", "reduce_scatter"}
        The name of the collective.
    unit : int
        The number of the unit.
    bytes : int
        The size of the collective, as `ddlkit.core.collective` defines it.
    """

    collective: str
    unit: int
    bytes: int


class Program(NamedTuple):
    """What every rank does in an iteration, in this order.

    Attributes
    ----------
    steps : tuple of Step
        The actions of a rank.
    messages : tuple of Message
        The messages, in the order in which they are posted. Steps refer to a message by
        its index in this tuple.
    """

    steps: tuple[Step, ...]
    messages: tuple[Message, ...]

    @property
    def compute_s(self) -> float:
        """Return the seconds of an iteration without communication."""
        return sum(step.operand for step in self.steps if step.action == COMPUTE)

    def play(self, message_s: Floats) -> Floats:
        """Return the time of an iteration whose messages are sent one after the other.

        Parameters
        ----------
        message_s : ndarray, shape (..., M)
            The time of each of the M messages, in seconds. Leading axes are scenarios.

        Returns
        -------
        ndarray, shape (...)
            The time of the iteration in seconds.
        """
        scenarios = message_s.shape[:-1]
        # The clock of the rank. A message that is under way does not advance it.
        now_s = np.zeros(scenarios)
        # When the link has sent all messages that were posted so far.
        link_free_s = np.zeros(scenarios)
        # When each posted message ends, by its number.
        ends_s: dict[int, Floats] = {}
        for action, operand in self.steps:
            if action == COMPUTE:
                now_s = now_s + operand
            elif action == WAIT:
                now_s = np.maximum(now_s, ends_s[int(operand)])
            else:
                # The action is POST. The message starts now, or when all messages before it
                # have ended.
                message = int(operand)
                starts_s = np.maximum(now_s, link_free_s)
                link_free_s = starts_s + message_s[..., message]
                ends_s[message] = link_free_s
        return now_s


@dataclass
class _ProgramBuilder:
    """A program that grows step by step.

    Attributes
    ----------
    unit_bytes : tuple of int
        The size of each unit.
    blocking : bool
        Whether a message that is posted is awaited at once.
    steps, messages : list
        The program so far.
    gathers : dict of int to int
        For each unit that is whole or is being gathered, the number of its gather.
    last_scatter : int, optional
        The number of the last scatter, None before the first one.
    """

    unit_bytes: tuple[int, ...]
    blocking: bool
    steps: list[Step] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    gathers: dict[int, int] = field(default_factory=dict)
    last_scatter: int | None = None

    def compute(self, seconds: float) -> None:
        """Let the rank compute."""
        self.steps.append(Step(COMPUTE, seconds))

    def wait(self, message: int) -> None:
        """Let the rank wait until a message, given by its number, has ended."""
        self.steps.append(Step(WAIT, message))

    def post(self, collective: str, unit: int) -> int:
        """Start a message and return its number."""
        message = len(self.messages)
        self.messages.append(Message(collective, unit, self.unit_bytes[unit]))
        self.steps.append(Step(POST, message))
        if self.blocking:
            self.wait(message)
        return message

    def gather(self, unit: int) -> None:
        """Start to gather a unit, unless it is whole or under way."""
        if unit not in self.gathers:
            self.gathers[unit] = self.post(GATHER, unit)

    def wait_for_unit(self, unit: int) -> None:
        """Wait until a unit is whole, and gather it if nobody has asked for it yet."""
        self.gather(unit)
        self.wait(self.gathers[unit])

    def gather_next(self, later_units: Sequence[int]) -> None:
        """Start to gather the first of ``later_units`` that is not gathered yet."""
        for unit in later_units:
            if unit not in self.gathers:
                self.gather(unit)
                break

    def reshard(self, unit: int) -> None:
        """Give up the gathered parameters of a unit, so that it must be gathered anew."""
        del self.gathers[unit]

    def scatter(self, unit: int) -> None:
        """Start to scatter the gradients of a unit, after the scatter before it."""
        # FSDP2 has a single buffer for the gradients that are being scattered.
        self.wait_for_scatter()
        self.last_scatter = self.post(SCATTER, unit)

    def wait_for_scatter(self) -> None:
        """Wait for the last scatter, if there was one."""
        if self.last_scatter is not None:
            self.wait(self.last_scatter)


class Run(NamedTuple):
    """Neighbouring tensors of one unit.

    Attributes
    ----------
    unit : int
        The number of the unit.
    forward_s, backward_s : float
        Seconds to compute all these tensors in forward and in backward.
    """

    unit: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Sharding:
    """A network that is divided into U units, the root first.

    Attributes
    ----------
    modules : tuple of tuple of str, length U
        The modules whose parameters each unit has; none for the root.
    bytes : tuple of int, length U
        The size of each unit; 0 for a root without parameters.
    runs : tuple of Run
        What is computed, in forward order. A unit has several runs if tensors of other
        units lie between its own.
    update_s : float
        Seconds of the update.

    Examples
    --------
    Two layers with passes of 3 s; a gather takes 1 s, a scatter 2 s:

    >>> one = np.ones(2, dtype=int)
    >>> names = ("a", "b")
    >>> layers = LayerProfile(
    ...     "net", "cpu", 1, names, names, one, one, 3.0 * one, 3.0 * one, 0.0 * one
    ... )
    >>> program = Sharding.of(layers, "a,b").program()
    >>> times = {GATHER: 1.0, SCATTER: 2.0}
    >>> message_s = np.array([times[sent.collective] for sent in program.messages])
    >>> program.compute_s, float(program.play(message_s))
    (12.0, 16.0)
    """

    modules: tuple[tuple[str, ...], ...]
    bytes: tuple[int, ...]
    runs: tuple[Run, ...]
    update_s: float

    @classmethod
    def of(cls, profile: LayerProfile, spec: str) -> Sharding:
        """Divide the network of a profile into units.

        Parameters
        ----------
        profile : LayerProfile
            The times and sizes of the tensors of a network, in forward order.
        spec : str
            Patterns of module names, as in "blocks.*,head", for a unit of each module
            that matches; or "size:25MB" for units of at least this size.

        Returns
        -------
        Sharding
            The units, the root first.

        Raises
        ------
        UserError
            If a pattern makes no unit, or if what follows "size:" is no size.
        """
        # `modules_of_tensor` has, for each tensor, the modules of its unit. Units have no numbers
        # yet, and are told apart by their modules.
        if spec.startswith(SIZE):
            least_bytes = _least_bytes(spec)
            modules_of_tensor = _units_by_size(profile, least_bytes)
        else:
            modules_of_tensor = _units_by_name(profile, spec)
        # The root, which has no modules, comes first, also if no tensor belongs to it.
        # All other units follow in the order in which they first compute. A dict has each
        # unit once, and keeps this order.
        root: tuple[str, ...] = ()
        modules_of_unit = list(dict.fromkeys([root, *modules_of_tensor]))
        # The number of a unit is its position in this list.
        number_of_unit = {
            modules: number for number, modules in enumerate(modules_of_unit)
        }
        unit_of_tensor = [number_of_unit[modules] for modules in modules_of_tensor]

        # The sum of the bytes of all tensors of each unit.
        bytes_of_unit = np.bincount(
            unit_of_tensor,
            weights=profile.gradient_bytes,
            minlength=len(modules_of_unit),
        )
        return cls(
            modules=tuple(modules_of_unit),
            bytes=tuple(bytes_of_unit.astype(int).tolist()),
            runs=_runs(profile, unit_of_tensor),
            update_s=profile.update_s,
        )

    def scaled(self, factor: float) -> Sharding:
        """Return the network on a machine where compute takes ``factor`` times as long.

        Parameters
        ----------
        factor : float
            How many times as long compute takes.

        Returns
        -------
        Sharding
            The units with scaled times.
        """
        runs = tuple(
            Run(run.unit, factor * run.forward_s, factor * run.backward_s)
            for run in self.runs
        )
        return replace(self, runs=runs, update_s=factor * self.update_s)

    def most_gathered_bytes(self, *, reshard: bool = True) -> int:
        """Return the most bytes of parameters that a rank holds whole at the same time.

        Parameters
        ----------
        reshard : bool, optional
            Whether parameters are resharded after forward. Otherwise all units are
            whole at the end of forward.

        Returns
        -------
        int
            Without ``reshard``, the bytes of all units. With it, the largest sum of the
            root and of two units that compute one after the other, because the next unit
            is gathered while one computes. The root stays whole throughout the iteration.
        """
        if not reshard:
            return sum(self.bytes)
        units = [run.unit for run in self.runs if run.unit != ROOT]
        # Sets of units that are whole at the same time. The runs of the root are left out
        # above, so that two runs of one unit can be neighbours. A set counts this unit once.
        gathered_together = [{ROOT, *pair} for pair in pairwise(units)]
        # Without a pair, the root is whole with the only other unit, or alone if there is
        # none. With pairs, this set is a part of the first one, and changes nothing.
        gathered_together.append({ROOT, *units[:1]})
        return max(
            sum(self.bytes[unit] for unit in gathered) for gathered in gathered_together
        )

    def program(
        self, *, prefetch: bool = True, reshard: bool = True, blocking: bool = False
    ) -> Program:
        """Return the steps and the messages of a rank in an iteration.

        Parameters
        ----------
        prefetch : bool, optional
            Whether the next unit is gathered while one computes.
        reshard : bool, optional
            Whether parameters are resharded after forward, and gathered again.
        blocking : bool, optional
            Whether collectives return only when they have ended, so that nothing
            overlaps.

        Returns
        -------
        Program
            The steps of a rank, and its messages.
        """
        # The builder adds steps, and remembers which units are whole or being gathered.
        program = _ProgramBuilder(unit_bytes=self.bytes, blocking=blocking)
        self._add_forward(program, prefetch=prefetch, reshard=reshard)
        self._add_backward(program, prefetch=prefetch)
        program.wait_for_scatter()
        program.compute(self.update_s)
        return Program(tuple(program.steps), tuple(program.messages))

    def _add_forward(
        self, program: _ProgramBuilder, *, prefetch: bool, reshard: bool
    ) -> None:
        """Add the steps of the forward pass to a program.

        With ``prefetch``, the next unit is gathered while one computes. With ``reshard``, a
        unit is divided among the ranks again when its forward has ended.
        """
        root_has_parameters = self.bytes[ROOT] > 0
        if root_has_parameters:
            program.wait_for_unit(ROOT)
        for run, later_units in _with_later_units(self.runs):
            unit = run.unit
            # This gathers the unit unless it was gathered ahead.
            program.wait_for_unit(unit)
            if prefetch:
                program.gather_next(later_units)
            program.compute(run.forward_s)
            # The root always stays whole. Any other unit stays whole if it computes again
            # in forward.
            stays_whole = unit == ROOT or unit in later_units
            if reshard and not stays_whole:
                program.reshard(unit)

    def _add_backward(self, program: _ProgramBuilder, *, prefetch: bool) -> None:
        """Add the steps of the backward pass to a program, with the scatters of gradients.

        With ``prefetch``, the next unit is gathered while one computes. Resharding frees the
        memory of a unit after the last of its runs. It takes no time, and the unit is not needed
        again in the iteration, so the program has no step for it.
        """
        root_has_parameters = self.bytes[ROOT] > 0
        first_unit = self.runs[0].unit
        # Backward runs from the last run to the first. Later units are those that compute
        # later in backward, which come earlier in forward.
        for run, later_units in _with_later_units(self.runs[::-1]):
            unit = run.unit
            # This gathers the unit unless it is whole or was gathered ahead.
            program.wait_for_unit(unit)
            if prefetch:
                program.gather_next(later_units)
            program.compute(run.backward_s)
            # The gradients of a unit are complete after the last of its runs. The root
            # and the first unit follow below.
            is_complete = unit not in later_units
            if is_complete and unit not in (ROOT, first_unit):
                program.scatter(unit)

        # The root and the first unit scatter after the backward pass. FSDP2 scatters the
        # gradients of a unit when the gradient of the unit's input is ready. The input of
        # these two units is that of the network, which has no gradient, so FSDP2 scatters
        # them only when the whole backward pass is over. If the root is itself the first
        # unit, it scatters once.
        if root_has_parameters:
            program.scatter(ROOT)
        if first_unit != ROOT:
            program.scatter(first_unit)


def _with_later_units(runs: Sequence[Run]) -> Iterator[tuple[Run, list[int]]]:
    """Yield each run, and the units of all runs after it."""
    for position, run in enumerate(runs):
        later_units = [later.unit for later in runs[position + 1 :]]
        yield run, later_units


def _runs(profile: LayerProfile, unit_of_tensor: Sequence[int]) -> tuple[Run, ...]:
    """Return the runs of neighbouring tensors that belong to one unit."""
    runs = []
    rows = zip(unit_of_tensor, profile.forward_s, profile.backward_s, strict=True)
    # `groupby` makes one group of successive rows that begin with the same unit. A run adds up
    # the times of these rows.
    for unit, rows_of_run in groupby(rows, key=itemgetter(0)):
        times = [(forward_s, backward_s) for _, forward_s, backward_s in rows_of_run]
        forward_s, backward_s = np.sum(times, axis=0).tolist()
        runs.append(Run(unit, forward_s, backward_s))
    return tuple(runs)


# -- which tensor belongs to which unit ------------------------------------------------


def _units_by_name(profile: LayerProfile, spec: str) -> list[tuple[str, ...]]:
    """Return the unit of each tensor: a tuple of its module, or () for the root.

    A unit is a tuple, because the units of `_units_by_size` have several modules.
    ``spec`` has patterns of module names, with commas between them, as in
    "blocks.*,head". The unit of a tensor is the outermost module around it that one of
    the patterns matches. A tensor without such a module belongs to the root. Raises
    UserError if a pattern makes no unit.
    """
    patterns = [pattern.strip() for pattern in spec.split(",")]
    used_patterns: set[str] = set()
    modules_of_tensor: list[tuple[str, ...]] = []
    for layer in profile.layer:
        # Pairs of a module around the layer and the pattern that matches it.
        matches = list(_matches(layer, patterns))
        if matches:
            # All matching modules are beginnings of the layer's name, so the smallest
            # text is the outermost module.
            module, pattern = min(matches)
            used_patterns.add(pattern)
            modules_of_tensor.append((module,))
        else:
            modules_of_tensor.append(())
    # A pattern is also unused if all its modules lie inside units of other patterns.
    unused = [pattern for pattern in patterns if pattern not in used_patterns]
    if unused:
        _raise_unused(unused[0], profile.layer)
    return modules_of_tensor


def _raise_unused(pattern: str, layers: Sequence[str]) -> NoReturn:
    """Raise UserError for a pattern of --units that makes no unit of these layers.

    The error says whether the pattern matches nothing, or only modules inside the units
    of other patterns.
    """
    # The modules that the pattern matches, around any layer.
    matched = [match for layer in layers for match in _matches(layer, [pattern])]
    if matched:
        raise UserError(
            f"--units {shown(pattern)}: matches only modules inside other units: leave "
            "it out"
        )
    first_layers = [*dict.fromkeys(layers)][:3]
    raise UserError(
        f"--units {shown(pattern)}: matches no module of the profile: name modules of "
        f"layers such as {', '.join(first_layers)}"
    )


def _matches(layer: str, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the modules around a layer that a pattern matches, each with its pattern.

    The modules around "blocks.0.norm" are "blocks", "blocks.0" and the layer itself.
    """
    names = layer.split(".")
    for pattern in patterns:
        # A * stands for one name, so a pattern only matches modules with as many names
        # as the pattern has.
        depth = pattern.count(".") + 1
        module = ".".join(names[:depth])
        # A layer with fewer names than the pattern lies inside no such module.
        if depth <= len(names) and fnmatch.fnmatchcase(module, pattern):
            yield module, pattern


def _least_bytes(spec: str) -> int:
    """Return the least size of a unit in bytes from a text such as "size:25MB".

    Raises UserError if the text states no size, or a small number without a unit.
    """
    size = spec.removeprefix(SIZE)
    # Whoever writes size:25 means megabytes, because units of 25 bytes would be single layers.
    if is_small_number(size):
        raise UserError(
            f"--units {shown(spec)}: units of {size} bytes: write {SIZE}{size}MB, or "
            f"{SIZE}{size}B if bytes are meant"
        )
    try:
        return parse_bytes(size)
    except UserError as error:
        raise UserError(f"--units {shown(spec)}: {error}") from error


def _units_by_size(profile: LayerProfile, least_bytes: int) -> list[tuple[str, ...]]:
    """Return for each tensor its unit, as a tuple of the names of its layers.

    Layers that follow one another form a unit, which is complete as soon as it has
    ``least_bytes``. Only the last unit may be smaller.
    """
    # By layer, the layers of its unit. They share one list, which grows until the unit is
    # complete.
    layers_of_unit: dict[str, list[str]] = {}
    layers: list[str] = []
    # The bytes of the unit so far. An infinite size before the first layer makes this layer
    # begin a unit.
    unit_bytes = math.inf
    sizes = profile.gradient_bytes.tolist()
    for layer, n_bytes in zip(profile.layer, sizes, strict=True):
        # The first tensor of a layer puts the layer into a unit. Its further tensors are taken
        # to follow at once, and belong to this unit even if the unit is already complete.
        if layer not in layers_of_unit:
            if unit_bytes >= least_bytes:
                layers = []
                unit_bytes = 0
            layers.append(layer)
            layers_of_unit[layer] = layers
        unit_bytes += n_bytes
    return [tuple(layers_of_unit[layer]) for layer in profile.layer]


# -- the time of an iteration ----------------------------------------------------------


def forecast(
    program: Program,
    communications: Mapping[str, Communication],
    level: float = LEVEL,
    brief_s: Floats | None = None,
    single_iterations: bool = True,
    common_error: float | Floats = COMMON_ERROR,
) -> tuple[Prediction, tuple[float, float] | None]:
    """Return the prediction of an iteration with its interval.

    The interval is meant for replays, which sleep where a training computes: the share
    ``level`` of their iterations should lie in it. In real training compute and messages
    slow each other down, and compute drifts. There is no model of this here, so the
    interval is too narrow for real training. `INTERVAL_HOLDS` says in words what it includes.

    Parameters
    ----------
    program : Program
        What every rank does, with M messages.
    communications : mapping of str to Communication
        The fitted cost of messages with draws of it, which are costs fitted to resampled
        messages, by the name of the collective. B is the least number of draws that one
        of the costs has, and further draws are not used.
    level : float, optional
        The share of draws that lie in the interval.
    brief_s : ndarray, shape (n,), optional
        Measured times of iterations whose messages have only one element per rank. The
        program must then be blocking. Its iteration is predicted as such a brief
        iteration, plus the time by which its messages take longer than messages of one
        element. All of this additional time is exposed.
    single_iterations : bool, optional
        Whether the interval is of single iterations, or of the median of many.
    common_error : float or ndarray, shape (B, 1), optional
        The error that all messages of an iteration have in common, as the logarithm of
        measured over predicted time. A number is the standard deviation of this error,
        and an array has the error in each draw.

    Returns
    -------
    prediction : Prediction
        The predicted times.
    interval_s : (float, float) or None
        Lower and upper end in seconds; None if a cost has no draws.
    """
    predicted_s, drawn_s = _message_times(
        program,
        communications,
        # In the median of many iterations, the scatter of single messages averages out.
        scatter_by_message=single_iterations,
        beyond_one_element=brief_s is not None,
    )
    draws = len(drawn_s)
    drawn_s *= _common_factors(common_error, draws)
    # The first row is the prediction, and all others are draws: shape (1 + B, M). With
    # ``brief_s``, these are only the times beyond those of messages of one element.
    message_s = np.vstack([predicted_s, drawn_s])
    if brief_s is None:
        compute_s = program.compute_s
        iterations_s = program.play(message_s)
    else:
        compute_s = float(np.median(brief_s))
        # Nothing overlaps in a blocking program, so the times of messages add up. The
        # measured iterations already include a message of one element for each of them.
        iterations_s = _brief_iterations_s(brief_s, draws, single_iterations)
        iterations_s = iterations_s + message_s.sum(axis=1)
    # With ``brief_s``, communication is only the time beyond that of one element.
    prediction = Prediction(
        iteration_s=float(iterations_s[0]),
        compute_s=compute_s,
        communication_s=float(predicted_s.sum()),
    )
    if not draws:
        return prediction, None
    lower_s, upper_s = interval(iterations_s[1:], level)
    return prediction, (float(lower_s), float(upper_s))


def _common_factors(common_error: float | Floats, draws: int) -> Floats:
    """Return the factor of all messages of a draw for each draw, shape (draws, 1).

    ``common_error`` is the error that these messages have in common, as the logarithm of
    measured over predicted time. An array of shape (draws, 1) has the error in each draw.
    A number is the standard deviation of normal errors.
    """
    # If there are no draws, there are no factors. `_normal_scores` would divide by 0.
    if not draws:
        return np.ones((0, 1))
    log_errors = common_error
    is_standard_deviation = np.ndim(common_error) == 0
    if is_standard_deviation:
        # The scores are values of a standard normal distribution, one for each draw.
        log_errors = common_error * _normal_scores(draws)
    return np.asarray(np.exp(log_errors))


def _brief_iterations_s(brief_s: Floats, draws: int, single_iterations: bool) -> Floats:
    """Return the time of an iteration with brief messages, shape (1 + draws,).

    Brief messages have one element for each rank. The first value is the median of the
    measured times ``brief_s``. Each other value is a bootstrap draw. For single
    iterations, it is one of the measured times. Otherwise it is the median of as many
    resampled times as were measured.
    """
    sample_size = 1 if single_iterations else len(brief_s)
    resampled_s = np.random.default_rng(0).choice(brief_s, (draws, sample_size))
    return np.append(np.median(brief_s), np.median(resampled_s, axis=1))


def _message_times(
    program: Program,
    communications: Mapping[str, Communication],
    scatter_by_message: bool,
    beyond_one_element: bool,
) -> tuple[Floats, Floats]:
    """Return the predicted time of each message of a program, and draws of this time.

    Parameters
    ----------
    program : Program
        What every rank does, with M messages.
    communications : mapping of str to Communication
        The fitted cost of messages with draws of it, which are costs fitted to resampled
        messages, by the name of the collective.
    scatter_by_message : bool
        Whether each message of a draw has a random scatter of its own. Otherwise times
        are means of many messages, whose scatter averages out.
    beyond_one_element : bool
        Whether to return only by how much a message takes longer than a message of one
        element per rank. The iterations to which this is added were measured with such
        short messages, and contain their time already.

    Returns
    -------
    predicted_s : ndarray, shape (M,)
        Seconds of each message, or with ``beyond_one_element`` the seconds beyond those
        of a message of one element per rank.
    drawn_s : ndarray, shape (B, M)
        The same in each of B draws. B is the least number of draws that one of the costs
        has.
    """
    n_bytes = np.array([message.bytes for message in program.messages])
    draws = min(len(communication.draws) for communication in communications.values())
    predicted_s = np.zeros(len(n_bytes))
    drawn_s = np.zeros((draws, len(n_bytes)))
    collectives = np.array([message.collective for message in program.messages])
    for collective, communication in communications.items():
        # The columns of the messages of this collective.
        columns = collectives == collective
        sizes = n_bytes[columns]
        # One row for each cost: the fitted one first, then its draws.
        costs = [communication.cost, *communication.draws[:draws]]
        times_s = np.array([cost(sizes) for cost in costs])
        if beyond_one_element:
            # The column of the times of one element is subtracted from all columns.
            times_s -= _times_of_one_element_s(costs)
        predicted_s[columns] = times_s[0]
        drawn_s[:, columns] = times_s[1:]
        # Draws also have the noise of messages, if there are draws and if the noise is known.
        if draws and communication.noise:
            # Random factors: a row for each draw, and a column for each message. All messages of
            # a draw share their drift. Each also scatters by itself, if ``scatter_by_message``.
            factors = communication.noise.factors(
                sizes, draws, scatter=scatter_by_message
            )
            # The time of one element was subtracted above, and so gets no factor. The measured
            # iterations contain this time with its own scatter.
            drawn_s[:, columns] *= factors
    return predicted_s, drawn_s


def _times_of_one_element_s(costs: Sequence[MessageCost]) -> Floats:
    """Return the time of a message of one element per rank by each cost, in seconds.

    ``costs`` are a cost and draws of it. The result has the shape (number of costs, 1).
    """
    # A cost that does not state its number of ranks counts as one of a single rank.
    ranks = costs[0].workers or 1
    return np.array([[cost(ELEMENT_BYTES * ranks)] for cost in costs])


def _normal_scores(draws: int) -> Floats:
    """Return evenly spaced quantiles of a normal distribution, in random order.

    The result has the shape (draws, 1): all messages of a draw share a quantile.
    """
    # `scipy.stats` has the same function, but takes three times as long to import.
    from scipy.special import ndtri as normal_quantile

    # Evenly spaced quantiles spread as the distribution does, even if they are few, while a few
    # random numbers may spread less. Their random order makes them independent of the other
    # quantities of the draws.
    order = np.random.default_rng(1).permutation(draws)
    # The half keeps the probabilities above 0 and below 1, where quantiles are
    # infinite.
    probabilities = (order + 0.5) / draws
    return np.asarray(normal_quantile(probabilities)[:, None])
