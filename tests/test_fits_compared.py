"""Forms side by side: what the comparison says is what the fits do, on other people's logs too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.fit import SIMPLE_FIRST, fit, held_out_errors
from ddlkit.core.units import MIB
from ddlkit.formats import messages
from ddlkit.report import fits

LOG = min((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
COST = AlphaBeta(2e-5, 1e-10)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Sizes and seconds of a log, a row a size."""
    sizes, seconds, _ = messages.read_bytes_seconds(LOG, place="out_of_place")
    return sizes.astype(float), seconds


@pytest.fixture(scope="module")
def compared(rows: tuple[np.ndarray, np.ndarray]) -> fits.Comparison:
    return fits.compare(*rows, "alpha_beta:ends", workers=16)


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main([str(word) for word in words])
    return status, *capsys.readouterr()


def test_a_comparison_holds_what_the_fits_say(
    rows: tuple[np.ndarray, np.ndarray], compared: fits.Comparison
) -> None:
    assert list(compared.table.index) == [*SIMPLE_FIRST, "alpha_beta:ends"] == list(compared.fits)
    same = fit("auto", *rows, workers=16)
    assert (compared.chosen, compared.why) == (same.form, same.why)
    of_chosen = compared.fits[compared.chosen]
    np.testing.assert_array_equal(of_chosen.interval(rows[0]), same.interval(rows[0]))
    for form, row in compared.table.iterrows():
        at, errors, _ = held_out_errors(str(form), *rows)
        off = np.abs(errors)
        assert row["sizes"] == len(at) == 22
        assert row["median"] == np.median(off) and row["worst"] == off.max()
        assert row["median_below_25_mib"] == np.median(off[at < 25 * MIB])
        assert row["median_from_1_mib"] == np.median(off[at >= MIB])
        assert (compared.fits[str(form)].draws != ()) == (form == compared.chosen)


def test_the_command_compares_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, said = asked(capsys, "fit", LOG, "--compare")
    assert (status, said) == (0, "")
    default = Path("allreduce_inter_anode_job02-fits.png")
    assert f"drawn {default}" in re.sub(" +", " ", out)
    with Image.open(default) as image:
        assert image.size[0] > 800
    compared = fits.compare(*messages.read_bytes_seconds(LOG)[:2])
    for form, row in compared.table.iterrows():
        (line,) = (line for line in out.splitlines() if line.startswith(f"{form} "))
        assert f"{row['median']:.2%}" in line and f"{row['worst']:.2%}" in line
    assert compared.why in out
    more = ("--json", "--draw", "a.png", "--form", "alpha_beta:ends")
    status, out, _ = asked(capsys, "fit", LOG, "--compare", *more)
    told = json.loads(out)
    chosen = compared.chosen
    assert (told["chosen"], told["drawn"], Path("a.png").is_file()) == (chosen, "a.png", True)
    assert told["forms"].keys() == {*SIMPLE_FIRST, "alpha_beta:ends"}
    assert told["forms"]["table"]["median"] == pytest.approx(compared.table.loc["table", "median"])
