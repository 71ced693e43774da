"""Joint plans of buckets and two groups' resources: never slower than one planned after the other."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.resources import Resources
from ddlkit.core.workload import Workload
from ddlkit.report.figures import sharing_joint, sharing_panels
from ddlkit.report.figures.sharing_predicted import drawn, shared
from ddlkit.report.figures.sharing_sure import Pairs, Sure, sure

LINK, DEFAULT = "lab:4gbit", "t2-free-normal"
NAMES = ("t1-free-nice10", DEFAULT, "t2-free-raised")
SHARES = st.floats(0.0, 1.0)
WAYS = st.tuples(st.floats(1e-9, 1e-8), SHARES, SHARES)
ROWS = st.lists(st.tuples(st.floats(1e-3, 5e-2), st.integers(10**5, 10**7)), min_size=2, max_size=6)
WORK = ROWS.map(
    lambda rows: Workload.from_arrays(0.02, [row[0] for row in rows], [row[1] for row in rows])
)


def known_of(ways: list[tuple[float, float, float]]) -> dict[tuple[str, str], Resources]:
    return {
        (LINK, name): Resources(name, AlphaBeta(1e-4, per_byte), s, m)
        for name, (per_byte, s, m) in zip(NAMES, ways, strict=True)
    }


@settings(max_examples=25, deadline=None)
@given(WORK, st.lists(WAYS, min_size=3, max_size=3), st.sampled_from((0.0, 2e-10)))
def test_the_joint_plan_is_never_slower_than_a_plan_whose_resources_are_chosen_after_it(
    work: Workload, ways: list[tuple[float, float, float]], copy_s_per_byte: float
) -> None:
    """Under the model that chooses: of DDP's buckets with any two configurations, and of the default."""
    known = known_of(ways)
    found = sharing_joint.tried(work, known, LINK, copy_s_per_byte)
    best = min(one.iteration_s for one in found.values())
    for spec in sharing_joint.NAMED:
        after = [one.iteration_s for (plan, _), one in found.items() if plan == spec]
        assert len(after) == len(NAMES) ** 2
        assert best <= min(after)
    default = found["ddp", DEFAULT]
    plain = shared(work, "ddp", DEFAULT, LINK, known)
    assert plain is not None
    assert best <= default.iteration_s and default.iteration_s >= plain.iteration_s


KNOWN = known_of([(3e-9, 0.1, 0.2)] * 3)
LAYERS = {
    ("n", batch): Workload.from_arrays(0.05, [0.05, 0.05], [10**6, 4 * 10**6]).scaled(batch)
    for batch in (1, 2, 3)
}


def rounds(share: float) -> pd.DataFrame:
    """Iterations that last longer than foretold by a share, in rounds that compute at other speeds."""
    rows: list[dict[str, object]] = []
    for (network, batch), work in LAYERS.items():
        key = (network, batch, "ddp", LINK, DEFAULT)
        for repeat, slower in enumerate((1.0, 1.0, 1.1, 0.9, 1.0)):
            told = shared(work.scaled(slower), "ddp", DEFAULT, LINK, KNOWN)
            assert told is not None
            names = ("network", "batch", "plan", "link", "configuration")
            row = {**dict(zip(names, key, strict=True)), "repeat": repeat}
            times = {
                "iteration_s": (1 + share) * told.iteration_s,
                "compute_s": told.workload.compute_s,
            }
            rows.append({**row, **times})
    return pd.DataFrame(rows)


def judged(iterations: pd.DataFrame) -> Sure:
    cells = iterations[iterations["repeat"] == 0]
    return sure(drawn(iterations, cells, LAYERS, KNOWN, {}))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_steady_error_is_surely_seen_and_drift_that_computing_shares_is_none(
    share: float,
) -> None:
    found = judged(rounds(share))
    off = 1 / (1 + share) - 1
    assert found.mean == pytest.approx(off, abs=2e-3) and found.median == pytest.approx(
        -off, abs=2e-3
    )
    assert found.mean_lower - 1e-12 <= found.mean <= found.mean_upper + 1e-12
    assert (found.mean_upper < 0) == (share > 0)
    assert found.noise < 2e-3


def test_rounds_that_scatter_make_it_unsure() -> None:
    table, noises = rounds(0.0), []
    for seed in range(5):  # few cells: their halves may happen to agree
        scatter = np.random.default_rng(seed).normal(1.0, 0.2, len(table)).clip(0.5)
        found = judged(table.assign(iteration_s=table["iteration_s"] * scatter))
        assert found.mean_lower < found.mean < found.mean_upper
        noises.append(found.noise)
    assert np.median(noises) > 0.02


def test_what_scatter_alone_would_show_is_the_median_error_of_a_model_that_has_none() -> None:
    scatter = np.random.default_rng(0).normal(1.0, 0.1, (120, 16))
    found = sure([[Pairs(np.ones(16), one)] for one in scatter])
    assert found.noise == pytest.approx(found.median, rel=0.25)


def test_what_was_written_down_is_judged_by_the_interval() -> None:
    """Of the recording: each plan's halves are there, and a verdict is the side of its interval."""
    here = sharing_panels.recorded("")
    trained = here.beside("joint") if here is not None else None
    assert trained is not None
    found = sharing_joint.judged(trained)
    assert set(found["taken"]) == set(sharing_joint.PARTS)
    assert {(row.network, row.batch) for row in found.itertuples()} == set(sharing_joint.FORETOLD)
    inside = (found["lower"] <= found["foretold"]) & (found["foretold"] <= found["upper"])
    assert inside.equals(found["as_foretold"])
    assert (found["gains"].eq("yes") == (found["lower"] > 0)).all()
    assert (found["measured"].between(found["lower"], found["upper"])).all()


def test_told_again_with_the_same_resources_gains_are_as_they_were_foretold() -> None:
    here = sharing_panels.recorded("")
    trained = here.beside("joint") if here is not None else None
    assert here is not None and trained is not None
    found = sharing_joint.judged(trained)
    again = sharing_joint.retold(found, here.source, here.known, here.copied)
    np.testing.assert_allclose(again, found["foretold"], rtol=1e-6, atol=1e-9)
