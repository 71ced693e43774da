"""How much of a machine communication may take: configurations, and groups of ranks that keep to them.

The paper gives NCCL's kernels so many blocks and threads (sharing 3). On a processor the same conflict is
about gloo's threads: how many carry messages, on which cores, and who goes first where a core is wanted
twice. Between GPUs it is the blocks of a communicator. A configuration is one answer to that, and a group
of ranks is made for each, so that one process can change between them from message to message. A policy
says which configuration carries what: one for all, or one for the messages that computation hides and
another for the last, which nothing hides (sharing 5, Future work).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.rank import (
    Rank,
    agree_all,
    everyones_texts,
    hasten,
    register_gloo,
    threads_here,
)

FREE, OWN, ONE = CORES = ("free", "own", "one")
"""Cores of communication's threads: any, that of the rank's own number, or one for all ranks."""
GPU = "gpu"  # in place of cores, where kernels of NCCL communicate
PRIORITIES = ("idle", "nice10", "normal", "raised")
"""Of communication's threads, from those that wait for everybody to those that wait for nobody."""
DEFAULT = "t2-free-normal"
"""What torch gives gloo: two threads, which run where and when the system lets them."""
APPLIED, REFUSED = "applied", "refused"
TWO = "+"  # between the configurations of a policy of two

_ON_CPU = re.compile(r"t([1-9]\d*)-(\w+)-(\w+?)(?:-omp([1-9]\d*))?")
_ON_GPU = re.compile(r"b(\d+)(?:-t([1-9]\d*))?")
NCCL_THREADS = "NCCL_NTHREADS"
# Kernels of two communicators may keep one another from the multiprocessors, each on its own rank, unless
# they start in the order in which the host launched them.
IN_ORDER = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
_NICE = 10
_ORDER = ("SCHED_OTHER", "SCHED_FIFO", "SCHED_RR", "SCHED_BATCH", "", "SCHED_IDLE")


@dataclass(frozen=True)
class Configuration:
    """What communication may take.

    threads : of gloo, that carry messages; of NCCL, in each block, 0 leaves them to it
    cores : of all gloo's threads, one of CORES, or GPU; priority : of these, one of PRIORITIES
    openmp : computing threads of each rank
    blocks : of each kernel of NCCL; 0: of gloo, or left to NCCL

    Raises UserError for what there is not.
    """

    threads: int = 2
    cores: str = FREE
    priority: str = "normal"
    openmp: int = 1
    blocks: int = 0

    def __post_init__(self) -> None:
        wrong = self.cores not in (*CORES, GPU) or self.priority not in PRIORITIES
        if wrong or self.openmp < 1 or not (self.on_gpu or 1 <= self.threads <= 64):
            raise UserError(
                f"configuration {self.name!r}: cores are {', '.join(CORES)}, priorities "
                f"{', '.join(PRIORITIES)}, threads 1 to 64"
            )

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Of its name. Raises UserError for one that is none.

        >>> Configuration.parse("t1-own-nice10").cores
        'own'
        >>> Configuration.parse("b4-t256").blocks
        4
        """
        if on_gpu := _ON_GPU.fullmatch(text):
            return cls(int(on_gpu[2] or 0), GPU, blocks=int(on_gpu[1]))
        if not (on_cpu := _ON_CPU.fullmatch(text)):
            raise UserError(f"configuration {text!r}: write {DEFAULT}, t1-own-nice10-omp2 or b4")
        threads, cores, priority, openmp = on_cpu.groups()
        return cls(int(threads), cores, priority, int(openmp or 1))

    @property
    def on_gpu(self) -> bool:
        """Whether kernels of NCCL communicate."""
        return self.cores == GPU

    @property
    def name(self) -> str:
        """As it is written.

        >>> Configuration(4, "one", "raised", openmp=2).name
        't4-one-raised-omp2'
        """
        if self.on_gpu:
            return f"b{self.blocks}" + (f"-t{self.threads}" if self.threads else "")
        more = f"-omp{self.openmp}" if self.openmp > 1 else ""
        return f"t{self.threads}-{self.cores}-{self.priority}{more}"


@dataclass(frozen=True)
class Policy:
    """Which configuration carries which message: ``last`` the last of an iteration, ``hidden`` all others.

    >>> Policy.parse("t1-free-nice10+t2-free-raised").last.priority
    'raised'
    """

    hidden: Configuration
    last: Configuration

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Of its name. Raises UserError as `Configuration.parse`, and for two that compute differently."""
        first, _, second = text.partition(TWO)
        hidden, last = Configuration.parse(first), Configuration.parse(second or first)
        if hidden.openmp != last.openmp:
            raise UserError(f"policy {text!r}: both its groups need the same number after omp")
        if hidden.on_gpu != last.on_gpu or (hidden.on_gpu and hidden.threads != last.threads):
            raise UserError(f"policy {text!r}: only blocks, or what gloo may take, can differ")
        return cls(hidden, last)

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.hidden.name}{TWO}{self.last.name}" if self.two else self.hidden.name

    @property
    def two(self) -> bool:
        """Whether there are two groups."""
        return self.hidden != self.last

    def columns(self) -> dict[str, Any]:
        """As it appears in tables: its name, then what the hidden messages may take."""
        one = self.hidden
        shares = {name: getattr(one, name) for name in ("threads", "cores", "priority", "openmp")}
        last = self.last.name if self.two else ""
        return {"configuration": self.name, **shares, "blocks": one.blocks, "last": last}


