"""The training loop."""

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain, count
from typing import Literal

import torch

from evenpack.data.batches.loader_processes import explained_loader_deaths
from evenpack.data.batches.pipeline import SkippedStep, StepBatches
from evenpack.data.manifest import MANIFEST
from evenpack.data.verification import explained_damage
from evenpack.differences import flatten
from evenpack.engine.activity import START, doing
from evenpack.engine.build import Start, TrainingRun, build_at, find_start
from evenpack.engine.compilation import announced_compilations
from evenpack.engine.config import RunConfig
from evenpack.engine.evaluate import evaluate_model
from evenpack.engine.parts.bad_steps import BadSteps
from evenpack.engine.parts.metrics_writer import MetricsWriter
from evenpack.engine.parts.mlperf_log import MlperfLog, require_first_start
from evenpack.engine.parts.part import Parts, Step, Update
from evenpack.engine.parts.profile import StepProfile
from evenpack.engine.parts.progress import ProgressLine, StepActivities
from evenpack.engine.parts.rank_times import RankTimes
from evenpack.engine.parts.saves import Saves
from evenpack.engine.parts.trackers import Trackers
from evenpack.engine.parts.verification import DataVerification
from evenpack.engine.reporting.run_record import Place, place_of, write_start
from evenpack.engine.reporting.step_totals import sum_over_ranks
from evenpack.engine.resolving.requirements import require_trackers, require_trainable
from evenpack.engine.resolving.resolve import ResolvedRun, is_evaluation_due, open_run
from evenpack.engine.world.distributed import World, configure_logging, joined_world, require_shared_directory
from evenpack.errors import RunError
from evenpack.files import file_checksum
from evenpack.models.common.loss_sums import exact_denominators
from evenpack.units import counted

log = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Time for which a collective waits for a rank. Heartbeats judge whether that rank hangs; torch's own limit of 10 or 30
minutes cannot tell, and would end a run in which rank 0 reads or writes for longer."""


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The outcome of a call of `train`."""

    state: Literal["finished", "stopped"]
    """`finished`: the step or the accuracy that the run file names is reached; `stopped`: asked to stop, saved, can be
    resumed."""
    step: int
    """Steps done, skipped ones included: the number by which records and messages name the last one."""
    reached_accuracy: float | None
    """The accuracy that reached the run's target; None if none did."""


def train(config: RunConfig, *, stop_requested: Callable[[], bool]) -> TrainOutcome:
    """Trains from the newest complete checkpoint, or from the start, to the step that the run file names.

    Every rank of the run calls it. `stop_requested` is called once per step; if it is true on any rank, all save at the
    end of the step and return.

    Raises: ConfigError, DataError, CheckpointError or BackendError if the run cannot start; RunError for a loss that
    is not finite (nothing is saved then), a full disk, or ranks that do not see the same files.
    """
    with joined_world(run_facts(config), patience=_COLLECTIVE_TIMEOUT) as world:
        configure_logging(world)
        return train_in(world, config, stop_requested=stop_requested)


def run_facts(config: RunConfig) -> dict[str, str]:
    """Returns what a rank sees of the run: each key of the run file, overrides included, and the prepared data."""
    facts = {key: json.dumps(value) for key, value in flatten(config.model_dump(mode="json")).items()}
    for folder in dict.fromkeys(part.prepared_dir for _, part in config.parts):
        try:
            data = f"checksum {file_checksum(folder / MANIFEST)}"
        except OSError as error:
            data = f"{error.strerror}"
        facts[f"prepared data in {folder}"] = data
    return facts


def train_in(world: World, config: RunConfig, *, stop_requested: Callable[[], bool]) -> TrainOutcome:
    """Does the work of `train`, with ranks that have already met."""
    started = time.time()
    require_shared_directory(config.run.output_dir, world)
    doing.enter("opening the data", 0)
    log.info("%s joined; opening the data and building the model", counted(world.size, "rank"))
    with (
        announced_compilations(),
        explained_loader_deaths(),  # one may also die while the damage is explained
        explained_damage(config.prepared_dir),
    ):
        resolved = open_run(config, verify="later")  # by a part of the loop, before the first save
        require_trainable(resolved)
        world.on_main(lambda: require_trackers(resolved.config.metrics))
        while True:
            doing.enter("building the model")
            start = find_start(resolved, world)
            if start.is_done:
                return _nothing_to_do(start)
            world.on_main(partial(require_first_start, start))
            largest = max(start.resolved.of_stages, key=lambda stage: stage.shape.items_per_micro_batch)
            with explained_damage(start.prepared.directory), _explained_memory(largest, world):
                outcome = _train(start, stop_requested=stop_requested, started=started)
            if outcome is not None:
                return outcome
            doing.begin_black_box(START)
            del start
            gc.collect()  # of what was built, before the next part is
            if world.device.type == "cuda":
                torch.cuda.empty_cache()


