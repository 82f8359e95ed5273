"""The fixed evaluation set: samples at equal distances among all rows of the evaluation text.

MLPerf's rule is 10,000 samples of the rows of eval.txt (ten passes over it), the i-th of them row floor(i x N / 10,000)
in double precision: `cleanup_scripts/pick_eval_samples.py` of mlcommons/training, language_model/tensorflow/bert.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from evenpack.data.shards.layout import ShardSet
from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.data.shards.reading import read_slices
from evenpack.data.shards.writing import ShardForm, WrittenLayout, new_shard
from evenpack.errors import ConfigError, DataError
from evenpack.files import atomic_path
from evenpack.progress import Progress

MLPERF_SAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class PickedSet:
    """Counts of a picked set and of its source."""

    file: Path
    samples: int
    candidates: int
    layout: WrittenLayout


def evenly_spaced(candidates: int, samples: int) -> Int64[np.ndarray, " samples"]:
    """Returns ascending numbers of samples below `candidates`, by the rule above.

    Raises: DataError if there are too few.
    """
    if samples > candidates:
        raise DataError(
            f"{samples} samples cannot be picked from {candidates}: give all shards of the evaluation text, or pick "
            "fewer"
        )
    chosen: Int64[np.ndarray, " samples"] = (np.arange(samples) * (candidates / samples)).astype(np.int64)
    return chosen


def pick_evaluation_set(
    files: tuple[Path, ...], output: Path, *, samples: int, layout: WrittenLayout | None, progress: Progress
) -> PickedSet:
    """Writes the evaluation set of `files`, in order; `layout` None: that of the files, `variable` for packed ones.

    Only the picked rows are held in memory.

    Raises: DataError for shards that are wrong, or hold too few rows; ConfigError if `output` exists.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; name another file or remove it")
    shards = ShardSet.open(files)
    picked, candidates = _pick(shards, samples, progress)
    own_layout: WrittenLayout = "fixed" if shards.layout == "fixed" else "variable"
    form = ShardForm(
        layout=layout or own_layout,
        row_slots=shards.row_slots or int(picked.lengths.max()),
        mask_slots=shards.mask_slots or int(picked.mask_counts.max(initial=1)),
        vocabulary_size=1 + int(max(picked.tokens.max(), picked.mask_labels.max(initial=0))),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(output) as unfinished, new_shard(unfinished, form, samples) as writer:
        writer.append(picked)
    return PickedSet(file=output, samples=samples, candidates=candidates, layout=form.layout)


def _pick(shards: ShardSet, samples: int, progress: Progress) -> tuple[MaskedSequences, int]:
    """Returns the picked sequences and the number of candidates."""
    candidates = shards.rows if shards.layout != "packed" else _count(shards, progress)
    chosen = evenly_spaced(candidates, samples)
    piece = progress.begin("picking", unit="bytes")
    parts, before = [], 0
    for part in read_slices(shards):
        numbers = np.arange(before, before + len(part.sequences.lengths))
        parts.append(part.sequences.select(np.isin(numbers, chosen, assume_unique=True)))
        before += len(numbers)
        piece.update(part.bytes_read, shards.total_bytes, facts=[f"{before:,} rows"])
    return _concatenated(parts), candidates


def _count(shards: ShardSet, progress: Progress) -> int:
    """Returns the sequences of packed rows, which no header counts."""
    piece, count = progress.begin("counting sequences", unit="bytes"), 0
    for part in read_slices(shards):
        count += len(part.sequences.lengths)
        piece.update(part.bytes_read, shards.total_bytes, facts=[f"{count:,} sequences"])
    return count


def _concatenated(parts: list[MaskedSequences]) -> MaskedSequences:
    names = [field.name for field in fields(MaskedSequences)]
    return MaskedSequences(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})
