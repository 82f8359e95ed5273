"""Defines the file of a shuffle study."""

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section, UserPath
from evenpack.studies.runs.study_file import Name, RunsStudyConfig
from evenpack.units import NatsPerToken, Sequences, Share, Steps, Stretches, Windows

MEAN_OF_KINDS = "mean"
"""The kind of held-out text under which the mean of all kinds is reported."""


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
    held_out: dict[Name, UserPath | None] = Field(default_factory=dict)
    """Held-out text by its kind: a file, folder or pattern for each, as `evenpack evaluate --data` takes it. Each
    finished run is evaluated on all of them, and arms are compared with the reference kind by kind, and by the mean of
    the kinds. Null: the path is given on the command line."""
    effect: NatsPerToken = Field(default=0.05, gt=0.0)
    """The smallest difference of a held-out loss that matters: where an interval is wider, the table says that it
    cannot tell, and never that there is no difference."""
    significance: Share = Field(default=0.05, gt=0.0, lt=0.5)
    """Significance level of the comparisons of held-out losses, corrected for their number; intervals have confidence
    1 - 2 x significance."""

    @field_validator("held_out")
    @classmethod
    def _check_held_out(cls, value: dict[str, Path | None]) -> dict[str, Path | None]:
        if MEAN_OF_KINDS in value:
            raise ValueError(f"'{MEAN_OF_KINDS}' names the mean of the kinds: give that kind another name")
        return value


class ShuffleStudyConfig(RunsStudyConfig):
    """A study whose arms differ in `data.shuffle`."""

    shuffle: ShuffleSection

    @model_validator(mode="after")
    def _check_reference(self) -> "ShuffleStudyConfig":
        self.require_arm("shuffle.reference", self.shuffle.reference)
        return self
