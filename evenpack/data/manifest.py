"""The manifest of a prepared directory, written last, so that a directory with one is complete."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from evenpack.config import Section
from evenpack.data.checksums import Checksums, digest_of, with_checksum, without_checksum
from evenpack.data.config import DataConfig
from evenpack.data.order.step_shape import Batching
from evenpack.data.packing import Packing
from evenpack.data.recipes import OF_THE_LOSS
from evenpack.data.sequences import TokenAccounting
from evenpack.data.sources.files import InputFile
from evenpack.data.sources.rows import RowAccounting
from evenpack.differences import differences
from evenpack.errors import DataError, NotPreparedError
from evenpack.files import explained, read_json, write_json

MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
TRAINED_ON = "tokenizer.trained_on.json"
"""Name of the record next to the folder: the folder's content belongs to the fingerprint, and times of files do not."""
_PATHS = {"path", "validation_path"}
"""Keys with the paths of a source or tokenizer."""
_NOT_OF_A_SOURCE = ("weight", "maximum_document_bytes")
"""Keys of a source that decide no file: they are of the mixture, or limits within which a source is read."""
_OFF_UNLESS_GIVEN: dict[str, bool | None] = {
    **dict.fromkeys(("rows", "minimum_words", "maximum_rows", "validation_path", "validation_split")),
    "allow_validation_overlap": False,
}
"""Keys of a source of text with their defaults, which decide nothing then: left out unless they have another value."""
_TOKENIZER_AS_EVER = {"encoder": "files", "beginning": "none"}
"""Keys of a tokenizer with defaults that change nothing; they are newer than prepared sets that exist."""
_NOT_OF_FILES = dict.fromkeys(("prepared_dir", "tokens_dir", "order", "verify_in_training"), True)
"""Keys of the data section on which prepared files do not depend."""
SPLITS: tuple[Literal["train", "validation"], ...] = ("train", "validation")


class FileRecord(Section):
    """One file of the prepared set."""

    path: str
    """Path relative to the prepared directory; absolute for a token file that is used in its original location."""
    content: Checksums

    @property
    def is_shared(self) -> bool:
        """Returns whether it is in a `data.tokens_dir`, where other prepared sets may use it."""
        return self.path.startswith("../")

    def locate(self, directory: Path) -> Path:
        """Returns the path of the file; `directory` is the prepared one."""
        path = directory / self.path
        return path.resolve() if self.is_shared else path

    @classmethod
    def of(cls, path: Path, recorded_path: str, content: Checksums | None = None) -> "FileRecord":
        """Makes the record of the file at `path`, which is read for its checksums unless they are known."""
        return cls(path=recorded_path, content=content or digest_of(path).checksums())


class PackingSummary(Section):
    """The efficiency of a split's packing."""

    algorithm: str
    packs: int
    sequences: int
    tokens: int
    padding: int
    """Slots without a token."""
    efficiency: float
    """Fraction of slots that hold a token; the others are padding."""
    packing_factor: float
    """Sequences per pack, on average."""
    depth: int
    """Sequences of the fullest pack."""
    gap: float
    """Packs above the lower bound, as a fraction of it."""

    def items(self, batching: Batching) -> int:
        """Returns packs or sequences, whichever a step counts."""
        return self.packs if batching == "packs" else self.sequences

    @classmethod
    def of(cls, packing: Packing, *, padding_in_sequences: int = 0) -> "PackingSummary":
        """Summarises a packing; `padding_in_sequences` are tokens that the packing counts and that are padding."""
        values = {name: getattr(packing, name) for name in cls.model_fields}
        values["tokens"] -= padding_in_sequences
        values["padding"] += padding_in_sequences
        return cls(**values | {"efficiency": values["tokens"] / (values["tokens"] + values["padding"])})


class SplitRecord(Section):
    """One split of one source."""

    accounting: TokenAccounting
    packing: PackingSummary | None
    """Packing; None if there is no sequence."""


