"""Writes the token file of a corpus, by this process alone or by workers; the bytes are the same."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
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
from evenpack.data.sources.corpus import Corpus
from evenpack.data.sources.rows import RowCorpus
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter, column_path
from evenpack.errors import DataError

_MOST_PARTS = 1 << 10
SMALLEST_PART_BYTES = 1 << 24
_LARGEST_PART_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class WrittenTokens:
    """A finished token file, with the counts and columns stored for it."""

    token_file: TokenFile
    columns: tuple[Path, ...]
    """Columns that are stored for each document in addition to its tokens, the hashes first."""
    state: TokenisingState
    """The counts of tokenising; zeros for a token file that was not written here."""
    checksums: Mapping[str, Checksums]
    """Known checksums of files, by name."""

    @property
    def identities(self) -> UInt64[np.ndarray, " documents"]:
        """`Document.stored_identity` of each document."""
        return open_array(self.columns[0])


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
) -> WrittenTokens:
    """Writes the token file of a source, or resumes it.

    Args:
        origin: stored in the journal's state.
        check_inputs: called after reading. Raises: DataError if a file has changed.

    Raises: DataError for a source that cannot be read or whose text does not match this vocabulary: then its output is
    removed. RunError if the disk is full, or if a worker dies: then it is kept.
    """
    kept = columns(tokenising.language)
    with TokenFileWriter.resume(prefix, vocabulary_size=tokenising.tokenizer.vocabulary_size, columns=kept) as writer:
        state = TokenisingState.read(writer) or TokenisingState(origin=origin)
        resumed = corpus.total_bytes if writer.complete else state.bytes_read

        def report(state: TokenisingState) -> None:
            progress.report(
                documents=writer.documents, tokens=writer.tokens, bytes_read=state.bytes_read, bytes_resumed=resumed
            )

        if writer.complete:
            progress.note(f"source '{progress.source}': {prefix.parent} holds its tokens already")
            report(replace(state, bytes_read=resumed))
        else:
            try:
                state = _append_all(corpus, writer, tokenising, state, source=progress.source, report=report)
                check_inputs()
                _check_content(corpus, progress.source, writer, state)
            except DataError:
                writer.abandon()
                raise
            finally:
                shutil.rmtree(_parts_folder(prefix), ignore_errors=True)
        journal = writer.finish(state.to_json())
    return WrittenTokens(
        token_file=TokenFile(prefix),
        columns=tuple(column_path(prefix, name) for name in kept),
        state=state,
        checksums=journal.checksums,
    )


def _append_all(
    corpus: Corpus,
    writer: TokenFileWriter,
    how: Tokenising,
    state: TokenisingState,
    *,
    source: str,
    report: Callable[[TokenisingState], None],
) -> TokenisingState:
    """Appends the missing documents. Returns: the state at the end."""
    parts, workers = corpus.parts(part_bytes(corpus.total_bytes)), how.workers
    encode = encoder(how.tokenizer, how.language)
    if workers is None or len(parts) - state.parts < 2:
        return append_parts(parts, encode, writer, state, report=report)
    if writer.documents > state.part_documents:  # begun by a single process
        state = append_parts(parts[: state.parts + 1], encode, writer, state, report=report)
    folder = _parts_folder(writer.prefix)
    shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed
    tasks = [
        PartTask(
            number=number,
            part=parts[number],
            source=source,
            prefix=folder / f"{number:06d}" / "tokens",
            tokenizer_folder=how.tokenizer_folder,
            tokenizer_checksum=how.tokenizer.checksum,
            language=how.language,
        )
        for number in range(state.parts, len(parts))
    ]
    with closing(workers.files(tasks)) as files:  # concatenated in their order while later ones are written
        for file in files:
            file.append_to(writer)
            state = state.with_part(file.state, documents=writer.documents)
            writer.commit(state.to_json())
            shutil.rmtree(file.prefix.parent)
            report(state)
    return state


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
