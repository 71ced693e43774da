"""Laws of the emulated link: nothing appears or vanishes, no rate is exceeded, and chance is fair."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.lablink import read_link
from ddlkit.run.lab import conditions, tunnel
from ddlkit.run.lab.conditions import Background, Change, Conditions
from ddlkit.run.lab.network import LabShape
from ddlkit.run.lab.shaper import NEVER_S, Line, Piece, Shaper, Size, size_of

MSS, HEAD = 1448, 52
Sent = tuple[float, int, int, Size]  # when, from whom, to whom, what
Arrived = list[tuple[float, Piece]]

sizes = st.builds(
    lambda payload: size_of(HEAD + payload, HEAD, MSS), st.integers(0, 65_000)
)  # from an acknowledgement to the largest packet
seconds = st.floats(0, 0.02)


@st.composite
def traffic(draw: st.DrawFn, ranks: int = 3) -> list[Sent]:
    """Packets between ranks, in the order of their times."""
    gaps = draw(st.lists(st.tuples(seconds, sizes, st.integers(0, 8)), min_size=1, max_size=25))
    now_s, found = 0.0, []
    for gap_s, size, way in gaps:
        now_s += gap_s
        source = way % ranks
        found.append((now_s, source, (source + 1 + way // ranks) % ranks, size))
    return found


@st.composite
def any_conditions(draw: st.DrawFn) -> Conditions:
    delay_s = draw(st.floats(0, 0.01))
    times = sorted(draw(st.lists(seconds, max_size=3)))
    rates = st.sampled_from([1e7, 5e7, 1e9])
    return Conditions(
        delay_s=delay_s,
        jitter_s=delay_s * draw(st.floats(0, 1)),
        loss=draw(st.sampled_from([0.0, 0.01, 0.3])),
        rates=((1, draw(rates)),),
        changes=tuple(Change(at_s, draw(rates), draw(seconds)) for at_s in times),
        background=Background(draw(st.sampled_from([0.0, 0.5])), 0.003, draw(seconds)),
        queue_bytes=draw(st.sampled_from([128 * 1024, 2**26])),
    )


def play(shaper: Shaper, sent: Sequence[Sent], lag_s: float = 0.0) -> Arrived:
    """What arrives when everything is sent, and taken out by who comes ``lag_s`` after each packet."""
    arrived: Arrived = []
    for number, (now_s, source, target, size) in enumerate(sent):
        arrived += shaper.take(now_s - lag_s)
        shaper.send(now_s, source, target, size, number)
    while shaper.next_s < NEVER_S:
        arrived += shaper.take(shaper.next_s)
    return arrived


def shaper_of(how: Conditions, rate: float = 1e8, ranks: int = 3) -> Shaper:
    return Shaper([rate] * ranks, how)


@given(traffic(), any_conditions())
def test_every_frame_arrives_once_or_is_counted_as_lost_or_dropped(
    sent: list[Sent], how: Conditions
) -> None:
    shaper = shaper_of(how)
    arrived = play(shaper, sent)
    lines = shaper.up + shaper.down
    gone = sum(line.lost + line.dropped for line in lines)
    assert sum(p.stop - p.start for _, p in arrived) + gone == sum(s[3].frames for s in sent)
    seen = Counter((p.load, frame) for _, p in arrived for frame in range(p.start, p.stop))
    assert not seen or max(seen.values()) == 1
    assert all(p.target == sent[p.load][2] for _, p in arrived)


@given(traffic(), any_conditions())
def test_packets_between_two_ranks_never_overtake_each_other(
    sent: list[Sent], how: Conditions
) -> None:
    arrived = play(shaper_of(how), sent)
    for way in {(s, t) for _, s, t, _ in sent}:
        order = [(p.load, p.start) for _, p in arrived if (p.source, p.target) == way]
        assert order == sorted(order)
    assert [due_s for due_s, _ in arrived] == sorted(due_s for due_s, _ in arrived)


@given(traffic(), any_conditions())
def test_no_packet_is_earlier_than_rate_and_delay_allow(sent: list[Sent], how: Conditions) -> None:
    fastest = max(1e8, *(c.rate_bits_per_s or 0 for c in how.changes), *(r for _, r in how.rates))
    least_s = min(how.delay_s, *(c.delay_s or 0 for c in how.changes), math.inf)
    least_s = max(0.0, least_s - how.jitter_s)
    for due_s, piece in play(shaper_of(how), sent):
        on_wire_s = piece.size.of(piece.start, piece.stop) * 8 / fastest
        assert due_s >= sent[piece.load][0] + 2 * least_s + on_wire_s - 1e-12


@given(traffic(), st.floats(0, 0.01), st.sampled_from([0.0, 0.001]))
def test_over_no_window_a_link_gives_more_than_its_rate(
    sent: list[Sent], delay_s: float, burst_s: float
) -> None:
    rate = 1e8
    arrived = play(shaper_of(Conditions(delay_s=delay_s, burst_s=burst_s), rate), sent)
    for rank in range(3):
        ends = [(due_s, p.size.bytes) for due_s, p in arrived if p.target == rank]
        for first in range(len(ends)):
            after = np.cumsum([n for _, n in ends[first + 1 :]])
            window_s = np.array([due_s for due_s, _ in ends[first + 1 :]]) - ends[first][0]
            assert (after <= rate / 8 * (window_s + burst_s) + 1e-3).all()


@given(traffic(), st.floats(0, 0.05))
def test_a_delay_comes_on_top_of_each_of_the_two_links(sent: list[Sent], delay_s: float) -> None:
    at_once, later = (
        play(shaper_of(Conditions(delay_s=one)), [s for s in sent if s[1] == 0])
        for one in (0.0, delay_s)
    )
    due_s = {p.load: due_s for due_s, p in at_once}
    for due, piece in later:
        assert due == pytest.approx(due_s[piece.load] + 2 * delay_s, abs=1e-12)


@given(traffic(), any_conditions(), st.floats(0, 0.01))
def test_who_takes_late_gets_the_same(sent: list[Sent], how: Conditions, lag_s: float) -> None:
    def told(arrived: Arrived) -> list[Any]:
        return sorted((due_s, p.load, p.start, p.stop) for due_s, p in arrived)

    assert told(play(shaper_of(how), sent)) == told(play(shaper_of(how), sent, lag_s))


@given(sizes, st.sampled_from([1e7, 1e9]), st.sampled_from([1e7, 1e9]))
def test_frames_pass_two_links_at_once(size: Size, up: float, down: float) -> None:
    """The slower link takes all frames, the faster one frame: as a row of frames does by itself."""
    sent_s = arrived_s = 0.0
    for frame in range(size.frames):
        n_bits = 8 * size.of(frame, frame + 1)
        sent_s += n_bits / up
        arrived_s = max(sent_s, arrived_s) + n_bits / down
    ((due_s, _),) = play(Shaper([up, down], Conditions(rates=((1, down),))), [(0.0, 0, 1, size)])
    # A last frame that is shorter may find the one before it still under way.
    assert due_s <= arrived_s + 1e-12
    assert due_s >= arrived_s - 8 * size.frame_bytes / min(up, down)


@given(
    st.floats(0, 0.01),
    st.floats(1, 1e5),
    st.lists(st.tuples(st.floats(1e-3, 0.01), st.sampled_from([1e6, 1e8, 1e9])), max_size=4),
    st.sampled_from([Background(0.0), Background(0.6), Background(0.8, 0.003, 0.001)]),
)
def test_bytes_leave_when_the_area_under_the_rate_is_theirs(
    start_s: float, n_bytes: float, steps: list[tuple[float, float]], background: Background
) -> None:
    """By an independent way: the integral of the rate on a table of its edges, inverted."""
    line, at_s, edges = Line(1e8, background=background), 0.0, {0.0: 1e8}
    for gap_s, rate in steps:
        at_s += gap_s
        line.change(Change(at_s, rate))
        edges[at_s] = rate
    turns = np.arange(0, 12, 0.002 / 2) if background.period_s else np.array([12.0])
    times = np.unique(np.concatenate([list(edges), turns, [12.0]]))
    middles = (times[1:] + times[:-1]) / 2
    starts = np.array(sorted(edges))
    rates = np.array([edges[s] for s in starts])[np.searchsorted(starts, middles, "right") - 1]
    load = np.full(len(middles), background.load)
    if background.period_s:
        load[middles % background.period_s > background.on_s] = 0.0
    area = np.concatenate([[0.0], np.cumsum(rates / 8 * (1 - load) * np.diff(times))])
    wanted = np.interp(np.interp(start_s, times, area) + n_bytes, area, times)
    assert line.end_s(start_s, n_bytes) == pytest.approx(wanted, rel=1e-9)


@given(traffic(), st.integers(0, 3))
def test_a_queue_never_holds_more_than_it_may(sent: list[Sent], seed: int) -> None:
    how = Conditions(queue_bytes=conditions.MIN_QUEUE_BYTES, seed=seed)
    shaper = shaper_of(how, 1e6)
    play(shaper, sent)
    for line in shaper.up + shaper.down:
        assert line.most_queued_bytes <= how.queue_bytes


def test_of_a_packet_that_does_not_fit_the_first_frames_are_carried() -> None:
    line = Line(1e6, queue_bytes=10_000)
    assert line.fits(0.0, size_of(HEAD + 10 * MSS, HEAD, MSS), 0, 10) == 6
    assert line.dropped == 4


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("seed", [0, 1])
def test_as_many_frames_are_lost_as_chance_says(loss: float, seed: int) -> None:
    shaper = shaper_of(Conditions(loss=loss, seed=seed), 1e9)
    size = size_of(HEAD + 44 * MSS, HEAD, MSS)
    play(shaper, [(k * 1e-3, 0, 1, size) for k in range(5000)])
    n = 44 * 5000
    assert abs(shaper.up[0].lost - n * loss) < 5 * math.sqrt(n * loss * (1 - loss))
    assert shaper.up[1].lost == shaper.down[1].lost == 0


def test_the_same_seed_loses_the_same_frames_and_another_others() -> None:
    size = size_of(HEAD + 44 * MSS, HEAD, MSS)
    sent = [(k * 1e-3, k % 2, 2, size) for k in range(300)]

    def frames(seed: int, sent: Sequence[Sent]) -> list[tuple[int, int]]:
        how = Conditions(loss=0.02, seed=seed)
        arrived = play(shaper_of(how, 1e9), sent)
        return [(p.start, p.stop) for _, p in arrived if p.source == 0]

    assert frames(1, sent) == frames(1, sent) != frames(2, sent)
    assert frames(1, sent) == frames(1, [s for s in sent if s[1] == 0]), "not of others' packets"


def test_a_loss_that_ends_takes_no_more() -> None:
    how = Conditions(changes=(Change(1.0, loss=0.5), Change(2.0, loss=0.0)))
    shaper = shaper_of(how, 1e9)
    arrived = play(shaper, [(k * 1e-2, 0, 1, size_of(1500)) for k in range(300)])
    missing = {*range(300)} - {p.load for _, p in arrived}
    assert missing and missing <= {*range(100, 200)}


def test_one_slow_link_holds_up_only_its_own() -> None:
    size = size_of(1500)
    shaper = shaper_of(Conditions(rates=((1, 1e6),)), 1e9)
    due_s = {p.load: due_s for due_s, p in play(shaper, [(0.0, 0, 1, size), (0.0, 0, 2, size)])}
    assert due_s[0] > 0.012 > 1e-4 > due_s[1]


def test_nodes_delay_what_leaves_them_and_nothing_inside() -> None:
    shaper = Shaper([1e10] * 4, Conditions(delay_s=0.01), 2, 1e9)
    sent = [(0.0, 0, 1, size_of(1500)), (0.0, 0, 2, size_of(1500))]
    due_s = {p.load: due_s for due_s, p in play(shaper, sent)}
    assert due_s[0] < 1e-4 and due_s[1] == pytest.approx(0.02, rel=0.01)


def test_a_change_of_a_running_link_counts_from_when_it_hears_of_it() -> None:
    shaper = shaper_of(Conditions(changes=(Change(1.0, 1e8),)), 1e6)
    shaper.change((Change(2.0, 1e7),), since_s=5.0)
    shaper.send(6.0, 0, 1, size_of(1500), "before")
    shaper.send(7.5, 0, 1, size_of(1500), "after")
    due_s = {p.load: due_s for due_s, p in shaper.take(NEVER_S)}
    assert due_s["after"] - 7.5 == pytest.approx(10 * (due_s["before"] - 6.0))
    with pytest.raises(UserError, match="known already"):
        shaper.change((Change(0.0, 1e7),), since_s=6.0)


# -- what cannot be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"delay": "-1ms"}, "number with a unit"),
        ({"delay": "1m"}, "lies between 0 and 10"),
        ({"jitter": "1ms"}, "jitter is at most the delay"),
        ({"loss": "80%"}, "lies between"),
        ({"loss": "much"}, "not a share"),
        ({"background": "100%"}, "lies between"),
        ({"background": "50%:1s"}, "80%:100ms/300ms"),
        ({"rank_rate": ["250mbit"]}, "1=250mbit"),
        ({"rank_rate": ["1=1"]}, "use bit, kbit"),
        ({"queue": "1KiB"}, "at least"),
        ({"congestion": "vegas"}, "use reno, cubic, bbr"),
        ({"change": [Change(2.0, 1e8), Change(1.0, 1e8)]}, "in the order of their times"),
    ],
)
def test_wrong_conditions_are_refused_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        conditions.parse(wrong)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["5s", "5s:", "5s:speed=1", "x:rate=1gbit", "1s:rank=1", "1s:loss=9"]
)
def test_a_wrong_change_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        conditions.parse_change(text)


def test_a_lab_refuses_links_of_ranks_that_it_lacks() -> None:
    for wrong in (
        Conditions(rates=((4, 1e8),)),
        Conditions(delays=((-1, 0.1),)),
        Conditions(changes=(Change(0.0, 1e8, ranks=(9,)),)),
    ):
        with pytest.raises(UserError, match="no link of rank"):
            LabShape(4, 1e9, conditions=wrong)


@given(any_conditions())
def test_conditions_survive_json_and_their_name_says_what_they_are(how: Conditions) -> None:
    shape = LabShape(3, 5e8, conditions=how)
    assert LabShape.from_dict(json.loads(json.dumps(dataclasses.asdict(shape)))) == shape
    said = read_link(shape.link)
    assert (said.engine, said.rate_bits_per_s, said.loss) == ("emulated", 5e8, how.loss)
    assert said.delay_s == pytest.approx(how.delay_s, abs=1e-9)
    assert read_link(LabShape(3, 5e8).link).engine == "tbf"


def test_different_conditions_have_different_names() -> None:
    every = [
        Conditions(),
        Conditions(1e-3),
        Conditions(1e-3, 1e-4),
        Conditions(loss=1e-3),
        Conditions(seed=1),
        Conditions(rates=((0, 1e8),)),
        Conditions(delays=((0, 1e-3),)),
        Conditions(changes=(Change(1.0, 1e8),)),
        Conditions(changes=(Change(2.0, 1e8),)),
        Conditions(background=Background(0.2)),
        Conditions(background=Background(0.2, 0.1, 0.1)),
        Conditions(queue_bytes=2**20),
        Conditions(burst_s=1e-3),
        Conditions(congestion="bbr"),
    ]
    names = [LabShape(2, 1e9, conditions=one).name for one in every]
    assert len({*names, LabShape(2, 1e9).name}) == len(every) + 1
    assert all(name.isprintable() and "/" not in name and " " not in name for name in names)


# -- packets -----------------------------------------------------------------------------------


def whole_packet(payload: bytes, sequence: int, mss: int, flags: int) -> bytes:
    """As a device gives it: TCP with options, its check sum only begun."""
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 7, 8 << 4, flags, 500, 0, 0) + bytes(12)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 52 + len(payload), 5, 0x4000, 64, 6, 0)
    ip += bytes([10, 77, 0, 1, 10, 77, 0, 2])
    return struct.pack("<BBHHHH", 1, 1, 52, mss, 20, 16) + ip + tcp + payload


def checked(packet: bytes) -> tuple[int, int, bytes]:
    """(sequence, flags, payload) of a packet whose lengths and check sums are right."""
    _, kind, _, mss, start, offset = struct.unpack_from("<BBHHHH", packet)
    ip = packet[10:]
    assert tunnel.folded(ip[:20]) == 0xFFFF
    assert struct.unpack_from("!H", ip, 2)[0] == len(ip)
    payload = ip[52:]
    assert (kind == 0) == (len(payload) <= MSS) and (mss == 0) == (kind == 0)
    begun = struct.unpack_from("!H", ip, start + offset)[0]
    pseudo = ip[12:20] + struct.pack("!HH", 6, len(ip) - 20)
    assert begun == tunnel.folded(pseudo), "the kernel goes on from the sum of the pseudo header"
    return struct.unpack_from("!I", ip, 24)[0], ip[33], payload


@given(
    st.binary(min_size=MSS + 1, max_size=5 * MSS),
    st.integers(0, 2**32 - 1),
    st.sets(st.integers(0, 5)),
)
def test_pieces_of_a_packet_are_as_if_they_had_been_sent_alone(
    payload: bytes, sequence: int, cuts: set[int]
) -> None:
    packet = whole_packet(payload, sequence, MSS, 0x19 | 0x80)  # acknowledged, pushed, last, CWR
    size = tunnel.measured(packet)
    assert (size.frames, size.frame_bytes) == (-(-len(payload) // MSS), MSS + 52 + 38)
    assert size.bytes == len(payload) + size.frames * 90
    edges = sorted({0, size.frames, *(c for c in cuts if c < size.frames)})
    found = b""
    for start, stop in zip(edges, edges[1:], strict=False):
        number, flags, part = checked(tunnel.cut(packet, start, stop))
        assert number == (sequence + len(found)) % 2**32
        assert bool(flags & 0x09) == (stop == size.frames)
        assert bool(flags & 0x80) == (start == 0)
        found += part
    assert found == payload


@given(st.integers(1, 60_000), st.integers(0, 100))
def test_a_link_counts_the_framing_that_it_is_asked_to(payload: int, framing: int) -> None:
    """Each frame differs by as much; by its name the link is read as it was."""
    asked, usual = (size_of(HEAD + payload, HEAD, MSS, *more) for more in ((framing,), ()))
    assert asked.frames == usual.frames
    assert usual.bytes - asked.bytes == (38 - framing) * usual.frames
    how = conditions.parse({"framing": framing, "burst": "1ms"})
    named = read_link(f"emulated:1gbit-{how.name}")
    assert (named.framing_bytes, named.burst_s) == (framing, 1e-3)
    assert named.framing == pytest.approx(1448 / (1500 + framing))
    assert Conditions.from_dict(json.loads(json.dumps(dataclasses.asdict(how)))) == how
    assert shaper_of(how, 1e9).framing_bytes == framing