class SourceRecord(Section):
    """One source: the counts of what was read, and the use of each token."""

    kind: str
    inputs: tuple[InputFile, ...]
    token_file: str
    """Prefix of the pair, relative to the prepared directory or absolute; that of the training sequences for
    finished pairs."""
    documents: int
    tokens: int
    text_bytes: int
    """Bytes of all texts in UTF-8; 0 if the source holds tokens."""
    unknown_tokens: int
    """Tokens that represent text which the vocabulary cannot express."""
    rows: RowAccounting | None = None
    """Rows and words before tokenising; None if the source's documents are not divided or filtered."""
    train: SplitRecord
    validation: SplitRecord

    @model_validator(mode="after")
    def _check_conservation(self) -> "SourceRecord":
        for name in ("documents", "tokens"):
            splits = sum(getattr(split.accounting, f"{name}_read") for split in (self.train, self.validation))
            if splits != getattr(self, name):
                raise ValueError(f"the token file has {getattr(self, name)} {name}, the splits account for {splits}")
        if self.rows is not None and self.rows.rows_kept != self.documents:
            raise ValueError(f"the token file has {self.documents} documents, of {self.rows.rows_kept} rows kept")
        return self


class TokenizerRecord(Section):
    """The vocabulary."""

    vocabulary_size: int
    end_of_text_id: int
    checksum: str
    """Checksum of everything on which the encoding of text depends; empty if the source holds tokens."""
    inputs: tuple[InputFile, ...]


class Manifest(Section):
    """A finished prepared directory."""

    format_version: Literal[2] = 2
    data: dict[str, Any]
    """`data_section` of the run that prepared it."""
    tokenizer: TokenizerRecord
    sources: dict[str, SourceRecord]
    files: dict[str, FileRecord]
    """Files by name; the names do not depend on the location of the set."""

    def write(self, directory: Path) -> None:
        """Writes the manifest atomically, which completes the prepared directory."""
        write_json(directory / MANIFEST, with_checksum(self.model_dump(mode="json")))

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Reads a manifest.

        Raises: NotPreparedError if there is none, DataError if it is broken or of another format.
        """
        path = directory / MANIFEST
        try:
            with explained(path, DataError):
                return cls.model_validate(without_checksum(read_json(path)))
        except (FileNotFoundError, NotADirectoryError) as error:
            begun = ", or only in part" if (directory / "sources").is_dir() else ""
            raise NotPreparedError(
                f"{directory} has not been prepared{begun}: run `evenpack prepare` with this run file"
            ) from error
        except ValueError as error:
            finding = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise DataError(
                f"{path} is damaged or of another version of evenpack: {finding}; copy it again from an intact copy, "
                f"or remove {directory} and prepare again"
            ) from error

    def of_sources(self, names: Collection[str]) -> "Manifest":
        """Returns the part of the set that runs of these sources read; it may hold more of them, for other runs."""
        others = {f"sources/{name}/" for name in self.sources.keys() - set(names)}
        if not others:
            return self
        kept = {name: one for name, one in self.sources.items() if name in names}
        sections = {name: one for name, one in self.data["sources"].items() if name in names}
        files = {name: one for name, one in self.files.items() if not name.startswith(tuple(others))}
        return self.model_copy(update={"sources": kept, "files": files, "data": self.data | {"sources": sections}})

    def refuse_other_data(self, config: DataConfig, directory: Path) -> None:
        """Raises: DataError naming what differs from the run's data section, for the sources that both have."""
        shared = {name: source for name, source in config.sources.items() if name in self.sources}
        now = config.model_copy(update={"sources": shared}) if shared else config
        refuse_differences(self.of_sources(shared or self.sources).data, data_section(now), directory)

    def summary(self) -> list[dict[str, Any]]:
        """Returns a row for each source and split, for tables and JSON; figures of packing are 0 without sequences."""
        return [
            {
                "source": name,
                "split": split,
                "documents": record.accounting.documents_kept,
                "sequences": record.accounting.sequences,
                "packs": record.packing.packs if record.packing else 0,
                "tokens": record.accounting.tokens_kept,
                "tokens_cut": record.accounting.tokens_cut,
                "tokens_dropped": record.accounting.tokens_dropped,
                "subsequence_ends": record.accounting.tokens_subsequence_ends,
                "tail_padding": record.accounting.tail_padding,
                "packing_efficiency": record.packing.efficiency if record.packing else 0.0,
                "packing_factor": record.packing.packing_factor if record.packing else 0.0,
                "padding_share": 1 - record.packing.efficiency if record.packing else 0.0,
                "depth": record.packing.depth if record.packing else 0,
                "packing_algorithm": record.packing.algorithm if record.packing else None,
            }
            for name, source in self.sources.items()
            for split, record in (("train", source.train), ("validation", source.validation))
        ]

    def row_summary(self) -> list[dict[str, Any]]:
        """Returns the rows dropped before tokenising, for each source whose documents are divided or filtered."""
        return [
            {
                "source": name,
                **asdict(source.rows),
                "rows_dropped_share": source.rows.rows_dropped / max(source.rows.rows_read, 1),
                "words_dropped_share": source.rows.words_dropped / max(source.rows.words_read, 1),
            }
            for name, source in self.sources.items()
            if source.rows is not None
        ]


