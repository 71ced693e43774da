"""The process of an emulated link, through which every packet between ranks passes.

The process has a TUN device in the namespace of each rank. Devices take and give
packets of up to 64 KiB whose check sums are still to be made (TSO), so that few packets
cross between the kernel and Python. A packet stands for the frames that the wire would
carry. The frames follow one another through the link of the sender, and then through
the link of the receiver, at the rate of each link, as on a real path. The first frame
enters the second link before the last one has left the first link. Each link adds its
delay.

If packets are lost by chance, each frame is a packet of its own. Then the process needs
more of the processor, and from some 100 Mbit/s on packets may be late.
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
from ddlkit.jobs import die_with_parent, enter_namespace
from ddlkit.lab import Conditions

DEVICE = "/dev/net/tun"
READY = "ready"
"""What the process prints once its devices exist."""
INTERFACE = "eth0"
CROSSED = struct.Struct("=4d")
"""The record of what has crossed: packets, late packets, and seconds and processor
seconds of the process until the last packet."""
LATE_S = 2e-4
"""A packet is late if it is written this much after it was due, or not taken."""
MIN_PACKET_BYTES = 46
"""The least that a frame carries. Shorter packets are padded."""
SPIN_S = 3e-5
"""The process does not sleep until a due time that is nearer than waking up takes."""
WINDOW_BYTES = (4096, 16 * 1024**2, 64 * 1024**2)
"""The least, the first and the most that TCP keeps in flight.

Linux's first window, 64 KiB, would grow with the connections before."""

# From the kernel's linux/if_tun.h, and glibc's malloc.h.
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN = 0x1
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_CSUM = 0x1
_TSO4 = 0x2
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# What a device puts before each packet (virtio_net_hdr): flags, kind of segments, bytes
# of the headers, bytes of a segment, where the check sum starts, and where it goes.
_HEADER = struct.Struct("<BBHHHH")
# After that header follows the IP header. Its byte 0 holds the version, and its bytes 16
# to 19 are the four numbers of the target's address.
_IP_VERSION_AT = _HEADER.size
_NETWORK_OF_TARGET = slice(_HEADER.size + 16, _HEADER.size + 19)
_NUMBER_OF_TARGET_AT = _HEADER.size + 19


# -- when packets leave links: without a clock, a socket or a byte ---------------------


class Size(NamedTuple):
    """The size of a packet on the wire.

    Attributes
    ----------
    frames : int
        How many frames the packet becomes.
    frame_bytes : int
        The bytes of each frame. The last one may be shorter.
    bytes : int
        The bytes of all frames.
    """

    frames: int
    frame_bytes: int
    bytes: int


