"""A rate-limited network between ranks on one machine: namespaces, and what joins them.

Each rank has a namespace of its own, and what joins them another; the host's network never sees any of it.
Needs Linux, root and iproute2. Engine "tbf" is veth pairs and a bridge, each end shaped by the kernel's token
bucket; "emulated" is a process of ours, through which every packet passes (`ddlkit.lab.tunnel`).
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from ddlkit import jobs
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import burst_bytes
from ddlkit.jobs.launch import Place
from ddlkit.jobs.vitals import LINK
from ddlkit.lab import LabShape as LabShape  # others know it by this name
from ddlkit.lab import tunnel
from ddlkit.lab.tunnel import INTERFACE
from ddlkit.store.files import atomic_write_text

NAMESPACES = Path("/run/netns")  # of iproute2
STATE = Path("/run/ddlkit/labs")
"""One JSON file per lab: its shape, whether a process owns it, and the owner and the link that it needs."""

MAX_PACKET_BYTES = (
    65536  # Linux hands TCP data down in packets of this size, to be cut on the wire
)
QUEUE_BYTES = (
    256 * 1024**2
)  # far above what TCP keeps in flight, so that nothing is dropped
UP = "addrgenmode none up"
PREFIX = "10.77.0."
# A window that is open from the start and stays so: Linux's default, cubic, mistakes the shaper's
# queue for congestion, and one 12 MB message in fifty then takes up to twice as long as the others.
TCP = "congctl reno initcwnd 1000 initrwnd 1000"
DEADLINE_S = 30.0
TRAPPED = (signal.SIGTERM, signal.SIGHUP)
NEEDS_ROOT = "the lab needs root, for network namespaces and traffic shaping"
NEEDS_IPROUTE2 = "the lab needs {} (iproute2), not found on the PATH"
NEEDS_TUN = "the emulated link needs /dev/net/tun, which is not here; the tbf lab works without it"


class Lab(Place):
    """Namespaces joined by links, each shaped as ``shape`` says: a context manager, and a place for ranks.

    label : of the namespaces, "ddl0-rank0"; by default the first ``ddlN`` that is free
    persistent : outlives this process, and is removed by ``attach(label).down()``
    """

    address, port = (
        f"{PREFIX}1",
        29500,
    )  # free in any namespace that runs one job at a time

    def __init__(
        self, shape: LabShape, label: str = "", *, persistent: bool = False
    ) -> None:
        if label and not re.fullmatch(r"[a-z][a-z0-9]{0,15}", label):
            raise UserError(
                f"lab label {label!r} must be a few small letters and digits, as ddl0"
            )
        self.shape, self.label, self.persistent = shape, label, persistent
        self.ranks, self.name = shape.workers, shape.link
        self.link_bits_per_s = shape.rate_bits_per_s  # each way, framing included
        self._holder = 0  # the process whose ``down`` counts, while it is up
        self._trapped = ExitStack()  # signals, which unwind the stack while it is up
        self._link: subprocess.Popen[str] | None = None  # if our child

    @property
    def namespaces(self) -> list[str]:
        """Return the names of the ranks' namespaces, and last of the one that joins them."""
        return [
            *(f"{self.label}-rank{rank}" for rank in range(self.ranks)),
            f"{self.label}-switch",
        ]

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return what a rank of a job of ``ranks`` must find in its environment."""
        link = (
            {LINK: str(STATE / f"{self.label}.link")} if self.shape.conditions else {}
        )
        return {
            **super().environment(rank, ranks),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            **link,
        }

    def namespace(self, rank: int) -> Path:
        """Return the file of the namespace of ``rank``."""
        return NAMESPACES / self.namespaces[rank]

    def lost(self) -> str:
        """Return why ranks no longer reach one another, in one line; empty as long as they can."""
        gone = f"the process of the emulated link of lab {self.label} is gone: take the lab down"
        return "" if all(map(_runs, _states()[self.label]["needs"])) else gone

    def up(self) -> Lab:
        """Build the network; whatever goes wrong, nothing is left. Removes dead labs first."""
        try:
            with _registry():
                _remove_dead()
                self._take_label()
                self._build()
                if (
                    self.persistent
                ):  # only now: while it is built, it dies with who builds it
                    self._save(owned=False)
            if not self.persistent:
                self._trapped.enter_context(jobs.unwinding(*TRAPPED))
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End every process in the lab and remove it, if up. Raises UserError if another process owns it."""
        if self._holder != os.getpid():  # never up, already down, or a forked copy
            return
        with _registry():
            state = _states().get(self.label)
            pid, *_ = owner = (
                state["needs"][0] if state and state["owned"] else (0, None)
            )
            if pid != os.getpid() and _runs(owner):
                raise UserError(
                    f"lab {self.label} belongs to running process {pid}: end it first"
                )
            _remove(self.label)
            if self._link:
                self._link.wait()
                self._link = None
            self._holder = 0
        self._trapped.close()

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *raised: object) -> None:
        self.down()

    def _take_label(self) -> None:
        """Write the state file before anything exists, so that every leftover has an owner."""
        taken = {*_states(), *(name.split("-")[0] for name in _listed())}
        if not self.label:
            self.label = next(name for n in count() if (name := f"ddl{n}") not in taken)
        elif self.label in taken:
            raise UserError(
                f"a lab or namespace named {self.label} exists: choose another label"
            )
        self._save(owned=True)
        self._holder = os.getpid()

    def _save(self, *, owned: bool) -> None:
        """Write the state file."""
        pids = [os.getpid()] * owned + ([self._link.pid] if self._link else [])
        needs = [(pid, _started(pid)) for pid in pids]
        state = {"shape": asdict(self.shape), "owned": owned, "needs": needs}
        atomic_write_text(STATE / f"{self.label}.json", json.dumps(state) + "\n")

    def _build(self) -> None:
        """Make namespaces, the links between them, and addresses."""
        _ip([f"netns add {name}" for name in self.namespaces])
        if self.shape.conditions:
            self._start_link()
            packet, queued = MAX_PACKET_BYTES, 10_000  # as many as the link has to read
        else:
            self._join()
            # A packet larger than a burst is cut up in software, which 16 ranks have no time for.
            burst = round(0.9 * burst_bytes(self.link_bits_per_s))
            packet, queued = min(MAX_PACKET_BYTES, burst), 1000  # Linux's default
        for rank, name in enumerate(self.namespaces[:-1]):
            addressing = [
                "link set lo up",
                f"addr add {PREFIX}{rank + 1}/24 dev {INTERFACE} noprefixroute",
                f"link set {INTERFACE} gso_max_size {packet} txqueuelen {queued} {UP}",
                f"route add {PREFIX}0/24 dev {INTERFACE} {TCP}",
            ]
            _ip(addressing, name)

    def _start_link(self) -> None:
        """Start the process of an emulated link, in the switch's namespace; it makes the ranks' devices."""
        if not Path(tunnel.DEVICE).exists():
            raise UserError(NEEDS_TUN)
        config = {
            "namespaces": [str(NAMESPACES / name) for name in self.namespaces],
            "crossed": str(STATE / f"{self.label}.link"),
            "prefix": PREFIX,
            "rate_bits_per_s": self.link_bits_per_s,
            "conditions": asdict(self.shape)["conditions"],
            "owned": not self.persistent,
        }
        argv = [
            "ip",
            "netns",
            "exec",
            self.namespaces[-1],
            sys.executable,
            "-m",
            tunnel.__name__,
        ]
        self._link = subprocess.Popen(
            [*argv, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=jobs.child_environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal, and its end, reach only us
        )
        assert self._link.stdout
        with self._link.stdout as output:
            speaks = select.select([output], (), (), DEADLINE_S)[0]
            line = output.readline().strip() if speaks else "it said nothing"
            if line != tunnel.READY:
                self._link.kill()
                raise UserError(
                    f"the emulated link did not start: {line}; the tbf lab may work"
                )
        self._save(owned=True)

    def _join(self) -> None:
        """Make a bridge and its links to the ranks, each end of which sends shaped."""
        *ranks, switch = self.namespaces
        links = [
            "link set lo up",
            "link add bridge type bridge",
            f"link set bridge {UP}",
        ]
        for rank, name in enumerate(ranks):
            links += [
                f"link add port{rank} type veth peer name {INTERFACE} netns {name}"
            ]
            links += [f"link set port{rank} master bridge {UP}"]
        _ip(links, switch)
        for rank, name in enumerate(ranks):
            _ip([_shape(f"port{rank}", self.link_bits_per_s)], switch, tool="tc")
            _ip([_shape(INTERFACE, self.link_bits_per_s)], name, tool="tc")


def attach(label: str) -> Lab:
    """Return the lab of that label that is up, to run in or to take down. Raises UserError if none is."""
    states = _states()
    if not (state := states.get(label)):
        raise UserError(
            f"there is no lab {label!r}; labs that are up: {', '.join(states) or 'none'}"
        )
    if not state["shape"]:
        raise UserError(
            f"the state of lab {label} is damaged: remove it by ddlkit lab clean"
        )
    lab = Lab(LabShape.from_dict(state["shape"]), label, persistent=not state["owned"])
    lab._holder = os.getpid()
    return lab


def status() -> list[dict[str, Any]]:
    """List the labs on this machine: label, ranks, link, owner, alive."""
    rows = []
    for label, state in _states().items():
        row = {
            "label": label,
            "ranks": 0,
            "link": "an unknown link",
            "owner": "owner unknown",
        }
        if state["shape"]:
            shape = LabShape.from_dict(state["shape"])
            owner = (
                f"process {state['needs'][0][0]}" if state["owned"] else "persistent"
            )
            row |= {"ranks": shape.workers, "link": shape.link, "owner": owner}
        rows.append({**row, "alive": all(map(_runs, state["needs"]))})
    return rows


def clean() -> list[str]:
    """Remove every lab whose owner has died, with the processes in it; returns their labels."""
    with _registry():
        return _remove_dead()


def lacking() -> str:
    """Return what a lab needs that is not here, in one line; empty if all is. Nothing is tried."""
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return NEEDS_ROOT
    return "" if shutil.which("ip") else NEEDS_IPROUTE2.format("ip")


@functools.lru_cache(maxsize=1)
def available() -> str:
    """Return why no lab is possible here, in one line; empty if one is (a small one is tried)."""
    if reason := lacking():
        return reason
    try:
        with Lab(LabShape(1, 1e9)):
            return ""
    except (UserError, OSError) as error:
        return f"the lab does not work here: {error}"


def _run(argv: list[str], script: str = "") -> str:
    """Return the output of an iproute2 call. In a session of its own, so that Ctrl-C does not reach it."""
    how: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "start_new_session": True,
    }
    try:
        done = subprocess.run(argv, input=script, timeout=DEADLINE_S, **how)
    except FileNotFoundError:
        raise UserError(NEEDS_IPROUTE2.format(argv[0])) from None
    except subprocess.TimeoutExpired:
        late = f"did not end within {DEADLINE_S:g} s and was killed: try again"
        raise UserError(f"lab network: {' '.join(argv)}: {late}") from None
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[0]
        raise UserError(f"lab network: {' '.join(argv)}: {complaint}")
    return done.stdout


