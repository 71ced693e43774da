"""Transcribed numbers of papers and of others, guarded by hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.store import files

SUMS = "SHA256SUMS"


def read_transcribed(path: Path) -> bytes:
    """Return the content of a transcribed file, compared with the SHA256SUMS beside it, if there is one."""
    data, sums = files.read(path), path.with_name(SUMS)
    listed = files.read_text(sums).splitlines() if sums.is_file() else None
    if (
        listed is not None
        and f"{hashlib.sha256(data).hexdigest()}  {path.name}" not in listed
    ):
        advice = (
            f"restore it, or check it against its source and write {SUMS} there anew"
        )
        raise UserError(f"{path} differs from what was transcribed: {advice}")
    return data
