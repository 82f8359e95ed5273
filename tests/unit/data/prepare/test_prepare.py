"""`prepare` writes every token of every document once, on its side of the split."""

from pathlib import Path

import numpy as np
import pytest
import xxhash
from prepared_files import Recorder, contents, texts_of, two_sources

from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.sources.config import BuiltinSource
from evenpack.data.sources.kinds import held_out
from evenpack.data.tokenizers.config import TrainedTokenizer
from evenpack.data.tokenizers.loading import train_tokenizer
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError


def test_the_token_file_holds_every_document_in_order(corpus: Path, finished: Path) -> None:
    config = two_sources(corpus)
    tokenizer = Tokenizer.load(finished / "tokenizer")
    for name in config.sources:
        token_file = TokenFile(finished / "sources" / name / "tokens")
        offsets, lengths = token_file.spans(np.arange(token_file.documents))
        written = [token_file.gather(offsets[n : n + 1], lengths[n : n + 1]) for n in range(token_file.documents)]
        assert all(tokens[-1] == tokenizer.end_of_text_id for tokens in written)
        assert [tokenizer.decode(tokens[:-1].tolist()) for tokens in written] == texts_of(config, name)


def test_the_ledger_accounts_for_every_token_read(corpus: Path, tmp_path: Path) -> None:
    recipe = {"kind": "documents", "max_sequence_length": 64, "long_documents": "truncate"}
    config = two_sources(corpus, recipe=recipe)
    manifest = prepare(config, tmp_path / "data")
    for name, source in manifest.sources.items():
        encoded = Tokenizer.load(tmp_path / "data" / "tokenizer").encode_batch(texts_of(config, name))
        assert source.documents == len(encoded.lengths)
        assert source.tokens == len(encoded.tokens)
        assert source.text_bytes == sum(len(text.encode()) for text in texts_of(config, name))
        accounts = [source.train.accounting, source.validation.accounting]
        kept = sum(accounting.tokens_kept for accounting in accounts)
        cut = sum(accounting.tokens_cut for accounting in accounts)
        assert kept == int(np.minimum(encoded.lengths, 64)[encoded.lengths >= 2].sum())
        assert cut == int(np.maximum(encoded.lengths - 64, 0).sum()) > 0
        assert kept + cut + sum(accounting.tokens_dropped for accounting in accounts) == source.tokens
        for split in (source.train, source.validation):
            assert split.packing is not None
            assert split.packing.tokens == split.accounting.tokens_kept
            assert split.packing.padding == split.packing.packs * 128 - split.packing.tokens
    empty = manifest.sources["wiki"].train.accounting, manifest.sources["wiki"].validation.accounting
    assert sum(accounting.documents_too_short for accounting in empty) == 1


def test_each_training_sequence_is_in_exactly_one_pack_of_an_epoch(corpus: Path, finished: Path) -> None:
    prepared = PreparedData.open(finished, two_sources(corpus))
    for name in prepared.source_names:
        for split in ("train", "validation"):
            view, plan = prepared.view(name, split), prepared.plan(name, split, seed=3)
            drawn = plan.draw(np.arange(plan.packs, 2 * plan.packs))
            assert sorted(drawn.sequence_ids.tolist()) == list(range(view.count))
            np.testing.assert_array_equal(drawn.lengths, view.lengths()[drawn.sequence_ids])


def test_the_split_follows_the_text_alone(corpus: Path, finished: Path) -> None:
    config = two_sources(corpus)
    for name in config.sources:
        identities = np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts_of(config, name)], np.uint64)
        np.testing.assert_array_equal(np.load(finished / "sources" / name / "document_hashes.npy"), identities)
        out = held_out(identities, config.sources[name], 0.1)
        assert 0.03 < out.mean() < 0.2
        lengths = TokenFile(finished / "sources" / name / "tokens").document_lengths()
        for split, chosen in (("train", ~out), ("validation", out)):
            documents = np.load(finished / "sources" / name / split / "documents.npy")
            assert documents.tolist() == np.flatnonzero(chosen & (lengths >= 2)).tolist()
    identities, source = np.load(finished / "sources" / "wiki" / "document_hashes.npy"), config.sources["wiki"]
    np.testing.assert_array_equal(held_out(identities[:50], source, 0.1), held_out(identities[400:450], source, 0.1))


def test_the_held_out_share_grows_without_moving_documents_back() -> None:
    identities = np.arange(100_000, dtype=np.uint64)
    shares = [0.0, 0.01, 0.3, 0.999]
    chosen = [held_out(identities, BuiltinSource(kind="builtin"), share) for share in shares]
    for share, out in zip(shares, chosen, strict=True):
        assert abs(out.mean() - share) < 0.006
    assert not (chosen[1] & ~chosen[2]).any()
    assert not (chosen[2] & ~chosen[3]).any()


def test_a_tokenizer_is_trained_on_the_training_documents_only(corpus: Path, tmp_path: Path) -> None:
    config = two_sources(corpus, validation_fraction=0.5)
    prepare(config, tmp_path / "data")
    texts = [text for name in config.sources for text in texts_of(config, name)]
    identities = np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)
    out = held_out(identities, config.sources["wiki"], 0.5)
    assert isinstance(config.tokenizer, TrainedTokenizer)
    expected = train_tokenizer(config.tokenizer, [text for text, held in zip(texts, out, strict=True) if not held])
    everything = train_tokenizer(config.tokenizer, texts)
    assert Tokenizer.load(tmp_path / "data" / "tokenizer").checksum == expected.checksum != everything.checksum


def test_all_sources_can_be_held_whole_for_training(corpus: Path, tmp_path: Path) -> None:
    config = two_sources(corpus, validation_fraction=0.0)
    manifest = prepare(config, tmp_path / "data")
    assert manifest.sources["wiki"].validation.packing is None
    prepared = PreparedData.open(tmp_path / "data", config)
    assert prepared.view("wiki", "validation").count == 0
    with pytest.raises(DataError, match=r"no sequence for validation: raise data\.validation_fraction"):
        prepared.plan("wiki", "validation", seed=0)


def test_batches_show_in_the_progress_alone_which_counts_up_to_the_end_of_each_source(
    corpus: Path, finished: Path, tmp_path: Path, small_batches: None
) -> None:
    recorder = Recorder()
    manifest = prepare(two_sources(corpus), tmp_path / "data", progress=recorder)
    assert contents(tmp_path / "data") == contents(finished)
    assert len(recorder.states) > 20
    assert next(state.stage for state in recorder.states if state.source == "wiki") == "tokenizer"
    for name in manifest.sources:
        states = [state for state in recorder.states if state.source == name and state.stage == "tokens"]
        assert [state.bytes_read for state in states] == sorted(state.bytes_read for state in states)
        assert states[-1].bytes_read == states[-1].total_bytes == (corpus / f"{name}.jsonl").stat().st_size
        assert states[-1].tokens == manifest.sources[name].tokens
