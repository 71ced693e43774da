"""A rate-limited network between ranks on one machine: namespaces, and what joins them.

Each rank has a network namespace of its own, and what joins them has another one. The
network of the host never sees any of it. A lab needs Linux, root and iproute2.

Engine "tbf" joins the ranks by pairs of virtual interfaces (veth) and a bridge. The
kernel's token bucket limits what leaves each end. Engine "emulated" joins them by a
process of this library, through which every packet passes (`ddlkit.lab.tunnel`).
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import IO, Any

from ddlkit import jobs
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import burst_bytes
from ddlkit.jobs.launch import Place
from ddlkit.jobs.vitals import LINK
from ddlkit.lab import LabShape as LabShape  # others know it by this name
from ddlkit.lab import tunnel
from ddlkit.lab.tunnel import INTERFACE
from ddlkit.store.files import atomic_write_text

NAMESPACES = Path("/run/netns")
"""Where iproute2 keeps namespaces."""
STATE = Path("/run/ddlkit/labs")
"""Where each lab has a JSON file: its shape, whether a process owns the lab, and the
processes that the lab needs, which are its owner, if any, and its emulated link."""

MAX_PACKET_BYTES = 65536
"""The packets in which Linux hands TCP data down. They are cut into frames later."""
QUEUE_BYTES = 256 * 1024**2
"""Far more than TCP keeps in flight, so that nothing is dropped."""
UP = "addrgenmode none up"
"""Options of ``ip link set`` that take an interface up without an IPv6 address."""
PREFIX = "10.77.0."
"""The first three numbers of all addresses. The fourth number of rank r is r + 1."""
TCP = "congctl reno initcwnd 1000 initrwnd 1000"
"""Options of a route, by which TCP's window is open from the start and stays open.

