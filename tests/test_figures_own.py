"""The workbook's own figures: what is marked in them is what was computed."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from workbook.course import example
from workbook.course import figures as lessons
from workbook.plots.style import look
from workbook.validate import figures as errors


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def outlined_widths(ax: Axes) -> list[float]:
    """Return the widths of what is drawn with a dashed outline."""
    widths = []
    for bars in ax.collections:
        if "None" in str(bars.get_linestyle()):
            continue  # a solid line has no pattern of dashes
        for path in bars.get_paths():
            corners = np.asarray(path.vertices)
            widths.append(float(np.ptp(corners[:, 0])))
    return widths


def test_the_default_costs_what_the_running_example_says_and_waits_are_outlined() -> (
    None
):
    running = example.load()
    figure, spans = lessons.default_costs(running)
    table = running.table().query("compute == @example.PROFILED").set_index("plan")
    for ax, plan in zip(figure.axes, ("ddp", "exact"), strict=True):
        step = table.loc[plan]
        ends_ms = np.asarray(ax.get_lines()[-1].get_xdata(), dtype=float)
        assert ends_ms[0] == pytest.approx(1e3 * step["iteration_s"])
        assert sum(outlined_widths(ax)) == pytest.approx(1e3 * step["exposed_s"])
        own = spans[spans["plan"] == plan]
        assert own["end_s"].max() == pytest.approx(step["iteration_s"])
        assert f"{step['messages']} messages" in ax.get_title(loc="left")
    limits = [ax.get_xlim() for ax in figure.axes]
    assert limits[0] == limits[1]
    saved = 1 - 1 / table.loc["ddp", "over_best"]
    assert f"{saved:.0%}" in figure.get_suptitle()


def trainings() -> pd.DataFrame:
    """Return cases of two networks, each under a plan of two messages and of one."""
    rows = []
    for network, off in (("resnet18", 0.02), ("googlenet", 0.03)):
        for plan, ends in (("single", "9"), ("ddp", "4;9")):
            one: dict[str, object] = {"network": network, "link": "lab:1gbit"}
            one |= {"plan": plan, "ends": ends, "repeatability_exposed": 0.02}
            one |= {
                "measured_iteration_s": 1.0,
                "measured_exposed_communication_s": 0.5,
            }
            errors_of = {"model": off, "no_overlap": 0.2, "perfect_overlap": -0.2}
            for model, error in errors_of.items():
                one[f"{model}_error"] = 0.7
                one[f"{model}_paired_error"] = error if plan == "ddp" else 0.5
            rows.append(one)
    return pd.DataFrame(rows)


def test_a_plan_with_one_message_is_grey_and_in_no_range_of_the_title() -> None:
    figure = errors.training_errors(trainings())
    (ax,) = figure.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names.count(errors.PLANS["single"]) == 2
    grey_rows = [row for row, name in enumerate(names) if "for all" in name]
    for line in ax.get_lines()[1:]:
        places = np.asarray(line.get_data(), dtype=float)
        rows = places[1, ~np.isnan(places[0])]
        coloured = to_hex(line.get_color()) in {
            to_hex(look(role).color) for role in errors.TRIVIAL
        }
        assert coloured != bool(set(rows) & set(grey_rows))
    title = " ".join(figure.get_suptitle().split())
    assert "errs by 2 to 3%" in title
    assert "50" not in title and "70" not in title


def test_the_grey_band_is_the_repeatability_of_what_pairing_leaves_to_predict() -> None:
    repeats = errors.paired_repeatability(trainings())
    np.testing.assert_allclose(repeats, 0.02 * 0.5)


def test_errors_of_training_are_paired_and_those_of_replays_as_they_are() -> None:
    """Trainings with one message are left out of the row, of its median and of the title."""
    replays = trainings().assign(model_error=0.004, no_overlap_error=0.4)
    live = pd.DataFrame({"kind": ["replay", "training"], "model_error": [0.01, -0.05]})
    campaign = trainings().assign(model_paired_error=0.03, no_overlap_paired_error=0.1)
    figure = errors.every_case(replays, trainings(), campaign, live)
    (ax,) = figure.axes
    names = [label.get_text().replace("\n", " ") for label in ax.get_yticklabels()]
    drawn = {}
    for line in ax.get_lines():
        places = np.asarray(line.get_data(), dtype=float)
        if line.get_marker() not in ("None", "|"):
            drawn[names[int(places[1, 0])]] = sorted(places[0])
    assert drawn == {
        "4 replays, our model": pytest.approx([0.4] * 4),
        "1 live replays, our model": pytest.approx([1]),
        "2 trainings, our model": pytest.approx([2, 3]),
        "4 trainings, campaign, our model": pytest.approx([3] * 4),
        "1 live trainings, our model": pytest.approx([-5]),
        "4 replays, no overlap": pytest.approx([40] * 4),
        "2 trainings, no overlap": pytest.approx([20, 20]),
        "4 trainings, campaign, no overlap": pytest.approx([10] * 4),
    }
    title = " ".join(figure.get_suptitle().split())
    assert "0.4% on recorded replays and by 2.5% to 5.0% on real training" in title
    assert "40% and by 10% to 20%" in title


def test_networks_that_reach_the_same_share_are_drawn_at_it() -> None:
    shares = {"fp32": [0.25, 0.5], "bf16": [0.125, 0.75]}
    rows = [
        {"kernel": f"step of {network}", "precision": precision, "share": share}
        for precision, both in shares.items()
        for network, share in zip(("AlexNet", "VGG-16"), both, strict=True)
    ]
    figure = lessons.steps_over_peak(pd.DataFrame(rows))
    (ax,) = figure.axes
    drawn = {line.get_label(): line.get_xdata() for line in ax.get_lines()}
    for precision, both in shares.items():
        percent = np.asarray(drawn[precision], dtype=float)
        np.testing.assert_allclose(percent, 100 * np.array(both))
    assert "12% to 75%" in figure.get_suptitle()


def test_of_labs_left_out_only_medians_within_the_limit_are_counted() -> None:
    rows = [("emulated", 0.01), ("emulated", 0.05), ("tbf", 0.02), ("tbf", 0.02)]
    table = pd.DataFrame(rows, columns=["kind", "error"])
    table["lab"] = ["a", "b", "c", "d"]
    table = pd.concat([table.assign(decides=part) for part in errors.DECIDES])
    medians = table.groupby(["kind", "lab"])["error"].median()
    title = " ".join(errors.labs_left_out(table, medians).get_suptitle().split())
    assert "1 of 2 are predicted within 3%" in title
    assert "2 of 2 where they have none" in title
