"""The process of an emulated link: every packet between ranks passes it, by one TUN device in each namespace.

Devices take and give packets of up to 64 KiB, whose check sums are still to be made (TSO), so that few of
them cross between kernel and Python. A packet stands for the frames that the wire would carry: these follow
one another through its sender's link, then its receiver's, as on a real path (a switch need not have the last
one to send the first), at each link's rate, and leave it after its delay. Where chance takes some, each frame
is a packet of its own, which takes more of the processor: from some 100 Mbit/s on such links may be late.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import heapq
import json
import math
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

from ddlkit.core.lab_links import FRAMING_BYTES
from ddlkit.jobs import die_with_parent, enter
from ddlkit.lab import Conditions

DEVICE = "/dev/net/tun"
READY = "ready"
INTERFACE = "eth0"
CROSSED = struct.Struct("=4d")
"""What has crossed: packets, late ones among them, and until the last, seconds and those of the processor."""
LATE_S = (
    2e-4  # a packet that is written so much behind its due time, or not taken, is late
)
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


# -- when packets leave links: without a clock, a socket or a byte -----------------------------


class Size(NamedTuple):
    """A packet on the wire: ``frames`` of ``frame_bytes`` each, the last one shorter; ``bytes`` of all."""

    frames: int
    frame_bytes: int
    bytes: int


def size_of(ip_bytes: int, header_bytes: int = 0, segment_bytes: int = 0) -> Size:
    """Cut a packet into frames: segments with a header each, if it has any, and framing around each."""
    payload = ip_bytes - header_bytes
    if payload <= segment_bytes or not segment_bytes:
        whole = max(MIN_PACKET_BYTES, ip_bytes) + FRAMING_BYTES
        return Size(1, whole, whole)
    frames, around = -(-payload // segment_bytes), header_bytes + FRAMING_BYTES
    return Size(frames, segment_bytes + around, payload + frames * around)


@dataclass(slots=True, eq=False)
class Packet:
    """A packet on its way; first_s : when its first frame arrived; passed : its sender's link."""

    load: Any
    size: Size
    target: int
    first_s: float
    passed: bool = False


class Line:
    """One direction of a link; free_s : when all that was given to it will have left."""

    def __init__(self, rate_bits_per_s: float) -> None:
        self.bytes_per_s, self.free_s = rate_bits_per_s / 8, 0.0

    def carry(self, first_s: float, last_s: float, size: Size) -> tuple[float, float]:
        """Return when the first frame of a packet has left, and when all have, by when these arrive."""
        begin_s = max(first_s, self.free_s)
        last_bytes = size.bytes - (size.frames - 1) * size.frame_bytes
        all_s = begin_s + size.bytes / self.bytes_per_s
        self.free_s = max(all_s, last_s + last_bytes / self.bytes_per_s)
        return min(
            self.free_s, begin_s + size.frame_bytes / self.bytes_per_s
        ), self.free_s


