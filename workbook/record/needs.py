"""What each kind of point of the workbook needs of a machine, and how long it is expected to take.

Run as a program, this module prints the table of docs/INSTALL.md:

    python -m workbook.record.needs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddlkit.jobs.clock import Budget
from ddlkit.measure import needs as library
from ddlkit.measure.needs import (
    BUILD_S,
    LAB_ITERATION_S,
    LAUNCH_S,
    WARMTH,
    Gpus,
    Lab,
    Needs,
)
from ddlkit.store import machine
from workbook.record.speed import CACHE_BYTES, MOST_SETS

DRIFT_S = 4.0
"""Seconds of a product and of a copy of memory on a GPU."""
DRAW_S = 1.0
"""Seconds to draw the matrices of products on a GPU."""
NUMBERS_PER_S = 1e8
"""How many random numbers a processor is expected to draw in a second."""
COPY_BYTES_PER_S = 5e9
"""The bytes that a processor is expected to copy in a second."""
PRODUCT_FACTOR = 1.5
"""Expected duration of a product, divided by the ``max_s`` of its budget."""
PICTURES_S = 3.0
"""Seconds to draw pictures and to write their files."""
INPUT_FACTOR = 12.0
"""Expected duration of decoding and reading, divided by the ``max_s`` of the budget."""
COST_MODELS_S = 10.0
"""Seconds in which PyTorch estimates all known messages and layers."""
SELECTION_S = 0.2
"""Seconds of the selections at one density on a processor, from a tensor of few elements."""
ELEMENT_S = 2.5e-7
"""Seconds by which each element of the tensor makes these selections longer."""
NEIGHBOUR_S = 3.0
"""Seconds to build a kernel and its neighbour, and to try each way of communicating."""
NEIGHBOUR_FACTOR = 1.5
"""Expected duration next to a neighbour, divided by the ``max_s`` of the budget."""
EPOCH_S = 5.0
"""Seconds of an epoch of dense training."""
SPARSE_EPOCH_S = 4.0
"""Seconds of an epoch of sparsified training."""
DISTINCT_PLANS = 8
"""How many plans a network is replayed under at most, outside of campaigns."""
LAB_LAUNCH_S = 3.0
"""Seconds in which a campaign's lab is set up, its ranks meet, and the lab is taken down again."""
AROUND_S = 0.1
"""Seconds around an iteration in which the ranks exchange what they recorded, or around products and
copies of memory in which their numbers are drawn and saved."""
CASE_S = 1.0
"""Seconds in which a model predicts a case, or all cases of a lab."""

IMAGE_S = {
    "alexnet": 1.2e-4,
    "vgg16": 1.7e-3,
    "vgg19": 2.15e-3,
    "resnet18": 3.7e-4,
    "resnet50": 8.3e-4,
    "resnet101": 1.6e-3,
    "vit_b_16": 2.5e-3,
}
"""Seconds in which an H200 is expected to train on an image in fp32."""


# -- how long each kind takes ----------------------------------------------------------


def drift_s(device: str, side: int, copy_bytes: int, budget: Budget) -> float:
    """Return how long a product and a copy of memory are expected to take, in seconds.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    side : int
        The rows and columns of the matrices.
    copy_bytes : int
        The bytes that are copied.
    budget : Budget
        How long each of the two is measured.
    """
    if device == "cuda":
        return DRIFT_S
    copy_s = copy_bytes / COPY_BYTES_PER_S
    return AROUND_S + _product_s(side, budget) + library.timing_s(budget, copy_s)


def matrix_products_s(
    device: str, precisions: int, sides: Sequence[int], budget: Budget
) -> float:
    """Return how long products of matrices are expected to take, in seconds.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    precisions : int
        How many precisions there are.
    sides : sequence of int
        The rows and columns of the matrices.
    budget : Budget
        How long each product is measured.
    """
    if device == "cuda":
        return DRAW_S + PRODUCT_FACTOR * budget.max_s * precisions * len(sides)
    return AROUND_S + precisions * sum(_product_s(side, budget) for side in sides)


def _product_s(side: int, budget: Budget) -> float:
    """Return how long products of one side are expected to take on a processor, in seconds."""
    # As many sets of three matrices of float32 as exceed the caches, up to a limit.
    sets = min(MOST_SETS, max(2, math.ceil(CACHE_BYTES / (12 * side**2))))
    draw_s = sets * 3 * side**2 / NUMBERS_PER_S
    # Each element of a product takes as many multiplications and additions as the matrices have
    # rows. A sample has a product for each set.
    flops = sets * 2 * side**3
    sample_s = flops / (machine.cores() * library.CORE_FLOPS_PER_S)
    return draw_s + library.timing_s(budget, sample_s)


def input_alone_s(budget: Budget) -> float:
    """Return how long reading and decoding of pictures are expected to take, in seconds."""
    return PICTURES_S + INPUT_FACTOR * budget.max_s


