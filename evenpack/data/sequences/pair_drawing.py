"""The sentences that form each pair: the procedure of BERT's own data, for many documents at once.

A document is processed sentence by sentence. Sentences are added to a chunk until it reaches the target length or the
document ends. A takes the first few sentences of the chunk, a random number of them. B is the second part of the chunk,
or, with probability one half and always where there is no second part, sentences of another document from a random one
on, up to the target; then the sentences after A begin the next chunk. The target is the length that fits, or, in one
pass over a document of ten, a shorter random length. While a pair is too long, the longer segment loses a token at its
front or its end, at random.

All documents advance together, a chunk at a time, in arithmetic on arrays. Each draw is a hash of (seed, pass,
document, chunk, purpose), so the result depends neither on the blocks of documents nor on the number of threads. Stored
masks, fixed for each duplicate as in BERT's own data, depend on (seed, pass, source, position of the pair's first token
in the token file) alone.

`sentencex` splits the text, and the token file of the documents, the usual one, stores where its sentences end: its
column `sentence_lengths` holds the tokens of every sentence, document after document.

Source: Devlin et al., "BERT" (2019), appendix A.2.

Shapes: D = documents of a split, B = documents of a block, K = pairs, T = their tokens, M = masked tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, Integer, UInt64

from evenpack.data.keys import derive_key
from evenpack.data.ranges import ranges
from evenpack.data.recipes import MaskingConfig, SentencePairsRecipe
from evenpack.data.sequences.masking import SPECIAL_TOKENS_OF_A_PAIR, mask_sequences, masking_keys
from evenpack.data.sequences.pairs import PairMasks
from evenpack.data.tokenizers.special_tokens import SENTENCE_LENGTHS, MaskingVocabulary
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import column_path
from evenpack.errors import DataError

LANGUAGES_WITH_RULES = frozenset(
    "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk".split()  # noqa: SIM905  # a list would take 33 lines
)
"""Languages for which `sentencex` 1.0 has rules; another gets the rules of a related language, or English ones."""
_SHORT, _TARGET, _SPLIT, _NEXT, _OTHER, _START, _FRONT_A, _FRONT_B = range(8)
"""Purposes of a draw."""
_SHORTEST_TARGET = 2


def split_sentences(text: str, language: str) -> list[str]:
    """Returns the sentences of a text, including white space; a line break between paragraphs also ends a sentence."""
    from sentencex import segment

    return list(segment(language, text))


@dataclass(frozen=True, kw_only=True, eq=False)
class SentenceIndex:
    """The positions of the sentences of a token file; S = sentences, D = documents.

    Positions count only the tokens of text. The file holds one end-of-text for each earlier document, so position p of
    document d is token p + d of the file. Memory: 8 bytes per sentence and 8 bytes per document.
    """

    token_file: TokenFile
    places: Int64[np.ndarray, " S_plus_1"]
    """Start of each sentence, and the number of tokens of text. Ascending: no sentence is empty."""
    first_sentences: Int64[np.ndarray, " D_plus_1"]
    """The first sentence of each document, and the number of sentences."""

    @classmethod
    def open(cls, token_file: TokenFile) -> "SentenceIndex":
        """Reads the column. Raises: DataError if it is missing or is not of this token file."""
        return cls.of(token_file, open_array(column_path(token_file.prefix, SENTENCE_LENGTHS)))

    @classmethod
    def of(cls, token_file: TokenFile, sentence_lengths: Integer[np.ndarray, " S"]) -> "SentenceIndex":
        """Builds the index. Raises: DataError if the sentences do not end where the documents end."""
        places = np.zeros(len(sentence_lengths) + 1, dtype=np.int64)
        np.cumsum(sentence_lengths, out=places[1:])
        document_places = token_file.document_offsets - np.arange(token_file.documents + 1)
        first_sentences = np.searchsorted(places, document_places)
        found = places[np.minimum(first_sentences, len(sentence_lengths))]
        if (found != document_places).any() or first_sentences[-1] != len(sentence_lengths):
            raise DataError(
                f"the sentences of {token_file.prefix} do not end where its documents end: they are of another "
                f"file; remove the folder {token_file.prefix.parent} and prepare again"
            )
        return cls(token_file=token_file, places=places, first_sentences=first_sentences)


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSpans:
    """K pairs as ranges of the token file, in the order of (document, chunk)."""

    first_starts: Int64[np.ndarray, " K"]
    first_lengths: Int64[np.ndarray, " K"]
    """Tokens of A, without the special ones."""
    second_starts: Int64[np.ndarray, " K"]
    second_lengths: Int64[np.ndarray, " K"]
    is_random_next: Bool[np.ndarray, " K"]
    tokens_cut: int
    """Tokens cut from A and B, where they were too long together."""
    tokens_borrowed: int
    """Tokens of each B that is from another document, before they were cut."""

    @property
    def lengths(self) -> Int64[np.ndarray, " K"]:
        """Tokens of each pair, special ones included."""
        return self.first_lengths + self.second_lengths + SPECIAL_TOKENS_OF_A_PAIR


class _Chunks(NamedTuple):
    """The chunks of the documents: sentences begin <= A < split <= rest < end."""

    documents: Int64[np.ndarray, " K"]
    """Index among the split's documents."""
    keys: UInt64[np.ndarray, " K"]
    targets: Int64[np.ndarray, " K"]
    begins: Int64[np.ndarray, " K"]
    splits: Int64[np.ndarray, " K"]
    ends: Int64[np.ndarray, " K"]
    is_random_next: Bool[np.ndarray, " K"]


