"""Benchmarks of other programs are read in the sizes and units of ddlkit, or refused for a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.formats.messages import read_bytes_seconds
from ddlkit.store.files import read_text

RANKS = 4
SIZES = [2**14, 2**17, 2**20, 2**23]
BUS_FACTOR = {"all_reduce": 1.5, "all_gather": 0.75}


def us(size: int) -> float:
    """Return the time of a message in microseconds, of numbers of our own."""
    return 15.0 + size * 4e-5


def busbw(size: int, collective: str = "all_reduce") -> float:
    """Return the bus bandwidth of such a message in GB/s."""
    return BUS_FACTOR[collective] * size / us(size) / 1e3


def read(
    folder: Path,
    text: str,
    *,
    collective: str | None = None,
    link: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
) -> tuple[Any, Any, dict[str, Any]]:
    path = folder / "benchmark"
    path.write_text(text)
    return read_bytes_seconds(
        path, collective=collective, link=link, ranks=ranks, place=place, table=table
    )


def refusal(
    folder: Path,
    text: str,
    *,
    collective: str | None = None,
    ranks: int | None = None,
    table: int | None = None,
) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text, collective=collective, ranks=ranks, table=table)
    line = str(caught.value)
    assert "\n" not in line
    return line


def check(
    result: tuple[Any, Any, dict[str, Any]],
    collective: str = "all_reduce",
    rtol: float = 1e-6,
) -> None:
    """Check that sizes, times, collective and ranks are those of `SIZES` and `us`."""
    sizes, seconds, known = result
    assert sorted({*sizes.tolist()}) == SIZES
    np.testing.assert_allclose(seconds, [us(size) * 1e-6 for size in sizes], rtol=rtol)
    assert (known["collective"], known["ranks"]) == (collective, RANKS)


# -- nccl-tests ------------------------------------------------------------------------


def nccl_json(processes: int = 1, groups: int = 1, **changes: Any) -> str:
    """Return the JSON of a run of 4 ranks in a group, in some processes."""
    n_gpus = RANKS * groups // processes
    devices = [
        {"rank": n_gpus * k, "group": k % groups, "pid": k} for k in range(processes)
    ]
    results = []
    for size in SIZES:
        times: dict[str, Any] = {
            "time": us(size),
            "alg_bw": 1.0,
            "bus_bw": round(busbw(size), 6),
        }
        times |= {"nwrong": None, **changes}
        results.append({"size": size, "out_of_place": times, "in_place": times})
    document = {
        "nccl_version": 22803,
        "args": ["/opt/bin/all_reduce_perf", "-J"],
        "config": {"nthreads": 1, "ngpus": n_gpus, "devices": devices},
        "results": [{"size": 0}, *results],
    }
    return json.dumps(document)


@pytest.mark.parametrize(("processes", "groups"), [(1, 1), (2, 1), (4, 1), (12, 3)])
def test_json_of_nccl_tests_has_the_ranks_of_a_group(
    processes: int, groups: int, tmp_path: Path
) -> None:
    """Of a process with several GPUs, it lists the first rank only."""
    check(read(tmp_path, nccl_json(processes, groups)))
    text = nccl_json(processes, groups)
    assert "no row with ranks 2" in refusal(tmp_path, text, ranks=2)


def test_json_of_nccl_tests_is_refused_for_a_reason(tmp_path: Path) -> None:
    assert "3.0 wrong values" in refusal(tmp_path, nccl_json(nwrong=3.0))
    assert "its option -C" in refusal(tmp_path, nccl_json(cpu_time=3.0))
    assert "did the run of nccl-tests end?" in refusal(tmp_path, nccl_json()[:-9])
    assert "contradicts" in refusal(tmp_path, nccl_json(time=15e-6))
    line = refusal(tmp_path, nccl_json(), table=1)
    # A file is of one run, so that there is nothing to choose.
    assert "leave --table out" in line and "choose by" not in line


def nccl_log(ranks: list[tuple[int, int]], times_printed: int = 1) -> list[str]:
    """Return the lines of a log whose ranks and groups are given."""
    lines = times_printed * ["# Collective test starting: all_reduce_perf"]
    for rank, group in ranks:
        lines.append(f"#  Rank {rank:2} Group {group:2} Pid {rank + 7} on n1 device 0")
    head = "#  size  count  type  redop  root" + 2 * "  time  algbw  busbw  #wrong"
    lines += times_printed * [head]
    for size in SIZES:
        algbw = size / us(size) / 1e3
        times = f"  {us(size):.3f}  {algbw:.2f}  {busbw(size):.2f}  0"
        lines += times_printed * [f"  {size}  {size // 4}  float  sum  -1{2 * times}"]
    return [*lines, "# Avg bus bandwidth    : 9.5"]


@pytest.mark.parametrize(("count", "judged"), [(12, "FAILED"), (0, "OK")])
def test_a_log_whose_last_lines_tell_of_wrong_results_is_refused(
    count: int, judged: str, tmp_path: Path
) -> None:
    """Older versions of nccl-tests have no counts of wrong values in their rows."""
    *lines, last = nccl_log([(rank, 0) for rank in range(RANKS)])
    text = "\n".join([*lines, f"# Out of bounds values : {count} {judged}", last])
    if judged == "OK":
        check(read(tmp_path, text), rtol=1e-3)
    else:
        assert str(count) in refusal(tmp_path, text)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_text_in_another_encoding_is_told_by_its_mark(
    encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("bytes,seconds\n1,2\n".encode(encoding))
    if encoding == "utf-16":
        with pytest.raises(UserError, match="UTF-16"):
            read_text(path)
    else:
        assert read_text(path).startswith("bytes")


def test_ranks_in_groups_are_counted_by_group(tmp_path: Path) -> None:
    split = [(rank, rank % 3) for rank in range(3 * RANKS)]
    text = "\n".join(nccl_log(split))
    check(read(tmp_path, text), rtol=1e-3)
    check(read(tmp_path, text, ranks=RANKS), rtol=1e-3)
    assert "no row with ranks 12" in refusal(tmp_path, text, ranks=12)


def test_processes_that_are_each_alone_are_said_to_lack_mpi(tmp_path: Path) -> None:
    at_once = "\n".join(nccl_log(3 * [(0, 0)], times_printed=3))
    line = refusal(tmp_path, at_once)
    assert "3 processes print into one table" in line and "MPI=1" in line
    one_after_the_other = "\n".join(2 * nccl_log([(0, 0)]))
    line = refusal(tmp_path, one_after_the_other)
    assert "2 processes print a table each" in line and "MPI=1" in line


def test_ranks_that_a_failed_attempt_lists_as_well_count_once(tmp_path: Path) -> None:
    ranks = [(rank, 0) for rank in range(RANKS)]
    check(read(tmp_path, "\n".join(nccl_log(2 * ranks))), rtol=1e-3)
    assert "MPI=1" in refusal(tmp_path, "\n".join(nccl_log(2 * ranks, 2)))


@pytest.mark.parametrize("words_before", [3, 5, 7, 9, 12])
@pytest.mark.parametrize("between", [0, 2])
def test_a_row_that_text_of_nccl_interrupts_is_joined(
    words_before: int, between: int, tmp_path: Path
) -> None:
    debug = "n1:41:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    lines = []
    for line in nccl_log([(rank, 0) for rank in range(RANKS)]):
        words = line.split()
        if words[0] == str(SIZES[1]):
            lines.append("  ".join(words[:words_before]) + debug)
            lines += between * [debug]
            lines.append("  " + "  ".join(words[words_before:]))
        elif words[0] == str(SIZES[2]):
            # The text after a whole row ends no row.
            lines.append(line + debug)
        else:
            lines.append(line)
    check(read(tmp_path, "\n".join(lines)), rtol=1e-3)


def test_a_table_that_is_not_there_is_said_not_to_be(tmp_path: Path) -> None:
    text = "\n".join(nccl_log([(rank, 0) for rank in range(RANKS)]))
    line = refusal(tmp_path, text, table=3)
    assert "--table 3" in line and "one table" in line


def test_several_types_at_one_size_are_told_apart(tmp_path: Path) -> None:
    """The option -d all times every type, one after the other, in one table."""
    lines = nccl_log([(rank, 0) for rank in range(RANKS)])
    rows = [line for line in lines if "float" in line]
    halves = [line.replace("float", "half") for line in rows]
    text = "\n".join([*lines[:-1], *halves, lines[-1]])
    assert "column type: several values (float, half)" in refusal(tmp_path, text)
    document = json.loads(nccl_json())
    for result in document["results"][1:]:
        document["results"].append({**result, "redop": "max"})
        result["redop"] = "sum"
        if len(document["results"]) > 2 * len(SIZES):
            break
    line = refusal(tmp_path, json.dumps(document))
    assert "column redop: several values (sum, max)" in line


# -- Other programs --------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["AllReduce", "AllGather"])
def test_csv_of_rccl_tests(collective: str, tmp_path: Path) -> None:
    name = {"AllReduce": "all_reduce", "AllGather": "all_gather"}[collective]
    head = "numCycle,collective,{},size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    early = head.format("gpus")
    later = head.format("ranks,rankspernode,gpusperrank")
    for size in [0, *SIZES]:
        for place in (0, 1):
            rates = f"{us(size):.6f},1.0,{busbw(size, name):.6f}"
            row = f'"float","sum",{place},{rates},"0"\n'
            early += f'0,"{collective}",4,{size},{row}'
            later += f'0,"{collective}",2,2,2,{size},{row}'
    check(read(tmp_path, early), name)
    check(read(tmp_path, later), name)
    assert len(read(tmp_path, early, place="in_place")[0]) == len(SIZES)
    wrong = early.replace('"0"', '"7"')
    assert "7 wrong values" in refusal(tmp_path, wrong)
    assert "contradicts" in refusal(tmp_path, early.replace(",4,", ",8,"))


def test_tables_of_all_reduce_bench(tmp_path: Path) -> None:
    title = "The average bandwidth of all_reduce over 4 ranks (5 warmups / 20 trials):"
    table = "| payload |    busbw   |    algbw   |\n| ------: | ---------: | ----: |\n"
    for size in SIZES:
        payload = f"{size // 2**20}MiB" if size >= 2**20 else f"{size // 2**10}KiB"
        algbw = size / us(size) / 1e3
        table += f"| {payload} | {busbw(size):6.2f}GBps | {algbw:6.2f}GBps |\n"
    check(read(tmp_path, f"{title}\n\n{table}"), rtol=0.01)
    check(read(tmp_path, table, ranks=RANKS, collective="all_reduce"), rtol=0.01)
    assert "contradicts" in refusal(tmp_path, table, ranks=64)
    # torch-dist-bench.py adds latencies, also of sizes without a bandwidth.
    title_of_later = title.replace("bandwidth", "bandwidth and the per-call latency")
    later = table.replace("|\n", "| 9.0us | 9.9us | 9.1us | 20 |\n")
    later += "|   64B |            |            | 8.0us | 8.1us | 8.0us | 99 |\n"
    check(read(tmp_path, f"{title_of_later}\n\n{later}"), rtol=0.01)
    text = f"{title}\n{table}{title.replace('4 ranks', '2 ranks')}\n"
    text += "| payload | busbw | algbw |\n| 16KiB | 1.00GBps | 1.00GBps |\n"
    assert "several values of ranks (4, 2)" in refusal(tmp_path, text)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
@pytest.mark.parametrize("unit", ["Gbps", "GBps"])
@pytest.mark.parametrize("layout", ["units", "milliseconds", "raw"])
def test_logs_of_deepspeed(
    collective: str, unit: str, layout: str, tmp_path: Path
) -> None:
    """The size of an all_gather is printed as that of one rank's input."""
    duration_head = "Duration (us)" if layout == "raw" else "Duration"
    text = f"---- Performance of {collective} on 4 devices ----------\n"
    text += f"Size (Bytes)  Description  {duration_head}  Throughput ({unit})  "
    text += f"BusBW ({unit})\n-----\n"
    for size in SIZES:
        printed = size // RANKS if collective == "all_gather" else size
        rate = busbw(size, collective) * (8 if unit == "Gbps" else 1)
        duration = {
            "raw": f"{us(size):.3f}",
            "units": f"{us(size):.3f} us",
            "milliseconds": f"{us(size) / 1e3:.3f} ms",
        }[layout]
        shown_size = printed if layout == "raw" else f"{printed / 2**10:.2f} KB"
        text += f"{shown_size}  {printed // 4}x4  {duration}  1.0  {rate:.3f}\n"
    check(read(tmp_path, text), collective, rtol=1e-3)
    if layout == "raw":
        without_unit = text.replace(" (us)", "")
        assert "Duration: " in refusal(tmp_path, without_unit)


