"""Laws of the store: what is written is read back whole and unchanged, or refused in one line."""

from __future__ import annotations

import errno
import fcntl
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.collective import of_gradients
from ddlkit.core.errors import UserError
from ddlkit.formats import messages
from ddlkit.store import files, machine, sheet
from fuzzing import LOG
from places import PATIENCE_S
from workbook.common import places, specs

COMMAND = ["ddlkit", "measure", "collectives"]
MACHINE: Mapping[str, Any] = {"name": "test"}


def collectives(n: int = 3, **changed: Any) -> pd.DataFrame:
    """``n`` samples of one size, columns replaced as said."""
    columns: dict[str, Any] = {
        **{
            "collective": "all_reduce",
            "backend": "gloo",
            "algorithm": "",
            "link": "lab:1gbit",
        },
        **{"link_bits_per_s": 1e9, "ranks": 4, "messages_per_sample": 1, "bytes": 4096},
        **{"session": 0, "sample": np.arange(n), "seconds": 0.1 + np.arange(n) / 3},
        **{
            "stolen": 0.0,
            "late": 0.0,
            "in_flight": 1,
            "clock": "wall",
            "others": 0.0,
            "apart_s": 0.0,
            "nodes": 1,
            "ranks_per_node": 4,
            "fastest_s": 0.05,
        },
    }
    return pd.DataFrame({**columns, **changed})


def layers(**changed: Any) -> pd.DataFrame:
    """Two tensors of one layer and one of another."""
    columns: dict[str, Any] = {
        **{
            "network": "tiny",
            "device": "cpu",
            "batch": 8,
            "precision": "fp32",
            "ranks": 1,
        },
        **{
            "threads": 2,
            "tensor": ["a.weight", "a.bias", "b.weight"],
            "layer": ["a", "a", "b"],
        },
        **{"parameters": [100, 10, 50], "gradient_bytes": [400, 40, 200]},
        **{"forward_s": [0.1, 0.0, 0.2], "backward_s": [0.3, 0.01, 0.4]},
        **{"flops": [1e6, 0.0, 2e6], "update_s": 0.05},
    }
    return pd.DataFrame({**columns, **changed})


def save(
    directory: Path,
    frame: pd.DataFrame,
    name: str = "c",
    *,
    schema: str = "collectives",
    command: Sequence[str] = COMMAND,
    machine: Mapping[str, Any] | None = MACHINE,
    append: bool = False,
) -> Path:
    return store.save_table(
        frame,
        directory,
        name,
        schema=schema,
        command=command,
        machine=machine,
        append=append,
    )


def refusal(action: Callable[[], object]) -> str:
    """The one line with which the action is refused."""
    with pytest.raises(UserError) as refused:
        action()
    line = str(refused.value)
    assert line and "\n" not in line
    return line


def restamp(path: Path, data: bytes) -> Path:
    """Put other content under a stamp that vouches for it: only the schema can object now."""
    stamp = store.load_stamp(path)
    path.write_bytes(data)
    stamp["sha256"] = hashlib.sha256(data).hexdigest()
    path.with_name(path.name.split(".")[0] + ".json").write_text(json.dumps(stamp))
    return path


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seconds=st.lists(
        st.floats(min_value=5e-324, allow_infinity=False), min_size=1, max_size=8
    ),
    rate=st.floats(min_value=0, allow_infinity=False),
    text=st.text(min_size=1, max_size=8).filter(str.isprintable),
    size=st.integers(1, 2**63 - 1),
    name=st.sampled_from(["c", "c.csv", "c.csv.gz"]),
)
def test_every_value_comes_back_to_the_last_digit(
    tmp_path: Path, seconds: list[float], rate: float, text: str, size: int, name: str
) -> None:
    frame = collectives(
        len(seconds), seconds=seconds, link=text, link_bits_per_s=rate, bytes=size
    )
    loaded = store.load_table(save(tmp_path, frame, name), "collectives")
    assert list(loaded.columns) == list(frame.columns)
    for column in frame:
        assert loaded[column].tolist() == frame[column].tolist(), column


