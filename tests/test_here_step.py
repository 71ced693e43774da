"""The section on this machine of notebook 13: a step predicted from this machine's own tables."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from ddlkit import store
from ddlkit.cli import ask
from ddlkit.formats import save_profile
from workbook.common import source
from workbook.common.source import Source
from workbook.course import example
from workbook.course.here import step

RECORDING = source.open_source()
NUMBERS = re.compile(r"takes? (\d+) ms|and (\d+) ms|gain of (\S+)%|recording, (\d+)")


@pytest.fixture(scope="module")
def running() -> example.Example:
    return example.load()


def numbers(sentence: str) -> list[float]:
    """Compute, default, best and gain of this machine, then default and best of the recording."""
    return [float("".join(groups)) for groups in NUMBERS.findall(sentence)]


def save_here(folder: Path, link: str, *, slower: float = 1.0) -> Source:
    """Write layers of GoogLeNet, and messages over one link, as if they were measured here."""
    layers = RECORDING.table("layers").query("network == @example.NETWORK")
    layers = layers.query(source.ALONE).drop(columns="machine")
    times = ["forward_s", "backward_s", "update_s"]
    layers = layers.assign(**{name: slower * layers[name] for name in times})
    messages = RECORDING.table("collectives").query("link == @link")
    messages = messages.drop(columns="machine")
    messages["seconds"] *= slower
    for kind, table in (("layers", layers), ("collectives", messages)):
        store.save_table(table, folder, f"{kind}-made", schema=kind, command=["test"])
    return Source((folder,))


def test_the_recording_predicts_the_running_example(
    running: example.Example,
) -> None:
    sentence, _ = step.compare(running, RECORDING)
    compute, default, best, gain, *recorded = numbers(sentence)
    assert [default, best] == recorded == [694, 555]
    assert compute == round(1e3 * running.profiled.compute_s)
    default_s = running.iteration_s("ddp")
    assert gain == pytest.approx(
        100 * (1 - running.iteration_s("exact") / default_s), abs=0.05
    )


def test_the_command_of_the_notebook_predicts_the_running_example(
    running: example.Example, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.csv"
    messages = tmp_path / "collectives.csv"
    save_profile(RECORDING.profile(example.NETWORK), profile)
    sums = RECORDING.table("collectives").query(
        "collective == 'all_reduce' and link == @example.LINK and ranks == @example.WORKERS"
        " and in_flight == 1"
    )
    sums[["bytes", "seconds"]].to_csv(messages, index=False)
    for plan in ("ddp", "exact"):
        asked = ask(
            "predict",
            plan=plan,
            profile=profile,
            collectives=messages,
            ranks=example.WORKERS,
        )
        assert asked["iteration_s"] == pytest.approx(
            running.iteration_s(plan), rel=1e-3
        )


@pytest.mark.parametrize("kinds", [(), ("layers",), ("collectives",)])
def test_where_a_table_is_missing_it_says_how_to_measure(
    running: example.Example, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    whole = save_here(tmp_path, "loopback")
    for kind in {"layers", "collectives"} - {*kinds}:
        for path in tmp_path.glob(f"{kind}-*"):
            path.unlink()
    sentence, figure = step.compare(running, whole)
    assert figure is None
    assert "./reproduce.sh" in sentence and not numbers(sentence)


def test_another_network_says_nothing_of_the_running_example(
    running: example.Example, tmp_path: Path
) -> None:
    here = save_here(tmp_path, example.LINK)
    (path,) = tmp_path.glob("layers-*.csv")
    other = pd.DataFrame(store.load_table(path, "layers")).assign(network="resnet18")
    store.save_table(other, tmp_path, path.stem, schema="layers", command=["test"])
    sentence, _ = step.compare(running, here)
    assert not numbers(sentence)


def test_a_machine_that_is_twice_as_slow_takes_twice_as_long(
    running: example.Example, tmp_path: Path
) -> None:
    sentence, _ = step.compare(running, save_here(tmp_path, example.LINK, slower=2.0))
    compute, default, best, gain, *recorded = numbers(sentence)
    assert compute == pytest.approx(2e3 * running.profiled.compute_s, abs=1)
    assert [default, best] == pytest.approx([2 * each for each in recorded], abs=2)
    assert gain == pytest.approx(100 * (1 - best / default), abs=0.2)


def test_another_link_is_named_and_so_is_that_of_the_recording(
    running: example.Example, tmp_path: Path
) -> None:
    sentence, _ = step.compare(running, save_here(tmp_path, "loopback"))
    assert "over loopback" in sentence and "4 workers over 1 Gbit/s" in sentence
    assert numbers(sentence)[-2:] == [694, 555]
