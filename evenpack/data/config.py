"""Defines the sections `data:` and `masking:` of a run file."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evenpack.config import Section, UserPath
from evenpack.data.limits import MOST_SLOTS
from evenpack.data.order.config import MixtureChange, check_schedule, weight_changes
from evenpack.data.order.weight_change import WeightChange
from evenpack.data.shuffle.config import PermutationShuffle, Shuffle
from evenpack.data.sources.config import Source
from evenpack.data.tokenizers.config import TokenizerConfig
from evenpack.units import Passes, Sequences, Share, Slots, Tokens

OF_THE_LOSS = {"padding_in_loss"}
"""Keys of a recipe that affect the targets of the loss and not the prepared files."""

_DEFAULT_SEED = 42
"""Default seed of the order of atoms."""

_LONGEST_NAME = 200
"""Bytes of a source's name: of 255 in the name of a folder, some are for what is added to it."""


class DocumentsRecipe(Section):
    """Each document is a sequence; `long_documents` decides about those that are too long."""

    kind: Literal["documents"]
    max_sequence_length: Tokens = Field(ge=2, le=MOST_SLOTS)
    """Most tokens of a sequence, end-of-text included."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """What to do with a longer document: split it into several sequences, truncate it, drop it, or stop with an error;
    lost tokens are counted."""
    minimum_document_length: Tokens = Field(default=2, ge=1)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""


class ConcatRecipe(Section):
    """All documents are concatenated to one stream, which is cut into rows of exactly `max_sequence_length` tokens."""

    kind: Literal["concat"]
    max_sequence_length: Tokens = Field(ge=2, le=MOST_SLOTS)
    """Tokens of a row of the stream."""
    atom: Tokens | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Tokens of an atom: atoms are shuffled once and then joined to rows, or cut into rows, which are trained in that
    order. A divisor or a multiple of max_sequence_length. Null: rows are shuffled, in a new order in each epoch."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Seed of the order of atoms; null is 42."""
    isolate_documents: bool = True
    """Whether documents within a row do not attend to each other and have positions of their own; the same holds for
    atoms that were not adjacent in the stream. false is what GPT-2 does."""
    minimum_document_length: Tokens = Field(default=2, ge=1)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""

    @model_validator(mode="before")
    @classmethod
    def _settle_seed(cls, values: Any) -> Any:
        """Fills in the default seed where there is an atom, so that equal rows have equal data sections."""
        if isinstance(values, dict) and values.get("atom") is not None and values.get("seed") is None:
            return {**values, "seed": _DEFAULT_SEED}
        return values

    @model_validator(mode="after")
    def _check(self) -> "ConcatRecipe":
        if self.atom is None and self.seed is not None:
            raise ValueError(f"seed ({self.seed}) is for the order of atoms: give an atom, or leave the seed out")
        if self.atom is not None:
            check_atom(self.atom, self.max_sequence_length, smallest=1)
        return self

    @property
    def keeps_order(self) -> bool:
        """Whether rows are trained in the order in which they were prepared."""
        return self.atom is not None


class PaddingRecipe(Section):
    """Documents are cut into pieces of `atom` - 1 tokens, each followed by an end-of-text, which also pads the rest."""

    kind: Literal["padding"]
    max_sequence_length: Slots = Field(ge=2, le=MOST_SLOTS)
    """Slots of a row."""
    atom: Slots = Field(ge=1, le=MOST_SLOTS)
    """Slots of an atom: atoms are shuffled once and then joined to rows, or cut into rows, which are trained in that
    order. A divisor or a multiple of max_sequence_length."""
    seed: int = Field(default=_DEFAULT_SEED, ge=0, lt=1 << 63)
    """Seed of the order of atoms."""
    pad_tails_to: Literal["row", "atom"] = "row"
    """Length to which the end of a document is padded where an atom is longer than a row: whole rows, or the whole
    atom, which gives rows that hold padding only."""
    padding_in_loss: bool = True
    """Whether padding, which is made of end-of-text, is predicted like other tokens; the first end-of-text after a text
    always is. The default is not shown to be that of the recipe's paper (docs/chunking.md)."""
    isolate_documents: bool = True
    """Whether atoms within a row do not attend to each other and have positions of their own, unless they were
    adjacent in the document; false is the method of the paper that this recipe is from (docs/chunking.md)."""
    minimum_document_length: Tokens = Field(default=2, ge=2)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""

    @model_validator(mode="after")
    def _check(self) -> "PaddingRecipe":
        if self.atom == 1:
            raise ValueError("atom is 1, and its only slot would hold the end-of-text: give at least 2")
        check_atom(self.atom, self.max_sequence_length, smallest=2)
        return self

    @property
    def keeps_order(self) -> bool:
        """Whether rows are trained in the order in which they were prepared."""
        return True


def check_atom(atom: int, max_sequence_length: int, *, smallest: int) -> None:
    """Raises: ValueError, with the valid sizes from `smallest` on, unless one of the two divides the other."""
    if atom % max_sequence_length and max_sequence_length % atom:
        divisors = [str(size) for size in range(smallest, max_sequence_length) if max_sequence_length % size == 0]
        raise ValueError(
            f"atom ({atom}) is neither a divisor nor a multiple of max_sequence_length ({max_sequence_length}), so "
            f"rows would cut atoms anywhere: give {', '.join(divisors)}, or a multiple of {max_sequence_length}"
        )


