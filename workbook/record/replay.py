"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank waits out the recorded compute by absolute deadlines. All ranks are on one machine and share its
clock. When the last gradient of a group would be ready, a rank posts the group's collective. This is an
all-reduce. For sparsified gradients it is an all-gather of values and one of indices, after the recorded
time of selecting. Waiting is sleeping, because with more ranks than cores a rank that spins would take the
processor from gloo's threads. Rank 0 appends each iteration to a file when the iteration is complete, so that
a kill loses only the iteration in flight.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core import sparse
from ddlkit.core.case import Case
from ddlkit.core.collective import of_gradients
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import one_way_delay_s
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import sleep_until
from ddlkit.jobs.launch import Place, launch, workspace
from ddlkit.jobs.rank import Floats, Rank, Tables, job
from ddlkit.jobs.vitals import Retries, Usage, Watch, processor_times, processor_usage
from ddlkit.lab.network import Lab
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.store.files import append_text

ITERATIONS = "replay.jsonl"
"""The name of the file of iterations. Each line holds the row of an iteration and its spans."""
HEAD_START_S = 0.01
"""Seconds from the barrier to the common start, in which all ranks must have heard of the start."""
SETTLE_S = 0.1
"""Seconds around an iteration for checks and for the exchange of recorded times."""
MESSAGES_PER_SAMPLE = 16
"""How many messages a calibration posts at once, as a replay posts its groups."""
TURNS_PER_RETRY = 4
"""For each so many iterations, one that was disturbed may be played again, and one in any case.

Repeats therefore add about a quarter to a long replay at most, even if others disturb the machine all
the time.
"""
BY_GLOO = {"backend": "gloo"}
"""The argument ``join`` of `launch` for ranks that exchange messages by gloo.

A calibration must use the same backend as the replays that it is to predict.
"""


class PlannedCase(NamedTuple):
    """A case that can be replayed, with its workload before dilation and its plan."""

    case: Case
    workload: Workload
    plan: FusionPlan


def plan_case(
    profile: LayerProfile,
    spec: str,
    cost: MessageCost,
    place: Place,
    *,
    density: float = 1.0,
    straggler: float = 1.0,
    selection_sha256: str = "",
) -> PlannedCase:
    """Return the case of a profile under a plan.

    Compute is dilated: all its times are multiplied by a factor, so that an iteration computes as
    long as one message with all gradients takes. Where compute and messages take equally long, an
    error of a model of their overlap shows most.

    Parameters
    ----------
    profile : LayerProfile
        The measured layers of the network.
    spec : str
        The name of the plan.
    cost : MessageCost
        The cost of sending a group of gradients, by the bytes of all its gradients. If it is a
        `sparse.SparseGather`, its times of selecting are dilated, too.
    place : Place
        Where the ranks run.
    density, straggler, selection_sha256
        As of `Case`.

    Raises
    ------
    UserError
        If the plan cannot be made for the profile.
    """
    workload = profile.workload()
    largest_message_s = float(cost(workload.bytes.sum()))
    # The factor is rounded to four digits, as the case records it.
    dilation = float(f"{largest_message_s / workload.compute_s:.4g}")
    plan = make_plan(
        spec, workload.scaled(dilation), _with_dilated_selection(cost, dilation)
    )
    case = Case(
        kind="replay",
        network=profile.network,
        device=profile.device,
        batch=profile.batch,
        # 0 stands for an unknown number of workers.
        workers=cost.workers or 0,
        link=place.name,
        link_bits_per_s=place.link_bits_per_s,
        collective=cost.collective,
        plan=plan.planner,
        ends=";".join(map(str, plan.ends)),
        dilation=dilation,
        profile_sha256=profile.sha256,
        density=density,
        straggler=straggler,
        selection_sha256=selection_sha256,
    )
    # The workload goes undilated. `Script.from_case` dilates it by the factor in the case.
    return PlannedCase(case, workload, plan)


def _with_dilated_selection(cost: MessageCost, dilation: float) -> MessageCost:
    """Return the cost with its times of selecting multiplied by ``dilation``, if it has any."""
    if not isinstance(cost, sparse.SparseGather) or cost.selecting is None:
        return cost
    selecting = cost.selecting

    def dilated(elements: Any, density: float) -> Any:
        return dilation * selecting(elements, density)

    return replace(cost, selecting=dilated)


