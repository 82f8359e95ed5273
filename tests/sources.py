"""Provides sources in memory, for tests of plans and views."""

from dataclasses import dataclass

import numpy as np

from evenpack.data.order.plan import PackPlan
from evenpack.data.order.selection import PackedSource
from evenpack.data.packing import LengthHistogram, pack
from evenpack.data.sequences.view import NumberedSequences, SequenceContent, SequenceCounts, TokenAccounting


@dataclass(frozen=True, kw_only=True)
class ListView(NumberedSequences):
    """A `SequenceView` over lists of segments; each token identifies its origin."""

    sequences: list[list[int]]
    """Segment lengths of each sequence."""
    max_sequence_length: int
    first_token: int = 1000

    @property
    def count(self) -> int:
        return len(self.sequences)

    @property
    def max_segments_per_sequence(self) -> int:
        return max(len(segments) for segments in self.sequences)

    @property
    def accounting(self) -> TokenAccounting:
        return TokenAccounting.of_whole(sequences=self.count, tokens=int(self.lengths().sum()))

    def lengths(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.array([sum(segments) for segments in self.sequences[start:stop]], dtype=np.int32)

    def tokens(self, sequence: int) -> np.ndarray:
        """Returns the tokens of one sequence, which all differ from those of every other one."""
        start = self.first_token + sequence * self.max_sequence_length
        return start + np.arange(sum(self.sequences[sequence]))

    def counts(self, sequence_ids: np.ndarray, lengths: np.ndarray) -> SequenceCounts:
        chosen = [self.sequences[int(i)] for i in sequence_ids]
        segments = np.array([len(one) for one in chosen], dtype=np.int64)
        return SequenceCounts(
            lengths=lengths.astype(np.int64),
            segment_lengths=np.array([length for one in chosen for length in one], dtype=np.int64),
            segments=segments,
            targets=lengths - segments,
        )

    def read(self, sequence_ids: np.ndarray) -> SequenceContent:
        tokens = np.concatenate([np.zeros(0, dtype=np.int64), *(self.tokens(int(i)) for i in sequence_ids)])
        return SequenceContent(counts=self.counts(sequence_ids, self.lengths()[sequence_ids]), tokens=tokens)


def packed_source(
    sequences: list[list[int]],
    *,
    pack_length: int,
    longest: int,
    key: int = 7,
    first_token: int = 1000,
    algorithm: str = "longest_pack_first",
) -> PackedSource:
    """Returns a source whose sequences have the given segments."""
    view = ListView(sequences=sequences, max_sequence_length=longest, first_token=first_token)
    lengths = view.lengths()
    packing = pack(LengthHistogram.from_lengths(lengths, longest=longest), algorithm, pack_length=pack_length)
    return PackedSource(view=view, plan=PackPlan(packing, np.argsort(lengths, kind="stable"), key=key), key=first_token)
