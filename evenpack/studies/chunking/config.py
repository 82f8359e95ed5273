"""The file of a chunking study."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.studies.chunking.grid import GridSection
from evenpack.studies.runs.config import RunsStudyConfig
from evenpack.units import Packs, Share, StepNumber


class ChunkingSection(Section):
    """Which arms there are beside those of the phase, and what is compared."""

    grid: GridSection | None = None
    """Arms of the last phase, before those that stand there."""
    reference: str = "concat_{msl}_atom_{msl}"
    """The arm that those of the same length are compared with; {msl} stands for the length."""
    significance: Share = Field(default=0.05, gt=0.0, lt=0.5)
    """Significance level: intervals of differences have confidence 1 - 2 x significance."""
    perplexity_at_steps: list[StepNumber] | None = None
    """Steps at which perplexities are compared. Null: at a quarter, a half, three quarters and the end of the shortest
    run of each length."""
    documents_alone: bool = True
    """Whether each finished run is evaluated on held-out documents, one by one, the same for all arms of a length."""
    documents_packs: Packs | None = Field(default=None, ge=1)
    """How many packs of held-out documents are taken at most, from each source; null: all."""
    smoothing: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Alpha of the curves that are drawn; 0 draws them as they are. No table depends on it."""
    smoothing_weighs: Literal["old", "new"] = "old"
    """Whether the factor of appendix A.7 weighs the average so far, which smooths, or the new value, as is printed."""


class ChunkingConfig(RunsStudyConfig):
    """Arms of one phase that chunk the same corpus in different ways."""

    may_lack_arms: ClassVar[bool] = True

    chunking: ChunkingSection = ChunkingSection()

    @model_validator(mode="after")
    def _check_names(self) -> "ChunkingConfig":
        grid, phase = self.chunking.grid, self.last_phase
        names = [] if grid is None else [arm.name for arm in grid.arms]
        both = [name for name in names if names.count(name) > 1 or name in self.phases[phase].arms]
        if both:
            raise ValueError(
                f"chunking.grid: two runs of one name, {both[0]}: a recipe with atoms, one without and the arms of "
                f"phases.{phase}.arms must differ in their names; rename one of them"
            )
        if not names and not self.phases[phase].arms:
            raise ValueError(f"phases.{phase}.arms: expected at least one arm, there or from chunking.grid, found none")
        return self

    def with_arms_of_grid(self) -> "ChunkingConfig":
        """Returns the same study with the arms of its grid in the last phase, before those that stand there."""
        if self.chunking.grid is None:
            return self
        phase = self.phases[self.last_phase]
        arms = {arm.name: arm.settings for arm in self.chunking.grid.arms} | phase.arms
        phases = self.phases | {self.last_phase: phase.model_copy(update={"arms": arms})}
        return self.model_copy(update={"phases": phases})
