"""Messages timed on this machine are compared with the recording by their own numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ddlkit import store
from workbook.common.source import Source, open_source
from workbook.course.here import messages

LINK = "lab:1gbit"
WORKERS = 4
SIZES = 1024 * 2 ** np.arange(10)


def line(directory: Path, alpha_s: float, beta_s: float, *, link: str = LINK) -> Source:
    """All-reduces whose times lie on a line, as the tables of a machine."""
    frame = pd.DataFrame({"bytes": np.repeat(SIZES, 3), "sample": [0, 1, 2] * 10})
    frame["seconds"] = alpha_s + beta_s * frame["bytes"]
    columns = {
        "collective": "all_reduce",
        "backend": "gloo",
        "algorithm": "ring",
        "link": link,
        "link_bits_per_s": 1e9,
        "ranks": WORKERS,
        "messages_per_sample": 1,
    }
    store.save_table(
        frame.assign(**columns),
        directory,
        f"collectives-{link.partition(':')[2]}",
        schema="collectives",
        command=["test"],
    )
    return Source((directory,))


def test_the_recording_compared_with_itself_differs_in_nothing() -> None:
    recording = open_source()
    sentence, figure = messages.compare(recording, recording, LINK, WORKERS)
    numbers = messages._by_link(recording)[LINK, WORKERS]
    assert isinstance(figure, Figure)
    for part in (
        f"{len(numbers.seconds)} all-reduces",
        f"is {numbers.held_out_error:.1%} here and {numbers.held_out_error:.1%}",
    ):
        assert part in sentence


def test_without_tables_it_says_how_to_measure() -> None:
    sentence, figure = messages.compare(open_source(), Source(()), LINK, WORKERS)
    assert figure is None and "./reproduce.sh" in sentence


def test_a_line_measured_here_is_reported_by_its_start_up_and_time_per_byte(
    tmp_path: Path,
) -> None:
    here = line(tmp_path, alpha_s=7e-3, beta_s=21e-9)
    sentence, figure = messages.compare(open_source(), here, LINK, WORKERS)
    assert "30 all-reduces" in sentence
    assert "7.02 ms here" in sentence  # start-up and 1 KiB
    assert "21.00 ns here" in sentence
    assert figure is not None
    (drawn,) = (
        drawn
        for drawn in figure.axes[0].lines
        if drawn.get_label() == messages.MEASURED_HERE.label
    )
    assert np.asarray(drawn.get_xdata()) == pytest.approx(SIZES)
    assert np.asarray(drawn.get_ydata()) == pytest.approx(7 + 21e-6 * SIZES)  # ms


def test_another_link_is_compared_if_it_is_the_only_one_in_common(
    tmp_path: Path,
) -> None:
    recording = line(tmp_path / "recorded", 1e-3, 1e-8, link="lab:2gbit")
    here = line(tmp_path / "here", 2e-3, 1e-8, link="lab:2gbit")
    sentence, figure = messages.compare(recording, here, LINK, WORKERS)
    assert "over lab:2gbit" in sentence and figure is not None
    other = line(tmp_path / "other", 2e-3, 1e-8, link="lab:3gbit")
    assert messages.compare(recording, other, LINK, WORKERS) == (messages.NOTHING, None)
