"""Inputs as strangers send them: good ones, what chance makes of them, and what an answer must be.

An input is a command and its files. Every mutation is drawn from a generator that is seeded by the input's
kind and number, so that a failure is made again by these two.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import math
import random
import re
import resource
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit import cli
from workbook.cli import PROGRAM
from workbook.common import places

MOST_S = 10.0
"""Of processor time for an input: a thousand times what a good one takes."""
MOST_BYTES = 1536 * 1024**2
"""Of memory for an input, beyond what the process has: what a file of the largest size may take."""
MOST_LINE = 1000


class Input(NamedTuple):
    """A command's words, and its files by name: they lie where it runs."""

    words: tuple[str, ...]
    files: dict[str, bytes]


class Outcome(NamedTuple):
    """How a command ended, what it printed, and what it left: files that are new or not as they were."""

    status: int | str
    out: str
    error: str
    made: dict[str, bytes]


TIMES = "".join(f"{1024 * 4**k},{1e-3 + 8e-9 * 1024 * 4**k}\n" for k in range(8))
PROFILE = "tensor,gradient_bytes,forward_s,backward_s\n" + "".join(
    f"t{k},{1_000_000 * (k + 1)},0.01,0.02\n" for k in range(5)
)
TRACE = "Id\tName\tForward\tBackward\tComm.\tSize\n" + 2 * (
    "0\tdata\t900\t0\t0\t0\n1\tconv1\t20\t40\t50\t4000\n2\trelu\t3\t3\t0\t0\n3\tfc\t10\t25\t70\t8000\n"
)
FLOPS = "tensor,layer,parameters,flops\nconv,conv,1000,1e9\nbias,conv,10,1e6\nfc,fc,5000,2e8\n"
LOG = """# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728
# Using devices
#  Rank  0 Group  0 Pid   7 on      node device  0 [0x00] NVIDIA A100
#  Rank  1 Group  0 Pid   7 on      node device  1 [0x00] NVIDIA A100
# all_reduce_perf
#    size   count   type redop root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#     (B) (elements)                  (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
  1048576  262144  float   sum   -1  100.0  10.49  10.49      0  100.0  10.49  10.49      0
  2097152  524288  float   sum   -1  180.0  11.65  11.65      0  180.0  11.65  11.65      0
  4194304 1048576  float   sum   -1  340.0  12.34  12.34      0  340.0  12.34  12.34      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.4900
"""
LINE = {"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "workers": 4}
DRAWS = [
    {"alpha_s": alpha_s, "beta_s_per_byte": 8e-9} for alpha_s in (1e-3, 2e-3, 1e-3)
]
COSTS: tuple[dict[str, Any], ...] = (
    LINE,
    {
        "form": "table",
        "bytes": [1e3, 1e5, 1e7],
        "seconds": [1e-3, 2e-3, 8e-2],
        "workers": 4,
    },
    LINE | {"fit": {"draws": DRAWS}},
)
GATHER = COSTS[1] | {"collective": "all_gather"}
SELECTION = {"form": "scan", "start_s": 1e-3, "s_per_element": 1e-9}
PLAN = {"planner": "mine", "groups": [[4, 3], [2], [1, 0]], "iteration_s": 0.2}
YAML = """measure: campaign
rounds: 1
calibration: quick
plans: &plans [none, "buffer:4MB"]
points:
  - &lab {networks: resnet18:4, workers: [2], rates: 1gbit}
  - {<<: *lab, workers: 4, plans: *plans}
  - {<<: *lab, engines: emulated, delays: 1ms, losses: 0.1%}
"""
SPANS = "\n".join(
    ["case,repeat,task,kind,stream,rank,iteration,group,origin,start_s,end_s,bytes"]
    + [
        f"c,0,{kind},{kind},compute,{rank},0,-1,replayed,{0.1 * number},{0.1 * number + 0.1},0"
        for rank in range(2)
        for number, kind in enumerate(("forward", "backward", "all_reduce", "update"))
    ]
)
"""A timeline in the columns of a recorded one."""


def _import(kind: str, text: str | bytes, *options: str) -> Input:
    words = ("import", f"in.{kind}", *options, "--out", "out.csv", "--json")
    return Input(
        words, {f"in.{kind}": text.encode() if isinstance(text, str) else text}
    )


def asked(cost: Any, *options: str, **files: str) -> Input:
    words = ("predict", "--profile", "p.csv", "--cost", "c.json", *options, "--json")
    named = {"p.csv": PROFILE, "c.json": json.dumps(cost), **files}
    return Input(words, {name: text.encode() for name, text in named.items()})


PROFILED_TRAINING = places.ROOT / "examples" / "torch_profile_lenet5.json.gz"
STEPS = """gpus,nodes,job,step_s,step,samples,nccl,settings
1,1,a,0.9,0,8,2.27.3,
1,1,a,0.5,1,8,2.27.3,
1,1,a,0.51,2,8,2.27.3,
4,2,b,0.55,1,8,2.27.3,
8,4,c,0.57,1,8,2.27.3,
"""
MORE = """bytes,seconds,ranks,nodes,nccl,settings
1024,2e-5,4,2,2.27.3,
1048576,2e-4,4,2,2.27.3,
33554432,4e-3,4,2,2.27.3,
"""
KERNELS = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.0,6000000,10,600000.0,600000.0,500000,700000,1.0,"void gemm<float, 4>(int, int)"
40.0,3000000,20,150000.0,150000.0,100000,900000,1.0,"ncclDevKernel_AllReduce_Sum_f32_RING_LL(x<4096>)"
"""
SCALED = (
    "scale",
    "--steps",
    "s.csv",
    "--nodes",
    "8",
    "--json",
    "--wish",
    "0.8",
    "--collectives",
)
COUNTS = ("--peak", "1e12", "--utilisation", "0.5", "--batch", "8")
SPARSE = ("--density", "0.01", "--selection", "s.json")
MEASURED = (
    "predict",
    "--profile",
    "p.csv",
    "--collectives",
    "m.csv",
    "--ranks",
    "4",
    "--json",
)
CHOSEN = {
    "import": [
        _import("txt", TRACE),
        _import("json.gz", PROFILED_TRAINING.read_bytes()),
        _import("csv", FLOPS, *COUNTS),
    ],
    "fit": [
        *(
            Input(
                ("fit", "t", "--form", form, "--json"),
                {"t": f"bytes,seconds\n{TIMES}".encode()},
            )
            for form in ("alpha_beta", "segments", "auto")
        ),
        Input(("fit", "log", "--form", "alpha_beta", "--json"), {"log": LOG.encode()}),
    ],
    "predict": [
        *(asked(cost, "--ranks", "4") for cost in COSTS),
        *(
            asked(LINE, "--plan", plan)
            for plan in ("buffer:4MB:5ms", "random:3:2", "cuts:2,4", "mg_wfbp")
        ),
        asked(LINE, "--plan", "plan.json", **{"plan.json": json.dumps(PLAN)}),
        asked(GATHER, *SPARSE, **{"s.json": json.dumps(SELECTION)}),
        asked(LINE, "--in-flight", "2", "--copy-s-per-byte", "1e-10"),
        Input(
            MEASURED,
            {
                "p.csv": PROFILE.encode(),
                "m.csv": f"bytes,seconds\n{2 * TIMES}".encode(),
            },
        ),
    ],
    "scale": [
        Input(SCALED[:-1], {"s.csv": STEPS.encode()}),
        Input(
            (*SCALED, "log", "more.csv", "--kernels", "k.csv", "--profile", "p.csv"),
            {
                "s.csv": STEPS.encode(),
                "log": LOG.encode(),
                "more.csv": MORE.encode(),
                "k.csv": KERNELS.encode(),
                "p.csv": PROFILE.encode(),
            },
        ),
    ],
    "timeline": [
        Input(("timeline", "t.csv", "--out", "t.json"), {"t.csv": SPANS.encode()})
    ],
    "campaign": [
        Input(
            ("campaign", "c.yml", "--dry-run", "--out", "there"),
            {"c.yml": YAML.encode()},
        )
    ],
}
"""Good inputs by command: what is mutated."""

WORDS = (
    " 0 -0 -1 1.5 1e-320 1e-31 1e29 1e31 1e308 1e309 nan -inf Infinity 0x10 1_000 true null [] {} -- - ' \" "
    ", ; : \x1b[31m \u2028 é ٣ ² \ufeff 😀 ../x %s {0} 1,5 # 1e308KB 0MB random:-1:2 buffer:1e308KB 1h "
    "1gbit 101% &a *a"
)
NASTY = [
    *WORDS.split(" "),
    "9" * 30,
    "9" * 400,
    "9" * 5000,
    "a" * 5000,
    "a\nb",
    "\t",
    "\r",
    "\0",
]
NEAR = ("0", "0.1", "-1", "2000", "1e-6", "1e12", "1e-25")
TOKEN = re.compile(r"[A-Za-z_]+|[-+]?[0-9][0-9.eE+-]*|[^\sA-Za-z0-9_]")


def _bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes are others, gone, there many times, something that nobody means, or the end of all."""
    at = draw.randrange(len(data) + 1)
    end = at + draw.choice((1, 1, 8, 64))
    nasty = draw.choice(NASTY).encode()
    changed = draw.choice((draw.randbytes(end - at), b"", data[at:end] * 30, nasty))
    return data[:at] if draw.random() < 0.1 else data[:at] + changed + data[end:]


@functools.lru_cache(maxsize=32)
def _found(data: bytes) -> tuple[str, list[re.Match[str]]]:
    """The text of a file and its tokens, which take longer to find than to exchange."""
    text = data.decode(errors="replace")
    return text, list(TOKEN.finditer(text))


def _tokens(data: bytes, draw: random.Random) -> bytes:
    """A number, word or sign is another one of the file, another number, or what nobody means."""
    text, tokens = _found(data)
    if tokens:
        old, other = draw.choice(tokens), draw.choice(tokens).group()
        new = draw.choice((other, draw.choice(NEAR), draw.choice(NASTY), ""))
        text = text[: old.start()] + new + text[old.end() :]
    return text.encode()


def _mutated_file(name: str, data: bytes, draw: random.Random) -> bytes:
    how = draw.choice((_bytes, _tokens, _tokens))
    if name.endswith(".gz") and draw.random() < 0.8:
        with contextlib.suppress(
            OSError, EOFError, zlib.error
        ):  # of what is no gzip any more
            return gzip.compress(how(gzip.decompress(data), draw), mtime=0)
    return how(data, draw)


def mutated(kind: str, number: int) -> Input:
    """The ``number``-th of a kind: a good input with one to three mutations."""
    draw = random.Random(f"{kind}:{number}")
    words, files = draw.choice(CHOSEN[kind])
    files = dict(files)
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        name = draw.choice(sorted(files))
        files[name] = _mutated_file(name, files[name], draw)
    return Input(words, files)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """No more memory than now and MOST_BYTES."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def answer(given: Input, folder: Path) -> Outcome:
    """What the command does with its files in ``folder``, which is empty and where it runs.

    Memory is limited where the caller is `limited`; for what never ends, pytest's time.
    """
    for name, data in given.files.items():
        (folder / name).write_bytes(data)
    out, error = io.StringIO(), io.StringIO()
    status: int | str
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            program = PROGRAM if given.words[0] in PROGRAM.commands else cli.DDLKIT
            status = cli.main(given.words, program)
    except SystemExit as left:
        status = int(left.code or 0)
    except Exception as raised:
        status = f"{type(raised).__name__}: {raised}"[:300]
    if time.process_time() - began > MOST_S:
        status = f"more than {MOST_S:g} s of processor time"
    there = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
    }
    made = {name: data for name, data in there.items() if given.files.get(name) != data}
    return Outcome(status, out.getvalue(), error.getvalue(), made)


def wrong(given: Input, got: Outcome) -> str:
    """What is wrong with an answer; "" for one line that refuses, or a sane success."""
    if got.status not in (0, 2):
        return str(got.status)
    lines = got.error.splitlines()
    try:
        assert not got.made.keys() & given.files.keys(), "its own input was overwritten"
        assert not any(name.startswith(".") for name in got.made), (
            "half a file is left behind"
        )
        assert all(len(line) <= MOST_LINE and line.isprintable() for line in lines), (
            "odd lines"
        )
        (_refused if got.status else _sane)(given, got)
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        return f"{error!r}: {got.out[:200]} {lines[:3]}"
    return ""


def _refused(given: Input, got: Outcome) -> None:
    lines = got.error.splitlines()
    by_argparse = got.error.startswith("usage: ")
    *warnings, line = lines[-1:] if by_argparse else lines
    assert (
        re.match(r"(ddlkit|(python -m )?workbook)( [a-z-]+)?: error: ", line)
        and not got.out
    ), "not refused"
    assert all(re.match("(ddlkit|workbook): (?!error: )", said) for said in warnings), (
        "not in one line"
    )


FITTED = (
    "alpha_s",
    "log_intercept_s",
    "intercept_s",
    "log_slope_s",
    "exposed_communication_s",
)
SIZES = ("_s", "bytes", "parameters", "tensors", "messages", "workers")


def _check(value: Any, name: str = "") -> None:
    """Every number is finite, and none of a time or a size is negative."""
    if isinstance(value, (dict, list)):
        for key, inner in (
            value.items() if isinstance(value, dict) else ((name, v) for v in value)
        ):
            _check(inner, key)
    elif isinstance(value, (int, float)):
        assert math.isfinite(value), f"{name} is {value}"
        assert value >= 0 or name in FITTED or not name.endswith(SIZES), (
            f"{name} is {value}"
        )


def _sane(given: Input, got: Outcome) -> None:
    assert all(line.startswith("ddlkit: ") for line in got.error.splitlines()), (
        "not only warnings"
    )
    assert got.out or got.made, "nothing was said"
    documents = [data for name, data in got.made.items() if name.endswith(".json")]
    if "--json" in given.words:
        documents.append(got.out.encode())
    for document in documents:
        answer = json.loads(document)
        _check(answer)
    if given.words[0] == "predict":
        assert answer["iteration_s"] >= answer["compute_s"] * (1 - 1e-9), (
            "shorter than compute"
        )
    if "--json" not in given.words:
        said = re.sub(r"(?m)^out .*", "", got.out)  # a file may have any name
        assert not re.search(r"\b(nan|inf|infinity)\b", said.lower()), "no number"
