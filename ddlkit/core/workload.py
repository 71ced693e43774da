"""What one training iteration computes, tensor by tensor: all that planning and simulation know."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import MOST, MOST_WHOLE

MOST_TENSORS = (
    20_000  # networks have some thousands; `exact` of so many takes half a minute
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _freeze(owner: Any, n: int, **least: int) -> None:
    """Make columns read-only copies of length ``n``, finite and not below ``least``; 1: whole numbers."""
    for name, minimum in least.items():
        array: NDArray[Any] = np.array(getattr(owner, name), float)
        if array.shape != (n,):
            raise UserError(
                f"{name} has shape {array.shape}, but there are {n} tensors"
            )
        wrong = np.flatnonzero(~np.isfinite(array) | (array < minimum))
        if wrong.size:
            wrong_one = f"{name} of tensor {wrong[0]} is {array[wrong[0]]:g}"
            raise UserError(f"{wrong_one}: must be >= {minimum}")
        if (array > (MOST_WHOLE if minimum else MOST)).any():
            raise UserError(
                f"{name} is {array.max():g} in some tensor: nobody means that"
            )
        if minimum:
            array = np.array(getattr(owner, name), np.int64)
        array.setflags(write=False)
        object.__setattr__(owner, name, array)


def _check_time(seconds: float, what: str) -> None:
    if not 0 <= seconds <= MOST:
        raise UserError(f"{what} is {seconds}: must be a finite time >= 0")


@dataclass(frozen=True, eq=False)
class Workload:
    """One iteration in *ready order*: gradients as they become ready, last layer first.

    backward_s : (n,) time of backward between the previous gradient's readiness and this one's
    bytes : (n,) size of each gradient on the wire; parameters : (n,) its elements
    update_s : optimizer step, after the last gradient has arrived
    """

    forward_s: float
    backward_s: Floats
    bytes: Ints
    parameters: Ints
    layer: tuple[str, ...]
    tensor: tuple[str, ...]
    update_s: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.tensor)
        if n == 0:
            raise UserError("the workload is empty: it needs at least one tensor")
        if n > MOST_TENSORS:
            raise UserError(
                f"{n} tensors: at most {MOST_TENSORS}: merge those of a layer"
            )
        if len(self.layer) != n:
            raise UserError(
                f"layer has {len(self.layer)} names, but there are {n} tensors"
            )
        _check_time(self.forward_s, "forward_s")
        _check_time(self.update_s, "update_s")
        _freeze(self, n, backward_s=0, bytes=1, parameters=1)
        _check_time(float(self.backward_s.sum()), "backward_s in all")

    @property
    def n(self) -> int:
        """Return the number of gradient tensors."""
        return len(self.tensor)

    @property
    def ready_s(self) -> Floats:
        """Return (n,) the time at which each gradient is ready, counted from the start of the iteration."""
        return self.forward_s + np.cumsum(self.backward_s)

    @property
    def compute_s(self) -> float:
        """Return seconds of forward, backward and update: the iteration of a single worker."""
        return float(self.ready_s[-1]) + self.update_s

    def scaled(self, factor: float) -> Workload:
        """Return the workload on a machine ``factor`` times slower (time dilation)."""
        if not factor > 0:
            raise UserError(f"time dilation factor is {factor}: must be above zero")
        names = ("forward_s", "backward_s", "update_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def accumulated(self, batches: int) -> Workload:
        """Return micro-batches of which only the last sends gradients, as in DDP's ``no_sync``."""
        if not 1 <= batches <= MOST_WHOLE:
            limits = f"at least 1, and at most {MOST_WHOLE:g}"
            raise UserError(f"{shown(batches)} micro-batches accumulated: {limits}")
        before_s = (batches - 1) * (self.forward_s + float(self.backward_s.sum()))
        return replace(self, forward_s=self.forward_s + before_s)

    @classmethod
    def from_arrays(
        cls,
        forward_s: float,
        backward_s: Sequence[float] | Floats,
        n_bytes: Sequence[int] | Ints,
        update_s: float = 0.0,
    ) -> Workload:
        """Return a workload of float32 gradients without names: for teaching examples and tests."""
        sizes = np.asarray(n_bytes, dtype=np.int64)
        names = tuple(f"t{i}" for i in range(sizes.size))
        times, elements = np.asarray(backward_s, float), np.maximum(sizes // 4, 1)
        return cls(forward_s, times, sizes, elements, names, names, update_s)


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """Measured times of one network on one device, in *forward order*, columns (n,) of one row a tensor.

    forward_s : a layer with several tensors carries it on the first; flops : forward, 2 per multiply-add
    """

    network: str
    device: str
    batch: int
    tensor: tuple[str, ...]
    layer: tuple[str, ...]
    parameters: Ints
    gradient_bytes: Ints
    forward_s: Floats
    backward_s: Floats
    flops: Floats
    update_s: float = 0.0

    def __post_init__(self) -> None:
        _check_time(self.update_s, "update_s")
        n = len(self.tensor)
        _freeze(
            self, n, parameters=1, gradient_bytes=1, forward_s=0, backward_s=0, flops=0
        )

    @classmethod
    def from_flops(
        cls,
        network: str,
        batch: int,
        tensor: Sequence[str],
        parameters: Sequence[int] | Ints,
        sample_flops: Sequence[float] | Floats,
        *,
        peak_flops_per_s: float,
        utilisation: float,
        layer: Sequence[str] | None = None,
    ) -> LayerProfile:
        """Return a profile by count instead of clock: work over a device's rate (osf Eqs 4-6), in float32.

        forward is M C / (c pi) and backward twice that; M = batch, C = sample_flops (n,), the forward FLOP of
        one sample (2 per multiply-add), pi = peak_flops_per_s, c = utilisation.
        """
        if batch < 1:
            raise UserError(f"batch size is {batch}: must be at least 1")
        if not 0 < peak_flops_per_s < np.inf:
            raise UserError(
                f"peak rate is {peak_flops_per_s} FLOP/s: must be above zero"
            )
        if not 0 < utilisation <= 1:
            raise UserError(
                f"utilisation is {utilisation}: must be above 0 and at most 1"
            )
        flops = np.asarray(sample_flops, float) * batch
        if not np.any(flops):
            raise UserError("no tensor has any FLOP: count them, or measure the layers")
        forward_s, counts = (
            flops / (utilisation * peak_flops_per_s),
            np.asarray(parameters),
        )
        layers, times = (
            tuple(tensor if layer is None else layer),
            (forward_s, 2 * forward_s, flops),
        )
        return cls(
            network,
            "estimated",
            batch,
            tuple(tensor),
            layers,
            counts,
            counts * 4,
            *times,
        )

    @property
    def sha256(self) -> str:
        """Return the hash of all that a prediction depends on: names, sizes and times to the last bit."""
        digest = hashlib.sha256()
        for names in (
            (self.network, self.device, str(self.batch)),
            self.tensor,
            self.layer,
        ):
            digest.update("\0".join(names).encode())
        for column in (
            self.parameters,
            self.gradient_bytes,
            self.forward_s,
            self.backward_s,
        ):
            digest.update(column.tobytes())
        digest.update(np.float64(self.update_s).tobytes())
        return digest.hexdigest()

    def sent_as(self, element_bytes: int) -> LayerProfile:
        """Return the profile whose gradients travel in numbers of that many bytes: 2 for fp16 and bf16."""
        return replace(self, gradient_bytes=self.parameters * element_bytes)

    def resized(self, factors: Mapping[str, float]) -> LayerProfile:
        """Return it with layers or tensors, by name, so many times as large: in time and bytes."""
        factor = np.ones(len(self.tensor))
        for name, times in factors.items():
            named = [name in pair for pair in zip(self.layer, self.tensor, strict=True)]
            if not any(named):
                some = ", ".join(dict.fromkeys(self.layer[:3]))
                raise UserError(
                    f"no layer or tensor {name!r}: use one of the profile's, as {some}"
                )
            if not 0 < times < np.inf:
                raise UserError(
                    f"layer {name}: cannot be {times:g} times as large: use one > 0"
                )
            factor[named] *= times
        columns = {
            n: factor * getattr(self, n) for n in ("forward_s", "backward_s", "flops")
        }
        for name in ("parameters", "gradient_bytes"):
            columns[name] = np.maximum(1, np.rint(factor * getattr(self, name))).astype(
                int
            )
        return replace(self, **columns)

    def workload(self) -> Workload:
        """Return the profile in ready order: the exact reverse of forward order."""
        forward_s, backward_s = float(self.forward_s.sum()), self.backward_s[::-1]
        sizes = self.gradient_bytes[::-1], self.parameters[::-1]
        names = self.layer[::-1], self.tensor[::-1]
        return Workload(forward_s, backward_s, *sizes, *names, self.update_s)
