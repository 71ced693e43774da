"""``ddlkit trace``: what each rank's trace holds, and what is refused."""

from __future__ import annotations

import gzip
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.formats.kineto import ACCUMULATE, KinetoTrace, iterations, parse_kineto
from ddlkit.jobs.rank import Rank
from ddlkit.measure.tracing import trace_iterations
from forked import two_ranks

MODELS = Path(__file__).with_name("given_models.py")
RANKS = 2
ITERATIONS = 9
WARMUP = 5
STEP = "ProfilerStep#"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[KinetoTrace]:
    """The traces of two ranks, in a directory that had those of three ranks before."""
    out = tmp_path_factory.mktemp("traces")
    for rank in range(3):
        (out / f"rank{rank}.json.gz").write_bytes(b"")
    words = ["trace", "--model", f"{MODELS}:batch_normalized", "--out", str(out)]
    words += ["--iterations", str(ITERATIONS), "--warmup", str(WARMUP)]
    assert cli.main(words) == 0
    names = [f"rank{rank}.json.gz" for rank in range(RANKS)]
    assert sorted(path.name for path in out.iterdir()) == names
    read = []
    for name in names:
        text = gzip.decompress((out / name).read_bytes()).decode()
        read.append(parse_kineto(text, name))
    return read


def test_each_rank_has_the_iterations_that_were_asked_for(
    traces: list[KinetoTrace],
) -> None:
    assert [trace.rank for trace in traces] == [*range(RANKS)]
    for trace in traces:
        numbers = [iteration.number for iteration in iterations(trace)]
        assert numbers == [*range(ITERATIONS)]
        steps = {event.name for event in trace.events if STEP in event.name}
        last = WARMUP + ITERATIONS
        assert steps == {f"{STEP}{number}" for number in range(WARMUP, last)}


def test_ddp_sends_all_gradients_and_the_buffers_in_each_iteration(
    traces: list[KinetoTrace],
) -> None:
    """Its default options send the buffers, and the buckets are already rebuilt."""
    for trace in traces:
        for iteration in iterations(trace):
            gradients = [
                event.bytes for event in iteration.events if event.name == ACCUMULATE
            ]
            messages: Counter[str] = Counter()
            for event in iteration.events:
                messages[event.collective] += event.bytes
            assert messages["all_reduce"] == sum(gradients) > 0
            posts = Counter(event.name for event in iteration.events)
            assert posts["c10d::broadcast_"] > 0
            assert posts["c10d::allreduce_"] > 0


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("parts_alone", "loss() does not call the model itself"),
        ("frozen_and_unused", "unused.weight"),
    ],
)
def test_training_that_ddp_could_not_do_is_refused_and_leaves_nothing(
    function: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "traces"
    words = ["trace", "--model", f"{MODELS}:{function}", "--out", str(out)]
    assert cli.main(words) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert named in last_line
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--iterations 7 --out new", "--iterations 7"),
        ("--warmup 3 --out new", "--warmup 3"),
        ("--ranks 1 --out new", "--ranks 1"),
        ("--out file", "file: is a file"),
        ("--out full", "notes.txt"),
        ("--out /proc/new", "/proc"),
        ("--model missing.py:net --out new", "missing.py"),
        ("--model {models}:missing --out new", "missing"),
        ("--model {models}:all_frozen --out new", "nothing is trained"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    words: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("full").mkdir()
    Path("full", "notes.txt").touch()
    model = [] if "--model" in words else ["--model", f"{MODELS}:batch_normalized"]
    given = words.format(models=MODELS).split()
    assert cli.main(["trace", *model, *given]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert not Path("new").exists()


def trace_into_a_file_on_rank_1(directory: Path) -> int:
    """Record an iteration on each of two ranks, of which rank 1 cannot make its directory."""
    me = Rank.join()
    where = directory / "traces"
    if me.rank == 1:
        where = directory / "file" / "traces"
    try:
        trace_iterations(lambda number: None, where, me, iterations=1, warmup=1)
    except (OSError, UserError) as error:
        print(error)
        return 2
    finally:
        me.leave()
    return 0


def test_no_rank_waits_for_one_that_cannot_make_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    main = partial(trace_into_a_file_on_rank_1, tmp_path)
    statuses, said = two_ranks(main, tmp_path, on_one_node=True)
    assert statuses == [2, 2]
    assert "another rank could not write its trace" in said[0]
    assert "file" in said[1]
    assert [*(tmp_path / "traces").iterdir()] == []
