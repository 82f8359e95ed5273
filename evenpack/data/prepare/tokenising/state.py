"""The state in the journal of a token file of text: the tokenised part of its corpus, and the counts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenpack.data.prepare.origins import Origin
from evenpack.data.sources.corpus import CorpusPart
from evenpack.data.sources.rows import RowAccounting, RowPart
from evenpack.data.tokens.writer import TokenFileWriter
from evenpack.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TokenisingState:
    """The tokenised part of a corpus."""

    origin: Origin
    part_bytes: int
    """The target size of the corpus' parts, which a resumed call keeps."""
    parts: int = 0
    """Number of completely tokenised parts."""
    part_documents: int = 0
    """Documents of those parts."""
    bytes_read: int = 0
    """Bytes of the source's files."""
    text_bytes: int = 0
    """Bytes of the documents, in UTF-8."""
    unknown_tokens: int = 0
    rows: RowAccounting | None = None
    """Row accounting of those parts, if documents are divided or filtered before tokenising; None if not."""
    longest_row_words: int = 0

    @classmethod
    def read(cls, writer: TokenFileWriter) -> "TokenisingState | None":
        """Returns the state at the last commit, None before the first. Raises: DataError if it is of another form."""
        return cls.of_json(writer.state) if writer.state else None

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "TokenisingState":
        """Returns the state that `to_json` has written. Raises: DataError if it is of another form."""
        try:
            rows = values["rows"]
            return cls(**{**values, "rows": None if rows is None else RowAccounting(**rows)})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"the token file was begun by another version of evenpack ({error}): remove its folder and prepare "
                "again"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Returns the state as a journal keeps it."""
        return asdict(self)

    def with_batch(self, *, text_bytes: int, unknown_tokens: int, bytes_read: int) -> "TokenisingState":
        """Returns the state after another batch of a part."""
        return replace(
            self,
            bytes_read=bytes_read,
            text_bytes=self.text_bytes + text_bytes,
            unknown_tokens=self.unknown_tokens + unknown_tokens,
        )

    def with_end_of_part(self, part: CorpusPart, *, documents: int, bytes_read: int) -> "TokenisingState":
        """Returns the state after the last document of `part`.

        Args:
            documents: those of all parts so far.
            bytes_read: those of all parts so far.
        """
        ended = replace(self, parts=self.parts + 1, part_documents=documents, bytes_read=bytes_read)
        if not isinstance(part, RowPart):
            return ended
        assert part.accounting is not None, "the part has been read to its end"
        return ended.with_rows(part.accounting, part.longest_row_words)

    def with_part(self, part: "TokenisingState", *, documents: int) -> "TokenisingState":
        """Returns the state after a whole part that a worker tokenised.

        Args:
            part: the state of the part's own file at its end.
            documents: those of all parts so far.
        """
        ended = replace(
            self,
            parts=self.parts + 1,
            part_documents=documents,
            bytes_read=self.bytes_read + part.bytes_read,
            text_bytes=self.text_bytes + part.text_bytes,
            unknown_tokens=self.unknown_tokens + part.unknown_tokens,
        )
        return ended if part.rows is None else ended.with_rows(part.rows, part.longest_row_words)

    def with_rows(self, rows: RowAccounting, longest_row_words: int) -> "TokenisingState":
        """Returns the state with the rows of another part."""
        return replace(
            self,
            rows=rows if self.rows is None else self.rows + rows,
            longest_row_words=max(self.longest_row_words, longest_row_words),
        )
