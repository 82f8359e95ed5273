"""Lists the kinds of YAML files that evenpack reads, with their schemas."""

from collections.abc import Callable
from typing import Any

from evenpack.config import Section, nearest
from evenpack.errors import ConfigError


def _run() -> type[Section]:
    from evenpack.engine.config import RunConfig

    return RunConfig


def _finetune() -> type[Section]:
    from evenpack.finetuning.config import FinetuneConfig

    return FinetuneConfig


def _equivalence() -> type[Section]:
    from evenpack.studies.equivalence.config import EquivalenceConfig

    return EquivalenceConfig


def _chunking() -> type[Section]:
    from evenpack.studies.chunking.config import ChunkingConfig

    return ChunkingConfig


def _shuffle() -> type[Section]:
    from evenpack.studies.shuffle.config import ShuffleStudyConfig

    return ShuffleStudyConfig


RUN_FILE = "run"

FILES: dict[str, Callable[[], type[Section]]] = {
    RUN_FILE: _run,
    "finetune": _finetune,
    "equivalence": _equivalence,
    "chunking": _chunking,
    "shuffle": _shuffle,
}
"""Functions that import a schema, by the name that `--file` takes."""


def schema_of(file: str) -> type[Section]:
    """Returns the schema of a kind of file. Raises: ConfigError if there is no such kind."""
    if file not in FILES:
        raise ConfigError(f"--file {file}: there is no such kind of file; {nearest(file, tuple(FILES))}")
    return FILES[file]()


def json_schema(file: str) -> dict[str, Any]:
    """Returns the JSON schema of a kind of file, for editors.

    It covers types, limits and kinds; consistency checks between keys are in evenpack only.

    Raises: ConfigError if there is no such kind, or for a model family that cannot be loaded.
    """
    schema = schema_of(file)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema.model_json_schema()}
