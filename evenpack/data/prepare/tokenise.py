"""A source's documents -> its token file, in a pipeline that keeps the encoder's threads busy.

reader thread            documents, in batches of equal bytes, a few batches ahead
four encoder threads     batch -> tokens; several, so that Rust's threads have work while the last
                         long document of a batch is encoded, and while ids become arrays
the calling thread       appends in order, commits every few seconds
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt64

from evenpack.data.prepare.in_order import mapped
from evenpack.data.prepare.progress import PrepareState, Progress, Stage
from evenpack.data.sequences.sentences import split_sentences
from evenpack.data.sources.corpus import Corpus, Document
from evenpack.data.sources.held_out import held_out
from evenpack.data.sources.rows import RowCorpus
from evenpack.data.tokenizers.tokenizer import SENTENCE_LENGTHS, EncodedDocuments, Tokenizer
from evenpack.data.tokens.file import DOCUMENT_HASHES, Journal
from evenpack.data.tokens.writer import HASH_COLUMN, TokenFileWriter
from evenpack.errors import DataError

BATCH_TEXT_BYTES = 1 << 19
_BATCH_DOCUMENTS = 1 << 14
_BATCHES_READ_AHEAD = 3
_ENCODERS = 4
COMMIT_SECONDS = 5.0
"""What a kill costs at most."""

T = TypeVar("T")
Encoder = Callable[[Sequence[str]], EncodedDocuments]
"""Documents -> their tokens."""


class Batch(NamedTuple):
    """Some documents in a row."""

    texts: list[str]
    identities: UInt64[np.ndarray, " documents"]
    text_bytes: int
    bytes_read: int
    """Of the source's files, when the last document was read."""


class EncodedBatch(NamedTuple):
    """A batch and its tokens."""

    batch: Batch
    encoded: EncodedDocuments


@dataclass(frozen=True, kw_only=True)
class SourceReporter:
    """Turns the counts of one source into progress."""

    progress: Progress
    source: str
    stage: Stage
    total_bytes: int
    start_seconds: float

    @classmethod
    def begin(cls, progress: Progress, source: str, stage: Stage, corpus: Corpus) -> "SourceReporter":
        """The clock runs from now on."""
        return cls(
            progress=progress,
            source=source,
            stage=stage,
            total_bytes=corpus.total_bytes,
            start_seconds=time.monotonic(),
        )

    def report(self, *, documents: int, tokens: int, bytes_read: int, bytes_resumed: int) -> None:
        self.progress.update(
            PrepareState(
                stage=self.stage,
                source=self.source,
                documents=documents,
                tokens=tokens,
                bytes_read=bytes_read,
                bytes_resumed=bytes_resumed,
                total_bytes=self.total_bytes,
                elapsed_seconds=time.monotonic() - self.start_seconds,
            )
        )


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    prefix: Path,
    *,
    sentence_language: str | None,
    origin: dict[str, Any],
    reporter: SourceReporter,
) -> Journal:
    """Writes the token file of a source, or goes on with it. `origin` goes into the journal's state.

    With a language, text is tokenised sentence by sentence, and their lengths are kept in a column.

    Raises: DataError for a source that cannot be read or says nothing in this vocabulary: then what was written of it
    is removed. RunError if the disk is full: then it is kept.
    """
    columns = {**HASH_COLUMN, **({} if sentence_language is None else {SENTENCE_LENGTHS: "<i4"})}
    encode = tokenizer.encode_batch if sentence_language is None else _by_sentence(tokenizer, sentence_language)
    with TokenFileWriter.resume(prefix, vocabulary_size=tokenizer.vocabulary_size, columns=columns) as writer:
        if writer.complete:
            reporter.progress.note(f"source '{reporter.source}': {prefix.parent} holds its tokens already")
            reporter.report(
                documents=writer.documents,
                tokens=writer.tokens,
                bytes_read=corpus.total_bytes,
                bytes_resumed=corpus.total_bytes,
            )
            return writer.finish()
        try:
            state = _append_all(corpus, encode, writer, origin=origin, reporter=reporter)
            _check_content(reporter.source, writer, state)
        except DataError:
            writer.abandon()
            raise
        return writer.finish(state)


