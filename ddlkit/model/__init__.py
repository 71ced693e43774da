"""The validated model, one for notebooks, commands and campaigns: calibrate, plan, predict."""

from ddlkit.core.plan import make_plan
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.predictor import Forecast, forecast, forecast_case

__all__ = [
    "Calibration",
    "Communication",
    "Forecast",
    "forecast",
    "forecast_case",
    "make_plan",
]
