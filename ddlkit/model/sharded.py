"""Fully sharded data parallel training (ZeRO-3) as PyTorch's FSDP2 does it: what is sent when, and its time.

Each rank keeps a shard of the parameters, which are gathered unit by unit: before forward and, if they were
sharded again, before backward, after which gradients are scattered. The root, unit 0, has what no other unit
has: it is gathered first, stays whole, and its gradients leave when backward has ended, those of a unit that
takes the input after them. Units are gathered one ahead; where a processor is ahead of its GPU, FSDP2's
forward may be two ahead, and gather the last unit anew while it still computes. What is not covered: mixed
sharding (HSDP), activation checkpointing, tensor parallelism.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import LEVEL, interval
from ddlkit.core.iteration import Prediction
from ddlkit.core.units import parse_bytes
from ddlkit.core.workload import Floats, LayerProfile
from ddlkit.model.calibration import Communication

SENT = GATHER, SCATTER = "all_gather", "reduce_scatter"
ELEMENT_BYTES, SIZE = 4, "size:"
COMPUTE, POST, WAIT = "compute", "post", "wait"
MISSED = 0.023  # standard deviation of what messages missed beyond noise: 84 replays of two ranks


class Step(NamedTuple):
    """What a rank does next: it computes for so many seconds, or posts or waits for a message, by number."""

    do: str
    what: float


class Message(NamedTuple):
    """A collective of a unit's parameters or gradients; bytes as in `ddlkit.core.collective`."""

    collective: str
    unit: int
    bytes: int


class Program(NamedTuple):
    """What every rank does in an iteration, in its order, and the messages that it numbers."""

    steps: tuple[Step, ...]
    messages: tuple[Message, ...]

    @property
    def compute_s(self) -> float:
        """Return the iteration without communication."""
        return sum(step.what for step in self.steps if step.do == COMPUTE)

    def play(self, message_s: Floats) -> Floats:
        """Return (...) iterations by what (..., M) messages take, in their order, one after the other."""
        now_s, free_s = np.zeros((2, *message_s.shape[:-1]))
        ends_s: dict[int, Floats] = {}
        for do, what in self.steps:
            if do == COMPUTE:
                now_s = now_s + what
            elif do == WAIT:
                now_s = np.maximum(now_s, ends_s[int(what)])
            else:
                free_s = np.maximum(now_s, free_s) + message_s[..., int(what)]
                ends_s[int(what)] = free_s
        return now_s


@dataclass(frozen=True)
class Sharding:
    """A network in units, the root first.

    modules : whose parameters a unit has; bytes : of each unit, 0 of a root without parameters
    runs : (unit, seconds of forward, of backward) of neighbours of one unit, in forward order
    """

    modules: tuple[tuple[str, ...], ...]
    bytes: tuple[int, ...]
    runs: tuple[tuple[int, float, float], ...]
    update_s: float

    @classmethod
    def of(cls, profile: LayerProfile, spec: str) -> Sharding:
        """Return a profile's: "blocks.*,head" has a unit for each module, "size:25MB" for so many bytes.

        Raises UserError for a pattern that no module matches.
        """
        owners = (
            _by_size(profile, spec)
            if spec.startswith(SIZE)
            else _by_name(profile, spec)
        )
        numbers = {owner: k for k, owner in enumerate(dict.fromkeys([(), *owners]))}
        units, runs = [numbers[owner] for owner in owners], []
        rows = zip(units, profile.forward_s, profile.backward_s, strict=True)
        for unit, neighbours in groupby(rows, key=itemgetter(0)):
            _, forward_s, backward_s = np.sum([*neighbours], axis=0).tolist()
            runs.append((unit, forward_s, backward_s))
        sizes = (
            np.bincount(units, profile.gradient_bytes, len(numbers))
            .astype(int)
            .tolist()
        )
        return cls(tuple(numbers), tuple(sizes), tuple(runs), profile.update_s)

    def scaled(self, factor: float) -> Sharding:
        """Return it on a machine ``factor`` times slower (time dilation)."""
        runs = tuple(
            (unit, factor * ahead, factor * back) for unit, ahead, back in self.runs
        )
        return replace(self, runs=runs, update_s=factor * self.update_s)

    def gathered_bytes(self, *, reshard: bool = True) -> int:
        """Return the most bytes of parameters that are whole at a time: the root, and two neighbours."""
        units = [unit for unit, *_ in self.runs if unit]
        pairs = ({0, *two} for two in zip(units, units[1:], strict=False))
        most = max(
            sum(self.bytes[unit] for unit in pair) for pair in [*pairs, {0, *units[:1]}]
        )
        return most if reshard else sum(self.bytes)

    def program(
        self, *, prefetch: bool = True, reshard: bool = True, blocking: bool = False
    ) -> Program:
        """Return an iteration: a unit is awaited, the next one gathered meanwhile, and so on.

        Gradients leave when backward of a unit has ended and those before have arrived, as FSDP2 has one
        buffer for them. reshard : after forward; blocking : collectives return when they have ended
        """
        steps: list[Step] = []
        messages: list[Message] = []
        whole, scattered = dict[int, int](), list[int]()  # gathers by unit, scatters

        def post(collective: str, unit: int) -> int:
            messages.append(Message(collective, unit, self.bytes[unit]))
            steps.append(Step(POST, len(messages) - 1))
            if blocking:
                steps.append(Step(WAIT, len(messages) - 1))
            return len(messages) - 1

        def need(unit: int) -> None:
            if unit not in whole:
                whole[unit] = post(GATHER, unit)
            steps.append(Step(WAIT, whole[unit]))

        def scatter(unit: int) -> None:
            steps.extend(Step(WAIT, before) for before in scattered[-1:])
            scattered.append(post(SCATTER, unit))

        first, root = self.runs[0][0], [0] * (self.bytes[0] > 0)
        for unit in root:
            need(unit)
        for backward, runs in ((False, self.runs), (True, self.runs[::-1])):
            for k, (unit, *seconds) in enumerate(runs):
                rest = [later for later, *_ in runs[k + 1 :]]
                need(unit)
                following = next((later for later in rest if later not in whole), None)
                if prefetch and following is not None:
                    whole[following] = post(GATHER, following)
                steps.append(Step(COMPUTE, seconds[backward]))
                if unit and unit not in rest and not backward and reshard:
                    del whole[unit]
                if unit not in (0, first, *rest) and backward:
                    scatter(unit)
        for unit in [
            *root,
            *[first] * (first > 0),
        ]:  # the first unit's input has no gradient
            scatter(unit)
        steps += [Step(WAIT, scattered[-1]), Step(COMPUTE, self.update_s)]
        return Program(tuple(steps), tuple(messages))


