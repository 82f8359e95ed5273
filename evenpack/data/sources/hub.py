"""The source `hub`: a dataset of the hub, or a local folder of that form or of `save_to_disk`, through `datasets`."""

import os
import re
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from evenpack.data.sources.config import HubSource
from evenpack.data.sources.corpus import Document, FileCorpus, SourceKind, make_document
from evenpack.data.sources.file_sources import text_of
from evenpack.data.sources.files import InputFile, files_below, refuse_mixed_splits, refuse_split_column, split_of
from evenpack.errors import DataError
from evenpack.files import expand_user

_ROWS_AT_ONCE = 1000
_OF_SAVED = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
"""The files that `save_to_disk` writes beside the rows, of a Dataset and of a DatasetDict."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The mark that closes a stream of Arrow's record batches."""


def _loaded(label: str, name: str, subset: str | None, split: str) -> tuple[Any, Any]:
    """Returns a split as a `datasets.Dataset`, and the builder that found its files; None for one of `save_to_disk`."""
    import datasets

    folder = expand_user(name)
    is_saved = any(all((folder / name).is_file() for name in names) for names in _OF_SAVED)
    if is_saved and subset is not None:
        raise DataError(f"{label}: {name} was written by save_to_disk and has no subsets: leave its subset out")
    call = "load_from_disk" if is_saved else "load_dataset"
    bars_were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would write over the caller's own
    try:
        if is_saved:
            return _saved_split(datasets.load_from_disk(folder), split), None
        builder = datasets.load_dataset_builder(str(folder) if folder.is_dir() else name, subset)
        builder.download_and_prepare()
        return builder.as_dataset(split), builder
    except Exception as error:  # `datasets` raises all errors of its readers, filesystems and the network
        raise DataError(
            f"{label}: datasets.{call}('{name}', {subset!r}, split='{split}') failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        if not bars_were_off:
            datasets.enable_progress_bars()


def _saved_split(loaded: Any, split: str) -> Any:
    """Returns a split of what `save_to_disk` wrote; a Dataset that does not say its own is `train`."""
    found = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    if split not in found:
        raise DataError(f"it holds {', '.join(found)}: set the source's split")
    for file in found[split].cache_files:
        with Path(file["filename"]).open("rb") as stream:
            stream.seek(-len(_END_OF_STREAM), os.SEEK_END)
            if stream.read() != _END_OF_STREAM:  # which Arrow does not notice after a whole record batch
                raise DataError(f"{file['filename']} is cut off: copy the whole folder again")
    return found[split]


class HubPiece:
    """The text column of a split of a dataset that `datasets` loads."""

    def __init__(self, name: str, source: HubSource, split: str, *, is_held_out: bool | None) -> None:
        """Loads the split. Raises: DataError if it cannot be loaded, is of files of several, or has no such column."""
        dataset, builder = _loaded(f"source '{name}'", source.name, source.subset, split)
        folder = expand_user(source.name)
        for part, files in ((builder and builder.config.data_files) or {}).items():
            if part in re.findall(r"[\w.-]+", split) and (is_held_out or split_of(str(part)) in (None, "train")):
                key, kinds = "validation_path" if is_held_out else "path", " of kind jsonl, parquet or text"
                base = folder.resolve() if folder.is_dir() else Path(builder.base_path, "*")
                refuse_mixed_splits(name, map(Path, files), base, key, kinds=kinds)
        if source.text_key not in dataset.column_names:
            raise DataError(
                f"source '{name}': {source.name} has no column '{source.text_key}'; existing columns: "
                f"{', '.join(dataset.column_names)}. Set data.sources.{name}.text_key"
            )
        refuse_split_column(dataset, f"source '{name}': {source.name}")
        self._source = source
        self._is_held_out = is_held_out
        self._dataset: Any = dataset.select_columns([source.text_key])
        self._count = len(dataset)
        self.total_bytes = int(self._dataset.data.nbytes)

    def read(self, start: int, bytes_before: int) -> Generator[Document, None, int]:
        from evenpack.data.sources.tables import arrow_errors_as_data_errors  # pyarrow takes a while to import

        for number, row in enumerate(self._rows(start), start=start):
            where = partial(self._place, number)
            with arrow_errors_as_data_errors(where(), "Arrow"):
                row.validate(full=True)  # following an offset out of the file would end the process
            text = text_of(row[0], self._source.text_key, where, most=self._source.maximum_document_bytes)
            bytes_read = bytes_before + self.total_bytes * (number + 1) // self._count
            yield make_document(text, bytes_read, where, is_held_out=self._is_held_out)
        return max(0, start - self._count)

    def divided(self, target_bytes: int) -> tuple["HubPiece", ...]:
        """Returns the piece itself: only `datasets` knows the location of rows."""
        return (self,)

    def _rows(self, start: int) -> Iterator[Any]:
        """Yields the rows from number `start` on as arrays of one value; rows before it are not read."""
        if start < self._count:
            for rows in self._dataset.with_format("arrow").skip(start).iter(batch_size=_ROWS_AT_ONCE):
                column = rows.column(self._source.text_key)
                yield from (column.slice(index, 1) for index in range(len(column)))

    def _place(self, number: int) -> str:
        return f"row {number} of {self._source.name}"


def _open_corpus(name: str, source: HubSource) -> FileCorpus:
    """Loads the splits, that for validation first. Raises: DataError if one cannot be loaded."""
    if source.validation_split is None:
        return FileCorpus(pieces=(HubPiece(name, source, source.split, is_held_out=None),))
    training = HubPiece(name, source, source.split, is_held_out=False)
    validation = HubPiece(name, source, source.validation_split, is_held_out=True)
    return FileCorpus(pieces=(validation, training))


def _inputs(_name: str, source: HubSource) -> tuple[InputFile, ...]:
    """Returns the files of a local folder, including links; a name on the hub is not queried again."""
    folder = expand_user(source.name)
    return tuple(InputFile.of(file) for file in files_below(folder)) if folder.is_dir() else ()


HUB = SourceKind[HubSource](open_corpus=_open_corpus, inputs=_inputs)
