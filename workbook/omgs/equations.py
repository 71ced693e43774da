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
from typing import Any, NamedTuple

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
    # The backward pass goes from layer L down to layer 1. The times of layers L to l add up to
    # the end of layer l. It starts earlier by its own time.
    ended_s = forward_s + np.cumsum(spent_s[::-1])[::-1]
    return ended_s - spent_s


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
    durations_s = communication_s.tolist()
    # Layer L, at the last index, starts when it has been selected from. The others also
    # wait for the layer after them, down to layer 1 at index 0.
    last = len(start_s) - 1
    for i in range(last - 1, -1, -1):
        link_free_s = start_s[i + 1] + durations_s[i + 1]
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
    # Of no elements, 0 log 0 is NaN without a warning.
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
        The network whose layers are the normal layers. Each includes the merged layers
        between it and the next normal layer.

    Notes
    -----
    A merged layer neither selects nor sends (Eq 13). Its elements are added to those of
    the layer before it (Eq 14). The backward pass of the layer before it starts when that
    of the merged layer ends, because no selection is between them (Eq 15).
    """
    # `np.add.reduceat` adds up from each normal layer to the layer before the next one.
    normal_layers = np.flatnonzero(~np.asarray(merged, bool))
    return replace(
        instance,
        backward_s=np.add.reduceat(instance.backward_s, normal_layers),
        elements=np.add.reduceat(instance.elements, normal_layers),
    )


def combinations(layers: int) -> Bools:
    """Return all choices of merged layers (omgs Eqs 16, 19).

    A choice says of each layer whether it is merged with the layer before it, or normal.

    Parameters
    ----------
    layers : int
        The number L of layers.

    Returns
    -------
    ndarray of bool, shape (2^(L-1), L)
        A row for each choice: whether each layer is merged. Layer 1, which has no layer
        before it, is always normal.

    Examples
    --------
    >>> combinations(3).astype(int).tolist()
    [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
    """
    # The bits of the number of a row, least significant first, say which of the layers 2
    # to L are merged.
    rows = np.arange(2 ** (layers - 1))[:, None]
    bits = (rows >> np.arange(layers - 1)) & 1
    layer_1 = np.zeros_like(rows, bool)
    return np.concatenate([layer_1, bits.astype(bool)], axis=1)


def merged_iteration_s(instance: Instance, merged: ArrayLike) -> Floats:
    """Return the iteration under each of several choices of merged layers (omgs Eq 17).

    Parameters
    ----------
    instance : Instance
        A network of L layers.
    merged : array_like of bool, shape (..., L)
        Which layers are merged. Leading axes are choices. Layer 1 is always normal.

    Returns
    -------
    ndarray, shape (...)
        Iterations in seconds.

    Notes
    -----
    t_iter = tau_c^(1) + t_c^(1), by Eqs 6-8 and 13-15
    """
    is_merged = np.asarray(merged, bool)
    # The three arrays have a number for each choice: when the computing and the selecting
    # of the layers so far end, when the last message so far ends, and how many elements of
    # merged layers wait for the next normal layer.
    computed_s = np.full(is_merged.shape[:-1], instance.forward_s)
    sent_s = np.zeros_like(computed_s)
    pending = np.zeros_like(computed_s)
    # The backward pass begins with layer L.
    for layer in range(instance.layers - 1, -1, -1):
        pending = pending + instance.elements[layer]
        computed_s = computed_s + instance.backward_s[layer]
        # A normal layer selects from all pending elements, and sends them.
        is_normal = ~is_merged[..., layer]
        selecting_s = np.where(is_normal, instance.selection_s(pending), 0.0)
        computed_s = computed_s + selecting_s
        # A message waits for the selection and for the message before it.
        end_s = np.maximum(sent_s, computed_s) + instance.communication_s(pending)
        sent_s = np.where(is_normal, end_s, sent_s)
        pending = np.where(is_normal, 0.0, pending)
    # Layer 1, the last of the backward pass, is normal, so that its message ends the iteration.
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
    # These are the paper's t_s, t_c, tau_b, tau_s and tau_c, in this order.
    selecting_s = instance.selection_s(instance.elements)
    communication_s = instance.communication_s(instance.elements)
    backward_starts_s = backward_start_s(
        instance.forward_s, instance.backward_s, selecting_s
    )
    selection_starts_s = selection_start_s(backward_starts_s, instance.backward_s)
    communication_starts_s = communication_start_s(
        selection_starts_s + selecting_s, communication_s
    )
    return (
        backward_starts_s,
        selection_starts_s,
        communication_starts_s,
        communication_s,
    )


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
    # Index 0 is layer 1.
    _, selection_starts_s, communication_starts_s, communication_s = timeline(instance)
    selecting_s = float(instance.selection_s(instance.elements[0]))
    if literal:
        # As printed, t_s^(1) has the other sign.
        selecting_s = -selecting_s
    selected_s = selection_starts_s[0] + selecting_s
    return float(communication_starts_s[0] + communication_s[0] - selected_s)


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
    # Index 0 is layer 1, and index 1 is layer 2.
    _, selection_starts_s, communication_starts_s, communication_s = timeline(instance)
    sent_s = communication_starts_s + communication_s
    if literal:
        first_term_s = sent_s[0]
    else:
        selecting_s = instance.selection_s(instance.elements[0])
        first_term_s = selection_starts_s[0] + selecting_s
    return float(max(first_term_s, sent_s[1]) + communication_s[0])


# -- which layers to merge -----------------------------------------------------------


class Candidates:
    """Whether to merge each layer with the one before it (omgs Eqs 12, 20-24).

    Each layer l from 2 to L is judged with layer l - 1, while no other layer is merged
    (Section IV-A). The backward pass goes from layer L down to layer 1, so that layer l - 1
    is computed after layer l.

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
        _, selection_starts_s, communication_starts_s, communication_s = timeline(
            instance
        )
        elements = instance.elements
        selecting_s = instance.selection_s(elements)
        self.instance = instance
        # [1:] are the layers l from 2 to L, and [:-1] are the layers l - 1 before them.
        self.elements = elements[1:]
        # The selection from layer l starts when the gradients of layer l are computed. Without
        # a selection, the backward pass of layer l - 1 would start then.
        self.u_s = selection_starts_s[1:] + instance.backward_s[:-1]
        self.own_s = selecting_s[1:]
        self.before_s = selecting_s[:-1]
        self.together_s = instance.selection_s(elements[1:] + elements[:-1])
        self.sending_s = communication_starts_s[1:]
        self.free_s = communication_starts_s[1:] + communication_s[1:]

        # When both layers have been selected from, one after the other or at once.
        apart_ready_s = self.u_s + self.own_s + self.before_s
        together_ready_s = self.u_s + self.together_s
        self.q3: Bools = apart_ready_s < self.free_s
        self.q4: Bools = together_ready_s < self.sending_s
        self.q5: Bools = self.sending_s + instance.alpha_s > together_ready_s

    def completion_s(self, line: int = 6) -> Floats:
        """Return when the message of layer l - 1 ends if layer l is normal, that is, not merged.

        Parameters
        ----------
        line : int, optional
            By which line of the paper's derivation, 2 to 6. Lines 2, 5 and 6 give the right
            time. Line 3 drops t_s^(l-1), and line 4 has tau_b^(l) where tau_b^(l-1) is meant.

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
        # ``ready_s`` is tau_b^(l-1) + t_b^(l-1) + t_s^(l-1), where tau_b^(l-1) is
        # tau_b^(l) + t_b^(l) + t_s^(l). With tau_b^(l) in its place, line 4 lacks two terms.
        if line == 4:
            ready_s = ready_s - self.own_s - self.instance.backward_s[1:]
        message_s = self.instance.communication_s(self.instance.elements[:-1])
        return np.maximum(ready_s, self.free_s) + message_s

    @property
    def gain_s(self) -> Floats:
        """Return how much earlier the message of layer l - 1 ends if layer l is merged.

        Returns
        -------
        ndarray, shape (L-1,)
            t_gain = mu^(l-1) - mu~^(l-1) in seconds, where mu~ is the end with l merged.
        """
        # A single message of both layers starts when both have been selected from, but not
        # before tau_c^(l), when the message of layer l alone would start.
        start_s = np.maximum(self.u_s + self.together_s, self.sending_s)
        elements_of_both = self.elements + self.instance.elements[:-1]
        end_s = start_s + self.instance.communication_s(elements_of_both)
        return self.completion_s() - end_s

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

        With Q3, apart, the second message starts when the first one ends. One message of both
        layers then saves a start-up alpha, less by how much it starts after tau_c^(l):

        C2, it starts at tau_c^(l) (Q3 and Q4, Eq 22): alpha

        C3, it starts at u^(l) + t_s(d^(l) + d^(l-1)) (Q3 and not Q4):
        tau_c^(l) + alpha - u^(l) - t_s(d^(l) + d^(l-1))
        """
        instance = self.instance
        # By how much one selection from both layers is shorter than two selections. It is longer
        # by Eq 20, so that this is negative.
        selecting_less_s = self.own_s + self.before_s - self.together_s
        if literal:
            # All three selections include the factor gamma rho. As printed, only the first
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
            By which equation. Both say the same, because Q4 implies Q5: alpha is not
            negative.

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
"""The gamma of the authors' published code, whose selection takes gamma d log2 d.

It is in seconds, and rounded from 2.18896957e-10."""
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
        Which of REPAIRS to make. Without any, the algorithm is as printed. Then line 16
        computes 0 x log 0 for the first merged layer. This is NaN, and so are all later times,
        with which every comparison is false.
    by_code : bool, optional
        Whether to follow the authors' published code. Algorithm 1 merges layer l if two
        conditions hold. By Q3, if both layers were sent apart, the message of layer l would
        delay that of layer l - 1. By Q5, both layers together would be ready less than a
        start-up after the message of layer l could start. The code differs in three ways: It
        does not test Q3, it takes both layers in Q5 to be ready t_s^(l-1) earlier, and it
        merges layer L without a test.

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
    last = instance.layers - 1
    merged = np.zeros(instance.layers, bool)
    # As printed, line 32 reads the backward time of layer 1 instead of layer L.
    layer_read = last if "index" in repairs else 0
    times = _LayerTimes(
        begun_s=0.0,
        computed_s=layers.backward_s[layer_read],
        # The link is always free for the first message.
        link_free_s=-np.inf,
    )
    # The index i is that of the paper's layer i + 1, so that layer 1 is not judged.
    for i in range(last, 0, -1):
        if by_code and i == last:
            # The code marks layer L as merged, but counts its times as if it were not.
            merged[i] = True
            times = _times_after_apart(layers, i, times)
        elif _joins(layers, i, times, by_code=by_code):
            merged[i] = True
            layers.join(i)
            times = _times_after_joined(layers, i, times, repairs)
        else:
            times = _times_after_apart(layers, i, times)
    return merged


class _LayerTimes(NamedTuple):
    """The times of the layer that Algorithm 1 judges, from the start of the backward pass.

    Attributes
    ----------
    begun_s, computed_s : float
        When the backward pass of the layer begins and ends, in seconds.
    link_free_s : float
        When the link is free for the message of the layer, in seconds.
    """

    begun_s: float
    computed_s: float
    link_free_s: float


def _message_start_s(times: _LayerTimes, selecting_s: float) -> float:
    """Return when the message of a layer starts, in seconds from the backward pass's start.

    It starts as soon as the layer is computed and then selected from, which takes
    ``selecting_s``, and the link is free.
    """
    # The order of the arguments matters for NaN, which `max` keeps if it comes first.
    return max(times.computed_s + selecting_s, times.link_free_s)


def _joins(
    layers: _MergingLayers, i: int, times: _LayerTimes, *, by_code: bool
) -> bool:
    """Return whether the layer at index ``i`` is merged with the one before it (omgs Eq 24).

    By Eq 24 it is merged if two conditions hold, which the paper calls Q3 and Q5.

    Parameters
    ----------
    layers : _MergingLayers
        The layers, with those that have been merged so far.
    i : int
        The index of the layer that is judged, which is called layer i here.
    times : _LayerTimes
        The times of this layer.
    by_code : bool
        Whether to judge by the authors' published code, which is not quite Eq 24.
    """
    instance = layers.instance
    selecting_s = layers.selecting_s[i]
    before_s = layers.selecting_s[i - 1]
    # When the start-up of the message of layer i ends.
    started_s = _message_start_s(times, selecting_s) + instance.alpha_s
    # When both layers are computed without a selection between, and when they have been
    # selected from at once.
    both_computed_s = times.begun_s + layers.backward_s[i] + layers.backward_s[i - 1]
    together_ready_s = both_computed_s + layers.together_s[i]
    if by_code:
        # The code does not test Q3. In Q5 it takes both layers to be ready earlier than they
        # are, by the time of the selection from layer i - 1 (errata, entry 29).
        return together_ready_s - before_s < started_s

    # Q3: apart, layer i - 1 is ready before the message of layer i has been sent, so that
    # its own message would wait.
    apart_ready_s = both_computed_s + selecting_s + before_s
    sent_end_s = started_s + instance.beta_s * layers.size[i]
    waits = apart_ready_s < sent_end_s
    # Q5: together, both layers are ready less than a start-up after the message of layer i
    # could start, that is, before the start-up of this message ends.
    return waits and together_ready_s < started_s


def _times_after_apart(
    layers: _MergingLayers, i: int, times: _LayerTimes
) -> _LayerTimes:
    """Return the times of layer i - 1, after layer i with ``times`` was not merged.

    Layer i is the layer at index ``i``. The backward pass goes from it on to layer i - 1.
    """
    selecting_s = layers.selecting_s[i]
    # By Eq 6, layer i - 1 begins when the selection from layer i ends.
    begun_s = times.computed_s + selecting_s
    return _LayerTimes(
        begun_s=begun_s,
        computed_s=begun_s + layers.backward_s[i - 1],
        link_free_s=_message_start_s(times, selecting_s) + layers.message_s[i],
    )


def _times_after_joined(
    layers: _MergingLayers, i: int, times: _LayerTimes, repairs: frozenset[str]
) -> _LayerTimes:
    """Return the times of layer i - 1, after layer i with ``times`` has joined it.

    Layer i is the layer at index ``i``. ``layers`` have been joined already. ``repairs`` are
    those of REPAIRS that are made. Where one of REPAIRS is not made, the times have the printed
    mistake.
    """
    # The backward pass of layer i is a part of that of layer i - 1 now (``join``), so that
    # layer i itself takes no time: it is computed as soon as it begins.
    layer_i_computed_s = times.begun_s
    # As printed, line 32 adds the backward time of the paper's layer 1, which is at index 0,
    # whatever layer is judged.
    if "index" not in repairs:
        layer_i_computed_s += layers.backward_s[0]
    # A merged layer neither selects nor sends. As printed, it pays a start-up, and selects for
    # 0 x log 0, which is NaN. This makes all later times NaN, as the printed lines would.
    selecting_s = 0.0 if "log0" in repairs else np.nan
    message_s = 0.0 if "alpha" in repairs else layers.instance.alpha_s
    begun_s = layer_i_computed_s + selecting_s
    return _LayerTimes(
        begun_s=begun_s,
        computed_s=begun_s + layers.backward_s[i - 1],
        link_free_s=max(layer_i_computed_s, times.link_free_s) + message_s,
    )


class _MergingLayers:
    """The layers of a network while Algorithm 1 merges them.

    Attributes
    ----------
    backward_s, selecting_s, message_s : list of float, length L
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
        self.message_s: list[float] = instance.communication_s(elements).tolist()

    def join(self, i: int) -> None:
        """Let the layer at index ``i`` join the one before it.

        The joined layers have the index i - 1. The numbers at index ``i`` stay as they
        are, and are not used again.
        """
        instance = self.instance
        self.backward_s[i - 1] += self.backward_s[i]
        self.size[i - 1] += self.size[i]
        self.selecting_s[i - 1] = self.together_s[i]
        # By Eq 11.
        self.message_s[i - 1] = instance.alpha_s + instance.beta_s * self.size[i - 1]
        # The layer before the joined ones, if there is one, is judged with them next. A
        # selection takes an array or a scalar of numpy.
        if i > 1:
            next_pair = np.float64(self.size[i - 1] + self.size[i - 2])
            next_pair_s = instance.selection(next_pair, instance.density)
            self.together_s[i - 1] = float(next_pair_s)


def of_planning(
    workload: Workload, cost: MessageCost, gamma_s: float | None = None
) -> Instance:
    """Return the network and its costs for which Algorithm 1 plans (omgs Eqs 10, 11).

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
    line = _line_through_ends(workload.bytes, cost)
    # Eq 11 has a beta per element, which is that per byte times the bytes of an element.
    all_bytes = float(workload.bytes.sum())
    beta_s = line.s_per_byte * all_bytes / float(workload.parameters.sum())
    selection: Selecting
    # A selection of gamma d log2 d, as in the published code, does not depend on the density.
    density = 1.0
    if gamma_s is not None:
        selection = Log(gamma_s)
    elif isinstance(cost, SparseGather) and cost.selecting:
        selection = cost.selecting
        density = cost.density
    else:
        selection = Log(PUBLISHED_GAMMA_S)
    # A workload is in ready order, which begins with layer L, and an instance with layer 1.
    return Instance(
        backward_s=workload.backward_s[::-1],
        elements=workload.parameters[::-1].astype(float),
        selection=selection,
        alpha_s=line.alpha_s,
        beta_s=beta_s,
        forward_s=workload.forward_s,
        density=density,
    )


class _Line(NamedTuple):
    """The time of a message as a straight line over its bytes.

    Attributes
    ----------
    alpha_s : float
        The start-up of a message, in seconds.
    s_per_byte : float
        The time of each byte, in seconds.
    """

    alpha_s: float
    s_per_byte: float


def _line_through_ends(sizes: NDArray[np.int_], cost: MessageCost) -> _Line:
    """Return the line through two costs: of the smallest gradient, and of all together.

    Algorithm 1 needs an alpha and a beta of at least 0, so that a negative one becomes 0.
    ``sizes`` are the bytes of the gradients.
    """
    smallest_bytes = float(sizes.min())
    all_bytes = float(sizes.sum())
    # A cost that interpolates measurements may fall with the size, so that beta is negative.
    growth_s = max(0.0, cost(all_bytes) - cost(smallest_bytes))
    # With one gradient both sizes are equal and ``growth_s`` is 0, so that any divisor will
    # do.
    s_per_byte = growth_s / max(all_bytes - smallest_bytes, 1.0)
    # It may also rise so steeply that alpha, the start of the line at 0 bytes, is negative.
    alpha_s = max(0.0, cost(smallest_bytes) - s_per_byte * smallest_bytes)
    return _Line(alpha_s, s_per_byte)


def plan_of(merged: Bools, name: str) -> FusionPlan:
    """Return the fusion plan of a choice of merged layers: which gradients share a message.

    Parameters
    ----------
    merged : ndarray of bool, shape (L,)
        Whether each layer is fused with the one before it in the network.
    name : str
        The name of the plan.
    """
    # A plan is in ready order, which begins with layer L. There a normal layer comes after
    # the merged layers that are fused with it, and is the last one of its message.
    is_last_of_message = ~merged[::-1]
    # The end of a message is the number of layers up to and including its last one.
    ends = np.flatnonzero(is_last_of_message) + 1
    return FusionPlan(name, tuple(ends.tolist()))


def messages(merged: Bools, *, literal: bool = False) -> tuple[tuple[int, ...], ...]:
    """Return which layers each message has (omgs Algorithm 2).

    Parameters
    ----------
    merged : ndarray of bool, shape (L,)
        Whether each layer is merged. Layer 1 is normal, so that the buffer is empty at the
        end.
    literal : bool, optional
        Whether to follow the algorithm as printed, where nothing pushes the gradient of
        a normal layer into the buffer.

    Returns
    -------
    tuple of tuple of int
        The layers, numbered from 1, of each message in the order of sending. A merged layer
        pushes its gradient into a buffer, and a normal layer sends the buffer (lines
        15-28).

    Examples
    --------
    >>> messages(np.array([False, True, False]))
    ((3,), (2, 1))
    """
    sent: list[tuple[int, ...]] = []
    buffer: list[int] = []
    for layer in range(len(merged), 0, -1):
        is_merged = merged[layer - 1]
        # As printed, the gradient of a normal layer is in no message.
        is_pushed = is_merged or not literal
        if is_pushed:
            buffer.append(layer)
        if not is_merged:
            sent.append(tuple(buffer))
            buffer.clear()
    return tuple(sent)


def merge_up_to(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """Return the sizes of the messages of MGS-SGD (omgs V-D).

    Parameters
    ----------
    parameters : iterable of int
        The elements of each layer in ready order.
    threshold : int
        How many elements pending layers must have together to be sent as a message.

    Returns
    -------
    tuple of int
        The elements of each message. The last one has what remains, which may be less than
        the threshold.

    Examples
    --------
    >>> merge_up_to([10, 5, 5, 3], threshold=10)
    (10, 10, 3)
    """
    message_sizes = []
    pending = 0
    for size in parameters:
        pending += size
        if pending >= threshold:
            message_sizes.append(pending)
            pending = 0
    if pending:
        message_sizes.append(pending)
    return tuple(message_sizes)


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
"""The hidden units of the LSTM that are tried. The messages of MGS-SGD in Tab V agree with 1,024
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
        A selection from d elements takes gamma d log2 d. Each of the two all-gathers, of
        values and of indices, takes alpha, and beta for every byte of all workers.
    """
    code = published_code("omgs")
    gather = AlphaBeta(
        # The start-up in seconds, and the seconds per byte.
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
        The share of the backward pass that is divided evenly among the layers. The rest is
        divided by their multiply-adds.
    units : int
        The hidden units of the LSTM.
    """

    network: str
    compute_s: float
    backward: float = 2 / 3
    even: float = 0.0
    units: int = 1500

    def workload(self) -> Workload:
        """Return one iteration, in which the tensors of a layer become ready together."""
        sizes, shares_by_work, equal_shares = _shape(self.network, self.units)
        backward_s = self.compute_s * self.backward
        forward_s = self.compute_s - backward_s
        # The share of each tensor in the backward pass.
        shares = (1 - self.even) * shares_by_work + self.even * equal_shares
        return Workload.from_arrays(
            forward_s, backward_s * shares, ELEMENT_BYTES * sizes
        )


@cache
def _shape(network: str, units: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the tensors of a network in ready order, which begins with the last layer.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    units : int
        The hidden units of the LSTM. They do not matter for the other networks.

    Returns
    -------
    sizes : ndarray of int, shape (n,)
        The elements of each tensor.
    by_work, equal : ndarray, shape (n,)
        The share of each tensor in the backward pass: ``by_work`` if a layer takes time by
        its multiply-adds, and ``equal`` if all layers take the same time. The tensors of a
        layer become ready together, so that the first one has the share of the layer, and
        the others have none.
    """
    if network == LSTM:
        layers = tuple(networks.ptb_lstm(units))
    else:
        layers = networks.layers(NETWORKS[network])
    all_multiply_adds = sum(layer.multiply_adds for layer in layers)
    sizes: list[int] = []
    by_work: list[float] = []
    equal: list[float] = []
    for layer in reversed(layers):
        sizes.extend(layer.tensors[::-1])
        shares_of_others = [0.0] * (len(layer.tensors) - 1)
        by_work.extend([layer.multiply_adds / all_multiply_adds, *shares_of_others])
        equal.extend([1 / len(layers), *shares_of_others])
    return np.array(sizes, dtype=np.int64), np.array(by_work), np.array(equal)


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
    message_bytes = plan.group_bytes(workload)
    selecting_s = float(cost.selection_s(message_bytes).sum())
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
    """Return by how much an iteration with several messages can be shorter than TopK-SGD's.

    TopK-SGD sends a single message. The returned bound holds whatever the times of the
    layers are.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    cost : SparseGather
        The cost of a selection and of a message, as `published_cost` returns it.
    messages : int
        The number of messages.
    units : int, optional
        The hidden units of the LSTM, by default those of the authors' code.

    Returns
    -------
    float
        The most that can be saved, in seconds.

    Notes
    -----
    Selection takes the least time if all messages are equally large. All communication
    but the start-up of the last message may be hidden, while TopK-SGD hides nothing.
    """
    sizes, _, _ = _shape(network, units)
    all_elements = float(sizes.sum())
    all_bytes = ELEMENT_BYTES * all_elements
    # This need not be a whole number. ``cost.selection_s`` would round it up, and the result
    # would be no bound. So the selection of ``cost``, of gamma d log2 d for d elements, is made
    # again, and takes the number as it is.
    elements_per_message = all_elements / messages
    selecting = Log(published_code("omgs")["gamma"])
    # The density, which is 1 here, does not change the time.
    least_selecting_s = messages * float(selecting(elements_per_message, 1))
    topk_selecting_s = float(cost.selection_s(all_bytes))
    # What TopK-SGD selects and sends, less what the messages select and cannot hide.
    return topk_selecting_s - least_selecting_s + cost(all_bytes) - cost.startup_s()


def scan(network: str, topk_s: float, cost: SparseGather) -> Iterator[dict[str, Any]]:
    """Yield the iterations of every setting of a network, OMGS-SGD by both of its rules.

    The rules are Algorithm 1 and that of the published code.

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
        The fields of `Setting`, "rule" ("omgs" for Algorithm 1, or "omgs:code"), the
        iterations "topk_s", "mgs_s" and "omgs_s" in seconds, and "messages", the number of
        messages of OMGS-SGD.
    """
    compute_times_s = np.linspace(topk_s / 16, topk_s, 16).tolist()
    # Which share of computing is the backward pass, and which share of the backward pass is
    # divided evenly among the layers. Multiply-adds divide the rest.
    backward_shares = (0.5, 2 / 3, 0.75)
    even_shares = (0.0, 0.5)
    # Only the LSTM has hidden units, whose number the paper leaves open. For the other
    # networks 0 stands for none.
    units_tried = UNITS if network == LSTM else (0,)
    for compute_s, backward, even, units in product(
        compute_times_s, backward_shares, even_shares, units_tried
    ):
        setting = Setting(network, compute_s, backward, even, units)
        topk = planned(setting, PLANS["TopK"], cost)
        mgs = planned(setting, PLANS["MGS"], cost)
        # PLANS has the planners of the algorithms. Both rules are names of planners, too.
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
