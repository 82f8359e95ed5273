"""Rows that hold several documents each: the columns by which trainers and collators mark their borders.

positions   position_ids                         a document begins where they restart (axolotl, flattening collators)
ids         sequence_ids, seq_idx                a document begins where the id changes; 0 after others is padding
segments    segment_ids, inputs_segmentation     the same, counted from 1 (T5X, MaxText); 0 beside others is padding
mask        attention_mask                       the same, counted from 1 (neat packing); 0 is padding
lengths     seq_lengths, doc_lens                the lengths of a row's documents (TRL)
starts      seq_start_id                         where each document of the row begins (NeMo)
offsets     cu_seqlens, cu_seq_lens_q            the same, and the end of the last (FlashAttention's varlen functions)

`token_type_ids` marks none: it tells the sentences of one document apart. Another column that holds numbers in lists is
refused by its name, because it may be one more convention, or say what counts in the loss.

Shapes: R = rows read at once, T = their tokens, V = values of a column in these rows.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from evenpack.errors import DataError

ROWS_AT_ONCE = 1 << 10
"""Rows of values, one for each token: so many of 4,096 int64 are 32 MiB."""


Begins = Bool[np.ndarray, " T"]
"""Which tokens begin a document."""


class _RowError(Exception):
    """A row whose column cannot be followed: its index among those read at once, and why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Rows that are read at once, with the values that a column has for them."""

    bounds: Int64[np.ndarray, " R_plus_1"]
    """First token of each row, and the number of tokens."""
    values: Int64[np.ndarray, " V"]
    counts: Int64[np.ndarray, " R"]
    """Number of values of each row."""

    @property
    def tokens(self) -> Int64[np.ndarray, " R"]:
        return np.diff(self.bounds)

    def require(self, right: Bool[np.ndarray, " R"], reason: Callable[[int], str]) -> None:
        """Raises _RowError for the first row that is not right."""
        if not right.all():
            row = int(np.argmin(right))
            raise _RowError(row, reason(row))

    def require_each_token(self) -> None:
        """Raises _RowError unless there is a value for each token."""
        counts, tokens = self.counts, self.tokens
        self.require(counts == tokens, lambda row: f"has {counts[row]} values for {tokens[row]} tokens")

    def refuse_padding(self, places: Int64[np.ndarray, " K"], what: str) -> None:
        """Raises _RowError if there are places of tokens that only pad."""
        if len(places):
            raise _RowError(_row_of(places[0], self.bounds), f"{what}, {_PADDING}")


def _firsts(bounds: Int64[np.ndarray, " R_plus_1"]) -> Begins:
    """Returns where a row begins."""
    begins = np.zeros(int(bounds[-1]), dtype=bool)
    begins[bounds[:-1][np.diff(bounds) > 0]] = True
    return begins


def _row_of(place: int | np.int64, bounds: Int64[np.ndarray, " R_plus_1"]) -> int:
    return int(np.searchsorted(bounds, place, side="right")) - 1


def _of_positions(rows: _Rows) -> Begins:
    rows.require_each_token()
    values, bounds, firsts = rows.values, rows.bounds, _firsts(rows.bounds)
    begins = firsts.copy()
    begins[1:] |= np.diff(values) != 1
    again = np.flatnonzero(begins & ~firsts)
    row_firsts = bounds[np.searchsorted(bounds, again, side="right") - 1]
    wrong = again[(values[again] != 0) & (values[again] != values[row_firsts])]
    if len(wrong):
        raise _RowError(
            _row_of(wrong[0], bounds),
            f"goes from {values[wrong[0] - 1]} to {values[wrong[0]]}, which neither counts on nor restarts, and the "
            "loader counts positions itself",
        )
    return begins


_IDS_OF_PADDING = "has ids that stand for padding (below 0, or 0 beside others)"


def _of_ids(rows: _Rows) -> Begins:
    rows.require_each_token()
    values, begins = rows.values, _firsts(rows.bounds)
    begins[1:] |= np.diff(values) != 0
    others = np.maximum.accumulate(np.where(begins & (values != 0), np.arange(len(values)), -1))
    is_after_others = others >= np.repeat(rows.bounds[:-1], rows.tokens)
    rows.refuse_padding(np.flatnonzero((values < 0) | ((values == 0) & is_after_others)), _IDS_OF_PADDING)
    return begins


def _of_segments(rows: _Rows) -> Begins:
    begins, filled = _of_ids(rows), np.flatnonzero(rows.tokens)
    firsts, lasts = rows.bounds[filled], rows.bounds[filled + 1] - 1
    rows.refuse_padding(firsts[(rows.values[firsts] == 0) & (rows.values[lasts] != 0)], _IDS_OF_PADDING)
    return begins


def _of_mask(rows: _Rows) -> Begins | None:
    rows.require_each_token()
    rows.refuse_padding(np.flatnonzero(rows.values < 1), "is padded: it has zeros")
    return None if rows.values.max(initial=1) == 1 else _of_ids(rows)


def _of_lengths(rows: _Rows) -> Begins:
    values, tokens = rows.values, rows.tokens
    ends, sums = np.cumsum(rows.counts), np.append(0, np.cumsum(values))
    if len(negative := np.flatnonzero(values < 0)):
        raise _RowError(int(np.searchsorted(ends, negative[0], side="right")), f"holds {values[negative[0]]}")
    found = sums[ends] - sums[ends - rows.counts]
    rows.require(found == tokens, lambda row: f"has {found[row]} tokens in its documents, the row has {tokens[row]}")
    begins = np.zeros(int(rows.bounds[-1]), dtype=bool)
    begins[sums[:-1][values > 0]] = True
    return begins


def _of_offsets(rows: _Rows) -> Begins:
    values, counts, tokens = rows.values, rows.counts, rows.tokens
    rows.require((counts > 0) | (tokens == 0), lambda row: f"is empty, and the row has {tokens[row]} tokens")
    filled = np.flatnonzero(counts)
    begins, ends = (np.cumsum(counts) - counts)[filled], np.cumsum(counts)[filled]
    right = np.ones(len(counts), dtype=bool)
    right[filled] = (values[begins] == 0) & (values[ends - 1] == tokens[filled])
    rows.require(right, lambda row: f"must begin with 0 and end with {tokens[row]}, the tokens of the row")
    lengths = np.delete(np.diff(values, prepend=0), begins)
    return _of_lengths(replace(rows, values=lengths, counts=np.maximum(counts - 1, 0)))


def _of_starts(rows: _Rows) -> Begins:
    offsets = np.insert(rows.values, np.cumsum(rows.counts), rows.tokens)
    return _of_offsets(replace(rows, values=offsets, counts=rows.counts + 1))


Reader = Callable[[_Rows], Begins | None]
"""Returns where documents begin; None: nothing is said about it."""
_PADDING = "and padding would be trained on. Tokenise without padding, or keep only the tokens of documents"
_SIDE = r"((inputs?|targets|encoder|decoder|tokens?|text|rope)_)?"
"""Of which part of an example a column is, as T5X and MaxText name it (`decoder_segment_ids`)."""
_PART = r"(sub|seq|sequence|doc|document|segment|example|sample|conversation|packed|packing|pack)"
_PARTS = rf"({_PART}s?_?)+"
_CONVENTIONS: tuple[tuple[re.Pattern[str], Reader], ...] = (
    (re.compile(rf"{_SIDE}({_PARTS})?((position|pos)_?ids?|positions?)|input_?pos"), _of_positions),
    (re.compile(rf"{_SIDE}(segment_?(ids?|idx|indices|index)|segmentation)"), _of_segments),
    (re.compile(rf"{_SIDE}{_PARTS}(ids?|idx|indices|index)"), _of_ids),
    (re.compile(rf"(attention|{_PARTS})_?masks?"), _of_mask),
    (re.compile(rf"({_SIDE}{_PARTS})?(lens?|lengths?)(_?[qk])?"), _of_lengths),
    (re.compile(rf"{_PARTS}starts?(_?(ids?|idx|indices|positions?))?"), _of_starts),
    (
        re.compile(
            rf"(cu|cumulative)_?({_PARTS})?(lens?|lengths?)(_?[qk])?(_?(un)?padded)?|"
            rf"{_PARTS}(offsets|bounds|boundaries|borders)"
        ),
        _of_offsets,
    ),
)
"""How columns of these names are read, where they hold lists. One that holds a number or a text is of the whole row."""
_NUMBERS_IN_TEXT = r"^[\[({\s]*[0-9]+([\s,;]+[0-9]+)+[\s\])}]*$"
"""Borders that were written as text, `[0, 12, 40]`."""
_TOKENS_OF_ROW = re.compile(r"(n|num|number_of)_?tokens|tokens?_?counts?")
_NUMBERS_IN_LISTS = re.compile(r"list.*\b(u?int\d+|bool|halffloat|float|double)\b")
_LISTS = re.compile(r"(large_|fixed_size_)?list")
_MARK_NONE = frozenset(("input_ids", "token_type_ids", "special_tokens_mask", "offset_mapping"))
"""What tokenizers of transformers return, but for masks of padding."""


def _reader_of(column: str) -> Reader | None:
    return next((read for pattern, read in _CONVENTIONS if pattern.fullmatch(column.lower())), None)


def document_offsets(
    dataset: Any, row_offsets: Int64[np.ndarray, " rows_plus_1"], name: str, *, others: Collection[str]
) -> Int64[np.ndarray, " documents_plus_1"]:
    """Returns the first token of each document of a Hugging Face dataset, and the number of tokens.

    Args:
        row_offsets: those of its rows, which are returned where no column marks a border within a row.
        name: opens each message.
        others: columns that are known to mark no borders, such as that of the tokens.

    Raises: DataError for rows that are padded, for a column of borders that does not fit its row or is not understood,
        for numbers in lists, or lists with a value for each token, that are neither known borders nor among `others`,
        and for two columns that differ.
    """
    found = {
        column: read
        for column in dataset.column_names
        if (read := _reader_of(column)) is not None and _holds_lists(dataset, column, read, name)
    }
    _refuse_padded_rows(dataset, row_offsets, name)
    for column in dataset.column_names:
        if column in {*found, *others, *_MARK_NONE}:
            continue
        kind = str(_type_of(dataset, column))
        if _NUMBERS_IN_LISTS.search(kind) or (_LISTS.match(kind) and _is_for_each_token(dataset, column, row_offsets)):
            raise DataError(
                f"{name}: column '{column}' may say where documents of a row begin, or what counts in the loss, and "
                f"its convention is not known here: drop it, remove_columns('{column}'), or rename it, "
                f"rename_column('{column}', NAME), to what it is: position_ids, document_ids, seq_lengths, cu_seqlens, "
                "seq_start_id or labels, all of integers"
            )
    starts: list[np.ndarray] = []
    is_divided = False
    parts = {column: _parts_of(dataset, column) for column in found}
    for first in range(0, len(dataset) if found else 0, ROWS_AT_ONCE):
        bounds = row_offsets[first : first + ROWS_AT_ONCE + 1] - row_offsets[first]
        marked: dict[str, np.ndarray] = {}
        for column, read in found.items():
            try:
                values, counts = _values(next(parts[column])[1])
                begins = read(_Rows(bounds=bounds, values=values, counts=counts))
            except _RowError as error:
                row, reason = error.args
                raise DataError(
                    f"{name}: '{column}' of row {first + row} {reason}; remove the column if it says something else"
                ) from None
            if begins is not None:
                marked[column] = begins
        merged = _agreed(marked, bounds, first, name)
        is_divided |= len(merged) != np.count_nonzero(np.diff(bounds))
        starts.append(merged + row_offsets[first])
    return np.concatenate([*starts, row_offsets[-1:]]) if is_divided else row_offsets


def _parts_of(dataset: Any, column: str) -> Iterator[tuple[slice, Any]]:
    """Yields a column as Arrow arrays of some rows at a time, each with the rows."""
    rows = dataset.select_columns([column]).with_format("arrow")
    for first in range(0, len(dataset), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        yield part, rows[part][column]


def _is_for_each_token(dataset: Any, column: str, row_offsets: Int64[np.ndarray, " rows_plus_1"]) -> bool:
    """Returns whether the lists of a column have as many values as their rows have tokens; some may be empty."""
    tokens, is_empty = np.diff(row_offsets), True
    for part, values in _parts_of(dataset, column):
        counts = list_lengths(values)
        if (counts != tokens[part])[counts > 0].any():
            return False
        is_empty &= not counts.any()
    return not is_empty


def _agreed(
    marked: dict[str, Bool[np.ndarray, " T"]], bounds: Int64[np.ndarray, " R_plus_1"], first: int, name: str
) -> Int64[np.ndarray, " documents"]:
    """Returns where documents begin. Raises: DataError naming two columns that do not agree."""
    (column, begins), *others = marked.items() or [("", _firsts(bounds))]
    for other, found in others:
        differs = np.flatnonzero(begins != found)
        if len(differs):
            row = _row_of(differs[0], bounds)
            raise DataError(
                f"{name}: '{column}' and '{other}' mark other documents in row {first + row}, at token "
                f"{differs[0] - bounds[row]}: remove the one that is wrong"
            )
    return np.flatnonzero(begins)


def _refuse_padded_rows(dataset: Any, row_offsets: Int64[np.ndarray, " rows_plus_1"], name: str) -> None:
    """Raises DataError if a column says of a row, in one number, that it has fewer tokens than it holds."""
    import pyarrow as pa

    tokens = np.diff(row_offsets)
    for column in dataset.column_names:
        if _reader_of(column) is not _of_lengths and not _TOKENS_OF_ROW.fullmatch(column.lower()):
            continue
        if not pa.types.is_integer(_type_of(dataset, column)):
            continue
        for part, values in _parts_of(dataset, column):
            said = values.to_numpy(zero_copy_only=False)  # null is not a number
            wrong = np.flatnonzero(said < tokens[part])
            if len(wrong):
                row = part.start + int(wrong[0])
                raise DataError(
                    f"{name}: '{column}' of row {row} says {said[wrong[0]]:.0f} tokens, and the row holds "
                    f"{tokens[row]}: if the others are padding, they would be trained on. Tokenise without padding; "
                    "remove the column if it counts something else"
                )


def _holds_lists(dataset: Any, column: str, read: Reader, name: str) -> bool:
    """Returns whether a column holds lists of whole numbers.

    Raises: DataError for lists of anything else, and for lists that were written as text or bytes.
    """
    import pyarrow as pa

    kind = _type_of(dataset, column)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    is_right = is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_written = (is_bytes and read not in (_of_ids, _of_segments)) or (is_text and _spells_numbers(dataset, column))
    if is_written or (pa.types.is_nested(kind) and not is_right):
        raise DataError(
            f"{name}: column '{column}' says where documents of a row begin, if it is what its name says, and must "
            f"hold lists of integers, found {kind}; remove it if it says something else"
        )
    return bool(is_right)


def _spells_numbers(dataset: Any, column: str) -> bool:
    """Returns whether a text of a column is several whole numbers."""
    import pyarrow.compute as pc

    parts = (values for _, values in _parts_of(dataset, column))
    return any(pc.any(pc.match_substring_regex(part, _NUMBERS_IN_TEXT)).as_py() for part in parts)


def _type_of(dataset: Any, column: str) -> Any:
    """Returns the Arrow type of a column; arrays of several axes are lists of lists to Arrow."""
    kind = dataset.data.schema.field(column).type
    return getattr(kind, "storage_type", kind)


def _values(column: Any) -> tuple[Int64[np.ndarray, " V"], Int64[np.ndarray, " R"]]:
    """Returns the values of some rows, and how many each has. A null is an empty list."""
    counts = list_lengths(column)
    flat = column.combine_chunks().flatten()
    if flat.null_count:
        place = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False)))
        raise _RowError(int(np.searchsorted(np.cumsum(counts), place, side="right")), "holds a null")
    return flat.to_numpy(zero_copy_only=False).astype(np.int64), counts


def list_lengths(column: Any) -> Int64[np.ndarray, " R"]:
    """Returns the number of values in each list of an Arrow column. A null is an empty list."""
    import pyarrow.compute as pc

    counts: Int64[np.ndarray, " R"] = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return counts.astype(np.int64)
