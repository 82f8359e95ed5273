"""The sequences that a recipe makes of the documents of a split, computed by arithmetic, without a copy of any token.

A view holds one or two numbers per document (or cut), so that a sequence is found without a search through lengths.
For 1e8 documents they take seconds to compute and gigabytes of memory, too much for every worker of every rank.
`prepare` therefore stores them as .npy files; an opened view maps these, and its pickle is the name of its folder.

Views tell which parts of which documents are in which sequence (`Origins`), and account for every token of the split
(`TokenAccounting`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, Shaped

from evenpack.data.mapped_pages import release_mapped_pages
from evenpack.data.recipes import OF_THE_LOSS, Recipe
from evenpack.data.tokens.array_file import damage_named, open_array, write_array
from evenpack.data.tokens.file import TokenFile
from evenpack.errors import DataError
from evenpack.files import fsync_directory, read_json, write_json

Trait = Literal["labels", "masks", "padding", "pairs"]
"""Labels of single tokens, stored masks, tokens that only pad, and halves that follow each other or not."""

_DESCRIPTION = "view.json"
_CHUNK_SEQUENCES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TokenAccounting:
    """The accounts of one recipe over one split of one source; they balance, or the constructor raises ValueError."""

    documents_read: int
    documents_kept: int
    documents_too_short: int = 0
    documents_too_long: int = 0
    tokens_read: int
    tokens_kept: int
    """Tokens in a sequence."""
    tokens_cut: int = 0
    """Tokens beyond `max_sequence_length` in truncated documents (`truncate`), and those cut from pairs that are too
    long."""
    tokens_too_short: int = 0
    """Tokens in documents below `minimum_document_length`, or without a sentence."""
    tokens_too_long: int = 0
    """Tokens in documents above `max_sequence_length` that were dropped (`drop`)."""
    sequences: int
    passes: int = 1
    """Number of passes over each document (`duplication_factor`)."""
    documents_single_sentence: int = 0
    tokens_single_sentence: int = 0
    """Tokens in documents of one sentence that were left out (`single_sentence_documents`)."""
    tokens_document_ends: int = 0
    """End-of-text tokens of kept documents whose sequences leave them out."""
    tokens_borrowed: int = 0
    """Tokens of segments from another document (random next), before they were cut."""
    tokens_special: int = 0
    """Tokens added around segments: [CLS] and [SEP]."""
    tokens_added_ends: int = 0
    """End-of-text tokens after pieces of documents, beyond the one that each document has."""
    tokens_subsequence_ends: int = 0
    """End-of-text tokens after pieces that fill an atom, including the document's own one."""
    tokens_tail_ends: int = 0
    """The first end-of-text token after each tail of a document."""
    padding_slots: int = 0
    """Padding: end-of-text tokens after that first one. They are not counted as tokens."""

    @classmethod
    def of_whole(cls, *, sequences: int, tokens: int) -> "TokenAccounting":
        """Returns the accounting of documents that each are a whole sequence."""
        return cls(
            documents_read=sequences,
            documents_kept=sequences,
            tokens_read=tokens,
            tokens_kept=tokens,
            sequences=sequences,
        )

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"accounting entries below zero: {', '.join(negative)} in {self}")
        if self.documents_read != self.documents_kept + self.documents_dropped:
            raise ValueError(f"the documents read are not the sum of those kept and dropped: {self}")
        added = self.tokens_borrowed + self.tokens_special + self.tokens_added_ends
        gathered = self.passes * (self.tokens_read - self.tokens_document_ends) + added
        if gathered != self.tokens_kept + self.tokens_cut + self.tokens_dropped:
            raise ValueError(
                "the tokens read, with those borrowed and added, are not the sum of those kept, cut and dropped: "
                f"{self}"
            )

    @property
    def documents_dropped(self) -> int:
        return self.documents_too_short + self.documents_too_long + self.documents_single_sentence

    @property
    def tail_padding(self) -> int:
        """End-of-text tokens after tails of documents, including the first one."""
        return self.tokens_tail_ends + self.padding_slots

    @property
    def tokens_dropped(self) -> int:
        """Tokens dropped in all passes."""
        return self.passes * (self.tokens_too_short + self.tokens_too_long + self.tokens_single_sentence)


