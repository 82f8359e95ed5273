"""The file of a chunking study: a grid of arms (each recipe at each length, with each atom), and what is compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.data.recipes import check_atom
from evenpack.differences import flatten
from evenpack.studies.runs.study_file import Name, RunsStudyConfig, Settings
from evenpack.units import Packs, Rows, Share, StepNumber, Tokens

_KEYS = ("data.recipe.max_sequence_length", "data.recipe.atom", "data.pack_length", "training.packs_per_step")
"""Keys that a grid sets in each of its arms."""


class GridLength(Section):
    """The arms of one maximum sequence length (MSL)."""

    max_sequence_length: Tokens = Field(ge=2)
    """Tokens of a row."""
    rows_per_step: Rows = Field(ge=1)
    """Rows of one optimizer update."""
    atoms: list[Annotated[Tokens, Field(ge=1)]] = Field(min_length=1)
    """Sizes of atoms, which are shuffled as units, in tokens; each divides the MSL, or is a multiple of it."""
    settings: Settings = Field(default_factory=dict)
    """Settings of all arms of this length: dotted keys with their values."""

    @model_validator(mode="after")
    def _check_atoms(self) -> "GridLength":
        for atom in self.atoms:
            check_atom(atom, self.max_sequence_length, smallest=1)
        if len(set(self.atoms)) < len(self.atoms):
            listed = ", ".join(map(str, self.atoms))
            raise ValueError(f"atoms: two runs would have the same name: give each atom once, found {listed}")
        return self


class GridSection(Section):
    """A grid that generates arms for each length, recipe and atom."""

    lengths: list[GridLength] = Field(min_length=1)
    """Lengths of rows, each with its atoms."""
    recipes: dict[Name, Settings] = Field(default_factory=dict)
    """Recipes by name, each with its dotted keys and values; they are run with each atom, as arms named
    RECIPE_MSL_atom_ATOM."""
    recipes_without_atoms: dict[Name, Settings] = Field(default_factory=dict)
    """Recipes without atoms, run once for each length, as arms named RECIPE_MSL."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "GridSection":
        lengths = [row.max_sequence_length for row in self.lengths]
        if len(set(lengths)) < len(lengths):
            listed = ", ".join(map(str, lengths))
            raise ValueError(
                f"lengths: two runs would have the same name: give each max_sequence_length once, found {listed}"
            )
        of_lengths = {f"lengths: settings of {row.max_sequence_length}": row.settings for row in self.lengths}
        for name, settings in {**self.recipes, **self.recipes_without_atoms, **of_lengths}.items():
            for key in flatten(settings):
                if key in _KEYS:
                    raise ValueError(f"{name}: {key} is set by the grid itself, from lengths: leave it out")
        return self

    @property
    def arms(self) -> "list[GridArm]":
        """The arms, ordered by length, recipe and atom."""
        return [
            _arm(row, recipe, settings, atom)
            for row in self.lengths
            for recipes, atoms in ((self.recipes, row.atoms), (self.recipes_without_atoms, [None]))
            for recipe, settings in recipes.items()
            for atom in atoms
        ]


@dataclass(frozen=True, kw_only=True)
class GridArm:
    """An arm that a grid expands to."""

    name: str
    recipe: str
    """Name of the recipe in the grid."""
    settings: Settings


class ChunkingSection(Section):
    """A grid of arms in addition to the arms of the phase, and what is compared."""

    grid: GridSection | None = None
    """Arms of the last phase in addition to those listed there."""
    reference: str = "concat_{msl}_atom_{msl}"
    """The arm with which arms of the same length are compared; {msl} stands for the length."""
    references: dict[Name, Name] = Field(default_factory=dict)
    """Arms that are compared with another arm than `reference`, each with the name of that arm, of the same length; an
    arm with its own name is compared with none, because others are compared with it."""
    significance: Share = Field(default=0.05, gt=0.0, lt=0.5)
    """Significance level: intervals of differences have confidence 1 - 2 x significance."""
    effect: Share = Field(default=0.02, gt=0.0, lt=1.0)
    """The smallest difference that matters, as a share of the reference's perplexity: where an interval is wider, the
    table says that it cannot tell, and never that there is no difference."""
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

    def reference_of(self, arm: str, max_sequence_length: int) -> str:
        """Returns the name of the arm with which one of this length is compared; its own where it is with none."""
        return self.references.get(arm) or self.reference.replace("{msl}", str(max_sequence_length))


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

    def located(self, folder: Path) -> dict[str, Any]:
        """Returns the phases with the arms of the grid in the last one, before the arms listed there."""
        changed = super().located(folder)
        if self.chunking.grid is not None:
            phase = changed["phases"][self.last_phase]
            arms = {arm.name: arm.settings for arm in self.chunking.grid.arms} | phase.arms
            changed["phases"][self.last_phase] = phase.model_copy(update={"arms": arms})
        return changed


def _arm(row: GridLength, recipe: str, settings: Settings, atom: int | None) -> GridArm:
    length = row.max_sequence_length
    of_atom = {} if atom is None else {"data.recipe.atom": atom}
    return GridArm(
        name=f"{recipe}_{length}" if atom is None else f"{recipe}_{length}_atom_{atom}",
        recipe=recipe,
        settings={
            **settings,  # whole recipes come first, followed by the grid's changes to them
            **row.settings,
            "data.recipe.max_sequence_length": length,
            **of_atom,
            "data.pack_length": length,
            "training.packs_per_step": row.rows_per_step,
        },
    )
