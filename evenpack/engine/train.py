"""The training loop."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import Any, Literal, Protocol

from evenpack.data.batches.loader_processes import explained_loader_deaths
from evenpack.data.batches.pipeline import SkippedStep, StepBatches
from evenpack.data.prepare.verification import explained_damage
from evenpack.engine.activity import OnActivity, StepActivities, entered_as_own_work, ignore_activity, own_work
from evenpack.engine.bad_steps import BadSteps
from evenpack.engine.build import Run, build_at, find_start
from evenpack.engine.compilation import compiling_as_own_work
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.engine import LocalStep
from evenpack.engine.evaluate import Evaluations, evaluate_model, overall_accuracy
from evenpack.engine.memory.exhausted import explained_memory
from evenpack.engine.reporting.config import MetricsSection
from evenpack.engine.reporting.journal import Journal
from evenpack.engine.reporting.mlperf_log import MlperfLog
from evenpack.engine.reporting.profile import StepProfile
from evenpack.engine.reporting.rank_times import RankTimes
from evenpack.engine.reporting.run_record import write_start
from evenpack.engine.reporting.step_totals import StepTotals, sum_over_ranks
from evenpack.engine.reporting.trackers.trackers import require_trackers
from evenpack.engine.resolving.resolve import ResolvedRun, open_run, require_trainable
from evenpack.engine.saves import Saves
from evenpack.engine.verification import DataVerification
from evenpack.engine.world.agreement import run_facts
from evenpack.engine.world.distributed import World, configure_logging, joined_world, require_shared_directory
from evenpack.models.common.losses import exact_denominators
from evenpack.units import counted

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=7)
"""Time for which a collective waits for a rank. Heartbeats judge whether that rank hangs; torch's own limit of 10 or 30
minutes cannot tell, and would end a run in which rank 0 reads or writes for longer."""


class _Note(Protocol):
    """Records a step, trained on or skipped, with the results at its end."""

    def __call__(self, *, evaluations: Evaluations | None, ranks: dict[str, Any] | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The outcome of a call of `train`."""

    state: Literal["finished", "stopped"]
    """`finished`: the step or the accuracy that the run file names is reached; `stopped`: asked to stop, saved, can be
    resumed."""
    step: int
    """Number of updates done."""
    reached_accuracy: float | None
    """The accuracy that reached the run's target; None if none did."""


def train(
    config: RunConfig, *, stop_requested: Callable[[], bool], on_activity: OnActivity = ignore_activity
) -> TrainOutcome:
    """Trains from the newest complete checkpoint, or from the start, to the step that the run file names.

    Every rank of the run calls it. `stop_requested` is called once per step; if it is true on any rank, all save at the
    end of the step and return. `on_activity` is told what this rank begins to do.

    Raises: ConfigError, DataError, CheckpointError or BackendError if the run cannot start; RunError for a loss that
    is not finite (nothing is saved then), a full disk, or ranks that do not see the same files; StoppedEarlyError if
    `stop_requested` before all ranks have met.
    """
    with joined_world(run_facts(config), stop_requested=stop_requested, patience=_PATIENCE) as world:
        configure_logging(world)
        return train_in(world, config, stop_requested=stop_requested, on_activity=on_activity)


def train_in(
    world: World,
    config: RunConfig,
    *,
    stop_requested: Callable[[], bool],
    on_activity: OnActivity = ignore_activity,
) -> TrainOutcome:
    """Does the work of `train`, with ranks that have already met."""
    started = time.time()
    require_shared_directory(config.run.output_dir, world)
    on_activity("opening the data", 0)
    log.info("%s joined; opening the data and building the model", counted(world.size, "rank"))
    with (
        compiling_as_own_work(),
        explained_loader_deaths(),  # one may also die while the damage is explained
        explained_damage(config.prepared_dir),
    ):
        with own_work():
            resolved = open_run(config)
            require_trainable(resolved)
        world.on_main(lambda: require_trackers(resolved.config.metrics))
        with explained_memory(resolved, world):
            return _train(world, resolved, stop_requested=stop_requested, on_activity=on_activity, started=started)


def _train(
    world: World,
    resolved: ResolvedRun,
    *,
    stop_requested: Callable[[], bool],
    on_activity: OnActivity,
    started: float,
) -> TrainOutcome:
    on_activity("building the model", 0)
    start = find_start(resolved, world)
    last_step = start.config.training.last_step
    # Its processes start while the model is built. A run that is done needs none.
    loader: AbstractContextManager[Generator[StepBatches | SkippedStep] | None]
    loader = nullcontext() if start.is_done else entered_as_own_work(closing(start.batches(stop_step=last_step)))
    with loader as batches:
        run = build_at(start, on_activity=on_activity)
        log.info("%s", describe(run, last_step=last_step))
        if batches is None:
            return _nothing_to_do(run)
        world.on_main(lambda: write_start(run))
        return _train_on(batches, run, stop_requested=stop_requested, on_activity=on_activity, started=started)