Linux's default, cubic, mistakes the queue of the shaper for congestion. One message of
12 MB in fifty then takes up to twice as long as the others."""
DEADLINE_S = 30.0
"""Seconds within which iproute2, a new link and a killed process must answer."""
TRAPPED = (signal.SIGTERM, signal.SIGHUP)
NEEDS_ROOT = "the lab needs root, for network namespaces and traffic shaping"
NEEDS_CAPABILITIES = (
    "the lab needs the capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN, which this root lacks, "
    "as in a container: start the container with them, as docker run --privileged does"
)
# The bits of CAP_NET_ADMIN and CAP_SYS_ADMIN in the sets of the kernel (capabilities(7)).
_CAPABILITIES = 1 << 12 | 1 << 21
NEEDS_IPROUTE2 = "the lab needs {} (iproute2), not found on the PATH"
NEEDS_TUN = (
    "the emulated link needs /dev/net/tun, which is not here; "
    "the tbf lab works without it"
)

Process = Sequence[Any]
"""A process: its id, and when it started, because ids are used again."""


class Lab(Place):
    """Network namespaces in which ranks run, joined by links of a limited rate.

    A lab is a context manager, which builds and removes the namespaces.

    Parameters
    ----------
    shape : LabShape
        The ranks and the links.
    label : str, optional
        The first part of the namespaces' names, such as "ddl0" of "ddl0-rank0". The
        default is the first ``ddlN`` that is free.
    persistent : bool, optional
        Whether the lab outlives this process. ``attach(label).down()`` removes such a
        lab.

    Raises
    ------
    UserError
        If the label is not a small letter, followed by at most 15 small letters and digits.
    """

    address = f"{PREFIX}1"
    # Any port is free in a namespace that runs one job at a time.
    port = 29500

    def __init__(
        self, shape: LabShape, label: str = "", *, persistent: bool = False
    ) -> None:
        if label and not re.fullmatch(r"[a-z][a-z0-9]{0,15}", label):
            raise UserError(
                f"lab label {label!r}: use a small letter, followed by at most 15 small "
                "letters and digits, as in ddl0"
            )
        self.shape = shape
        self.label = label
        self.persistent = persistent
        self.ranks = shape.workers
        # The name of a place is how tables name its link.
        self.name = shape.link
        self.link_bits_per_s = shape.rate_bits_per_s
        # The id of the process that may take the lab down with this object, because it
        # built the lab or attached to it. It is 0 while the lab is not up. In any other
        # process, such as a forked one, `down` does nothing.
        self._holder = 0
        # While the lab is up, this makes signals unwind the stack, so that `down` runs.
        self._trapped = ExitStack()
        # The process of an emulated link, if it is a child of this process.
        self._link_process: subprocess.Popen[str] | None = None

    @property
    def namespaces(self) -> list[str]:
        """Return the namespaces of the ranks, and last the one that joins them."""
        return _namespaces_of(self.label, self.ranks)

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return what a rank must find in its environment.

        Parameters
        ----------
        rank, ranks : int
            The number of the rank, and how many ranks the job has.
        port : int, optional
            Not used: ranks of a lab meet at the lab's own ``port``.

        Returns
        -------
        dict of str to str
        """
        # The variables by which torchrun tells a rank who it is, and where ranks meet: at
        # `address` and `port` of the lab.
        environment = super().environment(rank, ranks)
        # Without this variable, gloo looks for the address of the host's name, which is not
        # one of the addresses in the namespace.
        environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        if self.shape.conditions:
            # Delays and losses need a link that a process emulates. That process counts in
            # a file how many packets were late, and the rank finds the file by this variable.
            environment[LINK] = str(self._link_file)
        return environment

    @property
    def _link_file(self) -> Path:
        """Return the file in which an emulated link counts packets."""
        return STATE / f"{self.label}.link"

    def namespace(self, rank: int) -> Path:
        """Return the file of the namespace of a rank.

        Parameters
        ----------
        rank : int
            The number of the rank.

        Returns
        -------
        Path
        """
        return NAMESPACES / self.namespaces[rank]

    def lost(self) -> str:
        """Return why ranks cannot reach one another any more, or "" while they can."""
        # A lab needs its owner, unless it is persistent, and the process of its link, if
        # the link is emulated. If this process built the lab, it is the owner, and only the
        # process of the link can be gone. The message below is for this case.
        states = _states()
        if self.label not in states:
            return f"lab {self.label} was taken down by another process: make it again"
        needed_processes = states[self.label]["needs"]
        if all(_runs(process) for process in needed_processes):
            return ""
        return (
            f"the process of the emulated link of lab {self.label} is gone: "
            "take the lab down"
        )

    def up(self) -> Lab:
        """Build the network, after removing dead labs.

        Returns
        -------
        Lab
            This lab.

        Raises
        ------
        UserError
            If the lab cannot be built. Nothing of the lab is left then.
        """
        try:
            # No other process makes or removes a lab during this block.
            with _registry():
                _remove_dead()
                self._claim_label()
                self._build()
                if self.persistent:
                    # This process owned the lab while it was being built, so that a lab of
                    # which only a part was built is removed. From now on it has no owner.
                    self._save(owned=False)
            if not self.persistent:
                # From now on, signals that would end this process raise an exception, so
                # that the lab is removed on the way out.
                self._trapped.enter_context(jobs.unwinding(*TRAPPED))
        except BaseException:
            # Not even Ctrl-C may leave a part of a lab.
            self.down()
            raise
        return self

    def down(self) -> None:
        """End every process in the lab, and remove the lab if it is up.

        Nothing happens in a process that neither built the lab nor attached to it.

        Raises
        ------
        UserError
            If another process owns the lab and still runs.
        """
        if self._holder != os.getpid():
            # The lab was never up or is down already, or this is a forked copy of the
            # process that built the lab or attached to it.
            return
        with _registry():
            state = _states().get(self.label)
            # No process owns a persistent lab, so each that attached to it may remove it.
            if state and state["owned"]:
                self._refuse_other_owner_that_runs(state)
            _remove(self.label)
            if self._link_process:
                # `_remove` has killed the process of the emulated link. Waiting for it
                # lets the kernel forget it.
                self._link_process.wait()
                self._link_process = None
            self._holder = 0
        # From here on signals have the handlers that they had before the lab was up.
        self._trapped.close()

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *raised: object) -> None:
        self.down()

    def _claim_label(self) -> None:
        """Choose a free label, or check the given one, and write the lab's state file.

        The file is written before anything else of the lab exists. It names this process
        as the owner, so that what an interrupt leaves can be removed. Once a persistent lab
        is complete, `up` writes the file again without an owner.
        """
        # A label is taken if a lab has it, or if the name of a namespace begins with it, as
        # "ddl0-rank3" with "ddl0". Such a namespace may be left of a lab without a state
        # file.
        labels_of_namespaces = {name.split("-")[0] for name in _listed_namespaces()}
        taken = {*_states(), *labels_of_namespaces}
        if not self.label:
            free_labels = (f"ddl{n}" for n in count() if f"ddl{n}" not in taken)
            self.label = next(free_labels)
        elif self.label in taken:
            raise UserError(
                f"a lab or namespace named {self.label} exists: choose another label"
            )
        self._save(owned=True)
        # `down` works in this process, and not in a forked copy of it.
        self._holder = os.getpid()

    def _save(self, *, owned: bool) -> None:
        """Write the state file, with the processes that the lab needs.

        ``owned`` says whether this process owns the lab. An owned lab needs its owner,
        which comes first. A lab with an emulated link needs the process of the link. Once
        one of them has ended, the lab is dead.
        """
        pids = []
        if owned:
            pids.append(os.getpid())
        if self._link_process:
            pids.append(self._link_process.pid)
        state = {
            "shape": asdict(self.shape),
            "owned": owned,
            # The start tells a process from a later one with the same id.
            "needs": [(pid, _started(pid)) for pid in pids],
        }
        atomic_write_text(STATE / f"{self.label}.json", json.dumps(state) + "\n")

    def _refuse_other_owner_that_runs(self, state: Mapping[str, Any]) -> None:
        """Raise UserError if another process owns the lab and still runs.

        ``state`` is what `_save` wrote of a lab that a process owns. A process that only
        attached to the lab is not its owner.
        """
        # Under "needs" are the processes without which the lab is dead, its owner first.
        # Each has its id and its start, by which `_runs` tells it from a later process with
        # the same id.
        owner = state["needs"][0]
        pid, _start = owner
        if pid != os.getpid() and _runs(owner):
            raise UserError(
                f"lab {self.label} belongs to running process {pid}: end it first"
            )

    def _build(self) -> None:
        """Make the namespaces, the links between them, and addresses."""
        _ip([f"netns add {name}" for name in self.namespaces])
        # Conditions, such as losses, need a link that a process emulates.
        if self.shape.conditions:
            self._start_link()
        else:
            self._join()
        limits = self._limits_of_interface()
        # The last namespace is the switch, whose interfaces have no addresses.
        *rank_namespaces, _ = self.namespaces
        for rank, name in enumerate(rank_namespaces):
            # The kernel's own route ("prefix route") would lack the options of TCP, so the
            # route is added by itself.
            addressing = [
                "link set lo up",
                f"addr add {PREFIX}{rank + 1}/24 dev {INTERFACE} noprefixroute",
                f"link set {INTERFACE} {limits} {UP}",
                f"route add {PREFIX}0/24 dev {INTERFACE} {TCP}",
            ]
            _ip(addressing, name)

    def _limits_of_interface(self) -> str:
        """Return the limits of a rank's interface, as words for "ip link set".

        They are the largest packet in bytes that the kernel hands to the interface, and how
        many packets the queue in front of the interface holds.
        """
        if self.shape.conditions:
            packet_bytes = MAX_PACKET_BYTES
            # A process emulates the link, and packets wait in this queue until it has read
            # them. A full queue would drop some, but packets are to be lost only as the
            # conditions of the lab say.
            queue_packets = 10_000
        else:
            # The burst is how many bytes the kernel's token bucket lets leave at once. Larger
            # packets would be cut in front of the bucket, for which a lab of 16 ranks lacks the
            # processor time. No measurement of this is kept. A tenth of the burst is left for
            # the headers of the frames, which count, too.
            largest_in_burst_bytes = round(0.9 * burst_bytes(self.link_bits_per_s))
            packet_bytes = min(MAX_PACKET_BYTES, largest_in_burst_bytes)
            queue_packets = 1000  # Linux's default
        return f"gso_max_size {packet_bytes} txqueuelen {queue_packets}"

    def _start_link(self) -> None:
        """Start the process of an emulated link, which makes the ranks' devices.

        Raises UserError if it does not start. A lab of the other engine, tbf, may work then,
        because the kernel limits its links.
        """
        if not Path(tunnel.DEVICE).exists():
            raise UserError(NEEDS_TUN)
        self._link_process = subprocess.Popen(
            self._link_command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The working directory is "/", so the process must find this package by its
            # environment.
            env=jobs.child_environment(),
            cwd="/",
            # Neither Ctrl-C in the terminal nor the terminal's end reaches the link.
            start_new_session=True,
        )
        assert self._link_process.stdout  # for the type checker: it is a pipe
        # The pipe is closed after the first line. A link that is ready prints no other line.
        with self._link_process.stdout as output:
            line = _first_line(output)
            if line != tunnel.READY:
                self._link_process.kill()
                raise UserError(
                    f"the emulated link did not start: {line}; the tbf lab may work"
                )
        # The state file must name all processes that the lab needs. It was first written before
        # the process of the link existed, so it is written again. Even a persistent lab is owned
        # by this process until the lab is complete. `up` then saves it without an owner.
        self._save(owned=True)

    def _link_command(self) -> list[str]:
        """Return the command that runs the process of an emulated link."""
        config = {
            "namespaces": [str(NAMESPACES / name) for name in self.namespaces],
            # The process of the link counts in this file what has crossed the link.
            "crossed": str(self._link_file),
            # What the addresses of all ranks begin with.
            "prefix": PREFIX,
            "rate_bits_per_s": self.link_bits_per_s,
            "conditions": asdict(self.shape)["conditions"],
            "dies_with_parent": not self.persistent,
        }
        # The process runs in the last namespace, the switch.
        in_switch = ["ip", "netns", "exec", self.namespaces[-1]]
        program = [sys.executable, "-m", tunnel.__name__, json.dumps(config)]
        return [*in_switch, *program]

    def _join(self) -> None:
        """Join the ranks by a bridge, and limit the rate at both ends of each link."""
        *rank_namespaces, switch = self.namespaces
        commands = [
            "link set lo up",
            "link add bridge type bridge",
            f"link set bridge {UP}",
        ]
        for rank, name in enumerate(rank_namespaces):
            # One end of a pair of virtual interfaces (veth) is a port of the bridge, and the
            # other end is the interface in the namespace of the rank.
            port = f"port{rank}"
            commands.append(
                f"link add {port} type veth peer name {INTERFACE} netns {name}"
            )
            commands.append(f"link set {port} master bridge {UP}")
        _ip(commands, switch)
        for rank, name in enumerate(rank_namespaces):
            # A token bucket limits what leaves: the port limits what its rank receives,
            # and the interface of the rank limits what the rank sends.
            limit_port = _rate_limit(f"port{rank}", self.link_bits_per_s)
            limit_rank = _rate_limit(INTERFACE, self.link_bits_per_s)
            _ip([limit_port], switch, tool="tc")
            _ip([limit_rank], name, tool="tc")


