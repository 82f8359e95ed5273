"""Documents as tokens in a pair of files, PREFIX.bin and PREFIX.idx, that Megatron-LM and DeepSpeed share.

`TokenFile` opens a pair, memory-mapped: documents -> spans -> tokens. `writer.py` writes one. PREFIX.bin holds the raw
tokens; PREFIX.idx has the layout of Megatron-LM's IndexedDataset and DeepSpeed's MMapIndexedDataset,
little-endian:

    9 bytes                     magic `MMIDIDX\\0\\0`
    uint64                      version, 1
    uint8                       code of the token type
    uint64, uint64              S = sequences, D = documents + 1
    int32[S]                    tokens of each sequence
    int64[S]                    first byte of each sequence in the `.bin` file
    int64[D]                    first sequence of each document, and S

A document is one sequence, or several where a corpus was split into sentences.
"""

import os
import struct
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Bool, Int32, Int64, Integer, Shaped, UInt64

from evenpack.data.mapped_pages import exceeds_page_cache, read_alone, release_mapped_pages
from evenpack.data.ranges import cut
from evenpack.errors import DataError
from evenpack.files import explained

_MAGIC = b"MMIDIDX\x00\x00"
_OLDER_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Up to 5 all agree. Then DeepSpeed's reader continues with unsigned types, and Megatron-LM with float64 and
# float32, which hold no tokens, and uint16 (as Megatron-DeepSpeed does). No code stands for uint16 in both, so ours is
# Megatron's, 8; the size of the `.bin` file distinguishes it from DeepSpeed's uint64. 6 is DeepSpeed's uint16, which
# early versions of evenpack wrote; the size distinguishes it from a file of float64.
_TYPES_OF_CODE = {
    1: (np.uint8,),
    2: (np.int8,),
    3: (np.int16,),
    4: (np.int32,),
    5: (np.int64,),
    6: (np.uint16,),
    7: (np.uint32,),
    8: (np.uint16, np.uint64),
}
_CODE_OF_TYPE = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}
_CHUNK_TOKENS = 1 << 22
_CHUNK_DOCUMENTS = 1 << 20
_FEW_DOCUMENTS = 1 << 10
"""Documents from which on neighbours are looked up as a slice, five times as fast as by their ids."""


def bin_path(prefix: Path) -> Path:
    """Returns the path of the file of raw tokens; a prefix may contain dots."""
    return prefix.with_name(f"{prefix.name}.bin")


def index_path(prefix: Path) -> Path:
    """Returns the path of the file described above."""
    return prefix.with_name(f"{prefix.name}.idx")


