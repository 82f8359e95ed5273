"""Documents that a source's section names for validation: files of their own, or a split on the hub."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import Recorder, contents, data_config, sentences, texts_of, two_sources, write_jsonl

from evenpack.data.config import DataConfig
from evenpack.data.manifest import data_section
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.workers import local_workers
from evenpack.data.prepared import PreparedData
from evenpack.data.sources.kinds import held_out, open_corpus, source_inputs
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


def test_workers_write_the_same_bytes(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenpack.data.prepare.source.SMALLEST_PART_BYTES", 3_000)
    config = config_of(files)
    prepare(config, tmp_path / "one")
    prepare(config, tmp_path / "two", workers=local_workers(2))
    for name, content in contents(tmp_path / "one" / "sources").items():
        if not name.endswith("journal.json"):
            assert (tmp_path / "two" / "sources" / name).read_bytes() == content, name


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


def test_one_file_for_both_is_refused(files: Path, tmp_path: Path) -> None:
    config = config_of(files, source={"validation_path": files / "tr*"})
    with pytest.raises(DataError, match=r"training\.jsonl belongs to path and to validation_path"):
        prepare(config, tmp_path / "data")
    with pytest.raises(DataError, match=r"give data\.sources\.wiki\.validation_path=FILE"):
        prepare(config_of(files, source={"validation_path": files / "none"}), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_empty_validation_file_is_a_warning(files: Path, tmp_path: Path) -> None:
    write_jsonl(files / "validation.jsonl", ["", ""])
    recorder = Recorder()
    prepare(config_of(files), tmp_path / "data", progress=recorder)
    assert any("the recipe takes none that is held out" in note for note in recorder.notes)


def test_sets_without_the_key_are_what_they_were_before_there_was_any(corpus: Path, files: Path) -> None:
    sections = data_section(two_sources(corpus))["sources"].values()
    assert all(section.keys() == {"kind", "path", "text_key"} for section in sections)
    section = data_section(config_of(files))["sources"]["wiki"]
    assert section.keys() == {"kind", "path", "text_key", "validation_path"}
    assert len(texts_of(two_sources(corpus), "wiki")) > 20
    assert len(source_inputs("wiki", two_sources(corpus).sources["wiki"])) == 1


@pytest.fixture(scope="module")
def texts_of_the_hash(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[str]]:
    """Texts by whether the hash of each lies in the lowest hundredth."""
    path = write_jsonl(tmp_path_factory.mktemp("hash") / "all.jsonl", sentences(1000, seed=3))
    source = data_config({"wiki": {"kind": "jsonl", "path": path}}).sources["wiki"]
    documents = list(open_corpus("wiki", source).documents())
    identities = np.array([document.stored_identity for document in documents], dtype=np.uint64)
    chosen = held_out(identities, source, 0.01).tolist()
    return {
        side: [one.text for one, is_chosen in zip(documents, chosen, strict=True) if is_chosen is side]
        for side in (False, True)
    }


@pytest.mark.parametrize(
    ("trained", "validation", "fraction", "is_warned"), [(2, 0, 0.01, True), (9, 1, 0.01, False), (2, 0, 0.0, False)]
)
def test_a_source_that_holds_nothing_out_is_said_with_what_to_change(
    *,
    trained: int,
    validation: int,
    fraction: float,
    is_warned: bool,
    texts_of_the_hash: dict[bool, list[str]],
    tmp_path: Path,
) -> None:
    texts = [*texts_of_the_hash[False][:trained], *texts_of_the_hash[True][:validation]]
    source = {"kind": "jsonl", "path": write_jsonl(tmp_path / "wiki.jsonl", texts)}
    recorder = Recorder()
    prepare(data_config({"wiki": source}, validation_fraction=fraction), tmp_path / "data", progress=recorder)
    warnings = [note for note in recorder.notes if note.startswith("warning: source 'wiki' holds nothing out")]
    assert len(warnings) == is_warned
    assert all("data.sources.wiki.rows" in warning for warning in warnings)
