"""Sharded training, replayed and real, after its layers and messages: what data/sharded holds, anew.

    python -m workbook campaign examples/campaign_sharded.yml --out DIR
    python examples/sharded.py DIR

Replays play the program of an iteration with real collectives in labs and wait out its compute, dilated to
what its messages take; every value that comes is checked. Real training is FSDP2's own; and in brief: its
collectives send one element a rank, and copy the rest. That takes compute, copies into and out of messages,
allocation and waiting for the slowest: all but bytes. Where there are GPUs it trains on all of them by NCCL,
and the first command is not needed.

Ranks of replays post 5 ms after one another. It matters: gloo sends when the other side has said
that it receives, and posts each half of a gather to be sent before it says so (gloo/allgather.cc,
gloo/transport/tcp/pair.cc). A rank that is late sends at once, and its word waits behind its own bytes. So
a large gather between two ranks takes its bytes' time if they post together, 1.5 times that if one is late;
ranks that wait for the very same moment are now in this state, now in that (data/sharded, 300 Mbit/s).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import clock
from ddlkit.jobs import rank as peers
from ddlkit.jobs.rank import Rank, Tables, job
from ddlkit.jobs.vitals import TRIES, Retries, Usage, Watch
from ddlkit.measure.given import known
from ddlkit.measure.parts import Ranks, ranks_in_lab
from ddlkit.model.fits import table_cost
from ddlkit.model.sharded import (
    COMPUTE,
    ELEMENT_BYTES,
    GATHER,
    POST,
    SENT,
    Program,
    Sharding,
    Step,
)
from workbook.common import places
from workbook.record.replay import HEAD_START_S

WARMUP, LIMIT_S = 2, 900.0
APART_S = 5e-3  # more than a word takes from rank to rank in any of the labs below


@dataclass(frozen=True)
class Script:
    """The program of an iteration: (do, what) by `ddlkit.model.sharded`, (collective, bytes); its columns."""

    labels: Mapping[str, Any]
    steps: Sequence[tuple[str, float]]
    messages: Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Settings:
    """Scripts to play, or a network to train by units of so many modules each, without the root's."""

    labels: Mapping[str, Any]
    repeats: int = 3
    scripts: Sequence[Script] = ()
    units: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    iterations: int = 4
    apart_s: float = (
        0.0  # each rank posts every message so much after the one before it
    )


