"""The contents of steps and the steps of documents, on whole small runs, and the messages for bad queries."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pair_sources import pair_run
from prepared_files import sentences
from run_files import changed, prepared, run_config, run_values, text_sources

from evenpack.data.keys import derive_key, hash64
from evenpack.data.prepare.prepare import prepare
from evenpack.data.sequences import SentencePairsView
from evenpack.data.sequences.pairs import PairsAsDocuments
from evenpack.data.where import DocumentVisits, StepContent, Where
from evenpack.engine.config import RunConfig
from evenpack.engine.where import differs_from_trained, open_where
from evenpack.errors import ConfigError

STEPS = 24


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares two sources that the run repeats; a fifth of their documents is held out."""
    folder = tmp_path_factory.mktemp("where")
    texts = {name: [text[:70] for text in sentences(count, seed=count)] for name, count in (("wiki", 40), ("code", 15))}
    sources = text_sources(folder, texts)
    sources["wiki"]["weight"] = 2
    data = {"sources": sources, "validation_fraction": 0.2, "recipe": {"kind": "documents", "max_sequence_length": 24}}
    training = {"steps": STEPS, "skip_steps": [[3, 5], 9]}
    return prepared(run_config(run_values("gpt2", folder, data=data, training=training)))


def plain_hash(content: StepContent, names: list[str]) -> str:
    """Returns the order hash of a step, summed over the answer of `where`."""
    total = 0
    for one in content.sequences:
        parts = (names.index(one.source), one.stream_position)
        pack = derive_key(*(np.array([part], dtype=np.uint64) for part in parts))
        total += int(hash64(hash64(pack ^ np.uint64(one.slot)) ^ np.uint64(one.sequence))[0])
    return f"{total % 2**64:016x}"


PLACE = ("epoch", "pack", "stream_position", "slot", "sequence")
"""What both answers say of a sequence in a step."""


def visits_of_steps(where: Where) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """Returns for each document all its parts in the contents of all steps."""
    found = defaultdict(list)
    for step in range(1, where.steps + 1):
        for one in where.step(step).sequences:
            place = [getattr(one, name) for name in PLACE]
            for part in one.parts:
                found[one.source, part.document].append((step, *place, part.start, part.tokens))
    return found


def visits_of_document(found: DocumentVisits) -> list[tuple[int, ...]]:
    return [(one.step, *(getattr(one, name) for name in PLACE), one.start, one.tokens) for one in found.visits]


SEQUENCES = {
    "batching": "sequences",
    "layout": "padded",
    **dict.fromkeys(("packs_per_step", "packs_per_micro_batch")),
    "sequences_per_step": 20,
    "sequences_per_micro_batch": 5,
}


STAGES = [
    {"step": 4, "data.sources.code.weight": 5, "training.packs_per_step": 8},
    {"step": 8, "data.sources.wiki.weight": 0},
    {"step": 11, "data.sources.wiki.weight": 7, "data.sources.code.weight": 1},
]


@pytest.mark.parametrize("sections", [{"stages": STAGES}, {"training": SEQUENCES}], ids=["stages", "sequences"])
def test_documents_and_steps_lead_to_one_another(config: RunConfig, sections: dict[str, dict[str, Any]]):
    where = open_where(changed(config, **sections))
    by_steps = visits_of_steps(where)
    epochs, held_out = 0, 0
    for source in where.sources:
        for document in range(source.origins.document_file.documents):
            found = where.document(document, source.name)
            assert sorted(visits_of_document(found)) == sorted(by_steps.pop((source.name, document), []))
            assert [one.step for one in found.visits] == sorted(one.step for one in found.visits)
            assert [one.skipped for one in found.visits] == [one.step in {3, 4, 5, 9} for one in found.visits]
            assert (found.absence is not None) == (not found.sequences)
            held_out += found.absence == "it is held out for validation"
            epochs = max([epochs, *(one.epoch for one in found.visits)])
    assert not by_steps
    assert epochs >= 1
    assert held_out > 3


ROWS = [
    {"kind": "concat", "max_sequence_length": 24},
    {"kind": "concat", "max_sequence_length": 24, "atom": 48},
    {"kind": "padding", "max_sequence_length": 24, "atom": 8},
]


@pytest.mark.parametrize("recipe", ROWS, ids=["concat", "atoms", "padding"])
def test_documents_that_are_cut_into_rows_lead_to_each_of_them(tmp_path: Path, recipe: dict[str, Any]):
    sources = text_sources(tmp_path, {"wiki": [text[:70] for text in sentences(12, seed=4)]})
    data = {"sources": sources, "recipe": recipe, "pack_length": 24}
    where = open_where(prepared(run_config(run_values("gpt2", tmp_path, data=data, training={"steps": 9}))))
    by_steps = visits_of_steps(where)
    for document in range(12):
        found = where.document(document)
        assert len(found.sequences) > 1
        assert sorted(visits_of_document(found)) == sorted(by_steps.pop(("wiki", document)))
    assert not by_steps


GRID = {"kind": "grid", "rows": 2, "columns": 2, "block_tokens": 400}
BLOCKS = {"kind": "blocks", "block_tokens": 400}


