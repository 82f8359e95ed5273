"""Documents that somebody else tokenised, with the interface of a token file: lists, arrays, rows of a table.

lists of token ids            TokenArrays.of_lists
flat tokens and offsets       TokenArrays: in memory, or mapped (`np.load(..., mmap_mode="r")`, `np.memmap`)
a Hugging Face dataset        TokenRows: one column of lists, read where it is; rows of several documents are divided
                              as other columns say (borders.py)

Each may have labels: for each token the token itself, or -100 where it is not predicted, as in a prompt.
"""

import mmap
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jaxtyping import Bool, Int32, Int64, Integer

from evenpack.data.keys import derive_key
from evenpack.data.permutation import permute
from evenpack.data.tokens.borders import document_offsets, list_lengths
from evenpack.data.tokens.file import TokenFile, joined_slices
from evenpack.errors import DataError

MOST_HASHED = 1 << 26
"""Tokens up to which a fingerprint reads all of them; of more it reads a sample, and all borders."""
_SAMPLED_DOCUMENTS = 1 << 10
_SAMPLED_TOKENS = 256
"""Tokens of each sampled document that are read, from its start."""
_HASH_CHUNK = 1 << 22
_DOCUMENTS_AT_ONCE = 1 << 18
"""2 MiB of offsets, which stay in the processor's cache from their copy to their hash."""
_MOST_ID = (1 << 31) - 1
_ROWS_AT_ONCE = 1 << 14
IGNORED = -100
"""The label of a token that is not predicted, as in the losses of transformers and torch."""
_LABELS = "labels"
_LOSS_MASKS = tuple(
    f"{part}_mask{ending}"
    for part in ("completion", "assistant", "loss", "prompt", "response", "label", "target", "action")
    for ending in ("", "s")
)
_WEIGHTS = tuple(
    f"{part}{ending}"
    for part in ("weight", "loss_weight", "token_weight", "sample_weight", "example_weight", "loss_scale")
    for ending in ("", "s")
)
"""Columns of weights in the loss, which no batch would have."""
ABOUT_THE_LOSS = frozenset((_LABELS, *_LOSS_MASKS, *_WEIGHTS))


