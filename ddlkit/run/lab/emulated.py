"""An emulated link as its lab and its ranks see it: started, and asked how many packets were late."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.run.instruments.vitals import BUSY_LIMIT, Usage, processor_times, processor_usage
from ddlkit.run.jobs.protocol import child_environment
from ddlkit.run.lab import tunnel

MISSING = (
    f"the emulated link needs {tunnel.DEVICE}, which is not here; the tbf lab works without it"
)
LINK = "DDLKIT_LINK"
"""In the environment of a rank: by which socket the link that it uses is asked."""
START_S = 30.0  # until the devices are there
ANSWER_S = 5.0  # a request takes well below a millisecond, unless the process is gone or starved


def start(config: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start the process of a link, as `tunnel.main` takes its ``config``, and wait until it is ready.

    It lives in the switch's namespace. An owned one ends when its standard input closes, so with us.
    Raises UserError where there is no TUN, and when it ends at once.
    """
    if not Path(tunnel.DEVICE).exists():
        raise UserError(MISSING)
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
            last = (process.stderr.read().strip().splitlines() or ["it said nothing"])[-1]
            process.wait()
            raise UserError(f"the emulated link did not start: {last}; the tbf lab may work")
    return process


def ask_mine() -> dict[str, Any]:
    """Return what has crossed the emulated link that this rank uses; empty where it uses none.

    Raises UserError when the link's process is gone.
    """
    if not (path := os.environ.get(LINK)):
        return {}
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_S)
            line.connect(path)
            with line.makefile("rb") as answer:
                crossed: dict[str, Any] = json.loads(answer.readline())
    except (OSError, ValueError) as error:
        gone = f"emulated link {Path(path).stem}: its process does not answer ({error})"
        raise UserError(gone) from error
    return crossed


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
        spent = {name: value - self._crossed[name] for name, value in ask_mine().items()}
        full = spent["processor_s"] >= BUSY_LIMIT * max(spent["seconds"], 1e-9)
        return replace(used, late=1.0 if full else spent["late"] / max(1, spent["packets"]))
