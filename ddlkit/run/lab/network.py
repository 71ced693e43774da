"""A rate-limited network between ranks on one machine: namespaces, veth pairs, one bridge, tbf.

Each rank lives in a network namespace of its own and the bridges in another. Every veth pair is
made inside them, so the host's network never sees a link, an address or a packet of a lab, and
labs of different labels never meet. Ranks may share nodes: a node is a bridge of its own, joined to
the main one by the link that its ranks share. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.link import burst_bytes
from ddlkit.run.jobs import protocol

NAMESPACES = Path("/run/netns")  # of iproute2
STATE = Path("/run/ddlkit")
"""One JSON file per lab: its shape and which process owns it."""

MAX_RANKS = 64
MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S = 1e6, 1e11
MAX_PACKET_BYTES = 65536  # Linux hands TCP data down in packets of this size, to be cut on the wire
QUEUE_BYTES = 256 * 1024**2  # far above what TCP keeps in flight, so that nothing is dropped
INTERFACE = "eth0"
UP = "addrgenmode none up"
SUBNET = "10.77.0.0/24"
# A window that is open from the start and stays so: Linux's default, cubic, mistakes the shaper's
# queue for congestion, and one 12 MB message in fifty then takes up to twice as long as the others.
TCP = "congctl reno initcwnd 1000 initrwnd 1000"
PORT = 29500  # free in any namespace that runs one job at a time
DEADLINE_S = 30.0
NEEDS_ROOT = "the lab needs root, for network namespaces and traffic shaping"


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet: ``workers`` links of ``rate_bits_per_s`` both ways.

    ranks_per_node : with more than one, that many ranks in a row form a node and share one link of
        that rate; inside the node each rank's own is shaped to ``intra_rate_bits_per_s``

    Raises UserError for a rate or a number of ranks out of range.
    """

    workers: int
    rate_bits_per_s: float
    ranks_per_node: int = 1
    intra_rate_bits_per_s: float = 0.0

    def __post_init__(self) -> None:
        per_node, intra = self.ranks_per_node, self.intra_rate_bits_per_s
        if not 1 <= self.workers <= MAX_RANKS:
            raise UserError(f"a lab of {self.workers} ranks is not possible: 1 to {MAX_RANKS} are")
        if per_node < 1 or self.workers % per_node:
            complaint = f"nodes of {per_node} ranks cannot hold {self.workers}"
            raise UserError(f"{complaint}: choose a number that divides it")
        if (per_node > 1) != bool(intra):
            complaint = f"nodes of {per_node} ranks with an intra rate of {intra:g} bit/s"
            raise UserError(f"{complaint}: several need one, for example 10gbit, one has none")
        for rate in (self.rate_bits_per_s, self.own_rate_bits_per_s):
            if not MIN_RATE_BITS_PER_S <= rate <= MAX_RATE_BITS_PER_S:
                complaint = f"lab rate {rate:g} bit/s is not between 1mbit and 100gbit"
                raise UserError(f"{complaint}: write it with its unit, for example 1gbit")

    @property
    def own_rate_bits_per_s(self) -> float:
        """Rate of each rank's own link."""
        return self.intra_rate_bits_per_s or self.rate_bits_per_s

    @property
    def link(self) -> str:
        """The link as it appears in tables: "lab:1gbit"."""
        return f"lab:{self.name.partition('-')[2]}"

    @property
    def name(self) -> str:
        """As it appears in file names.

        >>> LabShape(16, 1e9, ranks_per_node=4, intra_rate_bits_per_s=1e10).name
        'p16-1gbit-g4-10gbit'
        """
        names = [f"p{self.workers}", _rate_text(self.rate_bits_per_s)]
        if self.nodes:
            names += [f"g{self.ranks_per_node}", _rate_text(self.intra_rate_bits_per_s)]
        return "-".join(names)

    @property
    def nodes(self) -> range:
        """Numbers of the nodes that ranks share; none where each rank has a link of its own."""
        return range(self.workers // self.ranks_per_node if self.ranks_per_node > 1 else 0)


class Lab:
    """Namespaces joined by a bridge, each link shaped as ``shape`` says.

    A context manager, and a place that ``ddlkit.run.jobs.launch`` can start ranks in. ``label`` names
    the namespaces (``ddl0-rank0``, ``ddl0-switch``); left out, the first free ``ddlN`` is taken.
    A persistent lab outlives this process and is removed by ``attach(label).down()``.

    Raises UserError for a label that cannot name a namespace or is in use.
    """

    def __init__(self, shape: LabShape, label: str = "", *, persistent: bool = False) -> None:
        if label and not re.fullmatch(r"[a-z][a-z0-9]{0,15}", label):
            raise UserError(f"lab label {label!r} must be a few small letters and digits, as ddl0")
        self.shape, self.label, self.persistent = shape, label, persistent
        self.ranks, self.name = shape.workers, shape.link
        # Of each link in each direction, framing included; with nodes that of a node's.
        self.link_bits_per_s = shape.rate_bits_per_s
        self._holder = 0  # the process whose ``down`` counts; 0 while the lab is not up

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What a rank of a job of ``ranks`` must find in its environment."""
        if ranks > self.ranks:
            raise UserError(f"{ranks} ranks do not fit into lab {self.label} of {self.ranks}")
        numbers = protocol.rank_environment(rank, ranks, _address(0), PORT)
        return {**numbers, "GLOO_SOCKET_IFNAME": INTERFACE}

    def namespace(self, rank: int) -> Path:
        """File of the namespace of ``rank``. Raises UserError for a rank that the lab does not have."""
        if not 0 <= rank < self.ranks:
            raise UserError(f"lab {self.label} has ranks 0 to {self.ranks - 1}, but no rank {rank}")
        return NAMESPACES / self.namespaces[rank]

    def up(self) -> Lab:
        """Build the network; whatever goes wrong, nothing is left. Removes dead labs first."""
        try:
            with _registry():
                _remove_dead()
                self._take_label()
                self._build()
            if not self.persistent:
                _ours[self.label] = self
                _trapped.enter_context(protocol.unwinding(*_TRAPPED))
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End every process in the lab and remove it. Does nothing if this lab is not up.

        Raises UserError for an attached lab that belongs to another, running process.
        """
        if self._holder != os.getpid():  # never up, already down, or a forked copy
            return
        with _registry():
            owner = _states().get(self.label, {}).get("owner")
            if owner and owner["pid"] != os.getpid() and _alive(owner):
                whose = f"belongs to running process {owner['pid']}"
                raise UserError(f"lab {self.label} {whose}: end that first")
            self._remove()
            self._holder = 0
            _ours.pop(self.label, None)
        if not _ours:
            _trapped.close()

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *raised: object) -> None:
        self.down()

    @property
    def namespaces(self) -> list[str]:
        """Names of all namespaces of this lab, the bridge's last."""
        return [*(f"{self.label}-rank{rank}" for rank in range(self.ranks)), f"{self.label}-switch"]

    def _take_label(self) -> None:
        """Write the state file before anything exists, so that every leftover has an owner."""
        taken = {*_states(), *(name.split("-")[0] for name in _listed())}
        if not self.label:
            self.label = next(name for n in count() if (name := f"ddl{n}") not in taken)
        elif self.label in taken:
            raise UserError(f"a lab or namespace named {self.label} exists: choose another label")
        owner = {} if self.persistent else {"pid": os.getpid(), "start": _start_ticks(os.getpid())}
        draft = STATE / f".{self.label}"
        draft.write_text(json.dumps({"shape": asdict(self.shape), "owner": owner}) + "\n")
        draft.rename(STATE / f"{self.label}.json")
        self._holder = os.getpid()

    def _build(self) -> None:
        """Bridges, the links between them and to the ranks, and their rates; each end sends shaped."""
        *ranks, switch = self.namespaces
        own = self.shape.own_rate_bits_per_s
        _ip([f"netns add {name}" for name in self.namespaces])
        links, rates = ["link set lo up"], []
        for bridge in ("bridge", *(f"node{node}" for node in self.shape.nodes)):
            links += [f"link add {bridge} type bridge", f"link set {bridge} {UP}"]
        for node in self.shape.nodes:
            ends = {f"up{node}": f"node{node}", f"down{node}": "bridge"}
            links += ["link add {} type veth peer name {}".format(*ends)]
            links += [f"link set {end} master {home} {UP}" for end, home in ends.items()]
            rates += [_shape(end, self.shape.rate_bits_per_s) for end in ends]
        for rank, name in enumerate(ranks):
            home = f"node{rank // self.shape.ranks_per_node}" if self.shape.nodes else "bridge"
            links += [f"link add port{rank} type veth peer name {INTERFACE} netns {name}"]
            links += [f"link set port{rank} master {home} {UP}"]
            rates += [_shape(f"port{rank}", own)]
        _ip(links, switch)
        _ip(rates, switch, tool="tc")
        # A packet larger than a burst is cut up in software, which 16 ranks have no time for.
        smallest = burst_bytes(min(own, self.shape.rate_bits_per_s))
        packet = min(MAX_PACKET_BYTES, round(0.9 * smallest))
        for rank, name in enumerate(ranks):
            _ip([_shape(INTERFACE, own)], name, tool="tc")
            addressing = [
                "link set lo up",
                f"addr add {_address(rank)}/24 dev {INTERFACE} noprefixroute",
                f"link set {INTERFACE} gso_max_size {packet} {UP}",
                f"route add {SUBNET} dev {INTERFACE} {TCP}",
            ]
            _ip(addressing, name)

    def _remove(self) -> None:
        present = [name for name in self.namespaces if name in _listed()]
        _end_processes(present)
        _ip([f"netns del {name}" for name in present])  # links and queues go with them
        (STATE / f"{self.label}.json").unlink(missing_ok=True)


