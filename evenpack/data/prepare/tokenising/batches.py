"""Documents in batches of about equal bytes, read ahead by a thread of their own."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import UInt64

from evenpack.data.prepare.progress import SourceReporter
from evenpack.data.sources.config import Source
from evenpack.data.sources.corpus import Corpus, Document
from evenpack.data.sources.held_out import held_out
from evenpack.errors import DataError

BATCH_TEXT_BYTES = 1 << 19
_BATCH_DOCUMENTS = 1 << 14
_BATCHES_READ_AHEAD = 3

T = TypeVar("T")


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
    corpus: Corpus, source: Source, *, validation_fraction: float, reporter: SourceReporter
) -> Iterator[str]:
    """Yields the texts that are not held out, to train a tokenizer.

    Raises: DataError for a source without documents.
    """
    documents = 0
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as executor:
        for batch in read_ahead(batches(corpus.documents()), executor):
            documents += len(batch.texts)
            reporter.report(documents=documents, tokens=0, bytes_read=batch.bytes_read, bytes_resumed=0)
            out = held_out(batch.identities, source, validation_fraction)
            yield from (text for text, held in zip(batch.texts, out.tolist(), strict=True) if not held)
    if documents == 0:
        raise no_documents_error(reporter.source)


def no_documents_error(source: str) -> DataError:
    """Returns the error of a source without documents."""
    return DataError(f"source '{source}' holds no document: check data.sources.{source}")


def _batch(documents: list[Document], text_bytes: int) -> Batch:
    identities = np.array([document.stored_identity for document in documents], dtype=np.uint64)
    return Batch([document.text for document in documents], identities, text_bytes, documents[-1].bytes_read)