def size_of(ip_bytes: int, header_bytes: int = 0, segment_bytes: int = 0) -> Size:
    """Return the size on the wire of a packet that is cut into frames.

    Parameters
    ----------
    ip_bytes : int
        The bytes of the packet.
    header_bytes : int, optional
        The bytes of its IP and TCP headers, which each segment has.
    segment_bytes : int, optional
        The bytes of payload in a segment. With 0, the default, the packet is not cut.

    Returns
    -------
    Size
        The frames, with the framing around each of them.

    Examples
    --------
    >>> size_of(2948, header_bytes=52, segment_bytes=1448)
    Size(frames=2, frame_bytes=1538, bytes=3076)
    """
    payload_bytes = ip_bytes - header_bytes
    # A packet whose payload fits into one segment, or that is not to be cut, is a single
    # frame. A short frame is padded.
    if payload_bytes <= segment_bytes or not segment_bytes:
        only_frame_bytes = max(MIN_PACKET_BYTES, ip_bytes) + FRAMING_BYTES
        return Size(frames=1, frame_bytes=only_frame_bytes, bytes=only_frame_bytes)
    frames = -(-payload_bytes // segment_bytes)  # rounded up
    # Each frame has the headers of the packet and the framing around its payload.
    overhead_bytes = header_bytes + FRAMING_BYTES
    return Size(
        frames=frames,
        frame_bytes=segment_bytes + overhead_bytes,
        bytes=payload_bytes + frames * overhead_bytes,
    )


@dataclass(slots=True, eq=False)
class Packet:
    """A packet on its way.

    Attributes
    ----------
    load : object
        What is carried.
    size : Size
        The packet's size on the wire.
    target : int
        The rank that it goes to.
    first_s : float
        When its first frame has arrived at the link that carries the packet next.
    left_sender : bool
        Whether it has left the link of its sender.
    """

    load: Any
    size: Size
    target: int
    first_s: float
    left_sender: bool = False


class Line:
    """One direction of a link.

    Parameters
    ----------
    rate_bits_per_s : float
        The rate of the link in bit/s.

    Attributes
    ----------
    bytes_per_s : float
        The rate in bytes per second.
    free_s : float
        When the link will have sent all packets that it was given, in seconds.
    """

    def __init__(self, rate_bits_per_s: float) -> None:
        self.bytes_per_s = rate_bits_per_s / 8
        self.free_s = 0.0

    def carry(self, first_s: float, last_s: float, size: Size) -> tuple[float, float]:
        """Return when the first frame of a packet and when all its frames have left.

        The packet waits until the link is free (``free_s``), which this method then
        changes to when all frames of the packet have left.

        Parameters
        ----------
        first_s, last_s : float
            When the first and the last frame have arrived at the link, in seconds.
        size : Size
            The frames.

        Returns
        -------
        first_left_s, all_left_s : float
            Seconds.

        Notes
        -----
        Frames arrive at even intervals and leave one after the other, so the first and the
        last of them decide when all have left. The last frame cannot begin to leave before
        it has arrived, at ``last_s``, and then needs its own transmission time. A last frame
        that is shorter than the others may arrive while the frame before it still leaves. The
        delay from this is less than the time of one frame, and is neglected.
        """
        begin_s = max(first_s, self.free_s)
        last_frame_bytes = size.bytes - (size.frames - 1) * size.frame_bytes
        # When all have left if no frame has to be waited for.
        without_waiting_s = begin_s + size.bytes / self.bytes_per_s
        last_left_s = last_s + last_frame_bytes / self.bytes_per_s
        self.free_s = max(without_waiting_s, last_left_s)
        # A single frame is also the last one, which may be shorter than `frame_bytes`.
        first_frame_bytes = min(size.frame_bytes, size.bytes)
        first_left_s = begin_s + first_frame_bytes / self.bytes_per_s
        return first_left_s, self.free_s


class Shaper:
    """The packets on their way between ranks.

    All times are seconds since a start that the caller chooses.

    Parameters
    ----------
    rates_bits_per_s : sequence of float
        The rate of each rank's link in bit/s.
    conditions : Conditions
        The delay and the loss of each link.

    Attributes
    ----------
    lost : int
        How many packets were lost by chance, all on the link of their sender.
    """

    def __init__(
        self, rates_bits_per_s: Sequence[float], conditions: Conditions
    ) -> None:
        self.lost = 0
        self._conditions = conditions
        # The two directions of each rank's link: what the rank sends, what it receives.
        self._up = [Line(rate) for rate in rates_bits_per_s]
        self._down = [Line(rate) for rate in rates_bits_per_s]
        # A generator for each rank, with its number as the seed, so that its losses do not
        # depend on what others send.
        self._chance = [random.Random(rank) for rank in range(len(rates_bits_per_s))]
        # A heap of events: when a packet is at the end of a link, the number of the
        # event, and the packet. Of events at the same time, the one that was noted first
        # has the smallest number, and comes first.
        self._events: list[tuple[float, int, Packet]] = []
        self._order = count()

    def send(
        self, now_s: float, source: int, target: int, size: Size, load: Any
    ) -> None:
        """Let a packet leave a rank.

        Parameters
        ----------
        now_s : float
            The time, which is no earlier than in any call before.
        source, target : int
            The ranks.
        size : Size
            The packet's size on the wire.
        load : object
            What is carried.
        """
        loss = self._conditions.loss
        up_link = self._up[source]
        # A rank hands over a whole packet at once, so the first and the last of its frames
        # arrive at the link at ``now_s``.
        if loss and self._chance[source].random() < loss:
            # A packet that is lost takes its time on the link, too.
            up_link.carry(first_s=now_s, last_s=now_s, size=size)
            self.lost += 1
        else:
            packet = Packet(load, size, target, first_s=now_s)
            self._carry(up_link, packet, last_s=now_s)

    def _carry(self, line: Line, packet: Packet, last_s: float) -> None:
        """Let a link carry a packet, and note when the packet is at the link's end.

        ``packet.first_s`` is the time at which its first frame has arrived at this link.
        It is changed to the time at which that frame arrives at the link's end.
        ``last_s`` is when the last frame has arrived at this link.
        """
        first_left_s, all_left_s = line.carry(packet.first_s, last_s, packet.size)
        delay_s = self._conditions.delay_s
        packet.first_s = first_left_s + delay_s
        event = (all_left_s + delay_s, next(self._order), packet)
        heapq.heappush(self._events, event)

    @property
    def next_s(self) -> float:
        """Return when to call `pop_arrived` next, or infinity if no packet is on its way."""
        return self._events[0][0] if self._events else math.inf

    def pop_arrived(self, now_s: float) -> Iterator[tuple[float, Packet]]:
        """Remove and yield all packets that have arrived, in order.

        Parameters
        ----------
        now_s : float
            The time.

        Yields
        ------
        due_s : float
            When the packet was due.
        packet : Packet
            The packet.
        """
        # A packet has two events: its last frame (`Size`) is at the end of the sender's link,
        # and later at the end of the target's link. The heap has the earliest event first.
        # Within this loop, `_carry` may add an event that is due already.
        events = self._events
        while events and events[0][0] <= now_s:
            arrived_s, _, packet = heapq.heappop(events)
            if packet.left_sender:
                yield arrived_s, packet
            else:
                packet.left_sender = True
                # The last frame is at the link of the target now. The first one got
                # there at `packet.first_s`.
                self._carry(self._down[packet.target], packet, last_s=arrived_s)


# -- packets ---------------------------------------------------------------------------


def wire_size(packet: bytes) -> Size:
    """Return the size on the wire of a packet that a device gives.

    Parameters
    ----------
    packet : bytes
        The header of the device, followed by the IP packet.

    Returns
    -------
    Size
    """
    # `checksum_start` is the offset in the IP packet at which the check sum begins.
    _, segment_kind, _, segment_bytes, checksum_start, _ = _HEADER.unpack_from(packet)
    ip_bytes = len(packet) - _HEADER.size
    # Kind 0 is a packet that is not to be cut into segments.
    if segment_kind == 0:
        return size_of(ip_bytes)
    # The check sum is that of TCP, so it begins where the IP header ends. Byte 12 of the
    # TCP header has the length of that header, in words of 4 bytes, in its upper half.
    ip_header_bytes = checksum_start
    tcp_header_words = packet[_HEADER.size + ip_header_bytes + 12] >> 4
    return size_of(
        ip_bytes,
        header_bytes=ip_header_bytes + 4 * tcp_header_words,
        segment_bytes=segment_bytes,
    )


# -- the process -----------------------------------------------------------------------


def open_device(namespace: str, return_to: str, offload: int) -> int:
    """Open a device in a namespace, and set the windows of TCP there.

    Parameters
    ----------
    namespace : str
        The file of the namespace.
    return_to : str
        The file of the namespace to which this process returns afterwards.
    offload : int
        The flags of the tasks that the kernel leaves to the device: check sums, and the
        cutting into segments.

    Returns
    -------
    int
        The file descriptor of the device.

    Raises
    ------
    OSError
        If a namespace does not exist, or if the kernel has no TUN devices.
    """
    # The settings of TCP and the new device are those of the namespace in which this
    # process is.
    enter_namespace(namespace)
    windows = " ".join(str(n_bytes) for n_bytes in WINDOW_BYTES)
    # The buffers of what is received, and of what is to be sent.
    for buffer in ("rmem", "wmem"):
        Path(f"/proc/sys/net/ipv4/tcp_{buffer}").write_text(windows)
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    # Read and write IP packets (TUN), without the kernel's header of packet information
    # (NO_PI), but with a header on check sums and segments (VNET_HDR).
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    # The kernel's struct ifreq: the name of the interface, its flags, and padding.
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    # The size of the header before each packet, and the tasks left to this device.
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER.size))
    fcntl.ioctl(device, _TUNSETOFFLOAD, offload)
    enter_namespace(return_to)
    return device


