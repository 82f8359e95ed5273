"""A Llama whose documents begin with a token: what is exported knows it, and makes of text what training saw."""

import json
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from run_files import run_values, write_run_file
from small_run import evenpack, train_on, write_corpus
from tokenizer_folders import FOLDERS
from transformers import AutoConfig, AutoTokenizer

from evenpack.config import load_run_file
from evenpack.data.tokens.file import TokenFile
from evenpack.engine.config import RunConfig


@pytest.mark.slow
def test_the_exported_tokenizer_and_model_begin_documents_as_training_did(tmp_path: Path) -> None:
    write_corpus(tmp_path / "words.jsonl", documents=200, first=0)
    tokenizer_dir = FOLDERS["both ends"].write(tmp_path / "tokenizer")
    values = run_values(
        "llama",
        tmp_path,
        data={
            "sources": {"words": {"kind": "jsonl", "path": str(tmp_path / "words.jsonl")}},
            "tokenizer": {"kind": "hub", "name": str(tokenizer_dir), "beginning": "bos"},
        },
        training={"steps": 1},
    )
    run_file, directory = write_run_file(tmp_path / "run.yaml", values), tmp_path / "exported"
    evenpack("prepare", run_file)
    run_ranks(train_on, 1, load_run_file(run_file, RunConfig))
    evenpack("export", run_file, str(directory))
    tokenizer, config = AutoTokenizer.from_pretrained(directory), AutoConfig.from_pretrained(directory)
    assert config.eos_token_id == tokenizer.eos_token_id != tokenizer.bos_token_id == config.bos_token_id
    trained_on = TokenFile(tmp_path / "data" / "sources" / "words" / "tokens")
    texts = [json.loads(line)["text"] for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    offsets = trained_on.document_offsets.tolist()
    assert len(offsets) > 100
    for text, begin, end in zip(texts, offsets, offsets[1:], strict=False):
        assert [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] == trained_on.read(begin, end).tolist()
        assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 1
