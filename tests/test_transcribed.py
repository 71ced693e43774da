"""The papers' numbers are read only while they are what was transcribed."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from workbook.common import claims, places, transcribed

PAPERS = places.DATA / "papers"


def seal(folder: Path) -> Path:
    """What ``sha256sum *.csv > SHA256SUMS`` writes."""
    lines = (
        f"{store.sha256_file(path)}  {path.name}\n"
        for path in sorted(folder.glob("*.csv"))
    )
    sums = folder / transcribed.SUMS
    sums.write_text("".join(lines))
    return sums


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_transcription_is_sealed_as_it_is(paper: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PAPERS / paper, tmp_path / paper))
    assert seal(copy).read_text() == (PAPERS / paper / transcribed.SUMS).read_text()


@given(data=st.data())
def test_one_changed_byte_is_one_error_that_names_the_file(data: st.DataObject) -> None:
    with TemporaryDirectory() as name:
        path = Path(name, "tab.csv")
        path.write_bytes(data.draw(st.binary(min_size=1, max_size=50)))
        seal(path.parent)
        changed = bytearray(transcribed.read_transcribed(path))
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(
            st.integers(1, 255)
        )
        path.write_bytes(changed)
        with pytest.raises(
            UserError, match=r"tab\.csv differs from what was transcribed: restore"
        ):
            transcribed.read_transcribed(path)