class Tunnel:
    """The devices of all ranks, joined by a shaper.

    Parameters
    ----------
    devices : list of int
        The file descriptor of each rank's device.
    shaper : Shaper
        Decides when packets arrive.
    prefix : str
        The first three numbers of all addresses, such as "10.77.0.". The fourth number
        of rank r is r + 1.
    crossed : int
        The file descriptor of a file in which packets are counted, in the format of
        `CROSSED`.
    """

    def __init__(
        self, devices: list[int], shaper: Shaper, prefix: str, crossed: int
    ) -> None:
        self.devices = devices
        self.shaper = shaper
        self._crossed = crossed
        # The first three bytes of all addresses.
        self._prefix = socket.inet_aton(f"{prefix}0")[:3]
        # How many packets were to be written to their target's device, and how many of
        # them were late: written more than `LATE_S` after they were due, or not taken.
        self._packets = 0
        self._late = 0
        self._begun_s = time.perf_counter()
        # When `select` last found packets to read. They count as sent at this time.
        self._readable_since_s = 0.0

    def serve(self) -> None:
        """Carry packets for ever."""
        while True:
            until_next_s = self.shaper.next_s - self.now_s()
            if math.isinf(until_next_s):
                # No packet is on its way, so `select` waits until one is sent.
                wait_s = None
            elif until_next_s >= SPIN_S:
                wait_s = until_next_s
            else:
                # Do not sleep: waking up would take longer than this wait.
                wait_s = 0.0
            ready, _, _ = select.select(self.devices, (), (), wait_s)
            # `read` takes this for the time at which the packets were sent.
            self._readable_since_s = self.now_s()
            for device in ready:
                self.read(device)
                # A packet that is due does not wait for those that still have to be
                # read.
                self.write()
            # Packets also fall due while no device has anything to read.
            self.write()

    def now_s(self) -> float:
        """Return the seconds since this object was made."""
        return time.perf_counter() - self._begun_s

    def read(self, device: int) -> None:
        """Read a packet from a device, and give it to the shaper if it is for a rank.

        The packet counts as sent when `serve` last found devices to be readable. It may be
        read later than that, because `serve` reads the devices one after the other.

        Parameters
        ----------
        device : int
            The file descriptor of the device.
        """
        try:
            # The device puts a header of its own (virtio_net_hdr) before each IP packet,
            # which has at most 65,535 bytes.
            packet = os.read(device, _HEADER.size + 65535)
        except BlockingIOError:
            # `select` may report a device that has no packet after all.
            return
        # What is not for a rank is dropped, such as the packets of IPv6 that the kernel
        # sends by itself. The version is the first half byte of the IP header.
        ip_version = packet[_IP_VERSION_AT] >> 4
        if ip_version != 4 or packet[_NETWORK_OF_TARGET] != self._prefix:
            return
        # The last number of the address of rank r is r + 1.
        target = packet[_NUMBER_OF_TARGET_AT] - 1
        if 0 <= target < len(self.devices):
            source = self.devices.index(device)
            self.shaper.send(
                self._readable_since_s, source, target, wire_size(packet), packet
            )

    def write(self) -> None:
        """Write what has arrived to the devices of its targets, and count it."""
        for due_s, packet in self.shaper.pop_arrived(self.now_s()):
            late_s = self.now_s() - due_s
            try:
                os.write(self.devices[packet.target], packet.load)
            except OSError:
                # The device is down, or its memory is used up. The packet counts as late.
                late_s = math.inf
            self._packets += 1
            if late_s > LATE_S:
                self._late += 1
            # The last two numbers are the seconds and the processor seconds so far.
            record = CROSSED.pack(
                self._packets, self._late, self.now_s(), time.process_time()
            )
            # The record is written at the beginning of the file, over the previous one.
            os.pwrite(self._crossed, record, 0)


