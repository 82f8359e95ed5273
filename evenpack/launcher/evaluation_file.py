"""Files of text as the data on which a run's model is evaluated, by the tokenizer and recipe of the run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenpack.data.config import DataConfig, SentencePairsRecipe
from evenpack.data.prepared import PreparedData
from evenpack.data.shuffle.config import PermutationShuffle
from evenpack.data.sources.config import ArrowSource, JsonlSource, ParquetSource, Source, TextSource
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.config import RunConfig
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.errors import ConfigError
from evenpack.launcher.preparing import prepare_run
from evenpack.launcher.text_sources import FoundText, find_text

_SOURCES: dict[str, JsonlSource | ParquetSource | ArrowSource | TextSource] = {
    source.kind: source
    for source in (
        JsonlSource(kind="jsonl"),
        ParquetSource(kind="parquet"),
        ArrowSource(kind="arrow"),
        TextSource(kind="text"),
    )
}


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
    tokenizer = Tokenizer.load(PreparedData.open(config.prepared_dir, config.data).tokenizer_dir)
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
    return {text.name: _source(data, text) for text in find_text([str(path)], option="--data")}


def _source(data: DataConfig, text: FoundText) -> Source:
    own = next((source for source in data.sources.values() if source.kind == text.kind), _SOURCES[text.kind])
    paths = tuple(Path(path).absolute() for path in ((text.path,) if isinstance(text.path, str) else text.path))
    values: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths, "validation_path": None}
    values |= {"weight": 1, "maximum_epochs": None, "maximum_rows": None}
    return own.model_copy(update=values | ({"split": text.split} if text.kind == "arrow" else {}))


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
            "mixture_schedule": (),
        }
    )


def _one_step(config: RunConfig) -> dict[str, object]:
    """Returns sections of a run of one step: a file may hold less than a step, or an epoch, of the training."""
    training = config.training
    lengths = dict.fromkeys(("epochs", "max_samples", "tokens", "chinchilla_ratio", "stop_after_steps"))
    step = {f"{training.batching}_per_step": training.items_per_micro_batch, "tokens_per_step": None, "steps": 1}
    off = {
        "packing_adjustment": "none",
        "skip_steps": (),
        "validation_weights": None,
        "target_accuracy": None,
        "evaluation_packs": None,
    }
    changed = training.model_copy(update={**lengths, **step, **off})
    return {"training": changed, "schedule": ScheduleSection(), "mlperf": None}
