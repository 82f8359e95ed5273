"""The sections of sources, `data.sources.NAME:` of a run file."""

from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from evenpack.config import Section, UserPath, UserPaths
from evenpack.data.limits import HIGHEST_WEIGHT
from evenpack.data.sources.lines import LONGEST_LINE_BYTES
from evenpack.units import Rows, Words


class _SourceBase(Section):
    weight: int = Field(default=1, ge=0, le=HIGHEST_WEIGHT)
    """Weight of this source in the mixture: its share of all packs is its weight over the sum of all weights. 0: it is
    not drawn, until a stage gives it a weight."""

    @property
    def has_validation_documents(self) -> bool:
        """Whether the section names documents of text for validation, instead of a fraction that is held out."""
        return False


class SourceOfText(_SourceBase):
    """What all sources have in common whose documents are text."""

    rows: Literal["lines", "paragraphs"] | None = None
    """How the source's documents are divided into rows, each of which becomes a document: into their lines, or into the
    paragraphs between blank lines; blank rows are skipped. Null: documents are not divided."""
    minimum_words: Words | None = Field(default=None, ge=1)
    """Fewest words, separated by white space, of a row (of a document, where `rows` is null): shorter ones are dropped
    before tokenising, and counted. Null: all are kept."""
    maximum_rows: Rows | None = Field(default=None, ge=1)
    """Number of kept rows that are used, from the first one on; the source is not read any further. Null: all."""

    @property
    def changes_rows(self) -> bool:
        """Whether any of these keys is given."""
        return (self.rows, self.minimum_words, self.maximum_rows) != (None, None, None)


class _SourceOfForeignText(SourceOfText):
    """What all sources have in common that read text of any origin."""

    maximum_document_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(LONGEST_LINE_BYTES)
    """Most bytes of a document in UTF-8, and of the line of a .jsonl file that holds it. The first longer one is
    refused by file and line: tokenising takes about 120 bytes of memory for each byte of a document."""


class SourceOfFiles(_SourceOfForeignText):
    """What all sources have in common that read files of text."""

    path: UserPaths | None = None
    """A file, a folder or a glob pattern, each in sorted order; or a list of these, read in its own order."""
    validation_path: UserPaths | None = None
    """Files whose documents are held out for validation, given in the same way and read by the same keys
    (`maximum_rows` counts only training rows). Nothing is split off by `validation_fraction` then."""
    allow_validation_overlap: bool = False
    """Whether documents that are also in the validation files may be trained on; false: the first one is an error."""

    @property
    def has_validation_documents(self) -> bool:
        """Whether `validation_path` is given."""
        return self.validation_path is not None


class BuiltinSource(SourceOfText):
    """Text that every Python installation carries: pydoc topics and the standard library's docstrings."""

    kind: Literal["builtin"]


class JsonlSource(SourceOfFiles):
    """One JSON object a line, plain or compressed (`.zst`, `.gz`)."""

    kind: Literal["jsonl"]
    text_key: str = "text"
    """The key whose string is the document."""


class ParquetSource(SourceOfFiles):
    """Parquet files with a column of text."""

    kind: Literal["parquet"]
    text_key: str = "text"
    """The column whose string is the document."""


class TextSource(SourceOfFiles):
    """Plain UTF-8 text files."""

    kind: Literal["text"]
    document_separator: Literal["file", "blank_line", "line"] = "file"
    """Where a document ends, at the end of its file, at a blank line (each paragraph is a document) or at the end of
    each line."""

    @model_validator(mode="after")
    def _check(self) -> "TextSource":
        if self.rows is not None and self.document_separator != "file":
            raise ValueError(
                f"rows ({self.rows}) and document_separator ({self.document_separator}) both cut the files: leave rows "
                "out, or take document_separator file"
            )
        return self


class HubSource(_SourceOfForeignText):
    """A dataset of the Hugging Face hub, or a local folder of that shape or of `save_to_disk`, read by `datasets`."""

    kind: Literal["hub"]
    name: str
    """Name of the dataset, for example `allenai/c4`, or a folder."""
    subset: str | None = None
    """Name of the dataset's configuration, for example `en`; null: it has only one."""
    split: str = "train"
    """Name of the split that is read."""
    validation_split: str | None = None
    """Name of the split whose documents are held out for validation (`maximum_rows` counts only training rows).
    Nothing is split off by `validation_fraction` then."""
    allow_validation_overlap: bool = False
    """Whether documents that are also in the validation split may be trained on; false: the first one is an error."""
    text_key: str = "text"
    """The column whose string is the document."""

    @model_validator(mode="after")
    def _check(self) -> "HubSource":
        if self.split == self.validation_split:
            raise ValueError(
                f"split and validation_split are both '{self.split}': validation documents must not be trained on"
            )
        return self

    @property
    def has_validation_documents(self) -> bool:
        """Whether `validation_split` is given."""
        return self.validation_split is not None


class MegatronSource(_SourceBase):
    """A token file pair PREFIX.bin and PREFIX.idx made by Megatron-LM or DeepSpeed, used as it is."""

    kind: Literal["megatron"]
    path: UserPath | None = None
    """The common prefix of the two files."""
    require_end_of_text: bool = True
    """Whether documents that do not end in the tokenizer's end-of-text id (Megatron's `--append-eod`) are refused."""


class Hdf5Source(_SourceBase):
    """HDF5 shards of finished, masked pairs, as MLPerf's and NVIDIA's BERT pipelines make them."""

    kind: Literal["hdf5"]
    path: UserPaths | None = None
    """A file, a folder or a glob pattern, each in sorted order; or a list of these, read in its own order."""
    validation_path: UserPaths | None = None
    """Shards of the evaluation set, given in the same way. Nothing is split off by `validation_fraction`
    then."""
    allow_validation_overlap: bool = False
    """Whether rows that are also in the evaluation set may be trained on; false: the first one is an error."""


Source = Annotated[
    BuiltinSource | JsonlSource | ParquetSource | TextSource | HubSource | MegatronSource | Hdf5Source,
    Field(discriminator="kind"),
]