def _by_name(profile: LayerProfile, spec: str) -> list[tuple[str, ...]]:
    """Return of each tensor the outermost module that a pattern matches, () for the root."""
    patterns, matched = [each.strip() for each in spec.split(",")], set[str]()
    owners: list[tuple[str, ...]] = []
    for layer in profile.layer:
        parts = layer.split(".")
        deep = {n: ".".join(parts[: n + 1]) for n in range(len(parts))}  # * is one name
        hits = [(deep.get(each.count("."), ""), each) for each in patterns]
        hits = sorted(
            (path, each) for path, each in hits if fnmatch.fnmatchcase(path, each)
        )
        matched |= {each for _, each in hits[:1]}
        owners.append((hits[0][0],) if hits else ())
    if missed := [each for each in patterns if each not in matched]:
        some = ", ".join(dict.fromkeys(profile.layer[:3]))
        raise UserError(
            f"units {shown(missed[0])}: match no module outside of others, as {some}"
        )
    return owners


def _by_size(profile: LayerProfile, spec: str) -> list[tuple[str, ...]]:
    """Return of each tensor its unit: layers in a row that have so many bytes together, or more."""
    least, filled = parse_bytes(spec.removeprefix(SIZE)), math.inf
    units = dict[str, list[str]]()  # by layer
    unit: list[str] = []
    for layer, n_bytes in zip(
        profile.layer, profile.gradient_bytes.tolist(), strict=True
    ):
        if layer not in units:
            unit, filled = ([], 0) if filled >= least else (unit, filled)
            unit.append(layer)
        units.setdefault(layer, unit)
        filled += n_bytes
    return [tuple(units[layer]) for layer in profile.layer]


def forecast(
    program: Program,
    by: Mapping[str, Communication],
    level: float = LEVEL,
    brief_s: Floats | None = None,
    single: bool = True,
    missed: float | Floats = MISSED,
) -> tuple[Prediction, tuple[float, float] | None]:
    """Return a prediction, and the interval of single iterations or of their median; None without draws.

    by : what is known of GATHER and of SCATTER; missed : of all messages' time: (draws, 1), or how far
    brief_s : (n,) measured iterations whose messages have one element a rank: then those of a program that
        blocks take as much longer as its messages do than such ones, and count all as exposed
    """
    from scipy.stats import norm

    n_bytes = np.array([message.bytes for message in program.messages])
    taken_s, draws = (
        np.zeros(len(n_bytes)),
        min(len(each.draws) for each in by.values()),
    )
    drawn_s = np.zeros((draws, len(n_bytes)))
    for name, known in by.items():
        mask = np.array([message.collective == name for message in program.messages])
        sizes, least = n_bytes[mask], ELEMENT_BYTES * (known.cost.workers or 1)
        costs = [known.cost, *known.draws[:draws]]
        each_s = np.array(
            [cost(sizes) - (brief_s is not None) * cost(least) for cost in costs]
        )
        noise = (
            known.noise.factors(sizes, draws, scatter=single)
            if draws and known.noise
            else 1.0
        )
        taken_s[mask], drawn_s[:, mask] = each_s[0], each_s[1:] * noise
    if draws and np.ndim(missed) == 0:
        scores = norm.ppf((np.random.default_rng(1).permutation(draws) + 0.5) / draws)
        missed = missed * scores[:, None]  # so few drawn at random may be too narrow
    drawn_s *= np.exp(missed)
    if brief_s is None:
        alone_s, iterations_s = (
            program.compute_s,
            program.play(np.vstack([taken_s, drawn_s])),
        )
    else:
        alone_s = float(np.median(brief_s))
        chosen_s = np.random.default_rng(0).choice(
            brief_s, (draws, 1 if single else len(brief_s))
        )
        others_s = np.append(alone_s, np.median(chosen_s, axis=1))
        iterations_s = others_s + np.vstack([taken_s, drawn_s]).sum(axis=1)
    said = Prediction(float(iterations_s[0]), alone_s, float(taken_s.sum()))
    if not draws:
        return said, None
    lower_s, upper_s = interval(iterations_s[1:], level)
    return said, (float(lower_s), float(upper_s))