@pytest.mark.parametrize("shuffle", [GRID, BLOCKS], ids=["grid", "blocks"])
def test_documents_that_are_shuffled_on_disk_keep_their_numbers(tmp_path: Path, shuffle: dict[str, Any]):
    texts = [text[:50] for text in sentences(30, seed=6)]
    data = {
        "sources": text_sources(tmp_path, {"wiki": texts}),
        "shuffle": shuffle,
        "tokens_dir": tmp_path / "tokens",
        "validation_fraction": 0.2,
    }
    config = prepared(run_config(run_values("gpt2", tmp_path, data=data, training={"steps": 14})))
    where = open_where(config, with_text=True)
    assert where.sources[0].packed.plan.blocks.count > 1
    by_steps = visits_of_steps(where)
    held_out = 0
    for document, text in enumerate(texts):
        found = where.document(document)
        assert str(found.text).startswith(text)
        assert sorted(visits_of_document(found)) == sorted(by_steps.pop(("wiki", document), []))
        assert found.absence == (None if found.visits else "it is held out for validation")
        assert {one.epoch for one in found.visits} > {0} or not found.visits
        held_out += not found.visits
    assert not by_steps
    assert 0 < held_out < 15


def test_the_hash_of_a_step_is_that_of_what_it_names(config: RunConfig):
    where = open_where(config)
    names = [source.name for source in where.sources]
    for step in range(1, STEPS + 1):
        content = where.step(step)
        assert content.order_hash == plain_hash(content, names)
        assert content.skipped == (step in {3, 4, 5, 9})
        assert content.packs == config.training.packs_per_step == len({one.pack for one in content.sequences})
    one, *rest = content.sequences
    wrong = replace(content, sequences=(replace(one, slot=one.slot + 1), *rest))
    assert plain_hash(wrong, names) != content.order_hash


def test_texts_are_those_of_the_documents(config: RunConfig):
    where = open_where(config, with_text=True)
    lines = Path(config.data.sources["wiki"].path).read_text(encoding="utf-8").split("\n")
    for document in (0, 7, 39):
        text = where.document(document, "wiki").text
        assert text is not None
        assert text.startswith(lines[document])
    later_parts = 0
    for one in where.step(2).sequences:
        for part in one.parts:
            assert part.text is not None
            text = where.document(part.document, one.source).text
            assert text is not None
            before = where._text(where.sources[0 if one.source == "wiki" else 1], part.document, 0, part.start)
            assert before is not None
            assert text.startswith(before + part.text)
            later_parts += part.start > 0
    assert later_parts > 3
    assert open_where(config).document(0, "wiki").text is None


def test_a_trained_step_of_the_same_order_is_as_it_was(config: RunConfig, tmp_path: Path):
    content = open_where(config).step(3)
    lines = ['{"step": 2, "order_hash": "0"}\n', f'{{"step": 3, "order_hash": "{content.order_hash}"}}\n']
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert differs_from_trained(content, tmp_path) is None
    assert differs_from_trained(content, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("document", "source", "message"),
    [
        (-1, "wiki", "documents 0 to 39"),
        (3, None, "any of wiki, code"),
        (3, "wik", "no source 'wik': its sources are wiki, code"),
    ],
)
def test_questions_without_an_answer_say_what_there_is(
    config: RunConfig, document: int, source: str | None, message: str
):
    with pytest.raises(ConfigError, match=message):
        open_where(config).document(document, source)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = pair_run(tmp_path_factory.mktemp("pairs"))
    prepare(config.data, config.prepared_dir)
    return config


def test_pairs_name_the_documents_of_both_their_halves(pairs: RunConfig):
    where = open_where(pairs)
    by_steps = visits_of_steps(where)
    for source in where.sources:
        view, file = source.packed.view, source.origins.document_file
        assert isinstance(view, SentencePairsView)
        offsets = file.document_offsets
        found = source.origins.origins(np.arange(view.count))
        assert all(found.starts + found.tokens < np.diff(offsets)[found.documents])  # ends before the end-of-text
        begins = offsets[found.documents] + found.starts
        spans = zip(begins.tolist(), found.tokens.tolist(), strict=True)
        halves = [file.read(begin, begin + tokens).tolist() for begin, tokens in spans]
        for sequence in range(view.count):
            first = int(view.first_segment_lengths[sequence])
            tokens = view.read(np.array([sequence])).tokens.tolist()
            assert halves[2 * sequence : 2 * sequence + 2] == [tokens[1 : first - 1], tokens[first:-1]]
        for document in range(file.documents):
            visits = visits_of_document(where.document(document, source.name))
            assert sorted(visits) == sorted(by_steps[source.name, document])
    assert len(by_steps) > 20


def test_pairs_that_came_finished_are_their_own_documents(pairs: RunConfig):
    view = open_where(pairs).sources[0].packed.view
    assert isinstance(view, SentencePairsView)
    finished = PairsAsDocuments(view=view)
    found = finished.origins(np.array([3, 0]))
    assert found.documents.tolist() == [3, 0]
    assert found.starts.tolist() == [0, 0]
    assert found.tokens.tolist() == view.lengths()[[3, 0]].tolist()
    assert finished.document_file.documents == view.count
