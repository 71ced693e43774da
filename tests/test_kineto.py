"""Profiles of torch.profiler: a real one of this machine, one as a GPU writes them, and what they lack."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from ddlkit import cli
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.formats import import_file, kineto
from ddlkit.formats.kineto import (
    ACCUMULATE,
    BACKWARD,
    EVALUATE,
    FORWARD,
    UPDATE,
    Event,
    KinetoTrace,
    layer_profile,
    parse_kineto,
    timeline,
)
from ddlkit.store import files

PHASES = [
    Event(FORWARD, 10.0, 11.0),
    Event(BACKWARD, 11.0, 14.0),
    Event(UPDATE, 14.0, 14.5),
]
GRADIENT = f"{EVALUATE}: {ACCUMULATE}"


def read_kineto(path: Path) -> KinetoTrace:
    return parse_kineto(files.read_text(path), str(path))


def profile_of(*events: Event) -> KinetoTrace:
    return KinetoTrace("test", tuple(sorted(events, key=lambda event: event.start_s)))


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), st.floats(0.1, 2.9))
def test_backward_ends_with_the_last_gradient(
    lengths: list[float], last: float
) -> None:
    ends = 11.0 + np.cumsum(lengths)
    starts = np.concatenate([[11.0], ends[:-1]])
    messages = [
        Event("gloo:all_reduce", a, b)
        for a, b in zip(starts, ends, strict=True)
        if b < 14.5
    ]
    gradients = [Event(GRADIENT, 11.0, 11.05), Event(GRADIENT, 11.05, 11.0 + last)]
    sizes = list(range(1, len(messages) + 1))
    found = timeline(profile_of(*messages, *gradients, *PHASES), sizes)
    assert found.busy_s(("forward",)) == pytest.approx(1.0)
    assert found.busy_s(("backward",)) == pytest.approx(last)
    assert found.busy_s(("wait",)) == pytest.approx(3.0 - last)
    assert found.select(found.kind == "all_reduce").bytes.tolist() == sizes


MESSAGES = {
    ("gloo:all_reduce", False): "all_reduce",
    ("nccl:all_reduce", False): "",  # the range around the launch
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(Args<4096ul>)", True): "all_reduce",
    ("ncclKernel_AllGather_RING_LL_Sum_int8_t", True): "all_gather",
    ("ncclDevKernel_Generic_4", True): "other",
    ("void gemm", True): "",
}


def test_a_message_is_known_by_its_name() -> None:
    for (name, on_gpu), collective in MESSAGES.items():
        assert Event(name, 0, 1, on_gpu).collective == collective
    for collective, known in COLLECTIVES.items():
        assert Event(f"gloo:{collective}", 0, 1).collective == collective
        told = {"Collective name": known.process_group_name}
        kernel = Event("ncclDevKernel_Generic_4", 0, 1, True, args=told)
        assert kernel.collective == collective


N_ITERATIONS = 3


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*convolution, nn.Linear(288, 16), nn.ReLU(), nn.Linear(16, 4))


def record(model: nn.Module, path: Path, **options: Any) -> None:
    """Profile some marked iterations of training, after one that is not profiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))

    def iterate() -> None:
        optimizer.zero_grad()
        with record_function(FORWARD):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        with record_function(BACKWARD):
            loss.backward()
        with record_function(UPDATE):
            optimizer.step()

    iterate()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], **options
    ) as profiler:
        for _ in range(N_ITERATIONS):
            iterate()
    profiler.export_chrome_trace(str(path))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kineto") / "cpu.json.gz"
    record(tiny(), path, record_shapes=True)
    return path


def test_a_recorded_profile_holds_every_gradient_of_the_network(recorded: Path) -> None:
    profile, _ = layer_profile(read_kineto(recorded))
    assert sorted(profile.parameters) == sorted(p.numel() for p in tiny().parameters())
    assert profile.gradient_bytes.tolist() == (4 * profile.parameters).tolist()
    assert profile.forward_s[0] > 0 and not profile.forward_s[1:].any()
    assert (profile.backward_s > 0).all() and profile.update_s > 0
    findings = import_file(recorded).findings
    assert [finding.what for finding in findings] == ["iterations", "profiler", "batch"]


