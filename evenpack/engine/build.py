"""The composition root: a run file and a place among the ranks become everything that a run consists of."""

import logging
from collections.abc import Generator
from dataclasses import dataclass

import torch

from evenpack.data.batches.pipeline import PipelineSettings, StepBatches, training_batches
from evenpack.data.prepared import PreparedData
from evenpack.engine.checkpoints.continuation import (
    compare_run_files,
    keep_initial_weights,
    kept_cost_weights,
    require_fingerprint,
)
from evenpack.engine.checkpoints.files import TrainState
from evenpack.engine.checkpoints.initial_weights import initialize
from evenpack.engine.checkpoints.store import CHECKPOINTS, CheckpointStore
from evenpack.engine.config import RunConfig
from evenpack.engine.deepspeed_config import micro_batches_per_step
from evenpack.engine.distributed import World
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.objective import build_denominators, build_objective
from evenpack.engine.packing_adjustment import adjust_to_packing, measured_packing_factor
from evenpack.errors import RunError
from evenpack.models.build import Model, new_model
from evenpack.models.config import study_switches
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a training run consists of, at the step where it begins or goes on."""

    config: RunConfig
    """With what `training.packing_adjustment` made of the run file's numbers."""
    world: World
    prepared: PreparedData
    engine: TrainingEngine
    checkpoints: CheckpointStore
    fingerprint: str
    cost_weights: tuple[float, float]
    """a and b of the cost of a pack or a sequence, a·tokens + b·Σ length², by which cost_balanced assigns."""
    first_step: int
    """Updates done before: 0, or those of the checkpoint."""

    def batches(self, *, stop_step: int) -> Generator[StepBatches]:
        """This rank's share of the steps from `first_step` up to `stop_step`; closing it ends the loader."""
        settings = pipeline_settings(self.config, self.prepared, self.world, cost_weights=self.cost_weights)
        yield from training_batches(self.prepared, settings, start_step=self.first_step, stop_step=stop_step)

    def state(self, step: int) -> TrainState:
        """What a checkpoint after `step` updates must hold beside weights and optimizer.

        Its run file asks for no `training.packing_adjustment`: its numbers are adjusted, and whoever trains by it again
        would have them adjusted twice.
        """
        config = self.config.model_dump(mode="json")
        config["training"]["packing_adjustment"] = "none"
        return TrainState(
            step=step,
            fingerprint=self.fingerprint,
            world_size=self.world.size,
            zero_stage=self.config.deepspeed.zero_stage,
            cost_weights=self.cost_weights,
            config=config,
        )


def build(config: RunConfig, world: World) -> Run:
    """Opens the data, makes the model and puts the newest whole checkpoint into it, if there is one; if there is none,
    the weights that `training.initialize_from` names.

    Raises: ConfigError if these ranks cannot divide a step, or `training.packing_adjustment` cannot be had;
    NotPreparedError and DataError; CheckpointError for a checkpoint that cannot be gone on from, or weights that are
    not this model's; RunError if the ranks do not see the same data.
    """
    prepared = PreparedData.open(config.prepared_dir, config.data)
    adjustment = adjust_to_packing(config, packing_factor=measured_packing_factor(prepared))
    config = adjustment.config
    if adjustment.description:
        log.info("%s", "\n  ".join(adjustment.description))
    for switch, meaning in study_switches(config.model, config.attention).items():
        log.warning("FOR STUDY ONLY: %s is false: %s", switch, meaning)
    micro_batches_per_step(config.training, world.size)
    fingerprint = _shared_fingerprint(prepared, config, world)
    checkpoints = CheckpointStore(config.run.output_dir / CHECKPOINTS, world, keep=config.training.keep_checkpoints)
    checkpoint = checkpoints.newest()
    if checkpoint is not None:
        require_fingerprint(checkpoint.state, fingerprint)
        compare_run_files(checkpoint.state, config.model_dump(mode="json"))
        config = keep_initial_weights(config, checkpoint.state)
    model = build_model(config, prepared, world.device)
    if checkpoint is None and config.training.initialize_from is not None:
        initialize(model, config.training.initialize_from, tokenizer_dir=prepared.tokenizer_dir, world=world)
    kept = None if checkpoint is None else kept_cost_weights(checkpoint.state, config.training.layout)
    engine = TrainingEngine(model, config, world, denominators=build_denominators(config, prepared))
    if checkpoint is not None:
        checkpoints.load(engine.deepspeed, checkpoint)
    return Run(
        config=config,
        world=world,
        prepared=prepared,
        engine=engine,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
        cost_weights=kept or cost_weights(config, prepared),
        first_step=0 if checkpoint is None else checkpoint.step,
    )


def build_model(config: RunConfig, prepared: PreparedData, device: torch.device) -> Model:
    """The run's model with the initial weights of its seed."""
    with device:
        return new_model(
            config.model,
            vocabulary_size=prepared.vocabulary_size,
            max_positions=config.model.max_positions or config.positions_needed,
            attention_backend=config.attention.backend,
            seed=config.run.seed,
        )


def pipeline_settings(
    config: RunConfig, prepared: PreparedData, world: World, *, cost_weights: tuple[float, float]
) -> PipelineSettings:
    """What the run file says about this rank's batches."""
    training = config.training
    return PipelineSettings(
        seed=config.run.seed,
        packs_per_step=training.items_per_step,
        packs_per_micro_batch=training.items_per_micro_batch,
        form=config.batch_form,
        objective=build_objective(config, prepared),
        ranks=world.size,
        rank=world.rank,
        per_micro_batch_balance=False,  # ZeRO 0 and 1 exchange once a step
        cost_weights=cost_weights,
        loader_workers=training.loader_workers,
        pin_memory=world.device.type == "cuda",
        batching=training.batching,
        assignment=training.policy,
    )


def cost_weights(config: RunConfig, prepared: PreparedData) -> tuple[float, float]:
    """a and b of a pack's cost: the run file's, or by the model's operations, in units of b.

    In the packed layout every pack has the same slots and so the same work outside attention, real tokens or not:
    a is 0 there, else a pack would seem the cheaper for its padding.
    """
    if config.training.cost_weights is not None:
        return config.training.cost_weights
    if config.training.layout == "packed":
        return 0.0, 1.0

    def flops(work: Work) -> int:
        return step_flops(config.model, vocabulary_size=prepared.vocabulary_size, work=work)

    tokens = 2000  # enough for a share of masked ones
    is_masked = family_of(config.model).objective == "masked_tokens"
    head_share = (config.static_masks or config.masking).share if is_masked else 1.0
    of_tokens = flops(Work(slots=tokens, squared_lengths=0, head_slots=round(tokens * head_share), sequences=0))
    of_squares = flops(Work(slots=0, squared_lengths=tokens, head_slots=0, sequences=0))
    return of_tokens / of_squares, 1.0


def _shared_fingerprint(prepared: PreparedData, config: RunConfig, world: World) -> str:
    """Raises: RunError if a rank sees other data than rank 0."""
    fingerprints = world.all_gather(prepared.fingerprint(config.run.seed, config.training.batching))
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise RunError(
            f"ranks {others} have another seed or other prepared data in {prepared.directory} than rank 0: start all "
            "with the same run file, and put data.prepared_dir on a file system that all machines share, or copy the "
            "same prepared set to each"
        )
    return fingerprints[0]
