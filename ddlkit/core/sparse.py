"""Sparsified gradients as a dense model sees them: other message times, and selection among the compute."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.collective import of_gradients
from ddlkit.core.cost import Form, MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Floats, Workload

ELEMENT_BYTES = 4  # of a gradient's value (fp32), and of an index (int32)

Selecting = Callable[[Any, float], Any]
"""(elements, density) -> seconds to select."""


def selected(elements: int, density: float) -> int:
    """Return how many of ``elements`` are kept: density x elements (omgs IV), at least 1."""
    return max(1, round(density * elements))


def elements_of(n_bytes: ArrayLike) -> Floats:
    """Return the float32 elements of gradients of ``n_bytes`` (any shape), rounded up."""
    return np.asarray(np.ceil(np.asarray(n_bytes, dtype=float) / ELEMENT_BYTES))


@dataclass(frozen=True, eq=False)
class SparseGather(MessageCost, described=False):
    """What exchanging the largest of a dense group costs: one all-gather of values, one of indices.

    gather : of the whole output, P k elements of 4 bytes; selecting : them before, None: not known
    """

    form: ClassVar[str] = "sparse_gather"
    gather: MessageCost
    density: float
    collective: str = field(default=of_gradients(sparse=True), kw_only=True)
    selecting: Selecting | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        gather = self.gather
        needed = of_gradients(sparse=True)
        gathers = gather.workers is not None and gather.collective == needed
        self.check(gathers, f"needs the cost of an {needed} that knows its workers")
        self.check(
            0 < self.density <= 1,
            f"density {self.density} is not above 0 and at most 1",
        )
        for name in ("workers", "samples"):
            object.__setattr__(self, name, getattr(gather, name))

    def _seconds(self, sizes: Floats) -> Floats:
        return np.asarray(2 * self.gather(self.collective_bytes(sizes)))

    def collective_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the whole output of either gather, in bytes, for dense groups of ``n_bytes``."""
        return self.sent_bytes(n_bytes) / 2

    def selection_s(self, n_bytes: ArrayLike) -> Floats:
        """Return seconds to select from dense groups of ``n_bytes``; 0 where that is not known."""
        if self.selecting is None:
            return super().selection_s(n_bytes)
        return np.asarray(
            self.selecting(elements_of(n_bytes), self.density), dtype=float
        )

    def sent_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the whole outputs of both gathers, in bytes, for dense groups of ``n_bytes``."""
        kept = np.maximum(1.0, np.rint(self.density * elements_of(n_bytes)))
        return 2 * ELEMENT_BYTES * (self.workers or 1) * kept


def with_selection(
    workload: Workload, plan: FusionPlan, selection_s: Floats
) -> Workload:
    """Return it with each group's selection (G,) in its backward, after its last gradient (omgs Eqs 6, 7)."""
    backward_s = workload.backward_s.copy()
    backward_s[np.array(plan.ends) - 1] += selection_s
    return replace(workload, backward_s=backward_s)


def sparse_iteration(
    workload: Workload, plan: FusionPlan, cost: MessageCost
) -> Iteration:
    """Return the iteration under a plan at a cost that selects, the selections among its compute."""
    selecting_s = cost.selection_s(plan.group_bytes(workload))
    return Iteration(with_selection(workload, plan, selecting_s), plan, cost)


def sparse_timeline(
    workload: Workload, plan: FusionPlan, cost: MessageCost
) -> Timeline:
    """Return the spans of a `sparse_iteration`, each group's selection as a span of its own."""
    iteration = sparse_iteration(workload, plan, cost)
    spans = iteration.timeline().to_frame()
    took_s = np.zeros(len(spans))
    of_last = np.flatnonzero(spans["kind"] == "backward")[np.array(plan.ends) - 1]
    took_s[of_last] = cost.selection_s(iteration.group_bytes)
    begins_s = np.maximum(spans["end_s"] - took_s, spans["start_s"])
    selections = spans.iloc[of_last].assign(
        start_s=begins_s.iloc[of_last], kind="sparsify"
    )
    selections["task"] = [f"select {group}" for group in selections["group"]]
    rows = [
        *spans.assign(end_s=np.where(took_s > 0, begins_s, spans["end_s"])).to_dict(
            "records"
        )
    ]
    return Timeline.from_rows(rows + selections.to_dict("records"))


SELECTION_FORMS: dict[str, type[SelectionCost]] = {}
"""Every form of a selection cost by its name; a class with a ``form`` enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class SelectionCost(Form):
    """The time to select the largest density x elements of a tensor, by an operation on a device."""

    operation: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        SELECTION_FORMS[cls.form] = cls

    def __call__(self, elements: ArrayLike, density: ArrayLike = 1.0) -> Any:
        """Return seconds for ``elements`` of at least 1 and ``density`` above 0 to 1; shapes broadcast."""
        d, rho = np.broadcast_arrays(
            np.asarray(elements, float), np.asarray(density, float)
        )
        seconds = self._seconds(d, rho)
        return float(seconds) if d.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, d: Floats, rho: Floats) -> Floats: ...


@dataclass(frozen=True, eq=False)
class Log(SelectionCost):
    """omgs Eq 10 without rho, as its authors' published code has it: t = gamma d log2 d."""

    form: ClassVar[str] = "log"
    gamma_s: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.gamma_s * d * np.log2(d)


@dataclass(frozen=True, eq=False)
class Scan(SelectionCost):
    """t = t0 + passes x bytes / bandwidth: a start-up, and a time per element whatever the density."""

    form: ClassVar[str] = "scan"
    start_s: float
    s_per_element: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.start_s + self.s_per_element * d


@dataclass(frozen=True, eq=False)
class SelectionTimes(SelectionCost):
    """Measured times, (m, n) by density and elements, in log-log; beyond the largest size in proportion."""

    form: ClassVar[str] = "table"
    elements: Floats
    density: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, axis, least in (
            ("density", self.density, 1),
            ("elements", self.elements, 2),
        ):
            rising = axis.size >= least and np.all(np.diff(axis, prepend=0.0) > 0)
            self.check(
                rising, f"{name} must be {least} or more, increasing, above zero"
            )
        fitting = self.seconds.shape == (self.density.size, self.elements.size)
        self.check(fitting, "seconds must hold one row a density, one column a size")
        self.check(np.all(self.seconds > 0), "every time in seconds must be above zero")

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        last, largest = len(self.seconds) - 1, self.elements[-1]
        if not last and np.any(rho != self.density[0]):
            raise UserError(
                f"selection was recorded at density {self.density[0]:g} only"
            )
        # Beyond the largest size in proportion: so recorded replays waited.
        beyond = np.maximum(1.0, d / largest)
        d = np.minimum(d, largest)
        if not last:
            return np.asarray(beyond * Table(self.elements, self.seconds[0])(d))
        logs = np.log([Table(self.elements, row)(d) for row in self.seconds])
        at = np.interp(np.log(rho), np.log(self.density), np.arange(last + 1))
        below = np.minimum(at.astype(int), last)
        above = np.minimum(below + 1, last)
        lower, upper = (np.take_along_axis(logs, k[None], 0)[0] for k in (below, above))
        return np.asarray(beyond * np.exp(lower + (at - below) * (upper - lower)))

    @property
    def sha256(self) -> str:
        """Return the hash of all that a selection time depends on, as a Case carries it."""
        columns = self.density, self.elements, self.seconds
        return hashlib.sha256(
            b"".join(column.tobytes() for column in columns)
        ).hexdigest()
