"""What notebook 01 measures while its reader waits: a network, two products, and messages of two ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB

SIZES = (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB)
"""The sizes of the messages."""
SIDES = {"cpu": (256, 2048), "cuda": (256, 8192)}
"""The sides of the square matrices that are multiplied, by device."""
Clock = Callable[[Callable[[], Any], Callable[[], Any]], float]
"""A clock: it takes an action, and a function that waits until the device is done; it returns seconds."""


def measure(directory: Path, network: str, batch: int, clock: Clock) -> str:
    """Measure for a few seconds, and write the tables into a directory.

    The tables are ``layers`` and ``samples`` of the network, ``peaks`` with a product of two square
    matrices for each of two sizes, and ``collectives`` with all-reduces between two processes.
    Layers and products are measured on a GPU if PyTorch sees one, else on the processor. Messages
    are exchanged between GPUs only if PyTorch sees two.

    Parameters
    ----------
    directory : Path
        The directory for the tables.
    network : str
        The name of the network.
    batch : int
        The number of samples in its batch.
    clock : callable
        Times the products. It takes a function that multiplies and one that waits until the device
        is done, and returns seconds.

    Returns
    -------
    str
        Why nothing was written, as part of a sentence. Empty if all was measured.
    """
    try:
        import torch

        from ddlkit.jobs.clock import Budget
        from ddlkit.measure.layers import layer_tables
        from workbook.record import zoo as zoo  # registers the networks of the papers
    except ImportError as error:
        return f"PyTorch is not installed: {error}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The reader waits, so that few repeats have to do.
    budget = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=1.0)
    try:
        # Lines of progress are no part of the notebook.
        with redirect_stderr(StringIO()):
            # Tables ``layers`` and ``samples``. If ``threads`` is None, torch keeps its number of
            # threads.
            tables = dict(
                layer_tables(network, batch, device, "fp32", budget, threads=None)
            )
            collectives = _all_reduces(budget)
    except UserError as error:
        return str(error)
    tables["peaks"] = _products(device, clock)
    tables["collectives"] = collectives
    for schema, table in tables.items():
        store.save_table(
            table, directory, f"{schema}-brief", schema=schema, command=sys.argv
        )
    return ""


def _all_reduces(budget: Any) -> pd.DataFrame:
    """Return table ``collectives`` with all-reduces of SIZES between two ranks on this machine.

    ``budget``, a `ddlkit.jobs.clock.Budget`, says how often each size is repeated.
    """
    import torch

    from ddlkit.jobs.launch import Loopback, launch
    from ddlkit.measure.collectives import CollectivesSettings, collectives_job

    # NCCL needs a GPU for each rank. Without two GPUs, gloo sends from the memory of the host.
    backend = "nccl" if torch.cuda.device_count() >= 2 else "gloo"
    # Both ranks meet over the loopback interface of the machine.
    tables = launch(
        collectives_job,
        CollectivesSettings(["all_reduce"], SIZES, budget),
        ranks=2,
        place=Loopback(),
        join={"backend": backend},
    )
    return tables["collectives"]


def _products(device: str, clock: Clock) -> pd.DataFrame:
    """Return table ``peaks`` with a product of square matrices for each of the device's `SIDES`.

    The ``clock`` times the products, as in `measure`.
    """
    import torch

    from ddlkit.jobs.clock import synchronizer

    rows = []
    for side in SIDES[device]:
        # The first dimension counts the two matrices.
        left, right = torch.rand(2, side, side, device=device)
        seconds = clock(partial(torch.mm, left, right), synchronizer(device))
        rows.append({"kernel": "product", "side": side, "seconds": seconds})
    # Each product has one sample, whose number is 0.
    return pd.DataFrame(rows).assign(device=device, precision="fp32", sample=0)
