"""The equations of the omgs paper: merged gradient sparsification (INFOCOM 2020).

Layers are numbered 1 to L as in the paper, and arrays hold layer l at index l - 1. The
backward pass begins with layer L. Each layer's backward is followed by the selection of
its largest gradients, unless the layer is merged with the one before it in the network.
Symbols of the paper: t_f and t_b are the forward and the backward pass, t_s is selection,
t_c is communication, tau_x is the start of what t_x takes, d is a number of elements, and
rho is the density, which is the share of the elements that is selected.

Some equations cannot be meant as they are printed. With ``literal=True`` a function
computes what the paper prints. LAGS-SGD, which merges nothing, is the planner ``none``,
and TopK-SGD, which merges everything, is the planner ``single``.

References
----------
omgs : S. Shi, Q. Wang, X. Chu, B. Li, Y. Qin, R. Liu and X. Zhao, "Communication-Efficient
    Distributed Deep Learning with Merged Gradient Sparsification on GPUs", INFOCOM 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Log,
    Selecting,
    SparseGather,
    sparse_iteration,
)
from ddlkit.core.workload import Floats, Workload
from workbook.common import networks
from workbook.common.papers import published_code

Bools = NDArray[np.bool_]

# -- one iteration without merged layers ---------------------------------------------


def sgd_step(weights: ArrayLike, gradient: ArrayLike, learning_rate: float) -> Floats:
    """Return the weights after one step of SGD (omgs Eq 1).

    Parameters
    ----------
    weights : array_like
        The weights W.
    gradient : array_like
        The gradient at these weights, of the shape of the weights.
    learning_rate : float
        The learning rate eta.

    Returns
    -------
    ndarray
        The new weights W', of the shape of the weights.

    Notes
    -----
    W' = W - eta grad

    Examples
    --------
    >>> sgd_step([1.0, 2.0], [0.5, -1.0], learning_rate=0.5).tolist()
    [0.75, 2.5]
    """
    return np.asarray(weights, float) - learning_rate * np.asarray(gradient, float)


def iteration_s(
    forward_s: float,
    backward_s: ArrayLike,
    selection_s: ArrayLike = 0.0,
    exposed_s: float = 0.0,
) -> float:
    """Return the iteration of one worker (omgs Eq 3), or of LAGS-SGD (Eq 5).

    Parameters
    ----------
    forward_s : float
        The forward pass t_f of all layers, in seconds.
    backward_s : array_like, shape (L,)
        The backward pass t_b of each layer, in seconds.
    selection_s : array_like, shape (L,), optional
        The selection t_s of each layer, in seconds. One worker selects nothing (Eq 3).
    exposed_s : float, optional
        The communication t_c^no that nothing hides, in seconds. One worker has none.

    Returns
    -------
    float
        The iteration in seconds.

    Notes
    -----
    t_iter = t_f + sum over l of (t_b^(l) + t_s^(l)) + t_c^no
    """
    return forward_s + float(np.sum(backward_s) + np.sum(selection_s)) + exposed_s


def backward_start_s(
    forward_s: float, backward_s: ArrayLike, selection_s: ArrayLike = 0.0
) -> Floats:
    """Return when the backward pass of each layer starts (omgs Eqs 2, 6).

    Parameters
    ----------
    forward_s : float
        The forward pass t_f of all layers, in seconds.
    backward_s : array_like, shape (L,)
        The backward pass t_b of each layer, in seconds.
    selection_s : array_like, shape (L,), optional
        The selection t_s of each layer, in seconds. Without selection this is Eq 2.

    Returns
    -------
    ndarray, shape (L,)
        tau_b in seconds from the start of the forward pass.

    Notes
    -----
    tau_b^(L) = t_f and tau_b^(l) = tau_s^(l+1) + t_s^(l+1),

    where tau_s^(l+1) = tau_b^(l+1) + t_b^(l+1) by Eq 7.
    """
    spent_s = np.asarray(backward_s, float) + np.asarray(selection_s, float)
    # The sum over all layers from L down to l ends after layer l, so that its own time
    # is taken off again.
    return forward_s + np.cumsum(spent_s[::-1])[::-1] - spent_s


def topk_iteration_s(
    forward_s: float, backward_s: ArrayLike, selection_s: float, communication_s: float
) -> float:
    """Return the iteration of TopK-SGD, in which nothing overlaps (omgs Eq 4).

    Parameters
    ----------
    forward_s : float
        The forward pass t_f of all layers, in seconds.
    backward_s : array_like, shape (L,)
        The backward pass t_b of each layer, in seconds.
    selection_s : float
        The selection t_s from all gradients at once, in seconds.
    communication_s : float
        The communication t_c of all selected gradients, in seconds.

    Returns
    -------
    float
        The iteration in seconds.

    Notes
    -----
    t_iter = t_f + sum over l of t_b^(l) + t_s + t_c
    """
    return iteration_s(forward_s, backward_s, selection_s, communication_s)


def selection_start_s(backward_start_s: ArrayLike, backward_s: ArrayLike) -> Floats:
    """Return when the selection of each layer starts (omgs Eq 7).

    Parameters
    ----------
    backward_start_s : array_like, shape (L,)
        The start tau_b of each layer's backward pass, in seconds.
    backward_s : array_like, shape (L,)
        The backward pass t_b of each layer, in seconds.

    Returns
    -------
    ndarray, shape (L,)
        tau_s in seconds.

    Notes
    -----
    tau_s^(l) = tau_b^(l) + t_b^(l)
    """
    return np.asarray(backward_start_s, float) + np.asarray(backward_s, float)


def communication_start_s(selection_end_s: Floats, communication_s: Floats) -> Floats:
    """Return when the communication of each layer starts (omgs Eq 8).

    Parameters
    ----------
    selection_end_s : ndarray, shape (L,)
        When each layer has been selected from, tau_s + t_s, in seconds.
    communication_s : ndarray, shape (L,)
        The communication t_c of each layer, in seconds.

    Returns
    -------
    ndarray, shape (L,)
        tau_c in seconds.

    Notes
    -----
    tau_c^(L) = tau_s^(L) + t_s^(L), and for every other layer

    tau_c^(l) = max(tau_c^(l+1) + t_c^(l+1), tau_s^(l) + t_s^(l))
    """
    # Lists, because single elements of an array are slow.
    start_s = selection_end_s.tolist()
    sent_s = communication_s.tolist()
    for i in range(len(start_s) - 2, -1, -1):
        link_free_s = start_s[i + 1] + sent_s[i + 1]
        start_s[i] = max(start_s[i], link_free_s)
    return np.array(start_s)


def selection_s(gamma: float, density: float, elements: ArrayLike) -> Any:
    """Return the time to select the largest gradients of a layer (omgs Eq 10).

    Parameters
    ----------
    gamma : float
        The seconds gamma of one step of the selection.
    density : float
        The density rho.
    elements : array_like
        The number d of gradients of each layer, of any shape.

    Returns
    -------
    float or ndarray, shape of ``elements``
        t_s in seconds, which is NaN for no elements.

    Notes
    -----
    t_s = gamma rho d log d, where log is log2, as in the authors' published code
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.asarray(elements, float)
        return gamma * density * size * np.log2(size)


