"""The sections of tokenizers, `data.tokenizer:` of a run file."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from evenpack.config import Section, UserPath
from evenpack.data.limits import MOST_VOCABULARY


class Gpt2Tokenizer(Section):
    """Byte-level BPE of GPT-2, from files."""

    kind: Literal["gpt2"]
    path: UserPath | None = None
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


class BertTokenizer(Section):
    """WordPiece of BERT, from files or from the hub. A document ends in [SEP]."""

    kind: Literal["bert"]
    path: UserPath | None = None
    """A folder with tokenizer.json, or with vocab.txt."""
    name: str | None = None
    """Of the hub, for example `google-bert/bert-base-uncased`; instead of `path`."""
    lower_case: bool = True
    """For vocab.txt, which does not say it: text is turned to lower case and accents are stripped."""

    @model_validator(mode="after")
    def _check(self) -> "BertTokenizer":
        if self.path is not None and self.name is not None:
            raise ValueError("path and name exclude each other: give the folder or the name of the hub")
        return self


class TrainedWordPieces(Section):
    """A WordPiece vocabulary in BERT's form, trained on the training documents of this run's sources."""

    kind: Literal["train_word_pieces"]
    vocabulary_size: int = Field(default=8192, ge=64, le=1_000_000)
    """Entries; [PAD], [UNK], [CLS], [SEP], [MASK] and every letter of the text included."""
    lower_case: bool = True
    """Text is turned to lower case and accents are stripped."""


class ExternalTokenizer(Section):
    """Tokens come ready made (Megatron and HDF5 sources): only their vocabulary is known."""

    kind: Literal["external"]
    vocabulary_size: int = Field(ge=2, le=MOST_VOCABULARY)
    end_of_text_id: int = Field(ge=0, lt=MOST_VOCABULARY)


TokenizerConfig = Annotated[
    Gpt2Tokenizer | BertTokenizer | HubTokenizer | TrainedTokenizer | TrainedWordPieces | ExternalTokenizer,
    Field(discriminator="kind"),
]


EncoderTokenizer = BertTokenizer
"""What an encoder's texts are read with: it has [CLS] and [SEP], and stands ready."""
