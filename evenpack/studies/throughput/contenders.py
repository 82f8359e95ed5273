"""The contenders of the study: one run's sequences in different layouts, assignments and packs, and samples of them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from evenpack.batch import PackedBatch
from evenpack.config import nearest, with_values
from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.data.order.config import PackingConfig
from evenpack.data.order.selection import select_packs
from evenpack.data.order.stages import StagedOrder
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, Batching, Layout
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.resolve import ResolvedRun, open_run, resolve
from evenpack.engine.world.distributed import World
from evenpack.errors import ConfigError
from evenpack.losses import NO_COUNTS
from evenpack.studies.shared_options import parse_list

LAYOUTS: tuple[Layout, ...] = ("padded", "unpadded", "packed")

DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, None)
"""Depths of table 1 of PackedBERT; None: no limit."""


FORMS: dict[str, tuple[Batching, Layout, AssignmentPolicy | None]] = {
    **{layout: ("packs", layout, None) for layout in LAYOUTS},
    **{
        f"{layout}/{policy}": (batching, layout, policy)
        for (batching, layout), policies in POLICIES.items()
        for policy in policies
        if batching == "sequences"
    },
}
"""Forms by their name on the command line. A layout without a policy lays out the run's packs, the same sequences in
each, with the run file's default assignment; with a policy, single sequences."""

_POOL = 2048
"""Sequences to choose from; 16 times a micro-batch if that is more."""

_SIZES = (1 / 2, 2 / 3, 5 / 6, 1.0)
"""Tokens of the samples, of a micro-batch of full rows. With far fewer a GPU would wait for its host."""

_NEIGHBOURS = 32
"""One part in so many of the pool, at most, is taken for sequences of nearly one length."""

_GOLDEN = 0.5 * (5**0.5 - 1)


def sequences_per_item(dataset: MicroBatchDataset) -> float:
    """Returns the mean sequences of an item of a step over an epoch, the sources weighted as the run draws them."""
    drawn = zip(dataset.data.weights, dataset.planner.sources, strict=True)
    items = sum(weight * one.plan.sequences / one.plan.packs for weight, one in drawn)
    return items / sum(dataset.data.weights)


def parse_forms(given: str) -> tuple[str, ...]:
    """Parses `padded,unpadded/max_tokens` as names of `FORMS`.

    Raises: ConfigError for another word, or a repeated one.
    """
    forms = parse_list(given, "--layouts", _form)
    if len(set(forms)) < len(forms):
        raise ConfigError(f"--layouts {given}: a layout is given twice")
    return forms


def _form(word: str) -> str:
    if word not in FORMS:
        raise ValueError(f"there is no layout '{word}'; {nearest(word, list(FORMS))}")
    return word


def contender(form: str, run: ResolvedRun, world: World) -> MicroBatchDataset:
    """Returns the batches of the run in another form; its steps have the rows, packs or sequences, of the run file."""
    return _batches(resolve(formed(run.config, form), run.prepared), world)


def formed(config: RunConfig, form: str) -> RunConfig:
    """Returns the run file with the settings of this form, and as many items of it as it had."""
    training = config.training
    return with_steps(config, *FORMS[form], each=training.items_per_micro_batch, per_step=training.items_per_step)


def with_steps(
    config: RunConfig, batching: Batching, layout: Layout, policy: AssignmentPolicy | None, *, each: int, per_step: int
) -> RunConfig:
    """Returns the run file with steps of `per_step` items in micro-batches of `each`; `policy` None: the default."""
    other = {"packs": "sequences", "sequences": "packs"}[batching]
    return changed(
        config,
        training={
            "batching": batching,
            "layout": layout,
            "assignment": policy,
            f"{batching}_per_step": per_step,
            f"{batching}_per_micro_batch": each,
            f"{other}_per_step": None,
            f"{other}_per_micro_batch": None,
        },
    )


