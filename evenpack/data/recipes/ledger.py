"""Where every token of a split went."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class RecipeLedger:
    """The accounts of one recipe over one split of one source; they balance or the constructor raises ValueError."""

    documents_read: int
    documents_kept: int
    documents_too_short: int
    documents_too_long: int
    tokens_read: int
    tokens_kept: int
    """In a sequence."""
    tokens_cut: int
    """Behind `max_sequence_length` in documents kept in part (`truncate`)."""
    tokens_too_short: int
    """In documents below `minimum_document_length`."""
    tokens_too_long: int
    """In documents above `max_sequence_length` that were dropped (`drop`)."""
    sequences: int

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"ledger entries below zero: {', '.join(negative)} in {self}")
        if self.documents_read != self.documents_kept + self.documents_dropped:
            raise ValueError(f"documents read are not those kept and dropped: {self}")
        if self.tokens_read != self.tokens_kept + self.tokens_cut + self.tokens_dropped:
            raise ValueError(f"tokens read are not those kept, cut and dropped: {self}")

    @property
    def documents_dropped(self) -> int:
        return self.documents_too_short + self.documents_too_long

    @property
    def tokens_dropped(self) -> int:
        return self.tokens_too_short + self.tokens_too_long