def test_phases_found_without_marks_lie_where_the_marks_are(recorded: Path) -> None:
    events = json.loads(files.read_text(recorded))["traceEvents"]
    unmarked = [e for e in events if e["name"] not in (FORWARD, BACKWARD, UPDATE)]
    without = parse_kineto(json.dumps({"traceEvents": unmarked}), "unmarked")
    for marked, found in zip(
        *map(kineto.iterations, (read_kineto(recorded), without)), strict=True
    ):
        (opens, closes), (start, end) = (
            marked.phases["forward"],
            found.phases["forward"],
        )
        assert opens <= start < closes <= end == found.phases["backward"][0]
        for kind in ("backward", "update"):
            (opens, closes), (start, end) = marked.phases[kind], found.phases[kind]
            assert opens <= start < end <= closes
        assert found.gradients_end_s() == marked.gradients_end_s()


def test_what_a_recorded_profile_lacks_is_said(tmp_path: Path) -> None:
    path = tmp_path / "no-shapes.json"
    record(tiny(), path)
    with pytest.raises(
        UserError, match=r"no-shapes\.json: sizes of gradients.*record_shapes=True"
    ):
        layer_profile(read_kineto(path))
    assert timeline(read_kineto(path)).n == 4 * N_ITERATIONS  # and a wait, of marks


LAUNCH_US = 2.0


class Gpu:
    """A Chrome trace in the making: the processor launches, and one stream works it off."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now_us = 1e9
        self.free_us = self.now_us

    def add(self, name: str, start: float, end: float, cat: str, **args: Any) -> None:
        event = {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args})

    def launch(
        self, name: str, took_us: float, cat: str = "kernel", **args: Any
    ) -> None:
        link = {"correlation": len(self.events)}
        with self.within("cudaLaunchKernel", "cuda_runtime", **link):
            self.now_us += LAUNCH_US
        start = max(self.free_us, self.now_us)
        self.free_us = start + took_us
        self.add(name, start, self.free_us, cat, **link, **args)

    @contextmanager
    def within(self, name: str, cat: str = "cpu_op", **args: Any) -> Iterator[None]:
        start = self.now_us
        self.now_us += 0.5
        yield
        self.now_us += 0.5
        self.add(name, start, self.now_us, cat, **args)

    def json(self) -> str:
        properties = [{"id": 0, "name": "NVIDIA Toy"}]
        return json.dumps({"deviceProperties": properties, "traceEvents": self.events})


def gpu_training(forward: list[float], backward: list[float], *paces: float) -> str:
    """Layers of so many microseconds on the GPU, times a pace; layer i has 10 (i + 1) parameters."""
    gpu = Gpu()
    for pace in paces or (1.0,):
        gpu.launch("Memcpy HtoD (Pageable -> Device)", 50.0, "gpu_memcpy")
        for i, took_us in enumerate(forward):
            with gpu.within("aten::linear", "cpu_op", **{"Sequence number": i}):
                gpu.launch("gemm", took_us * pace)
        for i in reversed(range(len(backward))):
            node: dict[str, Any] = {"Sequence number": i}
            with gpu.within(f"{EVALUATE}: AddmmBackward0", **node):
                gpu.launch("wgrad", backward[i] * pace)
            shape: dict[str, Any] = {
                "Input Dims": [[10 * i + 10]],
                "Input type": ["c10::BFloat16"],
            }
            with gpu.within(GRADIENT), gpu.within(ACCUMULATE, **shape):
                pass
        sent: dict[str, Any] = {
            "In msg nelems": 1000,
            "Out msg nelems": 1000,
            "dtype": "BFloat16",
        }
        gpu.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 10.0, **sent)
        with gpu.within("Optimizer.step#SGD.step", "user_annotation"):
            gpu.launch("sgd", 30.0)
    return gpu.json()


lengths = st.lists(
    st.tuples(st.floats(100, 1e4), st.floats(100, 1e4)), min_size=1, max_size=5
)


@given(lengths, st.integers(1, 3))
def test_times_of_a_gpu_are_those_of_its_kernels(
    layers: list[tuple[float, float]], k: int
) -> None:
    forward, backward = map(list, zip(*layers, strict=True))
    trace = parse_kineto(gpu_training(forward, backward, *[1.0] * k), "gpu")
    profile, _ = layer_profile(trace)
    # The processor runs ahead, so that kernels follow one another at once.
    assert profile.forward_s.sum() * 1e6 == pytest.approx(sum(forward), rel=1e-3)
    assert profile.backward_s * 1e6 == pytest.approx(backward, rel=1e-3)
    assert profile.update_s * 1e6 == pytest.approx(30, rel=1e-3)
    assert profile.parameters.tolist() == [10 * (i + 1) for i in range(len(layers))]
    assert profile.gradient_bytes.tolist() == (2 * profile.parameters).tolist()
    assert profile.device == "NVIDIA Toy"


def test_timeline_of_a_gpu_shows_kernels_copies_and_messages() -> None:
    trace = parse_kineto(gpu_training([200.0, 300.0], [400.0, 600.0], 1.0, 1.0), "gpu")
    line = timeline(trace)
    first = line.select(line.iteration == 0)
    kinds = "h2d forward forward backward backward all_reduce update"
    assert first.kind.tolist() == kinds.split()
    assert first.busy_s(("backward",)) == pytest.approx(1e-3)
    assert first.exposed_communication_s() == pytest.approx(1e-5, rel=1e-3)
    assert first.bytes.tolist() == [0, 0, 0, 0, 0, 2000, 0]


SPAN = '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1%s}]}'
UNREADABLE = {
    SPAN % "": r"traceEvents\[0\] \('a'\): ts 1 and dur None",
    SPAN % ', "dur": 1': "no operator of PyTorch .* a trace of another program",
    SPAN.replace('"a"', '"aten::mm"') % ', "dur": 1': "no iteration has both",
    "[[1, 2]]": "no Chrome trace",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(
        UserError, match=rf"^[^\n]*mine\.json\.gz: [^\n]*{UNREADABLE[text]}[^\n]*$"
    ):
        layer_profile(read_kineto(path))


Events = list[dict[str, Any]]
LAYERS = [200.0, 300.0], [400.0, 600.0]


def of(events: Events, name: str, **changes: Any) -> dict[str, Any]:
    return {**next(e for e in events if e["name"].startswith(name)), **changes}


def edited(add: Callable[[Events], Events], *gone: str) -> str:
    events = json.loads(gpu_training(*LAYERS))["traceEvents"]
    return json.dumps(
        [e for e in events if not e["name"].startswith(gone)] + add(events)
    )


STEP = {"ph": "X", "name": "ProfilerStep#7", "dur": 9e3}
LEFT_OUT: dict[str, Callable[[Events], Events]] = {
    "1 spans of the GPU": lambda es: [of(es, "gemm", ts=1e9 - 5e3, dur=5e3, args={})],
    "1 gradients: undefined": lambda es: [
        of(es, ACCUMULATE, args={"Input type": [""]})
    ],
    "1 of 2 steps": lambda _: [{**STEP, "ts": 1e9}, {**STEP, "ts": 1e9 + 9e3}],
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_belongs_to_no_iteration_is_left_out_and_counted(what: str) -> None:
    whole, _ = layer_profile(parse_kineto(gpu_training(*LAYERS), "whole"))
    less, (_, finding) = layer_profile(parse_kineto(edited(LEFT_OUT[what]), "less"))
    for name in ("parameters", "forward_s", "backward_s", "update_s"):
        assert getattr(less, name) == pytest.approx(getattr(whole, name))
    assert finding.text.startswith(what)


def test_no_work_of_a_gpu_that_is_behind_counts_twice() -> None:
    """Here two iterations, and a kernel of the second's forward that another stream does at once."""
    events = json.loads(gpu_training(*LAYERS, 1.0, 1.0))["traceEvents"]
    launch, gemm = [
        events[k - 1 : k + 1] for k, e in enumerate(events) if e["name"] == "gemm"
    ][2]
    events.append({**gemm, "tid": 7, "ts": launch["ts"] + LAUNCH_US, "dur": 1.0})
    profile, _ = layer_profile(parse_kineto(json.dumps(events), "gpu"), [1])
    assert profile.forward_s.sum() == pytest.approx(
        550e-6, rel=1e-3
    )  # 50 of them the copy before


