"""What is known of each collective: its bytes on a ring, what its size means, and its names.

How a collective is posted with torch.distributed stands in `ddlkit.measure.collectives`,
under the same names: this module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError, shown


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective: everything that models, readers and exports know of it.

    Sizes are those of nccl-tests, in bytes. On a ring of n ranks, each rank sends to the
    next one; a round of the ring has n - 1 steps.

    Parameters
    ----------
    name : str
        The name in tables, settings and commands. The program of nccl-tests is called
        ``name_perf``, and the name without underscores is looked for in traces and logs.
    rounds : int
        How often a ring goes round. 0: no ring but a single step, point to point.
    divided : bool
        Whether a message is cut into n pieces, of which a step sends one. Otherwise all of
        it crosses each link, once in a round.
    sized : {"buffer", "input", "output"}
        Which buffer of a rank has the size in bytes. "buffer": its input and its output
        alike. "input": all of its input, the output is one part of n. "output": all of its
        output, the input is one part of n.
    prints_redop, prints_root : bool
        Whether nccl-tests prints an operation by which values are reduced, and a rank that
        differs from the others: its logs are recognized by these columns.
    mpi_prints_a_part : bool
        Whether OSU's and Intel's MPI benchmarks print the bytes that go from one rank to
        one other, an n-th of the size, and not the size.
    spellings : tuple of str
        Further names in traces and logs, in small letters without underscores.
    process_group_name : str
        The name that PyTorch's process groups give it, as in a profile's "Collective name".
    graph_name : str
        The name of its operator in PyTorch's graphs, below ``_c10d_functional``.

    Examples
    --------
    Among 4 ranks, each link carries 1.5 bytes for a byte of an all-reduce. One of 1 MB that
    takes 2 ms has a bus bandwidth of 750 MB/s:

    >>> all_reduce = COLLECTIVES["all_reduce"]
    >>> all_reduce.steps(4), all_reduce.bus_factor(4)
    (6, 1.5)
    >>> float(all_reduce.busbw(4, n_bytes=1e6, seconds=2e-3))
    750000000.0

    The size of an all-gather is that of the output; the input is a fourth of it:

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
        """Return its names in traces and logs, in small letters without underscores."""
        return (self.name.replace("_", ""), *self.spellings)

    def steps(self, ranks: int) -> int:
        """Return how many steps a ring of ``ranks`` takes, one after the other."""
        return self.rounds * (ranks - 1) if self.rounds else 1

    def pieces(self, ranks: int) -> int:
        """Return into how many pieces a message is cut on a ring of ``ranks``."""
        return ranks if self.divided else 1

    def pieces_sent(self, ranks: int) -> int:
        """Return how many of these pieces each rank's link carries, each way."""
        return self.steps(ranks) if self.divided else max(1, self.rounds)

    def bus_factor(self, ranks: int) -> float:
        """Return the bytes that each rank's link carries each way, per byte of a message.

        This is the factor between algorithm and bus bandwidth in nccl-tests.
        """
        return self.pieces_sent(ranks) / self.pieces(ranks)

    def wire_bytes(self, ranks: int, n_bytes: Any) -> Any:
        """Return the bytes that each rank's link carries each way for ``n_bytes``."""
        return self.bus_factor(ranks) * n_bytes

    def busbw(self, ranks: Any, n_bytes: ArrayLike, seconds: ArrayLike) -> Any:
        """Return the bus bandwidth in bytes/s of numbers or arrays (nccl-tests).

        It can be compared with the link's rate, which it must not exceed.
        """
        return self.bus_factor(ranks) * (np.asarray(n_bytes) / np.asarray(seconds))

    def input_parts(self, ranks: int) -> int:
        """Return the size of a message over the size of a rank's input."""
        return ranks if self.sized == "output" else 1

    def output_parts(self, ranks: int) -> int:
        """Return the size of a message over the size of a rank's output."""
        return ranks if self.sized == "input" else 1


def _by_name(*collectives: Collective) -> dict[str, Collective]:
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
"""Every collective that can be timed, fitted, predicted, exported and drawn, by its name."""

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
    # It reduces nothing, and yet an operation is printed.
    Collective(name="sendrecv", rounds=0, divided=False, prints_redop=True),
)
"""Collectives that benchmarks time and whose logs are read, and that nothing else knows."""

STEPS = "steps:"
"""Before an algorithm's name in a table: its steps were sent one by one, not by a library's collective."""


def find_collective(name: str) -> Collective:
    """Return the collective of that name. Raises UserError unless it is in COLLECTIVES."""
    if name not in COLLECTIVES:
        raise UserError(
            f"unknown collective {shown(name)}: use {' or '.join(COLLECTIVES)}"
        )
    return COLLECTIVES[name]


def of_gradients(*, sparse: bool) -> str:
    """Return the name of the collective that exchanges gradients.

    Dense ones are reduced. Of sparse ones each rank has selected other elements, so that
    values and indices are gathered.
    """
    return "all_gather" if sparse else "all_reduce"
