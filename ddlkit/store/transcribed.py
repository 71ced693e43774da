"""The papers' numbers as transcribed: read only while they are what was transcribed and compared.

Each folder of data/papers holds a SHA256SUMS of its CSV files, in the format of ``sha256sum -c``.
After a correction, ``python -m ddlkit.store.transcribed`` writes them anew.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.paths import DATA

SUMS = "SHA256SUMS"


def read(path: Path) -> bytes:
    """Content of a transcribed file, compared with the SHA256SUMS beside it.

    A folder without SHA256SUMS is not guarded. Raises UserError when the file cannot be read, is
    not listed, or differs from what is listed.
    """
    data = files.read(path)
    sums = path.with_name(SUMS)
    if not sums.is_file():
        return data
    listed = _parse(files.read_text(sums), sums)
    advice = "restore it, or check it against the paper and run python -m ddlkit.store.transcribed"
    if path.name not in listed:
        raise UserError(f"{path} is not among what was transcribed ({SUMS}): {advice}")
    if hashlib.sha256(data).hexdigest() != listed[path.name]:
        raise UserError(f"{path} differs from what was transcribed: {advice}")
    return data


def seal(folder: Path) -> Path:
    """Write the SHA256SUMS of a folder's CSV files as they are now; returns its path."""
    lines = (f"{files.sha256_file(path)}  {path.name}\n" for path in sorted(folder.glob("*.csv")))
    files.atomic_write_text(folder / SUMS, "".join(lines))
    return folder / SUMS


def _parse(text: str, where: Path) -> dict[str, str]:
    """File name -> SHA-256, 64 hex digits."""
    listed = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = re.fullmatch(r"(.{64})  (.+)", line)
        if not found:
            raise UserError(f"{where}, line {number}: must be a SHA-256, two spaces, a file name")
        listed[found[2]] = found[1]
    return listed


if __name__ == "__main__":
    for claims in sorted((DATA / "papers").glob("*/claims.csv")):
        print(seal(claims.parent).relative_to(DATA))
