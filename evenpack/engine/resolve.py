"""A run file and its prepared data -> what is run. Done once, before anything is built.

Training, `--dry-run`, evaluation and the studies all begin here, so they cannot disagree about what a step is.
"""

import logging
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path

from evenpack.data.batches.objectives import Objective
from evenpack.data.batches.pipeline import PipelineSettings
from evenpack.data.order.mixture_schedule import MixtureSchedule
from evenpack.data.order.step_shape import CostWeights, StepShape
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.cost_model import CostModel
from evenpack.engine.cost_weights import operation_weights, read_cost_model
from evenpack.engine.distributed import World
from evenpack.engine.objective import Denominators, build_denominators, build_objective
from evenpack.engine.reporting.config import require_mlperf_logging
from evenpack.engine.run_length import is_evaluation_due
from evenpack.engine.settle import parameters_of, settled_micro_batches
from evenpack.engine.settle_over import settle_over
from evenpack.engine.sharding import sharding_at
from evenpack.engine.step_items import AverageItem, average_item, drawn_shares, items_of_an_epoch
from evenpack.errors import ConfigError
from evenpack.models.config import study_switches

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """Everything about a run that depends neither on the ranks nor on a checkpoint."""

    config: RunConfig
    """With what `training.packing_adjustment` made of the run file's numbers."""
    prepared: PreparedData
    shape: StepShape
    cost_model: CostModel | None
    """What the cost weights come from; None: the model's operations."""
    adjustment: tuple[str, ...]
    """For people: the changes by `training.packing_adjustment`, and the steps that tokens and the run's length give."""
    tokens_per_step: int | None
    """What the run file asks for, before it became packs or sequences; None where it gives those."""

    @cached_property
    def objective(self) -> Objective:
        """What is asked of the model. Raises: DataError if the vocabulary lacks a special token for it."""
        return build_objective(self.config.model, self.config.masking, self.prepared, seed=self.config.run.seed)

    @cached_property
    def denominators(self) -> Denominators:
        """What the losses of a step are divided by."""
        return build_denominators(self.config.model, self.config.masking, self.prepared, self.shape)

    def fingerprint(self, last_step: int | None = None) -> str:
        """Of all that decides which packs form which step, up to `last_step`; None: of all steps."""
        return self.prepared.fingerprint(self.config.run.seed, self.shape.batching, last_step=last_step)

    @cached_property
    def mixture(self) -> MixtureSchedule:
        """Which source each draw comes from."""
        return self.prepared.mixture(self.shape.items_per_step)

    @cached_property
    def shares(self) -> dict[str, Fraction]:
        """Of each source among all packs or sequences that the run draws."""
        return drawn_shares(self.config)

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been gone through after `step` steps, skipped ones included."""
        draws = step * self.shape.items_per_step
        items = items_of_an_epoch(self.prepared, self.shape.batching)
        return {name: self.mixture.drawn_before(index, draws) / items[name] for index, name in enumerate(items)}

    @cached_property
    def item(self) -> AverageItem:
        """Of what a step is made, on average over the run. Raises: DataError if a source has nothing to train on."""
        return average_item(self.prepared, self.shape.batching, shares=self.shares)

    @property
    def samples_per_step(self) -> Fraction:
        """Sequences, on average over what the run draws. Raises: DataError if a source has nothing to train on."""
        return self.shape.items_per_step * self.item.sequences

    @property
    def max_positions(self) -> int:
        """Rows of a learned position table."""
        return self.config.model.max_positions or self.config.positions_needed

    @property
    def parameters(self) -> int:
        """Of the model; see `parameters_of`."""
        return parameters_of(self.config, self.prepared.vocabulary_size)

    def micro_batches(self, ranks: int) -> int:
        """Of each rank in each step. Raises: ConfigError with what would do, if the ranks cannot divide a step."""
        return settled_micro_batches(self.config.training, self.item, ranks, asked=self.tokens_per_step)

    @property
    def settled_config(self) -> RunConfig:
        """The run file that asks for no further adjustment: whoever trains by it again has the same numbers."""
        training = self.config.training.model_copy(update={"packing_adjustment": "none"})
        return self.config.model_copy(update={"training": training})

    @property
    def evaluation_shape(self) -> StepShape:
        """The shape of validation: packs in order, with isolated sequences, whatever the shape of training.

        All runs over the same data are therefore evaluated on the same packs in the same way. It computes no padding
        beyond that of packs.
        """
        rows = self.config.evaluation_packs_per_micro_batch
        layout = "unpadded" if self.shape.layout == "padded" else self.shape.layout
        return replace(
            self.shape,
            batching="packs",
            layout=layout,
            isolate=True,
            reset_positions=True,
            policy="arrival",
            items_per_step=rows,
            items_per_micro_batch=rows,
            cost_weights=self.shape.cost_weights.in_layout(layout),
        )

    def is_evaluation_due(self, step: int) -> bool:
        """Whether the model is evaluated after `step` updates; see `run_length.is_evaluation_due`."""
        return is_evaluation_due(self.config.training, step, samples_per_step=self.samples_per_step)

    def with_cost_weights(self, weights: CostWeights) -> "ResolvedRun":
        """The run that goes on with the weights of a checkpoint."""
        return replace(self, shape=replace(self.shape, cost_weights=weights))

    def with_initial_weights(self, path: Path | None) -> "ResolvedRun":
        """The run that tells in its checkpoints what it began with, whatever its run file says by now."""
        training = self.config.training.model_copy(update={"initialize_from": path})
        return replace(self, config=self.config.model_copy(update={"training": training}))

    def pipeline_settings(self, world: World) -> PipelineSettings:
        """What decides this rank's batches."""
        return PipelineSettings(
            seed=self.config.run.seed,
            objective=self.objective,
            shape=self.shape,
            ranks=world.size,
            rank=world.rank,
            loader_workers=self.config.training.loader_workers,
            pin_memory=world.device.type == "cuda",
        )


