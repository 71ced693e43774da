"""The process of an emulated link: every packet between ranks passes it, by one TUN device in each namespace.

Devices take and give packets of up to 64 KiB, whose check sums are still to be made (TSO), so that few of
them cross between kernel and Python. A packet stands for the frames that the wire would carry: these follow
one another through its sender's link, then its receiver's, as on a real path (a switch need not have the last
one to send the first), at each link's rate, and leave it after its delay. Chance takes them frame by frame.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import heapq
import json
import math
import mmap
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core.link import FRAMING_BYTES
from ddlkit.run.jobs import die_with_parent, enter
from ddlkit.run.lab import Conditions

DEVICE = "/dev/net/tun"
READY = "ready"
INTERFACE = "eth0"
CROSSED = struct.Struct("=4d")
"""What has crossed: packets, late ones among them, and until the last, seconds and those of the processor."""
LATE_S = 2e-4  # a packet that is written so much behind its due time, or not taken, is late
MIN_PACKET_BYTES = 46  # in a frame; a shorter one is padded
SPIN_S = 3e-5  # to a due time nearer than this, waking up would take as long
# Least, first and most that TCP keeps in flight: Linux's first, 64 KiB, grows with what came before.
WINDOW_BYTES = (4096, 16 * 1024**2, 64 * 1024**2)


_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_CSUM, _TSO4 = 0x1, 0x2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Before each packet: flags, kind of segments, bytes of headers, of a segment, where the sum starts and goes.
_HEADER = struct.Struct("<BBHHHH")
_FIN_PSH, _CWR = 0x09, 0x80


# -- when packets leave links: without a clock, a socket or a byte -----------------------------


class Size(NamedTuple):
    """A packet on the wire: ``frames`` of ``frame_bytes`` each, the last one shorter; ``bytes`` of all."""

    frames: int
    frame_bytes: int
    bytes: int

    def of(self, start: int, stop: int) -> int:
        """Return the bytes of the frames from ``start`` up to ``stop``."""
        if stop == self.frames:
            return self.bytes - start * self.frame_bytes
        return (stop - start) * self.frame_bytes


def size_of(ip_bytes: int, header_bytes: int = 0, segment_bytes: int = 0) -> Size:
    """Cut a packet into frames: segments with a header each, if it has any, and framing around each."""
    payload = ip_bytes - header_bytes
    if not segment_bytes or payload <= segment_bytes:
        whole = max(MIN_PACKET_BYTES, ip_bytes) + FRAMING_BYTES
        return Size(1, whole, whole)
    frames = -(-payload // segment_bytes)
    around = header_bytes + FRAMING_BYTES
    return Size(frames, segment_bytes + around, payload + frames * around)


@dataclass(slots=True, eq=False)
class Piece:
    """Frames of a packet on their way: those from ``start`` up to ``stop`` of ``load``.

    first_s : when the first of them arrived; passed : whether they are through their sender's link
    """

    load: Any
    size: Size
    source: int
    target: int
    start: int
    stop: int
    first_s: float = 0.0
    passed: bool = False


class Line:
    """One direction of a link; free_s : when all that was given to it will have left; lost : frames."""

    def __init__(self, bytes_per_s: float, loss: float, name: str) -> None:
        self.bytes_per_s, self.loss, self.chance = bytes_per_s, loss, random.Random(name)
        self.free_s, self.lost = 0.0, 0
        self._until_loss = self._draw()

    def carry(self, first_s: float, last_s: float, piece: Piece) -> tuple[float, float]:
        """Carry frames whose first arrives at the one time and whose last at the other.

        Returns when the first of them has left, and when all have.
        """
        size, stop = piece.size, piece.stop
        begin_s = max(first_s, self.free_s)
        left_s = begin_s + size.of(piece.start, stop) / self.bytes_per_s
        if last_s > first_s:
            left_s = max(left_s, last_s + size.of(stop - 1, stop) / self.bytes_per_s)
        self.free_s = left_s
        return min(left_s, begin_s + size.frame_bytes / self.bytes_per_s), left_s

    def spared(self, frames: int) -> int:
        """Return how many of that many frames pass until chance takes one; all if it takes none."""
        if self._until_loss >= frames:
            self._until_loss -= frames
            return frames
        passed, self._until_loss = int(self._until_loss), self._draw()
        self.lost += 1
        return passed

    def _draw(self) -> float:
        """Return how many frames pass until the next is lost."""
        if not self.loss:
            return math.inf
        return math.log(1.0 - self.chance.random()) // math.log1p(-self.loss)


class Shaper:
    """Packets on their way between ranks: give it what is sent, and take out what has arrived.

    rates_bits_per_s : of each rank's link; all times are seconds since a start that the caller chooses
    """

    def __init__(self, rates_bits_per_s: Sequence[float], conditions: Conditions) -> None:
        self._how = conditions
        rates = [rate / 8 * (1 - conditions.background) for rate in rates_bits_per_s]
        # Chance takes a frame once on its way, where it is sent.
        self.up = [Line(rate, conditions.loss, f"0 up{n}") for n, rate in enumerate(rates)]
        self.down = [Line(rate, 0.0, f"0 down{n}") for n, rate in enumerate(rates)]
        self._events: list[tuple[float, int, Piece]] = []
        self._order = count()
        self._last_s: dict[tuple[bool, int, int], float] = {}

    def send(self, now_s: float, source: int, target: int, size: Size, load: Any) -> None:
        """Let a packet leave a rank: no earlier than any before."""
        line, start = self.up[source], 0
        while start < size.frames:
            stop = start + line.spared(size.frames - start)
            if stop > start:
                self._carry(line, Piece(load, size, source, target, start, stop), now_s, now_s)
            if stop < size.frames:  # the frame that is lost takes its time, too
                line.carry(now_s, now_s, Piece(load, size, source, target, stop, stop + 1))
            start = stop + 1

    def _carry(self, line: Line, piece: Piece, first_s: float, last_s: float) -> None:
        """Let a link carry a piece, and note when it will be at the end of that."""
        began_s, left_s = line.carry(first_s, last_s, piece)
        due_s = left_s + self._how.delay_s
        if jitter_s := self._how.jitter_s:
            way = (piece.passed, piece.source, piece.target)
            late_s = due_s + line.chance.uniform(-jitter_s, jitter_s)
            due_s = self._last_s[way] = max(late_s, self._last_s.get(way, 0.0))
        piece.first_s = began_s + due_s - left_s
        heapq.heappush(self._events, (due_s, next(self._order), piece))

    @property
    def next_s(self) -> float:
        """Return when `take` should be called next; infinite where nothing is under way."""
        return self._events[0][0] if self._events else math.inf

    def take(self, now_s: float) -> Iterator[tuple[float, Piece]]:
        """Yield (when it was due, piece) of all that has arrived by now, in order, one by one."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, piece = heapq.heappop(events)
            if piece.passed:
                yield at_s, piece
            else:
                piece.passed = True
                self._carry(self.down[piece.target], piece, piece.first_s, at_s)


