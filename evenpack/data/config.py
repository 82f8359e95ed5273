"""The sections `data:` and `masking:` of a run file."""

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
"""Keys of a recipe that decide what is predicted and nothing of the prepared files."""

_DEFAULT_SEED = 42
"""Of the order of atoms."""

_LONGEST_NAME = 100
"""Characters of a source's name."""


class DocumentsRecipe(Section):
    """Each document is a sequence; what is too long follows `long_documents`."""

    kind: Literal["documents"]
    max_sequence_length: Tokens = Field(ge=2, le=MOST_SLOTS)
    """Most tokens of a sequence, end-of-text included."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """What becomes of a longer document: it is split into several sequences, cut off, dropped, or refused as an error;
    the tokens that are lost are counted."""
    minimum_document_length: Tokens = Field(default=2, ge=1)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""


class ConcatRecipe(Section):
    """All documents one after another in one stream, cut exactly at `max_sequence_length`."""

    kind: Literal["concat"]
    max_sequence_length: Tokens = Field(ge=2, le=MOST_SLOTS)
    """Tokens of a row of the stream."""
    atom: Tokens | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Tokens that are shuffled together, once, before rows are made of them: a divisor or a multiple of
    max_sequence_length. Rows are then trained in that order. Null: rows, in an order that each epoch draws again."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Seed of the order of atoms; null is 42."""
    isolate_documents: bool = True
    """Whether documents within a row are kept apart: they do not see each other and positions restart, and neither do
    atoms that were no neighbours; false is GPT-2's own way."""
    minimum_document_length: Tokens = Field(default=2, ge=1)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""

    @model_validator(mode="before")
    @classmethod
    def _settle_seed(cls, values: Any) -> Any:
        """With an atom, 42 and no seed are the same rows, and so the same data section."""
        if isinstance(values, dict) and values.get("atom") is not None and values.get("seed") is None:
            return {**values, "seed": _DEFAULT_SEED}
        return values

    @model_validator(mode="after")
    def _check(self) -> "ConcatRecipe":
        if self.atom is None and self.seed is not None:
            raise ValueError(f"seed ({self.seed}) is of the order of atoms: give an atom, or leave the seed out")
        if self.atom is not None:
            check_atom(self.atom, self.max_sequence_length, smallest=1)
        return self

    @property
    def keeps_order(self) -> bool:
        """Whether rows are trained in the order in which they were prepared."""
        return self.atom is not None


class PaddingRecipe(Section):
    """Documents cut into pieces of `atom` - 1 tokens that an end-of-text closes; what is left is filled up with it."""

    kind: Literal["padding"]
    max_sequence_length: Slots = Field(ge=2, le=MOST_SLOTS)
    """Slots of a row."""
    atom: Slots = Field(ge=1, le=MOST_SLOTS)
    """Slots that are shuffled together, once, before rows are made of them: a divisor or a multiple of
    max_sequence_length. Rows are trained in that order."""
    seed: int = Field(default=_DEFAULT_SEED, ge=0, lt=1 << 63)
    """Seed of the order of atoms."""
    pad_tails_to: Literal["row", "atom"] = "row"
    """What the rest of a document is filled up to where an atom is longer than a row: whole rows, or the atom, which
    leaves rows of padding alone."""
    padding_in_loss: bool = True
    """Whether end-of-text that only fills up is predicted like other tokens; the first one behind a text always is."""
    isolate_documents: bool = True
    """Whether atoms of a row are kept apart: they do not see each other and positions restart, unless they were
    neighbours; false is the way of the paper that this recipe is from (docs/chunking.md)."""
    minimum_document_length: Tokens = Field(default=2, ge=2)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""

    @model_validator(mode="after")
    def _check(self) -> "PaddingRecipe":
        if self.atom == 1:
            raise ValueError("atom is 1, and its only slot is the end-of-text: give at least 2")
        check_atom(self.atom, self.max_sequence_length, smallest=2)
        return self

    @property
    def keeps_order(self) -> bool:
        """Rows are trained in the order in which they were prepared."""
        return True


def check_atom(atom: int, max_sequence_length: int, *, smallest: int) -> None:
    """Raises: ValueError, with the sizes from `smallest` on that would do, unless one of the two divides the other."""
    if atom % max_sequence_length and max_sequence_length % atom:
        divisors = [str(size) for size in range(smallest, max_sequence_length) if max_sequence_length % size == 0]
        raise ValueError(
            f"atom ({atom}) is neither a divisor nor a multiple of max_sequence_length ({max_sequence_length}), so "
            f"rows would cut atoms anywhere: give {', '.join(divisors)}, or a multiple of {max_sequence_length}"
        )


class MaskingConfig(Section):
    """How many tokens are masked, and what becomes of them."""

    share: Share = Field(default=0.15, gt=0.0, le=1.0)
    """Masked tokens among those of a sequence, special ones counted."""
    max_predictions: Tokens = Field(default=76, ge=1, le=1 << 16)
    """Most tokens of a sequence that are masked."""
    mask_share: Share = Field(default=0.8, ge=0.0, le=1.0)
    """Masked tokens that become [MASK]."""
    random_share: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Masked tokens that become a random token; the rest stay as they are."""
    whole_words: bool = False
    """Whether the pieces of a word are masked together, as far as the count allows."""

    @model_validator(mode="after")
    def _check(self) -> "MaskingConfig":
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share ({self.mask_share}) and random_share ({self.random_share}) exceed 1 together")
        return self


class SentencePairsRecipe(Section):
    """[CLS] A [SEP] B [SEP] with next-sentence labels, made of sentences in the way of BERT's own data."""

    kind: Literal["sentence_pairs"]
    max_sequence_length: Tokens = Field(ge=5, le=1 << 16)
    """Most tokens of a pair, the three special ones included."""
    duplication_factor: Passes = Field(default=10, ge=1, le=1000)
    """How often training documents are gone through, each time with other draws. Validation documents: once."""
    short_target_probability: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Passes over a document that fill pairs up to a random shorter length only."""
    random_next_probability: Share = Field(default=0.5, ge=0.0, le=1.0)
    """How often B is taken from another document where A could go on."""
    single_sentence_documents: Literal["random_next", "drop", "error"] = "random_next"
    """What becomes of a document of one sentence, which has no next one: its only pair ends in another document, or it
    is left out, or refused as an error."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}$")
    """Language whose rules split sentences (ISO 639); `sentencex` takes a related language's where it has none."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the pairs and their stored masks; the run's seed orders them."""
    static_masks: MaskingConfig | None = None
    """How masks are drawn once, with the pairs, and stored, each of the duplicates with its own; the run's section
    `masking` is left out then. Null: each epoch has masks of its own."""