# -- merged layers -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Instance:
    """A network and a cluster: everything on which the choice of merged layers depends.

    Attributes
    ----------
    backward_s : ndarray, shape (L,)
        The backward pass t_b of each layer, in seconds.
    elements : ndarray, shape (L,)
        The number d of gradients of each layer.
    selection : callable
        The time t_s of a selection in seconds, by elements and density (Eq 10, or
        another cost).
    alpha_s : float
        The start-up alpha of a message, in seconds (Eq 11).
    beta_s : float
        The time beta of an element in a message, in seconds (Eq 11).
    forward_s : float
        The forward pass t_f of all layers, in seconds.
    density : float
        The density rho.
    """

    backward_s: Floats
    elements: Floats
    selection: Selecting
    alpha_s: float
    beta_s: float
    forward_s: float = 0.0
    density: float = 1.0

    @property
    def layers(self) -> int:
        """Return the number L of layers."""
        return self.elements.size

    def selection_s(self, elements: ArrayLike) -> Floats:
        """Return the time to select from layers, in seconds.

        Parameters
        ----------
        elements : array_like
            The number of gradients of each layer, of any shape.

        Returns
        -------
        ndarray, shape of ``elements``
            t_s, which is 0 where there is nothing to select from.
        """
        sizes = np.asarray(elements, float)
        is_present = sizes > 0
        # The cost may take a logarithm, so that it is never asked for 0 elements. The size 2
        # stands in for them, and its price is not used.
        priced = self.selection(np.where(is_present, sizes, 2.0), self.density)
        return np.where(is_present, priced, 0.0)

    def communication_s(self, elements: ArrayLike) -> Floats:
        """Return the time of messages in seconds (omgs Eq 11).

        Parameters
        ----------
        elements : array_like
            The number of elements of each message, of any shape.

        Returns
        -------
        ndarray, shape of ``elements``
            t_c, which is 0 where there is nothing to send.

        Notes
        -----
        t_c = alpha + beta d
        """
        sizes = np.asarray(elements, float)
        return np.where(sizes > 0, self.alpha_s + self.beta_s * sizes, 0.0)


def merge(instance: Instance, merged: ArrayLike) -> Instance:
    """Return the network in which merged layers are part of normal layers (omgs Eqs 13-15).

    Parameters
    ----------
    instance : Instance
        A network of L layers.
    merged : array_like of bool, shape (L,)
        Whether each layer l is a merged layer l_m, else it is normal. Layer 1 is always
        normal.

    Returns
    -------
    Instance
        The network whose layers are the normal layers. Each has the merged layers that
        follow it.

    Notes
    -----
    A merged layer neither selects nor sends (Eq 13). Its elements are added to those of
    the layer before it (Eq 14). The backward pass of that layer starts at once, because
    there is no selection between (Eq 15).
    """
    # Each sum goes from a normal layer up to the next normal one.
    normal_layers = np.flatnonzero(~np.asarray(merged, bool))
    return replace(
        instance,
        backward_s=np.add.reduceat(instance.backward_s, normal_layers),
        elements=np.add.reduceat(instance.elements, normal_layers),
    )