def cost_models_s() -> float:
    """Return how long the cost models of PyTorch are expected to take, in seconds."""
    return COST_MODELS_S


def selections_s(budget: Budget, device: str, elements: int, densities: int) -> float:
    """Return how long all selections from so many elements are expected to take, in seconds.

    Parameters
    ----------
    budget : Budget
        How long to measure at each density.
    device : str
        "cpu" or "cuda".
    elements : int
        The elements of a tensor.
    densities : int
        How many shares of the elements are selected, one after the other.
    """
    # A GPU is expected to spend the whole budget of each density.
    if device == "cuda":
        return densities * budget.max_s
    # On a processor, this is a rough guess, which does not depend on the budget.
    return densities * (SELECTION_S + ELEMENT_S * elements)


def kernels_s(budget: Budget) -> float:
    """Return how long a kernel and its neighbour are expected to take, in seconds.

    The neighbour communicates on the same GPU, in several ways one after the other. ``budget`` is
    that of all ways together.
    """
    return NEIGHBOUR_S + NEIGHBOUR_FACTOR * budget.max_s


def training_beside_s(budget: Budget, network: str, batch: int, settings: int) -> float:
    """Return how long training next to the stand-in is expected to take, in seconds.

    The stand-in is a kernel that loads the GPU as NCCL's does.

    Parameters
    ----------
    budget : Budget
        How long to measure all settings together.
    network : str
        The name of the network. A network that is not in `IMAGE_S` counts as ResNet-50.
    batch : int
        The batch size.
    settings : int
        How many settings are compared. Each round has an iteration by each of them.
    """
    iteration_s = batch * IMAGE_S.get(network, IMAGE_S["resnet50"])
    # The warm-up comes on top of the budget. The factor `WARMTH` includes it.
    budget_s = WARMTH * budget.max_s
    # So many rounds are measured in any case, even if they exceed the budget.
    fewest_rounds = budget.warmup + budget.min_repeats
    fewest_s = fewest_rounds * settings * iteration_s
    # After the network is built, one iteration shows the order of its gradients. It is expected to
    # take as long as the building.
    first_iteration_s = BUILD_S
    return BUILD_S + first_iteration_s + max(budget_s, fewest_s)


def convergences_s(epochs: int) -> float:
    """Return how long so many epochs of dense training are expected to take, in seconds."""
    return EPOCH_S * epochs


def sparse_convergences_s(epochs: int) -> float:
    """Return how long so many epochs of sparsified training are expected to take, in seconds."""
    return SPARSE_EPOCH_S * epochs


def replays_s(cases: int, rounds: int) -> float:
    """Return how long rounds of so many replayed cases are expected to take, in seconds."""
    return LAUNCH_S + cases * rounds * LAB_ITERATION_S


def campaign_s(iterations: int, message_s: float) -> float:
    """Return how long the replays of a campaign in one lab are expected to take, in seconds.

    Parameters
    ----------
    iterations : int
        How many iterations are left. With 0, no lab is set up.
    message_s : float
        The seconds of a message with all gradients of the largest network. An iteration is expected to
        compute for as long as its messages take.
    """
    if not iterations:
        return 0.0
    # Computing and sending take equally long, and are counted one after the other.
    iteration_s = 2 * message_s
    return LAB_LAUNCH_S + iterations * (AROUND_S + iteration_s)


def calibration_s(samples_s: Sequence[float], max_s: float) -> float:
    """Return how long the calibration of a lab is expected to take, in seconds.

    Parameters
    ----------
    samples_s : sequence of float
        For each size of messages, the expected seconds of one sample.
    max_s : float
        The budget of each size in seconds.
    """
    # A size takes its budget, or three samples if these take longer, because one warm-up and two
    # repeats are measured in any case.
    sizes_s = [max(3 * sample_s, max_s) for sample_s in samples_s]
    return LAB_LAUNCH_S + sum(sizes_s)


def predicted_s(cases: int) -> float:
    """Return how long models are expected to predict so many cases, in seconds."""
    return CASE_S * cases


# -- the table -------------------------------------------------------------------------

