import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from batches import build_batch, random_sequences
from scored_tokens import next_token_logits

from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

VOCABULARY = 61
LONGEST = 24


def tiny(*, max_positions=LONGEST, seed=0, backend="auto", layers=3, **settings):
    config = Gpt2Config(kind="gpt2", preset="tiny", layers=layers, hidden_size=48, heads=3, **settings)
    return Gpt2(config, vocabulary_size=VOCABULARY, max_positions=max_positions, attention_backend=backend, seed=seed)


def some_batch(seed=0):
    sequences = random_sequences([7, 1, 12, 4, 24], vocabulary_size=VOCABULARY, seed=seed)
    return build_batch([sequences[:4], sequences[4:]], "packed", max_sequence_length=LONGEST, pack_length=28)


def test_the_loss_is_the_weighted_sum_over_the_logits():
    model, (batch, _) = tiny(), some_batch()
    losses = F.cross_entropy(next_token_logits(model, batch), batch.targets["next_token"].labels, reduction="none")
    hits = (next_token_logits(model, batch).argmax(-1) == batch.targets["next_token"].labels) & (
        batch.targets["next_token"].weights > 0
    )
    sums = model(batch)
    torch.testing.assert_close(
        sums["next_token"].loss_sum, (losses * batch.targets["next_token"].weights).sum(), rtol=1e-6, atol=0.0
    )
    assert sums["next_token"].loss_sum.dtype == torch.float32
    assert int(sums["next_token"].correct) == int(hits.sum())
    assert batch.local_counts.targets == int((batch.targets["next_token"].weights > 0).sum()) == 6 + 0 + 11 + 3 + 23


def test_initial_weights_follow_gpt2():
    config = Gpt2Config(kind="gpt2", preset="tiny", layers=8, hidden_size=256, heads=4)
    parameters = dict(Gpt2(config, vocabulary_size=512, max_positions=64).named_parameters())
    residual = ("attention.output.weight", "feed_forward.contract.weight")
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1.0).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith(residual) else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 6 * expected / math.sqrt(parameter.numel()), name


def test_alibi_has_no_position_parameters_and_no_longest_sequence():
    model, (batch, _) = tiny(positions="alibi", max_positions=1), some_batch()
    assert not [name for name, _ in model.named_parameters() if "position" in name]
    shifted = replace(batch, position_ids=batch.position_ids + 1000)
    assert torch.equal(next_token_logits(model, batch), next_token_logits(model, shifted))


@pytest.mark.parametrize("has_slopes", [True, False])
def test_alibi_distinguishes_orders(has_slopes, monkeypatch):
    """With one layer and no positions, the order of earlier tokens has no effect, as slopes of 0 show."""
    if not has_slopes:
        monkeypatch.setattr("evenpack.models.common.decoder.alibi_slopes", lambda heads, _: torch.zeros(heads))
    model = tiny(positions="alibi", layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    orders = [build_batch([[tokens]], "packed", max_sequence_length=LONGEST)[0] for tokens in ([7, 11, 2], [11, 7, 2])]
    difference = (next_token_logits(model, orders[0])[-1] - next_token_logits(model, orders[1])[-1]).abs().max().item()
    assert difference > 1e-2 if has_slopes else difference < 1e-5


def test_sequences_longer_than_the_position_table_are_refused():
    with pytest.raises(ValueError, match="model has 23"):
        tiny(max_positions=23)(some_batch()[0])


@pytest.mark.slow
def test_one_step_at_the_full_width_of_xl_lowers_the_loss():
    config = Gpt2Config(kind="gpt2", preset="xl", layers=2)
    assert config.shape == {"layers": 2, "hidden_size": 1600, "heads": 25}
    model = Gpt2(config, vocabulary_size=50257, max_positions=1024)
    sequences = random_sequences([9, 3, 14], vocabulary_size=50257)
    batch, _ = build_batch([sequences], "packed", max_sequence_length=1024, pack_length=32)
    first = model(batch)
    assert first["next_token"].loss_sum.item() / batch.local_counts.targets == pytest.approx(math.log(50257), rel=0.05)
    (first["next_token"].loss_sum / batch.local_counts.targets).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    second = model(batch)
    assert second["next_token"].loss_sum.item() < 0.97 * first["next_token"].loss_sum.item()
