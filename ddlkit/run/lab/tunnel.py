"""The process of an emulated link: every packet between ranks passes it, by one TUN device in each namespace.

``python -m ddlkit.run.lab.tunnel CONFIG``, a JSON object; `ddlkit.run.lab.emulated` starts it and asks it.
Devices take and give packets of up to 64 KiB, whose check sums are still to be made (TSO), so that few of
them cross between kernel and Python. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddlkit.run.lab.conditions import Conditions
from ddlkit.run.lab.shaper import NEVER_S, Piece, Shaper, Size, size_of

DEVICE = "/dev/net/tun"
READY = "ready"
INTERFACE = "eth0"
LATE_S = 2e-4
"""A packet that is written later than so much behind its due time is late."""
BINS = (2e-5, 5e-5, 1e-4, LATE_S, 5e-4, 1e-3, 1e-2)
"""Upper edges, in seconds, by which lateness is counted; one bin more is for all beyond."""
COUNTED = ("bytes", "packets", "frames", "lost")
"""What is known of each link, in each direction, as a sum since it is up."""
PRIORITY = 2  # above gloo's threads: a link does not wait for those who use it
WINDOW_BYTES = (4096, 16 * 1024**2, 64 * 1024**2)
"""Least, first and most that TCP keeps in flight: above what any link here holds.

Linux's first, 64 KiB, grows with what has been received: over a delay, a message's time would hang on the
messages before it."""
WINDOWS = ("/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem")
SPIN_S = 3e-5  # to a due time nearer than this, waking up would take as long

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_CSUM, _TSO4 = 0x1, 0x2
_CLONE_NEWNET = 0x40000000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Before each packet: flags, kind of segments, bytes of headers, of a segment, where the sum starts and goes.
_HEADER = struct.Struct("<BBHHHH")
_LARGEST = _HEADER.size + 65535
_FIN_PSH, _CWR = 0x09, 0x80


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
    one = len(payload) <= segment_bytes
    segments = (0, header_bytes, 0) if one else (kind, header_bytes, segment_bytes)
    return _HEADER.pack(flags, *segments, tcp, offset) + bytes(head) + bytes(payload)


def folded(octets: bytes | bytearray) -> int:
    """Sum up 16-bit words with the carries added in (RFC 1071), of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(octets) // 2}H", octets))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


# -- devices -----------------------------------------------------------------------------------


def enter(namespace: str) -> None:
    """Live in that network namespace from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter", namespace)


def open_device(namespace: str, back: str) -> int:
    """Open a device in ``namespace``, while this process lives in ``back``; windows there are open at once.

    Raises OSError.
    """
    enter(namespace)
    try:
        for window in WINDOWS:
            with open(window, "w") as setting:
                setting.write(" ".join(map(str, WINDOW_BYTES)))
        device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
        fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER.size))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _CSUM | _TSO4)
    finally:
        enter(back)
    return device


def keep_memory() -> None:
    """Let freed memory stay ours: to fetch it anew for each large packet takes longer than to read that."""
    for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        with suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).mallopt(parameter, 2**30)


# -- the process -------------------------------------------------------------------------------


class Tunnel:
    """Devices joined by a shaper. ``prefix`` is what addresses begin with: rank r has r + 1 behind it."""

    def __init__(self, devices: Sequence[int], shaper: Shaper, prefix: str) -> None:
        self.devices, self.shaper = devices, shaper
        self._prefix = socket.inet_aton(f"{prefix}0")[:3]
        self._ranks = {device: rank for rank, device in enumerate(devices)}
        self.late = [0] * (len(BINS) + 1)
        self.stray = self.refused = 0  # packets for nobody, and such as a device would not take
        self.begun_s = time.perf_counter()
        self.heard_s = 0.0

    def now_s(self) -> float:
        """Return the seconds since it began."""
        return time.perf_counter() - self.begun_s

    def wait(self, others: Sequence[int]) -> list[int]:
        """Return the descriptors among devices and ``others`` that can be read, until one is due."""
        next_s = self.shaper.next_s
        rest_s = None if next_s == NEVER_S else next_s - self.now_s()
        if rest_s is not None and rest_s < SPIN_S:
            rest_s = 0.0
        ready = select.select([*self.devices, *others], (), (), rest_s)[0]
        self.heard_s = self.now_s()
        return ready

    def read(self, device: int) -> None:
        """Take a packet from a device: it was there when `wait` ended, and counts from then."""
        try:
            packet = os.read(device, _LARGEST)
        except BlockingIOError:
            return
        target = packet[29] - 1 if packet[10] >> 4 == 4 and packet[26:29] == self._prefix else -1
        if 0 <= target < len(self.devices):
            source = self._ranks[device]
            self.shaper.send(self.heard_s, source, target, measured(packet), packet)
        else:
            self.stray += 1

    def write(self) -> None:
        """Give what has arrived to its devices."""
        for due_s, piece in self.shaper.take(self.now_s()):
            late_s = self.now_s() - due_s
            self._write(piece)
            self.late[bisect_left(BINS, late_s)] += 1

    def _write(self, piece: Piece) -> None:
        packet = piece.load if piece.whole else cut(piece.load, piece.start, piece.stop)
        try:
            os.write(self.devices[piece.target], packet)
        except OSError:  # the device is down, or its memory is used up
            self.refused += 1

    def crossed(self) -> dict[str, Any]:
        """Say what has crossed until now."""
        rows = [
            {"rank": rank}
            | {f"sent_{name}": getattr(up, name) for name in COUNTED}
            | {f"received_{name}": getattr(down, name) for name in COUNTED}
            for rank, (up, down) in enumerate(zip(self.shaper.up, self.shaper.down, strict=True))
        ]
        whole = {"seconds": self.now_s(), "processor_s": time.process_time(), "late": self.late}
        return {**whole, "stray": self.stray, "refused": self.refused, "ranks": rows}


def serve(tunnel: Tunnel, door: socket.socket, owner: int | None) -> None:
    """Carry packets, and say to all who come what has crossed, until ``owner``, a pipe, closes."""
    others = [door.fileno(), *([] if owner is None else [owner])]
    while True:
        for ready in tunnel.wait(others):
            if ready == owner:
                return
            if ready == door.fileno():
                with suppress(OSError), door.accept()[0] as line:
                    line.setblocking(False)
                    line.sendall(json.dumps(tunnel.crossed()).encode() + b"\n")
            else:
                tunnel.read(ready)
                tunnel.write()  # a packet that is due does not wait for those that come
        tunnel.write()


def main(config: Mapping[str, Any]) -> None:
    """Make the devices, say so, and be the link.

    config : namespaces (files, the switch's last), socket (path), prefix, rates_bits_per_s, ranks_per_node,
        node_rate_bits_per_s, conditions, and owned: whether to end with standard input
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    *ranks, switch = config["namespaces"]
    devices = [open_device(rank, switch) for rank in ranks]
    shaper = Shaper(
        config["rates_bits_per_s"],
        Conditions(**config["conditions"]),
        config["ranks_per_node"],
        config["node_rate_bits_per_s"],
    )
    with suppress(PermissionError):  # without, it is late more often, and says so
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    gc.collect()
    gc.disable()  # nothing here goes round in circles
    keep_memory()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(config["socket"])
        door.listen(8)
        print(READY, flush=True)
        serve(Tunnel(devices, shaper, config["prefix"]), door, 0 if config["owned"] else None)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"{error.strerror}: {error.filename or DEVICE}", file=sys.stderr)
        sys.exit(1)
