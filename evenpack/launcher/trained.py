"""A checkpoint of a run in one process: its weights in a model, evaluated on held-out or other text, or exported."""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import RenderableType
from rich.table import Table

from evenpack.console import Report, percent, table
from evenpack.data.config import DataConfig
from evenpack.data.manifest import Manifest
from evenpack.data.prepared import PreparedData, Split, Verification
from evenpack.data.recipes import SentencePairsRecipe
from evenpack.data.shuffle.config import PermutationShuffle
from evenpack.data.sources.config import Source
from evenpack.engine.build import build_model
from evenpack.engine.checkpoints.continuation import require_checkpoint
from evenpack.engine.checkpoints.files import CHECKPOINTS, Checkpoint
from evenpack.engine.checkpoints.loading import newest_whole, whole_at
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.checkpoints.weights import require_fitting, require_same_network, saved_model_section, shapes_of
from evenpack.engine.config import LENGTHS, RunConfig
from evenpack.engine.evaluate import SourceEvaluation, evaluate_model
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.resolving.resolve import ResolvedRun, open_run
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError, DataError
from evenpack.files import require_new_folder
from evenpack.launcher.preparing import FoundText, find_text, prepare_run
from evenpack.launcher.processes.devices import choose_accelerator
from evenpack.losses import losses_logged_apart
from evenpack.models.build import Model
from evenpack.models.huggingface import mapping_of, to_huggingface

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint of its run."""

    model: Model
    checkpoint: Checkpoint
    run: ResolvedRun
    world: World
    """The world of this single process."""

    @property
    def special_token_id(self) -> int:
        """Returns the special token's id for transformers' configuration of such a model.

        Raises: ConfigError if transformers has no such model; DataError if its configuration names the padding token,
        and the vocabulary has none.
        """
        is_padding = mapping_of(self.model.config).special_token == "padding"
        return self.run.prepared.tokenizer.padding_id if is_padding else self.run.prepared.end_of_text_id


def load_trained_model(
    config: RunConfig, device: torch.device, *, step: int | None = None, verify: Verification = "all"
) -> TrainedModel:
    """Opens the run's data and loads its newest complete checkpoint, or that after `step` steps.

    The data may differ from the training data, for example in the recipe, if the tokenizer is the same; `verify` is as
    in `PreparedData.open`.

    Raises: NotPreparedError; DataError, also for data of another tokenizer; CheckpointError if there is no checkpoint,
    or of another model.
    """
    require_checkpoint(config)
    world = World(rank=0, size=1, local_rank=0, device=device)
    checkpoint = _checkpoint(config, step, world)
    config = _as_trained(config, checkpoint.step)
    training = config.training.model_copy(update={"cost_model": None})  # nothing is balanced, and it may be gone
    run = open_run(config.model_copy(update={"training": training}), verify=verify)
    if checkpoint.state.fingerprint != run.fingerprint(checkpoint.step):
        _compare_data(checkpoint, run)
    model = build_model(run, torch.device("meta"))
    weights = saved_tensors(checkpoint).weights()
    remedy = "The run file with which it was trained is in its manifest.json"
    require_fitting(shapes_of(model.state_dict()), shapes_of(weights), origin=str(checkpoint.path), remedy=remedy)
    require_same_network(config.model, saved_model_section(checkpoint), origin=str(checkpoint.path), remedy=remedy)
    model.load_state_dict(weights, assign=True)  # they are the model's, not copied into it
    model.requires_grad_().to(device)
    log.info("loaded %s", checkpoint.path)
    return TrainedModel(model=model.eval(), checkpoint=checkpoint, run=run, world=world)


def _checkpoint(config: RunConfig, step: int | None, world: World) -> Checkpoint:
    """Returns the checkpoint of a run that has one. Raises: CheckpointError."""
    directory = config.run.output_dir / CHECKPOINTS
    checkpoint = newest_whole(directory, world) if step is None else whole_at(directory, step, world)
    assert checkpoint is not None, "the run has one"
    return checkpoint


def _as_trained(config: RunConfig, step: int) -> RunConfig:
    """Returns the run with the data and model of the part that ended with a step, or did it."""
    parts = config.parts
    return config if len(parts) == 1 else [part for first, part in parts if first < max(step, 1)][-1]


def _compare_data(checkpoint: Checkpoint, run: ResolvedRun) -> None:
    """Warns if held-out documents may be among those on which the checkpoint was trained.

    Raises: DataError naming the difference between the two tokenizers.
    """
    place = checkpoint.state.config["data"]["prepared_dir"]
    trained_on = run.config.run.output_dir / "data" if place is None else Path(place)
    here = run.prepared.manifest
    try:
        there = Manifest.read(trained_on).of_sources(checkpoint.state.config["data"]["sources"])
    except DataError as error:
        log.warning(
            "%s was trained on other data than %s, with whose tokenizer and held-out documents these cannot be "
            "compared: %s",
            checkpoint.path,
            run.prepared.directory,
            error,
        )
        return
    for key in ("vocabulary_size", "end_of_text_id", "checksum"):
        before, now = getattr(there.tokenizer, key), getattr(here.tokenizer, key)
        if before != now:
            raise DataError(
                f"{checkpoint.path} was trained with another tokenizer than {run.prepared.directory} has: "
                f"its {key} is {before}, here it is {now}. Evaluate data that was prepared as {trained_on} was"
            )
    if any(there.data[key] != here.data[key] for key in ("sources", "validation_fraction")):
        log.warning(
            "%s was trained on other data: it may have seen some of the documents that are evaluated here",
            checkpoint.path,
        )


@dataclass(frozen=True, kw_only=True)
class RunEvaluation:
    """The evaluation of a checkpoint on the held-out documents."""

    checkpoint: Path
    step: int
    """Optimizer updates after which it was saved."""
    data: Path | None
    """The file, folder or pattern that it was evaluated on; None: the held-out documents of the run's sources."""
    sources: dict[str, SourceEvaluation | None]
    """Every source, or the sources of the files, by name; None: nothing is held out."""

    def to_json(self) -> dict[str, Any]:
        """Returns the values for JSON; data is left out where there is none."""
        sources = {name: None if found is None else found.to_json() for name, found in self.sources.items()}
        data = {} if self.data is None else {"data": self.data}
        return {"checkpoint": self.checkpoint, "step": self.step, **data, "sources": sources}


