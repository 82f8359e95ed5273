"""A finished token file, with the counts and columns stored for it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from evenpack.data.checksums import Checksums
from evenpack.data.prepare.tokenising.state import TokenisingState
from evenpack.data.sources.rows import RowAccounting
from evenpack.data.tokens.file import Journal, TokenFile, column_path, hashes_path


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
            identities=np.load(hashes_path(prefix), mmap_mode="r"),
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
            identities=np.load(hashes, mmap_mode="r"),
            text_bytes=0,
            unknown_tokens=0,
            rows=None,
            checksums={},
        )
