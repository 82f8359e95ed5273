"""The composition root: builds all parts of a run from a resolved run and a place among the ranks.

A run is built in two parts: `find_start` says where it begins, from which its loader can start. Building the model
takes seconds, in which the loader's processes import what they need and collate the first batches.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch

from evenpack.data.batches.pipeline import SkippedStep, StepBatches, training_batches
from evenpack.data.prepared import PreparedData
from evenpack.engine.activity import doing
from evenpack.engine.checkpoints.continuation import continued
from evenpack.engine.checkpoints.files import CHECKPOINTS, Checkpoint, TrainState
from evenpack.engine.checkpoints.forks import parent_checkpoint, take_over
from evenpack.engine.checkpoints.initial_weights import initialize
from evenpack.engine.checkpoints.loading import load_checkpoint, newest_whole, whole_at
from evenpack.engine.checkpoints.saving import CheckpointWriter, KeepPolicy
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import deepspeed_config
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.resolving.attention_choice import check_attention
from evenpack.engine.resolving.resolve import ResolvedRun, announce
from evenpack.engine.world.distributed import World
from evenpack.errors import RunError
from evenpack.models.build import Model, new_model


@dataclass(frozen=True, kw_only=True)
class Start:
    """The point at which a training run begins or continues."""

    resolved: ResolvedRun
    world: World
    checkpoint: Checkpoint | None
    """The checkpoint from which it continues."""

    @property
    def config(self) -> RunConfig:
        """Configuration, as in `ResolvedRun`."""
        return self.resolved.config

    @property
    def prepared(self) -> PreparedData:
        """Data on which the run trains."""
        return self.resolved.prepared

    @property
    def steps_done(self) -> int:
        """Steps done before: 0, or the checkpoint's number."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def steps_of_parent(self) -> int:
        """Steps that another run has done, from which this one is forked."""
        parent = self.config.run.parent
        return 0 if parent is None else parent.step

    @property
    def samples_done(self) -> int:
        """Sequences trained on before."""
        return 0 if self.checkpoint is None else self.checkpoint.state.samples

    @property
    def reached_accuracy(self) -> float | None:
        """Accuracy of the checkpoint that reached the target of an earlier start; None without one."""
        return None if self.checkpoint is None else self.checkpoint.state.reached_accuracy

    def batches(self, *, stop_step: int) -> Generator[StepBatches | SkippedStep]:
        """This rank's part of the steps from the first that is not done up to `stop_step`.

        The loader's processes start at the call; closing what it returns ends them.
        """
        settings = self.resolved.pipeline_settings(self.world)
        skipped = self.config.training.skipped
        return training_batches(
            self.prepared, settings, start_step=self.steps_done, stop_step=stop_step, skipped=skipped
        )

    @property
    def has_reached_target(self) -> bool:
        """Whether an earlier start of the run has reached its target accuracy."""
        target = self.config.training.target_accuracy
        return target is not None and self.reached_accuracy is not None and self.reached_accuracy >= target

    @property
    def is_done(self) -> bool:
        """Whether an earlier start has reached the target or done the last step."""
        return self.steps_done >= self.config.training.stop_step or self.has_reached_target


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run with all that trains it."""

    start: Start
    engine: TrainingEngine
    checkpoints: CheckpointWriter

    def state(self, steps_done: int, *, samples: int, reached_accuracy: float | None) -> TrainState:
        """Returns the state of a checkpoint after so many steps, without weights and optimizer."""
        return TrainState(
            step=steps_done,
            fingerprint=self.start.resolved.fingerprint(steps_done),
            world_size=self.start.world.size,
            zero_stage=self.engine.sharding.stage,
            cost_weights=self.start.resolved.shape.cost_weights,
            config=self.start.resolved.run_file.model_dump(mode="json"),
            reached_accuracy=reached_accuracy,
            samples=samples,
            stages=self.start.resolved.past(steps_done),
        )


def find_start(resolved: ResolvedRun, world: World) -> Start:
    """Finds the run's newest complete checkpoint, or its parent's, and settles what the run keeps of it.

    Of a run in parts it begins the one that goes on there.

    Raises: ConfigError if these ranks cannot divide a step; CheckpointError for a checkpoint that cannot be resumed;
    RunError if the ranks do not see the same data.
    """
    announce(resolved)
    for part in resolved.parts:
        check_attention(part.config, world.device.type)
    resolved.require_divisible(world.size)
    _require_shared_fingerprint(resolved, world)
    run = resolved.config.run
    checkpoint = newest_whole(run.output_dir / CHECKPOINTS, world)
    parents = None
    if checkpoint is None and run.parent is not None:
        config = resolved.config
        checkpoint = parents = world.on_main(lambda: parent_checkpoint(config))
        whole_at(run.parent.run / CHECKPOINTS, run.parent.step, world)
    resolved = resolved.part_after(0) if checkpoint is None else continued(resolved, checkpoint.state)
    if parents is not None:  # nothing is written before it could be refused
        checkpoint = world.on_main(lambda: take_over(parents, run.output_dir))
    return Start(resolved=resolved, world=world, checkpoint=checkpoint)


def build_at(start: Start) -> TrainingRun:
    """Makes the run with the weights of its newest complete checkpoint, or else with its initial weights.

    Initial weights come from `training.initialize_from`, or else from the seed.

    Raises: DataError for a vocabulary that the objective cannot use; CheckpointError for a checkpoint that cannot be
    loaded, or weights of another model.
    """
    resolved, world, checkpoint = start.resolved, start.world, start.checkpoint
    model = build_placed_model(resolved, world)
    path = resolved.config.training.initialize_from
    if checkpoint is None and path is not None:
        initialize(
            model,
            path,
            tokenizer_dir=resolved.prepared.tokenizer_dir,
            world=world,
            sharding=resolved.config.deepspeed.sharding,
        )
    engine = TrainingEngine(model, resolved.config, world, denominators=resolved.denominators)
    if checkpoint is not None:
        doing.enter("loading the checkpoint", checkpoint.step)
        load_checkpoint(engine.deepspeed, checkpoint, world)
    training = resolved.config.training
    policy = KeepPolicy(newest=training.keep_checkpoints, steps=frozenset(training.keep_checkpoint_steps))
    directory = resolved.config.run.output_dir / CHECKPOINTS
    writer = CheckpointWriter(directory, world, policy, steps_done=start.steps_done)
    return TrainingRun(start=start, engine=engine, checkpoints=writer)


def build_model(run: ResolvedRun, device: torch.device) -> Model:
    """Returns the run's model with the initial weights of its seed."""
    with device:
        model = new_model(
            run.config.model,
            vocabulary_size=run.prepared.vocabulary_size,
            max_positions=run.config.max_positions,
            attention_backend=run.config.attention.backend,
            seed=run.config.run.seed,
        )
    if run.config.training.residual_dtype == "bf16":
        model.residual_dtype = torch.bfloat16
    return model


def build_placed_model(run: ResolvedRun, world: World) -> Model:
    """Returns the same model for the engine: divided among the ranks if the ZeRO stage divides parameters.

    Raises: ConfigError if this number of ranks cannot divide a step.
    """
    settings = deepspeed_config(run.config, world.size)
    model = build_model(run, torch.device("meta"))
    run.config.deepspeed.sharding.place(model, run.config.run.seed, world, settings)
    return model


def _require_shared_fingerprint(run: ResolvedRun, world: World) -> None:
    """Compares fingerprints. Raises: RunError if a rank sees other data than rank 0."""
    fingerprints = world.all_gather(run.fingerprint())
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise RunError(
            f"ranks {others} have another seed or other prepared data in {run.prepared.directory} than rank 0: start "
            "all with the same run file, and put data.prepared_dir on a file system that all machines share, or copy "
            "the same prepared set to each"
        )
