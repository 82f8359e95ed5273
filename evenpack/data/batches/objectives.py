"""Defines the training objectives: next tokens, or masked tokens, with next sentences where the data has pairs.

An objective computes the number of targets of a sequence from its length and its number of segments, or from a stored
column, so that every rank counts the targets of a whole step without reading tokens. It also makes the targets of a
batch from its tokens and their positions.

Shapes: M = sequences of the batch, T = its slots, K = values given.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped

from evenpack.batch import ChosenTargets, SlotTargets, Targets
from evenpack.data.batches.placement import Placement
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import TargetCounter
from evenpack.data.recipes import (
    ConcatRecipe,
    DocumentsRecipe,
    EndOfText,
    MaskingConfig,
    PaddingRecipe,
    Recipe,
    SentencePairsRecipe,
)
from evenpack.data.sequences import (
    LabelledDocumentsView,
    MaskedPairsView,
    PaddingView,
    SentencePairsView,
    SequenceView,
)
from evenpack.data.sequences.masking import (
    SPECIAL_TOKENS_OF_A_DOCUMENT,
    SPECIAL_TOKENS_OF_A_PAIR,
    MaskedTokens,
    mask_sequences,
    masked_count,
    masking_keys,
)
from evenpack.data.sequences.view import PaddingCounts, SequenceOrigins
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.errors import ConfigError, DataError
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, NEXT_TOKEN, Loss


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceContent:
    """The sequences of a batch, in slot order."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens of all sequences, concatenated."""
    lengths: Int64[np.ndarray, " M"]
    sources: Int64[np.ndarray, " M"]
    """Index into the batch's sources."""
    epochs: Int64[np.ndarray, " M"]
    """Epoch of each sequence's source."""
    sequence_ids: Int64[np.ndarray, " M"]
    segments: Int64[np.ndarray, " M"]
    """Number of segments of each sequence."""
    pack_sizes: Int64[np.ndarray, " M"]
    """Number of sequences in each one's pack."""
    padding: PaddingCounts
    """Padding inside each sequence."""
    left_out: Bool[np.ndarray, " tokens"] | None
    """Tokens that are not predicted, by labels or as an end-of-text by `end_of_text_in_loss`; None: none."""

    @property
    def starts(self) -> Int64[np.ndarray, " M"]:
        """First token of each sequence."""
        starts: Int64[np.ndarray, " M"] = np.cumsum(self.lengths) - self.lengths
        return starts


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The inputs that a batch shows the model, and its targets."""

    tokens: Int64[np.ndarray, " tokens"]
    """Tokens as the model sees them, in the order of the content."""
    token_types: Int64[np.ndarray, " tokens"] | None
    """The half of its pair to which each token belongs; None where there are no pairs."""
    targets: Mapping[str, Targets[np.ndarray]]
    """The targets of each loss, by name, the main one first."""
    target_count: int
    """Number of targets of the main loss."""


_SIZE_MULTIPLE = 64


def rounded_size(count: int) -> int:
    """Returns the size of an index array that follows its micro-batch: few different sizes, suited to tensor cores."""
    return -(-count // _SIZE_MULTIPLE) * _SIZE_MULTIPLE


class BatchSizes(NamedTuple):
    """The sizes of the index arrays of one batch."""

    sequences: int
    segments: int
    targets: int | None
    """None: a `rounded_size` of the batch's own number."""


def beyond_capacity(name: str, found: int, expected: int) -> str:
    """Returns the message about a micro-batch that does not fit into the fixed sizes of a run's batches."""
    return (
        f"a micro-batch has {found} {name}, but no step of the run was to have more than {expected} in one: the "
        "prepared data has changed since the run started; start it again, and prepare the data again if this repeats"
    )


