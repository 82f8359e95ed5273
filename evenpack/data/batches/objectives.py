"""Defines the training objectives: next tokens, or masked tokens, with next sentences where the data has pairs.

An objective computes the number of targets of a sequence from its length and its number of segments, or from a stored
column, so that every rank counts the targets of a whole step without reading tokens. It also makes the targets of a
batch from its tokens and their positions.

Shapes: M = sequences of the batch, T = its slots, K = values given.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from evenpack.batch import ChosenTargets, SlotTargets, Targets
from evenpack.data.batches.placement import Placement
from evenpack.data.order.selection import PackedSource, PackSelection
from evenpack.data.order.step_plan import TargetCounter
from evenpack.data.recipes import ConcatRecipe, MaskingConfig, Recipe, SentencePairsRecipe
from evenpack.data.sequences import SequenceContent, SequenceCounts, SequenceView
from evenpack.data.sequences.masking import (
    SPECIAL_TOKENS_OF_A_DOCUMENT,
    SPECIAL_TOKENS_OF_A_PAIR,
    MaskedTokens,
    mask_sequences,
    masked_count,
    masking_keys,
)
from evenpack.data.sequences.view import SequenceOrigins
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.errors import ConfigError, DataError
from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, NEXT_TOKEN, Loss

Sources = Sequence[PackedSource]
"""The sources of the mixture."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The inputs that a batch shows the model, and its targets."""

    tokens: Integer[np.ndarray, " tokens"]
    """Tokens as the model sees them, in the order of the content."""
    token_types: Int64[np.ndarray, " tokens"] | None
    """The half of its pair to which each token belongs; None where there are no pairs."""
    targets: Mapping[str, Targets[np.ndarray]]
    """The targets of each loss, by name, the main one first."""
    target_count: int
    """Number of targets of the main loss."""


_SIZE_MULTIPLE = 64


