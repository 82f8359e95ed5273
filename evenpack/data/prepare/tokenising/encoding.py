"""Turns parts of a corpus into tokens, in order, with a thread that reads and several that encode."""

import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from evenpack.data.limits import TOKENISING_BYTES
from evenpack.data.prepare.in_order import mapped
from evenpack.data.prepare.tokenising.batches import Batch, batches, read_ahead
from evenpack.data.prepare.tokenising.state import TokenisingState
from evenpack.data.sequences.sentences import split_sentences
from evenpack.data.sources.corpus import CorpusPart
from evenpack.data.tokenizers.tokenizer import SENTENCE_LENGTHS, EncodedDocuments, Tokenizer
from evenpack.data.tokens.file import DOCUMENT_HASHES
from evenpack.data.tokens.writer import HASH_COLUMN, TokenFileWriter
from evenpack.launch_environment import RUST_THREADS

COMMIT_SECONDS = 5.0
"""The work that a kill costs at most."""
_MOST_ENCODERS = 4
_LONG_BYTES = 1 << 23
"""Bytes of a document from which on it is encoded alone, and the user is warned: it takes about 1 GB of memory."""

_logger = logging.getLogger(__name__)

Encoder = Callable[[Sequence[str]], EncodedDocuments]
"""Turns documents into tokens."""


class EncodedBatch(NamedTuple):
    """A batch and its tokens."""

    batch: Batch
    encoded: EncodedDocuments


class EndOfPart(NamedTuple):
    """Marks the end of a part, after its last batch."""

    part: CorpusPart


def encoder(tokenizer: Tokenizer, language: str | None) -> Encoder:
    """Returns an encoder of whole documents, or of single sentences if a language with rules for splitting is given."""
    if language is None:
        return tokenizer.encode_batch
    rules = language

    def encode(texts: Sequence[str]) -> EncodedDocuments:
        return tokenizer.encode_sentences([split_sentences(text, rules) for text in texts])

    return encode


def columns(language: str | None) -> dict[str, str]:
    """Returns the columns that the token file stores with the tokens, with numpy's names of the types."""
    return {**HASH_COLUMN, **({} if language is None else {SENTENCE_LENGTHS: "<i4"})}


def append_parts(
    parts: Sequence[CorpusPart],
    encode: Encoder,
    writer: TokenFileWriter,
    state: TokenisingState,
    *,
    threads: int,
    report: Callable[[TokenisingState], None],
) -> TokenisingState:
    """Tokenises what the writer does not have yet of `parts`: all parts of a corpus, or those up to one of them.

    It commits every few seconds; a kill loses the work after the last commit.

    Args:
        state: that of the writer's last commit, or the first one.
        threads: how many encode.
        report: is given the state after each batch.

    Returns: the state at the end.
    Raises: DataError for a part that cannot be read.
    """
    bytes_before = sum(part.total_bytes for part in parts[: state.parts])
    committed = time.monotonic()
    begin = writer.documents - state.part_documents
    # Closed at once, so that a traceback that holds the frame does not keep the threads alive.
    with closing(_encoded(parts[state.parts :], begin, encode, threads=threads)) as steps:
        for step in steps:
            if isinstance(step, EndOfPart):
                bytes_before += step.part.total_bytes
                state = state.with_end_of_part(step.part, documents=writer.documents, bytes_read=bytes_before)
                continue
            batch, encoded = step
            writer.append(encoded.tokens, encoded.lengths, {DOCUMENT_HASHES: batch.identities, **encoded.columns})
            state = state.with_batch(
                text_bytes=batch.text_bytes,
                unknown_tokens=encoded.unknown_tokens,
                bytes_read=bytes_before + batch.bytes_read,
            )
            if time.monotonic() - committed >= COMMIT_SECONDS:
                writer.commit(state.to_json())
                committed = time.monotonic()
            report(state)
    return state


def encoding_threads() -> int:
    """Returns how many threads of Python encode, no more than the cores that a worker is allowed.

    There are several, so that Rust's threads have work while the last long document of a batch is encoded, and while
    ids become arrays.
    """
    return min(_MOST_ENCODERS, RUST_THREADS.read(os.environ) or _MOST_ENCODERS)


def _encoded(
    parts: Sequence[CorpusPart], begin: int, encode: Encoder, *, threads: int
) -> Generator[EncodedBatch | EndOfPart, None, None]:
    """Yields batches in order, read and encoded in the background, from document `begin` of the first part on."""
    alone = threading.Lock()  # the memory of one long document, and not of one for each thread
    is_warned = False

    def encode_texts(step: Batch | EndOfPart) -> EncodedBatch | EndOfPart:
        nonlocal is_warned
        if isinstance(step, EndOfPart):
            return step
        if step.text_bytes < _LONG_BYTES:
            return EncodedBatch(step, encode(step.texts))
        with alone:
            if not is_warned:
                is_warned = True
                _warn_of_long_document(step)
            return EncodedBatch(step, encode(step.texts))

    with (
        ThreadPoolExecutor(1, thread_name_prefix="reader") as reader,
        ThreadPoolExecutor(threads, thread_name_prefix="encoder") as encoders,
    ):
        yield from mapped(encode_texts, read_ahead(_steps(parts, begin), reader), encoders, threads=threads)


def _warn_of_long_document(batch: Batch) -> None:
    longest = max(batch.texts, key=len)
    size = len(longest.encode())
    _logger.warning(
        "a document of %s bytes, which begins %r, takes the tokenizer about %.1f GB of memory: is it one document? "
        "data.sources.NAME.maximum_document_bytes refuses such ones; later ones are not reported",
        f"{size:,}",
        longest[:40],
        size * TOKENISING_BYTES / 1e9,
    )


def _steps(parts: Sequence[CorpusPart], begin: int) -> Iterator[Batch | EndOfPart]:
    for part in parts:
        yield from batches(part.documents(begin))
        yield EndOfPart(part)
        begin = 0
