"""Commands that turn a file of one kind into one of another."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from ddlkit.cli.command import JSON, arg, command, flag, show
from ddlkit.core import units
from ddlkit.core.errors import Finding, UserError

_OF_A_NUMBER = "of a gradient's number: 2, fp16, bf16 [as the file says]"


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that are listed, as in 0,2-5; of four digits at most."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers as 0,2-5")
    ends = [part.split("-") for part in text.split(",")]
    return tuple(
        number for run in ends for number in range(int(run[0]), int(run[-1]) + 1)
    )


ELEMENT = arg("--gradient-bytes", type=units.parse_element_bytes, help=_OF_A_NUMBER)


@command(
    "make a layer profile of a layer-wise trace, a torch.profiler file, FLOP counts or a transformer's shape",
    arg("file", type=Path, help="the trace, Chrome trace (also .gz) or CSV"),
    arg("--kind", help="which format it is: a wrong one lists all [by content]"),
    arg("--out", type=Path, help="the layer profile (CSV)"),
    arg(
        "--messages",
        type=Path,
        help="of torch.profiler: sizes and times of messages (CSV)",
    ),
    arg(
        "--iterations",
        type=_numbers,
        default=(),
        help="of torch.profiler: which, as 0,2-5 [all]",
    ),
    arg("--network", help="its name [the file's]; of transformers: which one"),
    arg("--batch", type=int, help="samples an iteration [1]"),
    arg("--device", help="what it ran on [as the file says]"),
    arg("--peak", type=float, help="of counts: peak rate in FLOP/s"),
    arg("--utilisation", type=float, help="of counts: share of it, 0 to 1"),
    arg(
        "--compute-s",
        type=float,
        help="of counts: forward and backward, in place of a rate",
    ),
    arg("--sequence", type=int, help="of a transformer: tokens of a sample"),
    ELEMENT,
    flag(
        "--without-input",
        "of a trace: leave out all before the first layer with parameters",
    ),
    JSON,
)
def import_(arguments: argparse.Namespace) -> None:
    from ddlkit import formats, store

    if not (arguments.out or arguments.messages):
        raise UserError("import: nothing to write: give --out, --messages or both")
    result: dict[str, Any] = {}
    findings: tuple[Finding, ...] = ()
    sent = _messages(arguments) if arguments.messages else None
    if arguments.out:
        options = formats.ImportOptions(
            network=arguments.network,
            batch=arguments.batch,
            device=arguments.device,
            peak=arguments.peak,
            utilisation=arguments.utilisation,
            without_input=arguments.without_input,
            compute_s=arguments.compute_s,
            sequence=arguments.sequence,
            gradient_bytes=arguments.gradient_bytes,
            iterations=arguments.iterations,
        )
        imported = formats.import_file(arguments.file, arguments.kind, options)
        profile, workload = imported.profile, imported.profile.workload()
        formats.save_profile(profile, arguments.out, arguments.file)
        findings = imported.findings
        result = {"kind": imported.kind, "tensors": workload.n}
        result |= {
            name: getattr(profile, name) for name in ("network", "device", "batch")
        }
        result |= {name: getattr(workload, name) for name in ("forward_s", "update_s")}
        result["parameters"] = int(workload.parameters.sum())
        result["backward_s"] = float(workload.backward_s.sum())
    if sent:
        store.atomic_write_text(arguments.messages, sent[0])
        findings += (sent[1],)
        result["messages"] = str(arguments.messages)
    listed = [finding._asdict() for finding in findings]
    show({**result, "findings": listed} if arguments.json else result, arguments.json)
    for finding in () if arguments.json else findings:
        where = f" ({', '.join(finding.layers)})" if finding.layers else ""
        print(f"  {finding.what}{where}: {finding.text}")


def _messages(arguments: argparse.Namespace) -> tuple[str, Finding]:
    """Return messages in a trace of torch.profiler as a table, and how many there are."""
    from ddlkit import formats, store
    from ddlkit.formats import kineto

    store.own_output(arguments.messages, arguments.file, *filter(None, [arguments.out]))
    text = store.files.read_text(arguments.file)
    if formats.guess_kind(text, str(arguments.file)) != "kineto":
        problem = (
            "only a trace of torch.profiler has messages that were timed by themselves"
        )
        raise UserError(f"{arguments.file}: --messages: {problem}: measure collectives")
    return kineto.message_table(kineto.parse_kineto(text, str(arguments.file)))


@command(
    "export a recorded timeline as a Chrome trace, which Perfetto opens",
    arg("file", type=Path, help="timeline table (CSV, also .gz)"),
    arg("--case", help="key of the case, when it holds several"),
    arg("--repeat", type=int, help="which repeat, when it holds several"),
    arg("--out", type=Path, required=True, help="the Chrome trace (JSON)"),
)
def timeline(arguments: argparse.Namespace) -> None:
    from ddlkit import store

    line = store.read_timeline(arguments.file, arguments.case, arguments.repeat)
    text = json.dumps(line.to_chrome_trace(), allow_nan=False) + "\n"
    store.atomic_write_text(store.own_output(arguments.out, arguments.file), text)
    counts = {"ranks": len(set(line.rank)), "iterations": len(set(line.iteration))}
    show({"spans": line.n, **counts, "out": arguments.out}, False)
