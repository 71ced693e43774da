"""Sharded training: laws of its program, the order of FSDP2 itself, replays, and what a campaign reached."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import sharded
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Prediction
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import save_profile
from ddlkit.formats.messages import read_collectives
from ddlkit.jobs.launch import Loopback, launch
from ddlkit.model import Calibration, Communication
from ddlkit.model.sharded import (
    COMPUTE,
    GATHER,
    POST,
    SCATTER,
    SENT,
    WAIT,
    Sharding,
    forecast,
)
from order_job import SEEN, OrderSettings, order_job
from test_logs import nccl
from workbook.common import places
from workbook.record import zoo as zoo  # makes lenet5 known to the ranks, too
from workbook.validate import accuracy

STARTS = {
    "together": places.DATA / "sharded",
    "apart": places.DATA / "sharded_apart",
    "again": places.DATA / "sharded_again",
    "last": places.DATA / "sharded_last",
}
RECORDED = STARTS["together"]


def bounds(said: Prediction) -> tuple[float, float]:
    """Seconds of the iteration without overlap, and with a perfect one."""
    return said.compute_s + said.communication_s, max(
        said.compute_s, said.communication_s
    )


CASE = [
    "origin",
    "network",
    "batch",
    "ranks",
    "link",
    "units",
    "prefetch",
]  # in a campaign of STARTS
KNOWN = ["predicted_s", "lower_s", "upper_s", "none_s", "perfect_s", "compute_s"]


def drawn(seed: int, layers: int) -> LayerProfile:
    """A network of blocks.0, blocks.1, ... with two tensors each; the root ends it, and may begin it."""
    rng = np.random.default_rng(seed)
    names = [f"blocks.{k}.linear" for k in range(layers) for _ in range(2)]
    names = ["words"] * (seed % 2) + [*names, "head"]
    elements, n = rng.integers(1, 10**6, len(names)), len(names)
    times = rng.uniform(0, 1, (2, n)) * (rng.uniform(size=(2, n)) < 0.8)
    tensors = tuple(f"{name}.{k}" for k, name in enumerate(names))
    known = ("net", "cpu", 1, tensors, tuple(names), elements, 4 * elements)
    return LayerProfile(*known, times[0], times[1], np.zeros(n), 0.1)


PROFILES = st.builds(drawn, st.integers(0, 10**6), st.integers(1, 6))


class Flags(NamedTuple):
    """What of a sharded iteration is switched on or off."""

    prefetch: bool
    reshard: bool


FLAGS = st.builds(Flags, st.booleans(), st.booleans())


@given(PROFILES, FLAGS, st.floats(1e-10, 1e-5))
def test_an_iteration_lies_between_its_bounds(
    profile: LayerProfile, how: Flags, slope: float
) -> None:
    """Blocking it is the sum; longer messages make none shorter; many scenarios at once are each alone."""
    whole = Sharding.of(profile, "blocks.*")
    program = whole.program(prefetch=how.prefetch, reshard=how.reshard)
    sizes = np.array([message.bytes for message in program.messages])
    message_s = np.multiply.outer([0.0, 1.0, 1.5], slope * sizes)
    free_s, taken_s, longer_s = program.play(message_s)
    compute_s = profile.forward_s.sum() + profile.backward_s.sum() + profile.update_s
    assert free_s == pytest.approx(compute_s) and program.compute_s == pytest.approx(
        compute_s
    )
    sent_s = message_s[1].sum()
    assert (
        max(compute_s, sent_s) * (1 - 1e-9)
        <= taken_s
        <= (compute_s + sent_s) * (1 + 1e-9)
    )
    assert longer_s >= taken_s
    assert [float(program.play(row)) for row in message_s] == [
        free_s,
        taken_s,
        longer_s,
    ]
    blocking = whole.program(prefetch=how.prefetch, reshard=how.reshard, blocking=True)
    assert blocking.play(message_s[1]) == pytest.approx(compute_s + sent_s)
    assert blocking.messages == program.messages


@given(PROFILES, FLAGS)
def test_a_unit_is_whole_when_it_computes(profile: LayerProfile, how: Flags) -> None:
    """Each is gathered once, or twice if it was resharded, the root once; gradients leave in reverse."""
    whole = Sharding.of(profile, "blocks.*")
    program = whole.program(prefetch=how.prefetch, reshard=how.reshard)
    units = range(len(whole.bytes))
    gathers = [m.unit for m in program.messages if m.collective == GATHER]
    scatters = [m.unit for m in program.messages if m.collective == SCATTER]
    ends = (
        [1, 0] if whole.runs[0][0] == 0 else [0, 1]
    )  # the input of the first layer has no gradient
    assert scatters == [*reversed(units[2:]), *ends] and gathers[: len(units)] == [
        *units
    ]
    assert [gathers.count(unit) for unit in units] == [1] + [1 + how.reshard] * (
        len(units) - 1
    )
    posted, awaited = set[float](), set[float]()
    runs = iter([unit for unit, *_ in (*whole.runs, *whole.runs[::-1])])
    for do, what in program.steps[:-1]:
        if do == COMPUTE:
            unit = next(runs)
            assert any(program.messages[int(k)].unit == unit for k in awaited)
        (posted if do == POST else awaited if do == WAIT else set[float]()).add(what)
    assert next(runs, None) is None and awaited <= posted == set(
        range(len(program.messages))
    )
    assert sum(whole.bytes) == profile.gradient_bytes.sum()
    kept = Sharding.of(profile, "blocks.*").most_gathered_bytes(reshard=False)
    assert whole.most_gathered_bytes() <= kept == sum(whole.bytes)


def test_two_units_by_hand() -> None:
    """Gathers of 1 s, scatters of 2 s, passes of 3 s: what prefetch hides, and what it cannot."""
    ones, nothing = np.ones(2, dtype=int), np.zeros(2)
    names = ("a", "b")
    profile = LayerProfile(
        "net", "cpu", 1, names, names, ones, ones, nothing + 3, nothing + 3, nothing
    )
    whole = Sharding.of(profile, "a,b")
    costs = {GATHER: 1.0, SCATTER: 2.0}

    def taken_s(
        *, prefetch: bool = True, reshard: bool = True, blocking: bool = False
    ) -> float:
        program = whole.program(prefetch=prefetch, reshard=reshard, blocking=blocking)
        return float(
            program.play(np.array([costs[m.collective] for m in program.messages]))
        )

    # a is gathered, 1; forward of a hides b, 4, and of b is 7; b anew, 8, and its backward hides a, 11;
    # b's gradients hide behind a's backward, 14, which then sends its own, 16.
    assert taken_s() == 16 and taken_s(blocking=True) == 12 + 4 + 4
    assert taken_s(reshard=False) == 15, "nothing is gathered before backward"
    assert taken_s(prefetch=False) == 1 + 3 + 1 + 3 + 1 + 3 + 2 + 1 + 3 + 2, (
        "a waits behind b's gradients"
    )


def test_units_by_size_are_layers_in_a_row() -> None:
    profile = drawn(3, 5)
    whole = Sharding.of(profile, "size:3MB")
    assert [*np.concatenate(whole.modules[1:])] == [*dict.fromkeys(profile.layer)]
    assert whole.bytes[0] == 0 and min(whole.bytes[1:-1]) >= 3e6 > 0


Message = tuple[str, int]
ORDERS = {
    ("resnet18", "layer*"): True,
    ("squeezenet1_1", "features.*"): False,
}
"""Networks by their units, and whether a unit is sharded again between its passes."""


def messages_of(
    network: str, spec: str, *, prefetch: bool = True, reshard: bool = True
) -> list[Message]:
    """What the program of an iteration sends, in that order."""
    program = Sharding.of(profile(network, 4), spec).program(
        prefetch=prefetch, reshard=reshard
    )
    return [(message.collective, message.bytes) for message in program.messages]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Message]]:
    """What FSDP2 of the installed torch sends, by network, on real ranks whose messages its hooks see."""
    out = tmp_path_factory.mktemp("orders")
    trainings = []
    for (network, spec), reshard in ORDERS.items():
        labels = {"network": network, "batch": 1, "reshard": reshard}
        modules = Sharding.of(profile(network, 4), spec).modules[1:]
        trainings.append(sharded.Settings(labels, units={spec: modules}))
    launch(
        order_job,
        OrderSettings(trainings),
        ranks=2,
        place=Loopback(),
        join={"backend": "gloo"},
        timeout_s=120,
        out=out,
    )
    seen = json.loads((out / SEEN).read_text())
    return {
        network: [(name, size) for name, size in messages]
        for (network, _), messages in zip(ORDERS, seen, strict=True)
    }


def alike(expected: list[Message], seen: list[Message]) -> bool:
    """Whether messages are those expected, of which padding may add a hundredth."""
    return len(expected) == len(seen) and all(
        name == said and n_bytes <= size <= 1.01 * n_bytes
        for (said, n_bytes), (name, size) in zip(expected, seen, strict=True)
    )


@pytest.mark.parametrize(("network", "spec"), ORDERS)
def test_the_order_is_that_of_fsdp2(
    network: str, spec: str, sent: dict[str, list[Message]]
) -> None:
    """And another order, or sharding again at other times, would be noticed."""
    reshard = ORDERS[network, spec]
    assert alike(messages_of(network, spec, reshard=reshard), sent[network])
    other = messages_of(network, spec, reshard=reshard, prefetch=False)
    assert not reshard or not alike(other, sent[network])
    assert not alike(messages_of(network, spec, reshard=not reshard), sent[network])


def test_an_iteration_is_played_and_trained(tmp_path: Path) -> None:
    """By real ranks: a replay takes at least its compute and its program; training is timed in brief, too."""
    whole = Sharding.of(profile("squeezenet1_1", 4), "features.*")
    program = whole.program()
    labels = {
        "network": "squeezenet1_1",
        "batch": 4,
        "units": "features.*",
        "prefetch": True,
    }
    labels |= {"dilation": 1.0, "reshard": True, "profile_sha256": "-"}
    script = sharded.Script(
        labels, program.steps, [(m[0], m[2]) for m in program.messages]
    )
    lenet: dict[str, Any] = {**labels, "network": "lenet5", "batch": 4}
    units = {"conv1,fc1": (("conv1",), ("fc1",))}
    settings = sharded.Settings(lenet, 1, [script], units=units, iterations=2)
    tables = launch(
        sharded.sharded_job,
        settings,
        ranks=2,
        place=Loopback(),
        join={"backend": "gloo"},
        timeout_s=120,
    )
    rows = tables["sharded"]
    store.save_table(rows, tmp_path, "sharded", schema="sharded", command=[])
    assert (rows["ranks"] == 2).all()
    assert rows.groupby(["origin", "quantity"]).size().to_dict() == {
        ("measured", "brief"): 4,
        ("measured", "iteration"): 2,
        ("replayed", "iteration"): 1,
    }
    replayed = rows[rows["origin"] == "replayed"]
    assert replayed["seconds"].min() >= program.compute_s


def test_the_command_says_what_the_model_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units that match nothing, one cost for two collectives, what is not sharded: one line each."""
    tables = [
        f"{RECORDED}/{name}"
        for name in ("layers-gpt_small-b8-r1.csv", "collectives-lab-p2-1gbit.csv")
    ]
    words = ["--profile", tables[0], "--collectives", tables[1], "--strategy", "fsdp"]
    assert cli.main(["predict", *words, "--units", "blocks.layers.*", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    by = {name: calibration().between("lab:1gbit", 2, name) for name in SENT}
    said, interval_s = forecast(
        Sharding.of(profile("gpt_small", 8), "blocks.layers.*").program(), by
    )
    assert answer["iteration_s"] == pytest.approx(said.iteration_s)
    assert answer["iteration_interval_s"] == pytest.approx(interval_s)
    assert isinstance(answer["warnings"], list)
    assert interval_s is not None
    assert cli.main(["predict", *words, "--units", "blocks.layers.*"]) == 0
    assert interval_s is not None
    lower_s, upper_s = interval_s
    # Six digits, as every other number of the answer.
    assert f" {lower_s:.6g}, {upper_s:.6g}\n" in capsys.readouterr().out
    assert (answer["no_overlap_s"], answer["perfect_overlap_s"]) == pytest.approx(
        bounds(said)
    )
    assert (
        cli.main(["advise", *words, "--units", "blocks.layers.*;blocks", "--json"]) == 0
    )
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert len(ranked) == 12 and ranked == sorted(
        ranked, key=lambda row: row["iteration_s"]
    )
    assert any(row["iteration_s"] == pytest.approx(said.iteration_s) for row in ranked)
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(AlphaBeta(1e-3, 1e-9, workers=2).to_dict()))
    different = []
    for collective, ranks in (("all_gather", 2), ("reduce_scatter", 4)):
        file = tmp_path / f"{collective}.csv"
        sizes = [2**k for k in range(10, 20)]
        rows = pd.DataFrame(
            {"bytes": sizes, "seconds": [1e-4 + 1e-9 * n for n in sizes]}
        )
        rows.assign(collective=collective, ranks=ranks).to_csv(file, index=False)
        different.append(str(file))
    for wrong, line in (
        (["predict", *words], "needs --units"),
        (
            ["predict", *words, "--units", "layers.*"],
            "--units 'layers.*': matches no module",
        ),
        (
            ["predict", *words, "--units", "x", "--copies", "y"],
            "--copies has no effect with --strategy fsdp",
        ),
        (
            ["predict", *words[:2], *words[4:], "--units", "x", "--cost", str(cost)],
            "takes no --cost",
        ),
        (["advise", "--strategy", "fsdp", "--model", "x.py:f"], "leave --model out"),
        (
            ["predict", *words, "--units", "x", "--accumulate", "2"],
            "--accumulate has no effect with --strategy fsdp",
        ),
        (
            ["predict", *words, "--units", "x", "--plan", "ddp"],
            "--plan has no effect with --strategy fsdp",
        ),
        (
            ["predict", *words, "--units", "x", "--collective", "all_gather"],
            "--collective has no effect with --strategy fsdp",
        ),
        (["predict", *words, "--units", "x;y"], "one way"),
        (["predict", *words, "--units", "size:25"], "size:25MB"),
        (
            ["predict", *words[:3], *different, *words[4:], "--units", "size:1MB"],
            "of all_gather between 2 ranks and of reduce_scatter between 4 ranks",
        ),
        (["predict", *words[:4], "--units", "x"], "is only for --strategy fsdp"),
    ):
        assert cli.main(wrong) == 2
        assert (
            line in (said_so := capsys.readouterr().err) and said_so.count("error") == 1
        )


def test_a_log_of_each_collective_is_what_sharding_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in SENT:
        Path(f"{name}.log").write_text(nccl(name, title=name))
    save_profile(drawn(1, 3), "layers.csv")
    words = ["predict", "--profile", "layers.csv", "--strategy", "fsdp"]
    words += ["--units", "blocks.*.linear", "--collectives"]
    assert cli.main([*words, *(f"{name}.log" for name in SENT), "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    known = {}
    for name in SENT:
        rows = read_collectives(Path(f"{name}.log"))
        known[name] = Calibration.of(rows).between("unknown", 8, name)
    program = Sharding.of(drawn(1, 3), "blocks.*.linear").program()
    expected, interval_s = forecast(program, known)
    assert answer["iteration_s"] == pytest.approx(expected.iteration_s)
    assert answer["iteration_interval_s"] == pytest.approx(interval_s)
    assert answer["contention"] is None and answer["ranks"] == 8
    assert "not to slow each other down" in printed.err
    assert cli.main([*words, *(f"{name}.log" for name in SENT)]) == 0
    (line,) = re.findall(
        r"^iteration_interval_s +(.*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert re.fullmatch(r"[\d.e-]+, [\d.e-]+", line)
    for log, problem in (
        (["all_gather.log"], "no times of reduce_scatter"),
        (["layers.csv"], "layers.csv"),
    ):
        assert cli.main([*words, *log]) == 2
        assert problem in capsys.readouterr().err


def test_no_draws_no_interval() -> None:
    by = {name: Communication(AlphaBeta(1e-3, 1e-9, workers=2)) for name in SENT}
    said, interval_s = forecast(Sharding.of(drawn(1, 2), "blocks.*").program(), by)
    assert interval_s is None and said.exposed_communication_s > 0


@cache
def calibration(start: str = "together") -> Calibration:
    paths = store.list_tables(STARTS[start], "collectives*.csv*")
    return Calibration.of(pd.concat([store.load_table(path) for path in paths]))


@cache
def profile(network: str, batch: int, start: str = "together") -> LayerProfile:
    (path,) = store.list_tables(STARTS[start], f"layers-{network}-b{batch}-r1.csv*")
    return store.read_profile(path)


def said(
    start: str,
    origin: str,
    network: str,
    batch: int,
    ranks: int,
    link: str,
    units: str,
    prefetch: bool,
) -> dict[str, float]:
    """What was said of a case before it ran; of real training of what messages add to it in brief."""
    by = {name: calibration(start).between(link, ranks, name) for name in SENT}
    whole = Sharding.of(profile(network, batch, start), units)
    if origin == "measured":
        program = whole.program(blocking=True)
        added, interval_s = forecast(
            program,
            by,
            brief_s=np.zeros(1),
            single_iterations=start == "together",
            common_error=0,
        )
        assert interval_s
        serial_s = program.compute_s + float(forecast(program, by)[0].communication_s)
        numbers = added.iteration_s, *interval_s, serial_s, np.nan, program.compute_s
        return dict(zip(KNOWN, numbers, strict=True))
    messages = whole.program().messages
    sent_s = sum(float(by[each.collective].cost(each.bytes)) for each in messages)
    program = whole.scaled(float(f"{sent_s / whole.program().compute_s:.4g}")).program(
        prefetch=prefetch
    )
    if start != "together":
        program = sharded.of_last(program, ranks)
    narrow = 0.02 * np.random.default_rng(1).standard_normal(
        (200, 1)
    )  # too few draws, by chance
    by_start: dict[str, Any] = {"again": narrow, "last": 0.02}
    found, interval_s = forecast(program, by, common_error=by_start.get(start, 0.0))
    assert interval_s
    numbers = found.iteration_s, *interval_s, *bounds(found), found.compute_s
    return dict(zip(KNOWN, numbers, strict=True))


def came(case: dict[str, Any], rows: pd.DataFrame) -> dict[str, float]:
    """What a case took, and how far all models are off."""
    measured_s = rows.loc[rows["quantity"] == "iteration", "seconds"].median()
    brief_s = rows.loc[rows["quantity"] == "brief", "seconds"].to_numpy()
    predicted_s, low_s, high_s = (case[name] for name in KNOWN[:3])
    if len(brief_s):
        start = case["start"]
        known = calibration(start)
        by = {name: known.between(case["link"], case["ranks"], name) for name in SENT}
        whole = Sharding.of(
            profile(case["network"], case["batch"], start), case["units"]
        )
        found, interval_s = forecast(
            whole.program(blocking=True),
            by,
            brief_s=brief_s,
            single_iterations=start == "together",
            common_error=0.0,
        )
        assert interval_s
        predicted_s, low_s, high_s = found.iteration_s, *interval_s
    exposed_s = measured_s - case["compute_s"]
    return {
        "measured_s": measured_s,
        "brief_s": float(np.median(brief_s)) if len(brief_s) else np.nan,
        "error": predicted_s / measured_s - 1,
        "none": case["none_s"] / measured_s - 1,
        "perfect": case["perfect_s"] / measured_s - 1,
        "serial": case["none_s"] / measured_s - 1,
        "added": case["predicted_s"] / (measured_s - np.median(brief_s)) - 1
        if len(brief_s)
        else np.nan,
        "apart": case["none_s"] / case["perfect_s"] - 1,
        "exposed": (predicted_s - case["compute_s"]) / exposed_s - 1,
        "inside": float(low_s <= measured_s <= high_s),
        "half": (high_s - low_s) / measured_s / 2,
        "disturbed": rows["disturbed"].mean(),
        "limited": rows["processor_limited"].mean(),
    }


def as_recorded(listed: pd.DataFrame) -> pd.DataFrame:
    """Some cases of data/sharded.csv as they were said before, and as they came."""
    paths = [
        (k, path)
        for k, at in STARTS.items()
        for path in store.list_tables(at, "sharded-*.csv*")
    ]
    rows = pd.concat(
        [store.load_table(path).assign(start=start) for start, path in paths]
    )
    cases, key = [], ["start", *CASE]
    for case in listed[key].to_dict("records"):
        whole = {**case, **said(*case.values())}
        of_case = rows[(rows[key] == pd.Series(case)).all(axis=1)]
        cases.append({**whole, **came(whole, of_case)})
    table = pd.DataFrame(cases)
    numbers = table.select_dtypes("float").columns
    table[numbers] = table[numbers].map(lambda value: float(f"{value:.6g}"))
    return table


def test_recorded_cases_reach_what_was_frozen(request: pytest.FixtureRequest) -> None:
    """data/sharded.csv by the recorded tables, reports/goals.csv by it.

    Without ``--long`` every fourth case of each kind of units is predicted anew.
    """
    is_long = request.config.getoption("--long") or request.config.getoption("--write")
    step = 1 if is_long else 4
    frozen = places.DATA / "sharded.csv"
    kept = pd.read_csv(frozen)
    of_kind = kept.groupby(["start", "units"]).cumcount()
    again = kept[of_kind % step == 0].reset_index(drop=True)
    for column in ("start", "origin", "network", "link", "units", "prefetch", "ranks"):
        assert set(again[column]) == set(kept[column]), column
    table = as_recorded(again)
    if request.config.getoption("--write"):
        table.to_csv(frozen, index=False, lineterminator="\n")
        kept = pd.read_csv(frozen)
        again = kept
    pd.testing.assert_frame_equal(table, again, rtol=1e-3, atol=1e-4)
    goals = pd.read_csv(places.ROOT / "reports" / "goals.csv", keep_default_na=False)
    origins = {"replayed": "replayed", "measured": "trained"}
    for (start, origin), of in kept.groupby(["start", "origin"]):
        campaign = f"{STARTS[start].name}_{origins[origin]}"
        rows = goals[goals["campaign"] == campaign.replace("_", "-")].set_index("goal")
        assert len(rows) == len(accuracy.goals(campaign))
        for goal in accuracy.goals(campaign):
            now, row = goal.judged(of), rows.loc[goal.goal]
            assert float(row["reached"]) == pytest.approx(now["reached"], rel=1e-5)
            assert (row["wanted"], row["held"]) == (now["wanted"], str(now["holds"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs no messages are needed")
def test_without_a_folder_of_messages_it_says_what_to_run_first(tmp_path: Path) -> None:
    for arguments in ((), ("a", "b")):
        with pytest.raises(SystemExit, match="^usage: "):
            sharded.main(*arguments)
    with pytest.raises(SystemExit, match="first run python -m workbook campaign"):
        sharded.main(str(tmp_path))
