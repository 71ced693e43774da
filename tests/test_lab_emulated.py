"""The emulated link in earnest: never faster than asked, whole whatever is lost, and gone with its lab."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.run.clock import Budget
from ddlkit.run.lab import Conditions, network, tunnel
from ddlkit.run.lab.network import Lab, LabShape, attach, clean, status
from ddlkit.run.lab.replay import calibrate, replay
from ddlkit.run.measure.collectives import CollectivesSettings
from places import PATIENCE_S, ROOT, alive, planned, ranks_below, wait_for
from test_lab_network import entering, lines, links, start, traces

# Echo requests, each answered before the next: prints the round trips in seconds.
PING = """
import socket, struct, sys, time
from ddlkit.run.lab.tunnel import folded
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); s.settimeout(100)
for number in range(int(sys.argv[2])):
    said = struct.pack("!HH", 77, number) + bytes(56)
    sum_ = 0xFFFF ^ folded(struct.pack("!BBH", 8, 0, 0) + said)
    start = time.perf_counter(); s.sendto(struct.pack("!BBH", 8, 0, sum_) + said, (sys.argv[1], 0))
    while (heard := s.recv(2048))[20] or heard[24:28] != said[:4]: pass
    print(time.perf_counter() - start)
"""
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

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.usefixtures("require_emulated")]
QUICK = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.2)


def shape(ranks: int = 2, rate: float = 1e9, **how: Any) -> LabShape:
    return LabShape(ranks, rate, conditions=Conditions(**how))


def ping(lab: Lab, sender: int, receiver: int, count: int = 20) -> list[float]:
    argv = [sys.executable, "-c", PING, f"10.77.0.{receiver + 1}", str(count)]
    how: Any = {"capture_output": True, "text": True, "check": True, "timeout": 60, "cwd": ROOT}
    return [
        float(line) for line in subprocess.run(entering(lab, sender, *argv), **how).stdout.split()
    ]


def link_process(label: str) -> psutil.Process:
    return psutil.Process(json.loads((network.STATE / f"{label}.json").read_text())["link"]["pid"])


class TestLink:
    def test_what_is_lost_is_sent_again_and_arrives_as_it_was(self) -> None:
        """Frames are cut out of large packets: a wrong check sum would be counted by the kernel."""
        rate, n_bytes = 2e8, 2_000_000
        with Lab(shape(rate=rate, delay_s=1e-3, loss=0.01)) as lab:
            receive = entering(lab, 1, sys.executable, "-c", HASH)
            receiving = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
            assert receiving.stdout is not None and receiving.stdout.readline() == "ready\n"
            argv = [sys.executable, "-c", SEND_RANDOM, "10.77.0.2", str(n_bytes)]
            start_s = time.perf_counter()
            subprocess.run(entering(lab, 0, *argv), check=True, timeout=PATIENCE_S)
            heard = receiving.communicate(timeout=PATIENCE_S)[0].strip()
            took_s = time.perf_counter() - start_s
            counters = [lines(*entering(lab, rank, "cat", "/proc/net/snmp")) for rank in (0, 1)]
        assert heard == hashlib.sha256(random.Random(1).randbytes(n_bytes)).hexdigest()
        assert n_bytes * 1538 / 1448 <= took_s * rate / 8
        tcp = [[line.split() for line in told if line.startswith("Tcp:")] for told in counters]
        sender, receiver = (dict(zip(names, values, strict=True)) for names, values in tcp)
        assert int(sender["RetransSegs"]) > 0, "something was lost"
        assert sender["InCsumErrors"] == receiver["InCsumErrors"] == "0"

    def test_jitter_spreads_round_trips_and_the_host_never_sees_the_link(self) -> None:
        before = links()
        with Lab(shape(rate=1e8, delay_s=5e-3, jitter_s=4e-3)) as lab:
            process = link_process(lab.label)
            assert lab.name == "emulated:100mbit-delay5ms-jitter4ms" and links() == before
            trips = ping(lab, 0, 1, 40)
            assert min(trips) >= 4 * 1e-3
            assert statistics.stdev(trips) > 1e-3  # of four uniform draws: 4.6 ms
        assert not process.is_running() and traces(lab.label) == [] and links() == before


class TestJobs:
    def test_rows_say_which_link_it_was_and_when_it_was_late(self) -> None:
        settings = CollectivesSettings(["all_reduce"], (1024, 65536), QUICK, 16)
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
    def test_a_killed_link_ends_its_ranks_with_one_line_and_leaves_nothing(self) -> None:
        def kill_link() -> None:
            assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
            link_process("cutoff").kill()

        settings = CollectivesSettings(["all_reduce"], [2**24], Budget(1, 10**6, 10**6, 60.0))
        with Lab(shape(delay_s=1e-3), "cutoff") as lab:
            threading.Thread(target=kill_link).start()
            with pytest.raises(UserError, match="process of the emulated link .* gone") as raised:
                calibrate(lab, settings)
            assert "\n" not in str(raised.value)
            assert alive(ranks_below(os.getpid())) == []
            assert {row["label"]: row["alive"] for row in status()}["cutoff"] is False
        assert traces("cutoff") == []


# An owner that says which lab it has up, and then waits.
OWNER = """
import sys, time
from ddlkit.run.lab import Conditions
from ddlkit.run.lab.network import Lab, LabShape
with Lab(LabShape(2, 1e9, conditions=Conditions(1e-3))) as lab:
    print(lab.label, flush=True)
    time.sleep(60)
