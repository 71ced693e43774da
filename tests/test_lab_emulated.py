"""The emulated link in earnest: never faster than asked, whole whatever is lost, and gone with its lab."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.model import Calibration
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.instruments.usage import Usage
from ddlkit.run.jobs.launch import launch
from ddlkit.run.lab import emulated, network, tunnel
from ddlkit.run.lab.conditions import Change, Conditions
from ddlkit.run.lab.emulated import Crossing
from ddlkit.run.lab.network import Lab, LabShape, attach, clean, status
from ddlkit.run.lab.replay import calibrate, choose_join, replay
from ddlkit.run.measure.echoes import EchoesSettings, echoes_job
from places import PATIENCE_S, ROOT, alive, planned, ranks_below, wait_for
from test_lab_network import entering, lines, links, send, start, traces

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
FLOOD = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])): s.sendto(bytes(1400), (sys.argv[1], 7002))
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
    def test_a_round_trip_takes_four_delays_and_any_packet_crosses(self) -> None:
        with Lab(shape(3, delay_s=3e-3, delays=((2, 10e-3),))) as lab, lab.watched() as seen:
            assert min(ping(lab, 0, 1)) >= 4 * 3e-3
            assert min(ping(lab, 1, 2, 5)) >= 2 * (3e-3 + 10e-3)
        (crossed,) = seen
        assert crossed.packets == 2 * (20 + 5)
        table = crossed.ranks
        assert table["sent_bytes"].sum() == table["received_bytes"].sum() == 50 * (84 + 38)
        assert crossed.stray == crossed.refused == 0

    def test_jitter_spreads_round_trips(self) -> None:
        with Lab(shape(delay_s=5e-3, jitter_s=4e-3)) as lab:
            trips = ping(lab, 0, 1, 40)
        assert min(trips) >= 4 * 1e-3
        assert statistics.stdev(trips) > 1e-3  # of four uniform draws: 4.6 ms

    def test_never_more_than_the_rate_and_all_of_it_is_counted(self) -> None:
        rate, n_bytes = 2e8, 5_000_000
        with Lab(shape(rate=rate)) as lab, lab.watched() as seen:
            start_s = time.perf_counter()
            send(lab, 0, 1, n_bytes)
            took_s = time.perf_counter() - start_s
        carried = int(seen[0].ranks["sent_bytes"][0])
        n_sent = (n_bytes >> 16) << 16
        assert carried >= n_sent * 1538 / 1448
        assert took_s >= carried * 8 / rate
        assert (seen[0].ranks[["sent_dropped", "sent_lost", "received_dropped"]] == 0).all(
            axis=None
        )

    def test_a_rank_of_half_the_rate_takes_twice_as_long_both_ways(self) -> None:
        with Lab(shape(rate=1e9, rates=((1, 5e7),))) as lab:
            for way in ((0, 1), (1, 0)):
                start_s = time.perf_counter()
                send(lab, *way, 2_000_000)
                assert time.perf_counter() - start_s >= 1.9e6 * 8 / 5e7

    def test_what_is_lost_is_sent_again_and_arrives_as_it_was(self) -> None:
        """Frames are cut out of large packets: a wrong check sum would be counted by the kernel."""
        n_bytes = 3_000_000
        with Lab(shape(loss=0.02, delay_s=1e-3)) as lab, lab.watched() as seen:
            receive = entering(lab, 1, sys.executable, "-c", HASH)
            receiving = subprocess.Popen(receive, stdout=subprocess.PIPE, text=True)
            assert receiving.stdout is not None and receiving.stdout.readline() == "ready\n"
            argv = [sys.executable, "-c", SEND_RANDOM, "10.77.0.2", str(n_bytes)]
            subprocess.run(entering(lab, 0, *argv), check=True, timeout=PATIENCE_S)
            found = receiving.communicate(timeout=PATIENCE_S)[0].strip()
            counters = [lines(*entering(lab, rank, "cat", "/proc/net/snmp")) for rank in (0, 1)]
        import random

        assert found == hashlib.sha256(random.Random(1).randbytes(n_bytes)).hexdigest()
        assert seen[0].ranks["sent_lost"][0] > 0
        for told in counters:
            names, values = (line.split() for line in told if line.startswith("Tcp:"))
            assert dict(zip(names, values, strict=True))["InCsumErrors"] == "0"

    def test_a_full_queue_drops_what_comes_and_counts_it(self) -> None:
        sent = 2000
        with Lab(shape(rate=1e6, queue_bytes=128 * 1024)) as lab:
            with lab.watched() as seen:
                argv = [sys.executable, "-c", FLOOD, "10.77.0.2", str(sent)]
                subprocess.run(entering(lab, 0, *argv), check=True, timeout=PATIENCE_S)
                assert wait_for(lambda: lab.crossed()["ranks"][0]["sent_dropped"] > 0)
            row = seen[0].ranks.iloc[0]
            assert row["sent_frames"] + row["sent_dropped"] <= sent
            assert min(ping(lab, 1, 0, 2)) > 0, "the link goes on"

    def test_a_change_while_it_runs_holds_from_its_time_on(self) -> None:
        with Lab(shape(delay_s=1e-3)) as lab:
            lab.change([Change(0.0, delay_s=20e-3)])
            assert min(ping(lab, 0, 1, 5)) >= 4 * 20e-3
            lab.change([Change(60.0, rate_bits_per_s=1e8)])
            with pytest.raises(UserError, match="known already"):
                lab.change([Change(1.0, rate_bits_per_s=1e7)])
            with pytest.raises(UserError, match="in the order"):
                lab.change([Change(70.0, loss=0.1), Change(65.0, loss=0.0)])
            with pytest.raises(UserError, match="no link of rank 5"):
                lab.change([Change(70.0, loss=0.1, ranks=(5,))])

    def test_who_is_slow_to_ask_is_answered_and_holds_up_nobody(self) -> None:
        with Lab(shape()) as lab, socket.socket(socket.AF_UNIX) as slow:
            slow.connect(str(network.STATE / f"{lab.label}.link"))
            assert min(ping(lab, 0, 1, 3)) > 0
            assert sum(lab.crossed()["late"]) == 6
            slow.sendall(b"{}\n")
            with slow.makefile() as answer:
                assert len(json.loads(answer.readline())["ranks"]) == 2

    def test_ranks_of_a_node_share_its_link(self) -> None:
        how = Conditions(delay_s=5e-3)
        with Lab(LabShape(4, 1e8, 2, 1e9, how)) as lab:
            assert lab.name == "emulated:100mbit-g2-1gbit-delay5ms"
            assert min(ping(lab, 0, 2, 5)) >= 4 * 5e-3
            start_s = time.perf_counter()
            send(lab, 0, 3, 2_000_000)
            assert time.perf_counter() - start_s >= 1.9e6 * 8 / 1e8

    def test_a_lab_of_tbf_has_no_such_process(self) -> None:
        with Lab(LabShape(2, 1e9)) as lab, lab.watched() as seen:
            with pytest.raises(UserError, match="only emulated links"):
                lab.crossed()
            with pytest.raises(UserError, match="only emulated links"):
                lab.change([Change(0.0, loss=0.1)])
        assert seen == [] and lab.lost() == ""


class TestJobs:
    def test_rows_say_which_link_it_was_and_join_no_other_calibration(self) -> None:
        sizes = (1024, 65536)
        with Lab(shape(delay_s=2e-3)) as lab:
            rows = calibrate(lab, sizes, budget=QUICK)
        assert set(rows["link"]) == {"emulated:1gbit-delay2ms"}
        # A ring of two ranks takes two steps, each from one to the other.
        assert (rows["seconds"] >= 2 * 2 * 2e-3 / rows["messages_per_sample"]).all()
        assert rows["late"].between(0, 1).all()
        known = Calibration.of(rows, draws=0)
        with pytest.raises(UserError, match="no calibration"):
            known.between("lab:1gbit", 2)
        assert known.between(lab.name, 2).link.burst_s == 0, "a wire saves no credit"

    def test_echoes_take_four_delays_and_the_packets_of_an_all_reduce_are_counted(self) -> None:
        """Over the kernel's bucket no process of ours works, and nothing is counted."""
        how: dict[str, Any] = {"ranks": 3, "join": choose_join(1)}
        with Lab(shape(3, delay_s=2e-3)) as lab:
            rows = launch(echoes_job, EchoesSettings(20), place=lab, **how)["echoes"]
        echoes, reduced = (rows[rows["operation"] == name] for name in ("echo", "all_reduce"))
        assert echoes.groupby("at_once").size().to_dict() == {1: 20, 3: 20}
        assert (echoes["seconds"] >= 4 * 2e-3).all() and (reduced["seconds"] >= 4 * 2 * 2e-3).all()
        steps, ways = 2 * (3 - 1), 3
        assert (echoes.loc[echoes["at_once"] == 1, "packets"] >= 2).all()
        assert (reduced["packets"] >= steps * ways).all() and (rows["processor_s"] > 0).all()
        with Lab(LabShape(3, 1e9)) as lab:
            rows = launch(echoes_job, EchoesSettings(20), place=lab, **how)["echoes"]
        assert (rows["seconds"] > 0).all() and (rows[["packets", "processor_s"]] == 0).all(
            axis=None
        )

    def test_iterations_are_marked_when_the_link_was_late(self) -> None:
        with Lab(shape(delay_s=1e-3)) as lab:
            runs = replay(lab, 2, [planned("none", lab)], rounds=2).runs
        assert runs["late"].between(0, 1).all()
        assert runs["processor_limited"][runs["late"] > 0.05].all()
        assert Usage(0.1, 0.0, late=0.06).limited and not Usage(0.1, 0.0, late=0.04).limited

    @pytest.mark.fault(
        fault="the process of an emulated link is killed",
        injected="SIGKILL to it while ranks talk over it",
        holds="the ranks are ended, one line, the lab comes down",
    )
    def test_a_killed_link_ends_its_ranks_with_one_line_and_leaves_nothing(self) -> None:
        def kill_link() -> None:
            assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
            link_process("cutoff").kill()

        with Lab(shape(delay_s=1e-3), "cutoff") as lab:
            threading.Thread(target=kill_link).start()
            with pytest.raises(UserError, match="process of the emulated link .* gone") as raised:
                calibrate(lab, [2**24], budget=Budget(1, 10**6, 10**6, 60.0))
            assert "\n" not in str(raised.value)
            assert alive(ranks_below(os.getpid())) == []
            assert {row["label"]: row["alive"] for row in status()}["cutoff"] is False
            with pytest.raises(UserError, match="does not answer"):
                lab.crossed()
        assert traces("cutoff") == []

    def test_a_rank_that_dies_leaves_the_link_as_it_was(self) -> None:
        def kill_one() -> None:
            assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
            time.sleep(2.0)
            ranks_below(os.getpid())[-1].kill()

        with Lab(shape(delay_s=1e-3)) as lab:
            threading.Thread(target=kill_one).start()
            with pytest.raises(UserError, match="was killed by SIGKILL"):
                calibrate(lab, [2**24], budget=Budget(1, 10**6, 10**6, 60.0))
            assert lab.lost() == ""
            assert len(calibrate(lab, [1024], budget=QUICK)) >= 2
        assert traces(lab.label) == []


