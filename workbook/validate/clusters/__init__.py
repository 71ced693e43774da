"""What others measured on their clusters (data/external).

Readers of the published files return seconds and bytes. Rules say which rows may
calibrate a model, and which rows are predicted.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.fit import AUTO, fit
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.store import files
from workbook.common import places, transcribed

EXTERNAL = places.DATA / "external"
"""What others published, as they published it."""


# -- readers of published files ------------------------------------------------------


def read(path: Path) -> str:
    """Return the text of a published file, unpacked if it is packed.

    Raises
    ------
    UserError
        If the file differs from the copy of what was published, whose hash is recorded.
    """
    return files.text_of(transcribed.read_transcribed(path), path)


def table(path: Path, **kinds: type) -> pd.DataFrame:
    """Return a published CSV file as a table.

    Parameters
    ----------
    path : Path
        The file, which may be packed. `read` refuses it if it was changed.
    **kinds : type
        The types of columns, by name, whose values look like values of another type. A
        name that consists of digits is an example.
    """
    return pd.read_csv(io.StringIO(read(path)), dtype=kinds)


def pollux_iterations(path: Path) -> pd.DataFrame:
    """Return the iterations of a file of Pollux.

    Returns
    -------
    DataFrame
        One row for each setting. The columns are ``placement`` (a digit for each node, its
        number of GPUs, or "" if the file does not say), ``nodes``, ``ranks``,
        ``batch`` (of one GPU) and ``iteration_s``.
    """
    columns = {
        "num_nodes": "nodes",
        "num_replicas": "ranks",
        "local_bsz": "batch",
        "step_time": "iteration_s",
    }
    frame = table(path, placement=str).rename(columns=columns)
    # A file has either placements or the columns of nodes and ranks.
    if "placement" in frame:
        frame["nodes"] = frame["placement"].str.len()
        frame["ranks"] = frame["placement"].map(lambda text: sum(map(int, text)))
    else:
        frame["placement"] = ""
    return frame[["placement", *columns.values()]]


def abci_iterations(path: Path) -> pd.DataFrame:
    """Return the logged iterations of a training on ABCI.

    Returns
    -------
    DataFrame
        One row for each logged step. The columns are ``step``, ``iteration_s`` (from
        the throughput that the log prints), ``ranks``, ``batch`` (of one GPU) and
        ``amp`` (whether the precision is mixed).
    """
    entries = []
    # Each line is an object in JSON behind the name of the logger.
    for line in read(path).splitlines():
        entry = json.loads(line.removeprefix("DLLL "))
        if entry["type"] == "LOG":
            entries.append(entry)
    # The first entry has the settings of the training.
    settings = entries[0]["data"]
    ranks = settings["world_size"]
    batch = settings["batch_size"]
    rows = []
    for entry in entries[1:]:
        # The step of an iteration is (epoch, iteration). Summaries have fewer numbers. Each
        # iteration has two entries, of which one states the throughput.
        step = entry["step"]
        images_per_s = entry["data"].get("train.total_ips")
        if len(step) == 2 and images_per_s is not None:
            _, iteration = step
            rows.append((iteration, ranks * batch / images_per_s))
    frame = pd.DataFrame(rows, columns=["step", "iteration_s"])
    return frame.assign(ranks=ranks, batch=batch, amp=bool(settings["amp"]))


def cs336_iterations(path: Path) -> pd.DataFrame:
    """Return the iterations of a file of cs336.

    Returns
    -------
    DataFrame
        One row for each setting. The columns are those of the file, among them ``batch``
        (of one GPU), ``sequence`` (its length in tokens) and ``iteration_s``. In addition,
        there are ``bucket_bytes`` (0 without buckets) and ``overlap`` (whether messages
        overlap with backward).
    """
    frame = table(path)
    bucket_bytes = MIB * frame.pop("bucket_mb")
    # In a file without the column overlap, the messages of all iterations overlap with backward.
    overlap = frame.get("overlap", True)
    return frame.assign(bucket_bytes=bucket_bytes, overlap=overlap)


def vidur_all_reduce(path: Path) -> pd.DataFrame:
    """Return the all-reduces of a file of Vidur.

    Returns
    -------
    DataFrame
        One row for each size. The columns are ``table`` (the machine, ``ranks`` and
        ``per_node``, as in "h100_dgx-8x8"), ``ranks``, ``per_node`` (the GPUs of a node),
        ``bytes`` and ``median_s``.
    """
    frame = table(path)
    # The name of a file is the machine, a hyphen, and its largest size.
    machine, _, _ = path.name.partition("-")
    ranks = frame["ranks"].astype(str)
    per_node = frame["per_node"].astype(str)
    names = f"{machine}-" + ranks + "x" + per_node
    return frame.assign(table=names, median_s=frame["median_us"] / 1e6)


# -- ResNet-50 as TrioSim traced it --------------------------------------------------


@cache
def resnet50() -> Workload:
    """Return ResNet-50 with the times of its kernels.

    TrioSim traced them on an H100 with a batch of 128 in float32. An operator of
    backward that has a parameter among its inputs makes the gradients of the layer of this
    parameter. The time of any other operator counts towards the next gradient.
    """
    frame = table(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    # Lists, written as texts: the ids of the tensors that an operator takes, and how many elements
    # each of them has.
    for name in ("Operator_input", "InputSize"):
        frame[name] = [_integers(text) for text in frame[name]]
    # The file has microseconds.
    frame["seconds"] = frame["Operator_cudatimenooverlap"] / 1e6
    elements = _parameter_sizes(frame)
    layers = _parameters_of_layers(frame, elements)
    ready, gaps_s = _ready_gradients(frame[frame["stage"] == "backward"], layers)
    # An element in float32 has 4 bytes.
    n_bytes = [4 * elements[parameter] for parameter in ready]
    stage_s = frame.groupby("stage")["seconds"].sum()
    return Workload.from_arrays(
        stage_s["forward"], gaps_s, n_bytes, stage_s["optimizer"]
    )


def _integers(text: str) -> tuple[int, ...]:
    """Return all whole numbers of a text."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text))


