"""A recording of a GPU, made up in a copy of data/, moves the outcome of no claim but those it should."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import gpu_recording
from ddlkit.model.predictor import HOST_BOUND
from places import ROOT
from workbook.common import places, source
from workbook.common.source import Source
from workbook.sharing import fig03, fig04, fig06, fig07, fig08, recordings
from workbook.validate import compare

# Judged by all recordings, so that a GPU's is one more measurement. Each outcome stays.
MEASURED_ON_ANY_MACHINE = {"omgs-eq12", "osf-eq4-backward"}
EVALUATE = """\
import sys
from pathlib import Path
from workbook.common import places
places.RECORDED = Path(sys.argv[1])
from workbook.common import claims
from workbook.site import verdicts
names = sys.argv[2:]
listed = [claim for claim in claims.load_claims() if claim.id in names]
columns = ["id", "low", "high", "outcome", "note"]
verdicts.evaluate(listed)[columns].to_csv(sys.stdout, index=False)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of all recordings, with one of a GPU among them."""
    directory = tmp_path_factory.mktemp("data") / "recorded"
    shutil.copytree(places.RECORDED, directory)
    gpu_recording.write(directory, Source(tuple(places.list_recorded())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "RECORDED", directory)
        yield directory


@pytest.mark.rehearsal
@pytest.mark.slow
def test_claims_come_out_as_without_a_gpu(
    recorded: Path, request: pytest.FixtureRequest
) -> None:
    """In a process of its own, because the checks keep what they have read.

    Without ``--long`` these are the claims that measurements judge: to search for the settings of
    a paper takes as long as all of them, and reads no recording.
    """
    before = pd.read_csv(ROOT / "tests" / "gate.csv").set_index("id").sort_index()
    if not request.config.getoption("--long"):
        chosen = gpu_recording.MEASURED_CLAIMS | {gpu_recording.COUNTED_IN_NOTE}
        before = before.loc[sorted(chosen)]
    done = subprocess.run(
        [sys.executable, "-c", EVALUATE, str(recorded), *before.index],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    now = pd.read_csv(io.StringIO(done.stdout)).set_index("id").sort_index()
    assert before["outcome"].to_dict() == now["outcome"].to_dict()
    moved = set()
    for end in ("low", "high"):
        same = np.isclose(before[end], now[end], rtol=1e-5, equal_nan=True)
        moved |= set(before.index[~same])
    assert moved <= MEASURED_ON_ANY_MACHINE
    notes = now["note"].fillna("")
    assert not notes.str.contains(r"\bnan\b").any()
    assert f"GPU of {gpu_recording.NAME}" in notes["omgs-eq12"]
    assert "from GPUs: 1" in notes[gpu_recording.COUNTED_IN_NOTE]
    assert "one-rank" not in notes["omgs-merged-message"]


def test_figures_of_sharing_have_a_panel_of_the_gpu(recorded: Path) -> None:
    tables = recordings.recorded()
    for figure in (fig03, fig04, fig08):
        assert figure.numbers(tables)["panel"].str.contains("stand-in").any()
    for figure in (fig06, fig07):
        assert figure.numbers(tables)["where"].str.contains("stand-in").any()
    headings = [name for name in fig08.texts(tables) if "stand-in" in name]
    assert headings and all(name.startswith("One GPU next to") for name in headings)


def test_batches_of_a_gpu_are_neither_added_nor_mixed(recorded: Path) -> None:
    gpu = source.recordings("layers")[gpu_recording.NAME]
    batches = gpu.table("layers").query("network == 'resnet50'")["batch"]
    assert batches.nunique() == 2
    assert gpu.profile("resnet50").batch == batches.max()
    shares = compare.kernel_shares({"gpu": gpu}, ["resnet50", "vgg16"])
    steps = shares[shares["kernel"].str.startswith("step of")]
    names = set(steps["kernel"])
    assert {f"step of ResNet-50, batch {batch}" for batch in set(batches)} <= names


def test_a_step_that_the_host_limits_has_the_time_of_its_graph(recorded: Path) -> None:
    gpu = source.recordings("layers")[gpu_recording.NAME]
    rates = compare.steps(gpu).query("network == 'resnet50'")
    rates = rates.set_index(["precision", "batch"])["rate"]
    smaller, larger = sorted(rates.index.unique("batch"))
    # By the law of the made-up times, a larger batch is faster by the same factor everywhere.
    gain = rates["fp32", larger] / rates["fp32", smaller]
    as_issued = rates["bf16", larger] / gain
    assert rates["bf16", smaller] == pytest.approx(as_issued / 0.8, rel=0.02)
    assert gpu_recording.HOST_BOUND == ("bf16", 1) and HOST_BOUND < 0.95
