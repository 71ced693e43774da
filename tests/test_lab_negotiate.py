"""Laws of negotiation: nothing leaves before every rank has it ready, and nothing else is changed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.papers.osf.breakdown import of_timeline
from ddlkit.run.jobs.launch import Place
from ddlkit.run.lab import negotiate, replay
from ddlkit.run.lab.negotiate import Negotiator, coordinate
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.script import Replayed
from places import TINY, planned

SLOWER = 1.5


@contextmanager
def coordinated(ranks: int) -> Iterator[Sequence[socket.socket]]:
    """The lines of all ranks, with a coordinator at their other ends."""
    near, far = zip(*(socket.socketpair() for _ in range(ranks)), strict=True)
    desk = threading.Thread(target=coordinate, args=(far,))
    desk.start()
    try:
        yield near
    finally:
        for line in near:
            line.shutdown(socket.SHUT_RDWR)
        desk.join(10)
        assert not desk.is_alive(), "the coordinator outlives its ranks"
        for line in (*near, *far):
            line.close()


@contextmanager
def negotiators(ranks: int) -> Iterator[list[Negotiator]]:
    """Those of all ranks, in this process."""
    with coordinated(ranks) as lines:
        yield [Negotiator(line) for line in lines]


@given(st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_group_is_answered_once_when_the_last_rank_has_reported_it(
    ranks: int, groups: int, chance: Random
) -> None:
    """Whatever the ranks' reports are interleaved like; and so again in the next iteration."""
    with coordinated(ranks) as lines:
        for _ in range(2):
            turns = [rank for rank in range(ranks) for _ in range(groups)]
            chance.shuffle(turns)
            reported = [0] * ranks
            answered = 0
            for rank in turns:
                with pytest.raises(BlockingIOError):  # no answer but those already heard
                    lines[rank].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                group = reported[rank]
                reported[rank] += 1
                lines[rank].sendall(negotiate._GROUP.pack(group))
                if min(reported) > answered:  # the last that this group needed
                    for line in lines:
                        answer = line.recv(negotiate._GROUP.size, socket.MSG_WAITALL)
                        assert negotiate._GROUP.unpack(answer) == (group,)
                    answered += 1
            assert answered == groups


def test_every_rank_posts_all_groups_in_one_order_and_computing_is_not_held_up() -> None:
    groups = 50
    with negotiators(3) as ranks:
        posted: list[list[int]] = [[] for _ in ranks]
        for rank, seen in zip(ranks, posted, strict=True):
            rank.begin(seen.append)
        for rank in ranks[:-1]:
            for group in range(groups):  # returns at once, though the last rank has reported none
                rank.report(group)
        assert not any(posted)
        for group in range(groups):
            ranks[-1].report(group)
        for rank in ranks:
            rank.finish()
        assert posted == [list(range(groups))] * 3


def test_what_goes_wrong_is_told_to_the_rank_that_waits() -> None:
    def broken(group: int) -> None:
        raise RuntimeError(f"cannot send group {group}")

    with negotiators(1) as (rank,):
        rank.begin(broken)
        rank.report(7)
        with pytest.raises(RuntimeError, match="cannot send group 7"):
            rank.finish()
    near, far = socket.socketpair()
    with near:
        rank = Negotiator(near)
        rank.begin(lambda group: None)
        rank.report(0)
        far.close()
        with pytest.raises(ConnectionError, match="coordinator"):
            rank.finish()


# -- in replays --------------------------------------------------------------------------------


def replayed(place: Place, ranks: int) -> Replayed:
    """One by one and fused, equal and unequal ranks, negotiated and not."""
    cases = [
        planned(spec, place, workers=ranks, straggler=slower, negotiated=negotiated)
        for spec in ("none", "buffer:512KiB")
        for slower in (1.0, SLOWER)
        for negotiated in (False, True)
    ]
    return replay.replay(place, ranks, cases, 1)


def spans_by_case(found: Replayed) -> Iterator[tuple[pd.Series, Timeline]]:
    """Every case with its timeline."""
    for _, row in found.runs.iterrows():
        spans = found.timeline[found.timeline["case"] == row["case"]]
        yield row, Timeline(**{name: spans[name].to_numpy() for name in COLUMNS})


def check_laws(found: Replayed, ranks: int) -> None:
    assert (found.runs["iteration_s"] >= found.runs["compute_s"]).all()
    assert len(found.runs) == 8 and found.runs["negotiated"].sum() == 4
    for row, spans in spans_by_case(found):
        agreed = spans.select(spans.kind == "negotiate")
        messages = spans.select(spans.kind == "all_reduce")
        backward = spans.select(spans.kind == "backward")
        assert messages.bytes.sum() == ranks * TINY.bytes.sum()
        phases = of_timeline(spans, rank=0)
        # The parts are all of the time from the first gradient to the last message's end.
        mine = [messages.select(messages.rank == 0), backward.select(backward.rank == 0)]
        total_s = mine[0].end_s.max() - mine[1].end_s.min()
        assert sum(phases.values()) == pytest.approx(total_s, abs=1e-9)
        if not row["negotiated"]:
            assert agreed.n == 0 and phases["NEGOTIATE"] == 0
            continue
        assert agreed.n == messages.n
        for group in np.unique(messages.group):
            told_s = agreed.start_s[agreed.group == group].max()
            assert (agreed.end_s[agreed.group == group] >= told_s).all(), "answered too early"
            assert (messages.start_s[messages.group == group] >= told_s).all(), "sent too early"
        if row["straggler"] > 1:
            # The slow rank's gradients are not there before it has computed them.
            slowest_s = TINY.forward_s + SLOWER * TINY.backward_s.sum()
            assert agreed.end_s.max() >= slowest_s
            assert phases["NEGOTIATE"] > 0


@pytest.mark.lab
@pytest.mark.usefixtures("require_lab")
def test_in_the_lab_nothing_leaves_before_all_are_ready() -> None:
    with Lab(LabShape(3, 1e9)) as lab:
        check_laws(replayed(lab, 3), 3)
