import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from batches import build_batch, random_sequences
from exchanged_weights import huggingface_weights, load_huggingface_weights
from safetensors import SafetensorError
from scored_tokens import next_token_logits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from evenpack.errors import CheckpointError, ConfigError, RunError
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2
from evenpack.models.huggingface import from_huggingface, to_huggingface

VOCABULARY = 59
LONGEST = 32
TOLERANCE = 1e-5


def our_model(seed=4, **settings):
    config = Gpt2Config(kind="gpt2", preset="tiny", layers=3, hidden_size=48, heads=3, **settings)
    return Gpt2(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=seed)


def their_model(**settings):
    """Returns a random GPT-2 of transformers, with weights large enough to have an effect."""
    torch.manual_seed(8)
    defaults = {"n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": LONGEST, "vocab_size": VOCABULARY}
    theirs = GPT2LMHeadModel(GPT2Config(**(defaults | {"bos_token_id": 0, "eos_token_id": 0} | settings)))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return theirs.eval()


def save_theirs(theirs, directory):
    theirs.save_pretrained(directory)
    return directory


def their_logits(theirs, sequence):
    with torch.no_grad():
        return theirs(torch.tensor([sequence]), use_cache=False).logits[0]


def batch_of(*packs):
    return build_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)


@torch.no_grad()
def our_logits(model, sequence):
    batch, spans = batch_of([sequence])
    return next_token_logits(model.eval(), batch)[spans[0]]


@torch.no_grad()
def test_our_logits_equal_those_of_transformers_on_single_sequences(tmp_path):
    theirs = their_model()
    ours = from_huggingface(save_theirs(theirs, tmp_path / "theirs")).eval()
    packs = [random_sequences(lengths, vocabulary_size=VOCABULARY) for lengths in ([32], [9, 1, 16, 4], [31], [20, 2])]
    batch, spans = batch_of(*packs)
    logits = next_token_logits(ours, batch)
    for sequence, slots in zip((sequence for pack in packs for sequence in pack), spans, strict=True):
        expected = their_logits(theirs, sequence)
        assert expected.std() > 0.5
        torch.testing.assert_close(logits[slots], expected, rtol=0.0, atol=TOLERANCE)


