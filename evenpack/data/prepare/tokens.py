"""Writes the token file of a corpus, by this process alone or by workers; the bytes are the same."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from evenpack.data.checksums import Checksums
from evenpack.data.prepare.progress import SourceProgress
from evenpack.data.prepare.tokenising import (
    TokenisingState,
    append_parts,
    columns,
    encoder,
    no_documents_error,
)
from evenpack.data.prepare.tokens_dir import Origin
from evenpack.data.prepare.workers import PartTask, Workers
from evenpack.data.sources.corpus import Corpus, CorpusPart
from evenpack.data.sources.rows import RowAccounting, RowCorpus
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import Journal, TokenFileWriter, column_path, hashes_path
from evenpack.errors import DataError

_MOST_PARTS = 1 << 10
SMALLEST_PART_BYTES = 1 << 24
_LARGEST_PART_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WrittenTokens:
    """A finished token file, with the counts and columns stored for it."""

    token_file: TokenFile
    columns: tuple[Path, ...]
    """Columns that are stored for each document in addition to its tokens."""
    identities: UInt64[np.ndarray, " documents"]
    text_bytes: int
    unknown_tokens: int
    rows: RowAccounting | None
    """Accounting of rows, if documents were divided or filtered before tokenising; None if not."""
    checksums: Mapping[str, Checksums]
    """Known checksums of files, by name."""

    @classmethod
    def of_text(cls, prefix: Path, journal: Journal, columns: Collection[str]) -> "WrittenTokens":
        """Opens the output of `write_tokens`. Raises: DataError if the files are incomplete."""
        state = TokenisingState.of_json(journal.state)
        return cls(
            token_file=TokenFile(prefix),
            columns=tuple(column_path(prefix, name) for name in columns),
            identities=open_array(hashes_path(prefix)),
            text_bytes=state.text_bytes,
            unknown_tokens=state.unknown_tokens,
            rows=state.rows,
            checksums=journal.checksums,
        )

    @classmethod
    def of_token_file(cls, token_file: TokenFile, hashes: Path) -> "WrittenTokens":
        """Opens a token file that was not written here, with the hashes of its documents."""
        return cls(
            token_file=token_file,
            columns=(hashes,),
            identities=open_array(hashes),
            text_bytes=0,
            unknown_tokens=0,
            rows=None,
            checksums={},
        )


def part_bytes(total_bytes: int) -> int:
    """Returns the target size of a part: a thousandth of a source, within 16 MiB and 1 GiB.

    That is work for many workers, and little is lost with one.
    """
    return min(max(total_bytes // _MOST_PARTS, SMALLEST_PART_BYTES), _LARGEST_PART_BYTES)


@dataclass(frozen=True, kw_only=True)
class Tokenising:
    """The settings of tokenisation, for all sources."""

    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Folder from which workers read the tokenizer."""
    language: str | None
    """With a language, text is tokenised sentence by sentence, and the lengths of sentences are stored in a column."""
    workers: Workers | None
    """Workers; None: this process tokenises, with several threads."""


def write_tokens(
    corpus: Corpus,
    prefix: Path,
    tokenising: Tokenising,
    *,
    origin: Origin,
    progress: SourceProgress,
    check_inputs: Callable[[], None],
) -> Journal:
    """Writes the token file of a source, or resumes it.

    Args:
        origin: stored in the journal's state.
        check_inputs: called after reading. Raises: DataError if a file has changed.

    Raises: DataError for a source that cannot be read or whose text does not match this vocabulary: then its output is
    removed. RunError if the disk is full, or if a worker dies: then it is kept.
    """
    vocabulary_size = tokenising.tokenizer.vocabulary_size
    with TokenFileWriter.resume(
        prefix, vocabulary_size=vocabulary_size, columns=columns(tokenising.language)
    ) as writer:
        if writer.complete:
            progress.note(f"source '{progress.source}': {prefix.parent} holds its tokens already")
            total = corpus.total_bytes
            progress.report(documents=writer.documents, tokens=writer.tokens, bytes_read=total, bytes_resumed=total)
            return writer.finish()
        try:
            state = _SourceWriting(corpus, writer, tokenising, origin=origin, progress=progress).run()
            check_inputs()
            _check_content(corpus, progress.source, writer, state)
        except DataError:
            writer.abandon()
            shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
            raise
        shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
        return writer.finish(state.to_json())


