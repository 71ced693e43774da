"""What strangers tried on the commands: each is answered, or refused in one line that says what to do."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddlkit import cli, store
from ddlkit.core.errors import UserError
from ddlkit.formats import plans
from ddlkit.store.tables import is_stamped
from places import PATIENCE_S

LEAST = {"alpha_beta": 3, "piecewise": 5, "segments": 3, "table": 2}
COST = {"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9}
SIZES = tuple(1024 * 4**k for k in range(8))
TENSORS = 5


def write_times(path: Path, sizes: tuple[int, ...] = SIZES, **columns: str) -> Path:
    """Times on a line, with columns that say the same in each row."""
    header, *said = (
        ",".join(words) for words in (["bytes", "seconds", *columns], columns.values())
    )
    rows = [",".join([f"{size},{1e-3 + 8e-9 * size}", *filter(None, said)]) for size in sizes]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def write_profile(path: Path, device: str = "cpu") -> Path:
    rows = [f"{device},t{k},{1_000_000 * (k + 1)},0.01,0.02" for k in range(TENSORS)]
    header = "device,tensor,gradient_bytes,forward_s,backward_s"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def write_cost(path: Path, **more: object) -> Path:
    path.write_text(json.dumps({**COST, **more}))
    return path


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit status, output and standard error of a command."""
    capsys.readouterr()
    status = cli.main([str(word) for word in words])
    return status, *capsys.readouterr()


