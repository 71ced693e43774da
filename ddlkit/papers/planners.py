"""All planners: those of core.plan, and those that the papers' modules register when they are imported."""

from ddlkit.core.plan import PLANNERS, make_plan
from ddlkit.papers import load

load()

__all__ = ["PLANNERS", "make_plan"]
