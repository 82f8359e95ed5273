"""Compares arms of one length: last values, ranks, and differences from the reference between runs of one seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from scipy.stats import rankdata

from evenpack.studies.chunking.arms import Arm, ArmsByName, reference_of
from evenpack.studies.chunking.config import ChunkingConfig
from evenpack.studies.chunking.curves import Curve
from evenpack.studies.chunking.held_out import HeldOut
from evenpack.studies.statistics.paired import PairedDifference, Spread, paired_difference

_DECIMALS = 6
"""Decimals of perplexities that are ranked: differences by rounding alone count as equal."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has finished."""

    curve: Curve
    held_out: HeldOut


FinishedRuns = Mapping[str, Mapping[int, Finished]]
"""Finished runs by arm and seed."""


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """The results of an arm. Perplexities are those of training unless stated otherwise."""

    arm: Arm
    seeds: tuple[int, ...]
    """Seeds that have finished."""
    steps: int
    steps_per_epoch: float
    tokens_per_step: float
    """Real tokens on average."""
    padding_share: float
    final: Spread
    """Mean perplexity over the last hundredth of the last epoch."""
    final_step: Spread
    rank_in_recipe: Spread | None
    """Mean over the hundredths of the last epoch of the rank among the atoms of the recipe, where 1 is the lowest
    perplexity, over seeds that all of them have finished. None without another arm."""
    rank_at_length: Spread | None
    """The same among all arms of the length."""
    at_steps: Mapping[int, Spread | None]
    """Mean over the hundredth of an epoch that ends at each step; None where the run is shorter."""
    difference: PairedDifference | None
    """Difference of `final` from the reference; None for the reference, without a common seed, and if either run
    diverged."""
    own_rows: Spread | None
    """Perplexity of held-out documents in rows of the arm's own recipe, as its training counts them; None without
    evaluation, and for an arm with `attention.isolate: false`, whose evaluation differs from its training."""
    own_rows_real_tokens: Spread | None
    """The same with padding left out of the loss; None where there is none in it."""
    documents: Spread | None
    """Perplexity of single held-out documents, the same for all arms of the length."""
    documents_difference: PairedDifference | None


def compare(finished: FinishedRuns, arms: ArmsByName, study: ChunkingConfig) -> tuple[ArmRow, ...]:
    """Returns a row for each arm that has a finished run, in the study's order."""
    present = {name: arms[name] for name, of_seed in finished.items() if of_seed}
    rows = []
    for name, arm in present.items():
        at_length = [one.name for one in present.values() if one.max_sequence_length == arm.max_sequence_length]
        in_recipe = [one for one in at_length if present[one].recipe == arm.recipe]
        reference = {} if reference_of(study, arm) == name else finished.get(reference_of(study, arm), {})
        steps = study.chunking.perplexity_at_steps or _quarters(finished, at_length)
        rows.append(
            _row(
                arm,
                finished[name],
                reference,
                rank_in_recipe=_mean_ranks(finished, in_recipe, arm),
                rank_at_length=_mean_ranks(finished, at_length, arm),
                steps=steps,
                significance=study.chunking.significance,
            )
        )
    return tuple(rows)


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

    def difference(measure: Callable[[Finished], float | None]) -> PairedDifference | None:
        pairs = [(measure(one), measure(reference[seed])) for seed, one in of_seed.items() if seed in reference]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        if not both or not all(map(math.isfinite, chain.from_iterable(both))):
            return None
        return paired_difference([one for one, _ in both], [other for _, other in both], significance=significance)

    return ArmRow(
        arm=arm,
        seeds=tuple(of_seed),
        steps=curves[0].steps,
        steps_per_epoch=curves[0].steps / epochs,
        tokens_per_step=float(np.mean([curve.tokens_per_step for curve in curves])),
        padding_share=1.0 - sum(one.tokens_per_step for one in curves) / sum(one.slots_per_step for one in curves),
        final=Spread.of([curve.final(epochs) for curve in curves]),
        final_step=Spread.of([float(curve.perplexity[-1]) for curve in curves]),
        rank_in_recipe=rank_in_recipe,
        rank_at_length=rank_at_length,
        at_steps={step: _over_seeds([curve.at_step(step, epochs) for curve in curves]) for step in steps},
        difference=difference(lambda one: one.curve.final(epochs)),
        own_rows=_over_seeds([one.held_out.own_rows for one in of_seed.values()]) if arm.isolates else None,
        own_rows_real_tokens=_over_seeds([one.held_out.own_rows_real_tokens for one in of_seed.values()]),
        documents=_over_seeds([one.held_out.documents for one in of_seed.values()]),
        documents_difference=difference(lambda one: one.held_out.documents),
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


def _over_seeds(values: Sequence[float | None]) -> Spread | None:
    """Returns the spread over seeds; None if one of them has no value."""
    found = [value for value in values if value is not None]
    return Spread.of(found) if found and len(found) == len(values) else None