def test_iterations_of_two_kinds_are_shown_as_two_and_chosen() -> None:
    mixed = parse_kineto(gpu_training(*LAYERS, 1.0, 9.0, 1.0, 9.0, 9.0), "gpu")
    with pytest.raises(
        UserError,
        match=r"0,2 compute for 1\.53 ms each .* 1,3-4 compute for 13\.5 ms each .* 0,2$",
    ):
        layer_profile(mixed)
    for chosen, pace in (((0, 2), 1e-6), ((1, 3, 4), 9e-6)):
        profile, _ = layer_profile(mixed, chosen)
        assert profile.backward_s == pytest.approx(np.array(LAYERS[1]) * pace, rel=1e-3)
    mostly = parse_kineto(gpu_training(*LAYERS, 9.0, 1.0, 1.0), "gpu")
    assert (
        "numbers 1-2 compute for 1.53 ms each (median); number 0 computes for 13.5 ms"
        in layer_profile(mostly)[1][0].text
    )


REFUSED: dict[str, tuple[Callable[[Events], Events], tuple[str, ...]]] = {
    "forward runs again": (
        lambda es: [of(es, "aten::linear", ts=of(es, "Optimizer")["ts"])],
        (),
    ),
    "its phases take": (lambda es: [of(es, "sgd", ts=of(es, "gemm")["ts"])], ()),
    "a PyTorch before 1.12": (lambda _: [], (EVALUATE,)),
    "cudaLaunchKernel gives work": (
        lambda _: [],
        ("gemm", "wgrad", "sgd", "nccl", "Memcpy"),
    ),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_a_trace_is_refused_by_its_cause_and_nothing_is_written(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add, gone = REFUSED[cause]
    trace, *outs = (tmp_path / name for name in ("in.json", "out.csv", "sent.csv"))
    trace.write_text(edited(add, *gone))
    assert (
        cli.main(
            ["import", str(trace), "--out", str(outs[0]), "--messages", str(outs[1])]
        )
        == 2
    )
    line = capsys.readouterr().err
    assert (
        cause in line
        and line.count("\n") == 1
        and not any(out.exists() for out in outs)
    )


def test_a_message_has_its_size_from_what_launched_it(tmp_path: Path) -> None:
    gpu, dims = Gpu(), {"Input Dims": [[500]], "Input type": ["float"]}
    sizes = {
        "In msg nelems": 500,
        "Out msg nelems": 1000,
        "dtype": "Float",
        "Group size": 2,
    }
    for name, args, launches in (
        ("record_param_comms", {**sizes, "Collective name": "_allgather_base"}, 1),
        ("nccl:all_reduce", dims, 1),
        ("nccl:all_reduce", dims, 2),  # of how much each?
        ("nccl:_all_gather_base", dims, 1),  # a share of what is gathered
        ("nccl:allreduce_coalesced", dims, 1),  # the first of many
    ):
        with gpu.within(name, "user_annotation", **args):
            for _ in range(launches):
                gpu.launch("ncclDevKernel_Generic(...)", 7.0)
    gpu.launch("gemm", 7.0)
    trace, sent = tmp_path / "in.json", tmp_path / "sent.csv"
    trace.write_text(gpu.json())
    assert cli.main(["import", str(trace), "--messages", str(sent), "--json"]) == 0
    rows = [row.split(",")[::2] for row in sent.read_text().splitlines()[1:]]
    assert rows == [["4000", "all_gather"], ["2000", "all_reduce"]]


@given(st.data())
def test_a_damaged_trace_is_one_line_or_finite(data: st.DataObject) -> None:
    events = json.loads(gpu_training(*LAYERS))["traceEvents"]
    event = data.draw(st.sampled_from(events))
    values: list[Any] = [None, "", [], {}, -1, 1e308, math.nan, 10**30, [[-1]], True]
    event[data.draw(st.sampled_from(sorted(event)))] = data.draw(
        st.sampled_from(values)
    )
    text = json.dumps(events)
    text = text[: data.draw(st.just(len(text)) | st.integers(0, len(text)))]
    try:
        profile, _ = layer_profile(parse_kineto(text, "damaged"))
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert np.isfinite([profile.forward_s, profile.backward_s]).all()


def test_messages_of_sharded_parameters_over_gloo_have_the_size_of_the_whole() -> None:
    """Gloo's spans have the shard of a gather, and send a reduce-scatter as an all-reduce."""
    entries = []
    for start_us, post, shapes, sent in (
        (0, "c10d::_allgather_base_", [[800], [400]], ("gloo:all_gather", [400])),
        (
            500,
            "c10d::_reduce_scatter_base_",
            [[400], [800]],
            ("gloo:all_reduce", [800]),
        ),
        (900, "c10d::allreduce_", [[[800]]], ("gloo:all_reduce", [800])),
    ):
        name, shape = sent
        common = {"ph": "X", "pid": 1}
        entries += [
            {
                **common,
                "name": post,
                "cat": "cpu_op",
                "tid": 1,
                "ts": start_us,
                "dur": 20,
                "args": {"Input Dims": shapes},
            },
            {
                **common,
                "name": name,
                "cat": "user_annotation",
                "tid": 2,
                "ts": start_us + 10,
                "dur": 100,
                "args": {"Input Dims": [shape], "Input type": ["float"]},
            },
        ]
    trace = kineto.trace_of_document({"traceEvents": entries}, "trace.json")
    table, _ = kineto.message_table(trace)
    rows = [line.split(",") for line in table.splitlines()[1:]]
    assert [(row[2], int(row[0])) for row in rows] == [
        ("all_gather", 3200),
        ("reduce_scatter", 3200),
        ("all_reduce", 3200),
    ]