class OwnTokens(TokenFile):
    """Documents with labels or without, in one line of text."""

    def __repr__(self) -> str:
        """Returns the size of the documents; `labels` if some tokens may be left out of the loss."""
        labels = ", labels" if self.labelled else ""
        return f"{type(self).__name__}({self.documents:,} documents, {self.tokens:,} tokens, {self.dtype}{labels})"

    def unpredicted(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Bool[np.ndarray, " tokens"]:
        """Returns where labels are -100. Raises: DataError at any other label that is not the token itself."""
        labels = self._gather_labels(token_offsets, lengths)
        left_out: Bool[np.ndarray, " tokens"] = labels == IGNORED
        wrong = ~left_out & (labels != self.gather(token_offsets, lengths))
        if wrong.any():
            first = int(np.argmax(wrong))
            piece = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
            place = token_offsets[piece] + first - np.sum(lengths[:piece])
            document = int(np.searchsorted(self.document_offsets, place, side="right")) - 1
            (token,) = self.gather(place[None], np.ones(1, dtype=np.int64))
            raise DataError(
                f"{self.prefix}: document {document} has label {labels[first]} at token "
                f"{place - self.document_offsets[document]}, which is {token}: a label is the token at the same place, "
                "not shifted, or -100 if it is not to be predicted"
            )
        return left_out

    def _gather_labels(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        raise NotImplementedError


class TokenArrays(OwnTokens):
    """Documents as flat tokens and the offset of each document among them."""

    def __init__(
        self,
        tokens: Any,
        offsets: Any,
        *,
        labels: Any = None,
        name: str = "own documents",
    ) -> None:
        """Takes arrays without copying them; mapped ones are mapped again by each worker process.

        Args:
            tokens: integers [tokens], those of all documents concatenated.
            offsets: integers [documents + 1], the first token of each document, and the number of all tokens.
            labels: signed integers [tokens]: each token itself, or -100 where it is not to be predicted; None: all are.
            name: stands in messages for the path of a file.

        Raises: DataError for arrays of other shapes or types, or offsets that do not begin at 0 and end at the end.
        """
        given = {"tokens": tokens, "offsets": offsets} | ({} if labels is None else {"labels": labels})
        for what, values in given.items():
            _refuse_masked(values, f"{name}: {what}")
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
                found = f"{type(values).__name__} {getattr(values, 'dtype', '')} {getattr(values, 'shape', '')}"
                raise DataError(f"{name}: {what} must be a numpy array of integers with one axis, found {found}")
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens):
            found = f"{offsets[0]} and {offsets[-1]}" if len(offsets) else "none"
            raise DataError(
                f"{name}: the first offset must be 0 and the last the number of tokens, {len(tokens)}; found {found}. "
                "Offsets are where documents begin, and one more where the last one ends"
            )
        if labels is not None and (len(labels) != len(tokens) or labels.dtype.kind != "i"):
            raise DataError(
                f"{name}: labels must be signed integers, one for each of {len(tokens)} tokens, found {labels.dtype} "
                f"[{len(labels)}]"
            )
        self.prefix = Path(name)
        self.documents = len(offsets) - 1
        self.tokens = len(tokens)
        self.dtype = tokens.dtype
        self.labelled = labels is not None
        self._given = tuple(given.values())
        self._tokens = tokens.view(np.ndarray)
        self._offsets = offsets.view(np.ndarray)
        self._labels = None if labels is None else labels.view(np.ndarray)

    @classmethod
    def of_lists(
        cls,
        documents: "Sequence[Any] | np.ndarray",
        *,
        labels: "Sequence[Any] | np.ndarray | None" = None,
        name: str = "own documents",
    ) -> "TokenArrays":
        """Copies lists of token ids, or arrays or tensors of them, into two arrays; and lists of labels into a third.

        Raises: DataError naming the first document that holds anything but whole numbers from 0 to 2**31 - 1, or whose
            labels are not as many.
        """
        parts = [_token_ids(document, f"{name}: document {index}") for index, document in enumerate(documents)]
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        if labels is None:
            return cls(_flat_of(parts), offsets, name=name)
        if len(labels) != len(parts):
            raise DataError(f"{name}: labels for {len(labels)} documents, there are {len(parts)}")
        for index, one in enumerate(labels):
            _refuse_masked(one, f"{name}: labels of document {index}")
        kept = [np.asarray(one) for one in labels]
        for index, (one, part) in enumerate(zip(kept, parts, strict=True)):
            if one.shape != part.shape or (len(one) and one.dtype.kind not in "iu"):
                raise DataError(
                    f"{name}: document {index} has labels of type {one.dtype} and shape {list(one.shape)}, expected a "
                    f"whole number for each of its {len(part)} tokens"
                )
        filled = [one for one in kept if len(one)]  # an empty list has no type of its own, and becomes float64
        return cls(_flat_of(parts), offsets, labels=_flat_of(filled), name=name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.prefix), *(_Mapped.of(array) for array in self._given)), self.reads_alone

    def document_starts(self, boundaries: Integer[np.ndarray, " K"] | slice) -> Int64[np.ndarray, " K"]:
        return self._offsets[boundaries].astype(np.int64)

    def spans(self, documents: Integer[np.ndarray, " K"]) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
        """Returns first token and length of each. Raises: DataError if one ends before it begins, or leaves the tokens.

        Checked here and not in all offsets at once, so that opening does not read them.
        """
        starts, lengths = super().spans(documents)
        ends = starts + lengths
        if min(lengths.min(initial=0), starts.min(initial=0)) < 0 or ends.max(initial=0) > self.tokens:
            place = int(np.argmax((lengths < 0) | (starts < 0) | (ends > self.tokens)))
            raise DataError(
                f"{self.prefix}: document {documents[place]} begins at token {starts[place]} and ends at "
                f"{starts[place] + lengths[place]} of {self.tokens}: offsets must never decrease"
            )
        return starts, lengths

    def _gather_labels(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        assert self._labels is not None, "asked of labelled documents alone"
        return joined_slices(self._labels, token_offsets, token_offsets + lengths)

    def mapped_arrays(self) -> Sequence[np.ndarray]:
        """Returns those that are mapped as a whole; a copy-on-write one would lose what was written to it."""
        return [array for array in self._given if isinstance(_Mapped.of(array), _Mapped)]


class TokenRows(OwnTokens):
    """The documents of a Hugging Face dataset: a row of token ids is one, or several; rows are read when needed."""

    def __init__(
        self,
        dataset: Any,
        *,
        column: str = "input_ids",
        name: str = "own documents",
        offsets: Int64[np.ndarray, " documents_plus_1"] | None = None,
    ) -> None:
        """Reads the lengths of all rows, and the columns that divide rows into documents.

        A row that is null is an empty document. A column `labels` is used. `offsets` are those of the documents, where
        they were found before.

        Raises: DataError if there is no such column, or if it or `labels` holds anything but lists of integers, or if
            these have other lengths, or for a column that says otherwise what counts in the loss, or as
            `document_offsets` for rows that were padded or packed before.
        """
        import pyarrow as pa

        if not hasattr(dataset, "__len__"):
            raise DataError(
                f"{name}: the {type(dataset).__name__} is read from front to back only, and packs need all lengths "
                "before: load it without streaming, or write its rows to a datasets.Dataset (from_generator)"
            )
        if column not in dataset.column_names:
            raise DataError(
                f"{name}: the dataset has no column '{column}' but {', '.join(dataset.column_names)}: tokenise it "
                f"first (dataset.map), or name the column that holds token ids"
            )
        if dataset.format["type"] == "custom":
            raise DataError(
                f"{name}: the dataset has a transform (set_transform, with_transform), which makes rows as they are "
                "read: write them with dataset.map, or drop it by dataset.with_format(None)"
            )
        self.prefix = Path(name)
        self.labelled = _LABELS in dataset.column_names
        masks = [one for one in _LOSS_MASKS if one in dataset.column_names]
        if masks and not self.labelled:
            raise DataError(
                f"{name}: the dataset says in {', '.join(masks)} what counts in the loss, and has no column "
                f"'{_LABELS}': make it, with -100 where a token does not count (PackSFTTrainer does), or remove them"
            )
        weights = [one for one in _WEIGHTS if one in dataset.column_names]
        if weights:
            raise DataError(
                f"{name}: the dataset has weights in {', '.join(weights)}, and the loader none: a token counts in the "
                f"loss, or has the label -100 in '{_LABELS}'; remove them, and weight the losses in a loop of your own"
            )
        self._column = column
        self._dataset = dataset = dataset.with_format("arrow")
        self._rows: dict[str, Any] = {}
        for one in (column, _LABELS) if self.labelled else (column,):
            self._rows[one] = rows = dataset.select_columns([one])
            kind = rows.data.schema.field(one).type
            lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            if not (lists and pa.types.is_integer(kind.value_type)):
                advice = "; remove it if it does not say which tokens are predicted" if one == _LABELS else ""
                raise DataError(f"{name}: column '{one}' must hold lists of integers, found {kind}{advice}")
        kind = self._rows[column].data.schema.field(column).type
        self.dtype = np.dtype(kind.value_type.to_pandas_dtype())
        self.tokens = int(self._offsets[-1])
        if self.labelled:
            wrong = np.flatnonzero(np.diff(self._offsets_of(_LABELS)) != np.diff(self._offsets))
            if len(wrong):
                raise DataError(
                    f"{name}: {len(wrong)} rows, the first of them row {wrong[0]}, have not as many '{_LABELS}' as "
                    f"'{column}': give a label for each token, -100 where it is not to be predicted"
                )
        if offsets is None:
            offsets = document_offsets(dataset, self._offsets, name, others={column, *ABOUT_THE_LOSS})
        self._documents = offsets
        self.documents = len(self._documents) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self._dataset.select_columns(list(self._rows))
        offsets = None if self._documents is self._offsets else self._documents
        return partial(TokenRows, column=self._column, name=str(self.prefix), offsets=offsets), (rows,)

    @cached_property
    def _offsets(self) -> Int64[np.ndarray, " rows_plus_1"]:
        return self._offsets_of(self._column)

    def _offsets_of(self, column: str) -> Int64[np.ndarray, " rows_plus_1"]:
        count = len(self._dataset)
        offsets = np.zeros(count + 1, dtype=np.int64)
        for start in range(0, count, _ROWS_AT_ONCE):
            lengths = list_lengths(self._rows[column][start : start + _ROWS_AT_ONCE][column])
            offsets[1 + start : 1 + start + len(lengths)] = lengths
        return np.cumsum(offsets, out=offsets)

    def document_starts(self, boundaries: Integer[np.ndarray, " K"] | slice) -> Int64[np.ndarray, " K"]:
        return self._documents[boundaries]

    def read(self, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        return self.gather(np.array([start]), np.array([stop - start]))

    def gather(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        return self._gather(self._column, token_offsets, lengths)

    def _gather_labels(
        self, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        return self._gather(_LABELS, token_offsets, lengths)

    def _gather(
        self, column: str, token_offsets: Integer[np.ndarray, " K"], lengths: Integer[np.ndarray, " K"]
    ) -> Integer[np.ndarray, " tokens"]:
        if len(token_offsets) == 0:
            return np.empty(0, dtype=self.dtype)
        # An empty slice at the end of the last row begins in no row.
        firsts = np.minimum(np.searchsorted(self._offsets, token_offsets, side="right"), len(self._dataset)) - 1
        lasts = np.maximum(np.searchsorted(self._offsets, token_offsets + lengths, side="left") - 1, firsts)
        rows = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, lasts, strict=True)]))
        content = self._flat(column, rows.tolist())
        begins = np.concatenate([[0], np.cumsum(np.diff(self._offsets)[rows])])
        starts = begins[np.searchsorted(rows, firsts)] + token_offsets - self._offsets[firsts]
        return joined_slices(content, starts, starts + lengths)

    def mapped_arrays(self) -> Sequence[np.ndarray]:
        """Returns none: the dataset decides what it keeps in memory."""
        return ()

    def _flat(self, column: str, rows: Sequence[int]) -> np.ndarray:
        flat = self._rows[column][rows][column].combine_chunks().flatten()
        if flat.null_count:
            (missing, *_) = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))
            ends = np.cumsum(np.diff(self._offsets)[rows])
            row = rows[int(np.searchsorted(ends, missing, side="right"))]
            raise DataError(f"{self.prefix}: row {row} has a null in '{column}': drop or mend such rows first")
        return flat.to_numpy(zero_copy_only=False)


