"""Documents as tokens in a pair of files, PREFIX.bin and PREFIX.idx, that Megatron-LM and DeepSpeed share.

    TokenFile         opens a pair, memory-mapped      prefix -> document spans -> tokens
    TokenFileWriter   writes one, resumable            batches of tokens -> PREFIX.{bin,idx}, document_hashes.npy

While a file is written the folder holds PREFIX.{bin,sizes,hashes}.partial and PREFIX.journal.json. The journal says
how far the data is on disk; whatever lies behind that is cut off before the writing goes on. The last journal is
complete, is written before the first rename, and stays: it is the record of the file.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import xxhash
from jaxtyping import Bool, Int64, Integer, UInt64

from evenpack.data.token_index import bin_path, index_path, read_index, write_index
from evenpack.errors import DataError, RunError
from evenpack.files import file_checksum, fsync_directory, fsync_file, write_json

_CHUNK_TOKENS = 1 << 22
_CHUNK_DOCUMENTS = 1 << 20


class TokenFile:
    """A finished pair, read-only.

    Pickled, it is its path: a worker maps the same pages again. Its private memory does not grow with the file; the
    pages it maps belong to the page cache and the system takes them back when it needs them.
    """

    def __init__(self, prefix: Path, *, verify: bool = True) -> None:
        """`verify` reads the whole index (20 bytes a document); false leaves it at the sizes of the files.

        Raises: DataError if the pair is missing, cut short, of another kind or does not fit together.
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
        """The first token of each document, and the number of tokens: 8 bytes of memory a document.

        `spans` looks up single documents without it.
        """
        offsets = np.empty(self.documents + 1, dtype=np.int64)
        for start in range(0, len(offsets), _CHUNK_DOCUMENTS):
            chunk = np.arange(start, min(start + _CHUNK_DOCUMENTS, len(offsets)))
            offsets[chunk] = self._index.token_offsets(chunk)
        return offsets

    @property
    def document_lengths(self) -> Int64[np.ndarray, " documents"]:
        """Tokens of each document."""
        lengths: Int64[np.ndarray, " documents"] = np.diff(self.document_offsets)
        return lengths

    def spans(
        self, documents: Integer[np.ndarray, " K"]
    ) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """First token and length of each of `documents`, looked up in the mapped index."""
        starts = self._index.token_offsets(documents)
        return starts, self._index.token_offsets(documents + 1) - starts

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Tokens `start` to `stop` as a read-only view of the file."""
        return self._tokens[start:stop]

    def gather(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        """Copies K slices of the file behind one another, in the file's own type.

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
        # One slice costs 0.3 us, one token of an index array 2 to 3 ns: slices win from 100 tokens on
        # (benchmarks/token_file.py), and packs hold few sequences much shorter than that.
        tokens = self._tokens
        slices = [tokens[start:stop] for start, stop in zip(token_offsets.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(slices)

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
        """Whether each document's last token is `token_id`; an empty document ends in nothing."""
        ends = np.zeros(self.documents, dtype=np.bool_)
        for start in range(0, self.documents, _CHUNK_DOCUMENTS):
            offsets, lengths = self.spans(np.arange(start, min(start + _CHUNK_DOCUMENTS, self.documents)))
            (filled,) = np.nonzero(lengths)
            ends[start + filled] = self._tokens[(offsets + lengths - 1)[filled]] == token_id
        return ends


def hash_documents(token_file: TokenFile) -> UInt64[np.ndarray, " documents"]:
    """XXH3 (64 bits) of each document's tokens as little-endian uint32, whatever type the file has.

    For files that came without their text; memory is bounded by the longest document.
    """
    offsets = token_file.document_offsets
    hashes = np.empty(token_file.documents, dtype=np.uint64)
    first = 0
    while first < token_file.documents:
        last = int(np.searchsorted(offsets, offsets[first] + _CHUNK_TOKENS, side="right")) - 1
        last = max(last, first + 1)
        tokens = token_file.read(int(offsets[first]), int(offsets[last])).astype("<u4")
        bounds = (4 * (offsets[first : last + 1] - offsets[first])).tolist()
        content = memoryview(tokens).cast("B")
        for document, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True), first):
            hashes[document] = xxhash.xxh3_64_intdigest(content[start:stop])
        first = last
    return hashes


def _reopen(prefix: Path) -> TokenFile:
    return TokenFile(prefix, verify=False)


@dataclass(frozen=True, kw_only=True)
class Journal:
    """How far a token file is written; the complete one is its record."""

    complete: bool
    vocabulary_size: int
    documents: int
    tokens: int
    checksums: dict[str, str]
    """XXH3 (128 bits) by file name; empty until complete."""
    state: dict[str, Any]
    """The caller's own, as given to the last `commit` or `finish`."""


def journal_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.journal.json")


def hashes_path(prefix: Path) -> Path:
    """`document_hashes.npy` beside the pair: uint64[documents]."""
    return prefix.with_name("document_hashes.npy")


