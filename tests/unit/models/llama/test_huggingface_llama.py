"""Llama's weights are converted to transformers and back, with equal logits."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import build_batch, random_sequences
from safetensors.torch import load_file, save_file
from scored_tokens import next_token_logits
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM, modeling_rope_utils
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from evenpack.errors import CheckpointError
from evenpack.models import huggingface
from evenpack.models.build import Model, new_model
from evenpack.models.common.positions import Rotation
from evenpack.models.common.section import RotaryScaling
from evenpack.models.huggingface import from_huggingface, to_huggingface
from evenpack.models.llama.config import LlamaConfig
from evenpack.models.llama.huggingface import LLAMA_MAPPING

VOCABULARY, POSITIONS = 71, 48
SHAPE = {"preset": "tiny", "layers": 3, "hidden_size": 64, "heads": 4, "feed_forward_size": 96}
SCALING = {
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_positions": 32,
}
THEIR_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""With the eight pairs of channels here some are kept, some scaled, and some between."""
KINDS = {
    "grouped": {"key_value_heads": 2},
    "one key head, tied": {"key_value_heads": 1, "tied_head": True},
    "scaled rotations": {"key_value_heads": 2, "rotary_base": 500.0, "rotary_scaling": SCALING},
    "each head its own, other numbers": {"key_value_heads": 4, "norm_epsilon": 1e-3, "rotary_base": 500.0},
}


def our_model(**changes: Any) -> Model:
    config = LlamaConfig(kind="llama", **SHAPE, **changes)
    model = new_model(config, vocabulary_size=VOCABULARY, max_positions=POSITIONS, seed=4)
    with torch.no_grad():  # initial weights hardly attend
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def assert_near(found: torch.Tensor | None, expected: torch.Tensor, name: str) -> None:
    """Compares by norm, as the order of sums differs and single elements may be near zero."""
    assert found is not None
    assert expected.norm() > 0, name
    assert (found - expected).norm() <= 1e-6 * expected.norm(), name


