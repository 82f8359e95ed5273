"""A file of text as the data on which a run's model is evaluated, by the tokenizer and recipe of the run."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenpack.data.config import DataConfig, SentencePairsRecipe
from evenpack.data.prepared import PreparedData
from evenpack.data.shuffle.config import PermutationShuffle
from evenpack.data.sources.config import ArrowSource, JsonlSource, ParquetSource, Source, TextSource
from evenpack.data.sources.json_lines import JSONL_SUFFIXES
from evenpack.data.sources.saved_sets import ARROW_SUFFIXES
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.engine.config import RunConfig
from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.errors import ConfigError
from evenpack.launcher.preparing import prepare_run

_SOURCES: dict[tuple[str, ...], JsonlSource | ParquetSource | ArrowSource | TextSource] = {
    JSONL_SUFFIXES: JsonlSource(kind="jsonl"),
    (".parquet",): ParquetSource(kind="parquet"),
    ARROW_SUFFIXES: ArrowSource(kind="arrow"),
    (".txt", ".text", ".md"): TextSource(kind="text"),
}
"""Sources by the endings of their files' names."""


@contextmanager
def run_over_file(config: RunConfig, path: Path) -> Iterator[RunConfig]:
    """Yields the run with all of `path` as its training split, prepared in a folder that is removed afterwards.

    Nothing is held out, every sequence comes once, and the run's own tokenizer encodes the text. How documents are
    read (`text_key`, `document_separator`, `rows`) is said by the run's first source of the same kind, if there is one.

    Raises: ConfigError if the run's sources hold tokens, or if `path` is not a file of text; NotPreparedError if the
    run is not prepared, as its tokenizer is missing then; DataError if the file cannot be read.
    """
    source = _source(config.data, path)
    tokenizer = Tokenizer.load(PreparedData.open(config.prepared_dir, config.data).tokenizer_dir)
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.name.partition(".")[0]) or "file"
    with tempfile.TemporaryDirectory(prefix="evenpack_evaluate_") as folder:
        data = _data(config.data, name, source, Path(folder) / "data")
        run = config.model_copy(update={**_one_step(config), "data": data})
        prepare_run(run, tokenizer=tokenizer)
        yield run


def _source(data: DataConfig, path: Path) -> Source:
    if data.tokenizer.kind == "external" or data.recipe.kind == "masked_pairs":
        raise ConfigError(
            f"--data {path}: the sources of this run hold tokens, and there is no tokenizer for text; prepare other "
            "data by overrides of data.sources and data.prepared_dir, and evaluate that"
        )
    if not path.is_file():
        raise ConfigError(f"--data {path} is {'not a file' if path.exists() else 'not there'}: give a file of text")
    for suffixes, source in _SOURCES.items():
        if path.name.endswith(suffixes):
            alike = [own for own in data.sources.values() if isinstance(own, type(source))]
            values = {"path": path.absolute(), "validation_path": None, "weight": 1, "maximum_epochs": None}
            values |= {"maximum_rows": None}
            return (alike[0] if alike else source).model_copy(update=values)
    known = ", ".join(suffix for suffixes in _SOURCES for suffix in suffixes)
    raise ConfigError(f"--data {path}: the format of a file is recognised by the ending of its name; known: {known}")


def _data(data: DataConfig, name: str, source: Source, directory: Path) -> DataConfig:
    recipe = data.recipe
    if isinstance(recipe, SentencePairsRecipe):
        recipe = recipe.model_copy(update={"duplication_factor": 1})  # validation documents have one pass, too
    return data.model_copy(
        update={
            "prepared_dir": directory,
            "tokens_dir": None,
            "sources": {name: source},
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