def evaluate_run(config: RunConfig, *, step: int | None = None, data: Path | None = None) -> RunEvaluation:
    """Evaluates the run's newest complete checkpoint, or that after `step` steps, in this process.

    It takes the GPU if there is one. `data` is a file, folder or pattern of text, which replaces the held-out
    documents.

    Raises: as `load_trained_model`; and see `run_over_text`.
    """
    choose_accelerator()
    if len(config.parts) > 1:
        require_checkpoint(config)
        step = _checkpoint(config, step, World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))).step
        config = _as_trained(config, step)
    if data is None:
        return _evaluate(config, step=step, split="validation", data=None)
    with run_over_text(config, data) as over_file:
        return _evaluate(over_file, step=step, split="train", data=data)


def _evaluate(config: RunConfig, *, step: int | None, split: Split, data: Path | None) -> RunEvaluation:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained_model(config, device, step=step)
    evaluations = evaluate_model(trained.model, trained.run, trained.world, split=split)
    if config.data.verify_in_training:
        trained.run.prepared.verify()  # which reads again only if a file has changed meanwhile
    return RunEvaluation(
        checkpoint=trained.checkpoint.path,
        step=trained.checkpoint.step,
        data=data,
        sources={name: evaluations.get(name) for name in trained.run.prepared.source_names},
    )


def describe_evaluation(found: RunEvaluation) -> Report:
    """Returns the report of an evaluation."""
    value = found.to_json()
    place = "" if found.data is None else f", on {found.data}"
    shown: list[RenderableType] = [evaluation_table(value["sources"], title=f"After step {found.step:,}{place}")]
    return Report(value=value, shown=shown)


@contextmanager
def run_over_text(config: RunConfig, path: Path) -> Iterator[RunConfig]:
    """Yields the run with all of `path` as its training split, prepared in a folder that is removed afterwards.

    `path` is a file, a folder or a pattern; a folder with files of several kinds gives a source for each. Nothing is
    held out, every sequence comes once, and the run's own tokenizer encodes the text. How documents are read
    (`text_key`, `document_separator`, `rows`) is said by the run's first source of the same kind, if there is one.

    Raises: ConfigError if the run's sources hold tokens, or if `path` leads to no text; NotPreparedError if the run is
    not prepared, as its tokenizer is missing then; DataError if the files cannot be read.
    """
    sources = _sources(config.data, path)
    tokenizer = PreparedData.open(config.prepared_dir, config.data, verify="tokenizer").tokenizer
    with tempfile.TemporaryDirectory(prefix="evenpack_evaluate_") as folder:
        data = _data(config.data, sources, Path(folder) / "data")
        run = config.model_copy(update={**_one_step(config), "data": data})
        prepare_run(run, tokenizer=tokenizer)
        yield run


