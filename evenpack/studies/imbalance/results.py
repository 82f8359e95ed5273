"""The study of waiting as a value, for tables, figures and JSON."""

from dataclasses import dataclass

from evenpack.studies.imbalance.extrapolated.forecast import LogForecast
from evenpack.studies.imbalance.extrapolated.reference import ReferenceCurve
from evenpack.studies.imbalance.measured.measurement import Measured
from evenpack.studies.imbalance.measured.replay import Replay
from evenpack.studies.imbalance.run_settings import StepOfRun
from evenpack.studies.imbalance.simulated.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class ImbalanceStudy:
    """What was simulated, measured and published, apart from each other."""

    origin: str
    """Origin of the lengths."""
    footer: tuple[str, ...]
    """Run, data, commit and device, for figures."""
    step: StepOfRun | None
    """Step of the run from which the simulated clusters are taken; None for a plain list of lengths."""
    simulation: Simulation
    replay: Replay | None
    """Clusters replayed on this device, if that was asked for."""
    measured: Measured | None
    """Steps of a real run, if there are any."""
    forecast: LogForecast | None
    """What follows from those steps for other numbers of devices, if anything does."""
    reference: ReferenceCurve | None
    """The published curve, if it is to be shown."""
    notes: tuple[str, ...]
    """What was left out, and why."""
    warnings: tuple[str, ...]
