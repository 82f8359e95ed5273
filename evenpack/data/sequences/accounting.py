"""Token accounting: the use of every token of a split.

    passes x (tokens_read - tokens_document_ends) + tokens_borrowed + tokens_special + tokens_added_ends
        = tokens_kept + tokens_cut + tokens_dropped

Only pairs of sentences read documents more than once, borrow and add tokens, and leave out documents' ends. Only the
recipe `padding` adds ends of its own and padding.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class TokenAccounting:
    """The accounts of one recipe over one split of one source; they balance, or the constructor raises ValueError."""

    documents_read: int
    documents_kept: int
    documents_too_short: int
    documents_too_long: int
    tokens_read: int
    tokens_kept: int
    """Tokens in a sequence."""
    tokens_cut: int
    """Tokens beyond `max_sequence_length` in truncated documents (`truncate`), and those cut from pairs that are too
    long."""
    tokens_too_short: int
    """Tokens in documents below `minimum_document_length`, or without a sentence."""
    tokens_too_long: int
    """Tokens in documents above `max_sequence_length` that were dropped (`drop`)."""
    sequences: int
    passes: int = 1
    """Number of passes over each document (`duplication_factor`)."""
    documents_single_sentence: int = 0
    tokens_single_sentence: int = 0
    """Tokens in documents of one sentence that were left out (`single_sentence_documents`)."""
    tokens_document_ends: int = 0
    """End-of-text tokens of kept documents whose sequences leave them out."""
    tokens_borrowed: int = 0
    """Tokens of segments from another document (random next), before they were cut."""
    tokens_special: int = 0
    """Tokens added around segments: [CLS] and [SEP]."""
    tokens_added_ends: int = 0
    """End-of-text tokens after pieces of documents, beyond the one that each document has."""
    tokens_subsequence_ends: int = 0
    """End-of-text tokens after pieces that fill an atom, including the document's own one."""
    tokens_tail_ends: int = 0
    """The first end-of-text token after each tail of a document."""
    padding_slots: int = 0
    """Padding: end-of-text tokens after that first one. They are not counted as tokens."""

    def __post_init__(self) -> None:
        negative = [field.name for field in fields(self) if getattr(self, field.name) < 0]
        if negative:
            raise ValueError(f"accounting entries below zero: {', '.join(negative)} in {self}")
        if self.documents_read != self.documents_kept + self.documents_dropped:
            raise ValueError(f"documents read are not those kept and dropped: {self}")
        added = self.tokens_borrowed + self.tokens_special + self.tokens_added_ends
        gathered = self.passes * (self.tokens_read - self.tokens_document_ends) + added
        if gathered != self.tokens_kept + self.tokens_cut + self.tokens_dropped:
            raise ValueError(f"tokens read are not (with those borrowed and added) those kept, cut and dropped: {self}")

    @property
    def documents_dropped(self) -> int:
        return self.documents_too_short + self.documents_too_long + self.documents_single_sentence

    @property
    def tail_padding(self) -> int:
        """End-of-text tokens after tails of documents, including the first one."""
        return self.tokens_tail_ends + self.padding_slots

    @property
    def tokens_dropped(self) -> int:
        """Tokens dropped in all passes."""
        return self.passes * (self.tokens_too_short + self.tokens_too_long + self.tokens_single_sentence)
