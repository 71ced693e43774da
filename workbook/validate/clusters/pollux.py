"""Pollux: iterations on T4 GPUs in many placements, predicted from their smallest batch.

The models know two numbers. C is the seconds of compute alone. W is the seconds that
all bytes take on the link alone. Nobody has timed W. It is inferred from the row of a
placement that calibrates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import plan
from ddlkit.core.link import one_by_one
from ddlkit.core.workload import Floats, Workload
from workbook.validate import clusters

Model = Callable[[Floats, Floats], Floats]
"""A function of C and W that returns the seconds of iterations.

All arrays have the shape (..., n). An iteration is never shorter for a larger W."""
NETWORKS = {
    "pollux-bert": "BERT",
    "pollux-deepspeech2": "DeepSpeech2",
    "pollux-ncf": "NCF",
    "pollux-resnet18": "ResNet-18",
    "pollux-resnet50-fitted": "ResNet-50",
    "pollux-yolov3": "YOLOv3",
}
"""The rules of data/external/rules.yml, one for each network, and the titles of the networks."""
PLACE = ["placement", "nodes", "ranks"]
"""The columns that distinguish placements.

Files by nodes and ranks have no placement: they do not say how many GPUs a node has."""


def wire_s(model: Model, compute_s: Floats, iteration_s: Floats) -> Floats:
    """Return the W with which a model predicts measured iterations exactly.

    W is the seconds that all bytes take on the link alone, which nobody has timed.

    Parameters
    ----------
    model : callable
        The model.
    compute_s : ndarray, shape (n,)
        The seconds of compute, C.
    iteration_s : ndarray, shape (n,)
        The measured seconds.

    Returns
    -------
    ndarray, shape (n,), or (k, n) for a model with k values of its free number
        Seconds, found by bisection between 0 and the measured iteration. They are 0 where
        no W between these predicts the iteration.
    """
    compute_s = np.asarray(compute_s, float)
    measured_s = np.asarray(iteration_s, float)
    least_s = model(compute_s, np.zeros_like(measured_s))
    low_s = np.zeros_like(least_s)
    high_s = np.broadcast_to(measured_s, least_s.shape)
    # An iteration is never shorter for a larger W, so that there is such a W if the smallest
    # gives less than the measured iteration, and the largest at least as much.
    exists = (least_s < measured_s) & (model(compute_s, high_s) >= measured_s)
    # Each step halves the range of W. A double has 53 bits, so that more steps are of no use.
    for _ in range(53):
        middle_s = (low_s + high_s) / 2
        is_enough = model(compute_s, middle_s) >= measured_s
        low_s = np.where(is_enough, low_s, middle_s)
        high_s = np.where(is_enough, middle_s, high_s)
    return np.where(exists, high_s, 0.0)


# -- models --------------------------------------------------------------------------


def norm(gamma: ArrayLike) -> Model:
    """Return Pollux's own model, (C^gamma + W^gamma)^(1/gamma).

    C is the compute, and W the time of all bytes on the link. With a gamma of 1 they are
    added, so that nothing is hidden. With an infinite gamma the shorter of them is hidden.
    """
    power = np.asarray(gamma, float)

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        longer_s = np.maximum(compute_s, wire_s)
        shorter_s = np.minimum(compute_s, wire_s)
        # The longer time is factored out of the sum, so that large powers do not overflow.
        ratio = shorter_s / longer_s
        return np.asarray(longer_s * (1 + ratio**power) ** (1 / power))

    return iteration_s


def slowed(workload: Workload, slowdown: ArrayLike) -> Model:
    """Return our model: the messages of PyTorch's buckets follow one another.

    The message of a bucket starts when the bucket is ready and the message before it has
    ended. Compute and the time of all bytes on the link are divided between the buckets as in
    a workload.

    Parameters
    ----------
    workload : Workload
        The layers. Only their shares of compute and of bytes count.
    slowdown : float or ndarray, shape (k, 1)
        How much longer compute takes while a message is under way: 0.1 is a tenth longer.
        Several values give times of shape (k, n).
    """
    buckets = plan.ddp(workload)
    ready_share = buckets.group_ready_s(workload) / workload.compute_s
    bytes_share = buckets.group_bytes(workload) / workload.bytes.sum()
    update_share = workload.update_s / workload.compute_s

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        """Return the seconds of n iterations.

        ``compute_s`` is how long each of them computes, and ``wire_s`` how long all its bytes
        take on the link. Bucket b is ready after ``ready_share[b]`` of the compute, and has
        ``bytes_share[b]`` of the bytes. Compute is slowed while a message is under way. The
        update follows the last message, so that nothing slows it. The result has the shape (n,),
        or (k, n) for k slowdowns.
        """
        # With slowdowns of shape (k, 1), broadcasting gives (k, n).
        shape = np.broadcast_shapes(compute_s.shape, wire_s.shape, np.shape(slowdown))
        # The outer products have one more axis at the end, that of the buckets.
        ready_s = np.multiply.outer(np.broadcast_to(compute_s, shape), ready_share)
        on_link_s = np.multiply.outer(np.broadcast_to(wire_s, shape), bytes_share)
        # The model counts only the time on the link, and none that a processor takes to send.
        no_processor_time_s = np.zeros_like(ready_s)
        # Each slowdown holds for all n iterations and for all buckets, so that its axes for
        # them have length 1.
        slowdown_of_buckets = np.asarray(slowdown, float)[..., None]
        _, ends_s = one_by_one(
            ready_s, no_processor_time_s, on_link_s, slowdown=slowdown_of_buckets
        )
        return np.asarray(ends_s[..., -1] + update_share * compute_s)

    return iteration_s


def model(name: str, workload: Workload, number: ArrayLike = 0.0) -> Model:
    """Return a model by its name.

    A model is a function of the compute C and of the time W that all bytes take on the link.

    Parameters
    ----------
    name : str
        One of MODELS.
    workload : Workload
        The layers. Only their shares of compute and of bytes count.
    number : float or ndarray, shape (k, 1)
        The free number: gamma of "norm", and the slowdown of compute of "workbook_slowed".
        "workbook" has a slowdown of 0. Several values give times of shape (k, n).
    """
    if name == "no_overlap":
        # C + W
        return np.add
    if name == "perfect_overlap":
        # The longer one of C and W.
        return np.maximum
    if name == "norm":
        return norm(number)
    # "workbook" with its number 0, or "workbook_slowed".
    return slowed(workload, number)


MODELS: dict[str, Sequence[float]] = {
    "no_overlap": (0.0,),
    "perfect_overlap": (0.0,),
    "norm": np.linspace(1.0, 10.0, 91).tolist(),
    "workbook": (0.0,),
    "workbook_slowed": np.linspace(0.0, 1.0, 51).tolist(),
}
"""The models, and the values of their free number that are tried.

