"""Laws of the lab's network: it shapes as asked, keeps to itself, and never leaves anything behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_bits_per_s
from ddlkit.lab import network
from ddlkit.lab.network import Lab, LabShape, attach, clean, status
from places import PATIENCE_S, ROOT

# An owner that says which lab it has up, with a process inside it, and then waits.
OWNER = """
import signal, subprocess, sys, time
from ddlkit.lab import Conditions
from ddlkit.lab.network import Lab, LabShape
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the tests run under nohup
with Lab(LabShape(2, 1e9)) as lab:
    sleep = ["ip", "netns", "exec", lab.namespaces[1], "sleep", "60"]
    inside = subprocess.Popen(sleep, start_new_session=True)
    time.sleep(0.1)
    print(lab.label, inside.pid, flush=True)
    time.sleep(60)
"""

needs_lab = [pytest.mark.lab, pytest.mark.alone, pytest.mark.usefixtures("require_lab")]


def lines(*argv: str) -> list[str]:
    return subprocess.run(
        argv, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def traces(label: str) -> list[str]:
    """Every namespace, state file and live process in a namespace of a lab."""
    names = [
        line.split()[0] for line in lines("ip", "netns") if line.startswith(f"{label}-")
    ]
    inside = [pid for name in names for pid in lines("ip", "netns", "pids", name)]
    return names + inside + [path.name for path in network.STATE.glob(f"*{label}*")]


def links() -> list[str]:
    """The host's interfaces and routes: what a lab must never touch."""
    return (
        lines("ip", "-br", "link") + lines("ip", "-br", "addr") + lines("ip", "route")
    )


def start(code: str) -> subprocess.Popen[str]:
    how: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **how)


def entering(lab: Lab, rank: int, *argv: str) -> list[str]:
    return ["ip", "netns", "exec", lab.namespace(rank).name, *argv]


Owner = tuple[subprocess.Popen[str], str, int]


@pytest.fixture
def owner() -> Iterator[Owner]:
    """(process that owns a lab, the lab's label, a process inside the lab)"""
    process = start(OWNER)
    assert process.stdout is not None
    label, inside = process.stdout.readline().split()
    yield process, label, int(inside)
    process.kill()
    process.wait()
    clean()  # ends the process inside too, which holds the pipe open
    process.communicate()


