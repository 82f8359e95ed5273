"""Computes a `ResolvedRun` from a run file and its prepared data, once, before anything is built.

Training, plans, evaluation and the studies all use it, so they agree on the contents of a step. What needs torch
is imported where it is used: `evenpack train` checks a run without it.
"""

import json
import logging
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from evenpack.data.order.stages import Stage, StagedOrder, by_name
from evenpack.data.order.step_shape import StepShape
from evenpack.data.prepared import PreparedData, Verification
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.cost_weights import operation_weights, read_cost_model
from evenpack.engine.resolving.data_facts import AverageItem, average_item, drawn_shares, items_of_an_epoch, stages_of
from evenpack.engine.resolving.settle import SettledRun, parameters_of, settle_prepared
from evenpack.errors import ConfigError
from evenpack.kernels.config import WHOLE_ROWS
from evenpack.models.config import study_switches

if TYPE_CHECKING:
    from evenpack.data.batches.objectives import Objective
    from evenpack.data.batches.pipeline import PipelineSettings
    from evenpack.engine.resolving.objective import DenominatorsOf
    from evenpack.engine.world.distributed import World

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """The settings of a run that depend neither on the ranks nor on a checkpoint.

    Of a run with stages, shape and data are those of its first one; `of_stages` has all.
    """

    config: RunConfig
    """The run file in packs (or sequences) and steps."""
    settled: SettledRun
    """How the run file's packs and steps were computed."""
    prepared: PreparedData
    shape: StepShape
    cost_model: CostModel | None
    """The source of the cost weights; None: the model's operations."""

    @cached_property
    def objective(self) -> "Objective":
        """The training objective. Raises: DataError if the vocabulary lacks a special token for it."""
        from evenpack.engine.resolving.objective import build_objective

        return build_objective(self.config, self.prepared)

    @cached_property
    def denominators(self) -> "DenominatorsOf":
        """The denominators of a step's losses."""
        from evenpack.engine.resolving.objective import build_denominators

        return build_denominators(self.config, self.prepared, self.shape)

    def fingerprint(self, stop_step: int | None = None) -> str:
        """Returns a hash of all that decides which packs form which step before `stop_step`; None: all steps."""
        return self.prepared.fingerprint(self.config.run.seed, self.shape.batching, stages=self.order.begun(stop_step))

    def past(self, steps_done: int) -> tuple[dict[str, Any], ...]:
        """Returns the stages that have begun after so many steps, as JSON values: all that decides what they draw.

        Those are the first step (from 1), the size of steps, the weights, and a hash of the files of each source.
        """
        prepared = self.prepared
        hashes = {
            name: xxhash.xxh3_128_hexdigest(json.dumps(prepared.checksums.get(name), sort_keys=True).encode())
            for name in prepared.source_names
        }
        return tuple(
            {
                "step": stage.step + 1,
                "items_per_step": stage.items_per_step,
                "weights": by_name(prepared.source_names, stage.weights),
                "files": {
                    name: hashes[name]
                    for name, weight in zip(prepared.source_names, stage.weights, strict=True)
                    if weight
                },
            }
            for stage in self.order.begun(steps_done)
        )

    @cached_property
    def order(self) -> StagedOrder:
        """The order in which steps draw from sources, through all stages."""
        return StagedOrder(self.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What the steps of each stage draw."""
        return stages_of(self.config)

    @cached_property
    def of_stages(self) -> tuple["ResolvedRun", ...]:
        """Each stage as an ordinary run, by which it is checked and planned; a run without stages is its own."""
        if not self.config.stages:
            return (self,)
        return tuple(
            replace(
                self,
                config=config,
                settled=SettledRun.as_stated(config),
                prepared=self.prepared.drawn_by(config.data),
                shape=stage.shaped(self.shape),
            )
            for stage, (_, config) in zip(self.stages, self.config.staged(), strict=True)
        )

    @cached_property
    def shares(self) -> dict[str, Fraction]:
        """Share of each source among all packs or sequences that the run draws."""
        return drawn_shares(self.config)

    def require_divisible(self, ranks: int) -> None:
        """Checks each stage. Raises: ConfigError if the ranks cannot divide a step, with values that would do."""
        for stage, run in zip(self.stages, self.of_stages, strict=True):
            try:
                run.settled.micro_batches(ranks)
            except ConfigError as error:
                raise ConfigError(
                    f"the stage of step {stage.step + 1}: {error}" if stage.step else str(error)
                ) from error

    def epochs(self, steps_done: int) -> dict[str, float]:
        """Returns the number of passes over each source after so many steps, skipped ones included."""
        items = items_of_an_epoch(self.prepared, self.shape.batching)
        return {name: self.order.drawn_before(index, steps_done) / items[name] for index, name in enumerate(items)}

    @cached_property
    def item(self) -> AverageItem:
        """The average pack or sequence of the run. Raises: DataError if a source has nothing to train on."""
        return average_item(self.prepared, self.shape.batching, shares=self.shares)

    @property
    def samples_per_step(self) -> Fraction:
        """Mean number of sequences per step over the run. Raises: DataError if a source has nothing to train on."""
        return self.shape.items_per_step * self.item.sequences

    @property
    def parameters(self) -> int:
        """Number of the model's parameters; see `parameters_of`."""
        return parameters_of(self.config, self.prepared.vocabulary_size)

    @property
    def evaluation_shape(self) -> StepShape:
        """The shape of validation: packs in order, with isolated sequences, whatever the shape of training.

        All runs over the same data are therefore evaluated on the same packs in the same way. There is no padding
        except that of packs.
        """
        rows = self.config.evaluation_packs_per_micro_batch
        layout = self.shape.layout
        if layout == "padded":
            layout = "packed" if self.config.attention.backend in WHOLE_ROWS else "unpadded"
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

    def pipeline_settings(self, world: "World") -> "PipelineSettings":
        """Returns the settings of this rank's data pipeline."""
        return self._pipeline_settings(rank=world.rank, ranks=world.size, pin_memory=world.device.type == "cuda")

    def _pipeline_settings(self, *, rank: int, ranks: int, pin_memory: bool) -> "PipelineSettings":
        from evenpack.data.batches.pipeline import PipelineSettings

        return PipelineSettings(
            seed=self.config.run.seed,
            objective=self.objective,
            shape=self.shape,
            ranks=ranks,
            rank=rank,
            loader_workers=self.config.training.loader_workers,
            pin_memory=pin_memory,
            later_stages=self.stages[1:],
        )


def open_run(config: RunConfig, *, verify: Verification = "all") -> ResolvedRun:
    """Opens the run's prepared data and resolves the run; `verify` is as in `PreparedData.open`.

    Raises: NotPreparedError, DataError; and see `resolve`.
    """
    return resolve(config, PreparedData.open(config.prepared_dir, config.data, verify=verify))


def resolve(config: RunConfig, prepared: PreparedData) -> ResolvedRun:
    """Settles the run file, reads the cost model and decides how steps are formed.

    Raises: ConfigError if a value of the run file cannot be settled, or if the cost model was measured on another
    model or layout and is refused then; DataError if there is nothing to train on.
    """
    settled = settle_prepared(config, prepared)
    config, training = settled.config, settled.config.training
    cost_model = read_cost_model(training, config.model)
    weights = operation_weights(config, prepared) if cost_model is None else cost_model.cost_weights
    shape = StepShape(
        batching=training.batching,
        items_per_step=training.items_per_step,
        items_per_micro_batch=training.items_per_micro_batch,
        layout=training.layout,
        isolate=config.attention.isolate,
        reset_positions=config.model.reset_positions,
        policy=training.policy,
        cost_weights=weights.in_layout(training.layout),
        windows=config.model.windows,
        balances_each_micro_batch=config.deepspeed.sharding.balances_each_micro_batch,
    )
    if shape.policy == "cost_balanced" and shape.cost_weights.are_zero:
        raise ConfigError(
            f"training.cost_model {training.cost_model} gives all packs the same cost in layout {shape.layout} "
            "(its costs of attention and of segments are 0): measure again, or set training.assignment=arrival"
        )
    return ResolvedRun(
        config=config,
        settled=settled,
        prepared=prepared,
        shape=shape,
        cost_model=cost_model,
    )


def is_evaluation_due(training: TrainingSection, steps_done: int, *, samples_per_step: Fraction) -> bool:
    """Returns whether the model is evaluated after so many steps; the end of the schedule is included if any is.

    A stop before the end adds no evaluation, so that a run that was stopped and resumed has the same log as another.
    """
    every = training.evaluate_every_samples
    is_last = steps_done == training.planned_steps
    if every is None:
        steps = training.evaluate_every_steps
        return steps is not None and (is_last or steps_done % steps == 0)
    if is_last:
        return True
    if every == "mlperf":
        every = mlperf_evaluation_interval(float(samples_per_step))
    return math.floor(steps_done * samples_per_step / every) > math.floor((steps_done - 1) * samples_per_step / every)


def mlperf_evaluation_interval(samples_per_step: float) -> int:
    """Returns the samples between two evaluations of MLPerf's BERT: floor(0.05 (230.23 batch + 3e6) / 25000) 25000."""
    return math.floor(0.05 * (230.23 * samples_per_step + 3_000_000) / 25_000) * 25_000


def announce(run: ResolvedRun) -> None:
    """Logs the adjustments and warns of settings that are for study only."""
    if run.settled.adjustment:
        log.info("%s", "\n  ".join(run.settled.adjustment))
    switches = study_switches(run.config.model, run.config.attention) | run.config.data.study_switches
    for switch, meaning in switches.items():
        log.warning("FOR STUDY ONLY: %s: %s", switch, meaning)
