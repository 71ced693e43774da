"""Ranks that die, parents that die, signals, ports: one line for the user, and nothing left behind."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

import apart_job
import faulty_job
from ddlkit import jobs, store
from ddlkit.core.errors import UserError
from ddlkit.jobs import launch
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import Loopback, Place
from ddlkit.jobs.rank import Job, Rank, Tables
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.store import machine
from ddlkit.store.files import scratch
from forked import Forked, two_ranks
from places import (
    PATIENCE_S,
    ROOT,
    alive,
    family,
    listening,
    ranks_below,
    wait_for,
)

ENDLESS = CollectivesSettings(
    ["all_reduce"],
    [1024],
    Budget(max_repeats=10**7, max_s=600.0, relative_halfwidth=0.0),
)


def run_endless(
    out: Path | None,
    place: Place,
    *,
    join: dict[str, Any] | None = None,
    timeout_s: float = 900.0,
) -> None:
    launch.launch(
        collectives_job,
        ENDLESS,
        ranks=2,
        place=place,
        join=join,
        timeout_s=timeout_s,
        out=out,
    )


def python(*argv: str, **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **how.pop("environment", {})}
    command = [*how.pop("by", ()), sys.executable, *argv]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, **how
    )


@pytest.mark.parametrize("at_work", [False, True])
@pytest.mark.fault(
    fault="a rank is killed while it starts, or in the middle of a job",
    injected="SIGKILL to rank 1 of 2 at its first sign, and at work",
    holds="the other rank ends within seconds; one line names rank, signal and job; its "
    "last words are kept",
)
def test_a_rank_killed_in_the_middle_ends_the_job_with_one_line(
    at_work: bool, tmp_path: Path
) -> None:
    started: list[psutil.Process] = []  # in the order of their ranks

    def kill() -> None:
        assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
        assert not at_work or wait_for((tmp_path / "job.json").exists)
        started.extend(ranks_below(os.getpid()))
        started[1].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(UserError) as caught:
        run_endless(tmp_path, Loopback())
    killer.join()
    line = str(caught.value)
    assert line == (
        "rank 1 of 2 was killed by SIGKILL in job collectives; it printed nothing"
    )
    assert "\n" not in line
    assert len(started) == 2 and not alive(started)
    assert any((tmp_path / jobs.LOGS).rglob("*.log")), "what a failed job said is kept"


SCRIPT = """
import signal
from ddlkit.jobs.launch import Loopback
from test_launch import run_endless
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    run_endless(None, Loopback())
except KeyboardInterrupt:
    run_endless(None, Loopback())
"""


@contextmanager
def a_parent(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs SCRIPT, with its temporary files in ``directory``."""
    packages = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONPATH": packages}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, env=environment, cwd=directory) as parent:
        try:
            yield parent
        finally:
            parent.kill()


def joined(directory: Path) -> bool:
    return any(directory.glob("ddlkit-*/files/job.json"))


@pytest.mark.parametrize("moment", ["at once", "at work"])
@pytest.mark.fault(
    fault="the launcher is killed",
    injected="SIGKILL to the process that launches two ranks: while the server imports torch, and "
    "at work with one rank stopped",
    holds="every rank dies with it, within a second; the next launch sweeps its temporary directory",
)
def test_no_rank_outlives_a_parent_that_is_killed(moment: str, tmp_path: Path) -> None:
    with a_parent(tmp_path) as parent:
        if moment == "at once":
            assert wait_for(lambda: len(family(parent.pid)) >= 2)
        else:
            assert wait_for(lambda: joined(tmp_path))
            ranks_below(parent.pid)[1].suspend()
        children = family(parent.pid)
        parent.kill()
        assert wait_for(lambda: not alive(children), 1.0), "a rank outlived its parent"
    with scratch(tmp_path):
        assert len([*tmp_path.glob("ddlkit-work-*")]) == 1, (
            "the next launch sweeps what is nobody's"
        )