def _train_on(
    batches: Iterator[StepBatches | SkippedStep],
    run: Run,
    *,
    stop_requested: Callable[[], bool],
    on_activity: OnActivity,
    started: float,
) -> TrainOutcome:
    on_activity("starting the loader", run.first_step)
    with (
        MlperfLog.opened(run, started=started) as mlperf,
        DataVerification.begin(run.prepared, run.world) as verification,
    ):
        with own_work():
            first = next(batches)  # waits for the loader's processes, which is not part of a step's time
        with (
            entered_as_own_work(Journal.opened(run, mlperf, run.config.metrics)) as journal,
            Saves(run, journal, on_activity) as saves,
            StepProfile(run.config.run.output_dir, run.world, run.config.run.profile_steps) as profile,
        ):
            outcome = _loop(
                run,
                journal,
                saves,
                chain([first], batches),
                lambda: stop_requested() or verification.has_found_damage,
                profile=profile,
                before_saving=verification.finish,
                on_activity=on_activity,
            )
            on_activity("writing the summary", outcome.step)
            with own_work():
                journal.summarise(outcome.state, outcome.step, reached_accuracy=outcome.reached_accuracy)
    return outcome


def _nothing_to_do(run: Run) -> TrainOutcome:
    reached = run.reached_accuracy if run.has_reached_target else None  # the target may have been raised since
    if reached is not None:
        log.info("nothing to do: step %d has reached an accuracy of %.4f", run.first_step, reached)
    else:
        log.info("nothing to do: step %d of %d is done", run.first_step, run.config.training.last_step)
    # A kill may have come before the summary.
    with own_work(), Journal.opened(run, MlperfLog.silent(run), MetricsSection()) as journal:
        journal.summarise("finished", run.first_step, reached_accuracy=reached)
    return TrainOutcome(state="finished", step=run.first_step, reached_accuracy=reached)


def _loop(
    run: Run,
    journal: Journal,
    saves: Saves,
    batches_of_steps: Iterator[StepBatches | SkippedStep],
    stop_requested: Callable[[], bool],
    *,
    profile: StepProfile,
    before_saving: Callable[[Callable[[], None]], None],
    on_activity: OnActivity,
) -> TrainOutcome:
    training = run.config.training
    rank_times = RankTimes(run.world)
    bad_steps = BadSteps(run)
    activities = StepActivities(on_activity, micro_batches=run.engine.micro_batches)
    run.engine.observer = activities.end_of
    for batches, loader_seconds in _timed(batches_of_steps, on_activity, first_step=run.first_step + 1):
        step = batches.step + 1
        note: _Note
        if isinstance(batches, SkippedStep):
            stop = run.world.any(stop_requested())
            note = partial(journal.skip, batches, learning_rate=run.engine.learning_rate(batches.step))
        else:
            started = time.perf_counter()
            activities.begin(step)
            local, totals = _update(run, batches, stop_requested, profile, loader_seconds=loader_seconds)
            step_seconds = loader_seconds + time.perf_counter() - started
            rank_times.add(batches.micro_batches, local.stopwatch.seconds())
            stop = totals.stop
            if bad_steps.is_left_out(batches, local, totals):
                left_out = SkippedStep(step=batches.step, counts=batches.counts)
                note = partial(journal.skip, left_out, learning_rate=local.learning_rate, is_not_finite=True)
            else:
                journal.count(totals)
                note = partial(journal.add, step, totals, learning_rate=local.learning_rate, step_seconds=step_seconds)
        evaluations = None
        if run.resolved.is_evaluation_due(step):
            evaluating = partial(on_activity, "evaluating", step)
            evaluating()  # and again for each batch, which is progress
            evaluate = partial(evaluate_model, run.engine.model, run.resolved, run.world, on_batch=evaluating)
            evaluations = journal.evaluated(evaluate)
        reached = _reached_accuracy(training, evaluations)
        is_last = step == training.last_step or reached is not None
        is_over = reached is not None or step == training.planned_steps
        stopped = time.time()
        is_stopped = stop and not is_last
        are_times_due = _is_due(step, training.log_rank_times_every_steps, is_last=is_last or is_stopped)
        on_activity("recording the step", step)
        saves.collect()
        ranks = rank_times.gather() if are_times_due and not rank_times.is_empty else None
        with own_work():
            note(evaluations=evaluations, ranks=ranks)
        if is_last or is_stopped or _is_due(step, training.checkpoint_every_steps, is_last=False):
            with journal.paused():
                before_saving(partial(on_activity, "verifying the data", step))
                on_activity("saving a checkpoint", step)
                if is_over:
                    journal.end_mlperf(is_reached=reached is not None, stopped=stopped)
                goes_on = not (is_last or is_stopped)
                saves.save(step, reached_accuracy=reached, evaluations=evaluations, goes_on=goes_on)
        if is_last or is_stopped:
            return TrainOutcome(state="finished" if is_last else "stopped", step=step, reached_accuracy=reached)
    raise AssertionError("the batches end with the last step")


