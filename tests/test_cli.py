"""The command line: answers on one's own data, and one line on stderr for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store

GOOD_COST = '{"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9}'
TENSORS = 5  # of conftest's profile
HEADER = "network,device,batch,tensor,layer,parameters,gradient_bytes,forward_s,backward_s,flops\n"


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    sizes = np.repeat(np.geomspace(1024, 2**26, 17).round(), 5)
    seconds = (1e-3 + 8e-9 * sizes) * np.random.default_rng(0).lognormal(0, 0.02, sizes.size)
    path = tmp_path / "messages.csv"
    pd.DataFrame({"bytes": sizes.astype(int), "seconds": seconds}).to_csv(path, index=False)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_from_times_to_a_cost_to_a_prediction_to_a_plan(
    profile: Path, messages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    for form in ("alpha_beta", "piecewise", "segments", "table"):
        fitted = run(capsys, "fit", messages, "--form", form, "--json")
        cost.write_text(json.dumps(fitted))
        assert fitted["form"] == form
        assert fitted["fit"]["median_abs_held_out_error"] < 0.2
        inputs = ("--profile", profile, "--cost", cost, "--json")
        found = run(capsys, "predict", *inputs, "--plan", "single")
        # 15 MB in one message after 0.15 s of compute
        assert found["compute_s"] == pytest.approx(0.15)
        assert found["iteration_s"] == pytest.approx(0.15 + 1e-3 + 8e-9 * 15e6, rel=0.03)
        low, high = found["interval_95_s"]
        assert found["interval_s"] == [low, high] and found["level"] == 0.95
        assert low <= found["iteration_s"] <= high
        half = run(capsys, "predict", *inputs, "--plan", "single", "--level", 0.5)
        assert low < half["interval_s"][0] < half["interval_s"][1] < high
        assert half["level"] == 0.5 and "interval_95_s" not in half
        best = run(capsys, "plan", *inputs, "--planner", "exact")
        assert best["iteration_s"] <= found["iteration_s"]
        assert sorted(i for group in best["groups"] for i in group) == list(range(TENSORS))


TRACE = "Id Name Forward Backward Comm. Size\n0 data 9 0 0 0\n1 a 20 30 40 4000\n2 b 5 6 70 80\n"
COUNTS = "tensor,parameters,flops\na,10,1e9\nb,20,2e9\n"


def kineto_json() -> str:
    """One iteration as a profiler writes it: phases marked, one gradient of 10 float32."""
    size = {"Input Dims": [[10]], "Input type": ["float"]}
    rows: list[tuple[str, int, int, dict]] = [
        ("ddlkit.forward", 0, 10, {}),
        ("ddlkit.backward", 10, 30, {}),
        ("torch::autograd::AccumulateGrad", 20, 25, size),
        ("gloo:all_reduce", 26, 28, size),
        ("ddlkit.update", 30, 40, {}),
    ]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": a, "dur": b - a, "args": args}
        for name, a, b, args in rows
    ]
    return json.dumps({"traceEvents": events})


@pytest.mark.parametrize(
    ("text", "kind", "options", "times_s"),
    [
        (TRACE, "trace", [], (34e-6, 36e-6, 0)),
        (TRACE, "trace", ["--without-input"], (25e-6, 36e-6, 0)),
        (kineto_json(), "kineto", [], (10e-6, 15e-6, 10e-6)),
        (COUNTS, "flops", ["--peak", "1e12", "--utilisation", "0.5"], (0.024, 0.048, 0)),
    ],
)
def test_a_foreign_file_becomes_a_profile_that_predicts(
    text: str,
    kind: str,
    options: list[str],
    times_s: tuple[float, float, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.txt").write_text(text)
    out = tmp_path / "profile.csv"
    argv = ["import", tmp_path / "mine.txt", "--out", out, "--batch", 4, *options]
    found = run(capsys, *argv, "--json")
    assert (found["kind"], found["network"], found["batch"]) == (kind, "mine", 4)
    assert [found[f"{p}_s"] for p in ("forward", "backward", "update")] == pytest.approx(times_s)
    assert {finding["what"] for finding in found["findings"]}
    cost = tmp_path / "cost.json"
    cost.write_text(GOOD_COST)
    predicted = run(capsys, "predict", "--profile", out, "--cost", cost, "--json")
    assert predicted["compute_s"] == pytest.approx(sum(times_s))
    assert cli.main([str(word) for word in argv]) == 0
    assert f"kind                             {kind}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("hello\n", [], "is nothing that can be imported: say --kind"),
        (TRACE, ["--kind", "table"], "unknown kind 'table'"),
        (TRACE, ["--batch", "0"], "batch size is 0"),
        (COUNTS, [], "say --peak (FLOP/s) and --utilisation"),
        (
            COUNTS.replace("1e9", "-1"),
            ["--peak", "1", "--utilisation", "1"],
            "line 2, column flops",
        ),
        (f"{HEADER}n,cpu,1,t,l,10,40,1,1,1\n", [], "a layer profile already"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line(
    text: str,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.txt").write_text(text)
    out = tmp_path / "profile.csv"
    assert_one_line(
        ["import", str(tmp_path / "mine.txt"), "--out", str(out), *options], message, capsys
    )
    assert not out.exists()


def test_a_recorded_timeline_becomes_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "mine.csv", tmp_path / "trace.json"
    header = "case,repeat,task,kind,stream,rank,iteration,group,origin,start_s,end_s,bytes\n"
    rows = [
        f"{case},0,f,forward,s,0,0,-1,measured,-0.5,{end},0\n" for case, end in (("x", 1), ("y", 2))
    ]
    path.write_text(header + "".join(rows))
    argv = ["timeline", str(path), "--out", str(out)]
    assert_one_line(argv, "several values of case (x, y): choose one by case", capsys)
    assert_one_line([*argv, "--case", "z"], "no row with case z", capsys)
    assert cli.main([*argv, "--case", "y"]) == 0
    (span,) = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("f", 0, 2.5e6)


def test_machine_tells_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "machine", "--json")["cpu"]["cores"] >= 1


MISTAKES = {
    "wrong unit in a plan": (["predict", "--plan", "buffer:25Mb"], None, None, "use B, KB"),
    "unknown planner": (["plan", "--planner", "greedy"], None, None, "unknown planner 'greedy'"),
    "cost of zero slope and NaN": (
        ["predict"],
        None,
        '{"form": "alpha_beta", "alpha_s": NaN, "beta_s_per_byte": 0}',
        "must be a finite number",
    ),
    "binary profile": (["predict"], b"\x00\xff\x01\x02", None, "binary"),
    "NaN time": (["predict"], f"{HEADER}n,cpu,1,t,l,10,40,1,nan,1\n".encode(), None, "backward_s"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_and_where(
    mistake: str, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, profile_bytes, cost_text, message = MISTAKES[mistake]
    if profile_bytes is not None:
        profile.write_bytes(profile_bytes)
    cost = tmp_path / "cost.json"
    cost.write_text(cost_text or GOOD_COST)
    argv = [command[0], "--profile", str(profile), "--cost", str(cost), *command[1:]]
    assert_one_line(argv, message, capsys)


def assert_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("ddlkit: error: ")
    assert message in printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fit", "absent.csv"], "absent.csv"),
        (["lab", "up", "--rate", "1GB"], "use bit, kbit, mbit or gbit"),
        (["lab", "down", "--label", "nosuchlab"], "nosuchlab"),
        (["measure", "nosuch"], "no such suite: use cpu, full, gpu, quick, smoke, or a file "),
        (["measure", "sharing"], "sharing on processors was recorded at v0.2-studies"),
        (["measure", "nosuch.json"], "cannot read"),
        (["measure", "gpu", "--dry-run"], "no GPU here"),
        (["measure", "layers", "--budget", "8x"], "time '8x' has unit 'x'"),
    ],
)
def test_other_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line(argv, message, capsys)


@pytest.mark.parametrize("words", cli.GONE)
def test_what_is_gone_is_one_line_that_says_what_to_do_instead(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *option = words.split()
    argv = [command, "--file", *(f"{word}=1" for word in option)]
    assert_one_line(argv, f"{words} is gone: {cli.GONE[words]}", capsys)


@pytest.mark.fault(
    fault="nobody reads what is printed",
    injected="the reading end of standard output is closed",
    holds="no traceback",
)
def test_an_unknown_option_and_a_closed_pipe_end_without_a_traceback(profile: Path) -> None:
    ddlkit = [sys.executable, "-m", "ddlkit"]
    wrong = subprocess.run([*ddlkit, "predict", "--plans", "x"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    piped = subprocess.Popen([*ddlkit, "machine"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert piped.stdout is not None and piped.stderr is not None
    piped.stdout.close()
    piped.wait()
    assert b"Traceback" not in piped.stderr.read()
    piped.stderr.close()


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A cost of four workers: 100 MB/s, and no start-up."""
    path = tmp_path / "cost.json"
    line = {"form": "alpha_beta", "alpha_s": 0.0, "beta_s_per_byte": 1e-8, "workers": 4}
    path.write_text(json.dumps(line))
    return path


