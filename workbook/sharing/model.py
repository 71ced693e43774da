"""The contention model: figures 4 to 8 of the sharing paper from its figures 2 and 3.

An all-reduce under one of the paper's configurations takes a known multiple of the
default's time (Fig 2), and slows kernels down by a known amount (Fig 3). Unknown are the
compute time of each network, the time of an all-reduce of 25 MB, the share of Fig 3's
slowdown that training feels, and how much compute slows messages down. They are fitted
on two batches of Fig 8. The other batches of Fig 8, and Fig 4, are predicted.

References
----------
sharing : S. Zhong and S. Qu, "Resource Sharing between Computation and Communication".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link, one_by_one
from ddlkit.core.timeline import COMPUTE
from ddlkit.core.workload import LayerProfile, Workload
from workbook.common import source, specs
from workbook.common.claims import paper_table
from workbook.sharing.printed import (
    DEFAULT,
    configurations,
    relative_times,
    throughput,
)

Floats = NDArray[np.float64]
FITTED = (16, 64)
"""The batches of Fig 8 on which the unknowns are fitted. The others are predicted."""
ALLREDUCE_BYTES = 25e6
"""The message of Fig 2. If it were 25 MiB, only the fitted time of one would be longer."""
PARTS = ["computation only", "overlap", "communication only"]
"""The parts of an iteration."""
FIT_MODELS = ["both", "none"]
"""The models: "both" slows compute and messages down, "none" slows nothing down."""


@cache
def layers(network: str) -> Workload:
    """Return a network in which the forward pass of a layer takes one second per FLOP.

    Only ratios of its times have a meaning. The FLOP are those of a recorded profile.

    Parameters
    ----------
    network : str
        The name of the network in the paper.

    Returns
    -------
    Workload
        The gradients of one iteration and their times.

    Raises
    ------
    UserError
        If no recorded profile has the network on one rank in fp32.
    """
    # Profiles have names such as "vit_b_16" where the paper has "ViT-Base/16".
    name = specs.network_named(network).lower()
    selection = f"network == {name!r} and precision == 'fp32' and ranks == 1"
    # The first machine that has the network decides. FLOP do not depend on the machine.
    for recording in source.recordings("layers").values():
        rows = recording.table("layers").query(selection)
        if len(rows):
            # A profile may have several batches. Any single one has the same ratios.
            rows = rows[rows["batch"] == rows["batch"].min()]
            # The recorded FLOP are those of the whole batch, which is passed as one sample.
            profile = LayerProfile.from_flops(
                network,
                batch=1,
                tensor=tuple(rows["tensor"]),
                parameters=rows["parameters"].to_numpy(),
                sample_flops=rows["flops"].to_numpy(),
                # At 1 FLOP per second, as many seconds as FLOP.
                peak_flops_per_s=1.0,
                utilisation=1.0,
            )
            return profile.workload()
    raise UserError(
        f"no recorded fp32 profile of {network} on one rank: record its layers"
    )


@cache
def _buckets(network: str) -> tuple[Floats, Floats]:
    """Return when each of PyTorch's buckets is ready, and its bytes.

    Returns
    -------
    ready_shares, bucket_bytes : ndarray, shape (G,)
        The share of an iteration's compute after which each of the G buckets is ready, and
        the size of each bucket.
    """
    workload = layers(network)
    ddp_plan = plan.ddp(workload)
    ready_shares = ddp_plan.group_ready_s(workload) / workload.compute_s
    return ready_shares, ddp_plan.group_bytes(workload).astype(float)


@cache
def kernel_slowdowns() -> pd.Series:
    """Return how much longer kernels take during an all-reduce (sharing Fig 3).

    Returns
    -------
    Series
        By configuration, such as "2x256", the geometric mean of the five kernels' slowdowns,
        less 1: 0.1 means that kernels take a tenth longer.
    """
    grid = paper_table("sharing", "fig03")
    logs = np.log(grid["slowdown"])
    # The geometric mean is the exponential of the mean logarithm.
    means = np.exp(logs.groupby(configurations(grid), sort=False).mean())
    # `Fitted.iteration_s` combines these numbers by position with those of figure 2.
    in_order_of_fig02 = means[relative_times().index]
    return in_order_of_fig02 - 1


@dataclass(frozen=True, eq=False)
class Fitted:
    """The contention model with its fitted unknowns.

    Attributes
    ----------
    allreduce_s : float
        The time of an all-reduce of 25 MB under the default configuration, in seconds.
    felt : float
        The share of Fig 3's slowdown of kernels by which an all-reduce slows training down.
    messages : float
        How much longer a message takes during compute: 0.1 is a tenth longer.
    start_s : dict of str to float
        By network, the part of an iteration's compute that does not grow with the batch, in
        seconds.
    image_s : dict of str to float
        By network, the compute that each image of the batch adds, in seconds.
    """

    allreduce_s: float
    felt: float
    messages: float
    start_s: dict[str, float]
    image_s: dict[str, float]

    def iteration_s(self, network: str, batches: Floats) -> Floats:
        """Return the predicted times of a network's iteration under every configuration.

        Parameters
        ----------
        network : str
            The name of the network in the paper.
        batches : ndarray, shape (B,)
            The batch sizes.

        Returns
        -------
        ndarray, shape (B, 16)
            Iterations in seconds. Configurations are in the order of Fig 2.
        """
        ready_shares, bucket_bytes = _buckets(network)
        # The time of an all-reduce under each of the 16 configurations, divided by that under the
        # default (Fig 2).
        allreduce_ratios = relative_times().to_numpy()
        images = np.asarray(batches, float)
        compute_s = self.start_s[network] + self.image_s[network] * images
        default_s_per_byte = self.allreduce_s / ALLREDUCE_BYTES
        # The times of messages have shape (16, G) for the G buckets of the network.
        message_s = default_s_per_byte * np.outer(allreduce_ratios, bucket_bytes)
        # Both arrays get shape (B, 16, G).
        ready_s, sent_s = np.broadcast_arrays(
            compute_s[:, None, None] * ready_shares, message_s[None]
        )
        # Shape (16, 1): all buckets of a configuration slow compute down equally.
        slowdown = self.felt * kernel_slowdowns().to_numpy()[:, None]
        # Messages take no time of a processor in this model.
        software_s = np.zeros(sent_s.shape)
        _, ends_s = one_by_one(
            ready_s,
            software_s,
            sent_s,
            slowdown=slowdown,
            message_slowdown=self.messages,
        )
        # The last bucket is ready when all compute is done, so that its message ends last.
        return ends_s[..., -1]

    def iteration(self, network: str, batch: int, configuration: str) -> Iteration:
        """Return the predicted iteration at one batch and configuration, with its timeline.

        Parameters
        ----------
        network : str
            The name of the network in the paper.
        batch : int
            The batch size.
        configuration : str
            Blocks and threads of the all-reduce, such as "2x256".
        """
        # `layers` returns a workload that takes one second per FLOP. It is scaled so that its whole
        # compute takes ``compute_s``.
        workload = layers(network)
        compute_s = self.start_s[network] + self.image_s[network] * batch
        scaled = workload.scaled(compute_s / workload.compute_s)
        # The time of an all-reduce divided by that under the default configuration (Fig 2).
        allreduce_ratio = float(relative_times()[configuration])
        default_s_per_byte = self.allreduce_s / ALLREDUCE_BYTES
        # The time of a message is proportional to its bytes, so that it has no latency alpha.
        cost = AlphaBeta(
            alpha_s=0.0, beta_s_per_byte=default_s_per_byte * allreduce_ratio
        )
        link = Link(
            slowdown=self.felt * float(kernel_slowdowns()[configuration]),
            message_slowdown=self.messages,
        )
        return Iteration(scaled, plan.ddp(scaled), cost, link)


@cache
def fitted(slowdowns: str) -> Fitted:
    """Fit the unknowns of the model to the throughputs of Fig 8 at the batches FITTED.

    Parameters
    ----------
    slowdowns : {"both", "none"}
        One of FIT_MODELS: a model in which both compute and messages slow each other down, or
        one in which neither is slowed down.

    Returns
    -------
    Fitted
        The model with the least sum of squared differences between the logarithms of its
        throughputs and of the printed ones.

    Notes
    -----
    The vector of unknowns has the logarithm of ``allreduce_s``, then the slowdowns ``felt``
    (the share of Fig 3's slowdown that compute feels) and ``messages``. Then come logarithms
    of two times of compute by network: ``start_s``, which does not grow with the batch, and
    ``image_s``, that of each image. Logarithms keep times above 0. The model "none" has the
    same unknowns and ignores both slowdowns.
    """
    # SciPy takes long to import.
    from scipy.optimize import least_squares

    printed = throughput()
    # A dict keeps the order of Fig 8, and each network once.
    networks = list(dict.fromkeys(printed.index.get_level_values("network")))
    # Axes are networks, batches of FITTED, and configurations.
    fitted_throughputs = [printed.loc[name].loc[list(FITTED)] for name in networks]
    log_throughputs = np.array([np.log(rows.to_numpy()) for rows in fitted_throughputs])
    n = len(networks)
    # The bounds are in the order of the unknowns. The time of an all-reduce has none, both
    # slowdowns are 0 or more, and both times of compute of each of the n networks are 10 ns or
    # more.
    lower = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    # The minimum is flat. With the default tolerances, the search would end while the digits
    # that `_rounded` keeps still change. With "jac", each unknown, a logarithm or a share, is
    # scaled by how much it changes the residuals.
    solution = least_squares(
        _residuals,
        _first_guess(log_throughputs),
        args=(networks, slowdowns, log_throughputs),
        bounds=(lower, np.inf),
        x_scale="jac",
        ftol=1e-13,
        xtol=1e-13,
        gtol=1e-13,
    )
    return _rounded(_model_of(solution.x, networks, slowdowns))


def _model_of(unknowns: Floats, networks: list[str], slowdowns: str) -> Fitted:
    """Return the model of a vector of unknowns.

    ``unknowns`` has, in this order, the logarithm of ``allreduce_s``, then ``felt`` and
    ``messages`` themselves, then the logarithms of ``start_s`` of all ``networks`` (the part
    of an iteration's compute that does not grow with the batch), and last those of
    ``image_s`` (the compute that each image adds). ``slowdowns`` is one of FIT_MODELS.
    """
    # The model "none" ignores its two unknowns of slowdowns, whatever their values.
    felt = 0.0
    messages = 0.0
    if slowdowns != "none":
        felt, messages = unknowns[1:3].tolist()
    times_s = np.exp(unknowns[3:])
    # The first half of the times are starts, and the second half times of an image.
    start_s, image_s = times_s.reshape(2, len(networks)).tolist()
    return Fitted(
        allreduce_s=float(np.exp(unknowns[0])),
        felt=felt,
        messages=messages,
        start_s=dict(zip(networks, start_s, strict=True)),
        image_s=dict(zip(networks, image_s, strict=True)),
    )


def _residuals(
    unknowns: Floats, networks: list[str], slowdowns: str, log_throughputs: Floats
) -> Floats:
    """Return by how much a model's throughputs miss the printed ones.

    Parameters
    ----------
    unknowns : ndarray, shape (3 + 2 n,)
        The vector of unknowns, as `_model_of` takes it.
    networks : list of str, length n
        The names of the networks in the paper.
    slowdowns : {"both", "none"}
        One of FIT_MODELS: "both" uses the two unknown slowdowns, of compute and of messages,
        and "none" ignores them.
    log_throughputs : ndarray, shape (n, 2, 16)
        The logarithms of the printed images per second, by network, batch of FITTED, and
        configuration. They are NaN for cells in which the paper prints nothing.

    Returns
    -------
    ndarray, shape (m,)
        The logarithm of the printed throughput less that of the model's, for each of the m
        cells that the paper prints.
    """
    model = _model_of(unknowns, networks, slowdowns)
    batches = np.array(FITTED, float)
    # Shape (n, 2, 16), as ``log_throughputs``.
    iterations_s = np.array([model.iteration_s(name, batches) for name in networks])
    images_per_s = batches[:, None] / iterations_s
    differences = log_throughputs - np.log(images_per_s)
    return differences[np.isfinite(differences)]


def _first_guess(log_throughputs: Floats) -> list[float]:
    """Return the vector of unknowns, in the order of `_model_of`, at which the search begins.

    The compute of an image is taken from Fig 8: it is what each further image adds to the
    iteration under the fastest configuration. The other numbers are guesses: 15 ms for the
    all-reduce of 25 MB, 0.1 for both slowdowns, and 1 ms for the part of the compute that
    does not grow with the batch.

    ``log_throughputs``, shape (n, 2, 16), has the logarithms of images per second by network,
    batch of FITTED, and configuration.
    """
    batches = np.array(FITTED, float)
    added_images = FITTED[1] - FITTED[0]
    image_s = []
    for logs in log_throughputs:
        # The largest throughput of each of the two batches, over the 16 configurations. Cells that
        # are not printed are NaN.
        images_per_s = np.exp(np.nanmax(logs, axis=1))
        fastest_s = batches / images_per_s
        # `np.ptp` returns the longer of the two iterations less the shorter one.
        added_s = float(np.ptp(fastest_s))
        image_s.append(added_s / added_images)
    log_start_s = np.full(len(image_s), np.log(1e-3))
    return [np.log(0.015), 0.1, 0.1, *log_start_s, *np.log(image_s)]


def _rounded(fit: Fitted, digits: int = 5) -> Fitted:
    """Return a model with its parameters rounded to ``digits`` significant digits.

    The minimum is flat. Further digits depend on how a processor computes logarithms, and
    would make the tables of two machines differ.
    """

    def rounded(value: float) -> float:
        return float(f"{value:.{digits}g}")

    return Fitted(
        allreduce_s=rounded(fit.allreduce_s),
        felt=rounded(fit.felt),
        messages=rounded(fit.messages),
        start_s={network: rounded(start_s) for network, start_s in fit.start_s.items()},
        image_s={network: rounded(image_s) for network, image_s in fit.image_s.items()},
    )


def predicted(model: str) -> pd.DataFrame:
    """Return Fig 8 as a model predicts the throughputs.

    Parameters
    ----------
    model : {"both", "none"}
        One of FIT_MODELS.

    Returns
    -------
    DataFrame
        Images per second, with the rows and columns of `throughput`.
    """
    tables = []
    for network, rows in throughput().groupby(level="network", sort=False):
        batches = rows.index.get_level_values("batch").to_numpy(dtype=float)
        iterations_s = fitted(model).iteration_s(str(network), batches)
        images_per_s = batches[:, None] / iterations_s
        # `iteration_s` has the configurations in the order of figure 2, which is also that of
        # figure 8.
        tables.append(pd.DataFrame(images_per_s, rows.index, rows.columns))
    return pd.concat(tables)


def errors() -> pd.DataFrame:
    """Return how well each model predicts the batches of Fig 8 that were not fitted.

    A configuration of a network counts only if figure 8 prints its throughput at both
    fitted batches.

    Returns
    -------
    DataFrame
        A row for each of FIT_MODELS. One more row, "default", is for choosing the default
        configuration without any model. It has a regret, and NaN in the other columns, because
        nothing is predicted. Columns:

        cases
            The number of throughputs.
        median
            The median absolute relative error of the throughputs.
        regret
            By which share the printed throughput of the model's choice of a configuration
            falls short of the best one, as a mean over networks and batches.
    """
    printed = _not_fitted()
    # Each throughput as a share of that of the best configuration of its network and batch.
    share_of_best = printed.div(printed.max(axis=1), axis=0)

    table = {}
    for model in FIT_MODELS:
        # Only predictions of printed throughputs count.
        images = predicted(model).loc[printed.index].where(printed.notna())
        relative_errors = (images / printed - 1).abs().stack()
        # The model chooses the configuration that it predicts to be the fastest.
        is_chosen = images.eq(images.max(axis=1), axis=0)
        # All other cells of a row become NaN, so that the maximum is the cell of the choice.
        reached = share_of_best.where(is_chosen).max(axis=1)
        table[model] = {
            "cases": relative_errors.count(),
            "median": relative_errors.median(),
            "regret": 1 - reached.mean(),
        }
    table["default"] = {"regret": 1 - share_of_best[DEFAULT].mean()}
    return pd.DataFrame(table).T


def _not_fitted() -> pd.DataFrame:
    """Return the rows of figure 8 at batches that were not fitted.

    A configuration of a network is NaN unless figure 8 prints its throughput at both fitted
    batches.
    """
    grid = throughput()
    is_fitted = grid.index.isin(FITTED, level="batch")
    # Figure 8 lacks some cells, which are NaN.
    has_both = grid[is_fitted].notna().groupby("network").all()
    # The row of a network is repeated for each of its batches.
    has_both = has_both.reindex(grid.index, level="network")
    return grid.where(has_both)[~is_fitted]


def best(network: str, batch: int) -> str:
    """Return the configuration with the largest throughput in Fig 8."""
    return str(throughput().loc[(network, batch)].idxmax())


@cache
def parts_s(network: str, batch: int, configuration: str) -> tuple[float, float, float]:
    """Return the three PARTS of a simulated iteration, in their order and in seconds."""
    # In the model "both", compute and messages slow each other down.
    timeline = fitted("both").iteration(network, batch, configuration).timeline()
    overlap_s = timeline.overlap_s()
    compute_only_s = timeline.busy_s(COMPUTE) - overlap_s
    return compute_only_s, overlap_s, timeline.exposed_communication_s()


def with_best(networks: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """Return the parts of iterations under the default and under the paper's best choice.

    Parameters
    ----------
    networks : mapping of str to (str, int)
        The network and the batch of each case, by the label of the case.

    Returns
    -------
    DataFrame
        PARTS in seconds. Each case has a row for the default and, after that, a row for
        the best configuration, which are named "<label>, <configuration>". If the default
        is the best configuration, the case has a single row.
    """
    rows = {}
    for label, (network, batch) in networks.items():
        for configuration in (DEFAULT, best(network, batch)):
            row_name = f"{label}, {configuration}"
            rows[row_name] = parts_s(network, batch, configuration)
    return pd.DataFrame.from_dict(rows, orient="index", columns=PARTS)