@runtime_checkable
class Objective(TargetCounter, Protocol):
    """A training objective. It is pickled with the loader's settings, and holds no data of a source."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token attends to later tokens, too."""

    @property
    def end_of_text_in_loss(self) -> EndOfText:
        """The end-of-text tokens that are among the targets."""

    def check(self, view: SequenceView) -> None:
        """Checks the sequences of a source. Raises: ConfigError if the objective cannot use them."""

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"] | None:
        """Returns the largest number of targets of a sequence, by its length; None if a batch does not list targets.

        It reads neither tokens nor sequences.
        """

    def for_validation(self) -> "Objective":
        """Returns the objective for evaluation, which is independent of the run's seed."""

    def make(
        self, content: SequenceContent, placement: Placement, sources: Sequence[PackedSource], sizes: BatchSizes
    ) -> Task:
        """Returns the task of one batch.

        Its index arrays have the given sizes, which are the same for many batches of the run.
        """


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """Next-token prediction: each token predicts the next one in its segment."""

    end_of_text_in_loss: EndOfText = "all"
    is_bidirectional = False

    def check(self, view: SequenceView) -> None:
        if isinstance(view, SentencePairsView):
            raise ConfigError(
                f"data.recipe.kind {view.recipe.kind} is for models of masked tokens: choose another model.kind or "
                "another recipe"
            )
        if isinstance(view, LabelledDocumentsView) and self.end_of_text_in_loss != "all":
            raise ConfigError(
                f"end_of_text_in_loss is '{self.end_of_text_in_loss}', and these documents have labels, which say what "
                "is predicted: leave it out, and give an end-of-text that is not to be predicted the label -100"
            )

    def count_targets(
        self,
        view: SequenceView,
        sequence_ids: Int64[np.ndarray, " K"],
        lengths: Int64[np.ndarray, " K"],
        segments: Int64[np.ndarray, " K"],
    ) -> Int64[np.ndarray, " K"]:
        targets: Int64[np.ndarray, " K"]
        if isinstance(view, LabelledDocumentsView):
            targets = view.targets[sequence_ids].astype(np.int64)
            return targets
        targets = lengths - segments
        padding = None if self.end_of_text_in_loss == "all" else view.padding_counts(sequence_ids)
        if padding is not None:
            targets -= padding.targets
        if self.end_of_text_in_loss == "none":
            targets -= view.closing_targets(sequence_ids)
        return targets

    def most_targets(self, view: SequenceView) -> None:
        """Returns None: there is a label for each slot."""

    def for_validation(self) -> "NextTokens":
        return self

    def make(
        self, content: SequenceContent, placement: Placement, sources: Sequence[PackedSource], sizes: BatchSizes
    ) -> Task:
        is_target = np.zeros(placement.slots, dtype=bool)
        is_target[placement.slot_of_token] = True
        is_target[placement.segment_last_slots] = False
        if content.left_out is not None:
            is_target[placement.slot_of_token[content.left_out] - 1] = False
        labels = np.zeros(placement.slots, dtype=np.int64)
        labels[placement.slot_of_token - 1] = content.tokens  # slot 0's label wraps around to padding or a last slot
        labels[~is_target] = 0
        targets: SlotTargets[np.ndarray] = SlotTargets(labels=labels, weights=is_target.astype(np.float32))
        return Task(
            tokens=content.tokens,
            token_types=None,
            targets={NEXT_TOKEN.name: targets},
            target_count=int(is_target.sum()),
        )


def next_tokens(recipe: Recipe) -> NextTokens:
    """Returns the objective of next tokens for a recipe's sequences."""
    if isinstance(recipe, DocumentsRecipe | ConcatRecipe | PaddingRecipe):
        return NextTokens(end_of_text_in_loss=recipe.end_of_text_in_loss)
    return NextTokens()


MaskedT = TypeVar("MaskedT", bound="_MaskedObjective")