class Shaper:
    """Packets on their way between ranks: give it what is sent, and take out what has arrived.

    rates_bits_per_s : of each rank's link; all times are seconds since a start that the caller chooses
    lost : how many packets chance has taken, once on their way, where they were sent
    """

    def __init__(
        self, rates_bits_per_s: Sequence[float], conditions: Conditions
    ) -> None:
        self._how, self.lost = conditions, 0
        self._up, self._down = ([Line(rate) for rate in rates_bits_per_s] for _ in "ud")
        self._chance = [random.Random(rank) for rank in range(len(rates_bits_per_s))]
        self._events: list[tuple[float, int, Packet]] = []
        self._order = count()

    def send(
        self, now_s: float, source: int, target: int, size: Size, load: Any
    ) -> None:
        """Let a packet leave a rank: no earlier than any before."""
        if self._how.loss and self._chance[source].random() < self._how.loss:
            self._up[source].carry(
                now_s, now_s, size
            )  # what is lost takes its time, too
            self.lost += 1
        else:
            self._carry(self._up[source], Packet(load, size, target, now_s), now_s)

    def _carry(self, line: Line, packet: Packet, last_s: float) -> None:
        """Let a link carry a packet, and note when it will be at the end of that."""
        began_s, left_s = line.carry(packet.first_s, last_s, packet.size)
        packet.first_s = began_s + self._how.delay_s
        heapq.heappush(
            self._events, (left_s + self._how.delay_s, next(self._order), packet)
        )

    @property
    def next_s(self) -> float:
        """Return when `take` should be called next; infinite where nothing is under way."""
        return self._events[0][0] if self._events else math.inf

    def take(self, now_s: float) -> Iterator[tuple[float, Packet]]:
        """Yield (when it was due, packet) of all that has arrived by now, in order, one by one."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, packet = heapq.heappop(events)
            if packet.passed:
                yield at_s, packet
            else:
                packet.passed = True
                self._carry(self._down[packet.target], packet, at_s)


# -- packets -----------------------------------------------------------------------------------


def measured(packet: bytes) -> Size:
    """Return what a packet, as a device gives it, is on the wire."""
    _, kind, _, segment_bytes, start, _ = _HEADER.unpack_from(packet)
    header_bytes = start + (packet[_HEADER.size + start + 12] >> 4) * 4 if kind else 0
    return size_of(
        len(packet) - _HEADER.size, header_bytes, segment_bytes if kind else 0
    )


# -- the process -------------------------------------------------------------------------------


def open_device(namespace: str, back: str, offload: int) -> int:
    """Open a device and TCP's windows in ``namespace``, and go ``back`` to another. Raises OSError."""
    enter(namespace)
    for buffer in ("rmem", "wmem"):
        Path(f"/proc/sys/net/ipv4/tcp_{buffer}").write_text(
            " ".join(map(str, WINDOW_BYTES))
        )
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER.size))
    fcntl.ioctl(device, _TUNSETOFFLOAD, offload)
    enter(back)
    return device


class Tunnel:
    """Devices joined by a shaper; prefix : of addresses: rank r has r + 1 behind it; crossed : as CROSSED."""

    def __init__(
        self, devices: list[int], shaper: Shaper, prefix: str, crossed: int
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
        target = (
            packet[29] - 1
            if packet[10] >> 4 == 4 and packet[26:29] == self._prefix
            else -1
        )
        if 0 <= target < len(self.devices):
            source = self.devices.index(device)
            self.shaper.send(self._heard_s, source, target, measured(packet), packet)

    def write(self) -> None:
        """Give what has arrived to its devices."""
        for due_s, packet in self.shaper.take(self.now_s()):
            late_s = self.now_s() - due_s
            try:
                os.write(self.devices[packet.target], packet.load)
            except OSError:  # the device is down, or its memory is used up
                late_s = math.inf
            self._packets += 1
            self._late += late_s > LATE_S
            seconds = self.now_s(), time.process_time()
            os.pwrite(
                self._crossed, CROSSED.pack(self._packets, self._late, *seconds), 0
            )


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
    conditions = Conditions(**config["conditions"])
    # Where packets stood for many frames, chance would take all of these at once.
    offload = _CSUM if conditions.loss else _CSUM | _TSO4
    devices = [open_device(rank, switch, offload) for rank in ranks]
    shaper = Shaper([config["rate_bits_per_s"]] * len(devices), conditions)
    with suppress(PermissionError):  # without, it is late more often, and says so
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.collect()
    gc.disable()  # nothing here goes round in circles
    # Freed memory stays ours: to fetch it anew for each large packet takes longer than to read that.
    for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        with suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).mallopt(parameter, 2**30)
    crossed = os.open(config["crossed"], os.O_WRONLY | os.O_CREAT, 0o644)
    os.pwrite(crossed, bytes(CROSSED.size), 0)
    print(READY, flush=True)
    Tunnel(devices, shaper, config["prefix"], crossed).serve()


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        sys.exit(f"{error.strerror}: {error.filename or DEVICE}")
