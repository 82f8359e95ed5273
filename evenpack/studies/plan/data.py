"""The data of a run for its plan: read from prepared data, or estimated from counts or assumptions."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from evenpack.data.batches.objectives import Objective
from evenpack.data.config import DataConfig
from evenpack.data.packing import LengthHistogram
from evenpack.data.prepared import PreparedData
from evenpack.data.recipes import ConcatRecipe, DocumentsRecipe
from evenpack.data.sequences import SequenceView
from evenpack.data.sequences.masking import masked_count
from evenpack.data.sequences.pieces import RowsView
from evenpack.data.tokenizers.loading import vocabulary_size_of
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.data_facts import AverageItem, DataFacts, average_of, drawn_shares, training_packing
from evenpack.engine.resolving.resolve import ResolvedRun, resolve
from evenpack.engine.resolving.settle import SettledRun, settle
from evenpack.errors import ConfigError, NotPreparedError
from evenpack.models.cost import Work
from evenpack.models.families import family_of
from evenpack.studies.lengths.reading import lengths_of
from evenpack.studies.plan.options import PlanOptions
from evenpack.visible_pairs import pairs_of_average_length, total_pairs_within


@dataclass(frozen=True, kw_only=True)
class SourceData:
    """An epoch of one source."""

    name: str
    share: Fraction
    """Fraction of the packs or sequences that a step draws."""
    documents: int
    """Documents for training."""
    sequences: int
    items: int
    """Packs or sequences, as a step counts them."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ItemWork:
    """The average work of a pack or sequence in attention and in the head."""

    squared_lengths: Fraction
    """Sum over its segments."""
    pairs_within: Mapping[int, Fraction]
    """For each window of the model's layers, the pairs of tokens of a segment that are at most so far apart."""
    targets: Fraction

    def plus(self, other: "ItemWork", *, times: Fraction = Fraction(1)) -> "ItemWork":
        """Returns this work and that of the other so many times."""
        return ItemWork(
            squared_lengths=self.squared_lengths + times * other.squared_lengths,
            pairs_within={
                window: pairs + times * other.pairs_within[window] for window, pairs in self.pairs_within.items()
            },
            targets=self.targets + times * other.targets,
        )

    def of_items(self, items: int, *, slots: int, sequences: int) -> Work:
        """Returns the work of so many packs or sequences, which take so many slots."""
        return Work(
            slots=slots,
            squared_lengths=round(items * self.squared_lengths),
            head_slots=round(items * self.targets),
            sequences=sequences,
            pairs_within={window: round(items * pairs) for window, pairs in self.pairs_within.items()},
        )


@dataclass(frozen=True, kw_only=True)
class RunData(DataFacts):
    """The average data of a run, and its amount."""

    useful: ItemWork
    """Work on real tokens."""
    of_padding: ItemWork
    """Work on the padding inside sequences."""
    padded_rows: Fraction | None
    """Work on an item if each sequence (of a stream: each document) were padded to rows of `max_sequence_length`;
    None if unknown, or if the recipe pads to rows itself."""
    sources: tuple[SourceData, ...]
    """The sources; empty if they are not known individually."""
    lengths: LengthHistogram | None
    """The sequences of all sources; None if they are not known, or are rows that may hold padding."""
    assumptions: tuple[str, ...]
    """Assumptions in place of prepared data; empty if the data was read."""


def settled_data(
    config: RunConfig, options: PlanOptions, resolved: ResolvedRun | None = None
) -> tuple[SettledRun, RunData]:
    """Returns the run in packs and steps, and its data; the arguments are as in `plan_run`.

    Raises: ConfigError for a vocabulary size of data that has one, or a length that follows from data that is not
    prepared; DataError for data that was prepared from another section.
    """
    vocabulary_size, tokens, documents = options.vocabulary_size, options.corpus_tokens, options.corpus_documents
    if tokens is not None and documents is not None:
        data = data_of_counts(config, tokens=tokens, documents=documents, vocabulary_size=vocabulary_size)
        return settle(config, data), data
    run = resolved or _resolved(config)
    if run is not None:
        if vocabulary_size is not None:
            raise ConfigError(
                "--vocabulary-size is for data that is not prepared; this run's vocabulary has "
                f"{run.prepared.vocabulary_size:,} entries: leave the option out"
            )
        return run.settled, data_of_run(run)
    data = estimated_data(config, vocabulary_size=vocabulary_size)
    return settle(config, data), data


def _resolved(config: RunConfig) -> ResolvedRun | None:
    try:
        return resolve(config, PreparedData.open(config.prepared_dir, config.data, verify="nothing"))
    except NotPreparedError:
        return None