DRIFT = Needs(
    drift_s,
    "A product and a copy of memory are each repeated for at most 2 s.",
    memory="two sets of three matrices, and the source and the target of the copy",
)
MATRIX_PRODUCTS = Needs(
    matrix_products_s,
    "Each precision and side takes its budget, or less if its products are short. On a GPU it takes "
    f"{PRODUCT_FACTOR:g} times its budget, because repeats also warm up.",
    memory="two to sixteen sets of three matrices",
)
INPUT_ALONE = Needs(
    input_alone_s,
    f"Pictures are written in {PICTURES_S:g} s. Decoding and reading take up to {INPUT_FACTOR:g} times the "
    "budget.",
    gpus=Gpus.NONE,
    packages={"PIL": "pillow"},
)
COST_MODELS = Needs(
    cost_models_s,
    "Nothing is sent, and no time is measured: PyTorch estimates the times of known messages and layers.",
    gpus=Gpus.NONE,
)
SELECTIONS = Needs(
    selections_s,
    "On a GPU each density has a budget of its own. On a processor the time of a density follows from the "
    f"elements: {SELECTION_S:g} s and {ELEMENT_S * 1e6:g} s for each million.",
    memory="the elements of one tensor, or 4 million, and a buffer that flushes the cache",
)
KERNELS = Needs(
    kernels_s,
    f"The kernel and its neighbour are built, and each way of communicating is tried, in {NEIGHBOUR_S:g} s. "
    f"All ways together have a budget, and take {NEIGHBOUR_FACTOR:g} times as long, because the fewest "
    "rounds may take longer than the budget.",
    gpus=Gpus.ONE,
    memory="three buffers of 256 MiB, and 2 GiB for the input and the result of the kernel",
)
TRAINING_BESIDE = Needs(
    training_beside_s,
    f"The network is built and tried in {2 * BUILD_S:g} s. Repeats take {WARMTH:g} times the budget, or as "
    "long as the fewest rounds, each with an iteration by every setting. Seconds per image are those "
    "of an H200.",
    gpus=Gpus.ONE,
    needs_network=True,
    memory="the network, its gradients and momentum, its activations, and three buffers of 256 MiB",
)
CONVERGENCES = Needs(
    convergences_s,
    f"An epoch takes {EPOCH_S:g} s.",
    memory="a small network and its pictures",
)
SPARSE_CONVERGENCES = Needs(
    sparse_convergences_s,
    f"An epoch takes {SPARSE_EPOCH_S:g} s. One process plays all ranks on one core.",
    gpus=Gpus.NONE,
    memory="a small network, its pictures, and unsent gradients of all ranks",
)
REPLAYS = Needs(
    replays_s,
    f"Ranks start in {LAUNCH_S:g} s. An iteration takes {LAB_ITERATION_S:g} s, and each network has at "
    f"most {DISTINCT_PLANS} plans.",
    gpus=Gpus.NONE,
    ranks="2 or more",
    lab=Lab.YES,
    memory="all gradients, on each rank",
)
CAMPAIGN = Needs(
    campaign_s,
    f"A lab starts in {LAB_LAUNCH_S:g} s. An iteration takes twice its largest message, and {AROUND_S:g} s "
    "in which the ranks exchange what they recorded.",
    gpus=Gpus.NONE,
    ranks="2 or more",
    lab=Lab.YES,
    memory="all gradients, on each rank",
)
CALIBRATION = Needs(
    calibration_s,
    f"A lab starts in {LAB_LAUNCH_S:g} s. Each size has a budget of its own, but at least three samples.",
    gpus=Gpus.NONE,
    ranks="2 or more",
    lab=Lab.YES,
    memory="five times the largest message, on each rank",
)
PREDICTED = Needs(
    predicted_s,
    f"Nothing is measured. Models predict a case, or all cases of a lab, in {CASE_S:g} s.",
    gpus=Gpus.NONE,
)

NEEDS: dict[str, Needs[Any]] = {
    "drift": DRIFT,
    "matrix_products": MATRIX_PRODUCTS,
    **library.NEEDS,
    "input_alone": INPUT_ALONE,
    "cost_models_of_torch": COST_MODELS,
    "selections": SELECTIONS,
    "kernels_beside_messages": KERNELS,
    "training_beside_messages": TRAINING_BESIDE,
    "convergences": CONVERGENCES,
    "sparse_convergences": SPARSE_CONVERGENCES,
    "replays": REPLAYS,
    "campaign": CAMPAIGN,
    "calibration of a campaign": CALIBRATION,
    "prediction before a campaign": PREDICTED,
}
"""What each kind of point needs, by its name in files of points. The last two belong to campaigns."""


def table() -> str:
    """Return the table of all kinds of points and their needs in Markdown, for docs/INSTALL.md.

    A point is a measurement with tables of its own.
    """
    lines = [
        "| what is measured | on | ranks | lab | also needs | memory for | expected duration |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in NEEDS.items():
        # ``packages`` has the name of a package by the name of its module. It may be None.
        also = [*(row.packages or {}).values()]
        if row.needs_network:
            also.append("torchvision, for its networks")
        # A name with a space is a part of a campaign, and no word that a file may have.
        shown_name = name if " " in name else f"`{name}`"
        # ``gpus`` says on which device the point is measured, ``memory`` what takes the memory, and
        # ``why`` what the expected duration consists of.
        cells = [
            shown_name,
            row.gpus.value,
            row.ranks,
            row.lab.value,
            ", ".join(also),
            row.memory,
            row.why,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
