from dataclasses import replace

import pytest
import torch
from batches import build_batch, random_sequences
from scored_tokens import next_token_logits

from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

VOCABULARY = 61
LONGEST = 24


def tiny(*, max_positions=LONGEST, layers=3):
    config = Gpt2Config(kind="gpt2", preset="tiny", layers=layers, hidden_size=48, heads=3, positions="alibi")
    return Gpt2(config, vocabulary_size=VOCABULARY, max_positions=max_positions)


def test_alibi_has_no_position_parameters_and_no_longest_sequence():
    model = tiny(max_positions=1)
    sequences = random_sequences([7, 1, 12, 4, 24], vocabulary_size=VOCABULARY)
    batch, _ = build_batch([sequences], "packed", max_sequence_length=LONGEST)
    assert not [name for name, _ in model.named_parameters() if "position" in name]
    shifted = replace(batch, position_ids=batch.position_ids + 1000)
    assert torch.equal(next_token_logits(model, batch), next_token_logits(model, shifted))


@pytest.mark.parametrize("has_slopes", [True, False])
def test_alibi_distinguishes_orders(has_slopes, monkeypatch):
    """With one layer and no positions, the order of earlier tokens has no effect, as slopes of 0 show."""
    if not has_slopes:
        monkeypatch.setattr("evenpack.models.common.decoder.alibi_slopes", lambda heads, _: torch.zeros(heads))
    model = tiny(layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    orders = [build_batch([[tokens]], "packed", max_sequence_length=LONGEST)[0] for tokens in ([7, 11, 2], [11, 7, 2])]
    difference = (next_token_logits(model, orders[0])[-1] - next_token_logits(model, orders[1])[-1]).abs().max().item()
    assert difference > 1e-2 if has_slopes else difference < 1e-5
