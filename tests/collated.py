"""Plans and collates steps of sources in memory, for tests of batches."""

from collections.abc import Sequence

from evenpack.batch import PackedBatch
from evenpack.data.batches.collate import Collator
from evenpack.data.batches.objectives import NextTokens, Objective
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.order.step_plan import StepPlanner
from evenpack.data.order.step_shape import StepShape
from evenpack.losses import NO_COUNTS

NEXT_TOKENS = NextTokens()
PADDING_TOKEN = 3


def planner_of(
    sources: Sequence[PackedSource], shape: StepShape, objective: Objective = NEXT_TOKENS, *, ranks: int = 1
) -> StepPlanner:
    """Returns the planner of sources of equal weights."""
    return StepPlanner(sources, [1] * len(sources), shape=shape, ranks=ranks, objective=objective)


def collator_of(
    sources: Sequence[PackedSource],
    shape: StepShape,
    objective: Objective = NEXT_TOKENS,
    *,
    pack_length: int,
    padding_token: int = PADDING_TOKEN,
    vocabulary_size: int = 1_000_000,
    fills_rows: bool = True,
) -> Collator:
    return Collator(
        sources,
        shape=shape,
        objective=objective,
        pack_length=pack_length,
        padding_token=padding_token,
        vocabulary_size=vocabulary_size,
        fills_rows=fills_rows,
    )


def batches_of(planner: StepPlanner, collator: Collator, step: int) -> list[tuple[PackSelection, PackedBatch]]:
    """Returns the packs and the batch of each micro-batch of all ranks, which together hold what the plan counts."""
    plan, found, held = planner.plan(step), [], NO_COUNTS
    for rank in range(planner.ranks):
        for index in range(plan.micro_batches):
            packs = plan.micro_batch(rank, index)
            batch = collator.collate(packs, plan.counts)
            assert batch.step_counts == plan.counts
            held += batch.local_counts
            found.append((packs, batch))
    assert held == plan.counts
    return found
