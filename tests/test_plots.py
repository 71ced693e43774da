"""Figures: the artists carry the data, looks are unique without colour, files are reproducible."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from PIL import Image

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, judge_selections
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import make_plan
from ddlkit.core.timeline import KINDS, Timeline
from ddlkit.core.workload import Workload
from ddlkit.report import outputs, plots, verdicts

WORKLOAD = Workload.from_arrays(0.2, [0.1, 0.05, 0.3, 0.1], [4000, 8_000_000, 400, 2_000_000], 0.01)
COST = AlphaBeta(1e-3, 5e-8)
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
    "family",
    [plots.ROLES, plots.PLANS, plots.FORMS, plots.SELECTIONS],
    ids=["role", "plan", "form", "selection"],
)
def test_markers_and_colours_are_unique_within_a_family(family: dict[str, plots.Style]) -> None:
    for feature in ("marker", "color", "label"):
        assert len({getattr(style, feature) for style in family.values()}) == len(family)


@pytest.mark.parametrize("family", [plots.ROLES, plots.SPANS], ids=["role", "span"])
def test_bars_differ_in_hatch_or_clearly_in_grey(family: dict[str, plots.Style]) -> None:
    for one, other in combinations(family.values(), 2):
        grey = abs(luminance(one.color) - luminance(other.color))
        assert one.hatch != other.hatch or grey > 0.05, (one.label, other.label)


def test_roles_differ_in_line_and_every_span_kind_has_a_look() -> None:
    assert len({str(style.line) for style in plots.ROLES.values()}) == len(plots.ROLES)
    assert set(plots.SPANS) == set(KINDS)


def test_look_knows_plan_arguments_and_refuses_strangers() -> None:
    assert plots.look("buffer:25MB").color == plots.look("buffer").color
    assert plots.look("buffer:25MB").label == "buffer 25MB"
    with pytest.raises(UserError, match="no style for 'guess'"):
        plots.look("guess")


def test_the_theme_is_left_behind() -> None:
    before = dict(mpl.rcParams)
    with plots.theme():
        assert mpl.rcParams["axes.spines.top"] is False
    figure, axes = plots.canvas()
    plots.bars_by_plan(axes, ["none"], {"model": [1.0]})
    plt.close(figure)
    assert dict(mpl.rcParams) == before


def draw_predicted(ax: Axes) -> None:
    plots.predicted_vs_measured(ax, [0.5, 2.0], {"model": [0.51, 1.9], "no_overlap": [0.7, 3.0]})


def draw_fit(ax: Axes) -> None:
    plots.cost_fit(
        ax, fit("alpha_beta", SIZES, SECONDS, draws=10), fit("table", SIZES, SECONDS, draws=0)
    )


def draw_samples(ax: Axes) -> None:
    frame = pd.DataFrame({"bytes": SIZES, "seconds": SECONDS, "collective": "all_reduce"})
    plots.samples_by_size(ax, frame, series="collective")


def draw_errors(ax: Axes) -> None:
    plots.error_by_case(ax, ["a", "b"], {"model": [0.01, -0.02]}, repeatability=[0.03, 0.01])


def draw_selection(ax: Axes) -> None:
    sizes = np.repeat([1e3, 1e4, 1e5, 1e6], 3)
    judged = judge_selections(
        sizes, np.full(12, 0.01), 1e-9 * sizes, forms=["log", "scan"], draws=5
    )
    plots.selection_fit(ax, judged, density=0.01)


def draw_slowdowns(ax: Axes) -> None:
    frame = pd.DataFrame({"kernel": ["relu", "linear"] * 2, "blocks": [1, 1, 4, 4]})
    plots.slowdown_by_blocks(ax, frame.assign(slowdown=[1.1, 1.2, 1.5, 2.0]))


DRAWN: list[tuple[Callable[[Axes], None], str, str]] = [
    (draw_predicted, r"measured iteration time \[s\]", r"predicted iteration time \[s\]"),
    (draw_fit, "message size", r"all-reduce time \[ms\]"),
    (draw_samples, "message size", r"time \[ms\]"),
    (draw_errors, r"relative error, iteration time \[%\]", ""),
    (draw_selection, "elements", r"selection time \[(ms|µs)\]"),
    (draw_slowdowns, "time beside communication / time alone", ""),
    (
        lambda ax: plots.error_by_size(ax, {"table": ([1e3, 1e6], [0.1, 0])}),
        "message size",
        r"\[%\]",
    ),
    (lambda ax: plots.gantt(ax, timeline()), r"time \[(ms|s)\]", ""),
    (lambda ax: plots.bars_by_plan(ax, ["a"], {"model": [0.2]}), "", r"iteration time \[ms\]"),
    (lambda ax: plots.layer_profile(ax, {"net": WORKLOAD}), r"\[ms\]", r"\[% of bytes\]"),
    (lambda ax: plots.verdict_ratios(ax, verdicts.evaluate()), "computed here / printed", ""),
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


def test_predictions_stand_where_they_should(ax: Axes) -> None:
    measured, model = np.array([0.5, 2.0]), np.array([0.45, 2.1])
    plots.predicted_vs_measured(ax, measured, {"model": model, "perfect_overlap": measured / 2})
    points = {c.get_label(): c for c in ax.collections if isinstance(c, PathCollection)}
    assert np.allclose(points["model"].get_offsets(), np.column_stack([measured, model]))
    assert ax.get_xlim() == ax.get_ylim()
    with pytest.raises(UserError, match="no iteration time above zero"):
        plots.predicted_vs_measured(ax, [0.0], {"model": [0.0]})


def test_small_times_are_drawn_in_small_units(ax: Axes) -> None:
    plots.bars_by_plan(ax, ["none", "single"], {"measured": [2e-3, 3e-3], "model": [1e-3, 3e-3]})
    bars = [container for container in ax.containers if isinstance(container, BarContainer)]
    assert [[bar.get_height() for bar in group] for group in bars] == [[2, 3], [1, 3]]
    assert ax.get_ylabel() == "iteration time [ms]"


def test_errors_are_percent_and_the_grey_bars_are_the_repeatability(ax: Axes) -> None:
    plots.error_by_case(ax, ["a", "b"], {"model": [0.01, -0.02]}, repeatability=[0.03, 0.01])
    model = next(line for line in ax.get_lines() if line.get_label() == "model")
    assert np.allclose(np.asarray(model.get_xdata(), dtype=float), [1, -2])
    (bars,) = [container for container in ax.containers if isinstance(container, BarContainer)]
    assert np.allclose([(bar.get_x(), bar.get_width()) for bar in bars], [(-3, 6), (-1, 2)])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_a_gantt_chart_has_every_span_once_at_full_length(ax: Axes) -> None:
    spans = timeline("buffer:1MB")
    plots.gantt(ax, spans)
    corners = [np.asarray(path.vertices) for bars in ax.collections for path in bars.get_paths()]
    widths = np.array([np.ptp(corner[:, 0]) for corner in corners])
    assert len(widths) == spans.n
    assert widths.sum() == pytest.approx(1e3 * float((spans.end_s - spans.start_s).sum()))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["compute", "communication"]
    assert f"{1e3 * spans.exposed_communication_s():.3g} ms" in ax.get_title(loc="right")
    with pytest.raises(UserError, match="no span of rank 3, iteration None"):
        plots.gantt(ax, spans, rank=3)


def test_stacked_gantt_charts_share_one_scale() -> None:
    figure, axes = plots.canvas(rows=2)
    plots.gantts(axes, {"none": timeline("none"), "single": timeline("single")})
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert [ax.get_title() or ax.get_title(loc="left") for ax in axes] == ["none", "single"]
    plt.close(figure)


def test_the_layer_profile_ends_at_all_bytes_when_backward_ends(ax: Axes) -> None:
    plots.layer_profile(ax, {"net": WORKLOAD})
    x, y = (np.asarray(values, dtype=float) for values in ax.get_lines()[0].get_data())
    assert x[-1] == pytest.approx(1e3 * WORKLOAD.ready_s[-1])
    assert y[-1] == 100
    assert np.all(np.diff(y) >= 0)
    assert y[1] == 0 and x[1] == pytest.approx(1e3 * WORKLOAD.forward_s)


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
    assert image.size == (round(plots.WIDTH * plots.DPI), 2 * plots.DPI)
    assert set(image.info) <= {"dpi"}
    rows = paths[0].with_suffix(".csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[0]) for row in rows] == numbers["x"].tolist()
    plt.close("all")


def test_a_table_is_an_image_and_the_full_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"network": ["VGG-16"], "size_mib": [527.7921447753906]})
    figure = plots.table(frame, "osf-tab2", tmp_path)
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "network",
        "size mib",
        "VGG-16",
        "527.8",
    ]
    csv = (tmp_path / "figures" / "osf-tab2.csv").read_text()
    assert csv == "network,size_mib\nVGG-16,527.7921447753906\n"
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
    assert kept == {"a_s": 1 / 3, "n": 4, "where": "lab"}
    assert json.loads((tmp_path / "summaries" / "20_fit.json").read_text()) == kept
    assert outputs.read_summaries(tmp_path) == {"20_fit": kept}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda where: outputs.write_numbers("../x", pd.DataFrame({"a": [1]}), where),
            "figure id '../x'",
        ),
        (lambda where: outputs.write_numbers("wb-x", pd.DataFrame({"a": []}), where), "is empty"),
        (
            lambda where: outputs.record_summary("a", {"x": float("nan")}, where),
            "summary a, x is nan",
        ),
        (lambda where: outputs.record_summary("a", {"x": np.zeros(2)}, where), "x is a ndarray"),
        (lambda where: outputs.record_summary("A b", {"x": 1}, where), "summary name 'A b'"),
    ],
)
def test_what_cannot_be_reported_is_refused(
    tmp_path: Path, call: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call(tmp_path)
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (1 / 3, "0.3333"),
        (12345.6, "12346"),
        (60965224.0, "60965224"),
        (4, "4"),
        ("x", "x"),
    ],
)
def test_numbers_are_short(value: Any, text: str) -> None:
    assert outputs.format_number(value) == text
