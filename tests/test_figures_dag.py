"""dag's figures: a graph's slack; one setting is the graph's schedule, and a grid is its settings."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.strategies import STRATEGIES, IterationTimes
from ddlkit.core.taskgraph import Gpus, s_sgd, schedule
from workbook.common.claims import paper_table, prose
from workbook.dag import cluster as clusters
from workbook.dag import fig01
from workbook.dag.cluster import CLUSTERS, NETWORKS, Setting
from workbook.dag.equations import period_s
from workbook.dag.settings import Grid, setting_search
from workbook.dag.statements import quantities

GRID = Grid()
BETTER = (
    "nfs_bytes_per_s",
    "disk_bytes_per_s",
    "decoded_per_s",
    "alexnet_speedup",
    "inside_share",
)
SLOWER = ("mxnet_slower", "grpc_slower", "varies")
WORSE = ("stored_bytes", "copy_s", "alexnet_backward_s", "inside_start_s", *SLOWER)
places = st.tuples(*(st.integers(0, n - 1) for n in GRID.shape))
sizes = st.sampled_from([Gpus(), Gpus(1, 2), Gpus(1, 4), Gpus(2, 4), Gpus(4, 4)])
cases = st.tuples(
    *(st.sampled_from(sorted(names)) for names in (CLUSTERS, NETWORKS, STRATEGIES))
)


def test_slack_in_a_schedule_is_zero_exactly_on_critical_paths() -> None:
    times = IterationTimes(
        0.5, 0.5, np.ones(3), np.full(3, 2.0), np.array([1.5, 2.5, 3.5]), 0.5
    )
    drawn = schedule(s_sgd(times, STRATEGIES["Caffe-MPI"], Gpus(1, 4)))
    table = fig01.numbers(drawn)
    assert list(table["task"]) == [f"T{i}" for i in range(36)]
    path = table[table["critical"]]
    assert (path["slack_s"] == 0).all()
    assert (
        (path["end_s"] - path["start_s"]).sum()
        == drawn.duration_s
        == table["end_s"].max()
    )
    # GPU g's batch is read g + 1 reads after the start; so much sooner than the last one's.
    layers = table[table["kind"] == "forward"].groupby("rank")["slack_s"].min()
    assert layers.to_list() == [1.5, 1.0, 0.5, 0.0]


def at(place: tuple[int, ...]) -> Setting:
    values = vars(GRID.at(np.array([place])))
    return Setting(**{name: float(column[0]) for name, column in values.items()})


def tasks_of(
    setting: Setting, cluster: str, network: str, framework: str, gpus: Gpus
) -> tuple[IterationTimes, float, Gpus]:
    """Of a setting of numbers the tasks' times, that of decoding, and the GPUs."""
    start_s, per_byte = setting.message(cluster, framework, gpus)
    backward_s = setting.backward_s(cluster, network, gpus.n) * clusters.layer_shares(
        network
    )
    sent_s = start_s + per_byte * clusters.layer_bytes(network)
    memory_bytes_per_s = clusters.MACHINES * clusters.MEMORY_BYTES_PER_S
    shared = cluster == "K80" and setting.nfs_bytes_per_s < memory_bytes_per_s
    reads_s = setting.reads_s(cluster, network, framework, gpus)
    io_s = reads_s / (gpus.n if shared else gpus.per_machine)
    h2d_s = clusters.BATCH[network] * setting.copy_s
    times = IterationTimes(io_s, h2d_s, backward_s / 2, backward_s, sent_s)
    decode_s = setting.decode_s(cluster, network)
    return times, decode_s, Gpus(gpus.machines, gpus.per_machine, shared)


@settings(max_examples=40, deadline=None)  # the first example computes the grid
@given(places, cases, sizes, st.sampled_from(BETTER + WORSE), st.floats(1.0, 4.0))
def test_a_setting_is_eq_5_repaired_of_its_tasks_and_no_better_with_something_worse(
    place: tuple[int, ...],
    case: tuple[str, str, str],
    gpus: Gpus,
    name: str,
    factor: float,
) -> None:
    setting = at(place)
    times, decode_s, seen = tasks_of(setting, *case, gpus)
    closed_s = period_s(times, STRATEGIES[case[2]], seen, decode_s=decode_s)
    assert setting.iteration_s(*case, gpus) == pytest.approx(closed_s, rel=1e-9)
    change = factor if name in WORSE else 1 / factor
    worse = replace(setting, **{name: change * getattr(setting, name)})
    assert worse.iteration_s(*case, gpus) >= closed_s * (1 - 1e-9)
    alone = quantities(setting)
    for statement, values in setting_search().values.items():
        in_grid = np.broadcast_to(values, GRID.shape)[place]
        assert in_grid == pytest.approx(alone[statement], rel=1e-12)


def test_the_clusters_are_those_of_table_2_and_of_the_text() -> None:
    table, printed = paper_table("dag", "tab02"), prose("dag")
    for row, (name, known) in zip(table.itertuples(), CLUSTERS.items(), strict=True):
        assert (
            row.gpu == f"Tesla {name}"
            and row.memory_bytes_per_s == clusters.MEMORY_BYTES_PER_S
        )
        stored = (
            row.connection_bytes_per_s,
            row.network_bits_per_s / 8,
            row.storage_bytes_per_s,
        )
        times = [
            printed[f"fig03-{name.lower()}-{what}"]
            for what in ("backward", "communication")
        ]
        ours = [getattr(known, field.name) for field in fields(known)]
        assert ours == pytest.approx([*stored, *times])
    assert (
        paper_table("dag", "tab04").set_index("network")["batch"].to_dict()
        == clusters.BATCH
    )
    backward_us = paper_table("dag", "tab06")["backward_us"].sum()
    assert backward_us / 1e6 == pytest.approx(clusters.ALEXNET_BACKWARD_S, rel=1e-9)