def _namespaces_of(label: str, ranks: int) -> list[str]:
    """Return the names of the namespaces of a lab: of the ranks, and last of the switch."""
    of_ranks = [f"{label}-rank{rank}" for rank in range(ranks)]
    return [*of_ranks, f"{label}-switch"]


def _first_line(output: IO[str]) -> str:
    """Return the first line that a process prints, within DEADLINE_S.

    A process that prints nothing within this time is described in words instead. The
    result is "" if the process ends without a line.
    """
    # A process that hangs before its first line would block `readline` for ever.
    readable, _, _ = select.select([output], (), (), DEADLINE_S)
    if not readable:
        return "it printed nothing"
    return output.readline().strip()


# -- labs on this machine --------------------------------------------------------------


def attach(label: str) -> Lab:
    """Return a lab that is up, to run in or to take down.

    Parameters
    ----------
    label : str
        The label of the lab.

    Returns
    -------
    Lab

    Raises
    ------
    UserError
        If no lab of that label is up, or if its state is damaged.
    """
    # The states of all labs that are up, by label.
    states = _states()
    if label not in states:
        if not states:
            raise UserError(f"there is no lab {label!r}, and no other on this machine")
        labels = ", ".join(states)
        raise UserError(
            f"there is no lab {label!r}: the labs of this machine are {labels}"
        )
    state = states[label]
    # `_checked_state` returns no shape for a state file that cannot be read.
    if not state["shape"]:
        raise UserError(
            f"the state of lab {label} is damaged: remove it by ddlkit lab clean"
        )
    shape = LabShape.from_dict(state["shape"])
    # A lab is persistent if it outlives every process, and so no process owns it.
    lab = Lab(shape, label, persistent=not state["owned"])
    # `down` removes a lab only for the process that holds it, which is now this one.
    lab._holder = os.getpid()
    return lab


