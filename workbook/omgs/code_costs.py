"""The networks of omgs at the costs of its authors' published code.

At these costs, Table VI leaves certain times for computing, and the algorithms send
certain numbers of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, product
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.sparse import ELEMENT_BYTES, Log
from ddlkit.core.workload import Floats
from workbook.common import networks, source
from workbook.common.papers import published_code
from workbook.omgs import equations as omgs
from workbook.omgs.equations import LSTM, UNITS
from workbook.omgs.settings import RESNET, TOLERANCE, cost_of, printed, tensors
from workbook.validate import audit

OFF = (1 - TOLERANCE, 1, 1 + TOLERANCE)
"""The factors by which TopK-SGD's time in Table VI may be off, all of which are tried."""
BACKWARD = (1 / 2, 2 / 3, 3 / 4)
"""The shares of all computing that the backward pass is assumed to take (omgs Eq 4). The
paper does not state the share, so that each of them is tried."""
LEFT = "what TopK-SGD's time in Table VI, within 5%, leaves at the code's costs"
"""How notes call the times that `left_s` returns."""


class OpenCase(NamedTuple):
    """One choice of what the paper leaves open of a network, and what follows from it.

    Attributes
    ----------
    units : int
        The hidden units of the LSTM, or 0 for another network.
    gathers : {1, 2}
        How many all-gathers a message takes. In the code there are two: one of the
        values, and one of their indices.
    tensor_elements : tuple of int
        The number of elements of each tensor in forward order.
    selecting_s, sending_s : float
        How long TopK-SGD selects and how long it sends, in seconds.
    compute_s : ndarray, shape (k,)
        The times that Table VI leaves for computing, in seconds: what `left_s` returns,
        which has at least one.
    """

    units: int
    gathers: int
    tensor_elements: tuple[int, ...]
    selecting_s: float
    sending_s: float
    compute_s: Floats


def as_in_the_code(
    backward_s: ArrayLike,
    elements: ArrayLike,
    gathers: int = 2,
    density: float = audit.DENSITY,
) -> omgs.Instance:
    """Return a network with the costs that the authors' code has for 16 workers.

    The selection from d elements takes gamma d log2 d.

    Parameters
    ----------
    backward_s : array_like, shape (L,)
        The backward pass of each layer, in seconds.
    elements : array_like, shape (L,)
        The number d of gradients of each layer.
    gathers : {1, 2}, optional
        How many all-gathers a message takes. The first carries density x d values of
        every worker, and the second as many indices.
    density : float, optional
        The density rho.

    Returns
    -------
    Instance
        Its beta is the time by which an element of a layer lengthens a message.
    """
    code = published_code("omgs")
    workers = 16
    # The seconds per byte times the bytes that all workers send of an element: each sends
    # the share ``density`` in every all-gather.
    beta_s = (
        gathers * code[f"beta-{workers}"] * workers * code["element-bytes"] * density
    )
    return omgs.Instance(
        backward_s=np.asarray(backward_s, float),
        elements=np.asarray(elements, float),
        selection=Log(code["gamma"]),
        alpha_s=gathers * code[f"alpha-{workers}"],
        beta_s=beta_s,
    )


def recorded_shares(network: str) -> list[tuple[Floats, list[int]]]:
    """Return how the layers of a network share the backward pass, by recording.

    Parameters
    ----------
    network : str
        One of `workbook.omgs.equations.NETWORKS`.

    Returns
    -------
    list of (ndarray, list of int)
        For each recording, the shares of the backward pass, which add up to 1, and the
        elements of the tensors, both in forward order. The workloads that the lab replayed
        come before the profiles of real training.
    """
    return [
        (layers.backward_s / layers.backward_s.sum(), layers.elements)
        for layers in _recorded_layers(network)
    ]


def recorded_devices(network: str) -> list[str]:
    """Return the device of each of `recorded_shares`, "cpu" or "cuda"."""
    return [layers.device for layers in _recorded_layers(network)]


class _RecordedLayers(NamedTuple):
    """The layers of a network in one recording.

    Attributes
    ----------
    backward_s : ndarray, shape (n,)
        The backward time of each tensor in forward order, in seconds.
    elements : list of int, length n
        The elements of each tensor in forward order.
    device : {"cpu", "cuda"}
        What computed.
    """

    backward_s: Floats
    elements: list[int]
    device: str


@cache
def _recorded_layers(network: str) -> list[_RecordedLayers]:
    """Return the layers of a network in each recording of it.

    A recording is a layer profile that the campaign OMGS replayed, or a profile of real
    training on one of the recorded machines. The former come first.
    """
    recordings = []
    # A campaign is opened with the other recordings of its machine, which `alone` leaves out.
    # Their profiles are added below.
    campaign = source.open_campaign(name=source.OMGS).alone
    for workload in campaign.workloads().values():
        # A workload has no name. The campaign's networks are told apart by their numbers of
        # tensors, of which no two are equal.
        if workload.n == len(tensors(network)):
            # A workload begins with the last layer, whose gradients are ready first.
            backward_s = workload.backward_s[::-1]
            elements = workload.parameters[::-1].tolist()
            # Replays in the lab run on processors.
            recordings.append(_RecordedLayers(backward_s, elements, "cpu"))
    # Of the paper's networks, ResNet-50 is the only one of which real training is profiled. Each
    # machine with layer profiles has one of it, which is in forward order.
    if network == RESNET:
        for machine in source.recordings("layers").values():
            profile = machine.profile("resnet50")
            elements = profile.parameters.tolist()
            recordings.append(
                _RecordedLayers(profile.backward_s, elements, profile.device)
            )
    return recordings