def _flat_of(parts: Sequence[np.ndarray]) -> Int32[np.ndarray, " values"]:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts], dtype=np.int32)


def _token_ids(document: Any, where: str) -> Int32[np.ndarray, " tokens"]:
    """Returns a copy of one document. Raises: DataError, which `where` opens."""
    _refuse_masked(document, where)
    is_array = hasattr(document, "__array__")
    if is_array:
        values = np.asarray(document)
        right = values.ndim == 1 and values.dtype.kind in "iu"
    else:
        right = isinstance(document, Sequence) and not isinstance(document, str | bytes | bytearray)
        right = right and all(type(token) is int or isinstance(token, np.integer) for token in document)
    if not right:
        is_row = isinstance(document, Mapping)
        advice = "rows make a datasets.Dataset (from_list), which is taken whole" if is_row else "tokenise texts first"
        raise DataError(
            f"{where} must be a list of token ids (whole numbers), or an array of them with one axis, found "
            f"{document!r:.60}; {advice}"
        )
    least, greatest = (
        (values.min(initial=0), values.max(initial=0))
        if is_array
        else (min(document, default=0), max(document, default=0))
    )
    if least < 0 or greatest > _MOST_ID:
        raise DataError(f"{where} holds token id {least if least < 0 else greatest}, expected 0 to 2**31 - 1")
    return np.array(document, dtype=np.int32)


