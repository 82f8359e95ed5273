"""How fast un-padding is on many devices, where each step waits for the slowest."""

from evenpack.studies.imbalance.laws import Gumbel, Law, expected_minima, expected_minimum
from evenpack.studies.imbalance.reference import ReferenceCurve, ReferenceRow, reference_curve, single_device_gumbel

__all__ = [
    "Gumbel",
    "Law",
    "ReferenceCurve",
    "ReferenceRow",
    "expected_minima",
    "expected_minimum",
    "reference_curve",
    "single_device_gumbel",
]
