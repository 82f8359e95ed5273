"""A small prepared GPT-2 run, for studies of time in the test's own process."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenpack.config import validate
from evenpack.data.prepare.prepare import prepare
from evenpack.engine.config import RunConfig
from evenpack.engine.distributed import World, joined_world

PACK_LENGTH = 64


def tiny_gpt2_run(folder: Path) -> RunConfig:
    """Sequences of all lengths up to a pack; two micro-batches a step."""
    source = random.Random(4)
    documents = ["".join(source.choices("abcdefgh", k=source.randint(2, 60))) for _ in range(600)]
    (folder / "one.txt").write_text("\n".join(documents), encoding="utf-8")
    values = {
        "run": {"name": "tiny", "output_dir": folder / "out", "seed": 3},
        "data": {
            "prepared_dir": folder / "data",
            "sources": {"one": {"kind": "text", "path": folder / "one.txt", "document_separator": "line"}},
            "validation_fraction": 0.0,
            "tokenizer": {"kind": "train", "vocabulary_size": 260},
            "recipe": {"kind": "documents", "max_sequence_length": PACK_LENGTH},
            "pack_length": PACK_LENGTH,
        },
        "model": {"kind": "gpt2", "preset": "tiny", "hidden_size": 32, "heads": 2},
        "training": {
            "packs_per_step": 8,
            "packs_per_micro_batch": 4,
            "steps": 6,
            "precision": "fp32",
            "loader_workers": 0,
        },
        "optimizer": {"learning_rate": 1e-3},
    }
    config = validate(values, RunConfig, origin="test")
    prepare(config.data, config.prepared_dir)
    return config


@contextmanager
def lone_world() -> Iterator[World]:
    """One rank on the CPU; the environment is as it was afterwards."""
    before = dict(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        with joined_world() as alone:
            yield alone
    finally:
        os.environ.clear()
        os.environ.update(before)
