"""The data of a run for its budget: estimated here from counts or assumptions, read in `exact.py`."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from evenpack.data.config import DataConfig
from evenpack.data.sequences.masking import masked_count
from evenpack.data.tokenizers.loading import vocabulary_size_of
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.step_items import AverageItem
from evenpack.errors import ConfigError
from evenpack.models.families import family_of


@dataclass(frozen=True, kw_only=True)
class SourceData:
    """An epoch of one source."""

    name: str
    share: Fraction
    """Fraction of the packs or sequences that a step draws."""
    items: int
    """Packs or sequences, as a step counts them."""
    tokens: int


@dataclass(frozen=True, kw_only=True)
class ItemWork:
    """The average work of a pack or sequence in attention and in the head."""

    squared_lengths: Fraction
    """Sum over its segments."""
    targets: Fraction


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The average data of a run, and its amount."""

    item: AverageItem
    useful: ItemWork
    """Work on real tokens."""
    of_padding: ItemWork
    """Work on the padding inside sequences."""
    padded_rows: Fraction | None
    """Work on an item if each sequence (of a stream: each document) were padded to rows of `max_sequence_length`;
    None if unknown, or if the recipe pads to rows itself."""
    items_per_epoch: int | None
    """Items of all sources together; None if unknown."""
    sources: tuple[SourceData, ...]
    """The sources; empty if they are not known individually."""
    vocabulary_size: int
    assumptions: tuple[str, ...]
    """Assumptions in place of prepared data; empty if the data was read."""


def data_of_counts(config: RunConfig, *, tokens: int, documents: int, vocabulary_size: int | None) -> RunData:
    """Estimates the data of one corpus from its counts alone.

    Args:
        tokens: of an epoch, without end-of-text.
        documents: number of documents; each adds an end-of-text token.
        vocabulary_size: None: the tokenizer's.

    Raises: ConfigError for recipes whose sequences do not follow from counts, and several sources.
    """
    _require_countable(config.data)
    recipe, pack_length = config.data.recipe, config.data.pack_length
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
    return _estimated(
        config,
        sequences=Fraction(sequences, items),
        segments=Fraction(segments, items),
        tokens=Fraction(total, items),
        padded_rows=None if padded_rows is None else Fraction(padded_rows, items),
        source=SourceData(name=name, share=Fraction(1), items=items, tokens=total),
        vocabulary_size=vocabulary_size,
        assumptions=(
            f"{tokens:,} tokens and {documents:,} end-of-text tokens per epoch, as given",
            f"{assumption}; all sequences are taken as equally long for attention",
        ),
    )


def _require_countable(data: DataConfig) -> None:
    """Checks the recipe.

    Raises: ConfigError if the number of sequences does not follow from counts, and for several sources.
    """
    if data.recipe.kind not in ("documents", "concat"):
        raise ConfigError(
            f"--corpus-tokens is for data.recipe.kind documents or concat: how many sequences {data.recipe.kind} makes "
            "does not follow from counts; prepare the data"
        )
    if len(data.sources) > 1:
        raise ConfigError(
            f"--corpus-tokens counts one source, and the run has {', '.join(data.sources)}: leave one, or prepare the "
            "data"
        )


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
    padded_rows: Fraction | None,
    source: SourceData | None,
    vocabulary_size: int | None,
    assumptions: tuple[str, ...],
) -> RunData:
    """Returns data whose items hold so much, as if all segments were equally long."""
    of_packs = config.training.batching == "packs"
    targets = tokens - segments
    if family_of(config.model).objective == "masked_tokens":
        masking = config.data.static_masks or config.masking
        targets = sequences * int(masked_count(np.array([round(tokens / sequences)]), masking)[0])
    vocabulary, origin = _vocabulary(config.data, vocabulary_size)
    return RunData(
        item=AverageItem(
            sequences=sequences,
            tokens=tokens,
            row_slots=config.data.pack_length if of_packs else config.data.recipe.max_sequence_length,
        ),
        useful=ItemWork(squared_lengths=tokens**2 / segments, targets=targets),
        of_padding=ItemWork(squared_lengths=Fraction(0), targets=Fraction(0)),
        padded_rows=padded_rows,
        items_per_epoch=None if source is None else source.items,
        sources=() if source is None else (source,),
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
