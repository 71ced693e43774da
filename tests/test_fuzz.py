"""Files come from strangers: whatever is in them, one line says what is wrong, or the answer is sane."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import corpus
import fuzzing
from ddlkit import cli
from workbook.cli import PROGRAM
from workbook.record import kinds

assert (
    kinds
)  # what is loaded by the first input counts neither as its time nor its memory

INPUTS = int(os.environ.get("DDLKIT_FUZZ", "0"))
"""So many in all, if given: 50000 for a night. Else 400, and 20,000 with --long."""
SHARES = {
    "import": 0.2,
    "predict": 0.34,
    "timeline": 0.12,
    "fit": 0.08,
    "campaign": 0.16,
    "scale": 0.1,
}


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same parsers for all inputs, and limited memory."""
    make = cli._parser
    parsers = {
        (program.name, with_defaults): make(program, with_defaults=with_defaults)
        for program, with_defaults in product((cli.DDLKIT, PROGRAM), (True, False))
    }

    def kept(program: cli.Program, *, with_defaults: bool = True) -> Any:
        return parsers[program.name, with_defaults]

    monkeypatch.setattr(cli, "_parser", kept)
    with fuzzing.limited():
        yield


@pytest.mark.parametrize("kind", fuzzing.CHOSEN)
def test_what_is_mutated_was_good(
    kind: str, guarded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, given in enumerate(fuzzing.CHOSEN[kind]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        got = fuzzing.answer(given, folder)
        assert (got.status, fuzzing.wrong(given, got)) == (0, ""), got.error


@pytest.mark.parametrize("name", corpus.ENTRIES)
def test_what_once_broke_something_is_refused_in_one_line(
    name: str, guarded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word, given = corpus.ENTRIES[name]
    got = fuzzing.answer(given, tmp_path)
    assert (got.status, fuzzing.wrong(given, got)) == (2, ""), got.out
    assert word in got.error
    assert not got.made


@pytest.mark.slow
@pytest.mark.timeout(max(1200, INPUTS))
@pytest.mark.parametrize("kind", SHARES)
def test_a_mutated_input_is_refused_in_one_line_or_answered_sanely(
    kind: str,
    guarded: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    inputs = INPUTS or (20_000 if request.config.getoption("--long") else 400)
    ended: set[int | str] = set()
    for number in range(round(inputs * SHARES[kind])):
        given = fuzzing.mutated(kind, number)
        folder = tmp_path / "in" / str(number)
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        got = fuzzing.answer(given, folder)
        assert fuzzing.wrong(given, got) == "", f"{folder}: {' '.join(given.words)}"[
            :400
        ]
        shutil.rmtree(folder)
        ended.add(got.status)
    assert ended == {0, 2}
