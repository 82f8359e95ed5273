"""Datasets of the Hugging Face hub, or local folders of that shape, through `datasets`."""

from collections.abc import Iterator
from typing import Any

from evenpack.data.data_config import HubSource
from evenpack.errors import DataError

_ROWS_AT_ONCE = 1000


def open_hub_dataset(name: str, source: HubSource, *, start: int) -> Iterator[Any]:
    """The text column of the dataset, from row `start` on; rows before it are not read.

    Raises: DataError if it cannot be loaded, or has no such column.
    """
    import datasets

    try:
        dataset = datasets.load_dataset(source.name, source.subset, split=source.split)
    except Exception as error:  # `datasets` raises whatever its readers, filesystems and the network raise
        raise DataError(
            f"source '{name}': datasets.load_dataset('{source.name}', {source.subset!r}, split='{source.split}') "
            f"failed: {type(error).__name__}: {error}"
        ) from error
    if source.text_key not in dataset.column_names:
        raise DataError(
            f"source '{name}': {source.name} has no column '{source.text_key}'; the columns there are: "
            f"{', '.join(dataset.column_names)}. Set data.sources.{name}.text_key"
        )
    texts = dataset.select_columns([source.text_key]).skip(min(start, len(dataset)))
    for rows in texts.iter(batch_size=_ROWS_AT_ONCE):
        yield from rows[source.text_key]
