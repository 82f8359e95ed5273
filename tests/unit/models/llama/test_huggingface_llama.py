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

from evenpack.errors import CheckpointError, EvenpackError
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
PLAIN = {"rope_type": "default"}
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
def test_either_loads_what_the_other_saves_and_gives_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    rotations = THEIR_SCALING if "rotary_scaling" in changes else PLAIN
    config = TheirConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=changes["key_value_heads"],
        max_position_embeddings=POSITIONS,
        rms_norm_eps=changes.get("norm_epsilon", 1e-6),
        rope_parameters={"rope_theta": changes.get("rotary_base", 10_000.0), **rotations},
        tie_word_embeddings=changes.get("tied_head", False),
        initializer_range=0.1,
        pad_token_id=None,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = from_huggingface(tmp_path / "theirs")
    assert model.max_positions == POSITIONS
    assert_equal_logits(model, theirs)
    to_huggingface(model, tmp_path / "ours", tokenizer_dir=None, special_token_id=5)
    back, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert (back.config.eos_token_id, back.config.max_position_embeddings) == (5, POSITIONS)
    assert_equal_logits(model, back.eval())
    of_older_releases = json.loads((tmp_path / "ours" / "config.json").read_text())["rope_scaling"]
    assert of_older_releases == (THEIR_SCALING if "rotary_scaling" in changes else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            r"rope_parameters\.low_freq_factor: this key is required",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: .*'linear' found .*'default', 'llama3'",
        ),
        ({"rope_parameters": {**THEIR_SCALING, "low_freq_factor": 4.0}}, r"low_frequency_factor \(4\) must be below"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_a_llama_that_we_do_not_compute_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    to_huggingface(our_model(key_value_heads=2), directory, tokenizer_dir=None, special_token_id=0)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EvenpackError, match=message):
        from_huggingface(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": True}, "num_key_value_heads[: ].*found "),
        ({"rope_scaling": "llama3"}, "rope_scaling: .*valid dictionary"),
        ({"rope_parameters": 0}, "rope_parameters: .*valid dictionary"),
        ({"rope_theta": None}, "rope_theta: .*found None"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta: .*found 'x'"),
        ({"rope_scaling": {"rope_type": [1]}}, "rope_scaling: Input tag .*'default', 'llama3'"),
        ({"rope_scaling": {**THEIR_SCALING, "factor": None}}, "rope_scaling.factor: .*valid number, found None"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: no such key"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings: .*valid boolean, found None"),
    ],
)
def test_a_malformed_config_is_refused_by_file_and_key(change: dict[str, Any], message: str) -> None:
    values = LLAMA_MAPPING.config_values(our_model(key_value_heads=2), 0)
    with pytest.raises(CheckpointError, match=rf"^config\.json:\n  {message}"):
        LLAMA_MAPPING.read_config(values | change, "config.json")


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
    "given",
    [
        {"rope_theta": 5e5, "rope_parameters": {**PLAIN, "rope_theta": 1e4}},
        {"rope_scaling": THEIR_SCALING, "rope_parameters": {**PLAIN, "rope_theta": 1e4}},
        {"rope_scaling": {**THEIR_SCALING, "factor": 4.0}, "rope_parameters": THEIR_SCALING},
        {"rope_theta": 5e5, "rope_scaling": THEIR_SCALING, "rope_parameters": {**THEIR_SCALING, "rope_theta": 1e4}},
    ],
)
def test_rotations_that_disagree_are_refused_by_both_names(given: dict[str, Any]) -> None:
    values = LLAMA_MAPPING.config_values(our_model(key_value_heads=2), 0) | ABSENT
    del values["rope_theta"]
    with pytest.raises(CheckpointError, match=rf"{' and '.join(given)} must describe the same rotations") as caught:
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
    with pytest.raises(CheckpointError, match=r"pipe is not a file"):
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
