"""Synchronous training as a graph of tasks: longest path, slack, schedules and changes.

The graph is the one of dag IV-B and its Fig 1. An edge (a, b) says that task b begins
after task a has ended. A resource does one task at a time, in the order in which tasks
become ready. Among equals the smaller number comes first. A schedule is therefore the
longest path of the graph with one more edge between each pair of neighbours on a
resource.

The paper leaves some points open. Here a message occupies the links of all machines.
Each machine has its own processor, where a processor decodes, and its own disk, unless
all machines share one network file system.

References
----------
dag : S. Shi et al., "A DAG Model of Synchronous Stochastic Gradient Descent in
    Distributed Deep Learning", 2018.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan
from ddlkit.core.strategies import IterationTimes, Strategy
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Floats, Ints

Bools = NDArray[np.bool_]

COMPUTE_KINDS = ("decode", "forward", "backward", "update")
"""The kinds of tasks that compute. All others communicate ("dag" IV-A, Shi et al. 2018)."""

ALL_RANKS = -1
"""The rank of a task that all ranks do together, such as a message."""

NO_LAYER = -1
"""The layer of a task that belongs to no layer, such as a read."""

NO_ITERATION = -1
"""The iteration of a task in a graph without iterations."""


# -- graphs ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """Tasks in columns, and which task must precede which.

    Attributes
    ----------
    resources : tuple of str
        The names of the resources.
    kind : ndarray, shape (n,)
        The index of each task's kind in `ddlkit.core.timeline.KINDS`.
    resource : ndarray, shape (n,)
        The index of each task's resource in ``resources``.
    duration_s : ndarray, shape (n,)
        Seconds that each task takes.
    rank : ndarray, shape (n,)
        The rank of each task, counted from 0, or ALL_RANKS if all ranks do the task
        together.
    layer : ndarray, shape (n,)
        The layer of each task, counted from 1, or NO_LAYER if the task belongs to no
        layer.
    iteration : ndarray, shape (n,)
        The iteration of each task, counted from 0, or NO_ITERATION if the graph has no
        iterations.
    edges : ndarray, shape (m, 2)
        Pairs of tasks, the first before the second.

    Raises
    ------
    UserError
        If a duration is negative, infinite or NaN.
    """

    resources: tuple[str, ...]
    kind: Ints
    resource: Ints
    duration_s: Floats
    rank: Ints
    layer: Ints
    iteration: Ints
    edges: Ints

    def __post_init__(self) -> None:
        # The columns may be given as any sequences, and become arrays. A frozen dataclass
        # lets its fields be set only in this way.
        for name in ("kind", "resource", "rank", "layer", "iteration", "edges"):
            object.__setattr__(self, name, np.array(getattr(self, name), np.int64))
        object.__setattr__(self, "duration_s", np.array(self.duration_s, float))
        # NaN fails both comparisons.
        allowed = (self.duration_s >= 0) & (self.duration_s < np.inf)
        if not allowed.all():
            # False is less than True, so `argmin` returns the first False.
            first_refused = int(np.argmin(allowed))
            self._refuse_duration(first_refused)

    def _refuse_duration(self, task: int) -> None:
        """Raise UserError that names a task, given by its number, and its duration."""
        what = KINDS[self.kind[task]]
        if self.rank[task] != ALL_RANKS:
            what += f" on rank {self.rank[task]}"
        raise UserError(
            f"task T{task} ({what}) has a duration of {self.duration_s[task]:g} s: "
            "give a finite time >= 0"
        )

    @classmethod
    def of(
        cls,
        duration_s: ArrayLike,
        edges: ArrayLike,
        resource: Sequence[int] | None = None,
    ) -> TaskGraph:
        """Return a graph whose tasks are all of the kind "forward".

        Parameters
        ----------
        duration_s : array_like, shape (n,)
            Seconds that each task takes.
        edges : array_like, shape (m, 2)
            Pairs of tasks, the first before the second.
        resource : sequence of int, length n, optional
            The number of each task's resource. By default each task has its own.

        Returns
        -------
        TaskGraph
            Tasks of no single rank, and without layer and iteration.

        Examples
        --------
        Two tasks of 2 s and 3 s, after which a task of 1 s may begin:

        >>> graph = TaskGraph.of([2, 3, 1], edges=[(0, 2), (1, 2)])
        >>> graph.longest_path_s, graph.slack_s.tolist()
        (4.0, [1.0, 0.0, 0.0])
        """
        seconds = np.asarray(duration_s, float)
        n = seconds.size
        resource_numbers = np.arange(n) if resource is None else np.array(resource)
        # Resources are counted from 0. A graph without tasks has none.
        n_resources = resource_numbers.max(initial=-1) + 1
        return cls(
            # Tasks of the kind "forward" are done by GPUs.
            resources=tuple(f"gpu {i}" for i in range(n_resources)),
            kind=np.full(n, KINDS.index("forward")),
            resource=resource_numbers,
            duration_s=seconds,
            # Every task must state a rank. ALL_RANKS is the value that names no single one.
            rank=np.full(n, ALL_RANKS),
            layer=np.full(n, NO_LAYER),
            iteration=np.full(n, NO_ITERATION),
            edges=np.array(edges, np.int64).reshape(-1, 2),
        )

    @property
    def n(self) -> int:
        """Return the number of tasks."""
        return len(self.kind)

    @cached_property
    def computes(self) -> Bools:
        """Return whether each task computes, shape (n,). The others communicate."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in COMPUTE_KINDS])

    @cached_property
    def earliest_s(self) -> Floats:
        """Return when each task can begin if none waits for a resource, shape (n,)."""
        return _longest_paths(self.duration_s, self.edges)

    @property
    def longest_path_s(self) -> float:
        """Return the length of the longest path, which no schedule can undercut."""
        return float((self.earliest_s + self.duration_s).max(initial=0.0))

    @cached_property
    def slack_s(self) -> Floats:
        """Return how late each task alone may be, shape (n,).

        The longest path does not grow if one task is late by its slack.
        """
        # With every edge reversed, the longest path to the start of a task is the
        # longest path from the end of this task to the end of the graph.
        reversed_edges = self.edges[:, ::-1]
        after_s = _longest_paths(self.duration_s, reversed_edges)
        # The longest path through a task has three parts: before it, itself, after it.
        slack_s = self.longest_path_s - after_s - self.duration_s - self.earliest_s
        # Sums in different orders round differently, so a slack may come out below
        # zero.
        return np.asarray(np.maximum(slack_s, 0.0))

    def levels(self) -> Ints:
        """Return the length of the longest chain of edges that leads to each task.

        Returns
        -------
        ndarray, shape (n,)
            Numbers of edges.
        """
        # If every task takes a second, the longest path to the start of a task, which does
        # not count the task itself, has as many seconds as edges.
        return _longest_paths(np.ones(self.n), self.edges).astype(np.int64)


