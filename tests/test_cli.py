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
        assert low <= found["iteration_s"] <= high
        best = run(capsys, "plan", *inputs, "--planner", "exact")
        assert best["iteration_s"] <= found["iteration_s"]
        assert sorted(i for group in best["groups"] for i in group) == list(range(TENSORS))


def test_a_cost_written_by_hand_needs_no_fit(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9}')
    found = run(capsys, "predict", "--profile", profile, "--cost", cost, "--json")
    assert found["interval_95_s"] is None
    assert 0 < found["scaling_factor"] < 1
    assert cli.main(["plan", "--profile", str(profile), "--cost", str(cost)]) == 0
    assert "t4" in capsys.readouterr().out


# -- import and timeline -----------------------------------------------------------------------

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
    ("text", "kind", "options", "times_s", "messages"),
    [
        (TRACE, "trace", [], (34e-6, 36e-6, 0), 2),
        (TRACE, "trace", ["--without-input"], (25e-6, 36e-6, 0), 2),
        (kineto_json(), "kineto", [], (10e-6, 15e-6, 10e-6), 1),
        (COUNTS, "flops", ["--peak", "1e12", "--utilisation", "0.5"], (0.024, 0.048, 0), 0),
    ],
)
def test_a_foreign_file_becomes_a_profile_that_predicts(
    text: str,
    kind: str,
    options: list[str],
    times_s: tuple[float, float, float],
    messages: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.txt").write_text(text)
    out, sent = tmp_path / "profile.csv", tmp_path / "messages.csv"
    argv = ["import", tmp_path / "mine.txt", "--out", out, "--batch", 4, *options]
    argv += ["--messages", sent] if messages else []
    found = run(capsys, *argv, "--json")
    assert (found["kind"], found["network"], found["batch"]) == (kind, "mine", 4)
    assert [found[f"{p}_s"] for p in ("forward", "backward", "update")] == pytest.approx(times_s)
    assert found["messages"] == messages
    assert {finding["what"] for finding in found["findings"]}
    assert messages == 0 or len(sent.read_text().splitlines()) == messages + 1
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
        (TRACE.replace("4000", "0").replace("80", "0"), [], "mine.txt: trace: no layer has a grad"),
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


def test_an_import_does_not_write_over_a_recorded_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text(TRACE)
    (tmp_path / "taken.json").write_text('{"schema": "layers", "sha256": ""}')
    argv = ["import", str(tmp_path / "mine.txt"), "--out"]
    assert cli.main([*argv, str(tmp_path / "taken.csv")]) == 2
    assert not (tmp_path / "taken.csv").exists()
    assert_one_line([*argv, str(tmp_path / "profile.txt")], "is CSV", capsys)


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
    "unknown network": (["predict", "--network", "resnet51"], None, None, "resnet51"),
    "unknown cost form": (["predict"], None, '{"form": "cubic"}', "unknown cost form 'cubic'"),
    "cost that is not JSON": (["predict"], None, "{", "is not JSON"),
    "cost of zero slope and NaN": (
        ["predict"],
        None,
        '{"form": "alpha_beta", "alpha_s": NaN, "beta_s_per_byte": 0}',
        "must be a finite number",
    ),
    "binary profile": (["predict"], b"\x00\xff\x01\x02", None, "binary"),
    "truncated profile": (["predict"], f"{HEADER}n,cpu,1,t,l,10,40\n".encode(), None, "line 2"),
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


# ---------------------------------------------------------------- what-if


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A cost of four workers: 100 MB/s, and no start-up."""
    path = tmp_path / "cost.json"
    line = {"form": "alpha_beta", "alpha_s": 0.0, "beta_s_per_byte": 1e-8, "workers": 4}
    path.write_text(json.dumps(line))
    return path


@pytest.mark.parametrize(
    "option", [("--accumulate", 2), ("--copy-s-per-byte", 1e-9), ("--in-flight", 2)]
)
def test_what_if_refuses_what_its_graph_leaves_out(
    option: tuple[str, float], profile: Path, four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would answer as if that had not been said."""
    argv = ["what-if", "--profile", str(profile), "--cost", str(four), *map(str, option)]
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"ddlkit: error: {option[0]}: the graph has no task")


