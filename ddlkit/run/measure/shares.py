"""How much of a machine communication may take: configurations, and groups of ranks that keep to them.

The paper gives NCCL's kernels so many blocks and threads (sharing 3). On a processor the same conflict is
about gloo's threads: how many carry messages, and who goes first where a core is wanted twice. A
configuration is one answer to that, and a group of ranks is made for each, so that one process can change
between them from message to message. A policy says which configuration carries what: one for all, or one for
the messages that computation hides and another for the last, which nothing hides (sharing 5).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
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

PRIORITIES = ("idle", "nice10", "normal", "raised")
"""Of communication's threads, from those that wait for everybody to those that wait for nobody."""
APPLIED, REFUSED = "applied", "refused"
_NAME = re.compile(rf"t([1-9]|[1-5]\d|6[0-4])-free-({'|'.join(PRIORITIES)})")
_NICE = 10
_ORDER = ("SCHED_OTHER", "SCHED_FIFO", "SCHED_RR", "SCHED_BATCH", "", "SCHED_IDLE")


@dataclass(frozen=True)
class Configuration:
    """What communication may take: threads of gloo that carry messages on any core, one of PRIORITIES."""

    threads: int = 2
    priority: str = "normal"

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Return that of a name. Raises UserError for one that is none.

        >>> Configuration.parse("t1-free-nice10").priority
        'nice10'
        """
        if not (words := _NAME.fullmatch(text)):
            raise UserError(
                f"configuration {text!r}: write t2-free-normal: 1 to 64 threads on any core, and a "
                f"priority, {', '.join(PRIORITIES)}"
            )
        return cls(int(words[1]), words[2])

    @property
    def name(self) -> str:
        """Return it as it is written."""
        return f"t{self.threads}-free-{self.priority}"


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
        """Return that of a name. Raises UserError for one that is none."""
        first, _, second = text.partition("+")
        return cls(Configuration.parse(first), Configuration.parse(second or first))

    @property
    def name(self) -> str:
        """Return it as it is written."""
        return f"{self.hidden.name}+{self.last.name}" if self.two else self.hidden.name

    @property
    def two(self) -> bool:
        """Return whether there are two groups."""
        return self.hidden != self.last

    def columns(self) -> dict[str, Any]:
        """Return its name, then what the hidden messages may take, as columns of tables."""
        same = {"cores": "free", "openmp": 1, "blocks": 0}
        last = self.last.name if self.two else ""
        return {"configuration": self.name, **vars(self.hidden), **same, "last": last}


def place_columns(me: Rank) -> dict[str, Any]:
    """Return where something was measured, as columns of tables."""
    place = {"link": me.link, "link_bits_per_s": me.link_bits_per_s}
    return {"device": me.device.type, "ranks": me.world_size, **place}


# -- groups of ranks ---------------------------------------------------------------------------


@dataclass
class Groups:
    """A group of ranks for each configuration, made when it is first asked for, and what became of it.

    Every rank must ask for the same in the same order. ``why`` : by configuration, why it was refused, ""
    where it was not; the same on all ranks. Raises UserError on a GPU.
    """

    me: Rank
    why: dict[Configuration, str] = field(default_factory=dict)
    _groups: dict[Configuration, dist.ProcessGroup] = field(default_factory=dict)
    _rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.me.device.type == "cuda":
            raise UserError("gloo's threads share processors: on a GPU use contention and sharing")

    def made(self, names: Sequence[str]) -> list[Policy]:
        """Return the policies of these names whose configurations take effect here, on every rank.

        Raises UserError, with why the first was refused, where none does.
        """
        policies = [Policy.parse(name) for name in names]
        for policy in policies:
            for configuration in (policy.hidden, policy.last):
                if configuration not in self.why:
                    self._make(configuration)
        possible = [one for one in policies if not (self.why[one.hidden] or self.why[one.last])]
        if not possible:
            raise UserError(
                f"no configuration takes effect: {next(filter(None, self.why.values()))}"
            )
        return possible

    def of(self, configuration: Configuration) -> dist.ProcessGroup:
        """Return the ranks as a group that keeps to that configuration."""
        return self._groups[configuration]

    def control(self) -> pd.DataFrame:
        """Return table ``sharing_control``: what was asked of each rank, and what the system says it has."""
        return pd.DataFrame(self._rows)

    def _make(self, configuration: Configuration) -> None:
        """Make its group, and keep whether it took effect everywhere, and what each rank has."""
        before = set(threads_here())
        backend = register_gloo(configuration.threads, self.me.device)
        group: dist.ProcessGroup = dist.new_group(backend=backend)
        wanted = len(before) + 2 * configuration.threads
        threads = sorted(set(threads_here(at_least=wanted)) - before)
        dist.barrier(group=group)
        refused = apply(configuration, threads, group)
        self._groups[configuration] = group
        everybody = everyones_texts(json.dumps([refused, witness(threads)]))
        ranks = [json.loads(text) for text in everybody]
        self.why[configuration] = next((reason for reason, _ in ranks if reason), "")
        named = {**place_columns(self.me), **Policy(configuration, configuration).columns()}
        for rank, (reason, taken) in enumerate(ranks):
            outcome = {"outcome": REFUSED if reason else APPLIED, "reason": reason or "none"}
            self._rows.append({**named, "rank": rank, **outcome, **taken})


def apply(
    configuration: Configuration, threads: Sequence[int], group: dist.ProcessGroup | None
) -> str:
    """Have threads of this process keep to a configuration; returns why they may not, "" if they do.

    Every rank must call it alike. Of what was refused in the middle nothing needs to be taken back: nobody
    sends over such a group.
    """
    reason, priority = "", configuration.priority
    try:
        for thread in threads:
            if priority == "idle":
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            elif priority == "nice10":
                os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except AttributeError:
        reason = f"{configuration.name}: this system cannot give threads priorities of their own"
    except OSError as error:
        reason = f"priority {priority} not permitted: {error.strerror}"
    if priority == "raised" and agree_all(not reason):
        hastened = hasten(threads, group)
        reason = "" if hastened else "raising priorities not permitted, or the ranks stood still"
    return reason


def witness(threads: Sequence[int]) -> dict[str, Any]:
    """Return what the system says that these threads have, as columns."""
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
        "taken_openmp": torch.get_num_threads(),
    }
