"""An nvidia-smi to put on the PATH: a program that plays a scene, and notes its pid where it stays."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# What it does is what nvidia-smi 580 does: a line per GPU, again and again with -lms, nothing but a complaint
# when one of the fields is unknown. A resident one holds the driver open; a starting driver looks busy.
PROGRAM = """\
import json, os, sys, time
from pathlib import Path

home = Path(__file__).parent
scene = json.loads((home / "scene.json").read_text())
words = sys.argv[1:]
query = next(word for word in words if word.startswith("--query-"))
about, fields = query.removeprefix("--query-").split("=")
rows = scene["gpus"] if about == "gpu" else scene["processes"]
known = {"index", "uuid", *scene["gpus"][0]} if about == "gpu" else {"gpu_uuid", "pid"}
for field in fields.split(","):
    if field not in known:
        print(f'Field "{field}" is not a valid field to query.')
        raise SystemExit(2)
resident = home / "resident"


def alive():
    try:
        os.kill(int(resident.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def show():
    for number, row in enumerate(rows):
        cells = {"index": str(number), "uuid": f"GPU-{number}", **row}
        if scene["starts"] and not alive():
            cells["utilization.gpu"] = "100"
        print(", ".join(cells[field] for field in fields.split(",")), flush=True)


if "-lms" in words:
    resident.write_text(str(os.getpid()))
    while True:
        show()
        time.sleep(int(words[words.index("-lms") + 1]) / 1e3)
show()
"""
IDLE = {
    **{"name": "NVIDIA H200", "driver_version": "580.65.06", "memory.total": "143771"},
    **{"compute_cap": "9.0", "persistence_mode": "Disabled", "clocks.sm": "345"},
    **{"clocks.mem": "3201", "temperature.gpu": "31", "power.draw": "[N/A]"},
    **{"utilization.gpu": "0", "memory.used": "4"},
}


def resident(home: Path) -> int:
    """Return the pid of the last that stayed; 0 if none has been started."""
    path = home / "resident"
    return int(path.read_text() or 0) if path.exists() else 0


def install(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    *gpus: dict[str, str],
    processes: Sequence[dict[str, str]] = (),
    starts: bool = False,
) -> None:
    """Put it on the PATH; as `write`."""
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    write(home, gpus, processes, starts)


def write(
    home: Path,
    gpus: Sequence[dict[str, str]],
    processes: Sequence[dict[str, str]] = (),
    starts: bool = False,
) -> None:
    """Write it into a directory.

    gpus : what differs from IDLE; starts : without a resident the driver starts each time, and looks busy
    """
    home.mkdir(exist_ok=True)
    scene: dict[str, Any] = {"gpus": [{**IDLE, **gpu} for gpu in gpus or ({},)]}
    scene |= {"processes": list(processes), "starts": starts}
    (home / "scene.json").write_text(json.dumps(scene))
    program = home / "nvidia-smi"
    program.write_text(f"#!{sys.executable} -SE\n{PROGRAM}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
