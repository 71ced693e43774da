"""pytorch: the statements about its cost models, as sentences for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

SENTENCES = {
    "pytorch-reduce-bytes": (
        "For an all-reduce of 4 MiB, a graph of torch.fx counts 4 MiB."
    ),
    "pytorch-gather-paths": (
        "For an all-gather, a graph of torch.fx counts 1 times as many bytes as Inductor."
    ),
    "pytorch-below-smallest": (
        "A profile has messages of 1 MiB and more, which take 50 µs and the time of their "
        "bytes at 10 GB/s. A message of 1 KiB then takes at least the 50 µs, which are "
        "0.323 times the time of 1 MiB."
    ),
    "pytorch-first-sample": (
        "A profile has one message three times, and it took 900, 100 and 100 µs. "
        "The estimate for this message is at most the mean."
    ),
    "pytorch-beyond-twice": (
        "A message that is slightly longer than twice the largest size in a profile takes "
        "at least as long as a message of twice that size, although the profile also has "
        "an all-gather that is twice as fast."
    ),
    "pytorch-nvlink": (
        "Inductor assumes the same bandwidth for the NVLink of an H100 as saturation and "
        "as DTensor."
    ),
    "pytorch-roofline": (
        "The roofline lets a product of two 8192 x 8192 matrices in bf16 run on an H100 at "
        "no more than 75% of the peak rate."
    ),
    "pytorch-fp32-peak": "The peak rate of an H100 in fp32 is 67 TFLOP/s.",
    "pytorch-names": (
        "The roofline finds the peak rates of three GPUs by the names that CUDA gives them."
    ),
    "pytorch-more-ranks": (
        "An all-reduce of 100 MiB takes no longer with 16 ranks than with 64 "
        "(V100, A100 and H100)."
    ),
    "pytorch-point-to-point": (
        "One of eight H100 sends 1 GiB to another at no more than the rate of the NVLink."
    ),
    "pytorch-placement": (
        "An all-reduce of 100 MiB takes at least 7.4 times as long with eight H100 on "
        "eight nodes as with eight H100 on one node."
    ),
    "pytorch-longer": (
        "With 64 A100, an all-reduce of 4 MiB takes at least as long as one that is four "
        "bytes shorter."
    ),
    "pytorch-all-to-all": (
        "By DTensor, an all-to-all takes at least as long as an all-gather, because the "
        "source adds a penalty to it."
    ),
    "pytorch-gib": "DTensor assumes a bandwidth of 87.7 GB/s in a node.",
    "pytorch-saturation": (
        "A message of the size by saturation reaches 90% of the bandwidth that a message "
        "of 1 GiB reaches (V100, A100 and H100)."
    ),
}
"""What each claim of data/papers/pytorch/claims.csv states, by the claim's id."""


def table(rows: Sequence[Mapping[str, str]]) -> pd.DataFrame:
    """Return the statements about PyTorch's cost models as a table for readers.

    Parameters
    ----------
    rows : sequence of mappings
        The claims about PyTorch, as `workbook.site.verdicts.shown` returns them.

    Returns
    -------
    DataFrame
        One row per statement: ``statement`` in a sentence, the ``stated`` number, the
        number that PyTorch ``returned``, and the ``verdict``.

    Raises
    ------
    KeyError
        If `SENTENCES` lacks one of the claims.
    """
    return pd.DataFrame(
        {
            "statement": [SENTENCES[row["id"]] for row in rows],
            "stated": [row["printed"] for row in rows],
            "returned": [row["computed"] for row in rows],
            "verdict": [row["outcome"] for row in rows],
        }
    )
