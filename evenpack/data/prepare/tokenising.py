"""Turns parts of a corpus into tokens, in order, with a thread that reads and several that encode.

parts -> batches of about equal bytes -> tokens -> the writer of a token file, whose journal holds a `TokenisingState`
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt64

from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.prepare.tokens_dir import Origin
from evenpack.data.sequences.pair_drawing import split_sentences
from evenpack.data.sources.config import Source
from evenpack.data.sources.corpus import Corpus, CorpusPart, Document
from evenpack.data.sources.kinds import held_out
from evenpack.data.sources.rows import RowAccounting, RowPart
from evenpack.data.tokenizers.special_tokens import SENTENCE_LENGTHS
from evenpack.data.tokenizers.tokenizer import EncodedDocuments, TextError, Tokenizer
from evenpack.data.tokens.writer import DOCUMENT_HASHES, HASH_COLUMN, TokenFileWriter
from evenpack.errors import DataError
from evenpack.launch_environment import RUST_THREADS
from evenpack.worker_pool import map_in_order

BATCH_TEXT_BYTES = 1 << 19
_BATCH_DOCUMENTS = 1 << 14
_BATCHES_READ_AHEAD = 3
T = TypeVar("T")
_MOST_ENCODERS = 4
_LONG_BYTES = 1 << 23
"""Bytes of a document from which on it is encoded alone: it takes about 1 GB of memory."""


class Batch(NamedTuple):
    """Consecutive documents."""

    texts: list[str]
    identities: UInt64[np.ndarray, " documents"]
    text_bytes: int
    bytes_read: int
    """Bytes of the documents' files, read when the last document was read."""


def batches(documents: Iterator[Document]) -> Iterator[Batch]:
    """Documents in groups of `BATCH_TEXT_BYTES` or a little more; where a group ends does not affect what is written.

    Raises: DataError for a file that cannot be read any more.
    """
    gathered: list[Document] = []
    text_bytes = 0
    try:
        for document in documents:
            gathered.append(document)
            text_bytes += document.text_bytes
            if text_bytes >= BATCH_TEXT_BYTES or len(gathered) == _BATCH_DOCUMENTS:
                yield _batch(gathered, text_bytes)
                gathered, text_bytes = [], 0
    except OSError as error:  # distinguished from a disk that cannot be written to
        raise DataError(f"the source could not be read to its end: {error}") from error
    if gathered:
        yield _batch(gathered, text_bytes)


def read_ahead(items: Iterator[T], executor: Executor) -> Iterator[T]:
    """Yields the items, the next few of them made by the executor's only thread while the caller is busy."""
    pending: deque[Future[T | None]] = deque()
    for _ in range(_BATCHES_READ_AHEAD):
        pending.append(executor.submit(next, items, None))
    while (item := pending.popleft().result()) is not None:
        pending.append(executor.submit(next, items, None))
        yield item


def training_texts(
    corpus: Corpus, source: Source, *, validation_fraction: float, progress: SourceProgress
) -> Iterator[str]:
    """Yields the texts that are not held out, to train a tokenizer.

    Raises: DataError for a source without documents.
    """
    documents = 0
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as executor:
        for batch in read_ahead(batches(corpus.documents()), executor):
            documents += len(batch.texts)
            progress.report(documents=documents, tokens=0, bytes_read=batch.bytes_read, bytes_resumed=0)
            out = held_out(batch.identities, source, validation_fraction)
            yield from (text for text, held in zip(batch.texts, out.tolist(), strict=True) if not held)
    if documents == 0:
        raise no_documents_error(progress.source)


def no_documents_error(source: str) -> DataError:
    """Returns the error of a source without documents."""
    return DataError(f"source '{source}' holds no document: check data.sources.{source}")


def _batch(documents: list[Document], text_bytes: int) -> Batch:
    identities = np.array([document.stored_identity for document in documents], dtype=np.uint64)
    return Batch([document.text for document in documents], identities, text_bytes, documents[-1].bytes_read)


