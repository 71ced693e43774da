"""The emulated link in earnest: never faster than asked, whole whatever is lost, and gone with its lab."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget
from ddlkit.lab import Conditions, network, tunnel
from ddlkit.lab.network import Lab, LabShape, attach, clean, status
from ddlkit.measure.collectives import CollectivesSettings
from places import PATIENCE_S, ROOT, alive, planned, ranks_below, wait_for
from test_lab_network import OWNER, entering, lines, links, start, traces
from workbook.record.replay import calibrate, replay

# Sends a file's worth of random bytes, and says what arrived.
SEND_RANDOM = """
import random, socket, sys
s = socket.create_connection((sys.argv[1], 7001)); s.sendall(random.Random(1).randbytes(int(sys.argv[2])))
s.shutdown(1); s.recv(1)
"""
HASH = """
import hashlib, socket
server = socket.create_server(("", 7001)); print("ready", flush=True)
s, _ = server.accept(); found = hashlib.sha256()
while part := s.recv(1 << 18): found.update(part)
print(found.hexdigest())
"""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.usefixtures("require_emulated"),
]


def shape(
    ranks: int = 2, rate: float = 1e9, delay_s: float = 0.0, loss: float = 0.0
) -> LabShape:
    return LabShape(ranks, rate, conditions=Conditions(delay_s=delay_s, loss=loss))


def link_process(label: str) -> psutil.Process:
    state = json.loads((network.STATE / f"{label}.json").read_text())
    return psutil.Process(state["needs"][-1][0])


def test_what_is_lost_is_sent_again_and_arrives_as_it_was_and_the_host_sees_nothing() -> (
    None
):
    rate, n_bytes, before = 5e7, 2_000_000, links()
    with Lab(shape(rate=rate, delay_s=1e-3, loss=0.01)) as lab:
        process = link_process(lab.label)
        assert lab.name == "emulated:50mbit-delay1ms-loss0.01" and links() == before
        receive = entering(lab, 1, sys.executable, "-c", HASH)
        receiving = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
        assert receiving.stdout is not None and receiving.stdout.readline() == "ready\n"
        argv = [sys.executable, "-c", SEND_RANDOM, "10.77.0.2", str(n_bytes)]
        start_s = time.perf_counter()
        subprocess.run(entering(lab, 0, *argv), check=True, timeout=PATIENCE_S)
        heard = receiving.communicate(timeout=PATIENCE_S)[0].strip()
        took_s = time.perf_counter() - start_s
        counters = lines(*entering(lab, 0, "cat", "/proc/net/snmp"))
    assert heard == hashlib.sha256(random.Random(1).randbytes(n_bytes)).hexdigest()
    assert n_bytes * 1538 / 1448 <= took_s * rate / 8
    names, values = (line.split() for line in counters if line[:4] == "Tcp:")
    assert int(dict(zip(names, values, strict=True))["RetransSegs"]) > 0, (
        "something was lost"
    )
    assert not process.is_running() and traces(lab.label) == [] and links() == before


def test_rows_say_which_link_it_was_and_when_it_was_late() -> None:
    budget = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.2)
    settings = CollectivesSettings(["all_reduce"], (1024, 65536), budget, 16)
    with Lab(shape(delay_s=2e-3)) as lab:
        rows = calibrate(lab, settings)
        runs = replay(lab, 2, [planned("none", lab)], rounds=2).runs
    assert set(rows["link"]) == {"emulated:1gbit-delay2ms"} == set(runs["link"])
    # A ring of two ranks takes two steps, each from one to the other.
    assert (rows["seconds"] >= 2 * 2 * 2e-3 / rows["messages_per_sample"]).all()
    assert rows["late"].between(0, 1).all() and runs["late"].between(0, 1).all()
    assert runs["processor_limited"][runs["late"] > 0.05].all()


@pytest.mark.fault(
    fault="the process of an emulated link is killed",
    injected="SIGKILL to it while ranks talk over it",
    holds="the ranks are ended, one line, the lab comes down",
)
def test_a_killed_link_ends_its_ranks_with_one_line_and_leaves_nothing() -> None:
    def kill_link() -> None:
        assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
        link_process("cutoff").kill()

    settings = CollectivesSettings(
        ["all_reduce"], [2**24], Budget(1, 10**6, 10**6, 60.0)
    )
    with Lab(shape(delay_s=1e-3), "cutoff") as lab:
        threading.Thread(target=kill_link).start()
        with pytest.raises(
            UserError, match="process of the emulated link .* gone"
        ) as raised:
            calibrate(lab, settings)
        assert "\n" not in str(raised.value)
        assert alive(ranks_below(os.getpid())) == []
        assert {row["label"]: row["alive"] for row in status()}["cutoff"] is False
    assert traces("cutoff") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.fault(
    fault="the owner of an emulated link is ended, or killed",
    injected="SIGTERM, SIGKILL to it",
    holds="the link's process ends, by itself where nobody ends it",
)
def test_the_link_of_a_killed_owner_ends_by_itself(number: signal.Signals) -> None:
    process = start(
        OWNER.replace("LabShape(2, 1e9)", "LabShape(2, 1e9, Conditions(1e-3))")
    )
    assert process.stdout is not None
    label, _ = process.stdout.readline().split()
    link = link_process(label)
    process.send_signal(number)
    process.wait(timeout=PATIENCE_S)
    assert wait_for(lambda: not alive([link]))
    clean()  # unless another lab that was made meanwhile has done it already
    process.communicate()
    assert traces(label) == []


def test_a_failed_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tunnel, "DEVICE", str(tmp_path / "tun"))
    lab = Lab(shape())
    with pytest.raises(UserError, match="tbf lab works without it"):
        lab.up()
    monkeypatch.undo()
    monkeypatch.setattr(network, "NAMESPACES", Path("/nowhere"))
    with pytest.raises(UserError, match="the emulated link did not start: .*nowhere"):
        lab.up()
    assert traces(lab.label) == []


def test_a_lab_of_the_command_line_stays(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["lab", "up", "--engine", "emulated", "--ranks", "2", "--rate", "500mbit"]
    argv += ["--delay", "2ms", "--loss", "0.1%", "--label", "stays"]
    command = [sys.executable, "-m", "ddlkit", *argv]
    subprocess.run(
        command, cwd=ROOT, start_new_session=True, check=True, timeout=PATIENCE_S
    )
    try:
        link = link_process("stays")
        assert "stays" not in clean() and alive([link])
        assert attach("stays").name == "emulated:500mbit-delay2ms-loss0.001"
        link.kill()
        assert wait_for(lambda: not alive([link]))
        assert cli.main(["lab", "status"]) == 0
        assert re.search(
            "^stays: dead: .*: run ddlkit lab clean$", capsys.readouterr().out, re.M
        )
        assert "stays" in clean()
        assert cli.main(["lab", "up", "--delay", "2ms"]) == 2
        assert "--delay needs --engine emulated" in capsys.readouterr().err
    finally:
        if "stays" in [row["label"] for row in status()]:
            attach("stays").down()
    assert traces("stays") == []
