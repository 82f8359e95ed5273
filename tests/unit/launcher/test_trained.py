"""A file as the data of a run: its tokenizer, its recipe, and errors."""

import random
from pathlib import Path

import pytest
from run_files import changed, pair_run_values, prepared, run_config, run_values, text_sources

from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.errors import ConfigError, DataError, NotPreparedError
from evenpack.launcher.trained import export_run, run_over_text

SENTENCES = ("a small cat sat.", "the dog ran far.", "it was late.", "we all went home.", "nobody saw the moon.")


def documents(count: int, *, seed: int) -> list[str]:
    """Returns lines of some sentences each."""
    source = random.Random(seed)
    return [" ".join(source.choices(SENTENCES, k=source.randint(2, 6))) for _ in range(count)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares a run over sentence pairs, with three passes over its documents, which are one per line."""
    folder = tmp_path_factory.mktemp("pairs")
    recipe = {"kind": "sentence_pairs", "max_sequence_length": 48, "duplication_factor": 3}
    data = {
        "sources": text_sources(folder, {"one": documents(60, seed=1)}),
        "tokenizer": {"kind": "train_word_pieces", "vocabulary_size": 120},
        "recipe": recipe,
        "pack_length": 48,
        "validation_fraction": 0.1,
    }
    return prepared(run_config(pair_run_values("bert", folder, data=data)))


def test_the_runs_own_tokenizer_encodes_every_document_once(pairs: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "new.txt"
    path.write_text("\n".join(documents(20, seed=2)))
    own = PreparedData.open(pairs.prepared_dir, pairs.data).manifest
    with run_over_text(pairs, path) as run:
        there = PreparedData.open(run.prepared_dir, run.data).manifest
        assert there.tokenizer.model_dump(exclude={"inputs"}) == own.tokenizer.model_dump(exclude={"inputs"})
        assert there.sources["new"].documents == 20  # a document a line, as the run's own source has it
        assert there.sources["new"].validation.packing is None
        assert run.data.recipe.model_dump() == {**pairs.data.recipe.model_dump(), "duplication_factor": 1}
        assert open_run(run).config.training.planned_steps == 1
        folder = run.prepared_dir
    assert not folder.parent.exists()


def test_a_folder_of_two_kinds_becomes_two_sources_read_as_the_runs_own(pairs: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("\n".join(documents(20, seed=2)))
    (tmp_path / "new.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in documents(7, seed=3)))
    (tmp_path / "notes").write_text("of no known kind")
    with run_over_text(pairs, tmp_path) as run:
        there = PreparedData.open(run.prepared_dir, run.data).manifest
        counts = [source.documents for _, source in sorted(there.sources.items())]
        assert [name.rpartition("_")[2] for name in sorted(there.sources)] == ["jsonl", "text"]
        assert counts == [7, 20]


def test_nothing_is_left_where_the_file_cannot_be_read(
    pairs: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(DataError, match=r"broken\.jsonl.*line 2"), run_over_text(pairs, tmp_path / "broken.jsonl"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jsonl"]


def test_what_is_no_file_of_text_is_refused(pairs: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file.bin").touch()
    for name, message in (
        ("none.txt", "does not exist: give the file, folder or pattern"),
        (".", r"no file of a known kind: expected names that end in \.jsonl, .*\.parquet, .*\.txt"),
        ("file.bin", r"no file of a known kind: expected names that end in \.jsonl, .*\.parquet, .*\.txt"),
    ):
        with pytest.raises(ConfigError, match=message), run_over_text(pairs, tmp_path / name):
            pass


def test_a_run_without_a_tokenizer_is_refused(pairs: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "new.txt"
    path.write_text("words")
    elsewhere = changed(pairs, data={"prepared_dir": tmp_path / "none"})
    with pytest.raises(NotPreparedError), run_over_text(elsewhere, path):
        pass
    data = {
        "sources": {"ready": {"kind": "megatron", "path": "prefix"}},
        "tokenizer": {"kind": "external", "vocabulary_size": 300, "end_of_text_id": 0},
    }
    of_tokens = run_config(run_values("gpt2", tmp_path, data=data))
    with pytest.raises(ConfigError, match="the sources of this run hold tokens"), run_over_text(of_tokens, path):
        pass


def test_an_export_looks_at_its_folder_before_it_reads_anything(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    never_prepared = run_config(run_values("gpt2", tmp_path))
    with pytest.raises(ConfigError, match="taken exists and is not an empty directory"):
        export_run(never_prepared, tmp_path / "taken")
