"""The arms of a chunking study, and the checks that make them comparable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenpack.data.config import ConcatRecipe, PaddingRecipe, Recipe
from evenpack.errors import ConfigError
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.runs.expansion import StudyRun


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to chunk the corpus."""

    name: str
    recipe: str
    """Name of the recipe in the grid; arms of the phase itself have a name of their own."""
    kind: str
    """`data.recipe.kind`."""
    max_sequence_length: int
    atom: int | None
    """See `atom_of`."""
    rows_per_step: int | None
    """Rows of a step; None where the run file gives its step in tokens."""
    epochs: float
    isolates: bool
    """`attention.isolate`, which evaluations always apply."""

    @property
    def atom_label(self) -> str:
        """Returns the atom in units of the MSL, as the paper has it; without an atom the recipe's name."""
        return self.recipe if self.atom is None else f"{self.atom / self.max_sequence_length:g} MSL"

    @property
    def is_natural(self) -> bool:
        """Returns whether this arm represents its recipe: its atom is the MSL, or it has none."""
        return self.atom in (None, self.max_sequence_length)


ArmsByName = Mapping[str, Arm]


def describe_arms(study: ChunkingConfig, runs: Sequence[StudyRun]) -> dict[str, Arm]:
    """Returns the arms of the last phase, by name.

    Raises: ConfigError if runs could not be compared: lengths that are not in epochs, parameters that depend on the
    MSL, or a length without its reference.
    """
    grid = study.chunking.grid
    recipes = {} if grid is None else {arm.name: arm.recipe for arm in grid.arms}
    compared = [run for run in runs if run.phase == study.last_phase]
    _require_equal_parameters(compared)
    arms = {run.arm: _describe(run, recipes.get(run.arm, run.arm)) for run in compared}
    for arm in arms.values():
        name = reference_of(study, arm)
        _require_equal_epochs(arm, arms)
        if name not in arms or arms[name].max_sequence_length != arm.max_sequence_length:
            same = [one.name for one in arms.values() if one.max_sequence_length == arm.max_sequence_length]
            raise ConfigError(
                f"chunking.reference: expected an arm of MSL {arm.max_sequence_length} ({', '.join(same)}), found "
                f"{name} (of '{study.chunking.reference}')"
            )
    return arms


def _require_equal_epochs(arm: Arm, arms: ArmsByName) -> None:
    """Checks that arms of one length have equal epochs: they are ranked by hundredths of their last ones."""
    for other in arms.values():
        if other.max_sequence_length == arm.max_sequence_length and other.epochs != arm.epochs:
            raise ConfigError(
                f"arms {arm.name} and {other.name} of MSL {arm.max_sequence_length} have training.epochs "
                f"{arm.epochs:g} and {other.epochs:g}, and would not have seen the same tokens: give them as many"
            )


def atom_of(recipe: Recipe) -> int | None:
    """Returns the tokens that stay together in the shuffle; None where only rows or packs are shuffled."""
    return recipe.atom if isinstance(recipe, ConcatRecipe | PaddingRecipe) else None


def reference_of(study: ChunkingConfig, arm: Arm) -> str:
    """Returns the name of the arm with which this one is compared."""
    return study.chunking.reference.replace("{msl}", str(arm.max_sequence_length))


def _describe(run: StudyRun, recipe: str) -> Arm:
    training, data = run.config.training, run.config.data
    if training.epochs is None or training.epochs < 1 or training.batching != "packs":
        raise ConfigError(
            f"run {run.key} of the study: last epochs are compared, in rows. Set training.epochs to 1 or more "
            "(the paper has 2) in place of steps or samples, and training.batching to packs; found training.epochs "
            f"{training.epochs} and {training.batching}"
        )
    return Arm(
        name=run.arm,
        recipe=recipe,
        kind=data.recipe.kind,
        max_sequence_length=data.recipe.max_sequence_length,
        atom=atom_of(data.recipe),
        rows_per_step=training.stated_items_per_step,
        epochs=training.epochs,
        isolates=run.config.attention.isolate,
    )


def _require_equal_parameters(runs: Sequence[StudyRun]) -> None:
    """Checks that arms of one seed begin with the same weights, which depend on the seed alone (appendix A.4)."""
    arm_of_size = {
        run.config.model.max_positions or run.config.positions_needed: run.arm
        for run in runs
        if run.config.model.positions == "learned"
    }
    if len(arm_of_size) > 1:
        sizes = " and ".join(f"{size} positions in {arm}" for size, arm in arm_of_size.items())
        raise ConfigError(
            f"model.positions learned has a parameter for each position, {sizes}, so these arms cannot begin with the "
            "same weights: set model.positions to alibi or rotary, which have none, or model.max_positions to the "
            "longest"
        )
