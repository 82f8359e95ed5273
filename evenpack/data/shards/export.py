"""A prepared set's pairs as shards: DIRECTORY/SOURCE/SPLIT/part_00000_of_00004.hdf5, rows in the order of the split."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from evenpack.data.config import DataConfig, MaskedPairsRecipe
from evenpack.data.prepared import PreparedData, Split
from evenpack.data.sequences import MaskedPairsView
from evenpack.data.shards.masked_sequences import MaskedSequences
from evenpack.data.shards.writing import ShardForm, WrittenLayout, new_shard
from evenpack.errors import ConfigError
from evenpack.files import atomic_directory
from evenpack.progress import Progress

_ROWS_AT_ONCE = 2048
_SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class ExportedSplit:
    """The counts of one exported split of one source."""

    source: str
    split: Split
    rows: int
    shards: int


def export_shards(
    prepared: PreparedData, directory: Path, *, layout: WrittenLayout, rows_per_shard: int, progress: Progress
) -> list[ExportedSplit]:
    """Writes all splits of all sources; the directory is renamed to its final name once it is complete and on disk.

    Args:
        directory: must not exist yet, or be empty.

    Raises: ConfigError if the pairs have no stored masks, or the directory has content.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; name a new one or remove it")
    form = _form(prepared.config, layout, prepared.vocabulary_size)
    exported = []
    with atomic_directory(directory) as unfinished:
        for source in prepared.source_names:
            for split in _SPLITS:
                view = prepared.view(source, split)
                assert isinstance(view, MaskedPairsView), "prepared with the settings of this run"
                if view.count:
                    folder = unfinished / source / split
                    shards = _write_split(view, folder, form, rows_per_shard, progress, name=f"{source}: {split}")
                    exported.append(ExportedSplit(source=source, split=split, rows=view.count, shards=shards))
    return exported


def _form(config: DataConfig, layout: WrittenLayout, vocabulary_size: int) -> ShardForm:
    """Returns the form of the shards. Raises: ConfigError if there are no masks to write."""
    recipe = config.recipe
    if not config.has_stored_masks:
        raise ConfigError(
            f"shards hold masks, and this run's recipe ({recipe.kind}) stores none: prepare it with "
            "data.recipe.kind=sentence_pairs and data.recipe.static_masks.max_predictions=76"
        )
    cap = recipe.max_predictions if isinstance(recipe, MaskedPairsRecipe) else None
    if config.static_masks is not None:
        cap = config.static_masks.max_predictions
    assert cap is not None, "stored masks are of one of the two"
    return ShardForm(
        layout=layout, row_slots=recipe.max_sequence_length, mask_slots=cap, vocabulary_size=vocabulary_size
    )


def _write_split(
    view: MaskedPairsView, folder: Path, form: ShardForm, rows_per_shard: int, progress: Progress, *, name: str
) -> int:
    """Writes a split in shards of nearly equal size. Returns: the number of shards."""
    folder.mkdir(parents=True)
    shards = -(-view.count // rows_per_shard)
    bounds = [view.count * shard // shards for shard in range(shards + 1)]
    piece = progress.begin(name, unit="rows")
    for shard, (first, last) in enumerate(pairwise(bounds)):
        with new_shard(folder / f"part_{shard:05d}_of_{shards:05d}.hdf5", form, last - first) as writer:
            for begin in range(first, last, _ROWS_AT_ONCE):
                end = min(begin + _ROWS_AT_ONCE, last)
                writer.append(MaskedSequences.of_view(view, begin, end))
                piece.update(end, view.count)
    return shards