def training_texts(corpus: Corpus, *, validation_fraction: float, reporter: SourceReporter) -> Iterator[str]:
    """The texts that are not held out, to train a tokenizer on. Raises: DataError for a source without documents."""
    documents = 0
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as executor:
        for batch in _ahead(_batches(corpus.documents()), executor):
            documents += len(batch.texts)
            reporter.report(documents=documents, tokens=0, bytes_read=batch.bytes_read, bytes_resumed=0)
            out = held_out(batch.identities, validation_fraction)
            yield from (text for text, held in zip(batch.texts, out.tolist(), strict=True) if not held)
    if documents == 0:
        raise _holds_no_document(reporter.source)


def _append_all(
    corpus: Corpus, encode: Encoder, writer: TokenFileWriter, *, origin: dict[str, Any], reporter: SourceReporter
) -> dict[str, Any]:
    """Tokenises what the writer does not have yet. Returns: the state for the last journal."""
    state: dict[str, Any] = {"origin": origin, "text_bytes": 0, "unknown_tokens": 0, "bytes_read": 0, **writer.state}
    bytes_resumed = state["bytes_read"]
    committed = time.monotonic()
    # Closed here and now, lest a traceback that holds the frame keep the threads alive.
    with closing(_encoded_batches(corpus.documents(writer.documents), encode)) as batches:
        for batch, encoded in batches:
            if writer.documents == 0 and batch.text_bytes and encoded.says_nothing:
                raise _says_nothing(reporter.source)
            writer.append(encoded.tokens, encoded.lengths, {DOCUMENT_HASHES: batch.identities, **encoded.columns})
            state["text_bytes"] += batch.text_bytes
            state["unknown_tokens"] += encoded.unknown_tokens
            state["bytes_read"] = batch.bytes_read
            if time.monotonic() - committed >= COMMIT_SECONDS:
                writer.commit(state)
                committed = time.monotonic()
            reporter.report(
                documents=writer.documents,
                tokens=writer.tokens,
                bytes_read=batch.bytes_read,
                bytes_resumed=bytes_resumed,
            )
    if isinstance(corpus, RowCorpus):
        assert corpus.accounting is not None, "the pass has come to its end"
        state["rows"] = asdict(corpus.accounting)
    return state


def _check_content(source: str, writer: TokenFileWriter, state: dict[str, Any]) -> None:
    if writer.documents == 0:
        raise _holds_no_document(source)
    if writer.tokens - writer.documents == state["unknown_tokens"]:
        raise _says_nothing(source)


def _holds_no_document(source: str) -> DataError:
    return DataError(f"source '{source}' holds no document: look at data.sources.{source}")


def _says_nothing(source: str) -> DataError:
    return DataError(
        f"the text of source '{source}' encodes to nothing but unknown tokens, or to no token at all: "
        "the tokenizer's vocabulary is not of this text, or the text is empty"
    )


def _by_sentence(tokenizer: Tokenizer, language: str) -> Encoder:
    def encode(texts: Sequence[str]) -> EncodedDocuments:
        return tokenizer.encode_sentences([split_sentences(text, language) for text in texts])

    return encode


def _encoded_batches(documents: Iterator[Document], encode: Encoder) -> Generator[EncodedBatch, None, None]:
    """Batches in order, read and encoded in the background."""

    def encode_texts(batch: Batch) -> EncodedBatch:
        return EncodedBatch(batch, encode(batch.texts))

    with (
        ThreadPoolExecutor(1, thread_name_prefix="reader") as reader,
        ThreadPoolExecutor(_ENCODERS, thread_name_prefix="encoder") as encoders,
    ):
        yield from mapped(encode_texts, _ahead(_batches(documents), reader), encoders, threads=_ENCODERS)


def _batches(documents: Iterator[Document]) -> Iterator[Batch]:
    """Documents in groups of `BATCH_TEXT_BYTES` or a little more; their bounds do not show in what is written.

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
    except OSError as error:  # told apart from a disk that cannot be written to
        raise DataError(f"the source could not be read to its end: {error}") from error
    if gathered:
        yield _batch(gathered, text_bytes)


def _batch(documents: list[Document], text_bytes: int) -> Batch:
    identities = np.array([document.identity for document in documents], dtype=np.uint64)
    return Batch([document.text for document in documents], identities, text_bytes, documents[-1].bytes_read)


def _ahead(items: Iterator[T], executor: Executor) -> Iterator[T]:
    """The items, the next few of them made by the executor's one thread while the caller is busy."""
    pending: deque[Future[T | None]] = deque()
    for _ in range(_BATCHES_READ_AHEAD):
        pending.append(executor.submit(next, items, None))
    while (item := pending.popleft().result()) is not None:
        pending.append(executor.submit(next, items, None))
        yield item