def _sources(data: DataConfig, path: Path) -> dict[str, Source]:
    if data.tokenizer.kind == "external" or data.recipe.kind == "masked_pairs":
        raise ConfigError(
            f"--data {path}: the sources of this run hold tokens, and there is no tokenizer for text; prepare other "
            "data by overrides of data.sources and data.prepared_dir, and evaluate that"
        )
    return {text.name: _source(data, text) for text in find_text([str(path)])}


def _source(data: DataConfig, text: FoundText) -> Source:
    default = TypeAdapter[Source](Source).validate_python({"kind": text.kind})
    own = next((source for source in data.sources.values() if source.kind == text.kind), default)
    paths = tuple(Path(path).absolute() for path in ((text.path,) if isinstance(text.path, str) else text.path))
    values: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths, "validation_path": None}
    values |= {"weight": 1, "maximum_rows": None}
    return own.model_copy(update=values)


def _data(data: DataConfig, sources: dict[str, Source], directory: Path) -> DataConfig:
    recipe = data.recipe
    if isinstance(recipe, SentencePairsRecipe):
        recipe = recipe.model_copy(update={"duplication_factor": 1})  # validation documents have one pass, too
    return data.model_copy(
        update={
            "prepared_dir": directory,
            "tokens_dir": None,
            "sources": sources,
            "validation_fraction": 0.0,
            "recipe": recipe,
            "shuffle": PermutationShuffle(),
        }
    )


def _one_step(config: RunConfig) -> dict[str, object]:
    """Returns sections of a run of one step: a file may hold less than a step, or an epoch, of the training."""
    training = config.training
    lengths = dict.fromkeys((*LENGTHS, "stop_after_steps"))
    step = {f"{training.batching}_per_step": training.items_per_micro_batch, "tokens_per_step": None, "steps": 1}
    off = {
        "packing_adjustment": "none",
        "skip_steps": (),
        "target_accuracy": None,
        "evaluation_packs": None,
    }
    changed = training.model_copy(update={**lengths, **step, **off})
    return {"training": changed, "schedule": ScheduleSection(), "mlperf": None, "stages": ()}


def evaluation_table(evaluations: Mapping[str, Mapping[str, Any] | None], *, title: str) -> Table:
    """Returns `evaluations_to_json` as a table."""
    rows = []
    for source, found in evaluations.items():
        values = found or {}
        rows.append(
            {
                "source": source,
                "loss": f"{values['loss']:.4f}" if found else None,
                "perplexity": f"{values['perplexity']:.2f}" if found else None,
                "accuracy": percent(values["accuracy"]) if found else None,
                **_losses_apart(values),
                "targets": values.get("targets"),
            }
        )
    return table(rows, title=title)


def _losses_apart(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the columns of a model's losses besides the main one."""
    columns = {}
    for loss in losses_logged_apart(values):
        columns[loss.title] = f"{values[loss.metric]:.4f}"
        if loss.accuracy is not None and loss.accuracy in values:
            columns[f"{loss.title.removesuffix(' loss')} accuracy"] = percent(values[loss.accuracy])
    return columns


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint that transformers loads."""

    directory: Path
    step: int
    """Optimizer updates after which it was saved."""
    tokenizer: bool
    """Whether the tokenizer was written too; False if the sources hold tokens."""


def export_run(config: RunConfig, directory: Path, *, step: int | None = None) -> Export:
    """Writes the run's newest complete checkpoint, or that after `step` steps, into a new folder.

    Raises: as `load_trained_model`; ConfigError if transformers has no such model, or if `directory` is not empty.
    """
    require_new_folder(directory)  # before the weights are read, which takes minutes
    choose_accelerator()
    trained = load_trained_model(config, torch.device("cpu"), step=step, verify="tokenizer")
    prepared = trained.run.prepared
    tokenizer = prepared.tokenizer if prepared.tokenizer_dir.is_dir() else None
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save(Path(folder))  # an earlier version may have prepared it with a template of its own
        to_huggingface(
            trained.model,
            directory,
            tokenizer_dir=None if tokenizer is None else Path(folder),
            special_token_id=trained.special_token_id,
            beginning_id=None if tokenizer is None else tokenizer.beginning_id,
        )
    return Export(directory=directory, step=trained.checkpoint.step, tokenizer=tokenizer is not None)
