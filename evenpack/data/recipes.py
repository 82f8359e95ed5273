"""The recipes, `data.recipe:` of a run file, which make sequences of documents, and the masking of pairs."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.data.limits import MOST_SLOTS
from evenpack.units import Passes, Share, Slots, Tokens

OF_THE_LOSS = {"end_of_text_in_loss"}
"""Keys of a recipe that affect the targets of the loss and not the prepared files."""
_DEFAULT_SEED = 42
"""Default seed of the order of atoms."""

EndOfText = Literal["all", "closing", "none"]
"""End-of-text tokens that are predicted: all, also those that pad; those that close a text; or none."""


class DocumentsRecipe(Section):
    """Each document is a sequence; `long_documents` decides about those that are too long."""

    kind: Literal["documents"]
    max_sequence_length: Tokens = Field(ge=2, le=MOST_SLOTS)
    """Most tokens of a sequence, end-of-text included."""
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """What to do with a longer document: split it into several sequences, truncate it, drop it, or stop with an error;
    lost tokens are counted."""
    end_of_text_in_loss: Literal["all", "none"] = "all"
    """Whether the end-of-text of a document is predicted like other tokens."""
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
    end_of_text_in_loss: Literal["all", "none"] = "all"
    """Whether the end-of-text of a document is predicted like other tokens."""
    isolate_documents: bool = True
    """Whether documents within a row are isolated: they do not attend to each other, and positions restart in each. So
    are atoms that were not adjacent in the stream. false is what GPT-2 does."""
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
    """Length to which the end of a document is padded where an atom is longer than a row: to complete rows, or to
    the complete atom, which gives rows that hold padding only."""
    end_of_text_in_loss: EndOfText = "all"
    """End-of-text tokens that are predicted: all, padding included; only the ones that close a piece; or none, as the
    tables of the recipe's paper suggest (docs/chunking.md)."""
    isolate_documents: bool = True
    """Whether atoms within a row are isolated, unless they were adjacent in the document: they do not attend to each
    other, and positions restart in each. false is the method of the recipe's paper (docs/chunking.md)."""
    minimum_document_length: Tokens = Field(default=2, ge=2)
    """Fewest tokens of a document, end-of-text included; shorter ones are dropped and counted."""

    @model_validator(mode="after")
    def _check(self) -> "PaddingRecipe":
        if self.atom == 1:
            raise ValueError("atom is 1, and its only slot would hold the end-of-text: give at least 2")
        check_atom(self.atom, self.max_sequence_length, smallest=2)
        return self


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


def atom_of(recipe: Recipe) -> int | None:
    """Returns the tokens that stay together in the shuffle; None where only rows or packs are shuffled."""
    return recipe.atom if isinstance(recipe, ConcatRecipe | PaddingRecipe) else None
