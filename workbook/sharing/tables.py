"""Tables 1 and 2 of the sharing paper, as printed and computed, and their checks."""

from __future__ import annotations

import math
from itertools import product

import pandas as pd

from workbook.common.claims import (
    Result,
    by_readings,
    check,
    counted,
    own,
    paper_table,
    recomputed,
)
from workbook.sharing import equations, implied
from workbook.sharing.printed import BATCHES, DEFAULT, throughput

SHAPE = (64, 64, 224, 224)
"""The shape of every kernel's input in Table 1: images, channels, height and width.

The table leaves out that of batch norm. For the linear layer, the last two are one.
"""


def table1() -> pd.DataFrame:
    """Return sharing Tab 1 with the FLOP and the least bytes of each kernel.

    Returns
    -------
    DataFrame
        The printed table, with two more columns:

        flops_computed
            The FLOP of matrix products, 2 for a multiply-add, and NaN for kernels that
            have no matrix product.
        bytes_computed
            The least bytes that are read or written, 4 for an element. How average pooling
            is applied is not stated, so that only the bytes that it reads count.
    """
    # ``elements`` is the number of elements in the input of a kernel.
    images, channels, height, width = SHAPE
    elements = math.prod(SHAPE)
    pixels = height * width
    # The convolution has 64 output channels, and the linear layer 64 output values.
    outputs = 64
    # The output of the convolution has as many channels as its input. It has a quarter of the
    # pixels, because the stride is 2 in both directions.
    convolved = elements / 4
    # The filters have 7 x 7 pixels.
    multiply_adds_a_value = channels * 7 * 7
    weights = outputs * multiply_adds_a_value
    # The linear layer turns the pixels of each channel into 64 values. It has a bias.
    linear_values = images * channels * outputs
    linear_weights = pixels * outputs + outputs

    multiply_adds = {
        "Average Pooling": math.nan,
        "Batch Norm": math.nan,
        "Convolution": convolved * multiply_adds_a_value,
        "Linear": linear_values * pixels,
        "ReLU": math.nan,
    }
    # Batch norm and ReLU read their input and write as much. The convolution and the linear
    # layer read their input and weights, and write their output.
    moved_elements = {
        "Average Pooling": elements,
        "Batch Norm": 2 * elements,
        "Convolution": elements + convolved + weights,
        "Linear": elements + linear_values + linear_weights,
        "ReLU": 2 * elements,
    }
    table = paper_table("sharing", "tab01")
    return table.assign(
        flops_computed=2.0 * table["kernel"].map(multiply_adds),
        bytes_computed=4.0 * table["kernel"].map(moved_elements),
    )


def table2() -> pd.DataFrame:
    """Return the best configurations and their gains (sharing Tab 2).

    Returns
    -------
    DataFrame
        A row for each network and batch, with ``best`` and ``gain_percent`` as printed.
        ``best_from_fig08`` lists all configurations that tie for the best in figure 8,
        ``gain_percent_computed`` is their gain, and ``gain_percent_difference`` the relative
        difference between the computed gain and the printed one.
    """
    rows = []
    gains = []
    table = paper_table("sharing", "tab02")
    for stated, batch in product(table.to_dict("records"), BATCHES):
        images_per_s = throughput().loc[(stated["network"], batch)]
        most = images_per_s.max()
        gains.append(100 * equations.gain(most, images_per_s[DEFAULT]))
        rows.append(
            {
                "network": stated["network"],
                "batch": batch,
                "best": stated[f"best_{batch}"],
                "best_from_fig08": " = ".join(images_per_s.index[images_per_s == most]),
                "gain_percent": stated[f"gain_{batch}_percent"],
            }
        )
    return recomputed(pd.DataFrame(rows), gain_percent=gains)


# -- claims --------------------------------------------------------------------------


@check("sharing-best-gain")
def _best_gain() -> Result:
    """Return the largest gain of any network at any batch."""
    # The gain is this ratio less 1, so that the largest ratio has the largest gain.
    ratios = throughput().max(axis=1) / throughput()[DEFAULT]
    network, batch = ratios.idxmax()
    return implied.gain(network, batch)


@check("sharing-tab2-vit-flops")
def _vit_flops() -> Result:
    note = (
        "all matrix products at 224 x 224 pixels, not stated; "
        "no square gives what is printed, 5/3 of it"
    )
    return counted(equations.vit_flops() / 1e9, note)


