"""A prepared run of a few hundred tokens, for tests of the loop on several ranks."""

from pathlib import Path
from typing import Any

from evenpack.config import validate
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig

MAX_SEQUENCE_LENGTH = 32


def never() -> bool:
    """Nobody asks for a stop."""
    return False


def prepare_run(folder: Path, sources: dict[str, list[str]], **training: Any) -> RunConfig:
    """Writes and prepares the documents of each source, one a line; nearly every byte is a token."""
    for name, documents in sources.items():
        (folder / f"{name}.txt").write_text("\n".join(documents), encoding="utf-8")
    values = {
        "run": {"name": "tiny", "output_dir": folder / "out", "seed": 3},
        "data": {
            "prepared_dir": folder / "data",
            "sources": {
                name: {"kind": "text", "path": folder / f"{name}.txt", "document_separator": "line"} for name in sources
            },
            "validation_fraction": 0.0,
            "tokenizer": {"kind": "train", "vocabulary_size": 260},
            "recipe": {"kind": "documents", "max_sequence_length": MAX_SEQUENCE_LENGTH},
            "pack_length": MAX_SEQUENCE_LENGTH,
        },
        "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32, "heads": 2},
        "training": {
            "packs_per_step": 8,
            "packs_per_micro_batch": 2,
            "steps": 6,
            "evaluate_every_steps": None,
            "checkpoint_every_steps": None,
            "precision": "fp32",
            "loader_workers": 0,
            **training,
        },
        "optimizer": {"learning_rate": 3e-3},
    }
    config = validate(values, RunConfig, origin="test")
    prepare(config.data, config.prepared_dir)
    return config


def changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """The same run with some values changed, section by section."""
    values = config.model_dump()
    for name, section in sections.items():
        values[name] |= section
    return validate(values, RunConfig, origin="test")
