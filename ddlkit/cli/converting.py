"""The commands that turn a file of one kind into a file of another: ``import`` and ``timeline``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    arg,
    command,
    flag,
    group,
    number,
    option_of,
    parsed_by,
    refuse_given,
    seconds,
    show,
    whole_number,
    with_help,
)
from ddlkit.core import units
from ddlkit.core.errors import Finding, UserError

ELEMENT = arg(
    "--gradient-bytes",
    type=parsed_by(units.parse_element_bytes),
    metavar="BYTES",
    help="The size of each number of a gradient that is sent: bytes, as in 2, or a "
    "type, as in fp16 or bf16. [default: as the file says]",
)

_ELEMENT_OF_FILE = with_help(
    ELEMENT,
    "The size of each number of a gradient that is sent: bytes, as in 2, or a type, as in "
    "fp16 or bf16. [default: as the file says; for FLOP counts and transformers, 4]",
)
"""The option ELEMENT for files of which some do not say the size."""


def flop_per_second(text: str) -> float:
    """Return the rate in FLOP per second that an argument gives."""
    return number(text, example="1e12")


def iteration_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a list of numbers and ranges gives, as in 0,2-5.

    A range includes both of its ends. Raises ArgumentTypeError for any other text.
    """
    # A number has at most four digits, because a range of billions of numbers would use up the
    # memory.
    number_or_range = r"\d{1,4}(-\d{1,4})?"
    # With re.ASCII, \d matches no digits of other scripts.
    if not re.fullmatch(f"{number_or_range}(,{number_or_range})*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write numbers of at most four digits, as in 0,2-5"
        )
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        # A single number is a range that ends with itself.
        last = last or first
        if int(first) > int(last):
            raise argparse.ArgumentTypeError(
                f"{part}: the first number is above the last: write {last}-{first}"
            )
        numbers += range(int(first), int(last) + 1)
    return tuple(numbers)


