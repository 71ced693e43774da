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
    """Return a network whose layers take as many seconds as they have FLOP.

    Only ratios of its times have a meaning. The FLOP are those of the recorded profiles.

    Parameters
    ----------
    network : str
        The name of the network in the paper.

    Returns
    -------
    Workload
        The tensors of one iteration.

    Raises
    ------
    UserError
        If no recorded profile has the network on one rank in fp32.
    """
    name = specs.network_named(network).lower()
    selection = f"network == {name!r} and precision == 'fp32' and ranks == 1"
    for recording in source.recordings("layers").values():
        rows = recording.table("layers").query(selection)
        if len(rows):
            # FLOP grow with the batch, and only ratios of the times have a meaning.
            rows = rows[rows["batch"] == rows["batch"].min()]
            # The recorded FLOP are those of the whole batch, which is passed as one sample.
            profile = LayerProfile.from_flops(
                network,
                1,
                tuple(rows["tensor"]),
                rows["parameters"].to_numpy(),
                rows["flops"].to_numpy(),
                peak_flops_per_s=1.0,
                utilisation=1.0,
            )
            return profile.workload()
    raise UserError(
        f"no recorded fp32 profile of {network} on one rank: record its layers"
    )


@cache
def _buckets(network: str) -> tuple[Floats, Floats]:
    """Return when each of PyTorch's buckets is ready, and its bytes, both (G,).

    A bucket is ready after a share of the network's compute.
    """
    workload = layers(network)
    buckets = plan.ddp(workload)
    ready_shares = buckets.group_ready_s(workload) / workload.compute_s
    return ready_shares, buckets.group_bytes(workload).astype(float)


@cache
def kernel_slowdowns() -> pd.Series:
    """Return how much longer kernels take during an all-reduce (sharing Fig 3).

    Returns
    -------
    Series
        By configuration, the geometric mean over the five kernels less 1: 0.1 means that
        kernels take a tenth longer.
    """
    grid = paper_table("sharing", "fig03")
    logs = np.log(grid["slowdown"])
    means = np.exp(logs.groupby(configurations(grid), sort=False).mean())
    # Figures 2 and 3 may list configurations in different orders. That of figure 2 is used.
    return means[relative_times().index] - 1


@dataclass(frozen=True, eq=False)
class Fitted:
    """The contention model with its fitted unknowns.

    Attributes
    ----------
    allreduce_s : float
        The time of an all-reduce of 25 MB under the default configuration, in seconds.
    felt : float
        Which share of Fig 3's slowdown the training feels.
    messages : float
        How much longer a message takes during compute: 0.1 is a tenth longer.
    start_s : dict of str to float
        By network, the part of an iteration's compute that no image adds to, in seconds.
    image_s : dict of str to float
        By network, the compute of each image, in seconds.
    """

    allreduce_s: float
    felt: float
    messages: float
    start_s: dict[str, float]
    image_s: dict[str, float]

    def iteration_s(self, network: str, batches: Floats) -> Floats:
        """Return the predicted iterations of a network under every configuration.

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
        relative = relative_times().to_numpy()
        images = np.asarray(batches, float)
        compute_s = self.start_s[network] + self.image_s[network] * images
        s_per_byte = self.allreduce_s / ALLREDUCE_BYTES
        message_s = s_per_byte * np.outer(relative, bucket_bytes)
        # Axes are batches, configurations and buckets.
        ready_s, sent_s = np.broadcast_arrays(
            compute_s[:, None, None] * ready_shares, message_s[None]
        )
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
        # The iteration ends with its last message.
        return ends_s[..., -1]

    def iteration(self, network: str, batch: int, configuration: str) -> Iteration:
        """Return one of the predicted iterations, with its timeline.

        Parameters
        ----------
        network : str
            The name of the network in the paper.
        batch : int
            The batch size.
        configuration : str
            Blocks and threads of the all-reduce, as Fig 2 has them.
        """
        workload = layers(network)
        compute_s = self.start_s[network] + self.image_s[network] * batch
        scaled = workload.scaled(compute_s / workload.compute_s)
        relative = float(relative_times()[configuration])
        cost = AlphaBeta(0.0, self.allreduce_s / ALLREDUCE_BYTES * relative)
        link = Link(
            slowdown=self.felt * float(kernel_slowdowns()[configuration]),
            message_slowdown=self.messages,
        )
        return Iteration(scaled, plan.ddp(scaled), cost, link)


@cache
def fitted(slowdowns: str) -> Fitted:
    """Fit the unknowns to the throughputs of Fig 8 at the batches FITTED.

    Parameters
    ----------
    slowdowns : {"both", "none"}
        The model, one of FIT_MODELS.

    Returns
    -------
    Fitted
        The model with the least squares of the differences of log throughput.

    Notes
    -----
    The vector of unknowns has the logarithm of ``allreduce_s``, then ``felt`` and
    ``messages``, then the logarithms of ``start_s`` and of ``image_s`` by network.
    Logarithms keep times above 0.
    """
    # SciPy takes long to import.
    from scipy.optimize import least_squares

    printed = throughput()
    networks = list(dict.fromkeys(printed.index.get_level_values("network")))
    log_throughputs = np.array(
        [
            np.log(printed.loc[network].loc[list(FITTED)].to_numpy())
            for network in networks
        ]
    )
    n = len(networks)
    # Both slowdowns are 0 or more, and the times of compute 10 ns or more. The time of an
    # all-reduce, which comes first, has no bound.
    lower = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    # The minimum is flat. With the default tolerances, the search would end before the digits
    # settle that `_rounded` keeps.
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

    As `fitted` states, the vector has the logarithm of ``allreduce_s``, then ``felt`` and
    ``messages``, then the logarithms of ``start_s`` of all networks (the part of an
    iteration's compute that no image adds to), and last those of ``image_s`` (the compute
    of each image). Logarithms keep times above 0.
    """
    # The model "none" ignores the two unknowns of slowdowns.
    felt = 0.0
    messages = 0.0
    if slowdowns != "none":
        felt, messages = unknowns[1:3].tolist()
    times_s = np.exp(unknowns[3:])
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
        The vector of unknowns.
    networks : list of str, length n
        The networks.
    slowdowns : {"both", "none"}
        The model.
    log_throughputs : ndarray, shape (n, 2, 16)
        The logarithms of the printed images per second, by network, batch of FITTED, and
        configuration. They are NaN for cells in which the paper prints nothing.

    Returns
    -------
    ndarray, shape (m,)
        The differences of the logarithms, of the printed cells alone.
    """
    model = _model_of(unknowns, networks, slowdowns)
    batches = np.array(FITTED, float)
    iterations_s = np.array([model.iteration_s(name, batches) for name in networks])
    differences = log_throughputs - np.log(batches[:, None] / iterations_s)
    return differences[np.isfinite(differences)]


def _first_guess(log_throughputs: Floats) -> list[float]:
    """Return the unknowns at which the search begins.

    An image takes the seconds that each further image adds under the fastest
    configuration. The other numbers are guesses: an all-reduce takes 15 ms, both slowdowns
    are 0.1, and a start takes 1 ms.

    ``log_throughputs`` is as of `_residuals`.
    """
    batches = np.array(FITTED, float)
    between_batches = FITTED[1] - FITTED[0]
    image_s = []
    for logs in log_throughputs:
        fastest_s = batches / np.exp(np.nanmax(logs, axis=1))
        image_s.append(float(np.ptp(fastest_s)) / between_batches)
    log_starts = np.full(len(image_s), np.log(1e-3))
    return [np.log(0.015), 0.1, 0.1, *log_starts, *np.log(image_s)]


def _rounded(fit: Fitted, digits: int = 5) -> Fitted:
    """Return a model with its parameters rounded to significant digits.

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
        seconds = fitted(model).iteration_s(str(network), batches)
        images_per_s = batches[:, None] / seconds
        tables.append(pd.DataFrame(images_per_s, rows.index, rows.columns))
    return pd.concat(tables)


