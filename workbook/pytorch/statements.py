"""The requirements of PyTorch's cost models, as sentences for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

SENTENCES = {
    "pytorch-reduce-bytes": (
        "For an all-reduce of 4 MiB, a graph of torch.fx counts 4 MiB."
    ),
    "pytorch-gather-paths": (
        "For an all-gather, a graph of torch.fx counts as many bytes as Inductor counts."
    ),
    "pytorch-below-smallest": (
        "In a profile, each message takes 50 µs plus the time of its bytes at 10 GB/s, and "
        "the smallest message has 1 MiB. A message of 1 KiB takes at least 50 µs, which is "
        "0.323 times the time of 1 MiB."
    ),
    "pytorch-first-sample": (
        "A profile contains the same message three times, with 900, 100 and 100 µs. "
        "The estimate for this message is at most the mean of these times."
    ),
    "pytorch-beyond-twice": (
        "A profile also contains all-gathers that are twice as fast as its all-reduces. "
        "An all-reduce of slightly more than twice the largest size still takes at least "
        "as long as an all-reduce of exactly twice this size."
    ),
    "pytorch-nvlink": (
        "For the NVLink of an H100, Inductor assumes the same bandwidth as DTensor and the "
        "same as saturation."
    ),
    "pytorch-roofline": (
        "The roofline lets a product of two 8192 x 8192 matrices in bf16 run on an H100 at "
        "no more than 75% of the peak rate."
    ),
    "pytorch-fp32-peak": "The peak rate of an H100 in fp32 is 67 TFLOP/s.",
    "pytorch-names": (
        "By the names that CUDA gives to three GPUs, the roofline finds the peak rates of "
        "all three."
    ),
    "pytorch-more-ranks": (
        "An all-reduce of 100 MiB takes no longer with 16 ranks than with 64 "
        "(V100, A100 and H100)."
    ),
    "pytorch-point-to-point": (
        "One of eight H100 sends 1 GiB to another at no more than the rate of the NVLink."
    ),
    "pytorch-placement": (
        "The network between nodes has 50 GB/s and NVLink has 370 GB/s, so an all-reduce "
        "of 100 MiB takes at least 7.4 times as long with eight H100 on eight nodes as "
        "with eight H100 on one node."
    ),
    "pytorch-longer": (
        "With 64 A100, an all-reduce of 4 MiB takes at least as long as one that is four "
        "bytes shorter."
    ),
    "pytorch-all-to-all": (
        "DTensor estimates at least as long a time for an all-to-all as for an all-gather. "
        "Its source adds a penalty to the all-to-all, so that the all-gather is preferred."
    ),
    "pytorch-gib": "DTensor assumes a bandwidth of 87.7 GB/s in a node.",
    "pytorch-saturation": (
        "Saturation returns a bucket size. An all-gather of this size reaches 90% of the "
        "bandwidth of an all-gather of 1 GiB (V100, A100 and H100; the tolerance is 5%)."
    ),
}
"""What each row of data/papers/pytorch/claims.csv requires, by its id."""


def table(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """Return the requirements of PyTorch's cost models as a table for readers.

    Parameters
    ----------
    rows : sequence of mappings
        The requirements, as `workbook.site.verdicts.shown` returns them.

    Returns
    -------
    DataFrame
        One row per requirement: the ``requirement`` in a sentence, the ``required``
        number, the number that PyTorch ``returned``, and the ``outcome``.

    Raises
    ------
    KeyError
        If `SENTENCES` lacks one of the claims.
    """
    columns = {
        "requirement": [SENTENCES[row["id"]] for row in rows],
        "required": [_with_micro_sign(row["printed"]) for row in rows],
        "returned": [_with_micro_sign(row["computed"]) for row in rows],
        "outcome": [row["outcome"] for row in rows],
    }
    return pd.DataFrame(columns)


def _with_micro_sign(number: str) -> str:
    """Return a number with its unit, in which microseconds are µs."""
    return number.replace(" us", " µs")
