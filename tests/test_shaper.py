"""Laws of the emulated link: nothing appears or vanishes, no rate is exceeded, and chance is fair."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import read_link
from ddlkit.lab import Conditions, LabShape, parse
from ddlkit.lab.tunnel import Packet, Shaper, Size, size_of, wire_size

MSS, HEAD = 1448, 52
RATE = 1e8
Sent = tuple[float, int, int, Size]  # when, from whom, to whom, what
Arrived = list[tuple[float, Packet]]

# From an acknowledgement to the largest packet.
sizes = st.integers(0, 65_000).map(lambda payload: size_of(HEAD + payload, HEAD, MSS))
any_conditions = st.builds(
    Conditions, st.floats(0, 0.01), st.sampled_from([0.0, 0.01, 0.3])
)


@st.composite
def traffic(draw: st.DrawFn, ranks: int = 4) -> list[Sent]:
    gaps = st.tuples(st.floats(0, 0.02), sizes, st.integers(0, 11))
    now_s, sent = 0.0, []
    for gap_s, size, way in draw(st.lists(gaps, min_size=1, max_size=25)):
        now_s += gap_s
        source = way % ranks
        sent.append((now_s, source, (source + 1 + way // ranks) % ranks, size))
    return sent


def play(how: Conditions, sent: Sequence[Sent], lag_s: float = 0.0) -> Arrived:
    """What arrives when everything is sent, and taken out by who comes ``lag_s`` after each packet."""
    shaper = Shaper([RATE] * 4, how)
    arrived: Arrived = []
    for number, (now_s, source, target, size) in enumerate(sent):
        arrived += shaper.pop_arrived(now_s - lag_s)
        shaper.send(now_s, source, target, size, number)
    while shaper.next_s < math.inf:
        arrived += shaper.pop_arrived(shaper.next_s)
    assert len(arrived) + shaper.lost == len(sent)
    return arrived


@given(traffic(), any_conditions, st.floats(0, 0.01))
def test_each_packet_arrives_once_in_order_in_no_less_than_its_time_or_is_counted_as_lost(
    sent: list[Sent], how: Conditions, lag_s: float
) -> None:
    arrived = play(how, sent)
    assert len({packet.load for _, packet in arrived}) == len(arrived)
    assert [due_s for due_s, _ in arrived] == sorted(due_s for due_s, _ in arrived)
    for due_s, packet in arrived:
        sent_s, _, target, size = sent[packet.load]
        assert packet.target == target
        assert due_s >= sent_s + 2 * how.delay_s + size.bytes * 8 / RATE - 1e-12
    for way in {(s, t) for _, s, t, _ in sent}:
        order = [packet.load for _, packet in arrived if sent[packet.load][1:3] == way]
        assert order == sorted(order), "nobody overtakes"

    def told(arrived: Arrived) -> list[tuple[float, int]]:
        return sorted((due_s, packet.load) for due_s, packet in arrived)

    assert told(arrived) == told(play(how, sent, lag_s)), "who takes late gets the same"


@given(traffic(), st.floats(0, 0.01))
def test_over_no_window_a_link_gives_more_than_its_rate(
    sent: list[Sent], delay_s: float
) -> None:
    arrived = play(Conditions(delay_s=delay_s), sent)
    for rank in range(4):
        ends = [(due_s, p.size.bytes) for due_s, p in arrived if p.target == rank]
        for first in range(len(ends)):
            after = np.cumsum([n for _, n in ends[first + 1 :]])
            window_s = (
                np.array([due_s for due_s, _ in ends[first + 1 :]]) - ends[first][0]
            )
            assert (after <= RATE / 8 * window_s + 1e-3).all()


@given(sizes, st.sampled_from([1e7, 1e9]), st.sampled_from([1e7, 1e9]))
def test_frames_pass_two_links_at_once(size: Size, up: float, down: float) -> None:
    """The slower link takes all frames, the faster one frame: as a row of frames does by itself."""
    sent_s = arrived_s = 0.0
    frames = [size.frame_bytes] * (size.frames - 1)
    for n_bytes in [*frames, size.bytes - sum(frames)]:
        sent_s += 8 * n_bytes / up
        arrived_s = max(sent_s, arrived_s) + 8 * n_bytes / down
    shaper = Shaper([up, down], Conditions())
    shaper.send(0.0, 0, 1, size, None)
    assert list(shaper.pop_arrived(shaper.next_s)) == []
    ((due_s, _),) = shaper.pop_arrived(shaper.next_s)
    # A last frame that is shorter may find the one before it still under way.
    assert due_s <= arrived_s + 1e-12
    assert due_s >= arrived_s - 8 * size.frame_bytes / min(up, down)


@pytest.mark.parametrize("loss", [0.001, 0.2])
def test_as_many_frames_are_lost_as_chance_says_and_the_same_again(loss: float) -> None:
    count = 40_000

    def lost(others: bool) -> list[int]:
        shaper, numbers = Shaper([1e9] * 3, Conditions(loss=loss)), []
        for number in range(count):
            before = shaper.lost
            shaper.send(1e-3 * number, 0, 2, size_of(1500), number)
            numbers += [number] * (shaper.lost - before)
            if others:
                shaper.send(1e-3 * number, 1, 2, size_of(1500), number)
        return numbers

    alone = lost(False)
    assert abs(len(alone) - count * loss) < 5 * math.sqrt(count * loss)
    assert lost(True) == alone, "whatever others send"


@pytest.mark.parametrize(
    ("payload", "frames", "n_bytes"), [(0, 1, 90), (1448, 1, 1538), (1449, 2, 1629)]
)
def test_a_packet_is_cut_into_frames(payload: int, frames: int, n_bytes: int) -> None:
    size = size_of(HEAD + payload, HEAD, MSS)
    assert (size.frames, size.bytes) == (frames, n_bytes)
    assert size_of(40).bytes == 46 + 38, "a short one is padded"
    headers = bytes(20 + 12) + bytes([8 << 4]) + bytes(19)  # IP, and TCP with options
    for kind in (0, 1):  # not to be cut, or by its header
        told = struct.pack("<BBHHHH", 1, kind, HEAD, MSS, 20, 16)
        whole = size_of(HEAD + payload, HEAD, MSS) if kind else size_of(HEAD + payload)
        assert wire_size(told + headers + bytes(payload)) == whole


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"delay": "1m"}, "must be from 0 to 10 s"),
        ({"loss": "51%"}, "must be from 0% to 50%"),
    ],
)
def test_wrong_conditions_are_refused_in_one_line(
    wrong: dict[str, str], told: str
) -> None:
    with pytest.raises(UserError, match=f"^[^\n]*{told}[^\n]*$"):
        parse(wrong)


def test_the_smallest_losses_are_named_without_an_exponent() -> None:
    """Its sign would look like the dash between two parts of a name."""
    assert Conditions(loss=1e-5).name == "delay0ms-loss0.00001"


def test_a_framing_that_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="framing '3x' is not a whole number"):
        read_link("emulated:1gbit-framing3x")


@given(any_conditions)
def test_conditions_survive_json_and_their_name_says_what_they_are(
    how: Conditions,
) -> None:
    shape = LabShape(3, 5e8, conditions=how)
    assert (
        LabShape.from_dict(json.loads(json.dumps(dataclasses.asdict(shape)))) == shape
    )
    said = read_link(shape.link)
    assert (said.engine, said.rate_bits_per_s) == ("emulated", 5e8)
    assert said.delay_s == pytest.approx(how.delay_s, abs=1e-9)
    assert parse({"delay": "2ms", "loss": "0.1%"}) == Conditions(0.002, 0.001)
