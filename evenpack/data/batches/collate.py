"""Collation: packs -> PackedBatch. Model and loss are the same for all layouts; only this step differs."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from evenpack.batch import PackedBatch
from evenpack.data.batches.objectives import Objective, filled, rounded_size
from evenpack.data.batches.placement import Placer
from evenpack.data.order.selection import PackedSource, PackSelection, order_hash
from evenpack.data.order.step_shape import StepShape
from evenpack.data.sequences import SequenceContent
from evenpack.errors import DataError
from evenpack.losses import StepCounts
from evenpack.visible_pairs import total_pairs_within


class Collator:
    """Lays out packs of the given sources; slots depend on the settings alone in the packed layout.

    Index arrays are as long as the micro-batch needs, rounded up (`rounded_size`).
    """

    def __init__(
        self,
        sources: Sequence[PackedSource],
        *,
        shape: StepShape,
        objective: Objective,
        pack_length: int,
        padding_token: int,
        vocabulary_size: int,
        fills_rows: bool = True,
    ) -> None:
        """Takes sources of one recipe.

        Args:
            fills_rows: whether packs that a micro-batch lacks become rows of padding, so that its slots are always as
                many.

        Raises: ConfigError if the sequences of a source do not suit the objective.
        """
        for source in sources:
            objective.check(source.view)
        self.sources = tuple(sources)
        self.objective = objective
        self.windows = shape.windows
        self.padding_token = padding_token
        self.vocabulary_size = vocabulary_size
        self.placer = Placer(
            shape=shape,
            pack_length=pack_length,
            max_sequence_length=max(source.view.max_sequence_length for source in sources),
            is_bidirectional=objective.is_bidirectional,
        )
        self.fills_rows = fills_rows

    def collate(self, packs: PackSelection, step_counts: StepCounts) -> PackedBatch:
        """Returns the batch of `collate_arrays` as tensors."""
        return self.collate_arrays(packs, step_counts).tensors()

    def collate_arrays(
        self, packs: PackSelection, step_counts: StepCounts, *, cost: float = 0.0
    ) -> PackedBatch[np.ndarray]:
        """Reads the packs' tokens and lays them out.

        At most `items_per_micro_batch` packs, unless they were assigned by `max_tokens`; fewer leave padding.

        Args:
            cost: what their plan says that they cost.

        Raises: DataError for a token beyond the vocabulary.
        """
        content, source_tokens = self._read(packs)
        counts = content.counts
        rows = self.placer.rows if self.fills_rows else packs.packs
        placement = self.placer.place(packs, counts.segment_lengths, counts.segments, rows=rows)
        task = self.objective.make(content, placement, packs, self.sources)
        tokens = np.full(placement.slots, self.padding_token, dtype=np.int64)
        tokens[placement.slot_of_token] = task.tokens
        token_types = np.zeros(placement.slots, dtype=np.int64)
        if task.token_types is not None:
            token_types[placement.slot_of_token] = task.token_types
        real_lengths = counts.real_lengths
        room = rounded_size(len(placement.segment_starts))
        cu_seqlens = filled(placement.segment_starts, room + 1, placement.slots)
        return PackedBatch(
            tokens=tokens,
            position_ids=placement.position_ids,
            token_type_ids=token_types,
            cu_seqlens=cu_seqlens.astype(np.int32),
            max_sequence_length=self.placer.max_segment_length,
            row_slots=placement.row_slots,
            position_rows=self.placer.position_rows,
            targets=task.targets,
            step_counts=step_counts,
            local_counts=StepCounts(
                packs=packs.packs,
                sequences=len(packs.sequence_ids),
                tokens=sum(source_tokens),
                targets=task.target_count,
                padding_targets=counts.padding_targets,
            ),
            sequence_ids=filled(packs.sequence_ids, rounded_size(len(packs.sequence_ids)), -1),
            source_tokens=source_tokens,
            squared_lengths=int((real_lengths**2).sum()),
            pairs_within=total_pairs_within(real_lengths, self.windows),
            cost=cost,
            order_hash=order_hash(packs),
        )

    def _read(self, packs: PackSelection) -> tuple[SequenceContent, tuple[int, ...]]:
        """Returns the sequences of all sources, and the real tokens of each source."""
        parts, source_tokens = {}, [0] * len(self.sources)
        for index, members in packs.members_of(len(self.sources)):
            parts[index] = self.sources[index].view.read(packs.sequence_ids[members])
            self._check(parts[index].tokens, index)
            source_tokens[index] = len(parts[index].tokens) - parts[index].counts.padding_tokens
        return SequenceContent.joined(packs.sequence_sources, parts), tuple(source_tokens)

    def _check(self, tokens: Integer[np.ndarray, " tokens"], source: int) -> None:
        """Checks token ids. Raises: DataError if one is not in the vocabulary, as after a change of the file."""
        is_signed = tokens.dtype.kind == "i"
        if len(tokens) and (tokens.max() >= self.vocabulary_size or (is_signed and tokens.min() < 0)):
            wrong = tokens.max() if tokens.max() >= self.vocabulary_size else tokens.min()
            raise DataError(
                f"source number {source} holds token id {wrong}, the vocabulary has {self.vocabulary_size} entries: if "
                "it was prepared, its token file is damaged or was replaced, so prepare it again; else use the "
                "tokenizer of this vocabulary"
            )
