"""The source `builtin`: pydoc's topics and the standard library's docstrings, equal documents once."""

from collections.abc import Iterator

from evenpack.data.sources import library_text
from evenpack.data.sources.config import BuiltinSource
from evenpack.data.sources.corpus import Document, SourceKind, WholeCorpus, make_document
from evenpack.data.sources.input_files import InputFile


class BuiltinCorpus:
    """The text of this Python's own files."""

    def __init__(self) -> None:
        self._library = library_text.standard_library()
        self._files = library_text.source_files(self._library)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def documents(self, start: int = 0) -> Iterator[Document]:
        seen: set[int] = set()
        bytes_read = 0
        for path in self._files:
            bytes_read += path.stat().st_size
            for text in library_text.file_documents(path, self._library):
                document = make_document(text, bytes_read, where=path.as_posix)
                if document.identity not in seen:
                    seen.add(document.identity)
                    if len(seen) > start:
                        yield document

    def parts(self, target_bytes: int) -> tuple[WholeCorpus, ...]:
        """Returns one part: a document that was seen before is left out, so all files belong together."""
        return (WholeCorpus(name="the standard library's text", corpus=self),)


def inputs(_name: str, _source: BuiltinSource) -> tuple[InputFile, ...]:
    """Returns one entry for the whole library: its hundreds of files change together, with Python."""
    library = library_text.standard_library()
    files = [InputFile.of(path) for path in library_text.source_files(library)]
    total, newest = sum(file.bytes for file in files), max(file.modified_ns for file in files)
    return (InputFile(path=str(library), bytes=total, modified_ns=newest),)


KIND = SourceKind[BuiltinSource](open_corpus=lambda name, source: BuiltinCorpus(), inputs=inputs)
