"""How fast un-padding is on many devices, where each step waits for the slowest."""

from evenpack.studies.imbalance.forecast import LogForecast, forecast_from_log
from evenpack.studies.imbalance.reference import ReferenceCurve, reference_curve, single_device_gumbel
from evenpack.studies.imbalance.step_log import StepLog, read_step_log
from evenpack.studies.statistics.fits import FitReport, fit_distributions
from evenpack.studies.statistics.laws import Gumbel, Law, expected_minima, expected_minimum

__all__ = [
    "FitReport",
    "Gumbel",
    "Law",
    "LogForecast",
    "ReferenceCurve",
    "StepLog",
    "expected_minima",
    "expected_minimum",
    "fit_distributions",
    "forecast_from_log",
    "read_step_log",
    "reference_curve",
    "single_device_gumbel",
]