def test_what_if_says_what_limits_before_and_after(
    profile: Path, four: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages of half the time, and rank 3 a fifth slower."""
    files = ["--profile", profile, "--cost", four, "--plan", "single", "--json"]
    changes = ["--scale", "allreduce=0.5", "--straggler", "3:1.2"]
    found = run(capsys, "what-if", *files, *changes, "--io-s", "0.28")
    sent_s, compute_s = 15e6 * 1e-8, TENSORS * 0.03
    assert found["tasks"] == 10 * (4 * (1 + 1 + 2 * TENSORS) + 1 + 1)
    assert found["iteration_s"] == pytest.approx(compute_s + sent_s)
    assert found["iteration_s_after"] == pytest.approx(0.28)  # now the disks limit
    assert found["limited_by_after"] == "disk" and "disk" not in found["shares_of_critical_path"]
    told = run(capsys, "what-if", *files, *changes)
    assert told["iteration_s_after"] == pytest.approx(1.2 * compute_s + 0.5 * sent_s)
    assert sum(told["shares_of_critical_path_after"].values()) == pytest.approx(1)
    assert {"forward on gpu 3", "backward on gpu 3"} <= told["critical_path_s_after"].keys()
    assert told["critical_path_s_after"]["all_reduce on link"] == pytest.approx(0.5 * sent_s)
    share = 0.5 * sent_s / told["iteration_s_after"]
    assert told["shares_of_critical_path_after"]["link"] == pytest.approx(share)
    assert told["speedup"] == pytest.approx(told["iteration_s"] / told["iteration_s_after"])
    predicted = run(capsys, "predict", *files)
    assert told["iteration_s"] == pytest.approx(predicted["iteration_s"])


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


def test_what_if_takes_its_input_from_what_was_measured(
    profile: Path, four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seconds of a picture times the profile's batch; what is said by hand counts."""
    batch = int(pd.read_csv(profile)["batch"].iloc[0])
    parts = {
        "cold files": ("read", 0.2),
        "one core": ("decode", 0.3),
        "cached files": ("read", 0.9),
    }
    common = {
        "device": "cpu",
        "stored": "jpeg",
        "batch": 1,
        "bytes": 9,
        "ranks": 1,
        "from_disk": 1.0,
    }
    rows = [
        {"quantity": quantity, "how": how, "sample": 0, "seconds": seconds / batch, **common}
        for how, (quantity, seconds) in parts.items()
    ]
    store.save_table(pd.DataFrame(rows), tmp_path, "inputs-toy", schema="inputs", command=[])
    files = ["--profile", profile, "--cost", four, "--plan", "single", "--json"]
    files += ["--strategy", "cntk", "--inputs", tmp_path / "inputs-toy.csv"]
    found = run(capsys, "what-if", *files, "--scale", "decode=0")
    assert found["iteration_s"] == pytest.approx(TENSORS * 0.03 + 15e6 * 1e-8)
    slow = run(capsys, "what-if", *files, "--gpus-per-machine", "4")
    assert slow["iteration_s"] == pytest.approx(4 * 0.3) and slow["limited_by"] == "cpu"
    said = run(capsys, "what-if", *files, "--gpus-per-machine", "4", "--decode-s", "0.1")
    assert said["iteration_s"] == pytest.approx(4 * 0.2) and said["limited_by"] == "disk"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "conv9=0.5"], "no layer or tensor 'conv9': use one of the profile's, as"),
        (["--gpus", "8"], "an alpha_beta cost can be carried to another number of workers only if"),
        (["--gpus", "0"], "--gpus 0: there must be at least one"),
        (["--inputs", "no.csv"], "no.csv"),
        (
            ["--straggler", "4:1.2"],
            "no task or resource 'rank:4': use layer:NUMBER to 5, rank:NUMBER to 3",
        ),
        (["--scale", "all_reduce=fast"], "'all_reduce=fast': write all_reduce=0.5"),
        (["--scale", "disc=0.5"], "no task or resource 'disc'"),
        (["--strategy", "torch"], "no strategy of 'torch' is known: use one of Caffe-MPI, CNTK"),
        (["--gpus-per-machine", "3"], "4 GPUs do not fill machines of 3"),
        (["--io-s", "-1"], "task T0 (io on rank 0) has a duration of -1 s"),
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


# ---------------------------------------------------------------- what earlier versions had


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        (["bench"], "python -m timeit"),
        (["measure", "collectives", "--algorithm", "ring"], "notebook 11"),
        (["measure", "collectives", "--algorithm=ring"], "notebook 11"),
        (["lab", "campaign", "mine.yml"], "write ddlkit measure FILE.yml"),
        (["lab", "up", "--change", "5s:rate=1mbit"], "make a lab of each kind"),
    ],
)
def test_what_is_gone_is_one_line_that_says_what_to_do_instead(
    argv: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(argv, advice, capsys)