class MaskingConfig(Section):
    """How many tokens are masked, and how they are replaced."""

    share: Share = Field(default=0.15, gt=0.0, le=1.0)
    """Share of a sequence's tokens, special ones counted, that is masked."""
    max_predictions: Tokens = Field(default=76, ge=1, le=1 << 16)
    """Most masked tokens of a sequence."""
    mask_share: Share = Field(default=0.8, ge=0.0, le=1.0)
    """Share of the masked tokens that is replaced by [MASK]."""
    random_share: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the masked tokens that is replaced by a random token; the remaining ones are kept."""
    whole_words: bool = False
    """Whether the pieces of a word are masked together, as far as the number of masked tokens allows."""

    @model_validator(mode="after")
    def _check(self) -> "MaskingConfig":
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share ({self.mask_share}) and random_share ({self.random_share}) exceed 1 together")
        return self


class SentencePairsRecipe(Section):
    """Pairs [CLS] A [SEP] B [SEP] with next-sentence labels, made from sentences as in BERT's own data."""

    kind: Literal["sentence_pairs"]
    max_sequence_length: Tokens = Field(ge=5, le=1 << 16)
    """Most tokens of a pair, the three special ones included."""
    duplication_factor: Passes = Field(default=10, ge=1, le=1000)
    """Number of passes over the training documents, each with other random draws; validation documents have one."""
    short_target_probability: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the passes over a document whose pairs have a random, shorter maximum length."""
    random_next_probability: Share = Field(default=0.5, ge=0.0, le=1.0)
    """Probability that B is taken from another document although A has a next sentence."""
    single_sentence_documents: Literal["random_next", "drop", "error"] = "random_next"
    """What to do with a document of one sentence, which has no next one: make one pair whose B is from another
    document, leave the document out, or stop with an error."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}$")
    """Language whose rules split sentences (ISO 639); without rules for it, `sentencex` uses a related language."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the pairs and their stored masks; their order depends on the run's seed."""
    static_masks: MaskingConfig | None = None
    """Masks that are drawn once and stored with the pairs, different ones for each duplicate; the run's section
    `masking` must be left out then. Null: masks are drawn again in each epoch."""


class MaskedPairsRecipe(Section):
    """Existing pairs with their masks, from HDF5 shards."""

    kind: Literal["masked_pairs"]
    max_sequence_length: Tokens = Field(ge=5, le=1 << 16)
    """Most tokens of a row, special ones counted; a longer row is refused."""
    max_predictions: Tokens = Field(default=76, ge=1, le=1 << 16)
    """Most masked tokens of a row; a row with more is refused."""


Recipe = Annotated[
    DocumentsRecipe | ConcatRecipe | PaddingRecipe | SentencePairsRecipe | MaskedPairsRecipe,
    Field(discriminator="kind"),
]


class PackingConfig(Section):
    """The packing algorithm and its options."""

    algorithm: str = "auto"
    """`auto` or the name of an algorithm of docs/packing.md: `longest_pack_first`, `cutting_stock`, `least_squares`,
    ..."""
    max_sequences_per_pack: Sequences | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Most sequences of a pack; null: no limit."""
    options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the algorithm, such as {weight: 0.09} of `least_squares`; docs/packing.md lists them."""


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
    before it saves a checkpoint; false: only file sizes are compared."""
    mixture_schedule: tuple[MixtureChange, ...] = ()
    """Changes of the sources' weights at given steps; a source keeps its weight until an entry changes it. The stream
    of each source continues across a change. Entries of future steps may be edited."""
    on_maximum_epochs: Literal["error", "warn"] = "error"
    """What `train` does if a run exceeds the `maximum_epochs` of a source."""
    on_changed_sources: Literal["warn", "error", "ignore"] = "warn"
    """What `train` does if the files of a source or tokenizer have changed since the data was prepared."""

    @property
    def static_masks(self) -> MaskingConfig | None:
        """The settings of masks that `prepare` draws and stores with the pairs; None if it draws none."""
        return self.recipe.static_masks if isinstance(self.recipe, SentencePairsRecipe) else None

    @property
    def has_stored_masks(self) -> bool:
        """Whether masks are stored with the pairs, by `prepare` or earlier; if not, each epoch draws its own."""
        return isinstance(self.recipe, MaskedPairsRecipe) or self.static_masks is not None

    @property
    def weight_changes(self) -> tuple[WeightChange, ...]:
        """The schedule of the mixture, each entry with the weights of all sources."""
        return weight_changes(self.mixture_schedule, {name: source.weight for name, source in self.sources.items()})

    @property
    def keeps_order(self) -> bool:
        """Whether the order of training is that of the prepared rows, whatever the run's seed and the epoch."""
        return isinstance(self.recipe, ConcatRecipe | PaddingRecipe) and self.recipe.keeps_order

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
        check_schedule(self.mixture_schedule, list(self.sources))
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
        for name, source in self.sources.items():
            if self.recipe.kind == "padding" and source.kind == "megatron" and not source.require_end_of_text:
                raise ValueError(
                    f"recipe padding pads with the documents' end-of-text, which source '{name}' may lack: set "
                    f"sources.{name}.require_end_of_text=true"
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
