"""Costs of collectives on more nodes than were measured.

The laws themselves are in `ddlkit.core.scaling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core import scaling, units
from ddlkit.core.collective import find_collective
from ddlkit.core.cost import Table
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The times of a collective on one number of nodes.

    Attributes
    ----------
    collective : str
        The name of the collective.
    nodes : int
        The number of nodes.
    ranks : int
        The number of GPUs.
    sizes : ndarray, shape (k,)
        The sizes in bytes, increasing.
    seconds : ndarray, shape (k,)
        The median time of each size.
    """

    collective: str
    nodes: int
    ranks: int
    sizes: Floats
    seconds: Floats

    @property
    def best_bytes_per_s(self) -> float:
        """Return the largest bus bandwidth over all sizes, in bytes per second."""
        factor = find_collective(self.collective).bus_factor(self.ranks)
        return float(np.max(self.sizes * factor / self.seconds))

    def continued_to(self, n_bytes: float) -> NodeTable:
        """Return the table with a further size, if it ends below that size.

        Parameters
        ----------
        n_bytes : float
            The size that the table should reach.

        Returns
        -------
        NodeTable
            The table itself if it reaches the size, or if it has a single size. Otherwise the size
            is appended, with a time that is extrapolated along the line through the two largest
            sizes.
        """
        # A table of a single size is returned as well, because no line can be drawn through it.
        if self.sizes[-1] >= n_bytes or len(self.sizes) < 2:
            return self
        # Beyond its largest size, this cost extrapolates.
        cost = _table(self.sizes, self.seconds, self.collective, self.ranks)
        return replace(
            self,
            sizes=np.append(self.sizes, n_bytes),
            seconds=np.append(self.seconds, cost(n_bytes)),
        )


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """The costs of collectives by their number of nodes.

    Attributes
    ----------
    tables : tuple of NodeTable
        The measured tables, in the order of their nodes.
    """

    tables: tuple[NodeTable, ...]

    @classmethod
    def of(cls, times: DataFrame) -> NodeCosts:
        """Return the costs of collectives from their measured times.

        Parameters
        ----------
        times : DataFrame
            The columns ``collective``, ``nodes``, ``ranks``, ``bytes`` and ``seconds``, with a
            row for each timed message.

        Returns
        -------
        NodeCosts
            A table of median times for each collective, number of nodes and number of ranks.
        """
        tables = []
        # `groupby` sorts by these columns, so the tables are in the order of their nodes.
        for key, rows in times.groupby(["nodes", "ranks", "collective"]):
            medians_s = rows.groupby("bytes")["seconds"].median()
            nodes, ranks, collective = key
            table = NodeTable(
                collective=str(collective),
                nodes=int(nodes),
                ranks=int(ranks),
                sizes=medians_s.index.to_numpy(float),
                seconds=medians_s.to_numpy(),
            )
            tables.append(table)
        return cls(tuple(tables))

    def continued_to(self, n_bytes: float) -> NodeCosts:
        """Return the costs with tables that reach a size.

        The measured tables are extrapolated to the size, and not the times that are predicted from
        them for more nodes. A prediction can add more seconds to the second largest size than to
        the largest one. The line through the two predicted times is then flatter than the line
        through the measured ones, and far beyond both sizes a message would seem shorter on more
        nodes.

        Parameters
        ----------
        n_bytes : float
            The size in bytes.

        Returns
        -------
        NodeCosts
            The tables, each extrapolated by `NodeTable.continued_to`.
        """
        return NodeCosts(tuple(table.continued_to(n_bytes) for table in self.tables))

    def with_per_node(self, gpus: int) -> NodeCosts:
        """Return the costs without the tables that have another number of GPUs on a node.

        Parameters
        ----------
        gpus : int
            The number of GPUs on each node.

        Returns
        -------
        NodeCosts
            The tables in which each node has ``gpus`` GPUs.

        Raises
        ------
        UserError
            If no table of several nodes is among them.
        """
        matching = tuple(
            table for table in self.tables if table.ranks == gpus * table.nodes
        )
        # Tables of one node alone say nothing of the network.
        if not any(table.nodes > 1 for table in matching):
            advice = f"measure them on two nodes or more with {gpus} GPUs on each"
            if matching:
                raise UserError(
                    f"the collectives were measured on 1 node alone with the {gpus} GPUs on "
                    f"each node of the training: {advice}"
                )
            of_tables = ", ".join(sorted({_per_node(table) for table in self.tables}))
            raise UserError(
                f"the training has {gpus} GPUs on each node, and the tables of collectives "
                f"have {of_tables}: {advice}"
            )
        return NodeCosts(matching)

    @property
    def collectives(self) -> list[str]:
        """Return the names of the measured collectives, sorted."""
        return sorted({table.collective for table in self.tables})

    def of_collective(self, collective: str) -> Iterator[NodeTable]:
        """Yield the tables of a collective, in the order of their nodes.

        Parameters
        ----------
        collective : str
            The name of the collective.

        Yields
        ------
        NodeTable
            A table.
        """
        return (table for table in self.tables if table.collective == collective)

    def measured(self, collective: str, nodes: int, ranks: int) -> NodeTable | None:
        """Return the table of exactly these nodes and ranks, or None.

        Parameters
        ----------
        collective : str
            The name of the collective.
        nodes, ranks : int
            The numbers of nodes and of GPUs.

        Returns
        -------
        NodeTable or None
            The table, None if these nodes and ranks were not measured.
        """
        for table in self.of_collective(collective):
            if (table.nodes, table.ranks) == (nodes, ranks):
                return table
        return None

    def knows(self, collective: str, nodes: int, ranks: int) -> bool:
        """Return whether a cost was measured, or can be predicted from a table of several nodes.

        Parameters
        ----------
        collective : str
            The name of the collective.
        nodes, ranks : int
            The numbers of nodes and of GPUs.

        Returns
        -------
        bool
            True if these nodes and GPUs were measured, or if their cost can be predicted, for which
            a table of several nodes with as many GPUs on each is needed. One node is never
            predicted, because its GPUs do not use the network.
        """
        if self.measured(collective, nodes, ranks) is not None:
            return True
        if nodes == 1:
            return False
        # A table has as many GPUs on each node if table.ranks / table.nodes == ranks / nodes.
        # Products of integers are compared, because quotients are rounded.
        return any(
            table.nodes > 1 and table.ranks * nodes == ranks * table.nodes
            for table in self.of_collective(collective)
        )

    def anchor(self, collective: str, nodes: int) -> NodeTable:
        """Return the table from which a number of nodes is predicted.

        Parameters
        ----------
        collective : str
            The name of the collective.
        nodes : int
            The number of nodes to predict for.

        Returns
        -------
        NodeTable
            The table of the largest number of nodes that is at most ``nodes``, or else the
            smallest table of several nodes.

        Raises
        ------
        UserError
            If there is no table of several nodes, if times of the collective are not predicted at
            all, or if ``nodes`` is too many times the nodes of the table.
        """
        several = [table for table in self.of_collective(collective) if table.nodes > 1]
        if not several:
            raise UserError(
                f"the tables of {collective} are of one node, which says nothing of the network: "
                "measure it on two nodes or more"
            )
        # The tables are in the order of their nodes, so that the last one has the most.
        not_larger = [table for table in several if table.nodes <= nodes]
        anchor = not_larger[-1] if not_larger else several[0]
        _refuse_too_many_nodes(anchor, nodes)
        return anchor

    def cost(self, collective: str, nodes: int, ranks: int) -> Table:
        """Return what a collective costs on a number of nodes on a quiet network.

        Parameters
        ----------
        collective : str
            The name of the collective.
        nodes, ranks : int
            The numbers of nodes and of GPUs.

        Returns
        -------
        Table
            The measured times if these nodes and GPUs were measured, or else times that are
            predicted from the table that `anchor` returns. If a table of more nodes exists as well,
            its times limit the predicted ones from above, because more nodes do not shorten a
            message. Measured times are not changed, even if they are shorter than those of fewer
            nodes.

        Raises
        ------
        UserError
            If the tables do not allow a prediction.
        """
        measured = self.measured(collective, nodes, ranks)
        if measured is not None:
            _refuse_one_size(measured)
            return _table(measured.sizes, measured.seconds, collective, ranks)
        if nodes == 1:
            raise UserError(
                f"{collective} within one node does not follow from tables of several nodes: "
                f"measure it on one node with {ranks} GPUs"
            )
        anchor = self.anchor(collective, nodes)
        _refuse_one_size(anchor)
        seconds = self._predicted_s(anchor, nodes, ranks)
        # If more nodes were measured, their times limit the predicted ones.
        larger = self._next_larger(anchor, nodes)
        if larger is not None:
            seconds = np.minimum(seconds, _upper_limits_s(anchor, larger))
        # Sizes whose times cannot be predicted have NaN, and are left out. On r times the anchor's
        # nodes, an all-gather or a reduce-scatter is predicted from one of 1/r of its size on the
        # anchor, where the shard of a rank is as large. The anchor's table may not reach that far.
        is_known = np.isfinite(seconds)
        # A table interpolates between sizes, so it needs two of them.
        if is_known.sum() < 2:
            raise _too_few_sizes(anchor, nodes)
        return _table(anchor.sizes[is_known], seconds[is_known], collective, ranks)

    def _next_larger(self, anchor: NodeTable, nodes: int) -> NodeTable | None:
        """Return the measured table of the next larger number of nodes than ``nodes``, or None.

        ``anchor`` is the table from which ``nodes`` nodes are predicted. The result has as many
        GPUs on each node as the anchor, and several sizes. It is None if there is no such table, or
        if ``anchor`` itself has more nodes than ``nodes``.
        """
        # The result bounds from above what is predicted from the anchor. If the anchor itself has
        # more nodes, it is the smallest table of several nodes. Fewer nodes are then predicted from
        # it alone, without a bound.
        if anchor.nodes > nodes:
            return None
        for table in self.of_collective(anchor.collective):
            # The tables have as many GPUs on each node if the quotients of ranks and nodes are
            # equal. Products of integers are compared, because quotients are rounded.
            has_equal_gpus_per_node = (
                table.ranks * anchor.nodes == anchor.ranks * table.nodes
            )
            # A table of one size cannot be interpolated at the sizes of the anchor.
            if table.nodes > nodes and has_equal_gpus_per_node and len(table.sizes) > 1:
                return table
        return None

    def _predicted_s(self, anchor: NodeTable, nodes: int, ranks: int) -> Floats:
        """Return the predicted seconds of each size of a table, shape (k,).

        ``anchor`` is the table from which they are predicted, for ``nodes`` nodes with ``ranks``
        GPUs in all. An all-reduce is predicted at all sizes. Of other collectives, the seconds are
        NaN at sizes that the table does not allow to predict.
        """
        # All-gathers and reduce-scatters follow another law than all-reduces.
        if anchor.collective != "all_reduce":
            ratio = nodes / anchor.nodes
            # The first sizes are those of the table, and the last ones those to predict for.
            return scaling.gathered_s(anchor.sizes, anchor.seconds, anchor.sizes, ratio)
        # The best bandwidth may have been measured on fewer nodes than the anchor has, but
        # not on one node, whose GPUs do not use the network. The anchor has several nodes, so
        # it is always among these tables.
        bandwidths = [
            table.best_bytes_per_s
            for table in self.of_collective(anchor.collective)
            if 1 < table.nodes <= anchor.nodes
        ]
        return scaling.all_reduce_s(
            anchor.seconds,
            anchor.sizes,
            best_bytes_per_s=max(bandwidths),
            anchor=(anchor.nodes, anchor.ranks),
            target=(nodes, ranks),
        )


