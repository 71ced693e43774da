"""omgs: equations of Shi et al., Merged Gradient Sparsification (INFOCOM 2020).

Here are Eqs 1-11, timelines of SGD, TopK-SGD and LAGS-SGD and what selecting and sending cost, and
Eqs 12-25, what merging a layer changes and the rule of Theorem 1. Beside them:

    algorithms   Algorithm 1 (which layers to merge), also as a planner; Algorithm 2 (what is sent when)
    optimality   the best of all mergings, and how near Algorithm 1 comes to it

Layers are numbered 1 to L as in the paper; arrays hold them in that (forward) order, layer l at index
l - 1. Where the paper prints something that cannot be meant, ``literal=True`` gives what it prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import DensityLog, SelectionCost
from ddlkit.core.workload import Workload
from ddlkit.papers import Paper

PAPER = Paper(
    "omgs",
    4,
    "Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs",
)
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def sgd_step(weights: ArrayLike, gradient: ArrayLike, learning_rate: float) -> Floats:
    """omgs Eq 1: W' = W - eta grad. Symbols: W = weights, eta = learning_rate."""
    return np.asarray(weights, float) - learning_rate * np.asarray(gradient, float)


def backward_start_s(
    forward_s: float, backward_s: ArrayLike, selection_s: ArrayLike = 0.0
) -> Floats:
    """omgs Eqs 2, 6: (L,) when each layer begins to compute its gradient.

    Symbols: t_f = forward_s, t_b = backward_s (L,), t_s = selection_s (L,); tau_b is the result.
    The paper's recursion from layer L down, with Eq 7 put in, is a running sum from the end.
    """
    spent = np.asarray(backward_s, float) + np.asarray(selection_s, float)
    return forward_s + np.cumsum(spent[::-1])[::-1] - spent


def sgd_iteration_s(forward_s: float, backward_s: ArrayLike) -> float:
    """omgs Eq 3: one worker's iteration, t_f + sum of t_b; the update is left out."""
    return forward_s + float(np.sum(backward_s))


def topk_iteration_s(
    forward_s: float, backward_s: ArrayLike, selection_s: float, communication_s: float
) -> float:
    """omgs Eq 4: nothing overlaps. Symbols: t_s = selection_s, t_c = communication_s."""
    return sgd_iteration_s(forward_s, backward_s) + selection_s + communication_s


def lags_iteration_s(
    forward_s: float, backward_s: ArrayLike, selection_s: ArrayLike, exposed_s: float
) -> float:
    """omgs Eq 5: computation, selection (L,), and the communication t_c^no = exposed_s that shows."""
    return sgd_iteration_s(forward_s, backward_s) + float(np.sum(selection_s)) + exposed_s


def selection_start_s(backward_start_s: ArrayLike, backward_s: ArrayLike) -> Floats:
    """omgs Eq 7: (L,) tau_s = tau_b + t_b."""
    return np.asarray(backward_start_s, float) + np.asarray(backward_s, float)


def communication_start_s(selection_end_s: ArrayLike, communication_s: ArrayLike) -> Floats:
    """omgs Eq 8: (L,) tau_c, a layer's message starts when it is selected and the last one is sent.

    Symbols: tau_s + t_s = selection_end_s, t_c = communication_s, both (L,).
    """
    selected, sent = np.asarray(selection_end_s, float), np.asarray(communication_s, float)
    start = selected.copy()
    for i in range(len(start) - 2, -1, -1):
        start[i] = max(selected[i], start[i + 1] + sent[i + 1])
    return start


def exposed_s(
    communication_start_s: ArrayLike,
    communication_s: ArrayLike,
    selection_start_s: ArrayLike,
    selection_s: ArrayLike,
    *,
    literal: bool = False,
) -> float:
    """omgs Eq 9: t_c^no, communication after layer 1 has been selected. All arguments (L,).

    Printed is tau_c + t_c - tau_s + t_s of layer 1; t_s must be subtracted with tau_s, else the
    selection of layer 1 counts twice too much.
    """
    end = np.asarray(communication_start_s, float)[0] + np.asarray(communication_s, float)[0]
    selecting = np.asarray(selection_s, float)[0]
    selected = np.asarray(selection_start_s, float)[0] + (-selecting if literal else selecting)
    return float(end - selected)


