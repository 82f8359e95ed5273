"""The sequences of a view in the order in which a grid shuffle wrote them."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer

from evenpack.data.sequences.documents import DocumentsView
from evenpack.data.sequences.pieces import ConcatView
from evenpack.data.sequences.view import Origins, SequenceCounts, SequencesAsDocuments
from evenpack.data.tokens.array_file import open_array
from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import column_path
from evenpack.errors import DataError

OrderedView = DocumentsView | ConcatView
"""The views that a grid shuffle takes: sequences in the order of the corpus, each one segment."""

SHUFFLED = "shuffled"
"""Name of the token file's pair of files, in the folder of a source."""
SOURCE_IDS = "shuffled_sequence_ids"
"""Name of that token file's column with the id that each document has in the view."""


class ShuffledView(SequencesAsDocuments):
    """A view of sequences that are the documents of `token_file`, each one segment.

    Its pickle holds the view and the paths.
    """

    max_segments_per_sequence = 1

    def __init__(self, view: OrderedView, token_file: TokenFile) -> None:
        """Opens the view. Raises: DataError if the token file is not of this view, or lacks its column."""
        self.source_view = view
        self.token_file = token_file
        self.max_sequence_length = view.max_sequence_length
        self.accounting = view.accounting
        self.source_ids: Integer[np.ndarray, " sequences"] = open_array(column_path(token_file.prefix, SOURCE_IDS))
        """Id of each sequence in `source_view`."""
        if not view.count == token_file.documents == len(self.source_ids):
            raise DataError(
                f"{token_file.prefix} holds {token_file.documents} sequences, the view that was shuffled {view.count}: "
                "prepare again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source_view, self.token_file)

    @property
    def count(self) -> int:
        return self.token_file.documents

    def counts(self, sequence_ids: Int64[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]) -> SequenceCounts:
        return self.source_view.counts(self._ids_in_source(sequence_ids), lengths)

    def left_out(self, sequence_ids: Int64[np.ndarray, " K"]) -> Bool[np.ndarray, " tokens"] | None:
        return self.source_view.left_out(self._ids_in_source(sequence_ids))

    @property
    def document_file(self) -> TokenFile:
        return self.source_view.token_file

    def origins(self, sequence_ids: Int64[np.ndarray, " K"]) -> Origins:
        return self.source_view.origins(self._ids_in_source(sequence_ids))

    def _ids_in_source(self, sequence_ids: Int64[np.ndarray, " K"]) -> Int64[np.ndarray, " K"]:
        self._check_ids(sequence_ids)
        return self.source_ids[sequence_ids].astype(np.int64)
