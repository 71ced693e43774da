"""Where numbers come from: one's own tables first, the recording for what they lack, never mixed up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from workbook.common import places
from workbook.common.source import Source, open_here, open_source, teaching_recording


def record(directory: Path, point: str, link: str, seconds: float) -> None:
    rows: dict[str, str | float] = {
        "collective": "all_reduce",
        "backend": "gloo",
        "algorithm": "ring",
        "link": link,
    }
    rows |= {
        "link_bits_per_s": 0.0,
        "ranks": 2,
        "messages_per_sample": 1,
        "bytes": 1024,
    }
    frame = pd.DataFrame({**rows, "sample": np.arange(3), "seconds": seconds})
    store.save_table(
        frame, directory, f"collectives-{point}", schema="collectives", command=["test"]
    )


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A live directory over a recording; both measured the same link, under different file names."""
    monkeypatch.setattr(places, "RECORDED", tmp_path / "recorded")
    live, recorded = tmp_path / "live", tmp_path / "recorded" / "cpu-other"
    record(live, "p4-1gbit", "lab:1gbit", 0.1)
    record(recorded, "lab-p4-1gbit", "lab:1gbit", 0.5)
    record(recorded, "loopback-p2", "loopback", 0.9)
    return Source((live, recorded))


def test_one_cost_is_never_calibrated_from_two_machines(merged: Source) -> None:
    """Of a link that both measured only the first machine's rows count; each row names its machine."""
    rows = merged.table("collectives")
    of_link = rows.groupby("link")[["machine", "seconds"]].agg(["unique"])
    assert of_link["machine", "unique"].str.join("+").to_dict() == {
        "lab:1gbit": "here",
        "loopback": "cpu-other",
    }
    assert rows[rows["link"] == "lab:1gbit"]["seconds"].unique().tolist() == [0.1]


def test_machines_are_judged_apart(merged: Source) -> None:
    """Each with all of its own tables, those too that another machine's hide when they are merged."""
    apart = merged.apart("collectives")
    assert list(apart) == ["here", "cpu-other"]
    for machine, source in apart.items():
        assert source.table("collectives")["machine"].unique().tolist() == [machine]
    assert sorted(apart["cpu-other"].table("collectives")["seconds"].unique()) == [
        0.5,
        0.9,
    ]
    assert merged.apart("runs") == {}


def test_a_profile_of_ones_own_comes_before_a_recorded_one(tmp_path: Path) -> None:
    """Also when its file name comes later in the alphabet."""
    recorded = teaching_recording()
    rows = store.load_table(
        store.list_tables(recorded, "layers-resnet50*r1.csv")[0], "layers"
    )
    rows = rows.assign(batch=64)
    store.save_table(
        rows, tmp_path, "layers-resnet50-b64-r1", schema="layers", command=["test"]
    )
    assert Source((tmp_path, recorded)).profile("resnet50").batch == 64


def test_a_recording_is_read_alone_and_a_directory_is_completed_from_it(
    tmp_path: Path,
) -> None:
    first = places.list_recorded()[0]
    assert open_source(first.name).directories == (first,)
    assert "recorded on" in open_source(first.name).label("collectives")
    record(tmp_path, "loopback-p2", "loopback", 0.1)
    stamp = store.load_stamp(tmp_path / "collectives-loopback-p2.csv")
    label = Source((tmp_path,)).label("collectives")
    assert label == f"measured live on {stamp['machine']['name']}, {stamp['time'][:10]}"
    assert open_source(str(tmp_path)).directories == (tmp_path, teaching_recording())


def test_a_lesson_never_shows_this_machine_unless_asked(tmp_path: Path) -> None:
    assert open_source().directories == (teaching_recording(),)
    assert (
        open_here("").directories == open_here(str(tmp_path / "no")).directories == ()
    )
    record(tmp_path, "loopback-p2", "loopback", 0.1)
    assert open_here(str(tmp_path)).is_live("collectives")


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table of runs in"):
        Source((tmp_path,)).table("runs")
    with pytest.raises(UserError, match="no tables in nowhere"):
        open_source("nowhere")
