"""The strategies and sorted sequences of a split as files, so that no run has to solve a packing again.

packing.json            algorithm, pack length, strategies and how often each is used
histogram.npy           int64[longest]: sequences by length
sorted_sequences.npy    sequence ids by length

or, where the sequences are read block by block, the files of `blocked_plan.py`.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.order.blocked_plan import BlockedPlan, Blocks, block_files, open_blocks
from evenpack.data.order.config import PackingConfig
from evenpack.data.order.pack_stream import DrawnPacks, PackStream, WholeEpochs
from evenpack.data.order.plan import PackPlan, sort_chunks_by_length
from evenpack.data.order.step_shape import Batching
from evenpack.data.packing import LengthHistogram, Packing, pack
from evenpack.data.permutation import sequence_id_type
from evenpack.data.sequences import SequenceView, length_chunks
from evenpack.data.tokens.array_file import damage_named, mapped_array, open_array, write_array
from evenpack.errors import DataError
from evenpack.files import read_json, write_text

_PACKING = "packing.json"
_HISTOGRAM = "histogram.npy"
_SORTED = "sorted_sequences.npy"


def store_plan(directory: Path, view: SequenceView, config: PackingConfig, *, pack_length: int) -> Packing:
    """Packs the sequences of a split, at least one, and stores the result, in memory that does not grow with them.

    The view's lengths are read twice: counted, then sorted into the mapped file.

    Raises: PackingError if they cannot be packed so.
    """
    packing = pack_view(view, config, pack_length=pack_length)
    write_array(directory / _HISTOGRAM, packing.histogram.counts)
    with mapped_array(directory / _SORTED, view.count, sequence_id_type(view.count)) as sequence_ids:
        sort_chunks_by_length(length_chunks(view), packing.histogram, sequence_ids)
    content = {
        "algorithm": packing.algorithm,
        "pack_length": packing.pack_length,
        "strategies": packing.strategies,
        "counts": packing.counts.tolist(),
    }
    write_text(directory / _PACKING, json.dumps(content) + "\n")
    return packing


def remove_plan(directory: Path) -> None:
    """Removes a stored plan of either form."""
    for path in (directory / _PACKING, directory / _HISTOGRAM, directory / _SORTED, *block_files(directory)):
        path.unlink(missing_ok=True)


def pack_view(view: SequenceView, config: PackingConfig, *, pack_length: int) -> Packing:
    """Packs the sequences of a view. Raises: PackingError if they cannot be packed so."""
    histogram = LengthHistogram.from_chunks(length_chunks(view), longest=view.max_sequence_length)
    return packed(histogram, config, pack_length=pack_length)


def open_plan(
    directory: Path,
    *,
    key: int,
    batching: Batching = "packs",
    repacking: PackingConfig | None = None,
    by_length: bool = False,
    keeps_order: bool = False,
) -> PackStream:
    """Opens the stored plan, or one of its sequences as packs of one, or packed as `repacking` says.

    Args:
        by_length: packs are not shuffled, but ordered by their longest sequence, the shortest first.
        keeps_order: sequences are rows, taken as they were prepared, each a pack of its own.

    Raises: DataError if a file is missing or broken; PackingError if the sequences cannot be packed so.
    """
    packing = open_packing(directory)
    if keeps_order:
        return SequentialPlan(packing)
    if batching == "sequences":
        packing = pack(packing.histogram, "none", pack_length=packing.pack_length)
    ids = open_array(directory / _SORTED)
    if repacking is not None and batching == "packs":
        packing = packed(packing.histogram, repacking, pack_length=packing.pack_length)
    return PackPlan(_by_length(packing) if by_length else packing, ids, key=key, shuffles_packs=not by_length)


def open_packing(directory: Path) -> Packing:
    """Opens the stored strategies. Raises: DataError if a file is missing or broken."""
    with damage_named(directory / _HISTOGRAM):
        histogram = LengthHistogram(counts=np.load(directory / _HISTOGRAM))
    with damage_named(directory / _PACKING):
        content = read_json(directory / _PACKING)
        return Packing(
            algorithm=content["algorithm"],
            pack_length=content["pack_length"],
            histogram=histogram,
            strategies=tuple(map(tuple, content["strategies"])),
            counts=np.array(content["counts"], dtype=np.int64),
            cpu_seconds=0.0,
        )


def open_blocked_plan(
    directory: Path,
    *,
    key: int,
    shuffles_blocks: bool,
    batching: Batching = "packs",
    repacking: PackingConfig | None = None,
) -> BlockedPlan:
    """Opens the plan of stored blocks, or of their sequences as packs of one, or packed as `repacking` says.

    Raises: DataError if a file is missing or broken; PackingError if the sequences cannot be packed so.
    """
    blocks, sorted_sequence_ids = open_blocks(directory)
    if batching == "sequences":
        repacking = PackingConfig(algorithm="none")
    if repacking is not None:
        histograms = (blocks.packing(index).histogram for index in range(blocks.count))
        blocks = Blocks.of([packed(one, repacking, pack_length=blocks.pack_length) for one in histograms])
    return BlockedPlan(blocks, sorted_sequence_ids, key=key, shuffles_blocks=shuffles_blocks)


def _by_length(packing: Packing) -> Packing:
    """Returns the same packs in the order of their strategies: by the longest sequence, then the second longest."""
    order = sorted(range(len(packing.strategies)), key=packing.strategies.__getitem__)
    return replace(packing, strategies=tuple(packing.strategies[i] for i in order), counts=packing.counts[order])


def packed(histogram: LengthHistogram, config: PackingConfig, *, pack_length: int) -> Packing:
    """Packs as the section `packing:` says. Raises: PackingError if that cannot be done."""
    return pack(
        histogram,
        config.algorithm,
        pack_length=pack_length,
        max_sequences_per_pack=config.max_sequences_per_pack,
        **config.options,
    )


class SequentialPlan(WholeEpochs):
    """Rows that were shuffled when they were prepared and are trained in that order: each is a pack of its own.

    Position n of the endless stream is row n % rows, in every epoch.

    All rows are as long as a pack, except for the last one, which may be shorter. No seed changes the order.
    """

    def __init__(self, packing: Packing) -> None:
        """Takes a `packing` of rows by themselves."""
        counts = packing.histogram.counts
        lengths = np.flatnonzero(counts) + 1
        self.packs = packing.packs
        self.sequences = packing.sequences
        self.max_sequences_per_pack = 1
        self.pack_length = packing.pack_length
        self._last_length = int(lengths[0])
        if counts[: self.pack_length - 1].sum() > 1 or lengths[-1] > self.pack_length:
            raise DataError(
                f"expected rows of {packing.pack_length} tokens and at most one that is shorter, found rows of "
                f"{', '.join(map(str, lengths[:5]))}: they are of another preparation; prepare the data again"
            )

    def draw(self, stream_positions: Int64[np.ndarray, " N"]) -> DrawnPacks:
        """Returns the rows at these positions of the stream. Raises: ValueError for a negative position."""
        _, rows = self.places(stream_positions)
        lengths = np.where(rows == self.packs - 1, self._last_length, self.pack_length)
        return DrawnPacks(offsets=np.arange(len(rows) + 1), sequence_ids=rows, lengths=lengths)