def read_journal(prefix: Path) -> Journal | None:
    """The journal of a written or half-written file, None if there is none. Raises: DataError if it is broken."""
    path = journal_path(prefix)
    if not path.is_file():
        return None
    try:
        return Journal(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} is no journal of a token file ({error}); remove the folder {path.parent} and prepare again"
        ) from error


def token_type(vocabulary_size: int) -> np.dtype:
    """The narrowest type that Megatron-LM and DeepSpeed write and that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size < 1 << 16 else np.int32)


class TokenFileWriter:
    """Appends documents in batches, survives a kill at any moment, and puts the finished files in place at once.

    A finished file of the same name stays readable until `finish` replaces it.
    """

    def __init__(self, prefix: Path, *, vocabulary_size: int) -> None:
        """Begins anew: what an earlier writer left unfinished under this name is removed."""
        self._prepare(prefix.absolute(), vocabulary_size)
        self._remove_unfinished()
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._open("wb")

    @classmethod
    def resume(cls, prefix: Path, *, vocabulary_size: int) -> Self:
        """Goes on from the journal, or begins anew if there is none. `state` says where the caller was.

        Raises: DataError if the journal is of another vocabulary or the partial files are shorter than it says.
        """
        journal = read_journal(prefix)
        if journal is None:
            return cls(prefix, vocabulary_size=vocabulary_size)
        if journal.vocabulary_size != vocabulary_size:
            raise DataError(
                f"{journal_path(prefix)} was begun with a vocabulary of {journal.vocabulary_size}, now it is "
                f"{vocabulary_size}; remove the folder {prefix.parent} and prepare again"
            )
        writer = cls.__new__(cls)
        writer._prepare(prefix.absolute(), vocabulary_size)
        writer._journal = journal
        writer.documents, writer.tokens = journal.documents, journal.tokens
        if not journal.complete:
            writer._cut_to_journal()
            writer._open("r+b")
        return writer

    def _prepare(self, prefix: Path, vocabulary_size: int) -> None:
        self.prefix = prefix
        self.dtype = token_type(vocabulary_size)
        self.documents = 0
        self.tokens = 0
        self._journal = Journal(
            complete=False, vocabulary_size=vocabulary_size, documents=0, tokens=0, checksums={}, state={}
        )
        self._files: dict[str, IO[bytes]] = {}

    @property
    def state(self) -> dict[str, Any]:
        """The caller's state at the last commit."""
        return self._journal.state

    @property
    def complete(self) -> bool:
        """Nothing can be appended any more; `finish` puts in place what is not there yet."""
        return self._journal.complete

    def append(
        self,
        tokens: Integer[np.ndarray, " tokens"],
        lengths: Integer[np.ndarray, " documents"],
        hashes: UInt64[np.ndarray, " documents"],
    ) -> None:
        """Adds documents that lie behind one another in `tokens`; `hashes` are XXH3 (64 bits) of their texts.

        Raises: DataError naming the document with a token id outside the vocabulary; RunError if the disk is full.
        """
        if lengths.sum() != len(tokens) or (len(lengths) and lengths.min() < 1):
            raise ValueError(
                f"{len(lengths)} documents of {lengths.sum()} tokens, each of at least one, expected, {len(tokens)} came"
            )
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self._journal.vocabulary_size):
            position = int(np.argmax((tokens < 0) | (tokens >= self._journal.vocabulary_size)))
            document = self.documents + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            raise DataError(
                f"document {document} for {self.prefix} holds token id {tokens[position]}, but the vocabulary has "
                f"{self._journal.vocabulary_size} entries; is this the tokenizer that made it?"
            )
        with self._explain_failure():
            self._write("bin", tokens.astype(self.dtype, copy=False))
            self._write("sizes", lengths.astype("<i4", casting="same_kind", copy=False))
            self._write("hashes", hashes.astype("<u8", copy=False))
        self.documents += len(lengths)
        self.tokens += len(tokens)

    def append_documents(
        self, documents: Sequence[Integer[np.ndarray, " _"]], hashes: UInt64[np.ndarray, " documents"]
    ) -> None:
        """`append` for a list of arrays."""
        if documents:
            self.append(np.concatenate(documents), np.array([len(document) for document in documents]), hashes)

    def commit(self, state: dict[str, Any]) -> None:
        """Flushes to disk and notes it: a resumed writer goes on from here. `state` must be JSON."""
        with self._explain_failure():
            self._write_journal(state, checksums={})

    def finish(self, state: dict[str, Any] | None = None) -> Journal:
        """Writes index and hashes and gives all files their names, the index last; safe to call again.

        `state` replaces that of the last commit. Returns: the record of the file.
        """
        with self._explain_failure():
            if not self.complete:
                self._write_journal(self.state if state is None else state, checksums={})
                self.close()
                self._write_index_and_hashes()
                checksums = {final.name: file_checksum(partial) for partial, final in self._renames()}
                self._write_journal(self.state, checksums=checksums)
            self._put_in_place()
        return self._journal

    def abandon(self) -> None:
        """Removes what is unfinished; a file finished earlier under this name stays."""
        self.close()
        self._remove_unfinished()

    def close(self) -> None:
        """Lets go of the files. What came after the last commit will be cut off."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
