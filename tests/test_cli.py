"""The command line: answers on one's own data, and one line on stderr for every mistake."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ddlkit
from ddlkit import cli, store
from ddlkit.cli import command
from ddlkit.cli.command import interrupt_says_kept
from ddlkit.core import fit
from ddlkit.core.collective import ONLY_IN_LOGS
from ddlkit.core.errors import UserError
from places import PATIENCE_S
from workbook.common import places

Capture = pytest.CaptureFixture[str]
COST = {"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9}
FOUR = {"form": "alpha_beta", "alpha_s": 0.0, "beta_s_per_byte": 1e-8, "workers": 4}
GATHER = {**COST, "workers": 4, "collective": "all_gather"}
TENSORS, COMPUTE_S = 5, 0.15  # of conftest's profile
TRACE = "Id Name Forward Backward Comm. Size\n0 data 9 0 0 0\n1 a 20 30 40 4000\n2 b 5 6 70 80\n"
COUNTS = "tensor,parameters,flops\na,10,1e9\nb,20,2e9\n"
DENSE = "--profile profile.csv --cost cost.json"
WHAT_IF = "what-if --profile profile.csv --cost four.json"
FROM_FOUR = "--profile profile.csv --cost four.json"
SPARSE = "--profile profile.csv --cost gather.json --selection selection.json"


FILES = {
    "unknown_units.csv": "size,time\n1,2\n",
    **{"trace": TRACE, "counts": COUNTS, "text": "hello\n"},
    "negative": COUNTS.replace("1e9", "-1"),
    "nothing": "tensor,parameters,flops\na,10,0\n",
    "cost.json": json.dumps(COST),
    "four.json": json.dumps(FOUR),
    "ring.json": json.dumps({**FOUR, "algorithm": "ring"}),
    "gather.json": json.dumps(GATHER),
    "selection.json": '{"form": "log", "gamma_s": 2.2e-10}',
    "falling.json": json.dumps({**COST, "beta_s_per_byte": -1.0}),
    "forward.json": '{"groups": [[0, 1], [2, 3, 4]]}',
    "gap.json": '{"groups": [[4], [3, 2, 0]]}',
    "twice.json": '{"groups": [[4], [3, 2, 1, 0, 0]]}',
    "names.json": '{"groups": [["t0"]]}',
    "other.json": '{"planner": "mine", "groups": [[6, 5, 4, 3, 2, 1, 0]]}',
}


@pytest.fixture(autouse=True)
def desk(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a user, where the commands run."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_bytes(text.encode("latin-1"))


def write_times(name: str, sizes: Any, **columns: object) -> None:
    """Times on a line, with columns that say the same in each row."""
    sizes = np.array(sizes)
    frame = pd.DataFrame({"bytes": sizes, "seconds": 1e-3 + 8e-9 * sizes, **columns})
    frame.to_csv(name, index=False)


def run(capsys: Capture, words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main([*shlex.split(words), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def screen(capsys: Capture, words: str) -> str:
    """What a command prints for a person."""
    capsys.readouterr()
    assert cli.main(shlex.split(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("planner", ["none", "single", "cuts:2,3", "exact"])
def test_the_screen_of_plan_has_the_messages_of_its_json(
    planner: str, capsys: Capture
) -> None:
    words = f"plan {DENSE} --planner {planner}"
    groups = run(capsys, words)["groups"]
    lines = screen(capsys, words).splitlines()
    first_of_table = 1 + lines.index(
        "messages in the order in which they are sent, and their first and last tensor:"
    )
    rows = [line.split() for line in lines[first_of_table:]]
    # A row ends with the first and the last tensor of the message, with dots between.
    ends = [[row[-3], row[-1]] for row in rows]
    assert ends == [[f"t{group[0]}", f"t{group[-1]}"] for group in groups]
    assert [int(row[0]) for row in rows] == [*range(len(groups))]


def test_the_screen_of_a_comparison_has_a_row_for_each_form(capsys: Capture) -> None:
    write_times("times.csv", np.geomspace(1024, 2**26, 17).round().astype(int))
    compared = run(capsys, "fit times.csv --compare --draw fits.png")
    printed = screen(capsys, "fit times.csv --compare --draw fits.png")
    for form, errors in compared["forms"].items():
        row = next(line for line in printed.splitlines() if line.startswith(form))
        assert f"{errors['median_error']:.2%}" in row
    assert compared["chosen_form"] in printed and "fits.png" in printed


def test_a_similar_choice_is_guessed_and_few_choices_are_all_named(
    capsys: Capture,
) -> None:
    assert_one_line("predikt", "did you mean 'predict'?", capsys)
    assert_one_line("measure layer", "layers", capsys)
    assert_one_line(
        f"export --to dpp {DENSE}", "use one of ddp, inductor, profile", capsys
    )


def test_what_if_says_why_a_task_takes_no_time(capsys: Capture) -> None:
    """A task without a time may be scaled, but nothing changes by it."""
    for task, reason in (("update", "update_s"), ("io", "--inputs")):
        capsys.readouterr()
        assert cli.main([*WHAT_IF.split(), "--scale", f"{task}=2", "--json"]) == 0
        printed = capsys.readouterr()
        assert reason in printed.err
        assert json.loads(printed.out)["iteration_speedup"] == pytest.approx(1)


def test_copies_of_a_table_count_as_those_of_its_size_nearest_to_a_bucket(
    capsys: Capture,
) -> None:
    table = places.RECORDED / "cpu-2x-amd-epyc-suite" / "copies-cpu.csv"
    rows = store.load_table(table, "copies").query("copy == 'memcpy'")
    ratios = np.abs(np.log(rows["bytes"] / (25 * 2**20)))
    nearest = rows[ratios == ratios.min()]
    copy_s_per_byte = float((nearest["seconds"] / nearest["bytes"]).median())

    without = run(capsys, f"predict {DENSE}")
    by_table = run(capsys, f"predict {DENSE} --copies {table}")
    by_number = run(capsys, f"predict {DENSE} --copy-s-per-byte {copy_s_per_byte!r}")
    assert by_table["iteration_s"] == pytest.approx(by_number["iteration_s"], rel=1e-12)
    assert by_table["iteration_s"] > without["iteration_s"]
    assert by_table["contention"]["copy_s_per_byte"] == pytest.approx(copy_s_per_byte)


def test_a_cost_is_fitted_to_a_collective_that_only_logs_have(capsys: Capture) -> None:
    """A prediction then refuses it, because no training sends its gradients by it."""
    write_times("times.csv", np.geomspace(1024, 2**26, 9).round().astype(int), ranks=4)
    for name in ONLY_IN_LOGS:
        cost = run(capsys, f"fit times.csv --collective {name}")
        assert cost["collective"] == name
        Path("alien.json").write_text(json.dumps(cost))
        words = "predict --profile profile.csv --cost alien.json"
        assert_one_line(words, f"a cost of {name}", capsys)
        # The option --collective of predictions does not take such a name.
        assert cli.main(words.split()) == 2
        assert "--collective" not in capsys.readouterr().err


def test_from_times_to_a_cost_to_a_prediction_to_a_plan(capsys: Capture) -> None:
    sizes = np.repeat(np.geomspace(1024, 2**26, 17).round(), 5).astype(int)
    write_times("times.csv", sizes)
    noisy = pd.read_csv("times.csv")
    noisy["seconds"] *= np.random.default_rng(0).lognormal(0, 0.02, sizes.size)
    noisy.to_csv("times.csv", index=False)
    for form in ("alpha_beta", "piecewise", "segments", "table"):
        fitted = run(capsys, f"fit times.csv --form {form}")
        Path("cost.json").write_text(json.dumps(fitted))
        assert fitted["form"] == form
        assert fitted["fit"]["median_abs_held_out_error"] < 0.2
        single = run(capsys, f"predict {DENSE} --plan single")
        # 15 MB in one message after compute
        assert single["compute_s"] == pytest.approx(COMPUTE_S)
        assert single["iteration_s"] == pytest.approx(
            COMPUTE_S + 1e-3 + 8e-9 * 15e6, rel=0.03
        )
        low, high = single["iteration_interval_s"]
        # Contention was not measured, so this is no interval of 95%.
        assert (
            single["interval_level"] is None
            and "not included: contention" in single["interval_includes"]
        )
        assert low <= single["iteration_s"] <= high
        half = run(capsys, f"predict {DENSE} --plan single --level 0.5")
        assert (
            low
            < half["iteration_interval_s"][0]
            < half["iteration_interval_s"][1]
            < high
        )
        best = run(capsys, f"plan {DENSE} --planner exact")
        assert best["iteration_s"] <= single["iteration_s"]
        assert sorted(i for group in best["groups"] for i in group) == list(
            range(TENSORS)
        )


@pytest.mark.parametrize("issue_share", [0.95, 0.5, None])
def test_a_profile_that_has_the_times_of_the_host_is_doubted(
    issue_share: float | None, tmp_path: Path, capsys: Capture
) -> None:
    """A recorded profile with the table samples beside it, as `measure layers` leaves both on a GPU."""
    profile = replace(store.read_profile("profile.csv"), device="cuda")
    rows = store.profile_frame(profile, "fp32", 1, 1)
    labels = {"network": profile.network, "device": "cuda", "batch": profile.batch}
    quantities = {"unhooked_iteration": 1.0}
    if issue_share is not None:
        quantities["issue"] = issue_share
    samples = pd.DataFrame(
        [
            {**labels, "precision": "fp32", "quantity": quantity, "seconds": seconds}
            for quantity, seconds in quantities.items()
        ]
    ).assign(ranks=1, sample=0)
    for schema, frame in (("layers", rows), ("samples", samples)):
        store.save_table(frame, tmp_path, f"{schema}-x", schema=schema, command=[])
    said = run(
        capsys,
        f"predict --profile {tmp_path}/layers-x.csv --cost cost.json --plan ddp",
    )
    doubted = any("times of the host" in line for line in said["warnings"])
    assert doubted == (issue_share == 0.95)


@pytest.mark.parametrize(
    ("name", "kind", "options", "times_s"),
    [
        ("trace", "trace", "", (34e-6, 36e-6, 0)),
        ("trace", "trace", "--without-input", (25e-6, 36e-6, 0)),
        ("counts", "flops", "--peak 1e12 --utilisation 0.5", (0.024, 0.048, 0)),
    ],
)
def test_a_foreign_file_becomes_a_profile_that_predicts(
    name: str, kind: str, options: str, times_s: tuple[float, ...], capsys: Capture
) -> None:
    imported = run(capsys, f"import {name} --out p.csv --batch 4 {options}")
    assert [imported[key] for key in ("kind", "network", "batch")] == [kind, name, 4]
    phases = [imported[f"{phase}_s"] for phase in ("forward", "backward", "update")]
    assert phases == pytest.approx(times_s)
    assert imported["findings"]
    predicted = run(capsys, "predict --profile p.csv --cost cost.json")
    assert predicted["compute_s"] == pytest.approx(sum(times_s))


def test_a_packed_profile_predicts_as_a_plain_one(capsys: Capture) -> None:
    for name in ("p.csv", "p.csv.gz"):
        run(capsys, f"import counts --network n --out {name} --compute-s 1")
    plain, packed = (
        run(capsys, f"predict --profile {name} --cost cost.json")
        for name in ("p.csv", "p.csv.gz")
    )
    assert packed == plain


@pytest.mark.parametrize(
    ("options", "has_flops"), [("trace", False), ("counts --compute-s 1", True)]
)
def test_a_layer_profile_is_imported_by_its_flop_counts_only_if_it_has_any(
    options: str, has_flops: bool, capsys: Capture
) -> None:
    run(capsys, f"import {options} --out p.csv")
    capsys.readouterr()
    assert cli.main(["import", "p.csv", "--out", "again.csv"]) == 2
    assert ("--kind flops" in capsys.readouterr().err) == has_flops
    words = "import p.csv --out again.csv --kind flops --compute-s 1"
    assert cli.main(words.split()) == (0 if has_flops else 2)
    assert Path("again.csv").exists() == has_flops


@pytest.mark.parametrize("absent", ["matplotlib", "jinja2"])
def test_what_a_drawing_needs_is_asked_for_before_anything_is_fitted_or_measured(
    absent: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    before = {*Path().iterdir()}
    asked = {"--html": "advise --model absent.py:net --html page.html"}
    if absent == "matplotlib":
        asked["--compare"] = "fit absent.csv --compare"
    for option, words in asked.items():
        assert cli.main(words.split()) == 2
        line = f"{option} needs {absent}: pip install 'ddlkit[plot]'"
        assert capsys.readouterr().err == f"ddlkit: error: {line}\n"
    assert {*Path().iterdir()} == before


@pytest.mark.parametrize(
    "words",
    ["measure collectives --lab 1gbit", "advise --model absent.py:net --lab 1gbit"],
)
def test_what_a_lab_needs_is_asked_for_before_anything_is_measured(
    words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {*Path().iterdir()}
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert cli.main(words.split()) == 2
    assert "the lab needs ip (iproute2)" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(words.split()) == 2
    line = "--lab 1gbit: the lab needs root, for network namespaces and traffic shaping"
    assert capsys.readouterr().err == f"ddlkit: error: {line}\n"
    assert {*Path().iterdir()} == before


def test_a_recorded_timeline_becomes_a_trace(capsys: Capture) -> None:
    header = (
        "case,repeat,task,kind,stream,rank,iteration,group,origin,start_s,end_s,bytes\n"
    )
    rows = [
        f"{case},0,f,forward,s,0,0,-1,measured,-0.5,{end},0\n"
        for case, end in (("x", 1), ("y", 2))
    ]
    Path("mine.csv").write_text(header + "".join(rows))
    words = "timeline mine.csv --out chrome.json"
    assert_one_line(
        words, "several values of case (x, y): choose one with --case", capsys
    )
    assert_one_line(f"{words} --case z", "no row with case z", capsys)
    assert cli.main(f"{words} --case y".split()) == 0
    events = json.loads(Path("chrome.json").read_text())["traceEvents"]
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("f", 0, 2.5e6)


def assert_one_line(words: str, message: str, capsys: Capture) -> None:
    """Refused in one line, below warnings if any."""
    capsys.readouterr()
    assert cli.main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    *warnings, line = printed.err.splitlines()
    assert all(warning.startswith("ddlkit: ") for warning in warnings)
    assert line.startswith("ddlkit: error: ") and message in line
    assert printed.out == ""


MISTAKES = {
    f"predict {DENSE} --plan buffer:25Mb": "use B, KB",
    "predict --profle x.csv": "predict has no argument --profle: did you mean --profile?",
    "--profle x.csv predict": "ddlkit has no argument --profle before the command",
    "-x": "ddlkit has no argument -x before the command (see ddlkit --help)",
    "--vresion": "did you mean --version?",
    "lab --link 1gbit": "lab has no argument --link (see ddlkit lab --help)",
    "lab up --rate=1gbit --seal=1": "lab has no argument --seal (see ddlkit lab --help)",
    f"predict {DENSE} --plan ddp25": "--plan 'ddp25': unknown: did you mean ddp?",
    f"predict {DENSE} --plan buffer=25MB": "did you mean a plan such as buffer:25MB?",
    "fit unknown_units.csv": "columns size and time: their units are not known",
    f"plan {DENSE} --planner ddp25": "--planner 'ddp25': unknown: did you mean ddp?",
    f"predict {DENSE} --plan search:3": "--plan 'search:3': write search alone",
    f"advise {DENSE} --html text/page.html": "--html text/page.html: cannot write",
    "import text --out p.csv": "is in no format that can be imported",
    "import trace --out p.csv --batch 0": "--batch 0",
    "import counts --out p.csv": "--peak (FLOP/s) with --utilisation",
    "import negative --out p.csv --compute-s 1": "line 2, column flops",
    "fit four.json --json --form auto --form table": "--form is given twice",
    "fit four.json --form=": "--form: its value is empty: write it, or leave --form out",
    "import nothing --out p.csv --compute-s 1": "nothing: no tensor has any FLOP",
    "import counts --out p.csv --peak 1T": "--peak: '1T' is not a number: write for example 1e12",
    "import trace --out p.csv --messages ./p.csv": "--out and --messages both name p.csv",
    "measure replay": "python -m workbook record replay",
    "measure no-such-part": "use one of quick, layers",
    f"plan {DENSE} --density 0.001": "give --density and --selection together",
    f"plan {SPARSE} --density 0": "--density: '0' is not above 0",
    f"predict {SPARSE} --density 2": "is not above 0 and at most 1",
    f"plan {SPARSE} --density 0.5 --gradient-bytes 2": "4 bytes a parameter",
    f"plan {FROM_FOUR} --density 0.5 --selection selection.json": "holds a cost of all_reduce",
    f"{WHAT_IF} --accumulate 2": "what-if has no argument --accumulate",
    f"{WHAT_IF} --layer conv9=0.5": "no layer or tensor 'conv9'",
    f"{WHAT_IF} --gpus 8": "holds for 4 ranks: to assume a ring, add --assume-ring",
    f"{WHAT_IF} --gpus 100001 --assume-ring": "--gpus 100001: use at most 100000",
    f"{WHAT_IF} --assume-ring": "--assume-ring needs --gpus",
    f"{WHAT_IF} --gpus 8 --assume-ring --straggler 8:2": "there is no rank '8': the ranks are 0 to 7",
    f"predict {FROM_FOUR} --assume-ring": "--assume-ring needs --ranks",
    f"predict {DENSE} --ranks 8 --assume-ring": "does not say between how many ranks it holds",
    f"predict {DENSE} --ranks 0": "0 is too few, because one rank alone sends nothing",
    f"predict {DENSE} --link lab:1gbit": "--link chooses among the times of --collectives",
    f"predict {DENSE} --table 1": "--table chooses among the times of --collectives",
    "fit text --link lab:1gbit": "text has no column link",
    f"advise {DENSE} --lab 1gbit": "--lab has an effect with --model only",
    f"advise {DENSE} --minutes 90s": "--minutes has an effect with --model only",
    "advise --model absent.py:net --collectives times.csv": "--collectives has no effect with --model",
    f"advise {DENSE} --html page.png": "--html page.png: name a file that ends in .html",
    "explain a.json b.json --html page": "--html page: name a file that ends in .html",
    "trace --model torchvision:resnet18:4 --out x --ranks 257": "ddlkit trace under torchrun",
    f"advise {DENSE} --html .": ". is a directory: name a file",
    "measure copies --ranks 2": "--ranks has no effect on the part copies",
    "measure collectives --networks resnet50": "--networks has no effect on the part collectives",
    "measure collectives --ranks 257": "use at most 256",
    "measure slowdown --sizes 1MiB": "--sizes has no effect on the part slowdown",
    "measure collectives --sizes 1MiB,": "--sizes: size '' is not a number with a unit",
    "measure collectives --dry-run --sizes 1MiB,1000000000GiB": "larger than the memory of this",
    "measure collectives --sizes 0": "a message has at least 1 byte",
    "measure layers --networks resnet-fifty:4": "--networks resnet-fifty: unknown network",
    "measure layers --networks resnet18,4": "as in resnet18:4",
    "measure layers --networks resnet18,vgg16:x": "--networks vgg16:x: the batch size 'x'",
    "measure layers --networks resnet18:4,vgg16:0": "--networks vgg16:0: must have a batch",
    "measure layers --networks resnet18:99999999999": "a batch of 1 to 1000000000",
    "measure layers --networks resnet18,": "--networks resnet18,: a network is empty",
    "measure collectives --sizes 1MiB 2MiB": "as in 1MiB,2MiB",
    "measure collectives --sizes=1MiB 2MiB": "as in 1MiB,2MiB",
    "measure collectives --sizes 1MiB --sizes 2MiB": "after one --sizes, separated by commas",
    "measure layers --m 3": "--m is ambiguous: write --model or --minutes",
    "lab down ddl0": "did you mean --label ddl0?",
    "measure collectives --minutes x": "write for example 3 (minutes) or 90s",
    "measure collectives --budget 8:30": "write for example 90s or 8m30s",
    "measure collectives --sizes 0,1MiB": "leave out 0",
    "measure gpu": "without one, use ddlkit measure quick",
    f"{WHAT_IF} --gpus 0": "--gpus 0: too few",
    f"{WHAT_IF} --straggler 4:1.2": "--straggler 4:1.2: there is no rank '4': the ranks are 0 to 3",
    f"{WHAT_IF} --scale all_reduce=fast": "--scale all_reduce=fast: write a kind of task and a factor",
    f"{WHAT_IF} --gpus-per-machine 3": "--gpus-per-machine 3: 4 GPUs cannot be divided",
    f"{WHAT_IF} --gpus 1 --assume-ring": "--gpus 1: too few, because one GPU alone",
    f"{WHAT_IF} --framework PyTorch": "--framework 'PyTorch': unknown: use one of Caffe-MPI",
    f"{WHAT_IF} --straggler x": "--straggler x: write the number of a rank",
    f"predict {DENSE} --forward-s 0.1": "has its own column forward_s",
    f"predict {DENSE} --dilation -1": "--dilation -1: must be finite and above zero",
    f"predict {DENSE} --no-prefetch": "--no-prefetch is only for --strategy fsdp",
    f"predict {DENSE} --collective all_redoce": "unknown collective 'all_redoce'",
    f"predict {DENSE} --json=yes": "--json: takes no value: leave =yes out",
    "export --to inductor four.json --cost four.json": "the cost is given twice",
    "fit times.csv --compare --draw x.xyz": "--draw x.xyz: name a file that ends in .png",
    "fit times.csv --compare --form chords": "--form chords has no effect with --compare",
    "import trace --out p.csv --iterations 5-2": "write 2-5",
    "import trace --out p.csv --peak 1e12": "--peak has no effect on a file of the kind trace",
    "measure copies --dry-run --out text": "--out text: is a file, not a directory",
    "measure copies --dry-run --out a/b --pack x.zip": "name a file that ends in .tgz",
    "measure copies --dry-run --out /proc/a/b": "--out /proc/a/b: cannot write into /proc",
    "lab up --ranks 1": "--ranks 1: a lab has 2 to 64 ranks",
    "lab up --rate 200gbit": "--rate: '200gbit': the rate of a link must be from 1mbit",
    "measure collectives --lab 1gbit --ranks 65": "--ranks 65: a lab has 2 to 64 ranks",
    "measure collectives --lab 1gbit --ranks 300": "--ranks 300: a lab has 2 to 64 ranks",
    "measure collectives --lab 1gbit,100": "--lab 1gbit,100: the delay of a link must be from 0 to",
    "measure collectives --lab 200gbit": "--lab 200gbit: the rate of a link must be from 1mbit",
    "lab up --engine emulated --loss 200%": "--loss 200%: the loss of a link must be from 0% to",
    "lab status --rate 1gbit": "--rate has no effect on lab status",
    "export --to inductor four.json --profile absent.csv": "--profile has no effect on --to inductor",
    "export --to profile four.json --planner exact": "--planner has no effect on --to profile",
    f"advise {DENSE} --minutes 3": "--minutes has an effect with --model only",
    f"advise {DENSE} --level 0.95": "--level has an effect with --strategy fsdp only",
    "measure copies --accumulate 1": "--accumulate needs --model",
    "measure layers --model m.py:net --pack a.tgz": "--model m.py:net: there is no file",
    "import four.json --messages m.csv --batch 3": "--batch has no effect without --out",
    "import trace --messages m.csv --batch 3": "--messages has no effect on a file of the kind trace",
    "import trace": "nothing to write: give --out",
    "import counts --out p.csv --sequence 5": "--sequence has no effect on a file of the kind flops",
    "import trace --out p.csv --peak 1e12 --sequence 5": "--sequence (only on transformer) have no",
    "import counts --out p.csv --kind kineto": "leave --kind out",
    "import counts --out p.csv --kind trace": "leave --kind out",
    "import counts --out p.csv --peak 1e12": "give --utilisation as well",
    "import counts --out p.csv --compute-s 0": "--compute-s 0: must be finite and above zero",
    "import counts --out p.csv --compute-s 1 --peak 1e12": "give --compute-s alone",
    "fit four.json": "is a cost that ddlkit fit wrote",
    "measure copies --budget -5s": "--budget: time '-5s' must not be negative",
    f"predict {SPARSE} --density 0.5 --collective all_reduce": "--collective all_reduce: with",
    f"plan {SPARSE.replace('selection.json', 'four.json')} --density 0.5": "four.json: is a cost of messages",
    f"{WHAT_IF} --in-flight 1": "what-if has no argument --in-flight",
    f"{WHAT_IF} --scale no_such=2": "--scale: there is no task 'no_such'",
    f"{WHAT_IF} --straggler 1:-2": "--straggler 1:-2: the factor must be finite",
    f"predict {DENSE} --copy-s-per-byte 1": "--copy-s-per-byte 1: must be from 0 to",
    f"predict {DENSE} --copy-s-per-byte 0 --copies c": "--copy-s-per-byte has no effect",
    f"predict {DENSE} --plan other.json": "other.json: plan 'mine' is for 7 tensors",
    f"predict {FROM_FOUR} --ranks 8": "four.json: holds for 4 ranks, not for 8",
    f"advise {DENSE}": "cost.json: the cost has no intervals",
    f"{WHAT_IF} --layer l1=0": "--layer l1=0: the factor must be finite and above 0",
    f"{WHAT_IF} --layer l1=1e30": "--layer: a tensor would have",
    f"{WHAT_IF} --scale cpu=2": "there is no task 'cpu': this resource has tasks only with",
    f"{WHAT_IF} --gpus 6 --assume-ring --gpus-per-machine 3": "use a divisor of both 4 and 6",
    f"what-if {DENSE} --gpus-per-machine 2": "--gpus-per-machine 2: the cost does not say",
    f"what-if {DENSE} --gpus 4": "give this number with --ranks, and add --assume-ring",
    f"predict {DENSE} --ranks 100001": "--ranks: 100001 is too many",
    f"predict {DENSE} --plan random:1:0": "write random:SEED:MESSAGES",
    f"predict {DENSE} --plan text": "--plan text: the name of a file with a plan must end in .json",
    f"predict {DENSE} --plan forward.json": "forward.json: its groups must list the tensors from the last",
    f"predict {DENSE} --plan gap.json": "gap.json: not a plan: tensor 1 (counted from 0) is in none",
    f"predict {DENSE} --plan twice.json": "twice.json: not a plan: tensor 0 (counted from 0) is in the",
    f"predict {DENSE} --plan names.json": "names.json: not a plan: a group has 't0'",
    "predict --profile profile.csv --cost falling.json": "falling.json: the cost of a message of",
    "plan --profile profile.csv --cost falling.json": "falling.json: the cost of a message of",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_and_where(
    words: str, capsys: Capture
) -> None:
    assert_one_line(words, MISTAKES[words], capsys)
    assert not Path("p.csv").exists()


@pytest.mark.parametrize(
    ("words", "may_be_left_out"),
    [
        (["trace", "--model=", "--out", "t"], False),
        (["trace", "--model", "m.py:net", "--out", "t", "--ranks", ""], True),
        (["measure", ""], False),
        (["measure", "layers", ""], True),
        (["explain", ""], False),
        (["explain", "a.json", ""], True),
        ([""], False),
    ],
)
def test_only_what_is_not_needed_may_be_left_out_if_it_is_empty(
    words: list[str], may_be_left_out: bool, capsys: Capture
) -> None:
    assert cli.main(words) == 2
    assert ("leave" in capsys.readouterr().err) == may_be_left_out


@pytest.mark.parametrize("option", ["--minutes", "--ranks"])
def test_zero_is_a_value_that_a_users_own_model_does_not_take(
    option: str, capsys: Capture
) -> None:
    Path("mine.py").touch()
    words = f"measure layers --model mine.py:net {option} 0"
    assert_one_line(words, f"{option} has no effect with --model", capsys)


def test_blanks_around_the_networks_of_a_list_do_not_count(capsys: Capture) -> None:
    listed = []
    for networks in ("resnet18:2,vgg16", " resnet18:2 , vgg16 "):
        words = ["measure", "layers", "--dry-run", "--networks", networks]
        assert cli.main(words) == 0
        listed.append(capsys.readouterr().out)
    assert listed[0] == listed[1]


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"algorithm": "ring"},
        {"algorithm": "tree"},
        {"alpha_s": -1e-6},
    ],
)
def test_assuming_a_ring_is_advised_where_it_is_possible_and_nowhere_else(
    about: dict[str, Any], capsys: Capture
) -> None:
    Path("asked.json").write_text(json.dumps({**FOUR, "alpha_s": 1e-3, **about}))
    for words in (
        "predict --profile profile.csv --cost asked.json --ranks 8",
        "what-if --profile profile.csv --cost asked.json --gpus 8",
    ):
        capsys.readouterr()
        assert cli.main(words.split()) == 2
        is_advised = "--assume-ring" in capsys.readouterr().err
        is_possible = cli.main([*words.split(), "--assume-ring"]) == 0
        assert is_advised == is_possible


def test_advice_on_a_chosen_row_can_be_followed(capsys: Capture) -> None:
    """Each listed value goes with the other options that are given."""
    frames = [
        pd.DataFrame(
            {
                "bytes": [1024, 1 << 20],
                "seconds": [1e-3, 1e-2],
                "ranks": ranks,
                "link": link,
            }
        )
        for ranks, link in ((2, "a"), (2, "b"), (4, "c"))
    ]
    pd.concat(frames).to_csv("links.csv", index=False)
    words = "predict --profile profile.csv --collectives links.csv"
    capsys.readouterr()
    assert cli.main(f"{words} --ranks 8 --link c".split()) == 2
    printed = capsys.readouterr().err
    assert "have ranks 4" in printed and "of collective" not in printed
    assert cli.main(f"{words} --ranks 4 --link c".split()) == 0
    assert_one_line(f"{words} --ranks 2 --link c", "have link a, b", capsys)


def test_an_option_that_names_a_table_of_another_kind_is_named_with_the_right_one(
    capsys: Capture,
) -> None:
    recorded = places.RECORDED / "cpu-2x-amd-epyc"
    table_by_option = {
        "--profile": recorded / "layers-alexnet-b8-r1.csv",
        "--collectives": recorded / "collectives-lab-p2-500mbit.csv",
    }
    for wrong, other in (
        ("--profile", "--collectives"),
        ("--collectives", "--profile"),
        ("--slowdown", "--profile"),
        ("--selection", "--profile"),
    ):
        tables = {**table_by_option, wrong: table_by_option[other]}
        words = " ".join(f"{option} {path}" for option, path in tables.items())
        if wrong == "--selection":
            words += " --density 0.1"
        message = f"{wrong} {table_by_option[other]}: "
        assert_one_line(f"predict {words}", message, capsys)
        assert_one_line(f"predict {words}", f"belongs to {other}", capsys)
    for other in ("--profile", "--collectives"):
        words = f"predict --profile profile.csv --cost {table_by_option[other]}"
        assert_one_line(words, f"give it with {other}", capsys)


@pytest.mark.fault(
    fault="nobody reads what is printed",
    injected="the reading end of standard output is closed",
    holds="no traceback",
)
def test_an_unknown_option_and_a_closed_pipe_end_without_a_traceback() -> None:
    ddlkit = [sys.executable, "-m", "ddlkit"]
    how: dict[str, Any] = {"cwd": places.ROOT, "stderr": subprocess.PIPE}
    wrong = subprocess.run([*ddlkit, "predict", "--plans", "x"], **how, check=False)
    assert wrong.returncode == 2 and b"Traceback" not in wrong.stderr
    with subprocess.Popen([*ddlkit, "machine"], stdout=subprocess.PIPE, **how) as piped:
        assert piped.stdout is not None and piped.stderr is not None
        piped.stdout.close()
        assert b"Traceback" not in piped.stderr.read()


def inputs_table(batch: int) -> Path:
    """What a batch takes: 0.2 s to read, 0.3 s to decode."""
    columns = {
        **{
            "quantity": ["read", "decode", "read"],
            "how": ["cold files", "one core", "cached"],
        },
        **{
            "device": "cpu",
            "stored": "jpeg",
            "batch": 1,
            "bytes": 9,
            "ranks": 1,
            "sample": 0,
        },
        **{"seconds": np.array([0.2, 0.3, 0.9]) / batch, "from_disk": 1.0},
    }
    frame = pd.DataFrame(columns)
    return store.save_table(frame, Path(), "inputs-toy", schema="inputs", command=[])


def test_what_if_says_what_limits_before_and_after(capsys: Capture) -> None:
    """Messages of half the time, and rank 3 a fifth slower; then input of four times as long."""
    sent_s = 15e6 * 1e-8
    words = f"{WHAT_IF} --plan single"
    answer = run(capsys, f"{words} --scale allreduce=0.5 --straggler 3:1.2")
    assert answer["simulated_tasks"] == 10 * (4 * (1 + 1 + 2 * TENSORS) + 1 + 1)
    assert answer["iteration_s"] == pytest.approx(COMPUTE_S + sent_s)
    assert answer["iteration_s_after"] == pytest.approx(1.2 * COMPUTE_S + 0.5 * sent_s)
    shares = answer["shares_of_critical_path_after"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["link"] == pytest.approx(0.5 * sent_s / answer["iteration_s_after"])
    assert answer["iteration_speedup"] == pytest.approx(
        answer["iteration_s"] / answer["iteration_s_after"]
    )
    # What computes is called as the result calls it, or as the graph does.
    assert answer["limited_by"] == "compute"
    by_name = {
        run(capsys, f"{words} --scale {name}=0.5")["iteration_s_after"]
        for name in ("compute", "gpu")
    }
    assert len(by_name) == 1 and min(by_name) < answer["iteration_s"]
    slow = run(capsys, f"{words} --inputs {inputs_table(batch=8)} --scale disk=4")
    assert slow["iteration_s_after"] == pytest.approx(4 * 0.2)  # now the disks limit
    assert (
        slow["limited_by_after"] == "disk"
        and "disk" not in slow["shares_of_critical_path"]
    )


def test_what_if_of_more_gpus_is_the_cost_carried_there(capsys: Capture) -> None:
    """Eight ranks of a ring: 7/8 against 3/4 of the bytes; and twice as many samples an iteration."""
    words = "--cost ring.json --plan single --gpus 8 --assume-ring --straggler 7:1.0"
    answer = run(capsys, f"what-if --profile profile.csv {words}")
    sent_s = 15e6 * 1e-8 * (7 / 8) / (3 / 4)
    assert (answer["ranks"], answer["ranks_after"]) == (4, 8)
    assert answer["iteration_s_after"] == pytest.approx(COMPUTE_S + sent_s)
    grown = answer["samples_per_s_after"] / answer["samples_per_s"]
    assert grown == pytest.approx(2 * answer["iteration_speedup"])


def test_what_undercuts_a_bound_is_printed_without_it_and_with_a_warning(
    capsys: Capture,
) -> None:
    """A burst, or several messages in flight; predict has the warnings of plan, by its option."""
    folder = places.ROOT / "data/recorded/cpu-2x-intel-xeon/campaign-training"
    profile = folder / "layers-resnet18-b4-r2.csv"
    lab = folder / "collectives-lab-p2-1gbit.csv"
    shaped = f"--profile {profile} --collectives {lab}"
    for given in (shaped, f"{FROM_FOUR} --in-flight 2"):
        planned = run(capsys, f"plan {given} --planner exact")
        predicted = run(capsys, f"predict {given} --plan exact")
        assert "lower_bound_s" not in planned
        (doubt,) = [line for line in planned["warnings"] if "--planner" in line]
        assert doubt.replace("--planner", "--plan") in predicted["warnings"]
    assert "lower_bound_s" in run(capsys, f"plan {FROM_FOUR} --planner exact")


def test_factors_of_a_repeated_layer_are_multiplied(capsys: Capture) -> None:
    layer = Path("profile.csv").read_text().splitlines()[1].split(",")
    header = Path("profile.csv").read_text().splitlines()[0].split(",")
    name = layer[header.index("tensor")]
    twice = run(capsys, f"{WHAT_IF} --layer {name}=2 --layer {name}=3")
    once = run(capsys, f"{WHAT_IF} --layer {name}=6")
    assert twice["iteration_s_after"] == once["iteration_s_after"]


def test_ranks_may_state_the_number_of_a_cost_before_a_ring_is_assumed(
    capsys: Capture,
) -> None:
    """A cost that does not say its number of ranks gives what one that says it gives."""
    write_times("times.csv", [1024 * 4**k for k in range(8)], ranks=4)
    stated = run(capsys, "fit times.csv --form alpha_beta")
    assert stated.pop("ranks") == 4
    Path("unstated.json").write_text(json.dumps(stated))
    Path("stated.json").write_text(json.dumps({**stated, "ranks": 4}))
    words = "what-if --profile profile.csv --gpus 8 --assume-ring --cost"
    unstated = run(capsys, f"{words} unstated.json --ranks 4")
    assert unstated == run(capsys, f"{words} stated.json")


def test_what_if_takes_measured_times_where_the_ranks_after_the_change_have_them(
    capsys: Capture,
) -> None:
    """No ring is assumed, and both iterations are those that predict has for their ranks."""
    sizes = [1024 * 4**k for k in range(8)]
    write_times("four.csv", sizes, ranks=4)
    of_four = pd.read_csv("four.csv")
    of_eight = of_four.assign(ranks=8, seconds=3 * of_four["seconds"])
    pd.concat([of_four, of_eight]).to_csv("both.csv", index=False)
    given = "--profile profile.csv --collectives both.csv --plan single"
    answer = run(capsys, f"what-if {given} --ranks 4 --gpus 8")
    for ranks, key in ((4, "iteration_s"), (8, "iteration_s_after")):
        predicted = run(capsys, f"predict {given} --ranks {ranks}")
        assert answer[key] == pytest.approx(predicted["iteration_s"])
    assert "assumed" not in answer and answer["ranks_after"] == 8
    assert run(capsys, f"what-if {given} --ranks 4 --gpus 8 --assume-ring") == answer


def ring_of_eight_s(n_bytes: float) -> float:
    """A ring of 8 ranks like one of 4, whose messages take 1 ms and 8 ns a byte.

    It has 14 steps instead of 6, and each link carries 14/8 of the bytes instead of 6/4.
    """
    return 1e-3 * 14 / 6 + 8e-9 * n_bytes * (14 / 8) / (6 / 4)


def test_a_file_without_ranks_has_no_times_between_the_ranks_after_a_change(
    capsys: Capture,
) -> None:
    """What it lacks is stated by --ranks, for the times before the change alone."""
    sizes = [1024 * 4**k for k in range(8)]
    write_times("before.csv", sizes)
    write_times("after.csv", sizes, ranks=8)
    slower = pd.read_csv("after.csv")
    slower.assign(seconds=3 * slower["seconds"]).to_csv("after.csv", index=False)
    given = "--profile profile.csv --plan single --collectives"
    answer = run(capsys, f"what-if {given} before.csv after.csv --ranks 4 --gpus 8")
    alone = run(capsys, f"predict {given} after.csv --ranks 8")
    assert answer["iteration_s_after"] == pytest.approx(alone["iteration_s"])


def test_more_ranks_than_measured_cost_what_a_ring_costs(capsys: Capture) -> None:
    write_times("times.csv", [1024 * 4**k for k in range(8)], ranks=4)
    given = "--profile profile.csv --collectives times.csv --plan single --assume-ring"
    expected_s = COMPUTE_S + ring_of_eight_s(15e6)
    predicted = run(capsys, f"predict {given} --ranks 8")
    assert predicted["iteration_s"] == pytest.approx(expected_s)
    lower_s, upper_s = predicted["iteration_interval_s"]
    assert lower_s <= predicted["iteration_s"] <= upper_s
    assert (predicted["ranks"], predicted["assumed"].split()[:2]) == (
        8,
        ["a", "ring"],
    )
    assert any(
        "is not taken from measured times" in line for line in predicted["warnings"]
    )
    # The same number of ranks by the cost that fit writes, and after a change.
    Path("line.json").write_text(
        json.dumps(run(capsys, "fit times.csv --form alpha_beta"))
    )
    words = "--profile profile.csv --cost line.json --plan single --assume-ring"
    assert run(capsys, f"predict {words} --ranks 8")["iteration_s"] == pytest.approx(
        expected_s
    )
    after = run(capsys, f"what-if {given} --gpus 8")
    assert after["iteration_s_after"] == pytest.approx(expected_s)
    assert after["iteration_s"] == pytest.approx(COMPUTE_S + 1e-3 + 8e-9 * 15e6)
    # A number that was measured is not carried, and no line takes the place of its times.
    measured = run(capsys, f"predict {given} --ranks 4")
    as_measured = run(
        capsys, f"predict {given.removesuffix(' --assume-ring')} --ranks 4"
    )
    assert measured["iteration_s"] == as_measured["iteration_s"]
    assert measured["warnings"] == as_measured["warnings"]
    assert "assumed" not in measured
    assert "assumed" in after
    assert "assumed" not in run(capsys, f"what-if {given} --gpus 4")
    for words in ("predict --ranks 8", "what-if --gpus 8"):
        line = "add --assume-ring"
        without = given.removesuffix(" --assume-ring")
        assert_one_line(f"{words} {without}", line, capsys)


def test_a_change_is_refused_before_notes_are_printed(capsys: Capture) -> None:
    for words in (
        "--straggler 9:2",
        "--layer absent=0.5",
        "--gpus 8",
        "--inputs profile.csv",
        "--scale absent=2",
    ):
        capsys.readouterr()
        assert cli.main(shlex.split(f"{WHAT_IF} {words}")) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_machines_that_are_alike_are_simulated_once(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        f"{WHAT_IF} --gpus 12 --gpus-per-machine 2 --assume-ring --straggler 7:1.3 "
        f"--scale rank:11=0.5 --inputs {inputs_table(batch=8)}"
    )
    once = run(capsys, words)
    assert once["simulated_tasks"] == 10 * (
        4 * (2 + 2 * TENSORS) + len_of_ddp(capsys) + 1
    )

    def every_machine(machines: int, changed_machines: set[int]) -> list[int]:
        return list(range(machines))

    with monkeypatch.context() as patched:
        patched.setattr(cli.predicting, "_machines_to_simulate", every_machine)
        assert run(capsys, words) == once
    most = run(capsys, f"{WHAT_IF} --gpus 100000 --assume-ring --straggler 99999:1.2")
    assert most["iteration_s_after"] > 1.2 * COMPUTE_S


def len_of_ddp(capsys: Capture) -> int:
    """Messages of PyTorch's default buckets."""
    return int(run(capsys, f"predict {FROM_FOUR}")["message_count"])


