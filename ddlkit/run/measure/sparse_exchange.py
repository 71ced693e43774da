"""A fusion plan imposed on the gradients of a torch module, sparsified: omgs Algorithm 2 in real training.

Each group of the plan keeps what of its gradients was not sent yet (error feedback). When the last gradient
of a group is there, in the midst of the backward pass, the largest elements are selected by one of our exact
selectors and leave as two asynchronous all-gathers, values and indices. `SparseExchange.finish` adds up what
came from all ranks, rank by rank, and leaves the mean in the gradients, where an optimizer finds it.

Hooks of our own, not DistributedDataParallel's for communication: its buckets change after the first
iteration, when a residual has its owner already, and torch before 2.11 cannot be told where they end.

Groups leave in the order of the plan on every rank, in whatever order their gradients become ready, and
`finish` sends what is left, so that ranks never wait for different messages. What is wrong on one rank
travels in the message itself: every rank raises the same error, none waits for one that has left.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import selected
from ddlkit.run.jobs.rank import everyones, gather_single
from ddlkit.run.measure.selection import Selector, threshold

MOST_ELEMENTS = 2**31 - 2**20  # of a group: an index is an int32, and the highest ones name faults
FAULTS = ("came twice: use no_sync() for all but the last backward pass", "is not float32")


class Span(NamedTuple):
    """What this rank's computing thread did for a group, by `time.perf_counter`.

    kind : "sparsify" (residual and selection), "wait" (for the messages) or "scatter"
    """

    kind: str
    group: int
    start_s: float
    end_s: float


@dataclass
class Group:
    """The tensors of one message.

    residual : (n,) float32 of all of them, one after the other: what was not sent yet
    positions, values : (k,) what this rank sent last
    missing : tensors whose gradients this pass has not seen yet, by their place in the group
    """

    names: list[str]
    parameters: list[nn.Parameter]
    residual: Tensor
    k: int = 1
    missing: set[int] = field(default_factory=set)
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    messages: list[tuple[Tensor, Any]] = field(default_factory=list)

    def parts(self, whole: Tensor) -> Iterator[Tensor]:
        """The tensors' shares of an (n,) tensor, each in its parameter's shape."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for part, parameter in zip(whole.split(sizes), self.parameters, strict=True):
            yield part.view(parameter.shape)

    def tensor_at(self, position: int) -> str:
        """The name of the tensor to which an element belongs."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            position -= parameter.numel()
            if position < 0:
                return name
        raise IndexError(position)

    @torch.no_grad()
    def choose(self, select: Selector) -> None:
        """Add the gradients to the residual, and take out of it what is to be sent: positions and values.

        Where a gradient has no order or is not float32, what is sent names it to every rank.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for place, gradient in enumerate(gradients):
            if gradient is not None and gradient.dtype != torch.float32:
                return self._name(self.residual.numel() + place)
        for part, gradient in zip(self.parts(self.residual), gradients, strict=True):
            if gradient is not None:
                part.add_(gradient)
        try:
            self.positions = select(self.residual.abs(), self.k)
        except UserError:  # an element has no order
            return self._name(int(self.residual.isnan().nonzero()[0]))
        self.values = self.residual[self.positions]
        self.residual[self.positions] = 0.0

    def _name(self, index: int) -> None:
        """Send no numbers, but which element is none or, beyond all elements, which tensor is not fp32."""
        self.values = self.residual.new_full((self.k,), float("nan"))
        self.positions = torch.full_like(self.values, index, dtype=torch.int64)

    @torch.no_grad()
    def take_mean(self, values: Tensor, indices: Tensor) -> None:
        """Add up what each rank sent, (P, k), in the order of ranks, and leave the mean in the gradients."""
        mean = torch.zeros_like(self.residual)
        for theirs, places in zip(values, indices, strict=True):
            mean.index_add_(0, places, theirs)
        mean /= len(values)
        for parameter, part in zip(self.parameters, self.parts(mean), strict=True):
            if parameter.grad is None or parameter.grad.layout != torch.strided:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)