def assert_equal_logits(model: Model, theirs: LlamaForCausalLM) -> None:
    """Compares logits on single sequences, and on all of them in one pack."""
    sequences = random_sequences([POSITIONS, 17, 1, 30], vocabulary_size=VOCABULARY, seed=9)
    batch, spans = build_batch([sequences], "packed", max_sequence_length=POSITIONS, pack_length=100)
    with torch.no_grad():
        packed = next_token_logits(model, batch)
        for sequence, span in zip(sequences, spans, strict=True):
            alone, _ = build_batch([[sequence]], "packed", max_sequence_length=POSITIONS)
            expected = theirs(torch.tensor([sequence])).logits[0]
            torch.testing.assert_close(next_token_logits(model, alone), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(packed[span], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_transformers_loads_what_is_saved_and_gives_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    model = our_model(**changes)
    to_huggingface(model, tmp_path / "out", tokenizer_dir=None, special_token_id=5)
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert (theirs.config.eos_token_id, theirs.config.max_position_embeddings) == (5, POSITIONS)
    assert_equal_logits(model, theirs.eval())


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_what_transformers_saves_is_loaded_and_gives_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = TheirConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=changes["key_value_heads"],
        max_position_embeddings=POSITIONS,
        rms_norm_eps=changes.get("norm_epsilon", 1e-6),
        rope_parameters={
            "rope_theta": changes.get("rotary_base", 10_000.0),
            **(THEIR_SCALING if "rotary_scaling" in changes else {"rope_type": "default"}),
        },
        tie_word_embeddings=changes.get("tied_head", False),
        initializer_range=0.1,
        pad_token_id=None,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = from_huggingface(tmp_path)
    assert model.max_positions == POSITIONS
    assert_equal_logits(model, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            r"rope_parameters\.low_freq_factor: this key is required",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: Input tag 'linear' found .* expected tags: 'default', 'llama3'",
        ),
        ({"rope_parameters": {**THEIR_SCALING, "low_freq_factor": 4.0}}, r"low_frequency_factor \(4\) must be below"),
        ({"num_key_value_heads": 3}, r"key_value_heads \(3\) must divide heads \(4\)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"intermediate_size": 80}, r"mlp.gate_proj.weight must have shape \(80, 64\), found \(96, 64\)"),
    ],
)
def test_a_llama_that_we_do_not_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    to_huggingface(our_model(key_value_heads=2), directory, tokenizer_dir=None, special_token_id=0)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((CheckpointError, Exception), match=message) as caught:
        from_huggingface(directory)
    assert type(caught.value).__module__ == "evenpack.errors"


MALFORMED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"num_key_value_heads": value}, "num_key_value_heads[: ].*found ")
        for value in (0, "32", [32], 32.0, True, 1 << 40)
    ),
    *(
        ({key: value}, f"{key}: .*valid dictionary")
        for key in ("rope_scaling", "rope_parameters")
        for value in ("llama3", [1], 0)
    ),
    *(({"rope_theta": value}, "rope_theta: .*found ") for value in (None, "x", 0)),
    *(({"rope_parameters": {"rope_theta": value}}, "rope_parameters.rope_theta: .*found ") for value in (None, "x")),
    *(({"rope_scaling": {"rope_type": value}}, "rope_scaling: Input tag .*'default', 'llama3'") for value in ([1], 3)),
    ({"rope_scaling": {**THEIR_SCALING, "factor": None}}, "rope_scaling.factor: .*valid number, found None"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: no such key"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings: .*valid boolean, found None"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps: .*valid number, found 'x'"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_a_malformed_config_is_refused_by_file_and_key(change: dict[str, Any], message: str) -> None:
    values = LLAMA_MAPPING.config_values(our_model(key_value_heads=2), 0)
    with pytest.raises(CheckpointError, match=rf"^config\.json:\n  {message}"):
        LLAMA_MAPPING.read_config(values | change, "config.json")


PLAIN = {"rope_type": "default"}
ABSENT: dict[str, Any] = dict.fromkeys(("rope_scaling", "rope_parameters"))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_theta": 500},
        {"rope_scaling": THEIR_SCALING},
        {"rope_theta": 500.0, "rope_scaling": {**THEIR_SCALING, "type": "llama3"}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type" if key == "rope_type" else key: THEIR_SCALING[key] for key in THEIR_SCALING},
        },
        {"rope_parameters": {**PLAIN, "rope_theta": 500.0}, "rope_scaling": {}},
        {"rope_theta": 500.0, "rope_parameters": THEIR_SCALING},
        {"rope_theta": 500, "rope_scaling": THEIR_SCALING, "rope_parameters": {**THEIR_SCALING, "rope_theta": 500.0}},
    ],
)
def test_rotations_are_read_as_transformers_reads_them(given: dict[str, Any]) -> None:
    values = LLAMA_MAPPING.config_values(our_model(key_value_heads=2), 0) | ABSENT
    del values["rope_theta"]
    config, _ = LLAMA_MAPPING.read_config(values | given, "config.json")
    theirs = TheirConfig.from_dict(copy.deepcopy(values | given)).rope_parameters
    expected = THEIR_SCALING if theirs["rope_type"] == "llama3" else None
    assert (config.rotary_base, config.rotary_scaling) == (theirs["rope_theta"], expected and RotaryScaling(**SCALING))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"rope_scaling": THEIR_SCALING, "rope_parameters": {**PLAIN, "rope_theta": 1e4}},
            "rope_scaling and rope_parameters",
        ),
        ({"rope_theta": 5e5, "rope_parameters": {**PLAIN, "rope_theta": 1e4}}, "rope_theta and rope_parameters"),
        (
            {"rope_scaling": THEIR_SCALING, "rope_parameters": {**THEIR_SCALING, "rope_theta": 5e5}},
            "rope_scaling and rope_parameters",
        ),
        (
            {"rope_scaling": {**THEIR_SCALING, "factor": 4.0}, "rope_parameters": THEIR_SCALING},
            "rope_scaling and rope_parameters",
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": THEIR_SCALING, "rope_parameters": {**THEIR_SCALING, "rope_theta": 1e4}},
            "rope_theta and rope_scaling and rope_parameters",
        ),
    ],
)
def test_rotations_that_disagree_are_refused_by_both_names(given: dict[str, Any], named: str) -> None:
    values = LLAMA_MAPPING.config_values(our_model(key_value_heads=2), 0) | ABSENT
    del values["rope_theta"]
    with pytest.raises(CheckpointError, match=rf"^config\.json: {named} must describe the same rotations") as caught:
        LLAMA_MAPPING.read_config(values | given, "config.json")
    assert all(f"{key} {value!r}" in str(caught.value) for key, value in given.items())


