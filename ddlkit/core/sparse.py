"""Sparsified gradients, as a model of dense gradients sees them.

Of each group of gradients, the ``density`` x elements largest elements are selected.
The groups are selected one after the other on the stream that computes. Then the values
and the indices of the selected elements are gathered from all workers. An iteration
with sparsified gradients is therefore an iteration of the dense model
(`ddlkit.core.iteration`) with another cost, and with the selections as part of compute.

References
----------
omgs : S. Shi et al., "Communication-Efficient Distributed Deep Learning with Merged
    Gradient Sparsification on GPUs", INFOCOM 2020.
"""

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

ELEMENT_BYTES = 4
"""Bytes of a value of a gradient (fp32), and of its index (int32)."""

Selecting = Callable[[Any, float], Any]
"""A function that returns the seconds to select.

Its arguments are the number of elements and the density.
"""


def selected(elements: int, density: float) -> int:
    """Return how many elements are selected: density x elements, at least 1.

    The product is rounded. It is that of Section IV of "omgs" (Shi et al. 2020).

    Parameters
    ----------
    elements : int
        The number of elements.
    density : float
        The share that is selected.

    Returns
    -------
    int
        The number of selected elements.

    Examples
    --------
    >>> selected(1000, 0.05), selected(5, 0.01)
    (50, 1)
    """
    return max(1, round(density * elements))


def elements_of(n_bytes: ArrayLike) -> Floats:
    """Return the number of float32 elements of gradients.

    A last element that the bytes fill only in part counts as a whole one.

    Parameters
    ----------
    n_bytes : array_like
        Sizes in bytes.

    Returns
    -------
    ndarray
        Whole numbers in the shape of ``n_bytes``.
    """
    return np.asarray(np.ceil(np.asarray(n_bytes, dtype=float) / ELEMENT_BYTES))


# -- messages --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SparseGather(MessageCost, described=False):
    """The time to exchange the largest elements of a group of dense gradients.

    There are two all-gathers, one of the values and one of the indices.

    Parameters
    ----------
    gather : MessageCost
        The time of an all-gather, as a function of the size of its whole output. Among
        P workers, k selected elements of 4 bytes have an output of 4 P k bytes.
    density : float
        The share of the elements that is selected.
    collective : str, optional
        The collective of the messages: an all-gather.
    selecting : Selecting, optional
        The time to select the elements before, if it is known.

    Raises
    ------
    UserError
        If ``gather`` is not the cost of an all-gather with a known number of workers,
        or if the density is not above 0 and at most 1.
    """

    form: ClassVar[str] = "sparse_gather"
    gather: MessageCost
    density: float
    collective: str = field(default=of_gradients(sparse=True), kw_only=True)
    selecting: Selecting | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # `super().__post_init__` is not called. Its checks are for parameters that are
        # numbers, and the parameter `gather` is a cost, which has checked itself.
        gather = self.gather
        all_gather = of_gradients(sparse=True)
        # `check` raises an error with the given text unless its first argument is true.
        self.check(
            gather.workers is not None and gather.collective == all_gather,
            f"needs the cost of an {all_gather} that knows its workers",
        )
        self.check(
            0 < self.density <= 1,
            f"density {self.density} is not above 0 and at most 1",
        )
        # This cost holds for the workers of the all-gathers, and has their `samples`,
        # that is, how many back-to-back messages each measured time averages. A frozen
        # dataclass lets its fields be set only in this way.
        for name in ("workers", "samples"):
            object.__setattr__(self, name, getattr(gather, name))

    def _seconds(self, sizes: Floats) -> Floats:
        # Values and indices are gathered one after the other.
        return np.asarray(2 * self.gather(self.collective_bytes(sizes)))

    def collective_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the size of each of the two all-gathers: the bytes of its output.

        Parameters
        ----------
        n_bytes : array_like
            Sizes of dense groups in bytes.

        Returns
        -------
        ndarray
            Bytes in the shape of ``n_bytes``.
        """
        # The outputs of the two all-gathers, of the values and of the indices, have equally
        # many bytes.
        bytes_of_both_outputs = self.sent_bytes(n_bytes)
        return bytes_of_both_outputs / 2

    def selection_s(self, n_bytes: ArrayLike) -> Floats:
        """Return the time to select from dense groups.

        Parameters
        ----------
        n_bytes : array_like
            Sizes of dense groups in bytes.

        Returns
        -------
        ndarray
            Seconds in the shape of ``n_bytes``, 0 if selection times are not known.
        """
        if self.selecting is None:
            return super().selection_s(n_bytes)
        seconds = self.selecting(elements_of(n_bytes), self.density)
        return np.asarray(seconds, dtype=float)

    def sent_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the size of both all-gathers together: the bytes of their outputs.

        The output of an all-gather is what a rank has in the end: the selected values, or
        their indices, of all workers.

        Parameters
        ----------
        n_bytes : array_like
            Sizes of dense groups in bytes.

        Returns
        -------
        ndarray
            Bytes in the shape of ``n_bytes``.
        """
        # The number that `selected` returns, here for arrays.
        selected_elements = np.maximum(
            1.0, np.rint(self.density * elements_of(n_bytes))
        )
        assert self.workers is not None  # `__post_init__` refuses a cost without it
        # Each worker contributes a value and an index for each selected element.
        return 2 * ELEMENT_BYTES * self.workers * selected_elements