class SparseExchange:
    """Exchange a module's gradients, sparsified, under a plan; every rank makes one, alike.

    ::

        exchange = SparseExchange(network, plan, density=0.001)
        with exchange.no_sync():            # as often as wanted: gradients add up
            loss(first_half).backward()
        loss(second_half).backward()        # groups are selected and sent meanwhile
        exchange.finish()                   # .grad is now the mean of what all ranks sent
        optimizer.step()
        optimizer.zero_grad()               # before the next pass, as with DistributedDataParallel

    plan : over the module's tensors in ready order; density : share of each group's elements that is sent
    order : the tensors' names in ready order, by default `named_parameters` from the last to the first
    select : positions of the k largest magnitudes; settle : called before the clock is read

    A tensor that several layers share is one tensor; one without a gradient in a pass counts as zero. Every
    rank must call `finish` equally often.

    Raises UserError, on every rank the same, for a density outside (0, 1], a plan or an order of other
    tensors, tensors that are empty or not float32, and ranks with other models, weights, plans or densities.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: FusionPlan,
        density: float,
        *,
        order: Sequence[str] | None = None,
        select: Selector = threshold,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = list(reversed(named)) if order is None else list(order)
        complaint = _wrong(module, named, names, plan, density)
        _agree(complaint, _layout(module, named, names, plan, density))
        self.select, self.settle = select, settle
        self.world_size = dist.get_world_size()
        self.spans: list[Span] = []  # of the last pass
        self.groups = [_group(names[part], named) for part in plan.slices]
        self._choose(density)
        self._sending, self._next, self._fault = True, 0, ""
        self._passes = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, group, place))
            for group in self.groups
            for place, parameter in enumerate(group.parameters)
        ]
        self._begin()

    @property
    def density(self) -> float:
        """Share of each group's elements that is sent, at least one of them."""
        return self._density

    def set_density(self, density: float) -> None:
        """Another density from now on; every rank must call it between two passes.

        Raises UserError, on every rank, for one outside (0, 1] and where ranks differ.
        """
        _agree(_wrong_density(density), [f"density {density}"])
        self._choose(density)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are not exchanged: gradients add up, and leave with the next one's."""
        before, self._sending = self._sending, False
        try:
            yield
        finally:
            self._sending = before

    def finish(self) -> None:
        """Send what has not left, wait, and make each gradient the mean over ranks of what was sent.

        Raises UserError, on every rank the same, for gradients that are not finite or not float32, and here
        alone for a second backward pass outside of `no_sync` that came too late to be sent.
        """
        self._passes += 1
        while self._next < len(self.groups):
            self._send(self._next)
        received = [self._wait(number) for number in range(len(self.groups))]
        complaint = _said(self.groups, received) or self._fault
        self._fault = ""
        self._begin()
        if complaint:
            raise UserError(f"sparsified training, iteration {self._passes}: {complaint}")
        for number, (values, indices) in enumerate(received):
            with self._timed("scatter", number):
                self.groups[number].take_mean(values, indices)

    def close(self) -> None:
        """Leave the module as it was before."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def residuals(self) -> dict[str, Tensor]:
        """What of each tensor was not sent yet, by name, in its shape; a view."""
        return {
            name: part
            for group in self.groups
            for name, part in zip(group.names, group.parts(group.residual), strict=True)
        }

    # -- one pass ----------------------------------------------------------------------------------

    def _choose(self, density: float) -> None:
        self._density = density
        for group in self.groups:
            group.k = selected(group.residual.numel(), density)

    def _begin(self) -> None:
        self._next = 0
        for group in self.groups:
            group.missing = set(range(len(group.parameters)))

    def _ready(self, group: Group, place: int, _: Tensor) -> None:
        """A gradient is there: send what is complete, in the order of the plan."""
        if not self._sending:
            return
        if place not in group.missing:
            self._fault = f"the gradient of {group.names[place]} {FAULTS[0]}"
            return
        group.missing.remove(place)
        while self._next < len(self.groups) and not self.groups[self._next].missing:
            self._send(self._next)

    @torch.no_grad()
    def _send(self, number: int) -> None:
        """Select from a group, and let values and indices leave."""
        if not number:
            self.spans.clear()
        self._next = number + 1
        group = self.groups[number]
        with self._timed("sparsify", number):
            group.choose(self.select)
        for sent in (group.values, group.positions.to(torch.int32)):
            got = sent.new_empty(self.world_size * group.k)
            group.messages.append((got, gather_single(got, sent, async_op=True)))

    def _wait(self, number: int) -> tuple[Tensor, Tensor]:
        """(P, k) values and indices of a group, of all ranks."""
        group = self.groups[number]
        with self._timed("wait", number):
            for _, work in group.messages:
                work.wait()
        values, indices = (got.view(self.world_size, group.k) for got, _ in group.messages)
        group.messages.clear()
        return values, indices

    @contextmanager
    def _timed(self, kind: str, number: int) -> Iterator[None]:
        self.settle()
        start_s = time.perf_counter()
        yield
        self.settle()
        self.spans.append(Span(kind, number, start_s, time.perf_counter()))


def _said(groups: Sequence[Group], received: Sequence[tuple[Tensor, Tensor]]) -> str:
    """The first fault that came with the messages, "" if there is none; received : (P, k) of each group."""
    if bool(torch.stack([values.isfinite().all() for values, _ in received]).all()):
        return ""
    for group, (values, indices) in zip(groups, received, strict=True):
        for rank in range(len(values)):
            bad = values[rank].isfinite().logical_not_().nonzero()
            if len(bad):
                index, n = int(indices[rank, int(bad[0])]), group.residual.numel()
                if index >= n:
                    return f"the gradient of {group.names[index - n]} {FAULTS[1]} on rank {rank}"
                return f"the gradient of {group.tensor_at(index)} is not finite on rank {rank}"
    raise AssertionError("no fault was sent")


class PlayedExchange:
    """The same with all ranks in one process, one after the other: the same numbers, to the last bit.

    ::

        exchange = PlayedExchange(network, plan, density=0.001, ranks=4)
        for rank in range(4):
            loss(rank).backward()
            exchange.take(rank)
        exchange.finish()

    Where it is asked what is learned, and not how fast, nobody needs to wait for messages. Raises UserError
    as `SparseExchange`.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: FusionPlan,
        density: float,
        ranks: int,
        *,
        select: Selector = threshold,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = list(reversed(named))
        if wrong := _wrong(module, named, names, plan, density):
            raise UserError(f"sparsified training: {wrong}")
        self.select = select
        self.ranks = [[_group(names[part], named) for part in plan.slices] for _ in range(ranks)]
        self.set_density(density)

    def set_density(self, density: float) -> None:
        """Another density from now on. Raises UserError for one outside (0, 1]."""
        if wrong := _wrong_density(density):
            raise UserError(f"sparsified training: {wrong}")
        self.density = density
        for group in chain.from_iterable(self.ranks):
            group.k = selected(group.residual.numel(), density)

    def take(self, rank: int) -> None:
        """Select from the gradients as that rank, and clear them."""
        for group in self.ranks[rank]:
            group.choose(self.select)
            for parameter in group.parameters:
                parameter.grad = None

    def finish(self) -> None:
        """Make each gradient the mean of what all ranks sent. Raises UserError as `SparseExchange.finish`."""
        received = [
            (torch.stack([g.values for g in each]), torch.stack([g.positions for g in each]))
            for each in zip(*self.ranks, strict=True)
        ]
        if complaint := _said(self.ranks[0], received):
            raise UserError(f"sparsified training: {complaint}")
        for group, (values, indices) in zip(self.ranks[0], received, strict=True):
            group.take_mean(values, indices)


