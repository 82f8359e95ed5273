"""Defines the training objectives: next tokens, or masked tokens with next sentences.

An objective computes the number of targets of a sequence from its length and its number of segments, or from a stored
column, so that every rank counts the targets of a whole step without reading tokens. It also makes the targets of a
batch from its tokens and their positions.

Shapes: M = sequences of the batch, T = its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from evenpack.batch import CausalTargets
from evenpack.data.batches.placement import Placement
from evenpack.data.batches.task import SequenceContent, Task, masked_task
from evenpack.data.order.selection import PackedSource
from evenpack.data.order.step_plan import TargetCounter
from evenpack.data.sequences import MaskedPairsView, SentencePairsView, SequenceView
from evenpack.data.sequences.config import MaskingConfig
from evenpack.data.sequences.masking import MaskedTokens, mask_sequences, masked_count, masking_keys
from evenpack.data.sequences.pairs import StaticMasks
from evenpack.data.tokenizers.special_tokens import MaskingVocabulary
from evenpack.errors import ConfigError, DataError


@runtime_checkable
class Objective(TargetCounter, Protocol):
    """A training objective. It is pickled with the loader's settings, and holds no data of a source."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token attends to later tokens, too."""

    @property
    def leaves_out_padding(self) -> bool:
        """Whether tokens that only pad a sequence are left out of the targets."""

    def check(self, view: SequenceView) -> None:
        """Checks the sequences of a source. Raises: ConfigError if the objective cannot use them."""

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"] | None:
        """Returns the largest number of targets of a sequence, by its length; None if a batch does not list targets.

        It reads neither tokens nor sequences.
        """

    def for_validation(self) -> "Objective":
        """Returns the objective for evaluation, which is independent of the run's seed."""

    def make(
        self,
        content: SequenceContent,
        placement: Placement,
        sources: Sequence[PackedSource],
        *,
        max_sequences: int,
        max_targets: int | None,
    ) -> Task:
        """Returns the task of one batch.

        The two limits are the same for all batches of the run, so that sizes never change. `max_targets` None: the
        number of targets of this batch, padded to a `rounded_size`.
        """


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """Next-token prediction: each token predicts the next one in its segment."""

    leaves_out_padding: bool = False

    @property
    def is_bidirectional(self) -> bool:
        return False

    def check(self, view: SequenceView) -> None:
        if isinstance(view, SentencePairsView):
            raise ConfigError(
                f"data.recipe.kind {view.recipe.kind} is for models of masked tokens: choose another model.kind or "
                "another recipe"
            )

    def count_targets(
        self,
        view: SequenceView,
        sequence_ids: Int64[np.ndarray, " K"],
        lengths: Int64[np.ndarray, " K"],
        segments: Int64[np.ndarray, " K"],
    ) -> Int64[np.ndarray, " K"]:
        targets: Int64[np.ndarray, " K"] = lengths - segments
        padding = view.padding_counts(sequence_ids) if self.leaves_out_padding else None
        return targets if padding is None else targets - padding.targets

    def most_targets(self, view: SequenceView) -> None:
        """Returns None: there is a label for each slot."""

    def for_validation(self) -> "NextTokens":
        return self

    def make(
        self,
        content: SequenceContent,
        placement: Placement,
        sources: Sequence[PackedSource],
        *,
        max_sequences: int,
        max_targets: int | None,
    ) -> Task:
        is_target = np.zeros(placement.slots, dtype=bool)
        is_target[placement.slot_of_token] = True
        is_target[placement.segment_last_slots] = False
        if content.left_out is not None:
            is_target[placement.slot_of_token[content.left_out] - 1] = False
        labels = np.zeros(placement.slots, dtype=np.int64)
        labels[placement.slot_of_token - 1] = content.tokens  # slot 0's label wraps around to padding or a last slot
        labels[~is_target] = 0
        targets = CausalTargets(labels=torch.from_numpy(labels), weights=torch.from_numpy(is_target.astype(np.float32)))
        return Task(
            tokens=content.tokens,
            token_types=np.zeros_like(content.tokens),
            targets=targets,
            target_count=int(is_target.sum()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedTokensAndNextSentence:
    """BERT's objective: masked tokens, drawn again in each epoch, and whether the second half of a pair is the next."""

    masking: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int
    reduction: Literal["token", "sequence"]
    """Whether each masked token has the same weight in the loss, or each sequence."""
    next_sentence_reduction: Literal["sequence", "pack"]
    """Whether each sequence has the same weight in the next-sentence loss, or each pack."""

    @property
    def is_bidirectional(self) -> bool:
        return True

    @property
    def leaves_out_padding(self) -> bool:
        return False  # pairs have no padding

    def check(self, view: SequenceView) -> None:
        _require_pairs(view)
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
        return masked_count(lengths, self.masking)

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"]:
        return masked_count(np.arange(1 + view.max_sequence_length), self.masking)

    def for_validation(self) -> "MaskedTokensAndNextSentence":
        return replace(self, seed=_VALIDATION_SEED, next_sentence_reduction="sequence")

    def make(
        self,
        content: SequenceContent,
        placement: Placement,
        sources: Sequence[PackedSource],
        *,
        max_sequences: int,
        max_targets: int | None,
    ) -> Task:
        offsets = np.concatenate([[0], np.cumsum(content.lengths)])
        source_keys = np.array([source.key for source in sources], dtype=np.uint64)[content.sources]
        keys = masking_keys(self.seed, content.epochs, source_keys, content.sequence_ids)
        masked = mask_sequences(content.tokens, offsets, keys, self.masking, self.vocabulary)
        return masked_task(
            content,
            placement,
            sources,
            masked,
            reduction=self.reduction,
            next_sentence_reduction=self.next_sentence_reduction,
            max_sequences=max_sequences,
            max_targets=max_targets,
        )


@dataclass(frozen=True, kw_only=True)
class StoredMasksAndNextSentence:
    """BERT's objective with masks that were drawn once and stored with the pairs, with the number of each pair's."""

    vocabulary_size: int
    reduction: Literal["token", "sequence"]
    next_sentence_reduction: Literal["sequence", "pack"]

    @property
    def is_bidirectional(self) -> bool:
        return True

    @property
    def leaves_out_padding(self) -> bool:
        return False  # pairs have no padding

    def check(self, view: SequenceView) -> None:
        _require_pairs(view)
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
        return _stored_masks(view).counts(sequence_ids, lengths)

    def most_targets(self, view: SequenceView) -> Int64[np.ndarray, " lengths"]:
        return _stored_masks(view).most_masks.astype(np.int64)

    def for_validation(self) -> "StoredMasksAndNextSentence":
        return replace(self, next_sentence_reduction="sequence")

    def make(
        self,
        content: SequenceContent,
        placement: Placement,
        sources: Sequence[PackedSource],
        *,
        max_sequences: int,
        max_targets: int | None,
    ) -> Task:
        return masked_task(
            content,
            placement,
            sources,
            self._take(content, sources),
            reduction=self.reduction,
            next_sentence_reduction=self.next_sentence_reduction,
            max_sequences=max_sequences,
            max_targets=max_targets,
        )

    def _take(self, content: SequenceContent, sources: Sequence[PackedSource]) -> MaskedTokens:
        """Reads the stored masks of the sequences. Raises: DataError if they are damaged."""
        taken = {}
        counts = np.empty(len(content.lengths), dtype=np.int64)
        for index, source in enumerate(sources):
            members = content.sources == index
            taken[index] = _stored_masks(source.view).take(content.sequence_ids[members], content.lengths[members])
            counts[members] = taken[index].counts
        positions = np.repeat(np.cumsum(content.lengths) - content.lengths, counts)
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


def _require_pairs(view: SequenceView) -> None:
    if not isinstance(view, SentencePairsView):
        raise ConfigError(
            "a model of masked tokens needs sentence pairs: set data.recipe.kind=sentence_pairs or masked_pairs"
        )


def _stored_masks(view: SequenceView) -> StaticMasks:
    assert isinstance(view, MaskedPairsView), "checked when the collator was made"
    return view.masks