# -- fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "least"), LEAST.items())
def test_as_many_sizes_as_a_form_needs_are_enough_and_one_less_is_not(
    form: str, least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = write_times(tmp_path / "times.csv", SIZES[:least])
    status, out, _ = asked(capsys, "fit", times, "--form", form, "--json")
    assert status == 0
    assert json.loads(out)["fit"]["median_abs_held_out_error"] is None
    assert "held_out_error        not known" in asked(capsys, "fit", times, "--form", form)[1]
    times = write_times(tmp_path / "fewer.csv", SIZES[: least - 1])
    status, _, said = asked(capsys, "fit", times, "--form", form)
    assert status == 2 and f"got {least - 1}" in said


def test_the_cost_may_be_written_beside_the_times_under_their_name(tmp_path: Path) -> None:
    """The shell makes the file before the command begins; a failed command leaves it empty."""
    times, cost = write_times(tmp_path / "x.csv"), tmp_path / "x.json"
    argv = [sys.executable, "-m", "ddlkit", "fit", str(times), "--json"]
    for _ in range(2):
        with cost.open("w") as file:
            done = subprocess.run(argv, stdout=file, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(cost.read_text())["form"] == "alpha_beta"


def test_an_empty_file_is_no_stamp_but_half_of_one_is_damaged(tmp_path: Path) -> None:
    times = write_times(tmp_path / "x.csv")
    (tmp_path / "x.json").touch()
    assert not is_stamped(times)
    (tmp_path / "x.json").write_text('{"sha256": ')
    with pytest.raises(UserError, match="damaged stamp"):
        is_stamped(times)


@pytest.mark.parametrize(
    ("header", "advice"),
    [
        ("bytes,busbw(GB/s)", "column busbw(GB/s): a rate, not a time: add the column seconds"),
        ("size,seconds,algbw_GBps", "column bytes: missing"),
        ("size,seconds,bus bandwidth [GB]", "column bytes: missing"),
        (
            "bytes,time(us),busbw(GB/s)",
            "column time(us): in us, expected seconds: divide by 100000",
        ),
        (
            "size_mb,seconds,busbw(GB/s)",
            "column size_mb: in mb, expected bytes: multiply by 100000",
        ),
        ("bytes,gb_per_s", "column gb_per_s: a rate, not a time"),
    ],
)
def test_a_rate_is_taken_neither_for_a_size_nor_for_a_time(
    header: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.csv"
    cells = ",".join("1" * len(header.split(",")))
    times.write_text(f"{header}\n{cells}\n")
    status, out, said = asked(capsys, "fit", times)
    assert (status, out, said.count("\n")) == (2, "", 1)
    assert advice in said and "1000000000" not in said


def test_a_fit_of_many_numbers_is_still_a_page_of_short_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = write_times(tmp_path / "times.csv", tuple(range(1000, 65000, 1000)))
    _, out, _ = asked(capsys, "fit", times, "--form", "table")
    assert max(map(len, out.splitlines())) < 100
    assert re.search(r"seconds +64 from \S+ to \S+ \(--json: all\)", out)
    _, out, _ = asked(capsys, "fit", times)
    assert re.search(r"standard_errors +alpha_s \S+, beta_s_per_byte \S+\n", out)
    document = json.loads(asked(capsys, "fit", times, "--form", "table", "--json")[1])
    assert len(document["seconds"]) == 64
    assert document["fit"]["standard_errors"] == {}  # a row a size: nothing was repeated


@pytest.mark.parametrize("measuring", [False, True])
def test_only_what_measured_says_that_something_is_kept(
    measuring: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ddlkit.core import fit
    from ddlkit.run.sessions import engine

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "fit", interrupted)
    monkeypatch.setattr(engine, "measure", interrupted)
    argv = ("measure", "quick") if measuring else ("fit", write_times(tmp_path / "times.csv"))
    kept = "; what was measured is kept" if measuring else ""
    assert asked(capsys, *argv) == (130, "", f"ddlkit: interrupted{kept}\n")


FALLS_WHERE_IT_IS_DROPPED = """
import contextlib, signal, sys, time
from ddlkit import cli
from ddlkit.core import fit

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def long(*_, **__):
    if sys.argv[2] == "finaliser":
        Last()
    else:
        with contextlib.suppress(KeyboardInterrupt):  # as an extension does that asks for an attribute
            signal.raise_signal(signal.SIGTERM)
    try:
        time.sleep(200)
    finally:
        time.sleep(1.5)  # cleaning up takes longer than an interrupt takes to come again
        print("cleaned up")

fit.fit = long
sys.exit(cli.main(["fit", sys.argv[1]]))
"""


@pytest.mark.parametrize("where", ["finaliser", "extension"])
def test_an_interrupt_that_is_dropped_comes_again_and_lets_clean_up(
    where: str, tmp_path: Path
) -> None:
    times = write_times(tmp_path / "times.csv")
    argv = [sys.executable, "-c", FALLS_WHERE_IT_IS_DROPPED, str(times), where]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")
    assert done.stderr.endswith("ddlkit: interrupted\n")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_tells_what_is_done_where_nothing_is_said(name: str) -> None:
    for names, options in cli.COMMANDS[name].arguments:
        default = options.get("default")
        if default not in (None, "", []):
            shown = f"{default:g}" if isinstance(default, (int, float)) else default
            assert f"[{shown}]" in options["help"], f"{name} {names[0]}: {options['help']}"


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["25", "1023", "1.5", "25:5ms"])
def test_a_buffer_of_a_few_bytes_is_refused(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ("--profile", write_profile(tmp_path / "p.csv"), "--cost", write_cost(tmp_path / "c"))
    for command in (("predict", "--plan"), ("plan", "--planner")):
        status, out, said = asked(capsys, *command, f"buffer:{size}", *inputs)
        assert (status, out) == (2, "")
        number, _, timeout = size.partition(":")
        assert f"write buffer:{number}MB{timeout and ':' + timeout}, or" in said
    for meant in (f"{number}B", "1024", "25MB"):
        assert asked(capsys, "predict", "--plan", f"buffer:{meant}", *inputs)[0] == 0


@pytest.mark.parametrize("planner", ["exact", "none", "single", "cuts:3", "ddp"])
def test_a_plan_that_was_printed_is_predicted_as_it_was_planned(
    planner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, cost = write_profile(tmp_path / "p.csv"), write_cost(tmp_path / "cost.json")
    inputs = ("--profile", profile, "--cost", cost, "--json")
    _, out, _ = asked(capsys, "plan", *inputs, "--planner", planner)
    kept = tmp_path / "plan.json"
    kept.write_text(out)
    planned = json.loads(out)
    predicted = json.loads(asked(capsys, "predict", *inputs, "--plan", kept)[1])
    assert predicted["iteration_s"] == planned["iteration_s"]
    assert predicted["messages"] == len(planned["groups"])
    assert plans.read_plan(kept).forward_groups() == planned["groups"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("{", "is not JSON"),
        ("[]", "not a plan: it has no groups"),
        ('{"groups": []}', "not a plan"),
        ('{"groups": [[1], []]}', "not a plan"),
        ('{"groups": [[0], [1]]}', "group 0 is [0], expected [1]"),
        ('{"groups": [[2, 0], [1]]}', "expected [2, 1]"),
        ('{"groups": [[1], [1]]}', "every tensor once"),
        ('{"groups": [["a"]]}', "group 0 is ['a']"),
        ('{"groups": [[1, 0]]}', "is of 2 tensors, the workload has 5"),
    ],
)
def test_another_file_is_no_plan(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ("--profile", write_profile(tmp_path / "p.csv"), "--cost", write_cost(tmp_path / "c"))
    (tmp_path / "plan.json").write_text(text)
    status, out, said = asked(capsys, "predict", *inputs, "--plan", tmp_path / "plan.json")
    assert (status, out) == (2, "") and message in said
    assert said.startswith("ddlkit: error: ")


# -- what does not fit together ----------------------------------------------------------------


def test_messages_outside_the_measured_sizes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a cost of fit, from a table by hand and from the times themselves; not when all are inside."""
    profile = write_profile(tmp_path / "p.csv")
    times = write_times(tmp_path / "times.csv", tuple(range(1_500_000, 4_500_001, 500_000)))
    fitted, table = tmp_path / "cost.json", tmp_path / "table.json"
    fitted.write_text(asked(capsys, "fit", times, "--json")[1])
    table.write_text('{"form": "table", "bytes": [1.5e6, 4.5e6], "seconds": [0.013, 0.037]}')
    for given in (("--cost", fitted), ("--cost", table), ("--collectives", times, "--ranks", 4)):
        words = ("predict", "--profile", profile, *given, "--json", "--plan")
        _, out, said = asked(capsys, *words, "none")
        (line,) = json.loads(out)["warnings"]
        assert "2 of 5 messages (976.6 KiB to 4.768 MiB) are outside" in line
        assert f"ddlkit: warning: {line}\n" in said
        # Two messages of 9 and 6 MB; then none outside.
        _, out, _ = asked(capsys, *words, "cuts:2")
        assert "2 of 2 messages" in json.loads(out)["warnings"][0]
    inside = write_times(tmp_path / "inside.csv")
    words = ("predict", "--profile", profile, "--collectives", inside, "--ranks", 4, "--json")
    _, out, said = asked(capsys, *words, "--plan", "none")
    assert json.loads(out)["warnings"] == [] and "warning" not in said


def test_a_cost_of_another_collective_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = write_profile(tmp_path / "p.csv")
    for collective, told in (("all_gather", 1), ("all_reduce", 0)):
        times = write_times(tmp_path / "times.csv", collective=collective)
        cost = tmp_path / "cost.json"
        cost.write_text(asked(capsys, "fit", times, "--json")[1])
        _, out, said = asked(capsys, "predict", "--profile", profile, "--cost", cost)
        assert said.count(f"warning: the cost is of {collective}") == told
        assert "iteration_s" in out and "warning" not in out


@pytest.mark.parametrize("device", ["cpu", "NVIDIA A100-SXM4-40GB", "unknown"])
@pytest.mark.parametrize("backend", ["gloo", "nccl", ""])
def test_a_profile_of_one_device_with_messages_of_another_is_told(
    device: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = write_profile(tmp_path / "p.csv", device)
    known = {"backend": backend} if backend else {}
    times = write_times(tmp_path / "times.csv", (1024, *SIZES[1:], 10**8), **known)
    cost = tmp_path / "cost.json"
    cost.write_text(asked(capsys, "fit", times, "--json")[1])
    alike = {("cpu", "gloo"), ("NVIDIA A100-SXM4-40GB", "nccl")}
    wanted = device != "unknown" and bool(backend) and (device, backend) not in alike
    for given in (("--cost", cost), ("--collectives", times, "--ranks", 4)):
        _, out, _ = asked(capsys, "plan", "--profile", profile, *given, "--json")
        lines = json.loads(out)["warnings"]
        assert len(lines) == wanted
        assert not wanted or f"({device}), the messages were timed between" in lines[0]


@pytest.mark.parametrize(
    ("device", "told"),
    [
        *(("NVIDIA H100 80GB HBM3", True), ("Tesla T4", True), ("GeForce RTX 3090", True)),
        *(("NVIDIA A100-SXM4-40GB", False), ("a100", False), ("unknown", False)),
    ],
)
def test_a_log_of_other_gpus_than_the_profile_s_is_told(
    device: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log was taken between A100s; by its cost and by itself."""
    profile, log, cost = (
        write_profile(tmp_path / "p.csv", device),
        tmp_path / "a.log",
        tmp_path / "c",
    )
    log.write_text("".join(the_log()))
    cost.write_text(asked(capsys, "fit", log, "--form", "table", "--json")[1])
    for given in (("--cost", cost), ("--collectives", log)):
        words = ("predict", "--profile", profile, *given, "--plan", "none", "--json")
        lines = json.loads(asked(capsys, *words)[1])["warnings"]
        assert len(lines) == told
        assert (
            not told or f"profile is of {device}, the messages were timed between A100" in lines[0]
        )


def test_of_a_log_both_times_of_a_size_are_taken_or_those_of_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(the_log()))
    fitted = {}
    for place in ("", "in_place", "out_of_place"):
        words = ("--place", place) if place else ()
        _, out, _ = asked(capsys, "fit", log, "--form", "table", *words, "--json")
        fitted[place] = json.loads(out)
    assert [one["fit"]["rows"] for one in fitted.values()] == [48, 24, 24]
    both, inside, outside = (one["seconds"] for one in fitted.values())
    assert inside != outside
    for middle, one, other in zip(both, inside, outside, strict=True):
        assert middle == pytest.approx((one + other) / 2)
    times = write_times(tmp_path / "times.csv")
    assert "no times 'in_place'" in refused(capsys, "fit", times, "--place", "in_place")


def test_what_is_given_in_place_of_a_cost_a_plan_or_ranks_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log for a cost, a page of plan for its JSON, and a form that needs ranks which nobody said."""
    profile, cost = write_profile(tmp_path / "p.csv"), write_cost(tmp_path / "c.json")
    log, page = tmp_path / "a.log", tmp_path / "plan.txt"
    log.write_text("".join(the_log()))
    said = refused(capsys, "predict", "--profile", profile, "--cost", log)
    assert "ddlkit fit FILE --json" in said and "--collectives" in said
    page.write_text(asked(capsys, "plan", "--profile", profile, "--cost", cost)[1])
    said = refused(capsys, "predict", "--profile", profile, "--cost", cost, "--plan", page)
    assert "write it by ddlkit plan --json" in said
    page.write_text(asked(capsys, "plan", "--profile", profile, "--cost", cost, "--json")[1])
    words = ("predict", "--profile", profile, "--cost", cost, "--plan", page)
    assert asked(capsys, *words)[0] == 0
    times = write_times(tmp_path / "times.csv")
    said = refused(capsys, "fit", times, "--form", "stepped")
    assert "unknown workers" in said and "--ranks" in said


# -- ranks -------------------------------------------------------------------------------------


def test_ranks_mean_the_same_to_every_command_that_reads_messages() -> None:
    commands = ("fit", "predict", "plan")
    given = [
        one for name in commands for one in cli.COMMANDS[name].arguments if "--ranks" in one[0]
    ]
    assert len(given) == len(commands) and all(one == given[0] for one in given)


def test_ranks_choose_or_say_and_never_carry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the number comes from, the prediction is of that many, and no other is taken."""
    profile = write_profile(tmp_path / "p.csv")
    silent, told = (
        write_times(tmp_path / "silent.csv"),
        write_times(tmp_path / "told.csv", ranks="4"),
    )
    for times, at_fit, at_predict in (
        (silent, (), ("--ranks", 4)),
        (silent, ("--ranks", 4), ()),
        (told, (), ()),
        (told, ("--ranks", 4), ("--ranks", 4)),
    ):
        cost = tmp_path / "cost.json"
        cost.write_text(asked(capsys, "fit", times, *at_fit, "--json")[1])
        words = ("predict", "--profile", profile, "--json")
        found = json.loads(asked(capsys, *words, "--cost", cost, *at_predict)[1])
        again = json.loads(asked(capsys, *words, "--collectives", times, "--ranks", 4)[1])
        assert found["workers"] == again["workers"] == 4
    status, _, said = asked(capsys, *words, "--cost", cost, "--ranks", 8)
    assert status == 2 and "a cost of 4 workers, not 8: --ranks does not carry" in said
    for argv in (("fit", told), (*words, "--collectives", told)):
        status, _, said = asked(capsys, *argv, "--ranks", 8)
        assert status == 2 and "no row with ranks 8: it has 4" in said


# -- files that are not what they seem ---------------------------------------------------------

LOG = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))[0]
TRACE = "\n".join(
    [
        "Id\tName\tForward\tBackward\tComm.\tSize",
        *(
            f"{k}\tlayer{k}\t{100 + k}.5\t{200 + k}.25\t{300 + k}\t{4000 * (k % 3)}"
            for k in range(12)
        ),
    ]
)
KINETO = json.dumps(
    {
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": f"aten::op{k}", "ts": 10 * k, "dur": 5, "tid": 1}
            for k in range(20)
        ]
    }
)
FLOPS = "tensor,parameters,flops\n" + "".join(f"t{k},10,{k + 1}e9\n" for k in range(9))


