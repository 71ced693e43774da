"""The compute of one training iteration, tensor by tensor.

This is all that planners and simulations know of a network. A `LayerProfile` has the
layers in the order of the forward pass. A `Workload` is made from a profile, and has
the gradients in the order in which they become ready.

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import MOST, MOST_WHOLE

MOST_TENSORS = 20_000
"""The most tensors of a workload.

Networks have some thousands. The planner `exact` takes half a minute for this number.
"""
FLOAT32_BYTES = 4
"""The bytes of a number in single precision."""
NUMBER_BYTES = (1, 2, 4, 8)
"""The bytes that a number of a gradient may have."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _check_and_freeze(owner: Any, name: str, n: int, *, whole: bool) -> None:
    """Replace a field of a frozen dataclass by a checked, read-only array of shape (n,).

    ``name`` is the field of ``owner``, which is changed in place. With ``whole`` the
    values must be at least 1, and become integers. Otherwise they must be at least 0.
    Raises UserError if there are not n values, or if a value is out of range or not
    finite.
    """
    values = getattr(owner, name)
    least = 1 if whole else 0
    most = MOST_WHOLE if whole else MOST
    # Whole numbers are checked as floats before they become integers, because infinite values
    # and NaN must be refused, and no integer can represent them.
    column: NDArray[Any] = np.array(values, float)
    if column.shape != (n,):
        raise UserError(f"{name} has shape {column.shape}, but there are {n} tensors")
    _refuse_out_of_range(column, name, least, most)
    if whole:
        column = np.array(values, np.int64)
    column.setflags(write=False)
    # A frozen dataclass lets its fields be set only in this way.
    object.__setattr__(owner, name, column)


def _refuse_out_of_range(column: Floats, name: str, least: float, most: float) -> None:
    """Raise UserError unless the values of all tensors are finite, from least to most.

    ``name`` says what the values are.
    """
    wrong = np.flatnonzero(~np.isfinite(column) | (column < least))
    if wrong.size:
        raise UserError(
            f"{name} of tensor {wrong[0]} is {column[wrong[0]]:g}: "
            f"must be a finite number of at least {least}"
        )
    if (column > most).any():
        raise UserError(
            f"{name} is {column.max():g} in some tensor: must be at most {most:g}"
        )


def _check_dtype(dtype: tuple[str, ...], n: int) -> None:
    """Raise UserError unless there is a type for each of n tensors, or none at all."""
    if len(dtype) not in (0, n):
        raise UserError(f"dtype has {len(dtype)} types, but there are {n} tensors")


def _check_time(seconds: float, name: str) -> None:
    """Raise UserError, in which the time is called ``name``, if a time is no valid one."""
    # NaN fails every comparison, and is refused, too.
    if not 0 <= seconds <= MOST:
        raise UserError(f"{name} is {seconds}: must be a time from 0 to {MOST:g} s")


