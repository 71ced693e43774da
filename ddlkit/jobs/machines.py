"""Which machines the ranks of a job run on, and the refusal of a mix of them.

The stamp of a table describes one machine. So all ranks of a job must run on equal
machines, with the same software.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddlkit.core.errors import UserError
from ddlkit.jobs import rank as peers
from ddlkit.jobs.rank import Rank
from ddlkit.store import machine

NAMES_OF_ADAPTERS = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME")
"""Variables that may differ between nodes, because nodes number their adapters."""


def facts_of(me: Rank) -> dict[str, str]:
    """Return the hardware and software of a rank, which must be equal on all ranks.

    Parameters
    ----------
    me : Rank
        This rank.

    Returns
    -------
    dict of str to str
        The processor and the versions of the software. For a rank on a GPU also the model
        and the driver of the GPU, and for a rank with NCCL the variables that NCCL obeys
        and that may change times.
    """
    described = machine.describe()
    facts = {"processor": described["cpu"]["model"]}
    if me.device.type == "cuda":
        # All GPUs of a node have the same driver, so the first one is asked. Without
        # nvidia-smi no GPU is described.
        gpu = described["gpus"][0] if described["gpus"] else {}
        facts["gpu"] = torch.cuda.get_device_name(me.device)
        facts["driver"] = str(gpu.get("driver", "unknown"))
    versions = machine.versions()
    for name in ("torch", "cuda", "cudnn", "nccl"):
        facts[name] = versions[name]
    if me.backend == "nccl":
        facts.update(_variables_that_matter(described["nccl_variables"]))
    return facts


def _variables_that_matter(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables of NCCL that may change times.

    The others are left out: variables of logs and of NCCL's monitoring (RAS), the name of
    the node (NCCL_HOSTID), and variables of files into which NCCL writes what it found.
    """
    left_out_prefixes = (
        "NCCL_DEBUG",
        "NCCL_RAS_",
        "NCCL_HOSTID",
        "TORCH_NCCL_DEBUG_INFO_",
    )
    # A variable with the first ending names such a file, and one with the second ending
    # is the number of the rank that writes it.
    endings_of_dumps = ("_DUMP_FILE", "_DUMP_FILE_RANK")
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(left_out_prefixes)
        and not name.endswith(endings_of_dumps)
    }


def shared_facts(me: Rank) -> dict[str, str]:
    """Return the facts about hardware and software, which all ranks must share.

    Only the names of network adapters (`NAMES_OF_ADAPTERS`) may differ between ranks,
    because nodes number their adapters.

    Parameters
    ----------
    me : Rank
        This rank. All ranks call this function.

    Returns
    -------
    dict of str to str
        The facts of rank 0, as `facts_of` gives them, on every rank.

    Raises
    ------
    UserError
        If any other fact of a rank differs, as on another model of GPU or with another
        torch.
    """
    facts_of_ranks = peers.everyones_text(json.dumps(facts_of(me)))
    return equal_machines(facts_of_ranks)


def equal_machines(texts: Sequence[str]) -> dict[str, str]:
    """Return the facts of rank 0, after a check that all ranks have the same facts.

    Only the names of network adapters may differ, because nodes number their adapters.

    Parameters
    ----------
    texts : sequence of str
        What `facts_of` returned on each rank, as JSON, in the order of ranks.

    Returns
    -------
    dict of str to str
        The facts of rank 0.

    Raises
    ------
    UserError
        If any other fact of a rank differs from that of rank 0.

    Examples
    --------
    >>> equal_machines(['{"gpu": "H200"}', '{"gpu": "H200"}'])
    {'gpu': 'H200'}
    """
    shared: dict[str, str]
    # The first text is that of rank 0, whose facts are returned.
    shared, *others = (json.loads(text) for text in texts)
    for rank, facts in enumerate(others, start=1):
        # The error ends both loops, so that it names the first difference only.
        for name, value in _differences(shared, facts):
            if name in NAMES_OF_ADAPTERS:
                continue
            raise UserError(
                f"ranks run on different machines: the {name} of rank 0 is "
                f"{shared.get(name, 'none')}, that of rank {rank} is {value}: start "
                "the job on equal nodes with the same software"
            )
    return shared


def refuse_other_origin(
    path: Path, stamp: Mapping[str, Any], facts: Mapping[str, str]
) -> None:
    """Refuse a table that was written by ranks with other hardware or software.

    No fact may differ here, not even the name of a network adapter.

    Parameters
    ----------
    path : Path
        The table, to which this job is going to add rows.
    stamp : mapping
        The stamp of the table, which says where its rows come from.
    facts : mapping of str to str
        What `shared_facts` returned in this job.

    Raises
    ------
    UserError
        If the stamp has other facts, or none.
    """
    # `ddlkit.measure.cluster` writes such facts into the stamps of its tables, under
    # "ranks". The stamps of other tables have none.
    earlier_facts: Mapping[str, str] = stamp["machine"].get("ranks", {})
    # The error ends this loop, so that it names the first difference only.
    for name, value in _differences(earlier_facts, facts):
        earlier = earlier_facts.get(name, "none")
        raise UserError(
            f"{path} was measured where the {name} is {earlier}, and here it is {value}: "
            "choose another directory"
        )


def _differences(
    first: Mapping[str, str], other: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each fact that differs, and its value in ``other``.

    A fact that a mapping lacks has the value "none" there.
    """
    for name in sorted({*first, *other}):
        value = other.get(name, "none")
        if value != first.get(name, "none"):
            yield name, value