# -- packets -----------------------------------------------------------------------------------


def measured(packet: bytes) -> Size:
    """Return what a packet, as a device gives it, is on the wire."""
    _, kind, _, segment_bytes, start, _ = _HEADER.unpack_from(packet)
    ip_bytes = len(packet) - _HEADER.size
    if not kind:
        return size_of(ip_bytes)
    header_bytes = start + (packet[_HEADER.size + start + 12] >> 4) * 4
    return size_of(ip_bytes, header_bytes, segment_bytes)


def cut(packet: bytes, start: int, stop: int) -> bytes:
    """Make the packet of the frames from ``start`` up to ``stop`` of one that stands for several.

    Sequence number, lengths, flags and check sums are as if these frames alone had been sent.
    """
    flags, kind, header_bytes, segment_bytes, tcp, offset = _HEADER.unpack_from(packet)
    ip = bytearray(packet[_HEADER.size :])
    data = tcp + (ip[tcp + 12] >> 4) * 4
    last = data + stop * segment_bytes >= len(ip)
    payload = ip[data + start * segment_bytes : data + stop * segment_bytes]
    head = ip[:data]
    sequence = struct.unpack_from("!I", head, tcp + 4)[0] + start * segment_bytes
    struct.pack_into("!I", head, tcp + 4, sequence % 2**32)
    head[tcp + 13] &= ~((0 if last else _FIN_PSH) | (_CWR if start else 0)) & 0xFF
    struct.pack_into("!H", head, 2, data + len(payload))
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, 0xFFFF ^ folded(head[:tcp]))
    # The kernel adds the rest: of the addresses, the protocol and the length, this is the sum.
    pseudo = bytes(head[12:20]) + struct.pack("!HH", head[9], data - tcp + len(payload))
    struct.pack_into("!H", head, tcp + offset, folded(pseudo))
    whole = len(payload) <= segment_bytes
    segments = (0, header_bytes, 0) if whole else (kind, header_bytes, segment_bytes)
    return _HEADER.pack(flags, *segments, tcp, offset) + bytes(head) + bytes(payload)


