"""Checks whether the sources and the tokenizer of a prepared set have changed."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from evenpack.data.config import DataConfig
from evenpack.data.prepare.manifest import Manifest, refuse_changed_inputs
from evenpack.data.sources.config import Source
from evenpack.data.sources.input_files import InputFile
from evenpack.data.sources.kinds import source_inputs
from evenpack.data.tokenizers.loading import tokenizer_inputs
from evenpack.errors import DataError

_Inputs = tuple[InputFile, ...]


def refuse_changed_sources(config: DataConfig, manifest: Manifest, directory: Path) -> None:
    """Compares sizes and times of the files from which `directory` was made; missing files are not reported.

    Raises: DataError naming the first file that has changed.
    """
    for before, find in _inputs(config, manifest):
        try:
            now = find()
        except DataError:
            continue
        refuse_changed_inputs(before, now, directory)


def refuse_changes_meanwhile(name: str, source: Source, before: _Inputs) -> None:
    """Checks a source after reading. Raises: DataError if its files differ from those before reading."""
    now = source_inputs(name, source)
    changed = sorted({file.path for file in {*before, *now} - ({*before} & {*now})})
    if changed:
        raise DataError(
            f"source '{name}' changed while it was read: {changed[0]} is new, gone or of another size or time (first "
            f"of {len(changed)}); its output is removed. Prepare again when no process writes to its files"
        )


def _inputs(config: DataConfig, manifest: Manifest) -> Iterator[tuple[_Inputs, Callable[[], _Inputs]]]:
    """Yields the files that were read, and a function that finds them again."""
    yield manifest.tokenizer.inputs, partial(tokenizer_inputs, config.tokenizer)
    for name, source in config.sources.items():
        yield manifest.sources[name].inputs, partial(source_inputs, name, source)