@pytest.mark.fault(
    fault="the launcher is interrupted or terminated",
    injected="SIGINT, then SIGTERM to the process that launched two ranks",
    holds="ranks and temporary directory are gone at once; after an interrupt it can launch again",
)
def test_no_rank_and_no_file_outlives_a_signal(tmp_path: Path) -> None:
    with a_parent(tmp_path) as parent:
        assert wait_for(lambda: joined(tmp_path))
        first = ranks_below(parent.pid)
        (directory,) = tmp_path.iterdir()
        parent.send_signal(signal.SIGINT)
        assert wait_for(lambda: not directory.exists() and not alive(first))
        assert wait_for(lambda: joined(tmp_path))
        children = family(parent.pid)
        assert len(first) == 2 and len(children) == 4, (
            "two ranks, and two of what forks them"
        )
        parent.terminate()
        assert parent.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert wait_for(lambda: not alive(children)), "a rank outlived its parent"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(
    fault="the port is taken",
    injected="someone else listens on the port where ranks shall meet",
    holds="one line names the port and says to choose another",
)
def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    told = "127.0.0.1 port {}: .*choose another port"
    with listening() as port, pytest.raises(UserError, match=told.format(port)):
        run_endless(tmp_path, Loopback(port))


def two_nodes(directory: Path, **config: object) -> tuple[list[int], list[str]]:
    """The exit statuses and the words of a job of two nodes of one rank each.

    One has the variables of torchrun, and one those of Slurm.
    """
    few = {"collectives": ["all_reduce"], "sizes": [1024], "budget": {"max_repeats": 9}}
    file = directory / "config.json"
    file.write_text(json.dumps({"out": str(directory / "out"), **few, **config}))

    return two_ranks(partial(be_rank_of, file), directory, ("torchrun", "srun"))


def be_rank_of(file: Path) -> int:
    """Be a rank that a launcher of ranks has started with a configuration."""
    sys.argv = ["launch", "collectives", str(file)]
    launch.be_rank()


def test_torchrun_and_slurm_start_the_same_worker_over_nodes(tmp_path: Path) -> None:
    statuses, said = two_nodes(tmp_path, link="cluster")
    assert statuses == [0, 0], said
    table = store.load_table(tmp_path / "out" / "collectives.csv", "collectives")
    assert set(table["ranks"]) == {2} and set(table["link"]) == {"cluster"}
    facts = json.loads((tmp_path / "out" / "job.json").read_text())
    assert facts["processor"] == machine.describe()["cpu"]["model"]


@pytest.mark.fault(
    fault="the ranks of a job run on different machines",
    injected="two ranks that see processors of different models",
    holds="each rank says in one line which fact differs, and nothing is measured",
)
def test_a_job_over_different_machines_is_refused(tmp_path: Path) -> None:
    statuses, said = two_nodes(tmp_path, imports=["other_machine"])
    assert statuses == 2 * [jobs.MISTAKE], said
    for text in said:
        assert (
            "the processor of rank 0 is Processor 0, that of rank 1 is Processor 1"
            in text.splitlines()[-1]
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(
    fault="a file lies where a directory is needed",
    injected="an output directory below a file",
    holds="one line names it",
)
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match="^cannot write .*file/out/rank-logs/.*: .*file is a file, not a directory",
    ):
        run_endless(tmp_path / "file" / "out", Loopback())


@pytest.mark.fault(
    fault="a job never ends",
    injected="ranks that repeat a collective ten million times, half a second allowed",
    holds="all ranks are ended, one line",
)
def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was not done after 0.5 s and was ended"):
        run_endless(tmp_path, Loopback(), timeout_s=0.5)
    assert not ranks_below(os.getpid())


