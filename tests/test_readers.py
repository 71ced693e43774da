"""Laws of foreign formats: each file is its own reader's first; one of no format is told which were tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuzzing
from ddlkit.cli.command import COMMANDS
from ddlkit.core.errors import UserError
from ddlkit.formats import ImportOptions, import_file
from ddlkit.formats.contract import KEYS, MessageOptions
from ddlkit.formats.messages import read_bytes_seconds
from ddlkit.formats.readers import LAYER_PROFILES, MESSAGE_TIMES, Reader, first_match
from ddlkit.store import files

INSPECTED = (
    '{"header": {"n_ranks": 4, "nnodes": 1}, "coll_perf": {"coll": "AllReduce", '
    '"coll_msg_size_bytes": 4096, "coll_exec_time_us": 12}}'
)
NCCL_JSON = """{"nccl_version": 22803, "args": ["./all_reduce_perf"],
"config": {"nthreads": 1, "ngpus": 4, "devices": [{"rank": 0, "group": 0}]},
"results": [{"size": 4096, "in_place": {"time": 12.5, "bus_bw": 0.49152}}]}"""
SHAPES = "name,layers,d_model,heads,d_ff,vocabulary\nmine,2,8,2,32,100\n"
EXAMPLES = {
    "log": fuzzing.LOG,
    "csv": f"bytes,seconds\n{fuzzing.TIMES}",
    "nccl-tests-json": NCCL_JSON,
    "rccl-tests-csv": "numCycle,collective,gpus,size,inplace,time,busbw\n"
    "0,AllReduce,4,4096,1,12.5,0.49\n",
    "nccl-inspector": INSPECTED,
    "all-reduce-bench": "of all_reduce over 4 ranks\n| payload | busbw | algbw |\n"
    "| 32KiB | 1.50GBps | 1.00GBps |\n",
    "deepspeed": "---- Performance of all_reduce on 4 devices ----\n"
    "Size (Bytes)  Description  Duration  Throughput (Gbps)  BusBW (Gbps)\n"
    "4.0 KB  1024x4  12.500 us  5.243  3.932\n",
    "hccl-test": "./bin/all_reduce_test -p 4\n"
    "data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:\n"
    "4096 | 12.50 | 0.32768 | success\n",
    "nccom-test": "nccom-test -r 4 allr\n"
    "size(B) count(elems) type time:avg(us) algbw(GB/s) busbw(GB/s)\n"
    "4096 1024 fp32 12.5 0.33 0.49\n",
    "trace": fuzzing.TRACE,
    "kineto": files.read_text(fuzzing.PROFILED_TRAINING),
    "flops": fuzzing.FLOPS,
    "transformer": SHAPES,
}
"""A small file of each format, which its reader takes with OPTIONS alone."""
OPTIONS = {
    "flops": ImportOptions(compute_s=1.0),
    "transformer": ImportOptions(compute_s=1.0, sequence=4),
}


def test_each_format_has_one_name_and_one_example() -> None:
    readers: tuple[Reader[Any, Any], ...] = (*MESSAGE_TIMES, *LAYER_PROFILES)
    names = [reader.name for reader in readers]
    assert sorted(names) == sorted(EXAMPLES)


@pytest.mark.parametrize("reader", MESSAGE_TIMES, ids=lambda reader: str(reader.name))
def test_message_times_are_read_by_the_reader_of_their_format_and_by_none_before_it(
    reader: Reader[MessageOptions, Any], tmp_path: Path
) -> None:
    text = EXAMPLES[reader.name]
    assert first_match(MESSAGE_TIMES, text) is reader
    rows = reader.read(text, "mine", MessageOptions()).rows
    assert {"bytes", "seconds"} <= {*rows} <= {"bytes", "seconds", *KEYS}
    assert len(rows) and (rows[["bytes", "seconds"]] > 0).all(axis=None)
    (tmp_path / "mine").write_text(text)
    sizes, seconds, _ = read_bytes_seconds(tmp_path / "mine")
    np.testing.assert_array_equal(sizes, rows["bytes"])
    np.testing.assert_array_equal(seconds, rows["seconds"])


@pytest.mark.parametrize("reader", LAYER_PROFILES, ids=lambda reader: str(reader.name))
def test_a_profile_is_read_by_the_reader_of_its_format_and_by_none_before_it(
    reader: Reader[ImportOptions, Any], tmp_path: Path
) -> None:
    text = EXAMPLES[reader.name]
    assert first_match(LAYER_PROFILES, text) is reader
    options = OPTIONS.get(reader.name, ImportOptions())
    profile = reader.read(text, "mine", options).profile
    (tmp_path / "mine").write_text(text)
    imported = import_file(tmp_path / "mine", options=options)
    assert imported.kind == reader.name
    assert imported.profile.tensor == profile.tensor
    np.testing.assert_array_equal(imported.profile.backward_s, profile.backward_s)


@pytest.mark.parametrize(
    ("command", "readers"), [(read_bytes_seconds, ()), (import_file, LAYER_PROFILES)]
)
def test_a_file_of_no_format_is_told_what_was_tried_and_how_it_begins(
    command: Callable[[Path], Any],
    readers: tuple[Reader[Any, Any], ...],
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("\nsize;rate\n8;2.1\n")
    with pytest.raises(UserError) as caught:
        command(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") and "\n" not in line
    assert "its first line is 'size;rate'" in line
    for reader in readers:
        assert reader.takes in line


def test_the_help_of_fit_lists_every_format_of_message_times() -> None:
    (argument,) = (a for a in COMMANDS["fit"].arguments if a.names == ("file",))
    listed = " ".join(argument.options["help"].split())
    for reader in MESSAGE_TIMES:
        assert reader.takes in listed