@command(
    "Make a layer profile from a layer-wise trace, a file of torch.profiler, FLOP "
    "counts, or the shape of a transformer.",
    *group(
        "input",
        arg(
            "file",
            type=Path,
            metavar="FILE",
            help="The file: a layer-wise trace, a Chrome trace of torch.profiler "
            "(also .gz), or a CSV.",
        ),
        arg(
            "--kind",
            help="The format of the file: trace (a layer-wise trace with the six columns "
            "id, name, forward, backward, comm and size, with times in microseconds and the "
            "bytes of gradients), kineto (a Chrome trace of "
            "torch.profiler), flops (FLOP counts, a CSV with the columns tensor, "
            "parameters and flops) or transformer (shapes of transformers, a CSV with the "
            "columns name, layers, d_model, heads, d_ff and vocabulary). [default: "
            "recognized by the content]",
        ),
        arg(
            "--network",
            metavar="NAME",
            help="The name that the network gets; for shapes of transformers, which "
            "of them. [default: as the file says]",
        ),
        arg(
            "--batch",
            type=whole_number,
            metavar="N",
            help="The number of samples in an iteration. [default: 1]",
        ),
        arg(
            "--device",
            metavar="NAME",
            help="The device on which the times were measured. [default: as the file "
            "says]",
        ),
        _ELEMENT_OF_FILE,
        flag(
            "--without-input",
            "For a layer-wise trace: leave out every layer before the first one that "
            "has parameters.",
        ),
    ),
    *group(
        "for a file of torch.profiler",
        arg(
            "--iterations",
            type=iteration_numbers,
            metavar="NUMBERS",
            default=(),
            help="The iterations to read, as in 0,2-5. [default: all]",
        ),
    ),
    *group(
        "for FLOP counts and transformers",
        arg(
            "--peak",
            type=flop_per_second,
            metavar="FLOP/S",
            help="The peak rate of the device in FLOP per second, as in 1e12. It needs "
            "--utilisation.",
        ),
        arg(
            "--utilisation",
            type=number,
            metavar="SHARE",
            help="The share of --peak that training reaches, above 0 and at most 1.",
        ),
        arg(
            "--compute-s",
            type=seconds,
            metavar="TIME",
            help="The time of a forward and a backward pass, instead of --peak and "
            "--utilisation: seconds, as in 0.25, or with a unit, as in 250ms.",
        ),
        arg(
            "--sequence",
            type=whole_number,
            metavar="N",
            help="For a transformer: the number of tokens in a sample.",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--out",
            type=Path,
            metavar="FILE.csv",
            help="Write the layer profile into this file (also .gz).",
        ),
        arg(
            "--messages",
            type=Path,
            metavar="FILE.csv",
            help="For a file of torch.profiler: write the sizes and times of its "
            "messages into this file (also .gz).",
        ),
        JSON,
    ),
    example="ddlkit import trace.json.gz --batch 32 --out profile.csv",
)
def import_(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit import``."""
    from ddlkit import formats, store

    _refuse_one_output(arguments)
    text = store.files.read_text(arguments.file)
    # What options a file needs depends on its kind. So options without an effect on this kind
    # are refused before others are demanded.
    kind = formats.kind_of(text, str(arguments.file), arguments.kind)
    _refuse_options_of_other_kinds(arguments, kind)
    if not (arguments.out or arguments.messages):
        has_messages = kind in _KINDS_BY_OPTION["messages"]
        advice = "give --out, --messages or both" if has_messages else "give --out"
        raise UserError(f"import: nothing to write: {advice}")
    if not arguments.out:
        refuse_given(
            arguments,
            _OPTIONS_OF_PROFILE,
            "has no effect without --out, which writes the layer profile",
        )
    result: dict[str, Any] = {}
    findings: list[Finding] = []
    # Messages are read before any file is written, so that an error in them leaves no file.
    messages = _messages_of_profiler(arguments, text) if arguments.messages else None
    if arguments.out:
        result, profile_findings = _write_imported_profile(arguments, text, kind)
        findings += profile_findings
    if messages is not None:
        message_csv, message_finding = messages
        store.atomic_write_text(arguments.messages, message_csv)
        findings.append(message_finding)
    # The files that were written.
    files = {"messages": arguments.messages, "profile": arguments.out}
    result |= {name: str(path) for name, path in files.items() if path}
    if arguments.json:
        listed = [finding._asdict() for finding in findings]
        show({**result, "findings": listed}, as_json=True)
        return
    show(result, as_json=False)
    _print_findings(findings)


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding, a remark on what was read, with the layers that it is about."""
    for finding in findings:
        # A finding about the whole file names no layers.
        layers = f" ({', '.join(finding.layers)})" if finding.layers else ""
        print(f"  {finding.what}{layers}: {finding.text}")


_OPTIONS_OF_PROFILE = (
    "kind",
    "network",
    "batch",
    "device",
    "gradient_bytes",
    "without_input",
    "iterations",
    "peak",
    "utilisation",
    "compute_s",
    "sequence",
)
"""Options of ``ddlkit import`` that are about the layer profile alone."""

_KINDS_BY_OPTION = {
    "without_input": ("trace",),
    "iterations": ("kineto",),
    "peak": ("flops", "transformer"),
    "utilisation": ("flops", "transformer"),
    "compute_s": ("flops", "transformer"),
    "sequence": ("transformer",),
    "messages": ("kineto",),
}
"""The kinds of files on which an option of ``ddlkit import`` has an effect."""


def _refuse_one_output(arguments: argparse.Namespace) -> None:
    """Raise UserError if --out and --messages name the same file."""
    if not (arguments.out and arguments.messages):
        return
    # Two paths may name one file by way of links.
    if arguments.out.resolve() == arguments.messages.resolve():
        raise UserError(
            f"import: --out and --messages both name {arguments.messages}: name two files"
        )


def _refuse_options_of_other_kinds(arguments: argparse.Namespace, kind: str) -> None:
    """Raise UserError for all options without an effect on a file of this kind."""
    # The options, with the kinds on which each has an effect.
    wrong = []
    for name, kinds in _KINDS_BY_OPTION.items():
        # An option that is not given has one of these values.
        is_given = getattr(arguments, name) not in (None, False, ())
        if is_given and kind not in kinds:
            wrong.append((option_of(name), " and ".join(kinds)))
    if not wrong:
        return
    problem = f"no effect on a file of the kind {kind}"
    if len(wrong) == 1:
        ((option, kinds_in_words),) = wrong
        text = f"{option} has {problem}, only on {kinds_in_words}: leave it out"
    else:
        listed = [f"{option} (only on {kinds})" for option, kinds in wrong]
        text = f"{', '.join(listed)} have {problem}: leave them out"
    if arguments.kind:
        text += ", or correct --kind"
    if not arguments.out:
        text += ", and give --out"
    if arguments.messages and kind not in _KINDS_BY_OPTION["messages"]:
        text += "; ddlkit measure collectives makes a table of messages"
    raise UserError(f"{arguments.file}: {text}")


def _write_imported_profile(
    arguments: argparse.Namespace, text: str, kind: str
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Read the layer profile, write it into --out, and return facts about it and findings.

    ``text`` is the content of the file, and ``kind`` its format. The facts are the entries
    of the result that is printed: names, counts, and totals over all layers. Findings are
    what the user should know of the profile.
    """
    from ddlkit import formats

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
    imported = formats.import_text(text, arguments.file, kind, options)
    profile = imported.profile
    # The workload is the profile as a prediction takes it.
    workload = profile.workload()
    # The last argument is the source, which is never overwritten.
    formats.save_profile(profile, arguments.out, arguments.file)
    facts = {
        "kind": imported.kind,
        "tensors": workload.n,
        "network": profile.network,
        "device": profile.device,
        "batch": profile.batch,
        "parameters": int(workload.parameters.sum()),
        "forward_s": workload.forward_s,
        "backward_s": float(workload.backward_s.sum()),
        "update_s": workload.update_s,
    }
    return facts, imported.findings


def _messages_of_profiler(
    arguments: argparse.Namespace, text: str
) -> tuple[str, Finding]:
    """Return the messages in a trace of torch.profiler as CSV, and a finding on them.

    ``text`` is the content of the file. The finding says how many messages there are.
    Raises UserError if the file is no such trace.
    """
    from ddlkit import store
    from ddlkit.formats import kineto

    # `own_output` refuses to overwrite the trace.
    store.own_output(arguments.messages, arguments.file)
    return kineto.message_table(kineto.parse_kineto(text, str(arguments.file)))


@command(
    "Turn a recorded timeline into a Chrome trace, which ui.perfetto.dev opens.",
    *group(
        "input",
        arg(
            "file",
            type=Path,
            metavar="FILE",
            help="The recorded timeline, a CSV (also .gz), as ddlkit measure training "
            "writes it.",
        ),
        arg(
            "--case",
            metavar="KEY",
            help="The key of the case to use, if the file holds several cases.",
        ),
        arg(
            "--repeat",
            type=whole_number,
            metavar="N",
            help="The number of the repeat to use, if the case has several.",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--out",
            type=Path,
            metavar="FILE.json",
            required=True,
            help="Write the Chrome trace into this file (also .gz).",
        ),
    ),
    example="ddlkit timeline timeline.csv.gz --out trace.json",
)
def timeline(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit timeline``."""
    from ddlkit import store

    # A span is something that a rank did, with its start and its end.
    spans = store.read_timeline(arguments.file, arguments.case, arguments.repeat)
    # No viewer of traces reads NaN, so a NaN is an error here.
    trace = json.dumps(spans.to_chrome_trace(), allow_nan=False) + "\n"
    # `own_output` refuses to overwrite the timeline itself.
    store.atomic_write_text(store.own_output(arguments.out, arguments.file), trace)
    counts = {
        "spans": spans.n,
        "ranks": len(set(spans.rank)),
        "iterations": len(set(spans.iteration)),
    }
    show({**counts, "out": arguments.out}, as_json=False)