def _refuse_masked(values: Any, where: str) -> None:
    """Raises DataError for an array of numpy that hides some of its values, which would be taken all the same."""
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(
            f"{where} is a masked array, and what it hides would be trained on: give the tokens that count "
            "(`compressed()`), or labels of -100"
        )


def hash_content(documents: TokenFile) -> str:
    """Returns a hash of the tokens, their division into documents and which are predicted, whatever the arrays' types.

    Up to 2**26 tokens all are read; of more, where each document begins, and the tokens of a fixed sample of 1,024.
    """
    digest = xxhash.xxh3_128(f"{documents.documents} documents, {documents.tokens} tokens".encode())
    if documents.tokens <= MOST_HASHED:
        digest.update(np.ascontiguousarray(documents.document_lengths(), dtype="<i8").data)
        for start in range(0, documents.tokens, _HASH_CHUNK):
            tokens = documents.read(start, min(start + _HASH_CHUNK, documents.tokens))
            digest.update(np.ascontiguousarray(tokens, dtype="<u4").data)
            if documents.labelled:
                digest.update(documents.unpredicted(np.array([start]), np.array([len(tokens)])).view(np.uint8).data)
        return digest.hexdigest()
    for start in range(0, documents.documents, _DOCUMENTS_AT_ONCE):
        starts = documents.document_starts(slice(start, min(start + _DOCUMENTS_AT_ONCE, documents.documents)))
        digest.update(np.ascontiguousarray(starts, dtype="<i8").data)
        documents.release_pages()
    sample = np.arange(min(_SAMPLED_DOCUMENTS, documents.documents))
    key = derive_key(0, documents.documents)
    chosen = permute(sample, np.full(len(sample), documents.documents), np.full(len(sample), key, dtype=np.uint64))
    starts, lengths = documents.spans(chosen)
    digest.update(lengths.astype("<i8").data)
    lengths = np.minimum(lengths, _SAMPLED_TOKENS)
    digest.update(documents.gather(starts, lengths).astype("<u4").data)
    if documents.labelled:
        digest.update(documents.unpredicted(starts, lengths).view(np.uint8).data)
    return digest.hexdigest()


class _Mapped:
    """A mapped array as its place in a file, so that a pickle does not hold its content."""

    def __init__(self, array: np.memmap) -> None:
        self.path, self.offset = str(array.filename), array.offset
        self.dtype, self.shape = array.dtype, array.shape

    @classmethod
    def of(cls, array: np.ndarray) -> "np.ndarray | _Mapped":
        """Returns the place of an array that is mapped as a whole, or the array.

        A part of one has no place to tell, and a copy-on-write one may hold what its file does not.
        """
        file: Any = array.base
        if not isinstance(array, np.memmap) or not isinstance(file, mmap.mmap) or array.filename is None:
            return array
        return array if array.mode == "c" else cls(array)

    def open(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self.dtype, mode="r", offset=self.offset, shape=self.shape)


def _reopen(name: str, *given: "np.ndarray | _Mapped") -> TokenArrays:
    tokens, offsets, *labels = (one.open() if isinstance(one, _Mapped) else one for one in given)
    return TokenArrays(tokens, offsets, labels=labels[0] if labels else None, name=name)
