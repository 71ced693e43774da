"""dag's figures 2 to 4 by model: one setting is the graph's schedule, and a grid is its settings."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.papers.dag import STRATEGIES
from ddlkit.papers.dag import cluster as clusters
from ddlkit.papers.dag.cluster import CLUSTERS, NETWORKS, Grid, Setting, quantities
from ddlkit.papers.dag.graph import Gpus, period_s
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.figures import dag_clusters

GRID = Grid()
BETTER = ("nfs_bytes_per_s", "disk_bytes_per_s", "decoded_per_s", "alexnet_speedup", "inside_share")
WORSE = ("stored_bytes", "copy_s", "inside_start_s", "mxnet_slower", "grpc_slower", "varies")

places = st.tuples(*(st.integers(0, n - 1) for n in GRID.shape))
sizes = st.sampled_from([Gpus(), Gpus(1, 2), Gpus(1, 4), Gpus(2, 4), Gpus(4, 4)])
cases = st.tuples(*(st.sampled_from(sorted(names)) for names in (CLUSTERS, NETWORKS, STRATEGIES)))


def at(place: tuple[int, ...]) -> Setting:
    found = GRID.at(np.array([place]))
    return Setting(**{name: float(values[0]) for name, values in vars(found).items()})


@given(places, cases, sizes)
def test_a_setting_is_eq_5_repaired_of_its_tasks(
    place: tuple[int, ...], case: tuple[str, str, str], gpus: Gpus
) -> None:
    setting = at(place)
    times, decode_s, gpus = setting.times(*case, gpus)
    closed_s = period_s(times, STRATEGIES[case[2]], gpus, decode_s=decode_s)
    assert setting.iteration_s(*case, gpus) == pytest.approx(closed_s, rel=1e-9)


@settings(max_examples=20, deadline=None)  # the first example computes the grid
@given(places)
def test_a_grid_is_its_settings_one_by_one(place: tuple[int, ...]) -> None:
    one = quantities(at(place))
    for name, values in dag_clusters.setting_search().values.items():
        assert np.broadcast_to(values, GRID.shape)[place] == pytest.approx(one[name], rel=1e-12)


@given(places, cases, sizes, st.sampled_from(BETTER + WORSE), st.floats(1.0, 4.0))
def test_no_iteration_is_longer_with_something_better(
    place: tuple[int, ...], case: tuple[str, str, str], gpus: Gpus, name: str, factor: float
) -> None:
    setting = at(place)
    change = factor if name in WORSE else 1 / factor
    worse = replace(setting, **{name: change * getattr(setting, name)})
    assert worse.iteration_s(*case, gpus) >= setting.iteration_s(*case, gpus) * (1 - 1e-12)


def test_the_clusters_are_those_of_table_2_and_of_the_text() -> None:
    table, said = paper_table("dag", "tab02"), prose("dag")
    for row, (name, known) in zip(table.itertuples(), CLUSTERS.items(), strict=True):
        assert row.gpu == f"Tesla {name}" and row.memory_bytes_per_s == clusters.MEMORY_BYTES_PER_S
        stored = row.connection_bytes_per_s, row.network_bits_per_s / 8, row.storage_bytes_per_s
        times = [said[f"fig03-{name.lower()}-{what}"] for what in ("backward", "communication")]
        ours = [getattr(known, field.name) for field in fields(known)]
        assert ours == pytest.approx([*stored, *times])
    assert paper_table("dag", "tab04").set_index("network")["batch"].to_dict() == clusters.BATCH
    backward_us = paper_table("dag", "tab06")["backward_us"].sum()
    assert backward_us / 1e6 == pytest.approx(clusters.ALEXNET_BACKWARD_S, rel=1e-9)