def depth_contenders(run: ResolvedRun, world: World, depths: tuple[int | None, ...]) -> dict[str, MicroBatchDataset]:
    """Returns the batches of `padding`, of the model `unmasked`, and of packs of each depth (`depth_name`), by name.

    All have as many rows. Padding has one sequence per row. The unmasked model attends over whole packs, those without
    a limit of depth, with positions that run through: its work is that on rows of one long sequence each.
    """
    config, prepared = run.config, run.prepared
    packed_config = formed(config, "packed")
    packings = {depth: prepared.repacked(_limited(config.data.packing, depth)) for depth in depths}
    full = resolve(packed_config, packings.get(None) or prepared.repacked(_limited(config.data.packing, None)))
    unmasked = replace(full, shape=replace(full.shape, isolate=False, reset_positions=False))
    return {
        "padding": contender("padded/arrival", run, world),
        "unmasked": _batches(unmasked, world),
        **{depth_name(depth): _batches(resolve(packed_config, packing), world) for depth, packing in packings.items()},
    }


def depth_name(depth: int | None) -> str:
    """Returns the name of packs of this depth among the contenders."""
    return f"depth {depth or 'max'}"


def sample_micro_batches(singles: MicroBatchDataset, count: int) -> Iterator[PackedBatch]:
    """Yields un-padded micro-batches of single sequences of nearly one length each, the same ones each time.

    They go from the shortest to the longest and have different numbers of tokens, so that these and squared lengths
    vary independently: at most those of a micro-batch of full rows, and at least half of them, less one sequence. Where
    few sequences have nearly one length, a micro-batch holds them several times.

    Args:
        singles: of single sequences, whose micro-batches may have any number of them.
    """
    rows = singles.settings.shape.items_per_micro_batch
    slots = rows * singles.data.pack_length
    one_step = StagedOrder([replace(singles.planner.order.stages[0], items_per_step=max(_POOL, 16 * rows))])
    pool = select_packs(singles.planner.sources, *one_step.draws(0))
    by_length = np.argsort(pool.lengths, kind="stable")
    for number in range(count):
        place = (number * _GOLDEN) % 1.0  # spreads evenly, whatever the count
        most_tokens = _SIZES[number % len(_SIZES)] * slots
        first = int(place * len(by_length))
        near = by_length[first : first + max(1, len(by_length) // _NEIGHBOURS)]
        repeated = np.resize(near, -(-slots // int(pool.lengths[near].min())))
        size = np.searchsorted(np.cumsum(pool.lengths[repeated]), most_tokens, side="right")
        yield singles.collator.collate(pool.take(repeated[: max(1, size)]), NO_COUNTS)


def run_to_measure(config: RunConfig, *, share: tuple[int, int] = (0, 1)) -> ResolvedRun:
    """Resolves the run as training would, with rows for positions that run through a pack.

    `share` is the part of the data that this process verifies: its index and their number. The run has no cost model,
    because none was measured in the compared layouts. Raises: as `open_run` does.
    """
    run = open_run(changed(config, training={"cost_model": None}), verify="later")
    run.prepared.verify(share=share)
    changes: dict[str, dict[str, Any]] = {}
    if config.model.positions == "learned":
        changes["model"] = {"max_positions": max(config.max_positions, run.prepared.pack_length)}
    return resolve(changed(run.config, **changes), run.prepared)


def changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """Returns the run with some values changed, section by section. Raises: ConfigError if it is invalid then."""
    return with_values(config, sections, origin="the run as it is measured")


def _limited(packing: PackingConfig, depth: int | None) -> PackingConfig:
    """Returns the run's packing at another limit of depth."""
    algorithm, options = (packing.algorithm, packing.options) if packing.algorithm != "none" else ("auto", {})
    return PackingConfig(algorithm=algorithm, max_sequences_per_pack=depth, options=options)


def _batches(run: ResolvedRun, world: World) -> MicroBatchDataset:
    return MicroBatchDataset(run.prepared, run.pipeline_settings(world))