def attach(label: str) -> Lab:
    """The lab of that label that is up, to run in or to take down. Raises UserError if none is."""
    states = _states()
    if label not in states:
        names = ", ".join(states) or "none"
        raise UserError(f"there is no lab {label!r}; labs that are up: {names}")
    state = states[label]
    lab = Lab(LabShape(**state["shape"]), label, persistent=not state["owner"])
    lab._holder = os.getpid()
    return lab


def status() -> list[dict[str, Any]]:
    """One row per lab on this machine: label, ranks, link, owner, alive."""
    rows = []
    for label, state in _states().items():
        shape, owner = LabShape(**state["shape"]), state["owner"]
        named = f"process {owner['pid']}" if owner else "persistent"
        row = {"label": label, "ranks": shape.workers, "link": shape.link}
        rows.append({**row, "owner": named, "alive": _alive(owner)})
    return rows


def clean() -> list[str]:
    """Remove every lab whose owner has died, with the processes in it; returns their labels."""
    with _registry():
        return _remove_dead()


@functools.lru_cache(maxsize=1)
def available() -> str:
    """Why no lab is possible here, in one line; empty if one is (a small one is tried)."""
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return NEEDS_ROOT
    missing = " and ".join(tool for tool in ("ip", "tc") if shutil.which(tool) is None)
    if missing:
        return f"the lab needs {missing} (iproute2), not found on the PATH"
    try:
        with Lab(LabShape(1, 1e9)):
            return ""
    except (UserError, OSError) as error:
        return f"the lab does not work here: {error}"


