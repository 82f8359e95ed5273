"""Every rank gets the same number of packs in every step, in an order independent of ranks (invariants 4 and 5)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from forked_ranks import run_ranks
from tiny_training import changed, never, prepare_run, records

from evenpack.engine.build import find_start
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import open_run
from evenpack.engine.train import train_in
from evenpack.engine.world.distributed import World

FEW = ["the first of three lines", "another line of this", "and the third line is it"]
SHORT = ["a b", "c d e", "f", "ghi jk", "lm no", "p q r s t", "uv wx y z", "0 1", "2 3 4 5", "67 89"]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The packs of one rank in one step."""

    packs_of_micro_batches: tuple[int, ...]
    few: tuple[int, ...]
    """Sequence ids of the source `few`, which fill a pack each."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Prepares two sources; an epoch of the first has three packs, fewer than ranks and far fewer than a step."""
    return prepare_run(tmp_path_factory.mktemp("equal_steps"), {"few": FEW, "short": SHORT})


def draw_and_train(world: World, config: RunConfig) -> tuple[int, list[Drawn]]:
    """Returns the packs of an epoch of `few` and those that this rank draws; then trains, which writes metrics."""
    run = find_start(open_run(config), world)
    epoch = run.prepared.plan("few", "train", seed=config.run.seed).packs
    drawn = []
    for batches in run.batches(stop_step=config.training.steps):
        few = [
            number
            for batch in batches.micro_batches
            for number in batch.sequence_ids[batch.sequence_ids >= 0].tolist()
            if batch.source_tokens[1] == 0
        ]
        packs = tuple(batch.local_counts.packs for batch in batches.micro_batches)
        drawn.append(Drawn(packs_of_micro_batches=packs, few=tuple(few)))
    train_in(world, config, stop_requested=never)
    return epoch, drawn


Outcome = tuple[list[tuple[int, list[Drawn]]], list[dict[str, Any]]]


def outcome(config: RunConfig, ranks: int) -> Outcome:
    """Returns the packs that the ranks drew, and the run's metrics."""
    folder = config.prepared_dir.parent / f"ranks_{ranks}"
    run = changed(config, run={"output_dir": folder}, training={"packs_per_micro_batch": 1})
    return run_ranks(draw_and_train, ranks, run), records(run)


@pytest.fixture(scope="module")
def together(config: RunConfig) -> Outcome:
    return outcome(config, 4)


def test_every_rank_gets_the_same_number_of_packs_in_every_step(config: RunConfig, together: Outcome):
    drawn, found = together
    assert drawn[0][0] == len(FEW) < 4, "an epoch must hold fewer packs than there are ranks"
    assert len(found) == config.training.steps
    for _, steps in drawn:
        assert [step.packs_of_micro_batches for step in steps] == [(1, 1)] * config.training.steps


def test_epochs_follow_one_another_and_nothing_repeats_or_is_left_out(config: RunConfig, together: Outcome):
    seen: Counter[int] = Counter()
    for step in range(config.training.steps):
        seen.update(number for _, steps in together[0] for number in steps[step].few)
        # Half of each step's eight packs come from `few`, so that steps cross the ends of its epochs of three.
        assert sum(seen.values()) == 4 * (step + 1)
        assert max(seen.values()) - min(seen[number] for number in range(len(FEW))) <= 1


def test_order_and_loss_are_those_of_one_rank(config: RunConfig, together: Outcome):
    alone = outcome(config, 1)[1]
    for name in ("order_hash", "tokens", "targets", "sequences", "source_tokens"):
        assert [record[name] for record in together[1]] == [record[name] for record in alone], name
    assert len({record["order_hash"] for record in alone}) == len(alone), "steps differ"
    for name in ("loss", "gradient_norm"):
        assert [record[name] for record in together[1]] == pytest.approx([record[name] for record in alone], rel=1e-5)