def test_times_have_units_and_plain_numbers_keep_their_meaning(capsys: Capture) -> None:
    for name in ("plain", "unit"):
        text = {"plain": "0.25", "unit": "250ms"}[name]
        run(capsys, f"import counts --out {name}.csv --compute-s {text}")
    assert Path("plain.csv").read_text() == Path("unit.csv").read_text()
    copied = [
        run(capsys, f"predict {DENSE} --copy-s-per-byte {text}")["iteration_s"]
        for text in ("2e-10", "0.2ns")
    ]
    assert copied[0] == pytest.approx(copied[1])
    minutes = [command.minutes(text) for text in ("3", "3m", "90s", "inf")]
    assert minutes == [3, 3, 1.5, np.inf]


def test_functions_take_paths_as_text_and_ask_takes_lists(tmp_path: Path) -> None:
    profile = store.read_profile("profile.csv")
    assert profile.tensor == store.read_profile(Path("profile.csv")).tensor
    ddlkit.save_profile(profile, "copy.csv")
    assert store.read_profile("copy.csv").tensor == profile.tensor
    write_times("small.csv", [1024 * 4**k for k in range(4)], ranks=4)
    write_times("large.csv", [1024 * 4**k for k in range(4, 8)], ranks=4)
    sizes, _, _ = ddlkit.read_bytes_seconds("small.csv")
    assert sizes.tolist() == [1024, 4096, 16384, 65536]
    both = cli.ask(
        "predict", profile="profile.csv", collectives=["small.csv", "large.csv"]
    )
    assert both["ranks"] == 4
    slow = cli.ask(
        "what-if",
        profile="profile.csv",
        cost="four.json",
        scale=["forward=2", "backward=2"],
        gpus=8,
        assume_ring=True,
    )
    assert slow["ranks_after"] == 8 and slow["iteration_speedup"] < 0.6
    with pytest.raises(UserError, match="name a command"):
        cli.ask(" ", plan="ddp")