@dataclass(frozen=True, kw_only=True, eq=False)
class _MaskedObjective(ABC):
    """Masked tokens in any sequences, and in pairs whether the second half is the next; subclasses mask them."""

    masked_token: Loss
    next_sentence: Loss
    """The losses as the run divides them, which decides the weights of their targets."""
    is_bidirectional = True
    end_of_text_in_loss: ClassVar[EndOfText] = "all"
    """A run file with another value is refused, and sequences with padding too."""

    def for_validation(self: MaskedT) -> MaskedT:
        return replace(
            self, masked_token=self.masked_token.in_evaluation, next_sentence=self.next_sentence.in_evaluation
        )

    @abstractmethod
    def _masked(self, content: SequenceContent, sources: Sequence[PackedSource]) -> MaskedTokens:
        """Returns the masked form of the content's tokens."""

    def make(
        self, content: SequenceContent, placement: Placement, sources: Sequence[PackedSource], sizes: BatchSizes
    ) -> Task:
        masked = self._masked(content, sources)
        max_targets = rounded_size(len(masked.positions)) if sizes.targets is None else sizes.targets
        if len(masked.positions) > max_targets:
            raise DataError(beyond_capacity("targets", len(masked.positions), max_targets))
        weights = np.ones(len(masked.positions), dtype=np.float32)
        if self.masked_token.divided_by == "sequences":
            weights /= np.repeat(masked.counts, masked.counts)
        targets = {
            MASKED_TOKEN.name: ChosenTargets(
                positions=filled(placement.slot_of_token[masked.positions], max_targets),
                labels=filled(masked.labels, max_targets),
                weights=filled(weights, max_targets),
            )
        }
        types = None
        if isinstance(sources[0].view, SentencePairsView):  # all sources are of one recipe
            first_lengths, labels = _pair_columns(content, sources)
            types = token_types(content, first_lengths)
            sequence_weights = np.ones(len(labels), dtype=np.float32)
            if self.next_sentence.divided_by == "packs":
                sequence_weights /= content.pack_sizes
            targets[NEXT_SENTENCE.name] = ChosenTargets(
                positions=filled(placement.slot_of_token[content.starts], sizes.sequences),
                labels=filled(labels, sizes.sequences),
                weights=filled(sequence_weights, sizes.sequences),
            )
        return Task(tokens=masked.tokens, token_types=types, targets=targets, target_count=len(masked.positions))


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicMasks(_MaskedObjective):
    """Masks that are drawn again in each epoch, never on special tokens."""

    recipe: Recipe
    """The recipe of the sequences, on which the number of their special tokens depends."""
    masking: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int

    def check(self, view: SequenceView) -> None:
        if isinstance(view, LabelledDocumentsView):
            raise ConfigError("labels say which next tokens count, and masks are drawn: give the documents without")
        if isinstance(view, PaddingView):
            raise ConfigError(
                "data.recipe.kind padding pads sequences with end-of-text, and masked tokens have no loss that leaves "
                "it out: choose documents, concat or sentence_pairs, or a model.kind of next tokens"
            )
        if isinstance(view, MaskedPairsView):
            raise ConfigError(
                "the pairs have masks that were drawn once, and would be masked again in each epoch: set "
                "data.recipe.static_masks to the values with which they were prepared"
            )

    def count_targets(
        self,
        view: SequenceView,
        sequence_ids: Int64[np.ndarray, " K"],
        lengths: Int64[np.ndarray, " K"],
        segments: Int64[np.ndarray, " K"],
    ) -> Int64[np.ndarray, " K"]:
        return masked_count(lengths, self.masking, self._special_tokens(view, sequence_ids, segments))

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"]:
        is_pair = isinstance(self.recipe, SentencePairsRecipe)
        special_tokens = SPECIAL_TOKENS_OF_A_PAIR if is_pair else SPECIAL_TOKENS_OF_A_DOCUMENT
        return masked_count(np.arange(1 + view.max_sequence_length), self.masking, special_tokens)

    def for_validation(self) -> "DynamicMasks":
        return replace(super().for_validation(), seed=_VALIDATION_SEED)

    def _masked(self, content: SequenceContent, sources: Sequence[PackedSource]) -> MaskedTokens:
        offsets = np.concatenate([[0], np.cumsum(content.lengths)])
        source_keys = np.array([source.key for source in sources], dtype=np.uint64)[content.sources]
        keys = masking_keys(self.seed, content.epochs, source_keys, content.sequence_ids)
        special_tokens = np.empty_like(content.lengths)
        for index, source in enumerate(sources):
            members = content.sources == index
            special_tokens[members] = self._special_tokens(
                source.view, content.sequence_ids[members], content.segments[members]
            )
        return mask_sequences(
            content.tokens, offsets, keys, self.masking, self.vocabulary, special_tokens=special_tokens
        )

    def _special_tokens(
        self, view: SequenceView, sequence_ids: Int64[np.ndarray, " K"], segments: Int64[np.ndarray, " K"]
    ) -> int | Int64[np.ndarray, " K"]:
        """Returns the most special tokens that these sequences can have: if all hold complete documents."""
        if isinstance(self.recipe, SentencePairsRecipe):
            return SPECIAL_TOKENS_OF_A_PAIR
        documents = segments
        if isinstance(self.recipe, ConcatRecipe) and not self.recipe.isolate_documents and len(sequence_ids):
            assert isinstance(view, SequenceOrigins), "as every view of documents"
            documents = view.origins(sequence_ids).per_sequence
        return SPECIAL_TOKENS_OF_A_DOCUMENT * documents