def status() -> list[dict[str, Any]]:
    """List the labs on this machine.

    Returns
    -------
    list of dict
        "label", "ranks", "link" and "owner" of each lab, and whether it is "alive". A
        lab is dead if a process that it needs has ended, and a lab without an owner also
        if one of its namespaces is gone. A lab whose state file is damaged has 0 ranks.
    """
    rows = []
    for label, state in _states().items():
        # These values are shown for a lab without a shape, whose state file is damaged.
        row: dict[str, Any] = {
            "label": label,
            "ranks": 0,
            "link": "an unknown link",
            "owner": "owner unknown",
        }
        if state["shape"]:
            shape = LabShape.from_dict(state["shape"])
            row["ranks"] = shape.workers
            row["link"] = shape.link
            row["owner"] = "persistent"
            if state["owned"]:
                # The owner is the first process that a lab needs. Its id and its start tell
                # it from a later process with the same id.
                pid, _start = state["needs"][0]
                row["owner"] = f"process {pid}"
        row["alive"] = _is_alive(label, state)
        rows.append(row)
    return rows


def clean() -> list[str]:
    """Remove every dead lab, and end the processes that still run in it.

    A lab is dead if the process that owns it has ended. A persistent lab has no owner, and
    is dead if the process of its emulated link has ended, or if one of its namespaces is
    gone. Ranks and other processes in a dead lab may still run.

    Returns
    -------
    list of str
        The labels of the removed labs.

    Raises
    ------
    UserError
        Without root, and if a lab cannot be removed.
    """
    # `_registry` holds the lock under which this machine's labs are made and removed.
    with _registry():
        return _remove_dead()


