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

    A file in a directory without a SHA256SUMS is not checked.

    Raises
    ------
    UserError
        If the file cannot be read, or if the directory of the file has a SHA256SUMS that
        does not list the file with the hash of its content.
    """
    data = files.read(path)
    sums = path.with_name(SUMS)
    if not sums.is_file():
        return data
    # The format of the command sha256sum: the hash, two blanks and the name.
    line = f"{hashlib.sha256(data).hexdigest()}  {path.name}"
    if line not in files.read_text(sums).splitlines():
        raise UserError(
            f"{path} differs from what was transcribed: restore it, or check it against "
            f"its source and write {SUMS} there anew"
        )
    return data
