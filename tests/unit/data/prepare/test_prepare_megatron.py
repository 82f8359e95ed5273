"""Existing token files, as Megatron-LM and DeepSpeed write them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import contents, data_config

from evenpack.data.config import DataConfig
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError


def megatron(prefix: Path, *, end: int = 9, last: int = 9, vocabulary_size: int = 10) -> Path:
    """Writes sixty documents of 2 to 21 tokens below 9, all but the last ended by `end`."""
    random = np.random.default_rng(5)
    lengths = random.integers(2, 22, 60)
    tokens = random.integers(0, 9, lengths.sum())
    tokens[np.cumsum(lengths) - 1] = end
    tokens[-1] = last
    with TokenFileWriter(prefix, vocabulary_size=vocabulary_size) as writer:
        writer.append(tokens, lengths, {"document_hashes": np.arange(60, dtype=np.uint64)})
        writer.finish()
    return prefix


def megatron_config(prefix: Path | None, vocabulary_size: int = 10, **source: Any) -> DataConfig:
    return data_config(
        {"ready": {"kind": "megatron", "path": prefix, **source}},
        tokenizer={"kind": "external", "vocabulary_size": vocabulary_size, "end_of_text_id": 9},
    )


def test_an_existing_token_file_is_used_in_its_place(tmp_path: Path) -> None:
    config = megatron_config(megatron(tmp_path / "ready"))
    before = contents(tmp_path)
    manifest = prepare(config, tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.bin"))
    assert not (tmp_path / "data" / "tokenizer").exists()
    assert manifest.sources["ready"].documents == 60
    prepared = PreparedData.open(tmp_path / "data", config)
    assert (prepared.vocabulary_size, prepared.end_of_text_id) == (10, 9)
    ids = np.arange(prepared.view("ready", "train").count)
    tokens = prepared.view("ready", "train").read(ids).tokens
    assert (tokens == 9).sum() == len(ids) > 40
    assert {name: content for name, content in contents(tmp_path).items() if not name.startswith("data/")} == before
    with (tmp_path / "ready.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match=r"ready\.bin has [\d,]+ bytes, expected [\d,]+"):
        PreparedData.open(tmp_path / "data", config)


def test_equal_existing_documents_stay_on_one_side(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "ready", vocabulary_size=10) as writer:
        tokens = np.tile(np.concatenate([np.array([n % 9, n // 9, 9]) for n in range(80)]), 2)
        writer.append(tokens, np.full(160, 3), {"document_hashes": np.arange(160, dtype=np.uint64)})
        writer.finish()
    prepare(megatron_config(tmp_path / "ready").model_copy(update={"validation_fraction": 0.5}), tmp_path / "data")
    validation = set(np.load(tmp_path / "data" / "sources" / "ready" / "validation" / "documents.npy").tolist())
    assert 20 < len(validation) < 140
    assert {(n + 80) % 160 for n in validation} == validation


def test_wrong_existing_token_files_are_refused(tmp_path: Path) -> None:
    def refusal(config: DataConfig) -> str:
        with pytest.raises(DataError) as caught:
            prepare(config, tmp_path / "data")
        assert not (tmp_path / "data").exists()
        return str(caught.value)

    good = megatron(tmp_path / "good")
    unended = megatron(tmp_path / "unended", last=3)
    assert "data.sources.ready.path=PREFIX" in refusal(megatron_config(None))
    assert "without '.bin' or '.idx'" in refusal(megatron_config(tmp_path / "good.bin"))
    assert "1 of 60 documents" in refusal(megatron_config(unended))
    assert "document 59 first" in refusal(megatron_config(unended))
    too_large = megatron_config(megatron(tmp_path / "large", last=500, vocabulary_size=600), require_end_of_text=False)
    assert "holds token id 500, but the vocabulary has 10 entries" in refusal(too_large)
    assert "end_of_text_id (9) is outside the vocabulary of 5" in refusal(megatron_config(good, 5))
    with good.with_suffix(".bin").open("r+b") as file:
        file.truncate(100)
    assert "truncated" in refusal(megatron_config(good))
    prepare(megatron_config(unended, require_end_of_text=False), tmp_path / "data")
