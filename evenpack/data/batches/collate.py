"""Collation: packs -> PackedBatch. Model and loss are the same for all layouts; only this step differs."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64, Integer

from evenpack.batch import PackedBatch
from evenpack.data.batches.capacity import BatchCapacity, capacity_of_any_batch
from evenpack.data.batches.objectives import Objective, SequenceContent, filled
from evenpack.data.batches.placement import Placer
from evenpack.data.order.selection import PackedSource, PackSelection, order_hash
from evenpack.data.order.step_plan import PackStatistics, item_costs
from evenpack.data.order.step_shape import StepShape
from evenpack.data.sequences.view import PaddingCounts
from evenpack.errors import DataError
from evenpack.kernels.visible_pairs import total_pairs_within
from evenpack.losses import StepCounts


class Collator:
    """Lays out packs of the given sources; shapes depend on the settings alone in the packed layout.

    Index arrays have the sizes of the capacity, which no micro-batch of the run exceeds. Under `max_tokens` the fullest
    would hold only the shortest sequences, dozens of times as many as most, so there sizes follow the micro-batch.
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
        capacity: BatchCapacity | None = None,
    ) -> None:
        """Takes the `capacity` of the batches; None: the capacity for the fullest possible micro-batch.

        Raises: ConfigError if the sequences of a source do not suit the objective.
        """
        for source in sources:
            objective.check(source.view)
        self.sources = tuple(sources)
        self.objective = objective
        self.windows = shape.windows
        self.cost_weights = shape.cost_weights
        self.padding_token = padding_token
        self.vocabulary_size = vocabulary_size
        self.placer = Placer.of(
            sources, shape=shape, pack_length=pack_length, is_bidirectional=objective.is_bidirectional
        )
        self.capacity = capacity or capacity_of_any_batch(sources, placer=self.placer, objective=objective)

    def collate(self, packs: PackSelection, step_counts: StepCounts) -> PackedBatch:
        """Returns the batch of `collate_arrays` as tensors."""
        return self.collate_arrays(packs, step_counts).tensors()

    def collate_arrays(self, packs: PackSelection, step_counts: StepCounts) -> PackedBatch[np.ndarray]:
        """Reads the packs' tokens and lays them out.

        At most `items_per_micro_batch` packs, unless they were assigned by `max_tokens`; fewer leave padding.

        Raises: DataError for a micro-batch beyond the capacity, or a token beyond the vocabulary.
        """
        content, segment_lengths, segments_per_sequence, pairs_within = self._read(packs)
        rows = packs.packs if self.capacity.follows else self.placer.rows
        placement = self.placer.place(packs, segment_lengths, segments_per_sequence, rows=rows)
        sizes = self.capacity.sizes(sequences=len(packs.sequence_ids), segments=len(placement.segment_starts))
        task = self.objective.make(content, placement, self.sources, sizes)
        tokens = np.full(placement.slots, self.padding_token, dtype=np.int64)
        tokens[placement.slot_of_token] = task.tokens
        token_types = np.zeros(placement.slots, dtype=np.int64)
        if task.token_types is not None:
            token_types[placement.slot_of_token] = task.token_types
        source_tokens = self._count_tokens(content)
        squared_lengths = int((segment_lengths**2).sum())
        held = PackStatistics(
            tokens=np.array([packs.lengths.sum()]),
            squared_lengths=np.array([squared_lengths]),
            segments=np.array([len(segment_lengths)]),
            pairs_within={
                window: np.array([pairs])
                for window, pairs in total_pairs_within(segment_lengths, self.cost_weights.per_pair_within).items()
            },
        )
        cu_seqlens = filled(placement.segment_starts, sizes.segments + 1, placement.slots)
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
            ),
            sequence_ids=filled(packs.sequence_ids, sizes.sequences, -1),
            source_tokens=source_tokens,
            squared_lengths=squared_lengths - int(content.padding.squared_lengths.sum()),
            pairs_within=pairs_within,
            cost=item_costs(self.cost_weights, held).item(),
            padding_targets=int(content.padding.targets.sum()) if self.objective.end_of_text_in_loss == "all" else 0,
            order_hash=order_hash(packs),
        )

    def _count_tokens(self, content: SequenceContent) -> tuple[int, ...]:
        """Returns the real tokens of each source."""
        real = content.lengths - content.padding.tokens
        return tuple(int(real[content.sources == index].sum()) for index in range(len(self.sources)))

    def _read(
        self, packs: PackSelection
    ) -> tuple[SequenceContent, Int64[np.ndarray, " K"], Int64[np.ndarray, " M"], dict[int, int]]:
        """Returns the sequences of all sources.

        With them the lengths of their segments, the number of segments of each, and the real pairs within each window.
        """
        sizes = np.diff(packs.offsets)
        sequence_sources = np.repeat(packs.sources, sizes)
        epochs = packs.stream_positions // np.array([source.plan.packs for source in self.sources])[packs.sources]
        tokens = np.empty(int(packs.lengths.sum()), dtype=np.int64)
        token_sources = np.repeat(sequence_sources, packs.lengths)
        counts = np.zeros(len(packs.sequence_ids), dtype=np.int64)
        parts: list[Int64[np.ndarray, " part"]] = []
        padding = PaddingCounts(*np.zeros((len(PaddingCounts._fields), len(counts)), dtype=np.int64))
        left_out: Bool[np.ndarray, " tokens"] | None = None
        pairs_within = dict.fromkeys(self.windows, 0)
        for index, source in enumerate(self.sources):
            members, its_tokens = self._part(index, sequence_sources), self._part(index, token_sources)
            chosen = packs.sequence_ids[members]
            tokens[its_tokens] = self._checked(source.view.gather(chosen), index)
            padding_counts = source.view.padding_counts(chosen)
            if padding_counts is not None:
                for values, found in zip(padding, padding_counts, strict=True):
                    values[members] = found
            ends = self.objective.end_of_text_in_loss
            left_out_here = (
                source.view.unpredicted(chosen)
                if ends == "all"
                else source.view.ends_of_text(chosen, closing=ends == "none")
            )
            if left_out_here is not None:
                left_out = np.zeros(len(tokens), dtype=bool) if left_out is None else left_out
                left_out[its_tokens] = left_out_here
            if source.view.max_segments_per_sequence == 1:  # avoids a second lookup in the index
                lengths, counts[members] = packs.lengths[members], 1
            else:
                lengths, counts[members] = source.view.segments(chosen)
            parts.append(lengths)
            if self.windows:
                real = lengths if padding_counts is None else source.view.real_segment_lengths(chosen)
                for window, pairs in total_pairs_within(real, self.windows).items():
                    pairs_within[window] += pairs
        segment_lengths = np.empty(int(counts.sum()), dtype=np.int64)
        segment_sources = np.repeat(sequence_sources, counts)
        for index, lengths in enumerate(parts):
            segment_lengths[self._part(index, segment_sources)] = lengths
        content = SequenceContent(
            tokens=tokens,
            lengths=packs.lengths,
            sources=sequence_sources,
            epochs=np.repeat(epochs, sizes),
            sequence_ids=packs.sequence_ids,
            segments=counts,
            pack_sizes=np.repeat(sizes, sizes),
            padding=padding,
            left_out=left_out,
        )
        return content, segment_lengths, counts, pairs_within

    def _part(self, source: int, sources: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " K"] | slice:
        """Returns where `sources` is this one: everywhere if there is one, which costs no mask."""
        return slice(None) if len(self.sources) == 1 else sources == source

    def _checked(self, tokens: Integer[np.ndarray, " tokens"], source: int) -> Integer[np.ndarray, " tokens"]:
        """Returns the content if all token ids are in the vocabulary.

        Raises: DataError if the file changed since `prepare`.
        """
        is_signed = tokens.dtype.kind == "i"
        if len(tokens) and (tokens.max() >= self.vocabulary_size or (is_signed and tokens.min() < 0)):
            wrong = tokens.max() if tokens.max() >= self.vocabulary_size else tokens.min()
            raise DataError(
                f"source number {source} holds token id {wrong}, the vocabulary has {self.vocabulary_size} entries: if "
                "it was prepared, its token file is damaged or was replaced, so prepare it again; else use the "
                "tokenizer of this vocabulary"
            )
        return tokens