def test_the_stamp_says_where_the_rows_come_from(tmp_path: Path) -> None:
    path = save(tmp_path, collectives(5), machine=None)
    stamp = store.load_stamp(path)
    assert stamp == json.loads((tmp_path / "c.json").read_text())
    assert stamp.pop("time").endswith("+00:00")
    assert stamp == {
        **{
            "schema": "collectives",
            "rows": 5,
            "benchmark_version": store.BENCHMARK_VERSION,
        },
        **{
            "command": COMMAND,
            "machine": machine.describe(),
            "versions": machine.versions(),
        },
        **{"commit": machine.commit(), "sha256": store.sha256_file(path)},
        **{"remark": "", "history": []},
    }


def test_the_stamp_names_no_place_outside_the_project(tmp_path: Path) -> None:
    words = ["/opt/env/bin/ddlkit", "64KiB", "a/b", f'{{"out": "{places.ROOT}/data"}}']
    words += [
        "--out=/tmp/me/gpu",
        f"--out={places.DATA}/x",
        "../me/gpu/",
        f"{places.ROOT}/x.py",
    ]
    told = [
        "ddlkit",
        "64KiB",
        "a/b",
        '{"out": "data"}',
        "--out=gpu",
        "--out=data/x",
        "gpu",
        "x.py",
    ]
    assert (
        store.load_stamp(save(tmp_path, collectives(), command=words))["command"]
        == told
    )


def test_every_recorded_case_keeps_its_key_and_is_sparse_if_it_selects() -> None:
    paths = store.list_tables(places.DATA, "**/runs*.csv*")
    rows = pd.concat(
        [store.load_table(path, "runs") for path in paths]
    ).drop_duplicates("case")
    cases = [Case.from_row(row) for row in rows.to_dict("records")]
    assert cases and [case.key for case in cases] == rows["case"].tolist()
    for case in cases:
        assert case.sparse == bool(case.selection_sha256)
        assert case.collective == of_gradients(sparse=case.sparse)
    assert 0 < sum(case.sparse for case in cases) < len(cases)


def test_appending_is_the_same_as_saving_at_once(tmp_path: Path) -> None:
    whole = collectives(6)
    save(tmp_path, whole[:4], append=True)
    path = save(tmp_path, whole[4:], append=True)
    assert path.read_bytes() == save(tmp_path / "once", whole).read_bytes()
    stamp = store.load_stamp(path)
    assert stamp["rows"] == 6 and [old["rows"] for old in stamp["history"]] == [4]


def test_append_refuses_rows_that_are_there_and_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, collectives(3))
    before = path.read_bytes()
    line = refusal(lambda: save(tmp_path, collectives(1), append=True))
    assert line.startswith(
        f"{path}: row at line 5, column sample: there is an earlier row of "
    )
    monkeypatch.setattr(
        "ddlkit.store.tables.BENCHMARK_VERSION", store.BENCHMARK_VERSION + 1
    )
    line = refusal(lambda: save(tmp_path, collectives(1, sample=9), append=True))
    assert "benchmark version" in line and str(path) in line
    assert path.read_bytes() == before and len(store.load_table(path)) == 3


def _append_four(directory: Path, ranks: int) -> None:
    for i in range(4):
        save(directory, collectives(1, sample=i, ranks=ranks), append=True)


@pytest.mark.fault(
    fault="several processes add to one table at once",
    injected="appends from processes at the same time",
    holds="every row is there once",
)
def test_processes_appending_at_once_lose_no_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    running = [
        context.Process(target=_append_four, args=(tmp_path, ranks))
        for ranks in (1, 2, 3)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=PATIENCE_S)
    assert [process.exitcode for process in running] == [0, 0, 0]
    assert len(store.load_table(tmp_path / "c.csv")) == 12


