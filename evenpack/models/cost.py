"""Parameters and floating-point operations of a model, by the formulas of its family.

The conventions are in `common/cost.py`. Nothing here needs torch or depends on the hardware.
"""

from evenpack.models.common.cost import Work
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import family_of

__all__ = ["Work", "parameter_count", "step_flops"]


def parameter_count(config: TransformerConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Returns the number of trained parameters; an output matrix that is the token embedding counts once."""
    count = family_of(config).cost.parameter_count
    return count(config, vocabulary_size=vocabulary_size, max_positions=max_positions)


def step_flops(config: TransformerConfig, *, vocabulary_size: int, work: Work) -> int:
    """Returns the operations of forward and backward over the work of a micro-batch, a step or a run."""
    return family_of(config).cost.step_flops(config, vocabulary_size=vocabulary_size, work=work)