def _parameter_sizes(frame: pd.DataFrame) -> dict[int, int]:
    """Return the number of elements of each parameter, by the id of its tensor."""
    is_update = frame["OperatorName"] == "aten::_foreach_addcdiv_"
    # The trace has one update of all parameters at once.
    (update,) = frame[is_update].itertuples()
    # The update takes all parameters, then as many first moments, and then as many roots
    # of second moments.
    count = len(update.InputSize) // 3
    parameters = update.Operator_input[:count]
    return dict(zip(parameters, update.InputSize[:count], strict=True))


def _parameters_of_layers(
    frame: pd.DataFrame, elements: Mapping[int, int]
) -> list[list[int]]:
    """Return the parameters of each layer, in the order of forward.

    ``frame`` has the traced operators, and the keys of ``elements`` are the ids of the
    tensors that are parameters. An operator of forward is a layer if it takes a parameter.
    """
    layers = []
    for inputs in frame.loc[frame["stage"] == "forward", "Operator_input"]:
        parameters = [tensor for tensor in inputs if tensor in elements]
        if parameters:
            layers.append(parameters)
    return layers


def _ready_gradients(
    backward: pd.DataFrame, layers: Sequence[list[int]]
) -> tuple[list[int], list[float]]:
    """Return the parameters in the order in which their gradients are ready.

    Parameters
    ----------
    backward : DataFrame
        The operators of backward in their order.
    layers : sequence of list of int
        The parameters of each layer, in the order of forward.

    Returns
    -------
    ready : list of int
        The parameters, by the ids of their tensors.
    gaps_s : list of float
        The seconds of backward between each gradient and the one before it.
    """
    pending = [*layers]
    ready: list[int] = []
    # The last gap is that to the next gradient. It grows with each operator.
    gaps_s = [0.0]
    for operator in backward.itertuples():
        gaps_s[-1] += operator.seconds
        layer = _layer_of(operator, pending)
        if layer:
            pending.remove(layer)
            # The gradients of a layer are ready together. As backward takes the last layer first,
            # so the last parameter of a layer comes first, such as a bias before its weights.
            ready += layer[::-1]
            # ``gaps_s`` ends with the gap to the first gradient of this layer. It is followed by
            # a gap of 0 to each further one, and by the gap to the next layer, which begins at 0.
            gaps_to_others_s = [0.0] * (len(layer) - 1)
            gap_to_next_layer_s = 0.0
            gaps_s += [*gaps_to_others_s, gap_to_next_layer_s]
    # No gradient follows the last gap. Its time counts towards the last gradient.
    after_s = gaps_s.pop()
    gaps_s[-1] += after_s
    return ready, gaps_s


def _layer_of(operator: Any, pending: Sequence[list[int]]) -> list[int] | None:
    """Return the layer whose gradients an operator of backward makes, if any.

    ``pending`` has the parameters of each layer without gradients so far, in the order of
    forward.
    """
    for layer in pending:
        if set(layer) & set(operator.Operator_input):
            return layer
    # A product of matrices is traced with a copy of its parameter, which has another id.
    # Backward begins with the last layers, so that its layer is the last pending one.
    if "AddmmBackward" in operator.OperatorName:
        return pending[-1]
    return None


