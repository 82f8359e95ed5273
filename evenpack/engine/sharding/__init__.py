"""The split of a model's training state over the ranks (ZeRO), and what a run needs of it.

    stage   split over the ranks                                         here
    0       nothing                                                      `Replicated`
    1       the optimizer's state                                        `PartitionedOptimizer`
    2       the optimizer's state and the gradients                      `PartitionedGradients`
    3       the optimizer's state, the gradients and the parameters      `PartitionedParameters`

A stage is one class and one line of `SHARDINGS`. It decides how gradients are reduced, their norm and clipping, where
ranks synchronise, and whether an optimizer sees whole tensors.

The run file is checked against this package, so torch is imported only where it is used.
"""

from evenpack.engine.sharding.base import Sharding
from evenpack.engine.sharding.partitioned import PartitionedGradients, PartitionedOptimizer, PartitionedParameters
from evenpack.engine.sharding.replicated import Replicated

__all__ = ["SHARDINGS", "Sharding"]

SHARDINGS: dict[int, Sharding] = {
    0: Replicated(),
    1: PartitionedOptimizer(),
    2: PartitionedGradients(),
    3: PartitionedParameters(),
}
