"""What a link takes for a packet that no software of ours waits for, and how many an all-reduce is made of.

An echo is answered by the kernel at the other end: its round trip is the link's alone.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.run.instruments.clock import sample_rows
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Floats, Rank, slowest
from ddlkit.run.lab import emulated
from ddlkit.run.lab.tunnel import folded

ASKED, ANSWERED = 8, 0  # kinds of ICMP messages (RFC 792)
IP_HEADER_BYTES = 20
PATIENCE_S, TRIES = 1.0, 10
IN_A_ROW = 20
_HEAD = struct.Struct("!BBHHH")  # kind, code, sum, whose, number


@dataclass(frozen=True)
class EchoesSettings:
    """``count`` echoes of ``n_bytes`` each, one after the other, and as many all-reduces.

    Raises UserError for too few, and for bytes that are no whole float32 or more than one frame holds.
    """

    count: int = 100
    n_bytes: int = 1024

    def __post_init__(self) -> None:
        if (
            self.count % IN_A_ROW
            or self.n_bytes % 4
            or self.count < 1
            or not 0 < self.n_bytes <= 1400
        ):
            raise UserError(
                f"echoes: {self.count} of {self.n_bytes} B: give a multiple of {IN_A_ROW}, of 4 to 1400 B"
            )


@job(EchoesSettings, "echoes")
def echoes_job(me: Rank, settings: EchoesSettings) -> Iterator[Tables]:
    """Round trips to the next rank, by rank 0 alone and by all ranks at once; and small all-reduces.

    ``seconds`` is of the slowest of those that take part; of IN_A_ROW all-reduces, their mean. ``packets``
    crossed an emulated link for each, and ``processor_s`` is what its process worked; 0 where there is none.
    Needs root.
    """
    addresses: list[str] = [""] * me.world_size
    dist.all_gather_object(addresses, _own_address())
    target, frames = addresses[(me.rank + 1) % me.world_size], []
    labels = {"link": me.link, "link_bits_per_s": me.link_bits_per_s, "ranks": me.world_size}
    for operation, at_once in (("echo", 1), ("echo", me.world_size), ("all_reduce", me.world_size)):
        dist.barrier()
        before = emulated.ask_mine() if me.rank == 0 else {}
        dist.barrier()
        if operation == "all_reduce":
            own = _all_reduces(settings)
        elif me.rank < at_once:
            own = round_trips(target, settings, me.rank)
        else:
            own = np.zeros(settings.count)
        # Nothing but the barrier of two packets or so a rank is counted besides.
        crossed = (
            _crossed(before, settings.count) if before else {"packets": 0.0, "processor_s": 0.0}
        )
        what = {"operation": operation, "at_once": at_once, "bytes": settings.n_bytes, **crossed}
        frames.append(sample_rows({**labels, **what}, slowest(own)))
        me.say(
            f"{at_once} x {operation}: {format_seconds(float(np.median(frames[-1]['seconds'])))}"
        )
    yield {"echoes": pd.concat(frames, ignore_index=True)}


def _all_reduces(settings: EchoesSettings) -> Floats:
    """(count / IN_A_ROW,) seconds of an all-reduce, mean of so many in a row."""
    data, found = torch.zeros(settings.n_bytes // 4), []
    for _ in range(settings.count // IN_A_ROW):
        start_s = time.perf_counter()
        for _ in range(IN_A_ROW):
            dist.all_reduce(data)
        found.append((time.perf_counter() - start_s) / IN_A_ROW)
    return np.array(found)


def _crossed(before: Mapping[str, Any], count: int) -> dict[str, float]:
    """Of an emulated link since then, for each of so many."""
    crossing = emulated.Crossing.between(before, emulated.ask_mine())
    return {"packets": crossing.packets / count, "processor_s": crossing.processor_s / count}


def _own_address() -> str:
    """Of the interface by which rank 0 is reached, and on rank 0 its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect((os.environ["MASTER_ADDR"], 9))
        return str(line.getsockname()[0])


def round_trips(address: str, settings: EchoesSettings, whose: int) -> Floats:
    """(count,) seconds from an echo's request to its answer.

    A kernel that is just sending an answer drops another request: what has no answer is asked again, and
    counts from then. Raises UserError without root, and where no answer comes at all.
    """
    payload, found = bytes(settings.n_bytes), []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as line:
            line.settimeout(PATIENCE_S)
            line.connect((address, 0))
            for number in range(settings.count):
                said = _HEAD.pack(ASKED, 0, 0, whose, number) + payload
                asked = _HEAD.pack(ASKED, 0, 0xFFFF ^ folded(said), whose, number) + payload
                found.append(_round_trip(line, asked, whose, number))
    except OSError as error:
        raise UserError(f"no echo from {address}: {error}: it needs root, and a link") from error
    return np.array(found)


def _round_trip(line: socket.socket, asked: bytes, whose: int, number: int) -> float:
    for again in range(TRIES):
        start_s = time.perf_counter()
        line.send(asked)
        try:
            while not _answers(line.recv(2048), whose, number):
                pass
            break
        except TimeoutError:
            if again == TRIES - 1:
                raise
    return time.perf_counter() - start_s


def _answers(packet: bytes, whose: int, number: int) -> bool:
    kind, _, _, of_whom, which = _HEAD.unpack_from(packet, IP_HEADER_BYTES)
    return bool((kind, of_whom, which) == (ANSWERED, whose, number))