def test_an_export_of_scaled_rotations_reaches_over_the_positions_that_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run with 8,192 positions, as many as before the scaling, of which transformers would warn."""
    warnings: list[str] = []
    monkeypatch.setattr(modeling_rope_utils.logger, "warning", warnings.append)
    with torch.device("meta"):
        model = new_model(LlamaConfig(kind="llama", preset="8b"), vocabulary_size=VOCABULARY, max_positions=8192)
    values = LLAMA_MAPPING.config_values(model, 0)
    TheirConfig.from_dict(copy.deepcopy(values))
    assert (values["max_position_embeddings"], warnings) == (8 * 8192, [])
    config, sizes = LLAMA_MAPPING.read_config(values, "config.json")
    assert config.unseen_in_weights == model.config.unseen_in_weights
    assert sizes == {"vocabulary_size": VOCABULARY, "max_positions": 8 * 8192}
    TheirConfig.from_dict(copy.deepcopy(values) | {"max_position_embeddings": 8192})
    assert "must be less than max_position_embeddings" in warnings[0]
    with torch.device("meta"):
        longer = new_model(LlamaConfig(kind="llama", preset="8b"), vocabulary_size=VOCABULARY, max_positions=32_768)
    assert LLAMA_MAPPING.config_values(longer, 0)["max_position_embeddings"] == 32_768


def test_a_checkpoint_of_an_older_release_is_read(tmp_path: Path) -> None:
    """Such releases name the base `rope_theta`, omit key/value heads if each head has its own, and store constants."""
    model = our_model(key_value_heads=4, rotary_base=123.0)
    to_huggingface(model, tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    path, weights = tmp_path / "out" / "config.json", tmp_path / "out" / "model.safetensors"
    values = json.loads(path.read_text())
    for key in ("rope_parameters", "num_key_value_heads", "head_dim"):
        del values[key]
    path.write_text(json.dumps(values))
    tensors = load_file(weights)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, weights)
    back = from_huggingface(tmp_path / "out")
    assert (back.config.rotary_base, back.config.shape["key_value_heads"]) == (123.0, 4)


def test_scaled_rotations_give_the_logits_losses_and_gradients_of_transformers(tmp_path: Path) -> None:
    """To 1e-6 by norm: the rotations are equal bit for bit, and what is left is the order of sums elsewhere.

    With these weights the gradients of both differ by up to 2.5e-6 from those in FP64.
    """
    model = our_model(**KINDS["scaled rotations"])
    to_huggingface(model, tmp_path / "out", tokenizer_dir=None, special_token_id=5)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    (tokens,) = random_sequences([POSITIONS], vocabulary_size=VOCABULARY, seed=9)
    batch, _ = build_batch([[tokens]], "packed", max_sequence_length=POSITIONS)
    ours = model(batch)["next_token"].loss_sum / (POSITIONS - 1)
    expected = theirs(torch.tensor([tokens]), labels=torch.tensor([tokens]))
    assert_near(next_token_logits(model, batch), expected.logits[0], "logits")
    assert_near(ours, expected.loss, "loss")
    ours.backward()
    expected.loss.backward()
    names = {name.ours: name for name in LLAMA_MAPPING.tensor_names(model)}
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, torch.cat([gradients[one] for one in names[name].theirs]), name)
    unscaled = our_model(key_value_heads=2, rotary_base=500.0)
    unscaled.load_state_dict(model.state_dict())
    assert abs(unscaled(batch)["next_token"].loss_sum.item() / (POSITIONS - 1) - expected.loss.item()) > 1e-3


@pytest.mark.parametrize(
    "section", [LlamaConfig(kind="llama", preset="8b"), KINDS["scaled rotations"]], ids=["8b", "tiny"]
)
def test_scaled_rotations_are_those_of_transformers_bit_for_bit(section: Any) -> None:
    config = section if isinstance(section, LlamaConfig) else LlamaConfig(kind="llama", **SHAPE, **section)
    with torch.device("meta"):
        model = new_model(config, vocabulary_size=VOCABULARY, max_positions=131_072)
    theirs = LlamaRotaryEmbedding(TheirConfig(**LLAMA_MAPPING.config_values(model, 0)))
    positions = torch.cat([torch.arange(8192), torch.arange(8192, 131_072, 97)])
    half, scaling = config.head_dim // 2, config.rotary_scaling
    ours = Rotation.at(positions, head_dim=config.head_dim, base=config.rotary_base, scaling=scaling)
    cos, sin = theirs(torch.zeros(1), positions[None])
    assert torch.equal(ours.cos[:, 0], cos[0])
    assert torch.equal(ours.sin[:, 0, half:], sin[0, :, half:])
    assert torch.equal(ours.sin[:, 0, :half], -sin[0, :, :half])


def test_a_scaling_of_an_older_release_is_read(tmp_path: Path) -> None:
    """Llama 3.1's own config.json names it `rope_scaling`, and the base beside it."""
    model = our_model(key_value_heads=2, rotary_base=500.0, rotary_scaling=SCALING)
    to_huggingface(model, tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    path = tmp_path / "out" / "config.json"
    values = json.loads(path.read_text())
    assert values.pop("rope_parameters") == {"rope_theta": 500.0, **THEIR_SCALING}
    assert values["rope_scaling"] == THEIR_SCALING
    path.write_text(json.dumps(values))
    assert from_huggingface(tmp_path / "out").config.unseen_in_weights == model.config.unseen_in_weights


def test_a_model_larger_than_a_file_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(key_value_heads=2)
    to_huggingface(model, tmp_path / "whole", tokenizer_dir=None, special_token_id=0)
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 60_000)
    to_huggingface(model, tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 3
    shards = [load_file(tmp_path / "out" / name) for name in names]
    assert all(sum(tensor.nbytes for tensor in shard.values()) <= 60_000 for shard in shards)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"] == {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    assert_equal_logits(model, LlamaForCausalLM.from_pretrained(tmp_path / "out").eval())
    back = from_huggingface(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("files", [None, ["model.safetensors"], {"model.norm.weight": 5}])
def test_an_index_that_names_no_files_is_refused(files: Any, tmp_path: Path) -> None:
    to_huggingface(our_model(key_value_heads=2), tmp_path / "out", tokenizer_dir=None, special_token_id=0)
    index = tmp_path / "out" / "model.safetensors.index.json"
    os.mkfifo(tmp_path / "out" / "pipe")
    index.write_text(json.dumps({"weight_map": {"a": "pipe"}}))
    with pytest.raises(CheckpointError, match=r"pipe is not a file; expected weights"):
        from_huggingface(tmp_path / "out")
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=r"index\.json must name the file of each tensor in its weight_map"):
        from_huggingface(tmp_path / "out")


def test_llama_8b_has_the_tensors_of_transformers_at_full_depth() -> None:
    """Without memory: names and shapes of all, and the files that it would be written to."""
    sizes = {"vocabulary_size": 128_256, "max_positions": 131_072}
    with torch.device("meta"):
        model = new_model(LlamaConfig(kind="llama", preset="8b"), **sizes)
        theirs = LlamaForCausalLM(TheirConfig(**LLAMA_MAPPING.config_values(model, 128_001)))
    parameters = huggingface.named_parameters(model, LLAMA_MAPPING.tensor_names(model))
    shapes = {
        key: part.shape for one, name in parameters for key, part in zip(name.theirs, name.parts_of(one), strict=True)
    }
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    shards = huggingface.shards_of(parameters, huggingface.SHARD_BYTES)
    held = [sum(4 * one.numel() for one, _ in shard) for shard in shards]
    assert (len(held), sum(held)) == (7, 4 * 8_030_261_248)
    assert max(held) <= huggingface.SHARD_BYTES