def _refuse_other_collective(case: Case) -> None:
    """Raise UserError if a case names a collective that a replay does not post."""
    posted = of_gradients(sparse=case.sparse)
    if case.collective == posted:
        return
    kind = "sparse" if case.sparse else "dense"
    raise UserError(
        f"replay: case {case.key} names {case.collective}: {kind} gradients are "
        f"sent by {posted}"
    )


@dataclass(frozen=True)
class Script:
    """What a rank plays in one iteration: when it waits, and what it sends.

    All times are dilated, which multiplies recorded times by the dilation of the case.

    Attributes
    ----------
    case : Case
        The case that is replayed.
    forward_s : float
        The end of the forward pass, in seconds from the common start.
    ready_s : sequence of float
        When each group is ready, in seconds from the common start, without the selections before it.
    bytes : sequence of int
        The dense bytes of each group.
    elements : sequence of int
        The number of elements of each group.
    update_s : float
        The seconds of the update.
    kept : sequence of int
        How many elements of each group are sent. Empty if all are sent.
    selection_s : sequence of float
        The seconds of selecting from each group. Empty if nothing is selected.
    """

    case: Case
    forward_s: float
    ready_s: Sequence[float]
    bytes: Sequence[int]
    elements: Sequence[int]
    update_s: float
    kept: Sequence[int] = ()
    selection_s: Sequence[float] = ()

    @classmethod
    def from_case(
        cls, planned: PlannedCase, selection: sparse.Selecting | None = None
    ) -> Script:
        """Return the script of a case, for a rank that is no straggler.

        Parameters
        ----------
        planned : PlannedCase
            The case.
        selection : Selecting, optional
            Takes numbers of elements and a density, and returns the recorded seconds of selecting.
            A sparse case waits them out.

        Raises
        ------
        UserError
            If the case is sparse and no ``selection`` is given, or if the case names a collective
            that a replay does not post.
        """
        case = planned.case
        plan = planned.plan
        _refuse_other_collective(case)
        dilated = planned.workload.scaled(case.dilation)
        elements = sparse.elements_of(plan.group_bytes(dilated)).astype(int)
        kept: Sequence[int] = ()
        selection_s: Sequence[float] = ()
        if case.sparse:
            if selection is None:
                raise UserError(
                    f"replay: case {case.key} waits out selections of unknown times"
                )
            kept = [sparse.selected(size, case.density) for size in elements.tolist()]
            dilated_s = case.dilation * selection(elements, case.density)
            selection_s = dilated_s.tolist()
        return cls(
            case=case,
            forward_s=dilated.forward_s,
            ready_s=plan.group_ready_s(dilated).tolist(),
            bytes=plan.group_bytes(dilated).tolist(),
            elements=elements.tolist(),
            update_s=dilated.update_s,
            kept=kept,
            selection_s=selection_s,
        )

    @property
    def compute_s(self) -> float:
        """Return the seconds of the iteration without communication, including the update."""
        # The last group is ready when the backward pass ends. Selections come on top.
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> Sequence[int]:
        """Return the bytes that a rank hands over for each group.

        Of a dense group these are all its bytes. Of a sparse group, each selected value is sent
        with its index, which is as large.
        """
        if not self.kept:
            return self.bytes
        return [2 * sparse.ELEMENT_BYTES * k for k in self.kept]

    @property
    def expected_s(self) -> float:
        """Return a generous estimate of the iteration in seconds, for a limit of time.

        The estimate counts compute and messages one after the other. Bytes of messages count twice
        if the rate of the link is known.
        """
        case = self.case
        if case.link_bits_per_s:
            # A byte has 8 bits. It counts twice, because in a ring all-reduce each rank sends almost
            # twice the bytes of a group. For an all-gather, this is a margin.
            s_per_byte = 2 * 8 / case.link_bits_per_s
        else:
            # The rate is unknown. 100 MB/s are assumed, which is a choice.
            s_per_byte = 1e-8
        # An all-gather, by which sparse gradients are sent, brings a rank the bytes of all ranks.
        copies = case.workers if self.kept else 1
        bytes_s = sum(self.sent_bytes) * s_per_byte * copies
        # The message of each group goes around a ring, in about 2 N steps for N workers.
        steps = 2 * case.workers * len(self.bytes)
        # A step takes a round trip, because a rank asks for data before it gets them.
        round_trip_s = 2 * one_way_delay_s(case.link)
        delays_s = steps * round_trip_s
        messages_s = bytes_s + delays_s
        # The slowest rank computes longer by the factor ``straggler``, which is 1 if all ranks
        # compute equally long. SETTLE_S is the time of the checks around the iteration.
        return self.compute_s * case.straggler + messages_s + SETTLE_S

    def played_by(self, rank: int) -> Script:
        """Return the script of a rank.

        If the case has a straggler, this is the last rank, whose times are all longer by a factor.
        """
        is_last = rank == self.case.workers - 1
        factor = self.case.straggler if is_last else 1.0
        return replace(
            self,
            forward_s=factor * self.forward_s,
            ready_s=[factor * ready_s for ready_s in self.ready_s],
            selection_s=[factor * seconds for seconds in self.selection_s],
            update_s=factor * self.update_s,
        )