def _too_few_sizes(anchor: NodeTable, nodes: int) -> UserError:
    """Return the error for a table whose sizes do not reach as far as a prediction needs.

    ``anchor`` is the table, from which times on ``nodes`` nodes cannot be predicted. All-gathers
    and reduce-scatters on r times the anchor's nodes are predicted from buffers of 1/r of their
    size on the anchor. So fewer nodes need larger sizes in the table, and more nodes smaller ones.
    """
    table = f"the table of {anchor.collective} on {anchor.nodes} nodes"
    if nodes < anchor.nodes:
        largest = units.format_bytes(anchor.sizes[-1])
        return UserError(
            f"{table} ends at {largest}, too small to predict for {nodes} nodes: measure "
            "larger sizes"
        )
    smallest = units.format_bytes(anchor.sizes[0])
    return UserError(
        f"{table} begins at {smallest}, too large to predict for {nodes} nodes: measure "
        "smaller sizes"
    )


def _refuse_one_size(table: NodeTable) -> None:
    """Raise UserError for a table of one size, because a table interpolates between sizes."""
    if len(table.sizes) < 2:
        nodes = "1 node" if table.nodes == 1 else f"{table.nodes} nodes"
        raise UserError(
            f"the table of {table.collective} on {nodes} has one size only: measure several sizes"
        )


