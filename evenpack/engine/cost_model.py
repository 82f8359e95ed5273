"""Seconds of a micro-batch as a function of what it holds: the file that `study throughput` writes and a run reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import Field

from evenpack.config import Section, validate
from evenpack.data.order.step_shape import CostWeights
from evenpack.errors import ConfigError
from evenpack.files import write_json


class MeasuredOn(Section):
    """Where a cost model comes from."""

    device: str
    family: str
    """The model's kind in a run file."""
    model: str
    """Kind and preset or shape."""
    causal: bool
    """Whether the model's attention is."""
    layers: int = Field(ge=1)
    """That were measured; nothing in the figures is scaled to another number."""
    hidden_size: int = Field(ge=1)
    vocabulary_size: int = Field(ge=1)
    rows_per_micro_batch: int = Field(ge=1)
    """Packs or sequences of a whole one. The constant belongs to this number where a part of the model has a fixed size
    for each row, as BERT's masked-token head has."""
    layouts: tuple[str, ...]
    precision: str
    attention: str
    """The backend, or `auto`."""
    evenpack: str
    torch: str
    commit: str | None
    """Of the source, where it is a checkout."""
    date: str
    """ISO 8601, UTC."""


class CostModel(Section):
    """Seconds of forward and backward over a micro-batch:
    constant + per_token · slots + per_squared_length · Σ segment² + per_segment · segments.
    """

    constant: float = Field(ge=0.0)
    per_token: float = Field(ge=0.0)
    """Seconds a slot, real or padding: what a slot costs outside attention."""
    per_squared_length: float = Field(ge=0.0)
    per_segment: float = Field(default=0.0, ge=0.0)
    """0 unless it made the fit clearly better."""
    per_step: float = Field(ge=0.0)
    """Seconds once a step: the optimizer."""
    noise: float = Field(ge=0.0)
    """Standard deviation of the held-out seconds / predicted seconds: what the model leaves unexplained."""
    repeat_noise: float | None = Field(ge=0.0)
    """The same for one micro-batch measured again, about its mean; null where none was."""
    held_out_median_error: float = Field(ge=0.0)
    """Of |seconds / predicted - 1| over micro-batches that the fit has not seen."""
    held_out_95_percent_error: float = Field(ge=0.0)
    """Its 95th percentile."""
    samples: int = Field(ge=1)
    """Measured micro-batches, repeats and held-out ones included."""
    measured_on: MeasuredOn

    def seconds(
        self,
        slots: Int64[np.ndarray, "*shape"],
        squared_lengths: Int64[np.ndarray, "*shape"],
        segments: Int64[np.ndarray, "*shape"] | None = None,
    ) -> Float64[np.ndarray, "*shape"]:
        """Expected seconds of micro-batches, without noise.

        Raises: ValueError if segments cost something and are not given.
        """
        expected = self.constant + self.per_token * slots + self.per_squared_length * squared_lengths
        if self.per_segment == 0.0:
            return expected
        if segments is None:
            raise ValueError("this cost model charges for each segment: give their number")
        return expected + self.per_segment * segments

    @property
    def cost_weights(self) -> CostWeights:
        """What packs or sequences cost a rank, in seconds."""
        return CostWeights(
            per_token=self.per_token, per_squared_length=self.per_squared_length, per_segment=self.per_segment
        )

    @classmethod
    def read(cls, path: Path) -> "CostModel":
        """Raises: ConfigError if the file is missing, is no JSON object, or holds something else."""
        return validate(read_cost_values(path), cls, origin=f"cost model {path}")

    def write(self, path: Path) -> None:
        """As JSON. Raises: ConfigError if the file cannot be written."""
        try:
            write_json(path, self.model_dump(mode="json"))
        except OSError as error:
            raise ConfigError(f"cost model {path} cannot be written: {error.strerror}") from error


def read_cost_values(path: Path) -> dict[str, Any]:
    """What a cost model's file holds. Raises: ConfigError if it is missing or is no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cost model {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cost model {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"cost model {path} must hold a JSON object, found {type(values).__name__}")
    return values