@pytest.mark.parametrize("parts", [1, RANKS])
def test_logs_of_hccl_test(parts: int, tmp_path: Path) -> None:
    """The size may be printed as that of one rank, which the bandwidth tells."""
    collective = "all_reduce" if parts == 1 else "all_gather"
    command = f"mpirun -n 4 ./bin/{collective}_test -p 4 -b 16K -e 8M\n"
    table = (
        "data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:\n"
    )
    for size in SIZES:
        algbw = size / us(size) / 1e3
        table += f"{size // parts:<17} | {us(size):.2f} | {algbw:.5f} | success\n"
    check(read(tmp_path, command + table, ranks=RANKS), collective, 1e-3)
    check(read(tmp_path, table, ranks=RANKS, collective=collective), collective, 1e-3)
    assert "hccl_test does not name its collective" in refusal(tmp_path, table)
    failed = table.replace("success", "failed")
    assert "check_result" in refusal(tmp_path, failed, collective=collective)
    milliseconds = table.replace(f"{us(SIZES[0]):.2f}", "0.02")
    line = refusal(tmp_path, milliseconds, collective=collective)
    assert "alg_bandwidth" in line and "--ranks" not in line
    # The size may be that of the part of one of these ranks.
    if parts > 1:
        line = refusal(tmp_path, table, collective=collective, ranks=2 * RANKS)
        assert "alg_bandwidth" in line and f"--ranks {2 * RANKS}" in line


