"""Figures: the artists carry the data, looks are unique without colour, files are reproducible."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from numpy.typing import NDArray
from PIL import Image

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import PLANNERS, make_plan
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Workload
from workbook import plots
from workbook.common import outputs, places
from workbook.omgs import planners
from workbook.plots import style as looks

assert planners  # whose import registers the planners of a paper
WORKLOAD = Workload.from_arrays(
    0.2, [0.1, 0.05, 0.3, 0.1], [4000, 8_000_000, 400, 2_000_000], 0.01
)
COST = AlphaBeta(1e-3, 5e-8)
SPANS = Iteration(WORKLOAD, make_plan("buffer:1MB", WORKLOAD, COST), COST).timeline()
DPI = 160
SIZES = np.repeat(2.0 ** np.arange(10, 25, 2), 5)
EXACT = {"alpha_beta": fit("alpha_beta", SIZES, COST(SIZES), draws=10)}
SELECTED = {
    "scan": fit("scan", np.repeat([1e3, 1e4, 1e5], 3), np.repeat([1e-6, 1e-5, 1e-4], 3))
}


@pytest.fixture
def ax() -> Iterator[Axes]:
    figure, axes = plots.canvas()
    yield axes
    plt.close(figure)


def drawn(ax: Axes, label: str) -> NDArray[np.float64]:
    """(n, 2) points of the line or markers with that label."""
    (line,) = (line for line in ax.get_lines() if line.get_label() == label)
    return np.array(line.get_data(), dtype=float).T


def names(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def luminance(color: str) -> float:
    """Relative luminance of a colour: what remains of it in grey."""
    return float(np.dot([0.2126, 0.7152, 0.0722], np.array(to_rgb(color)) ** 2.2))


def test_looks_of_a_family_and_of_a_series_differ_without_colour() -> None:
    for family in (
        "roles",
        "trials",
        "plans",
        "forms",
        "algorithms",
        "selections",
        "spans",
    ):
        styles = looks.FAMILIES[family].values()
        for feature in ["color", "label"] + ["marker"] * (family != "spans"):
            assert len({str(getattr(style, feature)) for style in styles}) == len(
                styles
            ), feature
    assert set(looks.FAMILIES["spans"]) == set(KINDS)
    assert set(looks.FAMILIES["plans"]) == set(PLANNERS), "every planner has a look"
    with pytest.raises(UserError, match="no style for 'guess'"):
        looks.look("guess")
    first, second, stranger, other = looks.looks(
        ["adafusion", "adafusion:repaired", "x", "y"]
    )
    assert (
        luminance(second.color) < luminance(first.color)
        and second.hollow > first.hollow
    )
    assert (stranger.color, stranger.marker) != (other.color, other.marker)


def test_bars_are_as_high_as_the_table_says_beside_or_upon_each_other(ax: Axes) -> None:
    table = pd.DataFrame(
        {"measured": [2.0, 3.0], "model": [1.0, np.nan]}, ["none", "single"]
    )
    for stacked in (False, True):
        ax.clear()
        plots.bars(ax, table, label="iteration [ms]", stacked=stacked)
        first, second = [
            bars for bars in ax.containers if isinstance(bars, BarContainer)
        ]
        heights = [[bar.get_height() for bar in group] for group in (first, second)]
        assert np.allclose(heights, [[2, 3], [1, 0]])
        assert second[0].get_y() == (2 if stacked else 0)
        apart = second[0].get_x() - first[0].get_x()
        assert apart == pytest.approx(0 if stacked else first[0].get_width())
        assert [group[0].get_hatch() for group in (first, second)] == ["", "///"]
        assert ax.get_ylabel() == "iteration [ms]" and names(ax.xaxis) == [
            "none",
            "single",
        ]


def test_two_bars_of_a_pair_stand_together_under_one_name(ax: Axes) -> None:
    table = pd.DataFrame(
        {"WAIT": [1.0, 2.0, 3.0, 4.0]}, ["1 MB", "1 MB", "1 GB", "1 GB"]
    )
    plots.bars(ax, table, label="time [s]", stacked=True, pairs="model, lab")
    middles = np.array([bar.get_x() + bar.get_width() / 2 for bar in ax.containers[0]])
    assert np.allclose(ax.get_xticks(), middles.reshape(-1, 2).mean(axis=1))
    assert middles[1] - middles[0] < middles[2] - middles[1]
    assert names(ax.xaxis) == ["1 MB", "1 GB"] and ax.get_xlabel() == "model, lab"


def test_no_difference_is_in_the_middle_of_the_colours_and_only_what_occurs_beside_them() -> (
    None
):
    """Of gains that is 0, of ratios 1, which are coloured by their logarithms."""
    grid = pd.DataFrame([[1.0, 2.0, 4.0]], ["a"], ["x", "y", "z"])
    shades: dict[bool, dict[float, float]] = {
        False: {-4: 0, 0: 0.5, 2: 0.75, 4: 1},
        True: {0.25: 0, 1: 0.5, 2: 0.75, 4: 1},
    }
    for log, wanted in shades.items():
        panel = plots.Panel(grid, 0.9 * grid, 1.1 * grid)
        figure = plots.heat_maps({"b": panel}, label="over that alone", log=log)
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert texts == ["(1.00)" if log else "1.00", "2.00", "4.00"], (
            "no difference is in it"
        )
        (image,) = figure.axes[0].collections
        found = np.asarray(image.norm(np.array([*wanted], dtype=float)), dtype=float)
        np.testing.assert_allclose(found, [*wanted.values()], atol=1e-12)
        assert figure.axes[-1].get_ylim() == (1, 4)
        assert not any("$" in text for text in names(figure.axes[-1].yaxis) if log)
        plt.close(figure)


def test_a_number_is_in_parentheses_if_its_interval_includes_no_difference() -> None:
    """An interval without a width is exact, and a number without an interval, too."""
    numbers = {
        "inside": (2.0, -1.0, 5.0),
        "at its end": (-2.0, -5.0, 0.0),
        "outside": (2.0, 1.0, 5.0),
        "exact": (0.0, 0.0, 0.0),
        "printed": (2.0, np.nan, np.nan),
    }
    grid, low, high = (
        pd.DataFrame([end], columns=[*numbers])
        for end in zip(*numbers.values(), strict=True)
    )
    (row,) = plots.texts(plots.Panel(grid, low, high), "{:+.0f}").to_numpy().tolist()
    assert row == ["(+2)", "(-2)", "+2", "+0", "+2"]


def test_lines_and_samples_carry_the_numbers_and_their_bands(ax: Axes) -> None:
    table = pd.DataFrame(
        {"exact": [1.0, 2, 4], "other": [3.0, np.nan, 5]}, [1024, 2048, 4096]
    )
    ends = table[["exact"]] / 2, table[["exact"]] * 2
    plots.lines(ax, table, xlabel="message size", ylabel="s", log="b", ends=ends)
    for name in table:
        assert np.array_equal(drawn(ax, name)[:, 1], table[name], equal_nan=True)
    (band,) = (np.asarray(path.vertices) for path in ax.collections[0].get_paths())
    assert (band[:, 1].min(), band[:, 1].max()) == (0.5, 8) and ax.get_xscale() == "log"
    rows = pd.DataFrame({"epoch": [1, 1, 2, 2], "loss": [4.0, 2, 1, 2], "network": "a"})
    plots.samples(
        ax, rows, x="epoch", y="loss", series="network", center="mean", percent=100
    )
    np.testing.assert_allclose(drawn(ax, "a"), [(1, 3), (2, 1.5)])
    (band,) = (np.asarray(path.vertices) for path in ax.collections[-1].get_paths())
    assert (band[:, 1].min(), band[:, 1].max()) == (1, 4)


def test_fitted_lines_pass_through_what_they_were_made_of(ax: Axes) -> None:
    plots.cost_fit(ax, EXACT)
    for label in ("line, relative error", "measured, median"):
        x, y = drawn(ax, label).T
        np.testing.assert_allclose(y, 1e3 * COST(x))
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "message size",
        "all-reduce time [ms]",
    )
    plots.cost_fit(ax, SELECTED)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("elements", "selection time [µs]")


def test_dots_and_ranges_stand_in_their_case_and_the_grey_bars_about_zero(
    ax: Axes,
) -> None:
    plots.dots(
        ax, ["a", "b"], {"model": [1, -2]}, label="%", band=("repeatability", [3, 1])
    )
    assert np.allclose(drawn(ax, "model"), [(1, 0), (-2, 1)])
    (bars,) = [
        container for container in ax.containers if isinstance(container, BarContainer)
    ]
    assert bars.get_label() == "repeatability"
    assert np.allclose(
        [(bar.get_x(), bar.get_width()) for bar in bars], [(-3, 6), (-1, 2)]
    )
    assert names(ax.yaxis) == ["a", "b"]
    plots.intervals(ax, ["a", "b"], {"paper": ([1, 2], [3, 5])}, label="%")
    (thick,) = [lines for lines in ax.collections if isinstance(lines, LineCollection)]
    assert np.allclose(
        np.array(thick.get_segments()), [[[1, 0], [3, 0]], [[2, 1], [5, 1]]]
    )
    ax.clear()
    plots.error_rows(ax, {"b": [-0.01, 0.03, -0.09], "a": [0.05]}, label="%")
    _, *rows = (np.array(line.get_data()).T for line in ax.get_lines())
    assert np.allclose(rows[0], [(-1, 0), (3, 0), (-9, 0)])
    assert np.allclose(rows[1], [(-1, 0)]), "the bar is at the median"
    assert np.allclose([*rows[2], *rows[3]], [(5, 1), (5, 1)])
    assert names(ax.yaxis) == ["b", "a"]
    written = [text.get_text() for text in ax.texts]
    assert written == ["3.0%", "5.0%", "median\n|error|"]


def test_a_gantt_chart_has_every_span_once_at_full_length(ax: Axes) -> None:
    plots.gantt(ax, {"": SPANS})
    corners = [
        np.asarray(path.vertices)
        for bars in ax.collections
        for path in bars.get_paths()
    ]
    widths = np.array([np.ptp(corner[:, 0]) for corner in corners])
    assert len(widths) == SPANS.n
    assert widths.sum() == pytest.approx(
        1e3 * float((SPANS.end_s - SPANS.start_s).sum())
    )
    assert (
        names(ax.yaxis) == ["compute", "communication"]
        and ax.get_xlabel() == "time [ms]"
    )
    assert f"{1e3 * SPANS.exposed_communication_s():.3g} ms" in ax.get_title(
        loc="right"
    )


OLDER_PROCESSOR = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Nehalem",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
}
"""What hides all but SSE4.2 from NumPy, from SciPy's OpenBLAS and from the C library's own functions."""

SCRIPT = """
import numpy as np, pandas as pd
from ddlkit.core.fit import fit
from workbook.common import outputs
rng = np.random.default_rng(0)
sizes = np.repeat(np.geomspace(1e3, 1e8, 12), 8)
seconds = (1e-4 + 1e-9 * sizes) * rng.lognormal(0, 0.05, sizes.size)
at = np.geomspace(2e3, 5e7, 40)
forms = ("alpha_beta", "piecewise", "segments", "table")
frame = pd.DataFrame({form: fit(form, sizes, seconds).cost(at) for form in forms})
outputs.write_numbers("wb-x", frame.assign(exact=np.exp(-at / 1e6)))
"""


def saved(y: NDArray[np.float64], where: Path) -> tuple[bytes, str]:
    """Bytes of a figure and of its numbers."""
    figure, axes = plots.canvas(height=2)
    axes.plot(y)
    path = plots.save_figure(figure, "wb-y", pd.DataFrame({"y": y}), where)
    return path.read_bytes(), path.with_suffix(".csv").read_text()


def test_the_same_figure_gives_the_same_bytes_without_a_date(tmp_path: Path) -> None:
    y = np.array([0.1 + 0.2, 1e-17, 1 / 3])
    png, csv = saved(y, tmp_path / "a")
    assert saved(y, tmp_path / "b") == (png, csv)
    assert saved(y**2, tmp_path / "b")[0] != png
    image = Image.open(io.BytesIO(png))
    assert image.size == (round(looks.WIDTH * DPI), 2 * DPI) and set(image.info) <= {
        "dpi"
    }
    assert [*map(float, csv.splitlines()[1:])] == [0.3, 1e-17, 0.333333]


@pytest.mark.fault(
    fault="another processor computes the last digits otherwise",
    injected="costs fitted again with all but SSE4.2 hidden from the libraries; plotted "
    "positions moved by 1e-9 of themselves",
    holds="the same bytes of CSV; the image that is there stays",
)
def test_what_is_published_does_not_depend_on_the_processor(tmp_path: Path) -> None:
    written = []
    for name, hidden in {"this": {}, "older": OLDER_PROCESSOR}.items():
        environment = {
            **os.environ,
            **hidden,
            outputs.REPORTS_VARIABLE: str(tmp_path / name),
        }
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, cwd=places.ROOT, check=True
        )
        written.append((tmp_path / name / "figures" / "wb-x.csv").read_bytes())
    assert written[0] == written[1]
    seconds = np.geomspace(1e-3, 1.0, 9)
    assert saved(seconds, tmp_path) == saved((1.0 + 1e-9) * seconds, tmp_path)


@given(st.floats(allow_nan=False), st.floats(-1e-13, 1e-13))
def test_rounding_keeps_six_digits_and_is_done_once(value: float, off: float) -> None:
    assume(
        math.isinf(value) or math.isfinite(value * (1 + off))
    )  # the largest float has no neighbour
    rounded = outputs.rounded(value)
    assert outputs.rounded(rounded) == rounded
    assert rounded == pytest.approx(
        value, rel=0.5 * 10 ** (1 - outputs.DIGITS), abs=5e-324
    )
    near = outputs.rounded(value * (1 + off))
    assert near == pytest.approx(
        rounded, rel=1.001 * 10 ** (1 - outputs.DIGITS), abs=5e-324
    )


def test_outputs_go_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(outputs.REPORTS_VARIABLE, str(tmp_path))
    assert (
        outputs.write_numbers("wb-x", pd.DataFrame({"a": [1]})).parent
        == tmp_path / "figures"
    )
    key = {"a_s": np.float64(1 / 3), "n": np.int64(4), "where": "lab"}
    kept = outputs.record_summary("20_fit", key)
    assert kept == {"a_s": 0.333333, "n": 4, "where": "lab"}
    assert json.loads((tmp_path / "summaries" / "20_fit.json").read_text()) == kept
    assert outputs.read_summaries(tmp_path) == {"20_fit": kept}
    for value in (float("nan"), np.zeros(2)):
        with pytest.raises((ValueError, TypeError)):
            outputs.record_summary("a", {"x": value}, tmp_path)
    assert not (tmp_path / "summaries" / "a.json").exists()
