"""Plans of a tokenised, unprepared corpus equal those of the prepared data, to the last digit."""

import os
from pathlib import Path
from typing import Any

import pytest
from prepared_files import StopAfter, StoppedError

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepare.tokens_dir import find_tokens
from evenpack.engine.config import RunConfig
from evenpack.errors import ConfigError, DataError
from evenpack.studies.plan.options import PlanOptions
from evenpack.studies.plan.plan import plan_run
from evenpack.testing import changed, run_config, run_values, text_sources

CONCAT: dict[str, Any] = {"kind": "concat", "max_sequence_length": 16, "atom": 8, "isolate_documents": False}
PADDING: dict[str, Any] = {**CONCAT, "kind": "padding"}
DOCUMENTS: dict[str, Any] = {"kind": "documents", "max_sequence_length": 16}
H100 = PlanOptions(device="h100", mfu=0.4)


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Returns a run over two sources whose tokens another run has written; its own data is not prepared."""
    folder = tmp_path_factory.mktemp("tokens")
    documents = {
        "one": ["abcdefgh"[: number % 8 + 1] * (number % 7 + 1) for number in range(120)],
        "two": ["xyz" * (number % 11 + 1) + str(number) for number in range(60)],
    }
    sources = text_sources(folder, documents)
    sources["one"]["weight"] = 2
    data = {
        "sources": sources,
        "validation_fraction": 0.1,
        "tokens_dir": str(folder / "tokens"),
        "recipe": CONCAT,
        "pack_length": 16,
    }
    run = run_config(run_values("gpt2", folder, data=data, training={"steps": None, "epochs": 2}))
    prepare(changed(run, data={"recipe": DOCUMENTS}).data, folder / "other")
    return run


@pytest.mark.parametrize(
    ("data", "training"),
    [
        ({"recipe": CONCAT}, {}),
        ({"recipe": CONCAT | {"isolate_documents": True}}, {}),
        ({"recipe": CONCAT | {"atom": None}, "pack_length": 32}, {}),
        ({"recipe": PADDING}, {}),
        ({"recipe": PADDING | {"atom": 32}}, {}),
        ({"recipe": PADDING | {"isolate_documents": True, "end_of_text_in_loss": "closing"}}, {}),
        ({"recipe": DOCUMENTS, "pack_length": 32}, {}),
        ({"recipe": DOCUMENTS}, {"packs_per_step": None, "tokens_per_step": 200}),
        (
            {"recipe": DOCUMENTS},
            {
                "batching": "sequences",
                "layout": "unpadded",
                "packs_per_step": None,
                "packs_per_micro_batch": None,
                "sequences_per_step": 8,
                "sequences_per_micro_batch": 2,
            },
        ),
    ],
)
def test_the_plan_is_that_of_the_prepared_data(
    tokenised: RunConfig, tmp_path: Path, data: dict[str, Any], training: dict[str, Any]
) -> None:
    run = changed(tokenised, data={**data, "prepared_dir": str(tmp_path / "data")}, training=training)
    before = plan_run(run, H100, ranks=2)
    assert not (tmp_path / "data").exists()
    prepare(run.data, run.prepared_dir)
    assert plan_run(run, H100, ranks=2) == before
    assert before.data.assumptions == ()
    assert before.data.epochs is not None


def test_a_vocabulary_of_another_size_is_refused(tokenised: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"--vocabulary-size is for data that is not prepared; .* leave the option"):
        plan_run(tokenised, PlanOptions(vocabulary_size=500), ranks=1)


@pytest.mark.parametrize(
    "data",
    [
        {"tokens_dir": None},
        {"tokens_dir": "/nowhere"},
        {"tokenizer": {"kind": "train", "vocabulary_size": 270}},
        {"tokenizer": {"kind": "hub", "name": "some/name"}},
        {"tokenizer": {"kind": "gpt2"}},
        {"tokenizer": {"kind": "gpt2", "path": "/nowhere"}},
        {"validation_fraction": 0.2},  # on whose other part the tokenizer would be trained
    ],
)
def test_other_tokens_are_not_mistaken_for_those_of_the_run(tokenised: RunConfig, data: dict[str, Any]) -> None:
    assert find_tokens(tokenised.data) is not None
    other = changed(tokenised, data=data)
    assert find_tokens(other.data) is None
    with pytest.raises(ConfigError, match=r"training\.epochs \(2\.0\) needs the data"):
        plan_run(other, PlanOptions(), ranks=1)


def test_a_corpus_that_has_changed_or_is_half_tokenised_is_not_known(tmp_path: Path, small_batches: None) -> None:
    sources = text_sources(tmp_path, {"one": ["some text of a line " * 9] * 200})
    data = {"sources": sources, "tokens_dir": str(tmp_path / "tokens")}
    run = run_config(run_values("gpt2", tmp_path, data=data))
    with pytest.raises(StoppedError):
        prepare(run.data, run.prepared_dir, progress=StopAfter(2))
    assert find_tokens(run.data) is None
    prepare(run.data, run.prepared_dir)
    known = find_tokens(run.data)
    assert known is not None
    assert known["one"].token_file.documents == 200
    (hashes,) = tmp_path.glob("tokens/one_*/document_hashes.npy")
    whole = hashes.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        hashes.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{hashes}.*remove the folder {hashes.parent} and prepare again"):
            find_tokens(run.data)
    hashes.write_bytes(whole)
    (index,) = tmp_path.glob("tokens/one_*/tokens.idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"tokens\.idx"):
        find_tokens(run.data)
    index.write_bytes(whole)
    os.utime(tmp_path / "one.txt", ns=(1, 1))
    assert find_tokens(run.data) is None