@runtime_checkable
class SequenceView(Protocol):
    """The sequences of one split of one source, numbered from 0; K = number of requested sequences.

    A sequence has one segment, or several where documents share it and must not see each other. Ids outside
    [0, count) raise IndexError. What counts in the loss is known from the recipe with which the view was opened.
    """

    @property
    def traits(self) -> frozenset[Trait]:
        """What the sequences have besides tokens, which an objective may need or refuse."""

    @property
    def max_sequence_length(self) -> int: ...

    @property
    def count(self) -> int:
        """Number of sequences."""

    @property
    def max_segments_per_sequence(self) -> int:
        """Returns the exact maximum, at least 1."""

    @property
    def accounting(self) -> TokenAccounting: ...

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        """Returns the tokens of the sequences `start` to `stop`, by default of all; takes memory for these alone."""

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> "SequenceCounts":
        """Returns what the sequences hold, without reading a token; `lengths` are theirs, which a plan already has.

        Raises: DataError if a stored column is damaged.
        """

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> "SequenceContent":
        """Returns the content of the sequences. Raises: DataError if a stored column is damaged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceCounts:
    """What K sequences hold."""

    lengths: Int64[np.ndarray, " K"]
    segment_lengths: Int64[np.ndarray, " segments"]
    """Lengths of all segments, sequence by sequence."""
    segments: Int64[np.ndarray, " K"]
    """Number of segments of each sequence, at least 1."""
    targets: Int64[np.ndarray, " K"]
    """Tokens of each sequence that are predicted: its stored masks; or those that its labels, or the recipe's
    `end_of_text_in_loss`, leave in the loss, but for the first of each segment."""
    padding: Int64[np.ndarray, " segments"] | None = None
    """Tokens of each segment that only pad; None: none do."""
    predicts_padding: bool = False
    """Whether these are among the targets, as other tokens are."""

    @classmethod
    def of_single_segments(cls, lengths: Integer[np.ndarray, " K"]) -> "SequenceCounts":
        """Returns the counts of sequences that are a segment each, in which nothing pads and all is predicted."""
        lengths = lengths.astype(np.int64, copy=False)
        return cls(lengths=lengths, segment_lengths=lengths, segments=np.ones_like(lengths), targets=lengths - 1)

    @classmethod
    def joined(cls, groups: Int64[np.ndarray, " K"], parts: Mapping[int, "SequenceCounts"]) -> "SequenceCounts":
        """Returns the counts of K sequences, each of which is the next one of its group; all are of one recipe."""
        one = next(iter(parts.values()))
        if len(parts) == 1:
            return one
        segments = _in_order(groups, parts, "segments")
        return cls(
            lengths=_in_order(groups, parts, "lengths"),
            segment_lengths=_in_order(groups, parts, "segment_lengths", segments),
            segments=segments,
            targets=_in_order(groups, parts, "targets"),
            padding=_in_order(groups, parts, "padding", segments),
            predicts_padding=one.predicts_padding,
        )

    @property
    def real_lengths(self) -> Int64[np.ndarray, " segments"]:
        """Lengths of all segments without what only pads them."""
        return self.segment_lengths if self.padding is None else self.segment_lengths - self.padding

    @property
    def padding_tokens(self) -> int:
        """Number of tokens that only pad."""
        return 0 if self.padding is None else int(self.padding.sum())

    @property
    def padding_targets(self) -> int:
        """Number of targets that only pad: a segment's first token is none."""
        if self.padding is None or not self.predicts_padding:
            return 0
        return int((self.padding - (self.padding == self.segment_lengths)).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceContent:
    """The content of K sequences, one after another."""

    counts: SequenceCounts
    tokens: Integer[np.ndarray, " tokens"]
    """Tokens in the token file's type."""
    left_out: Bool[np.ndarray, " tokens"] | None = None
    """Tokens that are not predicted, by labels or as an end-of-text; None: none."""
    first_lengths: Int64[np.ndarray, " K"] | None = None
    """Tokens of the first half of each, where sequences have two halves."""
    labels: Shaped[np.ndarray, " K *parts"] | None = None
    """The label of each sequence as a whole: whether its halves follow each other, or what a task's file says."""
    mask_places: Int64[np.ndarray, " targets"] | None = None
    """Ascending positions of the stored masks within each sequence, of which the targets are its number."""
    mask_labels: Int64[np.ndarray, " targets"] | None = None
    """The tokens to predict there."""

    @classmethod
    def joined(cls, groups: Int64[np.ndarray, " K"], parts: Mapping[int, "SequenceContent"]) -> "SequenceContent":
        """Returns the content of K sequences, each of which is the next one of its group."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        counts = SequenceCounts.joined(groups, {group: one.counts for group, one in parts.items()})
        return cls(
            counts=counts,
            tokens=_in_order(groups, parts, "tokens", counts.lengths),
            left_out=_in_order(groups, parts, "left_out", counts.lengths),
            first_lengths=_in_order(groups, parts, "first_lengths"),
            labels=_in_order(groups, parts, "labels"),
            mask_places=_in_order(groups, parts, "mask_places", counts.targets),
            mask_labels=_in_order(groups, parts, "mask_labels", counts.targets),
        )

    @property
    def lengths(self) -> Int64[np.ndarray, " K"]:
        return self.counts.lengths

    @property
    def starts(self) -> Int64[np.ndarray, " K"]:
        """First token of each sequence."""
        return np.cumsum(self.lengths) - self.lengths


def _in_order(
    groups: Int64[np.ndarray, " K"], parts: Mapping[int, Any], name: str, sizes: Int64[np.ndarray, " K"] | None = None
) -> Any:
    """Returns a field of K sequences, each of which takes its next values from the part of its group.

    None if no part has the field; zeros where one has not.

    Args:
        sizes: number of values of each sequence; None: one.
    """
    given = {group: values for group, part in parts.items() if (values := getattr(part, name)) is not None}
    if not given:
        return None
    of_values = groups if sizes is None else np.repeat(groups, sizes)
    joined = np.zeros(len(of_values), dtype=np.result_type(*given.values()))
    for group, values in given.items():
        joined[of_values == group] = values
    return joined


def length_chunks(view: SequenceView) -> Iterator[Int32[np.ndarray, " chunk"]]:
    """Yields the lengths of all sequences in order, some at a time: 4 MB for a billion sequences too."""
    for start in range(0, view.count, _CHUNK_SEQUENCES):
        yield view.lengths(start, min(start + _CHUNK_SEQUENCES, view.count))
        if isinstance(view, StoredView):
            view.release_pages()


class NumberedSequences:
    """Sequences numbered from 0."""

    traits: frozenset[Trait] = frozenset()

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of sequences."""

    def _check_ids(self, sequence_ids: Int64[np.ndarray, " K"]) -> None:
        if len(sequence_ids) and not 0 <= sequence_ids.min() <= sequence_ids.max() < self.count:
            raise IndexError(
                f"sequence ids {sequence_ids.min()} to {sequence_ids.max()} asked for, there are {self.count}"
            )


class LocatedSequences(NumberedSequences):
    """Sequences that each are contiguous in the token file and one segment."""

    token_file: TokenFile

    @abstractmethod
    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns the start of each sequence in the token file, and its length in tokens."""

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        self._check_ids(sequence_ids)
        return SequenceCounts.of_single_segments(lengths)

    def read(self, sequence_ids: Int64[np.ndarray, " K"]) -> SequenceContent:
        starts, lengths = self.locate(sequence_ids)
        return SequenceContent(
            counts=self.counts(sequence_ids, lengths),
            tokens=self.token_file.gather(starts, lengths),
            left_out=self.left_out(sequence_ids),
        )

    def left_out(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"] | None:
        """Returns `SequenceContent.left_out` of the sequences."""
        return None


class SequencesAsDocuments(LocatedSequences):
    """Sequences that are the documents of the token file, which was written for them."""

    def lengths(self, start: int = 0, stop: int | None = None) -> Int32[np.ndarray, " asked"]:
        return self.token_file.document_lengths(start, stop).astype(np.int32)

    def locate(self, sequence_ids: Int64[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        self._check_ids(sequence_ids)
        return self.token_file.spans(sequence_ids)


ViewT = TypeVar("ViewT", bound="StoredView")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredView(NumberedSequences):
    """The common part of all views, and their storage. The fields that a subclass adds are arrays, one file each."""

    recipe: Recipe
    token_file: TokenFile
    accounting: TokenAccounting
    max_segments_per_sequence: int = 1
    directory: Path | None = None
    """Folder in which the arrays are stored and from which they are mapped; None: in memory only."""

    @property
    def max_sequence_length(self) -> int:
        return self.recipe.max_sequence_length

    @property
    def count(self) -> int:
        return self.accounting.sequences

    def release_pages(self) -> None:
        """Removes the pages of the view's and the tokens' files from this process's memory; they can be read again."""
        self.token_file.release_pages()
        release_mapped_pages(getattr(self, name) for name in _array_names(type(self)))

    def save(self, directory: Path) -> None:
        """Stores the view. The description is removed first and written last, so that a folder with one is complete."""
        remove_description(directory)
        for name in _array_names(type(self)):
            write_array(directory / f"{name}.npy", getattr(self, name))
        write_description(directory, self.recipe, self.token_file, self.accounting, self.max_segments_per_sequence)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.directory is None:
            return super().__reduce_ex__(protocol)
        return open_stored, (type(self), self.directory, self.token_file, self.recipe)


def remove_description(directory: Path) -> None:
    """Makes the folder one that holds no view, before arrays are stored in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _DESCRIPTION).unlink(missing_ok=True)
    fsync_directory(directory)


def write_description(
    directory: Path,
    recipe: Recipe,
    token_file: TokenFile,
    accounting: TokenAccounting,
    max_segments_per_sequence: int = 1,
) -> None:
    """Writes the description of a view, once its arrays are stored."""
    description = {
        "recipe": _stored_form(recipe),
        "token_file_tokens": token_file.tokens,
        "accounting": asdict(accounting),
        "max_segments_per_sequence": max_segments_per_sequence,
    }
    write_json(directory / _DESCRIPTION, description)


def _stored_form(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_none=True, exclude=OF_THE_LOSS)


def open_stored(kind: type[ViewT], directory: Path, token_file: TokenFile, recipe: Recipe) -> ViewT:
    """Maps a stored view; what counts in the loss is not stored, and is what `recipe` says.

    Raises: DataError if a file is missing or cut short, or if the view is of another recipe or token file.
    """
    with damage_named(directory / _DESCRIPTION):
        description = read_json(directory / _DESCRIPTION)
        stored, tokens = description["recipe"], description["token_file_tokens"]
        accounting = TokenAccounting(**description["accounting"])
        max_segments_per_sequence = description["max_segments_per_sequence"]
    if stored != _stored_form(recipe):
        raise DataError(
            f"{directory} was made by the recipe {stored}, asked for is {_stored_form(recipe)}; prepare again"
        )
    if tokens != token_file.tokens:
        raise DataError(
            f"{directory} was made for a token file of {tokens} tokens, {token_file.prefix} has {token_file.tokens}; "
            "prepare again"
        )
    arrays = {name: open_array(directory / f"{name}.npy") for name in _array_names(kind)}
    return kind(
        recipe=recipe,
        token_file=token_file,
        accounting=accounting,
        max_segments_per_sequence=max_segments_per_sequence,
        directory=directory,
        **arrays,
    )


def _array_names(kind: type[StoredView]) -> list[str]:
    common = {field.name for field in fields(StoredView)}
    return [field.name for field in fields(kind) if field.name not in common]


@dataclass(frozen=True, kw_only=True, eq=False)
class Origins:
    """The parts of documents in K sequences, sequence by sequence, in the order of their tokens."""

    documents: Int64[np.ndarray, " P"]
    """Ids in the source's token file, from 0 in the order in which `prepare` read them."""
    starts: Int64[np.ndarray, " P"]
    """First token within the document."""
    tokens: Int64[np.ndarray, " P"]
    """Number of the document's tokens that follow from there; 0 where only an end-of-text represents it."""
    per_sequence: Int64[np.ndarray, " K"]

    @classmethod
    def joined(cls, groups: Int64[np.ndarray, " K"], parts: Mapping[int, "Origins"]) -> "Origins":
        """Returns the origins of K sequences, each of which is the next one of its group."""
        per_sequence = _in_order(groups, parts, "per_sequence")
        names = ("documents", "starts", "tokens")
        return cls(per_sequence=per_sequence, **{name: _in_order(groups, parts, name, per_sequence) for name in names})


@runtime_checkable
class SequenceOrigins(Protocol):
    """The origins of the sequences of one split of one source."""

    @property
    def document_file(self) -> TokenFile:
        """The token file of the documents, which are numbered by their order in it."""

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        """Returns the origins of these sequences; a sequence of unknown origin has none."""