def _per_node(table: NodeTable) -> str:
    """Return the GPUs on each node in words, or on all nodes if these differ in their GPUs."""
    if table.ranks % table.nodes:
        return f"{table.ranks} GPUs on {table.nodes} nodes"
    gpus = table.ranks // table.nodes
    return f"{gpus} GPU on each" if gpus == 1 else f"{gpus} GPUs on each"


def _refuse_too_many_nodes(anchor: NodeTable, nodes: int) -> None:
    """Raise UserError if a number of nodes cannot be predicted from the table ``anchor``.

    `NodeCosts.anchor` has chosen this table. It is the largest one of at most ``nodes`` nodes, or
    the smallest one if all have more.
    """
    collective = anchor.collective
    # Up to how many times its own nodes a table predicts. A collective that is not listed has
    # no law by which its times grow.
    most_times = scaling.MOST_TIMES_OF_COLLECTIVE.get(collective)
    if most_times is None:
        known = ", ".join(scaling.MOST_TIMES_OF_COLLECTIVE)
        raise UserError(
            f"{collective} is not predicted for more nodes: give tables of {known}"
        )
    if nodes > most_times * anchor.nodes:
        needed = int(np.ceil(nodes / most_times))
        raise UserError(
            f"{nodes} nodes are more than {most_times:g} times the {anchor.nodes} nodes of "
            f"the table of {collective} from which they are predicted: measure it on {needed} "
            "nodes or more"
        )