@dataclass(frozen=True, eq=False)
class Workload:
    """One iteration in *ready order*: gradients in the order in which they are ready.

    The gradients of the last layer come first.

    Parameters
    ----------
    forward_s : float
        The time of the forward pass in seconds.
    backward_s : ndarray, shape (n,)
        For each gradient the time of the backward pass since the gradient before it was
        ready, in seconds.
    bytes : ndarray, shape (n,)
        The size of each gradient as it is sent.
    parameters : ndarray, shape (n,)
        The number of elements of each gradient.
    layer, tensor : tuple of str, length n
        The names of the layer and of the tensor to which each gradient belongs.
    update_s : float, optional
        The time of the optimizer step, which follows the last message, in seconds.
    dtype : tuple of str, length n, optional
        The type of each gradient, such as "fp32". By default all have the same type. No
        message holds gradients of several types.

    Raises
    ------
    UserError
        If there is no tensor or if there are more than MOST_TENSORS, if lengths differ,
        if a time is negative, if a time or the sum of ``backward_s`` is too large, or if a
        size is below 1 or too large.

    Examples
    --------
    >>> layers = Workload.from_arrays(3.0, backward_s=[2.0, 2.0], n_bytes=[100, 50])
    >>> layers.ready_s.tolist(), layers.compute_s
    ([5.0, 7.0], 7.0)
    """

    forward_s: float
    backward_s: Floats
    bytes: Ints
    parameters: Ints
    layer: tuple[str, ...]
    tensor: tuple[str, ...]
    update_s: float = 0.0
    dtype: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tensor)
        if n == 0:
            raise UserError("the layer profile is empty: it needs at least one tensor")
        if n > MOST_TENSORS:
            raise UserError(
                f"{n} tensors: at most {MOST_TENSORS}: merge the tensors of a layer"
            )
        if len(self.layer) != n:
            raise UserError(
                f"layer has {len(self.layer)} names, but there are {n} tensors"
            )
        _check_time(self.forward_s, "forward_s")
        _check_time(self.update_s, "update_s")
        _check_and_freeze(self, "backward_s", n, whole=False)
        _check_and_freeze(self, "bytes", n, whole=True)
        _check_and_freeze(self, "parameters", n, whole=True)
        # Each of many times may be within the limit of a time while their sum exceeds it.
        _check_time(float(self.backward_s.sum()), "the sum of backward_s")
        _check_dtype(self.dtype, n)

    @property
    def n(self) -> int:
        """Return the number of gradient tensors."""
        return len(self.tensor)

    @cached_property
    def has_several_types(self) -> bool:
        """Return whether gradients have several types, which no message may mix."""
        return len(set(self.dtype)) > 1

    @property
    def ready_s(self) -> Floats:
        """Return when each gradient is ready, from the start of forward, shape (n,)."""
        return self.forward_s + np.cumsum(self.backward_s)

    @property
    def compute_s(self) -> float:
        """Return the iteration of a single worker: forward, backward and update."""
        return float(self.ready_s[-1]) + self.update_s

    def scaled(self, factor: float) -> Workload:
        """Return the workload on a machine where compute takes ``factor`` times as long.

        Raises
        ------
        UserError
            If the factor is not above zero.
        """
        # Commands take this factor by the option --dilation. NaN is refused, too.
        if not factor > 0:
            raise UserError(f"--dilation {factor:g}: must be above zero")
        return replace(
            self,
            forward_s=factor * self.forward_s,
            backward_s=factor * self.backward_s,
            update_s=factor * self.update_s,
        )

    def accumulated(self, batches: int) -> Workload:
        """Return an iteration of several micro-batches, the last of which sends gradients.

        Parameters
        ----------
        batches : int
            The number of micro-batches.

        Returns
        -------
        Workload
            The forward pass contains all that is computed before the last backward
            pass, as under the ``no_sync`` of PyTorch's DistributedDataParallel.

        Raises
        ------
        UserError
            If there is not at least one micro-batch, or if there are too many.
        """
        if not 1 <= batches <= MOST_WHOLE:
            raise UserError(
                f"{shown(batches)} micro-batches accumulated: "
                f"at least 1, and at most {MOST_WHOLE:g}"
            )
        # The micro-batches before the last one only compute, so they delay the gradients
        # as a longer forward pass does.
        one_batch_s = self.forward_s + float(self.backward_s.sum())
        before_s = (batches - 1) * one_batch_s
        return replace(self, forward_s=self.forward_s + before_s)

    @classmethod
    def from_arrays(
        cls,
        forward_s: float,
        backward_s: Sequence[float] | Floats,
        n_bytes: Sequence[int] | Ints,
        update_s: float = 0.0,
    ) -> Workload:
        """Return a workload of float32 gradients that are called t0, t1 and so on.

        Parameters
        ----------
        forward_s : float
            The time of the forward pass in seconds.
        backward_s : array_like, shape (n,)
            The time of the backward pass for each gradient in ready order, in seconds.
        n_bytes : array_like, shape (n,)
            The size of each gradient in bytes.
        update_s : float, optional
            The time of the optimizer step in seconds.

        Returns
        -------
        Workload
            Each gradient is a layer of its own.
        """
        sizes = np.asarray(n_bytes, dtype=np.int64)
        names = tuple(f"t{i}" for i in range(sizes.size))
        return cls(
            forward_s=forward_s,
            backward_s=np.asarray(backward_s, float),
            bytes=sizes,
            # A gradient of fewer bytes than one number still has an element.
            parameters=np.maximum(sizes // FLOAT32_BYTES, 1),
            layer=names,
            tensor=names,
            update_s=update_s,
        )


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The times of a network on a device, in *forward order*, by tensor.

    Parameters
    ----------
    network, device : str
        The names of the network and of the device.
    batch : int
        The samples in a batch of one device.
    tensor, layer : tuple of str, length n
        The names of the tensor and of its layer.
    parameters : ndarray, shape (n,)
        The number of elements of each tensor.
    gradient_bytes : ndarray, shape (n,)
        The size of each gradient as it is sent.
    forward_s, backward_s : ndarray, shape (n,)
        Times in seconds. A layer with several tensors has its forward time at the first
        of them.
    flops : ndarray, shape (n,)
        The floating-point operations of the forward pass for the whole batch, 2 for a
        multiply-add.
    update_s : float, optional
        The time of the optimizer step in seconds.
    dtype : tuple of str, length n, optional
        The type of each gradient, such as "fp32". By default all have the same type.

    Raises
    ------
    UserError
        If lengths differ, if a time is negative, or if a size is below 1.
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
    dtype: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tensor)
        _check_time(self.update_s, "update_s")
        _check_dtype(self.dtype, n)
        _check_and_freeze(self, "parameters", n, whole=True)
        _check_and_freeze(self, "gradient_bytes", n, whole=True)
        _check_and_freeze(self, "forward_s", n, whole=False)
        _check_and_freeze(self, "backward_s", n, whole=False)
        _check_and_freeze(self, "flops", n, whole=False)

    def doubts(self) -> Iterator[str]:
        """Yield a warning if parameters and gradient_bytes do not go together.

        A tensor is in doubt if its numbers do not have 1, 2, 4 or 8 bytes. Without several
        types in ``dtype``, all gradients have the same type, so a tensor is also in doubt
        if its numbers are not of the size that most tensors have.

        Yields
        ------
        str
            The warning, which names the first such tensor.

        Examples
        --------
        >>> times_s = np.array([0.1, 0.1])
        >>> names = ("conv", "fc")
        >>> profile = LayerProfile(
        ...     "small", "cpu", 4, names, names, np.array([10, 500]), np.array([40, 3000]),
        ...     times_s, times_s, times_s,
        ... )
        >>> (doubt,) = profile.doubts()
        >>> doubt.partition(",")[0]
        "tensor 'fc' has 3000 bytes of gradient for 500 parameters"
        """
        # For each possible size of a number: whether each tensor may have numbers of this size.
        fits_by_bytes = {n_bytes: self._fits(n_bytes) for n_bytes in NUMBER_BYTES}
        # How many tensors may have each size. If all have the same type, all should have the
        # size that most of them have.
        n_tensors = {
            n_bytes: int(fits.sum()) for n_bytes, fits in fits_by_bytes.items()
        }
        usual_bytes = max(n_tensors, key=n_tensors.__getitem__)
        has_several_types = len(set(self.dtype)) > 1
        if has_several_types or n_tensors[usual_bytes] == 0:
            # No size is usual, so each tensor may have any of the possible sizes.
            is_possible = np.any(list(fits_by_bytes.values()), axis=0)
            expected = "where 1, 2, 4 or 8 are possible"
        else:
            is_possible = fits_by_bytes[usual_bytes]
            expected = f"where other tensors have {usual_bytes} for each"
        if is_possible.all():
            return
        # False is less than True, so `argmin` returns the first False.
        row = int(np.argmin(is_possible))
        bytes_of_number = self.gradient_bytes[row] / self.parameters[row]
        yield (
            f"tensor {shown(self.tensor[row])} has {self.gradient_bytes[row]} bytes of "
            f"gradient for {self.parameters[row]} parameters, {bytes_of_number:.9g} for "
            f"each, {expected}: check the columns parameters and gradient_bytes"
        )

    def _fits(self, n_bytes: int) -> NDArray[np.bool_]:
        """Return whether each tensor may have numbers of ``n_bytes`` bytes, shape (n,)."""
        # If a user's file lacks the parameters, they were computed from the bytes and
        # rounded up. So there may be up to one parameter less than ``parameters`` has.
        fewest = self.parameters - 1
        is_above = self.gradient_bytes > n_bytes * fewest
        is_below = self.gradient_bytes <= n_bytes * self.parameters
        return np.asarray(is_above & is_below)

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
        """Return a float32 profile with times from counted operations.

        The times are those of Eqs 4 to 6 of "osf" (Liu et al. 2022), whose symbols are named
        below.

        Parameters
        ----------
        network : str
            The name of the network.
        batch : int
            M, the samples in a batch of one device.
        tensor : sequence of str, length n
            The names of the tensors, in forward order.
        parameters : array_like, shape (n,)
            The number of elements of each tensor.
        sample_flops : array_like, shape (n,)
            C, the floating-point operations of the forward pass of one sample, 2 for a
            multiply-add.
        peak_flops_per_s : float
            pi, the peak rate of the device.
        utilisation : float
            c, the share of the peak rate that is reached, above 0 and at most 1.
        layer : sequence of str, length n, optional
            The layer of each tensor. By default each tensor is a layer of its own.

        Returns
        -------
        LayerProfile
            The profile, whose device is called "estimated".

        Raises
        ------
        UserError
            If the batch, the rate or the utilisation is out of range, or if no tensor
            has any operation.

        Notes
        -----
        Forward of a tensor takes M C / (c pi), and backward takes twice as long.

        Examples
        --------
        >>> rate = {"peak_flops_per_s": 6e9, "utilisation": 0.5}
        >>> profile = LayerProfile.from_flops("small", 4, ["w"], [1000], [3e6], **rate)
        >>> profile.forward_s.tolist(), profile.backward_s.tolist()
        ([0.004], [0.008])
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
        forward_s = flops / (utilisation * peak_flops_per_s)
        counts = np.asarray(parameters)
        return cls(
            network=network,
            device="estimated",
            batch=batch,
            tensor=tuple(tensor),
            layer=tuple(tensor if layer is None else layer),
            parameters=counts,
            gradient_bytes=counts * FLOAT32_BYTES,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            flops=flops,
        )

    @property
    def sha256(self) -> str:
        """Return the hash of all that predictions depend on: names, sizes and times."""
        digest = hashlib.sha256()
        origin = (self.network, self.device, str(self.batch))
        texts = [origin, self.tensor, self.layer]
        # A single type changes no prediction. It stays out of the hash, so that profiles
        # that were recorded without types keep their hashes.
        if len(set(self.dtype)) > 1:
            texts.append(self.dtype)
        for names in texts:
            # The character 0 occurs in no name, so within a tuple ("a", "b") and ("ab",)
            # differ. Nothing separates one tuple from the next.
            digest.update("\0".join(names).encode())
        columns = (
            self.parameters,
            self.gradient_bytes,
            self.forward_s,
            self.backward_s,
        )
        for column in columns:
            digest.update(column.tobytes())
        digest.update(np.float64(self.update_s).tobytes())
        return digest.hexdigest()

    def sent_as(self, element_bytes: int) -> LayerProfile:
        """Return the profile with gradients of ``element_bytes`` for each element."""
        gradient_bytes = self.parameters * element_bytes
        # All gradients are then sent in one type, so that none needs to be stated.
        return replace(self, gradient_bytes=gradient_bytes, dtype=())

    def resized(self, factors: Mapping[str, float]) -> LayerProfile:
        """Return the profile with some layers or tensors larger or smaller.

        Parameters
        ----------
        factors : mapping of str to float
            For the name of a layer or of a tensor, the factor on its forward and backward
            times, operations, elements and bytes.

        Returns
        -------
        LayerProfile
            Elements and bytes are rounded, and are at least 1. The optimizer step,
            ``update_s``, is one time for the whole network, and stays as it is.

        Raises
        ------
        UserError
            If there is no layer or tensor of a name, or if a factor is not above zero.
        """
        # The factors of a tensor's own name and of its layer's name are multiplied.
        factor_of_tensor = np.ones(len(self.tensor))
        for name, factor in factors.items():
            is_meant = self._tensors_named(name)
            if not 0 < factor < np.inf:
                raise UserError(
                    f"layer {name}: cannot be {factor:g} times as large: use one > 0"
                )
            factor_of_tensor[is_meant] *= factor
        # Larger numbers do not fit the integers to which they are rounded.
        sizes = np.maximum(self.parameters, self.gradient_bytes)
        largest = float(np.max(factor_of_tensor * sizes))
        if largest > MOST_WHOLE:
            raise UserError(
                f"a tensor would have {largest:.3g} elements or bytes, more than "
                f"{MOST_WHOLE:.0e}: use a smaller factor"
            )
        return replace(
            self,
            parameters=_at_least_1(factor_of_tensor * self.parameters),
            gradient_bytes=_at_least_1(factor_of_tensor * self.gradient_bytes),
            forward_s=factor_of_tensor * self.forward_s,
            backward_s=factor_of_tensor * self.backward_s,
            flops=factor_of_tensor * self.flops,
        )

    def _tensors_named(self, name: str) -> NDArray[np.bool_]:
        """Return whether a name is that of each tensor or of its layer, shape (n,).

        Raises UserError if there is no layer or tensor of this name.
        """
        layer_and_tensor = zip(self.layer, self.tensor, strict=True)
        is_meant = np.array([name in names for names in layer_and_tensor])
        if not is_meant.any():
            known_names = [*self.layer, *self.tensor]
            similar = difflib.get_close_matches(name, known_names, n=1)
            guess = f"did you mean {similar[0]!r}? Otherwise " if similar else ""
            # The examples are the layers of the first three tensors, each once.
            examples = ", ".join(dict.fromkeys(self.layer[:3]))
            raise UserError(
                f"no layer or tensor {name!r}: {guess}use one of the profile's, such "
                f"as {examples}"
            )
        return is_meant

    def workload(self) -> Workload:
        """Return the profile in ready order, the exact reverse of forward order."""
        # Backward computes the last layer first, so its gradient is ready first.
        return Workload(
            forward_s=float(self.forward_s.sum()),
            backward_s=self.backward_s[::-1],
            bytes=self.gradient_bytes[::-1],
            parameters=self.parameters[::-1],
            layer=self.layer[::-1],
            tensor=self.tensor[::-1],
            update_s=self.update_s,
            dtype=self.dtype[::-1],
        )


def _at_least_1(values: Floats) -> Ints:
    """Return values rounded to integers, but at least 1."""
    return np.maximum(1, np.rint(values)).astype(int)
