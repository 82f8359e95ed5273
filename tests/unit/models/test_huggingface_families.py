"""What the exchange with transformers promises for every family.

Nothing is lost on the way, and what is not ours is refused.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from exchanged_weights import huggingface_weights, load_huggingface_weights
from torch import Tensor

from evenpack.errors import CheckpointError, ConfigError
from evenpack.models.build import Model, new_model
from evenpack.models.families import config_of, find_family, known_families
from evenpack.models.huggingface import from_huggingface, mapping_of, to_huggingface

VOCABULARY, LONGEST = 59, 32


@dataclass(frozen=True, kw_only=True)
class Format:
    """Names of a family in transformers' files, for a model of 3 layers, hidden size 48, 3 heads and MLP width 192."""

    sizes: tuple[str, ...]
    """Keys of config.json that hold sizes."""
    refused: dict[str, Any]
    """Keys of config.json, each with a value of a model that evenpack does not compute."""
    settings: dict[str, Any]
    """Settings of ours other than the shape, which config.json must carry."""
    misshapen: str
    """A matrix; 192 is one of its sizes."""
    missing: str
    beyond: str
    """A tensor of a fourth layer."""


FORMATS = {
    "gpt2": Format(
        sizes=("n_embd", "n_head", "vocab_size", "n_positions"),
        refused={
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "layer_norm_epsilon": 1e-6,
            "n_inner": 100,
            "model_type": "gpt_neo",
            "tie_word_embeddings": False,
        },
        settings={},
        misshapen="transformer.h.2.mlp.c_fc.weight",
        missing="transformer.ln_f.bias",
        beyond="h.3.ln_1.bias",
    ),
    "llama": Format(
        sizes=("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"),
        refused={
            "hidden_act": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
            "model_type": "mistral",
        },
        settings={"rotary_base": 777.0, "norm_epsilon": 2e-4, "tied_head": False},
        misshapen="model.layers.2.mlp.gate_proj.weight",
        missing="model.norm.weight",
        beyond="model.layers.3.input_layernorm.weight",
    ),
    "bert": Format(
        sizes=("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"),
        refused={
            "hidden_act": "relu",
            "layer_norm_eps": 1e-5,
            "position_embedding_type": "relative_key",
            "is_decoder": True,
            "intermediate_size": 100,
            "model_type": "roberta",
        },
        settings={"token_types": 4},
        misshapen="bert.encoder.layer.2.intermediate.dense.weight",
        missing="bert.pooler.dense.bias",
        beyond="bert.encoder.layer.3.output.dense.bias",
    ),
    "modernbert": Format(
        sizes=("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
        refused={
            "hidden_activation": "relu",
            "norm_bias": True,
            "mlp_bias": True,
            "decoder_bias": False,
            "model_type": "roberta",
        },
        settings={"global_every_layers": 2, "norm_epsilon": 1e-3},
        misshapen="model.layers.2.mlp.Wo.weight",
        missing="model.layers.1.attn.Wo.weight",
        beyond="model.layers.3.attn.Wo.weight",
    ),
}

every_family = pytest.mark.parametrize("kind", FORMATS)


def model_of(kind: str, *, seed: int = 4, **settings: Any) -> Model:
    shape = {"layers": 3, "hidden_size": 48, "heads": 3, "feed_forward_size": 192, "key_value_heads": 1}
    fields = config_of(kind).model_fields
    config = config_of(kind).model_validate(
        {"kind": kind, "preset": "tiny", **{key: shape[key] for key in shape if key in fields}, **settings}
    )
    return new_model(config, vocabulary_size=VOCABULARY, max_positions=LONGEST, seed=seed)


def exported(kind: str, tmp_path: Path, **settings: Any) -> Path:
    to_huggingface(model_of(kind, **settings), tmp_path / "exported", tokenizer_dir=None, special_token_id=0)
    return tmp_path / "exported"


def test_every_family_with_a_format_is_tried() -> None:
    assert set(FORMATS) == {kind for kind in known_families() if find_family(kind).huggingface is not None}


@every_family
def test_weights_and_settings_survive_the_way_out_and_in(kind: str, tmp_path: Path) -> None:
    ours = model_of(kind, **FORMATS[kind].settings)
    back = from_huggingface(exported(kind, tmp_path, **FORMATS[kind].settings))
    assert back.config.shape == ours.config.shape
    assert {name: getattr(back.config, name) for name in FORMATS[kind].settings} == FORMATS[kind].settings
    assert (back.vocabulary_size, back.max_positions) == (VOCABULARY, LONGEST)
    assert back.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())


@every_family
def test_a_tensor_of_another_shape_is_named_and_nothing_is_loaded(kind: str) -> None:
    ours, name = model_of(kind), FORMATS[kind].misshapen
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    weights = huggingface_weights(model_of(kind, seed=9))
    expected = tuple(weights[name].shape)
    assert 192 in expected
    found = tuple(200 if size == 192 else size for size in expected)
    weights[name] = torch.zeros(found)
    with pytest.raises(CheckpointError) as caught:
        load_huggingface_weights(ours, weights)
    assert f"{name} must have shape {expected}, found {found}" in str(caught.value)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in before.items())


@every_family
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, names: weights.pop(names.missing), "{missing} is missing, expected a tensor of shape"),
        (lambda weights, names: weights.update({names.beyond: torch.zeros(48)}), "{beyond} has no place in a "),
    ],
    ids=["missing", "beyond"],
)
def test_weights_of_another_model_are_refused(
    kind: str, change: Callable[[dict[str, Tensor], Format], Any], message: str
) -> None:
    weights = huggingface_weights(model_of(kind))
    change(weights, FORMATS[kind])
    with pytest.raises(CheckpointError) as caught:
        load_huggingface_weights(model_of(kind), weights)
    assert message.format(**vars(FORMATS[kind])) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "key", "value"), [(kind, *each) for kind in FORMATS for each in FORMATS[kind].refused.items()]
)
def test_an_architecture_that_we_do_not_compute_is_refused(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    path = exported(kind, tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=rf"{key} must be .* found .*{value}"):
        from_huggingface(path.parent)


@pytest.mark.parametrize("value", [None, "48", 48.0, 0, [48], True, 1 << 40])
@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in FORMATS for key in FORMATS[kind].sizes])
def test_a_size_that_is_no_size_is_refused_by_name(kind: str, key: str, value: Any) -> None:
    model = model_of(kind)
    mapping = mapping_of(model.config)
    values = mapping.config_values(model, 0)
    assert mapping.read_config(values, "config.json")
    with pytest.raises(CheckpointError, match=rf"^config\.json:\s+{key}[: ]"):
        mapping.read_config(values | {key: value}, "config.json")


@every_family
@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_special_token_outside_the_vocabulary_leaves_nothing_behind(kind: str, token: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"vocabulary .0 to 58., found {token}"):
        to_huggingface(model_of(kind), tmp_path / "exported", tokenizer_dir=None, special_token_id=token)
    assert not list(tmp_path.iterdir())