def topk_parts(network: str, gathers: int, elements: float = 0) -> tuple[float, float]:
    """Return how long TopK-SGD selects and sends at the costs of the code.

    Parameters
    ----------
    network : str
        One of `workbook.omgs.equations.NETWORKS`.
    gathers : {1, 2}
        How many all-gathers a message takes.
    elements : float, optional
        The number of gradients from which TopK-SGD selects, for an LSTM with another
        number of hidden units. 0 stands for all gradients of ``network``.

    Returns
    -------
    selecting_s, sending_s : float
        How long one selection from all gradients takes, and how long the message with
        the selected ones takes, in seconds.
    """
    # The cost takes the size of all gradients, and applies the density itself.
    cost = cost_of(network)
    n_bytes = ELEMENT_BYTES * (elements or sum(tensors(network)))
    selecting_s = float(cost.selection_s(n_bytes))
    # The cost is that of two all-gathers of the same size.
    sending_s = float(cost(n_bytes)) * gathers / 2
    return selecting_s, sending_s


def left_s(network: str, *parts_s: float) -> Floats:
    """Return what TopK-SGD's time in Table VI leaves for computing (omgs Eq 4).

    Nothing overlaps in TopK-SGD, so that computing takes the rest of the iteration.

    Parameters
    ----------
    network : str
        One of `workbook.omgs.equations.NETWORKS`.
    *parts_s : float
        The parts of the iteration that are not computing, in seconds.

    Returns
    -------
    ndarray, shape (k,)
        Seconds for each of the factors OFF, by which the printed time may be off, in their
        order. A factor is left out if the other parts take all of the time.
    """
    iterations_s = printed().loc[network, "topk_s"] * np.array(OFF)
    computing_s = iterations_s - sum(parts_s)
    return computing_s[computing_s > 0]


def unstated(network: str) -> Iterator[OpenCase]:
    """Yield each choice of hidden units and all-gathers with which time for computing is left.

    The paper states neither the hidden units of the LSTM nor the all-gathers of a message. The
    time for computing is TopK-SGD's iteration in Table VI without selecting and sending.

    Parameters
    ----------
    network : str
        One of `workbook.omgs.equations.NETWORKS`.

    Yields
    ------
    OpenCase
        In the order of UNITS. With equal units, one all-gather comes before two.
    """
    # Only the LSTM has units, each of which is tried. For another network, 0 stands for none.
    units_tried = UNITS if network == LSTM else (0,)
    for units, gathers in product(units_tried, (1, 2)):
        # The number of elements of each tensor. That of the LSTM depends on its units.
        elements = tensors(network)
        if units:
            tensors_by_layer = [layer.tensors for layer in networks.ptb_lstm(units)]
            elements = tuple(chain.from_iterable(tensors_by_layer))
        selecting_s, sending_s = topk_parts(network, gathers, sum(elements))
        # The printed iteration may be off by each of the factors OFF. The array has one time
        # for computing for each factor with which this time is positive.
        compute_times_s = left_s(network, selecting_s, sending_s)
        # If no factor leaves any time for computing, the choice cannot be the paper's.
        if len(compute_times_s):
            yield OpenCase(
                units, gathers, elements, selecting_s, sending_s, compute_times_s
            )


def message_counts(network: str, compute_s: float = 0) -> pd.DataFrame:
    """Return how many messages OMGS-SGD sends by Algorithm 1 and by the code's rule.

    Parameters
    ----------
    network : str
        One of `workbook.omgs.equations.NETWORKS`.
    compute_s : float, optional
        The time of all computing in seconds. By default (0), all times are tried that Table
        VI leaves for computing, which are those of ``OpenCase.compute_s``.

    Returns
    -------
    DataFrame
        A row for each recorded division of the backward pass among the layers, each
        `OpenCase`, each duration of the backward pass (each share BACKWARD of each computing
        time), and each rule. Columns:

        units
            The hidden units of the LSTM, or 0 for another network.
        variant
            The all-gathers of a message, "one" or "both" (one for the values and one for the
            indices), and the rule, "Algorithm 1" or "its rule" (that of the code).
        messages
            The number of messages.
    """
    density = printed().loc[network, "density"]
    rows = []
    for (shares, recorded_elements), case in product(
        recorded_shares(network), unstated(network)
    ):
        # The recorded LSTM has another number of units than most cases. So the size of each
        # recorded tensor is replaced by the size of the same tensor in the case. The tensor is
        # found by its recorded size, because tensors that are equally large in the recording are
        # equally large in the case, too.
        size_in_case = dict(zip(tensors(network), case.tensor_elements, strict=True))
        elements = [size_in_case[size] for size in recorded_elements]
        gathers_used = "one" if case.gathers == 1 else "both"
        # The default of 0 stands for the computing times of the case.
        compute_times_s = compute_s or case.compute_s
        # Each share of each computing time.
        backward_times_s = np.outer(BACKWARD, compute_times_s).flat
        for backward_s in backward_times_s:
            instance = as_in_the_code(
                backward_s * shares, elements, case.gathers, density
            )
            for by_code, rule in ((False, "Algorithm 1"), (True, "its rule")):
                merged = omgs.find_merged_layers(instance, by_code=by_code)
                # Each layer that is not merged into the one before it ends a message.
                n_messages = int((~merged).sum())
                rows.append((case.units, f"{gathers_used}, {rule}", n_messages))
    return pd.DataFrame(rows, columns=["units", "variant", "messages"])