# -- the rules, which say what the rows of a file may be used for --------------------

READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "pollux.read_iterations": pollux_iterations,
    "abci.read_iterations": abci_iterations,
    "abci.read_trainings": table,
    "cs336.read_iterations": cs336_iterations,
    "vidur.read_all_reduce": vidur_all_reduce,
}
"""Readers by their names in rules.yml, which is never edited."""


class Rows(NamedTuple):
    """The rows of a rule of data/external/rules.yml, by their purpose.

    A part that the rule lacks has no rows. No row is in two parts.

    Attributes
    ----------
    compute : DataFrame
        Iterations that show compute alone.
    calibrate : DataFrame
        Rows that calibrate a model for a placement or a table.
    fit : DataFrame
        Rows to which a free number of a model is fitted.
    test : DataFrame
        Rows that are predicted.
    """

    compute: pd.DataFrame
    calibrate: pd.DataFrame
    fit: pd.DataFrame
    test: pd.DataFrame


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Return the rules by name, as the head of data/external/rules.yml describes them.

    A rule says which files of others' measurements are read, and which of their rows serve for
    what (`Rows`).
    """
    return dict(files.own_yaml(files.read_text(EXTERNAL / "rules.yml"))["rules"])


@cache
def rows(name: str) -> Rows:
    """Return the rows of a rule of data/external/rules.yml.

    The rule says which files are read, and by a query for each field of `Rows` which of their
    rows the field has. A field without a query has no row.
    """
    rule = rules()[name]
    read_file = READERS[rule["read"]]
    paths = sorted(EXTERNAL.glob(rule["files"]))
    frame = pd.concat([read_file(path) for path in paths], ignore_index=True)
    # Queries such as "placement in @drawn" refer to a list of values in the rule: the placements or
    # the sizes that were drawn when the rule was written.
    variables = {"drawn": rule.get("drawn", [])}
    rows_by_field = {}
    for field in Rows._fields:
        query = rule.get(field)
        if query:
            rows_by_field[field] = frame.query(query, local_dict=variables)
        else:
            rows_by_field[field] = frame[:0]
    return Rows(**rows_by_field)


def fitted(
    predicted_s: Callable[[float], Any],
    measured_s: Any,
    most: float,
    least: float = 0.0,
) -> float:
    """Return the free number with which the median signed error of a model is nearest to 0.

    Parameters
    ----------
    predicted_s : callable
        Takes a free number and returns predicted seconds, which rise with it.
    measured_s : float or ndarray
        The measured seconds.
    most, least : float
        The largest and the smallest free number that is looked for. One of them is
        returned if the error is 0 only beyond it.
    """
    from scipy.optimize import brentq  # takes as long to import as pandas

    def bias(number: float) -> float:
        """Return the median signed error, which rises with the free number."""
        return float(np.median(predicted_s(number) / measured_s - 1))

    if bias(least) >= 0:
        return least
    if bias(most) <= 0:
        return most
    return float(brentq(bias, least, most, xtol=1e-9))


def predictions(
    rules: Sequence[str],
    models: Mapping[str, float],
    predicted_s: Callable[[Rows, pd.DataFrame, str, float], Floats],
    columns: Sequence[str],
) -> pd.DataFrame:
    """Return the test rows of rules as predicted by every model.

    A rule of data/external/rules.yml says which files of others' measurements are read, and
    which of their rows show compute alone, calibrate a model, or test it (`Rows`).

    Parameters
    ----------
    rules : sequence of str
        The names of the rules.
    models : mapping of str to float
        The largest free number of each model, or 0 if the model has none. The number is
        fitted to the rows of the rule that calibrate.
    predicted_s : callable
        Returns predicted seconds. Its arguments are all rows of a rule (`Rows`), those of
        them to predict, the name of a model and its free number.
    columns : sequence of str
        The columns of the test rows that are kept.

    Returns
    -------
    DataFrame
        One row for each test row and model. The columns are those of ``columns``,
        ``model``, ``measured_s``, ``predicted_s``, ``free`` (the fitted number, or NaN) and
        ``rule``. A model with a free number is left out if the rule has no rows of
        compute alone. Compute is then inferred from the rows that calibrate, so that any
        free number would predict them exactly, and none can be fitted.
    """
    tables = []
    for rule, (model, largest_number) in product(rules, models.items()):
        parts = rows(rule)
        # A model without a free number keeps NaN.
        number = np.nan
        if largest_number > 0:
            if parts.compute.empty:
                continue
            # The seconds of the rows that calibrate, as a function of the free number.
            by_number = partial(predicted_s, parts, parts.calibrate, model)
            measured_s = parts.calibrate["iteration_s"].to_numpy()
            number = fitted(by_number, measured_s, largest_number)
        predicted = parts.test[[*columns]].assign(
            model=model,
            measured_s=parts.test["iteration_s"],
            predicted_s=predicted_s(parts, parts.test, model, number),
            free=number,
            rule=rule,
        )
        tables.append(predicted)
    return pd.concat(tables, ignore_index=True)


# -- Vidur: dense tables of all-reduces, by fits that twelve sizes calibrate ---------

DENSE = ("vidur-64mib", "vidur-512mib")
"""The rules by which twelve sizes of a table calibrate, and all others from 1 MiB on are predicted.

