"""Campaigns: what a file asks for, what is wrong with it in one line, and that nothing measured is lost."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import psutil
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.sparse import SparseGather
from ddlkit.model import Calibration, forecast_case
from ddlkit.model.predictor import computed
from ddlkit.report import accuracy
from ddlkit.report.source import Source, default_recording
from ddlkit.run.lab import network
from ddlkit.run.lab.network import LabShape
from ddlkit.run.lab.script import PlannedCase
from ddlkit.run.sessions import campaign
from ddlkit.run.sessions.campaign_inputs import Inputs
from ddlkit.run.sessions.engine import measure
from ddlkit.run.sessions.lab_calibration import AFTER, BEFORE, CHECK_S_PER_BYTE, guessed_cost
from ddlkit.run.sessions.reader import Campaign, read_campaign
from places import ROOT, alive, ranks_below, wait_for

WHOLE = {
    "rounds": 2,
    "calibration": "quick",
    "networks": "lenet5:4",
    "plans": ["none", "single"],
    "grids": [{"workers": [2], "rates": ["1gbit"]}],
}


def written(directory: Path, described: object, name: str = "tiny.json") -> Path:
    path = directory / name
    path.write_text(described if isinstance(described, str) else json.dumps(described))
    return path


# -- the file ----------------------------------------------------------------------------------


def test_a_grid_is_the_product_of_its_lists_grouped_by_lab(tmp_path: Path) -> None:
    text = """
    density: [1.0, 0.01]
    stragglers: [1.0, 1.5]
    plans: [none, "buffer:4MB"]
    grids:
      - {networks: [lenet5, resnet18:8], workers: [2, 4], rates: [1gbit]}
      - {networks: lenet5, workers: 4, rates: 1gbit, plans: [none, ddp]}
      - {networks: lenet5, workers: 4, rates: 1gbit, ranks_per_node: [1, 2], intra_rates: 5gbit}
    """
    found = read_campaign(written(tmp_path, text, "some.yml"))
    assert (found.folder, found.rounds, found.calibration) == ("campaign-some", 2, "full")
    assert [shape.name for shape in found.labs] == ["p2-1gbit", "p4-1gbit", "p4-1gbit-g2-5gbit"]
    sizes = [len(requests) for requests in found.labs.values()]
    assert sizes == [16, 16 + 4, 8], "a request that two grids share is there once"
    assert {shape.engine for shape in found.labs} == {"tbf"}
    assert {request.case.batch for request in found.labs[LabShape(2, 1e9)]} == {4, 8}


def test_emulated_links_of_a_grid_are_the_product_of_what_they_do(tmp_path: Path) -> None:
    links = {
        "engines": "emulated",
        "delays": ["1ms", "2ms"],
        "losses": ["0%", "0.1%"],
        "congestions": ["reno", "bbr"],
    }
    grids = [{"workers": 2, "rates": "1gbit"}, {"workers": 2, "rates": "1gbit", **links}]
    found = read_campaign(written(tmp_path, {**WHOLE, "grids": grids}))
    assert len(found.labs) == 1 + 8
    every = {(shape.engine, shape.link) for shape in found.labs}
    assert ("tbf", "lab:1gbit") in every
    assert ("emulated", "emulated:1gbit-delay2ms-loss0.001-bbr") in every
    assert len({request for asked in found.labs.values() for request in asked}) == 2, "alike"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"round": 3}, "round: unknown key"),
        ({"rounds": 0}, "rounds: 0: must be a whole number"),
        ({"rounds": True}, "rounds: True: must be a whole number"),
        ({"repeat": 20}, "repeat: 20: must be a mapping as {cases: 20, rounds: 5}"),
        ({"repeat": {"cases": 20}}, "must be a mapping as {cases: 20, rounds: 5}"),
        ({"repeat": {"cases": 0, "rounds": 5}}, "must be a whole number, at least 1"),
        ({"calibration": "long"}, "calibration: 'long': must be quick or dense or medium or full"),
        ({"selection": "no"}, "selection: 'no': must be recorded or real"),
        ({"grids": []}, "grids: must be a list"),
        ({"grids": [{"workers": 2}]}, r"grids\[0\]: rates: missing"),
        ({"grids": [{"workers": 2, "rates": "1gbit", "speed": 1}]}, r"grids\[0\]: speed: unknown"),
        ({"grids": [{"workers": 1, "rates": "1gbit"}]}, r"grids\[0\]: workers: 1: one worker"),
        ({"grids": [{"workers": 99, "rates": "1gbit"}]}, r"grids\[0\]: workers: 99: a lab of 99"),
        ({"grids": [{"workers": 2, "rates": "fast"}]}, r"rates: 'fast': rate 'fast' is not"),
        ({"grids": [{"workers": 2, "rates": 1000}]}, "rates: 1000: must be a rate with its unit"),
        ({"grids": [{"workers": [], "rates": "1gbit"}]}, "workers: an empty list"),
        (
            {"grids": [{"workers": 4, "rates": "1gbit", "ranks_per_node": 2}]},
            "intra_rates: missing",
        ),
        (
            {
                "grids": [
                    {"workers": 4, "rates": "1gbit", "ranks_per_node": 3, "intra_rates": "2gbit"}
                ]
            },
            "workers: 4: nodes of 3 ranks",
        ),
        ({"plans": ["best"]}, "plans: 'best': must be a plan"),
        ({"engines": "netem"}, "engines: 'netem': must be tbf or emulated"),
        ({"delays": ["2ms"]}, "delays: only links of engines: emulated have these"),
        ({"engines": "emulated", "delays": 2}, "delays: 2: must be a time with its unit, as 2ms"),
        ({"engines": "emulated", "jitters": "1ms"}, "jitter is at most the delay"),
        ({"engines": "emulated", "losses": "99%"}, "loss 0.99: loss lies between"),
        ({"density": 2}, "density: 2: must lie between"),
        ({"stragglers": 0.5}, "stragglers: 0.5: must lie between"),
        ({"compute_s": "long"}, "compute_s: 'long': must be seconds, or balanced"),
        ({"compute_s": 0}, "compute_s: 0: must lie between"),
        ({"startups": "2ms"}, r"grids\[0\]: startups: give compute_s, too"),
        ({"startups": 2, "compute_s": 1}, "startups: 2: must be a time with its unit, as 2ms"),
        ({"negotiated": "yes"}, "negotiated: 'yes': must be true or false"),
        ({"networks": "lenet5:many"}, "networks: 'lenet5:many': must be a network"),
        (
            {"changes": "0s:speed=1gbit"},
            "changes: '0s:speed=1gbit': change '0s:speed=1gbit': write",
        ),
        ({"changes": 1}, "changes: 1: must be changes, as 0s:rate=250mbit"),
        ({"changes": "2s:loss=1%;1s:loss=0"}, "in the order of their times"),
        ({"seeds": -1}, "seeds: -1: must be a whole number, at least 0"),
        ({"straggler_spreads": 9}, "straggler_spreads: 9: must lie between 0 and 3"),
        ({"calibrated": "never"}, "calibrated: 'never': must be around or before"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_file_and_key(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    file = written(tmp_path, {**WHOLE, **change})
    with pytest.raises(UserError, match=told) as caught:
        read_campaign(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_what_changes_in_each_iteration_is_a_case_and_not_a_lab(tmp_path: Path) -> None:
    how = {
        "engines": "emulated",
        "changes": ["", "0s:rate=1mbit"],
        "seeds": [1, 2],
        "plans": "none",
    }
    found = read_campaign(written(tmp_path, {**WHOLE, **how, "calibrated": "before"}))
    ((_, requests),) = found.labs.items()
    asked = {(one.case.changes, one.case.seed) for one in requests}
    assert asked == {("", 1), ("", 2), ("0s:rate=1mbit", 1), ("0s:rate=1mbit", 2)}
    points = [point.key for point in campaign.campaign_points(found, tmp_path)]
    assert points[-1].startswith("replay/"), "both calibrations come first"
    around = read_campaign(written(tmp_path, WHOLE, "around.json"))
    assert campaign.campaign_points(around, tmp_path)[-1].key.endswith(" after")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("networks: [a", "is not YAML: line"),
        ("- a", "must be a mapping"),
        ("", "is empty"),
        ("a: !!python/object:os.system {}", "is not YAML"),
    ],
)
def test_what_is_no_campaign_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read_campaign(written(tmp_path, text, "bad.yml"))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot read"):
        read_campaign(tmp_path / "nowhere.yml")


def planned(found: Campaign, out: Path) -> list[PlannedCase]:
    """Every case of a campaign, as its labs would replay it."""
    inputs = Inputs(found, out, "")
    labs = [campaign._LabPoints(shape, asked, inputs) for shape, asked in found.labs.items()]
    return [one for lab in labs for one in lab.planned()]


def test_a_wished_compute_time_dilates_every_network_and_number_of_workers_to_it(
    tmp_path: Path,
) -> None:
    """A scaling factor against workers needs the same computation at each of them."""
    described = {
        **WHOLE,
        "networks": ["lenet5:4", "resnet18:4"],
        "compute_s": [0.5, "balanced"],
        "negotiated": [True, False],
        "grids": [{"workers": [2, 4], "rates": "1gbit"}],
    }
    asked = planned(read_campaign(written(tmp_path, described)), tmp_path / "out")
    assert len(asked) == len({one.case.key for one in asked}) == 2 * 2 * 2 * 2 * 2
    assert sum(one.case.negotiated for one in asked) == len(asked) / 2
    wished = [one.workload.compute_s * one.case.dilation for one in asked]
    assert sum(abs(seconds / 0.5 - 1) < 1e-3 for seconds in wished) >= len(asked) / 2


def test_a_start_up_of_elsewhere_stretches_time_until_that_of_the_lab_weighs_as_much(
    tmp_path: Path,
) -> None:
    """Dense messages stand beside the same computation; a lab without sparse ones has no such start-up."""
    grids: list[dict[str, object]] = [
        {"density": 0.01, "plans": ["none", "single"], "startups": ["2ms", "4ms"]},
        {"plans": "single", "startups": "2ms"},
    ]
    place = {"workers": 4, "rates": "1gbit", "compute_s": 0.5}
    described = {**WHOLE, "grids": [{**grid, **place} for grid in grids]}
    asked = planned(read_campaign(written(tmp_path, described)), tmp_path / "out")
    computes = {
        (one.case.density, round(one.workload.compute_s * one.case.dilation, 2)) for one in asked
    }
    assert len(asked) == 2 * 2 + 1
    gather = SparseGather(guessed_cost(LabShape(4, 1e9), "all_gather"), 0.01)
    longer = gather.startup_s() / 2e-3
    expected = {(0.01, 0.5 * longer), (0.01, 0.25 * longer), (1.0, 0.5 * longer)}
    assert computes == {(density, round(seconds, 2)) for density, seconds in expected}
    dense = {**described, "grids": [{**grids[1], **place}]}
    with pytest.raises(UserError, match="startups are those of sparse messages"):
        planned(read_campaign(written(tmp_path, dense)), tmp_path / "out")


def test_a_sparse_replay_is_planned_with_the_selections_that_it_waits_out(tmp_path: Path) -> None:
    """Selections are as often longer as the computation is, for who plans as for who predicts."""
    described = {**WHOLE, "networks": "resnet18:4", "density": 0.01, "compute_s": [0.2, 2.0]}
    described |= {"grids": [{"workers": 8, "rates": "200mbit", "plans": ["omgs", "exact"]}]}
    found = read_campaign(written(tmp_path, described))
    inputs = Inputs(found, tmp_path / "out", "")
    selecting = inputs.selection_times(0.01)
    ((shape, asked),) = found.labs.items()
    gather = guessed_cost(shape, "all_gather")
    best = []
    for one in campaign._LabPoints(shape, asked, inputs).planned():
        known = {one.case.profile_sha256: one.workload}
        whole = computed(one.case, known, {selecting.sha256: selecting})
        taken_s = Iteration(whole, one.plan, SparseGather(gather, 0.01)).prediction.iteration_s
        if one.plan.planner == "exact":
            assert one.plan.least_s == pytest.approx(taken_s, rel=1e-12)
            best.append(len(one.plan.ends))
    assert len(best) == 2 and max(best) > 1


def test_a_campaign_knows_the_papers_planners_by_itself(tmp_path: Path) -> None:
    plans = ["mg_wfbp", "adafusion:repaired", "exact"]
    file = written(tmp_path, {**WHOLE, "plans": plans})
    script = (
        "import sys; from pathlib import Path; from ddlkit.run.sessions import reader; "
        "labs = reader.read_campaign(Path(sys.argv[1])).labs; "
        "print(*(request.case.plan for requests in labs.values() for request in requests))"
    )
    # In a process of its own: here another test may have imported the papers already.
    found = subprocess.run(
        [sys.executable, "-c", script, str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.split() == plans, found.stderr


def test_without_pyyaml_one_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UserError, match="PyYAML: install it, or write the file as JSON"):
        read_campaign(written(tmp_path, "rounds: 1", "some.yml"))
    assert read_campaign(written(tmp_path, WHOLE)).rounds == 2  # JSON needs nothing


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"networks": "lenet"}, "networks: unknown network 'lenet'"),
        ({"plans": "random:1:99"}, "plans: lenet5: random plan of 99 groups"),
        ({"plans": "buffer:25Mb"}, "plans: lenet5: size '25Mb'"),
    ],
)
def test_a_wrong_network_or_plan_is_told_before_anything_is_measured(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    file = written(tmp_path, {**WHOLE, **change})
    with pytest.raises(UserError) as caught:
        measure(str(file), out=tmp_path / "out", dry_run=True)
    assert str(caught.value).startswith(f"{file}: {told}")


@pytest.mark.parametrize(
    ("name", "fewest", "least_s", "most_s"),
    [
        ("campaign_quick", 5, 5, 60),
        ("campaign_osf", 25, 120, 900),
        ("campaign_disturbed", 40, 240, 900),
        ("campaign", 150, 600, 7200),
        ("campaign_links", 150, 600, 7200),
        ("campaign_regimes", 15, 120, 1800),
        ("campaign_omgs", 40, 300, 3600),
    ],
)
def test_the_examples_are_as_large_as_they_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fewest: int,
    least_s: float,
    most_s: float,
) -> None:
    """On a machine of which nothing is recorded, so that its speed says nothing; without its profiles,
    which every campaign there shares."""
    monkeypatch.setattr(store.files, "RECORDED", tmp_path / "recorded")
    file = ROOT / "examples" / f"{name}.yml"
    found = read_campaign(file)
    assert found.rounds >= 2
    points = campaign.campaign_points(found, tmp_path)
    cases = [point.note.split()[-2] for point in points if point.what == "replay"]
    assert sum(map(int, cases)) >= fewest
    own_s = sum(point.estimate_s for point in points if point.what != "layers")
    assert least_s < own_s < most_s
    said = str(measure(str(file), out=tmp_path, dry_run=True)).splitlines()
    assert len(said) == len(points) + 1 and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("lab", ["p4-1gbit", "p4-100mbit"])
def test_an_estimate_is_the_forecast_of_the_validated_model(
    monkeypatch: pytest.MonkeyPatch, lab: str
) -> None:
    """With two in flight and one, all equal and not, dense and sparse; and what is around an iteration."""
    recorded = default_recording()
    monkeypatch.setattr(store, "recorded_dir", lambda: recorded)
    found = read_campaign(ROOT / "examples" / "campaign.yml")
    inputs = Inputs(found, recorded, "campaign")
    (shape,) = [shape for shape in found.labs if shape.name == lab]
    points = campaign._LabPoints(shape, found.labs[shape], inputs)
    tables = store.list_tables(inputs.directory, f"collectives-{lab}-all*.csv")
    calibration = Calibration.of(pd.concat(map(store.load_table, tables)))
    kept = [store.read_selection_times(inputs.directory / "selection-rho0.01.csv.gz", 0.01)]
    selections = {times.sha256: times for times in kept}
    measured = set(store.load_table(inputs.directory / f"runs-{lab}.csv", "runs")["case"])
    planned = [one for one in points.planned() if one.case.key in measured]
    assert len(planned) >= 10
    for one in planned:
        workloads = {one.case.profile_sha256: one.workload}
        foreseen = forecast_case(one.case, workloads, calibration, selections).prediction
        around_s = campaign.AROUND_S + CHECK_S_PER_BYTE * 4 * one.workload.bytes.sum()
        assert points.iteration_s(one) == pytest.approx(foreseen.iteration_s + around_s, rel=1e-12)


@pytest.mark.parametrize("cases", [1, 7, 20])
def test_some_cases_of_a_campaign_get_more_rounds(tmp_path: Path, cases: int) -> None:
    """As many as asked, over all labs in proportion, and every iteration is wanted exactly once."""
    grids = [{"workers": [2, 4], "rates": ["1gbit", "500mbit"]}]
    plans = ["none", "single", "ddp", "exact", "buffer:1MB", "random:1:3", "random:2:2"]
    described = {**WHOLE, "plans": plans, "grids": grids, "repeat": {"cases": cases, "rounds": 5}}
    found = read_campaign(written(tmp_path, described))
    assert sum(found.repeated.values()) == cases
    assert max(found.repeated.values()) - min(found.repeated.values()) <= 1
    inputs = Inputs(found, tmp_path, "campaign")
    for shape, requests in found.labs.items():
        points = campaign._LabPoints(shape, requests, inputs)
        planned = points.planned()
        rounds = points.rounds(planned)
        often = min(found.repeated[shape], len(planned))
        assert sorted(rounds.values()) == [2] * (len(planned) - often) + [5] * often
        missing = points._missing(planned)
        assert len(missing) == len(set(missing)) == sum(rounds.values())
        assert all(repeat < rounds[key] for key, repeat in missing)
        assert [repeat for _, repeat in missing] == sorted(repeat for _, repeat in missing)


def test_the_whole_campaign_tells_what_twenty_of_its_cases_repeat_to() -> None:
    found = read_campaign(ROOT / "examples" / "campaign.yml")
    assert found.repeat.cases == 20 and found.repeat.rounds >= 5
    assert all(found.repeated.values()), "every lab has one"


def test_the_command_refuses_a_file_where_none_belongs() -> None:
    main = importlib.import_module("ddlkit.cli").main
    assert main(["lab", "campaign"]) == main(["lab", "up", "some.yml"]) == 2
    assert main(["lab", "up", "--predict"]) == 2


# -- in the lab --------------------------------------------------------------------------------


def start(file: Path, out: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "ddlkit", "lab", "campaign", str(file), "--out", str(out)]
    return subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C for this process as soon as the condition holds."""

    def wait() -> None:
        if wait_for(condition):
            os.kill(os.getpid(), signal.SIGINT)

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        yield
    finally:
        waiter.join()