"""


class TestEnd:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    @pytest.mark.fault(
        fault="the owner of an emulated link is ended, or killed",
        injected="SIGTERM, SIGKILL to it",
        holds="the link's process ends, by itself where nobody ends it",
    )
    def test_the_link_of_a_killed_owner_ends_by_itself(self, number: signal.Signals) -> None:
        process = start(OWNER)
        assert process.stdout is not None
        label = process.stdout.readline().strip()
        link = link_process(label)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
        assert wait_for(lambda: not alive([link]))
        clean()  # unless another lab that was made meanwhile has done it already
        assert traces(label) == []

    def test_a_start_that_fails_leaves_nothing_and_tbf_works_without_tun(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tunnel, "DEVICE", str(tmp_path / "tun"))
        lab = Lab(shape())
        with pytest.raises(UserError, match="tbf lab works without it"):
            lab.up()
        assert traces(lab.label) == []
        monkeypatch.undo()
        monkeypatch.setattr(network, "NAMESPACES", Path("/nowhere"))
        with pytest.raises(UserError, match="the emulated link did not start: .*nowhere"):
            lab.up()
        assert traces(lab.label) == []

    def test_a_lab_of_the_command_line_stays_until_it_is_taken_down(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["lab", "up", "--engine", "emulated", "--ranks", "2", "--rate", "500mbit"]
        argv += ["--delay", "2ms", "--jitter", "0.2ms", "--loss", "0.1%", "--label", "stays"]
        terminal = subprocess.Popen(
            [sys.executable, "-m", "ddlkit", *argv], cwd=ROOT, start_new_session=True
        )
        assert terminal.wait(timeout=PATIENCE_S) == 0
        try:
            link = link_process("stays")
            assert "stays" not in clean() and alive([link])
            assert attach("stays").name == "emulated:500mbit-delay2ms-jitter0.2ms-loss0.001"
            assert min(ping(attach("stays"), 0, 1, 3)) >= 4 * 1.8e-3
            link.kill()
            assert wait_for(lambda: not alive([link]))
            assert cli.main(["lab", "status"]) == 0
            assert "dead: run ddlkit lab clean" in capsys.readouterr().out
            assert "stays" in clean()
        finally:
            if "stays" in [row["label"] for row in status()]:
                attach("stays").down()
        assert traces("stays") == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--delay", "2ms"], "--delay needs --engine emulated"),
        (["--engine", "emulated", "--jitter", "1ms"], "at most the delay"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = status()
    assert cli.main(["lab", "up", *argv]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1
    assert status() == before
