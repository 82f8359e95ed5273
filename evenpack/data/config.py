"""The section `data:` of a run file, which consists of the sections of the rooms, with the checks between them."""

from typing import Literal

from pydantic import Field, model_validator

from evenpack.config import Section, UserPath
from evenpack.data.limits import MOST_SLOTS
from evenpack.data.order.config import PackingConfig
from evenpack.data.recipes import (
    ConcatRecipe,
    DocumentsRecipe,
    MaskedPairsRecipe,
    MaskingConfig,
    Recipe,
    SentencePairsRecipe,
    atom_of,
)
from evenpack.data.shuffle.config import PermutationShuffle, Shuffle
from evenpack.data.sources.config import Source
from evenpack.data.tokenizers.config import TokenizerConfig
from evenpack.units import Share, Slots

_LONGEST_NAME = 200
"""Bytes of a source's name: of 255 in the name of a folder, some are for what is added to it."""


class DataConfig(Section):
    """The data: sources, tokenizer, and how documents become packs."""

    prepared_dir: UserPath | None = None
    """Folder that `prepare` writes and `train` reads; several runs may share it. Null: OUTPUT_DIR/data."""
    tokens_dir: UserPath | None = None
    """Folder where `prepare` keeps the tokens of text and a tokenizer trained for them; runs with the same sources and
    tokenizer share them, whatever their recipes. Null: each prepared directory has its own."""
    sources: dict[str, Source] = Field(min_length=1)
    """The sources of documents: one section for each, under a name of your choice."""
    validation_fraction: Share = Field(default=0.02, ge=0.0, lt=1.0)
    """Share of each source's documents that is held out for validation, chosen by a hash of the document."""
    tokenizer: TokenizerConfig
    """The tokenizer of the text."""
    recipe: Recipe
    """How documents become the sequences that are packed."""
    pack_length: Slots = Field(ge=2, le=MOST_SLOTS)
    """Slots of a pack."""
    packing: PackingConfig = PackingConfig()
    shuffle: Shuffle = PermutationShuffle()
    """How training sequences are put into random order: `permutation`, `grid` or `blocks`, or a section with its
    settings."""
    order: Literal["shuffled", "by_length"] = "shuffled"
    """Order of an epoch. For study, by_length: each epoch of a source has its sequences in ascending order of length,
    or its packs in ascending order of their longest sequence. Preparation is the same for both."""
    verify_in_training: bool = True
    """Whether `train` reads all prepared files during its first steps, each rank a share, and compares their checksums
    before it saves a checkpoint, and whether other commands that read the content compare it first; false: only file
    sizes are compared, which the other commands say."""

    @property
    def static_masks(self) -> MaskingConfig | None:
        """The settings of masks that `prepare` draws and stores with the pairs; None if it draws none."""
        return self.recipe.static_masks if isinstance(self.recipe, SentencePairsRecipe) else None

    @property
    def has_stored_masks(self) -> bool:
        """Whether masks are stored with the pairs, by `prepare` or earlier; if not, each epoch draws its own."""
        return isinstance(self.recipe, MaskedPairsRecipe) or self.static_masks is not None

    @property
    def has_pairs(self) -> bool:
        """Whether sequences are pairs, whose second half may follow the first."""
        return isinstance(self.recipe, SentencePairsRecipe | MaskedPairsRecipe)

    @property
    def keeps_order(self) -> bool:
        """Whether rows are trained in the order of preparation, for any seed of the run and in each epoch."""
        return atom_of(self.recipe) is not None

    @property
    def study_switches(self) -> dict[str, str]:
        """Keys of this section, with their values, that are for study only, each with its meaning."""
        if self.order == "shuffled":
            return {}
        return {"data.order is by_length": "a step holds sequences of nearly one length, and later steps longer ones"}

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        longest = self.recipe.max_sequence_length
        if longest > self.pack_length:
            raise ValueError(
                f"recipe.max_sequence_length ({longest}) is above pack_length ({self.pack_length}): "
                "no pack could hold the longest sequence"
            )
        self._check_order()
        self._check_ends_of_text()
        self._check_shuffle()
        if self.recipe.kind == "sentence_pairs" and self.tokenizer.kind == "external":
            raise ValueError(
                "recipe sentence_pairs splits text into sentences, and megatron sources hold no text: give text sources"
            )
        for name, source in self.sources.items():
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"source name '{name}' must consist of letters, digits, '_' and '-'")
            if (size := len(name.encode())) > _LONGEST_NAME:
                raise ValueError(
                    f"source name '{name[:20]}...' has {size} bytes in UTF-8, but folders are named after it: give one "
                    f"of at most {_LONGEST_NAME}"
                )
            self._check_kinds(name, source.kind)
        if not any(source.weight for source in self.sources.values()):
            raise ValueError("every source has weight 0, so there is nothing to draw: give one a weight of 1 or more")
        return self

    def _check_order(self) -> None:
        """Raises: ValueError if rows that keep their order would be packed, or sorted, into another one."""
        if not self.keeps_order:
            return
        rows = self.recipe.max_sequence_length
        if rows != self.pack_length:
            raise ValueError(
                f"recipe {self.recipe.kind} with an atom makes rows of max_sequence_length ({rows}), which are trained "
                f"in their order and not packed: set pack_length={rows}, found {self.pack_length}"
            )
        if self.order != "shuffled":
            raise ValueError(
                f"recipe {self.recipe.kind} with an atom decides the order of its rows itself: leave order out, found "
                f"{self.order}"
            )

    def _check_ends_of_text(self) -> None:
        """Raises: ValueError if the recipe needs the documents' end-of-text, and a source may lack it."""
        recipe = self.recipe
        if recipe.kind == "padding":
            need = "recipe padding pads with the documents' end-of-text"
        elif isinstance(recipe, DocumentsRecipe | ConcatRecipe) and recipe.end_of_text_in_loss == "none":
            need = "recipe.end_of_text_in_loss none leaves the last token of each document out"
        else:
            return
        for name, source in self.sources.items():
            if source.kind == "megatron" and not source.require_end_of_text:
                raise ValueError(
                    f"{need}, and source '{name}' may lack its end-of-text: set sources.{name}.require_end_of_text=true"
                )

    def _check_shuffle(self) -> None:
        """Raises: ValueError if the training sequences cannot be written in the requested order."""
        kind, recipe = self.shuffle.kind, self.recipe
        if kind == "permutation":
            return
        if self.order != "shuffled":
            raise ValueError(f"order {self.order} sorts the whole source by length: leave out shuffle {kind}")
        if self.keeps_order:
            raise ValueError(f"recipe {recipe.kind} with an atom keeps the order of its rows: leave out shuffle {kind}")
        if kind == "grid" and not (
            isinstance(recipe, DocumentsRecipe) or (isinstance(recipe, ConcatRecipe) and not recipe.isolate_documents)
        ):
            raise ValueError(
                "shuffle grid writes sequences of one segment: take recipe documents, or concat with "
                f"isolate_documents: false, found {recipe.kind}; or leave shuffle out"
            )

    def _check_kinds(self, name: str, kind: str) -> None:
        """Raises: ValueError if the source does not fit the recipe or the tokenizer."""
        recipe, tokenizer = self.recipe.kind, self.tokenizer.kind
        if (kind == "hdf5") != (recipe == "masked_pairs"):
            raise ValueError(
                f"source '{name}' is of kind {kind} and the recipe of kind {recipe}: hdf5 sources and the recipe "
                "masked_pairs go together"
            )
        fits = tokenizer == "external" or (kind == "hdf5" and tokenizer in ("bert", "hub"))
        if fits != (kind in ("megatron", "hdf5")):
            raise ValueError(
                f"source '{name}' is of kind {kind} and the tokenizer of kind {tokenizer}: megatron sources and the "
                "external tokenizer go together; hdf5 sources take bert, hub or external, the vocabulary of their ids"
            )