def lacking() -> str:
    """Return what this machine lacks for a lab, or "" if nothing is known to be lacking.

    No lab is built to find out.
    """
    if sys.platform != "linux":
        return "the lab needs Linux network namespaces"
    if os.geteuid() != 0:
        return NEEDS_ROOT
    if not shutil.which("ip"):
        return NEEDS_IPROUTE2.format("ip")
    return ""


@functools.lru_cache(maxsize=1)
def why_unavailable() -> str:
    """Return why no lab is possible here, "" if one is.

    A small lab is built and removed to see whether that works. This is done only once.
    """
    reason = lacking()
    if reason:
        return reason
    try:
        # A lab of one rank on a link of 1 Gbit/s.
        with Lab(LabShape(1, 1e9)):
            return ""
    except (UserError, OSError) as error:
        return f"the lab does not work here: {error}"


# -- iproute2 --------------------------------------------------------------------------


def _run(argv: list[str], script: str = "") -> str:
    """Run a command of iproute2, and return its output.

    ``script`` is the standard input of the command. Raises UserError with the first line
    of the command's error output if the command fails.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(
            argv,
            input=script,
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
    except FileNotFoundError:
        raise UserError(NEEDS_IPROUTE2.format(argv[0])) from None
    except subprocess.TimeoutExpired:
        late = f"did not end within {DEADLINE_S:g} s and was killed: try again"
        raise UserError(f"lab network: {command}: {late}") from None
    if done.returncode:
        # A command that fails without a word is described by its exit status.
        complaint = done.stderr.strip() or f"exit {done.returncode}"
        if "Operation not permitted" in complaint and _lacks_capabilities():
            raise UserError(NEEDS_CAPABILITIES)
        raise UserError(f"lab network: {command}: {complaint.splitlines()[0]}")
    return done.stdout


def _lacks_capabilities() -> bool:
    """Return whether this process lacks a capability that network namespaces need.

    Root has all of them, except in most containers. The result is False if the
    capabilities cannot be read.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                # The set of effective capabilities, as a hexadecimal number.
                effective = int(line.split()[1], base=16)
                return (effective & _CAPABILITIES) != _CAPABILITIES
    return False