@dataclass(frozen=True, kw_only=True)
class TokenisingState:
    """The tokenised part of a corpus."""

    origin: Origin
    parts: int = 0
    """Number of completely tokenised parts."""
    part_documents: int = 0
    """Documents of those parts."""
    bytes_read: int = 0
    """Bytes of the source's files."""
    text_bytes: int = 0
    """Bytes of the documents, in UTF-8."""
    unknown_tokens: int = 0
    beginning_tokens: int = 0
    """[CLS] before documents."""
    rows: RowAccounting | None = None
    """Row accounting of those parts, if documents are divided or filtered before tokenising; None if not."""

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "TokenisingState":
        """Returns the state that `to_json` has written. Raises: DataError if it is of another form."""
        try:
            rows = values["rows"]
            return cls(**{**values, "rows": None if rows is None else RowAccounting(**rows)})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"the token file was begun by another version of evenpack ({error}): remove its folder and prepare "
                "again"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Returns the state as a journal keeps it."""
        return asdict(self)

    def has_known_tokens(self, tokens: int, documents: int) -> bool:
        """Returns whether so many documents with so many tokens hold more than unknown and special tokens."""
        return tokens - documents != self.unknown_tokens + self.beginning_tokens

    def with_text(self, *, text_bytes: int, unknown_tokens: int, beginning_tokens: int) -> "TokenisingState":
        """Returns the state after more documents."""
        return replace(
            self,
            text_bytes=self.text_bytes + text_bytes,
            unknown_tokens=self.unknown_tokens + unknown_tokens,
            beginning_tokens=self.beginning_tokens + beginning_tokens,
        )

    def with_end_of_part(self, rows: RowAccounting | None, *, documents: int, bytes_read: int) -> "TokenisingState":
        """Returns the state after the last document of a part.

        Args:
            rows: those of the part, if documents are divided or filtered.
            documents: documents of all parts so far.
            bytes_read: bytes of all parts so far.
        """
        if rows is not None and self.rows is not None:
            rows = self.rows + rows
        return replace(self, parts=self.parts + 1, part_documents=documents, bytes_read=bytes_read, rows=rows)

    def with_part(self, part: "TokenisingState", *, documents: int) -> "TokenisingState":
        """Returns the state after a complete part that a worker tokenised.

        Args:
            part: the state of the part's own file at its end.
            documents: documents of all parts so far.
        """
        texts = ("text_bytes", "unknown_tokens", "beginning_tokens")
        state = self.with_text(**{name: getattr(part, name) for name in texts})
        return state.with_end_of_part(part.rows, documents=documents, bytes_read=self.bytes_read + part.bytes_read)


Encoder = Callable[[Sequence[str]], EncodedDocuments]
"""Turns documents into tokens."""


class EndOfPart(NamedTuple):
    """Marks the end of a part, after its last batch."""

    part: CorpusPart


def encoder(tokenizer: Tokenizer, language: str | None) -> Encoder:
    """Returns an encoder of whole documents, or of single sentences if a language with rules for splitting is given."""
    if language is None:
        return tokenizer.encode_batch
    return lambda texts: tokenizer.encode_sentences([split_sentences(text, language) for text in texts])


def columns(language: str | None) -> dict[str, str]:
    """Returns the columns that the token file stores with the tokens, with numpy's names of the types."""
    return {**HASH_COLUMN, **({} if language is None else {SENTENCE_LENGTHS: "<i4"})}


def append_parts(
    parts: Sequence[CorpusPart],
    encode: Encoder,
    writer: TokenFileWriter,
    state: TokenisingState,
    *,
    report: Callable[[TokenisingState], None],
) -> TokenisingState:
    """Tokenises what the writer does not have yet of `parts`: all parts of a corpus, or those up to one of them.

    It commits every few seconds; a kill loses the work after the last commit.

    Args:
        state: the state of the writer's last commit, or the first one.
        report: is given the state after each batch.

    Returns: the state at the end.
    Raises: DataError for a part that cannot be read, or a text that cannot be encoded, with its place.
    """
    bytes_before = sum(part.total_bytes for part in parts[: state.parts])
    begin = writer.documents - state.part_documents
    # Closed at once, so that a traceback that holds the frame does not keep the threads alive.
    with _naming_place(parts), closing(_encoded(parts[state.parts :], begin, encode)) as steps:
        for step in steps:
            if isinstance(step, EndOfPart):
                bytes_before += step.part.total_bytes
                rows = step.part.accounting if isinstance(step.part, RowPart) else None
                state = state.with_end_of_part(rows, documents=writer.documents, bytes_read=bytes_before)
                continue
            batch, encoded = step
            writer.append(encoded.tokens, encoded.lengths, {DOCUMENT_HASHES: batch.identities, **encoded.columns})
            state = replace(state, bytes_read=bytes_before + batch.bytes_read).with_text(
                text_bytes=batch.text_bytes,
                unknown_tokens=encoded.unknown_tokens,
                beginning_tokens=encoded.beginning_tokens,
            )
            if writer.is_commit_due:
                writer.commit(state.to_json())
            report(state)
    return state


@contextmanager
def _naming_place(parts: Iterable[CorpusPart]) -> Iterator[None]:
    """Puts the place of a text that cannot be encoded before the message: its document is looked for once more."""
    try:
        yield
    except TextError as error:
        for document in chain.from_iterable(part.documents() for part in parts):
            if error.text in document.text:
                raise DataError(f"{document.where()}: {error}") from error
        raise


def encoding_threads() -> int:
    """Returns how many threads of Python encode, no more than the cores that a worker is allowed.

    There are several, so that Rust's threads have work while the last long document of a batch is encoded, and while
    ids become arrays.
    """
    return min(_MOST_ENCODERS, RUST_THREADS.read(os.environ) or _MOST_ENCODERS)


def _encoded(
    parts: Sequence[CorpusPart], begin: int, encode: Encoder
) -> Generator[tuple[Batch, EncodedDocuments] | EndOfPart, None, None]:
    """Yields batches in order, read and encoded in the background, from document `begin` of the first part on."""
    alone = threading.Lock()  # the memory of one long document, and not of one for each thread
    threads = encoding_threads()

    def encode_texts(step: Batch | EndOfPart) -> tuple[Batch, EncodedDocuments] | EndOfPart:
        if isinstance(step, EndOfPart):
            return step
        if step.text_bytes < _LONG_BYTES:
            return step, encode(step.texts)
        with alone:
            return step, encode(step.texts)

    with (
        ThreadPoolExecutor(1, thread_name_prefix="reader") as reader,
        ThreadPoolExecutor(threads, thread_name_prefix="encoder") as encoders,
    ):
        yield from map_in_order(encode_texts, read_ahead(_steps(parts, begin), reader), encoders, threads=threads)


def _steps(parts: Sequence[CorpusPart], begin: int) -> Iterator[Batch | EndOfPart]:
    for part in parts:
        yield from batches(part.documents(begin))
        yield EndOfPart(part)
        begin = 0
