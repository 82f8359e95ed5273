"""The cost of packs and sequences to a rank, for `cost_balanced`: measured, or by the model's operations."""

from dataclasses import replace

from evenpack.data.order.step_shape import CostWeights
from evenpack.data.prepared import PreparedData
from evenpack.engine.config import RunConfig, TrainingSection
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.errors import ConfigError
from evenpack.models.config import ModelConfig
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of

_TOKENS = 2000
"""Number of tokens that is large enough for a fraction of masked ones."""


def read_cost_model(training: TrainingSection, model: ModelConfig) -> CostModel | None:
    """Reads the file that `training.cost_model` names; None if it names none.

    Raises: ConfigError if it cannot be read, or was measured on another model or layout. The device, the width and the
    number of layers may differ: large models are measured on a few layers.
    """
    path = training.cost_model
    if path is None:
        return None
    try:
        cost_model = CostModel.read(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. A run that is resumed in the same layout has its weights in the checkpoint: set "
            "training.cost_model=null for it"
        ) from error
    differences = _differences(cost_model, training, model)
    if differences:
        raise ConfigError(
            f"training.cost_model {path} {', and '.join(differences)}: measure this run by `evenpack study throughput "
            "--cost-model FILE`"
        )
    return cost_model


def operation_weights(config: RunConfig, prepared: PreparedData) -> CostWeights:
    """Returns weights by the model's floating-point operations; segments cost nothing.

    The unit is a pair of tokens that attend to each other in all layers: without windows, a squared length.
    """
    model = config.model
    if config.training.layout == "packed" and not model.windows:
        return CostWeights(per_token=0.0, per_squared_length=1.0, per_segment=0.0)

    def flops(work: Work) -> int:
        return step_flops(model, vocabulary_size=prepared.vocabulary_size, work=work)

    head_slots = round(_TOKENS * head_share(config, prepared))
    nothing = Work(slots=0, squared_lengths=0, head_slots=0, sequences=0, pairs_within=dict.fromkeys(model.windows, 0))
    of_tokens = flops(replace(nothing, slots=_TOKENS, head_slots=head_slots))
    of_squares = flops(replace(nothing, squared_lengths=_TOKENS))
    of_windows = {
        window: flops(replace(nothing, pairs_within={**nothing.pairs_within, window: _TOKENS}))
        for window in model.windows
    }
    of_attention = of_squares + sum(of_windows.values())
    if of_attention == 0:  # a model without attention
        return CostWeights(per_token=1.0, per_squared_length=0.0, per_segment=0.0)
    return CostWeights(
        per_token=of_tokens / of_attention,
        per_squared_length=of_squares / of_attention,
        per_segment=0.0,
        per_pair_within={window: flops / of_attention for window, flops in of_windows.items()},
    )


def head_share(config: RunConfig, prepared: PreparedData) -> float:
    """Returns the rows of the output head per token: all for a model of next tokens, or those masked.

    The masked share of the training tokens is that of the stored masks, or else that of the section `masking`.
    """
    if family_of(config.model).objective != "masked_tokens":
        return 1.0
    if not prepared.config.has_stored_masks:
        return config.masking.share
    masks = tokens = 0
    for name in prepared.source_names:
        masks += prepared.stored_masks(name)
        tokens += prepared.view(name, "train").accounting.tokens_kept
    return masks / tokens


def _differences(cost_model: CostModel, training: TrainingSection, model: ModelConfig) -> list[str]:
    """Returns the properties of this run that the measurement did not have."""
    on, found = cost_model.measured_on, []
    if on.family != model.kind:
        found.append(f"was measured on {on.model}, and model.kind is {model.kind}")
    if (windows := tuple(sorted(cost_model.per_pair_within))) != model.windows:
        found.append(
            f"has costs within {_named(windows)}, and the layers of this {model.kind} have {_named(model.windows)}"
        )
    layouts = {name.partition("/")[0] for name in on.layouts}
    if training.layout not in layouts:
        found.append(
            f"was measured in the layouts {', '.join(sorted(layouts))}, and training.layout is {training.layout}"
        )
    return found


def _named(windows: tuple[int, ...]) -> str:
    if not windows:
        return "no window"
    return f"windows of {', '.join(map(str, windows))}"
