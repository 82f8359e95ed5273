"""Computes a `ResolvedRun` from a run file and its prepared data, once, before anything is built.

Training, plans, evaluation and the studies all use it, so they agree on the contents of a step. What needs torch
is imported where it is used: `evenpack train` checks a run without it.
"""

import logging
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import xxhash

from evenpack.data.order.forms import Form
from evenpack.data.order.stages import Stage, StagedOrder, by_name, of_the_order
from evenpack.data.order.step_shape import StepShape
from evenpack.data.prepared import PreparedData, Verification
from evenpack.differences import flatten
from evenpack.engine.config import REBUILT, RunConfig, TrainingSection
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.cost_weights import operation_weights, read_cost_model
from evenpack.engine.resolving.data_facts import AverageItem, average_item, drawn_shares, items_of_an_epoch, stages_of
from evenpack.engine.resolving.settle import SettledRun, parameters_of, settle_prepared
from evenpack.errors import ConfigError, DataError
from evenpack.files import hash_of_json
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

    Of a run with stages, shape and data are those of its first one; `of_stages` has all. A run whose data or model
    change is a sequence of `parts`, each of which is built and trained as a run that is resumed.
    """

    config: RunConfig
    """The run file in packs (or sequences) and steps."""
    settled: SettledRun
    """How the run file's packs and steps were computed."""
    prepared: PreparedData
    shape: StepShape
    cost_model: CostModel | None
    """The source of the cost weights; None: the model's operations."""
    run_file: RunConfig
    """The settled run file of the whole run."""
    data_of_parts: tuple[PreparedData, ...]
    """The data of each part, whose packs differ in their form."""
    part: int | None = None
    """Index of the part that this is; None: the whole run."""

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
        found, seed = "", self.config.run.seed
        begun = self.order.begun(stop_step)
        for index, (prepared, first) in enumerate(zip(self.data_of_parts, self._firsts, strict=True)):
            own = [stage for stage in begun if self._index(stage.step) == index]
            if own:
                one = prepared.fingerprint(seed, self.shape.batching, stages=own)
                border = f"{first} restart" if first in self._restarts else f"{first}"
                found = one if index == 0 else xxhash.xxh3_128_hexdigest(f"{found} {border} {one}".encode())
        return found

    def past(self, steps_done: int) -> tuple[dict[str, Any], ...]:
        """Returns the begun stages that change draws, after so many steps, as JSON values: all that decides the draws.

        Those are the first step (from 1), the size of steps, the weights, a hash of the files of each source, and of a
        stage that begins a part the keys that are then rebuilt.
        """
        begun = self.order.begun(steps_done)
        of_order = {stage.step for stage in of_the_order(begun)}
        return tuple(self._recorded(stage) for stage in begun if stage.step in of_order or stage.step in self._firsts)

    def _recorded(self, stage: Stage) -> dict[str, Any]:
        index = self._index(stage.step)
        prepared = self.data_of_parts[index]
        drawn = [name for name, weight in zip(prepared.source_names, stage.weights, strict=True) if weight]
        found: dict[str, Any] = {
            "step": stage.step + 1,
            "items_per_step": stage.items_per_step,
            "weights": by_name(prepared.source_names, stage.weights),
            "files": {name: hash_of_json(prepared.checksums.get(name)) for name in drawn},
        }
        if stage.step and stage.step in self._firsts:
            values = flatten(self.run_file.parts[index][1].model_dump(mode="json"))
            found["built"] = {key: value for key, value in values.items() if key.startswith(REBUILT)}
            if stage.step in self._restarts:
                found["built"]["restart"] = True
        return found

    @cached_property
    def order(self) -> StagedOrder:
        """The order in which steps draw from sources, through all stages."""
        return StagedOrder(self.stages)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What the steps of each stage of the whole run draw."""
        return stages_of(self.run_file)

    @cached_property
    def forms(self) -> tuple[dict[str, Form], ...]:
        """The place of the packs of each part in the stream of each source, by name."""
        found: list[dict[str, Form]] = []
        for index, (prepared, first) in enumerate(zip(self.data_of_parts, self._firsts, strict=True)):
            packs = items_of_an_epoch(prepared, self.shape.batching)
            if index == 0:
                found.append({name: Form(packs=count) for name, count in packs.items()})
                continue
            before = self.data_of_parts[index - 1]
            if before.directory == prepared.directory:
                found.append(found[-1])
                continue
            joined = 1 if self.shape.batching == "sequences" else prepared.pack_length // before.pack_length
            found.append(
                {
                    name: found[-1][name].followed(
                        packs=count,
                        position=self.order.drawn_before(at, first),
                        joined=None if first in self._restarts else joined,
                    )
                    for at, (name, count) in enumerate(packs.items())
                }
            )
        return tuple(found)

    @cached_property
    def parts(self) -> tuple["ResolvedRun", ...]:
        """Each part of the run as a run of its own, which begins with the checkpoint of the part before."""
        found = self.run_file.parts
        if len(found) == 1:
            return (self,)
        data = [self.data_of_parts[0]]
        for prepared, forms in zip(self.data_of_parts[1:], self.forms[1:], strict=True):
            is_same = prepared.directory == data[-1].directory
            data.append(prepared.following(data[-1].follows if is_same else (data[-1], forms)))
        return tuple(
            replace(self._under(config, prepared), part=index)
            for index, ((_, config), prepared) in enumerate(zip(found, data, strict=True))
        )

    def part_after(self, steps_done: int) -> "ResolvedRun":
        """Returns the part that goes on after so many steps."""
        return self.parts[self._index(steps_done)]

    def part_of(self, steps_done: int) -> "ResolvedRun":
        """Returns the part that has done the last of so many steps."""
        return self.parts[self._index(max(steps_done - 1, 0))]

    def left_out(self, step: int) -> dict[str, dict[str, int | float]]:
        """Returns what step `step` (from 0) leaves of unfinished epochs, if it begins with new ones in another form.

        For each source of which something is left: its `packs` (or sequences), and their share of an epoch.
        """
        if step not in self._restarts:
            return {}
        index, found = self._index(step), {}
        for name, form in self.forms[index].items():
            before = self.forms[index - 1][name]
            if packs := before.end_of_epoch(form.start) - form.start:
                found[name] = {"packs": packs, "epochs": float(form.epoch - before.epochs(form.start))}
        return found

    def data_after(self, steps_done: int) -> list[PreparedData]:
        """Returns the data that steps after so many read: the part's own, and forms before that are not at an end."""
        index = self._index(steps_done)
        found, forms = [self.parts[index].prepared], self.forms[index]
        positions = {name: self.order.drawn_before(at, steps_done) for at, name in enumerate(forms)}
        while found[-1].follows and any(positions[name] < form.then for name, form in forms.items()):
            earlier, _ = found[-1].follows
            positions = {name: form.in_before(positions[name]) for name, form in forms.items()}
            forms = {name: form.before for name, form in forms.items() if form.before is not None}
            found.append(earlier)
        return found

    @cached_property
    def _restarts(self) -> frozenset[int]:
        """The first steps of the parts that begin with new epochs and leave out the rest of those before."""
        return frozenset(stage.step - 1 for stage in self.run_file.stages if stage.restart)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The first step of each part."""
        return tuple(first for first, _ in self.run_file.parts)

    def _index(self, step: int) -> int:
        """Returns the index of the part of a step."""
        return bisect_right(self._firsts, step) - 1

    @cached_property
    def of_stages(self) -> tuple["ResolvedRun", ...]:
        """Each stage as an ordinary run, by which it is checked and planned; a run without stages is its own."""
        if self.part is None and len(self.parts) > 1:
            return tuple(chain.from_iterable(part.of_stages for part in self.parts))
        if not self.config.stages:
            return (self,)
        return tuple(self._under(one, self.prepared.drawn_by(one.data)) for _, one in self.config.staged())

    def _under(self, config: RunConfig, prepared: PreparedData) -> "ResolvedRun":
        """Returns the run by the settings of one of its parts or stages."""
        training = config.training
        items, at_once = training.items_per_step, training.items_per_micro_batch
        shape = replace(self.shape, items_per_step=items, items_per_micro_batch=at_once)
        return replace(self, config=config, settled=SettledRun(config=config), prepared=prepared, shape=shape)

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
        forms = self.forms[self._index(max(steps_done - 1, 0))]
        return {
            name: float(form.epochs(self.order.drawn_before(index, steps_done)))
            for index, (name, form) in enumerate(forms.items())
        }

    @property
    def passes(self) -> dict[str, float]:
        """Number of passes over each source in the steps of this part alone."""
        steps, found = self.config.span, {}
        forms = self.forms[self._index(steps.start)]
        for index, (name, form) in enumerate(forms.items()):
            first, last = (self.order.drawn_before(index, step) for step in (steps.start, steps.stop))
            found[name] = float(form.epochs(last) - form.epochs(first))
        return found

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

    def pipeline_settings(self, world: "World") -> "PipelineSettings":
        """Returns the settings of this rank's data pipeline. Raises: ConfigError for a run of several parts."""
        from evenpack.data.batches.pipeline import PipelineSettings

        if self.part is None and len(self.parts) > 1:
            raise ConfigError(
                f"the run's data or model are rebuilt from step {self._firsts[1] + 1} on, and this reads packs of "
                "one form: take a run file without those stages (stages=[])"
            )
        return PipelineSettings(
            seed=self.config.run.seed,
            objective=self.objective,
            shape=self.shape,
            ranks=world.size,
            rank=world.rank,
            loader_workers=self.config.training.loader_workers,
            pin_memory=world.device.type == "cuda",
            stages=self.stages if len(self.stages) > 1 else (),
        )


