"""Plots: functions that draw data on given axes, in one theme, with one look for each role.

Every function takes an Axes and numbers in base units (seconds, bytes) and puts units on the axes. What a
figure consists of is a table: its index the cases, sizes or workers, a column per series.

    theme         what a role, plan, cost form or span kind looks like
    axes          units, logarithmic axes, legends
    pages         figures and typeset tables, and the files they are kept in
    categorical   bars and dots by case
    relational    curves, samples and fits against a size
    timelines     Gantt charts, and how gradients become ready
"""

from ddlkit.report.plots.categorical import bars, dots, dots_by_group, verdict_ratios
from ddlkit.report.plots.pages import canvas, heading, pictures, save_figure, table
from ddlkit.report.plots.relational import cost_fit, lines, points, predicted_vs_measured, samples
from ddlkit.report.plots.theme import SOFT
from ddlkit.report.plots.timelines import gantt, layer_profile

__all__ = [
    "SOFT",
    "bars",
    "canvas",
    "cost_fit",
    "dots",
    "dots_by_group",
    "gantt",
    "heading",
    "layer_profile",
    "lines",
    "pictures",
    "points",
    "predicted_vs_measured",
    "samples",
    "save_figure",
    "table",
    "verdict_ratios",
]