@pytest.mark.parametrize("ended_early", [False, True])
@pytest.mark.parametrize("temporary", [False, True])
def test_a_table_is_kept_from_the_first_yield_on_unless_its_directory_goes_anyway(
    temporary: bool, ended_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each yield in a user's directory; in one that is removed with the job once, at its end."""
    saved = list[int]()  # rows of the table, each time that it is written
    save = store.save_table

    def counted(frame: pd.DataFrame, *where: Any, **how: Any) -> Path:
        saved.append(len(frame))
        return save(frame, *where, **how)

    def part(me: Rank, settings: Budget) -> Iterator[Tables]:
        for sample in range(3):
            row = {"copy": "a", "device": "cpu", "bytes": 1, "copies_per_sample": 1}
            yield {"copies": pd.DataFrame([{**row, "sample": sample, "seconds": 1.0}])}
            assert (tmp_path / "copies.csv").exists() != temporary
            if ended_early:
                raise KeyboardInterrupt

    monkeypatch.setattr(store, "save_table", counted)
    me = Rank(0, 1, 0, torch.device("cpu"), "gloo", 1, tmp_path)
    me = replace(me, temporary_out=temporary)
    with suppress(KeyboardInterrupt):
        Job(Budget, ("copies",), part).run(me, Budget())
    if temporary:
        assert saved == [3] * (not ended_early)
    else:
        assert saved == ([1] if ended_early else [1, 2, 3])
    there = [store.load_table(path) for path in tmp_path.glob("*.csv")]
    assert [*map(len, there)] == saved[-1:]


def test_ranks_are_told_whether_their_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[bool]()

    def see(processes: Any, *_: Any) -> None:
        config = json.loads((processes[0].log.parent / launch.CONFIG).read_text())
        told.append(config["temporary_out"])

    monkeypatch.setattr(launch, "_watch", see)
    for out in (None, tmp_path):
        run_endless(out, Loopback())
    assert told == [True, False]


BARE = """
from ddlkit.jobs.clock import Budget
from ddlkit.jobs import launch
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.store import machine
few = CollectivesSettings(["all_reduce"], [1024], Budget(max_repeats=5))
launch.launch(collectives_job, few, ranks=1, place=launch.Loopback(), join={"backend": "gloo"})
"""


def launch_apart(log: Path) -> None:
    """Launch a job in a network namespace of this process, and write down what is said."""
    new_network = 0x40000000
    assert ctypes.CDLL(None, use_errno=True).unshare(new_network) == 0, (
        ctypes.get_errno()
    )
    os.chdir(log.parent)
    # The fork server may remember the temporary directory of an earlier test, which is gone.
    tempfile.tempdir = str(log.parent)
    with pytest.raises(UserError) as caught:
        run_endless(None, Loopback())
    log.write_text(str(caught.value))


@pytest.mark.fault(
    fault="the machine does not reach itself",
    injected="a network namespace whose loopback is down",
    holds="one line before any rank starts, with the command that mends it",
)
def test_a_machine_without_loopback_is_one_line_before_any_rank_starts(
    require_lab: None, tmp_path: Path
) -> None:
    log = tmp_path / "said"
    process = Forked(launch_apart, log)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    said = log.read_text()
    assert said.startswith(
        "no rank is started: this machine does not reach itself at 127.0.0.1 ("
    )
    assert said.endswith("; as root: ip link set lo up")
    assert not [*tmp_path.rglob("rank*.log")]


@pytest.mark.fault(
    fault="a rank hangs",
    injected="rank 1 of 2 sleeps for ever before a collective",
    holds="the other gives up after its timeout, both are ended, one line",
)
def test_a_rank_that_hangs_ends_the_job_with_one_line() -> None:
    hanging = faulty_job.faulty_job, faulty_job.FaultySettings()
    with pytest.raises(
        UserError, match="^rank 1 of 2 does not answer in job faulty_job"
    ) as caught:
        launch.launch(*hanging, ranks=2, place=Loopback(), join={"timeout_s": 2.0})
    said = str(caught.value)
    assert (
        "rank 0 gave up; its last line: " in said and "Timed out waiting 2000ms" in said
    )
    assert "\n" not in said and not ranks_below(os.getpid())


def test_gradients_that_differ_between_ranks_are_not_timed() -> None:
    apart = apart_job.apart_job, faulty_job.FaultySettings()
    with pytest.raises(
        UserError, match="not finite and the same on all ranks: not timed"
    ):
        launch.launch(*apart, ranks=2, place=Loopback())


def test_a_rank_whose_parent_is_gone_does_not_start() -> None:
    code = "from ddlkit.jobs import die_with_parent as d; d(); print('lives')"
    for parent, output in ((os.getpid(), "lives\n"), (os.getpid() + 1, "")):
        assert (
            python("-c", code, environment={jobs.PARENT: str(parent)}).stdout == output
        )


def test_wrong_work_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    for job, text, complaint in (
        ("collectives", "", "Expecting value"),
        ("collectives", "{}", '"out"'),
        ("dance", '{"out": "o"}', "unknown job 'dance': name the module"),
        ("no_such.dance", '{"out": "o"}', "unknown job 'no_such.dance'"),
        ("collectives", '{"out": "o", "colour": "red"}', "job settings: .*'colour'"),
    ):
        path.write_text(text)
        assert launch.status_of([job, str(path)]) == jobs.MISTAKE
        said = capsys.readouterr().err
        assert re.search(complaint, said) and said.count("\n") == 1
    # As torchrun and Slurm start it.
    done = python("-m", "ddlkit.jobs.launch")
    assert done.returncode == jobs.MISTAKE
    assert (
        done.stderr
        == f"{jobs.ERROR}usage: python -m ddlkit.jobs.launch JOB CONFIG.json\n"
    )


def test_a_script_that_launches_is_not_run_again_by_its_ranks(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(f"print('once', flush=True){BARE}")
    done = python(str(script))
    assert (done.stdout, done.returncode) == ("once\n", 0), done.stderr