class Replayed(NamedTuple):
    """The tables of a replay: ``runs``, and ``timeline`` of the first round. Times are dilated."""

    runs: pd.DataFrame
    timeline: pd.DataFrame


def calibrate(
    lab: Lab, settings: CollectivesSettings, timeout_s: float = 600.0
) -> pd.DataFrame:
    """Measure collectives between all ranks of the lab and return table ``collectives``.

    The ranks are ended, and UserError is raised, after ``timeout_s`` seconds.
    """
    tables = launch(
        collectives_job,
        settings,
        ranks=lab.ranks,
        place=lab,
        join=BY_GLOO,
        timeout_s=timeout_s,
    )
    return tables["collectives"]


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of the job.

    Attributes
    ----------
    scripts : sequence of Script
        The script of each case.
    turns : sequence of (int, int)
        For each iteration, the position of its script in ``scripts`` and the number of its round,
        in the order of play.
    tries : int
        How often an iteration is played at most, while others disturb the machine.
    """

    scripts: Sequence[Script]
    turns: Sequence[tuple[int, int]]
    tries: int


def replay(
    place: Place,
    ranks: int,
    cases: Sequence[PlannedCase],
    rounds: int = 3,
    *,
    selection: sparse.Selecting | None = None,
    done: Collection[tuple[str, int]] = (),
    tries: int = 1,
    out: Path | None = None,
) -> Replayed:
    """Replay every case once per round: sleep for its compute, and send its messages.

    All iterations run in one launch of the ranks.

    Parameters
    ----------
    place : Place
        Where the ranks run.
    ranks : int
        The number of ranks.
    cases : sequence of PlannedCase
        The cases.
    rounds : int, optional
        How often each case is played.
    selection : Selecting, optional
        The recorded seconds of selecting, which sparse cases need.
    done : collection of (str, int), optional
        For each iteration that need not be played, the key of its case and the number of its round,
        which counts from 0.
    tries : int, optional
        How often an iteration is played at most, while others disturb the machine.
    out : Path, optional
        The directory of the file to which iterations are appended. An iteration that an
        interrupted replay left there is not played again.

    Returns
    -------
    Replayed
        The tables of all iterations of ``cases`` in ``out``, also of those that were there before.

    Raises
    ------
    UserError
        As `launch` and `Script.from_case` do.
    """
    scripts = [Script.from_case(planned, selection) for planned in cases]
    round_s = sum(script.expected_s for script in scripts)
    with workspace(out) as directory:
        # The iterations that the file holds already, and those that need not be played, each by the
        # key of its case and the number of its round.
        left_out = {*keep_complete(directory), *done}
        # The iterations to play, each by the position of its case and the number of its round. All
        # cases of a round come before the next round, so that drift of the machine meets them
        # alike.
        turns = []
        for repeat in range(rounds):
            for position, planned in enumerate(cases):
                if (planned.case.key, repeat) not in left_out:
                    turns.append((position, repeat))
        # A minute to start the ranks, and three times as long as all tries are expected to take.
        # Only a replay that hangs takes longer.
        timeout_s = 60 + 3 * tries * rounds * round_s
        launch(
            replay_job,
            ReplaySettings(scripts, turns, tries),
            ranks=ranks,
            place=place,
            join=BY_GLOO,
            timeout_s=timeout_s,
            out=directory,
        )
        return read_replayed(directory, [planned.case for planned in cases])


# -- in each rank ----------------------------------------------------------------------


@job(ReplaySettings)
def replay_job(me: Rank, settings: ReplaySettings) -> Sequence[Tables]:
    """Play all iterations of the settings on this rank.

    Rank 0 appends each iteration to a file, which a kill leaves usable. No tables are returned.
    """
    # How many disturbed iterations may still be played again.
    retries = Retries(max(1, len(settings.turns) // TURNS_PER_RETRY))
    # For each iteration: its script, the number of its round, and how often it may still be played.
    pending = deque(
        (settings.scripts[position], repeat, settings.tries)
        for position, repeat in settings.turns
    )
    while pending:
        script, repeat, tries_left = pending.popleft()
        recorded_s, usage = _iterate(me, script)
        # An iteration that others disturbed is played again at the end. The usage is that of all
        # ranks. All ranks therefore decide alike and go on with the same script, without which
        # their collectives would not match.
        if tries_left > 1 and retries.again(usage):
            pending.append((script, repeat, tries_left - 1))
            continue
        # A row of times for each rank.
        ranks_s = peers.everyones(recorded_s)
        if me.rank == 0:
            append_iteration(me.out, script, repeat, ranks_s, usage)
    return ()


class _Gather(NamedTuple):
    """The memory of an all-gather.

    Attributes
    ----------
    received : Tensor, shape (ranks * k,)
        Gets what all ranks send, in the order of the ranks.
    sent : Tensor, shape (k,)
        What this rank sends.
    """

    received: torch.Tensor
    sent: torch.Tensor

    @classmethod
    def of(cls, sent: torch.Tensor, ranks: int) -> _Gather:
        """Return the memory for gathering tensors like ``sent`` from so many ranks."""
        return cls(received=sent.new_zeros(ranks * len(sent)), sent=sent)


class _SparseGroup(NamedTuple):
    """The two messages of a sparse group of gradients."""

    values: _Gather
    indices: _Gather


class _Messages:
    """The messages of a rank in one iteration: their memory, sending and checking.

    A thread waits for the collectives one after the other and notes when each group is complete. It
    notes this late, because it must wake up first, as a rank that waits must, too. A callback of
    the collective would need no waking up, but it would hold up the next collective in gloo's
    thread.

    Parameters
    ----------
    me : Rank
        This rank.
    script : Script
        What this rank plays.
    """

    def __init__(self, me: Rank, script: Script) -> None:
        self._script = script
        self._ranks = me.world_size
        # All collectives of the iteration, for which `wait` waits.
        self._works: list[dist.Work] = []
        # Each rank sends its number, counted from 1, as every value, so that `check` knows what
        # must arrive.
        own_value = me.rank + 1.0
        # The groups of a dense case. An all-reduce replaces what a rank sends by the sum, so that
        # one tensor is enough for each group.
        self._dense: list[torch.Tensor] = []
        # The groups of a sparse case.
        self._sparse: list[_SparseGroup] = []
        # If the case is sparse, ``kept`` has the number of elements that each group sends.
        # Otherwise it is empty.
        if script.kept:
            for k in script.kept:
                values = torch.full((k,), own_value)
                indices = torch.arange(k, dtype=torch.int32)
                group = _SparseGroup(
                    values=_Gather.of(values, self._ranks),
                    indices=_Gather.of(indices, self._ranks),
                )
                self._sparse.append(group)
        else:
            self._dense = [torch.full((n,), own_value) for n in script.elements]
        # The last collective of each group, with which the group is complete, in the order of
        # posting.
        self._posted: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self._complete_s: list[float] = []
        # A daemon thread does not keep the process of a rank that fails alive.
        self._noting = threading.Thread(target=self._note, daemon=True)
        self._noting.start()

    def post(self, group: int) -> float:
        """Post the collectives of a group, without waiting for them.

        Return the clock's seconds when all were posted.
        """
        # If the case is sparse, values and indices are sent. For a dense case, ``kept`` is empty.
        if self._script.kept:
            works = [
                peers.gather_single(gather.received, gather.sent, async_op=True)
                for gather in self._sparse[group]
            ]
        else:
            works = [dist.all_reduce(self._dense[group], async_op=True)]
        # `_note` waits for the last collective, with which the group is complete.
        self._posted.put(works[-1])
        self._works += works
        return time.perf_counter()

    def wait(self) -> tuple[float, Floats]:
        """Wait until all posted collectives are complete.

        Returns
        -------
        waited_s : float
            The clock's seconds at the end of the wait.
        complete_s : ndarray, shape (G,)
            The clock's seconds at which each of G groups was complete.
        """
        for work in self._works:
            work.wait()
        waited_s = time.perf_counter()
        self._noting.join()
        # All groups were complete at ``waited_s``. If the noting thread woke up later, it noted a
        # later time, which is replaced by ``waited_s``.
        return waited_s, np.minimum(self._complete_s, waited_s)

    def check(self) -> None:
        """Raise RuntimeError unless every sum is right and every gathered element is in its place.

        A case has either dense messages, which are summed, or sparse messages, which are gathered.
        The list of the other kind is empty.
        """
        n = self._ranks
        # Rank r has sent the number r + 1, so that the sum is 1 + 2 + ... + n. Floats hold it exactly.
        expected_sum = n * (n + 1) / 2
        # Whether all elements of a group are right, by group.
        is_right = [bool((sums == expected_sum).all()) for sums in self._dense]
        # The number that each rank sent, as a column. Below, what was received has a row for each
        # sending rank.
        expected_values = torch.arange(1.0, n + 1)[:, None]
        for values, indices in self._sparse:
            values_right = (values.received.view(n, -1) == expected_values).all()
            # Every rank sends the same indices.
            indices_right = (indices.received.view(n, -1) == indices.sent).all()
            is_right.append(bool(values_right and indices_right))
        if not all(is_right):
            # The first wrong group.
            group = is_right.index(False)
            raise RuntimeError(
                f"replay: wrong values in group {group} of case {self._script.case.key}"
            )

    def _note(self) -> None:
        """Note when each group is complete, in the noting thread."""
        # Once for each group, because ``ready_s`` has a time for each.
        for _ in self._script.ready_s:
            # `get` waits until the next group is posted.
            self._posted.get().wait()
            self._complete_s.append(time.perf_counter())


def _iterate(me: Rank, script: Script) -> tuple[Floats, Usage]:
    """Play one iteration, which all ranks start at once.

    Raises RuntimeError if `_Messages.check` finds that something wrong was received.

    Returns
    -------
    recorded_s : ndarray, shape (4 G + 3,)
        The times of this rank, as in `make_timeline`, with G groups of gradients.
    usage : Usage
        How all ranks used the cores. Its share of busy cores is that from the first message to the
        last, because ranks mostly sleep over a whole iteration.
    """
    script = script.played_by(me.rank)
    messages = _Messages(me, script)
    watch = Watch(me.rank)
    # All ranks share the clock of the machine. They start
    # together, a little after the last rank has come here.
    last_arrival_s = peers.slowest([time.perf_counter()])
    start_s = float(last_arrival_s[0]) + HEAD_START_S
    recorded_s, sending = _play(script, messages, start_s)
    # Of the whole iteration, except for the share of busy cores, which is that of sending.
    usage = peers.usage_of_all(replace(watch.usage(), busy=sending.busy))
    # Whether sums and gathered elements are right is checked after the iteration, to cost no time in it.
    messages.check()
    return recorded_s, usage


def _play(script: Script, messages: _Messages, start_s: float) -> tuple[Floats, Usage]:
    """Wait out the compute of a script and post its messages.

    Parameters
    ----------
    script : Script
        The script of this rank.
    messages : _Messages
        Its messages.
    start_s : float
        The clock's seconds at the common start of all ranks.

    Returns
    -------
    recorded_s : ndarray, shape (4 G + 3,)
        Seconds since ``start_s``, as in `make_timeline`, with G groups of gradients.
    sending : Usage
        How cores were used from the first message to the last.
    """
    n_groups = len(script.ready_s)
    # The clock's seconds by group: when the rank woke up after its sleep in place of the backward
    # pass, when it had selected, and when it had posted.
    awake_s = np.empty(n_groups)
    selected_s = np.empty(n_groups)
    posted_s = np.empty(n_groups)
    # The seconds of all selections so far. They delay the groups that follow, because ``ready_s``
    # leaves selections out.
    selecting_s = 0.0
    # `sleep_until` returns when the rank really woke up.
    forward_end_s = sleep_until(start_s + script.forward_s)
    for group, planned_s in enumerate(script.ready_s):
        ready_s = start_s + planned_s + selecting_s
        awake_s[group] = sleep_until(ready_s)
        # A dense group needs no selection, so that it counts as selected when the rank wakes up.
        selected_s[group] = awake_s[group]
        if script.selection_s:
            selecting_s += script.selection_s[group]
            selected_s[group] = sleep_until(ready_s + script.selection_s[group])
        if group == 0:
            # The use of the cores counts from the first message on. Before, ranks mostly sleep.
            times_before = processor_times()
        posted_s[group] = messages.post(group)
    waited_s, complete_s = messages.wait()
    sending = processor_usage(times_before, processor_times())
    end_s = sleep_until(waited_s + script.update_s)
    # Four arrays of G times, and three single times, in the order of `make_timeline`.
    clock_s = np.hstack(
        [awake_s, selected_s, posted_s, complete_s, forward_end_s, waited_s, end_s]
    )
    return clock_s - start_s, sending


# -- what comes back -------------------------------------------------------------------


def make_timeline(script: Script, ranks_s: Floats) -> Timeline:
    """Return the spans of all ranks, in seconds from the common start.

    A span is a part of an iteration, such as the backward pass of a group. The span of a collective
    begins right before it is posted, or when the collective before it ends if that is later. The
    ``bytes`` of a collective are those that a rank sends.

    Parameters
    ----------
    script : Script
        The script of the case.
    ranks_s : ndarray, shape (ranks, 4 G + 3)
        The times of each rank in seconds. They are four blocks of G times, in which each group
        has one:

        * when the rank woke up, after its sleep in place of the group's backward pass,
        * when it had selected elements of the group,
        * when it had posted the group,
        * when the collectives of the group were complete.

        Three single times follow: the ends of the forward pass, of waiting for all collectives,
        and of the update.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, rank_s in enumerate(ranks_s)
        for span in _spans(script.played_by(rank), rank_s)
    )


