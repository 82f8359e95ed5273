"""BERT's weights to and from transformers, and its outputs compared with `BertForPreTraining`."""

import pytest
import torch
from exchanged_weights import huggingface_weights, load_huggingface_weights
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import masked_token_logits, next_sentence_logits
from transformers import AutoTokenizer, BertForMaskedLM, BertForPreTraining
from transformers import BertConfig as TheirConfig

from evenpack.errors import CheckpointError
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.huggingface import from_huggingface, to_huggingface

VOCABULARY = 59
LONGEST = 32
TOLERANCE = 1e-5


def our_model(seed=4, **settings):
    config = BertConfig(kind="bert", preset="tiny", layers=3, hidden_size=48, heads=3, **settings)
    return Bert(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=seed).eval()


def their_model(kind=BertForPreTraining, **settings):
    """Returns a random BERT of transformers, with weights large enough to have an effect."""
    torch.manual_seed(8)
    defaults = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 192,
        "max_position_embeddings": LONGEST,
        "vocab_size": VOCABULARY,
    }
    theirs = kind(TheirConfig(**(defaults | settings)))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return theirs.eval()


def save_theirs(theirs, directory):
    theirs.save_pretrained(directory)
    return directory


@torch.no_grad()
def their_outputs(theirs, pair):
    """Returns the scores of every token at each masked position, and of both classes, for one sequence."""
    outputs = theirs(
        input_ids=torch.tensor([pair.tokens]),
        token_type_ids=torch.tensor([pair.token_types]),
        attention_mask=torch.ones(1, len(pair.tokens), dtype=torch.int64),
    )
    return outputs.prediction_logits[0, list(pair.masked)], outputs.seq_relationship_logits[0]


@torch.no_grad()
def our_outputs(model, packs):
    """Returns the same scores of our model for each sequence of the packs."""
    batch, _ = build_masked_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    pairs = [pair for pack in packs for pair in pack]
    rows = masked_token_logits(model, batch)[: batch.local_counts.targets]
    return list(zip(rows.split([len(pair.masked) for pair in pairs]), next_sentence_logits(model, batch), strict=False))


def assert_outputs_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=TOLERANCE)


def test_our_outputs_equal_those_of_transformers_on_single_sequences(tmp_path):
    theirs = their_model()
    ours = from_huggingface(save_theirs(theirs, tmp_path / "theirs")).eval()
    packs = [random_pairs(lengths, vocabulary_size=VOCABULARY) for lengths in ([32], [9, 2, 16, 4], [20, 3])]
    expected = [their_outputs(theirs, pair) for pack in packs for pair in pack]
    assert torch.stack([next_sentence for _, next_sentence in expected]).std(dim=0).min() > 0.1
    for ours_of_one, theirs_of_one in zip(our_outputs(ours, packs), expected, strict=True):
        assert_outputs_equal(ours_of_one, theirs_of_one)


def test_an_exported_model_loads_in_transformers_with_equal_outputs(tmp_path):
    ours = our_model(dropout=0.2, token_types=3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    to_huggingface(ours, tmp_path / "exported", tokenizer_dir=None, special_token_id=7)
    theirs, loading = BertForPreTraining.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.hidden_dropout_prob == theirs.config.attention_probs_dropout_prob == 0.2
    assert (theirs.config.pad_token_id, theirs.config.type_vocab_size) == (7, 3)
    assert theirs.dtype == torch.float32
    (pair,) = random_pairs([32], vocabulary_size=VOCABULARY)
    (found,) = our_outputs(ours, [[pair]])
    assert_outputs_equal(found, their_outputs(theirs.eval(), pair))


def test_weights_survive_the_way_in_and_out_bit_for_bit(tmp_path):
    theirs = their_model()
    weights = huggingface_weights(from_huggingface(save_theirs(theirs, tmp_path / "theirs")))
    expected = dict(theirs.named_parameters())  # tied ones come once
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def of_tensorflow(weights):
    """Renames weights as in checkpoints that were converted from Google's, such as bert-base-uncased."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    return renamed | {"bert.embeddings.position_ids": torch.arange(LONGEST)[None]}


def without_own_bias(weights):
    return {name: tensor for name, tensor in weights.items() if name != "cls.predictions.bias"}


@pytest.mark.parametrize("change", [dict, of_tensorflow, without_own_bias], ids=lambda change: change.__name__)
def test_state_dicts_with_tied_tensors_or_old_names_load_into_a_model(change):
    theirs, ours = their_model(), our_model()
    state = theirs.state_dict()
    assert {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} <= state.keys()
    load_huggingface_weights(ours, change(state))
    (pair,) = random_pairs([12], vocabulary_size=VOCABULARY)
    (found,) = our_outputs(ours, [[pair]])
    assert_outputs_equal(found, their_outputs(theirs, pair))


def test_a_model_without_next_sentence_becomes_a_masked_language_model_and_back(tmp_path):
    ours = our_model(next_sentence=False)
    to_huggingface(ours, tmp_path / "exported", tokenizer_dir=None, special_token_id=0)
    theirs, loading = BertForMaskedLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    (pair,) = random_pairs([20], vocabulary_size=VOCABULARY)
    batch, _ = build_masked_batch([[pair]], "packed", max_sequence_length=LONGEST)
    with torch.no_grad():
        found = masked_token_logits(ours, batch)[: len(pair.masked)]
        outputs = theirs.eval()(torch.tensor([pair.tokens]), token_type_ids=torch.tensor([pair.token_types]))
    torch.testing.assert_close(found, outputs.logits[0, list(pair.masked)], rtol=0.0, atol=TOLERANCE)
    again = from_huggingface(tmp_path / "exported")
    assert again.config.next_sentence is False
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())


def test_an_encoder_without_a_head_is_named_as_such(tmp_path):
    their_model().bert.save_pretrained(tmp_path / "encoder")
    with pytest.raises(CheckpointError, match=r"encoder has no masked-token head .* found the encoder alone"):
        from_huggingface(tmp_path / "encoder")


def test_a_model_without_next_sentence_takes_the_rest_of_a_checkpoint_with_it():
    weights = huggingface_weights(our_model(seed=9))
    ours = our_model(next_sentence=False)
    load_huggingface_weights(ours, weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in huggingface_weights(ours).items())


@pytest.mark.parametrize(
    ("name", "value"),
    [("cls.predictions.decoder.weight", torch.zeros(59, 48)), ("cls.predictions.decoder.bias", torch.ones(59))],
)
def test_a_head_that_is_not_tied_is_refused(name, value):
    with pytest.raises(CheckpointError, match=f"{name} differs from "):
        load_huggingface_weights(our_model(), huggingface_weights(our_model()) | {name: value})


def test_berts_vocabulary_file_travels_along(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "even", "pack", "##s"]
    (tmp_path / "tokenizer" / "vocab.txt").write_text("\n".join(words) + "\n")
    to_huggingface(our_model(), tmp_path / "exported", tokenizer_dir=tmp_path / "tokenizer", special_token_id=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("Even packs")["input_ids"] == [2, 5, 6, 7, 3]
