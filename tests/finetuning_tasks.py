"""Provides a small encoder with its tokenizer, and tasks that it can learn, for tests of fine-tuning."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from evenpack.config import validate
from evenpack.finetuning.config import FinetuneConfig
from evenpack.models.build import new_model
from evenpack.models.families import config_of
from evenpack.models.huggingface import to_huggingface

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_OTHERS = "the cat sat on mat it was a film and not in town who where ? ."
WORDS = ["good", "bad", *_OTHERS.split()]
POSITIONS = 48


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert"},
    "bert without a pooler": {"kind": "bert", "next_sentence": False},
    "modernbert": {"kind": "modernbert", "feed_forward_size": 48, "window": 4, "global_every_layers": 2},
}


def write_encoder(folder: Path, encoder: str = "bert", *, seed: int = 0) -> Path:
    """Writes a folder of transformers with an encoder of random weights, large enough to distinguish sequences."""
    torch.manual_seed(seed)
    section = {"layers": 2, "hidden_size": 32, "heads": 2, "dropout": 0.0, **ENCODERS[encoder]}
    config = config_of(section["kind"]).model_validate(section)
    model = new_model(config, vocabulary_size=len(SPECIAL + WORDS), max_positions=POSITIONS, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    vocabulary = folder.parent / f"{folder.name}_vocabulary"
    vocabulary.mkdir(parents=True)
    (vocabulary / "vocab.txt").write_text("\n".join(SPECIAL + WORDS) + "\n")
    to_huggingface(model, folder, tokenizer_dir=vocabulary, special_token_id=0)
    return folder


def write_sentences(folder: Path, *, training: int, evaluation: int) -> Path:
    """Writes SST-2's files: a sentence is of class 1 if it contains good, of class 0 if it contains bad."""
    folder.mkdir(exist_ok=True)
    source = random.Random(3)
    for name, rows in (("train.tsv", training), ("dev.tsv", evaluation)):
        lines = ["sentence\tlabel"]
        for _ in range(rows):
            words = source.choices(WORDS[2:-3], k=source.randint(1, 12))
            label = source.randint(0, 1)
            words.insert(source.randint(0, len(words)), WORDS[1 - label])
            lines.append(f"{' '.join(words)} \t{label}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def write_pairs(folder: Path, *, rows: int) -> Path:
    """Writes RTE's files."""
    return _write_pairs(folder, rows, "label", lambda source: source.choice(["entailment", "not_entailment"]), seed=5)


def write_scores(folder: Path, *, rows: int) -> Path:
    """Writes STS-B's files."""
    return _write_pairs(folder, rows, "score", lambda source: f"{source.uniform(0, 5):.3f}", seed=6)


def _write_pairs(folder: Path, rows: int, column: str, draw: Callable[[random.Random], str], *, seed: int) -> Path:
    folder.mkdir(exist_ok=True)
    source = random.Random(seed)
    for name in ("train.tsv", "dev.tsv"):
        lines = [f"index\tsentence1\tsentence2\t{column}"]
        for row in range(rows):
            first, second = (" ".join(source.choices(WORDS[:-3], k=source.randint(2, 9))) for _ in range(2))
            lines.append(f"{row}\t{first}\t{second}\t{draw(source)}")
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def squad_content(questions: int) -> dict[str, Any]:
    """Returns questions in SQuAD 1.1's form: where is the cat? Some contexts need several windows."""
    source = random.Random(8)
    paragraphs = []
    for number in range(questions):
        words = source.choices(WORDS[2:-5], k=source.randint(4, 60))
        place = source.randint(0, len(words))
        words[place:place] = ["in", "town"]
        context = " ".join(words).capitalize() + "."
        start = context.lower().index("in town")
        answer = {"text": context[start : start + 7], "answer_start": start}
        paragraphs.append(
            {"context": context, "qas": [{"id": f"q{number}", "question": "Where?", "answers": [answer]}]}
        )
    return {"version": "1.1", "data": [{"title": "Cats", "paragraphs": paragraphs}]}


def write_questions(folder: Path, *, questions: int) -> Path:
    """Writes SQuAD's files."""
    folder.mkdir(exist_ok=True)
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (folder / name).write_text(json.dumps(squad_content(questions)))
    return folder


def finetune_values(task: str, folder: Path, encoder: Path, output_dir: Path, **training: Any) -> dict[str, Any]:
    """Returns the sections of a run file without dropout."""
    spans = {"max_question_length": 8, "window_stride": 16} if task == "squad" else {}
    return {
        "run": {"name": task, "output_dir": str(output_dir), "seeds": [0]},
        "data": {"task": task, "folder": str(folder), "max_sequence_length": POSITIONS, **spans},
        "training": {"initialize_from": str(encoder), "epochs": 1, "dropout": 0.0, "sequences_per_step": 8, **training},
    }


def finetune_config(*arguments: Any, **training: Any) -> FinetuneConfig:
    """Returns `finetune_values`, validated."""
    return validate(finetune_values(*arguments, **training), FinetuneConfig, origin="test")


def write_finetune_file(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path
