"""Operators of one iteration on an H100, as TrioSim's tracer wrote them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import clusters
from ddlkit.store.readers import BYTES_PER_PARAMETER
from ddlkit.store.sheet import Column as C
from ddlkit.store.sheet import Schema, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

STAGES = ("forward", "backward", "optimizer")
_LIST = re.compile(r"\[(\d+(; \d+)*)?\]")
_LISTS = ("Operator_input", "Operator_output", "InputSize", "OutputSize")
_TRACE = Schema(
    "an operator trace",
    (
        C("OperatorID", "int", "positive"),
        C("OperatorName", "str", "named"),
        *(C(name, "str", "named") for name in _LISTS),
        C("Operator_cudatime", "microseconds", "non_negative"),
        C("Operator_cudatimenooverlap", "microseconds", "non_negative"),
        C("stage", "str", "named"),
    ),
    key=("OperatorID",),
)
_UPDATE = "aten::_foreach_addcdiv_"  # takes parameters, then as many first moments and roots of second ones


def read_operators(path: Path) -> DataFrame:
    """Columns operator, stage, elapsed_s, busy_s, inputs, outputs and input_elements, in order of time.

    elapsed_s : from the first kernel's start to the last one's end; busy_s : only while one of them ran
    inputs, outputs : numbers of tensors; input_elements : how many elements each input has; all tuples

    Raises UserError naming row and column for a file that is cut (no optimizer at its end, an open list),
    stages out of order, and an operator that is busy for longer than it takes.
    """
    sheet = read_sheet(clusters.read(path), str(path))
    frame = _TRACE.frame(sheet, exact=False)
    for name in _LISTS:
        for row, text in enumerate(frame[name]):
            if not _LIST.fullmatch(text):
                sheet.fail(row, name, f"{text[-20:]!r} is not the end of a list of numbers: cut?")
        frame[name] = [tuple(map(int, re.findall(r"\d+", text))) for text in frame[name]]
    if tuple(dict.fromkeys(frame["stage"])) != STAGES or frame["stage"].value_counts().size != 3:
        raise UserError(f"{path}: the stages are not {', '.join(STAGES)}: the trace is cut")
    if not (np.diff([STAGES.index(stage) for stage in frame["stage"]]) >= 0).all():
        raise UserError(f"{path}: stages take turns: several iterations in one file? divide them")
    longer = (frame["Operator_cudatimenooverlap"] > frame["Operator_cudatime"]).to_numpy()
    if longer.any():
        row = int(np.argmax(longer))
        sheet.fail(row, "Operator_cudatimenooverlap", "longer than Operator_cudatime: mixed units?")
    names = {
        "OperatorName": "operator",
        "Operator_cudatime": "elapsed_s",
        "InputSize": "input_elements",
    }
    names |= {"Operator_cudatimenooverlap": "busy_s", "Operator_input": "inputs"}
    frame = frame.rename(columns=names | {"Operator_output": "outputs"})
    return frame[
        ["operator", "stage", "elapsed_s", "busy_s", "inputs", "outputs", "input_elements"]
    ]


def parameters(operators: DataFrame) -> dict[int, int]:
    """Number of each tensor that holds parameters -> its elements, as the optimizer's last step lists them.

    Raises UserError where there is no such step.
    """
    update = operators[operators["operator"] == _UPDATE]
    if len(update) != 1:
        raise UserError(f"a trace with {len(update)} {_UPDATE}: one step of Adam was expected")
    inputs, elements = update["inputs"].iloc[0], update["input_elements"].iloc[0]
    return dict(zip(inputs[: len(inputs) // 3], elements[: len(inputs) // 3], strict=True))


def layer_profile(operators: DataFrame, network: str, batch: int) -> LayerProfile:
    """The trace as a layer profile in float32, from the times that kernels ran, one row a tensor.

    Tensors stand in the reverse of the order in which backward makes their gradients, so that the workload's
    ready order is the one traced. An operator of backward with a parameter among its inputs makes the
    gradients of the parameters that its forward operator has; one that multiplies matrices is traced with a
    copy of it, and takes the last such layer that is left. What other operators of backward take counts with
    the next gradient, as does the whole forward pass with the first tensor.

    Raises UserError where an operator's parameters cannot be told, or some have no gradient.
    """
    sizes = parameters(operators)
    layers = _layers(operators, sizes)
    ready: list[tuple[int, float]] = []
    spent_s = 0.0
    for row in operators[operators["stage"] == "backward"].itertuples():
        spent_s += row.busy_s
        own = next((tensors for tensors in layers if set(tensors) & set(row.inputs)), None)
        if own is None and "AddmmBackward" in row.operator:
            own = _last_matrix(operators, layers)
        if own is not None:
            layers.remove(own)
            ready += zip(own[::-1], [spent_s] + [0.0] * (len(own) - 1), strict=True)
            spent_s = 0.0
    if layers or not ready:
        raise UserError(f"{network}: no gradient of tensors {layers[:3]}: the trace is cut")
    ready[-1] = (ready[-1][0], ready[-1][1] + spent_s)
    return _profile(operators, ready[::-1], sizes, network, batch)


def _layers(operators: DataFrame, sizes: dict[int, int]) -> list[tuple[int, ...]]:
    """The parameters of each operator of the forward pass that has some, in its order."""
    forward = operators[operators["stage"] == "forward"]
    layers = (tuple(one for one in inputs if one in sizes) for inputs in forward["inputs"])
    return [tensors for tensors in layers if tensors]


def _last_matrix(operators: DataFrame, layers: list[tuple[int, ...]]) -> tuple[int, ...]:
    linear = operators[operators["operator"] == "aten::linear"]["inputs"]
    left = [tensors for tensors in layers if any(set(tensors) <= set(one) for one in linear)]
    if not left:
        raise UserError("more backward operators of matrices than linear layers: the trace is cut")
    return left[-1]


def _profile(
    operators: DataFrame,
    backward: list[tuple[int, float]],
    sizes: dict[int, int],
    network: str,
    batch: int,
) -> LayerProfile:
    """backward : (tensor, seconds) in forward order."""
    busy_s = operators.groupby("stage")["busy_s"].sum()
    elements = np.array([sizes[tensor] for tensor, _ in backward])
    forward_s = np.zeros(len(backward))
    forward_s[0] = busy_s["forward"]
    names = tuple(f"tensor{tensor}" for tensor, _ in backward)
    return LayerProfile(
        network=network,
        device="H100",
        batch=batch,
        tensor=names,
        layer=names,
        parameters=elements,
        gradient_bytes=elements * BYTES_PER_PARAMETER,
        forward_s=forward_s,
        backward_s=np.array([seconds for _, seconds in backward]),
        flops=np.zeros(len(backward)),
        update_s=float(busy_s["optimizer"]),
    )