@pytest.mark.parametrize("call", ["os.replace", "os.fsync"])
@pytest.mark.parametrize(
    "crash", [KeyboardInterrupt, OSError(28, "No space left on device")]
)
@pytest.mark.fault(
    fault="a crash, or a full disk, at any moment of saving",
    injected="KeyboardInterrupt or ENOSPC from each rename and each sync in turn",
    holds="the old table or the new one, whole, and rows can be added to it",
)
def test_a_crash_at_any_moment_leaves_one_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, crash: BaseException
) -> None:
    real = getattr(os, call.removeprefix("os."))
    survived = []
    for moment in range(1, 20):
        directory = tmp_path / str(moment)
        path = save(directory, collectives(3))
        calls = iter(range(1, 20))

        def crashing(*args: Any, at: int = moment, calls: Iterator[int] = calls) -> Any:
            if next(calls) == at:
                raise crash
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(call, crashing)
            try:
                save(directory, collectives(1, sample=7), append=True)
            except (KeyboardInterrupt, UserError):
                survived.append(len(store.load_table(path)))
            else:
                break
        assert not list(directory.glob("*.tmp")) and not list(directory.glob(".*.tmp"))
        save(directory, collectives(1, sample=8), append=True)
        assert len(store.load_table(path)) == survived[-1] + 1
    after = (
        {4} if call == "os.fsync" else set()
    )  # the table is exchanged by the last rename
    assert set(survived) == {3} | after


