"""Many tables in one file a kind: read by their old paths, cut out byte for byte, whole after any crash."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store import files, tables
from workbook.common import places

MACHINE = {"name": "cpu-made-up", "cpu": {"cores": 2}}
MOST_FILES, MOST_FILES_A_FOLDER = 200, 13
PARTS = store.list_tables(places.RECORDED, "**/*.csv*")
FOLDERS = sorted({path.parent for path in PARTS})


def save(
    folder: Path,
    name: str,
    seconds: float = 0.5,
    *,
    machine: dict[str, Any] = MACHINE,
    append: bool = False,
) -> Path:
    moment = "end" if append else "start"
    frame = pd.DataFrame(
        {"moment": moment, "work": "a, quoted", "device": "cpu"}, range(3)
    )
    frame = frame.assign(sample=range(3), seconds=seconds)
    return store.save_table(
        frame,
        folder,
        name,
        schema="drift",
        command=["test"],
        machine=machine,
        append=append,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tables of two kinds, one of them compressed, and a file of somebody else."""
    save(tmp_path, "drift-a")
    save(tmp_path, "drift-b.csv.gz", 0.25)
    facts = pd.DataFrame({"subject": ["cpu"], "fact": ["cores"], "value": ["2"]})
    store.save_table(
        facts, tmp_path, "facts-a", schema="facts", command=["t"], machine=MACHINE
    )
    (tmp_path / "mine.csv").write_text("bytes,seconds\n1,2\n")
    return tmp_path


def loose(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, tuple[pd.DataFrame, dict[str, Any]]]:
    paths = [path for path in store.list_tables(folder) if path.name != "mine.csv"]
    return {
        path.name: (store.load_table(path), store.load_stamp(path)) for path in paths
    }


def assert_same(
    folder: Path, before: dict[str, tuple[pd.DataFrame, dict[str, Any]]]
) -> None:
    now = contents(folder)
    assert now.keys() == before.keys()
    for name, (frame, stamp) in before.items():
        pd.testing.assert_frame_equal(now[name][0], frame, check_exact=True)
        assert now[name][1] == stamp


@functools.cache
def pack_lines(pack: Path) -> dict[str, list[str]]:
    """The lines of a pack by the table that they are of, "part" for the header."""
    lines: dict[str, list[str]] = {}
    for line in gzip.decompress(pack.read_bytes()).decode().splitlines():
        name, _, row = line.partition(",")
        lines.setdefault(name, []).append(row)
    return lines


def cut_out(path: Path) -> bytes:
    lines = pack_lines(tables.packed(path.parent)[path.name].pack)
    return "\n".join([*lines["part"], *lines[path.name], ""]).encode()


def test_every_recorded_part_is_cut_out_with_its_original_hash_and_read() -> None:
    """It is the text's: another zlib makes other bytes of a .csv.gz."""
    assert len(PARTS) > 700
    for path in PARTS:
        part = tables.packed(path.parent)[path.name]
        assert hashlib.sha256(cut_out(path)).hexdigest() == part.text_sha256
        assert path.suffix == ".gz" or part.text_sha256 == part.stamp["sha256"]
        assert len(store.load_table(path)) == part.stamp["rows"]
    assert all(len(store.machines_in(folder)) == 1 for folder in FOLDERS)


def test_recordings_are_few_files() -> None:
    there = [
        path
        for path in places.RECORDED.rglob("*")
        if path.is_file() and path.name != ".lock"
    ]
    assert len(there) <= MOST_FILES
    for folder in FOLDERS:
        assert sum(path.parent == folder for path in there) <= MOST_FILES_A_FOLDER


def test_packed_tables_are_read_as_loose_ones(folder: Path) -> None:
    before, bytes_before = contents(folder), loose(folder)
    assert [path.name for path in tables.pack(folder)] == list(before)
    assert {*loose(folder)} == {
        "drift.csv.gz",
        "facts.csv.gz",
        tables.STAMPS,
        "mine.csv",
    }
    assert_same(folder, before)
    for name in before:
        data = bytes_before[name]
        assert cut_out(folder / name) == (
            gzip.decompress(data) if name.endswith(".gz") else data
        )
        stamp = json.loads(bytes_before[f"{name.partition('.')[0]}.json"])
        assert store.load_stamp(folder / name) == stamp
    assert tables.pack(folder) == []


