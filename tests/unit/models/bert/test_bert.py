import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import masked_token_logits, next_sentence_logits

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

VOCABULARY = 61
LONGEST = 24


def tiny(*, max_positions=LONGEST, seed=0, backend="auto", layers=3, dropout=0.0, **settings):
    config = BertConfig(kind="bert", preset="tiny", layers=layers, hidden_size=48, heads=3, dropout=dropout, **settings)
    return Bert(config, vocabulary_size=VOCABULARY, max_positions=max_positions, attention_backend=backend, seed=seed)


def some_batch(lengths=((7, 2, 12, 4), (24,)), **settings):
    packs = [random_pairs(pack, vocabulary_size=VOCABULARY, seed=index) for index, pack in enumerate(lengths)]
    return build_masked_batch(packs, "packed", max_sequence_length=LONGEST, pack_length=28, **settings)[0]


def total(sums):
    return sum(output.loss_sum for output in sums.values())


def gradients(model, batch):
    model.zero_grad()
    loss = total(model(batch))
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# What is summed


@pytest.mark.parametrize("mlm_reduction", ["token", "sequence"])
def test_the_losses_are_weighted_sums_over_the_logits(mlm_reduction):
    model, batch = tiny(), some_batch(mlm_reduction=mlm_reduction)
    sums, targets = model(batch), batch.targets
    masked, pairs = masked_token_logits(model, batch), next_sentence_logits(model, batch)
    losses = F.cross_entropy(masked, targets["masked_token"].labels, reduction="none")
    torch.testing.assert_close(
        sums["masked_token"].loss_sum, (losses * targets["masked_token"].weights).sum(), rtol=1e-6, atol=0.0
    )
    pair_losses = F.cross_entropy(pairs, targets["next_sentence"].labels, reduction="none")
    expected = (pair_losses * targets["next_sentence"].weights).sum()
    torch.testing.assert_close(sums["next_sentence"].loss_sum, expected, rtol=1e-6, atol=0.0)
    assert sums["masked_token"].loss_sum.dtype == sums["next_sentence"].loss_sum.dtype == torch.float32
    assert int((targets["masked_token"].weights > 0).sum()) == 1 + 1 + 2 + 1 + 4


def test_what_fills_up_the_arrays_changes_neither_sums_nor_gradients():
    model, batch = tiny(), some_batch()
    other = {}
    for loss, (position, label) in {"masked_token": (40, 5), "next_sentence": (30, 1)}.items():
        targets = batch.targets[loss]
        unused = targets.weights == 0
        assert unused.any()
        other[loss] = replace(
            targets,
            positions=torch.where(unused, position, targets.positions),
            labels=torch.where(unused, label, targets.labels),
        )
    expected, found = gradients(model, batch), gradients(model, replace(batch, targets=other))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    sums, others = model(batch), model(replace(batch, targets=other))
    assert torch.equal(sums["masked_token"].correct, others["masked_token"].correct)
    assert torch.equal(sums["next_sentence"].correct, others["next_sentence"].correct)


def test_every_parameter_is_trained():
    for name, gradient in gradients(tiny(), some_batch())[1].items():
        assert gradient.any(), name


def test_shapes_depend_on_nothing_that_changes_from_batch_to_batch():
    """Each layer sees the same shapes, however many sequences and masked tokens there are."""
    model, seen = tiny(), []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, inputs, output: seen[-1].append((inputs[0].shape, output.shape)))
    for lengths in (((7, 2, 12, 4), (24,)), ((3,), (5, 5)), ((2, 2, 2, 2, 2, 2),) * 2):
        seen.append([])
        batch = some_batch(lengths, max_targets=14, max_sequences=12)
        total(model(batch))
        assert batch.slots == 56
    assert len(seen[0]) > 20
    assert seen[0] == seen[1] == seen[2]


def test_the_heads_run_at_chosen_slots_only():
    model, batch, rows = tiny(), some_batch(max_targets=11, max_sequences=6), {}
    heads = {"masked": model.masked_token_head, "pairs": model.next_sentence_head}
    for name, head in heads.items():
        head.register_forward_pre_hook(lambda _, inputs, name=name: rows.update({name: len(inputs[0])}))
    model(batch)
    assert rows == {"masked": 11, "pairs": 6}
    assert batch.slots == 56