def place_columns(me: Rank) -> dict[str, Any]:
    """Where something was measured, as it appears in tables."""
    place = {"link": me.link, "link_bits_per_s": me.link_bits_per_s}
    return {"device": me.device.type, "ranks": me.world_size, **place}


# -- groups of ranks ---------------------------------------------------------------------------


@dataclass
class Groups:
    """A group of ranks for each configuration, made when it is first asked for, and what became of it.

    Every rank must ask for the same in the same order. ``why`` : by configuration, why it was refused, ""
    where it was not; the same on all ranks.
    """

    me: Rank
    why: dict[Configuration, str] = field(default_factory=dict)
    _groups: dict[Configuration, dist.ProcessGroup] = field(default_factory=dict)
    _rows: list[dict[str, Any]] = field(default_factory=list)

    def made(self, names: Sequence[str]) -> list[Policy]:
        """The policies of these names whose configurations take effect here, on every rank."""
        policies = [Policy.parse(name) for name in names]
        for policy in policies:
            for one in (policy.hidden, policy.last):
                if one not in self.why:
                    self._make(one)
        return [one for one in policies if not self.reason(one)]

    def reason(self, policy: Policy) -> str:
        """Why it was refused; "" if it was not."""
        return self.why[policy.hidden] or self.why[policy.last]

    def of(self, one: Configuration) -> dist.ProcessGroup:
        """The ranks as a group that keeps to that configuration."""
        return self._groups[one]

    def control(self) -> pd.DataFrame:
        """Table ``sharing_control``: what was asked of each rank, and what the system says it has."""
        return pd.DataFrame(self._rows)

    def _make(self, one: Configuration) -> None:
        before = set(threads_here())
        if reason := cannot(one, self.me.backend):
            self._settle(one, reason, [])
            return
        group = nccl_group(one) if one.on_gpu else _gloo_group(self.me, one)
        # Before they are pinned: a new thread starts on the cores of the one that makes it.
        wanted = len(before) + (0 if one.on_gpu else 2 * one.threads)
        threads = [] if one.on_gpu else sorted(set(threads_here(at_least=wanted)) - before)
        dist.barrier(group=group)
        reason = "" if one.on_gpu else apply(one, threads, self.me.local_rank, group)
        self._groups[one] = group
        self._settle(one, reason, threads)

    def _settle(self, one: Configuration, reason: str, threads: Sequence[int]) -> None:
        """Keep whether it took effect everywhere, and what each rank has."""
        everybody = everyones_texts(json.dumps([reason, witness(threads, one)]))
        ranks = [json.loads(text) for text in everybody]
        self.why[one] = next((said for said, _ in ranks if said), "")
        for rank, (said, taken) in enumerate(ranks):
            outcome = {"outcome": REFUSED if said else APPLIED, "reason": said or "none"}
            columns = {**place_columns(self.me), **Policy(one, one).columns(), "rank": rank}
            self._rows.append({**columns, **outcome, **taken})