@pytest.mark.parametrize(("unit", "time"), [(1e9, "time:avg(us)"), (2**30, "time(us)")])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_logs_of_nccom_test(
    unit: float, time: str, collective: str, tmp_path: Path
) -> None:
    """The unit of the bandwidths depends on the version, and only the command has the ranks."""
    short = {"all_reduce": "allr", "all_gather": "allg"}[collective]
    command = f"$ nccom-test -r {RANKS} --datatype fp32 {short}\n"
    table = f"  size(B)  count(elems)  type  {time}  algbw(GB/s)  busbw(GB/s)\n"
    for size in SIZES:
        algbw = size / us(size) * 1e6 / unit
        rate = busbw(size, collective) * 1e9 / unit
        table += f"{size} {size // 4} fp32 {us(size):.2f} {algbw:.2f} {rate:.2f}\n"
    check(
        read(tmp_path, f"{command}{table}Avg bus bandwidth: 9.5GB/s\n"),
        collective,
        1e-3,
    )
    check(read(tmp_path, table, ranks=RANKS, collective=collective), collective, 1e-3)
    assert "nccom-test does not name its collective" in refusal(tmp_path, table)
    of_more_ranks = command.replace(f"-r {RANKS}", "-r 2")
    assert "contradicts" in refusal(tmp_path, of_more_ranks + table)
    milliseconds = table.replace(f" {us(SIZES[-1]):.2f} ", " 0.5 ")
    assert "algbw(GB/s)" in refusal(tmp_path, command + milliseconds)
    assert "is the log cut?" in refusal(tmp_path, command + table.rstrip()[:-6])


