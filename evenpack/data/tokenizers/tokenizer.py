"""Text -> token ids, each document ended by the end-of-text token; with BERT's tokenizers [CLS] document [SEP].

Whatever its origin, a tokenizer becomes one `tokenizers.Tokenizer`, whose encoder runs in Rust on all cores. Special
tokens are never recognised in text: a document that holds the characters `<|endoftext|>` stays one document, and
`<pad>` in a text is what its characters are.

What begins a document is a choice of the run file. The saved tokenizer does the same to a prompt, whatever template its
folder had: `AutoTokenizer` makes of a text what training saw of it, without the end-of-text. BERT's keeps its [SEP].
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
import xxhash
from jaxtyping import Int32, Int64
from tokenizers import pre_tokenizers, processors

from evenpack.data.tokenizers.backend import BACKEND_FILE, guarded_tokens, prepare_backend, read_backend, text_encoder
from evenpack.data.tokenizers.comparison import ends_pair, ids_around, template_of
from evenpack.data.tokenizers.special_tokens import SENTENCE_LENGTHS, MaskingVocabulary, PairTokens
from evenpack.data.tokenizers.word_pieces import CONTINUATION, ROLES
from evenpack.errors import DataError
from evenpack.files import read_json, write_json, write_text

BOUNDS = ("bos_token", "eos_token")
"""Transformers' names of the tokens around a text."""
CONFIG_FILE = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class EncodedDocuments:
    """Some documents as tokens, concatenated."""

    tokens: Int32[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    """Tokens of each document, including its end-of-text."""
    unknown_tokens: int
    """Number of tokens that represent text which the vocabulary cannot express."""
    beginning_tokens: int
    """Number of tokens that begin documents, [CLS] or `bos_token`."""
    columns: Mapping[str, Int64[np.ndarray, " _"]]
    """Columns to store with the tokens: `SENTENCE_LENGTHS` where documents came as sentences."""


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """A text as tokens with their positions in it."""

    tokens: Int64[np.ndarray, " tokens"]
    offsets: Int64[np.ndarray, " tokens 2"]
    """The first character of each token, and the one after its last."""


class TextError(DataError):
    """A text cannot be encoded, or becomes a token that delimits documents; `text` is the text."""

    def __init__(self, message: str, text: str = "") -> None:  # a pickled exception is made of its message alone
        super().__init__(message)
        self.text = text


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids that begin and end a document."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        end_of_text: str,
        unknown: str | None,
        roles: Mapping[str, str] = MappingProxyType({}),
        bounds: Mapping[str, str] | None = None,
        beginning: str | None = None,
        padding_side: str = "right",
    ) -> None:
        """Takes a backend and the names of its special tokens; the backend's template becomes that of the documents.

        `unknown` is the token for inexpressible text; None if there is none (byte-level vocabularies). `roles` are
        BERT's other special tokens, if there are any, by transformers' names (`cls_token`, ...). `bounds` are the
        `bos_token` and `eos_token` that a saved tokenizer has; None: both are `end_of_text`. `beginning` is the token
        before each document, None: none; where `end_of_text` is the [SEP] among the roles, it is always their [CLS].
        `padding_side` is where a saved tokenizer pads a batch of prompts: on the left, if a model is to go on.

        Raises: DataError if the vocabulary is empty or lacks one of these tokens.
        """
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        named = [token for token in (end_of_text, unknown, beginning, *roles.values()) if token is not None]
        prepare_backend(backend, [*named, *(bounds or {}).values()])
        for token in named:
            if token not in vocabulary:
                raise DataError(f"the tokenizer's vocabulary of {len(vocabulary)} entries lacks its token '{token}'")
        self._backend = backend
        self._encoder = text_encoder(backend)
        self._end_of_text = end_of_text
        self._unknown = unknown
        self._padding_side = padding_side
        self._roles = dict(roles)
        self._bounds = dict.fromkeys(BOUNDS, end_of_text) if bounds is None else dict(bounds)
        self._role_ids = {role: vocabulary[token] for role, token in roles.items()}
        self._unknown_id = None if unknown is None else vocabulary[unknown]
        self.end_of_text_id = vocabulary[end_of_text]
        # Around a text as transformers' BERT has them: [CLS] text [SEP].
        self._is_classified = "cls_token" in roles and end_of_text == roles.get("sep_token")
        self.beginning = roles["cls_token"] if self._is_classified else beginning
        """The token before each document that has tokens of text; None: none."""
        self._beginning: tuple[int, ...] = () if self.beginning is None else (vocabulary[self.beginning],)
        self._set_template()
        self.vocabulary_size = max(vocabulary.values()) + 1
        """One more than the largest id: ids may have gaps."""
        self._delimiting = np.zeros(self.vocabulary_size, dtype=np.bool_)
        guarded = {index for token, index in guarded_tokens(backend).items() if token != unknown}
        self._delimiting[[*guarded, self.end_of_text_id, *self._beginning]] = True

    def _set_template(self) -> None:
        """Lets the backend put around a prompt what training sees around it, if its own template does otherwise."""
        end = (self.end_of_text_id,) if self._is_classified else ()
        pairs_fit = not self._is_classified or (
            self._backend.num_special_tokens_to_add(is_pair=True) == 3 and ends_pair(self._backend, self.end_of_text_id)
        )
        if pairs_fit and ids_around(self._backend) == ([*self._beginning], [*end]):
            return
        if self._is_classified:  # and pairs as those of `sentence_pairs`: [CLS] text [SEP] text [SEP]
            single, pair = "beginning $A end", "beginning $A end $B:1 end:1"
        elif self._beginning:
            single, pair = "beginning $A", "beginning $A beginning:1 $B:1"
        else:
            single, pair = "$A", "$A $B:1"
        used = (("beginning", self.beginning, self._beginning), ("end", self._end_of_text, end))
        special = [{"id": name, "ids": [*ids], "tokens": [token]} for name, token, ids in used if ids]
        self._backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)

    def encode_batch(self, texts: Sequence[str]) -> EncodedDocuments:
        """Encodes documents on all cores, without Python's lock; each gets the end-of-text id at its end.

        A document that has tokens begins with `beginning`.

        Raises: DataError if a text becomes a token that delimits documents.
        """
        encodings = self._encode(texts)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
        beginnings = len(self._beginning) * (lengths > 0)
        lengths += 1 + beginnings
        # Only one document's list of ids exists at a time: 25 ns per token, against 41 with the lists of a whole batch.
        beginning, end = self._beginning, (self.end_of_text_id,)
        ids = chain.from_iterable((beginning if len(encoding) else (), encoding.ids, end) for encoding in encodings)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        encoded = zip(texts, encodings, strict=True)
        return self._checked(tokens, lengths, encoded, beginning_tokens=int(beginnings.sum()), columns={})

    def encode_sentences(self, documents: Sequence[Sequence[str]]) -> EncodedDocuments:
        """Encodes documents given as sentences, like `encode_batch`; sentences without a token are left out.

        Raises: DataError if a text becomes a token that delimits documents.
        """
        sentences = list(chain.from_iterable(documents))
        encodings = self._encode(sentences)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
        ids = (encoding.ids for encoding in encodings)
        text_tokens = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        counts = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        ends = np.append(0, np.cumsum(lengths))[np.cumsum(counts)]
        return self._checked(
            np.insert(text_tokens, ends, self.end_of_text_id),
            np.diff(ends, prepend=0) + 1,
            zip(sentences, encodings, strict=True),
            beginning_tokens=0,
            columns={SENTENCE_LENGTHS: lengths[lengths > 0]},
        )

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes each text by itself, without special tokens, on all cores."""
        encodings = self._encoder.encode_batch(list(texts), add_special_tokens=False)
        return [
            EncodedText(
                tokens=np.array(encoding.ids, dtype=np.int64),
                offsets=np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            )
            for encoding in encodings
        ]

    def unknown_share(self, tokens: Int64[np.ndarray, " tokens"]) -> float:
        """Returns the fraction of these tokens that represents text which the vocabulary cannot express."""
        return 0.0 if self._unknown_id is None else float(np.mean(tokens == self._unknown_id))

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        """Returns the encodings of texts without special tokens. Raises: TextError that names one without any."""
        try:
            return list(self._encoder.encode_batch_fast(texts, add_special_tokens=False))
        except Exception as error:  # `tokenizers` raises bare Exception
            if len(texts) > 1:
                for text in texts:
                    self._encode([text])
            raise TextError(
                f"the tokenizer cannot encode the text that begins {texts[0][:60]!r}: {error}", texts[0]
            ) from error

    def _checked(
        self,
        tokens: Int32[np.ndarray, " tokens"],
        lengths: Int64[np.ndarray, " documents"],
        encoded: Iterator[tuple[str, Any]],
        *,
        beginning_tokens: int,
        columns: Mapping[str, Int64[np.ndarray, " _"]],
    ) -> EncodedDocuments:
        """Checks `encoded`, each text with its encoding, to name the one with a special token."""
        if np.count_nonzero(self._delimiting[tokens]) != len(lengths) + beginning_tokens:
            pairs = ((text, index) for text, encoding in encoded for index in encoding.ids)
            text, index = next((text, index) for text, index in pairs if self._delimiting[index])
            raise TextError(
                f"the tokenizer makes its special token '{self._backend.id_to_token(index)}' of the text that begins "
                f"{text[:60]!r}, where documents would end or begin that do not: remove it from the text",
                text,
            )
        unknown = 0 if self._unknown_id is None else int(np.count_nonzero(tokens == self._unknown_id))
        return EncodedDocuments(
            tokens=tokens,
            lengths=lengths,
            unknown_tokens=unknown,
            beginning_tokens=beginning_tokens,
            columns=columns,
        )

    @property
    def beginning_id(self) -> int | None:
        """The id of `beginning`."""
        return self._beginning[0] if self._beginning else None

    @property
    def lower_cases(self) -> bool:
        """Whether text is lower-cased."""
        normalizer = self._backend.normalizer
        normalized = "A" if normalizer is None else normalizer.normalize_str("A")  # others prepend, or replace
        return "a" in normalized and "A" not in normalized

    def copied_backend(self) -> tokenizers.Tokenizer:
        """Returns a copy of the backend."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    @property
    def template(self) -> str:
        """What a saved tokenizer makes of a prompt, for people."""
        return template_of(self._backend)

    @property
    def document_template(self) -> str:
        """What documents are, for people."""
        return f"{self.beginning or ''} TEXT {self._end_of_text}".strip()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Each token's id."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def pair_tokens(self) -> PairTokens:
        """Special tokens of pairs. Raises: DataError if the vocabulary was not made for pairs and masks."""
        missing = [name for role, name in ROLES.items() if role != "pad_token" and role not in self._roles]
        if missing:
            raise DataError(
                f"the tokenizer's vocabulary of {self.vocabulary_size} entries has no {', '.join(missing)}, which "
                "sentence pairs and masks are made with: take a BERT vocabulary (data.tokenizer.kind=bert or "
                "train_word_pieces)"
            )
        ids = self._role_ids
        return PairTokens(classification_id=ids["cls_token"], separator_id=ids["sep_token"], mask_id=ids["mask_token"])

    @property
    def padding_id(self) -> int:
        """[PAD], which transformers' BERT requires. Raises: DataError if the vocabulary has none."""
        if "pad_token" not in self._role_ids:
            raise DataError(
                f"the tokenizer's vocabulary of {self.vocabulary_size} entries has no pad_token, which BERT's "
                "configuration in transformers names: give the tokenizer one and prepare again"
            )
        return self._role_ids["pad_token"]

    def masking_vocabulary(self) -> MaskingVocabulary:
        """Returns the vocabulary from which masks are drawn. Raises: DataError as `pair_tokens`."""
        vocabulary = self.vocabulary
        special = np.zeros(self.vocabulary_size, dtype=np.bool_)
        special[[*self._role_ids.values(), self.end_of_text_id, *self._beginning]] = True
        continues = np.zeros(self.vocabulary_size, dtype=np.bool_)
        continues[[index for token, index in vocabulary.items() if token.startswith(CONTINUATION)]] = True
        return MaskingVocabulary(mask_id=self.pair_tokens.mask_id, special=special, continues=continues)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    @property
    def checksum(self) -> str:
        """XXH3 (128 bits, hexadecimal) of everything on which the encoding of text depends."""
        # Tokens of earlier versions may be shared: these kept a folder's template, whatever their documents began with,
        # and made special tokens of text where the model does, unless BERT's splitter divides their names.
        begins = "" if self.beginning is None or self._is_classified else f"{self.beginning}\n"
        is_split = isinstance(self._backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        guarded = "" if self._encoder is self._backend or is_split else "guarded\n"
        return xxhash.xxh3_128_hexdigest(f"{guarded}{begins}{self._end_of_text}\n{self._backend.to_str()}".encode())

    def save(self, directory: Path) -> None:
        """Writes the form that `transformers.AutoTokenizer.from_pretrained(directory)` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        special: dict[str, Any] = {**self._bounds, **self._roles}
        if self.beginning is not None and not self._is_classified:
            special |= {"bos_token": self.beginning, "add_bos_token": True}
        if self._unknown is not None:
            special["unk_token"] = self._unknown
        if self._padding_side != "right":
            special["padding_side"] = self._padding_side
        write_text(directory / BACKEND_FILE, self._backend.to_str(pretty=True))
        write_json(
            directory / CONFIG_FILE,
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special},
        )

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Reads the files of `save`. Raises: DataError if they are missing or incomplete."""
        try:
            config = read_json(directory / CONFIG_FILE)
        except (OSError, ValueError) as error:
            raise DataError(f"{directory} holds no readable tokenizer: {error}") from error
        roles = {role: config[role] for role in ROLES if role in config}
        bounds = {role: config[role] for role in BOUNDS if role in config}
        end_of_text = config.get("eos_token", roles.get("sep_token"))
        if end_of_text is None:
            raise DataError(f"{directory} holds no readable tokenizer: {CONFIG_FILE} names no eos_token or sep_token")
        return cls(
            read_backend(directory / BACKEND_FILE),
            end_of_text=end_of_text,
            unknown=config.get("unk_token"),
            roles=roles,
            bounds=bounds,
            beginning=bounds.get("bos_token") if config.get("add_bos_token") else None,
            padding_side=config.get("padding_side", "right"),
        )