def combinations(layers: int) -> Bools:
    """Return all choices of merged layers (omgs Eqs 16, 19).

    A layer is merged with the one before it, or normal.

    Parameters
    ----------
    layers : int
        The number L of layers.

    Returns
    -------
    ndarray of bool, shape (2^(L-1), L)
        A choice a row: whether each layer is merged. Layer 1, which has none before it, is
        always normal.

    Examples
    --------
    >>> combinations(3).astype(int).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    """
    # The bits of the number of a row say which layers above the first are merged.
    rows = np.arange(2 ** (layers - 1))[:, None]
    bits = (rows >> np.arange(layers - 1)) & 1
    return np.concatenate([np.zeros_like(rows, bool), bits.astype(bool)], axis=1)


def merged_iteration_s(instance: Instance, merged: ArrayLike) -> Floats:
    """Return the iteration under each of several choices of merged layers (omgs Eq 17).

    Parameters
    ----------
    instance : Instance
        A network of L layers.
    merged : array_like of bool, shape (..., L)
        Which layers are merged. Leading axes are choices.

    Returns
    -------
    ndarray, shape (...)
        Iterations in seconds.

    Notes
    -----
    t_iter = tau_c^(1) + t_c^(1), by Eqs 6-8 and 13-15
    """
    is_merged = np.asarray(merged, bool)
    # When all that is computed and selected so far ends, and when the last message does.
    compute_s = np.full(is_merged.shape[:-1], instance.forward_s)
    sent_s = np.zeros_like(compute_s)
    # The elements that wait to be sent with a normal layer.
    pending = np.zeros_like(compute_s)
    for layer in range(instance.layers - 1, -1, -1):
        pending = pending + instance.elements[layer]
        compute_s = compute_s + instance.backward_s[layer]
        sends = ~is_merged[..., layer]
        compute_s = compute_s + np.where(sends, instance.selection_s(pending), 0.0)
        end_s = np.maximum(sent_s, compute_s) + instance.communication_s(pending)
        sent_s = np.where(sends, end_s, sent_s)
        pending = np.where(sends, 0.0, pending)
    return sent_s


