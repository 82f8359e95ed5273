"""Token files: the layout compared with DeepSpeed's own code, bad files, and bulk reads."""

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDatasetBuilder
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import dtypes as DEEPSPEED_TYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import all_documents, make_documents, write

from evenpack.data.tokens import file as token_file_module
from evenpack.data.tokens.file import TokenFile, hash_documents
from evenpack.errors import DataError

VOCABULARIES = {"uint16": 50_257, "int32": 70_000}
HEADER_BYTES = 34
CODE_AT = 17
MEGATRON_CODES = {
    "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8,
}  # fmt: skip
"""`DType` of Megatron-LM's megatron/core/datasets/indexed_dataset.py, in 2023 as in 2026."""


def write_with_deepspeed(prefix: Path, documents: list[list[np.ndarray]], dtype: type) -> None:
    """Writes documents, given as lists of sentences, with DeepSpeed."""
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentences in documents:
        for sentence in sentences:
            builder.add_item_numpy(sentence.astype(dtype))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def patch(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


# --- the layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", VOCABULARIES)
def test_our_files_are_those_of_deepspeeds_builder_but_for_the_code_of_uint16(tmp_path: Path, dtype: str) -> None:
    documents = make_documents(50, vocabulary_size=VOCABULARIES[dtype])
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(token_file_module, "_CHUNK_DOCUMENTS", 7)  # many chunks, the last one not full
        write(tmp_path / "ours", documents, vocabulary_size=VOCABULARIES[dtype])
    write_with_deepspeed(tmp_path / "theirs", [[document] for document in documents], getattr(np, dtype))
    if dtype == "uint16":
        patch(tmp_path / "theirs.idx", CODE_AT, bytes([MEGATRON_CODES[dtype]]))

    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()


def test_no_code_stands_for_uint16_in_both_tables() -> None:
    """If there were one, we should write it."""
    in_deepspeed = {np.dtype(kind).name: code for code, (kind, _) in DEEPSPEED_TYPES.items()}
    assert in_deepspeed["uint16"] != MEGATRON_CODES["uint16"]
    assert in_deepspeed["int32"] == MEGATRON_CODES["int32"]


def test_uint16_under_deepspeeds_code_is_read_and_float64_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "older", [np.arange(5)])
    patch(tmp_path / "older.idx", CODE_AT, bytes([6]))
    assert all_documents(TokenFile(tmp_path / "older")) == [[0, 1, 2, 3, 4]]

    write_with_deepspeed(tmp_path / "floats", [[np.arange(5)]], np.uint64)  # as long as float64
    patch(tmp_path / "floats.idx", CODE_AT, bytes([MEGATRON_CODES["float64"]]))
    with pytest.raises(DataError, match=r"floats\.bin .* 40 bytes, but .* describes 10 bytes of uint16 tokens"):
        TokenFile(tmp_path / "floats")


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16, np.uint32, np.uint64])
def test_we_read_what_deepspeed_writes_with_documents_of_several_sentences(tmp_path: Path, dtype: type) -> None:
    rng = np.random.default_rng(3)
    documents = [
        [rng.integers(0, 100, length) for length in rng.integers(1, 9, sentences)] for sentences in (1, 3, 0, 2, 5, 0)
    ]
    write_with_deepspeed(tmp_path / "theirs", documents, dtype)

    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(token_file_module, "_CHUNK_DOCUMENTS", 4)
        tokens = TokenFile(tmp_path / "theirs")
        found = all_documents(tokens)

    expected = [[int(token) for sentence in sentences for token in sentence] for sentences in documents]
    assert tokens.dtype == np.dtype(dtype)
    assert found == expected
    assert tokens.documents == 6
    assert tokens.tokens == sum(len(document) for document in expected)
    assert tokens.document_lengths().tolist() == [len(document) for document in expected]
    starts, lengths = tokens.spans(np.array([5, 1, 1, 0]))
    assert lengths.tolist() == [len(expected[index]) for index in (5, 1, 1, 0)]
    assert starts.tolist() == [tokens.document_offsets[index] for index in (5, 1, 1, 0)]


