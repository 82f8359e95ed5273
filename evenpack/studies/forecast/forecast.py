"""Forecasts of the waiting of several ranks from the times of one rank, checked on one device.

The micro-batches of n ranks are timed one by one, and the slowest rank of each step is taken. This is compared with
forecasts from the times of a run on one rank, over sequences that are in none of the predicted steps:

    order statistics   the expected maximum of n draws from the times as they were measured
    fitted law         the same of the normal, Gumbel or generalised extreme value law that fits them best (AIC)
    cost model         the mean maximum over simulated steps: the lengths that each rank would get, the fitted cost of a
                       micro-batch, and noise of the size of the model's residuals

The first two take ranks for independent draws of one law. This holds where sequences are assigned in order of arrival;
where a step is sorted or balanced over its ranks the law depends on their number, and only the last one applies.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_model import CostModel, MeasuredOn
from evenpack.engine.resolving.resolve import resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError, DataError
from evenpack.models.common.batch_work import performed_work
from evenpack.studies.cost_model import MicroBatchTimes, fit_cost_model
from evenpack.studies.forecast.bands import Resampling, interval_of_mean
from evenpack.studies.statistics.fits import best_law
from evenpack.studies.statistics.laws import expected_maximum, expected_maximum_of_draws
from evenpack.studies.statistics.paired import Interval
from evenpack.studies.throughput.contenders import VirtualRanks, formed, run_to_measure
from evenpack.studies.throughput.measure import ClockName, Progress, StepTimer, measured_on, segment_count

METHODS = ("order statistics", "fitted law", "cost model")
_FEWEST_FIT_STEPS = 20
_SEED = 0
_SHORT_NAME = 12
"""Characters of a fingerprint that tell data apart for people."""


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """The steps to time and the ranks to predict."""

    forms: tuple[str, ...]
    """Names of `FORMS`."""
    ranks: tuple[int, ...]
    """Numbers of ranks, 2 or more: forecasts start from one rank."""
    steps: int
    """Steps timed at each number of ranks."""
    fit_steps: int
    """Steps timed on one rank, for the forecasts."""
    warmup: int
    """Warm-up steps of one rank."""
    simulated_steps: int
    clock: ClockName

    def __post_init__(self) -> None:
        least = {"steps": 2, "fit_steps": _FEWEST_FIT_STEPS, "warmup": 0, "simulated_steps": 10}
        for name, few in least.items():
            if (value := getattr(self, name)) < few:
                raise ConfigError(f"--{name.replace('_', '-')} must be {few} or more, found {value}")
        if not self.ranks or min(self.ranks) < 2:
            raise ConfigError(
                f"--ranks {','.join(map(str, self.ranks))}: give numbers of 2 or more; one rank is always measured, "
                "because the forecasts are based on it"
            )


@dataclass(frozen=True, kw_only=True)
class RanksRow:
    """The results for one number of ranks."""

    ranks: int
    measured_seconds: float
    """Forward and backward of the slowest rank, mean over steps."""
    standard_error: float
    """Standard error of that mean."""
    measured_wait: float
    """Slowest rank / mean of the ranks: the cost of waiting."""
    forecasts: dict[str, float]
    """Seconds by each method; a method that does not apply is missing."""
    intervals: dict[str, Interval]
    """95 % interval of each forecast; see `bands.py` for what it contains."""
    mean_forecasts: dict[str, float]
    """Seconds of the mean rank by the same methods."""

    @property
    def errors(self) -> dict[str, float]:
        """Forecast / measured - 1, by method."""
        return {name: seconds / self.measured_seconds - 1.0 for name, seconds in self.forecasts.items()}


@dataclass(frozen=True, kw_only=True)
class FormForecast:
    """The results for one layout and assignment."""

    form: str
    one_rank_seconds: float
    one_rank_deviation: float
    law: str
    rows: tuple[RanksRow, ...]
    cost_model: CostModel | None
    cost_model_refusal: str | None

    def largest_error(self, method: str) -> float | None:
        """Returns the largest error over all numbers of ranks; None where the method did not apply."""
        found = [abs(row.errors[method]) for row in self.rows if method in row.errors]
        return max(found, default=None)


@dataclass(frozen=True, kw_only=True)
class ForecastStudy:
    """The results for all forms."""

    run: str
    measured_on: MeasuredOn
    options: ForecastOptions
    rows_per_rank: int
    """Packs or sequences that a rank computes in a step."""
    data: str
    """Sources and fingerprint of the data, as figures show them."""
    forms: tuple[FormForecast, ...]


def study_forecast(config: RunConfig, world: World, options: ForecastOptions, *, progress: Progress) -> ForecastStudy:
    """Runs the study on a single device. A rank's part of a step is the step of the run file.

    Raises: ConfigError if there are several ranks; NotPreparedError, DataError.
    """
    if world.size > 1:
        raise ConfigError(
            f"study forecast runs all ranks on one device, but {world.size} processes were started: start a single one"
        )
    run = run_to_measure(config)
    timer = StepTimer(resolve(formed(run.config, options.forms[0]), run.prepared), world, clock=options.clock)
    origin = measured_on(run, world, layouts=options.forms)
    return ForecastStudy(
        run=config.run.name,
        measured_on=origin,
        options=options,
        rows_per_rank=run.shape.items_per_step,
        data=f"{', '.join(run.prepared.source_names)} ({run.prepared.fingerprint(seed=0)[:_SHORT_NAME]})",
        forms=tuple(
            _forecast_form(
                timer,
                VirtualRanks(resolve(formed(run.config, form), run.prepared), world),
                form,
                options,
                progress=progress,
            )
            for form in options.forms
        ),
    )


def _forecast_form(
    timer: StepTimer, virtual: VirtualRanks, form: str, options: ForecastOptions, *, progress: Progress
) -> FormForecast:
    by_ranks, times = _time_in_turn(timer, virtual, form, options, progress)
    alone = by_ranks.pop(1)[:, 0]
    law_name, law = best_law(alone)
    resampling = Resampling(alone, law_name)
    model, refusal = None, None
    origin = measured_on(timer.run, timer.world, layouts=(form,))
    try:
        model = fit_cost_model(MicroBatchTimes.concatenate(times), per_step=0.0, measured_on=origin)
    except DataError as error:
        refusal = str(error)
    rows = []
    for ranks, seconds in by_ranks.items():
        forecasts = {
            "order statistics": expected_maximum_of_draws(alone, ranks),
            "fitted law": expected_maximum(law, ranks),
        }
        intervals = resampling.intervals(ranks)
        means = dict.fromkeys(forecasts, float(alone.mean()))
        if model is not None:
            simulated = _simulated(model, virtual, ranks, options)
            slowest = simulated.max(axis=1)
            forecasts["cost model"], intervals["cost model"] = float(slowest.mean()), interval_of_mean(slowest)
            means["cost model"] = float(simulated.mean())
        rows.append(_ranks_row(ranks, seconds, forecasts, intervals, means))
    return FormForecast(
        form=form,
        one_rank_seconds=float(alone.mean()),
        one_rank_deviation=float(alone.std(ddof=1)),
        law=law_name,
        rows=tuple(rows),
        cost_model=model,
        cost_model_refusal=refusal,
    )


def _ranks_row(
    ranks: int,
    seconds: Float64[np.ndarray, "steps ranks"],
    forecasts: dict[str, float],
    intervals: dict[str, Interval],
    means: dict[str, float],
) -> RanksRow:
    slowest = seconds.max(axis=1)
    return RanksRow(
        ranks=ranks,
        measured_seconds=float(slowest.mean()),
        standard_error=float(slowest.std(ddof=1) / len(slowest) ** 0.5),
        measured_wait=float(slowest.mean() / seconds.mean()),
        forecasts=forecasts,
        intervals=intervals,
        mean_forecasts=means,
    )


def _time_in_turn(
    timer: StepTimer, virtual: VirtualRanks, form: str, options: ForecastOptions, progress: Progress
) -> tuple[dict[int, Float64[np.ndarray, "steps ranks"]], list[MicroBatchTimes]]:
    """Returns the seconds of each rank in each step, and the micro-batches of one rank.

    They are timed in random order: a machine's load varies, and a slow period must not affect the ranks of one step
    more than any others, as on separate devices.
    """
    turns = [(ranks, step, rank) for ranks in options.ranks for step in range(options.steps) for rank in range(ranks)]
    turns += [(1, step, 0) for step in range(options.fit_steps)]
    seconds = {ranks: np.zeros((options.steps, ranks)) for ranks in options.ranks}
    seconds[1] = np.zeros((options.fit_steps, 1))
    times: list[MicroBatchTimes] = []
    behind = options.steps * max(options.ranks)  # one rank gets the sequences after all predicted steps
    for number in range(options.warmup):
        timer.time_step(virtual.share(1, behind + options.fit_steps + number, 0))
    for done, turn in enumerate(np.random.default_rng(_SEED).permutation(len(turns)), start=1):
        ranks, step, rank = turns[turn]
        measured = timer.time_step(virtual.share(ranks, step + (behind if ranks == 1 else 0), rank)).micro_batches
        seconds[ranks][step, rank] = measured.seconds.sum()
        if ranks == 1:
            times.append(measured)
        progress(form, done, len(turns))
    return seconds, times


def _simulated(
    model: CostModel, virtual: VirtualRanks, ranks: int, options: ForecastOptions
) -> Float64[np.ndarray, "steps ranks"]:
    """Returns the seconds of each rank in steps after all timed ones."""
    random = np.random.default_rng(_SEED)
    first = -(-(options.steps * max(options.ranks) + options.fit_steps + options.warmup) // ranks)
    seconds = []
    for step in range(first, first + options.simulated_steps):
        by_rank = []
        for rank in range(ranks):
            share = virtual.share(ranks, step, rank)
            works = [performed_work(batch) for batch in share]
            expected = model.seconds(
                np.array([work.slots for work in works]),
                np.array([work.squared_lengths for work in works]),
                np.array([segment_count(batch) for batch in share]),
            )
            noise = 1.0 + model.noise * random.standard_normal(len(works))
            by_rank.append(float((expected * noise).sum()))
        seconds.append(by_rank)
    return np.array(seconds)
