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
    """What a file gave: messages as (bytes, seconds), and what its user should know."""

    kind: str
    profile: LayerProfile
    messages: tuple[tuple[int, float], ...]
    findings: tuple[Finding, ...]


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
    """Return the file as a layer profile, of the kind that its content shows unless given.

    Unless the options say otherwise, the network is named after the file, and the batch is 1.
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
    imported = _READERS[kind](text, str(path), options)
    profile = replace(
        imported.profile,
        network=options.network or imported.profile.network or path.name.partition(".")[0],
        batch=options.batch or 1,
        device=options.device or imported.profile.device,
    )
    if options.element_bytes is not None:
        profile = profile.sent_as(options.element_bytes)
    findings = imported.findings
    if options.batch is None:
        text = "the file does not tell the batch size: 1 is taken"
        findings += (Finding("batch", (), text),)
    return imported._replace(profile=profile, findings=findings)


def guess_kind(text: str, source: str) -> str:
    """Return the one kind of KINDS that the content shows. Raises UserError where none or several do.

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
        "transformer": set(transformer.REQUIRED) <= names,
    }
    kinds = [kind for kind, is_shown in shown.items() if is_shown]
    if len(kinds) != 1:
        what = f"may be {' or '.join(kinds)}" if kinds else "is nothing that can be imported"
        raise UserError(f"{source}: {what}: say --kind; there are {'; '.join(KINDS.values())}")
    return kinds[0]


def save_profile(profile: LayerProfile, path: Path, *sources: Path) -> None:
    """Write the profile as a CSV of one's own, without a stamp: nothing of it was measured here.

    Raises UserError where a recorded table or one of the sources is in the way, and as writing does.
    """
    _write_own(path, write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path)), sources)


def save_messages(messages: Sequence[tuple[int, float]], path: Path, *sources: Path) -> None:
    """Write the messages as a CSV that ``ddlkit fit`` reads.

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
    layers = trace.parse_trace(text, source)
    try:
        profile = layers.profile("", with_input=options.with_input)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    sizes, seconds = layers.messages()
    messages = tuple(zip(sizes.tolist(), seconds.tolist(), strict=True))
    count = f"{len(layers.forward_s)} of {len(layers.name)} layers"
    findings = (Finding("iterations", (), count), *trace.check_trace(layers))
    return Imported("trace", profile, messages, findings)


def _import_kineto(text: str, source: str, options: ImportOptions) -> Imported:
    traced = kineto.parse_kineto(text, source)
    profile, count = autograd.layer_profile(traced, ""), len(kineto.iterations(traced))
    findings = [Finding("iterations", (), f"{count} on {traced.device}")]
    text = "the profiler's own cost is in all times: compare with an iteration that is not profiled"
    findings.append(Finding("profiler", (), text))
    if not profile.update_s:
        findings.append(Finding("update", (), "no optimizer's step in it: update takes no time"))
    return Imported("kineto", profile, tuple(kineto.message_times(traced)), tuple(findings))


def _import_flops(text: str, source: str, options: ImportOptions) -> Imported:
    frame = FLOPS.frame(read_sheet(text, source), exact=False)
    frame["layer"] = frame["layer"].where(frame["layer"] != "", frame["tensor"])
    sample_flops = (frame["flops"] / frame["batch"]).to_numpy()
    names = frame["tensor"].tolist(), frame["layer"].tolist()
    return _by_count("flops", "", (*names, frame["parameters"], sample_flops), source, options)


def _import_transformer(text: str, source: str, options: ImportOptions) -> Imported:
    shapes = transformer.read_shapes(read_sheet(text, source))
    name, shape = transformer.choose(shapes, options.network, source)
    if options.sequence is None:
        raise UserError(f"{source}: a transformer's FLOP depend on the sequence: say --sequence")
    tensor, layer, elements, flops = zip(*shape.tensors(options.sequence), strict=True)
    counts = tensor, layer, np.array(elements), np.array(flops)
    return _by_count("transformer", name, counts, source, options)


_READERS = {
    "trace": _import_trace,
    "kineto": _import_kineto,
    "flops": _import_flops,
    "transformer": _import_transformer,
}


def _by_count(
    kind: str,
    network: str,
    counts: tuple[Sequence[str], Sequence[str], Ints, Floats],
    source: str,
    options: ImportOptions,
) -> Imported:
    """A profile whose times are in proportion to FLOP, by a rate or by the time that all take.

    counts : tensor, layer, parameters and forward FLOP of one sample, n each
    """
    tensor, layer, parameters, sample_flops = counts
    batch, total = options.batch or 1, float(counts[3].sum())
    peak, share = options.peak_flops_per_s, options.utilisation
    if options.compute_s is not None and (peak, share) == (None, None):
        if not 0 < options.compute_s < np.inf:
            raise UserError(f"--compute-s is {options.compute_s}: must be above zero")
        peak, share = 3 * batch * total / options.compute_s, 1.0
    elif peak is None or share is None or options.compute_s is not None:
        rates = "--peak (FLOP/s) and --utilisation (0..1) together, or --compute-s alone"
        raise UserError(f"{source}: counts become times by a rate: say {rates}")
    of = (network, batch, tensor, np.asarray(parameters), sample_flops)
    profile = LayerProfile.from_flops(*of, layer=layer, peak_flops_per_s=peak, utilisation=share)
    text = f"{total:.4g} forward FLOP a sample at {share:g} of {peak:.4g} FLOP/s, three times that with"
    finding = Finding("flops", (), f"{text} backward; update takes no time")
    return Imported(kind, profile, (), (finding,))
