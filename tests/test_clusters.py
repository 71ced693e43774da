"""What others measured: shipped as taken, under known licences, and read in seconds and bytes or refused."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import MB, MIB
from ddlkit.formats import clusters
from ddlkit.formats.clusters import EXTERNAL, abci, cs336, pipedream, pollux, triosim, vidur
from ddlkit.formats.messages import read_bytes_seconds
from ddlkit.store import readers
from ddlkit.store.readers import published_networks

LOGS = sorted((EXTERNAL / "abci").glob("*.log.gz"))
RUNS = sorted((EXTERNAL / "abci").glob("*.json.gz"))
PLACED = sorted((EXTERNAL / "pollux").glob("*-placements.csv.gz"))
SCALED = sorted((EXTERNAL / "pollux").glob("*-scalability.csv.gz"))
GRAPHS = sorted((EXTERNAL / "pipedream").glob("*.gz"))
IMAGENET = EXTERNAL / "pollux" / "imagenet-placements.csv.gz"
DENSE = sorted((EXTERNAL / "vidur").glob("*.csv.gz"))
RESNET = EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz"
MOST_BYTES = 3 * MB

READERS: dict[str, tuple[Path, Callable[[Path], Any]]] = {
    "pollux": (IMAGENET, pollux.read_iterations),
    "scalability": (SCALED[0], pollux.read_iterations),
    "all_reduce": (LOGS[0], abci.read_all_reduce),
    "imagenet": (RUNS[0], abci.read_iterations),
    "trainings": (EXTERNAL / "abci" / "training.csv", abci.read_trainings),
    "buckets": (EXTERNAL / "cs336" / "iterations.csv", cs336.read_iterations),
    "sums": (EXTERNAL / "cs336" / "all_reduce.csv", cs336.read_all_reduce),
    "graph": (EXTERNAL / "pipedream" / "vgg16.txt.gz", pipedream.read_layers),
    "operators": (RESNET, triosim.read_operators),
    "dense": (EXTERNAL / "vidur" / "h100_pairwise_nvlink-64mib.csv.gz", vidur.read_all_reduce),
}


def text(path: Path) -> str:
    return (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()).read()


def own(folder: Path, content: str) -> Path:
    """A file without a SHA256SUMS beside it, as a user has it."""
    path = folder / "mine.txt"
    path.write_text(content)
    return path


# ---------------------------------------------------------------- what is shipped


def test_all_of_it_may_be_shipped_and_is_what_was_taken() -> None:
    clusters.check_sources()
    named = {"pollux", "abci", "cs336", "pipedream", "triosim", "vidur"}
    assert set(clusters.sources()["source"]) == named
    assert clusters.sources()["commit"].str.fullmatch("[0-9a-f]{40}").all()
    assert sum(path.stat().st_size for path in EXTERNAL.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXTERNAL, tmp_path / "external"))


def test_an_unknown_licence_is_refused(copy: Path) -> None:
    table = copy / "sources.csv"
    table.write_text(table.read_text().replace("Apache-2.0", "unknown"))
    with pytest.raises(UserError, match="pollux: licence 'unknown' is not .* do not ship these"):
        clusters.check_sources(copy)


def test_a_licence_without_its_text_or_holder_is_refused(copy: Path) -> None:
    licence, sums = copy / "triosim" / "LICENSE", copy / "triosim" / readers.SUMS
    before = store.sha256_file(licence)
    licence.write_text(licence.read_text().replace("Yifan Sun", "somebody"))
    sums.write_text(sums.read_text().replace(before, store.sha256_file(licence)))
    with pytest.raises(UserError, match="LICENSE: lacks 'Yifan Sun'"):
        clusters.check_sources(copy)
    licence.unlink()
    with pytest.raises(UserError, match="cannot read .*LICENSE"):
        clusters.check_sources(copy)


def test_a_file_or_folder_that_nobody_listed_is_refused(copy: Path) -> None:
    (copy / "cs336" / "more.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match=r"more\.csv is not among what was"):
        clusters.check_sources(copy)
    (copy / "cs336" / "more.csv").unlink()
    (copy / "cs336" / readers.SUMS).unlink()
    with pytest.raises(UserError, match="cs336: has no SHA256SUMS"):
        clusters.check_sources(copy)
    (copy / "elsewhere").mkdir()
    with pytest.raises(UserError, match=r"elsewhere: must be a folder and a row of sources\.csv"):
        clusters.check_sources(copy)


@pytest.mark.parametrize("source", READERS)
def test_a_changed_file_is_not_read(source: str, copy: Path) -> None:
    path, read = READERS[source]
    changed = copy / path.relative_to(EXTERNAL)
    changed.write_bytes(changed.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path.name} differs from what was"):
        read(changed)


# ---------------------------------------------------------------- what is read


@pytest.mark.parametrize("path", PLACED + SCALED, ids=lambda path: path.name)
def test_every_cell_of_pollux_is_as_published(path: Path) -> None:
    """Read anew here, number by number; each iteration is longer than its synchronisation."""
    frame = pollux.read_iterations(path)
    lines = [line.split(",") for line in text(path).splitlines()[1:]]
    assert len(frame) == len(lines)
    for row, cells in zip(frame.itertuples(), lines, strict=True):
        assert [row.batch, row.iteration_s, row.sync_s] == [int(cells[-3]), *map(float, cells[-2:])]
        if len(cells) == 4:
            digits = [int(digit) for digit in cells[0]]
            assert (row.placement, row.nodes, row.ranks) == (cells[0], len(digits), sum(digits))
        else:
            assert (row.placement, row.nodes, row.ranks) == ("", int(cells[0]), int(cells[1]))
    assert (frame["sync_s"] < frame["iteration_s"]).all()


def test_pollux_has_the_cells_that_are_to_be_predicted() -> None:
    """864 cells, less 8 of one GPU and the smallest batch of the other 107 placements."""
    frame = pollux.read_iterations(IMAGENET)
    many = frame[frame["ranks"] > 1]
    assert (len(frame), many["placement"].nunique()) == (864, 107)
    assert len(many[many["batch"] > frame["batch"].min()]) == 749
    alone = frame[frame["ranks"] == 1].sort_values("batch")
    assert (np.diff(alone["iteration_s"]) > 0).all()


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_logs_give_both_columns_as_printed(path: Path) -> None:
    """Both times are what the command's reader gives, and four times the bytes take longer.

    Twice the bytes need not: V100s of one node take 103 us for 2 MiB and 100 us for 4 MiB.
    """
    frame = abci.read_all_reduce(path)
    for place in ("out_of_place", "in_place"):
        n_bytes, seconds, meta = read_bytes_seconds(path, place=place)
        assert frame["bytes"].tolist() == n_bytes.tolist() == [4 * 2**i for i in range(24)]
        np.testing.assert_allclose(frame[f"{place}_s"], seconds, rtol=1e-15)
    assert frame["ranks"].iloc[0] == meta["ranks"]
    per_node = 8 if "A100" in frame["device"].iloc[0] else 4
    assert frame["ranks"].iloc[0] == frame["nodes"].iloc[0] * per_node or "intra" in path.name
    large = frame.loc[frame["bytes"] >= 2**20, ["in_place_s", "out_of_place_s"]].to_numpy()
    assert (large[2:] > large[:-2]).all()


def test_a_row_of_a_log_is_as_printed() -> None:
    row = abci.read_all_reduce(EXTERNAL / "abci" / "allreduce_inter_anode_job02.log.gz").iloc[-1]
    printed = "33554432 8388608 float sum 1887.3 17.78 33.34 5e-07 1885.6 17.80 33.37 5e-07"
    path = EXTERNAL / "abci" / "allreduce_inter_anode_job02.log.gz"
    assert printed in " ".join(text(path).split())
    assert (row["bytes"], row["ranks"], row["nodes"]) == (33554432, 16, 2)
    assert row["device"] == "A100-SXM4-40GB"
    assert (row["out_of_place_s"], row["in_place_s"]) == (1887.3e-6, 1885.6e-6)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_iterations_on_one_node_add_up(path: Path) -> None:
    """An iteration is its data and its compute; steps are 1 to 99; more ranks do not train faster each."""
    frame = abci.read_iterations(path)
    assert frame["step"].tolist() == list(range(1, 100))
    np.testing.assert_allclose(frame["iteration_s"], frame["compute_s"] + frame["data_s"], 1e-12)
    name = path.name.split(".")[0]
    assert frame["ranks"].iloc[0] == int(name.split("gpu")[1][0])
    assert frame["amp"].iloc[0] == name.endswith("amp")
    assert frame["batch"].iloc[0] == (256 if "anode" in name else 128)
    alone = abci.read_iterations(path.with_name(path.name.replace(name.split("_")[2], "gpu1")))
    assert frame["iteration_s"].median() >= alone["iteration_s"].median()


def test_an_iteration_on_one_node_is_as_printed() -> None:
    path = EXTERNAL / "abci" / "imagenet_anode_gpu4_fp32.json.gz"
    row = abci.read_iterations(path).set_index("step").loc[7]
    printed = [json.loads(line[5:]) for line in text(path).splitlines() if '"step": [0, 7]' in line]
    data = printed[0]["data"] | printed[1]["data"]
    assert row["iteration_s"] == 4 * 256 / data["train.total_ips"]
    assert row["compute_s"] == data["train.compute_time"] == 0.33194398880004883
    assert row["data_s"] == data["train.data_time"]


def test_whole_trainings_are_as_published() -> None:
    frame = abci.read_trainings(EXTERNAL / "abci" / "training.csv").set_index(["device", "nodes"])
    assert len(frame) == 11
    assert frame.loc[("A100", 16)].tolist() == [128, 256, 2019.90]
    assert frame.loc[("V100", 32)].tolist() == [128, 96, 3321.17]


def test_buckets_and_sums_of_two_gpus_are_as_published() -> None:
    frame = cs336.read_iterations(EXTERNAL / "cs336" / "iterations.csv")
    assert frame.groupby(["batch", "sequence"])["bucket_bytes"].apply(sorted).tolist() == (
        [[0, MIB, 10 * MIB, 100 * MIB, 1000 * MIB]] * 6
    )
    cells = frame.set_index(["batch", "sequence", "bucket_bytes"])
    assert cells.loc[(4, 512, 100 * MIB)].tolist() == [0.9598, 0.1311, True]
    assert cells.loc[(2, 128, 0)].tolist() == [0.7245, 0.2318, True]
    serial = cs336.read_iterations(EXTERNAL / "cs336" / "serial_iterations.csv")
    assert not serial["overlap"].any() and not serial["bucket_bytes"].any()
    alone = cells.loc[(slice(None), slice(None), 0), "iteration_s"].droplevel("bucket_bytes")
    after = serial.set_index(["batch", "sequence"])["iteration_s"]
    assert (after > alone.reindex(after.index)).all()
    sums = cs336.read_all_reduce(EXTERNAL / "cs336" / "all_reduce.csv")
    assert sums.groupby("ranks").size().to_dict() == {2: 4, 4: 4}
    assert sums.iloc[3].tolist() == [2, 1000 * MIB, 0.05077763646841049]
    by_size = sums.pivot(index="bytes", columns="ranks", values="seconds")
    assert (by_size[4] > by_size[2]).all() and (np.diff(by_size, axis=0) > 0).all()


@pytest.mark.parametrize("path", DENSE, ids=lambda path: path.name)
def test_dense_tables_are_as_published_and_were_measured(path: Path) -> None:
    """Read anew here. The three times of a size differ, and a size that was timed twice took two times."""
    frame = vidur.read_all_reduce(path)
    lines = [line.split(",") for line in text(path).splitlines()[1:]]
    assert len(frame) == len(lines)
    for row, cells in zip(frame.itertuples(), lines, strict=True):
        assert [row.ranks, row.per_node, row.bytes] == [int(cell) for cell in cells[:3]]
        assert [row.min_s, row.median_s, row.max_s] == [int(cell) / 1e6 for cell in cells[3:]]
        assert row.table == f"{path.name.split('-')[0]}-{row.ranks}x{row.per_node}"
    for _, rows in frame.groupby("table"):
        large = rows[rows["bytes"] >= MIB]
        assert len(large) > 860 and large["bytes"].max() == rows["bytes"].max() > 63 * MIB
        assert (large["max_s"] > large["min_s"]).mean() > 0.5
        again = rows[rows["bytes"].duplicated(keep=False)]
        assert again["bytes"].tolist() == [16 * MIB] * 2
        assert len(set(again[["min_s", "median_s", "max_s"]].to_numpy().ravel())) > 1


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.name)
def test_layers_are_in_forward_order_and_no_time_is_lost(path: Path) -> None:
    frame = pipedream.read_layers(path)
    for node, after in zip(frame["node"], frame["after"], strict=True):
        assert max(after, default=0) < node
    assert len(frame) == text(path).count("forward_compute_time=")
    assert sum(map(len, frame["after"])) == text(path).count("\tnode")
    profile = pipedream.layer_profile(frame, "net", 64)
    computed = frame[~frame["layer"].str.startswith("Input")]
    assert profile.gradient_bytes.sum() == frame["parameter_bytes"].sum()
    assert profile.forward_s.sum() == pytest.approx(computed["forward_s"].sum())
    assert profile.backward_s.sum() == pytest.approx(computed["backward_s"].sum())


def test_layers_are_as_printed_and_networks_as_large_as_published() -> None:
    frame = pipedream.read_layers(EXTERNAL / "pipedream" / "resnet50.txt.gz").set_index("node")
    row = frame.loc[76]  # the line of node76
    assert row["layer"].startswith("Conv2d(128, 512, kernel_size=(1, 1)")
    assert (row["forward_s"], row["backward_s"]) == (1.318 / 1e3, 2.796 / 1e3)
    assert (row["activation_bytes"], row["parameter_bytes"]) == (205520896, 262144)
    published = published_networks().set_index("name")["parameters"]
    for name in ("resnet50", "vgg16", "alexnet", "resnet18"):
        layers = pipedream.read_layers(EXTERNAL / "pipedream" / f"{name}.txt.gz")
        if name in published:
            assert layers["parameter_bytes"].sum() == 4 * published[name]


@pytest.mark.parametrize(("name", "tensors"), [("resnet50", 161), ("vgg13", 26)])
def test_a_trace_becomes_a_profile_with_all_its_time_and_tensors(name: str, tensors: int) -> None:
    frame = triosim.read_operators(EXTERNAL / "triosim" / f"{name}-h100-b128.csv.gz")
    assert (frame["busy_s"] <= frame["elapsed_s"]).all()
    profile = triosim.layer_profile(frame, name, 128)
    assert len(profile.tensor) == tensors
    assert profile.workload().compute_s == pytest.approx(frame["busy_s"].sum())
    assert profile.parameters.sum() == sum(triosim.parameters(frame).values())
    first = frame[frame["stage"] == "backward"].iloc[:3]["busy_s"].sum()
    assert profile.workload().backward_s[0] == pytest.approx(first), "loss and last matrix"


def test_operators_are_as_printed() -> None:
    frame = triosim.read_operators(RESNET)
    assert len(frame) == 396
    row = frame.iloc[
        0
    ]  # 1,aten::conv2d,[4; 6],[13],1278,1273,[19267584; 9408],[102760448],0,forward,1
    assert (row["operator"], row["stage"]) == ("aten::conv2d", "forward")
    assert (row["elapsed_s"], row["busy_s"]) == (1278e-6, 1273e-6)
    assert (row["inputs"], row["outputs"]) == ((4, 6), (13,))
    assert row["input_elements"] == (19267584, 9408)
    assert sum(triosim.parameters(frame).values()) == 25_557_032


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("source", READERS)
@pytest.mark.parametrize("kept", [0.05, 0.4, 0.8])
def test_a_file_cut_in_mid_line_is_one_line_of_error(
    source: str, kept: float, tmp_path: Path
) -> None:
    path, read = READERS[source]
    whole = text(path)
    lines = whole.splitlines(keepends=True)
    number = max(1, int(kept * len(lines)))
    cut = "".join(lines[:number]) + lines[number][: len(lines[number]) // 2]
    read(own(tmp_path, whole))
    with pytest.raises(UserError) as error:
        read(own(tmp_path, cut))
    assert "mine.txt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source", READERS)
def test_an_empty_file_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.txt: the file is empty"):
        READERS[source][1](own(tmp_path, " \n"))


# What is exchanged for what, and what is said of it.
DAMAGED = [
    ("pollux", "\n11,20,", "\n,20,", "column placement: '' must not be empty"),
    ("pollux", "\n11,20,", "\n101,20,", "placement '101': must be GPUs of each node"),
    ("pollux", "\n11,20,0.25", "\n11,20,25.25", "placement 11: its step_time .* mixed units"),
    ("pollux", "\n11,20,0.2", "\n11,20,0.0002", "row 9: sync_time above step_time"),
    ("pollux", "\n11,28,", "\n11,20,", "column local_bsz: repeats the row at line 10"),
    ("pollux", "step_time", "step_time_ms", "column step_time"),
    ("scalability", "\n6,6,", "\n6,5,", "row 1: fewer ranks than nodes"),
    ("all_reduce", "(us)", "(ms)", "its columns are not"),
    ("all_reduce", " 1887.3 ", " 1.8873 ", "out_of_place_algbw: contradicts size over time"),
    ("all_reduce", " 33.37 ", " 43.37 ", "in_place_busbw: contradicts size over time"),
    ("all_reduce", "# Avg bus", "# cut", "the log is cut"),
    (
        "imagenet",
        '"train.compute_time": 0',
        '"train.compute_time": 100',
        "contradicts compute_time",
    ),
    ("imagenet", '"train.total_ips"', '"other"', "step 1: lacks 'train.total_ips'"),
    ("trainings", "21247.42", "21.24742", "A100: more nodes take longer: mixed units"),
    ("buckets", ",0.2318", ",231.8", "row 1: wait_s 231.8 is not below"),
    ("sums", "0.00011", "0.11", "2 ranks: more bytes take a tenth of the time"),
    ("graph", "forward_compute_time=", "forward_compute_time_s=", "line 1: neither a node nor"),
    ("graph", "\tnode1 -- node2\n", "", "nothing leads to node2"),
    ("graph", "\tnode1 -- ", "\tnode99 -- ", "an edge from node99 to node2"),
    ("operators", "1278,1273", "1.278,1273", "longer than Operator_cudatime: mixed units"),
    ("operators", ",optimizer,", ",backward,", "the trace is cut"),
    ("dense", "\n2,2,2048,", "\n2,4,2048,", "row 1: more ranks on a node than there are"),
    ("dense", "\n4,4,2048,", "\n4,4,4096,", "its tables are not of the same sizes"),
    ("dense", ",28,28,33\n", ",28,28,0.033\n", "row 2: min, median and max are not in this order"),
    ("dense", "_us,max_us", "_ms,max_ms", "not a column"),
]


@pytest.mark.parametrize(("source", "old", "new", "said"), DAMAGED)
def test_bad_input_is_one_line_that_says_what(
    source: str, old: str, new: str, said: str, tmp_path: Path
) -> None:
    path, read = READERS[source]
    before = text(path)
    assert old in before
    with pytest.raises(UserError, match=said) as error:
        read(own(tmp_path, before.replace(old, new)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["all_reduce", "graph", "operators", "pollux", "buckets"])
def test_two_files_in_one_are_refused(source: str, tmp_path: Path) -> None:
    path, read = READERS[source]
    with pytest.raises(UserError, match=r"mine\.txt"):
        read(own(tmp_path, text(path).rstrip("\n") + "\n" + text(path)))
