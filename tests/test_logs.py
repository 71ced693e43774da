"""Logs of others' benchmarks are taken as they are, or refused for what they lack."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuzzing
from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.formats.messages import read_bytes_seconds

SIZES = [1024 * 4**k for k in range(9)]
KINDS = {
    **{
        "all_reduce": ("sum", -1, 2),
        "reduce_scatter": ("sum", -1, 1),
        "reduce": ("sum", 0, 0),
    },
    **{
        "all_gather": ("none", -1, 1),
        "alltoall": ("none", -1, 1),
        "broadcast": ("none", 0, 0),
    },
}
"""Redop, root, and k, where busbw is k (n - 1) / n times algbw, 0 for once: nccl-tests' PERFORMANCE.md."""


def us(size: int) -> float:
    return 21.5 + size / 11e3


def row(
    kind: str, n: int, size: int, *times: float, sent: float = 1.0, bus: float = 0.0
) -> str:
    """Return a row; sent is algbw over size by time, bus is busbw over algbw where it is unusual."""
    redop, root, passes = KINDS[kind]
    cells = [size, size // 4, "float", redop, root]
    for time in times or (us(size), us(size)):
        algbw = sent * size / time / 1e3
        busbw = algbw * (bus or (passes * (n - 1) / n if passes else 1.0))
        cells += [f"{time:.5g}", f"{algbw:.2f}", f"{busbw:.2f}", 0]
    return "  ".join(map(str, cells)) + "\n"


def nccl(
    kind: str = "all_reduce", n: int = 8, title: str = "", rows: str = "", **how: Any
) -> str:
    title = f"# Collective test starting: {title}_perf_mpi\n" if title else ""
    ranks = "".join(
        f"#  Rank {k:2} Pid 9 on n1 device {k} [0000:1{k}:00] B1\n" for k in range(n)
    )
    rows = rows or "".join(row(kind, n, size, **how) for size in SIZES)
    head = "#  size  count  type  redop  root" + 2 * "  time  algbw  busbw  #wrong"
    return f"{title}# nThread 1\n{ranks}#\n{head}\n#  (B)\n{rows}# Avg bus bandwidth    : 9.5\n#\n"


def osu(name: str = "MPI-CUDA Allreduce") -> str:
    head = (
        f"# OSU {name} Latency Test v7.1\n# SIZE  avg Latency(US)  P50 Tail Lat(us)\n"
    )
    return head + "".join(f"{size:<12}{us(size):12.2f}{1.0:12.2f}\n" for size in SIZES)


def imb(name: str = "Allreduce", n: int = 8) -> str:
    head = (
        f"# Benchmarking {name}\n# #processes = {n}\n#bytes #repetitions t_avg[usec]\n"
    )
    return head + "".join(f"{size:12} 99 {us(size):12.2f}\n" for size in [0, *SIZES])


def read(
    folder: Path,
    text: str,
    *,
    collective: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    (folder / "a.log").write_text(text)
    return read_bytes_seconds(
        folder / "a.log", collective=collective, ranks=ranks, place=place, table=table
    )


def refusal(
    folder: Path,
    text: str,
    *,
    collective: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text, collective=collective, ranks=ranks, place=place, table=table)
    return str(caught.value)


def test_a_code_block_of_a_page_ends_a_table_without_its_last_line(
    tmp_path: Path,
) -> None:
    rows, _, _ = nccl(title="all_reduce").partition("# Avg")
    page = f"Measured on 8 GPUs:\n```\n{rows}```\nIn short: 9.5 GB/s.\n"
    sizes, seconds, _ = read(tmp_path, page)
    assert sorted({*sizes}) == SIZES
    np.testing.assert_allclose(seconds, [us(size) / 1e6 for size in sizes], rtol=1e-4)
    # What the author has left out before the block ends may be the largest sizes.
    for cut in ("...\n", "^C\n"):
        assert "the log is cut" in refusal(
            tmp_path, page.replace("\n```\nIn", f"\n{cut}```\nIn")
        )
    assert "the log is cut" in refusal(tmp_path, rows)


TABLE = [
    words
    for line in nccl().splitlines()
    if len(words := line.strip("# ").split()) == 13
]
FORMATS = {
    **{
        "nccl": nccl(),
        "osu": osu(),
        "imb": imb(),
        "none of #": nccl().replace("#", ""),
    },
    "old": nccl().replace("#wrong", "error").replace("root", "").replace("-1", ""),
    **{
        name: "\n".join(map(by.join, TABLE))
        for name, by in {"csv": ",", "no #": "  "}.items()
    },
}
LABELS = [
    "{}",
    "[1,0]<stdout>:{}",
    "[prterun-n1-8@1,0]<stdout>: {}",
    "  0: {}",
    "[n1.local] {}",
]
LABELS += [
    "\x1b[36m(head, rank=0, pid=7)\x1b[0m [1,0]<stdout>:{}",
    "n1: {}",
    "> > {}",
    "    {}",
]
LABELS += [
    "2026-05-01T10:00:00.123Z {}",
    "[2026-05-01 10:00:00,123] n1: {}",
    "12:30:00 {}",
]
LABELS += [
    "[0] {}",
    "10.0.0.1: {}",
    "worker-1  | {}",
    "Fri May  1 10:00:00 2026<stdout>:{}",
]
LABELS += ["2026-05-01T10:00:00Z stdout F {}", "2026-05-01 10:00:00,123 INFO {}"]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("kept", FORMATS)
def test_a_table_is_the_same_however_it_was_kept(
    tmp_path: Path, kept: str, label: str
) -> None:
    text = "".join(f"{label.format(line)}\n" for line in FORMATS[kept].splitlines())
    inside = "[1,0]<stdout>:" if ">:" in label else "[0]" * label.startswith("[0]")
    text = text.replace("  -1  ", f"  -1{inside}  ")
    sizes, seconds, meta = read(tmp_path, f"# My cluster\n```\n{text}```\n")
    assert (
        sizes.tolist() == np.repeat(SIZES, 1 if kept in ("osu", "imb") else 2).tolist()
    )
    np.testing.assert_allclose(seconds, [us(size) * 1e-6 for size in sizes], rtol=3e-4)
    assert meta["source"] == {"osu": "osu-cuda", "imb": "imb"}.get(kept, "nccl-tests")
    ranks = None if kept in ("osu", "csv", "no #") else 8
    assert (meta["collective"], meta.get("ranks")) == ("all_reduce", ranks)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_collective_is_named_or_decided_or_asked_for(
    tmp_path: Path, kind: str, n: int
) -> None:
    text, may_be = nccl(kind, n), [k for k in KINDS if KINDS[k] == KINDS[kind]]
    assert read(tmp_path, nccl(kind, n, kind))[2]["collective"] == kind
    said = (
        refusal(tmp_path, text)
        if len(may_be) > 1
        else read(tmp_path, text)[2]["collective"]
    )
    assert said.endswith(" or ".join(may_be))
    for wanted in may_be:
        assert read(tmp_path, text, collective=wanted)[2]["collective"] == wanted
    for other in {*KINDS} - {*may_be}:
        words = f"of {' or '.join(may_be)}, not of {other}"
        assert words in refusal(tmp_path, text, collective=other)
        assert f"not those of {other} of {n} ranks" in refusal(
            tmp_path, nccl(kind, n, other)
        )


def test_versions_print_other_rates_sizes_and_units(tmp_path: Path) -> None:
    """In place unchecked; until 2020; sizes of one rank; 0.185 us and 16 s in two digits; milliseconds."""
    rows = "".join(f"{row('alltoall', 8, size).rstrip()[:-1]}N/A\n" for size in SIZES)
    unchecked_in_place = nccl(rows=rows)
    assert read(tmp_path, unchecked_in_place)[2]["collective"] == "alltoall"
    stamped = re.sub(r"(?m)N/A$", "N/A  2026-01-31 12:00:00", unchecked_in_place)
    stamped = re.sub(r"(?m)#wrong$", "#wrong  timestamp", stamped)
    assert read(tmp_path, stamped)[2]["collective"] == "alltoall"
    for sent, bus, n in ((7 / 8, 1.0, 1), (8.0, 7 / 8, 8), (7.0, 1.0, 8)):
        sizes, _, meta = read(tmp_path, nccl("all_gather", sent=sent, bus=bus))
        assert (
            meta["collective"] == "all_gather"
            and (sizes[::2] == np.multiply(SIZES, n)).all()
        )
    rows = "512 128 float sum -1" + 2 * " 0.18 2.77 4.85 0" + "\n"
    rows += "17179869184 4294967296 float sum -1" + 2 * " 1.6e+07 1.09 1.91 0" + "\n"
    assert read(tmp_path, nccl(rows=rows))[1][[0, 2]].tolist() == [0.18e-6, 16.0]
    assert "contradicts size" in refusal(
        tmp_path, nccl(rows=rows.replace("0.18", "0.22"))
    )
    old = nccl(rows="1048576 262144 float sum -1" + 2 * " 0.100 10.49 18.35 0" + "\n")
    old = (
        old.replace("size  count", "bytes  N")
        .replace("redop", "op")
        .replace("#wrong", "res")
    )
    assert read(tmp_path, old)[1] == pytest.approx([1e-4, 1e-4])


def test_one_of_several_tables_is_chosen_and_sizes_are_of_all_ranks(
    tmp_path: Path,
) -> None:
    text = (
        imb(n=2)
        + imb(n=8)
        + nccl("broadcast", 4)
        + imb("Allgather")
        + "#repetitions\n9 2 3\n"
    )
    described = (
        "1 of all_reduce, 2 ranks, 10 rows",
        "2 of all_reduce, 8 ranks, 10 rows",
        "3 of broadcast, 4 ranks, 9 rows",
        "4 of all_gather, 8 ranks, 10 rows",
    )
    for table in (None, 0, 5):
        line = refusal(tmp_path, text, table=table)
        assert "--table" in line
        assert all(words in line for words in described)
    line = refusal(tmp_path, text, collective="all_reduce")
    assert described[1] in line and described[2] not in line
    # None of the tables fits, so that choosing one by its number would not help either.
    for wanted in ("--collective reduce_scatter", "--ranks 7"):
        option, _, value = wanted.partition(" ")
        options: dict[str, Any] = {option[2:]: int(value) if value == "7" else value}
        line = refusal(tmp_path, text, **options)
        assert "none of its 4 tables" in line and f"leave {wanted} out" in line
        assert all(words in line for words in described)
    assert read(tmp_path, text, table=2)[2]["ranks"] == 8
    assert read(tmp_path, text, collective="all_reduce", ranks=8)[2]["ranks"] == 8
    one_rank = {osu(f"MPI All-to-All{v} Personalized Exchange"): 8 for v in ("", "v")}
    one_rank |= {imb("Allgather"): 8, imb("Reduce_scatter"): 1, osu("MPI Broadcast"): 1}
    for text, n in one_rank.items():
        assert (read(tmp_path, text, ranks=8)[0] == np.multiply(SIZES, n)).all()


def test_a_refusal_names_the_cause(tmp_path: Path) -> None:
    for text, words in {
        "mpirun -np 2 x\nn1: Test NCCL failure\n": "its last line 'n1: Test NCCL failure'",
        nccl().partition("#  (B)")[0]
        + "killed\n": "did the run fail? Its last line is 'killed'",
        "# nThread 1 nGpus 2 minBytes 8\nn1: Test NCCL failure\n": "a log of nccl-tests without a table",
        "# Size Avg Latency(us)\n8 2.15\n16 2.2": "fewer digits than in the row before",
        osu("MPI").replace(
            "avg ", ""
        ): "of the test Latency, without average times of a collective",
        osu(
            "MPI Allgather"
        ): "the bytes of all_gather are those of one rank: give --ranks",
        osu().replace(
            "OSU", ""
        ): "does not name its collective: give --collective all_reduce or",
        osu().replace("21.59", "nan"): "is 'nan'",
        imb().replace("21.59", "1e308"): "is '1e308'",
        nccl(n=1, title="all_reduce"): "all its times are of one rank",
    }.items():
        assert words in refusal(tmp_path, text)


def test_a_row_of_too_few_or_too_many_words_is_told_apart(tmp_path: Path) -> None:
    lines = nccl(title="all_reduce").splitlines()
    number = next(
        number for number, line in enumerate(lines) if len(line.split()) == 13
    )
    for change, words in (
        (" 1 2", "has 15 words instead of 13: remove"),
        ("", "is cut"),
    ):
        changed = lines[number] + change if change else lines[number][:40]
        text = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
        assert words in refusal(tmp_path, text)


def test_a_number_of_ranks_of_the_user_is_named_where_rates_contradict_it(
    tmp_path: Path,
) -> None:
    text = re.sub(r"(?m)^#\s+Rank.*\n", "", nccl(n=8, title="all_reduce"))
    assert read(tmp_path, text, ranks=8)[2]["ranks"] == 8
    assert "check --ranks 2" in refusal(tmp_path, text, ranks=2)


@pytest.mark.parametrize("place", ["in_place", "out_of_place"])
def test_programs_without_places_refuse_one(place: str, tmp_path: Path) -> None:
    for text in (osu(), imb()):
        assert "leave --place out" in refusal(tmp_path, text, place=place)


@functools.cache
def rows_of_whole(kept: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    sizes, seconds, _ = read(folder, FORMATS[kept])
    return sizes, seconds


@pytest.mark.parametrize("kept", FORMATS)
@given(cut=st.integers(0, 30), each=st.sampled_from([1, 2]))
def test_a_cut_or_doubled_log_is_refused_or_has_rows_of_the_whole(
    kept: str, cut: int, each: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = FORMATS[kept].splitlines(keepends=True)
    with contextlib.suppress(UserError):
        sizes, seconds, _ = read(folder, "".join(line * each for line in lines[:cut]))
        whole = rows_of_whole(kept, folder)
        assert np.array_equal(
            [sizes, seconds], [column[: len(sizes)] for column in whole]
        )
        assert each == 1 and (
            kept not in ("nccl", "old") or len(sizes) == len(whole[0])
        )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_mutated_logs_are_refused_or_read(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """50,000 with --long, and a million rows."""
    is_long, path, taken = request.config.getoption("--long"), tmp_path / "a.log", 0
    n = 1_000_000 if is_long else 100_001
    rows = "".join(f"{k} {us(k):.2f} 1.00\n" for k in range(1, n + 1))
    assert f"{n} rows, more than 100000" in refusal(
        tmp_path, osu().partition("1024")[0] + rows
    )
    for number in range(50_000 if is_long else 300):
        draw = random.Random(number)
        text = draw.choice([*FORMATS.values()]).encode()
        for _ in range(draw.choice((1, 2, 3))):
            text = fuzzing._mutated_file("log", text, draw)
        path.write_bytes(text)
        with contextlib.suppress(UserError):  # whose text is one line, by test_shown.py
            sizes, seconds, _ = read_bytes_seconds(path)
            assert (
                len(sizes)
                and min(sizes) > 0
                and 0 < min(seconds) <= max(seconds) < np.inf
            )
            taken += 1
    assert 0 < taken < number


def test_commands_tell_another_collective_and_several_populations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    """Times in place are taken alone if the two differ by more than they scatter; an outlier is scatter."""
    near, log = np.random.default_rng(0).lognormal(0, 0.02, (9, 2)), tmp_path / "a.log"

    def slower(*factors: int) -> str:
        times = (
            near
            * np.transpose([factors, [1] * 9])
            * np.transpose([[us(s) for s in SIZES]])
        )
        return nccl(
            rows="".join(row("all_reduce", 8, SIZES[k], *times[k]) for k in range(9))
        )

    def told(words: str, status: int = 0) -> Any:
        assert cli.main(f"{words} --json".split()) == status
        printed = capsys.readouterr()
        return printed.err if status else json.loads(printed.out)

    for factors in ([1] * 9, [1] * 4 + [9] + [1] * 4):
        sizes, _, meta = read(tmp_path, slower(*factors))
        assert len(sizes) == 18 and "place" not in meta
    _, seconds, meta = read(tmp_path, text := slower(*[10] * 5, *[1] * 4))
    np.testing.assert_array_equal(seconds, read(tmp_path, text, place="in_place")[1])
    assert meta["place"].startswith("in_place: ") and "out_of_place" in meta["place"]
    assert (
        meta["place"]
        in told(f"predict --profile {profile} --collectives {log}")["warnings"][0]
    )
    log.write_text(nccl("alltoall", title="alltoall"))
    (tmp_path / "cost.json").write_text(json.dumps(told(f"fit {log}")))
    for source in (f"--collectives {log}", f"--cost {tmp_path / 'cost.json'}"):
        line = told(f"predict --profile {profile} {source}", 2)
        assert "alltoall" in line and "all_reduce" in line
    both = [f"{s},{us(s) * k * 1e-6}\n" for s in SIZES for k in (1, 1, 10, 10)]
    log.write_text("".join(["bytes,seconds\n", *both]))
    assert "of several kinds" in told(f"fit {log} --form table")["fit"]["warnings"][0]