def folded(octets: bytes | bytearray) -> int:
    """Sum up 16-bit words with the carries added in (RFC 1071), of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(octets) // 2}H", octets))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


# -- the process -------------------------------------------------------------------------------


def open_device(namespace: str, back: str) -> int:
    """Open a device and TCP's windows in ``namespace``, and go ``back`` to another. Raises OSError."""
    enter(namespace)
    for buffer in ("rmem", "wmem"):
        Path(f"/proc/sys/net/ipv4/tcp_{buffer}").write_text(" ".join(map(str, WINDOW_BYTES)))
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER.size))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CSUM | _TSO4)
    enter(back)
    return device


class Tunnel:
    """Devices joined by a shaper; prefix : of addresses: rank r has r + 1 behind it; crossed : as CROSSED."""

    def __init__(
        self, devices: Sequence[int], shaper: Shaper, prefix: str, crossed: mmap.mmap
    ) -> None:
        self.devices, self.shaper, self._crossed = devices, shaper, crossed
        self._prefix = socket.inet_aton(f"{prefix}0")[:3]
        self._packets = self._late = 0
        self._begun_s, self._heard_s = time.perf_counter(), 0.0

    def serve(self) -> None:
        """Carry packets for ever."""
        while True:
            rest_s = self.shaper.next_s - self.now_s()
            wait_s = None if math.isinf(rest_s) else rest_s if rest_s >= SPIN_S else 0.0
            ready = select.select(self.devices, (), (), wait_s)[0]
            self._heard_s = self.now_s()
            for device in ready:
                self.read(device)
                self.write()  # a packet that is due does not wait for those that come
            self.write()

    def now_s(self) -> float:
        """Return the seconds since it began."""
        return time.perf_counter() - self._begun_s

    def read(self, device: int) -> None:
        """Take a packet from a device: it was there when waiting ended, and counts from then."""
        try:
            packet = os.read(device, _HEADER.size + 65535)
        except BlockingIOError:
            return
        target = packet[29] - 1 if packet[10] >> 4 == 4 and packet[26:29] == self._prefix else -1
        if 0 <= target < len(self.devices):
            source = self.devices.index(device)
            self.shaper.send(self._heard_s, source, target, measured(packet), packet)

    def write(self) -> None:
        """Give what has arrived to its devices."""
        for due_s, piece in self.shaper.take(self.now_s()):
            late_s = self.now_s() - due_s
            whole = piece.start == 0 and piece.stop == piece.size.frames
            try:
                packet = piece.load if whole else cut(piece.load, piece.start, piece.stop)
                os.write(self.devices[piece.target], packet)
            except OSError:  # the device is down, or its memory is used up
                late_s = math.inf
            self._packets += 1
            self._late += late_s > LATE_S
            seconds = self.now_s(), time.process_time()
            CROSSED.pack_into(self._crossed, 0, self._packets, self._late, *seconds)


def main(config: Mapping[str, Any]) -> None:
    """Make the devices, say so, and be the link.

    config : namespaces (files, the switch's last), crossed (file), prefix, rate_bits_per_s, conditions, and
        owned: whether to die with who started it
    """
    if config["owned"]:
        die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    *ranks, switch = config["namespaces"]
    devices = [open_device(rank, switch) for rank in ranks]
    rates = [config["rate_bits_per_s"]] * len(devices)
    shaper = Shaper(rates, Conditions(**config["conditions"]))
    with suppress(PermissionError):  # without, it is late more often, and says so
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.collect()
    gc.disable()  # nothing here goes round in circles
    # Freed memory stays ours: to fetch it anew for each large packet takes longer than to read that.
    for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        with suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).mallopt(parameter, 2**30)
    with open(config["crossed"], "w+b") as file:
        file.write(bytes(CROSSED.size))
        file.flush()
        crossed = mmap.mmap(file.fileno(), CROSSED.size)
    print(READY, flush=True)
    Tunnel(devices, shaper, config["prefix"], crossed).serve()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"{error.strerror}: {error.filename or DEVICE}", file=sys.stderr)
        sys.exit(1)
