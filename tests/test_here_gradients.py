"""Gradients and messages of this machine are compared with those of the recording."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from ddlkit import store
from workbook.common import source
from workbook.course.here import gradients

NETWORK = "googlenet"
PAIR = re.compile(r"(\S+) ms here and (\S+) ms in the recording")


@pytest.fixture(scope="module")
def recording() -> source.Source:
    return source.open_source()


def drawn(figure: Figure | None) -> list[list[np.ndarray]]:
    """The (2, n) points of both lines in each panel: recorded, and measured here."""
    assert figure is not None
    lines = [[line.get_xydata() for line in ax.lines] for ax in figure.axes]
    plt.close(figure)
    return [[np.asarray(line) for line in panel] for panel in lines]


def test_a_recording_compared_with_itself_shows_no_difference(
    recording: source.Source,
) -> None:
    sentence, figure = gradients.compare(recording, recording, NETWORK)
    pairs = PAIR.findall(sentence)
    assert len(pairs) == 3, "compute, a small message and a large one"
    assert all(here == recorded for here, recorded in pairs)
    for recorded, here in drawn(figure):
        np.testing.assert_array_equal(recorded, here)


@pytest.mark.parametrize("problem", ["", "PyTorch is not installed"])
def test_where_nothing_was_measured_it_says_why_and_how(
    recording: source.Source, problem: str
) -> None:
    sentence, figure = gradients.compare(recording, source.Source(()), NETWORK, problem)
    assert figure is None
    assert problem in sentence and "./reproduce.sh" in sentence


def test_a_network_that_was_not_measured_here_is_not_compared(
    recording: source.Source,
) -> None:
    sentence, figure = gradients.compare(recording, recording, "lenet5")
    assert figure is None and not PAIR.search(sentence)


def test_a_machine_that_is_twice_as_slow_is_shown_so(
    recording: source.Source, tmp_path: Path
) -> None:
    layers = recording.table("layers").query("network == @NETWORK and ranks == 1")
    layers = layers[layers["precision"] == "fp32"].drop(columns="machine")
    times = ["forward_s", "backward_s", "update_s"]
    slower = layers.assign(**{name: 2 * layers[name] for name in times})
    messages = recording.table("collectives").query("link == 'loopback'")
    messages = messages[messages["bytes"] < 2**24].drop(columns="machine")
    messages["seconds"] *= 2
    for kind, table in (("layers", slower), ("collectives", messages)):
        store.save_table(table, tmp_path, f"{kind}-mine", schema=kind, command=["test"])

    sentence, figure = gradients.compare(
        recording, source.open_here(str(tmp_path)), NETWORK
    )
    pairs = [
        (float(here), float(recorded)) for here, recorded in PAIR.findall(sentence)
    ]
    assert len(pairs) == 3
    for here, recorded in pairs:
        assert here == pytest.approx(2 * recorded, rel=0.02), "as far as it is rounded"
    ready, sizes = drawn(figure)
    np.testing.assert_allclose(ready[1], ready[0] * [2, 1])
    shorter = len(sizes[1])
    assert 0 < shorter < len(sizes[0]), "the largest sizes were not timed here"
    np.testing.assert_allclose(sizes[1], sizes[0][:shorter] * [1, 2])
