"""Makes [CLS] A [SEP] B [SEP] from sentences: writes the pairs of a split, in a token file with columns.

the calling thread     units of work: a block of documents in one pass; appends in order, commits every few seconds
threads                unit -> the sentences of pairs -> tokens, and stored masks (sequences/pair_drawing.py)

The output depends on the documents and the recipe alone, and neither on the blocks nor on the threads.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Int64, Integer

from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.ranges import cut, ranges
from evenpack.data.recipes import MaskedPairsRecipe, SentencePairsRecipe
from evenpack.data.sequences import PAIRS, MaskedPairsView, SentencePairsView, TokenAccounting
from evenpack.data.sequences.masking import SPECIAL_TOKENS_OF_A_PAIR
from evenpack.data.sequences.pair_drawing import MaskDrawing, PairDrawing, PairSpans, SentenceIndex
from evenpack.data.sequences.pairs import MASK_COLUMNS, MOST_MASKS, ORIGIN_COLUMNS, PairMasks, most_masks_by_length
from evenpack.data.sequences.view import open_stored, remove_description, write_description
from evenpack.data.tokenizers.special_tokens import PairTokens
from evenpack.data.tokens.array_file import open_array, write_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter, column_path
from evenpack.errors import DataError
from evenpack.worker_pool import map_in_order

PAIR_COLUMNS = {"first_segment_lengths": "<u2", "next_sentence_labels": "|u1"}
"""Columns of all pairs, by name and numpy's type; those with stored masks have `MASK_COLUMNS` too."""
_CHUNK_PAIRS = 1 << 20
"""Pairs whose masks are counted together."""
BLOCK_SENTENCES = 1 << 18
"""Sentences of a unit of work: some 15 MB of pairs, a few times that while they are made."""
_MOST_THREADS = 8
_COPIED_PAIRS = 1 << 12
"""Pairs whose tokens are copied together."""


PairsT = TypeVar("PairsT", bound=SentencePairsView)


def begin_masks(writer: TokenFileWriter, columns: dict[str, str], state: dict[str, Any]) -> None:
    """Writes the first offset of stored masks, which no pair writes, unless `state` has it; `state` counts masks."""
    if "masks" not in state:
        nothing = {name: np.zeros(0, dtype=kind) for name, kind in columns.items()}
        no_pairs = np.zeros(0, dtype=np.int64)
        writer.append(no_pairs, no_pairs, {**nothing, "mask_offsets": np.zeros(1, dtype=np.int64)})
        state["masks"] = 0


def pair_columns(
    first_segment_lengths: Int64[np.ndarray, " K"],
    next_sentence_labels: Integer[np.ndarray, " K"] | Bool[np.ndarray, " K"],
    masks: PairMasks | None,
    state: dict[str, Any],
) -> dict[str, Integer[np.ndarray, " _"]]:
    """Returns the rows of pairs to append to the columns that all have, and to those of masks; `state` counts masks."""
    columns: dict[str, Integer[np.ndarray, " _"]] = {
        "first_segment_lengths": first_segment_lengths.astype(np.uint16),
        "next_sentence_labels": next_sentence_labels.astype(np.uint8),
    }
    if masks is not None:
        columns |= masks.columns(state["masks"])
        state["masks"] += len(masks.labels)
    return columns


def store_view(
    kind: type[PairsT],
    recipe: SentencePairsRecipe | MaskedPairsRecipe,
    token_file: TokenFile,
    accounting: TokenAccounting,
) -> PairsT:
    """Makes a view of a finished token file and its columns, in their folder; computes `most_masks` if it has masks."""
    directory = token_file.prefix.parent
    remove_description(directory)
    if issubclass(kind, MaskedPairsView):
        mask_offsets = open_array(column_path(token_file.prefix, "mask_offsets"))
        starts = range(0, token_file.documents, _CHUNK_PAIRS)
        lengths = (token_file.document_lengths(start, start + _CHUNK_PAIRS) for start in starts)
        most_masks = most_masks_by_length(mask_offsets, lengths, longest=recipe.max_sequence_length)
        write_array(column_path(token_file.prefix, MOST_MASKS), most_masks)
    write_description(directory, recipe, token_file, accounting)
    return open_stored(kind, directory, token_file, recipe)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSettings:
    """The settings for the pairs of one split."""

    recipe: SentencePairsRecipe
    passes: int
    """Passes over the documents."""
    pair_tokens: PairTokens
    vocabulary_size: int
    masks: MaskDrawing | None
    """Masks that are stored with the pairs; None: none."""

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the pairs' token file."""
        return PAIR_COLUMNS | ORIGIN_COLUMNS | (MASK_COLUMNS if self.masks else {})


