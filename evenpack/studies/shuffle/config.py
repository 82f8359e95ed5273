"""The file of a shuffle study."""

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.studies.runs.config import Name, RunsStudyConfig
from evenpack.units import Sequences, Steps, Stretches, Windows


class ShuffleSection(Section):
    """How orders are measured."""

    reference: Name
    """The arm whose order counts as random: that of a permutation."""
    buffer: Sequences = Field(default=10_000, ge=2)
    """Sequences of the rolling buffer that is measured beside the arms and not trained."""
    windows: Windows = Field(default=10, ge=2, le=1000)
    """Equal parts of the first epoch whose composition is compared with that of the whole."""
    stretches: Stretches = Field(default=100, ge=2, le=100_000)
    """Equal parts of the corpus; sequences of one of them are neighbours."""
    steps_around_border: Steps = Field(default=10, ge=1)
    """Steps before the border of two blocks, and as many after it, whose mean losses are compared."""
    steps_read: Steps = Field(default=50, ge=1)
    """Steps whose sequences are read, from a file of which nothing is cached, to measure the rate."""


class ShuffleStudyConfig(RunsStudyConfig):
    """Arms of the last phase that differ in `data.shuffle`."""

    shuffle: ShuffleSection

    @model_validator(mode="after")
    def _check_reference(self) -> "ShuffleStudyConfig":
        arms = self.phases[self.last_phase].arms
        if self.shuffle.reference not in arms:
            raise ValueError(
                f"shuffle.reference: expected an arm of the last phase, {self.last_phase} ({', '.join(arms)}), found "
                f"'{self.shuffle.reference}'"
            )
        return self
