"""sharing Tables 1 and 2 beside what is computed here, and the checks of their claims."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd

from workbook.common.claims import Result, check, counted, own, paper_table, recomputed
from workbook.sharing import equations, implied
from workbook.sharing.printed import BATCHES, DEFAULT, throughput

SHAPE = (64, 64, 224, 224)
"""Of every kernel's input in Table 1.

The table leaves batch norm's out, and the linear layer's has the last two flattened.
"""


def table1() -> pd.DataFrame:
    """Return five kernels, the FLOP of their matrix products, and their least bytes.

    A multiply-add is 2 FLOP, and an element 4 bytes, in float32. Average pooling is not
    defined: only the bytes that it reads are counted.
    """
    rows, channels, *sides = SHAPE
    elements, pixels, kernel, outputs = math.prod(SHAPE), math.prod(sides), 7 * 7, 64
    convolved = elements / 4  # stride 2 in both directions
    weights = outputs * channels * kernel
    summed = rows * channels * outputs
    work = {  # multiply-adds, and elements read or written
        "Average Pooling": (math.nan, elements),
        "Batch Norm": (math.nan, 2 * elements),
        "Convolution": (convolved * channels * kernel, elements + convolved + weights),
        "Linear": (summed * pixels, elements + summed + pixels * outputs + outputs),
        "ReLU": (math.nan, 2 * elements),
    }
    printed = paper_table("sharing", "tab01")
    multiply_adds, moved = np.array([work[kernel] for kernel in printed["kernel"]]).T
    return printed.assign(flops_computed=2 * multiply_adds, bytes_computed=4 * moved)


def table2() -> pd.DataFrame:
    """Return the best configurations and gains by network and batch.

    They stand as printed, and as they follow from figure 8, of which all that tie.
    """
    printed, rows, gains = paper_table("sharing", "tab02"), [], []
    for stated, batch in product(printed.to_dict("records"), BATCHES):
        row = throughput().loc[(stated["network"], batch)]
        best = " = ".join(row.index[row == row.max()])
        gains.append(100 * equations.gain(row.max(), row[DEFAULT]))
        cells = stated[f"best_{batch}"], best, stated[f"gain_{batch}_percent"]
        rows.append((stated["network"], batch, *cells))
    columns = ["network", "batch", "best", "best_from_fig08", "gain_percent"]
    return recomputed(pd.DataFrame(rows, columns=columns), gain_percent=gains)


# -- claims --------------------------------------------------------------------------------------


@check("sharing-best-gain")
def _best_gain() -> Result:
    gains = throughput().max(axis=1) / throughput()[DEFAULT]
    return implied.gain(*gains.idxmax())


@check("sharing-tab2-vit-flops")
def _vit_flops() -> Result:
    note = (
        "all matrix products at 224 x 224 pixels, not stated; "
        "no square gives what is printed, 5/3 of it"
    )
    return counted(equations.vit_flops() / 1e9, note)


def _best_threads() -> pd.DataFrame:
    """Return threads in all of Table 2's best configurations, by network; one column a batch."""
    table = paper_table("sharing", "tab02").set_index("network")
    best = table[[f"best_{batch}" for batch in BATCHES]]
    return best.map(lambda name: math.prod(map(int, name.split("x"))))


@check("sharing-threads-fall")
def _threads_fall() -> Result:
    steps = _best_threads().diff(axis=1).iloc[:, 1:]
    stay = ", ".join(steps.index[(steps == 0).all(axis=1)])
    note = (
        f"from Table 2: all fall but {stay}; "
        "by two of three ties of VGG-19 at batch 32 it would be 6"
    )
    return own((steps <= 0).all(axis=1).sum(), note)


@check("sharing-intensity-order")
def _intensity_order() -> Result:
    """Networks that reach the least threads at no larger batch than any of lower intensity."""
    intensity = paper_table("sharing", "tab02").set_index("network")["intensity"]
    least = _best_threads().loc[intensity.sort_values(kind="stable").index] == 64
    reached = np.where(least.any(axis=1), least.to_numpy().argmax(axis=1), len(BATCHES))
    late = reached > np.minimum.accumulate(reached)
    rows = throughput().xs(32, level="batch").loc[least.index[late]]
    by = ", ".join(
        f"{name}, {x['1x64']:.0f} against {x.max():.0f} images/s"
        for name, x in rows.iterrows()
    )
    note = "from Table 2; later than others of lower intensity (batch 32, Fig 8): " + by
    return own(int((~late).sum()), note)
