"""Builds a prepared run of a few hundred tokens, for tests of the loop on several ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.testing import changed, prepared, run_config, run_values, text_sources

__all__ = ["MAX_SEQUENCE_LENGTH", "changed", "never", "prepare_run", "records", "train_all"]

MAX_SEQUENCE_LENGTH = 32


def never() -> bool:
    """Returns False: no stop is requested."""
    return False


def prepare_run(folder: Path, sources: dict[str, list[str]], **training: Any) -> RunConfig:
    """Writes and prepares the documents of each source, one per line; nearly every byte is a token."""
    data = {"sources": text_sources(folder, sources)}
    return prepared(run_config(run_values("gpt2", folder, data=data, training=training)))


def train_all(world: World, configs: Iterable[RunConfig]) -> None:
    """Trains one run after another."""
    for config in configs:
        train_in(world, config, stop_requested=never)


def records(config: RunConfig) -> list[dict[str, Any]]:
    """Returns the records of a run, one for each step."""
    return read_metrics(config.run.output_dir / METRICS)
