"""Small runs: the sections of a run file, checked, prepared, or written as YAML.

    config = prepared(run_config(run_values("gpt2", tmp_path, training={"steps": 4})))
    outcomes = run_ranks(train_in, 2, config)  # of forked_ranks.py

`run_values` and `pair_run_values` give the sections of a run file that trains in a second; `text_sources` writes the
documents of its sources; `run_config` checks it, `changed` changes values and checks again, `prepared` prepares its
data, and `write_run_file` writes it for the command line. One more kind of small run is one more function over
`run_values`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from evenpack.config import validate, with_values
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig

RunValues = dict[str, dict[str, Any]]
"""The sections of a run file."""


def run_values(kind: str, folder: Path, **sections: Mapping[str, Any]) -> RunValues:
    """Returns a run of single documents that trains in a second or two on the CPU, all of it below `folder`.

    The text is the built-in corpus; `text_sources` replaces it by documents of the test's own. Nothing is held out,
    saved or evaluated during training, and batches are made in the training process.

    Args:
        kind: the model's family; a causal one.
        sections: values that replace these, key by key.
    """
    values: RunValues = {
        "run": {"name": "small", "output_dir": str(folder / "out"), "seed": 3},
        "data": {
            "prepared_dir": str(folder / "data"),
            "sources": {"builtin": {"kind": "builtin"}},
            "validation_fraction": 0.0,
            "tokenizer": {"kind": "train", "vocabulary_size": 260},
            "recipe": {"kind": "documents", "max_sequence_length": 32},
            "pack_length": 32,
        },
        "model": {"kind": kind, "preset": "tiny", "hidden_size": 32, "heads": 2},
        "training": {
            "packs_per_step": 8,
            "packs_per_micro_batch": 2,
            "steps": 6,
            "evaluate_every_steps": None,
            "checkpoint_every_steps": None,
            "precision": "fp32",
            "loader_workers": 0,
        },
        "optimizer": {"learning_rate": 3e-3},
    }
    return _replaced(values, sections)


def pair_run_values(kind: str, folder: Path, **sections: Mapping[str, Any]) -> RunValues:
    """Returns the same over pairs of sentences and word pieces, with LAMB and without dropout.

    Args:
        kind: the model's family; a bidirectional one that predicts masked tokens.
        sections: values that replace these, key by key.
    """
    pairs: RunValues = {
        "data": {
            "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 120},
            "recipe": {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 1},
            "pack_length": 48,
        },
        "model": {"dropout": 0.0},
        "training": {"steps": 4},
        "optimizer": {"kind": "lamb", "learning_rate": 2e-3},
        "schedule": {"kind": "linear", "warmup_steps": 1},
    }
    return _replaced(run_values(kind, folder, **pairs), sections)


def text_sources(folder: Path, documents: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Writes the documents of each source to `folder`, one per line, and returns the section `data.sources`."""
    sources = {}
    for name, texts in documents.items():
        path = folder / f"{name}.txt"
        path.write_text("\n".join(texts), encoding="utf-8")
        sources[name] = {"kind": "text", "path": str(path), "document_separator": "line"}
    return sources


def run_config(values: Mapping[str, Any]) -> RunConfig:
    """Returns the checked run. Raises: ConfigError."""
    return validate(dict(values), RunConfig, origin="the run file")


def changed(config: RunConfig, **sections: Any) -> RunConfig:
    """Returns the same run with some values changed, key by key. Raises: ConfigError."""
    return with_values(config, sections, origin="the run file")


def prepared(config: RunConfig) -> RunConfig:
    """Prepares the run's data, if needed, and returns the run. Raises: DataError."""
    for data in config.forms:
        prepare(data, data.prepared_dir or config.prepared_dir)
    return config


def write_run_file(path: Path, values: Mapping[str, Any]) -> Path:
    """Writes the sections as YAML for the command line, and returns `path`."""
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return path


def _replaced(values: RunValues, sections: Mapping[str, Mapping[str, Any]]) -> RunValues:
    return values | {name: {**(values.get(name) or {}), **section} for name, section in sections.items()}
