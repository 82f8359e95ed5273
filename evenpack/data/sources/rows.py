"""Rows: parts of a source's documents that become documents themselves, except parts of too few words.

Rows are cut and counted before anything is tokenised. A word is what `str.split()` finds. The filter and its accounting
follow "Optimizing Packing and Shuffling Strategies for Enhanced Performance in Generative Language Models", A.1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from evenpack.data.sources.config import SourceOfText
from evenpack.data.sources.corpus import Corpus, CorpusPart, Document, make_document
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RowAccounting:
    """The use of every row and word of a source before tokenising; the constructor raises ValueError if any is lost."""

    rows_read: int
    rows_kept: int
    rows_dropped: int
    """Rows of fewer than `minimum_words`."""
    words_read: int
    words_kept: int
    words_dropped: int
    """Words in the rows that were dropped."""

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"accounting entries below zero: {', '.join(negative)} in {self}")
        if self.rows_read != self.rows_kept + self.rows_dropped:
            raise ValueError(f"the rows read are not the sum of rows kept and dropped: {self}")
        if self.words_read != self.words_kept + self.words_dropped:
            raise ValueError(f"the words read are not the sum of words kept and dropped: {self}")

    def __add__(self, other: "RowAccounting") -> "RowAccounting":
        """Returns the accounting of two parts of a source together."""
        return RowAccounting(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


class RowPart:
    """The rows of a part of a source, each a document, in its order.

    Every pass reads the part from its beginning, since an interrupted call must count the dropped rows, too; rows
    before the first requested one are only counted.
    """

    def __init__(self, name: str, part: CorpusPart, source: SourceOfText) -> None:
        """Takes the `name` of the source and its section, by whose keys rows are chosen."""
        self._name = name
        self._part = part
        self._source = source
        self.accounting: RowAccounting | None = None
        """Accounting of the whole part, or of what was read; None until the last pass has ended."""

    @property
    def total_bytes(self) -> int:
        return self._part.total_bytes

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yields the rows that are kept, from number `start` of them on. Raises: DataError as the part does.

        If later rows are dropped, `Document.bytes_read` of the last one is below `total_bytes`.
        """
        counts: Counter[str] = Counter()
        self.accounting = None
        training_rows, place = 0, f"a row of source '{self._name}'"
        for document in self._part.documents():
            for row in self._rows_of(document.text):
                if training_rows == self._source.maximum_rows:  # rows of validation documents are not counted
                    break
                words = len(row.split())
                fate = "kept" if words >= (self._source.minimum_words or 0) else "dropped"
                counts.update({"rows_read": 1, "words_read": words, f"rows_{fate}": 1, f"words_{fate}": words})
                training_rows += fate == "kept" and not document.is_held_out
                if fate == "kept" and counts["rows_kept"] > start:
                    yield make_document(row, document.bytes_read, lambda: place, is_held_out=document.is_held_out)
            if training_rows == self._source.maximum_rows:
                break
        self.accounting = RowAccounting(**{field.name: counts[field.name] for field in fields(RowAccounting)})

    def _rows_of(self, text: str) -> Iterable[str]:
        if self._source.rows is None:
            return (text,)
        return _CUTS[self._source.rows](line.rstrip("\r") for line in text.split("\n"))


class RowCorpus(RowPart):
    """The rows of a whole source, whose part is its corpus."""

    _part: Corpus

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yields the rows that are kept, from number `start` of them on.

        Raises: DataError as the corpus does, or if it has rows and keeps none.
        """
        yield from super().documents(start)
        assert self.accounting is not None, "the pass has come to its end"
        self.refuse_none_kept(self.accounting)

    def parts(self, target_bytes: int) -> tuple[RowPart, ...]:
        """Returns the rows of the corpus' parts: documents are whole, so no row is in two.

        With `maximum_rows` it is one part.
        """
        if self._source.maximum_rows is not None:
            return (self,)
        return tuple(RowPart(self._name, part, self._source) for part in self._part.parts(target_bytes))

    def refuse_none_kept(self, accounting: RowAccounting) -> None:
        """Checks the rows. Raises: DataError if the source has rows and none is kept."""
        if accounting.rows_kept or not accounting.rows_read:
            return
        key, mean = f"data.sources.{self._name}", accounting.words_read / accounting.rows_read
        raise DataError(
            f"source '{self._name}' keeps no row: {key}.minimum_words is {self._source.minimum_words or 0}, and its "
            f"{accounting.rows_read:,} rows have {mean:.1f} words on average; lower it, or cut rows in another way "
            f"({key}.rows)"
        )


def filled_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines that hold more than white space."""
    return (line for line in lines if line.strip())


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines between two lines of white space, joined."""
    gathered: list[str] = []
    for line in lines:
        if line.strip():
            gathered.append(line)
        elif gathered:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


_CUTS: Mapping[str, Callable[[Iterable[str]], Iterator[str]]] = {"lines": filled_lines, "paragraphs": paragraphs}