def test_the_lengths_of_some_documents_take_memory_for_those_alone(tmp_path: Path) -> None:
    documents = make_documents(25_000, vocabulary_size=50, longest=3)
    token_file = write(tmp_path / "many", documents)
    tracemalloc.start()
    try:
        found = [token_file.document_lengths(start, start + 100) for start in range(0, 25_000, 100)]
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert np.concatenate(found).tolist() == [len(document) for document in documents]
    assert kept < 300_000  # the 200 kB that `found` holds
    assert most < 300_000


@pytest.mark.parametrize(("start", "stop"), [(0, None), (2, 5), (5, 2), (4, 99), (-2, None), (6, 6)])
def test_the_lengths_of_some_documents_are_a_slice_of_all(tmp_path: Path, start: int, stop: int | None) -> None:
    token_file = write(tmp_path / "few", [np.arange(n) for n in range(1, 7)])
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(token_file_module, "_CHUNK_DOCUMENTS", 2)
        assert token_file.document_lengths(start, stop).tolist() == [1, 2, 3, 4, 5, 6][start:stop]


def test_a_file_without_documents_can_be_written_and_read(tmp_path: Path) -> None:
    tokens = write(tmp_path / "empty", [])

    assert (tokens.documents, tokens.tokens) == (0, 0)
    assert tokens.document_offsets.tolist() == [0]
    assert len(tokens.gather(np.array([], dtype=np.int64), np.array([], dtype=np.int64))) == 0
    assert len(hash_documents(tokens)) == 0


# --- bad files ----------------------------------------------------------------------------------------------------

# Of the file that `three_documents` writes: 3 documents, 3 + 4 + 5 tokens of uint16, 94 bytes of index.
LENGTHS_AT, POINTERS_AT, DOCUMENTS_AT = HEADER_BYTES, HEADER_BYTES + 12, HEADER_BYTES + 36


@pytest.fixture
def three_documents(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus.v1"
    write(prefix, [np.arange(3), np.arange(4), np.arange(5)])
    return prefix


def int64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda index, data: index.unlink(), ["corpus.v1.idx does not exist", "without either ending"]),
        (lambda index, data: data.unlink(), ["corpus.v1.bin does not exist"]),
        (lambda index, data: os.truncate(index, 101), ["corpus.v1.idx", "101 bytes", "expected 102"]),
        (lambda index, data: os.truncate(index, 0), ["corpus.v1.idx", "not an index of a token file"]),
        (lambda index, data: index.write_bytes(index.read_bytes() + b"\0"), ["103 bytes", "expected 102"]),
        (lambda index, data: index.write_bytes(index.read_bytes() + b"\0\0\0"), ["multimodal"]),
        (lambda index, data: patch(index, 0, b"PK\3\4"), ["not an index of a token file", "expected b'MMIDIDX"]),
        (lambda index, data: patch(index, 0, b"TNTIDX\0\0"), ["older", "'mmap'"]),
        (lambda index, data: patch(index, 9, int64(2)), ["version 2", "expected version 1"]),
        (lambda index, data: patch(index, CODE_AT, bytes([99])), ["token type code 99", "1 to 8"]),
        (lambda index, data: patch(index, CODE_AT, bytes([4])), ["24 bytes", "describes 34 bytes of int32"]),
        (lambda index, data: os.truncate(data, 22), ["corpus.v1.bin", "22 bytes", "describes 24 bytes"]),
        (lambda index, data: data.write_bytes(bytes(26)), ["26 bytes", "describes 24 bytes"]),
        (lambda index, data: patch(index, LENGTHS_AT, b"\2"), ["sequence 0 has 2 tokens", "byte 4", "byte 6"]),
        (lambda index, data: patch(index, POINTERS_AT, b"\2"), ["sequence 0", "byte 8"]),
        (lambda index, data: patch(index, LENGTHS_AT, (-1).to_bytes(4, "little", signed=True)), ["-1 tokens"]),
        (
            lambda index, data: patch(index, LENGTHS_AT, np.array([-1, 8, 5, 0, 0, -2, -1], "<i4").tobytes()),
            ["sequence 0 has -1 tokens"],  # with pointers that agree
        ),
        (
            lambda index, data: patch(index, LENGTHS_AT, np.array([2, 4, 5, 2, 0], "<i4").tobytes()),
            ["first sequence begins at byte 2, expected 0"],
        ),
        (lambda index, data: patch(index, DOCUMENTS_AT, int64(1)), ["sequences 1 to 3, expected 0 to 3"]),
        (lambda index, data: patch(index, DOCUMENTS_AT + 8, int64(3)), ["document 1 ends before"]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_a_file_that_is_cut_foreign_or_inconsistent_is_refused_with_the_finding(
    three_documents: Path, damage: Callable[[Path, Path], Any], words: list[str], chunk: int
) -> None:
    index, data = (three_documents.with_name(f"{three_documents.name}.{ending}") for ending in ("idx", "bin"))
    assert TokenFile(three_documents).documents == 3  # sound before

    damage(index, data)
    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(token_file_module, "_CHUNK_DOCUMENTS", chunk)
        with pytest.raises(DataError) as caught:
            TokenFile(three_documents)
    for word in [*words, "corpus.v1"]:
        assert word in str(caught.value)


# --- reading ------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=60)
def test_gather_copies_what_slicing_would(numbers: TokenFile, data: st.DataObject) -> None:
    slices = data.draw(
        st.lists(
            st.integers(0, numbers.tokens).flatmap(
                lambda start: st.tuples(st.just(start), st.integers(0, numbers.tokens - start))
            ),
            max_size=20,
        )
    )
    offsets, lengths = np.array(slices, dtype=np.int64).reshape(-1, 2).T

    gathered = numbers.gather(offsets, lengths)

    assert gathered.dtype == numbers.dtype
    assert gathered.tolist() == [token for start, length in slices for token in range(start, start + length)]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (999, 2), (1001, 0), (5, -1)])
