"""Rows: parts of a source's documents that become documents of their own, those of too few words left out.

Rows are cut and counted before anything is tokenised. A word is what `str.split()` finds. The filter and its accounting
follow "Optimizing Packing and Shuffling Strategies for Enhanced Performance in Generative Language Models", A.1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from evenpack.data.sources.corpus import Corpus, Document, make_document
from evenpack.errors import DataError

RowKind = Literal["lines", "paragraphs"]


@dataclass(frozen=True, kw_only=True)
class RowAccounting:
    """Where every row and word of a source went before tokenising; ValueError from the constructor if any is lost."""

    rows_read: int
    rows_kept: int
    rows_dropped: int
    """Those of fewer than `minimum_words`."""
    words_read: int
    words_kept: int
    words_dropped: int
    """In the rows that were dropped."""

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"accounting entries below zero: {', '.join(negative)} in {self}")
        if self.rows_read != self.rows_kept + self.rows_dropped:
            raise ValueError(f"rows read are not those kept and dropped: {self}")
        if self.words_read != self.words_kept + self.words_dropped:
            raise ValueError(f"words read are not those kept and dropped: {self}")


class RowCorpus:
    """The rows of another corpus, each a document, in its order.

    Every pass reads that corpus from its beginning, since an interrupted call must count the dropped rows, too; rows
    before the first one asked for are counted and no more.
    """

    def __init__(
        self,
        name: str,
        corpus: Corpus,
        *,
        rows: RowKind | None,
        minimum_words: int | None,
        maximum_rows: int | None,
    ) -> None:
        """`name` is the source's, the others are its keys."""
        self._name = name
        self._corpus = corpus
        self._cut = None if rows is None else _CUTS[rows]
        self._minimum_words = minimum_words or 0
        self._maximum_rows = maximum_rows
        self.accounting: RowAccounting | None = None
        """Of the whole source, or as far as it is read; None before a pass has come to its end."""

    @property
    def total_bytes(self) -> int:
        return self._corpus.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        """The rows that are kept, from number `start` of them on.

        Raises: DataError as that corpus does, or if it has rows of which none is kept.
        """
        last: Document | None = None
        for document in self._kept(start):
            if last is not None:
                yield last
            last = document
        if last is not None:
            yield last._replace(bytes_read=self.total_bytes)  # what comes after it was dropped, and has been read

    def _kept(self, start: int) -> Iterator[Document]:
        counts: Counter[str] = Counter()
        longest = 0
        for row, bytes_read in self._rows():
            if counts["rows_kept"] == self._maximum_rows:
                break
            words = len(row.split())
            longest = max(longest, words)
            fate = "kept" if words >= self._minimum_words else "dropped"
            counts["rows_read"] += 1
            counts["words_read"] += words
            counts[f"rows_{fate}"] += 1
            counts[f"words_{fate}"] += words
            if fate == "kept" and counts["rows_kept"] > start:
                yield make_document(row, bytes_read, where=f"a row of source '{self._name}'")
        if counts["rows_read"] and not counts["rows_kept"]:
            raise self._keeps_nothing(counts["rows_read"], longest)
        self.accounting = RowAccounting(**{field.name: counts[field.name] for field in fields(RowAccounting)})

    def _rows(self) -> Iterator[tuple[str, int]]:
        """Each row, and the bytes of the files that are read then."""
        for document in self._corpus.documents():
            for row in self._rows_of(document.text):
                yield row, document.bytes_read

    def _rows_of(self, text: str) -> Iterable[str]:
        if self._cut is None:
            return (text,)
        return self._cut(line.rstrip("\r") for line in text.split("\n"))

    def _keeps_nothing(self, rows: int, longest: int) -> DataError:
        key = f"data.sources.{self._name}"
        return DataError(
            f"source '{self._name}' keeps no row: {key}.minimum_words is {self._minimum_words}, and the longest of its "
            f"{rows:,} rows has {longest} words; lower it, or cut rows in another way ({key}.rows)"
        )


def filled_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines that hold more than white space."""
    return (line for line in lines if line.strip())


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """The lines between two lines of white space, joined."""
    gathered: list[str] = []
    for line in lines:
        if line.strip():
            gathered.append(line)
        elif gathered:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


_CUTS: Mapping[RowKind, Callable[[Iterable[str]], Iterator[str]]] = {"lines": filled_lines, "paragraphs": paragraphs}