def test_an_exported_model_loads_in_transformers_with_equal_logits(tmp_path):
    ours = our_model(dropout=0.1, attention_dropout=0.2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    to_huggingface(ours, tmp_path / "new" / "exported", tokenizer_dir=None, special_token_id=7)
    theirs, loading = GPT2LMHeadModel.from_pretrained(tmp_path / "new" / "exported", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.config.resid_pdrop, theirs.config.embd_pdrop, theirs.config.attn_pdrop) == (0.1, 0.1, 0.2)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 7
    assert theirs.dtype == torch.float32
    (sequence,) = random_sequences([32], vocabulary_size=VOCABULARY)
    expected = our_logits(ours, sequence)
    torch.testing.assert_close(their_logits(theirs.eval(), sequence), expected, rtol=0.0, atol=TOLERANCE)


def test_state_dicts_with_a_head_old_masks_or_no_prefix_load_into_a_model():
    theirs = their_model()
    bare = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    for weights in (theirs.state_dict(), bare, bare | masks):
        ours = our_model()
        load_huggingface_weights(ours, weights)
        (sequence,) = random_sequences([12], vocabulary_size=VOCABULARY)
        torch.testing.assert_close(our_logits(ours, sequence), their_logits(theirs, sequence), rtol=0.0, atol=TOLERANCE)


def test_weights_of_a_sharded_checkpoint_survive_the_way_in_and_out_bit_for_bit(tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    expected = dict(theirs.named_parameters())
    weights = huggingface_weights(from_huggingface(tmp_path / "shards"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_a_head_that_is_not_tied_is_refused():
    weights = huggingface_weights(our_model())
    for rows in (59, 60):
        with pytest.raises(CheckpointError, match=r"differs .* expected a tied LM head"):
            load_huggingface_weights(our_model(), weights | {"lm_head.weight": torch.zeros(rows, 48)})


@pytest.mark.parametrize("positions", ["alibi", "rotary"])
def test_models_without_learned_positions_say_why_they_cannot_be_exported(positions, tmp_path):
    with pytest.raises(ConfigError, match=rf"learned positions only.*model\.positions: {positions}"):
        to_huggingface(our_model(positions=positions), tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, r"config\.json does not exist"),
        (lambda directory: (directory / "config.json").write_text("{"), "not a readable JSON file"),
        (lambda directory: (directory / "config.json").write_text("[]"), "expected a JSON object, found list"),
        (lambda directory: (directory / "config.json").write_text("{}"), "n_embd: this key is required"),
        (
            lambda directory: (directory / "config.json").write_text('{"model_type": ["bert"]}'),
            "one of bert.*found .'b",
        ),
        (lambda directory: (directory / "config.json").write_text('{"model_type": {}}'), "one of bert.*found {}"),
        (lambda directory: (directory / "model.safetensors").unlink(), r"model\.safetensors does not exist"),
        (lambda directory: os.truncate(directory / "model.safetensors", 5000), "is broken or not in safetensors"),
    ],
)
def test_a_broken_checkpoint_directory_is_refused(tmp_path, damage, message):
    to_huggingface(our_model(), tmp_path / "exported", tokenizer_dir=None, special_token_id=0)
    damage(tmp_path / "exported")
    with pytest.raises(CheckpointError, match=message):
        from_huggingface(tmp_path / "exported")


def save_tokenizer(directory):
    entries = {word: index for index, word in enumerate(["<|endoftext|>", "even", "pack"])}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(directory)
    return directory


def test_the_tokenizer_travels_along_and_hands_over_what_the_model_takes(tmp_path):
    """GPT-2 would interpret token types as tokens and add them to its input."""
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer")
    (tokenizer_dir / "notes.md").write_text("not a part of a tokenizer")
    path = tokenizer_dir / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": ["input_ids", "token_type_ids"]}))
    to_huggingface(our_model(), tmp_path / "exported", tokenizer_dir=tokenizer_dir, special_token_id=0)
    found = AutoTokenizer.from_pretrained(tmp_path / "exported")("pack even")
    assert found["input_ids"] == [2, 1]
    assert set(found) == {"input_ids", "attention_mask"}
    assert not (tmp_path / "exported" / "notes.md").exists()


def test_a_folder_without_a_tokenizer_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match="nowhere holds no tokenizer"):
        to_huggingface(our_model(), tmp_path / "exported", tokenizer_dir=Path("nowhere"), special_token_id=0)
    assert not list(tmp_path.iterdir())


def test_a_directory_with_content_is_never_written_over(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("years of work")
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        to_huggingface(our_model(), tmp_path / "mine", tokenizer_dir=None, special_token_id=0)
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    to_huggingface(our_model(), tmp_path / "empty", tokenizer_dir=None, special_token_id=0)
    assert from_huggingface(tmp_path / "empty").config.shape["layers"] == 3


def test_every_exported_file_is_on_disk_before_the_directory_has_its_name(tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "tokenizer")
    flushed, replace = set(), os.replace
    on_disk_before = {}
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(Path(f"/dev/fd/{descriptor}").readlink().name))

    def watched_replace(source, target):
        on_disk_before[Path(target).name] = set(flushed)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched_replace)
    to_huggingface(our_model(), tmp_path / "out", tokenizer_dir=tmp_path / "tokenizer", special_token_id=0)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= written <= on_disk_before["out"]


def test_everybody_may_read_what_others_of_the_writer_s_files_let_them_read(tmp_path):
    umask = os.umask(0o027)
    try:
        to_huggingface(our_model(), tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


@pytest.mark.parametrize(("most_bytes", "failing"), [(10, "tokenizer"), (500, "config"), (20_000, "weights")])
def test_a_disk_that_fills_is_the_target_s_and_nothing_stays_behind(tmp_path, files_of_at_most, most_bytes, failing):
    tokenizer_dir = save_tokenizer(tmp_path / "tokenizer") if failing == "tokenizer" else None
    with (
        files_of_at_most(most_bytes),
        pytest.raises(RunError, match=r"exported cannot be written: .*File too large.*; make room on its disk") as told,
    ):
        to_huggingface(our_model(), tmp_path / "exported", tokenizer_dir=tokenizer_dir, special_token_id=0)
    assert str(told.value).startswith(str(tmp_path / "exported"))
    assert "tokenizer.json" not in str(told.value)
    assert isinstance(told.value.__cause__, SafetensorError) == (failing == "weights")
    assert [path.name for path in tmp_path.iterdir()] == (["tokenizer"] if failing == "tokenizer" else [])