# What is read


def test_positions_beyond_the_table_are_refused():
    with pytest.raises(ValueError, match="model has 23"):
        tiny(max_positions=23)(some_batch())


def test_positions_that_run_through_the_pack_need_a_table_of_its_length():
    batch = some_batch()
    running = replace(batch, position_ids=torch.arange(56) % 28, position_rows=28)
    with pytest.raises(ValueError, match=r"up to 28 tokens .* the model has 24"):
        tiny()(running)
    model = tiny(max_positions=28)
    assert not torch.allclose(masked_token_logits(model, running), masked_token_logits(model, batch))


def test_targets_of_the_other_kind_are_refused():
    causal, _ = build_batch([random_sequences([7], vocabulary_size=VOCABULARY)], "packed", max_sequence_length=LONGEST)
    with pytest.raises(ValueError, match="Bert learns from targets masked_token, the batch has next_token"):
        tiny()(causal)
    masked = some_batch()
    masked = replace(masked, targets={"masked_token": masked.targets["masked_token"]})
    with pytest.raises(ValueError, match=r"has targets next_sentence, or set model\.next_sentence=false"):
        tiny()(masked)
    gpt2 = Gpt2(Gpt2Config(kind="gpt2", preset="tiny"), vocabulary_size=VOCABULARY, max_positions=LONGEST)
    with pytest.raises(
        ValueError, match="Gpt2 learns from targets next_token, the batch has masked_token, next_sentence"
    ):
        gpt2(some_batch())


# Study switches


def test_without_next_sentence_the_masked_tokens_are_predicted_as_before():
    batch = some_batch()
    whole, alone = tiny(), tiny(next_sentence=False)
    sums = alone(batch)
    assert torch.equal(sums["masked_token"].loss_sum, whole(batch)["masked_token"].loss_sum)
    assert list(sums) == ["masked_token"]
    assert not [name for name, _ in alone.named_parameters() if "next_sentence" in name]
    assert all(gradient.any() for gradient in gradients(alone, batch)[1].values())


# Weights


def test_initial_weights_follow_bert():
    config = BertConfig(kind="bert", preset="tiny", hidden_size=256, heads=4)
    for name, parameter in Bert(config, vocabulary_size=512, max_positions=64).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name


# Dropout


def test_dropout_of_residuals_drops_all_that_blocks_add():
    model, batch = tiny(layers=1), some_batch()
    model.blocks[0].residual_dropout.p = 1.0
    embedded = model.token_embedding(batch.tokens) + model.token_type_embedding(batch.token_type_ids)
    embedded = embedded + model.positions.table(batch.position_ids)
    normalised = F.layer_norm(embedded, (48,), eps=1e-12)
    torch.testing.assert_close(model.hidden_states(batch), normalised, rtol=0.0, atol=1e-5)


# At full width


@pytest.mark.slow
def test_one_step_at_the_full_width_of_large_lowers_both_losses():
    config = BertConfig(kind="bert", preset="large", layers=2, dropout=0.0)
    assert config.shape == {"layers": 2, "hidden_size": 1024, "heads": 16}
    model = Bert(config, vocabulary_size=30522, max_positions=512)
    pairs = random_pairs([30, 9, 60], vocabulary_size=30522)
    batch, _ = build_masked_batch([pairs], "packed", max_sequence_length=512, pack_length=128)
    first = model(batch)
    counts = batch.local_counts
    assert first["masked_token"].loss_sum.item() / counts.targets == pytest.approx(math.log(30522), rel=0.05)
    (first["masked_token"].loss_sum / counts.targets + first["next_sentence"].loss_sum / counts.sequences).backward()
    torch.optim.SGD(model.parameters(), lr=0.02).step()
    second = model(batch)
    assert second["masked_token"].loss_sum.item() < 0.97 * first["masked_token"].loss_sum.item()
    assert second["next_sentence"].loss_sum.item() < 0.97 * first["next_sentence"].loss_sum.item()