def timeline(instance: Instance) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the times of all layers if no layer is merged (omgs Eqs 2, 6-8).

    Parameters
    ----------
    instance : Instance
        A network of L layers. If its selections take no time, this is Eq 2.

    Returns
    -------
    backward_start, selection_start, communication_start, communication : ndarray
        tau_b, tau_s, tau_c and t_c of each layer, all of shape (L,), in seconds.
    """
    selecting_s = instance.selection_s(instance.elements)
    sent_s = instance.communication_s(instance.elements)
    begun_s = backward_start_s(instance.forward_s, instance.backward_s, selecting_s)
    computed_s = selection_start_s(begun_s, instance.backward_s)
    sending_s = communication_start_s(computed_s + selecting_s, sent_s)
    return begun_s, computed_s, sending_s, sent_s


def exposed_s(instance: Instance, *, literal: bool = False) -> float:
    """Return the communication after the selection from layer 1 (omgs Eq 9).

    Parameters
    ----------
    instance : Instance
        A network in which no layer is merged.
    literal : bool, optional
        Whether to compute what is printed, where the sign of t_s^(1) is wrong.

    Returns
    -------
    float
        t_c^no in seconds.

    Notes
    -----
    Printed: t_c^no = tau_c^(1) + t_c^(1) - tau_s^(1) + t_s^(1)

    Repaired: t_c^no = tau_c^(1) + t_c^(1) - (tau_s^(1) + t_s^(1))
    """
    _, computed_s, sending_s, sent_s = timeline(instance)
    selecting_s = float(instance.selection_s(instance.elements[0]))
    if literal:
        selecting_s = -selecting_s
    selected_s = computed_s[0] + selecting_s
    return float(sending_s[0] + sent_s[0] - selected_s)


def objective_s(instance: Instance, *, literal: bool = False) -> float:
    """Return what the choice of merged layers minimises (omgs Eq 18).

    Parameters
    ----------
    instance : Instance
        A network that has been merged and has two layers or more.
    literal : bool, optional
        Whether to compute what is printed, where the first term is wrong.

    Returns
    -------
    float
        The objective in seconds. Repaired, it is the iteration of Eq 17.

    Notes
    -----
    Printed: max(tau_c^(1) + t_c^(1), tau_c^(2) + t_c^(2)) + t_c^(1)

    Repaired: max(tau_s^(1) + t_s^(1), tau_c^(2) + t_c^(2)) + t_c^(1)
    """
    _, computed_s, sending_s, sent_s = timeline(instance)
    if literal:
        first_s = sending_s[0] + sent_s[0]
    else:
        first_s = computed_s[0] + instance.selection_s(instance.elements[0])
    return float(max(first_s, sending_s[1] + sent_s[1]) + sent_s[0])


# -- which layers to merge -----------------------------------------------------------


class Candidates:
    """Whether to merge each layer with the one before it (omgs Eqs 12, 20-24).

    Each layer l from 2 to L is judged with layer l - 1, while no other layer is merged
    (Section IV-A).

    Parameters
    ----------
    instance : Instance
        A network of L layers.

    Attributes
    ----------
    instance : Instance
        The network.
    elements : ndarray, shape (L-1,)
        The elements d^(l).
    u_s : ndarray, shape (L-1,)
        u^(l), when the gradients of both layers would be computed if there were no
        selection between, in seconds.
    own_s : ndarray, shape (L-1,)
        The selection t_s^(l) from layer l, in seconds.
    before_s : ndarray, shape (L-1,)
        The selection t_s^(l-1) from the layer before, in seconds.
    together_s : ndarray, shape (L-1,)
        The selection from both layers at once, in seconds. By Eqs 12 and 20 it is longer
        than ``own_s`` and ``before_s``.
    sending_s : ndarray, shape (L-1,)
        tau_c^(l), when the message of layer l starts, in seconds.
    free_s : ndarray, shape (L-1,)
        tau_c^(l) + t_c^(l), when this message has been sent, in seconds.
    q3 : ndarray of bool, shape (L-1,)
        Whether, apart, the second message waits for the first. The contrary is Q1.
    q4 : ndarray of bool, shape (L-1,)
        Whether, together, both layers are selected from before ``sending_s``.
    q5 : ndarray of bool, shape (L-1,)
        Whether, together, both layers are selected from less than a start-up alpha after
        ``sending_s``.
    """

    def __init__(self, instance: Instance) -> None:
        _, computed_s, sending_s, sent_s = timeline(instance)
        elements = instance.elements
        selecting_s = instance.selection_s(elements)
        self.instance = instance
        # [1:] are the layers l from 2 to L, and [:-1] are the layers l - 1 before them.
        self.elements = elements[1:]
        self.u_s = computed_s[1:] + instance.backward_s[:-1]
        self.own_s = selecting_s[1:]
        self.before_s = selecting_s[:-1]
        self.together_s = instance.selection_s(elements[1:] + elements[:-1])
        self.sending_s = sending_s[1:]
        self.free_s = sending_s[1:] + sent_s[1:]

        apart_ready_s = self.u_s + self.own_s + self.before_s
        together_ready_s = self.u_s + self.together_s
        self.q3: Bools = apart_ready_s < self.free_s
        self.q4: Bools = together_ready_s < self.sending_s
        self.q5: Bools = self.sending_s + instance.alpha_s > together_ready_s

    def completion_s(self, line: int = 6) -> Floats:
        """Return when the message of layer l - 1 ends if layer l is normal.

        Parameters
        ----------
        line : int, optional
            By which line of the paper's derivation, 2 to 6. Line 3 drops t_s^(l-1), and
            line 4 has tau_b^(l) where tau_b^(l-1) is meant. The other lines agree.

        Returns
        -------
        ndarray, shape (L-1,)
            mu^(l-1) in seconds.

        Notes
        -----
        mu^(l-1) = max(u^(l) + t_s^(l) + t_s^(l-1), tau_c^(l) + t_c^(l)) + t_c^(l-1)
        """
        ready_s = self.u_s + self.own_s + self.before_s
        if line == 3:
            ready_s = ready_s - self.before_s
        # Backward of layer l - 1 starts t_b^(l) + t_s^(l) after that of layer l.
        if line == 4:
            ready_s = ready_s - self.own_s - self.instance.backward_s[1:]
        sent_s = self.instance.communication_s(self.instance.elements[:-1])
        return np.maximum(ready_s, self.free_s) + sent_s

    @property
    def gain_s(self) -> Floats:
        """Return how much earlier layer l - 1's message ends if l is merged.

        Returns
        -------
        ndarray, shape (L-1,)
            t_gain = mu^(l-1) - mu~^(l-1) in seconds, where mu~ is the end with l merged.
        """
        ready_s = np.maximum(self.u_s + self.together_s, self.sending_s)
        both = self.elements + self.instance.elements[:-1]
        together_end_s = ready_s + self.instance.communication_s(both)
        return self.completion_s() - together_end_s

    @property
    def gamma_rho_s(self) -> float:
        """Return gamma rho of Eq 10, in seconds.

        Selecting from two elements takes gamma rho 2 log2 2, which is 2 gamma rho.
        """
        return float(self.instance.selection_s(2.0)) / 2.0

    def case_gain_s(self, *, literal: bool = False) -> Floats:
        """Return the gain of merging by the paper's case distinction (omgs Eqs 21, 22).

        Parameters
        ----------
        literal : bool, optional
            Whether to compute Eq 21 as printed, where gamma rho is a factor of the first
            product only.

        Returns
        -------
        ndarray, shape (L-1,)
            t_gain in seconds.

        Notes
        -----
        C1, the backward pass hides the first message (not Q3, Eq 21). With d for d^(l),
        and e for d^(l-1):

        Printed: gamma rho d log d + e log e - (d + e) log(d + e) - beta d

        Repaired: gamma rho (d log d + e log e - (d + e) log(d + e)) - beta d,
        which is t_s^(l) + t_s^(l-1) - t_s(d^(l) + d^(l-1)) - beta d^(l)

        C2, communication is the bottleneck both ways (Q3 and Q4, Eq 22): alpha

        C3, all other layers: tau_c^(l) + alpha - u^(l) - t_s(d^(l) + d^(l-1))
        """
        instance = self.instance
        selecting_less_s = self.own_s + self.before_s - self.together_s
        if literal:
            # All three selections hold the factor gamma rho. As printed, only the first
            # one has it.
            without_factor = (self.before_s - self.together_s) / self.gamma_rho_s
            selecting_less_s = self.own_s + without_factor
        c1_gain_s = selecting_less_s - instance.beta_s * self.elements
        c2_gain_s = instance.alpha_s
        c3_gain_s = self.sending_s + instance.alpha_s - self.u_s - self.together_s
        c2_or_c3_gain_s = np.where(self.q4, c2_gain_s, c3_gain_s)
        return np.where(self.q3, c2_or_c3_gain_s, c1_gain_s)

    def rule(self, *, equation: int = 24) -> Bools:
        """Return whether each layer should be merged (omgs Eq 23 or 24).

        Parameters
        ----------
        equation : {23, 24}, optional
            By which equation. Both say the same.

        Returns
        -------
        ndarray of bool, shape (L-1,)
            Whether to merge layer l, for l from 2 to L.

        Notes
        -----
        Eq 23: (Q3 and Q4) or (Q3 and not Q4 and Q5)

        Eq 24: Q3 and Q5
        """
        if equation == 23:
            return (self.q3 & self.q4) | (self.q3 & ~self.q4 & self.q5)
        return self.q3 & self.q5


def merge_by_theorem(instance: Instance) -> Bools:
    """Return the merged layers of Theorem 1 (omgs Eq 25).

    Parameters
    ----------
    instance : Instance
        A network of L layers.

    Returns
    -------
    ndarray of bool, shape (L,)
        Whether each layer is merged. Each is judged in the network without merged layers.
    """
    # Layer 1 has no layer before it, and is never merged.
    return np.array([False, *Candidates(instance).rule()])


PUBLISHED_GAMMA_S = 2.2e-10
"""The gamma of the authors' published code, whose selection takes gamma d log2 d."""
COUNTEREXAMPLE = Instance(
    backward_s=np.ones(3),
    elements=np.full(3, 2.0),
    selection=Log(1.0),
    alpha_s=8.0,
    beta_s=1.0,
)
"""Three equal layers for which Algorithm 1 is not optimal (errata, entry 12)."""

