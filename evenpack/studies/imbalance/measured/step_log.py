"""Sequences/s of the steady steps of a training log; all others are cut and reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from evenpack.errors import DataError
from evenpack.studies.imbalance.measured.log_formats import LoggedStep, read_steps

MINIMUM_STEPS = 50
"""Least number of steps; fewer show too little of the tail that decides at many devices."""
WARM_UP_STEPS = 10
"""Least number of warm-up steps to cut."""
DIP_SPREADS = 5.0
"""A step is a dip if its rate is this many spreads below the median. Stragglers are to be measured, so the bound is
far away: a normal law has a probability of 3e-7 there, a Gumbel none."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A range of steps that is left out."""

    reason: str
    steps: int
    first_line: int
    """First line of the range in the file, from 1."""
    last_line: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLog:
    """The steady steps of a log."""

    path: Path
    format: str
    """Recognised format of the file, in words."""
    steps_read: int
    rates: Float64[np.ndarray, " steps"]
    """Sequences/s over all devices, in the order of the file."""
    cuts: tuple[Cut, ...]
    """Cuts in the order of the file; together with `rates` they cover all steps."""
    warnings: tuple[str, ...]
    devices: int | None
    """Number of ranks according to metrics.jsonl; None if the log does not contain it."""
    sequences_per_step: float | None
    """Mean over these steps; None if the log does not contain it."""
    wait_share: float | None
    """Fraction of these steps for which the mean rank waits for the slowest; None if the log does not contain it."""

    @property
    def sequences_per_second(self) -> float:
        """Returns the rate of a long run: as many sequences in each step, over the mean of the steps' seconds."""
        return float(1.0 / np.mean(1.0 / self.rates))


def read_step_log(path: Path, *, column: str | None = None, warm_up_steps: int | None = None) -> StepLog:
    """Reads the steady steps of a log.

    `column` names a CSV's column of sequences/s if it has none of the usual names; `warm_up_steps` is cut
    from the front in place of what `steady_start` finds. Of a run that went on with another number of ranks, only the
    steps of the last number are kept.
    Raises: DataError, as `read_steps`, and for fewer than 50 steady steps.
    """
    found = read_steps(path, column)
    devices = next((step.ranks for step in reversed(found.steps) if step.ranks is not None), None)
    others = [step.ranks not in (None, devices) for step in found.steps]
    same = [step for step, is_other in zip(found.steps, others, strict=True) if not is_other]
    kept, cuts, warnings = _steady(same, warm_up_steps)
    cuts += _cuts(f"other ranks: the last steps are of {devices}", found.steps, others)
    if len(kept) < MINIMUM_STEPS:
        raise DataError(
            f"{path}: {len(kept)} of {len(found.steps)} steps are left without warm-up and dips, at least "
            f"{MINIMUM_STEPS} are needed; give the log of a longer run, with every step in it"
        )
    return StepLog(
        path=path,
        format=found.format,
        steps_read=len(found.steps),
        rates=np.array([step.rate for step in kept]),
        cuts=tuple(sorted(cuts, key=lambda cut: cut.first_line)),
        warnings=(*found.warnings, *warnings),
        devices=devices,
        sequences_per_step=_mean([step.sequences for step in kept]),
        wait_share=_mean([step.wait_share for step in kept]),
    )


def steady_start(rates: Float64[np.ndarray, " steps"]) -> int:
    """Returns the number of warm-up steps: until the rate first comes within a spread of its median, at least 10."""
    median, spread = _median_and_spread(rates)
    reached = np.flatnonzero(rates >= median - spread)
    return min(len(rates), max(WARM_UP_STEPS, int(reached[0])))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _median_and_spread(rates: Float64[np.ndarray, " steps"]) -> tuple[float, float]:
    """Returns median and spread.

    The spread is the median absolute deviation, scaled to a normal law's standard deviation.
    """
    median = float(np.median(rates))
    return median, 1.4826 * float(np.median(np.abs(rates - median)))


def _steady(steps: Sequence[LoggedStep], warm_up_steps: int | None) -> tuple[list[LoggedStep], list[Cut], list[str]]:
    """Returns the steps without warm-up and dips, what was cut, and warnings."""
    rates = np.array([step.rate for step in steps])
    median, spread = _median_and_spread(rates)
    start = steady_start(rates) if warm_up_steps is None else min(warm_up_steps, len(rates))
    floor = median - DIP_SPREADS * spread
    is_warm_up = np.arange(len(rates)) < start
    is_dip = (rates < floor) & ~is_warm_up
    warm_up = "warm-up: the rate had not yet come within a spread of its median" if start > WARM_UP_STEPS else "warm-up"
    dip = f"dip: below {floor:.6g} sequences/s, {DIP_SPREADS:.0f} spreads of {spread:.4g} under the median {median:.6g}"
    cuts = _cuts(warm_up, steps, is_warm_up.tolist()) + _cuts(dip, steps, is_dip.tolist())
    warnings = []
    if is_dip.sum() > 0.05 * len(rates):
        warnings.append(
            f"{is_dip.sum()} of {len(rates)} steps were cut as dips: check whether training itself is unsteady"
        )
    return [step for step, left_out in zip(steps, is_warm_up | is_dip, strict=True) if not left_out], cuts, warnings


def _cuts(reason: str, steps: Sequence[LoggedStep], is_cut: Sequence[bool]) -> list[Cut]:
    """Returns the ranges of neighbouring steps that are cut."""
    runs: list[list[int]] = []
    for index in np.flatnonzero(is_cut).tolist():
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [
        Cut(reason=reason, steps=len(run), first_line=steps[run[0]].line, last_line=steps[run[-1]].line) for run in runs
    ]