class _SourceWriting:
    """One source while its token file is written."""

    def __init__(
        self,
        corpus: Corpus,
        writer: TokenFileWriter,
        tokenising: Tokenising,
        *,
        origin: Origin,
        progress: SourceProgress,
    ) -> None:
        self._writer = writer
        self._how = tokenising
        self._progress = progress
        self._state = TokenisingState.read(writer) or TokenisingState(origin=origin)
        self._bytes_resumed = self._state.bytes_read
        self._parts: Sequence[CorpusPart] = corpus.parts(part_bytes(corpus.total_bytes))

    def run(self) -> TokenisingState:
        """Appends the missing documents. Returns: the state at the end."""
        workers = self._how.workers
        if workers is None or len(self._parts) - self._state.parts < 2:
            self._append_here(self._parts)
            return self._state
        if self._writer.documents > self._state.part_documents:  # begun by a single process
            self._append_here(self._parts[: self._state.parts + 1])
        self._append_files_of(workers)
        return self._state

    def _append_here(self, parts: Sequence[CorpusPart]) -> None:
        self._state = append_parts(
            parts,
            encoder(self._how.tokenizer, self._how.language),
            self._writer,
            self._state,
            report=self._report,
        )

    def _append_files_of(self, workers: Workers) -> None:
        """Concatenates the parts' files in their order while later ones are written."""
        shutil.rmtree(_parts_folder(self._writer.prefix), ignore_errors=True)  # of a call that was killed
        tasks = [self._task(number) for number in range(self._state.parts, len(self._parts))]
        with closing(workers.files(tasks)) as files:
            for file in files:
                file.append_to(self._writer)
                self._state = self._state.with_part(file.state, documents=self._writer.documents)
                self._writer.commit(self._state.to_json())
                shutil.rmtree(file.prefix.parent)
                self._report(self._state)

    def _task(self, number: int) -> PartTask:
        tokenizer = self._how.tokenizer
        return PartTask(
            number=number,
            part=self._parts[number],
            source=self._progress.source,
            prefix=_parts_folder(self._writer.prefix) / f"{number:06d}" / "tokens",
            tokenizer_folder=self._how.tokenizer_folder,
            tokenizer_checksum=tokenizer.checksum,
            language=self._how.language,
        )

    def _report(self, state: TokenisingState) -> None:
        documents, tokens = self._writer.documents, self._writer.tokens
        self._progress.report(
            documents=documents, tokens=tokens, bytes_read=state.bytes_read, bytes_resumed=self._bytes_resumed
        )


def remove_unfinished(prefix: Path) -> None:
    """Removes what a call wrote that was killed before its journal."""
    shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
    for path in prefix.parent.glob(f"{prefix.name}.*.partial"):
        path.unlink(missing_ok=True)


def _parts_folder(prefix: Path) -> Path:
    """Returns the folder of the parts' files until they are concatenated."""
    return prefix.with_name(f"{prefix.name}.parts")


def _check_content(corpus: Corpus, source: str, writer: TokenFileWriter, state: TokenisingState) -> None:
    """Checks the content. Raises: DataError for a source without documents, or without a known token."""
    if isinstance(corpus, RowCorpus) and state.rows is not None:
        corpus.refuse_none_kept(state.rows)
    if writer.documents == 0:
        raise no_documents_error(source)
    if not state.has_known_tokens(writer.tokens, writer.documents):
        raise DataError(
            f"the text of source '{source}' encodes to nothing but unknown tokens, or to no token at all: "
            "the tokenizer's vocabulary is not of this text, or the text is empty"
        )