Pollux keeps its own between 1 and 10."""


# -- networks ------------------------------------------------------------------------

_NODE = re.compile(
    r"^node(?P<number>\d+) -- (?P<operator>.+) -- forward_compute_time=(?P<forward_ms>\S+), "
    r"backward_compute_time=(?P<backward_ms>\S+), "
    r"activation_size=.+, parameter_size=(?P<bytes>\S+)$",
    re.MULTILINE,
)


@cache
def pipedream_workload(network: str) -> Workload:
    """Return a network as PipeDream's profiler recorded it, with one tensor per layer.

    The recording does not state the batch. The time of a layer without parameters counts
    towards the last layer before it that has some. Layers before the first one with
    parameters count towards that one. The input is left out, because its time is that of
    loading data.
    """
    path = clusters.EXTERNAL / "pipedream" / f"{network}.txt.gz"
    rows = []
    for node in _NODE.finditer(clusters.read(path)):
        if not node["operator"].startswith("Input"):
            numbers = [node["forward_ms"], node["backward_ms"], node["bytes"]]
            rows.append((int(node["number"]), *map(float, numbers)))
    # In the order of forward, which is that of the numbers of the layers.
    _, forward_ms, backward_ms, n_bytes = np.array(sorted(rows)).T
    has_parameters = n_bytes > 0
    # The tensor that each layer counts towards, numbered from 0 in the order of forward.
    tensor = np.maximum(np.cumsum(has_parameters) - 1, 0)
    # The backward time of each tensor is the sum over its layers. Backward goes from the last
    # tensor to the first.
    backward_s = np.bincount(tensor, backward_ms)[::-1] / 1e3
    forward_s = forward_ms.sum() / 1e3
    return Workload.from_arrays(forward_s, backward_s, n_bytes[has_parameters][::-1])


def bert() -> Workload:
    """Return BERT-base with its published sizes, in the order in which gradients are ready.

    The embedding is the last. Backward takes 1 s, which all other tensors share by their
    elements. Forward takes 0.5 s.
    """
    # Elements of layers that are 768 wide. Only attention is counted with its biases.
    attention = [768 * 769] * 4
    feed_forward = [768 * 3072] * 2
    blocks = (feed_forward + attention) * 12
    # 30,522 words, 512 positions and 2 kinds of segments.
    embedding = 768 * (30_522 + 514)
    elements = np.array([*blocks, embedding])
    of_blocks = elements[:-1]
    backward_s = np.array([*of_blocks / of_blocks.sum(), 0.0])
    # An element has 4 bytes.
    return Workload.from_arrays(0.5, backward_s, 4 * elements)


def uniform() -> Workload:
    """Return ten equal layers, for a network whose layers are not known.

    Each layer is as large as a bucket of PyTorch. Times are those of `bert`.
    """
    backward_s = np.full(10, 0.1)
    return Workload.from_arrays(0.5, backward_s, np.full(10, plan.DDP_BUCKET_BYTES))


SHAPES: dict[str, Callable[[], Workload]] = {
    "resnet50": clusters.resnet50,
    "resnet18": partial(pipedream_workload, "resnet18"),
    "bert": bert,
    "uniform": uniform,
}
"""The shares of compute and of bytes by layer, which ``shape`` of a rule names.

