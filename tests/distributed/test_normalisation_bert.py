"""However a step of BERT is split, its gradient is that of its pairs one by one (invariants 3 and 6)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import run_ranks
from masked_batches import MaskedPair, build_masked_batch, random_pairs, roughen
from run_files import pair_run_values
from run_files import run_config as checked_run

from evenpack.batch import PackedBatch
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import TrainingEngine
from evenpack.engine.world.distributed import World
from evenpack.models.bert.model import Bert
from evenpack.models.common.loss_sums import exact_denominators

PACKS = 8
PACK_LENGTH = 40
VOCABULARY = 61
ACCUMULATIONS = (1, 2, 4)
REDUCTIONS = ("token", "sequence")


def make_packs() -> list[list[MaskedPair]]:
    """Returns packs of one to four pairs, from a few tokens to full, so that both counts of shares are very unequal."""
    lengths = [[3], [5, 2], [2, 2, 2, 2], [17], [9, 12], [20, 20], [10, 10, 10, 10], [40]]
    return [random_pairs(parts, vocabulary_size=VOCABULARY, seed=index) for index, parts in enumerate(lengths)]


def run_config(*, ranks: int, accumulation: int, mlm_reduction: str, loss_balancing: str = "exact") -> RunConfig:
    return checked_run(
        pair_run_values(
            "bert",
            Path("unused"),
            data={"recipe": {"kind": "sentence_pairs", "max_sequence_length": PACK_LENGTH}, "pack_length": PACK_LENGTH},
            model={"mlm_reduction": mlm_reduction, "loss_balancing": loss_balancing},
            training={
                "packs_per_step": PACKS,
                "packs_per_micro_batch": PACKS // (ranks * accumulation),
                "steps": 10,
                "gradient_clipping": None,
            },
        )
    )


def make_model(config: RunConfig) -> Bert:
    assert config.model.kind == "bert"
    model = Bert(config.model, vocabulary_size=VOCABULARY, max_positions=PACK_LENGTH, seed=3)
    roughen(model)
    return model


def packed(packs: list[list[MaskedPair]], mlm_reduction: str) -> PackedBatch:
    return build_masked_batch(
        packs, "packed", max_sequence_length=PACK_LENGTH, pack_length=PACK_LENGTH, mlm_reduction=mlm_reduction
    )[0]


def micro_batches(world: World, *, accumulation: int, mlm_reduction: str) -> list[PackedBatch]:
    """Returns a rank's share, with the counts of the whole step."""
    packs = make_packs()
    counts = packed(packs, mlm_reduction).step_counts
    size = PACKS // (world.size * accumulation)
    first = world.rank * accumulation * size
    return [
        replace(
            packed(packs[first + index * size : first + (index + 1) * size], mlm_reduction=mlm_reduction),
            step_counts=counts,
        )
        for index in range(accumulation)
    ]


def reference_gradients(model: Bert, mlm_reduction: str) -> list[torch.Tensor]:
    """Computes gradients of the mean masked-token loss plus the mean next-sentence loss, pair by pair."""
    token_losses, pair_losses, counts = [], [], []
    for pair in (pair for pack in make_packs() for pair in pack):
        sums = model(build_masked_batch([[pair]], "unpadded", max_sequence_length=PACK_LENGTH)[0])
        token_losses.append(sums["masked_token"].loss_sum)
        pair_losses.append(sums["next_sentence"].loss_sum)
        counts.append(float(len(pair.masked)))
    losses, divisors = torch.stack(token_losses), torch.tensor(counts)
    token_loss = losses.sum() / divisors.sum() if mlm_reduction == "token" else (losses / divisors).mean()
    return list(torch.autograd.grad(token_loss + torch.stack(pair_losses).mean(), list(model.parameters())))


def largest_errors(world: World) -> dict[tuple[str, int], float]:
    """Returns the largest relative error (L2) of a parameter's gradient, by reduction and accumulation."""
    errors = {}
    for mlm_reduction in REDUCTIONS:
        for accumulation in ACCUMULATIONS:
            config = run_config(ranks=world.size, accumulation=accumulation, mlm_reduction=mlm_reduction)
            engine = TrainingEngine(
                make_model(config), config, world, denominators=partial(exact_denominators, config.model.losses)
            )
            engine.compute_gradients(0, micro_batches(world, accumulation=accumulation, mlm_reduction=mlm_reduction))
            engine.reduction.finish()
            expected = reference_gradients(make_model(config), mlm_reduction)
            errors[mlm_reduction, accumulation] = max(
                float((parameter.grad - wanted).norm() / wanted.norm())
                for parameter, wanted in zip(engine.model.parameters(), expected, strict=True)
                if parameter.grad is not None
            )
            assert all(parameter.grad is not None for parameter in engine.model.parameters())
            engine.deepspeed.destroy()
    return errors


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_losses_are_means_over_the_whole_step_at_any_split(ranks: int) -> None:
    for errors in run_ranks(largest_errors, ranks):
        assert len(errors) == len(REDUCTIONS) * len(ACCUMULATIONS)
        assert max(errors.values()) <= 1e-5, errors


def plain_means(world: World) -> tuple[float, float, list[list[float]]]:
    """Of two micro-batches per rank, each divided by what it holds itself: how far gradients and losses are off their
    definition, and from the exact mean, and the losses that were optimised, by rank.
    """
    config = run_config(ranks=world.size, accumulation=2, mlm_reduction="token", loss_balancing="micro_batch")
    denominators = partial(exact_denominators, config.model.losses)
    engine = TrainingEngine(make_model(config), config, world, denominators=denominators)
    batches = micro_batches(world, accumulation=2, mlm_reduction="token")
    loss_sums, _, _ = engine.compute_gradients(0, batches)
    optimised = torch.stack(list(engine.optimised_losses(loss_sums, batches).values()))
    engine.reduction.finish()
    model, losses = make_model(config), []
    size = PACKS // (2 * world.size)
    for first in range(0, PACKS, size):
        batch = packed(make_packs()[first : first + size], "token")
        sums = model(batch)
        counts = batch.local_counts
        losses.append(
            torch.stack(
                [sums["masked_token"].loss_sum / counts.targets, sums["next_sentence"].loss_sum / counts.sequences]
            )
        )
    means = torch.stack(losses).mean(dim=0)
    wanted = torch.autograd.grad(means.sum(), list(model.parameters()))
    exact = reference_gradients(make_model(config), "token")
    found = [parameter.grad for parameter in engine.model.parameters()]
    engine.deepspeed.destroy()
    return error(found, wanted), error(found, exact), [means.tolist(), *world.all_gather(optimised.tolist())]


def error(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor]) -> float:
    """Returns the largest relative error (L2) of a parameter."""
    pairs = [(one, other) for one, other in zip(found, wanted, strict=True) if one is not None]
    assert len(pairs) == len(wanted)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def test_plain_means_of_micro_batches_are_what_they_are_called() -> None:
    for from_definition, from_exact, (means, *shares) in run_ranks(plain_means, 2):
        assert from_definition <= 1e-5
        assert from_exact > 0.05, "and no exact mean"
        assert [sum(share) for share in zip(*shares, strict=True)] == pytest.approx(means, rel=1e-5)
