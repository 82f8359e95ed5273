"""Defines the sections of tokenizers, `data.tokenizer:` in a run file."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from evenpack.config import Section, UserName, UserPath
from evenpack.data.limits import MOST_VOCABULARY
from evenpack.units import Entries

EncoderChoice = Literal["files", "class"]
Beginning = Literal["none", "bos"]


class Gpt2Tokenizer(Section):
    """GPT-2's byte-level BPE, from files."""

    kind: Literal["gpt2"]
    path: UserPath | None = None
    """A folder with tokenizer.json, or with vocab.json and merges.txt."""
    encoder: EncoderChoice = "files"
    """What tokenises: tokenizer.json, or else the vocabulary's files (`files`), or what the class of transformers makes
    of them that the folder names (`class`). Where these differ it is said."""
    beginning: Beginning = "none"
    """What each document begins with, and a prompt of the exported tokenizer: nothing, or <|endoftext|> (`bos`).
    Kind hub takes the bos_token that the folder names."""


class HubTokenizer(Section):
    """Any tokenizer of the hub, by name, or a folder with tokenizer.json, or one that `AutoTokenizer` can load."""

    kind: Literal["hub"]
    name: UserName
    """Name on the hub, for example `openai-community/gpt2`, or a folder."""
    encoder: EncoderChoice = "files"
    """What tokenises: tokenizer.json if there is one (`files`), or what the class of transformers makes of the files
    that the folder names (`class`). Where these differ it is said."""
    beginning: Beginning = "none"
    """What each document begins with, and a prompt of the exported tokenizer: nothing, or the bos_token (`bos`); [CLS]
    for tokenizers whose eos_token is their sep_token, such as RoBERTa's."""


class TrainedTokenizer(Section):
    """A byte-level BPE trained on the training documents of this run's sources."""

    kind: Literal["train"]
    vocabulary_size: Entries = Field(default=8192, ge=258, le=1_000_000)
    """Entries of the vocabulary, the 256 bytes and the end-of-text token included."""


class BertTokenizer(Section):
    """BERT's WordPiece tokenizer, from files or from the hub. A document ends in [SEP]."""

    kind: Literal["bert"]
    path: UserPath | None = None
    """A folder with tokenizer.json, or with vocab.txt."""
    name: UserName | None = None
    """Name on the hub, for example `google-bert/bert-base-uncased`; instead of `path`."""
    lower_case: bool = True
    """Whether text is lower-cased and accents are stripped; for vocab.txt, which does not contain this setting."""
    encoder: EncoderChoice = "files"
    """What tokenises: tokenizer.json, or else vocab.txt (`files`), or what the class of transformers makes of them that
    the folder names (`class`). Where these differ it is said."""

    @model_validator(mode="after")
    def _check(self) -> "BertTokenizer":
        if self.path is not None and self.name is not None:
            raise ValueError("path and name exclude each other: give the folder or the name of the hub")
        return self


class TrainedWordPieces(Section):
    """A WordPiece vocabulary in BERT's form, trained on the training documents of this run's sources."""

    kind: Literal["train_word_pieces"]
    vocabulary_size: Entries = Field(default=8192, ge=64, le=1_000_000)
    """Entries of the vocabulary; [PAD], [UNK], [CLS], [SEP], [MASK] and the letters of the text included: all of up to
    256 different ones; of more, the most frequent, at least 256, that cover 99.95 % of the text."""
    lower_case: bool = True
    """Whether text is lower-cased and accents are stripped."""


class ExternalTokenizer(Section):
    """No tokenizer: the source holds tokens (Megatron and HDF5 sources); only their vocabulary is given."""

    kind: Literal["external"]
    vocabulary_size: Entries = Field(ge=2, le=MOST_VOCABULARY)
    """Entries of the vocabulary; every id of the files is below it."""
    end_of_text_id: int = Field(ge=0, lt=MOST_VOCABULARY)
    """Id of the token that ends a document."""


TokenizerConfig = Annotated[
    Gpt2Tokenizer | BertTokenizer | HubTokenizer | TrainedTokenizer | TrainedWordPieces | ExternalTokenizer,
    Field(discriminator="kind"),
]


EncoderTokenizer = BertTokenizer
"""Tokenizer for an encoder's texts: an existing one with [CLS] and [SEP]."""
