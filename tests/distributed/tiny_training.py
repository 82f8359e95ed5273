"""Builds a prepared run of a few hundred tokens, for tests of the loop on several ranks."""

from pathlib import Path
from typing import Any

from evenpack.engine.config import RunConfig
from evenpack.testing import changed, prepared, run_config, run_values, text_sources

__all__ = ["MAX_SEQUENCE_LENGTH", "changed", "never", "prepare_run"]

MAX_SEQUENCE_LENGTH = 32


def never() -> bool:
    """Returns False: no stop is requested."""
    return False


def prepare_run(folder: Path, sources: dict[str, list[str]], **training: Any) -> RunConfig:
    """Writes and prepares the documents of each source, one per line; nearly every byte is a token."""
    data = {"sources": text_sources(folder, sources)}
    return prepared(run_config(run_values("gpt2", folder, data=data, training=training)))
