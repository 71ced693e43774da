"""How each claim is computed anew: one module a paper."""

from ddlkit.report.checks import dag, omgs, osf, sharing
from ddlkit.report.claims import CHECKS

__all__ = ["CHECKS", "dag", "omgs", "osf", "sharing"]