def _rate_text(bits_per_s: float) -> str:
    """``"1gbit"``, ``"200mbit"``: as ``core.units.parse_bits_per_s`` reads it."""
    unit, size = next((u, s) for u, s in (("gbit", 1e9), ("mbit", 1e6)) if bits_per_s >= s)
    return f"{bits_per_s / size:.6g}{unit}"


def _address(rank: int) -> str:
    return f"{SUBNET.removesuffix('0/24')}{rank + 1}"


def _run(argv: list[str], script: str = "") -> str:
    """Output of an iproute2 call. In a session of its own, so that Ctrl-C does not reach it."""
    how: dict[str, Any] = {"start_new_session": True, "timeout": DEADLINE_S}
    done = subprocess.run(argv, input=script, capture_output=True, text=True, **how)
    if done.returncode:
        complaint = (done.stderr.strip() or f"exit {done.returncode}").splitlines()[0]
        raise UserError(f"lab network: {' '.join(argv)}: {complaint}")
    return done.stdout


def _ip(commands: Sequence[str], namespace: str = "", *, tool: str = "ip") -> None:
    """Commands of ``tool``, one by one, in that namespace."""
    if commands:
        inside = ["-n", namespace] if namespace else []
        _run([tool, *inside, "-batch", "-"], "".join(f"{command}\n" for command in commands))