PipeDream's ResNet-18 has 1,000 classes and 224 pixels, and that of Pollux has 10
classes and 32 pixels."""


# -- predictions ---------------------------------------------------------------------


def timings(parts: clusters.Rows, target: pd.DataFrame) -> Floats:
    """Return the measured times from which the models predict n rows.

    Parameters
    ----------
    parts : Rows
        The measured iterations of a rule of data/external/rules.yml. Its rows of compute
        have each batch once, and those that calibrate each placement once.
    target : DataFrame
        The rows to predict.

    Returns
    -------
    ndarray, shape (3, n)
        Seconds, in this order: the compute alone of the row to predict, and the compute
        alone and the iteration of the row that calibrates the same placement.
    """
    # The compute of a batch is the iteration on one GPU.
    compute_s = parts.compute.set_index("batch")["iteration_s"]
    placements = pd.MultiIndex.from_frame(target[PLACE])
    calibrating = parts.calibrate.set_index(PLACE).loc[placements]
    return np.array(
        [
            compute_s[target["batch"]],
            compute_s[calibrating["batch"]],
            calibrating["iteration_s"],
        ]
    )


def predict(timed_s: Floats, model: Model) -> Floats:
    """Return predicted iterations in seconds, shape (n,), or (k, n) for k values of a free number.

    A model needs the compute of a row, and the time that all bytes take on the link. Nobody has
    timed the latter. It is the time with which the same model predicts, without error, the row
    that calibrates the same placement.

    Parameters
    ----------
    timed_s : ndarray, shape (3, n)
        The result of `timings`: the compute of each row to predict, and the compute and the
        measured iteration of the row that calibrates its placement.
    model : callable
        The model.
    """
    compute_s, calibrating_compute_s, calibrating_iteration_s = timed_s
    inferred_wire_s = wire_s(model, calibrating_compute_s, calibrating_iteration_s)
    return model(compute_s, inferred_wire_s)


def fit(parts: clusters.Rows, name: str, shape: Workload) -> float:
    """Return the free number with which a model has the least mean absolute relative error.

    Parameters
    ----------
    parts : Rows
        The measured iterations of a rule of data/external/rules.yml, which says what each
        serves for. The errors are those of its rows ``fit`` that have several nodes.
    name : str
        The model. A model without a free number gives 0.
    shape : Workload
        The layers. Only their shares of compute and of bytes count.
    """
    target = parts.fit.query("nodes > 1")
    # The k values that are tried. A model without a free number has only 0.
    numbers = np.array(MODELS[name])
    # The measured times from which the n target rows are predicted.
    timed_s = timings(parts, target)
    # As a column of shape (k, 1), the values give predictions of shape (k, n).
    predicted_s = predict(timed_s, model(name, shape, numbers[:, None]))
    errors = np.abs(predicted_s / target["iteration_s"].to_numpy() - 1)
    # "no_overlap" and "perfect_overlap" ignore the number, so that their errors have shape (n,).
    # They get the shape (1, n) here. The means over the rows have shape (k,).
    mean_errors = np.atleast_2d(errors).mean(axis=1)
    return float(numbers[mean_errors.argmin()])


def most_gpus(target: pd.DataFrame) -> NDArray[np.int64]:
    """Return the number of GPUs on the fullest node of each of n rows, shape (n,).

    A placement such as "1124" has a digit for each node. If the placement is "", which is
    not known, ranks are spread evenly over the nodes.
    """
    even = np.ceil(target["ranks"] / target["nodes"])
    placed = target["placement"].map(lambda text: max(map(int, text), default=0))
    return np.where(placed > 0, placed, even).astype(np.int64)


def predictions(rules: Sequence[str] = tuple(NETWORKS)) -> pd.DataFrame:
    """Return the test rows of rules as predicted by every model.

    A rule of data/external/rules.yml divides the measured iterations of a network: some
    calibrate a model, some serve to fit its free number, and the test rows are predicted.

    Parameters
    ----------
    rules : sequence of str, optional
        The names of the rules. By default all of NETWORKS, which has one for each network.

    Returns
    -------
    DataFrame
        One row for each test row and model. The columns are ``placement``, ``nodes``,
        ``ranks``, ``batch``, ``rule``, ``most_gpus`` (on the fullest node), ``measured_s``,
        ``model`` and ``predicted_s``.
    """
    tables = []
    for rule in rules:
        parts = clusters.rows(rule)
        # The rule names the workload whose layers stand for those of its network.
        shape = SHAPES[clusters.rules()[rule]["shape"]]()
        # The compute of each test row, and the compute and the iteration of the row that
        # calibrates its placement. The iterations of test rows are not among them.
        timed_s = timings(parts, parts.test)
        measured = parts.test[[*PLACE, "batch"]].assign(
            rule=rule,
            most_gpus=most_gpus(parts.test),
            measured_s=parts.test["iteration_s"],
        )
        for name in MODELS:
            free_number = fit(parts, name, shape)
            predicted_s = predict(timed_s, model(name, shape, free_number))
            tables.append(measured.assign(model=name, predicted_s=predicted_s))
    return pd.concat(tables, ignore_index=True)


def by_node(predicted: pd.DataFrame, rule: str, name: str = "workbook") -> pd.Series:
    """Return the median signed error by the number of GPUs on the fullest node.

    Parameters
    ----------
    predicted : DataFrame
        The rows of `predictions`. Only the median batch and larger ones count. Messages are a
        small part of an iteration with such a batch, so that the errors show how compute differs
        between the nodes.
    rule : str
        A rule of data/external/rules.yml, which says which measured rows of a network
        predict which others.
    name : str, optional
        The model. By default our model without any slowdown.
    """
    rows = predicted.query("rule == @rule and model == @name")
    large = rows[rows["batch"] >= rows["batch"].median()]
    errors = large["predicted_s"] / large["measured_s"] - 1
    return errors.groupby(large["most_gpus"]).median()
