"""Datasets of the Hugging Face hub, or local folders of that form, through `datasets`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenpack.data.sources.config import HubSource
from evenpack.data.sources.saved_sets import saved_splits
from evenpack.errors import DataError

_ROWS_AT_ONCE = 1000


def load_rows(name: str, subset: str | None, split: str, *, label: str) -> Any:
    """Returns a split as a `datasets.Dataset`. Raises: DataError, beginning with `label`, if it cannot be loaded."""
    import datasets

    if saved_splits(Path(name).expanduser()) == ():
        raise DataError(
            f"{label}: {name} was written by save_to_disk, which datasets.load_dataset does not read: in a run file, "
            f"give the source `kind: arrow` and `path: {name}`"
        )
    bars_were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they would write over the caller's own
    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # `datasets` raises all errors of its readers, filesystems and the network
        raise DataError(
            f"{label}: datasets.load_dataset('{name}', {subset!r}, split='{split}') failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        if not bars_were_off:
            datasets.enable_progress_bars()


class HubRows:
    """The text column of a dataset."""

    def __init__(self, name: str, source: HubSource) -> None:
        """Loads the dataset. Raises: DataError if it cannot be loaded, or has no such column."""
        dataset = load_rows(source.name, source.subset, source.split, label=f"source '{name}'")
        if source.text_key not in dataset.column_names:
            raise DataError(
                f"source '{name}': {source.name} has no column '{source.text_key}'; existing columns: "
                f"{', '.join(dataset.column_names)}. Set data.sources.{name}.text_key"
            )
        self._column = source.text_key
        self._dataset: Any = dataset.select_columns([source.text_key])
        self.count = len(dataset)
        self.total_bytes = int(self._dataset.data.nbytes)

    def read(self, start: int) -> Iterator[Any]:
        """Yields the values from row `start` on as scalars of `pyarrow`; rows before it are not read."""
        if start < self.count:
            for rows in self._dataset.with_format("arrow").skip(start).iter(batch_size=_ROWS_AT_ONCE):
                yield from rows.column(self._column)