def test_packed_tables_are_found_by_name_and_pattern(folder: Path) -> None:
    tables.pack(folder)
    a, b = folder / "drift-a.csv", folder / "drift-b.csv.gz"
    assert store.list_tables(folder, "drift-*.csv*") == [a, b]
    assert store.list_tables(folder.parent, f"{folder.name}/drift-*.csv") == [a]
    assert folder / "mine.csv" in store.list_tables(folder)
    assert store.expand_tables([folder / "drift-*", folder / "no*"]) == [
        a,
        b,
        folder / "no*",
    ]
    assert store.has_table(a) and not store.has_table(folder / "drift-c.csv")
    assert tables.is_stamped(a) and not tables.is_stamped(folder / "mine.csv")
    for taken in (a, folder / tables.STAMPS, folder / "drift.csv.gz"):
        with pytest.raises(UserError, match="choose another name"):
            store.own_output(taken)
    # A pack itself is no table, and the error names one of its tables.
    for read in (store.load_table, store.read_profile, store.read_timeline):
        with pytest.raises(
            UserError, match=f"is a pack of 2 recorded tables.*{a.name}"
        ):
            read(folder / "drift.csv.gz")


def test_a_pack_grows_and_a_later_table_replaces_its_part(folder: Path) -> None:
    tables.pack(folder)
    save(folder, "drift-c")
    save(folder, "drift-a", 2.0, append=True)
    frame = store.load_table(folder / "drift-a.csv")
    assert frame["seconds"].tolist() == [0.5] * 3 + [2.0] * 3, "below the packed rows"
    before = contents(folder)
    assert len(before["drift-a.csv"][1]["history"]) == 1
    tables.pack(folder)
    assert_same(folder, before)
    assert set(tables.packed(folder)) == {*before}


def test_tables_of_another_header_and_full_packs_go_into_a_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_PACK_CHARACTERS", 260)
    old, rows = (
        folder / "drift-d.csv",
        "moment,work,device,seconds,sample\nend,x,cpu,1.0,0\n",
    )
    stamp = store.load_stamp(folder / "drift-a.csv") | {"rows": 1}
    old.write_text(rows)
    stamp["sha256"] = hashlib.sha256(rows.encode()).hexdigest()
    old.with_suffix(".json").write_text(json.dumps(stamp))
    before = contents(folder)
    tables.pack(folder)
    assert {"drift.csv.gz", "drift.2.csv.gz", "drift.3.csv.gz"} <= {*loose(folder)}
    assert_same(folder, before)


def test_tables_of_two_machines_are_not_packed(folder: Path) -> None:
    save(folder, "drift-x", machine={"name": "another"})
    before = loose(folder)
    with pytest.raises(
        UserError, match="tables of another and cpu-made-up: give each its folder"
    ):
        tables.pack(folder)
    assert loose(folder) == before
    assert store.machines_in(folder) == {"another", "cpu-made-up"}


def swap_rows(path: Path) -> None:
    text = gzip.decompress(path.read_bytes()).replace(b"0.5", b"0.6")
    path.write_bytes(gzip.compress(text))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda at: swap_rows(at / "drift.csv.gz"), "drift.csv.gz: sha256 .* differs"),
        (lambda at: (at / "drift.csv.gz").unlink(), "drift.csv.gz: No such file"),
        (lambda at: (at / tables.STAMPS).write_text("[1]\n"), "damaged line 1"),
    ],
)
def test_a_damaged_pack_is_one_line(folder: Path, damage: Any, told: str) -> None:
    tables.pack(folder)
    damage(folder)
    for read in (store.load_table, store.load_stamp):
        with pytest.raises(UserError, match=told) as error:
            read(folder / "drift-a.csv")
        assert "\n" not in str(error.value)


def dies_packing(folder: Path, allowed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the process ends, as by a kill, where so many changes of the file system succeed."""
    left = iter(range(allowed))

    def mortal(act: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return act(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", mortal(os.replace))
        patch.setattr(Path, "unlink", mortal(Path.unlink))
        try:
            tables.pack(folder)
        except KeyboardInterrupt:
            return True
    return False


def test_a_crash_at_any_moment_leaves_every_table_readable(
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a first pack, and of one that grows and replaces a part; the next call completes it."""
    grown = tmp_path_factory.mktemp("grown") / "it"
    shutil.copytree(folder, grown)
    tables.pack(grown)
    save(grown, "drift-c")
    save(grown, "drift-a", 2.0, append=True)
    crashes = 0
    for start in (folder, grown):
        before = contents(start)
        for allowed in range(60):
            copy = tmp_path_factory.mktemp("crash") / "it"
            shutil.copytree(start, copy)
            if not dies_packing(copy, allowed, monkeypatch):
                break
            crashes += 1
            assert_same(copy, before)
            tables.pack(copy)
            assert_same(copy, before)
            assert set(tables.packed(copy)) == {*before}
            files.remove_unfinished(copy)
            packs = {part.pack.name for part in tables.packed(copy).values()}
            assert {*loose(copy)} == {*packs, tables.STAMPS, "mine.csv"}
    assert crashes > 20