@job(Settings, "sharded")
def sharded_job(me: Rank, settings: Settings) -> Iterator[Tables]:
    """Yield rows of table ``sharded``, seconds of the slowest rank; again what others disturbed."""
    at = {**settings.labels, "link": me.link, "link_bits_per_s": me.link_bits_per_s}
    at |= {"ranks": me.world_size, "device": me.device.type, "backend": me.backend}
    retries = Retries(settings.repeats * len(settings.scripts) // 4 + 8)
    made = {
        name: Sharded(me, settings, units) for name, units in settings.units.items()
    }
    for repeat in range(settings.repeats):
        for script in settings.scripts:
            for left in reversed(range(TRIES)):
                seconds, used = play(me, script, settings.apart_s)
                if not (left and retries.again(used)):
                    break
            columns = {
                **at,
                **script.labels,
                "origin": "replayed",
                "quantity": "iteration",
            }
            yield _rows(columns, repeat, np.array([seconds]), used)
        for name, sharded in made.items():
            while True:
                watch = Watch(me.rank)
                before, taken_s, after = (
                    sharded.timed(sent) for sent in (False, True, False)
                )
                used = peers.usage_of_all(watch.usage())
                if not retries.again(used):
                    break
            columns = {**at, "origin": "measured", "units": name}
            yield _rows({**columns, "quantity": "iteration"}, repeat, taken_s, used)
            yield _rows(
                {**columns, "quantity": "brief"}, repeat, np.append(before, after), used
            )


def _rows(
    columns: dict[str, Any], repeat: int, seconds: peers.Floats, used: Usage
) -> Tables:
    fared = {"stolen": used.stolen, "others": used.others, "disturbed": used.disturbed}
    columns = {**columns, "repeat": repeat, **fared, "processor_limited": used.limited}
    return {"sharded": clock.sample_rows(columns, seconds)}


def play(me: Rank, script: Script, apart_s: float = 0.0) -> tuple[float, Usage]:
    """Return seconds of an iteration that all ranks start at once, and how the machine fared."""
    n, mine = me.world_size, me.rank + 1.0
    pairs = []  # what comes, and what is sent
    for collective, n_bytes in script.messages:
        part = -(-n_bytes // (ELEMENT_BYTES * n))
        whole, own = torch.full((n * part,), mine), torch.full((part,), mine)
        pairs.append((whole, own) if collective == GATHER else (own, whole))
    watch, works = Watch(me.rank), dict[int, dist.Work]()
    start_s = now_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    clock.sleep_until(start_s)
    for do, what in script.steps:
        k = int(what)
        if do == COMPUTE:
            now_s += what
            clock.sleep_until(now_s)
        elif do == POST:
            now_s += me.rank * apart_s
            clock.sleep_until(now_s)
            gathers = script.messages[k][0] == GATHER
            post = peers.gather_single if gathers else peers.scatter_single
            works[k] = post(*pairs[k], async_op=True)
        elif not works[k].is_completed():
            works[k].wait()
            now_s = time.perf_counter()
    end_s = max(now_s, time.perf_counter())
    used = peers.usage_of_all(watch.usage())
    for (collective, _), (came, _) in zip(script.messages, pairs, strict=True):
        gathers = collective == GATHER
        right = torch.arange(1.0, n + 1)[:, None] if gathers else n * (n + 1) / 2
        if not bool((came.view(n if gathers else 1, -1) == right).all()):
            raise RuntimeError(
                f"replay of {script.labels}: wrong values of {collective}"
            )
    return float(peers.slowest([end_s - start_s])[0]), used


class _Collective:
    """FSDP2's collective of one kind: it is noted, and sends, or in brief."""

    def __init__(self, owner: Sharded, name: str) -> None:
        self._owner, self._name = owner, name

    def allocate(self, size: Sequence[int], **how: Any) -> Tensor:
        """Return memory for a message."""
        return torch.empty(*size, **how)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        to, of, gathers = output_tensor, input_tensor, self._name == GATHER
        self._owner.seen.append((self._name, max(to.nbytes, of.nbytes)))
        if not self._owner.sends:
            rows = (to if gathers else of).view(group.size(), -1)
            for row, copied in (
                ((row, of) for row in rows) if gathers else [(to, rows[0])]
            ):
                if row.data_ptr() != copied.data_ptr():  # FSDP2 gathers in place
                    row.copy_(copied)
            one, each = to.new_zeros(1), to.new_zeros(group.size())
            to, of = (each, one) if gathers else (one, each)
        return (
            peers.gather_single(to, of, group=group, async_op=async_op)
            if gathers
            else peers.scatter_single(to, of, op, group=group, async_op=async_op)
        )


class Sharded:
    """A network of the registry under FSDP2; seen : (collective, bytes) of the last iteration, in order."""

    def __init__(
        self, me: Rank, settings: Settings, units: Sequence[Sequence[str]]
    ) -> None:
        self.sends, self.seen = True, list[tuple[str, int]]()
        torch.manual_seed(0)
        network, batch = (settings.labels[name] for name in ("network", "batch"))
        self.training = known(network, batch, me.device, rank=me.rank)
        model, mesh = (
            self.training.model,
            init_device_mesh(me.device.type, (me.world_size,)),
        )
        for names in filter(None, units):
            modules = [model.get_submodule(name) for name in names]
            fully_shard(
                modules, mesh=mesh, reshard_after_forward=settings.labels["reshard"]
            )
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                ours: list[Any] = [_Collective(self, name) for name in SENT]
                module.set_custom_all_gather(ours[0])
                module.set_custom_reduce_scatter(ours[1])
        self.training.optimizer = torch.optim.SGD(
            model.parameters(), lr=0.0, momentum=0.9
        )
        self._iterations, self._wait = (
            settings.iterations,
            clock.synchronizer(me.device),
        )
        if not torch.isfinite(
            self.training.loss()
        ):  # it leaves the root whole, until backward has run
            raise UserError(f"{network} by FSDP2: the loss is not finite: not timed")
        for _ in range(WARMUP):
            self.iterate()

    def iterate(self) -> None:
        """Do one iteration."""
        self.seen.clear()
        self.training.iterate()

    def timed(self, sent: bool) -> peers.Floats:
        """Return seconds of iterations, of the slowest rank, their messages ``sent`` or in brief."""
        self.sends = sent
        exactly = clock.Budget(0, self._iterations, self._iterations, float("inf"), 0.0)
        dist.barrier()
        return peers.slowest(
            clock.measure(self.iterate, exactly, synchronize=self._wait)
        )


# -- the cases of data/sharded.csv ---------------------------------------------------------------

REPLAYS = {
    "gpt_small:8": ["blocks.layers.*", "size:2MB", "size:6MB"],
    "mobilenet_v3_small:4": ["features.*", "size:1MB"],
    "squeezenet1_1:4": ["features.*"],
    "resnet18:4": ["layer*.*"],
}
PLACES = (
    *((2, 200e6, 0.5e-3), (4, 200e6, 0.5e-3), (2, 300e6, 1e-3)),
    *((2, 400e6, 0.5e-3), (4, 150e6, 0.5e-3), (2, 150e6, 1e-3)),  # sharded_again
    *((2, 300e6, 0.5e-3), (4, 250e6, 0.5e-3), (2, 500e6, 0.5e-3)),  # sharded_last
)
TRAININGS = {
    "gpt_small:8": ["blocks.layers.*", "blocks"],
    "mobilenet_v3_small:4": ["features.*", "features"],
    "squeezenet1_1:4": ["features.*"],
    "resnet18:4": ["layer*"],
}
RATES = (200e6, 500e6, 1e9)


def layers_of(out: Path, network: str, batch: str) -> LayerProfile:
    """Return the profile in a folder, or the recorded one, whose modules are the same on any machine."""
    name = f"layers-{network}-b{batch}-r1.csv"
    every = (
        store.list_tables(folder, name) for folder in (out, places.DATA / "sharded")
    )
    return store.read_profile(next(path for paths in every for path in paths))


def replays(out: Path, network: str, members: Ranks, lab: str) -> Settings:
    """Return what to play of a network in a lab, with prefetch and without."""
    name, _, batch = network.partition(":")
    profile = layers_of(out, name, batch)
    rows = store.load_table(out / f"collectives-{lab}.csv")
    costs = {
        of: table_cost(rows[rows["collective"] == of], members.count) for of in SENT
    }
    scripts, of = (
        [],
        {"network": name, "batch": int(batch), "profile_sha256": profile.sha256},
    )
    for units, ahead in product(REPLAYS[network], (True, False)):
        whole = Sharding.of(profile, units)
        sent_s = sum(
            float(costs[each[0]](each.bytes)) for each in whole.program().messages
        )
        dilation = float(f"{sent_s / whole.program().compute_s:.4g}")
        program = whole.scaled(dilation).program(prefetch=ahead)
        labels = {
            "units": units,
            "prefetch": ahead,
            "dilation": dilation,
            "reshard": True,
        }
        messages = [(each.collective, each.bytes) for each in program.messages]
        scripts.append(Script({**of, **labels}, program.steps, messages))
    return Settings({}, scripts=scripts, apart_s=APART_S)


def of_last(program: Program, ranks: int) -> Program:
    """Return what the last rank does, which posts every message later than the first."""
    late = Step(COMPUTE, (ranks - 1) * APART_S)
    steps = ((late, step) if step.action == POST else (step,) for step in program.steps)
    return program._replace(steps=tuple(step for each in steps for step in each))


def training(out: Path, network: str) -> Settings:
    """Return how to train a network, by its modules in the layers that were measured."""
    name, _, batch = network.partition(":")
    profile = layers_of(out, name, batch)
    of = {"network": name, "batch": int(batch), "profile_sha256": profile.sha256}
    labels = {**of, "prefetch": False, "dilation": 1.0, "reshard": True}
    units = {
        spec: Sharding.of(profile, spec).modules[1:] for spec in TRAININGS[network]
    }
    return Settings(labels, units=units)


def main(*arguments: str) -> None:
    """Measure all cases that a folder lacks, in the labs whose messages it has.

    The folder is the only argument. Ends the program with a text if it is missing, or has no messages.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise SystemExit("usage: python examples/sharded.py DIR")
    out, gpus = Path(arguments[0]), torch.cuda.device_count()

    def known_lab(lab: str) -> bool:
        return store.has_table(out / f"collectives-{lab}.csv")

    wanted: list[tuple[str, Ranks, Settings]] = []
    for (count, rate, delay_s), network in product(() if gpus else PLACES, REPLAYS):
        members, lab = ranks_in_lab(count, rate, delay_s)
        if not known_lab(lab):
            continue
        key = f"replay-{network.replace(':', '-b')}-{lab.removeprefix('lab-')}"
        wanted.append((key, members, replays(out, network, members, lab)))
    for rate, network in product((0.0,) if gpus else RATES, TRAININGS):
        members, lab = (
            ranks_in_lab(2, rate) if rate else (Ranks.of(gpus, "cuda"), f"nccl-p{gpus}")
        )
        if not (gpus or known_lab(lab)):
            continue
        key = f"{network.replace(':', '-b')}-{lab.removeprefix('lab-')}"
        wanted.append((key, members, training(out, network)))
    if not wanted:
        raise SystemExit(
            f"sharded: {out} has no messages of a lab: first run python -m workbook campaign "
            f"examples/campaign_sharded.yml --out {out}"
        )
    for key, members, settings in wanted:
        if not store.has_table(path := out / f"sharded-{key}.csv"):
            rows = members.run(sharded_job, settings, LIMIT_S)["sharded"]
            store.save_table(rows, out, path.stem, schema="sharded", command=sys.argv)
            print(path, flush=True)


if __name__ == "__main__":
    import sharded  # by its name, under which ranks find the job

    sharded.main(*sys.argv[1:])