def _upper_limits_s(anchor: NodeTable, larger: NodeTable) -> Floats:
    """Return upper limits of the times on any number of nodes between those of two tables.

    ``larger`` is the table of more nodes, and ``anchor`` that of fewer nodes. The limits are in
    seconds, one for each size of ``anchor``, shape (k,).
    """
    # The times of the larger table, interpolated at the sizes of the anchor's table.
    cost = _table(larger.sizes, larger.seconds, larger.collective, larger.ranks)
    larger_s = cost(anchor.sizes)
    # More nodes do not shorten a message. So where the larger table is faster than the
    # anchor's, the limit is the anchor's time.
    limits_s: Floats = np.maximum(larger_s, anchor.seconds)
    return limits_s


def _table(sizes: Floats, seconds: Floats, collective: str, ranks: int) -> Table:
    return Table(sizes, seconds, collective=collective, workers=ranks)


def slowed(cost: Table, factor: float) -> Table:
    """Return a cost whose times are multiplied by a factor.

    Parameters
    ----------
    cost : Table
        The cost.
    factor : float
        The factor.

    Returns
    -------
    Table
        The slower cost.

    Examples
    --------
    >>> cost = Table(bytes=np.array([1e3, 1e5]), seconds=np.array([0.1, 10.0]))
    >>> slowed(cost, 2.0)(1e3)
    0.2
    """
    return replace(cost, seconds=factor * cost.seconds)


def facts_of(times: DataFrame, column: str) -> set[Any]:
    """Return what is known in a column of measured times, such as the versions of NCCL.

    Parameters
    ----------
    times : DataFrame
        A table.
    column : str
        The column, which the table may lack.

    Returns
    -------
    set
        The distinct values. "" is left out, because it stands for a value that is not known.
    """
    if column not in times:
        return set()
    return {value for value in times[column].unique() if value != ""}