TO_IMPORT = {
    "trace": (TRACE, "columns, expected 6|ends before"),
    "kineto": (KINETO, "JSON"),
    "flops": (FLOPS, "truncated file"),
}
"""What may be imported, and what is said of it when it is cut."""


def the_log() -> list[str]:
    return gzip.decompress(LOG.read_bytes()).decode().splitlines(keepends=True)


def row_of_the_log(size: int) -> int:
    """Where in the log the row of that size is."""
    (at,) = (k for k, line in enumerate(the_log()) if line.split()[:1] == [str(size)])
    return at


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line in which a command refuses."""
    status, out, said = asked(capsys, *words)
    assert (status, out, said.count("\n")) == (2, "", 1), said
    assert said.startswith("ddlkit: error: ")
    return said


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_a_log_cut_anywhere_is_refused(
    kept: float, part: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a row, or between two: what is left looks whole."""
    lines, begin = the_log(), row_of_the_log(4)
    number = begin + int(kept * 24)
    cut = tmp_path / "cut.log"
    cut.write_text("".join(lines[:number]) + lines[number][: int(part * len(lines[number]))])
    assert re.search(
        r"the log is cut: get the whole log|truncated after", refused(capsys, "fit", cut)
    )
    cut.write_text("".join(lines))
    assert asked(capsys, "fit", cut, "--form", "alpha_beta")[0] == 0


