"""Llama through the commands, with two ranks and LAMB: evaluation, and export to transformers.

How a command starts ranks depends on no family: test_commands.py has that.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from batches import build_batch
from forked_ranks import run_ranks
from run_files import run_values, write_run_file
from scored_tokens import next_token_logits
from small_run import evenpack, metrics, train_on, write_corpus
from tokenizer_folders import FOLDERS
from transformers import AutoTokenizer, LlamaForCausalLM

from evenpack.config import load_run_file
from evenpack.data.tokens.file import TokenFile
from evenpack.engine.config import RunConfig
from evenpack.models.huggingface import from_huggingface

STEPS, VOCABULARY = 4, 403


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares a run and trains it on two ranks."""
    folder = tmp_path_factory.mktemp("llama")
    write_corpus(folder / "words.jsonl", documents=600, first=0)
    tokenizer = FOLDERS["both ends"].write(folder / "tokenizer")
    values = run_values(
        "llama",
        folder,
        data={
            "sources": {"words": {"kind": "jsonl", "path": str(folder / "words.jsonl")}},
            "validation_fraction": 0.1,
            "tokenizer": {"kind": "hub", "name": str(tokenizer), "beginning": "bos"},
        },
        model={"hidden_size": 32, "heads": 4, "key_value_heads": 2, "feed_forward_size": 48},
        training={"steps": STEPS, "evaluate_every_steps": STEPS, "evaluation_packs": 20},
        optimizer={"kind": "lamb", "learning_rate": 0.1},
    )
    path = write_run_file(folder / "run.yaml", values)
    evenpack("prepare", path)
    run_ranks(train_on, 2, load_run_file(path, RunConfig))
    return path


def test_two_ranks_learn_and_evaluate_finds_what_training_has_seen(run_file: Path) -> None:
    records = metrics(run_file.parent / "out")
    losses = [record["loss"] for record in records]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert losses[-1] < losses[0]
    seen = records[-1]["validation"]["words"]
    found = json.loads(evenpack("evaluate", run_file, options=["--json"]).stdout)["sources"]["words"]
    assert found == pytest.approx(seen, rel=1e-5)


def test_transformers_loads_what_is_exported_and_gives_our_logits(run_file: Path) -> None:
    directory = run_file.parent / "exported"
    evenpack("export", run_file, str(directory))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    theirs, loading = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(loading.values())
    assert theirs.config.eos_token_id == tokenizer.eos_token_id != tokenizer.bos_token_id == theirs.config.bos_token_id
    tokens = tokenizer("import a module and return its value")["input_ids"]
    batch, _ = build_batch([[tokens]], "packed", max_sequence_length=len(tokens))
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([tokens])).logits[0]
        found = next_token_logits(from_huggingface(directory).eval(), batch)
    assert expected.std() > 0.01
    trained_on = TokenFile(run_file.parent / "data" / "sources" / "words" / "tokens")
    texts = [json.loads(line)["text"] for line in (run_file.parent / "words.jsonl").read_text().splitlines()]
    offsets = trained_on.document_offsets.tolist()
    for text, begin, end in zip(texts, offsets, offsets[1:], strict=False):
        assert [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] == trained_on.read(begin, end).tolist()
        assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
