"""The cost of a micro-batch in a simulated cluster: a measured cost model, or an explicit estimate."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import Field

from evenpack.config import Section, nearest, validate
from evenpack.engine.cost_model import CostModel, read_cost_values
from evenpack.errors import ConfigError
from evenpack.models.common.section import TransformerConfig
from evenpack.models.cost import Work, step_flops
from evenpack.models.families import family_of

SHIPPED = Path(__file__).with_name("cost_models")
DEFAULT_COST = "bert_large_estimate"
_MANY = 1 << 20
"""Number of pairs at which rounding to whole pairs has no effect."""


class EstimatedCost(Section):
    """Seconds computed from operations and assumed fractions of a device's peak; nothing is measured.

    It contains no constant and no optimizer. In the shipped ones an operation takes as long in attention as elsewhere:
    this is neutral, because real attention is slower, which favours layouts with short segments even more.
    """

    model: str
    causal: bool
    flops_per_slot: float = Field(gt=0.0)
    """Operations of forward and backward, blocks only: embeddings, norms and heads are left out."""
    flops_per_squared_length: float = Field(gt=0.0)
    device: str
    peak_flops: float = Field(gt=0.0)
    """Dense peak in operations per second."""
    utilisation: float = Field(gt=0.0, le=1.0)
    """Fraction of the peak that matrix products outside attention reach."""
    attention_utilisation: float = Field(gt=0.0, le=1.0)


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
    per_segment: float
    per_step: float
    """Seconds once per step, on every rank: the optimizer."""
    noise: float
    """Standard deviation of seconds / expected seconds."""

    def seconds(
        self,
        slots: Int64[np.ndarray, "*shape"],
        squared_lengths: Int64[np.ndarray, "*shape"],
        segments: Int64[np.ndarray, "*shape"],
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the seconds of micro-batches, without noise."""
        seconds = self.constant + self.per_slot * slots + self.per_squared_length * squared_lengths
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
            f"cost model {path}: constant, per_token, per_squared_length and per_segment are all 0, so no micro-batch "
            "takes any time; measure again by `evenpack study throughput --cost-model`"
        )
    return cost


def estimate_for(model: TransformerConfig) -> StepCost:
    """Returns the cost of a model at the utilisation that the shipped estimates assume."""

    def flops(**work: int) -> float:
        nothing = {"slots": 0, "squared_lengths": 0, "head_slots": 0, "sequences": 0}
        return step_flops(model, vocabulary_size=1, work=Work(**(nothing | work))) / _MANY

    assumed = validate(read_cost_values(SHIPPED / f"{DEFAULT_COST}.json"), EstimatedCost, origin=DEFAULT_COST)
    estimate = assumed.model_copy(
        update={
            "model": f"{model.kind} {model.preset}",
            "causal": family_of(model).causal,
            "flops_per_slot": flops(slots=_MANY),
            "flops_per_squared_length": flops(squared_lengths=_MANY),
        }
    )
    return _estimated("estimate of the run's model", estimate)


def _estimated(name: str, cost: EstimatedCost) -> StepCost:
    return StepCost(
        name=name,
        origin=f"ESTIMATE, not measured: {cost.model} on {cost.device} at {100 * cost.utilisation:.0f} % of "
        f"{cost.peak_flops / 1e12:.0f} TFLOP/s, attention at {100 * cost.attention_utilisation:.0f} %; no optimizer",
        estimated=True,
        device=cost.device,
        causal=cost.causal,
        constant=0.0,
        per_slot=cost.flops_per_slot / (cost.peak_flops * cost.utilisation),
        per_squared_length=cost.flops_per_squared_length / (cost.peak_flops * cost.attention_utilisation),
        per_segment=0.0,
        per_step=0.0,
        noise=0.0,
    )


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
        constant=model.constant,
        per_slot=model.per_token,
        per_squared_length=model.per_squared_length,
        per_segment=model.per_segment,
        per_step=model.per_step,
        noise=model.noise,
    )
