"""The shipped run file whose sequences become longer, with fewer steps: commands know what each step was made of."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from finetuning_tasks import WORDS
from repository import ROOT
from small_run import evenpack, evenpack_process, metrics
from transformers import ModernBertForMaskedLM

SHORTER = 500
"""Divides its steps."""
BORDER = 4
"""The last step before its sequences become longer, then."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    source = random.Random(7)
    texts = [" ".join(source.choices(WORDS, k=source.randint(3, 700))) for _ in range(100)]
    (folder / "wiki.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    values = yaml.safe_load((ROOT / "configs" / "modernbert_mini_stages.yaml").read_text(encoding="utf-8"))
    for section, key in (("training", "steps"), ("schedule", "warmup_steps"), ("schedule", "decay_steps")):
        values[section][key] //= SHORTER
    for stage in values["stages"]:
        stage["step"] = (stage["step"] - 1) // SHORTER + 1
    values["training"] |= {"evaluate_every_steps": 2, "evaluation_packs": 4, "loader_workers": 0}
    values["training"] |= {"checkpoint_every_steps": None, "keep_checkpoints": 9}
    values["model"] |= {"hidden_size": 32, "feed_forward_size": 48}
    values["data"]["sources"]["wiki"]["path"] = str(folder / "wiki.jsonl")
    values["data"] |= {"validation_fraction": 0.1, "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 80}}
    values["run"]["output_dir"] = str(folder / "run")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def answer(command: str, run_file: Path, *options: object) -> Mapping[str, Any]:
    done = evenpack(command, run_file, options=[*map(str, options), "--json"])
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_its_commands_know_the_form_of_each_step(run_file: Path, tmp_path: Path) -> None:
    before = answer("plan", run_file, "--ranks", 1, "--corpus-tokens", 100_000, "--corpus-documents", 100)
    assert [before["cost"]["steps"], *(part["cost"]["steps"] for part in before["later_parts"])] == [BORDER, 2]
    prepared = answer("prepare", run_file)
    (longer,) = prepared["other_forms"]
    assert prepared["splits"][0]["documents"] == longer["splits"][0]["documents"]
    assert longer["directory"] == f"{prepared['directory']}_512_512"
    evenpack_process("train", run_file, options=["--cpu-ranks", "1"])
    records = metrics(run_file.parent / "run")
    assert [record["slots"] for record in records] == [4096] * 6
    assert not any("left_out" in record for record in records)
    plan = answer("plan", run_file, "--ranks", 1)
    assert plan["later_parts"][0]["step"]["items"] == 8
    assert answer("verify", run_file)["other_forms"][0]["damaged"] == []
    for step, base in ((BORDER, 10_000.0), (BORDER + 2, 160_000.0)):
        content = answer("where", run_file, "--step", step)
        assert content["order_hash"] == records[step - 1]["order_hash"]
        packs: Counter[int] = Counter()
        for one in content["sequences"]:
            packs[one["pack"]] += one["tokens"]
        assert (max(packs.values()) > 128) == (step > BORDER)
        found = answer("evaluate", run_file, "--checkpoint", step)["sources"]["wiki"]
        assert found["loss"] == pytest.approx(records[step - 1]["validation"]["wiki"]["loss"], rel=1e-5)
        evenpack("export", run_file, str(tmp_path / str(step)), options=["--checkpoint", str(step)])
        model = ModernBertForMaskedLM.from_pretrained(tmp_path / str(step))
        assert model.config.rope_parameters["full_attention"]["rope_theta"] == base