@dataclass(frozen=True, kw_only=True)
class StoredMasks(_MaskedObjective):
    """Masks that were drawn once and are stored with pairs, with the number of each pair's."""

    vocabulary_size: int

    def check(self, view: SequenceView) -> None:
        if not isinstance(view, MaskedPairsView):
            raise ConfigError(
                "the pairs were prepared without masks: leave data.recipe.static_masks out, or prepare again with it"
            )

    def count_targets(
        self,
        view: SequenceView,
        sequence_ids: Int64[np.ndarray, " K"],
        lengths: Int64[np.ndarray, " K"],
        segments: Int64[np.ndarray, " K"],
    ) -> Int64[np.ndarray, " K"]:
        return _masked_pairs(view).mask_counts(sequence_ids, lengths)

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"]:
        return _masked_pairs(view).most_masks.astype(np.int64)

    def _masked(self, content: SequenceContent, sources: Sequence[PackedSource]) -> MaskedTokens:
        """Reads the stored masks of the sequences. Raises: DataError if they are damaged."""
        taken = {}
        counts = np.empty(len(content.lengths), dtype=np.int64)
        for index, source in enumerate(sources):
            members = content.sources == index
            taken[index] = _masked_pairs(source.view).masks(content.sequence_ids[members], content.lengths[members])
            counts[members] = taken[index].counts
        positions = np.repeat(content.starts, counts)
        labels = np.empty_like(positions)
        target_sources = np.repeat(content.sources, counts)
        for index, masks in taken.items():
            positions[target_sources == index] += masks.places
            labels[target_sources == index] = masks.labels
        wrong = np.flatnonzero((labels < 0) | (labels >= self.vocabulary_size))
        if len(wrong):
            raise DataError(
                f"mask_labels has token id {labels[wrong[0]]} for sequence "
                f"{np.repeat(content.sequence_ids, counts)[wrong[0]]} of source number {target_sources[wrong[0]]}, the "
                f"vocabulary has {self.vocabulary_size} entries: the file is damaged or was replaced; prepare it again"
            )
        return MaskedTokens(tokens=content.tokens, positions=positions, labels=labels, counts=counts)


_VALIDATION_SEED = 0


def _masked_pairs(view: SequenceView) -> MaskedPairsView:
    assert isinstance(view, MaskedPairsView), "checked when the collator was made"
    return view


def _pair_columns(
    content: SequenceContent, sources: Sequence[PackedSource]
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Returns the lengths of the first halves, and the next-sentence labels."""
    first_lengths = np.empty(len(content.lengths), dtype=np.int64)
    labels = np.empty(len(content.lengths), dtype=np.int64)
    for index, source in enumerate(sources):
        members = content.sources == index
        view = source.view
        assert isinstance(view, SentencePairsView), "checked when the collator was made"
        chosen = content.sequence_ids[members]
        first_lengths[members] = view.first_segment_lengths[chosen]
        labels[members] = view.next_sentence_labels[chosen]
    return first_lengths, labels


def token_types(content: SequenceContent, first_lengths: Int64[np.ndarray, " M"]) -> Int64[np.ndarray, " tokens"]:
    """Returns 0 for the tokens of first halves, which have these lengths, and 1 for the others."""
    token_of_sequence = np.arange(len(content.tokens)) - np.repeat(content.starts, content.lengths)
    is_second = token_of_sequence >= np.repeat(first_lengths, content.lengths)
    types: Int64[np.ndarray, " tokens"] = is_second.astype(np.int64)
    return types


def filled(values: Integer[np.ndarray, " K"] | np.ndarray, size: int, filler: int = 0) -> Shaped[np.ndarray, " size"]:
    """Returns `values` followed by `filler` up to `size`: int64, or float32 where they are floats."""
    result = np.full(size, filler, dtype=np.float32 if values.dtype.kind == "f" else np.int64)
    result[: len(values)] = values
    return result
