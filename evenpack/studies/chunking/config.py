"""Defines the file of a chunking study."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.studies.chunking.grid import GridSection
from evenpack.studies.runs.config import RunsStudyConfig
from evenpack.units import Packs, Share, StepNumber


class ChunkingSection(Section):
    """A grid of arms in addition to those of the phase, and what is compared."""

    grid: GridSection | None = None
    """Arms of the last phase in addition to those listed there."""
    reference: str = "concat_{msl}_atom_{msl}"
    """The arm with which arms of the same length are compared; {msl} stands for the length."""
    significance: Share = Field(default=0.05, gt=0.0, lt=0.5)
    """Significance level: intervals of differences have confidence 1 - 2 x significance."""
    perplexity_at_steps: list[StepNumber] | None = None
    """Steps at which perplexities are compared. Null: at a quarter, a half, three quarters and the end of the shortest
    run of each length."""
    documents_alone: bool = True
    """Whether each finished run is evaluated on isolated held-out documents, the same for all arms of a length."""
    documents_packs: Packs | None = Field(default=None, ge=1)
    """Most packs of held-out documents from each source; null: all."""
    smoothing: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Alpha of the smoothing of plotted curves; 0: no smoothing. Tables do not depend on it."""
    smoothing_weighs: Literal["old", "new"] = "old"
    """Which value the factor of appendix A.7 weights: the average so far, which smooths, or the new value, as printed
    there."""


class ChunkingConfig(RunsStudyConfig):
    """A study whose arms chunk the same corpus in different ways."""

    may_lack_arms: ClassVar[bool] = True

    chunking: ChunkingSection = ChunkingSection()

    @model_validator(mode="after")
    def _check_names(self) -> "ChunkingConfig":
        grid, phase = self.chunking.grid, self.last_phase
        names = [] if grid is None else [arm.name for arm in grid.arms]
        both = [name for name in names if names.count(name) > 1 or name in self.phases[phase].arms]
        if both:
            raise ValueError(
                f"chunking.grid: two runs have the same name, {both[0]}: a recipe with atoms, one without and the arms "
                f"of phases.{phase}.arms must differ in their names; rename one of them"
            )
        if not names and not self.phases[phase].arms:
            raise ValueError(f"phases.{phase}.arms: expected at least one arm, there or from chunking.grid, found none")
        return self

    def with_arms_of_grid(self) -> "ChunkingConfig":
        """Returns the same study with the arms of its grid in the last phase, before the arms listed there."""
        if self.chunking.grid is None:
            return self
        phase = self.phases[self.last_phase]
        arms = {arm.name: arm.settings for arm in self.chunking.grid.arms} | phase.arms
        phases = self.phases | {self.last_phase: phase.model_copy(update={"arms": arms})}
        return self.model_copy(update={"phases": phases})
