"""ModernBERT compared with `ModernBertForMaskedLM`: logits, loss and gradients, and weights in both directions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exchanged_weights import huggingface_weights
from masked_batches import MaskedPair, build_masked_batch, random_pairs
from safetensors.torch import load_file, save_file
from scored_tokens import masked_token_logits
from torch import Tensor
from transformers import ModernBertConfig as TheirConfig
from transformers import ModernBertForMaskedLM

from evenpack.engine.checkpoints.weights import require_same_network
from evenpack.errors import CheckpointError, EvenpackError
from evenpack.models.build import Model, new_model
from evenpack.models.cost import parameter_count
from evenpack.models.huggingface import from_huggingface, mapping_of, to_huggingface
from evenpack.models.modernbert.config import ModernBertConfig

VOCABULARY = 59
LONGEST = 48
PACKS = ([48], [25, 9, 2, 3], [13, 13, 11], [3, 30])
TOLERANCE = 1e-6
"""Norm of a difference over the norm of what transformers computes, in FP32."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "max_position_embeddings": LONGEST,
    "local_attention": 12,
}
NO_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
KINDS: dict[str, dict[str, Any]] = {
    "as released": {},
    "every second layer, other numbers": {
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 4,
        "norm_eps": 1e-3,
        "global_rope_theta": 500.0,
        "local_rope_theta": 80.0,
    },
    "one base, as mmBERT": {"local_rope_theta": 160_000.0},
    "global layers alone": {"global_attn_every_n_layers": 1, "num_hidden_layers": 2},
    "the first layer alone": {"global_attn_every_n_layers": 9, "local_attention": 7},
}
RELEASED: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
}
"""Where the released configurations differ from transformers' defaults."""


def their_model(**settings: Any) -> ModernBertForMaskedLM:
    """Returns a random model of transformers, with weights large enough to have an effect."""
    torch.manual_seed(8)
    theirs = ModernBertForMaskedLM(TheirConfig(**{**SIZES, **NO_TOKENS, **settings}))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return theirs.eval()


def both(folder: Path, **settings: Any) -> tuple[Model, ModernBertForMaskedLM]:
    theirs = their_model(**settings)
    theirs.save_pretrained(folder)
    return from_huggingface(folder), theirs


def pairs_of(packs: tuple[list[int], ...] = PACKS) -> list[list[MaskedPair]]:
    return [random_pairs(lengths, vocabulary_size=VOCABULARY, seed=sum(lengths)) for lengths in packs]


def their_logits(theirs: ModernBertForMaskedLM, pair: MaskedPair) -> Tensor:
    logits: Tensor = theirs(torch.tensor([pair.tokens])).logits[0, list(pair.masked)]
    return logits


def assert_near(found: Tensor, expected: Tensor, name: str = "") -> None:
    assert expected.norm() > 0, name
    assert (found - expected).norm() <= TOLERANCE * expected.norm(), name


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_logits_loss_and_gradients_are_those_of_transformers_on_each_sequence_alone(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    # In FP32 the gradients of some norms differ by 1.3e-6 on some processors.
    ours, theirs = (model.double() for model in both(tmp_path, **settings))
    packs = pairs_of()
    batch, _ = build_masked_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=LONGEST)
    losses = []
    pairs = [pair for pack in packs for pair in pack]
    rows = masked_token_logits(ours, batch)[: batch.local_counts.targets].split([len(pair.masked) for pair in pairs])
    for pair, found in zip(pairs, rows, strict=True):
        expected = their_logits(theirs, pair)
        assert_near(found, expected)
        losses.append(F.cross_entropy(expected, torch.tensor(list(pair.masked.values())), reduction="sum"))
    loss = ours(batch)["masked_token"].loss_sum
    expected_loss = torch.stack(losses).sum()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=TOLERANCE)
    loss.backward()
    expected_loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    with torch.no_grad():  # gradients take the way of the weights, so that the names are those of export
        for parameter in ours.parameters():
            parameter.copy_(parameter.grad)
    found_gradients = huggingface_weights(ours)
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_near(found_gradients[name], gradient, name)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_transformers_loads_what_is_exported_with_equal_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    ours, _ = both(tmp_path / "theirs", **settings)
    to_huggingface(ours, tmp_path / "ours", tokenizer_dir=None, special_token_id=5)
    back, loading = ModernBertForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values()), loading
    assert (back.config.pad_token_id, back.config.max_position_embeddings) == (5, LONGEST)
    ((pair,),) = pairs_of(([40],))
    batch, _ = build_masked_batch([[pair]], "packed", max_sequence_length=LONGEST)
    with torch.no_grad():
        assert_near(masked_token_logits(ours, batch)[: len(pair.masked)], their_logits(back.eval(), pair))


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_distance_beyond_the_layers_comes_back_as_the_same_network(layers: int, tmp_path: Path) -> None:
    config = ModernBertConfig(kind="modernbert", preset="tiny", layers=layers, global_every_layers=7)
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST)
    to_huggingface(model, tmp_path / "ours", tokenizer_dir=None, special_token_id=0)
    found = from_huggingface(tmp_path / "ours").config
    assert found.attention_windows == config.attention_windows
    require_same_network(config, found, origin="the export", remedy="")


