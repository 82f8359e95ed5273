"""The source `builtin`: pydoc's topics and the standard library's docstrings, equal documents once.

Sources are parsed, never executed, so that nothing is imported and the documents are always the same.
"""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from evenpack.data.sources.config import BuiltinSource
from evenpack.data.sources.corpus import Document, SourceKind, make_document
from evenpack.data.sources.files import InputFile

SHORTEST_DOCUMENT_CHARACTERS = 200
"""Definitions described in fewer characters join their module's document; modules below it are left out."""
_TOPICS_FILE = Path("pydoc_data/topics.py")
_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
"""Folders that are left out: test data is not prose, some distributions split idlelib off, and newer Pythons lack
lib2to3."""


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def standard_library() -> Path:
    """Returns the folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(library: Path) -> list[Path]:
    """Returns the Python sources of the documents, in a fixed order."""
    found = []
    for folder, inner, names in os.walk(library):
        inner[:] = set(inner) - _LEFT_OUT  # not searched: site-packages may hold a hundred times as many
        found += [Path(folder, name) for name in names if name.endswith(".py") and name != "__main__.py"]
    return sorted(found, key=lambda path: path.as_posix())


def file_documents(path: Path, library: Path) -> Iterator[str]:
    """Returns the documents of one source file: its topics, or its docstrings. An unreadable file has none."""
    try:
        with warnings.catch_warnings():
            # Old modules hold invalid escapes, which newer compilers warn about.
            warnings.simplefilter("ignore")
            module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    relative = path.relative_to(library)
    if relative == _TOPICS_FILE:
        texts = _topics(module)
    else:
        texts = _docstrings(module, ".".join(relative.with_suffix("").parts).removesuffix(".__init__"))
    # A literal may hold half of a surrogate pair, which UTF-8 cannot.
    yield from (text.encode(errors="replace").decode() for text in texts)


def _topics(module: ast.Module) -> Iterator[str]:
    """Yields the values of the only dictionary literal of pydoc's topics."""
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(statement.value)
            yield from (text.strip() for _, text in sorted(topics.items()))


def _docstrings(module: ast.Module, name: str) -> Iterator[str]:
    """Yields a document for each well described definition, after one of the module with all short ones."""
    opening = [f"module {name}", *_docstring(module)]
    long_documents = []
    for definition in module.body:
        if isinstance(definition, _Definition):
            text = "\n\n".join(_described(definition))
            if len(text) >= SHORTEST_DOCUMENT_CHARACTERS:
                long_documents.append(f"module {name}\n\n{text}")
            elif text:
                opening.append(text)
    first = "\n\n".join(opening)
    if len(first) >= SHORTEST_DOCUMENT_CHARACTERS:
        yield first
    yield from long_documents


def _described(definition: _Definition) -> list[str]:
    """Returns signature and docstring of a definition, and of the methods of a class.

    Nothing if none has a docstring.
    """
    parts = [f"{_signature(definition)}\n{text}" for text in _docstring(definition)]
    if isinstance(definition, ast.ClassDef):
        for method in definition.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                parts += [f"{definition.name}.{_signature(method)}\n{text}" for text in _docstring(method)]
    return parts


def _signature(definition: _Definition) -> str:
    if isinstance(definition, ast.ClassDef):
        return f"class {definition.name}"
    return f"{definition.name}({ast.unparse(definition.args)})"


def _docstring(node: _Definition | ast.Module) -> list[str]:
    text = ast.get_docstring(node)
    return [text] if text else []


class BuiltinCorpus:
    """The text of this Python's own files."""

    def __init__(self) -> None:
        self._library = standard_library()
        self._files = source_files(self._library)

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def documents(self, start: int = 0) -> Iterator[Document]:
        seen: set[int] = set()
        bytes_read = 0
        for path in self._files:
            bytes_read += path.stat().st_size
            for text in file_documents(path, self._library):
                document = make_document(text, bytes_read, where=path.as_posix)
                if document.identity not in seen:
                    seen.add(document.identity)
                    if len(seen) > start:
                        yield document

    def parts(self, target_bytes: int) -> tuple["BuiltinCorpus"]:
        """Returns itself: a document that was seen before is left out, so all files belong together."""
        return (self,)


def _inputs(_name: str, _source: BuiltinSource) -> tuple[InputFile, ...]:
    """Returns one entry for the whole library: its hundreds of files change together, with Python."""
    library = standard_library()
    files = [InputFile.of(path) for path in source_files(library)]
    total, newest = sum(file.bytes for file in files), max(file.modified_ns for file in files)
    return (InputFile(path=str(library), bytes=total, modified_ns=newest),)


BUILTIN = SourceKind[BuiltinSource](open_corpus=lambda name, source: BuiltinCorpus(), inputs=_inputs)
