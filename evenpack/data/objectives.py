"""What a model has to predict in the sequences of a batch: the next tokens, or masked ones and the next sentence.

An objective says how many targets a sequence has, from its length and its segments alone, so that every rank counts the
targets of a whole step without reading a token; and it makes the targets of a batch, from its tokens and their places.

Shapes: M = sequences of the batch, T = its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, Integer

from evenpack.batch import CausalTargets, MaskedTargets
from evenpack.data.masking import MaskingVocabulary, mask_sequences, masked_count, masking_keys
from evenpack.data.masking_config import MaskingConfig
from evenpack.data.placement import Placement
from evenpack.data.recipes import SentencePairsView, SequenceView
from evenpack.data.step_plan import PackedSource, TargetCounter
from evenpack.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceContent:
    """The sequences of a batch, in slot order."""

    tokens: Int64[np.ndarray, " tokens"]
    """Sequence behind sequence."""
    lengths: Int64[np.ndarray, " M"]
    sources: Int64[np.ndarray, " M"]
    """Index into the batch's sources."""
    epochs: Int64[np.ndarray, " M"]
    """Of their source."""
    sequence_ids: Int64[np.ndarray, " M"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a batch shows the model, and what it asks."""

    tokens: Int64[np.ndarray, " tokens"]
    """As the model sees them, in the order of the content."""
    token_types: Int64[np.ndarray, " tokens"]
    targets: CausalTargets | MaskedTargets
    target_count: int


@runtime_checkable
class Objective(TargetCounter, Protocol):
    """Pickled with a loader's settings; holds nothing of a source."""

    @property
    def looks_both_ways(self) -> bool:
        """Whether the model sees what lies behind a token."""

    def check(self, view: SequenceView) -> None:
        """Raises: ConfigError if sequences of this kind do not serve."""

    def for_validation(self) -> "Objective":
        """The one that every run is judged by, whatever its seed."""

    def make(
        self,
        content: SequenceContent,
        placement: Placement,
        sources: Sequence[PackedSource],
        *,
        max_sequences: int,
        max_targets: int | None,
    ) -> Task:
        """The task of one batch. The two limits are those of any batch of the run, so that sizes never change.

        `max_targets` None: as many as this batch has, filled up to a `rounded_size`.
        """


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """Each token predicts the next of its segment (GPT-2)."""

    @property
    def looks_both_ways(self) -> bool:
        return False

    def check(self, view: SequenceView) -> None:
        if isinstance(view, SentencePairsView):
            raise ConfigError("data.recipe.kind sentence_pairs is BERT's: set model.kind=bert, or another recipe")

    def count_targets(
        self, lengths: Int64[np.ndarray, " K"], segments: Int64[np.ndarray, " K"]
    ) -> Int64[np.ndarray, " K"]:
        targets: Int64[np.ndarray, " K"] = lengths - segments
        return targets

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
        labels = np.zeros(placement.slots, dtype=np.int64)
        labels[placement.slot_of_token - 1] = content.tokens  # that of slot 0 wraps around to padding or a last slot
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
    """Tokens masked anew in each epoch, and whether the second half of a pair follows the first (BERT)."""

    masking: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int
    reduction: Literal["token", "sequence"]
    """Whether each masked token weighs the same, or each sequence."""

    @property
    def looks_both_ways(self) -> bool:
        return True

    def check(self, view: SequenceView) -> None:
        if not isinstance(view, SentencePairsView):
            raise ConfigError("model.kind bert learns from sentence pairs: set data.recipe.kind=sentence_pairs")

    def count_targets(
        self, lengths: Int64[np.ndarray, " K"], segments: Int64[np.ndarray, " K"]
    ) -> Int64[np.ndarray, " K"]:
        return masked_count(lengths, self.masking)

    def for_validation(self) -> "MaskedTokensAndNextSentence":
        return replace(self, seed=_VALIDATION_SEED)

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
        first_lengths, labels = _pair_columns(content, sources)
        token_of_sequence = np.arange(len(content.tokens)) - np.repeat(offsets[:-1], content.lengths)
        max_targets = rounded_size(len(masked.positions)) if max_targets is None else max_targets
        weights = np.ones(len(masked.positions), dtype=np.float32)
        if self.reduction == "sequence":
            weights /= np.repeat(masked.counts, masked.counts)
        targets = MaskedTargets(
            positions=_filled(placement.slot_of_token[masked.positions], max_targets),
            labels=_filled(masked.labels, max_targets),
            weights=_filled(weights, max_targets),
            sequence_starts=_filled(placement.slot_of_token[offsets[:-1]], max_sequences),
            next_sentence_labels=_filled(labels, max_sequences),
            sequence_weights=_filled(np.ones(len(labels), dtype=np.float32), max_sequences),
        )
        return Task(
            tokens=masked.tokens,
            token_types=(token_of_sequence >= np.repeat(first_lengths, content.lengths)).astype(np.int64),
            targets=targets,
            target_count=len(masked.positions),
        )


_VALIDATION_SEED = 0

_SIZE_MULTIPLE = 64


def rounded_size(count: int) -> int:
    """Of an index array that follows its micro-batch: few different sizes, friendly to tensor cores."""
    return -(-count // _SIZE_MULTIPLE) * _SIZE_MULTIPLE


def _pair_columns(
    content: SequenceContent, sources: Sequence[PackedSource]
) -> tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]:
    """Lengths of the first halves, and next-sentence labels."""
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


def _filled(values: Integer[np.ndarray, " K"] | np.ndarray, size: int) -> torch.Tensor:
    """`values` followed by zeros."""
    result = np.zeros(size, dtype=np.float32 if values.dtype.kind == "f" else np.int64)
    result[: len(values)] = values
    return torch.from_numpy(result)
