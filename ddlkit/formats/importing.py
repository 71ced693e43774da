"""A foreign file made a layer profile: a layer-wise trace, a profile of torch.profiler, or FLOP counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import Finding, autograd, kineto, trace
from ddlkit.store import files
from ddlkit.store.readers import profile_frame
from ddlkit.store.schema import SCHEMAS
from ddlkit.store.sheet import Column, Schema, read_sheet, write_sheet
from ddlkit.store.tables import is_stamped

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
}


@dataclass(frozen=True)
class Imported:
    """What a file gave: messages as (bytes, seconds), and what its user should know."""

    kind: str
    profile: LayerProfile
    messages: tuple[tuple[int, float], ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Said:
    """What a file may leave open, as its user says it; None: not said."""

    network: str | None = None
    batch: int | None = None
    device: str | None = None
    peak_flops_per_s: float | None = None
    utilisation: float | None = None
    with_input: bool = True


def import_file(path: Path, kind: str | None = None, said: Said | None = None) -> Imported:
    """The file as a layer profile, of the kind that its content shows unless given.

    The network is named after the file unless said. Raises UserError for an unknown or ambiguous kind,
    a wrong file, and rates that FLOP counts need and nobody said.
    """
    said = said or Said()
    text = files.text_of(files.read(path), path)
    kind = guess_kind(text, str(path)) if kind is None else kind
    if kind not in KINDS:
        raise UserError(f"unknown kind {kind!r}: use one of {', '.join(KINDS)}")
    named = replace(said, network=said.network or path.name.partition(".")[0])
    read = {"trace": _import_trace, "kineto": _import_kineto, "flops": _import_flops}[kind]
    found = read(text, str(path), named)
    if said.batch is not None:
        return found
    told = Finding("batch", (), "the file does not tell the batch size, and 1 is taken")
    return replace(found, findings=(*found.findings, told))


def guess_kind(text: str, source: str) -> str:
    """The one kind of KINDS that the content shows. Raises UserError where none or several do."""
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
    }
    kinds = [kind for kind, is_shown in shown.items() if is_shown]
    if len(kinds) != 1:
        what = f"may be {' or '.join(kinds)}" if kinds else "is nothing that can be imported"
        raise UserError(f"{source}: {what}: say --kind; there are {'; '.join(KINDS.values())}")
    return kinds[0]


def save_profile(profile: LayerProfile, path: Path) -> None:
    """The profile as a CSV of one's own, without a stamp: nothing of it was measured here.

    Raises UserError where a recorded table is in the way, and as writing does.
    """
    text = write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path))
    _write_own(path, text)


def save_messages(messages: Sequence[tuple[int, float]], path: Path) -> None:
    """The messages as a CSV that ``ddlkit fit`` reads. Raises UserError when there are none."""
    if not messages:
        raise UserError(f"no message times to write into {path}: the file tells none")
    _write_own(path, "bytes,seconds\n" + "".join(f"{size},{time!r}\n" for size, time in messages))


def _write_own(path: Path, text: str) -> None:
    if path.suffix != ".csv":
        raise UserError(f"{path}: the table is CSV: name it so")
    if is_stamped(path):
        raise UserError(f"{path} is a recorded table: choose another name")
    files.atomic_write_text(path, text)


def _import_trace(text: str, source: str, said: Said) -> Imported:
    found = trace.parse_trace(text, source)
    try:
        profile = found.profile(
            said.network or "",
            batch=_batch(said),
            device=said.device or "unnamed",
            with_input=said.with_input,
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    sizes, seconds = found.messages()
    messages = tuple(zip(sizes.tolist(), seconds.tolist(), strict=True))
    findings = [_spread(found), *trace.check_trace(found)]
    return Imported("trace", profile, messages, tuple(findings))


def _spread(found: trace.LayerTrace) -> Finding:
    text = f"{found.iterations} iteration{'s' * (found.iterations > 1)} of {len(found.name)} layers"
    if found.iterations > 1:
        for column, spread in found.spread().items():
            mean = getattr(found.mean(), column)[0]
            share = np.median(spread[mean > 0] / mean[mean > 0]) if np.any(mean) else 0.0
            text += (
                f"; {column.removesuffix('_s')} spreads by {100 * share:.1f}% in the median layer"
            )
    return Finding("iterations", (), text)


def _import_kineto(text: str, source: str, said: Said) -> Imported:
    found = kineto.parse_kineto(text, source)
    profile = autograd.layer_profile(found, said.network or "", batch=_batch(said))
    if said.device:
        profile = replace(profile, device=said.device)
    messages = tuple(kineto.message_times(found))
    return Imported("kineto", profile, messages, tuple(autograd.check_profile(found)))


def _import_flops(text: str, source: str, said: Said) -> Imported:
    if said.peak_flops_per_s is None or said.utilisation is None:
        raise UserError(
            f"{source}: FLOP counts become times by a rate: say --peak (FLOP/s) and --utilisation (0..1)"
        )
    frame = FLOPS.frame(read_sheet(text, source), exact=False)
    sample_flops = (frame["flops"] / frame["batch"]).to_numpy()
    layers = [
        layer or tensor for layer, tensor in zip(frame["layer"], frame["tensor"], strict=True)
    ]
    profile = LayerProfile.from_flops(
        said.network or "",
        _batch(said),
        frame["tensor"].tolist(),
        frame["parameters"].to_numpy(),
        sample_flops,
        peak_flops_per_s=said.peak_flops_per_s,
        utilisation=said.utilisation,
        layer=layers,
        device=said.device or "estimated",
    )
    text = (
        f"{sample_flops.sum():.4g} forward FLOP a sample at {said.utilisation:g} of "
        f"{said.peak_flops_per_s:.4g} FLOP/s, three times that with backward; update takes no time"
    )
    return Imported("flops", profile, (), (Finding("flops", (), text),))


def _batch(said: Said) -> int:
    batch = 1 if said.batch is None else said.batch
    if batch < 1:
        raise UserError(f"batch size is {batch}: must be at least 1")
    return batch
