"""What pictures cost before training sees them: measured as said, read back as said, refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget
from ddlkit.store.readers import read_inputs
from workbook.dag import training
from workbook.dag.equations import naive_iteration_s
from workbook.record import speed

BRIEF = Budget(warmup=0, min_repeats=2, max_repeats=2, max_s=0.01)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    table = speed.measure_inputs(place, (80, 60), 2, 32, BRIEF)
    assert not list(place.iterdir())  # no pictures stay
    return store.save_table(
        table["inputs"], place, "inputs-x", schema="inputs", command=[]
    )


@pytest.fixture(scope="module")
def recorded() -> list[training.Parts]:
    return list(training.parts().values())


def test_cold_reads_come_from_the_disk_and_times_are_of_a_batch(measured: Path) -> None:
    table = store.load_table(measured, "inputs")
    assert set(zip(table["quantity"], table["how"], strict=True)) == {
        ("read", "cold files"),
        ("decode", "one core"),
    }
    assert (table.loc[table["quantity"] == "read", "from_disk"] >= 1).all()
    once, twice = read_inputs(measured, 2), read_inputs(measured, 4)
    assert set(once) == {"io_s", "decode_s"}
    assert {name: 2 * one for name, one in once.items()} == pytest.approx(twice)


def test_a_prediction_is_a_sum_where_nothing_is_hidden_and_never_more(
    recorded: list[training.Parts],
) -> None:
    """One disk for all ranks: each waits for those before it; all else is one after the other."""
    for part in recorded:
        for stored in ("jpeg", "raw"):
            times = part.times(stored)
            whole_s = naive_iteration_s(times) + part.input_s(
                "decode", stored, part.ranks
            )
            sum_s = part.predicted_s(stored, 0, "after")
            most_s = whole_s + (part.ranks - 1) * part.input_s("read", stored, 1)
            assert whole_s * (1 - 1e-9) <= sum_s <= most_s * (1 + 1e-9)
            for how in ((0, "during"), (2, "after"), (2, "during")):
                assert part.predicted_s(stored, *how) <= sum_s * (1 + 1e-9)


def test_a_mistake_is_one_line(recorded: list[training.Parts], tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(UserError, match="cannot "):
        speed.measure_inputs(tmp_path / "a-file", (80, 60), 1, 1, BRIEF)
    with pytest.raises(UserError, match="no training with pictures in"):
        training.parts(tmp_path)
    with pytest.raises(
        UserError, match="no decode of jpeg by 3 ranks: measure input again"
    ):
        recorded[0].input_s("decode", "jpeg", 3)