# An owner that says which lab it has up, and then waits.
OWNER = """
import sys, time
from ddlkit.run.lab.conditions import Conditions
from ddlkit.run.lab.network import Lab, LabShape
with Lab(LabShape(2, 1e9, conditions=Conditions(1e-3))) as lab:
    print(lab.label, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(OWNER)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    clean()
    process.communicate()


class TestEnd:
    def test_a_lab_leaves_nothing_and_never_shows_on_the_host(self) -> None:
        before = links()
        with Lab(shape(3)) as lab:
            process = link_process(lab.label)
            assert links() == before
            assert {row["label"]: row["alive"] for row in status()}[lab.label]
        assert not process.is_running()
        assert traces(lab.label) == []
        with lab:  # and again
            assert min(ping(lab, 0, 1, 1)) > 0
        assert traces(lab.label) == []
        assert links() == before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_takes_lab_and_link_down(
        self, owner: tuple[subprocess.Popen[str], str], number: signal.Signals
    ) -> None:
        process, label = owner
        link = link_process(label)
        process.send_signal(number)
        process.wait(timeout=PATIENCE_S)
        assert traces(label) == [] and not alive([link])

    @pytest.mark.fault(
        fault="the owner of an emulated link is killed",
        injected="SIGKILL to it",
        holds="the link's process ends by itself",
    )
    def test_the_link_of_a_killed_owner_ends_by_itself(
        self, owner: tuple[subprocess.Popen[str], str]
    ) -> None:
        process, label = owner
        link = link_process(label)
        process.kill()
        process.wait()
        assert wait_for(lambda: not alive([link]))
        clean()  # unless another lab that was made meanwhile has done it already
        assert traces(label) == []

    def test_a_start_that_fails_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulated, "check_possible", lambda: None)
        monkeypatch.setattr(network, "NAMESPACES", Path("/nowhere"))
        lab = Lab(shape())
        with pytest.raises(UserError, match="the emulated link did not start: .*nowhere"):
            lab.up()
        assert traces(lab.label) == []

    def test_without_tun_one_line_says_so_and_tbf_still_works(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tunnel, "DEVICE", str(tmp_path / "tun"))
        lab = Lab(shape())
        with pytest.raises(UserError, match="tbf lab works without it"):
            lab.up()
        assert traces(lab.label) == []
        with Lab(LabShape(2, 1e9)) as other:
            assert traces(other.label)

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
            assert cli.main(["lab", "crossed", "--label", "stays", "--json"]) == 0
            told = Crossing.since_up(json.loads(capsys.readouterr().out))
            assert told.packets >= 6 and told.processor_s > 0
            assert cli.main(["lab", "change", "--label", "stays", "--change", "0s:rate=1mbit"]) == 0
            assert cli.main(["lab", "crossed", "--label", "stays"]) == 0
            assert "in time" in capsys.readouterr().out
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
        (["--jitter", "1ms"], "--jitter needs --engine emulated"),
        (["--loss", "1%"], "--loss needs --engine emulated"),
        (["--rank-rate", "1=1gbit"], "--rank-rate needs --engine emulated"),
        (["--engine", "emulated", "--jitter", "1ms"], "at most the delay"),
        (
            ["--engine", "emulated", "--change", "2s:loss=1%", "--change", "1s:loss=0"],
            "in the order of their times",
        ),
        (["--engine", "emulated", "--rank-rate", "7=1gbit"], "no link of rank 7"),
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