def _reached_accuracy(training: TrainingSection, evaluations: Evaluations | None) -> float | None:
    """Returns the accuracy of an evaluation if it reaches the run's target; None without either."""
    accuracy = overall_accuracy(evaluations or {})
    if accuracy is None or training.target_accuracy is None or accuracy < training.target_accuracy:
        return None
    return accuracy


def _update(
    run: Run, batches: StepBatches, stop_requested: Callable[[], bool], profile: StepProfile, *, loader_seconds: float
) -> tuple[LocalStep, StepTotals]:
    with profile.of(batches.step + 1):
        local = run.engine.train_step(batches.step, batches.micro_batches)
        totals = sum_over_ranks(
            run.world,
            batches,
            local,
            exact_denominators(run.config.model, batches.counts),
            stop=stop_requested(),
            loader_seconds=loader_seconds,
        )
    return local, totals


def _timed(
    batches_of_steps: Iterator[StepBatches | SkippedStep], on_activity: OnActivity, *, first_step: int
) -> Iterator[tuple[StepBatches | SkippedStep, float]]:
    """Yields each step's batches, and the seconds that the rank waited for them."""
    for step in count(first_step):
        on_activity("waiting for a batch", step)
        started = time.perf_counter()
        with own_work():
            batches = next(batches_of_steps, None)
        if batches is None:
            return
        yield batches, time.perf_counter() - started


def _is_due(step: int, every_steps: int | None, *, is_last: bool) -> bool:
    return every_steps is not None and (is_last or step % every_steps == 0)


def describe(run: Run, *, last_step: int) -> str:
    """Returns a description of the run in a few lines, for the start of its log."""
    config, world, training = run.config, run.world, run.config.training
    weights = zip(run.prepared.source_names, run.prepared.weights, strict=True)
    shares = ", ".join(f"{name} {weight}" for name, weight in weights)
    for change in config.data.weight_changes:
        pairs = zip(run.prepared.source_names, change.weights, strict=True)
        shares += f"; from step {change.step} " + ", ".join(f"{name} {weight}" for name, weight in pairs)
    clipping = "off" if training.gradient_clipping is None else f"{training.gradient_clipping:g}"
    rows = f"packs of {config.data.pack_length} slots"
    if training.batching == "sequences":
        rows = f"sequences of up to {config.data.recipe.max_sequence_length} tokens"
    begin = "from the start" if run.first_step == 0 else f"continuing after step {run.first_step}"
    until = f"{last_step} of {training.planned_steps}" if last_step < training.planned_steps else f"{last_step}"
    if training.target_accuracy is not None:
        until += f" or an accuracy of {training.target_accuracy:g}"
    skipped = training.skipped
    return "\n".join(
        [
            f"run {config.run.name} in {config.run.output_dir}: {begin}, up to step {until}",
            f"  model    {config.model.kind} {config.model.preset}, {run.resolved.parameters:,} parameters, "
            f"{config.model.positions} positions, vocabulary {run.prepared.vocabulary_size:,}",
            f"  data     {shares} (source and weight); {rows}, layout {training.layout}",
            f"  step     {training.items_per_step} {training.batching} = {counted(world.size, 'rank')} "
            f"({world.device.type}) x {run.engine.micro_batches} micro-batches x "
            f"{training.items_per_micro_batch} {training.batching}",
            f"  balance  {training.policy}"
            + ("" if training.assignment else ", the meaning of training.assignment null"),
            f"  update   {config.optimizer.kind}, learning rate {config.optimizer.learning_rate:g}, "
            f"{config.schedule.kind} after {config.schedule.warmup_steps} steps of warm-up, clipping {clipping}, "
            f"{training.precision}, ZeRO {config.deepspeed.zero_stage}",
            *([f"  skipped  steps {skipped}, from which nothing is learned"] if skipped else []),
        ]
    )
