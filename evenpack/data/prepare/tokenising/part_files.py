"""Tokenises one part of a corpus into a token file of its own: the task of a worker, on this machine or another."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from evenpack.data.checksums import digest_of
from evenpack.data.prepare.tokenising.encoding import append_parts, columns, encoder, encoding_threads
from evenpack.data.prepare.tokenising.state import TokenisingState
from evenpack.data.sources.corpus import CorpusPart
from evenpack.data.tokenizers.tokenizer import Tokenizer
from evenpack.data.tokens.file import Journal, TokenFile, column_path, read_journal
from evenpack.data.tokens.index import bin_path, index_path
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError, RunError


@dataclass(frozen=True, kw_only=True)
class PartTask:
    """The task of a worker, which can be pickled."""

    number: int
    """Number of the part, from 0."""
    part: CorpusPart
    source: str
    prefix: Path
    """Prefix of the part's token file."""
    identity: Mapping[str, Any]
    """Identity of everything that decides the part's tokens: a file with another identity is replaced."""
    part_bytes: int
    tokenizer_folder: Path
    tokenizer_checksum: str
    language: str | None
    """Language whose rules split documents into sentences; None if they are not split."""


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """A tokenised part."""

    number: int
    prefix: Path
    journal: Journal
    worker: str
    """Host and process."""
    cpu_seconds: float
    """CPU seconds of all threads of the worker, for this part."""

    @property
    def state(self) -> TokenisingState:
        return TokenisingState.of_json(self.journal.state)

    def append_to(self, writer: TokenFileWriter) -> None:
        """Copies tokens and columns. Raises: RunError for a file that is not as the worker wrote it."""
        for path in (bin_path(self.prefix), index_path(self.prefix), *map(self._column, self.journal.column_values)):
            found, expected = digest_of(path).whole, self.journal.checksums[path.name].whole
            if found != expected:
                raise RunError(
                    f"{path} is not as {self.worker} wrote it (its checksum is {found}, expected {expected}): check "
                    "the disk, and run the same command again; it tokenises this part again"
                )
        token_file = TokenFile(self.prefix, verify=False)
        names = self.journal.column_values
        writer.append(
            token_file.read(0, token_file.tokens),
            token_file.document_lengths(),
            {name: np.load(self._column(name), mmap_mode="r") for name in names},
        )

    def _column(self, name: str) -> Path:
        return column_path(self.prefix, name)


def write_part(task: PartTask) -> PartFile:
    """Tokenises a part, or resumes an earlier call; finished files are compared with their checksums.

    Raises: DataError for what is wrong in the source; RunError for what is wrong with this host: a file or the
    tokenizer cannot be read here; OSError if the part cannot be written.
    """
    try:
        return _written(task)
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunError(
            f"part {task.number} of source '{task.source}' could not be read on host {socket.gethostname()}: {error}. "
            "What is tokenised is kept: the same command resumes once every host can read the source"
        ) from error
    except RunError as error:
        if isinstance(error.__cause__, OSError):  # an executor would drop the cause on its way
            raise error.__cause__ from None
        raise


def stop_file(parts_folder: Path) -> Path:
    """The file that asks those who tokenise parts in this folder to stop."""
    return parts_folder / "stop"


def _exit_if_requested(task: PartTask) -> None:
    if stop_file(task.prefix.parents[1]).exists():
        raise RunError(f"part {task.number} of source '{task.source}' was given up")


def _written(task: PartTask) -> PartFile:
    began = time.process_time()
    tokenizer = _tokenizer(task.tokenizer_folder, task.tokenizer_checksum)
    first = TokenisingState(origin=dict(task.identity), part_bytes=task.part_bytes)
    with _resumed(task, tokenizer) as writer:
        if writer.complete:
            journal = writer.finish()
        else:
            state = append_parts(
                (task.part,),
                encoder(tokenizer, task.language),
                writer,
                TokenisingState.read(writer) or first,
                threads=encoding_threads(),
                report=lambda _: _exit_if_requested(task),
            )
            journal = writer.finish(state.to_json())
    return PartFile(
        number=task.number,
        prefix=task.prefix,
        journal=journal,
        worker=f"{socket.gethostname()}, process {os.getpid()}",
        cpu_seconds=time.process_time() - began,
    )


def _resumed(task: PartTask, tokenizer: Tokenizer) -> TokenFileWriter:
    """Returns the writer of a part's file.

    It begins a new one if an earlier file has another identity or is damaged.
    """
    settings: dict[str, Any] = {
        "vocabulary_size": tokenizer.vocabulary_size,
        "columns": columns(task.language),
    }
    try:
        journal = read_journal(task.prefix)
        if journal is None or journal.state.get("origin", task.identity) == task.identity:
            return TokenFileWriter.resume(task.prefix, **settings)
    except DataError:  # damaged: only work is lost, and `finish` replaces the files
        pass
    return TokenFileWriter(task.prefix, **settings)


@lru_cache(maxsize=1)
def _tokenizer(folder: Path, checksum: str) -> Tokenizer:
    """Raises: RunError if this machine does not see the prepared directory, or sees another one."""
    host = socket.gethostname()
    if not folder.is_dir():
        raise RunError(
            f"{folder} is not there on host {host}: workers on several hosts need a data.prepared_dir on a file "
            "system that all of them share. What is tokenised is kept: the same command resumes then"
        )
    tokenizer = Tokenizer.load(folder)
    if tokenizer.checksum != checksum:
        raise RunError(
            f"{folder} on host {host} holds another tokenizer than the one of this run (checksum {tokenizer.checksum}, "
            f"expected {checksum}): all hosts must see the same data.prepared_dir"
        )
    return tokenizer