class MaskedPairsRecipe(Section):
    """Finished pairs with their masks, from HDF5 shards."""

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
    """How sequences are put into packs."""

    algorithm: str = "auto"
    """`auto` or the name of an algorithm of docs/packing.md: `longest_pack_first`, `cutting_stock`, `least_squares`,
    ..."""
    max_sequences_per_pack: Sequences | None = Field(default=None, ge=1, le=MOST_SLOTS)
    """Most sequences of a pack; null: no limit."""
    options: dict[str, int | float | str] = Field(default_factory=dict)
    """Options of the algorithm, such as {weight: 0.09} of `least_squares`; docs/packing.md lists them."""


class DataConfig(Section):
    """From documents to packs."""

    prepared_dir: UserPath | None = None
    """Folder where `prepare` writes and `train` reads; null is OUTPUT_DIR/data. Runs may share one."""
    tokens_dir: UserPath | None = None
    """Folder where `prepare` keeps the tokens of text, and a tokenizer trained for them: runs share them whose sources
    and tokenizer are the same, whatever their recipes. Null: each prepared directory has its own."""
    sources: dict[str, Source] = Field(min_length=1)
    """Where documents come from: a section for each source, by a name of your own."""
    validation_fraction: Share = Field(default=0.02, ge=0.0, lt=1.0)
    """Documents of each source that are held out for validation, chosen by a hash of the document."""
    tokenizer: TokenizerConfig
    """What turns text into tokens."""
    recipe: Recipe
    """How documents become the sequences that are packed."""
    pack_length: Slots = Field(ge=2, le=MOST_SLOTS)
    """Slots of a pack."""
    packing: PackingConfig = PackingConfig()
    shuffle: Shuffle = PermutationShuffle()
    """How training sequences come into random order: `permutation`, `grid` or `blocks`, or a section with its
    settings."""
    order: Literal["shuffled", "by_length"] = "shuffled"
    """Order of an epoch. For study, by_length: each epoch of a source goes from its shortest sequences to its longest,
    or from the packs whose longest sequence is shortest to the others. Preparation is the same for both."""
    verify_in_training: bool = True
    """Whether `train` reads all prepared files beside its first steps, each rank a share, and compares their checksums
    before it saves a checkpoint; false: sizes alone are compared."""
    mixture_schedule: tuple[MixtureChange, ...] = ()
    """Other weights of sources from given steps on; before the first entry, and where an entry leaves a source out,
    sources keep their weight. Each source's stream goes on where it was. The entries of steps to come may be edited."""
    on_maximum_epochs: Literal["error", "warn"] = "error"
    """What `train` does where a run goes through a source more often than its `maximum_epochs`."""
    on_changed_sources: Literal["warn", "error", "ignore"] = "warn"
    """What `train` does where a source's files or the tokenizer's are not those that the data was prepared from."""

    @property
    def static_masks(self) -> MaskingConfig | None:
        """What `prepare` draws the masks by that it stores with the pairs; None where it draws none."""
        return self.recipe.static_masks if isinstance(self.recipe, SentencePairsRecipe) else None

    @property
    def has_stored_masks(self) -> bool:
        """Whether masks lie beside the pairs, drawn by `prepare` or before; if not, each epoch draws its own."""
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
        """Keys of this section, with their values, that make it one for study alone, each with what that means."""
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
                "recipe sentence_pairs splits text into sentences, and megatron sources hold none: give text sources"
            )
        for name, source in self.sources.items():
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"source name '{name}' must consist of letters, digits, '_' and '-'")
            if len(name) > _LONGEST_NAME:
                raise ValueError(
                    f"source name '{name[:20]}...' has {len(name)} characters, but folders are named after it: give "
                    f"one of at most {_LONGEST_NAME}"
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
                f"in their order and packed no further: set pack_length={rows}, found {self.pack_length}"
            )
        if self.order != "shuffled":
            raise ValueError(
                f"recipe {self.recipe.kind} with an atom decides the order of its rows itself: leave order out, found "
                f"{self.order}"
            )
        for name, source in self.sources.items():
            if self.recipe.kind == "padding" and source.kind == "megatron" and not source.require_end_of_text:
                raise ValueError(
                    f"recipe padding fills up with the end-of-text of documents, and source '{name}' need not have "
                    f"any: set sources.{name}.require_end_of_text=true"
                )

    def _check_shuffle(self) -> None:
        """Raises: ValueError if the files of the training sequences cannot be in the order that is asked for."""
        kind, recipe = self.shuffle.kind, self.recipe
        if kind == "permutation":
            return
        if self.order != "shuffled":
            raise ValueError(f"order {self.order} goes through the whole source by length: leave out shuffle {kind}")
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
        """Raises: ValueError if the source does not go with the recipe or the tokenizer."""
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
