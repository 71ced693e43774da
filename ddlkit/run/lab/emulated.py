"""An emulated link as its lab sees it: started, asked what has crossed it, and judged by that."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.run.instruments.usage import (
    BUSY_LIMIT,
    LATE_LIMIT,
    Usage,
    processor_times,
    processor_usage,
)
from ddlkit.run.jobs.protocol import child_environment
from ddlkit.run.lab import tunnel

MISSING = (
    f"the emulated link needs {tunnel.DEVICE}, which is not here; the tbf lab works without it"
)
LINK = "DDLKIT_LINK"
"""In the environment of a rank: by which socket the link that it uses is asked."""
START_S = 30.0  # until the devices are there
ANSWER_S = 5.0  # a request takes well below a millisecond, unless the process is gone or starved


def check_possible() -> None:
    """Raise UserError where there is no TUN."""
    if not Path(tunnel.DEVICE).exists():
        raise UserError(MISSING)


def start(config: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start the process of a link, as `tunnel.main` takes its ``config``, and wait until it is ready.

    It lives in the switch's namespace. An owned one ends when its standard input closes, so with us.

    Raises UserError when it ends at once.
    """
    check_possible()
    switch = Path(config["namespaces"][-1]).name
    argv = ["ip", "netns", "exec", switch, sys.executable, "-m", tunnel.__name__]
    process = subprocess.Popen(
        [*argv, json.dumps(config)],
        stdin=subprocess.PIPE if config["owned"] else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        cwd="/",
        start_new_session=True,  # Ctrl-C in the terminal, and its end, reach only us
    )
    assert process.stdout and process.stderr
    with process.stdout, process.stderr:
        speaks = select.select([process.stdout], (), (), START_S)[0]
        if not speaks or process.stdout.readline().strip() != tunnel.READY:
            process.kill()
            said = process.stderr.read().strip().splitlines() or ["it said nothing"]
            process.wait()
            raise UserError(f"the emulated link did not start: {said[-1]}; the tbf lab may work")
    return process


def ask(path: Path) -> dict[str, Any]:
    """Return what has crossed the link behind a socket, by its process. Raises UserError when it is gone."""
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_S)
            line.connect(os.fspath(path))
            with line.makefile("rb") as answer:
                crossed: dict[str, Any] = json.loads(answer.readline())
    except (OSError, ValueError) as error:
        gone = f"emulated link {path.stem}: its process does not answer ({error})"
        raise UserError(gone) from error
    return crossed


def ask_mine() -> dict[str, Any]:
    """Return what has crossed the emulated link that this rank uses; empty where it uses none."""
    return ask(Path(os.environ[LINK])) if LINK in os.environ else {}


class Watch:
    """How the cores, and the emulated link where there is one, fare from now on. Rank 0 asks the link."""

    def __init__(self, rank: int) -> None:
        self._crossed = ask_mine() if rank == 0 else {}
        self._begun = processor_times()

    def usage(self) -> Usage:
        """Return the usage until now, as this rank sees it: marks are of the rank that saw worst.

        All packets count as late where the link's process had no time to spare: some waited unread.
        """
        used = processor_usage(self._begun, processor_times())
        if not self._crossed:
            return used
        crossing = Crossing.between(self._crossed, ask_mine())
        return replace(used, late=1.0 if crossing.full else 1.0 - crossing.in_time)


@dataclass(frozen=True)
class Crossing:
    """What crossed an emulated link between two moments.

    seconds : between them; processor_s : of the link's process meanwhile
    late : packets by `tunnel.BINS` of lateness
    stray, refused : packets for nobody, and such as a namespace did not take
    ranks : one row each: bytes and frames on the wire, packets, and frames lost, sent and received
    """

    seconds: float
    processor_s: float
    late: Sequence[int]
    stray: int
    refused: int
    ranks: pd.DataFrame

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Crossing:
        """Make it from two answers of the link's process; without the first, since the link is up."""
        earlier = {row["rank"]: row for row in before.get("ranks", [])}
        ranks = [
            {
                k: v - earlier.get(row["rank"], {}).get(k, 0) if k != "rank" else v
                for k, v in row.items()
            }
            for row in after["ranks"]
        ]
        counted = ("seconds", "processor_s", "stray", "refused")
        whole = {name: after[name] - before.get(name, 0) for name in counted}
        late = np.subtract(after["late"], before.get("late", 0)).tolist()
        return cls(**whole, late=late, ranks=pd.DataFrame(ranks))

    @property
    def packets(self) -> int:
        """Count what was written to its receivers."""
        return sum(self.late)

    @property
    def in_time(self) -> float:
        """Share of packets within `tunnel.LATE_S` of their due time; 1 where there were none."""
        on_time = sum(self.late[: 1 + tunnel.BINS.index(tunnel.LATE_S)])
        return on_time / self.packets if self.packets else 1.0

    @property
    def held(self) -> bool:
        """Whether the link did as asked: enough packets in time, none refused, and the process kept up."""
        return 1 - self.in_time <= LATE_LIMIT and not self.refused and not self.full

    @property
    def full(self) -> bool:
        """Whether the process had no time to spare: it was asked for more than the machine can carry."""
        return self.processor_s >= BUSY_LIMIT * max(self.seconds, 1e-9)

    def judged(self) -> dict[str, Any]:
        """How well the link did, by name, as a person wants to read it."""
        return {
            "seconds": self.seconds,
            "packets": self.packets,
            "in time": self.in_time,
            "processor_load": self.processor_s / max(self.seconds, 1e-9),
            "refused": self.refused,
            "verdict": "as asked" if self.held else "late: the machine cannot carry this",
        }