# -- iterations ------------------------------------------------------------------------


def with_selection(
    workload: Workload, plan: FusionPlan, selection_s: Floats
) -> Workload:
    """Return a workload whose backward pass also selects the elements to send.

    As in Eqs 6 and 7 of "omgs" (Shi et al. 2020), backward and selections follow one another.

    Parameters
    ----------
    workload : Workload
        What one iteration computes.
    plan : FusionPlan
        Which gradients share a message. The plan has G groups.
    selection_s : ndarray, shape (G,)
        Seconds to select from each group.

    Returns
    -------
    Workload
        The selection from a group follows the backward of its last gradient.
    """
    # A selection runs on the stream that computes, so it delays the next backward just
    # as a longer backward of the last gradient of its group would.
    backward_s = workload.backward_s.copy()
    # Both the ends of groups and the backward times are in ready order.
    last_of_group = np.array(plan.ends_in_ready_order) - 1
    backward_s[last_of_group] += selection_s
    return replace(workload, backward_s=backward_s)


def sparse_iteration(
    workload: Workload, plan: FusionPlan, cost: MessageCost
) -> Iteration:
    """Return an iteration whose compute includes the selections of a cost.

    Parameters
    ----------
    workload : Workload
        What one iteration computes.
    plan : FusionPlan
        Which gradients share a message.
    cost : MessageCost
        The time of a message, and of selecting what is sent.

    Returns
    -------
    Iteration
        The messages follow one another, as they do without selection.
    """
    selection_s = cost.selection_s(plan.group_bytes(workload))
    return Iteration(with_selection(workload, plan, selection_s), plan, cost)


