"""What strangers tried on the commands: each is answered, or refused in one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddlkit import cli
from ddlkit.cli.command import COMMANDS
from places import PATIENCE_S

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


FALLS_WHERE_IT_IS_DROPPED = """
import contextlib, signal, sys, time
from ddlkit import cli
from ddlkit.cli.command import COMMANDS
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


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_what_is_done_where_nothing_is_said(name: str) -> None:
    for names, options in COMMANDS[name].arguments:
        default = options.get("default")
        if default not in (None, "", []):
            shown = f"{default:g}" if isinstance(default, (int, float)) else default
            assert f"[{shown}]" in options["help"], f"{name} {names[0]}: {options['help']}"


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


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        ("NVIDIA A100-SXM4-40GB", "gloo"),
        ("unknown", "nccl"),
    ],
)
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