def _group(names: list[str], named: dict[str, nn.Parameter]) -> Group:
    parameters = [named[name] for name in names]
    elements = sum(parameter.numel() for parameter in parameters)
    return Group(names, parameters, torch.zeros(elements, device=parameters[0].device))


# -- what ranks must agree on ----------------------------------------------------------------------


def _wrong_density(density: float) -> str:
    if 0 < density <= 1:
        return ""
    return f"density {density} is not above 0 and at most 1"


def _wrong(
    module: nn.Module,
    named: dict[str, nn.Parameter],
    names: Sequence[str],
    plan: FusionPlan,
    density: float,
) -> str:
    """What of this rank's arguments cannot be, in one line; "" if nothing."""
    if isinstance(module, DistributedDataParallel):
        return "the module is a DistributedDataParallel, which exchanges gradients itself: give its .module"
    if wrong := _wrong_density(density):
        return wrong
    if sorted(names) != sorted(named) or not named:
        differing = sorted(set(names) ^ set(named))[:3]
        return f"the order names other tensors than the module trains: {', '.join(differing) or 'none'}"
    if plan.n != len(names):
        return f"plan {plan.planner!r} is of {plan.n} tensors, the module trains {len(names)}"
    for name in names:
        if not named[name].numel():
            return f"{name} has no elements: nothing can be selected from it"
        if named[name].dtype != torch.float32:
            return f"{name} is {str(named[name].dtype).removeprefix('torch.')}: only float32 is sparsified"
    largest = max(sum(named[name].numel() for name in names[part]) for part in plan.slices)
    if largest > MOST_ELEMENTS:
        return f"a group has {largest} elements: at most {MOST_ELEMENTS} have an index, use more groups"
    return ""


def _layout(
    module: nn.Module,
    named: dict[str, nn.Parameter],
    names: Sequence[str],
    plan: FusionPlan,
    density: float,
) -> list[str]:
    """What must be equal on all ranks, one line each; the weights as one digest."""
    tensors = [f"{name} of shape {tuple(named[name].shape)}" for name in names if name in named]
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    ends = ";".join(map(str, plan.ends))
    weights = f"weights of digest {digest.hexdigest()[:12]}"
    return [f"density {density}", f"{len(tensors)} tensors", *tensors, f"groups {ends}", weights]


def _agree(complaint: str, lines: Sequence[str]) -> None:
    """Raise the same UserError on every rank where one complains, or where their lines differ."""
    texts = [text.split("\n") for text in _everyones_text("\n".join([complaint, *lines]))]
    for rank, text in enumerate(texts):
        if text[0]:
            raise UserError(f"sparsified training: {text[0]} (rank {rank})")
    for rank, theirs in enumerate(texts):
        for first, other in zip(texts[0], theirs, strict=False):
            if first != other:
                differ = f"rank 0 has {first}, rank {rank} has {other}"
                raise UserError(
                    f"sparsified training: ranks differ: {differ}; make all from one model and seed"
                )


def _everyones_text(text: str) -> list[str]:
    """``text`` of every rank, as bytes: nothing is pickled."""
    mine = text.encode()
    lengths = everyones([float(len(mine))])[:, 0].astype(int)
    home = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    padded = torch.tensor(list(mine.ljust(lengths.max(), b"\0")), dtype=torch.uint8, device=home)
    whole = padded.new_empty(len(lengths) * padded.numel())
    gather_single(whole, padded)
    rows = whole.cpu().view(len(lengths), -1)
    return [
        bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)
    ]
