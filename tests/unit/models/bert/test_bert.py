from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch, random_sequences
from masked_batches import build_masked_batch, random_pairs
from scored_tokens import masked_token_logits

from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

VOCABULARY = 61
LONGEST = 24


def tiny(*, max_positions=LONGEST, layers=3, **settings):
    config = BertConfig(kind="bert", preset="tiny", layers=layers, hidden_size=48, heads=3, dropout=0.0, **settings)
    return Bert(config, vocabulary_size=VOCABULARY, max_positions=max_positions)


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


def test_what_fills_up_the_arrays_changes_neither_sums_nor_gradients():
    model, batch = tiny(), some_batch()
    other = {}
    for loss, (position, label) in {"masked_token": (40, 5), "next_sentence": (30, 1)}.items():
        targets = batch.targets[loss]
        unused = targets.weights == 0
        assert unused.any()
        positions = torch.where(unused, position, targets.positions)
        other[loss] = replace(targets, positions=positions, labels=torch.where(unused, label, targets.labels))
    batches = (batch, replace(batch, targets=other))
    expected, found = (gradients(model, one) for one in batches)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    sums, others = (model(one) for one in batches)
    assert all(torch.equal(output.correct, others[loss].correct) for loss, output in sums.items())


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
    gpt2 = Gpt2(Gpt2Config(kind="gpt2", preset="tiny"), vocabulary_size=VOCABULARY, max_positions=LONGEST)
    with pytest.raises(ValueError, match="Gpt2 learns from targets next_token, the batch has masked_token"):
        gpt2(masked)
    masked = replace(masked, targets={"masked_token": masked.targets["masked_token"]})
    with pytest.raises(ValueError, match=r"model\.next_sentence=false"):
        tiny()(masked)


def test_without_next_sentence_the_masked_tokens_are_predicted_as_before():
    batch = some_batch()
    whole, alone = tiny(), tiny(next_sentence=False)
    sums = alone(batch)
    assert torch.equal(sums["masked_token"].loss_sum, whole(batch)["masked_token"].loss_sum)
    assert list(sums) == ["masked_token"]
    assert not [name for name, _ in alone.named_parameters() if "next_sentence" in name]
    assert all(gradient.any() for gradient in gradients(alone, batch)[1].values())


def test_dropout_of_residuals_drops_all_that_blocks_add():
    model, batch = tiny(layers=1), some_batch()
    model.blocks[0].residual_dropout.p = 1.0
    embedded = model.token_embedding(batch.tokens) + model.token_type_embedding(batch.token_type_ids)
    embedded = embedded + model.positions.table(batch.position_ids)
    normalised = F.layer_norm(embedded, (48,), eps=1e-12)
    torch.testing.assert_close(model.hidden_states(batch), normalised, rtol=0.0, atol=1e-5)