def _ip(commands: Sequence[str], namespace: str = "", *, tool: str = "ip") -> None:
    """Run commands of ``ip`` or ``tc``, one by one, in a namespace.

    An empty ``namespace`` stands for the one of this process.
    """
    inside = ["-n", namespace] if namespace else []
    # A single process reads all commands, a line each, by "-batch -".
    script = "".join(f"{command}\n" for command in commands)
    _run([tool, *inside, "-batch", "-"], script)


def _rate_limit(device: str, rate_bits_per_s: float) -> str:
    """Return the command of ``tc`` that limits what leaves by a device."""
    rate = round(rate_bits_per_s)
    burst = burst_bytes(rate_bits_per_s)
    # "burst" is how many bytes may leave at once, and "limit" how many may wait.
    limits = f"rate {rate}bit burst {burst} limit {QUEUE_BYTES}"
    return f"qdisc add dev {device} root tbf {limits}"


def _listed_namespaces() -> list[str]:
    """Return the names of all network namespaces of this machine."""
    lines = _run(["ip", "netns", "list"]).splitlines()
    return [line.split()[0] for line in lines if line]


def _remove(label: str) -> None:
    """End all processes in a lab, and remove whatever exists of it.

    Raises UserError if a process does not end within DEADLINE_S.
    """
    name_in_lab = re.compile(rf"{label}-(rank\d+|switch)")
    namespaces = [name for name in _listed_namespaces() if name_in_lab.fullmatch(name)]
    give_up_s = time.monotonic() + DEADLINE_S
    # A process may start others before it is killed, so look again until none is left.
    while True:
        pids = _pids_in(namespaces)
        if not pids:
            break
        if time.monotonic() > give_up_s:
            raise UserError(
                f"lab network: process {pids[0]} in lab {label} does not end"
            )
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    # Deleting a namespace also deletes its links and queues.
    _ip([f"netns del {name}" for name in namespaces])
    # The file in which an emulated link counts packets, and the state file of the lab.
    for suffix in ("link", "json"):
        (STATE / f"{label}.{suffix}").unlink(missing_ok=True)


def _pids_in(namespaces: Sequence[str]) -> list[int]:
    """Return the ids of all processes in namespaces."""
    pids: list[int] = []
    for name in namespaces:
        output = _run(["ip", "netns", "pids", name])
        pids += [int(pid) for pid in output.split()]
    return pids


