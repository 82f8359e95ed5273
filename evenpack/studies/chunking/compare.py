"""Arms of a chunking study, compared at one length.

Last values, ranks, and differences from the reference between runs of one seed; before, the checks that make arms
comparable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
from scipy.stats import rankdata

from evenpack.data.recipes import PaddingRecipe, atom_of
from evenpack.errors import ConfigError
from evenpack.studies.chunking.config import ChunkingSection
from evenpack.studies.chunking.curves import Curve, HeldOut
from evenpack.studies.runs.arms import difference_from, over_seeds, paired_values, with_verdicts
from evenpack.studies.runs.jobs import StudyRun
from evenpack.studies.statistics.paired import FamilyVerdict, PairedDifference, Spread

_DECIMALS = 6
"""Decimals of perplexities that are ranked: differences by rounding alone count as equal."""


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
    counts_padding: bool
    """Whether padding is in its loss, where it is easy to predict."""

    @property
    def atom_label(self) -> str:
        """Returns the atom in units of the MSL, as the paper has it; without an atom the recipe's name."""
        return self.recipe if self.atom is None else f"{self.atom / self.max_sequence_length:g} MSL"

    @property
    def is_natural(self) -> bool:
        """Returns whether this arm represents its recipe: its atom is the MSL, or it has none."""
        return self.atom in (None, self.max_sequence_length)


ArmsByName = Mapping[str, Arm]


def describe_arms(section: ChunkingSection, runs: Sequence[StudyRun]) -> dict[str, Arm]:
    """Returns the arms, by name. `runs`: the runs of the last phase.

    Raises: ConfigError if runs could not be compared: lengths that are not in epochs, parameters that depend on the
    MSL, or a length without its reference.
    """
    grid = section.grid
    recipes = {} if grid is None else {arm.name: arm.recipe for arm in grid.arms}
    _require_equal_parameters(runs)
    arms = {run.arm: _describe(run, recipes.get(run.arm, run.arm)) for run in runs}
    unknown = [name for name in section.references if name not in arms]
    if unknown:
        raise ConfigError(f"chunking.references: expected arms ({', '.join(arms)}), found {', '.join(unknown)}")
    for arm in arms.values():
        name = section.reference_of(arm.name, arm.max_sequence_length)
        _require_equal_epochs(arm, arms)
        if name not in arms or arms[name].max_sequence_length != arm.max_sequence_length:
            same = [one.name for one in arms.values() if one.max_sequence_length == arm.max_sequence_length]
            own = arm.name in section.references
            key, of = ("references", arm.name) if own else ("reference", section.reference)
            raise ConfigError(
                f"chunking.{key}: expected an arm of MSL {arm.max_sequence_length} ({', '.join(same)}), found "
                f"{name} (of '{of}')"
            )
    return arms


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has finished."""

    curve: Curve
    held_out: HeldOut


FinishedRuns = Mapping[str, Mapping[int, Finished]]
"""Finished runs by arm and seed."""


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """The results of an arm. Perplexities are training perplexities unless stated otherwise."""

    arm: Arm
    seeds: tuple[int, ...]
    """Seeds that have finished."""
    steps: int
    steps_per_epoch: float
    tokens_per_step: float
    """Real tokens on average."""
    padding_share: float
    final: Spread
    """Mean perplexity over the last hundredth of the last epoch, as in the paper. It is of a few rows."""
    last_tenth: Spread
    """The same over its last tenth."""
    final_step: Spread
    rank_in_recipe: Spread | None
    """Mean over the hundredths of the last epoch of the rank among the atoms of the recipe, where 1 is the lowest
    perplexity, over seeds that all of them have finished. None without another arm."""
    rank_at_length: Spread | None
    """The same mean of ranks, among all arms of the length."""
    at_steps: Mapping[int, Spread | None]
    """Mean over the hundredth of an epoch that ends at each step; None where the run is shorter."""
    last_tenth_difference: PairedDifference | None
    """Difference of `last_tenth` from the reference; None for the reference, without a common seed, and if either run
    diverged."""
    last_tenth_verdict: FamilyVerdict | None
    """Among the comparisons of the length; None without a difference."""
    own_rows: Spread | None
    """Perplexity of held-out documents in rows of the arm's own recipe, as its training counts them; None without
    evaluation, and for an arm with `attention.isolate: false`, whose evaluation differs from its training."""
    documents: Spread | None
    """Perplexity of single held-out documents, the same for all arms of the length."""
    documents_difference: PairedDifference | None
    documents_verdict: FamilyVerdict | None


_JUDGED: Mapping[str, Callable[[Arm, Finished], float | None]] = {
    "last_tenth": lambda arm, one: one.curve.last_tenth(arm.epochs),
    "documents": lambda _, one: one.held_out.documents,
}
"""The measures with a verdict, by their name in a row."""


def compare(finished: FinishedRuns, arms: ArmsByName, section: ChunkingSection) -> tuple[ArmRow, ...]:
    """Returns a row for each arm that has a finished run, in the study's order."""
    present = {name: arms[name] for name, of_seed in finished.items() if of_seed}
    rows = []
    for name, arm in present.items():
        at_length = [one.name for one in present.values() if one.max_sequence_length == arm.max_sequence_length]
        in_recipe = [one for one in at_length if present[one].recipe == arm.recipe]
        reference = section.reference_of(name, arm.max_sequence_length)
        steps = section.perplexity_at_steps or _quarters(finished, at_length)
        rows.append(
            _row(
                arm,
                finished[name],
                {} if reference == name else finished.get(reference, {}),
                rank_in_recipe=_mean_ranks(finished, in_recipe, arm),
                rank_at_length=_mean_ranks(finished, at_length, arm),
                steps=steps,
                significance=section.significance,
            )
        )
    judged = []
    for length in dict.fromkeys(row.arm.max_sequence_length for row in rows):
        of_length = [row for row in rows if row.arm.max_sequence_length == length]
        for name in _JUDGED:  # among the arms of one length
            effect = partial(_effect, name, finished, section)
            of_length = with_verdicts(of_length, effect, significance=section.significance, prefix=f"{name}_")
        judged += of_length
    return tuple(sorted(judged, key=lambda row: [*present].index(row.arm.name)))


