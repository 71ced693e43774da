"""omgs Eqs 1-11: timelines of SGD, TopK-SGD and LAGS-SGD, and what selecting and sending cost."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


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
    d = np.asarray(elements, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = gamma * density * d * np.log2(d)
    return float(seconds) if d.ndim == 0 else seconds


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