def errors() -> pd.DataFrame:
    """Return how well each model predicts the batches of Fig 8 that were not fitted.

    Only configurations count that are printed at both fitted batches.

    Returns
    -------
    DataFrame
        A row for each of FIT_MODELS, and a row "default" for always keeping the default
        configuration, which predicts nothing and has only the regret. Columns:

        cases
            The number of throughputs.
        median
            The median absolute relative error of the throughputs.
        regret
            How much slower the model's choice of a configuration is than the best one,
            as a mean over networks and batches.
    """
    grid = throughput()
    is_fitted = grid.index.isin(FITTED, level="batch")
    # Figure 8 lacks some cells, which are NaN.
    printed_in_all = grid[is_fitted].notna().groupby("network").all()
    printed_in_all = printed_in_all.reindex(grid.index, level="network")
    measured = grid.where(printed_in_all)[~is_fitted]
    # Each throughput over that of the best configuration of its network and batch.
    relative = measured.div(measured.max(axis=1), axis=0)

    table = {}
    for model in FIT_MODELS:
        images = predicted(model).loc[measured.index].where(measured.notna())
        relative_errors = (images / measured - 1).abs().stack()
        # The model chooses the configuration that it predicts to be the fastest.
        is_chosen = images.eq(images.max(axis=1), axis=0)
        reached = relative.where(is_chosen).max(axis=1)
        table[model] = {
            "cases": relative_errors.count(),
            "median": relative_errors.median(),
            "regret": 1 - reached.mean(),
        }
    table["default"] = {"regret": 1 - relative[DEFAULT].mean()}
    return pd.DataFrame(table).T


def best(network: str, batch: int) -> str:
    """Return the configuration with the largest throughput in Fig 8."""
    return str(throughput().loc[(network, batch)].idxmax())


@cache
def parts_s(network: str, batch: int, configuration: str) -> tuple[float, float, float]:
    """Return the three PARTS of a simulated iteration, in seconds."""
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
        Network and batch by the label of the case.

    Returns
    -------
    DataFrame
        PARTS in seconds. Each case has a row for the default and, after that, a row for
        the best configuration.
    """
    rows = {}
    for label, (network, batch) in networks.items():
        for configuration in (DEFAULT, best(network, batch)):
            row = parts_s(network, batch, configuration)
            rows[f"{label}, {configuration}"] = row
    return pd.DataFrame.from_dict(rows, orient="index", columns=PARTS)