def test_a_change_of_tasks_that_take_no_time_is_told(capsys: Capture) -> None:
    words = f"{WHAT_IF} --scale h2d=0.5 --scale forward=0.5 --straggler 1:2"
    assert cli.main(words.split()) == 0
    told = [
        line for line in capsys.readouterr().err.splitlines() if "no effect" in line
    ]
    assert len(told) == 1 and "--scale h2d=0.5 has no effect" in told[0]


def test_an_exported_list_comes_with_what_it_gains(capsys: Capture) -> None:
    words = f"export --to ddp --torch 2.11 {FROM_FOUR} --planner single"
    assert cli.main(words.split()) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["bucket_cap_mb_list"]) == 1
    default = run(capsys, f"predict {FROM_FOUR}")["iteration_s"]
    single = run(capsys, f"predict {FROM_FOUR} --plan single")["iteration_s"]
    assert single > default
    assert f"{single / default - 1:.1%} longer" in printed.err


def test_a_plan_for_several_messages_in_flight_claims_no_bound(capsys: Capture) -> None:
    one = run(capsys, f"plan {FROM_FOUR}")
    several = run(capsys, f"plan {FROM_FOUR} --in-flight 3")
    assert several["groups"] == one["groups"] and one["warnings"] == []
    assert "lower_bound_s" in one and "lower_bound_s" not in several
    assert any("in flight" in warning for warning in several["warnings"])