def _spans(script: Script, recorded_s: Floats) -> Iterable[dict[str, Any]]:
    """Yield the spans of one rank from its recorded times, as in `make_timeline`.

    ``script`` is that of the rank. ``recorded_s`` has shape (4 G + 3,) for G groups of gradients.
    """
    forward_end_s, waited_s, end_s = recorded_s[-3:].tolist()
    # A row of four times for each group.
    groups_s = recorded_s[:-3].reshape(4, -1).T.tolist()
    yield _span("forward", -1, 0.0, forward_end_s)
    backward_begin_s = forward_end_s
    # When the collective before ended. For the first collective, the link is free from the common
    # start on.
    link_free_s = 0.0
    for group, n_bytes in enumerate(script.bytes):
        awake_s, selected_s, posted_s, complete_s = groups_s[group]
        # The rank sleeps in place of the backward pass, which ends when it wakes up.
        yield _span("backward", group, backward_begin_s, awake_s, n_bytes=n_bytes)
        # Elements are selected only from sparse groups. For others, selected_s is awake_s.
        if script.kept:
            yield _span("sparsify", group, awake_s, selected_s, n_bytes=n_bytes)
        # The rank begins to post the group at selected_s. Collectives run one after another.
        yield _span(
            script.case.collective,
            group,
            max(selected_s, link_free_s),
            complete_s,
            stream="communication",
            n_bytes=script.sent_bytes[group],
        )
        # The rank goes on with the next group once it has posted this one.
        backward_begin_s = posted_s
        link_free_s = complete_s
    yield _span("wait", -1, backward_begin_s, waited_s)
    yield _span("update", -1, waited_s, end_s)


