"""What a model costs, by the formulas of its family: parameters and floating-point operations.

The conventions stand in `common/cost.py`. Nothing here needs torch or depends on the hardware.
"""

from evenpack.models.common.cost import Work
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import family_of

__all__ = ["Work", "parameter_count", "step_flops"]


def parameter_count(config: TransformerConfig, *, vocabulary_size: int, max_positions: int) -> int:
    """Trained numbers of the model; an output matrix that is the token embedding counts once."""
    count = family_of(config).cost.parameter_count
    return count(config, vocabulary_size=vocabulary_size, max_positions=max_positions)


def step_flops(config: TransformerConfig, *, vocabulary_size: int, work: Work) -> int:
    """Operations of forward and backward over `work`: a micro-batch's, a step's or a run's; see the conventions."""
    return family_of(config).cost.step_flops(config, vocabulary_size=vocabulary_size, work=work)
