"""Figures: the artists carry the data, looks are unique without colour, files are reproducible."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import BarContainer
from numpy.typing import NDArray
from PIL import Image

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import make_plan
from ddlkit.core.timeline import KINDS, Timeline
from ddlkit.core.workload import Workload
from ddlkit.papers.dag import STRATEGIES, IterationTimes, tasks
from ddlkit.papers.dag.training import Gpus, s_sgd
from ddlkit.report import outputs, plots
from ddlkit.report.panels import Panel
from ddlkit.report.plots import speedups
from ddlkit.report.plots import style as looks

WORKLOAD = Workload.from_arrays(0.2, [0.1, 0.05, 0.3, 0.1], [4000, 8_000_000, 400, 2_000_000], 0.01)
COST = AlphaBeta(1e-3, 5e-8)
DPI = 160
SIZES = np.repeat(2.0 ** np.arange(10, 25, 2), 5)
SECONDS = COST(SIZES) * np.random.default_rng(0).lognormal(0, 0.05, SIZES.size)


@pytest.fixture
def ax() -> Iterator[Axes]:
    figure, axes = plots.canvas()
    yield axes
    plt.close(figure)


def timeline(plan: str = "none") -> Timeline:
    return Iteration(WORKLOAD, make_plan(plan, WORKLOAD, COST), COST).timeline()


def luminance(color: str) -> float:
    """Relative luminance of a colour: what remains of it in grey."""
    return float(np.dot([0.2126, 0.7152, 0.0722], np.array(to_rgb(color)) ** 2.2))


@pytest.mark.parametrize(
    "family", ["roles", "trials", "plans", "forms", "algorithms", "selections", "spans"]
)
def test_looks_of_a_family_differ_without_colour(family: str) -> None:
    styles = looks.FAMILIES[family].values()
    features = ("color", "label") if family == "spans" else ("color", "label", "marker")
    for feature in features:
        assert len({getattr(style, feature) for style in styles}) == len(styles), feature
    if family == "roles":
        assert len({str(style.line) for style in styles}) == len(styles)
    for one, other in combinations(styles, 2) if family in ("roles", "spans") else ():
        grey = abs(luminance(one.color) - luminance(other.color))
        assert one.hatch != other.hatch or grey > 0.05, (one.label, other.label)


def test_every_span_kind_has_a_look_and_strangers_have_none() -> None:
    assert set(looks.FAMILIES["spans"]) == set(KINDS)
    with pytest.raises(UserError, match="no style for 'guess'"):
        looks.look("guess")


def test_the_theme_is_left_behind() -> None:
    before = dict(mpl.rcParams)
    with looks.theme():
        assert mpl.rcParams["axes.spines.top"] is False
    figure, axes = plots.canvas()
    plots.bars(axes, pd.DataFrame({"model": [1.0]}, ["none"]), label="time [s]")
    plt.close(figure)
    assert dict(mpl.rcParams) == before


FITS = fit("alpha_beta", SIZES, SECONDS, draws=10), fit("table", SIZES, SECONDS, draws=0)
SELECTED = fit(
    "scan", np.repeat([1e3, 1e4, 1e5], 3), np.full(9, 0.01), np.repeat([1e-6, 1e-5, 1e-4], 3)
)
SAMPLES = pd.DataFrame({"bytes": SIZES, "seconds": SECONDS, "collective": "all_reduce"})
TABLE = pd.DataFrame({"model": [0.2, 0.3], "measured": [0.1, np.nan]}, index=[1, 2])
DRAWN: list[tuple[Callable[[Axes], None], str, str]] = [
    (lambda ax: plots.cost_fit(ax, *FITS), "message size", r"all-reduce time \[ms\]"),
    (lambda ax: plots.cost_fit(ax, SELECTED, density=0.01), "elements", r"selection time \[µs\]"),
    (
        lambda ax: plots.samples(ax, SAMPLES, x="bytes", series="collective"),
        "message size",
        r"time \[ms\]",
    ),
    (lambda ax: plots.lines(ax, TABLE, xlabel="n", ylabel="s", log="by"), "n", "s"),
    (lambda ax: plots.dots(ax, ["a", "b"], TABLE, label="error [%]"), r"error \[%\]", ""),
    (lambda ax: plots.gantt(ax, {"": timeline()}), r"time \[(ms|s)\]", ""),
    (lambda ax: plots.bars(ax, TABLE, label="time", seconds=True), "", r"time \[ms\]"),
]


@pytest.mark.parametrize(("draw", "x", "y"), DRAWN)
def test_axes_carry_quantities_with_units_and_a_legend(
    ax: Axes, draw: Callable[[Axes], None], x: str, y: str
) -> None:
    draw(ax)
    assert re.search(x, ax.get_xlabel())
    assert re.search(y, ax.get_ylabel())
    assert ax.get_legend() is not None
    ax.figure.canvas.draw()


def drawn(ax: Axes, label: str) -> NDArray[np.float64]:
    """(n, 2) points of the line or markers with that label."""
    (line,) = (line for line in ax.get_lines() if line.get_label() == label)
    return np.array(line.get_data(), dtype=float).T


@pytest.mark.parametrize("stacked", [False, True])
def test_bars_are_as_high_as_the_table_says_in_a_unit_that_reads_well(
    ax: Axes, stacked: bool
) -> None:
    table = pd.DataFrame({"measured": [2e-3, 3e-3], "model": [1e-3, np.nan]}, ["none", "single"])
    plots.bars(ax, table, label="iteration time", seconds=True, stacked=stacked)
    groups = [container for container in ax.containers if isinstance(container, BarContainer)]
    heights = [[bar.get_height() for bar in group] for group in groups]
    assert np.array_equal(np.nan_to_num(heights), [[2, 3], [1, 0]])
    assert groups[1][0].get_y() == (2 if stacked else 0)
    assert [bar.get_hatch() for group in groups for bar in group] == ["", "", "///", "///"]
    assert ax.get_ylabel() == "iteration time [ms]"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["none", "single"]


def test_a_spread_reaches_from_the_least_to_the_most_in_the_unit_of_the_bars(ax: Axes) -> None:
    table = pd.DataFrame({"forward": [1e-3, 2e-3], "backward": [2e-3, 3e-3]}, ["none", "single"])
    ends = ("rounds", [2.5e-3, 4e-3], [3.5e-3, 9e-3])
    plots.bars(ax, table, label="iteration", seconds=True, stacked=True, spread=ends)
    (found,) = [one for one in ax.collections if one.get_label() == "rounds"]
    assert isinstance(found, LineCollection)
    wanted = [[[0, 2.5], [0, 3.5]], [[1, 4], [1, 9]]]
    assert np.allclose(np.array(found.get_segments()), np.array(wanted))
    low, high = ax.get_ylim()
    assert low == 0 and high >= 9


def test_no_difference_is_in_the_middle_of_the_colours_and_only_what_occurs_beside_them() -> None:
    """Of gains that is 0, of ratios 1, which are coloured by their logarithms."""
    grid = pd.DataFrame([[1.0, 2.0, 4.0]], ["a"], ["x", "y", "z"])
    shades: dict[bool, dict[float, float]] = {
        False: {-4: 0, 0: 0.5, 2: 0.75, 4: 1},
        True: {0.25: 0, 1: 0.5, 2: 0.75, 4: 1},
    }
    for log, wanted in shades.items():
        figure = plots.heat_maps(
            {"": Panel(grid)}, label="over that alone", log=log, headings={"": "b"}
        )
        (image,) = figure.axes[0].collections
        found = np.asarray(image.norm(np.array([*wanted], dtype=float)), dtype=float)
        np.testing.assert_allclose(found, [*wanted.values()], atol=1e-12)
        assert figure.axes[-1].get_ylim() == (1, 4) and figure.axes[0].get_title(loc="left") == "b"
        ticks = [text.get_text() for text in figure.axes[-1].get_yticklabels()]
        assert not any("$" in text for text in ticks if log)
        plt.close(figure)


def test_two_bars_of_a_pair_stand_together_under_one_name(ax: Axes) -> None:
    table = pd.DataFrame({"WAIT": [1.0, 2.0, 3.0, 4.0]}, ["1 MB", "1 MB", "1 GB", "1 GB"])
    plots.bars(ax, table, label="time [s]", stacked=True, pairs="model, lab")
    (group,) = [one for one in ax.containers if isinstance(one, BarContainer)]
    middles = np.array([bar.get_x() + bar.get_width() / 2 for bar in group])
    assert np.allclose(ax.get_xticks(), middles.reshape(-1, 2).mean(axis=1))
    assert middles[1] - middles[0] < middles[2] - middles[1]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1 MB", "1 GB"]
    assert ax.get_xlabel() == "model, lab"


def test_lines_and_their_samples_carry_the_numbers(ax: Axes) -> None:
    table = pd.DataFrame(
        {"exact": [1.0, 2.0, 4.0], "other": [3.0, np.nan, 5.0]}, [1024, 2048, 4096]
    )
    plots.lines(ax, table, xlabel="message size", ylabel="s", log="b")
    for name, label in (("exact", "exact"), ("other", "other")):
        assert np.array_equal(drawn(ax, label)[:, 1], table[name], equal_nan=True)
    assert ax.get_xscale() == "log"
    rows = pd.DataFrame({"epoch": [1, 1, 2, 2], "loss": [4.0, 2.0, 1.0, 2.0], "network": "a"})
    plots.samples(ax, rows, x="epoch", y="loss", series="network", center="mean", percent=100)
    np.testing.assert_allclose(drawn(ax, "a"), [(1, 3), (2, 1.5)])
    (band,) = (np.asarray(path.vertices) for path in ax.collections[-1].get_paths())
    assert (band[:, 1].min(), band[:, 1].max()) == (1, 4)


def test_fitted_lines_pass_through_what_they_were_made_of(ax: Axes) -> None:
    cost = AlphaBeta(1e-3, 1e-9)
    plots.cost_fit(ax, fit("alpha_beta", SIZES, cost(SIZES), draws=0))
    x, y = drawn(ax, "line, relative error").T
    np.testing.assert_allclose(y, 1e3 * cost(x))
    x, y = drawn(ax, "measured, median").T
    np.testing.assert_allclose(y, 1e3 * cost(x))
    with pytest.raises(UserError, match="density 0.5 was not measured"):
        plots.cost_fit(ax, SELECTED, density=0.5)


def test_dots_stand_in_their_case_and_the_grey_bars_about_the_reference(ax: Axes) -> None:
    plots.dots(ax, ["a", "b"], {"model": [1, -2]}, label="%", band=("repeatability", [3, 1]))
    assert np.allclose(drawn(ax, "model"), [(1, 0), (-2, 1)])
    (bars,) = [container for container in ax.containers if isinstance(container, BarContainer)]
    assert np.allclose([(bar.get_x(), bar.get_width()) for bar in bars], [(-3, 6), (-1, 2)])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_a_gantt_chart_has_every_span_once_at_full_length(ax: Axes) -> None:
    spans = timeline("buffer:1MB")
    plots.gantt(ax, {"": spans})
    corners = [np.asarray(path.vertices) for bars in ax.collections for path in bars.get_paths()]
    widths = np.array([np.ptp(corner[:, 0]) for corner in corners])
    assert len(widths) == spans.n
    assert widths.sum() == pytest.approx(1e3 * float((spans.end_s - spans.start_s).sum()))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["compute", "communication"]
    assert f"{1e3 * spans.exposed_communication_s():.3g} ms" in ax.get_title(loc="right")
    with pytest.raises(UserError, match="no span of rank 3"):
        plots.gantt(ax, {"": spans}, rank=3)


def test_figure_1_has_36_tasks_in_two_colours_and_its_critical_path(ax: Axes) -> None:
    times = IterationTimes(0.5, 0.5, np.ones(3), np.full(3, 2.0), np.full(3, 1.5), 0.5)
    schedule = tasks.schedule(s_sgd(times, STRATEGIES["Caffe-MPI"], Gpus(1, 4)))
    speedups.task_graph(ax, schedule)
    nodes = [one for one in ax.collections if isinstance(one, PathCollection)]
    assert [np.shape(one.get_offsets())[0] for one in nodes] == [
        25,
        11,
    ]  # circles compute, squares communicate
    colors = np.concatenate([np.asarray(one.get_facecolor()) for one in nodes])
    assert {to_hex(color) for color in colors.tolist()} == {"#f7d154", "#e8833a"}
    places = np.concatenate([one.get_offsets() for one in nodes])
    assert len({tuple(place) for place in places.tolist()}) == 36
    gaps = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))[~np.eye(36, dtype=bool)]
    assert gaps.min() >= 1  # a column, or a row
    thick = [arrow for arrow in ax.patches if arrow.get_linewidth() > 1]
    assert len(thick) == len(schedule.critical_path) - 1
    assert len(ax.patches) - len(thick) == len(schedule.graph.edges)
    words = {text.get_text() for text in ax.texts}
    assert words >= {
        *(f"T{task}" for task in range(36)),
        "read",
        "copy",
        "forward\nlayer 3",
        "GPU 3",
    }


OLDER_PROCESSOR = {
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Nehalem",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
}
"""What hides all but SSE4.2 from NumPy, from SciPy's OpenBLAS and from the C library's own functions."""

SCRIPT = """
import numpy as np, pandas as pd
from ddlkit.core.fit import fit
from ddlkit.report import outputs
rng = np.random.default_rng(0)
sizes = np.repeat(np.geomspace(1e3, 1e8, 12), 8)
seconds = (1e-4 + 1e-9 * sizes) * rng.lognormal(0, 0.05, sizes.size)
at = np.geomspace(2e3, 5e7, 40)
forms = ("alpha_beta", "piecewise", "segments", "table")
frame = pd.DataFrame({form: fit(form, sizes, seconds).cost(at) for form in forms})
outputs.write_numbers("wb-x", frame.assign(exact=np.exp(-at / 1e6)))
"""


def figure_of(seed: int) -> Any:
    figure, axes = plots.canvas(height=2)
    axes.plot(np.random.default_rng(seed).uniform(size=9))
    return figure


def test_the_same_figure_gives_the_same_bytes_without_a_date(tmp_path: Path) -> None:
    numbers = pd.DataFrame({"x": [0.1 + 0.2, 1e-17, 1 / 3], "name": ["a", "b", "c"]})
    paths = [plots.save_figure(figure_of(1), "wb-same", numbers, tmp_path / name) for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert (
        plots.save_figure(figure_of(2), "wb-same", numbers, tmp_path).read_bytes()
        != paths[0].read_bytes()
    )
    image = Image.open(io.BytesIO(paths[0].read_bytes()))
    assert image.size == (round(looks.WIDTH * DPI), 2 * DPI)
    assert set(image.info) <= {"dpi"}
    rows = paths[0].with_suffix(".csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[0]) for row in rows] == [0.3, 1e-17, 0.333333]
    plt.close("all")


@pytest.mark.fault(
    fault="another processor computes the last digits otherwise",
    injected="costs fitted again with all but SSE4.2 hidden from the libraries; plotted "
    "positions moved by 1e-9 of themselves",
    holds="the same bytes of CSV; the image that is there stays",
)
def test_what_is_published_does_not_depend_on_the_processor(tmp_path: Path) -> None:
    written = {}
    for name, hidden in {"this": {}, "older": OLDER_PROCESSOR}.items():
        environment = {**os.environ, **hidden, outputs.REPORTS_VARIABLE: str(tmp_path / name)}
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=store.ROOT, check=True)
        written[name] = (tmp_path / name / "figures" / "wb-x.csv").read_bytes()
    assert written["this"] == written["older"]
    seconds = np.geomspace(1e-3, 1.0, 9)
    for factor in (1.0, 1.0 + 1e-9):
        figure, axes = plots.canvas(height=2)
        axes.plot(factor * seconds)
        path = plots.save_figure(figure, "wb-y", pd.DataFrame({"s": factor * seconds}), tmp_path)
        written[str(factor)] = path.read_bytes() + path.with_suffix(".csv").read_bytes()
    assert written["1.0"] == written["1.000000001"]
    plt.close("all")


@given(st.floats(allow_nan=False), st.floats(-1e-13, 1e-13))
def test_rounding_keeps_six_digits_and_is_done_once(value: float, off: float) -> None:
    assume(
        math.isinf(value) or math.isfinite(value * (1 + off))
    )  # the largest float has no neighbour
    rounded = outputs.rounded(value)
    assert outputs.rounded(rounded) == rounded
    assert rounded == pytest.approx(value, rel=0.5 * 10 ** (1 - outputs.DIGITS), abs=5e-324)
    near = outputs.rounded(value * (1 + off))
    assert near == pytest.approx(rounded, rel=1.001 * 10 ** (1 - outputs.DIGITS), abs=5e-324)


def test_a_table_is_an_image_and_the_full_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"network": ["VGG-16"], "size_mib": [527.7921447753906]})
    figure = plots.table(frame, "osf-tab2", tmp_path)
    (drawn,) = figure.axes[0].tables
    cells = [drawn[row, column].get_text().get_text() for row in (0, 1) for column in (0, 1)]
    assert cells == ["network", "size mib", "VGG-16", "527.8"]
    csv = (tmp_path / "figures" / "osf-tab2.csv").read_text()
    assert csv == "network,size_mib\nVGG-16,527.792\n"
    assert (tmp_path / "figures" / "osf-tab2.png").read_bytes().startswith(b"\x89PNG")
    plt.close(figure)


def test_outputs_go_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(outputs.REPORTS_VARIABLE, str(tmp_path))
    assert outputs.write_numbers("wb-x", pd.DataFrame({"a": [1]})).parent == tmp_path / "figures"
    kept = outputs.record_summary(
        "20_fit", {"a_s": np.float64(1 / 3), "n": np.int64(4), "where": "lab"}
    )
    assert kept == {"a_s": 0.333333, "n": 4, "where": "lab"}
    assert json.loads((tmp_path / "summaries" / "20_fit.json").read_text()) == kept
    assert outputs.read_summaries(tmp_path) == {"20_fit": kept}


@pytest.mark.parametrize("value", [float("nan"), np.zeros(2)])
def test_what_is_no_finite_number_is_not_kept(tmp_path: Path, value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        outputs.record_summary("a", {"x": value}, tmp_path)
    assert not list(tmp_path.rglob("*.*"))