def data_section(config: DataConfig) -> dict[str, Any]:
    """Returns the part of the `data:` section that decides the prepared files.

    It contains neither paths, nor settings of training and its predictions, nor the weights of the mixture, nor limits
    within which sources are read.
    """
    section = config.model_dump(mode="json", exclude={**_NOT_OF_FILES, "recipe": OF_THE_LOSS})
    if section["shuffle"]["kind"] == "permutation":
        del section["shuffle"]
    for source in section["sources"].values():
        for key in _NOT_OF_A_SOURCE:
            source.pop(key, None)
        if source["kind"] != "hdf5":
            for key in [key for key, default in _OFF_UNLESS_GIVEN.items() if source.get(key, default) == default]:
                source.pop(key, None)
    for key, default in _TOKENIZER_AS_EVER.items():
        if section["tokenizer"].get(key) == default:
            del section["tokenizer"][key]
    for part in (section["tokenizer"], *section["sources"].values()):
        for key in _PATHS & part.keys():
            part[key] = _absolute(part[key])
    return section


def _absolute(paths: str | list[str] | None) -> str | list[str] | None:
    if isinstance(paths, list):
        return [str(Path(path).absolute()) for path in paths]
    return None if paths is None else str(Path(paths).absolute())


def refuse_differences(before: dict[str, Any], now: dict[str, Any], place: Path) -> None:
    """Compares (parts of) two data sections.

    A path that the run leaves out is not compared: training does not need the location of the text.

    Raises: DataError naming each key whose value is not the one that `place` was prepared with.
    """
    lines = [
        f"  data.{key}: prepared with {earlier!r}, this run has {current!r}"
        for key, (earlier, current) in differences(before, now, absent="nothing").items()
        if not (key.rpartition(".")[2] in _PATHS and current in (None, "nothing"))
    ]
    if lines:
        raise DataError(
            "\n".join([f"{place} was prepared from another data section:", *lines, _prepare_elsewhere(place)])
        )


def refuse_changed_inputs(before: Sequence[InputFile], now: Sequence[InputFile], place: Path) -> None:
    """Compares input files. Raises: DataError naming the first that is new, missing, or of another size or time."""
    earlier, current = ({file.path: file for file in files} for files in (before, now))
    for path in sorted(earlier.keys() | current.keys()):
        if earlier.get(path) != current.get(path):
            raise DataError(
                f"input file {path} has changed since {place} was prepared from it:\n"
                f"  prepared with {_describe(earlier.get(path))}, now {_describe(current.get(path))}\n"
                f"{_prepare_elsewhere(place)}"
            )


def _describe(file: InputFile | None) -> str:
    if file is None:
        return "no such file"
    modified = datetime.fromtimestamp(file.modified_ns / 1e9, UTC)
    return f"{file.bytes} bytes, modified at {modified.isoformat(sep=' ', timespec='milliseconds')}"


def _prepare_elsewhere(place: Path) -> str:
    return f"Choose another data.prepared_dir (or run.output_dir), or remove {place} and prepare again"


def remedy(directory: Path, shared: Collection[Path] = ()) -> str:
    """Returns the remedy for damaged or missing files of a prepared set.

    Args:
        shared: the ones that are in a `data.tokens_dir`.
    """
    again = "Copy these files again from an intact copy, or remove"
    if not shared:
        return f"{again} {directory} and prepare again"
    folders = " and ".join(sorted({str(path.parent) for path in shared}))
    return (
        f"{again} {folders} (of data.tokens_dir) and {directory}, and prepare again: every set that shares these "
        "tokens is then complete, if the sources have not changed"
    )
