"""Layer profiles in foreign files: readers.py lists the formats; and layer profiles written for a user.

What a file lacks, and what its user must say, raises a UserError of one line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import readers
from ddlkit.formats.contract import ImportOptions
from ddlkit.store import files
from ddlkit.store.readers import profile_frame
from ddlkit.store.sheet import SCHEMAS, write_sheet
from ddlkit.store.tables import own_output

MOST_BATCH = 10**9  # samples of an iteration: more than any training set here has


class Imported(NamedTuple):
    """What a file gave, and what its user should know; kind : the name of its reader."""

    kind: str
    profile: LayerProfile
    findings: tuple[Finding, ...]


def import_file(
    path: Path, kind: str | None = None, options: ImportOptions | None = None
) -> Imported:
    """Return the file as a layer profile, of the kind that its content shows unless given."""
    options = options or ImportOptions()
    if options.batch is not None and not 1 <= options.batch <= MOST_BATCH:
        raise UserError(
            f"batch size is {options.batch}: must be from 1 to {MOST_BATCH}"
        )
    text, file = files.read_text(path), str(path)
    kind = guess_kind(text, file) if kind is None else kind
    by_name = {reader.name: reader for reader in readers.LAYER_PROFILES}
    if kind not in by_name:
        raise UserError(f"unknown kind {kind!r}: use one of {', '.join(by_name)}")
    profile, findings = by_name[kind].read(text, file, options)
    profile = replace(
        profile,
        network=options.network or profile.network or path.name.partition(".")[0],
        batch=options.batch or 1,
        device=options.device or profile.device,
    )
    if options.gradient_bytes is not None:
        profile = profile.sent_as(options.gradient_bytes)
    if options.batch is None:
        findings += (
            Finding("batch", (), "the file does not tell the batch size: 1 is taken"),
        )
    return Imported(kind, profile, findings)


def guess_kind(text: str, file: str) -> str:
    """Return the name of the first of readers.LAYER_PROFILES that takes the content.

    >>> guess_kind("tensor,parameters,flops\\nconv,10,1e9\\n", "mine.csv")
    'flops'
    """
    names = {name.strip() for name in text.partition("\n")[0].split(",")}
    if "backward_s" in names:
        advice = "use it with --profile, or say --kind flops to take its FLOP counts"
        raise UserError(f"{file}: a layer profile already: {advice}")
    reader = readers.first_match(readers.LAYER_PROFILES, text)
    if reader is None:
        formats = readers.tried(readers.LAYER_PROFILES, text)
        raise UserError(
            f"{file}: is nothing that can be imported: say --kind; {formats}; "
            "logs of messages are for ddlkit fit"
        )
    return reader.name


def save_profile(profile: LayerProfile, path: Path, *sources: Path) -> None:
    """Write the profile as a CSV of one's own, without a stamp, over none of the sources."""
    text = write_sheet(profile_frame(profile), SCHEMAS["layers"], str(path))
    files.atomic_write_text(own_output(path, *sources), text)
