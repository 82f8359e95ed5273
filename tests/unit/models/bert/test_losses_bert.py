"""Both losses of BERT are exact means over the step, each with its own denominator (invariant 6)."""

import pytest
import torch

from evenpack.losses import StepCounts
from evenpack.models.bert.config import BertConfig
from evenpack.models.common.loss_sums import LossOutput, exact_denominators, expected_denominators, scaled_loss
from evenpack.models.gpt2.config import Gpt2Config

COUNTS = StepCounts(packs=8, sequences=20, tokens=900, targets=130)


def bert_config(**settings):
    return BertConfig(kind="bert", preset="tiny", layers=2, hidden_size=32, heads=2, dropout=0.0, **settings)


def some_sums():
    return {
        "masked_token": LossOutput(torch.tensor(30.0), torch.tensor(4)),
        "next_sentence": LossOutput(torch.tensor(5.0), torch.tensor(2)),
    }


def test_exact_denominators_are_what_the_step_holds():
    per_token = exact_denominators(bert_config().losses, COUNTS)
    per_sequence = exact_denominators(bert_config(mlm_reduction="sequence").losses, COUNTS)
    assert per_token == {"masked_token": 130.0, "next_sentence": 20.0}
    assert per_sequence == {"masked_token": 20.0, "next_sentence": 20.0}
    assert exact_denominators(Gpt2Config(kind="gpt2").losses, COUNTS) == {"next_token": 130.0}


def test_one_next_sentence_loss_a_pack_is_divided_by_packs():
    config = bert_config(next_sentence_reduction="pack")
    assert exact_denominators(config.losses, COUNTS)["next_sentence"] == 8.0
    settings = {"targets_of_a_full_pack": 76.0, "token_efficiency": 1.0, "packing_factor": 2.0}
    assert expected_denominators(config, packs=3, **settings)["next_sentence"] == 3.0


def test_an_empty_step_divides_by_one():
    empty = StepCounts(packs=0, sequences=0, tokens=0, targets=0)
    for kind in ("token", "sequence"):
        denominators = exact_denominators(bert_config(mlm_reduction=kind).losses, empty)
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
    loss = scaled_loss(some_sums(), exact_denominators(bert_config().losses, COUNTS), world_size=2, accumulation=4)
    assert loss.item() == pytest.approx(8 * (30.0 / 130 + 5.0 / 20), rel=1e-6)


def test_a_model_that_returns_other_losses_than_its_section_declares_is_refused():
    denominators = exact_denominators(bert_config(next_sentence=False).losses, COUNTS)
    with pytest.raises(ValueError, match=r"returned the losses masked_token, next_sentence, .* declares masked_token:"):
        scaled_loss(some_sums(), denominators, world_size=1, accumulation=1)