# -- who owns what ---------------------------------------------------------------------


@contextmanager
def _registry() -> Iterator[None]:
    """Hold the lock under which labs are made and removed, one at a time.

    Ctrl-C and the signals that end a process wait until the block is over. Raises UserError
    without root.
    """
    if os.geteuid() != 0:
        raise UserError(NEEDS_ROOT)
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "lock", "w") as lock:
        # Closing the file at the end of the block releases the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with jobs.deferring(signal.SIGINT, *TRAPPED):
            yield


def _states() -> dict[str, dict[str, Any]]:
    """Return the state of each lab by its label, as `_checked_state` returns it."""
    states = {}
    for path in sorted(STATE.glob("[a-z]*.json")):
        # A lab may come down between the listing and the reading.
        with suppress(FileNotFoundError):
            states[path.stem] = _checked_state(path.read_text())
    return states


def _checked_state(text: str) -> dict[str, Any]:
    """Return the state of a lab in the text of its state file.

    Returns
    -------
    dict
        "shape" (the `LabShape` as a dictionary), "owned" (whether a process owns the
        lab), and "needs" (the processes that the lab needs, its owner first). If the
        text is damaged, the shape is None, and the lab needs a process that never ran.
        The lab then counts as dead.
    """
    try:
        state = json.loads(text)
        _refuse_damaged_state(state)
        return {name: state[name] for name in ("shape", "owned", "needs")}
    except (ValueError, TypeError, KeyError, UserError):
        # A process without a start time, which `_runs` takes for dead.
        never_ran = (0, None)
        return {"shape": None, "owned": False, "needs": [never_ran]}


def _refuse_damaged_state(state: Any) -> None:
    """Raise an exception if the shape or the processes in a state cannot be read.

    They are read only to see whether that works, so the results are not needed.
    """
    LabShape.from_dict(state["shape"])
    for process in state["needs"]:
        _runs(process)


def _started(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot, or None if it is dead.

    The time tells the process from a later one with the same id. A zombie, which has
    ended but was not waited for, counts as dead.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program, in parentheses, may hold blanks and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    if state in "ZX":  # a zombie, or dead
        return None
    # Field 22 of the file, as proc(5) counts from 1. The first of `fields` is field 4.
    return int(fields[18])


def _runs(process: Process) -> bool:
    """Return whether a process still runs, and not a later one with the same id."""
    pid, start = process
    return start is not None and _started(pid) == start


def _is_alive(label: str, state: Mapping[str, Any]) -> bool:
    """Return whether a lab is whole, as far as its state and its namespaces tell.

    ``state`` is what `_checked_state` returns.
    """
    # If the state was damaged, `_checked_state` has put a process that never ran in place of
    # those that the lab needs. So the lab counts as dead.
    if not all(_runs(process) for process in state["needs"]):
        return False
    # A lab that has an owner is alive while its owner runs. Its namespaces are not looked at,
    # because the owner may just be making or removing them.
    if state["owned"]:
        return True
    shape = LabShape.from_dict(state["shape"])
    names = _namespaces_of(label, shape.workers)
    return all((NAMESPACES / name).exists() for name in names)


def _remove_dead() -> list[str]:
    """Remove dead labs, with the processes in them, and return the labels of these labs.

    A lab is removed if its owner has ended. A persistent lab has no owner, and is removed
    if the process of its emulated link has ended, or if one of its namespaces is gone. A lab
    whose owner still runs is left to the owner, even if the process of its link has ended.
    """
    dead = []
    for label, state in _states().items():
        if state["owned"]:
            # The owner comes first among the processes that a lab needs.
            is_dead = not _runs(state["needs"][0])
        else:
            is_dead = not _is_alive(label, state)
        if is_dead:
            dead.append(label)
    for label in dead:
        _remove(label)
    return dead