def open_run(config: RunConfig, *, verify: Verification = "all") -> ResolvedRun:
    """Opens the run's prepared data and resolves the run; `verify` is as in `PreparedData.open`.

    Raises: NotPreparedError, DataError; and see `resolve`.
    """
    run = resolve(config, PreparedData.open(config.prepared_dir, config.data, verify=verify))
    for prepared in {one.directory: one for one in run.data_of_parts[1:]}.values():
        if verify != "later" and prepared.directory != run.prepared.directory:
            prepared.verify(verify)
    return run


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
        run_file=config,
        data_of_parts=(prepared, *(_form(one, prepared) for _, one in config.parts[1:])),
    )


def _form(config: RunConfig, first: PreparedData) -> PreparedData:
    """Opens the data of a later part. Raises: DataError unless it has the documents and vocabulary of the first."""
    prepared = PreparedData.open(config.prepared_dir, config.data, verify="later")
    texts = [[_text_of(one, name) for name in first.source_names] for one in (first, prepared)]
    if texts[0] != texts[1] or first.manifest.tokenizer.checksum != prepared.manifest.tokenizer.checksum:
        raise DataError(
            f"{prepared.directory} was prepared from other documents than {first.directory}, or with another "
            "tokenizer: a stage changes the form of packs and not their text. Remove it, and run `evenpack prepare` "
            "with this run file, over the text that the first was prepared from"
        )
    return prepared


def _text_of(prepared: PreparedData, name: str) -> object:
    """Returns what tells the documents of a source from others: its token file, or the files of finished sequences."""
    file = prepared.manifest.files.get(f"sources/{name}/tokens.bin")
    return prepared.manifest.sources[name].inputs if file is None else file.content


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
