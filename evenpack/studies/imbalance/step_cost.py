"""The cost of a micro-batch in a simulated cluster: a measured cost model, or an explicit estimate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Real
from pydantic import Field

from evenpack.config import Section, nearest, validate
from evenpack.engine.optimizers.config import OptimizerSection
from evenpack.engine.resolving.cost_model import CostModel, LinearSeconds, read_cost_values
from evenpack.engine.resolving.cost_weights import head_share
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.errors import ConfigError
from evenpack.models.config import ModelConfig
from evenpack.models.families import family_of
from evenpack.studies.cost_model_estimate import linear_seconds
from evenpack.visible_pairs import visible_pairs

SHIPPED = Path(__file__).parent / "cost_models"
DEFAULT_COST = "bert_large_estimate"
_DEVICE = "h100"
"""Device of the estimates."""


class EstimatedCost(Section):
    """What `studies/cost_model_estimate.py` computes the seconds of a micro-batch from; this model was not measured."""

    model: ModelConfig
    vocabulary_size: int = Field(ge=2)
    max_positions: int = Field(ge=1)
    """Rows of a learned position table."""
    head_share: float = Field(gt=0.0, le=1.0)
    """Rows of the output head per slot: 1 for next tokens, the share of masked ones for masked tokens."""
    optimizer: OptimizerSection
    device: str
    """Device with measured rates."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of micro-batches and steps, and their origin."""

    name: str
    origin: str
    """Description for people: device, model, and whether it was measured."""
    estimated: bool
    device: str
    """Device that it was measured on, or estimated for."""
    causal: bool
    """Whether the model's attention is causal: a padded row then costs its whole width squared (`placement.py`)."""
    constant: float
    """Seconds per micro-batch."""
    per_slot: float
    per_squared_length: float
    """Seconds for each pair of tokens that attend to each other in all layers: where no layer has a window, for each
    squared length."""
    window_shares: Mapping[int, float]
    """The shares of these seconds that are in layers with a window."""
    per_segment: float
    per_step: float
    """Seconds once per step, on every rank: the optimizer."""

    def attended(self, lengths: Int64[np.ndarray, "*shape"]) -> Real[np.ndarray, "*shape"]:
        """Returns the pairs that attention computes in segments of these lengths, as an average of the layers.

        That is length² in layers without a window.
        """
        pairs: Real[np.ndarray, "*shape"] = lengths**2
        for window, share in self.window_shares.items():
            pairs = pairs - share * (lengths**2 - visible_pairs(lengths, window=window, causal=False))
        return pairs

    def seconds(
        self,
        slots: Int64[np.ndarray, "*shape"],
        attended: Real[np.ndarray, "*shape"],
        segments: Int64[np.ndarray, "*shape"],
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the seconds of micro-batches, without noise."""
        seconds = self.constant + self.per_slot * slots + self.per_squared_length * attended
        return seconds + self.per_segment * segments if self.per_segment else seconds


def shipped_costs() -> tuple[str, ...]:
    """Returns the names that `find_cost` knows."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find_cost(given: str) -> StepCost:
    """Returns a shipped cost model by name, or one in a file.

    Raises: ConfigError if there is neither, or if the file holds something else.
    """
    path = Path(given)
    if given in shipped_costs():
        path = SHIPPED / f"{given}.json"
    elif not path.is_file():
        raise ConfigError(f"cost model {given} is neither a file nor a shipped one; {nearest(given, shipped_costs())}")
    values = read_cost_values(path)
    if "measured_on" not in values:
        return _estimated(path.stem, validate(values, EstimatedCost, origin=f"cost model {path}"))
    cost = _measured(path.stem, validate(values, CostModel, origin=f"cost model {path}"))
    if cost.constant + cost.per_slot + cost.per_squared_length + cost.per_segment == 0:
        raise ConfigError(
            f"cost model {path}: constant, per_slot, per_squared_length and per_segment are all 0, so no micro-batch "
            "takes any time; measure again by `evenpack study throughput --cost-model`"
        )
    return cost


def estimate_for(run: ResolvedRun) -> StepCost:
    """Returns the cost of a run's model on the device of the shipped estimates.

    Raises: ConfigError for a family that does not describe its layers.
    """
    config, prepared = run.config, run.prepared
    cost = EstimatedCost(
        model=config.model,
        vocabulary_size=prepared.vocabulary_size,
        max_positions=run.config.max_positions,
        head_share=head_share(config, prepared),
        optimizer=config.optimizer,
        device=_DEVICE,
    )
    return _estimated("estimate of the run's model", cost)


def _estimated(name: str, cost: EstimatedCost) -> StepCost:
    model = cost.model
    seconds = linear_seconds(
        model,
        vocabulary_size=cost.vocabulary_size,
        max_positions=cost.max_positions,
        head_share=cost.head_share,
        optimizer=cost.optimizer,
        device=cost.device,
    )
    return StepCost(
        name=name,
        origin=f"ESTIMATE, not measured: operations of {model.kind} {model.preset} at rates measured on one "
        f"{cost.device}, bfloat16, compiled, {cost.optimizer.kind}",
        estimated=True,
        device=f"NVIDIA {cost.device.upper()}, bfloat16",
        causal=family_of(model).causal,
        **_terms(seconds),
    )


def _terms(seconds: LinearSeconds) -> dict[str, Any]:
    of_attention = seconds.per_squared_length + sum(seconds.per_pair_within.values())
    return {
        "constant": seconds.constant,
        "per_slot": seconds.per_slot,
        "per_squared_length": of_attention,
        "window_shares": {
            window: per_pair / of_attention for window, per_pair in seconds.per_pair_within.items() if of_attention
        },
        "per_segment": seconds.per_segment,
        "per_step": seconds.per_step,
    }


def _measured(name: str, model: CostModel) -> StepCost:
    on = model.measured_on
    commit = f", commit {on.commit[:9]}" if on.commit else ""
    return StepCost(
        name=name,
        origin=f"measured: {on.model} ({on.layers} layers, width {on.hidden_size}, {on.rows_per_micro_batch} rows per "
        f"micro-batch), {on.precision}, on {on.device}, "
        f"{on.date[:10]}{commit}; error on held-out micro-batches {100 * model.held_out_median_error:.1f} % (median)",
        estimated=False,
        device=on.device,
        causal=on.causal,
        **_terms(model),
    )