def test_what_if_refuses_what_its_graph_leaves_out(
    profile: Path, four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would answer as if that had not been said."""
    for option, value in (("--accumulate", "2"), ("--in-flight", "2")):
        argv = ["what-if", "--profile", str(profile), "--cost", str(four), option, value]
        assert_one_line(argv, f"{option}: the graph has no task", capsys)


def inputs_table(folder: Path, batch: int) -> Path:
    """What a batch takes: 0.2 s to read, 0.3 s to decode."""
    parts = {"cold files": ("read", 0.2), "one core": ("decode", 0.3), "cached": ("read", 0.9)}
    common = {"device": "cpu", "stored": "jpeg", "batch": 1, "bytes": 9, "ranks": 1}
    rows = [
        {"quantity": quantity, "how": how, "sample": 0, "seconds": seconds / batch, **common}
        for how, (quantity, seconds) in parts.items()
    ]
    frame = pd.DataFrame(rows).assign(from_disk=1.0)
    return store.save_table(frame, folder, "inputs-toy", schema="inputs", command=[])


def test_what_if_says_what_limits_before_and_after(
    profile: Path, four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages of half the time, and rank 3 a fifth slower; then input of four times as long."""
    files = ["--profile", profile, "--cost", four, "--plan", "single", "--json"]
    changes = ["--scale", "allreduce=0.5", "--straggler", "3:1.2"]
    sent_s, compute_s = 15e6 * 1e-8, TENSORS * 0.03
    told = run(capsys, "what-if", *files, *changes)
    assert told["tasks"] == 10 * (4 * (1 + 1 + 2 * TENSORS) + 1 + 1)
    assert told["iteration_s"] == pytest.approx(compute_s + sent_s)
    assert told["iteration_s_after"] == pytest.approx(1.2 * compute_s + 0.5 * sent_s)
    assert sum(told["shares_of_critical_path_after"].values()) == pytest.approx(1)
    share = 0.5 * sent_s / told["iteration_s_after"]
    assert told["shares_of_critical_path_after"]["link"] == pytest.approx(share)
    assert told["speedup"] == pytest.approx(told["iteration_s"] / told["iteration_s_after"])
    predicted = run(capsys, "predict", *files)
    assert told["iteration_s"] == pytest.approx(predicted["iteration_s"])
    files += ["--inputs", inputs_table(tmp_path, int(pd.read_csv(profile)["batch"].iloc[0]))]
    slow = run(capsys, "what-if", *files, "--scale", "disk=4")
    assert slow["iteration_s_after"] == pytest.approx(4 * 0.2)  # now the disks limit
    assert slow["limited_by_after"] == "disk" and "disk" not in slow["shares_of_critical_path"]


def test_what_if_of_more_gpus_is_the_cost_carried_there(
    profile: Path, four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight ranks of a ring: 7/8 against 3/4 of the bytes; and twice as many samples an iteration."""
    described = {**json.loads(four.read_text()), "algorithm": "ring"}
    four.write_text(json.dumps(described))
    files = ["--profile", profile, "--cost", four, "--plan", "single", "--json"]
    found = run(capsys, "what-if", *files, "--gpus", "8", "--straggler", "7:1.0")
    sent_s, compute_s = 15e6 * 1e-8, TENSORS * 0.03
    assert (found["gpus"], found["gpus_after"]) == (4, 8)
    assert found["iteration_s"] == pytest.approx(compute_s + sent_s)
    assert found["iteration_s_after"] == pytest.approx(compute_s + sent_s * (7 / 8) / (3 / 4))
    grown = found["samples_per_s_after"] / found["samples_per_s"]
    assert grown == pytest.approx(2 * found["speedup"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "conv9=0.5"], "no layer or tensor 'conv9': use one of the profile's, as"),
        (["--gpus", "8"], "an alpha_beta cost can be carried to another number of workers only if"),
        (["--gpus", "0"], "--gpus 0: there must be at least one"),
        (["--straggler", "4:1.2"], "use layer:NUMBER to 5, rank:NUMBER to 3"),
        (["--scale", "all_reduce=fast"], "'all_reduce=fast': write all_reduce=0.5"),
        (["--strategy", "torch"], "no strategy of 'torch' is known: use one of Caffe-MPI, CNTK"),
        (["--gpus-per-machine", "3"], "4 GPUs do not fill machines of 3"),
    ],
)
def test_a_wrong_change_is_one_line(
    arguments: list[str],
    message: str,
    profile: Path,
    four: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["what-if", "--profile", str(profile), "--cost", str(four), *arguments]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("ddlkit: error: ") and message in line]
