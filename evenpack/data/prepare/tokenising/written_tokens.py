"""A finished token file, and what is known of it beside its tokens."""

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
    """A finished token file and what is known of it beside its tokens."""

    token_file: TokenFile
    columns: tuple[Path, ...]
    """What is stored of each document beside its tokens."""
    identities: UInt64[np.ndarray, " documents"]
    text_bytes: int
    unknown_tokens: int
    rows: RowAccounting | None
    """Of the rows that were cut and filtered before tokenising; None where documents were taken as they are."""
    checksums: Mapping[str, Checksums]
    """Of those files whose checksums are known already, by name."""

    @classmethod
    def of_text(cls, prefix: Path, journal: Journal, columns: Collection[str]) -> "WrittenTokens":
        """What `write_tokens` has written. Raises: DataError if the files are not whole."""
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
    def ready_made(cls, token_file: TokenFile, hashes: Path) -> "WrittenTokens":
        """A token file that was not written here, with the hashes of its documents."""
        return cls(
            token_file=token_file,
            columns=(hashes,),
            identities=np.load(hashes, mmap_mode="r"),
            text_bytes=0,
            unknown_tokens=0,
            rows=None,
            checksums={},
        )