REPAIRS = frozenset({"log0", "alpha", "index"})
"""What Algorithm 1 needs to do what its text says. Without all three it is as printed.

log0
    A merged layer selects for no time. Line 16 would compute 0 x log 0.
alpha
    A merged layer pays no alpha. Lines 12 and 22 would let it pay alpha again.
index
    Line 32 takes the backward time of layer L. Printed is tb[l], where l is 1 after the
    loop above."""


def find_merged_layers(
    instance: Instance, repairs: frozenset[str] = REPAIRS, *, by_code: bool = False
) -> Bools:
    """Return the merged layers that omgs Algorithm 1 finds.

    Parameters
    ----------
    instance : Instance
        A network of L layers.
    repairs : frozenset of str, optional
        Which of REPAIRS to make. Without any, the algorithm is as printed, and every
        comparison with NaN is false.
    by_code : bool, optional
        Whether to follow the authors' published code. There a layer is merged when its
        message waits less than a start-up, which leaves out Q3, and t_s^(l-1) out of Q5.
        Layer L is always merged without a test.

    Returns
    -------
    ndarray of bool, shape (L,)
        Whether each layer is merged.

    Notes
    -----
    Layers are judged from L down to 2. The paper computes all times anew after each
    merged layer, in O(L^2). This function takes O(L), because the next judgement needs
    only the times of one layer.
    """
    layers = _MergingLayers(instance)
    alpha_s = instance.alpha_s
    last = instance.layers - 1
    merged = np.zeros(instance.layers, bool)

    # The times of the layer that is judged (lines 17-36): when its backward pass begins
    # and ends, and when the link is free for its message. They count from the start of the
    # backward pass, at which nothing has been sent.
    begun_s = 0.0
    link_free_s = -np.inf
    # As printed, line 32 reads the backward time of layer 1 instead of layer L.
    layer_read = last if "index" in repairs else 0
    computed_s = layers.backward_s[layer_read]
    for i in range(last, 0, -1):
        selecting_s = layers.selecting_s[i]
        sent_s = layers.sent_s[i]
        # The order of the arguments matters for NaN, which `max` keeps if it comes first.
        sending_s = max(computed_s + selecting_s, link_free_s)

        before_s = layers.selecting_s[i - 1]
        both_computed_s = begun_s + layers.backward_s[i] + layers.backward_s[i - 1]
        apart_ready_s = both_computed_s + selecting_s + before_s
        together_ready_s = both_computed_s + layers.together_s[i]
        started_s = sending_s + alpha_s
        if by_code and i == last:
            # The code marks layer L as merged and leaves its numbers as they are.
            merged[i] = True
            joins = False
        elif by_code:
            joins = together_ready_s - before_s < started_s
        else:
            # These are Q3 and Q5 of Eq 24. With beta d, the start of the message and alpha
            # make its end.
            waits = apart_ready_s < started_s + instance.beta_s * layers.size[i]
            joins = waits and started_s > together_ready_s

        if joins:
            merged[i] = True
            layers.join(i)
            # The backward pass of layer i is a part of that of layer i - 1 now.
            computed_s = begun_s
            # As printed, line 32 adds the backward time of layer 1, whatever layer is judged.
            if "index" not in repairs:
                computed_s += layers.backward_s[0]
            # A merged layer neither selects nor sends. As printed, it selects for 0 x log 0,
            # which is NaN, and pays a start-up.
            sending_s = max(computed_s, link_free_s)
            selecting_s = 0.0 if "log0" in repairs else np.nan
            sent_s = 0.0 if "alpha" in repairs else alpha_s
        begun_s = computed_s + selecting_s
        link_free_s = sending_s + sent_s
        computed_s = begun_s + layers.backward_s[i - 1]
    return merged