@pytest.mark.parametrize("form", ["as released", "as transformers 5 writes it"])
@pytest.mark.parametrize("size", RELEASED)
def test_the_released_configurations_become_their_presets(size: str, form: str) -> None:
    """The files of December 2024 name the distance of global layers and two bases; transformers 5 writes lists."""
    values = TheirConfig(**RELEASED[size]).to_dict()
    if form == "as released":
        del values["layer_types"], values["rope_parameters"]
        values |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
        values |= {"classifier_pooling": "mean", "position_embedding_type": "absolute", "layer_norm_eps": 1e-5}
    preset = ModernBertConfig(kind="modernbert", preset=size)
    mapping = mapping_of(preset)
    config, sizes = mapping.read_config(values, "config.json")
    assert config.shape == preset.shape
    assert config.unseen_in_weights == preset.unseen_in_weights
    assert sizes == {"vocabulary_size": 50_368, "max_positions": 8192}
    with torch.device("meta"):
        theirs, ours = ModernBertForMaskedLM(TheirConfig(**RELEASED[size])), new_model(config, **sizes)
    assert parameter_count(config, **sizes) == sum(parameter.numel() for parameter in theirs.parameters())
    shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert shapes == {name.theirs[0]: ours.get_parameter(name.ours).shape for name in mapping.tensor_names(ours)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings must be True"),
        (
            {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
            "layer_types must be full_attention in the first layer and then in every n-th",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must be full_attention in the first layer"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}},
            r"rope_parameters\.full_attention\.rope_type: .*'default', found 'yarn'",
        ),
        ({"num_hidden_layers": 4, "layer_types": None}, r"layers\.4\.\S+ has no place in a ModernBert of 4 layers"),
    ],
)
def test_a_checkpoint_that_we_do_not_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    their_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EvenpackError, match=message):
        from_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_attention": None}, "local_attention: .*valid integer, found None"),
        ({"local_attention": 1}, "local_attention: .*greater than or equal to 2, found 1"),
        ({"global_attn_every_n_layers": 2.7}, "global_attn_every_n_layers: .*valid integer, found "),
        ({"layer_types": "full_attention"}, "layer_types: .*valid list, found "),
        ({"layer_types": [1, 2, 3, 4]}, "layer_types must be full_attention .* found 1, 2, 3, 4"),
        ({"rope_parameters": "default"}, "rope_parameters: .*valid dictionary"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rope_parameters.rope_type: no such key"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 0}}}, "rope_parameters.sliding_attention.rope_theta"),
        ({"local_rope_theta": None}, "local_rope_theta: .*valid number, found None"),
    ],
)
def test_a_malformed_config_is_refused_by_file_and_key(change: dict[str, Any], message: str) -> None:
    mapping = mapping_of(ModernBertConfig(kind="modernbert"))
    assert mapping.read_config(TheirConfig(**SIZES).to_dict(), "config.json")
    with pytest.raises(CheckpointError, match=rf"^config\.json:\s+{message}"):
        mapping.read_config(TheirConfig(**SIZES).to_dict() | change, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("head.dense.weight"), "has no masked-token head .* found the encoder alone"),
        (
            lambda weights: weights.update({"decoder.weight": torch.zeros(VOCABULARY, 48)}),
            r"decoder\.weight differs from model\.embeddings\.tok_embeddings\.weight",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    their_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        from_huggingface(tmp_path)