def token_type(vocabulary_size: int) -> np.dtype:
    """Returns the narrowest type that Megatron-LM writes and that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size < 1 << 16 else np.int32)


def _open_index(
    prefix: Path,
) -> tuple[
    int, Int32[np.ndarray, " sequences"], Int64[np.ndarray, " sequences"], Int64[np.ndarray, " documents_plus_1"]
]:
    """Returns the code of the token type, the mapped arrays of tokens and first bytes, and of documents' sequences.

    It takes time that does not grow with the file.

    Raises: DataError if a file is missing, cut short or of another kind.
    """
    path = index_path(prefix)
    for file in (path, bin_path(prefix)):
        with explained(file, DataError):
            if not file.is_file():
                raise DataError(
                    f"token file {prefix}: {file} does not exist; a token file is a pair PREFIX.bin and PREFIX.idx, "
                    "and its path is given without either ending"
                )
    with explained(path, DataError):
        code, sequences = _read_header(path)
        content = np.memmap(path, mode="r").view(np.ndarray)[_HEADER.size :]
    lengths, pointers, document_indices = np.split(content, [4 * sequences, 12 * sequences])
    firsts = document_indices.view("<i8")
    if firsts[0] != 0 or firsts[-1] != sequences:
        raise _broken(path, f"its documents cover sequences {firsts[0]} to {firsts[-1]}, expected 0 to {sequences}")
    return code, lengths.view("<i4"), pointers.view("<i8"), firsts


def write_index(path: Path, dtype: np.dtype, lengths: Int32[np.ndarray, " documents"]) -> None:
    """Writes the index of documents that are one sequence each, in chunks, and flushes it to disk.

    `lengths` may be memory-mapped. uint16 gets Megatron-LM's code 8, int32 the code 4 that all share.
    """
    count = len(lengths)
    chunks = [slice(start, min(start + _CHUNK_DOCUMENTS, count)) for start in range(0, count, _CHUNK_DOCUMENTS)]
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF_TYPE[dtype], count, count + 1))
        for chunk in chunks:
            file.write(lengths[chunk].astype("<i4").data)
        start = 0
        for chunk in chunks:
            ends = start + np.cumsum(lengths[chunk], dtype="<i8") * dtype.itemsize
            file.write(np.append(start, ends[:-1]).astype("<i8").data)
            start = int(ends[-1])
        file.write(np.zeros(1, dtype="<i8").data)
        for chunk in chunks:
            file.write(np.arange(chunk.start + 1, chunk.stop + 1, dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())


def _read_header(path: Path) -> tuple[int, int]:
    """Returns the code of the token type and the number of sequences, of a file of consistent size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if header.startswith(_OLDER_MAGIC):
        raise DataError(f"{path} is of the older 'lazy' or 'cached' kind; write it again as an 'mmap' dataset")
    if not header.startswith(_MAGIC):
        raise DataError(f"{path} is not an index of a token file: it begins with {header[:9]!r}, expected {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise _broken(path, f"it has {size} bytes, its header alone {_HEADER.size}")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != _VERSION or code not in _TYPES_OF_CODE:
        raise DataError(
            f"{path} has version {version} and token type code {code}, expected version {_VERSION} and a code of "
            f"{min(_TYPES_OF_CODE)} to {max(_TYPES_OF_CODE)}; write it again with Megatron-LM or DeepSpeed"
        )
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size == expected + sequences and sequences:
        raise DataError(f"{path} holds a mode for each sequence: multimodal token files cannot be used")
    if size != expected or boundaries == 0:
        raise _broken(
            path, f"it has {size} bytes, expected {expected} for {sequences} sequences and {boundaries} boundaries"
        )
    return code, sequences


def _broken(path: Path, finding: str) -> DataError:
    return DataError(
        f"{path} is truncated or not the other half of its pair: {finding}; copy or write both files again"
    )


class TokenFile:
    """A finished pair, read-only.

    Its pickle is its path: a worker maps the same pages again. Its private memory does not grow with the file; mapped
    pages belong to the page cache and the system reclaims them when it needs them.
    """

    labelled = False
    """Whether labels of one's own leave some tokens out of the loss; never in a file."""

    reads_alone = False
    """Whether `read_alone` was called."""

    def __init__(self, prefix: Path, *, verify: bool = True) -> None:
        """Opens the pair; `verify` reads the whole index (20 bytes per document), false checks only file sizes.

        Raises: DataError if the pair is missing, cut short, of another kind or inconsistent.
        """
        self.prefix = prefix.absolute()
        # Mapped and, 34 bytes into the file, not aligned: looked up by `array[ids]` alone, since `np.take` and
        # `np.searchsorted` would first copy them as a whole.
        code, self._sequence_lengths, self._pointers, self._document_indices = _open_index(self.prefix)
        self._bin_bytes = bin_path(self.prefix).stat().st_size
        self.dtype = self._type_of(code)
        if verify:
            self._verify_index()
        self.documents = len(self._document_indices) - 1
        self.tokens = self._bin_bytes // self.dtype.itemsize
        # An empty file cannot be mapped. A plain array, since each slice of np.memmap costs a microsecond more.
        self._tokens = np.empty(0, dtype=self.dtype)
        if self.tokens:
            with explained(bin_path(self.prefix), DataError):
                self._tokens = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TokenFile, verify=False), (self.prefix,), self.reads_alone

    def __setstate__(self, reads_alone: bool) -> None:
        if reads_alone:
            self.read_alone()

    def _type_of(self, code: int) -> np.dtype:
        """Returns the type of `code` for which the index covers the `.bin` file to its last byte."""
        choices = [np.dtype(kind) for kind in _TYPES_OF_CODE[code]]
        lengths, found = self._sequence_lengths, self._bin_bytes
        if len(choices) > 1:
            tokens = int(lengths.sum(dtype=np.int64))
            choices = [kind for kind in choices if tokens * kind.itemsize == found] or choices[:1]
        expected = int(self._pointers[-1]) + int(lengths[-1]) * choices[0].itemsize if len(lengths) else 0
        if expected != found:
            raise _broken(
                bin_path(self.prefix),
                f"it has {found} bytes, but {index_path(self.prefix)} describes {expected} bytes of {choices[0]} "
                "tokens",
            )
        return choices[0]

    def _verify_index(self) -> None:
        """Reads the whole index: sequences must follow one another without gap, documents must not go back.

        Raises: DataError naming the first sequence or document that does not fit.
        """
        path, pointers, count = index_path(self.prefix), self._pointers, len(self._pointers)
        for start in range(0, count, _CHUNK_DOCUMENTS):
            stop = min(start + _CHUNK_DOCUMENTS, count)
            lengths = self._sequence_lengths[start:stop].astype(np.int64)
            ends = pointers[start:stop] + lengths * self.dtype.itemsize
            following = np.full(stop - start, self._bin_bytes)
            following[: min(stop, count - 1) - start] = pointers[start + 1 : stop + 1]
            wrong = np.flatnonzero((lengths < 0) | (ends != following))
            if len(wrong):
                first = wrong[0]
                raise _broken(
                    path,
                    f"sequence {start + first} has {lengths[first]} tokens and ends at byte {ends[first]}, "
                    f"but the next one begins at byte {following[first]}",
                )
        if count and pointers[0] != 0:
            raise _broken(path, f"the first sequence begins at byte {pointers[0]}, expected 0")
        for start in range(0, len(self._document_indices) - 1, _CHUNK_DOCUMENTS):
            backward = np.flatnonzero(np.diff(self._document_indices[start : start + _CHUNK_DOCUMENTS + 1]) < 0)
            if len(backward):
                raise _broken(path, f"document {start + backward[0]} ends before its first sequence")

    def read_alone(self) -> None:
        """Lets single pages be read from now on; a pickle keeps it."""
        self.reads_alone = True
        read_alone(self.mapped_arrays())

    @cached_property
    def document_offsets(self) -> Int64[np.ndarray, " documents_plus_1"]:
        """Returns the first token of each document, and the number of tokens: 8 bytes of memory a document.

        `spans` looks up single documents without it.
        """
        offsets = np.empty(self.documents + 1, dtype=np.int64)
        for start in range(0, len(offsets), _CHUNK_DOCUMENTS):
            chunk = np.arange(start, min(start + _CHUNK_DOCUMENTS, len(offsets)))
            offsets[chunk] = self.document_starts(chunk)
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

    def document_starts(self, boundaries: Integer[np.ndarray, " K"] | slice) -> Int64[np.ndarray, " K"]:
        """Returns the first token of each document; the number of documents maps to the end of the file."""
        sequences = self._document_indices[boundaries]
        count = len(self._pointers)
        if count == 0:
            return np.zeros(len(sequences), dtype=np.int64)
        starts = self._pointers[np.minimum(sequences, count - 1)]
        return np.where(sequences < count, starts, self._bin_bytes) // self.dtype.itemsize

    def spans(self, documents: Integer[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns first token and length of each of `documents`, looked up in the mapped index."""
        if len(documents) >= _FEW_DOCUMENTS and self._are_neighbours(documents):
            bounds = self.document_starts(slice(int(documents[0]), int(documents[-1]) + 2))
            return bounds[:-1], np.diff(bounds)
        starts = self.document_starts(documents)
        return starts, self.document_starts(documents + 1) - starts

    def _are_neighbours(self, documents: Integer[np.ndarray, " K"]) -> bool:
        inside = 0 <= documents[0] <= documents[-1] < self.documents
        return bool(inside and (np.diff(documents) == 1).all())

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Returns the tokens `start` to `stop` as a read-only view of the file."""
        return self._tokens[start:stop]

    def gather(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        """Copies K slices of the file, concatenated, in the file's own type.

        Raises: IndexError if a slice leaves the file.
        """
        stops = token_offsets + lengths
        if len(stops) and (token_offsets.min() < 0 or lengths.min() < 0 or stops.max() > self.tokens):
            raise IndexError(
                f"slices from {token_offsets.min()} to {stops.max()} (shortest {lengths.min()}) "
                f"leave {self.prefix} of {self.tokens} tokens"
            )
        return joined_slices(self._tokens, token_offsets, stops)

    def unpredicted(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Bool[np.ndarray, " tokens"]:
        """Returns which tokens of K slices labels leave out of the loss, concatenated; only if `labelled`."""
        raise NotImplementedError(f"{type(self).__name__} has no labels")

    def release_pages(self) -> None:
        """Removes the pages that were read from this process's memory; they stay in the page cache.

        For a reader of a whole file under a memory limit.
        """
        release_mapped_pages(self.mapped_arrays())

    def mapped_arrays(self) -> Sequence[np.ndarray]:
        """Returns the arrays that are mapped from files."""
        return (self._tokens, self._pointers)

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


def joined_slices(
    values: Shaped[np.ndarray, " V"], starts: Integer[np.ndarray, " K"], stops: Integer[np.ndarray, " K"]
) -> Shaped[np.ndarray, " joined"]:
    """Copies K slices of an array, concatenated.

    A slice costs 0.3 us, a token of an index array 2 to 3 ns: slices are faster from some 130 tokens on, nearly three
    times at 1024, and are fast enough (80 M tokens/s) at 32.
    """
    slices = [values[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.concatenate(slices or [values[:0]])


def hash_sequences(
    tokens: Integer[np.ndarray, " tokens"], lengths: Integer[np.ndarray, " K"]
) -> UInt64[np.ndarray, " K"]:
    """Returns XXH3 (64 bits) of each of K concatenated sequences, as little-endian uint32 whatever their type."""
    bounds = [0, *(4 * np.cumsum(lengths, dtype=np.int64)).tolist()]
    content = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).data
    hashes = (xxhash.xxh3_64_intdigest(content[start:stop]) for start, stop in pairwise(bounds))
    return np.fromiter(hashes, dtype=np.uint64, count=len(lengths))


def hash_documents(token_file: TokenFile) -> UInt64[np.ndarray, " documents"]:
    """Returns `hash_sequences` of all documents, of a file without their text.

    Memory is bounded by the longest document.
    """
    offsets = token_file.document_offsets
    hashes = np.empty(token_file.documents, dtype=np.uint64)
    for first, stop in cut(offsets, _CHUNK_TOKENS):
        tokens = token_file.read(int(offsets[first]), int(offsets[stop]))
        hashes[first:stop] = hash_sequences(tokens, np.diff(offsets[first : stop + 1]))
    return hashes


def expect_random_reads(token_files: Sequence[TokenFile]) -> None:
    """Lets files that will be read in random order, all of them by turns, be read by single pages beyond memory."""
    if exceeds_page_cache(array for file in token_files for array in file.mapped_arrays()):
        for file in token_files:
            file.read_alone()