def _shape(device: str, rate_bits_per_s: float) -> str:
    """What limits what leaves by a device."""
    rate, burst = round(rate_bits_per_s), burst_bytes(rate_bits_per_s)
    return f"qdisc add dev {device} root tbf rate {rate}bit burst {burst} limit {QUEUE_BYTES}"


def _listed() -> list[str]:
    """Names of all network namespaces of this machine."""
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line]


def _end_processes(namespaces: list[str]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while pids := [int(p) for ns in namespaces for p in _run(["ip", "netns", "pids", ns]).split()]:
        if time.monotonic() > give_up:
            raise UserError(f"lab network: process {pids[0]} in {namespaces[0]} does not end")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# -- who owns what ---------------------------------------------------------------------------


@contextmanager
def _registry() -> Iterator[None]:
    """One lab at a time is made or removed on this machine; Ctrl-C and SIGTERM wait until it is.

    Python runs handlers in the main thread only: a block in another thread is never cut short.
    """
    if os.geteuid() != 0:
        raise UserError(NEEDS_ROOT)
    STATE.mkdir(parents=True, exist_ok=True)
    main = threading.current_thread() is threading.main_thread()
    held: list[int] = []
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {
            number: signal.signal(number, lambda which, frame: held.append(which))
            for number in (signal.SIGINT, *_TRAPPED)
            if main and signal.getsignal(number) not in (None, signal.SIG_IGN)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for arrived in dict.fromkeys(held):
                signal.raise_signal(arrived)


def _states() -> dict[str, dict[str, Any]]:
    """State of each lab by its label."""
    found = {}
    for path in sorted(STATE.glob("[a-z]*.json")):
        with suppress(FileNotFoundError):  # it came down meanwhile
            found[path.stem] = json.loads(path.read_text())
    return found


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks after boot; None where it is dead or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _alive(owner: dict[str, int]) -> bool:
    """Whether the owner lives; a persistent lab has none and counts as alive.

    The start time tells the owner from a later process that was given the same number.
    """
    return not owner or _start_ticks(owner["pid"]) == owner["start"]


def _remove_dead() -> list[str]:
    dead = [label for label, row in _states().items() if not _alive(row["owner"])]
    for label in dead:
        attach(label)._remove()
    return dead


_ours: dict[str, Lab] = {}
"""Labs that this process has up and must take down."""

_TRAPPED = (signal.SIGTERM, signal.SIGHUP)
_trapped = ExitStack()
"""What has them unwind the stack while a lab is up, as Ctrl-C does."""


@atexit.register
def _down_ours() -> None:
    """The last safety net, for a lab that was brought up without ``with``."""
    for lab in list(_ours.values()):
        lab.down()