def open_run(config: RunConfig) -> ResolvedRun:
    """`resolve` over the run's own prepared data. Raises: NotPreparedError, DataError; and see `resolve`."""
    return resolve(config, PreparedData.open(config.prepared_dir, config.data))


def resolve(config: RunConfig, prepared: PreparedData) -> ResolvedRun:
    """Applies the packing adjustment, reads the cost model and decides how steps are formed.

    Raises: ConfigError if `training.packing_adjustment` is impossible, or the cost model is of another model or layout
    and not to be used then; DataError if there is nothing to train on.
    """
    tokens_per_step = config.training.tokens_per_step
    config, adjustment = settle_over(config, prepared)
    training = config.training
    cost_model = read_cost_model(training, config.model)
    if cost_model is None:
        weights = operation_weights(config.model, config.masking, prepared, layout=training.layout)
    else:
        weights = cost_model.cost_weights
    shape = StepShape(
        batching=training.batching,
        items_per_step=training.items_per_step,
        items_per_micro_batch=training.items_per_micro_batch,
        layout=training.layout,
        isolate=config.attention.isolate,
        reset_positions=config.model.reset_positions,
        policy=training.policy,
        cost_weights=weights.in_layout(training.layout),
        balances_each_micro_batch=sharding_at(config.deepspeed.zero_stage).balances_each_micro_batch,
    )
    if shape.policy == "cost_balanced" and shape.cost_weights == CostWeights(
        per_token=0.0, per_squared_length=0.0, per_segment=0.0
    ):
        raise ConfigError(
            f"training.cost_model {training.cost_model} leaves nothing in layout {shape.layout} by which packs differ "
            "(per_squared_length and per_segment are 0): measure again, or set training.assignment=arrival"
        )
    return ResolvedRun(
        config=config,
        prepared=prepared,
        shape=shape,
        cost_model=cost_model,
        adjustment=adjustment,
        tokens_per_step=tokens_per_step,
    )


def require_trainable(run: ResolvedRun) -> None:
    """Checks what training needs, and neither evaluation nor export.

    Raises: ConfigError if the run goes through a source more often than it may, if it is to reach a target or to
    average losses and nothing is held out to measure them on, or is to write MLPerf's log and lacks the package for it
    or the name of who submits.
    """
    require_bounded_epochs(run)
    sources = run.prepared.manifest.sources
    absent = [name for name in run.config.training.validation_weights or {} if sources[name].validation.packing is None]
    if absent:
        raise ConfigError(
            f"training.validation_weights names {', '.join(absent)}, of which nothing is held out: take it out, or "
            f"raise data.validation_fraction (now {run.config.data.validation_fraction:g}) and prepare again"
        )
    has_validation = any(sources[name].validation.packing is not None for name in run.prepared.source_names)
    if run.config.training.target_accuracy is not None and not has_validation:
        raise ConfigError(
            f"training.target_accuracy ({run.config.training.target_accuracy:g}) is measured on what is held out, and "
            "no source holds out anything: raise data.validation_fraction (now "
            f"{run.config.data.validation_fraction:g}) and prepare again, or set target_accuracy to null"
        )
    if run.config.mlperf is not None:
        require_mlperf_logging("the section mlperf:", otherwise=", or leave the section out")
        if run.config.mlperf.submission_org is None:
            raise ConfigError(
                "mlperf.submission_org is null, and the log must name who submits: set it, or mlperf=null"
            )


def require_bounded_epochs(run: ResolvedRun) -> None:
    """Refuses a run that repeats a source more often than its `maximum_epochs`, or warns.

    Raises: ConfigError if `data.on_maximum_epochs` is `error`.
    """
    told = exceeded_epochs(run)
    if told is None:
        return
    if run.config.data.on_maximum_epochs == "error":
        raise ConfigError(f"{told}, or set data.on_maximum_epochs=warn")
    log.warning("%s", told)


def exceeded_epochs(run: ResolvedRun) -> str | None:
    """What to say of the sources that the run goes through more often than their `maximum_epochs`; None without any."""
    epochs = run.epochs(run.config.training.planned_steps)
    bounds = {name: source.maximum_epochs for name, source in run.config.data.sources.items()}
    lines = [
        f"  {name}: {epochs[name]:.2f} epochs, at most {bound:g}"
        for name, bound in bounds.items()
        if bound is not None and epochs[name] > bound
    ]
    if not lines:
        return None
    return "\n".join(
        [
            f"{run.config.training.planned_steps} steps repeat more of a source than its maximum_epochs allows:",
            *lines,
            "Lower its weight (data.sources.NAME.weight, data.mixture_schedule), give it more documents, or train for "
            "fewer steps",
        ]
    )


def announce(run: ResolvedRun) -> None:
    """Says once what was adjusted and what is for study only."""
    if run.adjustment:
        log.info("%s", "\n  ".join(run.adjustment))
    switches = study_switches(run.config.model, run.config.attention) | run.config.data.study_switches
    for switch, meaning in switches.items():
        log.warning("FOR STUDY ONLY: %s: %s", switch, meaning)
