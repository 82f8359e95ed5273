"""The commands of docs/modernbert.md at a small size: transformers gives the logits of what they leave."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import type_commands, write_inputs
from finetuning_tasks import WORDS
from masked_batches import MaskedPair, build_masked_batch
from scored_tokens import masked_token_logits
from small_run import metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer, ModernBertForMaskedLM

from evenpack.models.huggingface import from_huggingface

TINY: dict[str, Any] = {
    "model.preset": "tiny",
    "model.hidden_size": 32,
    "model.feed_forward_size": 48,
    "model.window": 3,
    "data.recipe.max_sequence_length": 48,
    "data.pack_length": 48,
    "data.validation_fraction": 0.1,
    "masking.max_predictions": 15,
    "training.packs_per_step": 4,
    "training.packs_per_micro_batch": 2,
    "training.steps": 6,
    "training.precision": "fp32",
    "training.compile": False,
    "training.evaluate_every_steps": 6,
    "training.evaluation_packs": 4,
    "training.loader_workers": 0,
    "attention.on_slow_backend": "warn",
    "schedule.warmup_steps": 0,
}
TINY_TUNING: dict[str, Any] = {
    "run.seeds": "[0]",
    "data.max_sequence_length": 48,
    "training.epochs": 1,
    "training.sequences_per_step": 8,
    "training.learning_rate": 1e-3,
}
TEXT = "good film and a bad cat sat on the mat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Types the commands."""
    folder = tmp_path_factory.mktemp("modernbert")
    source = random.Random(7)
    documents = [" ".join(source.choices(WORDS, k=source.randint(3, 60))) for _ in range(300)]
    write_inputs(folder, "web", documents)
    with contextlib.chdir(folder):
        done = type_commands("modernbert.md", TINY, tuning=TINY_TUNING)
    assert done == ["prepare", "train", "export", "finetune"]
    return folder


@pytest.mark.slow
def test_the_run_learns(folder: Path) -> None:
    records = metrics(folder / "runs" / "modernbert_base")
    assert len(records) == TINY["training.steps"]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["validation"]["web"]["targets"] > 0


@pytest.mark.slow
def test_transformers_gives_the_logits_of_the_exported_model(folder: Path) -> None:
    directory = folder / "modernbert_export"
    theirs, loading = ModernBertForMaskedLM.from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values()), loading
    encoded = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt")
    assert set(encoded) == {"input_ids", "attention_mask"}
    tokens = encoded["input_ids"][0].tolist()
    assert len(tokens) > 8
    pair = MaskedPair(
        tokens=tokens, token_types=[0] * len(tokens), masked=dict(enumerate(tokens)), next_sentence_label=0
    )
    batch, _ = build_masked_batch([[pair]], "packed", max_sequence_length=len(tokens))
    with torch.no_grad():
        expected = theirs.eval()(**encoded).logits[0]
        found = masked_token_logits(from_huggingface(directory).eval(), batch)[: len(tokens)]
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_fine_tuned_model_is_kept_for_transformers(folder: Path) -> None:
    results = json.loads((folder / "runs" / "finetune_sst2" / "results.json").read_text())
    assert results["seeds"][0]["steps"] == 8
    directory = folder / "runs" / "finetune_sst2" / "seed_0"
    model, loading = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(model).__name__ == "ModernBertForSequenceClassification"
    encoded = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt")
    assert model.eval()(**encoded).logits.shape == (1, 2)