def rounded_size(count: int) -> int:
    """Returns the size of an index array, which follows its micro-batch: few different sizes, suited to tensor cores.

    It is a dynamic dimension of compiled code. One size for all micro-batches would hold empty segments, for each of
    which a kernel starts blocks: 5 % of a step of GPT-2 XL on an H100.
    """
    return -(-count // _SIZE_MULTIPLE) * _SIZE_MULTIPLE


@runtime_checkable
class Objective(TargetCounter, Protocol):
    """A training objective. It is pickled with the loader's settings, and holds no data of a source."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token attends to later tokens, too."""

    def check(self, view: SequenceView) -> None:
        """Checks the sequences of a source. Raises: ConfigError if the objective cannot use them."""

    def for_validation(self) -> "Objective":
        """Returns the objective for evaluation, which is independent of the run's seed."""

    def make(self, content: SequenceContent, placement: Placement, packs: PackSelection, sources: Sources) -> Task:
        """Returns the task of one batch, whose index arrays have a `rounded_size`: the content of these packs."""


class _CountedTargets:
    """An objective whose targets are counted with the sequences."""

    def count_targets(
        self, view: SequenceView, sequence_ids: Int64[np.ndarray, " K"], counts: SequenceCounts
    ) -> Int64[np.ndarray, " K"]:
        return counts.targets


@dataclass(frozen=True, kw_only=True)
class NextTokens(_CountedTargets):
    """Next-token prediction: each token predicts the next one in its segment."""

    is_bidirectional = False

    def check(self, view: SequenceView) -> None:
        if "pairs" in view.traits:
            raise ConfigError(
                "data.recipe.kind sentence_pairs and masked_pairs are for models of masked tokens: choose another "
                "model.kind or another recipe"
            )

    def for_validation(self) -> "NextTokens":
        return self

    def make(self, content: SequenceContent, placement: Placement, packs: PackSelection, sources: Sources) -> Task:
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


MaskedT = TypeVar("MaskedT", bound="_MaskedObjective")


@dataclass(frozen=True, kw_only=True, eq=False)
class _MaskedObjective(ABC):
    """Masked tokens in any sequences, and in pairs whether the second half is the next; subclasses mask them."""

    masked_token: Loss
    next_sentence: Loss
    """The losses as the run divides them, which decides the weights of their targets."""
    is_bidirectional = True

    def for_validation(self: MaskedT) -> MaskedT:
        return replace(
            self, masked_token=self.masked_token.in_evaluation, next_sentence=self.next_sentence.in_evaluation
        )

    @abstractmethod
    def _masked(self, content: SequenceContent, packs: PackSelection, sources: Sources) -> MaskedTokens:
        """Returns the masked form of the content's tokens."""

    def make(self, content: SequenceContent, placement: Placement, packs: PackSelection, sources: Sources) -> Task:
        masked = self._masked(content, packs, sources)
        size = rounded_size(len(masked.positions))
        weights = np.ones(len(masked.positions), dtype=np.float32)
        if self.masked_token.divided_by == "sequences":
            weights /= np.repeat(masked.counts, masked.counts)
        targets = {
            MASKED_TOKEN.name: ChosenTargets(
                positions=filled(placement.slot_of_token[masked.positions], size),
                labels=filled(masked.labels, size),
                weights=filled(weights, size),
            )
        }
        types = None
        if content.labels is not None:
            types = token_types(content)
            sequence_weights = np.ones(len(content.labels), dtype=np.float32)
            if self.next_sentence.divided_by == "packs":
                sequence_weights /= np.repeat(packs.sizes, packs.sizes)
            size = rounded_size(len(content.labels))
            targets[NEXT_SENTENCE.name] = ChosenTargets(
                positions=filled(placement.slot_of_token[content.starts], size),
                labels=filled(content.labels, size),
                weights=filled(sequence_weights, size),
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
        if "labels" in view.traits:
            raise ConfigError("labels say which next tokens count, and masks are drawn: give the documents without")
        if "padding" in view.traits:
            raise ConfigError(
                "data.recipe.kind padding pads sequences with end-of-text, and masked tokens have no loss that leaves "
                "it out: choose documents, concat or sentence_pairs, or a model.kind of next tokens"
            )
        if "masks" in view.traits:
            raise ConfigError(
                "the pairs have masks that were drawn once, and would be masked again in each epoch: set "
                "data.recipe.static_masks to the values with which they were prepared"
            )

    def count_targets(
        self, view: SequenceView, sequence_ids: Int64[np.ndarray, " K"], counts: SequenceCounts
    ) -> Int64[np.ndarray, " K"]:
        return masked_count(counts.lengths, self.masking, self._special_tokens(view, sequence_ids, counts.segments))

    def for_validation(self) -> "DynamicMasks":
        return replace(super().for_validation(), seed=_VALIDATION_SEED)

    def _masked(self, content: SequenceContent, packs: PackSelection, sources: Sources) -> MaskedTokens:
        epochs = np.empty_like(packs.stream_positions)
        for index, source in enumerate(sources):
            epochs[packs.sources == index] = source.plan.epochs(packs.stream_positions[packs.sources == index])
        source_keys = np.array([source.key for source in sources], dtype=np.uint64)[packs.sequence_sources]
        keys = masking_keys(self.seed, np.repeat(epochs, packs.sizes), source_keys, packs.sequence_ids)
        special_tokens = np.empty_like(content.lengths)
        for index, members in packs.members_of(len(sources)):
            special_tokens[members] = self._special_tokens(
                sources[index].view, packs.sequence_ids[members], content.counts.segments[members]
            )
        offsets = np.concatenate([[0], np.cumsum(content.lengths)])
        return mask_sequences(
            content.tokens.astype(np.int64),
            offsets,
            keys,
            self.masking,
            self.vocabulary,
            special_tokens=special_tokens,
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
class StoredMasks(_CountedTargets, _MaskedObjective):
    """Masks that were drawn once and are stored with pairs, with the number of each pair's."""

    vocabulary_size: int

    def check(self, view: SequenceView) -> None:
        if "masks" not in view.traits:
            raise ConfigError(
                "the pairs were prepared without masks: leave data.recipe.static_masks out, or prepare again with it"
            )

    def _masked(self, content: SequenceContent, packs: PackSelection, sources: Sources) -> MaskedTokens:
        """Reads the stored masks of the sequences. Raises: DataError if they are damaged."""
        places, labels, counts = content.mask_places, content.mask_labels, content.counts.targets
        assert places is not None, "checked when the collator was made"
        assert labels is not None, "checked when the collator was made"
        wrong = np.flatnonzero((labels < 0) | (labels >= self.vocabulary_size))
        if len(wrong):
            sequence = np.repeat(np.arange(len(counts)), counts)[wrong[0]]
            raise DataError(
                f"mask_labels has token id {labels[wrong[0]]} for sequence {packs.sequence_ids[sequence]} of source "
                f"number {packs.sequence_sources[sequence]}, the vocabulary has {self.vocabulary_size} entries: the "
                "file is damaged or was replaced; prepare it again"
            )
        positions = np.repeat(content.starts, counts) + places
        return MaskedTokens(tokens=content.tokens, positions=positions, labels=labels, counts=counts)


_VALIDATION_SEED = 0


def token_types(content: SequenceContent) -> Int64[np.ndarray, " tokens"]:
    """Returns 0 for the tokens of first halves, and 1 for the others."""
    assert content.first_lengths is not None, "sequences of two halves"
    token_of_sequence = np.arange(len(content.tokens)) - np.repeat(content.starts, content.lengths)
    is_second = token_of_sequence >= np.repeat(content.first_lengths, content.lengths)
    return is_second.astype(np.int64)


def filled(values: Integer[np.ndarray, " K"] | np.ndarray, size: int, filler: int = 0) -> Shaped[np.ndarray, " size"]:
    """Returns `values` followed by `filler` up to `size`: int64, or float32 where they are floats."""
    result = np.full(size, filler, dtype=np.float32 if values.dtype.kind == "f" else np.int64)
    result[: len(values)] = values
    return result