Measured medians do not rise steadily with the size, because NCCL cuts messages into chunks."""
GOAL = 0.01
"""The goal for the median error of a table, which was set before it was computed."""
GOAL_SMALL = 0.05
"""The same for sizes below SMALL_TO."""
SMALL_TO = 25 * MIB
"""The smallest size that is not small: DistributedDataParallel sends no larger messages."""


@cache
def dense_tables() -> dict[str, Rows]:
    """Return the rows of each of Vidur's tables of all-reduces, in the order of their sizes.

    The result is by the name of the table, such as "h100_dgx-8x8". The tables are those of the
    rules DENSE, which say that twelve sizes of a table calibrate, and that all others from 1 MiB
    on are predicted.
    """
    by_name = {}
    for rule in DENSE:
        # The four fields of `Rows`, each with the rows of all tables of the rule.
        fields = [field.sort_values("bytes", kind="stable") for field in rows(rule)]
        names = sorted(set(rows(rule).test["table"]))
        for name in names:
            by_name[name] = Rows(*(field[field["table"] == name] for field in fields))
    return by_name


@cache
def dense_predictions(form: str = AUTO) -> pd.DataFrame:
    """Return the test rows of all of Vidur's tables as predicted by a form of cost.

    Parameters
    ----------
    form : str, optional
        The form of `ddlkit.core.fit.fit`, which is fitted to the medians of the twelve sizes
        of a table that calibrate. By default the fit chooses a form.

    Returns
    -------
    DataFrame
        One row for each table and size. The columns are ``bytes``, ``measured_s``,
        ``table``, ``predicted_s``, and ``lower_s`` and ``upper_s``, the ends of the interval of
        the prediction.
    """
    tables = []
    for name, rows_of_table in dense_tables().items():
        calibrating = rows_of_table.calibrate
        fitted_cost = fit(
            form,
            calibrating["bytes"].to_numpy(float),
            calibrating["median_s"].to_numpy(),
        )
        test = rows_of_table.test
        sizes = test["bytes"].to_numpy(float)
        lower_s, upper_s = fitted_cost.interval(sizes)
        columns = {"median_s": "measured_s"}
        measured = test[["bytes", "median_s"]].rename(columns=columns)
        predicted = measured.assign(
            table=name,
            predicted_s=fitted_cost.cost(sizes),
            lower_s=lower_s,
            upper_s=upper_s,
        )
        tables.append(predicted)
    return pd.concat(tables, ignore_index=True)


def judged(predicted: pd.DataFrame) -> pd.DataFrame:
    """Return how well each table is predicted.

    Parameters
    ----------
    predicted : DataFrame
        The rows of `dense_predictions`.

    Returns
    -------
    DataFrame
        One row for each ``table``. ``median`` and ``below_25_mib`` are medians of absolute
        relative errors, over all sizes and over those below SMALL_TO. ``covered`` of the
        ``n`` rows lie in their interval, whose median relative half width is
        ``half_width``. ``held`` is whether the two medians are at most GOAL and GOAL_SMALL.
    """
    sizes = predicted.eval("error = abs(predicted_s / measured_s - 1)")
    # The error of a small size. Others are NaN, which medians leave out.
    sizes["small"] = sizes["error"].where(sizes["bytes"] < SMALL_TO)
    sizes["inside"] = sizes["measured_s"].between(sizes["lower_s"], sizes["upper_s"])
    width_s = sizes["upper_s"] - sizes["lower_s"]
    sizes["half_width"] = width_s / sizes["predicted_s"] / 2
    scores = sizes.groupby("table", sort=False).agg(
        median=("error", "median"),
        below_25_mib=("small", "median"),
        covered=("inside", "sum"),
        half_width=("half_width", "median"),
        n=("error", "size"),
    )
    held = (scores["median"] <= GOAL) & (scores["below_25_mib"] <= GOAL_SMALL)
    return scores.assign(held=held).reset_index()