class _MergingLayers:
    """The layers of a network while Algorithm 1 merges them.

    Attributes
    ----------
    backward_s, selecting_s, sent_s : list of float, length L
        The backward pass, the selection and the message of each layer, in seconds, with
        the layers that have joined it.
    size : list of float, length L
        The elements of each layer, with the layers that have joined it.
    together_s : list of float, length L
        The selection from each layer and the one before it at once, in seconds. The first
        number means nothing.
    """

    def __init__(self, instance: Instance) -> None:
        elements = instance.elements
        pair_s = instance.selection_s(elements[1:] + elements[:-1])
        self.instance = instance
        # Lists, because single elements of an array are slow.
        self.backward_s: list[float] = instance.backward_s.tolist()
        self.size: list[float] = elements.tolist()
        self.selecting_s: list[float] = instance.selection_s(elements).tolist()
        self.together_s: list[float] = [0.0, *pair_s.tolist()]
        self.sent_s: list[float] = instance.communication_s(elements).tolist()

    def join(self, i: int) -> None:
        """Let the layer at index ``i`` join the one before it."""
        instance = self.instance
        self.backward_s[i - 1] += self.backward_s[i]
        self.size[i - 1] += self.size[i]
        self.selecting_s[i - 1] = self.together_s[i]
        self.sent_s[i - 1] = instance.alpha_s + instance.beta_s * self.size[i - 1]
        # If there is a layer before the joined ones, both are the next pair to be judged.
        if i > 1:
            next_pair = np.float64(self.size[i - 1] + self.size[i - 2])
            next_pair_s = instance.selection(next_pair, instance.density)
            self.together_s[i - 1] = float(next_pair_s)


def of_planning(
    workload: Workload, cost: MessageCost, gamma_s: float | None = None
) -> Instance:
    """Return the instance for which Algorithm 1 plans, with the costs of omgs Eqs 10, 11.

    Parameters
    ----------
    workload : Workload
        One iteration of the network.
    cost : MessageCost
        The time of a message, and of a selection if the cost has one.
    gamma_s : float, optional
        The gamma of a selection that takes gamma d log2 d. By default the selection is
        the one of ``cost``, or that of PUBLISHED_GAMMA_S if ``cost`` has none.

    Returns
    -------
    Instance
        Its alpha and beta are those of the line through two costs: of the smallest
        gradient, and of all gradients together.
    """
    smallest_bytes = float(workload.bytes.min())
    all_bytes = float(workload.bytes.sum())
    # The costs of a table may fall with the size, or rise so steeply that the line through
    # them would start below 0. Neither alpha nor beta is negative.
    growth_s = max(0.0, cost(all_bytes) - cost(smallest_bytes))
    # With one gradient both sizes are equal.
    s_per_byte = growth_s / max(all_bytes - smallest_bytes, 1.0)
    alpha_s = max(0.0, cost(smallest_bytes) - s_per_byte * smallest_bytes)
    # Eq 11 counts elements, which may have several bytes.
    beta_s = s_per_byte * all_bytes / float(workload.parameters.sum())
    selection: Selecting = Log(PUBLISHED_GAMMA_S)
    density = 1.0
    if gamma_s is not None:
        selection = Log(gamma_s)
    elif isinstance(cost, SparseGather) and cost.selecting:
        selection = cost.selecting
        density = cost.density
    # A workload is in ready order, which begins with layer L, and an instance with layer 1.
    return Instance(
        backward_s=workload.backward_s[::-1],
        elements=workload.parameters[::-1].astype(float),
        selection=selection,
        alpha_s=alpha_s,
        beta_s=beta_s,
        forward_s=workload.forward_s,
        density=density,
    )