class _Unit(NamedTuple):
    pass_number: int
    first: int
    last: int
    """Last of the kept documents."""
    text_tokens: int


def write_pairs(
    index: SentenceIndex,
    documents: Int64[np.ndarray, " documents"],
    settings: PairSettings,
    folder: Path,
    *,
    origin: dict[str, Any],
    progress: SourceProgress,
) -> SentencePairsView:
    """Writes the pairs of a split into `folder`, or resumes that; `documents` are its ids, in ascending order.

    `origin` goes into the journal's state.

    Raises: DataError if a document has one sentence and the policy is `error`, or if there is no other document to
    take a random next segment from; RunError if the disk is full.
    """
    kept, accounting = _choose(index, documents, settings, progress.source)
    prefix = folder / PAIRS
    with TokenFileWriter.resume(prefix, vocabulary_size=settings.vocabulary_size, columns=settings.columns) as writer:
        counts = ("passes", "documents", "text_tokens", "tokens_cut", "tokens_borrowed")
        state = {"origin": origin, **dict.fromkeys(counts, 0), **writer.state}
        if not writer.complete:
            if settings.masks is not None:
                begin_masks(writer, settings.columns, state)
            _append_all(index, kept, settings, writer, state, progress=progress)
        state = writer.finish(state).state
    accounting |= {name: state[name] for name in ("tokens_cut", "tokens_borrowed")}
    token_file = TokenFile(prefix)
    kind: type[SentencePairsView] = SentencePairsView if settings.masks is None else MaskedPairsView
    return store_view(
        kind,
        settings.recipe,
        token_file,
        TokenAccounting(
            tokens_kept=token_file.tokens,
            tokens_special=SPECIAL_TOKENS_OF_A_PAIR * token_file.documents,
            sequences=token_file.documents,
            **accounting,
        ),
    )


def _choose(
    index: SentenceIndex, documents: Int64[np.ndarray, " documents"], settings: PairSettings, source: str
) -> tuple[Int64[np.ndarray, " kept"], dict[str, int]]:
    """Returns the documents from which pairs are made, and the accounting of the others."""
    recipe = settings.recipe
    sentences = index.first_sentences[documents + 1] - index.first_sentences[documents]
    _, tokens = index.token_file.spans(documents)
    empty, single = sentences == 0, sentences == 1
    if single.any() and recipe.single_sentence_documents == "error":
        raise DataError(
            f"source '{source}': document {documents[single][0]} is the first of {int(single.sum())} with one sentence "
            "only, and recipe.single_sentence_documents is 'error'; take 'random_next' or 'drop'"
        )
    dropped = single if recipe.single_sentence_documents == "drop" else np.zeros_like(single)
    kept = ~(empty | dropped)
    if kept.sum() == 1:
        raise DataError(
            f"source '{source}': of {len(documents)} documents of a split only one can be made into pairs, and a "
            "random next segment comes from another: give the source more documents, or change "
            "data.validation_fraction (0 holds none out)"
        )
    return documents[kept], {
        "documents_read": len(documents),
        "documents_kept": int(kept.sum()),
        "documents_too_short": int(empty.sum()),
        "documents_single_sentence": int(dropped.sum()),
        "tokens_read": int(tokens.sum()),
        "tokens_too_short": int(tokens[empty].sum()),
        "tokens_single_sentence": int(tokens[dropped].sum()),
        "tokens_document_ends": int(kept.sum()),
        "passes": settings.passes,
    }