def _span(
    kind: str,
    group: int,
    start_s: float,
    end_s: float,
    stream: str = "compute",
    n_bytes: int = 0,
) -> dict[str, Any]:
    """Return a row of table ``timeline``, without the columns of the rank and the case.

    ``group`` is -1 for a span that belongs to no group of gradients. ``n_bytes`` is 0 for a span
    without gradients.
    """
    return {
        "task": kind if group < 0 else f"{kind} {group}",
        "kind": kind,
        "stream": stream,
        "group": group,
        "start_s": start_s,
        # No span has a negative length, even if its two times were noted in the wrong order.
        "end_s": max(start_s, end_s),
        "bytes": n_bytes,
    }


# -- the file --------------------------------------------------------------------------


def append_iteration(
    out: Path, script: Script, repeat: int, ranks_s: Floats, usage: Usage
) -> None:
    """Append an iteration to the file in ``out``, as one line of JSON.

    The line holds the iteration's row of table ``runs``, and a list of its rows of table
    ``timeline``, which is empty after the first round.

    Parameters
    ----------
    out : Path
        The directory of the file.
    script : Script
        The script of the case.
    repeat : int
        The number of the round, which counts from 0.
    ranks_s : ndarray, shape (ranks, 4 G + 3)
        The times of each rank, as in `make_timeline`.
    usage : Usage
        How all ranks used the cores.
    """
    # An iteration ends with the update of its slowest rank.
    iteration_s = float(ranks_s[:, -1].max())
    # How long the slowest rank computes, without communication. A straggler is always the last
    # rank. Without a straggler, the last rank computes as long as all others.
    last_rank = len(ranks_s) - 1
    compute_s = script.played_by(last_rank).compute_s
    row = {
        "case": script.case.key,
        "repeat": repeat,
        # The first and only iteration of this case in the round.
        "iteration": 0,
        "iteration_s": iteration_s,
        "compute_s": compute_s,
        "exposed_communication_s": iteration_s - compute_s,
        "processor_load": usage.busy,
        "processor_limited": usage.limited,
        "stolen": usage.stolen,
        "late": usage.late,
        "others": usage.others,
        "disturbed": usage.disturbed,
    }
    spans = []
    # Table ``timeline`` has the spans of the first round only.
    if repeat == 0:
        spans = make_timeline(script, ranks_s).to_frame().to_dict("records")
    append_text(out / ITERATIONS, json.dumps([row, spans]) + "\n")