def plan_of(merged: Bools, name: str) -> FusionPlan:
    """Return the fusion plan of a choice of merged layers.

    Parameters
    ----------
    merged : ndarray of bool, shape (L,)
        Whether each layer is fused with the one before it in the network.
    name : str
        The name of the plan.
    """
    # In ready order, the reverse of the network's, a normal layer ends its group.
    is_last_of_group = ~merged[::-1]
    ends = np.flatnonzero(is_last_of_group) + 1
    return FusionPlan(name, tuple(ends.tolist()))


def messages(merged: Bools, *, literal: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return which layers each message has (omgs Algorithm 2).

    Parameters
    ----------
    merged : ndarray of bool, shape (L,)
        Whether each layer is merged.
    literal : bool, optional
        Whether to follow the algorithm as printed, where nothing pushes the gradient of
        a normal layer into the buffer.

    Returns
    -------
    tuple of tuple of int
        The layers, numbered from 1, of each message in the order of sending. A normal
        layer sends what merged layers have pushed (lines 15-28).

    Examples
    --------
    >>> messages(np.array([False, True, False]))
    ((3,), (2, 1))
    """
    sent: list[tuple[int, ...]] = []
    buffer: list[int] = []
    for layer in range(len(merged), 0, -1):
        is_merged = merged[layer - 1]
        if is_merged or not literal:
            buffer.append(layer)
        if not is_merged:
            sent.append(tuple(buffer))
            buffer.clear()
    return tuple(sent)


def merge_up_to(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """Return the sizes of the merged layers of MGS-SGD (omgs V-D).

    Parameters
    ----------
    parameters : iterable of int
        The elements of each layer in ready order.
    threshold : int
        From how many elements on the pending layers are sent.

    Returns
    -------
    tuple of int
        The elements of each message. The last one has what remains.

    Examples
    --------
    >>> merge_up_to([10, 5, 5, 3], threshold=10)
    (10, 10, 3)
    """
    merged = []
    pending = 0
    for size in parameters:
        pending += size
        if pending >= threshold:
            merged.append(pending)
            pending = 0
    if pending:
        merged.append(pending)
    return tuple(merged)


# -- what the paper leaves open of its networks --------------------------------------

LSTM = "LSTM-PTB"
NETWORKS = {
    "VGG-16": "vgg16_cifar",
    "ResNet-50": "ResNet50",
    "Inception-v4": "inception_v4",
    LSTM: "lstm_ptb",
}
"""The four networks of omgs Tab V, and the names under which their layers are listed."""
PLANS = {
    "TopK": "single",
    "LAGS": "none",
    "MGS": "mgs:8192",
    "OMGS": "omgs",
    "exact": "exact",
}
"""The planner of each algorithm. OMGS has two: Algorithm 1, and the published code."""
PARTS = ("forward", "backward", "selection", "exposed")
"""The parts of an iteration (omgs Fig 4)."""
UNITS = (1024, 1280, 1500, 1750, 2047)
"""The units of the LSTM that are tried. The messages of MGS-SGD in Tab V agree with 1,024
to 2,047 units, and the published code has 1,500."""


def published_cost(workers: int, density: float) -> SparseGather:
    """Return the cost of a sparse exchange as the authors' code has it, on 1 Gbit/s.

    Parameters
    ----------
    workers : {2, 4, 8, 16}
        The number of workers.
    density : float
        The density rho.

    Returns
    -------
    SparseGather
        A selection takes gamma d log2 d, and an all-gather alpha + beta d.
    """
    code = published_code("omgs")
    gather = AlphaBeta(
        code[f"alpha-{workers}"],
        code[f"beta-{workers}"],
        collective="all_gather",
        workers=workers,
    )
    return SparseGather(gather, density, selecting=Log(code["gamma"]))


@dataclass(frozen=True)
class Setting:
    """The unstated settings of one network's iteration on the paper's cluster.

    Attributes
    ----------
    network : str
        One of NETWORKS.
    compute_s : float
        The forward and the backward pass, t_f + t_b, in seconds.
    backward : float
        The share of ``compute_s`` that is the backward pass.
    even : float
        The share of the backward pass that all layers have alike. The rest is divided by
        multiply-adds.
    units : int
        The units of the LSTM.
    """

    network: str
    compute_s: float
    backward: float = 2 / 3
    even: float = 0.0
    units: int = 1500

    def workload(self) -> Workload:
        """Return one iteration, in which the tensors of a layer become ready together."""
        sizes, by_work, alike = _shape(self.network, self.units)
        backward_s = self.compute_s * self.backward
        shares = (1 - self.even) * by_work + self.even * alike
        return Workload.from_arrays(
            self.compute_s - backward_s, backward_s * shares, ELEMENT_BYTES * sizes
        )


@cache
def _shape(network: str, units: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the tensors of a network in ready order.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    units : int
        The units of the LSTM. They do not matter for the other networks.

    Returns
    -------
    sizes : ndarray of int, shape (n,)
        The elements of each tensor.
    by_work, alike : ndarray, shape (n,)
        The share of each tensor in the backward pass, by the multiply-adds of its layer,
        and if all layers take the same time. The tensors of a layer become ready
        together, so that the first has the share of the layer, and the others have none.
    """
    if network == LSTM:
        layers = tuple(networks.ptb_lstm(units))
    else:
        layers = networks.layers(NETWORKS[network])
    multiply_adds = sum(layer.multiply_adds for layer in layers)
    sizes: list[int] = []
    by_work: list[float] = []
    alike: list[float] = []
    for layer in reversed(layers):
        sizes.extend(layer.tensors[::-1])
        no_shares = [0.0] * (len(layer.tensors) - 1)
        by_work.extend([layer.multiply_adds / multiply_adds, *no_shares])
        alike.extend([1 / len(layers), *no_shares])
    return np.array(sizes, dtype=np.int64), np.array(by_work), np.array(alike)


def breakdown(
    workload: Workload, plan: FusionPlan, cost: SparseGather
) -> dict[str, float]:
    """Return the parts of an iteration and its number of messages (omgs Fig 4).

    Parameters
    ----------
    workload : Workload
        One iteration.
    plan : FusionPlan
        Which gradients share a message.
    cost : SparseGather
        The cost of a selection and of a message.

    Returns
    -------
    dict of str to float
        The seconds of each of PARTS, which add up to "iteration", and "messages".
    """
    iteration_s = sparse_iteration(workload, plan, cost).prediction.iteration_s
    forward_s = workload.forward_s
    backward_s = float(workload.backward_s.sum())
    selecting_s = float(cost.selection_s(plan.group_bytes(workload)).sum())
    return {
        "forward": forward_s,
        "backward": backward_s,
        "selection": selecting_s,
        "exposed": iteration_s - forward_s - backward_s - selecting_s,
        "iteration": iteration_s,
        "messages": len(plan.ends),
    }


def planned(setting: Setting, planner: str, cost: SparseGather) -> dict[str, float]:
    """Return the `breakdown` of a setting under a planner."""
    workload = setting.workload()
    return breakdown(workload, make_plan(planner, workload, cost), cost)


def most_saved_s(
    network: str, cost: SparseGather, messages: int, units: int = 1500
) -> float:
    """Return how much less time than TopK-SGD several messages can take at most.

    The bound holds whatever the times of the layers are.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    cost : SparseGather
        The cost of a selection and of a message.
    messages : int
        The number of messages.
    units : int, optional
        The units of the LSTM, by default those of the authors' code.

    Returns
    -------
    float
        The saved time in seconds.

    Notes
    -----
    Selection takes the least time if all messages are equally large. All communication
    but the start-up of the last message may be hidden.
    """
    sizes, _, _ = _shape(network, units)
    all_bytes = ELEMENT_BYTES * float(sizes.sum())
    elements_a_message = all_bytes / ELEMENT_BYTES / messages
    selecting = Log(published_code("omgs")["gamma"])
    # The density, which is 1 here, does not change this cost.
    selecting_apart_s = messages * float(selecting(elements_a_message, 1))
    topk_selecting_s = float(cost.selection_s(all_bytes))
    return topk_selecting_s - selecting_apart_s + cost(all_bytes) - cost.startup_s()


def scan(network: str, topk_s: float, cost: SparseGather) -> Iterator[dict[str, Any]]:
    """Yield the iterations of every setting of a network under both rules of OMGS.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    topk_s : float
        The iteration of TopK-SGD in Table VI, in seconds. Computing takes at most as long.
        Sixteen evenly spaced compute times up to it are tried.
    cost : SparseGather
        The cost of a selection and of a message.

    Yields
    ------
    dict
        The fields of `Setting`, "rule" (the planner of OMGS), the iterations "topk_s",
        "mgs_s" and "omgs_s" in seconds, and the "messages" of OMGS.
    """
    compute_times_s = np.linspace(topk_s / 16, topk_s, 16).tolist()
    backward_shares = (0.5, 2 / 3, 0.75)
    even_shares = (0.0, 0.5)
    # Networks without units are scanned once.
    units_tried = UNITS if network == LSTM else (0,)
    for compute_s, backward, even, units in product(
        compute_times_s, backward_shares, even_shares, units_tried
    ):
        setting = Setting(network, compute_s, backward, even, units)
        topk = planned(setting, PLANS["TopK"], cost)
        mgs = planned(setting, PLANS["MGS"], cost)
        for rule in ("omgs", "omgs:code"):
            omgs = planned(setting, rule, cost)
            yield {
                **vars(setting),
                "rule": rule,
                "topk_s": topk["iteration"],
                "mgs_s": mgs["iteration"],
                "omgs_s": omgs["iteration"],
                "messages": omgs["messages"],
            }
