"""An nvidia-smi to put on the PATH: a program that plays a scene."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# As nvidia-smi 580: a line per GPU, nothing but a complaint when one of the fields is unknown.
PROGRAM = """\
import json, sys, time
from pathlib import Path

rows = json.loads((Path(__file__).parent / "scene.json").read_text())
if "topo" in sys.argv or "-q" in sys.argv:
    print("as the driver says it")
    raise SystemExit
query = next(word for word in sys.argv if word.startswith("--query-gpu="))
fields = query.partition("=")[2].split(",")
for field in fields:
    if field not in {"index", "uuid", *rows[0]}:
        print(f'Field "{field}" is not a valid field to query.')
        raise SystemExit(2)
periods = [word.partition("=")[2] for word in sys.argv if word.startswith("--loop-ms=")]
while True:
    for number, row in enumerate(rows):
        cells = {"index": str(number), "uuid": f"GPU-{number}", **row}
        print(", ".join(cells[field] for field in fields), flush=True)
    if not periods:
        break
    time.sleep(int(periods[0]) / 1e3)
"""
IDLE = {
    **{"name": "NVIDIA H200", "driver_version": "580.65.06", "memory.total": "143771"},
    **{"compute_cap": "9.0", "persistence_mode": "Disabled", "clocks.sm": "345"},
    **{"clocks.mem": "3201", "temperature.gpu": "31", "power.draw": "[N/A]"},
    **{"utilization.gpu": "0", "memory.used": "4"},
    **{"clocks_event_reasons.active": "0x0000000000000001"},
}


def install(home: Path, monkeypatch: pytest.MonkeyPatch, *gpus: dict[str, str]) -> None:
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{os.environ['PATH']}")
    write(home, gpus)


def write(home: Path, gpus: Sequence[dict[str, str]]) -> None:
    """Write it into a directory; gpus : what differs from IDLE."""
    home.mkdir(exist_ok=True)
    scene = [{**IDLE, **gpu} for gpu in gpus or ({},)]
    (home / "scene.json").write_text(json.dumps(scene))
    program = home / "nvidia-smi"
    program.write_text(f"#!{sys.executable} -SE\n{PROGRAM}")
    program.chmod(0o755)
