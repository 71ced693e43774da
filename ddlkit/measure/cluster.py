"""Collectives between all ranks of a job that torchrun or Slurm started.

Every rank calls `measure_collectives`, and rank 0 writes the table. All ranks must run
on equal machines, because the stamp of the table can describe only one kind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.units import format_bytes
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.machines import refuse_other_origin, shared_facts
from ddlkit.jobs.rank import Layout, Rank
from ddlkit.measure import collectives as messages
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.measure.session import Origin, table_path, this_machine
from ddlkit.store import machine
from ddlkit.store.tables import refuse_other_machines

MINUTES = 3.0
"""How long all sizes of all collectives take together by default, in minutes."""
MEETING_S = 120.0
"""Seconds until all ranks must have met. Nodes of a job may start one after another."""
_LEAST_S = 0.02
"""The least time for each size of each collective."""


def measure_collectives(
    me: Rank, out: Path, minutes: float, link: str = "", sizes: Sequence[int] = ()
) -> Path:
    """Measure the collectives that a table lacks, between all ranks of this job.

    Parameters
    ----------
    me : Rank
        This rank. NCCL is measured if it is the backend, and gloo otherwise.
    out : Path
        The directory of the table, which only rank 0 uses.
    minutes : float
        How long to measure altogether.
    link : str, optional
        The name of the link between the ranks in the table. By default it is the one
        that `link_of` returns.
    sizes : sequence of int, optional
        Sizes of messages in bytes, in ascending order. By default they reach 1 GiB with
        NCCL, and 64 MiB with gloo.

    Returns
    -------
    Path
        The table.

    Raises
    ------
    UserError
        If ranks differ in their hardware or software, if the directory has tables of
        other machines or settings, if a result is wrong, or if the table cannot be
        written. All ranks raise the same error.
    """
    layout = peers.layout()
    # The hardware and software of all ranks.
    facts_of_all_ranks = shared_facts(me)
    # All ranks call `link_of`, which exchanges texts between them, also if a name is given.
    found_link = link_of(me, layout)
    # The rows of the table name the link as this rank does.
    me = replace(me, link=link or found_link)
    on_nccl = me.backend == "nccl"
    default_sizes = messages.NCCL_SIZES if on_nccl else messages.SIZES
    sizes = sizes or default_sizes
    path = table_path(out, "collectives", _name(me, layout))
    me.say(_in_words(me, layout, sizes))
    # Only rank 0 uses the table. If rank 0 fails at it, all ranks raise its error together,
    # because the others would otherwise wait for rank 0.
    with peers.failing_together():
        if me.rank == 0:
            _refuse_tables_of_others(path, facts_of_all_ranks)
    missing = _collectives_by_missing_sizes(me, path, sizes)
    if not missing:
        me.say(f"{path.name} has all sizes already: nothing is left to do")
        return path
    # Each size of each collective gets an equal share of the time. The share is no larger
    # if the table has some of the sizes already.
    budget = _budget(60.0 * minutes / (len(COLLECTIVES) * len(sizes)))
    for missing_sizes, collectives in missing.items():
        settings = CollectivesSettings(
            collectives=collectives,
            sizes=missing_sizes,
            budget=budget,
            # A single small message of NCCL would mostly show how exactly the GPUs begin
            # together.
            messages_per_sample=messages.NCCL_MESSAGES if on_nccl else 1,
        )
        _measure_and_append(me, settings, path, facts_of_all_ranks)
    return path


def _measure_and_append(
    me: Rank, settings: CollectivesSettings, path: Path, facts: dict[str, str]
) -> None:
    """Measure the collectives that ``settings`` name, and add their rows to a table.

    All ranks measure, and only rank 0 writes the table ``path``. ``facts`` are the hardware
    and software of all ranks, for the table's stamp.
    """
    # This process is a rank already, so it calls the job's `part` instead of launching the
    # job. `part` yields once for each collective, with rows of all sizes.
    tables_of_collectives = collectives_job.part(me, settings)
    for collective, tables in zip(
        settings.collectives, tables_of_collectives, strict=True
    ):
        # The clock rates right after a measurement show whether a GPU was slowed
        # down, for example because it was hot.
        clocks_after = {
            "collective": collective,
            "bytes": [*settings.sizes],
            "ranks": [json.loads(text) for text in _clocks_of_all(me)],
        }
        with peers.failing_together():
            if me.rank == 0:
                _append_rows(path, tables["collectives"], facts, clocks_after)


def _append_rows(
    path: Path,
    rows: pd.DataFrame,
    facts: dict[str, str],
    clocks_after: dict[str, Any],
) -> None:
    """Add rows to the table, and the clock rates after their measurement to its stamp.

    The stamp is a file beside the table that says where its rows come from. ``facts`` are
    the hardware and software of all ranks. ``clocks_after`` names the collective and its
    sizes, and has the clock rates of each rank's GPU.
    """
    described = {
        **this_machine(),
        "ranks": facts,
        # The stamp is written anew, so the rates after earlier measurements are repeated.
        "clocks": [*_earlier_clocks(path), clocks_after],
    }
    Origin(machine=described).save(path, rows, "collectives", append=True)


def _refuse_tables_of_others(path: Path, facts: dict[str, str]) -> None:
    """Raise UserError if a directory has tables of another machine or other settings.

    ``path`` is the table that is measured. ``facts`` are the hardware and software of all
    ranks. If the table exists already, its rows must come from ranks with equal facts.
    """
    refuse_other_machines(path.parent, machine.name())
    if store.has_table(path):
        refuse_other_origin(path, store.load_stamp(path), facts)


def _earlier_clocks(path: Path) -> list[dict[str, Any]]:
    """Return the clock rates that the stamp of a table has after each measurement so far."""
    if not store.has_table(path):
        return []
    earlier: list[dict[str, Any]] = store.load_stamp(path)["machine"]["clocks"]
    return earlier


def _name(me: Rank, layout: Layout) -> str:
    """Return the name of the table, as in "nccl-network-p16-n2" for 16 ranks on 2 nodes."""
    return f"{me.backend}-{me.link}-p{me.world_size}-n{layout.nodes}"


def _in_words(me: Rank, layout: Layout, sizes: Sequence[int]) -> str:
    """Return a line that names the ranks, the link and the range of sizes.

    ``sizes`` are in ascending order.
    """
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes"
    # The sizes that are measured, which are rounded up.
    smallest = messages.whole_size(sizes[0], me.world_size)
    largest = messages.whole_size(sizes[-1], me.world_size)
    line = (
        f"{me.backend} between {me.world_size} ranks on {nodes} over {me.link}, "
        f"{format_bytes(smallest)} to {format_bytes(largest)}"
    )
    # The command joins its ranks without choosing a backend (`joined`). They then use NCCL
    # if they see GPUs.
    if me.backend != "nccl":
        line += "; there are no GPUs here, so this is not NCCL"
    return line


def _budget(size_s: float) -> Budget:
    """Return the budget for one size of one collective, which may take ``size_s``."""
    return Budget(warmup=2, min_repeats=5, max_repeats=200, max_s=max(_LEAST_S, size_s))


def _collectives_by_missing_sizes(
    me: Rank, path: Path, sizes: Sequence[int]
) -> dict[tuple[int, ...], list[str]]:
    """Return which collectives the table ``path`` lacks, grouped by the sizes that it lacks.

    One job can measure all collectives of a group together. A collective that has all its
    sizes in the table is left out. Only rank 0 sees the table, and all ranks return the
    answer of rank 0.
    """
    rows = pd.DataFrame()
    # If the table is damaged, all ranks raise the error of rank 0.
    with peers.failing_together():
        if me.rank == 0 and store.has_table(path):
            rows = store.load_table(path, "collectives")
    missing: dict[tuple[int, ...], list[str]] = {}
    for collective in COLLECTIVES:
        # On all ranks but rank 0 there are no rows, so all sizes seem to be missing there.
        # Only the answer of rank 0 is used.
        lacking = messages.missing_sizes(rows, collective, sizes, me.world_size)
        # Ranks exchange numbers only, so each size has a flag: 1 if it is missing, else
        # 0.
        is_missing = [float(size in lacking) for size in sizes]
        flags_of_rank_0 = peers.everyones(is_missing)[0]
        lacking_on_rank_0 = tuple(
            size for size, flag in zip(sizes, flags_of_rank_0, strict=True) if flag
        )
        if lacking_on_rank_0:
            missing.setdefault(lacking_on_rank_0, []).append(collective)
    return missing


def link_of(me: Rank, layout: Layout) -> str:
    """Return the name that tables give by default to the link between the ranks.

    Parameters
    ----------
    me : Rank
        This rank.
    layout : Layout
        How the ranks are spread over nodes.

    Returns
    -------
    str
        "network" between nodes; within a node "nvlink", "pcie" or "nccl" between the GPUs
        of the ranks, as `ddlkit.store.machine.gpu_link` says, and "loopback" between
        processors.

    Notes
    -----
    All ranks must call this function together, because only a rank itself knows which GPU
    it uses. Slurm may hide from a rank the GPUs of the others. Then nothing says what joins
    them, and the name is "nccl".
    """
    if layout.nodes > 1:
        return "network"
    if me.backend != "nccl":
        return "loopback"
    # Each rank tells all others its GPU, and the links of this GPU that it can see. `links`
    # has, for each GPU, the word of nvidia-smi for its link to each other GPU.
    own_gpu = _gpu_uuid(me)
    links = machine.links_between_gpus(machine.topology(), machine.gpu_uuids())
    known_to_rank = json.dumps({"gpu": own_gpu, "links": links.get(own_gpu, {})})
    gpus_of_ranks: list[str] = []
    links_by_gpu: dict[str, dict[str, str]] = {}
    for text in peers.everyones_text(known_to_rank):
        of_rank = json.loads(text)
        gpus_of_ranks.append(of_rank["gpu"])
        links_by_gpu[of_rank["gpu"]] = of_rank["links"]
    return machine.gpu_link(gpus_of_ranks, links_by_gpu)


def _gpu_uuid(me: Rank) -> str:
    """Return the identity of a rank's GPU, as nvidia-smi prints it, "" without a GPU."""
    if me.device.type != "cuda":
        return ""
    # nvidia-smi prints "GPU-" before the identity, which torch may leave out.
    uuid = str(torch.cuda.get_device_properties(me.device).uuid)
    return f"GPU-{uuid.removeprefix('GPU-')}"


def _clocks_of_all(me: Rank) -> list[str]:
    """Return the settings and clock rates of each rank's GPU as JSON.

    For a rank without a GPU the text is "{}". All ranks call this function.
    """
    settings: dict[str, Any] = {}
    if me.device.type == "cuda":
        # The option -i limits nvidia-smi to this GPU. So there is one row, and none if
        # nvidia-smi does not answer.
        settings = next(iter(machine.gpu_settings("-i", _gpu_uuid(me))), {})
    return peers.everyones_text(json.dumps(settings))
