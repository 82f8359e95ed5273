"""Measures how long other ranks wait for the rank with the most attention to compute.

    python benchmarks/balance.py [--histogram FILE.json --key wikipedia_512] [--json]

Consecutive steps of packs (longest pack first, in the shuffled order of a plan) are assigned to the ranks in order of
arrival, that is at random; most expensive pack first to the least expensive rank with room; and by `assign_by_cost`.
The figure is the most expensive rank's sum of length² over the mean rank's, averaged over the steps. With gradient
accumulation, where the ranks wait for each other in every micro-batch, the sums of the most expensive ranks of all
micro-batches are added up.
"""

import heapq
import time
from collections.abc import Callable

import measuring
import numpy as np

from evenpack.data.order.balance import assign_by_cost
from evenpack.data.order.plan import PackPlan
from evenpack.data.packing import pack

Assigner = Callable[[np.ndarray, int, int], np.ndarray]


def main() -> None:
    parser = measuring.parser_of(__doc__)
    measuring.add_histogram(parser)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--packs-per-rank", type=int, default=8, help="in a step, or in each micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches, for the second part")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    name, histogram = measuring.load_histogram(arguments)
    packing = pack(histogram, pack_length=len(histogram.counts))
    # Only lengths matter here: the index of sequences is a constant and takes no memory.
    plan = PackPlan(packing, np.broadcast_to(np.int32(0), histogram.sequences), key=1)
    ranks, share = arguments.ranks, arguments.packs_per_rank
    steps = [pack_costs(plan, step, ranks * share) for step in range(arguments.steps)]
    report: dict[str, float | int | str] = {
        "histogram": name,
        "ranks": ranks,
        "packs_per_rank": share,
        "steps": len(steps),
    }
    for assigner in (at_random, most_expensive_to_cheapest, balanced):
        report |= measure(assigner, steps, ranks, 1)
    report["random_to_balanced"] = round(float(report["at_random"]) / float(report["balanced"]), 3)
    packs = ranks * share * arguments.accumulation
    for assigner in (at_random, balanced, balanced_in_each_micro_batch):
        found = measure(assigner, [pack_costs(plan, step, packs) for step in range(10)], ranks, arguments.accumulation)
        report |= {f"accumulating_{figure}": value for figure, value in found.items()}
    measuring.print_report(report, as_json=arguments.json)


def pack_costs(plan: PackPlan, step: int, packs: int) -> np.ndarray:
    drawn = plan.draw(np.arange(step * packs, (step + 1) * packs))
    return np.add.reduceat(drawn.lengths**2, drawn.offsets[:-1]).astype(np.float64)


def measure(assigner: Assigner, steps: list[np.ndarray], ranks: int, micro_batches: int) -> dict[str, float]:
    imbalances = []
    start = time.process_time()
    all_assigned = [assigner(costs, ranks, micro_batches) for costs in steps]
    seconds = (time.process_time() - start) / len(steps)
    for costs, assigned in zip(steps, all_assigned, strict=True):
        sums = costs[assigned].sum(axis=2)
        imbalances.append(sums.max(axis=0).sum() / sums.mean(axis=0).sum())
    name = assigner.__name__
    return {
        name: round(float(np.mean(imbalances)), 4),
        f"{name}_worst_step": round(max(imbalances), 4),
        f"{name}_milliseconds": round(seconds * 1e3, 2),
    }


def at_random(costs: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
    return np.arange(len(costs)).reshape(ranks, micro_batches, -1)


def balanced(costs: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
    return assign_by_cost(costs, ranks=ranks, micro_batches=micro_batches, per_micro_batch=False)


def balanced_in_each_micro_batch(costs: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
    return assign_by_cost(costs, ranks=ranks, micro_batches=micro_batches, per_micro_batch=True)


def most_expensive_to_cheapest(costs: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
    heap = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in np.argsort(-costs, kind="stable").tolist():
        cost, rank = heapq.heappop(heap)
        shares[rank].append(index)
        if len(shares[rank]) < len(costs) // ranks:
            heapq.heappush(heap, (cost + costs[index], rank))
    return np.array(shares).reshape(ranks, micro_batches, -1)


if __name__ == "__main__":
    main()