def leave_unfinished(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary file that a writer of ``path`` leaves if it is killed."""
    left: dict[Path, bytes] = {}

    def killed(temporary: Path, target: Path) -> None:
        left[temporary] = temporary.read_bytes()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        files.atomic_write_text(path, "half")
    # An exception lets `atomic_write` clean up, which a kill does not.
    ((temporary, data),) = left.items()
    temporary.write_bytes(data)
    return temporary


@pytest.mark.parametrize("removed", ["t.csv", "t.csv.gz", "t", "[t]*", ""])
def test_only_unfinished_files_of_the_given_name_are_removed(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["t.csv", "t.csv.gz", "t.csv2", "tt.csv", "t", "[t]*"]
    left = {name: leave_unfinished(tmp_path / name, monkeypatch) for name in names}
    files.remove_unfinished(tmp_path, removed)
    kept = {name for name, temporary in left.items() if temporary.exists()}
    assert kept == ({*names} - {removed} if removed else set())


@pytest.fixture
def readonly() -> Iterator[Path]:
    """A directory with one table that this process may read but not write, also when it is root."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "recorded"
        save(directory, collectives(3))
        store.load_table(
            directory / "c.csv"
        )  # what reading imports, another user may not read
        Path(name).chmod(0o755)
        directory.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        yield directory
        if root:
            os.seteuid(0)
        directory.chmod(0o755)


@pytest.mark.fault(
    fault="the data are read-only",
    injected="a directory that this user may not write",
    holds="one line names it; the table in it is as before",
)
def test_a_read_only_directory_is_refused_and_kept(readonly: Path) -> None:
    line = refusal(lambda: save(readonly, collectives(1, sample=7), append=True))
    assert str(readonly) in line and "Permission denied" in line
    assert str(readonly) in refusal(
        lambda: store.atomic_write_text(readonly / "x", "y")
    )
    assert str(readonly) in refusal(lambda: store.lock(readonly / "lock").__enter__())
    assert str(readonly) in refusal(lambda: save(readonly / "deeper", collectives()))
    assert len(store.load_table(readonly / "c.csv")) == 3


@pytest.mark.fault(
    fault="the holder of a lock is killed",
    injected="SIGKILL to the process that holds it",
    holds="while it lived it was named; then the lock is free",
)
def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    code = (
        "import sys, time; from pathlib import Path; from ddlkit.store import lock\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=places.ROOT
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        line = refusal(lambda: store.lock(path).__enter__())
        assert str(path) in line and f"process {holder.pid}" in line
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    with store.lock(path):
        assert f"process {os.getpid()}" in refusal(lambda: store.lock(path).__enter__())
    with store.lock(path):
        assert path.read_text() == f"{os.getpid()}\n"
    assert path.read_text() == ""


def test_a_lock_whose_holder_removes_it_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder removes the file after another process has opened it."""
    path = tmp_path / "run" / "lock"
    flock = fcntl.flock
    opened: list[int] = []

    def remove_then_lock(descriptor: int, operation: int) -> None:
        opened.append(descriptor)
        if len(opened) == 1:
            path.unlink()
            path.parent.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_lock)
    with store.lock(path):
        assert len(opened) == 2
        assert path.read_text() == f"{os.getpid()}\n"
        assert "is held" in refusal(lambda: store.lock(path).__enter__())


def _flock_of_nfs(descriptor: int, operation: int) -> None:
    """Lock as NFS does, which makes a lock for writing of a file that is open for writing."""
    opened = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    if opened == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _flock_without_a_service(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("flock", [_flock_of_nfs, _flock_without_a_service])
@pytest.mark.fault(
    fault="the file system is a network's, with locks on files alone or with none",
    injected="flock as NFS has it: EBADF for a directory, or ENOLCK for everything",
    holds="tables are written and sessions begin; scratch folders of others stay",
)
def test_tables_are_written_on_a_network_file_system(
    flock: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / f"{files.SCRATCH}other" / "files"
    other.mkdir(parents=True)
    monkeypatch.setattr(fcntl, "flock", flock)
    path = save(tmp_path / "out", collectives())
    save(tmp_path / "out", collectives(1, sample=7), append=True)
    assert len(store.load_table(path)) == 4
    assert {each.name for each in path.parent.iterdir()} == {"c.csv", "c.json"}
    with store.lock(tmp_path / "out" / ".lock"), files.scratch(tmp_path) as mine:
        assert mine.is_dir()
    assert other.is_dir()
    other.rmdir()
    other.parent.rmdir()


@pytest.mark.fault(
    fault="a writer removes the file that another is waiting to lock",
    injected="the lock's file is removed as soon as it is locked for the first time",
    holds="the other locks the file that then has its name",
)
def test_a_lock_on_a_removed_file_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        locked.append(descriptor)
        if len(locked) == 1:
            (lock_file,) = tmp_path.iterdir()
            lock_file.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.writing_in(tmp_path):
        (lock_file,) = tmp_path.iterdir()
        assert len(locked) == 2
        assert os.path.samestat(os.fstat(locked[1]), lock_file.stat())
    assert not [*tmp_path.iterdir()]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 10**6),
    to=st.integers(1, 255),
    name=st.sampled_from(["c.csv", "c.csv.gz"]),
)
@pytest.mark.fault(
    fault="a recorded file was changed",
    injected="any byte of a table or of its packed form",
    holds="refused: not one is accepted",
)
def test_any_changed_byte_is_noticed(
    tmp_path: Path, at: int, to: int, name: str
) -> None:
    path = save(tmp_path, collectives(), name)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= to
    path.write_bytes(data)
    assert str(path) in refusal(lambda: store.load_table(path))
    assert str(path) in refusal(lambda: store.load_stamp(path))


@pytest.mark.parametrize(
    ("column", "cell", "problem"),
    [
        ("seconds", "nan", "finite"),
        ("seconds", "0", "above zero"),
        ("seconds", "", "is empty"),
        ("seconds", "fast", "not a number"),
        ("bytes", "9" * 30, "too large"),
        ("bytes", "1e40", "too large"),
        ("bytes", "1.5", "not a whole number"),
        ("link_bits_per_s", "-1", "negative"),
        ("collective", "a\tb", "cannot be printed"),
    ],
)
def test_a_wrong_cell_is_named_by_file_row_and_column(
    tmp_path: Path, column: str, cell: str, problem: str
) -> None:
    path = save(tmp_path, collectives(4))
    cells = [line.split(",") for line in path.read_text().splitlines()]
    cells[3][cells[0].index(column)] = cell
    text = "\n".join(",".join(row) for row in cells)
    line = refusal(lambda: store.load_table(restamp(path, text.encode())))
    assert (
        line.startswith(f"{path}: row at line 4, column {column}: ") and problem in line
    )
    values = collectives(4).astype({column: object})
    values.loc[2, column] = cell
    before = path.read_bytes()
    line = refusal(lambda: save(tmp_path, values))
    assert f"line 4, column {column}: " in line
    assert path.read_bytes() == before, "a refused table leaves the old one"


def test_columns_that_came_later_may_be_left_out_and_read_as_before(
    tmp_path: Path,
) -> None:
    later = ["in_flight", "clock"]
    save(tmp_path, collectives().drop(columns=later))
    below = collectives().assign(sample=np.arange(3, 6))
    path = save(tmp_path, below.drop(columns=later), append=True)
    both = pd.concat([collectives(), below], ignore_index=True)
    pd.testing.assert_frame_equal(store.load_table(path), both, check_dtype=False)


@pytest.mark.parametrize(
    ("damaged", "word"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[: data.index(b"\n")], "no rows"),
        (lambda data: data[: data.rindex(b",")], "line 4"),
        (
            lambda data: data.replace(b"\n", b",1\n", 2).replace(b",1\n", b"\n", 1),
            "line 2",
        ),
        (lambda data: data + b'"all_reduce,', "not CSV"),
    ],
)
def test_what_is_no_csv_is_refused(
    tmp_path: Path, damaged: Callable[[bytes], bytes], word: str
) -> None:
    path = save(tmp_path, collectives())
    data = damaged(path.read_bytes())
    line = refusal(lambda: store.load_table(restamp(path, data)))
    assert str(path) in line and word in line
    own = tmp_path / "own.csv"
    own.write_bytes(data)
    for reader in (messages.read_bytes_seconds, store.read_profile):
        assert str(own) in refusal(functools.partial(reader, own))


@given(text=st.text(st.characters(codec="utf-8"), min_size=1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_comes_back_from_a_file_of_any_name(tmp_path: Path, text: str) -> None:
    # The letter makes sure that the file is not empty. A byte order mark would be skipped.
    text = f"a{text}"
    for name in ("plain.json", "packed.json.gz"):
        path = tmp_path / name
        files.atomic_write_text(path, text)
        assert files.read_text(path) == text
    assert gzip.decompress(path.read_bytes()).decode() == text


@pytest.mark.parametrize("keep", [10, -1, None])
@pytest.mark.fault(
    fault="a packed table is truncated",
    injected="cut after any number of bytes, or no gzip at all",
    holds="refused in one line",
)
def test_a_file_that_is_no_whole_gzip_is_refused(
    tmp_path: Path, keep: int | None
) -> None:
    path = save(tmp_path, collectives(), "c.csv.gz")
    data = path.read_bytes()
    packed_without_name = tmp_path / "packed.csv"
    packed_without_name.write_bytes(data)
    assert "must end in .gz" in refusal(
        lambda: store.files.read_text(packed_without_name)
    )
    damaged = gzip.decompress(data) if keep is None else data[:keep]
    line = refusal(lambda: store.load_table(restamp(path, damaged)))
    assert str(path) in line and "gzip" in line


def test_missing_files_stamps_and_other_schemas_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: store.load_table(tmp_path / "no.csv"))
    assert "No such file" in refusal(lambda: store.sha256_file(tmp_path / "no.csv"))
    assert str(tmp_path) in refusal(lambda: store.load_table(tmp_path))
    path = save(tmp_path, collectives())
    line = refusal(lambda: store.load_table(path, "layers"))
    assert "message times" in line and "layer profile" in line
    assert "unknown schema 'nope'" in refusal(
        lambda: save(tmp_path, collectives(), schema="nope")
    )
    stamp = tmp_path / "c.json"
    kept = stamp.read_text()
    stamp.write_text(kept[: len(kept) // 2])
    assert "damaged stamp" in refusal(lambda: store.load_table(path))
    stamp.write_text(
        json.dumps({k: v for k, v in json.loads(kept).items() if k != "machine"})
    )
    assert "its machine is no dict" in refusal(lambda: store.load_table(path))
    stamp.write_text(kept.replace('"rows": 3', '"rows": 4'))
    assert "3 rows" in refusal(lambda: store.load_table(path))
    stamp.unlink()
    assert "c.json" in refusal(lambda: store.load_table(path))


def test_a_recorded_profile_comes_back(tmp_path: Path) -> None:
    profile = store.read_profile(save(tmp_path, layers(), schema="layers"))
    for name in set(layers()) - {"precision", "ranks", "threads"}:
        assert (getattr(profile, name) == layers()[name].to_numpy()).all(), name
    work = profile.workload()
    assert work.bytes.tolist() == [200, 40, 400] and work.forward_s == pytest.approx(
        0.3
    )


def own_csv(directory: Path, text: str) -> Path:
    path = directory / "own.csv"
    path.write_text(text)
    return path


def test_a_users_own_profile_needs_only_what_a_prediction_needs(tmp_path: Path) -> None:
    needed = layers(gradient_bytes=[400, 41, 1])
    needed = needed[["tensor", "gradient_bytes", "forward_s", "backward_s"]]
    own = own_csv(tmp_path, needed.to_csv(index=False))
    (tmp_path / "own.json").write_text(
        '{"form": "alpha_beta"}'
    )  # some other JSON, not a stamp
    assumed: list[str] = []
    profile = store.read_profile(own, assumed=assumed)
    assert (profile.network, profile.device, profile.batch) == ("own", "unknown", 1)
    assert profile.layer == profile.tensor == ("a.weight", "a.bias", "b.weight")
    assert profile.parameters.tolist() == [100, 11, 1]
    assert profile.flops.tolist() == [0, 0, 0] and profile.update_s == 0
    assert len(assumed) == 10 and "parameters = gradient_bytes / 4" in assumed


def test_the_time_of_a_whole_forward_pass_stands_for_its_column(tmp_path: Path) -> None:
    own = own_csv(tmp_path, layers().drop(columns="forward_s").to_csv(index=False))
    assert "has no column forward_s" in refusal(lambda: store.read_profile(own))
    assumed: list[str] = []
    assert (
        store.read_profile(own, forward_s=0.12, assumed=assumed).workload().forward_s
        == 0.12
    )
    assert assumed == []
    for wrong in (0.0, float("nan")):
        line = refusal(functools.partial(store.read_profile, own, forward_s=wrong))
        assert f"forward_s is {wrong}" in line


@pytest.mark.parametrize(("unit", "factor"), [("ms", 1e3), ("us", 1e6)])
def test_a_column_in_another_unit_is_named_with_the_one_that_is_needed(
    tmp_path: Path, unit: str, factor: float
) -> None:
    for name in ("forward_s", "backward_s"):
        other = f"{name.removesuffix('s')}{unit}"
        frame = layers().assign(**{other: factor * layers()[name]}).drop(columns=name)
        own = own_csv(tmp_path, frame.to_csv(index=False))
        line = refusal(functools.partial(store.read_profile, own))
        assert name in line and f"the column {other} to seconds" in line


def test_of_several_profiles_one_is_chosen_or_asked_for(tmp_path: Path) -> None:
    frame = pd.concat(
        [layers(), layers(batch=16, update_s=0.1), layers(network="other", ranks=2)]
    )
    path = save(tmp_path, frame, schema="layers")
    assert "several values of network (tiny, other)" in refusal(
        lambda: store.read_profile(path)
    )
    assert "of batch (8, 16)" in refusal(lambda: store.read_profile(path, "tiny"))
    assert store.read_profile(path, "tiny", 16).update_s == 0.1
    assert store.read_profile(path, ranks=2, network="other").network == "other"
    line = refusal(lambda: store.read_profile(path, "vgg16"))
    assert "no row with network vgg16" in line
    assert "tiny, other" in line
    save(tmp_path, layers(update_s=[0.1, 0.2, 0.1]), schema="layers")
    assert "update_s" in refusal(lambda: store.read_profile(path))


def test_a_plain_csv_is_read_and_labelled_as_said(tmp_path: Path) -> None:
    path = own_csv(tmp_path, "\ufeffseconds, bytes,note\n0.25,1024,x\n\n1e-3,1e6,y\n")
    size, seconds, meta = messages.read_bytes_seconds(path, ranks=4)
    assert size.tolist() == [1024, 1000000] and size.dtype == np.int64
    assert seconds.tolist() == [0.25, 1e-3]
    assert meta == {"source": "csv", "ranks": 4}


def test_rows_of_a_collectives_table_are_chosen_or_asked_for(tmp_path: Path) -> None:
    parts = [
        collectives(2, collective=name, ranks=ranks, seconds=[ranks, ranks + 0.5])
        for name in ("all_reduce", "all_gather")
        for ranks in (2, 4)
    ]
    path = save(tmp_path, pd.concat(parts))
    read = functools.partial(messages.read_bytes_seconds, path)
    assert "all_reduce, all_gather" in refusal(read)
    size, seconds, meta = read(collective="all_gather", ranks=4)
    assert size.tolist() == [4096] * 2 and seconds.tolist() == [4, 4.5]
    assert meta == {
        **{"source": "recorded", "collective": "all_gather", "ranks": 4},
        **{
            "backend": "gloo",
            "algorithm": "",
            "link": "lab:1gbit",
            "link_bits_per_s": 1e9,
        },
    }
    assert "2, 4" in refusal(lambda: read(collective="all_gather", ranks=8))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "bytes,rate\n1,2\n",
            "header, column seconds: missing; the columns are bytes, rate",
        ),
        (
            "bytes,seconds\n8,20\n4194304,34000\n",
            "column seconds: 4194304 bytes",
        ),
        (
            "bytes,seconds\n8,0.1\n\n16,0\n",
            "line 4, column seconds: is '0'",
        ),
        (
            LOG.replace("10.49      0", "10.49      3", 1),
            "3 wrong values",
        ),
        (LOG.replace("time", "cputime"), "column cputime: times of the processor"),
        (LOG.replace("100.0", "x", 1), "column time: 'x' is not a number"),
        (LOG.partition("# Out")[0], "the log is cut"),
        (
            LOG.replace("340.0", "350.0", 1),
            "column algbw: the one out of place contradicts size over time",
        ),
    ],
)
def test_message_times_that_cannot_be_are_named_by_row_and_column(
    tmp_path: Path, text: str, words: str
) -> None:
    path = own_csv(tmp_path, text)
    line = refusal(lambda: messages.read_bytes_seconds(path))
    assert line.startswith(f"{path}: ") and words in line


def test_every_spelling_stands_for_one_network_and_its_name_for_itself() -> None:
    names = pd.read_csv(places.DATA / "specs" / "networks.csv").set_index("name")[
        "aliases"
    ]
    for name, aliases in names.items():
        for text in (name, *aliases.split(";")):
            for written in (text, text.upper(), text.replace("-", "")):
                assert specs.network_named(written) == name


def test_a_recorded_directory_is_named_by_its_machine() -> None:
    assert places.recorded_dir("cpu-2x") == places.RECORDED / "cpu-2x"
    for bad in ("../elsewhere", "", "/etc", "Two Words", ".."):
        assert "machine name" in refusal(functools.partial(places.recorded_dir, bad))


LINKS = sheet.Schema(
    "links", (sheet.Column("link", "str"), sheet.Column("device", "str"))
)
"""A table of two columns of text."""


@pytest.mark.parametrize("cell", ['"a"b', '"a""b"c', '"a" '])
def test_text_after_a_closing_quote_is_refused(cell: str) -> None:
    for row in (f"{cell},cpu", f"ethernet,{cell}"):
        text = f'link,device\n{row}\n"a,b",cpu\n'
        line = refusal(functools.partial(LINKS.read, text, "links.csv"))
        assert line.startswith("links.csv: line 2 is not CSV")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_may_enclose_commas_and_quotes_in_whole_cells(end: str) -> None:
    rows = ["link,device", '"a,b","c""d"', '"",cpu', "ethernet,gpu", ""]
    table = LINKS.read(end.join(rows), "links.csv")
    assert table["link"].tolist() == ["a,b", "", "ethernet"]
    assert table["device"].tolist() == ['c"d', "cpu", "gpu"]


def test_a_long_row_does_not_make_up_for_a_short_one() -> None:
    # As many commas as in a table of whole rows.
    text = "link,device\nloopback,cpu,gpu\nethernet\n"
    line = refusal(functools.partial(LINKS.read, text, "links.csv"))
    assert line.startswith("links.csv: row at line 2")
    assert "3 fields" in line and "header has 2" in line
    # Any field may be the one too many.
    assert "column" not in line