@contextmanager
def _explained_memory(run: ResolvedRun, world: World) -> Iterator[None]:
    """Explains a lack of memory within the block. Raises: RunError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first_line, training = str(error).partition("\n")[0], run.config.training
        items, key = training.items_per_micro_batch, f"training.{training.batching}_per_micro_batch"
        smaller = f"fewer than {items} {key} (`evenpack plan` computes how many fit), or " if items > 1 else ""
        raise RunError(
            f"{world.device_name} has too little memory for this step: {first_line}\n"
            f"Take {smaller}model.activation_checkpointing=true; checkpoints stay valid with either"
        ) from error


def _train(start: Start, *, stop_requested: Callable[[], bool], started: float) -> TrainOutcome | None:
    """Trains one part of the run, as a resume does; None: it is done and saved, and the next one is to be built."""
    world = start.world
    # The loader's processes start while the model is built.
    with closing(start.batches(stop_step=start.config.training.stop_step)) as batches:
        run = build_at(start)
        log.info("%s", describe(start))
        places = world.all_gather(place_of(world))
        world.on_main(lambda: write_start(start, places, run.engine.model))
        doing.enter("starting the loader", start.steps_done)
        parts = _parts(run, places, stop_requested=stop_requested, started=started)
        with parts.opened():
            first = next(batches)  # waits for the loader's processes, which is not part of a step's time
            _compile_evaluation(run)
            outcome = _loop(run, chain([first], batches), parts)
    if outcome is None:
        run.engine.release()
    return outcome


def _parts(run: TrainingRun, places: Sequence[Place], *, stop_requested: Callable[[], bool], started: float) -> Parts:
    """Returns what hangs on the loop, in the order in which it is called at each hook."""
    start = run.start
    config, writer = start.config, MetricsWriter(start)
    return Parts(
        [
            ProgressLine(start),
            StepActivities(run),
            StepProfile(config.run.output_dir, start.world, config.run.profile_steps),
            BadSteps(start),
            RankTimes.of(start, places),
            # First of all that the next ones write at a save.
            *(DataVerification(data, start.world) for data in start.resolved.data_after(start.steps_done)),
            *([] if config.mlperf is None else [MlperfLog(start, started=started)]),
            writer,
            Trackers(start),
            Saves(run, writer),
        ],
        start.world,
        stop_requested=stop_requested,
    )


def _loop(run: TrainingRun, batches_of_steps: Iterator[StepBatches | SkippedStep], parts: Parts) -> TrainOutcome | None:
    start, training = run.start, run.start.config.training
    samples = start.samples_done
    for batches, loader_seconds in _timed(run, batches_of_steps):
        step = Step(run, batches, samples_before=samples)
        parts.call("before_step", step)
        if isinstance(batches, SkippedStep):
            step.stop = start.world.any(parts.wants_stop)
        else:
            step.update = _update(run, batches, parts, loader_seconds=loader_seconds)
            step.stop = step.update.totals.sums.stop > 0
        parts.call("after_step", step)
        samples = step.samples
        if is_evaluation_due(training, step.steps_done, samples_per_step=start.resolved.samples_per_step):
            doing.enter("evaluating", step.steps_done)
            parts.call("evaluating", step)
            with run.engine.compilation.explained():
                step.evaluations = evaluate_model(run.engine.model, start.resolved, start.world)
            parts.call("evaluated", step)
        doing.enter("recording the step", step.steps_done)
        parts.call("recording", step)
        is_kept = step.steps_done in training.keep_checkpoint_steps
        if step.ends_loop or is_kept or step.is_due(training.checkpoint_every_steps):
            parts.call("saving", step)
            parts.call("saved", step)
        if step.ends_loop:
            doing.enter("writing the summary", step.steps_done)
            parts.call("ending", step)
            if step.ends_part and not (step.is_last or step.stop):
                return None
            state: Literal["finished", "stopped"] = "finished" if step.is_last else "stopped"
            return TrainOutcome(state=state, step=step.steps_done, reached_accuracy=step.reached_accuracy)
    raise AssertionError("the batches end with the last step")


def _compile_evaluation(run: TrainingRun) -> None:
    """Evaluates a batch of each source if the run compiles: what cannot be compiled ends it before its first update."""
    start = run.start
    if run.engine.compilation.is_asked and start.config.training.is_evaluated:
        doing.enter("evaluating", start.steps_done)
        with run.engine.compilation.explained():
            evaluate_model(run.engine.model, start.resolved, start.world, most_batches=1)


def _update(run: TrainingRun, batches: StepBatches, parts: Parts, *, loader_seconds: float) -> Update:
    started = time.perf_counter()
    local = run.engine.train_step(batches.step, batches.micro_batches)
    totals = sum_over_ranks(
        run.start.world,
        batches,
        local,
        exact_denominators(run.start.config.model.losses, batches.counts),
        stop=parts.wants_stop,
        loader_seconds=loader_seconds,
        waits=parts.wait_values(batches, local, loader_seconds=loader_seconds),
    )
    seconds = loader_seconds + time.perf_counter() - started
    return Update(batches=batches, local=local, totals=totals, seconds=seconds)


def _nothing_to_do(run: Start) -> TrainOutcome:
    """Writes the summary of a run that is done, before which a kill may have come; no model is built for it."""
    log.info("%s", describe(run))
    reached = run.reached_accuracy if run.has_reached_target else None  # the target may have been raised since
    if reached is not None:
        log.info("nothing to do: step %d has reached an accuracy of %.4f", run.steps_done, reached)
    else:
        log.info("nothing to do: step %d of %d is done", run.steps_done, run.config.training.stop_step)
    if run.world.is_main:
        writer = MetricsWriter(run)
        with writer.opened():
            writer.summarise("finished", run.steps_done, reached_accuracy=reached)
    return TrainOutcome(state="finished", step=run.steps_done, reached_accuracy=reached)


def _timed(
    run: TrainingRun, batches_of_steps: Iterator[StepBatches | SkippedStep]
) -> Iterator[tuple[StepBatches | SkippedStep, float]]:
    """Yields each step's batches, and the seconds that the rank waited for them."""
    for step in count(run.start.steps_done + 1):
        doing.enter("waiting for a batch", step)
        started = time.perf_counter()
        batches = next(batches_of_steps, None)
        if batches is None:
            return
        yield batches, time.perf_counter() - started


