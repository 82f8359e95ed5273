"""Defines the file of an equivalence study."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.studies.runs.study_file import FinetuneSection, Name, RunsStudyConfig, beside
from evenpack.units import MeasureValue, Share

Measure = Literal["loss", "accuracy"]


class EquivalenceSection(Section):
    """The comparison and its margin of equivalence, fixed before the first run."""

    reference: str
    """The arm with which the others are compared."""
    measure: Measure = "loss"
    """Quantity measured on held-out targets at the last evaluation: the loss in nats/target, or the share of targets
    predicted correctly."""
    margin: MeasureValue = Field(gt=0.0)
    """Margin of equivalence: the largest difference that is considered negligible, in the unit of the measure."""
    significance: Share = Field(default=0.05, gt=0.0, lt=0.5)
    """Significance level of each of the two one-sided tests; the interval shown has confidence 1 - 2 x significance."""
    target: MeasureValue | None = None
    """Value of the measure for the comparison of samples needed; null: the worst of the reference's last values."""
    controls: tuple[str, ...] = ()
    """Arms that must not count as equivalent, such as the reference trained with its whole schedule on 80 % of the
    samples. No arm is called equivalent where the interval of a control is not beyond the margin, or where there is no
    control."""


class EquivalenceConfig(RunsStudyConfig):
    """A study that compares the arms of a phase with one of them."""

    equivalence: EquivalenceSection
    finetune: dict[Name, FinetuneSection] = Field(default_factory=dict)
    """Fine-tunings of each finished run of the last phase, under names of your choice."""

    @model_validator(mode="after")
    def _check_reference(self) -> "EquivalenceConfig":
        self.require_arm("equivalence.reference", self.equivalence.reference)
        for control in self.equivalence.controls:
            self.require_arm("equivalence.controls", control)
            if control == self.equivalence.reference:
                raise ValueError(
                    f"equivalence.controls: {control} is the reference; name arms that must differ from it"
                )
        return self

    def located(self, folder: Path) -> dict[str, Any]:
        return super().located(folder) | {"finetune": beside(folder, self.finetune)}