def inspected(collective: str = "AllReduce", parts: int = 1, nodes: int = 1) -> str:
    """Return lines of NCCL Inspector, of two operations of each size."""
    name = {"AllReduce": "all_reduce", "AllGather": "all_gather"}[collective]
    header = {"id": "0x1", "rank": 0, "n_ranks": RANKS, "nnodes": nodes}
    lines = []
    for number, size in enumerate([*SIZES, *SIZES]):
        performance = {
            "coll": collective,
            "coll_sn": number,
            "coll_msg_size_bytes": size // parts,
            "coll_exec_time_us": us(size),
            "coll_timing_source": "kernel_gpu",
            "coll_busbw_gbs": busbw(size, name),
        }
        lines.append(json.dumps({"header": header, "coll_perf": performance}))
    return "\n".join(lines) + "\n"


def test_lines_of_nccl_inspector(tmp_path: Path) -> None:
    """The size of an all_gather is that of one rank; since 4.3 a header is for the lines below."""
    check(read(tmp_path, inspected()))
    check(read(tmp_path, inspected("AllGather", parts=RANKS)), "all_gather")
    lines = [json.loads(line) for line in inspected().splitlines()]
    header = lines[0]["header"]
    stats = json.dumps({"header": header, "dump_stats": {"coll_records": 8}})
    records = [json.dumps({"coll_perf": line["coll_perf"]}) for line in lines]
    check(read(tmp_path, "\n".join([stats, *records])))


