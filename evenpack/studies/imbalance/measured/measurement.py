"""What was measured: rates and waiting of a logged run, and its speed-up over a baseline that was measured too."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evenpack.studies.imbalance.measured.comparable import require_comparable
from evenpack.studies.imbalance.measured.logged_run import LoggedRun, is_same_device
from evenpack.studies.imbalance.measured.step_log import Cut
from evenpack.studies.imbalance.simulated.cluster import Scheme
from evenpack.studies.imbalance.simulated.step_cost import StepCost
from evenpack.studies.imbalance.simulated.step_histogram import StepHistogram, step_histogram
from evenpack.studies.statistics.fits import ROUNDS, interval, resampled
from evenpack.studies.statistics.paired import Interval


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """The steady steps of one run."""

    label: str
    path: Path
    format: str
    layout: str | None
    """Layout, items and assignment in words; None if they are not recorded."""
    scheme: Scheme | None
    """The simulated scheme of the same kind, if there is one."""
    ranks: int
    device: str | None
    commit: str | None
    steps_read: int
    steps_used: int
    cuts: tuple[Cut, ...]
    sequences_per_second: float
    """Over all ranks, of a long run."""
    interval: Interval
    """95 % interval of that, over steps."""
    wait_share: float | None
    """Fraction of the steps for which the mean rank waits for the slowest one; None if the log does not contain it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, and the baseline that it is compared with."""

    run: MeasuredSteps
    baseline: MeasuredSteps | None
    padded_baseline: float | None
    """Sequences/s of the baseline, or those that were given for it; None if there is no baseline of padding."""
    speed_up: float | None
    """Sequences/s over those of the baseline; None without one."""
    speed_up_interval: Interval | None
    """95 % interval of that: of both runs' steps, or of the run's alone where a number was given for the baseline."""
    step_histogram: StepHistogram | None
    """Speed-ups over padding of single steps."""
    warnings: tuple[str, ...]

    @property
    def is_over_padding(self) -> bool:
        """Whether the speed-up is one over padding, like those that are simulated."""
        return self.padded_baseline is not None


def measure(
    run: LoggedRun, *, ranks: int, baseline: LoggedRun | None, padded_baseline: float | None, cost: StepCost
) -> Measured:
    """Compares the steps of a run with those of a baseline, or with a number of sequences/s for padding.

    Raises: ConfigError, as `require_comparable`.
    """
    warnings = [*run.log.warnings, *_device_warnings(run, cost)]
    over = padded_baseline
    if baseline is not None:
        warnings += [*require_comparable(run, baseline), *(f"{baseline.label}: {one}" for one in baseline.log.warnings)]
        over = baseline.log.sequences_per_second if _is_padding(baseline, warnings) else None
    speed_up, speed_ups = _speed_up(run, baseline, padded_baseline)
    return Measured(
        run=_steps(run, ranks),
        baseline=None if baseline is None else _steps(baseline, ranks),
        padded_baseline=over,
        speed_up=speed_up,
        speed_up_interval=None if speed_ups is None else interval(speed_ups),
        step_histogram=None
        if over is None
        else step_histogram(run.log.rates / over, speed_up=run.log.sequences_per_second / over, devices=ranks),
        warnings=tuple(warnings),
    )


def _is_padding(baseline: LoggedRun, warnings: list[str]) -> bool:
    if baseline.record is not None and not baseline.is_padding:
        warnings.append(
            f"the baseline is {baseline.layout}, and simulated speed-ups are over padding by arrival: the measured one "
            "is in the table alone"
        )
        return False
    return True


def _device_warnings(run: LoggedRun, cost: StepCost) -> list[str]:
    if run.device is None or is_same_device(run.device, cost.device):
        return []
    simulated = f"an ESTIMATE for {cost.device}" if cost.estimated else f"from a cost model measured on {cost.device}"
    return [
        f"{run.label} was measured on {run.device}, and the simulated lines are {simulated}: neither checks the other. "
        "Measure a cost model there (study throughput --cost-model FILE) and give it as --cost-model"
    ]


def _steps(run: LoggedRun, ranks: int) -> MeasuredSteps:
    log = run.log
    return MeasuredSteps(
        label=run.label,
        path=log.path,
        format=log.format,
        layout=run.layout,
        scheme=run.scheme,
        ranks=ranks,
        device=run.device,
        commit=None if run.record is None else run.record.starts[-1].commit,
        steps_read=log.steps_read,
        steps_used=len(log.rates),
        cuts=log.cuts,
        sequences_per_second=log.sequences_per_second,
        interval=interval(_bootstrapped(run, seed=0)),
        wait_share=log.wait_share,
    )


def _speed_up(
    run: LoggedRun, baseline: LoggedRun | None, padded_baseline: float | None
) -> tuple[float | None, Float64[np.ndarray, " rounds"] | None]:
    """Returns the ratio of the long runs' rates, and the same by each round of the bootstrap."""
    rate, rates = run.log.sequences_per_second, _bootstrapped(run, seed=0)
    if baseline is not None:
        return rate / baseline.log.sequences_per_second, rates / _bootstrapped(baseline, seed=1)
    if padded_baseline is not None:
        return rate / padded_baseline, rates / padded_baseline
    return None, None


def _bootstrapped(run: LoggedRun, *, seed: int) -> Float64[np.ndarray, " rounds"]:
    """Returns rates of long runs of resampled steps, in blocks where neighbours are correlated."""
    seconds = resampled(1.0 / run.log.rates, rounds=ROUNDS, seed=seed)
    rates: Float64[np.ndarray, " rounds"] = 1.0 / seconds.mean(axis=1)
    return rates
