"""Packs -> PackedBatch, in one of three layouts of the same sequences.

    packed      one row of `pack_length` slots for each pack; always rows x pack_length slots
    unpadded    whole sequences behind one another; slots follow the real tokens, so ranks differ
    padded      one row of `max_sequence_length` slots for each sequence, as a rectangle

The model and the loss are the same for all three. A rectangle's padding lies behind its sequence and belongs to the
sequence's last segment: a causal model cannot see it from the sequence, and it pays for the whole rectangle as
padded training does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer

from evenpack.batch import CausalTargets, PackedBatch, StepCounts
from evenpack.data.permutation import derive_key
from evenpack.data.step_plan import PackedSource, PackSelection
from evenpack.errors import DataError

Layout = Literal["packed", "unpadded", "padded"]

UNPADDED_SLOT_MULTIPLE = 64
"""Un-padded micro-batches are filled up to a multiple of this, so that matrix shapes stay friendly to tensor cores."""


@dataclass(frozen=True, kw_only=True)
class _Placement:
    """Where M sequences lie among T slots: K real segments, and all segments with the padding ones."""

    slots: int
    slot_of_token: Int64[np.ndarray, " tokens"]
    """Destination of each real token, sequence behind sequence."""
    segment_last_slots: Int64[np.ndarray, " K"]
    """The last real slot of each real segment."""
    segment_starts: Int64[np.ndarray, " segments"]
    """Of all segments, rising; each ends where the next begins."""


class Collator:
    """Lays out packs of the given sources; shapes depend on the settings alone in the packed layout."""

    def __init__(
        self,
        sources: Sequence[PackedSource],
        *,
        layout: Layout,
        pack_length: int,
        packs_per_micro_batch: int,
        padding_token: int,
        vocabulary_size: int,
    ) -> None:
        self.sources = tuple(sources)
        self.layout = layout
        self.pack_length = pack_length
        self.rows = packs_per_micro_batch
        self.padding_token = padding_token
        self.vocabulary_size = vocabulary_size
        self.max_sequence_length = max(source.view.max_sequence_length for source in sources)
        self.max_sequences = self.rows * max(source.plan.max_sequences_per_pack for source in sources)
        segments_per_pack = max(
            source.plan.max_sequences_per_pack * source.view.max_segments_per_sequence for source in sources
        )
        padding_segments = -(-max(pack_length, UNPADDED_SLOT_MULTIPLE) // self.max_sequence_length)
        self.max_segments = self.rows * (segments_per_pack + padding_segments)

    def collate(self, packs: PackSelection, step_counts: StepCounts) -> PackedBatch:
        """Reads the packs' tokens and lays them out. At most `packs_per_micro_batch` packs; fewer leave padding."""
        sequence_sources = np.repeat(packs.sources, np.diff(packs.offsets))
        tokens, segment_lengths, segments_per_sequence = self._read(packs, sequence_sources)
        placement = self._place(packs, segment_lengths, segments_per_sequence)
        is_real = np.zeros(placement.slots, dtype=bool)
        is_real[placement.slot_of_token] = True
        is_target = is_real.copy()
        is_target[placement.segment_last_slots] = False
        slot_tokens = np.full(placement.slots, self.padding_token, dtype=np.int64)
        slot_tokens[placement.slot_of_token] = tokens
        return PackedBatch(
            tokens=torch.from_numpy(slot_tokens),
            position_ids=torch.from_numpy(_positions(placement)),
            token_type_ids=torch.zeros(placement.slots, dtype=torch.int64),
            cu_seqlens=torch.from_numpy(self._cu_seqlens(placement)),
            max_sequence_length=self.max_sequence_length,
            position_rows=self.max_sequence_length,
            targets=_causal_targets(slot_tokens, is_target),
            step_counts=step_counts,
            local_counts=StepCounts(
                packs=packs.packs,
                sequences=len(packs.sequence_ids),
                tokens=len(tokens),
                targets=int(is_target.sum()),
            ),
            sequence_ids=torch.from_numpy(_filled(packs.sequence_ids, self.max_sequences, -1)),
            source_tokens=tuple(
                int(packs.lengths[sequence_sources == index].sum()) for index in range(len(self.sources))
            ),
            squared_lengths=int((segment_lengths**2).sum()),
            order_hash=order_hash(packs),
        )

    def _read(
        self, packs: PackSelection, sequence_sources: Int64[np.ndarray, " M"]
    ) -> tuple[Int64[np.ndarray, " tokens"], Int64[np.ndarray, " K"], Int64[np.ndarray, " M"]]:
        """Tokens and segment lengths in slot order, whatever source they come from."""
        tokens = np.empty(int(packs.lengths.sum()), dtype=np.int64)
        token_sources = np.repeat(sequence_sources, packs.lengths)
        counts = np.zeros(len(packs.sequence_ids), dtype=np.int64)
        parts: list[Int64[np.ndarray, " part"]] = []
        for index, source in enumerate(self.sources):
            members = sequence_sources == index
            chosen = packs.sequence_ids[members]
            tokens[token_sources == index] = self._checked(source.view.gather(chosen), index)
            lengths, counts[members] = source.view.segments(chosen)
            parts.append(lengths)
        segment_lengths = np.empty(int(counts.sum()), dtype=np.int64)
        segment_sources = np.repeat(sequence_sources, counts)
        for index, lengths in enumerate(parts):
            segment_lengths[segment_sources == index] = lengths
        return tokens, segment_lengths, counts

    def _checked(self, tokens: Integer[np.ndarray, " tokens"], source: int) -> Integer[np.ndarray, " tokens"]:
        """Raises: DataError for a token that the model has no embedding of; the file has changed since `prepare`."""
        if len(tokens) and (tokens.max() >= self.vocabulary_size or tokens.min() < 0):
            wrong = tokens.max() if tokens.max() >= self.vocabulary_size else tokens.min()
            raise DataError(
                f"the token file of source number {source} holds token id {wrong}, the vocabulary has "
                f"{self.vocabulary_size} entries: the file is damaged or was replaced; prepare it again"
            )
        return tokens

    def _place(
        self,
        packs: PackSelection,
        segment_lengths: Int64[np.ndarray, " K"],
        segments_per_sequence: Int64[np.ndarray, " M"],
    ) -> _Placement:
        ends = np.cumsum(packs.lengths)
        tight_starts = ends - packs.lengths
        starts, slots, padding = self._sequence_starts(packs, tight_starts)
        shift = starts - tight_starts
        segment_shift = np.repeat(shift, segments_per_sequence)
        segment_ends = np.cumsum(segment_lengths)
        segment_starts = segment_ends - segment_lengths + segment_shift
        return _Placement(
            slots=slots,
            slot_of_token=np.arange(packs.lengths.sum()) + np.repeat(shift, packs.lengths),
            segment_last_slots=segment_ends - 1 + segment_shift,
            segment_starts=np.sort(np.concatenate([segment_starts, padding])),
        )

    def _sequence_starts(
        self, packs: PackSelection, tight_starts: Int64[np.ndarray, " M"]
    ) -> tuple[Int64[np.ndarray, " M"], int, Int64[np.ndarray, " P"]]:
        """First slot of each sequence, the number of slots, and where segments of padding begin."""
        if self.layout == "padded":
            rows = len(packs.sequence_ids)
            return np.arange(rows) * self.max_sequence_length, rows * self.max_sequence_length, _none()
        tokens = int(packs.lengths.sum())
        if self.layout == "unpadded":
            slots = -(-tokens // UNPADDED_SLOT_MULTIPLE) * UNPADDED_SLOT_MULTIPLE
            return tight_starts, slots, self._padding_starts(np.array([tokens]), np.array([slots]))
        row_ends = (np.arange(self.rows) + 1) * self.pack_length
        row_tokens = np.zeros(self.rows, dtype=np.int64)
        row_tokens[: packs.packs] = np.diff(np.concatenate([[0], np.cumsum(packs.lengths)])[packs.offsets])
        row_of_sequence = np.repeat(np.arange(packs.packs), np.diff(packs.offsets))
        tokens_before_row = (np.cumsum(row_tokens) - row_tokens)[row_of_sequence]
        starts = row_of_sequence * self.pack_length + tight_starts - tokens_before_row
        padding = self._padding_starts(row_ends - self.pack_length + row_tokens, row_ends)
        return starts, self.rows * self.pack_length, padding

    def _padding_starts(
        self, starts: Int64[np.ndarray, " R"], ends: Int64[np.ndarray, " R"]
    ) -> Int64[np.ndarray, " P"]:
        """Padding is cut into segments no longer than a sequence, so that static kernel bounds hold for it too."""
        pieces = -(-(ends - starts) // self.max_sequence_length)
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        padding: Int64[np.ndarray, " P"] = np.repeat(starts, pieces) + piece * self.max_sequence_length
        return padding

    def _cu_seqlens(self, placement: _Placement) -> np.ndarray:
        return _filled(placement.segment_starts, self.max_segments + 1, placement.slots).astype(np.int32)


def order_hash(packs: PackSelection) -> int:
    """Sum mod 2**64 of hash(source, pack, slot, sequence id): equal for equal content, however it was dealt."""
    sizes = np.diff(packs.offsets)
    slot_in_pack = np.arange(len(packs.sequence_ids)) - np.repeat(packs.offsets[:-1], sizes)
    hashes = derive_key(
        np.repeat(packs.sources, sizes).astype(np.uint64),
        np.repeat(packs.stream_positions, sizes).astype(np.uint64),
        slot_in_pack.astype(np.uint64),
        packs.sequence_ids.astype(np.uint64),
    )
    return int(hashes.sum(dtype=np.uint64))


def _positions(placement: _Placement) -> Int64[np.ndarray, " T"]:
    lengths = np.diff(np.append(placement.segment_starts, placement.slots))
    positions: Int64[np.ndarray, " T"] = np.arange(placement.slots) - np.repeat(placement.segment_starts, lengths)
    return positions


def _causal_targets(tokens: Int64[np.ndarray, " T"], is_target: Bool[np.ndarray, " T"]) -> CausalTargets:
    labels = np.zeros_like(tokens)
    labels[:-1] = tokens[1:]
    labels[~is_target] = 0
    return CausalTargets(labels=torch.from_numpy(labels), weights=torch.from_numpy(is_target.astype(np.float32)))


def _filled(values: Int64[np.ndarray, " K"], size: int, filler: int) -> Int64[np.ndarray, " size"]:
    """`values` followed by `filler` up to `size`."""
    result = np.full(size, filler, dtype=np.int64)
    result[: len(values)] = values
    return result


def _none() -> Int64[np.ndarray, " 0"]:
    return np.zeros(0, dtype=np.int64)
