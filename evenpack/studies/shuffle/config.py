"""Defines the file of a shuffle study."""

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.studies.runs.study_file import Name, RunsStudyConfig
from evenpack.units import Sequences, Steps, Stretches, Windows


class ShuffleSection(Section):
    """How the randomness of orders is measured."""

    reference: Name
    """The arm whose order is considered random, usually the one with a permutation."""
    buffer: Sequences = Field(default=10_000, ge=2)
    """Sequences of a rolling shuffle buffer, which is measured in addition to the arms and not trained."""
    windows: Windows = Field(default=10, ge=2, le=1000)
    """Number of equal parts of the first epoch whose composition is compared with the complete epoch."""
    stretches: Stretches = Field(default=100, ge=2, le=100_000)
    """Number of equal parts of the corpus; sequences of the same part are considered neighbours."""
    steps_around_border: Steps = Field(default=10, ge=1)
    """Steps before a boundary between blocks, and as many after it, whose mean losses are compared."""
    steps_read: Steps = Field(default=50, ge=1)
    """Steps whose sequences are read from an uncached file to measure the rate of reading."""


class ShuffleStudyConfig(RunsStudyConfig):
    """A study whose arms differ in `data.shuffle`."""

    shuffle: ShuffleSection

    @model_validator(mode="after")
    def _check_reference(self) -> "ShuffleStudyConfig":
        self.require_arm("shuffle.reference", self.shuffle.reference)
        return self
