"""Both losses of BERT are exact means over the step, each with its own denominator (invariant 6)."""

import pytest
import torch
from masked_batches import build_masked_batch, random_pairs, roughen

from evenpack.losses import StepCounts
from evenpack.models.bert.config import BertConfig
from evenpack.models.bert.model import Bert
from evenpack.models.common.loss_sums import LossOutput, exact_denominators, expected_denominators, scaled_loss
from evenpack.models.gpt2.config import Gpt2Config

VOCABULARY = 31
LENGTHS = [3, 17, 2, 9, 4, 24, 5, 5, 11, 2, 2, 20, 7, 31, 13, 4]
COUNTS = StepCounts(packs=8, sequences=20, tokens=900, targets=130)


def bert_config(**settings):
    return BertConfig(kind="bert", preset="tiny", layers=2, hidden_size=32, heads=2, dropout=0.0, **settings)


def some_sums():
    return {
        "masked_token": LossOutput(torch.tensor(30.0), torch.tensor(4)),
        "next_sentence": LossOutput(torch.tensor(5.0), torch.tensor(2)),
    }


def test_exact_denominators_are_what_the_step_holds():
    per_token = exact_denominators(bert_config(), COUNTS)
    per_sequence = exact_denominators(bert_config(mlm_reduction="sequence"), COUNTS)
    assert per_token == {"masked_token": 130.0, "next_sentence": 20.0}
    assert per_sequence == {"masked_token": 20.0, "next_sentence": 20.0}
    assert exact_denominators(Gpt2Config(kind="gpt2"), COUNTS) == {"next_token": 130.0}


def test_one_next_sentence_loss_a_pack_is_divided_by_packs():
    config = bert_config(next_sentence_reduction="pack")
    assert exact_denominators(config, COUNTS)["next_sentence"] == 8.0
    settings = {"targets_of_a_full_pack": 76.0, "token_efficiency": 1.0, "packing_factor": 2.0}
    assert expected_denominators(config, packs=3, **settings)["next_sentence"] == 3.0


def test_an_empty_step_divides_by_one():
    empty = StepCounts(packs=0, sequences=0, tokens=0, targets=0)
    for kind in ("token", "sequence"):
        denominators = exact_denominators(bert_config(mlm_reduction=kind), empty)
        assert denominators == {"masked_token": 1.0, "next_sentence": 1.0}


def test_expected_denominators_follow_equations_25_and_26():
    """Batch 3 of section T.6: un-padded sequences of 512 half full, and two perfectly packed to one."""
    plain = {"packs": 6, "targets_of_a_full_pack": 76.0, "token_efficiency": 0.5, "packing_factor": 1.0}
    packed = {"packs": 3, "targets_of_a_full_pack": 76.0, "token_efficiency": 1.0, "packing_factor": 2.0}
    for settings in (plain, packed):
        per_token = expected_denominators(bert_config(), **settings)
        assert per_token == {"masked_token": 3 * 76.0, "next_sentence": 6.0}
        per_sequence = expected_denominators(bert_config(mlm_reduction="sequence"), **settings)
        assert per_sequence == {"masked_token": 6.0, "next_sentence": 6.0}


def test_each_loss_is_divided_by_its_own_denominator():
    loss = scaled_loss(some_sums(), exact_denominators(bert_config(), COUNTS), world_size=2, accumulation=4)
    assert loss.item() == pytest.approx(8 * (30.0 / 130 + 5.0 / 20), rel=1e-6)


def test_a_model_that_returns_other_losses_than_its_section_declares_is_refused():
    denominators = exact_denominators(bert_config(next_sentence=False), COUNTS)
    with pytest.raises(ValueError, match=r"returned the losses masked_token, next_sentence, .* declares masked_token:"):
        scaled_loss(some_sums(), denominators, world_size=1, accumulation=1)


@pytest.mark.parametrize("mlm_reduction", ["token", "sequence"])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_split_gives_the_gradient_of_both_global_means(world_size, accumulation, mlm_reduction):
    """The result is the mean over ranks of the mean over micro-batches, as in data parallelism with accumulation."""
    config = bert_config(mlm_reduction=mlm_reduction)
    model = Bert(config, vocabulary_size=VOCABULARY, max_positions=32)
    roughen(model)
    parameters = list(model.parameters())
    pairs = random_pairs(LENGTHS, vocabulary_size=VOCABULARY)
    expected_loss = mean_losses(model, pairs, mlm_reduction)
    expected = torch.autograd.grad(expected_loss, parameters)

    parts = world_size * accumulation
    share, loss_mean = len(pairs) // parts, 0.0
    whole = StepCounts(packs=1, sequences=16, tokens=sum(LENGTHS), targets=sum(len(pair.masked) for pair in pairs))
    denominators = exact_denominators(config, whole)
    model.zero_grad()
    for part in range(parts):
        batch = batch_of(pairs[part * share : (part + 1) * share], mlm_reduction)
        loss = scaled_loss(model(batch), denominators, world_size=world_size, accumulation=accumulation)
        loss_mean += loss.item() / parts
        (loss / accumulation / world_size).backward()
    assert loss_mean == pytest.approx(expected_loss.item(), rel=1e-6)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm()


def batch_of(pairs, mlm_reduction):
    return build_masked_batch([pairs], "packed", max_sequence_length=32, mlm_reduction=mlm_reduction)[0]


def mean_losses(model, pairs, mlm_reduction):
    """Computes the losses by definition, sequence by sequence, without denominators."""
    token_losses, pair_losses = [], []
    for pair in pairs:
        sums = model(batch_of([pair], "token"))
        token_losses.append(sums["masked_token"].loss_sum)
        pair_losses.append(sums["next_sentence"].loss_sum)
    counts = torch.tensor([float(len(pair.masked)) for pair in pairs])
    losses = torch.stack(token_losses)
    token_loss = losses.sum() / counts.sum() if mlm_reduction == "token" else (losses / counts).mean()
    return token_loss + torch.stack(pair_losses).mean()