def cannot(one: Configuration, backend: str) -> str:
    """Why ranks that met by that backend can have no such group, "" if they can."""
    if one.on_gpu != (backend == "nccl"):
        kind = "of NCCL" if one.on_gpu else "of gloo"
        return f"a configuration {kind}, but these ranks met by {backend}"
    there = os.environ.get(NCCL_THREADS, "0")
    if one.on_gpu and one.threads != int(there):
        return f"{NCCL_THREADS} is {there} for this process, and NCCL reads it once"
    return ""


def _gloo_group(me: Rank, one: Configuration) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=register_gloo(one.threads, me.device))
    return group


def nccl_group(one: Configuration) -> dist.ProcessGroup:
    """A communicator whose kernels have that many blocks: NCCL has no other setting for one alone."""
    options: Any = dist.ProcessGroupNCCL.Options()
    if one.blocks:
        options.config.min_ctas = options.config.max_ctas = one.blocks
    group: dist.ProcessGroup = dist.new_group(backend="nccl", pg_options=options)
    return group


def core_of(cores: str, local_rank: int) -> set[int]:
    """The cores that are meant by one of CORES, of those that this process may use."""
    there = sorted(os.sched_getaffinity(0))
    chosen = {FREE: there, OWN: [there[local_rank % len(there)]], ONE: there[:1]}
    return set(chosen[cores])


def apply(
    one: Configuration, threads: Sequence[int], local_rank: int, group: dist.ProcessGroup | None
) -> str:
    """Have threads of this process keep to a configuration; returns why they may not, "" if they do.

    Every rank must call it alike. Of what was refused in the middle nothing needs to be taken back: nobody
    sends over such a group.
    """
    what, reason = "pinning", ""
    try:
        for thread in threads if one.cores != FREE else ():
            os.sched_setaffinity(thread, core_of(one.cores, local_rank))
        what = f"priority {one.priority}"
        for thread in threads:
            if one.priority == "idle":
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            elif one.priority == "nice10":
                os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except AttributeError:
        reason = f"{one.name}: this system cannot give threads cores or priorities of their own"
    except OSError as error:
        reason = f"{what} not permitted: {error.strerror}"
    if one.priority == "raised" and agree_all(not reason):
        hastened = hasten(threads, group)
        reason = "" if hastened else "raising priorities not permitted, or the ranks stood still"
    return reason


def witness(threads: Sequence[int], one: Configuration) -> dict[str, Any]:
    """What the system says that these threads have, as columns; those of a GPU are seen by a profiler."""
    cores, policies, nice = set(), set(), set()
    with contextlib.suppress(AttributeError, OSError):
        for thread in threads:
            cores.add(",".join(map(str, sorted(os.sched_getaffinity(thread)))))
            policies.add(_ORDER[os.sched_getscheduler(thread)])
            nice.add(os.getpriority(os.PRIO_PROCESS, thread))
    return {
        "taken_threads": len(threads),
        "taken_cores": "/".join(sorted(cores)) or "unknown",
        "taken_policy": "/".join(sorted(policies)) or "unknown",
        "taken_nice": max(nice, default=0),
        "taken_openmp": one.openmp,
    }


@contextlib.contextmanager
def computing_with(openmp: int) -> Iterator[None]:
    """Compute with that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(openmp)
    try:
        yield
    finally:
        torch.set_num_threads(before)
