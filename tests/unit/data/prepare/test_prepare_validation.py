"""Documents that a source's section names for validation: files of their own, or a split on the hub."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import Recorder, data_config, recorded, sentences, write_jsonl

from evenpack.data.config import DataConfig
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sources.kinds import open_corpus
from evenpack.data.tokenizers.config import TrainedTokenizer
from evenpack.data.tokenizers.loading import train_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError

TRAINING, VALIDATION = sentences(60, seed=1), sentences(20, seed=2)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "training.jsonl", TRAINING)
    write_jsonl(tmp_path / "validation.jsonl", VALIDATION)
    return tmp_path


def config_of(folder: Path, *, source: dict[str, Any] | None = None, **changes: Any) -> DataConfig:
    section = {"kind": "jsonl", "path": folder / "training.jsonl", "validation_path": folder / "validation.jsonl"}
    return data_config({"wiki": {**section, **(source or {})}}, **changes)


def texts_of_split(directory: Path, split: str) -> list[str]:
    """Returns the texts of a split's documents, decoded."""
    source = directory / "sources" / "wiki"
    token_file = TokenFile(source / "tokens")
    offsets, tokenizer = token_file.document_offsets.tolist(), Tokenizer.load(directory / "tokenizer")
    documents = np.load(source / split / "documents.npy").tolist()
    return [tokenizer.decode(token_file.read(offsets[i], offsets[i + 1] - 1).tolist()) for i in documents]


def test_the_splits_are_the_files(files: Path, tmp_path: Path) -> None:
    config = config_of(files, validation_fraction=0.5)
    manifest = prepare(config, tmp_path / "data")
    assert texts_of_split(tmp_path / "data", "train") == TRAINING
    assert texts_of_split(tmp_path / "data", "validation") == VALIDATION
    assert [Path(file.path).name for file in manifest.sources["wiki"].inputs] == ["validation.jsonl", "training.jsonl"]
    assert manifest.sources["wiki"].documents == 80
    assert PreparedData.open(tmp_path / "data", config).view("wiki", "validation").count >= 20
    assert isinstance(config.tokenizer, TrainedTokenizer)
    trained = Tokenizer.load(tmp_path / "data" / "tokenizer")
    assert trained.checksum == train_tokenizer(config.tokenizer, TRAINING).checksum, "validation text is not learned"


def test_a_pass_may_begin_at_any_document(files: Path) -> None:
    corpus = open_corpus("wiki", config_of(files).sources["wiki"])
    documents = list(corpus.documents())
    assert [document.is_held_out for document in documents] == [True] * 20 + [False] * 60
    for start in (0, 7, 20, 41, 80, 90):
        assert list(corpus.documents(start)) == documents[start:]
    parts = [document for part in corpus.parts(2_000) for document in part.documents()]
    assert [(document.text, document.is_held_out) for document in parts] == [
        (document.text, document.is_held_out) for document in documents
    ]


def test_rows_of_validation_files_are_cut_alike_and_not_limited(files: Path, tmp_path: Path) -> None:
    write_jsonl(files / "training.jsonl", ["a b c\nd\ne f g", "h i j\nk l m"])
    write_jsonl(files / "validation.jsonl", ["n o p\nq", "r s t\nu v w"])
    config = config_of(files, source={"rows": "lines", "minimum_words": 2, "maximum_rows": 2})
    manifest = prepare(config, tmp_path / "data")
    assert texts_of_split(tmp_path / "data", "train") == ["a b c", "e f g"]
    assert texts_of_split(tmp_path / "data", "validation") == ["n o p", "r s t", "u v w"]
    rows = manifest.sources["wiki"].rows
    assert rows is not None
    assert (rows.rows_read, rows.rows_kept, rows.rows_dropped) == (7, 5, 2)


def test_a_split_of_the_hub_is_taken_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", TRAINING)
    write_jsonl(folder / "validation.jsonl", VALIDATION)
    section = {"kind": "hub", "name": str(folder), "validation_split": "validation"}
    prepare(data_config({"wiki": section}), tmp_path / "data")
    assert texts_of_split(tmp_path / "data", "train") == TRAINING
    assert texts_of_split(tmp_path / "data", "validation") == VALIDATION
    with pytest.raises(ValueError, match="split and validation_split are both 'train'"):
        data_config({"wiki": section | {"validation_split": "train"}})


def test_a_document_of_both_files_is_refused_and_nothing_is_left(files: Path, tmp_path: Path) -> None:
    write_jsonl(files / "training.jsonl", [*TRAINING, VALIDATION[3], VALIDATION[3], VALIDATION[5]])
    with pytest.raises(DataError, match="3 training documents are also in its validation_path") as caught:
        prepare(config_of(files), tmp_path / "data")
    assert repr(VALIDATION[3][:60]) in str(caught.value)
    assert "data.sources.wiki.allow_validation_overlap=true" in str(caught.value)
    assert not (tmp_path / "data").exists()
    recorder = Recorder()
    allowed = config_of(files, source={"allow_validation_overlap": True})
    prepare(allowed, tmp_path / "data", progress=recorder)
    assert any("3 training documents are also validation documents" in note for note in recorder.notes)
    assert texts_of_split(tmp_path / "data", "train")[-3:] == [VALIDATION[3], VALIDATION[3], VALIDATION[5]]
    with pytest.raises(DataError, match="allow_validation_overlap"):
        prepare(config_of(files), tmp_path / "data")


def test_shared_tokens_survive_a_refused_overlap(files: Path, tmp_path: Path) -> None:
    write_jsonl(files / "training.jsonl", [*TRAINING, VALIDATION[3]])
    changes: dict[str, Any] = {"tokens_dir": tmp_path / "tokens"}
    with pytest.raises(DataError, match="1 training documents"):
        prepare(config_of(files, **changes), tmp_path / "data")
    recorder = Recorder()
    config = config_of(files, source={"allow_validation_overlap": True}, **changes)
    prepare(config, tmp_path / "data", progress=recorder)
    assert any("holds its tokens already" in note for note in recorder.notes)
    assert np.load(tmp_path / "data/sources/wiki/train/documents.npy").tolist() == list(range(20, 81))


def test_an_empty_validation_file_is_a_warning(files: Path, tmp_path: Path) -> None:
    write_jsonl(files / "validation.jsonl", ["", ""])
    recorder = recorded(config_of(files), tmp_path / "data")
    assert any("the recipe takes none that is held out" in note for note in recorder.notes)


@pytest.mark.parametrize(("fraction", "is_warned"), [(1e-9, True), (0.5, False), (0.0, False)])
def test_a_source_that_holds_nothing_out_is_said_with_what_to_change(
    files: Path, tmp_path: Path, *, fraction: float, is_warned: bool
) -> None:
    source = {"kind": "jsonl", "path": files / "training.jsonl"}
    recorder = recorded(data_config({"wiki": source}, validation_fraction=fraction), tmp_path / "data")
    warnings = [note for note in recorder.notes if note.startswith("warning: source 'wiki' holds nothing out")]
    assert len(warnings) == is_warned
    assert all("data.sources.wiki.rows" in warning for warning in warnings)
