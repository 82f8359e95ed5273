"""The `data:` section of a run file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from evenpack.config import Section


class _SourceBase(Section):
    weight: int = Field(default=1, ge=1, le=1_000_000)
    """Packs of this source among the sum of all weights."""


class BuiltinSource(_SourceBase):
    """Text that every Python installation carries: pydoc topics and the standard library's docstrings."""

    kind: Literal["builtin"]


class JsonlSource(_SourceBase):
    """One JSON object a line, plain or zstd-compressed (`.zst`)."""

    kind: Literal["jsonl"]
    path: Path | None = None
    """A file, or a folder or glob pattern of files, read in sorted order."""
    text_key: str = "text"
    """The key whose string is the document."""


class TextSource(_SourceBase):
    """Plain UTF-8 text files."""

    kind: Literal["text"]
    path: Path | None = None
    """A file, or a folder or glob pattern of files, read in sorted order."""
    document_separator: Literal["file", "blank_line", "line"] = "file"
    """What ends a document."""


class HubSource(_SourceBase):
    """A dataset of the Hugging Face hub, or a local folder of that shape, read through `datasets`."""

    kind: Literal["hub"]
    name: str
    """For example `allenai/c4`, or a folder."""
    subset: str | None = None
    """Configuration name, for example `en`."""
    split: str = "train"
    text_key: str = "text"


class MegatronSource(_SourceBase):
    """A token file pair PREFIX.bin and PREFIX.idx made by Megatron-LM or DeepSpeed, used as it is."""

    kind: Literal["megatron"]
    path: Path | None = None
    """The common prefix of the two files."""
    require_end_of_text: bool = True
    """Refuse documents that do not end in the tokenizer's end-of-text id (Megatron's `--append-eod`)."""


Source = Annotated[BuiltinSource | JsonlSource | TextSource | HubSource | MegatronSource, Field(discriminator="kind")]


class Gpt2Tokenizer(Section):
    """Byte-level BPE of GPT-2, from files."""

    kind: Literal["gpt2"]
    path: Path | None = None
    """A folder with vocab.json and merges.txt."""


class HubTokenizer(Section):
    """Any tokenizer of the hub, by name, or a folder that `AutoTokenizer` understands."""

    kind: Literal["hub"]
    name: str


class TrainedTokenizer(Section):
    """A byte-level BPE trained on the training documents of this run's sources."""

    kind: Literal["train"]
    vocabulary_size: int = Field(default=8192, ge=258, le=1_000_000)
    """Entries, the 256 bytes and the end-of-text token included."""


class ExternalTokenizer(Section):
    """Tokens come ready made (Megatron sources): only their vocabulary is known."""

    kind: Literal["external"]
    vocabulary_size: int = Field(ge=2)
    end_of_text_id: int = Field(ge=0)


TokenizerConfig = Annotated[
    Gpt2Tokenizer | HubTokenizer | TrainedTokenizer | ExternalTokenizer, Field(discriminator="kind")
]


class DocumentsRecipe(Section):
    """Each document is a sequence; what is too long follows `long_documents`."""

    kind: Literal["documents"]
    max_sequence_length: int = Field(ge=2, le=1 << 24)
    """Tokens, end-of-text included."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    minimum_document_length: int = Field(default=2, ge=1)
    """Tokens, end-of-text included; shorter documents are dropped and counted in the ledger."""


class ConcatRecipe(Section):
    """All documents one after another in one stream, cut exactly at `max_sequence_length`."""

    kind: Literal["concat"]
    max_sequence_length: int = Field(ge=2, le=1 << 24)
    isolate_documents: bool = True
    """Documents within a cut do not see each other and positions restart; false is GPT-2's own way."""
    minimum_document_length: int = Field(default=2, ge=1)
    """Tokens, end-of-text included; shorter documents are dropped and counted in the ledger."""


Recipe = Annotated[DocumentsRecipe | ConcatRecipe, Field(discriminator="kind")]


class PackingConfig(Section):
    """How sequences are put into packs."""

    algorithm: str = "auto"
    """`auto` or a name of `evenpack.data.packing.ALGORITHMS`."""
    max_sequences_per_pack: int | None = Field(default=None, ge=1)
    options: dict[str, int | float | str] = Field(default_factory=dict)
    """Of the algorithm, e.g. {weight: 0.09} of `least_squares`; docs/packing.md lists them."""


class DataConfig(Section):
    """From documents to packs."""

    prepared_dir: Path | None = None
    """Where `prepare` writes and `train` reads; null is OUTPUT_DIR/data. Runs may share one."""
    sources: dict[str, Source] = Field(min_length=1)
    validation_fraction: float = Field(default=0.02, ge=0.0, lt=1.0)
    """Share of documents held out, chosen by a hash of the document."""
    tokenizer: TokenizerConfig
    recipe: Recipe
    pack_length: int = Field(ge=2, le=1 << 24)
    """Slots of a pack."""
    packing: PackingConfig = PackingConfig()

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        longest = self.recipe.max_sequence_length
        if longest > self.pack_length:
            raise ValueError(
                f"recipe.max_sequence_length ({longest}) is above pack_length ({self.pack_length}): "
                "no pack could hold the longest sequence"
            )
        for name, source in self.sources.items():
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"source name '{name}' must consist of letters, digits, '_' and '-'")
            if (source.kind == "megatron") != (self.tokenizer.kind == "external"):
                raise ValueError(
                    f"source '{name}' is of kind {source.kind} and the tokenizer of kind {self.tokenizer.kind}: "
                    "megatron sources and the external tokenizer go together"
                )
        return self