class PairDrawing:
    """Draws the pairs of the documents of one split."""

    def __init__(self, index: SentenceIndex, documents: Int64[np.ndarray, " D"], recipe: SentencePairsRecipe) -> None:
        """Takes at least two `documents`, each of one sentence or more; B is drawn from among them."""
        self._places = index.places
        self._documents = documents
        self._first_sentences = index.first_sentences[documents]
        self._last_sentences = index.first_sentences[documents + 1]
        self._recipe = recipe
        self._most_tokens = recipe.max_sequence_length - SPECIAL_TOKENS_OF_A_PAIR

    def draw(self, first: int, last: int, pass_number: int) -> PairSpans:
        """Returns the pairs of documents `first` to `last` of the split in one pass."""
        return self._pairs(self._chunks(first, last, pass_number))

    def _chunks(self, first: int, last: int, pass_number: int) -> _Chunks:
        block = np.arange(first, last)
        document_keys = derive_key(self._recipe.seed, pass_number, self._documents[block].astype(np.uint64))
        targets = self._targets(document_keys)
        cursors, stops = self._first_sentences[block], self._last_sentences[block]
        steps: list[_Chunks] = []
        while len(block):
            keys = derive_key(document_keys, len(steps))
            reached = np.searchsorted(self._places, self._places[cursors] + targets)
            ends = np.minimum(reached, stops)
            others = ends - cursors - 1
            splits = cursors + 1 + _below(keys, _SPLIT, np.maximum(others, 1))
            is_random_next = (others == 0) | (_fractions(keys, _NEXT) < self._recipe.random_next_probability)
            steps.append(_Chunks(block, keys, targets, cursors, splits, ends, is_random_next))
            cursors = np.where(is_random_next, splits, ends)
            going = cursors < stops
            if not going.all():
                block, document_keys, targets = block[going], document_keys[going], targets[going]
                cursors, stops = cursors[going], stops[going]
        columns = [np.concatenate(column) for column in zip(*steps, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        return _Chunks(*(column[order] for column in columns))

    def _targets(self, document_keys: UInt64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        """Returns the target length of a chunk, special tokens not counted."""
        is_short = _fractions(document_keys, _SHORT) < self._recipe.short_target_probability
        choices = np.full(len(document_keys), self._most_tokens - _SHORTEST_TARGET + 1)
        return np.where(is_short, _SHORTEST_TARGET + _below(document_keys, _TARGET, choices), self._most_tokens)

    def _pairs(self, chunks: _Chunks) -> PairSpans:
        first_lengths = self._places[chunks.splits] - self._places[chunks.begins]
        others, other_begins, other_ends = self._random_nexts(chunks, first_lengths)
        random = chunks.is_random_next
        second_begins = np.where(random, other_begins, chunks.splits)
        second_lengths = self._places[np.where(random, other_ends, chunks.ends)] - self._places[second_begins]
        first_cut, second_cut = cut_longer(first_lengths, second_lengths, self._most_tokens)
        second_documents = np.where(random, others, chunks.documents)
        return PairSpans(
            first_starts=self._in_file(chunks.begins, chunks.documents) + _fronts(first_cut, chunks.keys, _FRONT_A),
            first_lengths=first_lengths - first_cut,
            second_starts=self._in_file(second_begins, second_documents) + _fronts(second_cut, chunks.keys, _FRONT_B),
            second_lengths=second_lengths - second_cut,
            is_random_next=random,
            tokens_cut=int(first_cut.sum() + second_cut.sum()),
            tokens_borrowed=int(second_lengths[random].sum()),
        )

    def _random_nexts(
        self, chunks: _Chunks, first_lengths: Int64[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns another document of the split for each chunk, and the range of its sentences that could be B."""
        others = _below(chunks.keys, _OTHER, np.full(len(first_lengths), len(self._documents) - 1))
        others += others >= chunks.documents
        firsts, lasts = self._first_sentences[others], self._last_sentences[others]
        begins = firsts + _below(chunks.keys, _START, lasts - firsts)
        wanted = np.maximum(chunks.targets - first_lengths, 1)
        ends = np.minimum(np.searchsorted(self._places, self._places[begins] + wanted), lasts)
        return others, begins, ends

    def _in_file(
        self, sentences: Int64[np.ndarray, " K"], documents: Int64[np.ndarray, " K"]
    ) -> Int64[np.ndarray, " K"]:
        return self._places[sentences] + self._documents[documents]


def cut_longer(
    first: Int64[np.ndarray, " K"], second: Int64[np.ndarray, " K"], most_tokens: int
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """Returns how many tokens A and B lose if always the longer loses one, B where they are equal, until they fit."""
    excess = np.maximum(first + second - most_tokens, 0)
    first_alone = np.minimum(excess, np.maximum(first - second, 0))
    second_alone = np.minimum(excess, np.maximum(second - first, 0))
    shared = excess - first_alone - second_alone
    return first_alone + shared // 2, second_alone + (shared + 1) // 2


def _fronts(removed: Int64[np.ndarray, " K"], keys: UInt64[np.ndarray, " K"], purpose: int) -> Int64[np.ndarray, " K"]:
    """Returns how many of the removed tokens are taken from the front: one fair coin each."""
    words = -(-removed // 64)
    pairs = np.repeat(np.arange(len(removed)), words)
    numbers = ranges(np.zeros_like(words), words)
    coins = np.minimum(removed[pairs] - 64 * numbers, 64).astype(np.uint64)
    tossed = derive_key(keys[pairs], purpose, numbers.astype(np.uint64)) >> (np.uint64(64) - coins)
    return np.bincount(pairs, weights=np.bitwise_count(tossed), minlength=len(removed)).astype(np.int64)


def _fractions(keys: UInt64[np.ndarray, " N"], purpose: int) -> Float64[np.ndarray, " N"]:
    """Returns uniform numbers in [0, 1)."""
    return (derive_key(keys, purpose) >> np.uint64(11)) * 2.0**-53


def _below(keys: UInt64[np.ndarray, " N"], purpose: int, limits: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Returns uniform integers in [0, limit), with an error of 2**-32 x limit."""
    drawn = (derive_key(keys, purpose) >> np.uint64(32)) * limits.astype(np.uint64) >> np.uint64(32)
    return drawn.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskDrawing:
    """Draws the masks of one source's pairs."""

    config: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int
    source_key: int
    """A key that identifies the source."""

    def draw(
        self,
        tokens: Integer[np.ndarray, " T"],
        lengths: Int64[np.ndarray, " K"],
        first_starts: Int64[np.ndarray, " K"],
        pass_number: int,
    ) -> tuple[Integer[np.ndarray, " T"], PairMasks]:
        """Masks pairs whose tokens are concatenated; `first_starts` are the file positions of their A.

        Returns: the tokens as the model sees them, and the masks.
        """
        offsets = np.append(0, np.cumsum(lengths))
        source_keys = np.full(len(lengths), self.source_key, dtype=np.uint64)
        keys = masking_keys(self.seed, np.full(len(lengths), pass_number), source_keys, first_starts)
        masked = mask_sequences(tokens, offsets, keys, self.config, self.vocabulary)
        places = masked.positions - np.repeat(offsets[:-1], masked.counts)
        return masked.tokens, PairMasks(counts=masked.counts, places=places, labels=masked.labels)
