"""The commands of docs/bert.md, one after another as a reader would type them, at a small size."""

import json
import random
from pathlib import Path

import pytest
from documented import type_commands, write_inputs
from finetuning_tasks import WORDS
from small_run import metrics

TINY = {
    "model.preset": "tiny",
    "model.layers": 1,
    "model.hidden_size": 32,
    "model.heads": 2,
    "data.recipe.duplication_factor": 1,
    "data.validation_fraction": 0.1,
    "training.packs_per_step": 4,
    "training.packs_per_micro_batch": 2,
    "training.packing_adjustment": "none",
    "training.steps": 2,
    "training.precision": "fp32",
    "training.compile": False,
    "training.evaluate_every_steps": 2,
    "training.loader_workers": 0,
    "schedule.warmup_steps": 0,
}
TINY_TUNING = {
    "run.seeds": "[0]",
    "training.epochs": 1,
    "training.sequences_per_step": 8,
    "training.learning_rate": 1e-3,
}


@pytest.mark.slow
def test_a_reader_gets_from_text_to_a_fine_tuned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(7)
    sentences = [" ".join(source.choices(WORDS[:-3], k=source.randint(3, 9))) + "." for _ in range(900)]
    documents = [" ".join(sentences[first : first + 9]) for first in range(0, len(sentences), 9)]
    write_inputs(tmp_path, "wiki", documents)
    monkeypatch.chdir(tmp_path)
    done = type_commands("bert.md", TINY, tuning=TINY_TUNING)
    assert (done.count("plan"), done.count("train")) == (1, 2)
    phase1, phase2 = (metrics(tmp_path / "runs" / f"bert_large_phase{phase}") for phase in (1, 2))
    assert [record["step"] for record in phase1] == [record["step"] for record in phase2] == [1, 2]
    assert phase2[0]["loss"] < phase1[0]["loss"], "phase 2 begins with what phase 1 has learned"
    results = json.loads((tmp_path / "runs" / "finetune_sst2" / "results.json").read_text())
    assert results["seeds"][0]["steps"] == 8