def _ip(commands: Sequence[str], namespace: str = "", *, tool: str = "ip") -> None:
    """Run commands of ``tool``, one by one, in that namespace."""
    inside = ["-n", namespace] if namespace else []
    _run(
        [tool, *inside, "-batch", "-"], "".join(f"{command}\n" for command in commands)
    )


def _shape(device: str, rate_bits_per_s: float) -> str:
    """Return what limits what leaves by a device."""
    rate, burst = round(rate_bits_per_s), burst_bytes(rate_bits_per_s)
    return f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} limit {QUEUE_BYTES}"


def _listed() -> list[str]:
    """List the names of all network namespaces of this machine."""
    return [
        line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line
    ]


def _remove(label: str) -> None:
    """Remove whatever there is of a lab, with the processes in it."""
    ours = re.compile(rf"{label}-(rank\d+|switch)")
    present = [name for name in _listed() if ours.fullmatch(name)]
    give_up = time.monotonic() + DEADLINE_S
    while pids := [
        int(p) for ns in present for p in _run(["ip", "netns", "pids", ns]).split()
    ]:
        if time.monotonic() > give_up:
            raise UserError(
                f"lab network: process {pids[0]} in lab {label} does not end"
            )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    _ip([f"netns del {name}" for name in present])  # links and queues go with them
    for ending in ("link", "json"):
        (STATE / f"{label}.{ending}").unlink(missing_ok=True)