def test_lines_of_nccl_inspector_tell_populations_apart(tmp_path: Path) -> None:
    both = inspected(nodes=1) + inspected(nodes=2)
    assert "several values of link (1 node, 2 nodes)" in refusal(tmp_path, both)
    check(read(tmp_path, both, link="2 nodes"))
    by_processor = inspected().replace("kernel_gpu", "collective_cpu")
    assert "not of the GPU" in refusal(tmp_path, by_processor)
    assert "line 8 cannot be read as JSON" in refusal(tmp_path, inspected()[:-20])
    unknown = inspected().replace("AllReduce", "Shuffle")
    assert "'Shuffle'" in refusal(tmp_path, unknown)
    of_one_rank = inspected().replace(f'"n_ranks": {RANKS}', '"n_ranks": 1')
    assert "of one rank" in refusal(tmp_path, of_one_rank)


# -- A user's own tables ---------------------------------------------------------------


def own(header: str, form: str, separator: str = ",") -> str:
    """Return a table with a size in bytes and a time in microseconds, scaled by form."""
    lines = [header]
    for size in SIZES:
        cells = form.format(
            b=size, kib=size / 2**10, s=f"{us(size) / 1e6:.15f}", us=us(size)
        )
        lines.append(cells)
    return "\n".join(lines).replace(",", separator) + "\n"


@pytest.mark.parametrize(
    ("header", "form"),
    [
        ("bytes,seconds", "{b},{s}"),
        ("size_bytes,time_us", "{b},{us}"),
        ("Message size (B),Latency (us)", "{b},{us}"),
        ("size_KiB,avg_latency_us", "{kib},{us}"),
        ("nbytes,microseconds", "{b},{us}"),
        ("size[bytes],time [s],stddev", "{b},{s},0.1"),
        ("size_bytes,min_us,median_us,p99_us", "{b},1,{us},9e9"),
        ("size_bytes,time_us,mean_us", "{b},{us},1"),
    ],
)
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_own_tables_with_units_and_separators(
    header: str, form: str, separator: str, tmp_path: Path
) -> None:
    text = own(header, form, separator).replace("\n", "\n\n", 2) + "\n"
    check(read(tmp_path, text, ranks=RANKS, collective="all_reduce"), rtol=1e-4)


@pytest.mark.parametrize(
    ("separator", "name"),
    [(",", "comma"), (";", "semicolon"), ("\t", "tab"), (" ", "blank")],
)
def test_a_short_row_of_an_own_table_is_told_by_the_separator(
    separator: str, name: str, tmp_path: Path
) -> None:
    text = own("bytes,seconds,note", "{b},{s},1", separator) + f"1{separator}2\n"
    line = refusal(tmp_path, text)
    assert "has 2 fields" in line and f"a {name} is missing" in line


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_times_of_one_rank_are_refused_whatever_is_chosen(
    ranks: int | None, tmp_path: Path
) -> None:
    text = own("bytes,seconds,ranks", "{b},{s},1")
    assert "of one rank" in refusal(tmp_path, text, ranks=ranks)


def test_own_tables_separated_by_blanks(tmp_path: Path) -> None:
    text = own("bytes,seconds", "{b},{s}", "   ")
    check(read(tmp_path, text, ranks=RANKS, collective="all_reduce"), rtol=1e-4)


@pytest.mark.parametrize(
    ("header", "form", "words"),
    [
        (
            "size,time_us",
            "{b},{us}",
            "column size: its unit is not known: name it byte",
        ),
        ("size_MB,seconds", "{b},{s}", "column size_MB: mb may be 1000000 or 1048576"),
        ("bytes,time", "{b},{us}", "column time: its unit is not known: name it sec"),
        ("size_b,time", "{b},{us}", "column time: its unit is not known: name it sec"),
        ("bytes,time_us,time_s", "{b},{us},{s}", "columns time_us, time_s: several"),
        ("bytes,time_s", "{b},{us}", "column time_s: 131072 bytes"),
        (
            "bytes,busbw",
            "{b},{us}",
            "column seconds: missing; the columns are bytes, b",
        ),
        ("seconds;bytes", "'0,1;{b}", 'column seconds: "\'0,1" is not a number'),
        # To name one of the two bytes would change its unit.
        ("size_mib,size_kib,seconds", "1,{kib},{s}", "columns size_mib, size_kib: sev"),
        # The column "b" counts blocks, and "count" counts numbers.
        ("algo,b,time_ms,count", "ring,8,{us},{b}", "column bytes: missing; the col"),
        (
            "size_b,mean_us,median_us",
            "{b},1,{us}",
            "columns mean_us, median_us: several",
        ),
    ],
)
def test_own_tables_are_told_which_column_is_wrong(
    header: str, form: str, words: str, tmp_path: Path
) -> None:
    assert words in refusal(tmp_path, own(header, form))


