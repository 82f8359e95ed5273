import pytest
import torch
from batches import build_batch, random_sequences

from evenpack.losses import StepCounts
from evenpack.models.common.loss_sums import LossOutput, exact_denominators, scaled_loss
from evenpack.models.gpt2.config import Gpt2Config
from evenpack.models.gpt2.model import Gpt2

VOCABULARY = 31
CONFIG = Gpt2Config(kind="gpt2", preset="tiny", layers=2, hidden_size=32, heads=2)
LENGTHS = [3, 17, 2, 9, 1, 24, 5, 5, 11, 2, 2, 20, 7, 1, 13, 4]


def test_the_scale_undoes_the_averages_of_ranks_and_micro_batches():
    sums = {"next_token": LossOutput(torch.tensor(30.0), torch.tensor(0))}
    counts = StepCounts(packs=8, sequences=8, tokens=48, targets=40)
    loss = scaled_loss(sums, exact_denominators(CONFIG.losses, counts), world_size=2, accumulation=4)
    assert loss.item() == 30.0 * 2 * 4 / 40


def test_a_step_without_targets_has_loss_and_gradient_zero():
    model = Gpt2(Gpt2Config(kind="gpt2", preset="tiny"), vocabulary_size=VOCABULARY, max_positions=4)
    batch, _ = build_batch([[[5], [6]]], "packed", max_sequence_length=4)
    loss = scaled_loss(model(batch), exact_denominators(CONFIG.losses, batch.step_counts), world_size=1, accumulation=1)
    loss.backward()
    assert loss.item() == 0.0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_split_of_unequal_targets_gives_the_gradient_of_the_global_mean(world_size, accumulation):
    """The result is the mean over ranks of the mean over micro-batches, as in data parallelism with accumulation."""
    model = Gpt2(CONFIG, vocabulary_size=VOCABULARY, max_positions=32)
    parameters = list(model.parameters())
    sequences = random_sequences(LENGTHS, vocabulary_size=VOCABULARY)
    whole, _ = build_batch([sequences], "packed", max_sequence_length=32)
    sums = model(whole)
    expected_loss = sums["next_token"].loss_sum / whole.local_counts.targets
    expected = torch.autograd.grad(expected_loss, parameters)

    parts = world_size * accumulation
    denominators = exact_denominators(CONFIG.losses, whole.step_counts)
    share, loss_mean = len(sequences) // parts, 0.0
    model.zero_grad()
    for part in range(parts):
        batch, _ = build_batch([sequences[part * share : (part + 1) * share]], "packed", max_sequence_length=32)
        loss = scaled_loss(model(batch), denominators, world_size=world_size, accumulation=accumulation)
        loss_mean += loss.item() / parts
        (loss / accumulation / world_size).backward()
    assert loss_mean == pytest.approx(expected_loss.item(), rel=1e-6)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm()