def rows_of(path: Path) -> set[tuple[object, ...]]:
    rows = store.load_table(path, "runs")[["case", "repeat", "iteration_s"]]
    return set(rows.itertuples(index=False, name=None))


def rows_so_far(out: Path) -> int:
    return sum(path.read_text().count("\n") for path in out.glob(".partial/*/replay.csv"))


class TestLab:
    pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.usefixtures("require_lab")]

    def test_neither_kill_nor_interrupt_loses_a_finished_case(self, tmp_path: Path) -> None:
        """Interrupted, then killed, then left to end: everything is measured exactly once."""
        rounds = 120  # seconds, so that the kill comes in the middle even on a busy machine
        file = written(tmp_path, {**WHOLE, "rounds": rounds})
        out = tmp_path / "out"
        runs_file = out / "runs-p2-1gbit.csv"
        with pytest.raises(KeyboardInterrupt), interrupted_when(lambda: rows_so_far(out) > 8):
            measure(str(file), out=out)
        mine = f"process {os.getpid()}"
        assert not ranks_below(os.getpid())
        assert mine not in [row["owner"] for row in network.status()]
        assert not [*(out / ".partial").iterdir()]
        kept = rows_of(runs_file)
        assert len(kept) >= 8
        killed = start(file, out)
        assert wait_for(lambda: rows_so_far(out) > 8)
        ranks = ranks_below(killed.pid)
        killed.kill()
        killed.communicate()
        psutil.wait_procs(ranks, timeout=60)
        assert len(ranks) == 2 and not alive(ranks)
        network.clean()
        finished = rows_so_far(out) - 1  # less the header; the last line may be cut short
        assert rows_of(runs_file) == kept
        assert measure(str(file), out=out) == out
        runs = store.load_table(runs_file, "runs")
        assert len(runs) == runs[["case", "repeat"]].drop_duplicates().shape[0] == 2 * rounds
        assert kept <= rows_of(runs_file)
        earlier = store.load_stamp(runs_file)["history"]
        assert [stamp["rows"] for stamp in earlier] == [
            len(kept),
            pytest.approx(len(kept) + finished, abs=1),
        ]
        spans = store.load_table(out / "timeline-p2-1gbit.csv.gz", "timeline")
        assert set(spans["case"]) == set(runs["case"])
        assert not spans.duplicated(["case", "repeat", "rank", "task"]).any()
        before = {path: path.stat().st_mtime_ns for path in out.glob("*.csv*")}
        measure(str(file), out=out)
        assert {path: path.stat().st_mtime_ns for path in out.glob("*.csv*")} == before

    def test_predictions_come_before_their_runs_and_runs_say_which(self, tmp_path: Path) -> None:
        file, out = written(tmp_path, {**WHOLE, "rounds": 1}), tmp_path / "out"
        measure(str(file), out=out, predict=True)
        said = store.load_table(out / "predicted-cases.csv", "predicted")
        assert not [*out.glob("runs-*")]
        calibrated = {path: path.read_bytes() for path in out.glob("collectives-*.csv")}
        sessions = pd.concat(map(store.load_table, calibrated))["session"]
        assert set(sessions) == {BEFORE, AFTER}
        measure(str(file), out=out)
        runs = store.load_table(out / "runs-p2-1gbit.csv", "runs")
        digest = store.load_stamp(out / "predicted-cases.csv")["sha256"]
        assert set(runs["predicted"]) == {digest[: campaign.SAID_BY]}
        assert set(runs["case"]) == set(said["case"])
        assert calibrated == {path: path.read_bytes() for path in out.glob("collectives-*.csv")}
        found = accuracy.joined(Source((out,)))
        assert found["model_error"].notna().all() and (found["runs"] == 1).all()
        more = written(tmp_path, {**WHOLE, "rounds": 1, "plans": ["none", "single", "buffer:64KB"]})
        with pytest.raises(UserError, match="buffer:64KB.*: name another file, and predict before"):
            measure(str(more), out=out)
        assert len(store.load_table(out / "runs-p2-1gbit.csv")) == len(runs)
        (out / "predicted-cases.csv").unlink()
        with pytest.raises(UserError, match="a prediction comes before its runs"):
            measure(str(file), out=out, predict=True)