def _append_all(
    index: SentenceIndex,
    kept: Int64[np.ndarray, " kept"],
    settings: PairSettings,
    writer: TokenFileWriter,
    state: dict[str, Any],
    *,
    progress: SourceProgress,
) -> None:
    """Makes the pairs that the writer does not have yet, and stores `state` with them."""
    drawing = PairDrawing(index, kept, settings.recipe)
    itemsize, resumed = index.token_file.dtype.itemsize, state["text_tokens"]
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)

    def make(unit: _Unit) -> tuple[_Unit, Integer[np.ndarray, " tokens"], PairSpans, PairMasks | None]:
        spans = drawing.draw(unit.first, unit.last, unit.pass_number)
        tokens = _pair_tokens(index.token_file, spans, settings.pair_tokens)
        if settings.masks is None:
            return unit, tokens, spans, None
        tokens, masks = settings.masks.draw(tokens, spans.lengths, spans.first_starts, unit.pass_number)
        return unit, tokens, spans, masks

    with ThreadPoolExecutor(threads, thread_name_prefix="pairs") as executor:
        units = _units(index, kept, settings.passes, state["passes"], state["documents"])
        for unit, tokens, spans, masks in map_in_order(make, units, executor, threads=threads):
            columns = pair_columns(spans.first_lengths + 2, spans.is_random_next, masks, state)
            columns |= {"first_starts": spans.first_starts, "second_starts": spans.second_starts}
            writer.append(tokens, spans.lengths, columns)
            state["passes"] += unit.last == len(kept)
            state["documents"] = unit.last % len(kept)
            state["text_tokens"] += unit.text_tokens
            state["tokens_cut"] += spans.tokens_cut
            state["tokens_borrowed"] += spans.tokens_borrowed
            if writer.is_commit_due:
                writer.commit(state)
            progress.report(
                documents=writer.documents,
                tokens=writer.tokens,
                bytes_read=itemsize * state["text_tokens"],
                bytes_resumed=itemsize * resumed,
            )


def _units(
    index: SentenceIndex, kept: Int64[np.ndarray, " kept"], passes: int, passes_done: int, documents_done: int
) -> Iterator[_Unit]:
    """Yields blocks of documents of about `BLOCK_SENTENCES`, pass after pass, after those already done."""
    firsts, lasts = index.first_sentences[kept], index.first_sentences[kept + 1]
    sentences = np.append(0, np.cumsum(lasts - firsts))
    text_tokens = np.append(0, np.cumsum(index.places[lasts] - index.places[firsts]))
    for pass_number in range(passes_done, passes):
        begin = documents_done if pass_number == passes_done else 0
        for first, last in cut(sentences[begin:], BLOCK_SENTENCES):
            tokens = text_tokens[begin + last] - text_tokens[begin + first]
            yield _Unit(pass_number, begin + first, begin + last, int(tokens))


def _pair_tokens(token_file: TokenFile, spans: PairSpans, pair_tokens: PairTokens) -> Integer[np.ndarray, " tokens"]:
    """Returns [CLS] A [SEP] B [SEP], pair after pair, in the token file's type."""
    ends = np.cumsum(spans.lengths)
    made = np.empty(int(ends[-1]), dtype=token_file.dtype)
    content = token_file.read(0, token_file.tokens)
    for start in range(0, len(ends), _COPIED_PAIRS):
        chunk = slice(start, start + _COPIED_PAIRS)
        first, second = spans.first_lengths[chunk] + 1, spans.second_lengths[chunk] + 2
        begin = int(ends[start] - first[0] - second[0])
        # A is copied with the token before it, B with those around it: the positions of [CLS] and [SEP].
        lengths = np.stack([first, second], axis=1).ravel()
        starts = np.stack([spans.first_starts[chunk] - 1, spans.second_starts[chunk] - 1], axis=1).ravel()
        places = np.cumsum(lengths) - lengths
        origins = ranges(starts, lengths)
        copied = made[begin : begin + len(origins)]
        copied[:] = content.take(origins, mode="clip")
        copied[places[::2]] = pair_tokens.classification_id
        copied[places[1::2]] = pair_tokens.separator_id
        copied[ends[chunk] - begin - 1] = pair_tokens.separator_id
    return made