def _effect(name: str, finished: FinishedRuns, section: ChunkingSection, row: ArmRow) -> float:
    """Returns the smallest difference that matters: a share of the reference's mean over the seeds that are paired."""
    reference = finished[section.reference_of(row.arm.name, row.arm.max_sequence_length)]
    pairs = paired_values(reference, finished[row.arm.name], partial(_JUDGED[name], row.arm))
    return section.effect * fmean(other for _, other in pairs)


def _row(
    arm: Arm,
    of_seed: Mapping[int, Finished],
    reference: Mapping[int, Finished],
    *,
    rank_in_recipe: Spread | None,
    rank_at_length: Spread | None,
    steps: Sequence[int],
    significance: float,
) -> ArmRow:
    curves = [one.curve for one in of_seed.values()]
    epochs = arm.epochs
    difference = partial(difference_from, reference, of_seed, significance=significance)
    return ArmRow(
        arm=arm,
        seeds=tuple(of_seed),
        steps=curves[0].steps,
        steps_per_epoch=curves[0].steps / epochs,
        tokens_per_step=float(np.mean([curve.tokens_per_step for curve in curves])),
        padding_share=1.0 - sum(one.tokens_per_step for one in curves) / sum(one.slots_per_step for one in curves),
        final=Spread.of([curve.final(epochs) for curve in curves]),
        last_tenth=Spread.of([curve.last_tenth(epochs) for curve in curves]),
        final_step=Spread.of([float(curve.perplexity[-1]) for curve in curves]),
        rank_in_recipe=rank_in_recipe,
        rank_at_length=rank_at_length,
        at_steps={step: over_seeds([curve.at_step(step, epochs) for curve in curves]) for step in steps},
        last_tenth_difference=difference(partial(_JUDGED["last_tenth"], arm)),
        last_tenth_verdict=None,
        own_rows=over_seeds([one.held_out.own_rows for one in of_seed.values()]) if arm.isolates else None,
        documents=over_seeds([one.held_out.documents for one in of_seed.values()]),
        documents_difference=difference(partial(_JUDGED["documents"], arm)),
        documents_verdict=None,
    )


def _mean_ranks(finished: FinishedRuns, names: Sequence[str], arm: Arm) -> Spread | None:
    """Returns the mean rank of `arm` among `names`, seed by seed.

    Equal arms in a segment share the mean of their ranks.
    """
    seeds = [seed for seed in finished[arm.name] if all(seed in finished[name] for name in names)]
    if len(names) < 2 or not seeds:
        return None
    place, ranks = list(names).index(arm.name), []
    for seed in seeds:
        segments = np.stack([finished[name][seed].curve.segments(arm.epochs) for name in names])
        ranks.append(float(rankdata(segments.round(_DECIMALS), axis=0)[place].mean()))
    return Spread.of(ranks)


def _quarters(finished: FinishedRuns, names: Sequence[str]) -> list[int]:
    """Returns the quarters of the shortest run."""
    steps = min(one.curve.steps for name in names for one in finished[name].values())
    return sorted({max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)})


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
        counts_padding=isinstance(data.recipe, PaddingRecipe) and data.recipe.end_of_text_in_loss == "all",
    )


def _require_equal_parameters(runs: Sequence[StudyRun]) -> None:
    """Checks that arms of one seed begin with the same weights, which depend on the seed alone (appendix A.4)."""
    arm_of_size = {run.config.max_positions: run.arm for run in runs if run.config.model.positions == "learned"}
    if len(arm_of_size) > 1:
        sizes = " and ".join(f"{size} positions in {arm}" for size, arm in arm_of_size.items())
        raise ConfigError(
            f"model.positions learned has a parameter for each position, {sizes}, so these arms cannot begin with the "
            "same weights: set model.positions to alibi or rotary, which have none, or model.max_positions to the "
            "longest"
        )


def _require_equal_epochs(arm: Arm, arms: ArmsByName) -> None:
    """Checks that arms of one length have equal epochs: they are ranked by hundredths of their last ones."""
    for other in arms.values():
        if other.max_sequence_length == arm.max_sequence_length and other.epochs != arm.epochs:
            raise ConfigError(
                f"arms {arm.name} and {other.name} of MSL {arm.max_sequence_length} have training.epochs "
                f"{arm.epochs:g} and {other.epochs:g}, and would not have seen the same tokens: give them as many"
            )