def divided(column: str, values: list[Any]) -> str:
    """Return a table whose times double with each value of a column."""
    lines = [f"bytes,seconds,{column}"]
    for size in SIZES:
        for number, value in enumerate(values):
            lines.append(f"{size},{us(size) / 1e6 * 2**number:.15f},{value}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("column", ["world_size", "nranks", "n_gpus", "GPUs"])
def test_a_column_of_ranks_is_known_by_other_names(column: str, tmp_path: Path) -> None:
    text = divided(column, [RANKS, 8, 16])
    check(read(tmp_path, text, ranks=RANKS, collective="all_reduce"))
    assert "several values of ranks (4, 8, 16)" in refusal(tmp_path, text)
    assert "no row with ranks 2: the rows have ranks 4, 8, 16" in refusal(
        tmp_path, text, ranks=2
    )


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("dtype", ["float", "half"]),
        ("algo", ["Ring", "Tree"]),
        ("proto", ["LL", "Simple"]),
        ("channels", [2, 4, 8]),
        ("in_place", [0, 1]),
    ],
)
def test_a_column_that_divides_the_times_is_used_or_refused(
    column: str, values: list[Any], tmp_path: Path
) -> None:
    line = refusal(tmp_path, divided(column, values))
    assert f"column {column}: " in line and "rows of the same size" in line
    read(tmp_path, divided(column, values[:1]))


@pytest.mark.parametrize("column", ["collective", "op", "Operation"])
@pytest.mark.parametrize("spelling", ["AllGather", "all_gather_perf", "MPI_Allgather"])
def test_a_column_of_collectives_is_known_by_its_cells(
    column: str, spelling: str, tmp_path: Path
) -> None:
    """Times of an all_gather must not be taken for those of an all_reduce."""
    text = divided(column, [spelling])
    check(read(tmp_path, text, ranks=RANKS), "all_gather")
    assert "no row with collective all_reduce" in refusal(
        tmp_path, text, collective="all_reduce"
    )
    both = divided(column, [spelling, "allreduce"])
    assert "several values of collective" in refusal(tmp_path, both)
    check(read(tmp_path, both, ranks=RANKS, collective="all_gather"), "all_gather")
    # The operation of a reduction is no collective.
    reduced = divided("redop", ["sum"])
    check(read(tmp_path, reduced, ranks=RANKS, collective="all_reduce"))


def test_an_algorithm_which_no_option_chooses_is_left_to_the_user(
    tmp_path: Path,
) -> None:
    line = refusal(tmp_path, divided("algorithm", ["ring", "tree"]))
    assert "algorithm (ring, tree): keep the rows of one of them" in line


@pytest.mark.parametrize("column", ["repeat", "trial", "iteration"])
def test_a_column_of_repeats_divides_nothing(column: str, tmp_path: Path) -> None:
    assert len(read(tmp_path, divided(column, [0, 1, 2]))[0]) == 3 * len(SIZES)


def test_a_column_of_measured_numbers_divides_nothing(tmp_path: Path) -> None:
    lines = ["bytes,seconds,stddev,algo"]
    for number, size in enumerate([*SIZES, *SIZES]):
        algo = "Tree" if size < SIZES[2] else "Ring"
        lines.append(f"{size},{us(size) / 1e6:.15f},{0.1 + number / 97:.5f},{algo}")
    assert len(read(tmp_path, "\n".join(lines))[0]) == 2 * len(SIZES)


def test_a_csv_that_names_no_collective_is_of_the_one_that_the_user_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, profile = tmp_path / "times.csv", tmp_path / "profile.csv"
    times.write_text("bytes,seconds\n1024,1e-5\n4096,2e-5\n65536,1e-4\n")
    profile.write_text("tensor,forward_s,backward_s,gradient_bytes\na,1e-3,2e-3,4096\n")
    words = f"predict --profile {profile} --collectives {times} --ranks 4 --plan ddp"
    assert cli.main(words.split()) == 0
    assert "the cost is of" not in capsys.readouterr().err
    assert cli.main([*words.split(), "--collective", "all_gather"]) == 0
    assert "the cost is of all_gather" in capsys.readouterr().err