def data_of_counts(config: RunConfig, *, tokens: int, documents: int, vocabulary_size: int | None) -> RunData:
    """Estimates the data of one corpus from its counts alone.

    Args:
        tokens: of an epoch, without end-of-text.
        documents: number of documents; each adds an end-of-text token.
        vocabulary_size: None: the tokenizer's.

    Raises: ConfigError for recipes whose sequences do not follow from counts, and several sources.
    """
    recipe, pack_length = _countable_recipe(config.data), config.data.pack_length
    longest, total = recipe.max_sequence_length, tokens + documents
    if recipe.kind == "concat":
        sequences = math.ceil(total / longest)
        packs = math.ceil(sequences / (pack_length // longest))
        cuts = math.ceil(total / min(longest, recipe.atom or longest))
        segments = min(cuts + documents, total) if recipe.isolate_documents else sequences
        padded_rows = None
        assumption = "an epoch is one stream of all tokens"
    else:
        sequences = segments = max(documents, math.ceil(total / longest))
        packs = math.ceil(total / pack_length)
        padded_rows = sequences
        assumption = "packs are full, and documents no more than the tokens need are split"
    items = packs if config.training.batching == "packs" else sequences
    (name,) = config.data.sources
    ends_left_out = documents if recipe.end_of_text_in_loss == "none" else 0
    return _estimated(
        config,
        sequences=Fraction(sequences, items),
        segments=Fraction(segments, items),
        tokens=Fraction(total, items),
        ends_left_out=Fraction(ends_left_out, items),
        padded_rows=None if padded_rows is None else Fraction(padded_rows, items),
        source=SourceData(
            name=name, share=Fraction(1), documents=documents, sequences=sequences, items=items, tokens=total
        ),
        vocabulary_size=vocabulary_size,
        assumptions=(
            f"{tokens:,} tokens and {documents:,} end-of-text tokens per epoch, as given",
            f"{assumption}; all sequences are taken as equally long for attention",
        ),
    )


def _countable_recipe(data: DataConfig) -> DocumentsRecipe | ConcatRecipe:
    """Returns the recipe.

    Raises: ConfigError if the number of sequences does not follow from counts, and for several sources.
    """
    if not isinstance(data.recipe, DocumentsRecipe | ConcatRecipe):
        raise ConfigError(
            f"--corpus-tokens is for data.recipe.kind documents or concat: how many sequences {data.recipe.kind} makes "
            "does not follow from counts; prepare the data"
        )
    if len(data.sources) > 1:
        raise ConfigError(
            f"--corpus-tokens counts one source, and the run has {', '.join(data.sources)}: leave one, or prepare the "
            "data"
        )
    return data.recipe


def estimated_data(config: RunConfig, *, vocabulary_size: int | None) -> RunData:
    """Estimates a run whose data is not prepared: full packs of the longest sequences.

    Raises: ConfigError if a setting of the run file depends on the data.
    """
    training = config.training
    if training.epochs is not None or training.packing_adjustment != "none":
        key = "packing_adjustment" if training.epochs is None else "epochs"
        raise ConfigError(
            f"training.{key} ({getattr(training, key)}) needs the data, which is not prepared: run `evenpack "
            "prepare`, or give --corpus-tokens and --corpus-documents"
        )
    longest = config.data.recipe.max_sequence_length
    sequences = config.data.pack_length // longest if training.batching == "packs" else 1
    return _estimated(
        config,
        sequences=Fraction(sequences),
        segments=Fraction(sequences),
        tokens=Fraction(sequences * longest),
        ends_left_out=Fraction(0),
        padded_rows=None,
        source=None,
        vocabulary_size=vocabulary_size,
        assumptions=(
            "the data is not prepared: all sequences are taken as long as they can be, and packs as full of them",
        ),
    )


def _estimated(
    config: RunConfig,
    *,
    sequences: Fraction,
    segments: Fraction,
    tokens: Fraction,
    ends_left_out: Fraction,
    padded_rows: Fraction | None,
    source: SourceData | None,
    vocabulary_size: int | None,
    assumptions: tuple[str, ...],
) -> RunData:
    """Returns data whose items hold so much, as if all segments were equally long.

    Args:
        ends_left_out: end-of-text tokens of an item that the loss leaves out.
    """
    of_packs = config.training.batching == "packs"
    targets = max(tokens - segments - ends_left_out, Fraction(0))
    if family_of(config.model).objective == "masked_tokens":
        targets = sequences * int(masked_count(np.array([round(tokens / sequences)]), config.mask_limits)[0])
    vocabulary, origin = _vocabulary(config.data, vocabulary_size)
    return RunData(
        item=AverageItem(
            sequences=sequences,
            tokens=tokens,
            row_slots=config.data.pack_length if of_packs else config.data.recipe.max_sequence_length,
        ),
        useful=ItemWork(
            squared_lengths=tokens**2 / segments,
            pairs_within={
                window: segments * pairs_of_average_length(tokens / segments, window=window)
                for window in config.model.windows
            },
            targets=targets,
        ),
        of_padding=_no_work(config.model.windows),
        padded_rows=padded_rows,
        items_per_epoch=None if source is None else source.items,
        sources=() if source is None else (source,),
        lengths=None,
        vocabulary_size=vocabulary,
        assumptions=(*assumptions, origin),
    )


def _vocabulary(data: DataConfig, given: int | None) -> tuple[int, str]:
    """Returns the size and its origin. Raises: ConfigError if it is not known; DataError for a folder without one."""
    if given is not None:
        return given, f"a vocabulary of {given:,}, as given"
    known = vocabulary_size_of(data.tokenizer)
    if known is None:
        raise ConfigError(
            f"how large the vocabulary of data.tokenizer ({data.tokenizer.kind}) is, is known once the data is "
            "prepared: run `evenpack prepare`, or give --vocabulary-size"
        )
    size, origin = known
    return size, f"a vocabulary of {size:,}, {origin}"


_AT_ONCE = 1 << 20
"""Sequences, or documents, processed together."""


def data_of_run(run: ResolvedRun) -> RunData:
    """Reads prepared data.

    Raises: DataError if a source has nothing to train on, or the vocabulary lacks a token that the objective needs.
    """
    prepared = run.prepared
    views = {name: prepared.view(name, "train") for name in prepared.source_names}
    config = run.config
    data, batching = config.data, config.training.batching
    shares = drawn_shares(config)
    packings = {name: training_packing(prepared, name) for name in views}
    counts = {name: packing.items(batching) for name, packing in packings.items()}
    useful = of_padding = _no_work(config.model.windows)
    padded_rows = Fraction(0)
    for name, view in views.items():
        share = shares[name] / counts[name]
        of_epoch, of_its_padding = _sums(view, run.objective, config.model.windows)
        useful = useful.plus(of_epoch, times=share)
        of_padding = of_padding.plus(of_its_padding, times=share)
        padded_rows += share * _count_padded_rows(view)
    return RunData(
        item=average_of(packings, shares, batching=batching, data=data),
        useful=useful,
        of_padding=of_padding,
        padded_rows=None if data.recipe.kind == "padding" else padded_rows,
        items_per_epoch=sum(count for name, count in counts.items() if shares[name]),
        sources=tuple(
            SourceData(
                name=name,
                share=share,
                documents=views[name].accounting.documents_kept,
                sequences=packings[name].sequences,
                items=counts[name],
                tokens=packings[name].tokens,
            )
            for name, share in shares.items()
        ),
        lengths=None if data.keeps_order else lengths_of(list(views.values())),
        vocabulary_size=prepared.vocabulary_size,
        assumptions=(),
    )


def _no_work(windows: Iterable[int]) -> ItemWork:
    return ItemWork(squared_lengths=Fraction(0), pairs_within=dict.fromkeys(windows, Fraction(0)), targets=Fraction(0))


def _sums(view: SequenceView, objective: Objective, windows: Sequence[int]) -> tuple[ItemWork, ItemWork]:
    """Returns the work of a split without its padding, and that on its padding."""
    useful = of_padding = _no_work(windows)
    for sequence_ids in _id_chunks(view.count):
        held = view.counts(sequence_ids, view.lengths(int(sequence_ids[0]), int(sequence_ids[-1]) + 1))
        targets = int(objective.count_targets(view, sequence_ids, held).sum())
        all_work, real = (_attention(lengths, windows) for lengths in (held.segment_lengths, held.real_lengths))
        found = replace(real, targets=Fraction(targets - held.padding_targets))
        filling = ItemWork(
            squared_lengths=all_work.squared_lengths - real.squared_lengths,
            pairs_within={window: pairs - real.pairs_within[window] for window, pairs in all_work.pairs_within.items()},
            targets=Fraction(held.padding_targets),
        )
        useful, of_padding = useful.plus(found), of_padding.plus(filling)
    return useful, of_padding


def _attention(lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", windows: Sequence[int]) -> ItemWork:
    """Returns the work of attention within segments of these lengths."""
    return ItemWork(
        squared_lengths=Fraction(int((lengths**2).sum())),
        pairs_within={window: Fraction(pairs) for window, pairs in total_pairs_within(lengths, windows).items()},
        targets=Fraction(0),
    )


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
