"""Builds a prepared run of a few hundred tokens, for tests of the loop on several ranks."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from run_files import changed, prepared, run_config, run_values, text_sources

from evenpack.engine.build import build_at, find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.reporting.metrics import METRICS, read_metrics
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError

__all__ = [
    "MAX_SEQUENCE_LENGTH",
    "are_equal",
    "beside",
    "changed",
    "checkpoints",
    "exact",
    "logged",
    "never",
    "numbered_lines",
    "prepare_run",
    "records",
    "refusal",
    "saved_everything",
    "stop_after",
    "train_all",
]

MAX_SEQUENCE_LENGTH = 32


def never() -> bool:
    """Returns False: no stop is requested."""
    return False


def stop_after(steps: int) -> Callable[[], bool]:
    """Returns what requests a stop once it has been asked so often."""
    asked = iter(range(1, 1000))
    return lambda: next(asked) >= steps


def numbered_lines(count: int = 60) -> list[str]:
    """Returns documents of a few to some fifty bytes, which all differ."""
    return [f"{number} {'pack ' * (number % 11)}{number * number}" for number in range(count)]


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


EXACT = (
    *("step", "loss", "token_loss", "next_sentence_loss", "accuracy", "learning_rate", "gradient_norm", "tokens"),
    *("targets", "slots", "samples", "source_tokens", "source_epochs", "order_hash", "validation", "skipped"),
    "left_out",
)


def exact(config: RunConfig) -> list[list[Any]]:
    """Returns what each record has of the step itself, and not of its time and place."""
    return [[record.get(name) for name in EXACT] for record in records(config)]


def beside(config: RunConfig, name: str, **sections: dict[str, Any]) -> RunConfig:
    """Returns a run over the same prepared data that writes into a folder of its own beside it."""
    return changed(config, run={"output_dir": config.prepared_dir.parent / name}, **sections)


def checkpoints(output_dir: Path) -> list[str]:
    """Returns all names among a run's checkpoints."""
    return sorted(path.name for path in (output_dir / "checkpoints").iterdir())


def refusal(world: World, config: RunConfig) -> str:
    """Returns why a run does not begin, or go on."""
    with pytest.raises(CheckpointError) as caught:
        build_at(find_start(open_run(config), world))
    return str(caught.value)


@contextmanager
def logged(name: str = "evenpack", *, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Yields the messages of this level and above that a logger gets meanwhile."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def saved_everything(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint by its place, weights and optimizer state, whatever the sharding."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((config.run.output_dir / "checkpoints" / f"step_{step:06d}").glob("*.pt")):
        _collect(torch.load(path, weights_only=False), path.name, found)
    return found


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Returns whether two states are the same bit for bit."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[place], other[place]) for place in one)


def _collect(value: Any, place: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[place] = value
    elif isinstance(value, dict):
        for key, inner in value.items():
            _collect(inner, f"{place}.{key}", found)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _collect(inner, f"{place}.{index}", found)