def sparse_timeline(
    workload: Workload, plan: FusionPlan, cost: MessageCost
) -> Timeline:
    """Return an iteration with sparsified gradients as spans, with its selections.

    Parameters
    ----------
    workload : Workload
        What one iteration computes.
    plan : FusionPlan
        Which gradients share a message.
    cost : MessageCost
        The time of a message, and of selecting what is sent.

    Returns
    -------
    Timeline
        The spans of `Iteration.timeline`, and a span of the kind "sparsify" for each
        selection.
    """
    iteration = sparse_iteration(workload, plan, cost)
    spans = iteration.timeline().to_frame()
    # The row number of each backward span, in ready order, and of the last one of each
    # group.
    backward_rows = np.flatnonzero(spans["kind"] == "backward")
    last_of_group = backward_rows[np.array(plan.ends) - 1]

    # The simulated backward of a group's last gradient contains the selection, at its
    # end. Such a span is cut in two: its backward is shortened, and the rest of the
    # span becomes the selection.
    selection_s = np.zeros(len(spans))
    selection_s[last_of_group] = cost.selection_s(iteration.group_bytes)
    # Without the maximum, a rounding error could move the cut before the start of the
    # backward.
    cut_s = np.maximum(spans["end_s"] - selection_s, spans["start_s"])
    # A span without a selection is cut at its end, so it stays as it is.
    shortened = spans.assign(end_s=cut_s)
    # A selection has the other columns of the span from which it is cut.
    selections = spans.iloc[last_of_group].assign(
        start_s=cut_s.iloc[last_of_group], kind="sparsify"
    )
    selections["task"] = [f"select {group}" for group in selections["group"]]
    rows = [*shortened.to_dict("records"), *selections.to_dict("records")]
    return Timeline.from_rows(rows)


# -- the time to select ----------------------------------------------------------------

