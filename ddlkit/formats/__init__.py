"""Files of other programs, read into the workbook's own types; here, those that give a layer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import Floats, Ints, LayerProfile
from ddlkit.formats import autograd, kineto, trace, transformer
from ddlkit.store import files
from ddlkit.store.readers import profile_frame
from ddlkit.store.sheet import SCHEMAS, Column, Schema, read_sheet, write_sheet
from ddlkit.store.tables import own_output

MOST_BATCH = 10**9
"""Samples of an iteration: more than any training set here has."""
FLOPS = Schema(
    "FLOP counts",
    (
        Column("tensor", "str", "named"),
        Column("layer", "str", default=""),
        Column("parameters", "int", "positive"),
        Column("flops", "float", "non_negative"),
        # As a layer profile has them, counts are of a whole batch.
        Column("batch", "int", "positive", default="1"),
    ),
    key=("tensor",),
)

KINDS = {
    "trace": "a layer-wise trace (six columns: id, name, forward, backward, comm, size)",
    "kineto": "a Chrome trace of torch.profiler (JSON with traceEvents)",
    "flops": "FLOP counts (CSV with columns tensor, parameters, flops)",
    "transformer": "shapes of transformers (CSV with columns name, layers, d_model, heads, d_ff, vocabulary)",
}


class Imported(NamedTuple):
    """What a file gave: messages as (bytes, seconds), what its user should know, its batch if it tells."""

    kind: str
    profile: LayerProfile
    messages: tuple[tuple[int, float], ...]
    findings: tuple[Finding, ...]
    batch: int | None = None


@dataclass(frozen=True)
class ImportOptions:
    """What a file may leave open, as its user says it; None: not said.

    compute_s : of counts, forward and backward of the batch: in place of a rate and its utilisation
    sequence : of a transformer, tokens of a sample
    element_bytes : of a number of a gradient, where it is not what the file tells
    """

    network: str | None = None
    batch: int | None = None
    device: str | None = None
    peak_flops_per_s: float | None = None
    utilisation: float | None = None
    with_input: bool = True
    compute_s: float | None = None
    sequence: int | None = None
    element_bytes: int | None = None


def import_file(
    path: Path, kind: str | None = None, options: ImportOptions | None = None
) -> Imported:
    """The file as a layer profile, of the kind that its content shows unless given.

    Unless the options say otherwise, the network is named after the file, and the batch is what the file
    tells: a profiler's file that of the first convolution; or else 1.
    Raises UserError for an unknown or ambiguous kind, a wrong file, a batch below 1, and rates and lengths
    that counts need and the options lack.
    """
    options = options or ImportOptions()
    if options.batch is not None and not 1 <= options.batch <= MOST_BATCH:
        raise UserError(f"batch size is {options.batch}: must be from 1 to {MOST_BATCH}")
    text = files.read_text(path)
    kind = guess_kind(text, str(path)) if kind is None else kind
    if kind not in KINDS:
        raise UserError(f"unknown kind {kind!r}: use one of {', '.join(KINDS)}")
    found = _READERS[kind](text, str(path), options)
    profile = replace(
        found.profile,
        network=options.network or found.profile.network or path.name.partition(".")[0],
        batch=options.batch or found.batch or 1,
        device=options.device or found.profile.device,
    )
    if options.element_bytes is not None:
        profile = profile.sent_as(options.element_bytes)
    told = _batch_finding(options.batch, found.batch)
    return found._replace(profile=profile, findings=(*found.findings, *told))


def _batch_finding(said: int | None, told: int | None) -> list[Finding]:
    """What the user of a profile should know of its batch: as said, and as the file tells it."""
    if said is None and told is None:
        text = "the file does not tell the batch size, and 1 is taken"
    elif said is None:
        text = f"{told}, as the input of the first convolution tells"
    elif told not in (None, said):
        text = f"{said} is taken as said, but the input of the first convolution is of {told}"
    else:
        return []
    return [Finding("batch", (), text)]


def guess_kind(text: str, source: str) -> str:
    """The one kind of KINDS that the content shows. Raises UserError where none or several do.

    >>> guess_kind("tensor,parameters,flops\\nconv,10,1e9\\n", "mine.csv")
    'flops'
    """
    names = {name.strip() for name in text.partition("\n")[0].split(",")}
    if "backward_s" in names:
        raise UserError(
            f"{source}: a layer profile already: use it with --profile, or say --kind flops to take "
            "its FLOP counts"
        )
    shown = {
        "trace": trace.looks_like_one(text),
        "kineto": text.lstrip().startswith(("{", "[")),
        "flops": {"tensor", "parameters", "flops"} <= names,
        "transformer": transformer.looks_like_one(names),
    }
    kinds = [kind for kind, is_shown in shown.items() if is_shown]
    if len(kinds) != 1:
        what = f"may be {' or '.join(kinds)}" if kinds else "is nothing that can be imported"
        raise UserError(f"{source}: {what}: say --kind; there are {'; '.join(KINDS.values())}")
    return kinds[0]


def save_profile(profile: LayerProfile, path: Path, *sources: Path) -> None:
    """The profile as a CSV of one's own, without a stamp: nothing of it was measured here.

    Raises UserError where a recorded table or one of the sources is in the way, and as writing does.
    """
    _write_own(path, write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path)), sources)


def save_messages(messages: Sequence[tuple[int, float]], path: Path, *sources: Path) -> None:
    """The messages as a CSV that ``ddlkit fit`` reads.

    Raises UserError when there are none, and as `save_profile`.
    """
    if not messages:
        raise UserError(f"no message times to write into {path}: the file tells none")
    rows = "".join(f"{size},{time!r}\n" for size, time in messages)
    _write_own(path, "bytes,seconds\n" + rows, sources)


def _write_own(path: Path, text: str, sources: Sequence[Path]) -> None:
    if path.suffix != ".csv":
        raise UserError(f"{path}: the table is CSV: name it so")
    files.atomic_write_text(own_output(path, *sources), text)


def _import_trace(text: str, source: str, options: ImportOptions) -> Imported:
    found = trace.parse_trace(text, source)
    try:
        profile = found.profile("", with_input=options.with_input)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    sizes, seconds = found.messages()
    messages = tuple(zip(sizes.tolist(), seconds.tolist(), strict=True))
    findings = [_iterations(found), *trace.check_trace(found)]
    return Imported("trace", profile, messages, tuple(findings))


def _iterations(found: trace.LayerTrace) -> Finding:
    """How many iterations there are, and how much the columns differ between them."""
    text = f"{found.iterations} iteration{'s' * (found.iterations > 1)} of {len(found.name)} layers"
    for column, spread in found.spread().items():
        mean = getattr(found.mean(), column)[0]
        if found.iterations > 1:
            share = np.median(spread[mean > 0] / mean[mean > 0]) if np.any(mean) else 0.0
            phase = column.removesuffix("_s")
            text += f"; {phase} spreads by {100 * share:.1f}% in the median layer"
    return Finding("iterations", (), text)


def _import_kineto(text: str, source: str, options: ImportOptions) -> Imported:
    found = kineto.parse_kineto(text, source)
    profile, findings = autograd.layer_profile(found, ""), autograd.check_profile(found)
    seen = sorted(set(kineto.batch_sizes(found)))
    if len(seen) > 1:
        text = (
            f"iterations of {', '.join(map(str, seen))} samples: their medians are of none of them"
        )
        findings.append(Finding("batches", (), text))
    told = seen[0] if len(seen) == 1 else None
    return Imported("kineto", profile, tuple(kineto.message_times(found)), tuple(findings), told)


def _import_flops(text: str, source: str, options: ImportOptions) -> Imported:
    frame = FLOPS.frame(read_sheet(text, source), exact=False)
    sample_flops = (frame["flops"] / frame["batch"]).to_numpy()
    layer = frame["layer"].where(frame["layer"] != "", frame["tensor"]).tolist()
    tensor, parameters = frame["tensor"].tolist(), frame["parameters"].to_numpy()
    return _by_count("flops", "", (tensor, layer, parameters, sample_flops), source, options)


def _import_transformer(text: str, source: str, options: ImportOptions) -> Imported:
    shapes = transformer.read_shapes(read_sheet(text, source))
    name, shape = transformer.chosen(shapes, options.network, source)
    if options.sequence is None:
        raise UserError(f"{source}: a transformer's FLOP depend on the sequence: say --sequence")
    tensors = shape.tensors(options.sequence)
    counts = (
        [tensor.name for tensor in tensors],
        [tensor.layer for tensor in tensors],
        np.array([tensor.elements for tensor in tensors]),
        np.array([tensor.flops for tensor in tensors]),
    )
    return _by_count("transformer", name, counts, source, options)


_READERS = {
    "trace": _import_trace,
    "kineto": _import_kineto,
    "flops": _import_flops,
    "transformer": _import_transformer,
}
Counts = tuple[Sequence[str], Sequence[str], Ints, Floats]
"""Tensor, layer, parameters and forward FLOP of one sample, n each."""


def _by_count(
    kind: str, network: str, counts: Counts, source: str, options: ImportOptions
) -> Imported:
    """A profile whose times are in proportion to FLOP, by a rate or by the time that all take."""
    tensor, layer, parameters, sample_flops = counts
    batch = options.batch or 1
    rate = (options.peak_flops_per_s, options.utilisation)
    if rate != (None, None) and (options.compute_s is not None or None in rate):
        raise UserError(f"{source}: say --peak and --utilisation together, or --compute-s alone")
    if options.compute_s is not None:
        if not 0 < options.compute_s < np.inf:
            raise UserError(f"--compute-s is {options.compute_s}: must be above zero")
        rate = (3 * batch * float(sample_flops.sum()) / options.compute_s, 1.0)
    if rate[0] is None or rate[1] is None:
        raise UserError(
            f"{source}: counts become times by a rate: say --peak (FLOP/s) and --utilisation (0..1), or "
            "--compute-s"
        )
    profile = LayerProfile.from_flops(
        network,
        batch,
        tensor,
        parameters,
        sample_flops,
        peak_flops_per_s=rate[0],
        utilisation=rate[1],
        layer=layer,
    )
    text = (
        f"{sample_flops.sum():.4g} forward FLOP a sample at {rate[1]:g} of {rate[0]:.4g} FLOP/s, three "
        "times that with backward; update takes no time"
    )
    return Imported(kind, profile, (), (Finding("flops", (), text),))