def test_gather_outside_the_file_is_an_error_and_never_shorter(numbers: TokenFile, offset: int, length: int) -> None:
    with pytest.raises(IndexError, match="of 1000 tokens"):
        numbers.gather(np.array([3, offset]), np.array([2, length]))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Writes tokens 0 to 999, in ten documents."""
    return write(tmp_path_factory.mktemp("numbers") / "tokens", np.split(np.arange(1000), 10))


def test_a_pickled_file_is_its_path_and_opens_in_another_folder(
    numbers: TokenFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(numbers.prefix.parent)
    pickled = pickle.dumps(TokenFile(Path(numbers.prefix.name)))
    monkeypatch.chdir(tmp_path)

    assert len(pickled) < 500
    assert pickle.loads(pickled).read(40, 45).tolist() == [40, 41, 42, 43, 44]


def test_tokens_cannot_be_written_through_a_read(numbers: TokenFile) -> None:
    with pytest.raises(ValueError, match="read-only"):
        numbers.read(0, 5)[0] = 1


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_an_id_outside_the_vocabulary_of_an_existing_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    documents = [np.array([1, 2, 3]), np.array([4, 9, 1]), np.array([9, 2])]
    write_with_deepspeed(tmp_path / "theirs", [[document] for document in documents], np.int32)
    monkeypatch.setattr(token_file_module, "_CHUNK_TOKENS", chunk)
    tokens = TokenFile(tmp_path / "theirs")

    tokens.check_vocabulary(10)
    with pytest.raises(DataError, match=r"document 1 holds token id 9, but the vocabulary has 9 entries"):
        tokens.check_vocabulary(9)

    patch(tmp_path / "theirs.bin", 4 * 6, b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match=r"document 2 holds token id -1"):
        TokenFile(tmp_path / "theirs").check_vocabulary(10)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_documents_without_the_end_of_text_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    documents = [[np.array([1, 2, 0])], [], [np.array([0]), np.array([3])], [np.array([4]), np.array([0])], []]
    write_with_deepspeed(tmp_path / "theirs", documents, np.uint16)
    monkeypatch.setattr(token_file_module, "_CHUNK_DOCUMENTS", chunk)

    assert TokenFile(tmp_path / "theirs").ends_in(0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_document_hashes_depend_on_the_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    documents = [*make_documents(20, vocabulary_size=50_000), np.array([], dtype=np.int64)]
    expected = [xxhash.xxh3_64_intdigest(document.astype("<u4").tobytes()) for document in documents]
    monkeypatch.setattr(token_file_module, "_CHUNK_TOKENS", chunk)

    for dtype in (np.uint16, np.int32, np.int64):
        prefix = tmp_path / dtype.__name__
        write_with_deepspeed(prefix, [[document] for document in documents], dtype)
        assert hash_documents(TokenFile(prefix)).tolist() == expected
