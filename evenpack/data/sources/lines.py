"""Lines of files, plain or compressed (zstd, gzip), each with its position: whole files, or ranges of their bytes."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from evenpack.data.limits import TOKENISING_BYTES
from evenpack.errors import DataError
from evenpack.files import explained, parse_json_object

LONGEST_LINE_BYTES = 1 << 26
"""Bytes of the longest line that is read unless more is asked for: it is in memory as a whole, some times over."""
_LINE_BUFFER_BYTES = 1 << 20
_LARGEST_WINDOW_LOG = 31
"""zstd refuses windows above 128 MiB by default; corpora packed with `--long=31` need this much."""
_COMPRESSED = {".zst": "zstd with windows of up to 2 GiB", ".gz": "gzip"}
"""The compression by the ending of a file's name."""
_PIECE_BYTES = 1 << 20
_LFS_POINTER = "version https://git-lfs.github.com/spec/"
JSONL_SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")


class SourceReader:
    """An opened input file; `.zst` and `.gz` are decompressed while reading. Use it as a context manager."""

    def __init__(
        self,
        path: Path,
        *,
        begin: int = 0,
        stop: int | None = None,
        longest_line_bytes: int = LONGEST_LINE_BYTES,
    ) -> None:
        """Opens a file; if it is not compressed, `begin` and `stop` bound the bytes to read, each the first of a line.

        Raises: DataError if the file cannot be opened.
        """
        self.path = path
        self._begin = begin
        self._stop = stop
        self._lines_read = 0
        self._line_start = begin
        self._longest_line_bytes = longest_line_bytes
        with explained(path, DataError, missing=True):
            self._file: IO[bytes] = path.open("rb", buffering=0)
        self._file.seek(begin)
        raw: Any = self._file
        self._unreadable: tuple[type[Exception], ...] = ()
        if is_compressed(path):
            raw, self._unreadable = decompressed(self._file, path.suffix)
        self._stream = io.BufferedReader(raw, _LINE_BUFFER_BYTES)

    def __enter__(self) -> "SourceReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._file.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk, from `begin` on and up to `stop`."""
        position = self._file.tell()
        return (position if self._stop is None else min(position, self._stop)) - self._begin

    @property
    def where(self) -> str:
        """Path and number of the last line, for messages. After a `begin` it takes a pass over the earlier lines."""
        before = _count_lines(self.path, self._begin) if self._begin else 0
        return f"{self.path}, line {before + self._lines_read}"

    def lines(self) -> Iterator[bytes]:
        """Yields every line with its end.

        Raises: DataError for a line that is too long, and if the compressed data is broken or ends too early.
        """
        line_end = self._begin
        while self._stop is None or line_end < self._stop:
            try:
                line = self._stream.readline(self._longest_line_bytes + 1)
            except EOFError as error:
                raise DataError(f"{self.path} ends in the middle of its compressed data: it is truncated") from error
            except self._unreadable as error:
                raise DataError(f"{self.path} is not readable {_COMPRESSED[self.path.suffix]}: {error}") from error
            if not line:
                return
            self._lines_read += 1
            if len(line) > self._longest_line_bytes and not line.endswith(b"\n"):
                raise too_long_error(self.where, "line", most=self._longest_line_bytes)
            self._line_start = line_end
            line_end += len(line)
            yield line

    def filled_lines(self) -> Iterator[bytes]:
        """Yields the lines that hold more than white space; none is parsed."""
        return (line for line in self.lines() if not line.isspace())

    def decode(self, line: bytes) -> str:
        """Returns the last line as text, without a byte order mark.

        Raises: DataError if it is not UTF-8, holds the character NUL, as UTF-16 without a mark and binary files do, or
            begins a pointer of Git LFS.
        """
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            place = self._line_start + error.start
            raise DataError(
                f"{self.where}: invalid UTF-8: byte 0x{line[error.start]:02x} at byte {place} "
                f"of the {'uncompressed ' if is_compressed(self.path) else ''}file ({error.reason}). "
                "Convert the file to UTF-8"
            ) from error
        if self._line_start == 0 and text.startswith(_LFS_POINTER):
            raise DataError(
                f"{self.path} is a pointer of Git LFS, which stands for a file that was not fetched: run `git lfs "
                "pull` in its repository"
            )
        if "\0" in text:
            raise DataError(
                f"{self.where}: character {text.index(chr(0)) + 1} is NUL, which text in UTF-16 and binary files hold. "
                "Convert the file to UTF-8, remove such characters, or leave the file out"
            )
        return text.removeprefix("\ufeff") if self._line_start == 0 else text

    def json_object(self, line: bytes) -> dict[str, Any]:
        """Returns the last line as a JSON object. Raises: DataError with its position if it is none."""
        text = self.decode(line)
        try:
            return parse_json_object(text)
        except ValueError as error:
            raise DataError(f"{self.where}: {error}") from error


def too_long_error(where: str, what: str, *, most: int) -> DataError:
    """Returns the error of a line or document of more than `most` bytes."""
    return DataError(
        f"{where}: a {what} of more than {most:,} bytes. Is it one document? "
        f"data.sources.NAME.maximum_document_bytes allows longer ones; tokenising takes about {TOKENISING_BYTES} bytes "
        "of memory for each byte of a document"
    )


def is_compressed(path: Path) -> bool:
    """Returns whether a file is decompressed when it is read, so that it can only be read from its beginning."""
    return path.suffix in _COMPRESSED


def _count_lines(path: Path, stop: int) -> int:
    """Returns the number of line ends in the first `stop` bytes."""
    count = 0
    with path.open("rb") as file:
        while stop > 0 and (block := file.read(min(stop, _LINE_BUFFER_BYTES))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def decompressed(file: IO[bytes], suffix: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """Returns a stream of a compressed file's content, and the errors that say that it is not of this kind."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file), (gzip.BadGzipFile, zlib.error)
    from backports import zstd  # which reading packs does not need

    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW_LOG}
    return zstd.ZstdFile(file, options=options), (zstd.ZstdError,)


def line_bounds(path: Path, *, target_bytes: int, ends_document: Callable[[bytes], bool] | None) -> tuple[int, ...]:
    """Returns the bounds of ranges of a file of about equal size, at most `target_bytes` and a document, by seeking.

    A range ends after any line, or after one for which `ends_document` is true; there are fewer if documents are long.
    """
    size, bounds = path.stat().st_size, [0]
    count = -(-size // target_bytes)
    with path.open("rb") as file:
        for number in range(1, count):
            position = size * number // count
            if position <= bounds[-1]:
                continue
            file.seek(position - 1)
            _read_line(file, bytes.isspace)  # to the next line's beginning, which may be `position` itself
            while ends_document is not None and _read_line(file, ends_document) is False:
                pass
            if file.tell() >= size:
                break
            bounds.append(file.tell())
    return (*bounds, size)


def _read_line(file: IO[bytes], holds: Callable[[bytes], bool]) -> bool | None:
    """Reads a line of any length, in pieces; returns whether `holds` is true of each of them, None at the end."""
    found = None
    while piece := file.readline(_PIECE_BYTES):
        found = found is not False and holds(piece)
        if piece.endswith(b"\n"):
            break
    return found
