"""What packs and sequences cost a rank, for `cost_balanced`: measured, or by the model's operations."""

import logging

from evenpack.data.order.step_shape import CostWeights
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig
from evenpack.engine.cost_model import CostModel
from evenpack.errors import ConfigError
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of

log = logging.getLogger(__name__)

_TOKENS = 2000
"""Enough for a share of masked ones."""


def read_cost_model(config: RunConfig) -> CostModel | None:
    """The file that `training.cost_model` names; None where it names none.

    Raises: ConfigError if it cannot be read, or was measured on another model or layout and
    `training.cost_model_of_another` is not `use`.
    """
    path = config.training.cost_model
    if path is None:
        return None
    try:
        cost_model = CostModel.read(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. A run that goes on from its checkpoint in the same layout has its weights there: set "
            "training.cost_model=null for it"
        ) from error
    for difference in _differences(cost_model, config):
        if config.training.cost_model_of_another == "refuse":
            raise ConfigError(
                f"training.cost_model {path} {difference}: measure this run by `evenpack study throughput "
                "--cost-model FILE`, or set training.cost_model_of_another=use"
            )
        log.warning("training.cost_model %s %s, and is used all the same", path, difference)
    _warn_of_other_width(cost_model, config)
    return cost_model


def warn_of_other_device(cost_model: CostModel, device: str) -> None:
    """One warning if the cost model was measured on another device than the one that it is used on."""
    if cost_model.measured_on.device != device:
        log.warning(
            "the cost model was measured on %s and this is %s: the assignment may be less even than it could be",
            cost_model.measured_on.device,
            device,
        )


def _warn_of_other_width(cost_model: CostModel, config: RunConfig) -> None:
    """A slot's cost grows with the square of the width and attention's with the width, so their ratio is another.

    The number of layers may differ: cost models of large models are measured on a few of them.
    """
    measured, here = cost_model.measured_on.hidden_size, config.model.shape["hidden_size"]
    if measured != here:
        log.warning(
            "training.cost_model %s was measured at hidden_size %d and this model has %d: the assignment may be less "
            "even than it could be",
            config.training.cost_model,
            measured,
            here,
        )


def operation_weights(config: RunConfig, prepared: PreparedData) -> CostWeights:
    """By the model's floating-point operations, in units of a squared length; segments cost nothing."""

    def flops(work: Work) -> int:
        return step_flops(config.model, vocabulary_size=prepared.vocabulary_size, work=work)

    if config.training.layout == "packed":
        return CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0)
    is_masked = family_of(config.model).objective == "masked_tokens"
    head_share = (config.static_masks or config.masking).share if is_masked else 1.0
    of_tokens = flops(Work(slots=_TOKENS, squared_lengths=0, head_slots=round(_TOKENS * head_share), sequences=0))
    of_squares = flops(Work(slots=0, squared_lengths=_TOKENS, head_slots=0, sequences=0))
    return CostWeights(per_token=of_tokens / of_squares, per_squared_length=1.0, per_segment=0.0)


def _differences(cost_model: CostModel, config: RunConfig) -> list[str]:
    """What of this run the measurement did not have."""
    on, found = cost_model.measured_on, []
    if on.family != config.model.kind:
        found.append(f"was measured on {on.model}, and model.kind is {config.model.kind}")
    layouts = {name.partition("/")[0] for name in on.layouts}
    if config.training.layout not in layouts:
        found.append(
            f"was measured in the layouts {', '.join(sorted(layouts))}, and training.layout is {config.training.layout}"
        )
    return found