def describe(run: Start) -> str:
    """Returns a description of the run in a few lines, for the start of its log."""
    config, world, training, stop = run.config, run.world, run.config.training, run.config.training.stop_step
    weights = zip(run.prepared.source_names, run.prepared.weights, strict=True)
    sources = ", ".join(f"{name} {weight}" for name, weight in weights)
    clipping = "off" if training.gradient_clipping is None else f"{training.gradient_clipping:g}"
    rows = f"packs of {config.data.pack_length} slots"
    if training.batching == "sequences":
        rows = f"sequences of up to {config.data.recipe.max_sequence_length} tokens"
    begin = "from the start" if run.steps_done == 0 else f"continuing after step {run.steps_done}"
    if config.run.parent is not None and run.steps_done == config.run.parent.step:
        begin += f" of {config.run.parent.run}"
    until = f"{stop} of {training.planned_steps}" if stop < training.planned_steps else f"{stop}"
    if training.target_accuracy is not None:
        until += f" or an accuracy of {training.target_accuracy:g}"
    skipped = training.skipped
    return "\n".join(
        [
            f"run {config.run.name} in {config.run.output_dir}: {begin}, up to step {until}",
            f"  model    {config.model.kind} {config.model.preset}, {run.resolved.parameters:,} parameters, "
            f"{config.model.positions} positions, vocabulary {run.prepared.vocabulary_size:,}",
            f"  data     {sources} (source and weight); {rows}, layout {training.layout}",
            f"  step     {training.items_per_step} {training.batching} = {counted(world.size, 'rank')} "
            f"({world.device.type}) x {run.resolved.settled.micro_batches(world.size)} micro-batches x "
            f"{training.items_per_micro_batch} {training.batching}",
            f"  balance  {training.policy}" + ("" if training.assignment else " (chosen: training.assignment is null)"),
            f"  update   {config.optimizer.kind}, learning rate {config.optimizer.learning_rate:g}, "
            f"{config.schedule.kind} after {config.schedule.warmup_steps} steps of warm-up, clipping {clipping}, "
            f"{training.precision}, ZeRO {config.deepspeed.zero_stage}",
            *([f"  skipped  steps {skipped}, from which nothing is learned"] if skipped else []),
            *(
                f"  left out {left['packs']:,} {training.batching} of {name} ({left['epochs']:.2f} epochs), whose "
                "epoch was not finished: the stage restarts with packs of another form"
                for name, left in run.resolved.left_out(run.steps_done).items()
            ),
            *(
                f"  stage    from step {stage.step}: " + ", ".join(f"{key} {new}" for key, new in stage.changes.items())
                for stage in run.resolved.run_file.stages
            ),
        ]
    )
