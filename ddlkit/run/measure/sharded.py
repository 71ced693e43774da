"""Sharded training by FSDP2 itself, and in brief: its collectives send one element a rank, and copy the rest.

What the second takes is compute, copies into and out of messages, allocation, DTensor's work and waiting for
the slowest: all but bytes on the wire. On processors every collective blocks, so that these come on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddlkit.core.errors import UserError
from ddlkit.model.sharded import GATHER, SCATTER
from ddlkit.run import clock
from ddlkit.run.clock import Budget
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.rank import Rank, Tables, job
from ddlkit.run.lab.sharded import place_of, state
from ddlkit.run.nets.given import Training, known
from ddlkit.run.vitals import Retries, Watch

WARMUP = 2


@dataclass(frozen=True)
class ShardedTraining:
    """A network by several shardings: modules of each unit, without the root's; labels : columns of rows."""

    network: str
    batch: int
    shardings: Mapping[str, Sequence[Sequence[str]]]
    labels: Mapping[str, Any]
    repeats: int = 3
    iterations: int = 5
    reshard: bool = True


@job(ShardedTraining, "sharded")
def sharded_training_job(me: Rank, settings: ShardedTraining) -> Iterator[Tables]:
    """Yield rows by sharding and round: iterations, and around them ``brief`` ones. Raises UserError."""
    retries = Retries()
    made = {name: Sharded(me, settings, units) for name, units in settings.shardings.items()}
    for repeat in range(settings.repeats):
        for name, sharded in made.items():
            while True:
                watch = Watch(me.rank)
                before, seconds, after = (sharded.timed(sent) for sent in (False, True, False))
                used = peers.usage_of_all(watch.usage())
                if not retries.again(used):
                    break
            for quantity, taken_s in (
                ("brief", np.append(before, after)),
                ("iteration", seconds),
            ):
                columns = {
                    **settings.labels,
                    **place_of(me),
                    "units": name,
                    "repeat": repeat,
                    **state(used),
                }
                columns |= {"origin": "measured", "quantity": quantity}
                yield {"sharded": clock.sample_rows(columns, taken_s)}


class _Collective:
    """FSDP2's collective of one kind: it is noted, and sends, or in brief."""

    def __init__(self, owner: Sharded, name: str) -> None:
        self._owner, self._name = owner, name

    def allocate(self, size: Sequence[int], **how: Any) -> Tensor:
        return torch.empty(*size, **how)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, **how: Any
    ) -> dist.Work | None:
        to, of, gathers = output_tensor, input_tensor, self._name == GATHER
        self._owner.seen.append((self._name, max(to.nbytes, of.nbytes)))
        how |= {"group": group}
        if self._owner.sends:
            return (
                peers.gather_single(to, of, **how)
                if gathers
                else peers.scatter_single(to, of, op, **how)
            )
        rows, one, each = (
            (of, to)[gathers].view(group.size(), -1),
            to.new_zeros(1),
            to.new_zeros(group.size()),
        )
        if not gathers:
            to.copy_(rows[0])
            return peers.scatter_single(one, each, op, **how)
        for row in rows:
            if row.data_ptr() != of.data_ptr():  # FSDP2 gathers in place
                row.copy_(of)
        return peers.gather_single(each, one, **how)


class Sharded:
    """A network of the registry under FSDP2; seen : (collective, bytes) of the last iteration, in order."""

    def __init__(self, me: Rank, settings: ShardedTraining, units: Sequence[Sequence[str]]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.sends, self.seen = True, list[tuple[str, int]]()
        torch.manual_seed(0)
        self.training: Training = known(settings.network, settings.batch, me.device, rank=me.rank)
        model: nn.Module = self.training.model
        how: Any = {"mesh": init_device_mesh(me.device.type, (me.world_size,))}
        for names in units:
            if names:
                modules = [model.get_submodule(name) for name in names]
                fully_shard(modules, reshard_after_forward=settings.reshard, **how)
        fully_shard(model, **how)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_Collective(self, GATHER))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(_Collective(self, SCATTER))  # type: ignore[arg-type]
        self.training.optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        self._iterations, self._wait = settings.iterations, clock.synchronizer(me.device)
        for _ in range(WARMUP):
            self.training.iterate()
        if not np.isfinite(self.training.loss().item()):
            raise UserError(f"{settings.network} by FSDP2: the loss is not finite: not timed")

    def timed(self, sent: bool) -> peers.Floats:
        """Return seconds of iterations, of the slowest rank, their messages ``sent`` or in brief."""
        self.sends = sent
        exactly = Budget(0, self._iterations, self._iterations, float("inf"), 0.0)
        dist.barrier()
        return peers.slowest(clock.measure(self._iterate, exactly, synchronize=self._wait))

    def _iterate(self) -> None:
        self.seen.clear()
        self.training.iterate()
