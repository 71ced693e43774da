"""Files of other programs, read into the workbook's own types: layer profiles; and plans.

What a file lacks, and what its user must say, raises a UserError of one line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.errors import Finding, UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import counts, kineto, trace
from ddlkit.store import files
from ddlkit.store.readers import profile_frame
from ddlkit.store.sheet import SCHEMAS, read_sheet, write_sheet
from ddlkit.store.tables import own_output

MOST_BATCH = 10**9  # samples of an iteration: more than any training set here has
KINDS = {
    "trace": "a layer-wise trace (six columns: id, name, forward, backward, comm, size)",
    "kineto": "a Chrome trace of torch.profiler (JSON with traceEvents)",
    "flops": "FLOP counts (CSV with columns tensor, parameters, flops)",
    "transformer": f"shapes of transformers (CSV with columns name, {', '.join(counts.REQUIRED)})",
}


class Imported(NamedTuple):
    """What a file gave, and what its user should know."""

    kind: str
    profile: LayerProfile
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class ImportOptions:
    """What a file may leave open, as the options of ``ddlkit import``; None: not said."""

    network: str | None = None
    batch: int | None = None
    device: str | None = None
    peak: float | None = None
    utilisation: float | None = None
    without_input: bool = False
    compute_s: float | None = None
    sequence: int | None = None
    gradient_bytes: int | None = None
    iterations: tuple[int, ...] = ()


def import_file(
    path: Path, kind: str | None = None, options: ImportOptions | None = None
) -> Imported:
    """Return the file as a layer profile, of the kind that its content shows unless given."""
    options = options or ImportOptions()
    if options.batch is not None and not 1 <= options.batch <= MOST_BATCH:
        raise UserError(
            f"batch size is {options.batch}: must be from 1 to {MOST_BATCH}"
        )
    text = files.read_text(path)
    kind = guess_kind(text, str(path)) if kind is None else kind
    if kind not in KINDS:
        raise UserError(f"unknown kind {kind!r}: use one of {', '.join(KINDS)}")
    readers = {"trace": _import_trace, "kineto": _import_kineto}
    imported = readers.get(kind, _import_counts)(text, str(path), options)
    profile = replace(
        imported.profile,
        network=options.network
        or imported.profile.network
        or path.name.partition(".")[0],
        batch=options.batch or 1,
        device=options.device or imported.profile.device,
    )
    if options.gradient_bytes is not None:
        profile = profile.sent_as(options.gradient_bytes)
    findings = imported.findings
    if options.batch is None:
        findings += (
            Finding("batch", (), "the file does not tell the batch size: 1 is taken"),
        )
    return imported._replace(kind=kind, profile=profile, findings=findings)


def guess_kind(text: str, source: str) -> str:
    """Return the one kind of KINDS that the content shows.

    >>> guess_kind("tensor,parameters,flops\\nconv,10,1e9\\n", "mine.csv")
    'flops'
    """
    names = {name.strip() for name in text.partition("\n")[0].split(",")}
    if "backward_s" in names:
        advice = "use it with --profile, or say --kind flops to take its FLOP counts"
        raise UserError(f"{source}: a layer profile already: {advice}")
    is_shown = {
        "trace": trace.looks_like_one(text),
        "kineto": text.lstrip().startswith(("{", "[")),
        "flops": {"tensor", "parameters", "flops"} <= names,
        "transformer": set(counts.REQUIRED) <= names,
    }
    for kind in KINDS:
        if is_shown[kind]:
            return kind
    kinds = "; ".join([*KINDS.values(), "logs of messages are for ddlkit fit"])
    raise UserError(
        f"{source}: is nothing that can be imported: say --kind; there are {kinds}"
    )


def _import_trace(text: str, source: str, options: ImportOptions) -> Imported:
    layers = trace.parse_trace(text, source)
    profile = layers.profile("", with_input=not options.without_input)
    count = f"{len(layers.forward_s)} of {len(layers.name)} layers"
    return Imported(
        "", profile, (Finding("iterations", (), count), *trace.check_trace(layers))
    )


def _import_kineto(text: str, source: str, options: ImportOptions) -> Imported:
    profile, findings = kineto.layer_profile(
        kineto.parse_kineto(text, source), options.iterations
    )
    cost = "the profiler's own cost is in all times: compare with an iteration that is not profiled"
    findings.append(Finding("profiler", (), cost))
    if not profile.update_s:
        findings.append(
            Finding("update", (), "no optimizer's step in it: update takes no time")
        )
    return Imported("", profile, tuple(findings))


def _import_counts(text: str, source: str, options: ImportOptions) -> Imported:
    """Return a profile by FLOP counts, of a table or of a transformer's shape."""
    sheet, name = read_sheet(text, source), options.network or ""
    if set(counts.REQUIRED) <= set(sheet.header):
        shapes = counts.read_shapes(sheet)
        if not name and len(shapes) == 1:
            name = next(iter(shapes))
        if name not in shapes:
            what = f"no transformer {name!r}" if name else "several transformers"
            raise UserError(
                f"{source}: {what}: choose one by --network: {', '.join(shapes)}"
            )
        if options.sequence is None:
            raise UserError(f"{source}: FLOP depend on the sequence: say --sequence")
        tensors = list(shapes[name].tensors(options.sequence))
    else:
        tensors = counts.read_flops(sheet)
    rate = _rate(options, source)
    profile = counts.counted(name, options.batch or 1, tensors, rate)
    total = sum(tensor.flops for tensor in tensors)
    text = (
        f"{total:.4g} forward FLOP a sample, three times that with backward; no update"
    )
    return Imported("", profile, (Finding("flops", (), text),))


def _rate(options: ImportOptions, source: str) -> tuple[float, float] | float:
    """Return peak rate and utilisation, or the seconds of the batch, whichever is said."""
    peak, share, compute_s = options.peak, options.utilisation, options.compute_s
    if compute_s is None and peak is not None and share is not None:
        return peak, share
    if compute_s is None or (peak, share) != (None, None) or not 0 < compute_s < np.inf:
        rates = "--peak (FLOP/s) and --utilisation (0..1) together, or --compute-s (above 0) alone"
        raise UserError(f"{source}: counts become times by a rate: say {rates}")
    return compute_s


def save_profile(profile: LayerProfile, path: Path, *sources: Path) -> None:
    """Write the profile as a CSV of one's own, without a stamp, over none of the sources."""
    text = write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path))
    files.atomic_write_text(own_output(path, *sources), text)


def read_plan(path: Path) -> FusionPlan:
    """Return the plan in a file of ``ddlkit plan --json``: groups of tensors in forward order, from 0."""
    advice = "write it by ddlkit plan --json"
    described = files.read_json(path, advice)
    groups: Any = described.get("groups") if isinstance(described, dict) else None
    if not (
        isinstance(groups, list)
        and groups
        and all(isinstance(g, list) and g for g in groups)
    ):
        raise UserError(f"{path}: not a plan: it has no groups: {advice}")
    plan = FusionPlan(
        str(described.get("planner", path.stem)), tuple(accumulate(map(len, groups)))
    )
    for number, (group, wanted) in enumerate(
        zip(groups, plan.forward_groups(), strict=True)
    ):
        if group not in (wanted, wanted[::-1]):
            problem = f"group {number} is {shown(group)}, expected {shown(wanted)}"
            raise UserError(f"{path}: {problem}: every tensor once, the last first")
    return plan
