"""Slowdowns measured on this machine are compared with the recording by their own numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from ddlkit import store
from ddlkit.model.contention import COMPUTE, MESSAGES, NOTHING
from workbook.common import source
from workbook.common.source import Source
from workbook.course.here import slowdowns

SIZES = (65536, 2**21, 2**24)
LINK = "lab:1gbit"
ALONE_S = {"backward": 0.2, "message": 0.01}


def made(
    directory: Path, backward: float, messages: tuple[float, ...], link: str = LINK
) -> Source:
    """The tables of a machine on which backward and messages take so many times as long."""
    rows = []
    for repeat in range(4):
        pace = 1 + 0.1 * repeat  # of a round: ratios are of one round, so it cancels
        timed = [("backward", NOTHING, 0, ALONE_S["backward"])]
        for size, ratio in zip(SIZES, messages, strict=True):
            timed += [
                ("backward", MESSAGES, size, backward * ALONE_S["backward"]),
                ("message", NOTHING, size, ALONE_S["message"]),
                ("message", COMPUTE, size, ratio * ALONE_S["message"]),
            ]
        for quantity, beside, size, seconds in timed:
            rows.append(
                {
                    "quantity": quantity,
                    "beside": beside,
                    "bytes": size,
                    "messages": 1,
                    "repeat": repeat,
                    "seconds": pace * seconds,
                }
            )
    columns = {
        "network": "tiny_net",
        "device": "cpu",
        "batch": 4,
        "precision": "fp32",
        "backend": "gloo",
        "link": link,
        "link_bits_per_s": 1e9,
        "ranks": 2,
    }
    store.save_table(
        pd.DataFrame(rows).assign(**columns),
        directory,
        "slowdown-tiny",
        schema="slowdown",
        command=["test"],
    )
    return Source((directory,))


def test_the_recording_compared_with_itself_differs_in_nothing() -> None:
    recording = source.open_campaign("", source.TRAINED).alone
    sentence, figure = slowdowns.compare(recording, recording)
    table = slowdowns.slowdowns(recording)
    pairs = table[["network", "link"]].drop_duplicates()
    backward = table.loc[table["slowed"] == "backward", "ratio"].median()
    assert isinstance(figure, Figure)
    assert f"over {len(pairs)} pairs of a network and a link" in sentence
    assert f"{backward:.2f} times as long (recording: {backward:.2f})" in sentence
    assert (table["lower"] <= table["ratio"]).all()
    assert (table["ratio"] <= table["upper"]).all()


def test_without_tables_it_says_how_to_measure() -> None:
    recording = source.open_campaign("", source.TRAINED).alone
    sentence, figure = slowdowns.compare(recording, Source(()))
    assert figure is None and "./reproduce.sh" in sentence


def test_slowdowns_are_ratios_of_one_round(tmp_path: Path) -> None:
    here = made(tmp_path / "here", 1.25, (9.0, 2.0, 1.5))
    recording = made(tmp_path / "recorded", 1.1, (20.0, 3.0, 1.2))
    table = slowdowns.slowdowns(here)
    of_messages = table[table["slowed"] == "message"].set_index("bytes")["ratio"]
    assert of_messages.to_dict() == pytest.approx(
        dict(zip(SIZES, (9.0, 2.0, 1.5), strict=True))
    )
    sentence, figure = slowdowns.compare(recording, here)
    for part in (
        "1 pair of a network and a link",
        "backward takes 1.25 times as long (recording: 1.10)",
        "the largest messages take 1.50 times as long (recording: 1.20)",
        "The smallest messages take 9.00 times as long (recording: 20.00)",
    ):
        assert part in sentence
    assert figure is not None
    drawn = {
        line.get_label(): np.asarray(line.get_xdata())
        for line in figure.axes[1].lines
        if line.get_label() in {"recorded", "measured here"}
    }
    assert drawn["measured here"] == pytest.approx([9.0, 2.0, 1.5])
    assert drawn["recorded"] == pytest.approx([20.0, 3.0, 1.2])


def test_only_what_both_have_is_compared(tmp_path: Path) -> None:
    here = made(tmp_path / "here", 1.25, (9.0, 2.0, 1.5), link="lab:2gbit")
    recording = made(tmp_path / "recorded", 1.1, (20.0, 3.0, 1.2))
    sentence, figure = slowdowns.compare(recording, here)
    assert (sentence, figure) == (slowdowns.NOT_COMMON, None)