@pytest.mark.parametrize(
    ("shape", "told"), [((2, 1.0), "100gbit"), ((0, 1e9), "ranks")]
)
def test_labs_that_cannot_be_are_refused(shape: tuple[int, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        LabShape(*shape)
    for label in ("A", "../x", "x" * 40):
        with pytest.raises(UserError, match="label"):
            Lab(LabShape(2, 1e9), label)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)
def test_root_without_capabilities_is_told_which_it_lacks() -> None:
    """Most containers have such a root."""
    without = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    up = [sys.executable, "-m", "ddlkit", "lab", "up", "--ranks", "2"]
    done = subprocess.run([*without, *up], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "CAP_SYS_ADMIN" in line and "CAP_NET_ADMIN" in line


@pytest.mark.parametrize("text", ["1gbit", "12.5mbit"])
def test_the_name_reads_back_as_the_rate_and_ranks_find_the_meeting(text: str) -> None:
    lab = Lab(LabShape(2, parse_bits_per_s(text)))
    assert (lab.name, lab.shape.name) == (f"lab:{text}", f"p2-{text}")
    assert lab.link_bits_per_s == parse_bits_per_s(text)
    for rank in range(2):
        told = lab.environment(rank, 2, port=1)
        found = [told[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")]
        assert found == [str(rank), "10.77.0.1", "29500"]
    lab.down()  # what is not up comes down without complaint


class TestNetwork:
    pytestmark = needs_lab

    def test_a_lab_leaves_nothing_and_never_shows_on_the_host(self) -> None:
        before = links()
        with Lab(LabShape(3, 1e9)) as lab:
            sleeper = subprocess.Popen(entering(lab, 0, "sleep", "60"))
            assert (
                len([t for t in traces(lab.label) if t.startswith(f"{lab.label}-")])
                == 4
            )
            assert links() == before
        assert sleeper.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        assert traces(lab.label) == [] and links() == before
        with (
            pytest.raises(ZeroDivisionError),
            lab,
        ):  # again; and an error inside takes it down
            raise ZeroDivisionError
        assert traces(lab.label) == []

    def test_every_link_leads_to_peers_alone(self) -> None:
        reach = (
            "import socket\n"
            "for host in ('127.0.0.1', '10.77.0.1', '10.77.0.2', '192.0.2.1'):\n"
            "    s = socket.socket(); s.settimeout(60)\n"
            "    try: s.connect((host, 9))\n"
            "    except OSError as error: print(type(error).__name__, error.errno)"
        )
        with Lab(LabShape(2, 1e8)) as lab:
            assert attach(lab.label).name == lab.name
            reached = lines(*entering(lab, 0, sys.executable, "-c", reach))
        assert reached == ["ConnectionRefusedError 111"] * 3 + ["OSError 101"]

    @pytest.mark.fault(
        fault="the kernel refuses a shaper",
        injected="a queueing discipline that there is not",
        holds="one line; nothing of the lab is left",
    )
    def test_a_build_that_fails_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            network, "_rate_limit", lambda device, rate: "root nonsense"
        )
        lab = Lab(LabShape(2, 1e9))
        with pytest.raises(UserError, match="tc -n"):
            lab.up()
        assert traces(lab.label) == []

    @pytest.mark.fault(
        fault="two labs at once",
        injected="two labs up, one of them asked for by the other's name",
        holds="each has its own links; the name is refused; one comes down and the other stays",
    )
    def test_several_labs_stand_side_by_side(self) -> None:
        with Lab(LabShape(2, 1e9)) as one, Lab(LabShape(2, 1e8)) as two:
            assert one.label != two.label
            rows = {row["label"]: row for row in status()}
            assert rows[one.label]["link"] == "lab:1gbit"
            assert rows[two.label]["link"] == "lab:100mbit"
            assert all(rows[lab.label]["alive"] for lab in (one, two))
            with pytest.raises(UserError, match="choose another label"):
                Lab(LabShape(2, 1e9), one.label).up()
            two.down()
            assert traces(one.label) and not traces(two.label)

    @pytest.mark.fault(
        fault="a lab's name is in use by somebody else",
        injected="a network namespace of that name",
        holds="refused in one line; the namespace stays",
    )
    def test_a_namespace_of_somebody_else_is_left_alone(self) -> None:
        lines("ip", "netns", "add", "foreign-rank0")
        try:
            with pytest.raises(UserError, match="choose another label"):
                Lab(LabShape(1, 1e9), "foreign").up()
            assert "foreign-rank0" in [line.split()[0] for line in lines("ip", "netns")]
        finally:
            lines("ip", "netns", "del", "foreign-rank0")


class TestOwner:
    pytestmark = needs_lab

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    @pytest.mark.fault(
        fault="the owner of a lab is ended",
        injected="SIGINT, SIGTERM, SIGHUP with a process in the lab",
        holds="lab and process are gone",
    )
    def test_a_signal_takes_the_lab_down(
        self, owner: Owner, number: signal.Signals
    ) -> None:
        process, label, inside = owner
        process.send_signal(number)
        process.wait(timeout=PATIENCE_S)
        assert process.returncode in (-signal.SIGINT, 128 + number)
        assert traces(label) == []
        assert not psutil.pid_exists(inside)

    @pytest.mark.fault(
        fault="Ctrl-C while a lab is made or removed",
        injected="SIGINT at eight moments of an endless up and down",
        holds="nothing of the lab is left, each time",
    )
    def test_a_signal_during_up_or_down_leaves_nothing(self) -> None:
        code = (
            "import signal\nfrom ddlkit.lab.network import Lab, LabShape\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "for moment in range(8):\n    try:\n        print('go', flush=True)\n"
            "        while True:\n            with Lab(LabShape(2, 1e9), 'crossing'): pass\n"
            "    except KeyboardInterrupt:\n        print('out', flush=True); input()\n"
        )
        process = start(code)
        assert process.stdout is not None and process.stdin is not None
        for moment in range(8):
            assert process.stdout.readline() == "go\n"
            time.sleep(0.011 * moment)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "out\n"
            assert traces("crossing") == []
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(timeout=PATIENCE_S) == 0, process.communicate()[1]

    @pytest.mark.fault(
        fault="a namespace of a lab without an owner is deleted",
        injected="`ip netns del` of one of its namespaces",
        holds="it is shown as dead; `ddlkit lab clean` removes it",
    )
    @pytest.mark.parametrize("namespace", range(3))
    def test_a_lab_that_lost_a_namespace_is_dead_and_removed(
        self, namespace: int
    ) -> None:
        lab = Lab(LabShape(2, 1e9), "torn", persistent=True).up()
        assert {row["label"]: row["alive"] for row in status()}["torn"] is True
        lines("ip", "netns", "del", lab.namespaces[namespace])
        assert {row["label"]: row["alive"] for row in status()}["torn"] is False
        with pytest.raises(UserError, match="the labs of this machine are .*torn"):
            attach("other")
        assert "torn" in clean() and traces("torn") == []

    @pytest.mark.fault(
        fault="a lab of the command line is killed while it is made",
        injected="SIGKILL to `ddlkit lab up` once its namespaces are there, before its links are",
        holds="it is shown as dead; `ddlkit lab clean` removes it",
    )
    def test_a_lab_killed_while_it_is_built_is_dead_and_removed(self) -> None:
        code = (
            "import os, signal\nfrom ddlkit.lab import network\n"
            "network._rate_limit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "network.Lab(network.LabShape(2, 1e9), 'half', persistent=True).up()\n"
        )
        assert start(code).wait(timeout=PATIENCE_S) == -signal.SIGKILL
        assert len(traces("half")) == 4, "three namespaces and a state file"
        assert {row["label"]: row["alive"] for row in status()}["half"] is False
        assert "half" in clean() and traces("half") == []

    @pytest.mark.fault(
        fault="the owner of a lab is killed",
        injected="SIGKILL to it, a process still in the lab",
        holds="`ddlkit lab clean` removes lab and process",
    )
    def test_a_killed_owner_leaves_a_lab_that_clean_removes(self, owner: Owner) -> None:
        process, label, inside = owner
        process.kill()
        os.waitid(
            os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
        )  # dead, but still a zombie
        assert {row["label"]: row["alive"] for row in status()}[label] is False
        process.wait()
        with Lab(
            LabShape(1, 1e9), "next"
        ):  # the next lab removes the dead one, as `clean` does
            assert traces(label) == []
        assert (
            not psutil.pid_exists(inside) or psutil.Process(inside).status() == "zombie"
        )
        assert label not in clean()

    def test_the_lab_of_a_running_process_is_not_taken_from_it(
        self, owner: Owner
    ) -> None:
        process, label, _ = owner
        ((pid, start),) = json.loads((network.STATE / f"{label}.json").read_text())[
            "needs"
        ]
        assert network._runs((pid, start)) and not network._runs((pid, start + 1))
        assert label not in clean()
        with pytest.raises(UserError, match=f"running process {process.pid}"):
            attach(label).down()
        assert traces(label)