def selection_s(gamma: float, density: float, elements: ArrayLike) -> Any:
    """omgs Eq 10: time to select the largest k = density x elements, element by element.

    Symbols: rho = density, d = elements. The paper prints no base; its published code uses log2.
    Selecting from nothing is 0 x log 0, not a number.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return DensityLog(gamma)(elements, density)


def largest_gamma(seconds: float, density: float, elements: int) -> float:
    """omgs Eq 10 solved for gamma: the largest constant with which a selection ends in time."""
    return float(seconds / selection_s(1.0, density, elements))


def all_gather_s(alpha_s: float, beta_s: float, size: ArrayLike) -> Any:
    """omgs Eq 11: t_c = alpha + beta d.

    Symbols: alpha = alpha_s, beta = beta_s, d = size. ``size`` is in what beta_s is per: bytes as Eq 11
    says, gradients as Tab II and Section III have it.
    """
    seconds = alpha_s + beta_s * np.asarray(size, float)
    return float(seconds) if np.ndim(size) == 0 else seconds


@dataclass(frozen=True, eq=False)
class Instance:
    """A network and a cluster: all that a merging depends on.

    backward_s, elements : (L,) t_b and d of layers 1 to L; forward_s : t_f
    selection, density : t_s of a layer by its elements (Eq 10, or another cost)
    alpha_s, beta_s : Eq 11, per element

    Raises UserError for no layers, lengths that differ, and times or sizes that are not positive.
    """

    backward_s: Floats
    elements: Floats
    selection: SelectionCost
    alpha_s: float
    beta_s: float
    forward_s: float = 0.0
    density: float = 1.0

    def __post_init__(self) -> None:
        backward, elements = (np.array(v, float) for v in (self.backward_s, self.elements))
        if backward.ndim != 1 or backward.shape != elements.shape or not backward.size:
            raise UserError(
                f"{backward.size} backward times, {elements.size} sizes: give one each a layer"
            )
        if not (np.all(elements > 0) and np.all(backward >= 0) and np.isfinite(backward).all()):
            raise UserError("sizes of layers must be above zero and backward times at least zero")
        if min(self.alpha_s, self.beta_s, self.forward_s) < 0:
            raise UserError("alpha_s, beta_s and forward_s must be at least zero")
        object.__setattr__(self, "backward_s", backward)
        object.__setattr__(self, "elements", elements)

    @classmethod
    def of_workload(
        cls, workload: Workload, selection: SelectionCost, alpha_s: float, beta_s: float
    ) -> Instance:
        """A workload's tensors as layers; ``beta_s`` per element.

        >>> from ddlkit.core.sparse import Log
        >>> workload = Workload.from_arrays(0.01, [0.002, 0.003], [4_000_000, 40_000])
        >>> instance = Instance.of_workload(workload, Log(2.2e-10), alpha_s=0.004, beta_s=1e-9)
        >>> merged_iteration_s(instance, [[False, False], [False, True]]).round(4)
        array([0.0254, 0.0244])
        """
        backward_s, elements = workload.backward_s[::-1], workload.parameters[::-1].astype(float)
        return cls(backward_s, elements, selection, alpha_s, beta_s, workload.forward_s)

    @property
    def layers(self) -> int:
        """L."""
        return self.elements.size

    def selection_s(self, elements: ArrayLike) -> Floats:
        """(...,) seconds to select; 0 where there is nothing to select from."""
        present = np.asarray(elements, float)
        some = present > 0
        return np.where(some, self.selection(np.where(some, present, 2.0), self.density), 0.0)

    def communication_s(self, elements: ArrayLike) -> Floats:
        """(...,) seconds of a message (Eq 11); 0 where there is nothing to send."""
        present = np.asarray(elements, float)
        return np.where(present > 0, all_gather_s(self.alpha_s, self.beta_s, present), 0.0)


def selection_penalty_s(
    selection: SelectionCost, one: ArrayLike, other: ArrayLike, density: float = 1.0
) -> Floats:
    """omgs Eq 12 (with Eq 10, Eq 20): how much longer one selection from both takes than two.

    The paper's premise is that this is above zero. With t0 + b d it is -t0.
    """
    first, second = np.asarray(one, float), np.asarray(other, float)
    together = selection(first + second, density)
    return np.asarray(together - selection(first, density) - selection(second, density))


def merge(instance: Instance, merged: ArrayLike) -> Instance:
    """omgs Eqs 13-15: the network in which each merged layer is part of the normal layer before it.

    merged : (L,) truth of l_m. Layer 1 has none before it. Sizes add (Eq 14), backward of the layers
    runs without a selection between (Eq 15), merged layers neither select nor send (Eq 13).
    """
    flags = _flags(instance, merged)
    starts = np.flatnonzero(~flags)
    backward_s, elements = (
        np.add.reduceat(each, starts) for each in (instance.backward_s, instance.elements)
    )
    return replace(instance, backward_s=backward_s, elements=elements)


def combinations(layers: int) -> Bools:
    """omgs Eqs 16, 19: (2^(L-1), L) all choices of merged layers; layer 1 is always normal."""
    count = np.arange(2 ** (layers - 1))[:, None]
    free = (count >> np.arange(layers - 1)) & 1
    return np.concatenate([np.zeros_like(count, bool), free.astype(bool)], axis=1)


def merged_iteration_s(instance: Instance, merged: ArrayLike) -> Floats:
    """omgs Eq 17: (...,) iteration time tau_c(1) + t_c(1) of mergings (..., L).

    By Eqs 6-8 and 13-15, for many mergings at once: from layer L down, gradients gather until a normal
    layer selects from all of them and sends, after its selection and after the last message.
    """
    flags = _flags(instance, merged)
    compute_s = np.full(flags.shape[:-1], instance.forward_s)
    sent_s, pending = np.zeros_like(compute_s), np.zeros_like(compute_s)
    for layer in range(instance.layers - 1, -1, -1):
        pending = pending + instance.elements[layer]
        compute_s = compute_s + instance.backward_s[layer]
        sends = ~flags[..., layer]
        compute_s = compute_s + np.where(sends, instance.selection_s(pending), 0.0)
        end_s = np.maximum(sent_s, compute_s) + instance.communication_s(pending)
        sent_s = np.where(sends, end_s, sent_s)
        pending = np.where(sends, 0.0, pending)
    return sent_s


def objective_s(instance: Instance, *, literal: bool = False) -> float:
    """omgs Eq 18: what is minimised, for a network that has been merged and has two layers or more.

    Printed is max{tau_c(1) + t_c(1), tau_c(2) + t_c(2)} + t_c(1): Eq 17 plus t_c(1). With
    tau_s(1) + t_s(1) as the first term it is Eq 17.
    """
    _, _, selected, sending, sent = timeline(instance)
    first = sending[0] + sent[0] if literal else selected[0]
    return float(max(first, sending[1] + sent[1]) + sent[0])


def timeline(instance: Instance) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """omgs Eqs 6-8: (tau_b, tau_s, tau_s + t_s, tau_c, t_c), each (L,), when no layer is merged."""
    selecting = instance.selection_s(instance.elements)
    sent = instance.communication_s(instance.elements)
    begun = backward_start_s(instance.forward_s, instance.backward_s, selecting)
    computed = selection_start_s(begun, instance.backward_s)
    sending = communication_start_s(computed + selecting, sent)
    return begun, computed, computed + selecting, sending, sent


@dataclass(frozen=True)
class Candidate:
    """omgs Eqs 20-24: layer l and the one before it, of which Section IV-A asks whether to merge l.

    Symbols: tau_b(l) = backward_start_s, t_b(l) = backward_s, t_b(l-1) = previous_backward_s,
    tau_c(l) = communication_start_s, d(l) = elements, d(l-1) = previous_elements; instance holds
    gamma, rho, alpha and beta.
    """

    instance: Instance
    backward_start_s: float
    backward_s: float
    previous_backward_s: float
    communication_start_s: float
    elements: float
    previous_elements: float

    @property
    def u_s(self) -> float:
        """u(l): when both layers' gradients are computed, if nothing were selected between."""
        return self.backward_start_s + self.backward_s + self.previous_backward_s

    def _selecting(self, elements: float) -> float:
        return float(self.instance.selection_s(elements))

    @property
    def apart_s(self) -> float:
        """Time to select from the two layers one after the other."""
        return self._selecting(self.elements) + self._selecting(self.previous_elements)

    @property
    def together_s(self) -> float:
        """Time to select from both layers at once."""
        return self._selecting(self.elements + self.previous_elements)

    @property
    def free_s(self) -> float:
        """tau_c(l) + t_c(l): when the message of layer l has been sent."""
        instance = self.instance
        return self.communication_start_s + instance.alpha_s + instance.beta_s * self.elements

    def completion_s(self, line: int = 6) -> float:
        """mu(l-1), the end of layer l-1's message when l is normal, by one of the lines 2 to 6.

        Line 3 drops t_s(l-1), and line 4 has tau_b(l) where tau_b(l-1) is meant; 2, 5 and 6 agree.
        """
        own = self._selecting(self.elements)
        before = self._selecting(self.previous_elements)
        computed = self.backward_start_s + self.backward_s
        ready = {
            3: computed + own + self.previous_backward_s,
            4: self.backward_start_s + self.previous_backward_s + before,
        }.get(line, computed + own + self.previous_backward_s + before)
        instance = self.instance
        return max(ready, self.free_s) + instance.alpha_s + instance.beta_s * self.previous_elements

    @property
    def merged_completion_s(self) -> float:
        """mu~(l-1), the end of layer l-1's message when l is merged into it."""
        ready = max(self.u_s + self.together_s, self.communication_start_s)
        instance = self.instance
        return ready + instance.alpha_s + instance.beta_s * (self.elements + self.previous_elements)

    @property
    def gain_s(self) -> float:
        """t_gain = mu(l-1) - mu~(l-1): what merging layer l saves."""
        return self.completion_s() - self.merged_completion_s

    @property
    def q3(self) -> bool:
        """Q3: apart, the second message waits for the first. Its contrary is Q1."""
        return self.u_s + self.apart_s < self.free_s

    @property
    def q4(self) -> bool:
        """Q4: together, the message is selected before layer l's could have started."""
        return self.u_s + self.together_s < self.communication_start_s

    @property
    def q5(self) -> bool:
        """Q5: together, the message is selected within a start-up time after that."""
        return self.communication_start_s + self.instance.alpha_s > self.u_s + self.together_s

    def case_gain_s(self, *, literal: bool = False) -> float:
        """t_gain by case: C1 (Eq 21), C2 (Eq 22), or C3.

        literal : Eq 21 as printed, where gamma rho multiplies only the first of its three products.
        Raises UserError when the costs are not those of Eq 10, which alone says what a product is.
        """
        instance = self.instance
        if self.q3:
            if self.q4:
                return instance.alpha_s
            return self.communication_start_s + instance.alpha_s - self.u_s - self.together_s
        saved = self.apart_s - self.together_s
        if literal:
            unit = self._selecting(2.0) / 2.0  # gamma rho, as 2 log2 2 = 2
            if unit <= 0:
                raise UserError("Eq 21 needs the selection cost of Eq 10")
            bare = self._selecting(self.previous_elements) - self.together_s
            saved = self._selecting(self.elements) + bare / unit
        return saved - instance.beta_s * self.elements

    def rule(self, *, equation: int = 24) -> bool:
        """omgs Eq 23 or 24: whether layer l should be merged; the two say the same."""
        if equation == 23:
            return (self.q3 and self.q4) or (self.q3 and not self.q4 and self.q5)
        return self.q3 and self.q5


def candidate(instance: Instance, layer: int) -> Candidate:
    """Layer ``layer`` (2 to L) of a network in which no layer is merged."""
    begun, _, _, sending, _ = timeline(instance)
    i = layer - 1
    return Candidate(
        instance,
        float(begun[i]),
        float(instance.backward_s[i]),
        float(instance.backward_s[i - 1]),
        float(sending[i]),
        float(instance.elements[i]),
        float(instance.elements[i - 1]),
    )


def merge_by_theorem(instance: Instance) -> Bools:
    """omgs Eq 25, Theorem 1: (L,) merged layers, each judged in the network without merged layers."""
    rules = [candidate(instance, layer).rule() for layer in range(2, instance.layers + 1)]
    return np.array([False, *rules])


def _flags(instance: Instance, merged: ArrayLike) -> Bools:
    flags = np.asarray(merged, bool)
    if flags.shape[-1:] != (instance.layers,) or np.any(flags[..., 0]):
        raise UserError(
            f"merging of shape {flags.shape}: needs {instance.layers} layers, the first not merged"
        )
    return flags