def main(config: Mapping[str, Any]) -> None:
    """Make the devices, print that they exist, and carry packets for ever.

    Parameters
    ----------
    config : mapping
        ``namespaces`` are the files of the ranks' namespaces, and last that of the switch.
        ``crossed`` is the file in which packets are counted, and ``prefix`` the first three
        numbers of all addresses. Each link has the rate ``rate_bits_per_s``, and
        ``conditions`` are the attributes of `Conditions` by name. ``dies_with_parent`` says
        whether this process dies with the process that started it.

    Raises
    ------
    OSError
        If the devices cannot be made.
    """
    if config["dies_with_parent"]:
        die_with_parent()
    # Only the lab ends this process, by SIGKILL. Ctrl-C and the end of a terminal do not.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    *rank_namespaces, switch_namespace = config["namespaces"]
    conditions = Conditions(**config["conditions"])
    # With this flag the kernel makes no check sums. The header of each packet tells the
    # receiver's kernel that they are missing.
    offload = _CSUM
    if not conditions.loss:
        # With this second flag a packet may stand for many frames. With losses it must not,
        # because chance would take all frames of a packet at once.
        offload |= _TSO4
    # Each device is made within the namespace of its rank. The process then returns to
    # the namespace of the switch.
    devices = [
        open_device(namespace, return_to=switch_namespace, offload=offload)
        for namespace in rank_namespaces
    ]
    shaper = Shaper([config["rate_bits_per_s"]] * len(devices), conditions)
    # The link also works without real-time priority. It is then late more often, and
    # counts the packets that are late.
    with suppress(PermissionError):
        # Priority 1 is the lowest of the real-time priorities.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    _avoid_pauses_for_memory()
    crossed = os.open(config["crossed"], os.O_WRONLY | os.O_CREAT, 0o644)
    # The file has a record of zeros before the first packet.
    os.pwrite(crossed, bytes(CROSSED.size), 0)
    print(READY, flush=True)
    Tunnel(devices, shaper, config["prefix"], crossed).serve()


def _avoid_pauses_for_memory() -> None:
    """Keep the garbage collector and the allocator from taking time of this process."""
    # Unused objects that refer to each other in a cycle, such as those of imports, are freed
    # once. From now on no object here is part of a cycle, so the collector is not needed.
    gc.collect()
    gc.disable()
    # With thresholds of 1 GiB, glibc returns no freed memory to the kernel. Getting the
    # memory of a large packet from the kernel again takes longer than reading the packet.
    for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        with suppress(AttributeError):  # another C library has no mallopt
            ctypes.CDLL(None).mallopt(parameter, 2**30)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        sys.exit(f"{error.strerror}: {error.filename or DEVICE}")
