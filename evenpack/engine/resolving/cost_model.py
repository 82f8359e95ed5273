"""The seconds of a micro-batch by its content: the file that `study throughput` writes and a run reads."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float64, Int64
from pydantic import Field, model_serializer

from evenpack.config import Section, validate
from evenpack.data.order.step_shape import CostWeights
from evenpack.errors import ConfigError
from evenpack.files import explained, read_json, write_json


class MeasuredOn(Section):
    """The provenance of a cost model."""

    device: str
    family: str
    """The model's kind in a run file."""
    model: str
    """Kind and preset or shape of the model."""
    causal: bool
    """Whether the model's attention is causal."""
    layers: int = Field(ge=1)
    """Measured layers; nothing in the figures is scaled to another number."""
    hidden_size: int = Field(ge=1)
    vocabulary_size: int = Field(ge=1)
    rows_per_micro_batch: int = Field(ge=1)
    """Packs or sequences of a whole micro-batch. The constant depends on this number if a part of the model has a
    fixed size for each row, as BERT's masked-token head does."""
    layouts: tuple[str, ...]
    precision: str
    attention: str
    """Attention backend, or `auto`."""
    evenpack: str
    torch: str
    commit: str | None
    """Commit of the source, if it is a checkout."""
    date: str
    """Date in ISO 8601, UTC."""


class LinearSeconds(Section):
    """The seconds of forward and backward over a micro-batch.

    They are constant + per_slot · slots + per_squared_length · Σ segment² + per_segment · segments, and for each
    window of the model's layers per_pair_within · the pairs of tokens of a segment that are at most so far apart.
    """

    constant: float = Field(ge=0.0)
    per_slot: float = Field(ge=0.0)
    """Seconds per slot, real or padding: its cost outside attention."""
    per_squared_length: float = Field(ge=0.0)
    per_pair_within: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0.0)]] = Field(default_factory=dict)
    """For a model with local attention: seconds for each pair of tokens of a segment that are at most so far apart."""
    per_segment: float = Field(default=0.0, ge=0.0)
    """Seconds per segment; 0 unless it improved the fit clearly."""
    per_step: float = Field(ge=0.0)
    """Seconds once per step: the optimizer."""

    @model_serializer(mode="wrap")
    def _without_empty_windows(self, handler: Callable[[Any], Any]) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return values if self.per_pair_within else {name: values[name] for name in values if name != "per_pair_within"}

    def seconds(
        self,
        slots: Int64[np.ndarray, "*shape"],
        squared_lengths: Int64[np.ndarray, "*shape"],
        segments: Int64[np.ndarray, "*shape"] | None = None,
        pairs_within: Mapping[int, Int64[np.ndarray, "*shape"]] | None = None,
    ) -> Float64[np.ndarray, "*shape"]:
        """Returns the expected seconds of micro-batches, without noise.

        Raises: ValueError if segments, or pairs within windows, cost something and are not given.
        """
        expected = self.constant + self.per_slot * slots + self.per_squared_length * squared_lengths
        for window, per_pair in self.per_pair_within.items():
            if pairs_within is None or window not in pairs_within:
                raise ValueError(f"this cost model has a cost per pair within a window of {window}: give their number")
            expected = expected + per_pair * pairs_within[window]
        if self.per_segment == 0.0:
            return expected
        if segments is None:
            raise ValueError("this cost model has a cost per segment: give their number")
        return expected + self.per_segment * segments

    @property
    def cost_weights(self) -> CostWeights:
        """Returns the cost of packs or sequences to a rank, in seconds; a token of a sequence fills a slot."""
        return CostWeights(
            per_token=self.per_slot,
            per_squared_length=self.per_squared_length,
            per_segment=self.per_segment,
            per_pair_within=self.per_pair_within,
        )


class CostModel(LinearSeconds):
    """The seconds of a micro-batch as they were measured, and how well they predict others."""

    noise: float = Field(ge=0.0)
    """Standard deviation of the held-out seconds / predicted seconds: the unexplained part."""
    repeat_noise: float | None = Field(ge=0.0)
    """Standard deviation of repeats of one micro-batch about their mean, relative to it; null if there were none."""
    held_out_median_error: float = Field(ge=0.0)
    """Median of |seconds / predicted - 1| over held-out micro-batches."""
    held_out_95_percent_error: float = Field(ge=0.0)
    """The 95th percentile of |seconds / predicted - 1| over held-out micro-batches."""
    samples: int = Field(ge=1)
    """Measured micro-batches, including repeats and held-out ones."""
    measured_on: MeasuredOn

    @classmethod
    def read(cls, path: Path) -> "CostModel":
        """Reads a file. Raises: ConfigError if it is missing, is not a JSON object, or holds something else."""
        return validate(read_cost_values(path), cls, origin=f"cost model {path}")

    def write(self, path: Path) -> None:
        """Writes JSON. Raises: ConfigError if the file cannot be written."""
        with explained(path, ConfigError, action="written"):
            write_json(path, self.model_dump(mode="json"))


def read_cost_values(path: Path) -> dict[str, Any]:
    """Returns the content of a cost model's file. Raises: ConfigError if it is missing or is not a JSON object."""
    try:
        with explained(path, ConfigError, missing=True):
            return read_json(path)
    except ValueError as error:
        raise ConfigError(f"cost model {path}: {error}") from error
