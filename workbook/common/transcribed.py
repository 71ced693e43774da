"""Transcribed numbers of papers and of others, guarded by hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.store import files

SUMS = "SHA256SUMS"
"""The name of the file that lists the hashes of a directory."""


def read_transcribed(path: Path) -> bytes:
    """Return the content of a transcribed file.

    Raises
    ------
    UserError
        If the directory of the file has a SHA256SUMS, and this does not list the hash
        of the content.
    """
    data = files.read(path)
    sums = path.with_name(SUMS)
    if not sums.is_file():
        return data
    line = f"{hashlib.sha256(data).hexdigest()}  {path.name}"
    if line not in files.read_text(sums).splitlines():
        raise UserError(
            f"{path} differs from what was transcribed: restore it, or check it against "
            f"its source and write {SUMS} there anew"
        )
    return data
