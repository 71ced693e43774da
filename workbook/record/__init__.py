"""Recordings: the suites of the papers, campaigns, replays, and the networks of the zoo."""

from ddlkit.jobs import launch

launch.PRELOADED.append("workbook.record.replay")