SELECTION_FORMS: dict[str, type[SelectionCost]] = {}
"""Every form of a selection cost by its name. A class enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class SelectionCost(Form):
    """The time to select the density x elements largest elements of a tensor.

    Parameters
    ----------
    operation : str, optional
        The operation that selects, such as "topk".
    device : str, optional
        The device on which the operation was timed.
    """

    operation: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        """Register a subclass, so that costs of its form can be read from files."""
        SELECTION_FORMS[cls.form] = cls

    def __call__(self, elements: ArrayLike, density: ArrayLike = 1.0) -> Any:
        """Return the time to select from tensors.

        Parameters
        ----------
        elements : array_like
            The number of elements of each tensor, at least 1.
        density : array_like, optional
            The share that is selected, above 0 and at most 1. The shapes of
            ``elements`` and ``density`` are broadcast.

        Returns
        -------
        float or ndarray
            Seconds, a float if both arguments are scalars.
        """
        # Two single numbers are by far the most frequent arguments. To broadcast them would
        # take three times as long.
        if isinstance(elements, (int, float)) and isinstance(density, (int, float)):
            seconds = self._seconds(
                np.asarray(elements, float), np.asarray(density, float)
            )
            return float(seconds)
        all_elements, all_densities = np.broadcast_arrays(
            np.asarray(elements, float), np.asarray(density, float)
        )
        seconds = self._seconds(all_elements, all_densities)
        return float(seconds) if all_elements.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        """Return the time to select from d elements with the density rho."""


@dataclass(frozen=True, eq=False)
class Log(SelectionCost):
    """A selection whose time is gamma d log2(d) for d elements, whatever the density.

    This is Eq 10 of "omgs" (Shi et al. 2020) without the density rho, as the published code
    of its authors has it.

    Parameters
    ----------
    gamma_s : float
        gamma, in seconds.

    Examples
    --------
    >>> Log(gamma_s=1e-9)(1024)
    1.024e-05
    """

    form: ClassVar[str] = "log"
    gamma_s: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.gamma_s * d * np.log2(d)


@dataclass(frozen=True, eq=False)
class Scan(SelectionCost):
    """A selection that reads its tensor a fixed number of times, whatever the density.

    Its time is a start-up plus passes x bytes / bandwidth, hence linear in the
    elements.

    Parameters
    ----------
    start_s : float
        The start-up in seconds.
    s_per_element : float
        Seconds per element of all passes.

    Examples
    --------
    >>> Scan(start_s=0.5, s_per_element=1e-3)(1000)
    1.5
    """

    form: ClassVar[str] = "scan"
    start_s: float
    s_per_element: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.start_s + self.s_per_element * d


@dataclass(frozen=True, eq=False)
class SelectionTimes(SelectionCost):
    """Measured times to select, interpolated in logarithms.

    Beyond the largest size, times grow in proportion to the size. Below the smallest
    size, the times of the smallest size are taken. Outside the measured densities, the
    times of the nearest density are taken.

    Parameters
    ----------
    elements : ndarray, shape (n,)
        The measured sizes in elements, two or more, increasing.
    density : ndarray, shape (m,)
        The measured densities, one or more, increasing.
    seconds : ndarray, shape (m, n)
        The time at each density and size.

    Raises
    ------
    UserError
        If the shapes do not fit together, if sizes or densities do not increase, or if
        a time is not above zero. A call raises the error if a single density was
        measured, and the call has another density.
    """

    form: ClassVar[str] = "table"
    elements: Floats
    density: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_axis("density", self.density, least=1)
        self._check_axis("elements", self.elements, least=2)
        shapes_fit = self.seconds.shape == (self.density.size, self.elements.size)
        self.check(shapes_fit, "seconds must hold one row a density, one column a size")
        self.check(np.all(self.seconds > 0), "every time in seconds must be above zero")

    def _check_axis(self, name: str, values: Floats, least: int) -> None:
        """Raise UserError unless there are ``least`` values, positive and rising."""
        # Values that rise from 0 on are also positive.
        rising = np.all(np.diff(values, prepend=0.0) > 0)
        self.check(
            values.size >= least and rising,
            f"{name} must be {least} or more, increasing, above zero",
        )

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        """Return the time to select from d elements with the density rho."""
        one_density = len(self.density) == 1
        if one_density and np.any(rho != self.density[0]):
            raise UserError(
                f"selection was recorded at density {self.density[0]:g} only"
            )
        # A `Table` interpolates in the logarithms of size and time, and is flat below its
        # smallest size. Beyond its largest size it would continue along its last slope, but
        # the times of a selection grow in proportion to the size there. So the table is asked
        # for the largest size at most, and a larger size takes a multiple of that time.
        # This rule must not change, because recorded replays are compared with predictions. In
        # these replays, ranks slept for as long as the rule says in place of selecting.
        largest = self.elements[-1]
        multiple_of_largest = np.maximum(1.0, d / largest)
        inside = np.minimum(d, largest)
        inside_s_by_density = [
            Table(self.elements, row)(inside) for row in self.seconds
        ]
        if one_density:
            return np.asarray(multiple_of_largest * inside_s_by_density[0])
        inside_s = self._s_between_densities(np.log(inside_s_by_density), rho)
        return np.asarray(multiple_of_largest * inside_s)

    def _s_between_densities(self, log_s: Floats, rho: Floats) -> Floats:
        """Return seconds, interpolated between the two nearest measured densities.

        Parameters
        ----------
        log_s : ndarray, shape (m, ...)
            The logarithm of the time at each measured density.
        rho : ndarray, shape (...)
            The densities that are asked for.

        Returns
        -------
        ndarray, shape (...)
            Seconds, linear in the logarithms of density and time.
        """
        last = len(self.density) - 1
        # Where each density lies among the measured ones, counted from 0: 1.5 is halfway
        # between numbers 1 and 2. Outside the measured densities, `np.interp` returns the
        # first or the last number.
        position = np.interp(np.log(rho), np.log(self.density), np.arange(last + 1))
        below = position.astype(int)
        # The last density is its own neighbour above.
        above = np.minimum(below + 1, last)
        # The time of every element at the measured density below it, and at the one above.
        # `take_along_axis` needs indices with the axis of densities, here of length 1.
        log_s_below = np.take_along_axis(log_s, below[None], axis=0)[0]
        log_s_above = np.take_along_axis(log_s, above[None], axis=0)[0]
        fraction = position - below
        return np.asarray(np.exp(log_s_below + fraction * (log_s_above - log_s_below)))

    @property
    def sha256(self) -> str:
        """Return the hash of the recorded densities, sizes and times.

        This hash is the ``selection_sha256`` of a `ddlkit.core.case.Case`.
        """
        columns = (self.density, self.elements, self.seconds)
        return hashlib.sha256(
            b"".join(column.tobytes() for column in columns)
        ).hexdigest()
