"""All planners: those of core.plan, and those that the papers' modules register when they are imported.

Whoever is given a planner's name from outside (a command, a campaign's file) takes them from here.
"""

import ddlkit.papers.osf  # noqa: F401 - registers its planners
from ddlkit.core.plan import PLANNERS, make_plan

__all__ = ["PLANNERS", "make_plan"]
