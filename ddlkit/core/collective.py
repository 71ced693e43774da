"""Collectives: their bytes on a ring, what their size means, and their names.

`ddlkit.measure.collectives` starts collectives of these names with torch.distributed.
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError, shown


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective, with all that models, readers and exports know about it.

    Sizes are in bytes, and mean what they mean in nccl-tests. On a ring of n ranks,
    each rank sends to the next one. A round of the ring has n - 1 steps.

    Parameters
    ----------
    name : str
        The name in tables, settings and commands. The program of nccl-tests is called
        ``name_perf``, and the name without underscores is looked for in traces and
        logs.
    rounds : int
        How often a message goes around the ring. 0 stands for a single step from one
        rank to another, without a ring.
    divided : bool
        Whether a message is cut into n pieces, of which each step sends one. Otherwise
        the whole message crosses each link once in a round.
    sized : {"buffer", "input", "output"}
        Which buffer of a rank has the size of the message. With "buffer" both the input
        and the output have this size. With "input" the output is an n-th of the input.
        With "output" the input is an n-th of the output.
    prints_redop, prints_root : bool
        Whether nccl-tests prints the operation by which values are reduced, and the
        rank that differs from the others. Logs are recognized by these columns.
    mpi_prints_a_part : bool
        Whether the MPI benchmarks of OSU and Intel print the bytes from one rank to one
        other rank, an n-th of the size, instead of the size.
    spellings : tuple of str
        Further names in traces and logs, in small letters without underscores.
    process_group_name : str
        The name in process groups of PyTorch, as in the "Collective name" of a profile.
    graph_name : str
        The name of the operator in graphs of PyTorch, below ``_c10d_functional``.

    Examples
    --------
    Between 4 ranks, each link carries 1.5 bytes for each byte of an all-reduce. An
    all-reduce of 1 MB that takes 2 ms has a bus bandwidth of 750 MB/s:

    >>> all_reduce = COLLECTIVES["all_reduce"]
    >>> all_reduce.steps(4), all_reduce.bus_factor(4)
    (6, 1.5)
    >>> float(all_reduce.busbw(4, n_bytes=1e6, seconds=2e-3))
    750000000.0

    The output of an all-gather has the size of the message, and the input a fourth:

    >>> all_gather = COLLECTIVES["all_gather"]
    >>> all_gather.input_parts(4), all_gather.output_parts(4)
    (4, 1)
    """

    name: str
    rounds: int
    divided: bool
    sized: Literal["buffer", "input", "output"] = "buffer"
    prints_redop: bool = False
    prints_root: bool = False
    mpi_prints_a_part: bool = False
    spellings: tuple[str, ...] = ()
    process_group_name: str = ""
    graph_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names in traces and logs, in small letters without underscores."""
        return (self.name.replace("_", ""), *self.spellings)

    def steps(self, ranks: int) -> int:
        """Return how many steps a ring of ``ranks`` takes, one after the other."""
        if not self.rounds:
            # A message from one rank to another one is a single step.
            return 1
        return self.rounds * (ranks - 1)

    def pieces(self, ranks: int) -> int:
        """Return into how many pieces a message is cut on a ring of ``ranks``."""
        return ranks if self.divided else 1

    def pieces_sent(self, ranks: int) -> int:
        """Return how many pieces of a message the link of each rank carries, each way."""
        if self.divided:
            # Each step sends one piece.
            return self.steps(ranks)
        # The whole message crosses the link once in a round, or in its only step.
        return max(1, self.rounds)

    def bus_factor(self, ranks: int) -> float:
        """Return the bytes on the link of each rank, each way, per byte of a message.

        In nccl-tests this is the factor between algorithm bandwidth and bus bandwidth.
        """
        return self.pieces_sent(ranks) / self.pieces(ranks)

    def wire_bytes(self, ranks: int, n_bytes: Any) -> Any:
        """Return the bytes on the link of each rank, each way, for ``n_bytes``."""
        return self.bus_factor(ranks) * n_bytes

    def busbw(self, ranks: Any, n_bytes: ArrayLike, seconds: ArrayLike) -> Any:
        """Return the bus bandwidth in bytes/s, as nccl-tests defines it.

        The bus bandwidth can be compared with the rate of the link, and cannot exceed
        this rate.

        Parameters
        ----------
        ranks : int
            Between how many ranks.
        n_bytes, seconds : array_like
            Sizes and times of messages, of shapes that broadcast.

        Returns
        -------
        float or ndarray
            Bytes/s for each message.
        """
        return self.bus_factor(ranks) * (np.asarray(n_bytes) / np.asarray(seconds))

    def input_parts(self, ranks: int) -> int:
        """Return the size of a message, divided by the size of the input of a rank.

        If the message has the size of the output, the inputs of all ranks together have
        this size.
        """
        return ranks if self.sized == "output" else 1

    def output_parts(self, ranks: int) -> int:
        """Return the size of a message, divided by the size of the output of a rank.

        If the message has the size of the input, the outputs of all ranks together have
        this size.
        """
        return ranks if self.sized == "input" else 1


def _by_name(*collectives: Collective) -> dict[str, Collective]:
    """Return collectives in a dictionary by their names."""
    return {collective.name: collective for collective in collectives}


COLLECTIVES = _by_name(
    Collective(
        name="all_reduce",
        rounds=2,
        divided=True,
        prints_redop=True,
        process_group_name="allreduce",
        graph_name="all_reduce",
    ),
    Collective(
        name="all_gather",
        rounds=1,
        divided=True,
        sized="output",
        mpi_prints_a_part=True,
        process_group_name="_allgather_base",
        graph_name="all_gather_into_tensor",
    ),
    Collective(
        name="reduce_scatter",
        rounds=1,
        divided=True,
        sized="input",
        prints_redop=True,
        process_group_name="_reduce_scatter_base",
        graph_name="reduce_scatter_tensor",
    ),
)
"""Every collective that can be timed, fitted, predicted, exported and drawn."""

ONLY_IN_LOGS = _by_name(
    Collective(name="alltoall", rounds=1, divided=True, mpi_prints_a_part=True),
    Collective(
        name="gather",
        rounds=1,
        divided=True,
        sized="output",
        prints_root=True,
        mpi_prints_a_part=True,
    ),
    Collective(
        name="scatter",
        rounds=1,
        divided=True,
        sized="input",
        prints_root=True,
        mpi_prints_a_part=True,
    ),
    Collective(
        name="broadcast",
        rounds=1,
        divided=False,
        prints_root=True,
        spellings=("bcast",),
    ),
    Collective(
        name="reduce", rounds=1, divided=False, prints_redop=True, prints_root=True
    ),
    # nccl-tests prints an operation for sendrecv, although nothing is reduced.
    Collective(name="sendrecv", rounds=0, divided=False, prints_redop=True),
)
"""Collectives whose logs can be read and fitted, and for which there is nothing else."""

STEPS = "steps:"
"""The beginning of the name of an algorithm whose steps were sent one by one.

All other names are algorithms of a library's collective.
"""


def find_collective(
    name: str, known: Mapping[str, Collective] = COLLECTIVES
) -> Collective:
    """Return the collective of a name.

    Parameters
    ----------
    name : str
        The name.
    known : mapping of str to Collective, optional
        The collectives that are allowed, by name.

    Returns
    -------
    Collective
        The collective.

    Raises
    ------
    UserError
        If no known collective has the name.
    """
    if name not in known:
        raise UserError(f"unknown collective {shown(name)}: use {' or '.join(known)}")
    return known[name]


def of_gradients(*, sparse: bool) -> str:
    """Return the name of the collective that exchanges gradients.

    Dense gradients are reduced. Sparse gradients are gathered, values and indices,
    because each rank has selected other elements.
    """
    return "all_gather" if sparse else "all_reduce"