def keep_complete(out: Path) -> list[tuple[str, int]]:
    """Remove an incomplete last line, which a kill leaves, from the file of iterations in ``out``.

    If there is no file, an empty one is made. Returns the key of the case and the number of the
    round of each iteration that the file holds.
    """
    text = _whole_lines(out)
    (out / ITERATIONS).write_text(text)
    # Each line holds the row of an iteration and its spans.
    rows = [row for row, _ in map(json.loads, text.splitlines())]
    return [(row["case"], row["repeat"]) for row in rows]


def read_replayed(out: Path, cases: Iterable[Case]) -> Replayed:
    """Return the tables of those iterations in ``out`` that belong to ``cases``.

    Raises UserError if there is no such iteration.
    """
    columns_by_key = {case.key: asdict(case) for case in cases}
    runs = []
    timeline = []
    # Each line holds the row of an iteration and its spans.
    for row, spans in map(json.loads, _whole_lines(out).splitlines()):
        # The file may hold iterations of other cases, which an interrupted replay has left.
        if row["case"] not in columns_by_key:
            continue
        runs.append({**row, **columns_by_key[row["case"]], "origin": "replayed"})
        iteration = {"case": row["case"], "repeat": row["repeat"]}
        timeline += [{**iteration, **span} for span in spans]
    if not runs:
        raise UserError(f"replay: no iteration was completed in {out}")
    columns = ["case", "repeat", *TIMELINE_COLUMNS]
    return Replayed(pd.DataFrame(runs), pd.DataFrame(timeline, columns=columns))


def _whole_lines(out: Path) -> str:
    """Return the whole lines of the file in ``out``, without half a line that a kill has left.

    The text is empty if there is no file or no whole line.
    """
    path = out / ITERATIONS
    text = path.read_text() if path.exists() else ""
    # Without any end of a line, `rfind` returns -1.
    return text[: text.rfind("\n") + 1]