# -- who owns what ---------------------------------------------------------------------------


@contextmanager
def _registry() -> Iterator[None]:
    """Make or remove one lab at a time on this machine; Ctrl-C and SIGTERM wait until it is done."""
    if os.geteuid() != 0:
        raise UserError(NEEDS_ROOT)
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with jobs.deferring(signal.SIGINT, *TRAPPED):
            yield


def _states() -> dict[str, dict[str, Any]]:
    """Read the state of each lab, by its label; one that is damaged has no shape, and counts as dead."""
    states: dict[str, dict[str, Any]] = {}
    for path in sorted(STATE.glob("[a-z]*.json")):
        with suppress(FileNotFoundError):  # it came down meanwhile
            try:
                state = json.loads(path.read_text())
                LabShape.from_dict(state["shape"])
                list(map(_runs, state["needs"])), state["owned"]
            except (ValueError, TypeError, KeyError, UserError):
                state = {"shape": None, "owned": False, "needs": [(0, None)]}
            states[path.stem] = state
    return states


def _started(pid: int) -> int | None:
    """Return clock ticks after boot when a process began, as numbers come again; None where it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _runs(process: Sequence[Any]) -> bool:
    """Return whether a process that was there, (pid, start), still is."""
    pid, start = process
    return start is not None and _started(pid) == start


def _remove_dead() -> list[str]:
    """Remove labs whose owner is dead, and persistent ones without their link; returns their labels."""
    dead = [
        label
        for label, row in _states().items()
        if not all(map(_runs, row["needs"][:1]))
    ]
    for label in dead:
        _remove(label)
    return dead