def test_two_logs_in_one_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one collective and as many ranks, also where the first is cut."""
    both, lines = tmp_path / "both.log", the_log()
    both.write_text("".join(lines + lines))
    assert "two logs in one file? give each its own" in refused(capsys, "fit", both)
    both.write_text("".join(lines[: row_of_the_log(1024)] + lines))
    assert "a table begins in another: two logs" in refused(capsys, "fit", both)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("(us)", "(ms)"), "not in (B), (us) and (GB/s)"),
        (lambda text: text.replace("(GB/s)", "(MB/s)"), "not in (B), (us) and (GB/s)"),
        (
            lambda text: text.replace("  1887.3 ", "  1.8873 "),
            "out_of_place_algbw: contradicts size",
        ),
        (lambda text: text.replace("  1885.6 ", "  1885600 "), "in_place_algbw: contradicts size"),
    ],
)
def test_a_log_in_mixed_units_is_refused(
    change: Callable[[str], str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.log"
    mixed.write_text(change("".join(the_log())))
    assert mixed.read_text() != "".join(the_log())
    assert said in refused(capsys, "fit", mixed)


def test_own_times_cut_doubled_or_in_mixed_units_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = write_times(tmp_path / "times.csv")
    whole = times.read_text()
    for text, said in (
        (whole.rstrip().rpartition(",")[0], "truncated file or stray comma"),
        (whole + whole, "column bytes: 'bytes' is not a whole number"),
        (whole.replace("bytes,seconds", "bytes,seconds [ms]"), "in ms, expected seconds"),
        (whole + "16777216,13500\n", "13500 s is"),
    ):
        times.write_text(text)
        assert said in refused(capsys, "fit", times)


@pytest.mark.parametrize(("content", "why"), TO_IMPORT.values(), ids=TO_IMPORT)
@pytest.mark.parametrize("kept", [0.4, 0.7, 0.95])
def test_a_file_to_import_that_was_cut_is_refused(
    content: str, why: str, kept: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.txt"
    end = int(kept * len(content))
    while (
        content[end - 1] in "\n0123456789"
    ):  # in the middle of a word: no row that only looks whole
        end -= 1
    cut.write_text(content[:end])
    options = ("--peak", "1e12", "--utilisation", "0.5")
    assert re.search(why, refused(capsys, "import", cut, "--out", tmp_path / "p.csv", *options))
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize(("content", "why"), TO_IMPORT.values(), ids=TO_IMPORT)
def test_two_files_to_import_in_one_are_refused(
    content: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of traces, which may repeat their layers iteration by iteration, those of two networks."""
    both = tmp_path / "both.txt"
    both.write_text(content + "\n" + content.replace("layer7", "other"))
    options = ("--peak", "1e12", "--utilisation", "0.5")
    said = refused(capsys, "import", both, "--out", tmp_path / "p.csv", *options)
    assert re.search(f"{why}|but line|is not a", said)


@pytest.mark.parametrize(
    ("old", "new"),
    [("Forward", "Forward(ms)"), ("Backward", "backward_s"), ("\tSize", "\tSize(MB)")],
)
def test_a_trace_in_other_units_is_refused(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.txt"
    mixed.write_text(TRACE.replace(old, new))
    said = refused(capsys, "import", mixed, "--out", tmp_path / "p.csv")
    assert f"column {new.strip()!r}: give " in said
