"""The exact data of a run, from the lengths of all of its sequences, prepared or only tokenised."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from evenpack.data.batches.objectives import Objective
from evenpack.data.manifest import PackingSummary
from evenpack.data.order.stored_plan import pack_view
from evenpack.data.prepare.tokens_dir import KnownTokens
from evenpack.data.sequences import SequenceView
from evenpack.data.sequences.config import ConcatRecipe, DocumentsRecipe, PaddingRecipe
from evenpack.data.sequences.pieces import RowsView
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.objective import next_tokens
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.resolving.step_items import average_of, drawn_shares, training_packing
from evenpack.errors import DataError
from evenpack.studies.budget.data import ItemWork, RunData, SourceData

_AT_ONCE = 1 << 20
"""Sequences, or documents, processed together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Epoch:
    """An epoch of one source's training data."""

    view: SequenceView
    packing: PackingSummary


def data_of_run(run: ResolvedRun) -> RunData:
    """Reads prepared data.

    Raises: DataError if a source has nothing to train on, or the vocabulary lacks a token that the objective needs.
    """
    prepared = run.prepared
    epochs = {
        name: _Epoch(view=prepared.view(name, "train"), packing=training_packing(prepared, name))
        for name in prepared.source_names
    }
    return _counted(run.config, epochs, objective=run.objective, vocabulary_size=prepared.vocabulary_size)


def data_of_tokens(config: RunConfig, tokens: Mapping[str, KnownTokens]) -> RunData:
    """Reads tokenised documents: their sequences are made and packed in memory, as `prepare` would store them.

    Raises: DataError if a source has nothing to train on; PackingError if its sequences cannot be packed so.
    """
    data = config.data
    recipe = data.recipe
    assert isinstance(recipe, DocumentsRecipe | ConcatRecipe | PaddingRecipe), "tokens are found for no other"
    epochs = {}
    for name, known in tokens.items():
        view = known.training_view(recipe)
        if not view.count:
            raise DataError(f"source '{name}' has no sequence to train on: give it more documents, or leave it out")
        packing = PackingSummary.of(
            pack_view(view, data.packing, pack_length=data.pack_length),
            padding_in_sequences=view.accounting.padding_slots,
        )
        epochs[name] = _Epoch(view=view, packing=packing)
    (vocabulary_size,) = {known.vocabulary_size for known in tokens.values()}
    return _counted(config, epochs, objective=next_tokens(recipe), vocabulary_size=vocabulary_size)


def _counted(config: RunConfig, epochs: Mapping[str, _Epoch], *, objective: Objective, vocabulary_size: int) -> RunData:
    data, batching = config.data, config.training.batching
    shares = drawn_shares(config)
    packings = {name: epoch.packing for name, epoch in epochs.items()}
    counts = {name: packing.items(batching) for name, packing in packings.items()}
    squared_lengths = targets = padding_squared_lengths = padding_targets = padded_rows = Fraction(0)
    for name, epoch in epochs.items():
        share = shares[name] / counts[name]
        sums = _sums(epoch.view, objective)
        squared_lengths += share * sums.squared_lengths
        targets += share * sums.targets
        padding_squared_lengths += share * sums.padding_squared_lengths
        padding_targets += share * sums.padding_targets
        padded_rows += share * _count_padded_rows(epoch.view)
    return RunData(
        item=average_of(packings, shares, batching=batching, data=data),
        useful=ItemWork(squared_lengths=squared_lengths, targets=targets),
        of_padding=ItemWork(squared_lengths=padding_squared_lengths, targets=padding_targets),
        padded_rows=None if data.recipe.kind == "padding" else padded_rows,
        items_per_epoch=sum(counts.values()),
        sources=tuple(
            SourceData(name=name, share=share, items=counts[name], tokens=packings[name].tokens)
            for name, share in shares.items()
        ),
        vocabulary_size=vocabulary_size,
        assumptions=(),
    )


class _Sums(NamedTuple):
    """Sums over a split."""

    squared_lengths: int
    """Sum of length² over segments, without padding."""
    targets: int
    """Targets without padding."""
    padding_squared_lengths: int
    """Padding's part of the squared lengths."""
    padding_targets: int
    """Padding's part of the targets."""


def _sums(view: SequenceView, objective: Objective) -> _Sums:
    squares = targets = padding_squares = padding_targets = 0
    for sequence_ids in _id_chunks(view.count):
        lengths = view.lengths(int(sequence_ids[0]), int(sequence_ids[-1]) + 1).astype(np.int64)
        segments, squared = view.statistics(sequence_ids, lengths)
        squares += int(squared.sum())
        targets += int(objective.count_targets(view, sequence_ids, lengths, segments).sum())
        padding = view.padding_counts(sequence_ids)
        if padding is not None:
            padding_squares += int(padding.squared_lengths.sum())
            padding_targets += 0 if objective.leaves_out_padding else int(padding.targets.sum())
    return _Sums(squares - padding_squares, targets - padding_targets, padding_squares, padding_targets)


def _count_padded_rows(view: SequenceView) -> int:
    """Returns the padded rows of one sequence each; for a stream, of the pieces of one document each."""
    if not isinstance(view, RowsView):
        return view.count
    rows = 0
    for chosen in _id_chunks(len(view.documents)):
        _, lengths = view.token_file.spans(view.documents[chosen])
        rows += int((-(-lengths // view.max_sequence_length)).sum())
    return rows


def _id_chunks(count: int) -> Iterator["np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    for start in range(0, count, _AT_ONCE):
        yield np.arange(start, min(start + _AT_ONCE, count), dtype=np.int64)