def _best_threads() -> pd.DataFrame:
    """Return how many threads the best configurations of Table 2 have in all blocks.

    A configuration such as "3x64" has 3 x 64 = 192. There is a row for each network, and a
    column for each batch in ascending order.
    """
    table = paper_table("sharing", "tab02").set_index("network")
    best = table[[f"best_{batch}" for batch in BATCHES]]
    return best.map(lambda name: math.prod(map(int, name.split("x"))))


@check("sharing-threads-fall")
def _threads_fall() -> Result:
    """Count the networks whose best number of threads never rises with the batch."""
    # By how many threads a batch differs from the next smaller one. The first batch has none.
    changes = _best_threads().diff(axis=1).iloc[:, 1:]
    never_rises = (changes <= 0).all(axis=1)
    constant = ", ".join(changes.index[(changes == 0).all(axis=1)])
    # In Figure 8, four configurations of VGG-19 tie at batch 32. Table 2 prints 4x64, which has
    # 256 threads, as the best configuration of batch 16 has. Of the three others, 1x512 and
    # 3x128 have more threads. With one of these two, VGG-19's number would rise from batch 16 to
    # 32, and the count of networks would be 6.
    note = (
        f"from Table 2: all fall but {constant}; "
        "by two of three ties of VGG-19 at batch 32 it would be 6"
    )
    return own(never_rises.sum(), note)


@check("sharing-intensity-order")
def _intensity_order() -> Result:
    """Count the networks that reach the least threads in the order of their intensity.

    The paper says that the larger the intensity of a network, its FLOP per parameter, the
    smaller is the batch from which 1x64, with 64 threads, is its best configuration. A network
    counts if no network of lower intensity reaches 64 threads at a smaller batch.
    """
    # The networks are in ascending order of intensity.
    first_batch = _first_with_64_threads()
    # A network is late if one of lower intensity, which stands before it, reached 64 threads at a
    # smaller batch.
    is_late = first_batch > first_batch.cummin()
    in_order = int((~is_late).sum())
    # Spearman's correlation of the intensity and the first batch, which is that of their ranks.
    # The positions of the networks are the ranks of their intensity.
    intensity_ranks = pd.Series(range(len(first_batch)), index=first_batch.index)
    tendency = intensity_ranks.corr(first_batch.rank())
    # By another reading, the paper means a tendency: a larger intensity goes with a smaller batch,
    # so that the correlation is negative. That it must be at most -0.5 is a choice. The claim that
    # figure 4 is similar to figure 3 is judged by a correlation of a half, too.
    tendency_holds = tendency <= -0.5
    # The claim counts networks. A tendency is one of all networks together, so that all of them
    # count if it holds, and none if not.
    in_tendency = len(first_batch) if tendency_holds else 0
    readings = {
        "every network": own(in_order, f"{in_order} of {len(first_batch)}"),
        "a tendency": own(in_tendency, f"rank correlation {tendency:.2f}"),
    }
    late = first_batch.index[is_late]
    return by_readings(readings, _late_in_words(late))


def _first_with_64_threads() -> pd.Series:
    """Return the first batch at which each network's best configuration has 64 threads.

    The threads of all blocks are counted, so that only the configuration 1x64 has 64. The batch
    is an index in BATCHES, or their number if no batch has 64 threads. The networks are in
    ascending order of intensity.
    """
    intensity = paper_table("sharing", "tab02").set_index("network")["intensity"]
    by_intensity = intensity.sort_values(kind="stable").index
    # A row for each network, and a column for each batch in ascending order.
    has_64 = _best_threads().loc[by_intensity] == 64
    # The argmax of booleans is the first that is true.
    first_true = has_64.to_numpy().argmax(axis=1)
    has_any = has_64.any(axis=1)
    return pd.Series(first_true, index=by_intensity).where(has_any, len(BATCHES))


def _late_in_words(late: pd.Index) -> str:
    """Return the note of `_intensity_order`, which names the late networks.

    A network is late if 1x64, the configuration with 64 threads, becomes its best at a larger
    batch than for another network of lower intensity. For each late network, the note compares
    two of its throughputs: with 1x64, and with its best configuration. They are those at a batch
    at which 1x64 is already the best for the other network. The two are close, so that 1x64 only
    just fails to be the best.
    """
    # Table 2 has one late network, ViT-Base/16. At batch 32, where 1x64 is not yet its best, 1x64
    # is already the best for a network of lower intensity.
    images_per_s = throughput().xs(32, level="batch").loc[late]
    rates = ", ".join(
        f"{network}, {row['1x64']:.0f} against {row.max():.0f} images/s"
        for network, row in images_per_s.iterrows()
    )
    return (
        f"from Table 2; later than others of lower intensity (batch 32, Fig 8): {rates}"
    )
