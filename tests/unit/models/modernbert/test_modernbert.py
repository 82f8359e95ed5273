"""ModernBERT: its section, its numbers, its windows, and the same results in every layout and backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import LAYOUTS
from masked_batches import build_masked_batch, random_pairs, roughen
from scored_tokens import masked_token_logits

from evenpack.batch import PackedBatch
from evenpack.config import validate
from evenpack.errors import ConfigError
from evenpack.models.build import Model, new_model
from evenpack.models.cost import Work, parameter_count, step_flops
from evenpack.models.families import find_family
from evenpack.models.modernbert.config import ModernBertConfig

VOCABULARY = 61
LONGEST = 40
LENGTHS = ([40], [25, 9, 2, 3], [13, 13, 11], [3, 30])
CPU_BACKENDS = ("auto", "reference", "sdpa")
SMALL = {"preset": "tiny", "layers": 5, "hidden_size": 48, "heads": 3, "feed_forward_size": 64, "window": 5}
RELATIVE_TOLERANCE = 1e-5


def section(**changes: Any) -> ModernBertConfig:
    return validate({"kind": "modernbert", **SMALL, **changes}, ModernBertConfig, origin="model")


def small_model(*, backend: str = "auto", rough: bool = True, **changes: Any) -> Model:
    model = new_model(
        section(**changes), vocabulary_size=VOCABULARY, max_positions=LONGEST, attention_backend=backend, seed=3
    )
    if rough:
        roughen(model)
    return model


def batch_of(layout: Any = "packed", lengths: tuple[list[int], ...] = LENGTHS) -> tuple[PackedBatch, list[slice]]:
    packs = [random_pairs(pack, vocabulary_size=VOCABULARY, seed=sum(pack)) for pack in lengths]
    return build_masked_batch(packs, layout, max_sequence_length=LONGEST, pack_length=LONGEST)


def loss_and_gradients(model: Model, batch: PackedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(batch)["masked_token"].loss_sum
    loss.backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=RELATIVE_TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.norm() > 0, name
        assert (found[1][name] - gradient).norm() <= RELATIVE_TOLERANCE * gradient.norm(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 16}, r"hidden_size / heads must be even, found 3"),
        ({"heads": 5}, "must be a multiple of heads"),
        ({"next_sentence": False}, "no such key"),
    ],
)
def test_a_section_that_describes_no_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**changes)


@pytest.mark.parametrize(
    ("layers", "every", "windows"),
    [
        (7, 3, [None, 9, 9, None, 9, 9, None]),
        (5, 3, [None, 9, 9, None, 9]),  # as in base, whose 22 layers are no multiple of 3
        (3, 1, [None, None, None]),
        (3, 8, [None, 9, 9]),
    ],
)
def test_the_first_layer_and_then_every_nth_sees_everything(layers: int, every: int, windows: list[int | None]) -> None:
    config = section(layers=layers, global_every_layers=every, window=9)
    assert list(config.attention_windows) == windows
    model = small_model(layers=layers, global_every_layers=every, window=9)
    assert [block.attention.window for block in model.blocks] == windows


@pytest.mark.parametrize(("layers", "every"), [(1, 3), (1, 1), (2, 3), (4, 7), (5, 3), (7, 2)])
def test_operations_of_attention_are_those_of_its_global_and_its_local_layers(layers: int, every: int) -> None:
    config = section(layers=layers, global_every_layers=every, window=5)
    work = Work(
        slots=0, squared_lengths=700, head_slots=0, sequences=0, pairs_within=dict.fromkeys(config.windows, 300)
    )
    of_a_pair = 3 * 4 * config.shape["hidden_size"]  # scores and weighted sums, forward and twice that backward
    pairs = sum(700 if window is None else 300 for window in config.attention_windows)
    assert step_flops(config, vocabulary_size=VOCABULARY, work=work) == of_a_pair * pairs


def test_its_keys_that_weights_do_not_show_are_compared_when_weights_are_loaded() -> None:
    unseen = section().unseen_in_weights
    for change in ({"window": 6}, {"global_every_layers": 2}, {"rotary_base": 1e4}, {"local_rotary_base": 5e3}):
        assert section(**change).unseen_in_weights != unseen
    assert section(norm_epsilon=1e-6).unseen_in_weights != unseen


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("base", 149_655_232), ("large", 395_881_664)],  # the sums of the released safetensors files
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    config = ModernBertConfig(kind="modernbert", preset=preset)
    assert parameter_count(config, vocabulary_size=50_368, max_positions=8192) == parameters


def test_initial_weights_are_cut_normals_smaller_on_the_residual_stream() -> None:
    model = small_model(rough=False, hidden_size=96, feed_forward_size=128)
    assert not any("attention_norm" in name for name, _ in model.blocks[0].named_parameters())
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1.0).all(), name
        elif name.endswith("decoder_bias"):
            assert not parameter.any()
        else:
            shrunk = name.endswith(("attention.output.weight", "contract.weight", "masked_token_head.dense.weight"))
            deviation = 0.02 / (10**0.5 if shrunk else 1.0)
            assert 1.9 * deviation < parameter.abs().max().item() <= 2 * deviation, name
            # Cut at two deviations, a normal distribution has 0.8796 of its deviation left.
            assert parameter.std().item() == pytest.approx(0.8796 * deviation, rel=0.05), name
    assert sum(name.endswith("bias") for name, _ in model.named_parameters()) == 1


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_every_layout_and_backend_gives_the_same_loss_and_gradients(backend: str) -> None:
    expected = loss_and_gradients(small_model(backend="reference"), batch_of("unpadded")[0])
    for layout in LAYOUTS:
        assert_same(loss_and_gradients(small_model(backend=backend), batch_of(layout)[0]), expected)


def test_every_layer_has_the_rotation_of_its_kind() -> None:
    """A change of either base, of the window or of the pattern changes the outputs."""
    batch, _ = batch_of()
    model = small_model()
    expected = masked_token_logits(model, batch)
    for change in ({"rotary_base": 100.0}, {"local_rotary_base": 100.0}, {"window": 4}, {"global_every_layers": 2}):
        other = small_model(**change)
        other.load_state_dict(model.state_dict())
        assert (masked_token_logits(other, batch) - expected).abs().max() > 1e-3, change


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_token_outside_all_windows_is_not_seen_without_a_global_layer(backend: str) -> None:
    """One global layer comes first, whose attention is switched off; two local layers reach ten tokens."""
    model = small_model(backend=backend, layers=3)
    with torch.no_grad():
        model.blocks[0].attention.output.weight.zero_()
    batch, _ = batch_of(lengths=([40],))
    changed = replace(batch, tokens=batch.tokens.index_fill(0, torch.tensor([20]), 7))
    with torch.no_grad():
        before, after = model.hidden_states(batch), model.hidden_states(changed)
    is_changed = (before != after).any(dim=1).nonzero()[:, 0]
    assert is_changed.tolist() == list(range(10, 31))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_changing_one_sequence_changes_no_other(backend: str) -> None:
    """The tails of packs are segments like any other."""
    model = small_model(backend=backend)
    batch, spans = batch_of()
    slots = torch.arange(batch.slots)
    padding = torch.ones(batch.slots, dtype=torch.bool)
    for span in spans:
        padding[span] = False
    with torch.no_grad():
        expected = model.hidden_states(batch)
        for changed in [*(slots[span] for span in spans), slots[padding]]:
            tokens = batch.tokens.clone()
            tokens[changed] = (tokens[changed] + 1) % VOCABULARY
            found = model.hidden_states(replace(batch, tokens=tokens))
            others = ~torch.isin(slots, changed)
            assert torch.equal(found[others], expected[others])
            assert not torch.equal(found[changed], expected[changed])


def test_the_head_runs_at_masked_tokens_only_and_every_parameter_is_trained() -> None:
    model, rows = small_model(), []
    model.masked_token_head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    batch, _ = batch_of()
    _, gradients = loss_and_gradients(model, batch)
    assert rows == [len(batch.targets["masked_token"].labels)]
    assert rows[0] < batch.slots
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.any() for gradient in gradients.values())


def test_it_learns_from_masked_tokens_of_documents() -> None:
    family = find_family("modernbert")
    assert (family.causal, family.objective, family.recipes) == (False, "masked_tokens", ("documents", "concat"))
    assert [loss.name for loss in section().losses] == ["masked_token"]
    batch, _ = batch_of()
    with pytest.raises(ValueError, match="ModernBert learns from targets masked_token, the batch has next_sentence"):
        small_model()(replace(batch, targets={"next_sentence": batch.targets["next_sentence"]}))
