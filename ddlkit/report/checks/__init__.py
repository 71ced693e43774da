"""How each claim is computed anew: one module per paper, found by being here."""

import importlib
import pkgutil

from ddlkit.report.claims import CHECKS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["CHECKS"]
