"""The order in which one epoch trains the sequences of a corpus, from a plan or simulated, and how random it is."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from evenpack.data.config import DataConfig
from evenpack.data.order.pack_stream import PackStream
from evenpack.data.prepared import PreparedData
from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.shuffled import ShuffledView
from evenpack.data.sources.kinds import open_corpus, source_inputs
from evenpack.studies.shuffle.config import ShuffleSection

_DRAWN_TOGETHER = 1 << 14
_TENTHS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """One epoch of N sequences."""

    ranks: Int64[np.ndarray, " N"]
    """Position of each sequence in the corpus, in the order of training."""
    packs: Int64[np.ndarray, " N"]
    """Pack of each sequence, counted from 0; ascending."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Labels of the N training sequences of a source, in the order of the corpus."""

    names: tuple[str, ...]
    of_sequence: Int64[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures of one order."""

    displacement: float
    """Mean distance between a sequence's positions in the corpus and in training, as a fraction of the corpus; 1/3
    under a uniform permutation."""
    pack_mates: float | None
    """Fraction of the pairs of sequences in a pack from one stretch of the corpus; None: no pack has two."""
    step_mates: float | None
    """Fraction of the pairs in a step, but not in a pack, from one stretch of the corpus."""
    window_distance: float
    """The greatest total variation distance between the sources of a window of the epoch and of the whole epoch."""


def drawn_order(plan: PackStream, source_ids: Integer[np.ndarray, " N"] | None) -> Order:
    """Returns the first epoch of a plan. `source_ids`: positions of the sequences in the corpus; None: in order."""
    ids, sizes = [], []
    for first in range(0, plan.packs, _DRAWN_TOGETHER):
        drawn = plan.draw(np.arange(first, min(first + _DRAWN_TOGETHER, plan.packs)))
        ids.append(drawn.sequence_ids)
        sizes.append(np.diff(drawn.offsets))
    sequence_ids = np.concatenate(ids)
    ranks = sequence_ids if source_ids is None else np.asarray(source_ids)[sequence_ids].astype(np.int64)
    return Order(ranks=ranks, packs=np.repeat(np.arange(plan.packs), np.concatenate(sizes)))


def corpus_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int) -> Order:
    """Returns the order without shuffle: sequences in order, added to a pack until the next one does not fit."""
    ranks = np.arange(len(lengths))
    return Order(ranks=ranks, packs=next_fit(lengths, pack_length=pack_length))


def buffer_order(lengths: Integer[np.ndarray, " N"], *, pack_length: int, buffer: int, seed: int) -> Order:
    """Returns the order of a rolling buffer: random sequences leave it and are replaced by the next of the corpus."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    held = list(range(min(buffer, count)))
    ranks = np.empty(count, dtype=np.int64)
    for place in range(count):
        chosen = int(rng.integers(len(held)))
        ranks[place] = held[chosen]
        coming = buffer + place
        if coming < count:
            held[chosen] = coming
        else:
            held[chosen] = held[-1]
            held.pop()
    return Order(ranks=ranks, packs=next_fit(lengths[ranks], pack_length=pack_length))


def next_fit(lengths: Integer[np.ndarray, " N"], *, pack_length: int) -> Int64[np.ndarray, " N"]:
    """Returns the pack of each sequence where a pack is closed as soon as the next sequence does not fit."""
    packs = np.empty(len(lengths), dtype=np.int64)
    pack = filled = 0
    for place, length in enumerate(lengths.tolist()):
        if filled + length > pack_length:
            pack, filled = pack + 1, 0
        filled += length
        packs[place] = pack
    return packs


def file_labels(config: DataConfig, source: str, prepared: PreparedData) -> Labels:
    """Returns the file of each sequence; tenths of the corpus if it is one file, or no view of documents."""
    view = prepared.view(source, "train")
    view = view.source_view if isinstance(view, ShuffledView) else view
    files = [Path(file.path) for file in source_inputs(source, config.sources[source])]
    if len(files) < 2 or not isinstance(view, DocumentsView):
        tenths = np.arange(view.count) * _TENTHS // view.count
        return Labels(names=tuple(f"tenth {tenth + 1}" for tenth in range(_TENTHS)), of_sequence=tenths)
    section = config.sources[source]
    of_files = [section.model_copy(update={"path": file, "validation_path": None}) for file in files]
    counts = [sum(1 for _ in open_corpus(source, of_file).documents()) for of_file in of_files]
    documents = np.repeat(view.documents, np.diff(view.first_sequences))
    of_sequence = np.searchsorted(np.cumsum(counts), documents, side="right")
    return Labels(names=tuple(file.name for file in files), of_sequence=of_sequence)


def quality(order: Order, labels: Int64[np.ndarray, " N"], section: ShuffleSection, *, packs_per_step: int) -> Quality:
    """Measures an order; `labels` are the part of the corpus, such as the file, of each sequence by rank."""
    count = len(order.ranks)
    stretches = order.ranks * section.stretches // count
    pack_equal, pack_pairs = _equal_pairs(order.packs, stretches)
    step_equal, step_pairs = _equal_pairs(order.packs // packs_per_step, stretches)
    step_equal, step_pairs = step_equal - pack_equal, step_pairs - pack_pairs
    return Quality(
        displacement=float(np.abs(order.ranks - np.arange(count)).mean() / count),
        pack_mates=pack_equal / pack_pairs if pack_pairs else None,
        step_mates=step_equal / step_pairs if step_pairs else None,
        window_distance=window_distance(labels[order.ranks], windows=section.windows),
    )


def window_distance(labels: Int64[np.ndarray, " N"], *, windows: int) -> float:
    """Returns the greatest total variation distance between the labels of a window and all, in training order."""
    kinds = int(labels.max()) + 1
    overall = np.bincount(labels, minlength=kinds) / len(labels)
    return max(
        float(np.abs(np.bincount(window, minlength=kinds) / len(window) - overall).sum() / 2)
        for window in np.array_split(labels, windows)
        if len(window)
    )


def _equal_pairs(groups: Int64[np.ndarray, " N"], values: Int64[np.ndarray, " N"]) -> tuple[int, int]:
    """Returns the pairs within a group that have the same value, and all pairs within a group."""
    together = groups * (int(values.max()) + 1) + values
    _, equal = np.unique(together, return_counts=True)
    _, sizes = np.unique(groups, return_counts=True)
    return _pairs(equal), _pairs(sizes)


def _pairs(sizes: Int64[np.ndarray, " groups"]) -> int:
    return int((sizes * (sizes - 1) // 2).sum())