def test_a_cost_without_an_interval_claims_no_level(capsys: Capture) -> None:
    predicted = run(capsys, f"predict {DENSE}")
    assert (
        predicted["iteration_interval_s"] is None
        and predicted["interval_level"] is None
    )
    assert predicted["interval_includes"].startswith("nothing")


def test_a_lab_that_is_not_there_is_told(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddlkit.lab import network

    monkeypatch.setattr(network, "status", list)
    for action in ("status", "down"):
        assert cli.main(["lab", action]) == 0
        assert capsys.readouterr().out.strip()


def test_every_planner_of_sparse_messages_can_be_asked_for_and_none_beats_exact(
    capsys: Capture,
) -> None:
    taken = {}
    for planner in ("none", "single", "mgs:8192", "omgs", "omgs:theorem", "exact"):
        chosen = run(capsys, f"plan {SPARSE} --density 0.001 --planner {planner}")
        assert chosen["planner"] == planner and chosen["warnings"] == []
        assert ("lower_bound_s" in chosen) == (planner == "exact")
        taken[planner] = chosen["iteration_s"]
        predicted = run(capsys, f"predict {SPARSE} --density 0.001 --plan {planner}")
        assert predicted["iteration_s"] == chosen["iteration_s"]
    assert min(taken.values()) == taken["exact"]
    assert chosen["lower_bound_s"] == pytest.approx(taken["exact"], rel=1e-11)


def test_selection_is_computed_and_values_and_indices_are_gathered(
    capsys: Capture,
) -> None:
    answer = run(capsys, f"predict {SPARSE} --density 0.001 --plan single")
    assert answer["selection_s"] == pytest.approx(2.2e-10 * 3.75e6 * 21.838, rel=1e-4)
    assert answer["compute_s"] == pytest.approx(COMPUTE_S + answer["selection_s"])
    gathered = 4 * 4 * 3750  # bytes of 4 workers' values, or of their indices
    assert answer["communication_s"] == pytest.approx(2 * (1e-3 + 8e-9 * gathered))


def test_the_help_of_selection_names_a_pattern_of_recorded_tables(
    capsys: Capture,
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["predict", "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    (pattern,) = re.findall(r"'(data/recorded/[^']+)'", helped)
    selection = shlex.quote(str(places.ROOT / pattern))
    answer = run(
        capsys,
        f"predict --profile profile.csv --cost gather.json --density 0.01 --selection {selection}",
    )
    assert answer["selection_s"] > 0


def test_an_interrupt_that_is_dropped_comes_again_and_lets_clean_up(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    cleaned = []

    def long(*_: object, **__: object) -> None:
        with contextlib.suppress(
            KeyboardInterrupt
        ):  # as an extension does that asks for an attribute
            signal.raise_signal(signal.SIGTERM)
        try:
            time.sleep(PATIENCE_S)
        finally:
            time.sleep(
                1.5
            )  # cleaning up takes longer than an interrupt takes to come again
            cleaned.append(True)

    monkeypatch.setattr(fit, "fit", long)
    write_times("times.csv", range(1024, 9000, 1024))
    assert cli.main(["fit", "times.csv"]) == 143 and cleaned
    assert capsys.readouterr().err.endswith("ddlkit: interrupted\n")


def test_messages_outside_the_measured_sizes_are_told(capsys: Capture) -> None:
    """From a cost of fit and from the times themselves; not when all are inside."""
    write_times("times.csv", range(1_500_000, 4_500_001, 500_000))
    Path("fitted.json").write_text(json.dumps(run(capsys, "fit times.csv")))
    for given in ("--cost fitted.json", "--collectives times.csv --ranks 4"):
        words = f"predict --profile profile.csv {given} --plan"
        (line,) = run(capsys, f"{words} none")["warnings"]
        assert "2 of 5 messages (976.6 KiB to 4.768 MiB) are outside" in line
        # Two messages of 9 and 6 MB; then none outside.
        assert "2 of 2 messages" in run(capsys, f"{words} cuts:2")["warnings"][0]
    write_times("times.csv", [1024, 10**8])
    assert run(capsys, f"{words} none")["warnings"] == []


@pytest.mark.parametrize(
    ("device", "backend", "alike"),
    [("cpu", "gloo", True), ("NVIDIA A100", "gloo", False), ("unknown", "nccl", True)],
)
def test_a_profile_of_one_device_with_messages_of_another_is_told(
    device: str, backend: str, alike: bool, capsys: Capture
) -> None:
    pd.read_csv("profile.csv").assign(device=device).to_csv("profile.csv", index=False)
    write_times("times.csv", [1024 * 4**k for k in range(9)], backend=backend)
    Path("fitted.json").write_text(json.dumps(run(capsys, "fit times.csv")))
    for given in ("--cost fitted.json", "--collectives times.csv --ranks 4"):
        lines = run(capsys, f"plan --profile profile.csv {given}")["warnings"]
        assert len(lines) == (not alike)
        assert alike or f"({device}), the messages were timed between" in lines[0]


def test_the_manual_explains_every_value_that_predict_prints(capsys: Capture) -> None:
    page = (places.ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| name | what it is |")
    explained = re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    assert explained == [*run(capsys, f"predict {DENSE}")]


def keys_of(document: object) -> set[str]:
    """Return all keys of a JSON document, without those of lists of shares by name."""
    if isinstance(document, list):
        return set().union(*map(keys_of, document))
    if not isinstance(document, dict):
        return set()
    keys = {*document}
    for key, value in document.items():
        if key not in NAMED_BY_USERS:
            keys |= keys_of(value)
    return keys


NAMED_BY_USERS = {"forms", "shares_of_critical_path", "shares_of_critical_path_after"}
"""Keys of objects whose own keys are names of forms and resources."""

PLAIN_FORMS = ("alpha_beta", "piecewise", "segments", "chords", "table", "auto")
STEPS = "gpus,nodes,job,step_s\n1,1,a,1.0\n4,1,b,1.02\n8,2,c,1.05\n16,4,d,1.1\n"


@pytest.mark.parametrize(
    "words",
    [
        *(f"fit times.csv --form {form}" for form in PLAIN_FORMS),
        "fit times.csv --compare",
        f"plan {DENSE} --planner exact",
        f"{WHAT_IF} --gpus 8 --assume-ring",
        "scale --steps steps.csv --nodes 16 --wish 0.8",
        "import trace --out p.csv",
        "machine",
    ],
)
def test_the_manual_explains_every_key_of_a_document(
    words: str, capsys: Capture
) -> None:
    write_times("times.csv", [1024 * 4**k for k in range(9)], ranks=4, algorithm="ring")
    Path("steps.csv").write_text(STEPS)
    page = (places.ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    explained = {*re.findall(r"`(\w+)`", page)}
    keys = {key.removesuffix("_after") for key in keys_of(run(capsys, words))}
    assert keys - explained == set()


TOO_LONG = "a" * 300
"""A name with which no file system looks for a file, whoever the user is."""


@pytest.mark.parametrize(
    "words",
    [
        f"fit {TOO_LONG}",
        f"explain {TOO_LONG}",
        f"predict --profile {TOO_LONG} --cost cost.json",
        f"advise --model {TOO_LONG}.py:net",
        f"measure layers --model {TOO_LONG}.py:net",
        f"measure copies --dry-run --out {TOO_LONG}",
        f"trace --model {TOO_LONG}.py:net --out x",
        f"plan {DENSE} --slowdown {TOO_LONG}",
        f"scale --steps {TOO_LONG} --nodes 4",
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(words: str, capsys: Capture) -> None:
    assert_one_line(words, TOO_LONG, capsys)


@pytest.mark.parametrize(
    "words", ["fit shut/x", "explain shut/x", "advise --model shut/x.py:net"]
)
def test_a_directory_that_may_not_be_entered_is_one_line(
    words: str, capsys: Capture
) -> None:
    shut = Path("shut")
    shut.mkdir(mode=0)
    if os.access(shut, os.X_OK):
        pytest.skip("this user may enter every directory")
    try:
        assert_one_line(words, "shut/x", capsys)
    finally:
        shut.chmod(0o700)


def test_a_link_is_chosen_by_the_column_of_ones_own_table(capsys: Capture) -> None:
    sizes = [1024 * 4**k for k in range(8)]
    write_times("slow.csv", sizes, link="slow", ranks=2)
    both = pd.concat([pd.read_csv("slow.csv"), pd.read_csv("slow.csv")])
    both["link"] = ["slow"] * 8 + ["fast"] * 8
    both["seconds"] = both["seconds"].where(both["link"] == "slow", both["seconds"] / 2)
    both.to_csv("both.csv", index=False)
    slow, fast = (
        run(capsys, f"fit both.csv --link {link} --form alpha_beta")["alpha_s"]
        for link in ("slow", "fast")
    )
    assert slow == pytest.approx(2 * fast)
    predict = "predict --profile profile.csv --collectives both.csv --ranks 2"
    slower, faster = (
        run(capsys, f"{predict} --link {link}")["communication_s"]
        for link in ("slow", "fast")
    )
    assert slower > faster
    assert_one_line("fit both.csv --link other", "slow, fast", capsys)
    assert_one_line("fit absent.csv --link slow", "cannot read absent.csv", capsys)


def test_a_value_that_is_assumed_is_not_said_to_be_in_the_file(capsys: Capture) -> None:
    frame = pd.read_csv("profile.csv").drop(columns="batch")
    frame.to_csv("own.csv", index=False)
    words = "predict --profile own.csv --cost cost.json --batch 32"
    assert_one_line(words, "has no column batch", capsys)


def test_times_of_an_unknown_number_of_ranks_explain_nothing(capsys: Capture) -> None:
    write_times("times.csv", [1024 * 4**k for k in range(8)])
    words = "explain a.json b.json --collectives times.csv"
    assert_one_line(words, "times.csv: does not say between how many ranks", capsys)


def test_ranks_choose_or_say_and_never_carry(capsys: Capture) -> None:
    """Wherever the number comes from, the prediction is of that many, and no other is taken."""
    sizes = [1024 * 4**k for k in range(8)]
    write_times("silent.csv", sizes)
    write_times("telling.csv", sizes, ranks=4)
    predict = "predict --profile profile.csv"
    for times, at_fit, at_predict in (
        ("silent.csv", "", "--ranks 4"),
        ("silent.csv", "--ranks 4", ""),
        ("telling.csv", "", ""),
    ):
        Path("fitted.json").write_text(json.dumps(run(capsys, f"fit {times} {at_fit}")))
        given = (f"--cost fitted.json {at_predict}", f"--collectives {times} --ranks 4")
        assert [run(capsys, f"{predict} {words}")["ranks"] for words in given] == [
            4,
            4,
        ]
    mistake = "holds for 4 ranks, not for 8"
    assert_one_line(f"{predict} --cost fitted.json --ranks 8", mistake, capsys)
    for words in ("fit telling.csv", f"{predict} --collectives telling.csv"):
        assert_one_line(f"{words} --ranks 8", "no row with ranks 8", capsys)


@pytest.mark.parametrize("table", ["layers/runs.csv", "runs.csv.gz", ""])
def test_an_interrupt_says_where_tables_are_if_there_are_any(
    table: str, tmp_path: Path
) -> None:
    """Outcomes and vitals of a session are no measurements."""
    out = tmp_path / "out"
    for name in ("outcomes.csv", "vitals-s1.csv.gz", ".lock", table):
        if name:
            path = out / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
    with pytest.raises(KeyboardInterrupt) as caught, interrupt_says_kept(out):
        raise KeyboardInterrupt
    assert (str(out) in str(caught.value)) == bool(table)
