"""Documents as tokens in a pair of files, PREFIX.bin and PREFIX.idx, that Megatron-LM and DeepSpeed share.

index.py          the layout of PREFIX.idx         bytes <-> lengths, pointers, documents
TokenFile         opens a pair, memory-mapped      documents -> spans -> tokens
TokenFileWriter   writes one, resumable            batches of tokens -> PREFIX.{bin,idx}, COLUMN.npy
journal.py        the progress of a writer         PREFIX.journal.json
"""

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.tokens.array_file import release_mapped_pages
from evenpack.data.tokens.index import bin_path, read_index
from evenpack.data.tokens.journal import DOCUMENT_HASHES, Journal, column_path, hashes_path, read_journal
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError

__all__ = [
    "DOCUMENT_HASHES",
    "Journal",
    "TokenFile",
    "TokenFileWriter",
    "column_path",
    "hash_documents",
    "hashes_path",
    "read_journal",
]

_CHUNK_TOKENS = 1 << 22
_CHUNK_DOCUMENTS = 1 << 20


class TokenFile:
    """A finished pair, read-only.

    Its pickle is its path: a worker maps the same pages again. Its private memory does not grow with the file; mapped
    pages belong to the page cache and the system reclaims them when it needs them.
    """

    def __init__(self, prefix: Path, *, verify: bool = True) -> None:
        """Opens the pair; `verify` reads the whole index (20 bytes per document), false checks only file sizes.

        Raises: DataError if the pair is missing, cut short, of another kind or inconsistent.
        """
        self.prefix = prefix.absolute()
        self._index = read_index(self.prefix)
        if verify:
            self._index.verify()
        self.documents = self._index.documents
        self.tokens = self._index.tokens
        self.dtype = self._index.dtype
        # An empty file cannot be mapped. A plain array, since each slice of np.memmap costs a microsecond more.
        self._tokens = (
            np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r").view(np.ndarray)
            if self.tokens
            else np.empty(0, dtype=self.dtype)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.prefix,)

    @cached_property
    def document_offsets(self) -> Int64[np.ndarray, " documents_plus_1"]:
        """Returns the first token of each document, and the number of tokens: 8 bytes of memory a document.

        `spans` looks up single documents without it.
        """
        offsets = np.empty(self.documents + 1, dtype=np.int64)
        for start in range(0, len(offsets), _CHUNK_DOCUMENTS):
            chunk = np.arange(start, min(start + _CHUNK_DOCUMENTS, len(offsets)))
            offsets[chunk] = self._index.token_offsets(chunk)
        return offsets

    def document_lengths(self, start: int = 0, stop: int | None = None) -> Int64[np.ndarray, " asked"]:
        """Returns the tokens of the documents `start` to `stop`, by default of all.

        Takes time and memory for these alone.
        """
        first, last, _ = slice(start, stop).indices(self.documents)
        lengths = np.empty(max(0, last - first), dtype=np.int64)
        for begin in range(first, last, _CHUNK_DOCUMENTS):
            end = min(begin + _CHUNK_DOCUMENTS, last)
            _, lengths[begin - first : end - first] = self.spans(np.arange(begin, end))
        return lengths

    def spans(self, documents: Integer[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns first token and length of each of `documents`, looked up in the mapped index."""
        starts = self._index.token_offsets(documents)
        return starts, self._index.token_offsets(documents + 1) - starts

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Returns the tokens `start` to `stop` as a read-only view of the file."""
        return self._tokens[start:stop]

    def gather(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        """Copies K slices of the file, concatenated, in the file's own type.

        Raises: IndexError if a slice leaves the file.
        """
        if len(token_offsets) == 0:
            return np.empty(0, dtype=self.dtype)
        stops = token_offsets + lengths
        if token_offsets.min() < 0 or lengths.min() < 0 or stops.max() > self.tokens:
            raise IndexError(
                f"slices from {token_offsets.min()} to {stops.max()} (shortest {lengths.min()}) "
                f"leave {self.prefix} of {self.tokens} tokens"
            )
        # A slice costs 0.3 us, a token of an index array 2 to 3 ns: slices are faster from some 130 tokens on, nearly
        # three times at 1024, and are fast enough (80 M tokens/s) at 32 (benchmarks/token_file.py).
        tokens = self._tokens
        slices = [tokens[start:stop] for start, stop in zip(token_offsets.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(slices)

    def release_pages(self) -> None:
        """Removes the pages that were read from this process's memory; they stay in the page cache.

        For a reader of a whole file under a memory limit.
        """
        for array in (self._tokens, self._index.pointers):
            release_mapped_pages(array)

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Reads all tokens, in chunks. Raises: DataError naming the first id outside [0, vocabulary_size)."""
        for start in range(0, self.tokens, _CHUNK_TOKENS):
            tokens = self.read(start, start + _CHUNK_TOKENS)
            if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary_size:
                position = start + int(np.argmax((tokens < 0) | (tokens >= vocabulary_size)))
                document = int(np.searchsorted(self.document_offsets, position, side="right")) - 1
                raise DataError(
                    f"token file {self.prefix}: document {document} holds token id {self._tokens[position]}, but the "
                    f"vocabulary has {vocabulary_size} entries; give the vocabulary the file was made with"
                )

    def ends_in(self, token_id: int) -> Bool[np.ndarray, " documents"]:
        """Returns whether each document's last token is `token_id`; False for an empty document."""
        ends = np.zeros(self.documents, dtype=np.bool_)
        for start in range(0, self.documents, _CHUNK_DOCUMENTS):
            offsets, lengths = self.spans(np.arange(start, min(start + _CHUNK_DOCUMENTS, self.documents)))
            (filled,) = np.nonzero(lengths)
            ends[start + filled] = self._tokens[(offsets + lengths - 1)[filled]] == token_id
        return ends


def hash_documents(token_file: TokenFile) -> UInt64[np.ndarray, " documents"]:
    """Returns XXH3 (64 bits) of each document's tokens as little-endian uint32, whatever type the file has.

    It is for files without their text; memory is bounded by the longest document.
    """
    offsets = token_file.document_offsets
    hashes = np.empty(token_file.documents, dtype=np.uint64)
    first = 0
    while first < token_file.documents:
        last = int(np.searchsorted(offsets, offsets[first] + _CHUNK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        tokens = token_file.read(int(offsets[first]), int(offsets[last])).astype("<u4")
        bounds = (4 * (offsets[first : last + 1] - offsets[first])).tolist()
        content = tokens.view(np.uint8).data
        for document, (start, stop) in enumerate(pairwise(bounds), first):
            hashes[document] = xxhash.xxh3_64_intdigest(content[start:stop])
        first = last
    return hashes


def _reopen(prefix: Path) -> TokenFile:
    return TokenFile(prefix, verify=False)
