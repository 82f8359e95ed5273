"""The commands of docs/bert.md, one after another as a reader would type them, at a small size."""

import json
import random
import re
from pathlib import Path

import pytest
from finetuning_tasks import SPECIAL, WORDS, write_sentences
from repository import ROOT
from small_run import evenpack, evenpack_process, metrics

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


def commands() -> list[list[str]]:
    """Returns the words of each command, without `evenpack`."""
    text = (ROOT / "docs" / "bert.md").read_text(encoding="utf-8")
    found = re.search(r'```\nDATA="(.*?)"\n(.*?)```', text, re.DOTALL)
    assert found is not None
    lines = found.group(2).replace("\\\n", " ").replace("$DATA", found.group(1)).splitlines()
    return [line.split()[1:] for line in lines if line]


def write_inputs(folder: Path) -> None:
    source = random.Random(7)
    sentences = [" ".join(source.choices(WORDS[:-3], k=source.randint(3, 9))) + "." for _ in range(900)]
    documents = [" ".join(sentences[first : first + 9]) for first in range(0, len(sentences), 9)]
    for name in ("wiki", "bert", "glue"):
        (folder / name).mkdir()
    (folder / "wiki" / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "bert" / "vocab.txt").write_text("\n".join(SPECIAL + WORDS) + "\n")
    write_sentences(folder / "glue" / "SST-2", training=64, evaluation=16)


@pytest.mark.slow
def test_a_reader_gets_from_text_to_a_fine_tuned_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = []
    for command, run_file, *words in commands():
        options = [word for word in words if word.startswith(("--", "wikipedia_"))]
        tiny = TINY_TUNING if command == "finetune" else TINY
        written = [word for word in words if word not in options and word.partition("=")[0] not in tiny]
        if command == "train":
            options += ["--cpu-ranks", "1"]
        start = evenpack_process if command == "train" else evenpack
        start(command, ROOT / run_file, *written, *(f"{key}={value}" for key, value in tiny.items()), options=options)
        done.append(command)
    assert (done.count("plan"), done.count("train")) == (1, 2)
    phase1, phase2 = (metrics(tmp_path / "runs" / f"bert_large_phase{phase}") for phase in (1, 2))
    assert [record["step"] for record in phase1] == [record["step"] for record in phase2] == [1, 2]
    assert phase2[0]["loss"] < phase1[0]["loss"], "phase 2 begins with what phase 1 has learned"
    results = json.loads((tmp_path / "runs" / "finetune_sst2" / "results.json").read_text())
    assert results["seeds"][0]["steps"] == 8
