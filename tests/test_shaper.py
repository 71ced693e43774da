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
from ddlkit.core.link import read_link
from ddlkit.run.lab import Conditions, LabShape, parse, tunnel
from ddlkit.run.lab.tunnel import Line, Piece, Shaper, Size, size_of

MSS, HEAD = 1448, 52
RATE = 1e8
Sent = tuple[float, int, int, Size]  # when, from whom, to whom, what
Arrived = list[tuple[float, Piece]]

sizes = st.builds(
    lambda payload: size_of(HEAD + payload, HEAD, MSS), st.integers(0, 65_000)
)  # from an acknowledgement to the largest packet


@st.composite
def traffic(draw: st.DrawFn, ranks: int = 4) -> list[Sent]:
    """Packets between ranks, in the order of their times."""
    gaps = st.lists(
        st.tuples(st.floats(0, 0.02), sizes, st.integers(0, 11)), min_size=1, max_size=25
    )
    now_s, sent = 0.0, []
    for gap_s, size, way in draw(gaps):
        now_s += gap_s
        source = way % ranks
        sent.append((now_s, source, (source + 1 + way // ranks) % ranks, size))
    return sent


@st.composite
def any_conditions(draw: st.DrawFn) -> Conditions:
    delay_s = draw(st.floats(0, 0.01))
    return Conditions(
        delay_s=delay_s,
        jitter_s=delay_s * draw(st.floats(0, 1)),
        loss=draw(st.sampled_from([0.0, 0.01, 0.3])),
        background=draw(st.sampled_from([0.0, 0.5])),
    )


def play(how: Conditions, sent: Sequence[Sent], lag_s: float = 0.0) -> Arrived:
    """What arrives when everything is sent, and taken out by who comes ``lag_s`` after each packet."""
    shaper = Shaper([RATE] * 4, how)
    arrived: Arrived = []
    for number, (now_s, source, target, size) in enumerate(sent):
        arrived += shaper.take(now_s - lag_s)
        shaper.send(now_s, source, target, size, number)
    while shaper.next_s < math.inf:
        arrived += shaper.take(shaper.next_s)
    lost = sum(line.lost for line in shaper.up + shaper.down)
    assert sum(p.stop - p.start for _, p in arrived) + lost == sum(s[3].frames for s in sent)
    return arrived


@given(traffic(), any_conditions(), st.floats(0, 0.01))
def test_every_frame_arrives_once_in_order_in_no_less_than_its_time_or_is_counted_as_lost(
    sent: list[Sent], how: Conditions, lag_s: float
) -> None:
    arrived = play(how, sent)
    seen = Counter((p.load, frame) for _, p in arrived for frame in range(p.start, p.stop))
    assert not seen or max(seen.values()) == 1
    assert [due_s for due_s, _ in arrived] == sorted(due_s for due_s, _ in arrived)
    for due_s, piece in arrived:
        assert piece.target == sent[piece.load][2]
        on_wire_s = piece.size.of(piece.start, piece.stop) * 8 / (RATE * (1 - how.background))
        least_s = 2 * (how.delay_s - how.jitter_s) + on_wire_s
        assert due_s >= sent[piece.load][0] + least_s - 1e-12
    for way in {(s, t) for _, s, t, _ in sent}:
        order = [(p.load, p.start) for _, p in arrived if (p.source, p.target) == way]
        assert order == sorted(order), "nobody overtakes"

    def told(arrived: Arrived) -> list[Any]:
        return sorted((due_s, p.load, p.start, p.stop) for due_s, p in arrived)

    assert told(arrived) == told(play(how, sent, lag_s)), "who takes late gets the same"


@given(traffic(), st.floats(0, 0.01), st.sampled_from([0.0, 0.4]))
def test_over_no_window_a_link_gives_more_than_its_rate(
    sent: list[Sent], delay_s: float, load: float
) -> None:
    arrived = play(Conditions(delay_s=delay_s, background=load), sent)
    for rank in range(4):
        ends = [(due_s, p.size.bytes) for due_s, p in arrived if p.target == rank]
        for first in range(len(ends)):
            after = np.cumsum([n for _, n in ends[first + 1 :]])
            window_s = np.array([due_s for due_s, _ in ends[first + 1 :]]) - ends[first][0]
            assert (after <= RATE * (1 - load) / 8 * window_s + 1e-3).all()


@given(sizes, st.sampled_from([1e7, 1e9]), st.sampled_from([1e7, 1e9]))
def test_frames_pass_two_links_at_once(size: Size, up: float, down: float) -> None:
    """The slower link takes all frames, the faster one frame: as a row of frames does by itself."""
    sent_s = arrived_s = 0.0
    for frame in range(size.frames):
        n_bits = 8 * size.of(frame, frame + 1)
        sent_s += n_bits / up
        arrived_s = max(sent_s, arrived_s) + n_bits / down
    shaper = Shaper([up, down], Conditions())
    shaper.send(0.0, 0, 1, size, None)
    arrived: Arrived = []
    while shaper.next_s < math.inf:
        arrived += shaper.take(shaper.next_s)
    due_s = arrived[-1][0]
    # A last frame that is shorter may find the one before it still under way.
    assert due_s <= arrived_s + 1e-12
    assert due_s >= arrived_s - 8 * size.frame_bytes / min(up, down)


@pytest.mark.parametrize("loss", [0.001, 0.2])
def test_as_many_frames_are_lost_as_chance_says(loss: float) -> None:
    line, n = Line(1e9, loss, "a"), 220_000
    rest = n
    while rest > 0:
        asked = min(rest, 44)  # as many as a packet has
        passed = line.spared(asked)
        rest -= passed + (passed < asked)
    assert abs(line.lost - n * loss) < 5 * math.sqrt(n * loss)


def test_the_same_frames_are_lost_again_whatever_others_send() -> None:
    size = size_of(HEAD + 44 * MSS, HEAD, MSS)
    sent = [(k * 1e-3, k % 2, 2, size) for k in range(300)]

    def frames(sent: Sequence[Sent], source: int = 0) -> list[tuple[int, int]]:
        arrived = play(Conditions(loss=0.02), sent)
        return [(p.start, p.stop) for _, p in arrived if p.source == source]

    assert frames(sent) == frames([s for s in sent if s[1] == 0]) != frames(sent, 1)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"delay": "-1ms"}, "number with a unit"),
        ({"delay": "1m"}, "lies between 0 and 10"),
        ({"jitter": "1ms"}, "jitter is at most the delay"),
        ({"loss": "much"}, "not a share"),
        ({"background": "100%"}, "lies between"),
    ],
)
def test_wrong_conditions_are_refused_in_one_line(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        parse(wrong)
    assert "\n" not in str(raised.value)


@given(any_conditions())
def test_conditions_survive_json_and_their_name_says_what_they_are(how: Conditions) -> None:
    shape = LabShape(3, 5e8, conditions=how)
    assert LabShape.from_dict(json.loads(json.dumps(dataclasses.asdict(shape)))) == shape
    said = read_link(shape.link)
    assert (said.engine, said.rate_bits_per_s) == ("emulated", 5e8)
    assert said.delay_s == pytest.approx(how.delay_s, abs=1e-9)
    names = {LabShape(3, 5e8).name, shape.name}
    for other in ({"background": 0.25}, {"loss": 0.125}):
        names.add(LabShape(3, 5e8, conditions=dataclasses.replace(how, **other)).name)
    assert len(names) == 4, "others have other names"


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
    parts = b""
    for start, stop in zip(edges, edges[1:], strict=False):
        number, flags, part = checked(tunnel.cut(packet, start, stop))
        assert number == (sequence + len(parts)) % 2**32
        assert bool(flags & 0x09) == (stop == size.frames)
        assert bool(flags & 0x80) == (start == 0)
        parts += part
    assert parts == payload