def _longest_paths(duration_s: Floats, edges: Ints) -> Floats:
    """Return the length of the longest path to the start of each task, shape (n,)."""
    # If each task has a resource of its own, it waits only for the tasks before it. It
    # then starts when the longest path to it has ended.
    own_resource = np.arange(len(duration_s))
    start_s, _ = _first_ready_first_served(duration_s, edges, own_resource)
    return start_s


def _followers(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """Return the tasks that follow each task.

    Parameters
    ----------
    edges : ndarray, shape (m, 2)
        Pairs of tasks, the first before the second.
    n : int
        The number of tasks.

    Returns
    -------
    first : ndarray, shape (n + 1,)
        Indices into ``followers``: the tasks followers[first[i] : first[i + 1]] follow
        task i.
    followers : ndarray, shape (m,)
        The tasks that follow task 0, then those that follow task 1, and so on.
    """
    # Sort the edges by their first task, and take the second task of each.
    order = np.argsort(edges[:, 0], kind="stable")
    followers = edges[order, 1]
    # The followers of a task begin where those of all tasks before it end.
    counts = np.bincount(edges[:, 0], minlength=n)
    first = np.append(0, np.cumsum(counts))
    return first, followers


def _first_ready_first_served(
    duration_s: Floats, edges: Ints, resource: Ints
) -> tuple[Floats, Ints]:
    """Return when each task begins if a resource does one task at a time.

    This is list scheduling: tasks become ready when all tasks before them have ended,
    and are served in the order in which they become ready.

    Parameters
    ----------
    duration_s : ndarray, shape (n,)
        Seconds that each task takes.
    edges : ndarray, shape (m, 2)
        Pairs of tasks, the first before the second.
    resource : ndarray, shape (n,)
        The number of each task's resource.

    Returns
    -------
    start_s : ndarray, shape (n,)
        When each task begins, in seconds.
    order : ndarray, shape (at most n,)
        Tasks in the order in which they begin. Tasks on a cycle of edges never begin,
        and are missing here.
    """
    n = len(duration_s)
    # The loop reads single elements, which is several times faster in Python lists than
    # in arrays.
    seconds_of = duration_s.tolist()
    resource_of = resource.tolist()
    # The tasks that follow task i are followers[first[i] : first[i + 1]].
    first_array, followers_array = _followers(edges, n)
    first = first_array.tolist()
    followers = followers_array.tolist()
    # How many predecessors of each task have not ended yet.
    pending = np.bincount(edges[:, 1], minlength=n).tolist()
    ready_s = [0.0] * n
    start_s = [0.0] * n
    # When each resource has done all tasks that it was given so far.
    resource_free_s = [0.0] * (max(resource_of, default=0) + 1)
    order = []
    # A heap of pairs yields the task that is ready first, and of several tasks that are
    # ready at the same time the one with the smallest number. A list of equal times with
    # rising tasks is a heap already.
    ready = [(0.0, task) for task in range(n) if not pending[task]]
    while ready:
        task_ready_s, task = heappop(ready)
        task_resource = resource_of[task]
        begin_s = max(resource_free_s[task_resource], task_ready_s)
        end_s = begin_s + seconds_of[task]
        start_s[task] = begin_s
        resource_free_s[task_resource] = end_s
        order.append(task)
        # A task is ready when the last of the tasks before it has ended.
        for follower in followers[first[task] : first[task + 1]]:
            ready_s[follower] = max(ready_s[follower], end_s)
            pending[follower] -= 1
            if not pending[follower]:
                heappush(ready, (ready_s[follower], follower))
    return np.array(start_s), np.array(order, np.int64)


# -- schedules -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Schedule:
    """When every task of a graph runs.

    Attributes
    ----------
    graph : TaskGraph
        The tasks.
    start_s : ndarray, shape (n,)
        When each task begins, in seconds.
    order : ndarray, shape (n,)
        Tasks in the order in which they begin.
    """

    graph: TaskGraph
    start_s: Floats
    order: Ints

    @property
    def end_s(self) -> Floats:
        """Return when each task ends, in seconds, shape (n,)."""
        return np.asarray(self.start_s + self.graph.duration_s)

    @property
    def duration_s(self) -> float:
        """Return seconds from 0 to the end of the last task."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def iteration_ends_s(self) -> Floats:
        """Return when the last task of each of the k iterations ends, shape (k,)."""
        # Tasks without an iteration count as tasks of the first one.
        iteration = np.maximum(self.graph.iteration, 0)
        ends = np.zeros(int(iteration.max(initial=0)) + 1)
        # Raise the end of each task's iteration to the end of the task, task by task.
        np.maximum.at(ends, iteration, self.end_s)
        return ends

    @property
    def period_s(self) -> float:
        """Return seconds between the ends of the last two iterations.

        With a single iteration, this is the duration of the schedule.
        """
        ends = self.iteration_ends_s
        if len(ends) == 1:
            return self.duration_s
        return float(ends[-1] - ends[-2])

    @cached_property
    def bound(self) -> TaskGraph:
        """Return the graph with an edge from each task to the next on its resource.

        These edges bind the tasks of a resource to the order of the schedule. The
        longest path of this graph is the duration of the schedule.
        """
        # A stable sort by resource brings all tasks of one resource together, and keeps
        # the order in which they begin.
        resource_in_order = self.graph.resource[self.order]
        by_resource = np.argsort(resource_in_order, kind="stable")
        tasks = self.order[by_resource]
        resource = resource_in_order[by_resource]
        neighbours = np.column_stack([tasks[:-1], tasks[1:]])
        # The last task of a resource and the first one of the next resource are
        # neighbours, too, but get no edge.
        on_one_resource = resource[:-1] == resource[1:]
        edges = np.concatenate([self.graph.edges, neighbours[on_one_resource]])
        return replace(self.graph, edges=edges)

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Return the chain of tasks that determines the duration, in order.

        Each task begins when the one before it ends. Where several predecessors end at
        that moment, the one with the smallest number is in the path.
        """
        if not self.graph.n:
            return ()
        # The predecessors of a task are its followers when every edge is reversed.
        # `bound` has an edge also from each task to the next one on its resource.
        reversed_edges = self.bound.edges[:, ::-1]
        first, predecessors = _followers(reversed_edges, self.graph.n)
        # From the task that ends last back to a task that waits for no other.
        task = int(np.argmax(self.end_s))
        path = [task]
        while True:
            awaited = np.sort(predecessors[first[task] : first[task + 1]])
            # A start is copied from the end of the task that delays it, so the two
            # times are equal to the last bit.
            delaying = awaited[self.end_s[awaited] == self.start_s[task]]
            # If no task delays it, the path begins with this task.
            if not delaying.size:
                return tuple(reversed(path))
            task = int(delaying[0])
            path.append(task)

    def critical_shares(self) -> dict[str, float]:
        """Return how the time of the critical path is shared between resources.

        Returns
        -------
        dict of str to float
            The share of each class of resources ("gpu" for "gpu 3"), the largest first.
            If there are three iterations or more, the first and the last do not count,
            because communication is not yet or no longer hidden there.
        """
        graph = self.graph
        n_iterations = len(self.iteration_ends_s)
        if n_iterations >= 3:
            first_counted = 1
            last_counted = n_iterations - 2
        else:
            # All tasks count. NO_ITERATION is -1, the smallest iteration of any task.
            first_counted = NO_ITERATION
            last_counted = n_iterations - 1
        # The seconds of the path on each class of resources.
        seconds_of: dict[str, float] = defaultdict(float)
        for task in self.critical_path:
            if first_counted <= graph.iteration[task] <= last_counted:
                resource = graph.resources[graph.resource[task]]
                seconds_of[_class_of(resource)] += float(graph.duration_s[task])
        # If the path takes no time, all its seconds are 0. They are divided by 1 then, and
        # all shares are 0.
        whole_s = sum(seconds_of.values()) or 1.0
        largest_first = sorted(seconds_of, key=seconds_of.__getitem__, reverse=True)
        return {name: seconds_of[name] / whole_s for name in largest_first}


def _class_of(resource: str) -> str:
    """Return the class of a resource: "gpu" for "gpu 3"."""
    return resource.partition(" ")[0]


def schedule(graph: TaskGraph) -> Schedule:
    """Return the schedule of a graph in which each resource serves the first ready task.

    Parameters
    ----------
    graph : TaskGraph
        The tasks.

    Returns
    -------
    Schedule
        When each task runs.

    Examples
    --------
    Two tasks of 2 s and 3 s share a resource. A task of 1 s follows both of them, on
    another resource:

    >>> graph = TaskGraph.of([2, 3, 1], edges=[(0, 2), (1, 2)], resource=[0, 0, 1])
    >>> schedule(graph).start_s.tolist(), schedule(graph).critical_path
    ([0.0, 2.0, 5.0], (0, 1, 2))
    """
    start_s, order = _first_ready_first_served(
        graph.duration_s, graph.edges, graph.resource
    )
    return Schedule(graph, start_s, order)


# -- machines --------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpus:
    """The GPUs on which training runs, one rank each.

    Attributes
    ----------
    machines : int
        The number of machines.
    per_machine : int
        The number of GPUs of each machine.
    shared_disk : bool
        Whether all machines read from one network file system, not from their own
        disks.
    decoding : {"machine", "own", "trains"}
        What decodes samples: the processor of a machine, a core of each rank's own, or
        the core that trains.
    """

    machines: int = 1
    per_machine: int = 1
    shared_disk: bool = False
    decoding: str = "machine"

    @classmethod
    def of(cls, n: int, per_machine: int, shared_disk: bool = False) -> Gpus:
        """Return GPUs on as many machines as they fill.

        Parameters
        ----------
        n : int
            The number of GPUs.
        per_machine : int
            The number of GPUs of each machine.
        shared_disk : bool, optional
            Whether all machines read from one network file system.

        Returns
        -------
        Gpus
            The machines and their GPUs.

        Raises
        ------
        UserError
            If the GPUs do not fill machines.
        """
        if per_machine < 1 or n % per_machine:
            noun = "GPU" if n == 1 else "GPUs"
            raise UserError(
                f"{n} {noun} cannot be divided into machines of {per_machine}: "
                f"choose a divisor of {n}"
            )
        return cls(n // per_machine, per_machine, shared_disk)

    @property
    def n(self) -> int:
        """Return N_g, the number of GPUs of all machines."""
        return self.machines * self.per_machine

    def resources(self) -> tuple[tuple[str, ...], dict[str, Ints]]:
        """Return the resources on which tasks run.

        Returns
        -------
        names : tuple of str
            The names of all resources.
        resource_of : dict of str to ndarray, shape (R,) or (1,)
            For each class of resources, an index in ``names`` for each of the R ranks:
            the resource of this class that the rank uses. The classes are "disk" (reads),
            "cpu" (decoding), "copy" (copies to the GPU) and "gpu" (computing). Tasks of
            all ranks together are on the only resource of the classes "link" (messages)
            and "all" (updates). These two classes have a single index.
        """
        # Resources of one class have consecutive indices, one class after the other.
        names: list[str] = []
        resource_of: dict[str, Ints] = {}
        for class_name, numbers in self._numbers_in_class().items():
            resource_of[class_name] = len(names) + numbers
            names += [f"{class_name} {number}" for number in range(numbers.max() + 1)]
        if self.shared_disk:
            # The class "disk" comes first, so the first name is that of the only disk, "disk 0".
            names[0] = "disk all"
        # If the core that trains also decodes, `_numbers_in_class` has no class "cpu". This
        # core has the role of the GPU, and then takes the place of the "cpu", too.
        if self.decoding == "trains":
            resource_of["cpu"] = resource_of["gpu"]
        # Tasks of all ranks together: messages run on the link, updates on "gpu all".
        for class_name, name in (("link", "link"), ("all", "gpu all")):
            resource_of[class_name] = np.array([len(names)])
            names.append(name)
        return tuple(names), resource_of

    def _numbers_in_class(self) -> dict[str, Ints]:
        """Return which resource of each class every rank uses, shape (R,) for each class.

        Resources of a class are numbered from 0. The class "cpu" is missing where the core
        that trains decodes, too.
        """
        ranks = np.arange(self.n)
        machine_of_rank = ranks // self.per_machine
        # All ranks use the same disk, or all ranks of a machine do.
        disk = np.zeros_like(ranks) if self.shared_disk else machine_of_rank
        number_of_rank = {"disk": disk}
        if self.decoding == "machine":
            number_of_rank["cpu"] = machine_of_rank
        elif self.decoding == "own":
            number_of_rank["cpu"] = ranks
        number_of_rank["copy"] = ranks
        number_of_rank["gpu"] = ranks
        return number_of_rank


# -- synchronous SGD -------------------------------------------------------------------


def s_sgd(
    times: IterationTimes,
    strategy: Strategy,
    gpus: Gpus = Gpus(),
    *,
    iterations: int = 1,
    plan: FusionPlan | None = None,
    decode_s: float = 0.0,
) -> TaskGraph:
    """Return the graph of synchronous SGD of the paper "dag" (Shi et al. 2018).

    Tasks are numbered as in its Fig 1: the reads of all ranks, their copies, forward and
    then backward layer by layer, the messages, and the update.

    Parameters
    ----------
    times : IterationTimes
        The times of one iteration, layers in forward order. Reads and copies are of the
        batch of *one* GPU. With a ``plan``, ``communication_s`` has the time of each
        message. Messages are in the reverse of their order of sending, because the last
        layers are sent first.
    strategy : Strategy
        What the framework hides behind computing.
    gpus : Gpus, optional
        The GPUs. By default there is one.
    iterations : int, optional
        The number of iterations.
    plan : FusionPlan, optional
        Which gradients share a message, where the gradient of a layer counts as one
        tensor. By default each layer is sent alone.
    decode_s : float, optional
        Seconds to decode the batch of one GPU, if the strategy decodes on the CPU.

    Returns
    -------
    TaskGraph
        The tasks of all iterations, by Sections IV-B and IV-C of the paper.

    Raises
    ------
    UserError
        If there is no iteration, if a time is negative or infinite, or if the plan keeps
        gradients of several types apart.

    Examples
    --------
    >>> from ddlkit.core.strategies import ONE_AFTER_THE_OTHER
    >>> toy = IterationTimes(1.0, 1.0, np.ones(3), np.ones(3), np.ones(3), 1.0)
    >>> graph = s_sgd(toy, ONE_AFTER_THE_OTHER, Gpus(1, 4))
    >>> graph.n, graph.longest_path_s, schedule(graph).duration_s
    (36, 10.0, 15.0)
    """
    if iterations < 1:
        raise UserError(f"{iterations} iterations: there must be at least one")
    # For each message, in the order of sending, how many gradients must be ready before it
    # is complete. Each layer has one gradient.
    if plan is None:
        # Each gradient is a message of its own.
        ends: Sequence[int] = range(1, len(times.backward_s) + 1)
    else:
        ends = plan.ends_in_ready_order
    names, resource_of = gpus.resources()
    # Without decoding on the CPU, samples are read decoded, and there is no such task.
    if not strategy.decodes_on_cpu:
        decode_s = 0.0
    template = _one_iteration(times, strategy, ends, resource_of, decode_s)

    # The template has a row for each task, and the rows are repeated for each iteration.
    # All its columns are floats. `TaskGraph` makes integers of those that are indices.
    columns = np.tile(template.tasks, (iterations, 1)).T
    kind, resource, duration_s, rank, layer = columns
    return TaskGraph(
        resources=names,
        kind=kind,
        resource=resource,
        duration_s=duration_s,
        rank=rank,
        layer=layer,
        iteration=np.repeat(np.arange(iterations), len(template.tasks)),
        edges=_all_edges(template, iterations, strategy.batches_ahead),
    )


def _all_edges(template: _OneIteration, iterations: int, batches_ahead: int) -> Ints:
    """Return the edges of all iterations, pairs of tasks of the graph, shape (m, 2).

    ``template`` is any one of the iterations, which are equal. ``batches_ahead`` is how
    many batches the framework fetches before they are needed.
    """
    n = len(template.tasks)
    # An update frees the buffer of its own batch. The next ``batches_ahead`` batches have
    # been fetched by then, so the batch after them is read into this buffer. Without
    # fetching ahead, ``to_fetch`` has no edges.
    fetch_lag = 1 + batches_ahead
    # A lag is by how many iterations the second task of an edge comes after the first.
    edges = [
        _repeated(template.within, n, iterations, lag=0),
        _repeated(template.to_next, n, iterations, lag=1),
        _repeated(template.to_fetch, n, iterations, lag=fetch_lag),
    ]
    return np.concatenate(edges)


def _repeated(edges: Ints, n: int, iterations: int, lag: int) -> Ints:
    """Return the edges of one iteration, repeated for every iteration.

    Parameters
    ----------
    edges : ndarray, shape (m, 2)
        Pairs of tasks, both numbered within their own iteration.
    n : int
        The number of tasks of one iteration. Task t of iteration i has the number
        t + i * n in the graph.
    iterations : int
        The number of iterations.
    lag : int
        By how many iterations the second task of each edge comes after the first one.

    Returns
    -------
    ndarray, shape (m * max(iterations - lag, 0), 2)
        Pairs of tasks, numbered as in the graph. An iteration has no such edges if their
        second tasks would lie beyond the last iteration.
    """
    # Only the second task of each edge lies in a later iteration.
    to_later = np.array([0, lag * n])
    # The number of the first task of each iteration that has such edges.
    first_tasks = n * np.arange(max(iterations - lag, 0))
    # The sum has the shape (iterations with edges, m, 2).
    in_graph = edges + to_later + first_tasks[:, None, None]
    return in_graph.reshape(-1, 2)


class _OneIteration(NamedTuple):
    """The n tasks of one iteration, and the edges that begin in it.

    Edges are pairs of tasks. Both tasks are numbered as in this iteration, also where
    the second one belongs to a later iteration.

    Attributes
    ----------
    tasks : ndarray, shape (n, 5)
        The columns kind, resource, seconds, rank and layer.
    within : ndarray, shape (m, 2)
        Edges to tasks of the same iteration.
    to_next : ndarray, shape (m, 2)
        Edges to tasks of the next iteration.
    to_fetch : ndarray, shape (m, 2)
        Edges from the update to the reads of the iteration whose batch may be fetched
        after this update.
    """

    tasks: Floats
    within: Ints
    to_next: Ints
    to_fetch: Ints


@dataclass
class _Tasks:
    """Tasks of an iteration that are added one kind after the other.

    ``resource_of`` has for each class of resources, such as "gpu", the index of the
    resource that each rank uses, as `Gpus.resources` returns it. ``rows`` has the kind,
    resource, seconds, rank and layer of each task.
    """

    resource_of: Mapping[str, Ints]
    rows: list[tuple[float, ...]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def add_for_each_rank(
        self,
        kind: str,
        resource: str,
        seconds: float,
        *,
        after: Sequence[int],
        layer: int = NO_LAYER,
    ) -> range:
        """Add a task for each rank, and return the numbers of these tasks by rank.

        ``after`` has the task of each rank after which its new task begins. It is empty
        if the new tasks wait for nothing.
        """
        first = len(self.rows)
        kind_index = KINDS.index(kind)
        for rank, resource_index in enumerate(self.resource_of[resource]):
            self.rows.append((kind_index, resource_index, seconds, rank, layer))
        tasks = range(first, len(self.rows))
        # Not strict, because ``after`` may be empty.
        self.edges.extend(zip(after, tasks, strict=False))
        return tasks

    def add_for_all(
        self,
        kind: str,
        resource: str,
        seconds: float,
        *,
        after: Iterable[int],
        layer: int = NO_LAYER,
    ) -> int:
        """Add one task that all ranks do together, and return its number.

        The task begins after all tasks of ``after``.
        """
        task = len(self.rows)
        kind_index = KINDS.index(kind)
        # A class whose resource all ranks use together, such as "link", has only one.
        (resource_index,) = self.resource_of[resource]
        self.rows.append((kind_index, resource_index, seconds, ALL_RANKS, layer))
        self.edges.extend((before, task) for before in after)
        return task


def _one_iteration(
    times: IterationTimes,
    strategy: Strategy,
    ends: Sequence[int],
    resource_of: Mapping[str, Ints],
    decode_s: float,
) -> _OneIteration:
    """Return the tasks and edges of one iteration, and its edges to later iterations.

    ``ends`` has for each message how many gradients must be ready before the message is
    complete, as in `FusionPlan`. Each layer has one gradient. ``resource_of`` has the index
    of the resource of each rank, by the class of resources. The resource of the classes
    "link" and "all" belongs to all ranks together. Without decoding, ``decode_s`` is 0.
    """
    tasks = _Tasks(resource_of)

    # `io`, `fetched` and `h2d` are ranges of tasks, one task for each rank.
    io = tasks.add_for_each_rank("io", "disk", times.io_s, after=())
    fetched = io
    if decode_s:
        fetched = tasks.add_for_each_rank("decode", "cpu", decode_s, after=io)
    h2d = tasks.add_for_each_rank("h2d", "copy", times.h2d_s, after=fetched)

    # Both lists have a range of tasks for every layer, with one task for each rank.
    forward, backward = _add_compute(tasks, times, after=h2d)
    messages = _add_messages(tasks, times, strategy, ends, backward)
    update = tasks.add_for_all("update", "all", times.update_s, after=messages)

    to_fetch = []
    if strategy.batches_ahead:
        # The update frees a buffer, into which the batch of a later iteration is read.
        # `_all_edges` computes from ``batches_ahead`` which iteration that is. It comes after
        # the next one, so these edges are not in ``to_next``.
        to_fetch = [(update, later_read) for later_read in io]
    return _OneIteration(
        tasks=np.array(tasks.rows),
        within=_as_edges(tasks.edges),
        to_next=_as_edges(_pairs_to_next(strategy, io, h2d, forward[0], update)),
        to_fetch=_as_edges(to_fetch),
    )


def _add_compute(
    tasks: _Tasks, times: IterationTimes, after: range
) -> tuple[list[range], list[range]]:
    """Add the forward and backward tasks of every layer and rank to ``tasks``.

    Each task follows the one before it on the same rank. The first ones follow the
    tasks ``after``, one for each rank.

    Returns
    -------
    forward, backward : list of range
        For each layer, the numbers of its tasks by rank. Forward is in forward order,
        and backward in ready order, the last layer first.
    """
    n_layers = len(times.backward_s)
    previous = after
    forward = []
    for k in range(n_layers):
        previous = tasks.add_for_each_rank(
            "forward", "gpu", times.forward_s[k], after=previous, layer=k + 1
        )
        forward.append(previous)
    backward = []
    for k in reversed(range(n_layers)):
        previous = tasks.add_for_each_rank(
            "backward", "gpu", times.backward_s[k], after=previous, layer=k + 1
        )
        backward.append(previous)
    return forward, backward


def _add_messages(
    tasks: _Tasks,
    times: IterationTimes,
    strategy: Strategy,
    ends: Sequence[int],
    backward: Sequence[range],
) -> list[int]:
    """Add the messages to ``tasks``, and return their numbers in the order of sending.

    ``ends`` has for each message how many gradients must be ready before the message is
    complete. Each layer has one gradient, so these are also numbers of layers. ``backward``
    has the backward tasks of each layer by rank, the last layer first.
    """
    n_layers = len(backward)
    messages = []
    # ``times`` lists messages in reverse of the order of sending.
    for end, seconds in zip(ends, times.communication_s[::-1], strict=True):
        # How many layers must have ended their backward before the message starts.
        n_awaited = end if strategy.sends_during_backward else n_layers
        message = tasks.add_for_all(
            "all_reduce",
            "link",
            seconds,
            # The last of these layers ends its backward last, on every rank.
            after=backward[n_awaited - 1],
            # The layer of the last gradient of the message, counted in forward order
            # from 1.
            layer=n_layers - end + 1,
        )
        messages.append(message)
    return messages


def _pairs_to_next(
    strategy: Strategy, io: range, h2d: range, first_forward: range, update: int
) -> list[tuple[int, int]]:
    """Return the edges from an iteration to the next one.

    Parameters
    ----------
    strategy : Strategy
        What the framework hides behind computing.
    io, h2d, first_forward : range
        The reads, the copies to the GPU and the forward tasks of the first layer, one
        of each for each rank.
    update : int
        The update.

    Returns
    -------
    list of (int, int)
        Pairs of tasks, both numbered as in their own iteration.
    """
    # In each pair, the first task belongs to this iteration and the second one to the
    # next. A disk reads one batch after the other, so a read precedes the read of the same
    # rank in the next iteration.
    pairs = list(zip(io, io, strict=True))
    # The first forward of the next iteration needs the updated weights.
    pairs += [(update, task) for task in first_forward]
    # Reads and copies that the framework does not do ahead wait for the update, too.
    if not strategy.reads_ahead:
        pairs += [(update, task) for task in io]
    if not strategy.copies_ahead:
        pairs += [(update, task) for task in h2d]
    if strategy.one_buffer:
        # A read of the next iteration overwrites the buffer, so the copy of this iteration
        # out of the buffer comes first.
        pairs += zip(h2d, io, strict=True)
    return pairs


def _as_edges(pairs: Sequence[tuple[int, int]]) -> Ints:
    """Return pairs of tasks as an array of shape (m, 2), also if there is no pair."""
    # Without pairs, `np.array` alone would have the shape (0,).
    return np.array(pairs, np.int64).reshape(-1, 2)


def of_iteration(
    iteration: Iteration,
    strategy: Strategy,
    gpus: Gpus = Gpus(),
    *,
    forward_s: Floats,
    iterations: int = 1,
    io_s: float = 0.0,
    decode_s: float = 0.0,
    h2d_s: float = 0.0,
) -> TaskGraph:
    """Return the graph of a simulated iteration, with a message for each group of its plan.

    Parameters
    ----------
    iteration : Iteration
        A workload, a cost, and a plan: the gradients of a group share a message. Its messages
        must follow one another, and its gradients must not be copied into buckets or out of
        them.
    strategy : Strategy
        What the framework hides behind computing.
    gpus : Gpus, optional
        The GPUs. By default there is one.
    forward_s : ndarray, shape (n,)
        Seconds of forward of each tensor, in forward order.
    iterations : int, optional
        The number of iterations.
    io_s : float, optional
        Seconds to read the batch of one GPU.
    decode_s : float, optional
        Seconds to decode the batch of one GPU, if the strategy decodes on the CPU.
    h2d_s : float, optional
        Seconds to copy the batch of one GPU from the host to this GPU.

    Returns
    -------
    TaskGraph
        The tasks of all iterations.

    Raises
    ------
    UserError
        If the link is not plain (`Link.plain`), if gradients are copied into buckets and out
        of them, or if messages start at times of their own. The graph cannot express that.
    """
    iteration.refuse_if_not_a_graph()
    # `of_workload` has a message for each tensor, and all of forward in the first tensor.
    # Both are replaced below. Its times of backward, update, reading and copying stay.
    times = IterationTimes.of_workload(
        iteration.workload, iteration.cost, io_s=io_s, h2d_s=h2d_s
    )
    # With a plan, `s_sgd` needs the time of each message of the plan, and forward by tensor.
    # An iteration lists its messages in the order of sending. `IterationTimes` lists them
    # in the reverse order, because it lists layers in forward order.
    times = replace(
        times, communication_s=iteration.communication_s[::-1], forward_s=forward_s
    )
    return s_sgd(
        times,
        strategy,
        gpus,
        iterations=iterations,
        plan=iteration.plan,
        decode_s=decode_s,
    )


# -- what if tasks took other times ----------------------------------------------------


def tasks_named(graph: TaskGraph, what: str) -> Bools:
    """Return a mask of the tasks of a graph that a name stands for.

    Parameters
    ----------
    graph : TaskGraph
        The tasks.
    what : str
        A kind ("all_reduce" or "allreduce"), a class of resources ("disk"), "layer:2",
        or "rank:3" for all that this rank computes alone. These tasks do not include the
        update, which is one task of all ranks.

    Returns
    -------
    ndarray of bool, shape (n,)
        Whether the name stands for each task.

    Raises
    ------
    UserError
        If the name stands for no task.
    """
    # "layer:2" has the head "layer" and the number "2", and so has "layer 2". Other
    # names have no number.
    head, _, number = what.replace(":", " ").partition(" ")
    # No task is chosen if none of the cases below holds.
    chosen = np.zeros(graph.n, bool)
    if head == "layer" and number.strip().isdigit():
        chosen = graph.layer == int(number)
    elif head == "rank" and number.strip().isdigit():
        chosen = graph.computes & (graph.rank == int(number))
    elif not number:
        chosen = _of_kind_or_class(graph, head)
    if not chosen.any():
        raise _no_such_task(graph, what)
    return chosen


def _of_kind_or_class(graph: TaskGraph, name: str) -> Bools:
    """Return whether each task is of a kind or on a class of resources, shape (n,).

    ``name`` is a kind, which may be written without underscores, or a class of resources
    such as "gpu". No task is chosen if the graph has neither of this name.
    """
    spelling = name.replace("_", "")
    for code in np.unique(graph.kind):
        if KINDS[code].replace("_", "") == spelling:
            return np.asarray(graph.kind == code)
    # No kind has this name, so it may be the name of a class of resources.
    is_of_class = np.array([_class_of(r) == name for r in graph.resources], bool)
    # Look up the resource of each task.
    return np.asarray(is_of_class[graph.resource])


def _no_such_task(graph: TaskGraph, what: str) -> UserError:
    """Return the error for a name of no task, which lists the names of a graph."""
    kinds = sorted({KINDS[code] for code in np.unique(graph.kind)})
    # Only resources that have a task are listed, because a user can change no other. The class
    # of the resource "gpu 3" is "gpu". The keys of the dictionary are the classes without
    # repetition, in their order.
    used = [graph.resources[code] for code in np.unique(graph.resource)]
    classes = dict.fromkeys(_class_of(name) for name in used)
    last_rank = int(graph.rank.max(initial=0))
    ranks = f"rank:0 to rank:{last_rank}" if last_rank > 0 else "rank:0"
    last_layer = int(graph.layer.max(initial=NO_LAYER))
    # Layers are numbered from 1. Without any layer, no such name is listed.
    layers = ""
    if last_layer != NO_LAYER:
        layers = (
            f"layer:1 to layer:{last_layer} (rows of the profile in forward order), "
        )
    similar = difflib.get_close_matches(what, [*kinds, *classes], n=1)
    guess = f"did you mean {similar[0]!r}? Otherwise " if similar else ""
    # The name is right, and similar names mean something else.
    if what == "cpu":
        guess = (
            "this resource has tasks only with measured times of the input (--inputs), under a "
            "framework that decodes pictures: give these, or "
        )
    return UserError(
        f"there is no task {what!r}: {guess}use a kind ({', '.join(kinds)}), a "
        f"resource ({', '.join(classes)}), {layers}or {ranks}"
    )


def changed(graph: TaskGraph, changes: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return a graph in which some tasks take other times.

    Parameters
    ----------
    graph : TaskGraph
        The tasks.
    changes : sequence of (str, float)
        Names of tasks as `tasks_named` reads them, and how many times as long these
        tasks take. The changes are applied one after the other.

    Returns
    -------
    TaskGraph
        The same tasks and edges with other durations.

    Raises
    ------
    UserError
        If a name means no task, or if a factor is negative or infinite.
    """
    for what, factor in changes:
        if not 0 <= factor < np.inf:
            raise UserError(
                f"{what}: tasks cannot take {factor:g} times as long: use a number >= 0"
            )
        factors = np.where(tasks_named(graph, what), factor, 1.0)
        graph = replace(graph, duration_s=factors * graph.duration_s)
    return graph


def effect_of_change(before: Schedule, after: Schedule) -> dict[str, Any]:
    """Return how a change affects a schedule.

    Parameters
    ----------
    before : Schedule
        The schedule without the change.
    after : Schedule
        The schedule with the change.

    Returns
    -------
    dict
        For each schedule, the seconds between iterations, the resource that limits
        them, and the shares of the critical path. Keys of ``after`` end in "_after".
        "iteration_speedup" is the time before the change, divided by the time after it.
    """
    effect: dict[str, Any] = {}
    for suffix, compared in (("", before), ("_after", after)):
        shares = compared.critical_shares()
        effect[f"iteration_s{suffix}"] = compared.period_s
        # The largest share comes first. A graph without tasks has none.
        effect[f"limited_by{suffix}"] = next(iter(shares), "nothing")
        effect[f"shares_of_critical_path{suffix}"] = shares
    # Iterations that take no time after the change are infinitely faster.
    effect["iteration_speedup"] = np.inf
    if after.period_s:
        effect["iteration_speedup"] = before.period_s / after.period_s
    return effect
