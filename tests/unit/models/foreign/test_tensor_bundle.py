"""Our reader of TensorFlow's checkpoints agrees with TensorFlow's own, and reports damaged files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensorflow_checkpoints import BERT, SHARDS, SNAPPY, copy_of, values_of

from evenpack.errors import CheckpointError
from evenpack.models.foreign.tensor_bundle import TensorBundle, read_table

UNREADABLE = {"sliced", "text"}
"""Of the checkpoints in shards."""


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize(
    ("prefix", "unreadable"),
    [(BERT, set()), (SHARDS, UNREADABLE), (SNAPPY, UNREADABLE)],
    ids=["bert", "shards", "snappy"],
)
def test_every_tensor_is_what_tensorflow_reads_to_the_bit(prefix: Path, unreadable: set[str]) -> None:
    bundle, expected = TensorBundle(prefix), values_of(prefix)
    assert set(bundle) == expected.keys() | unreadable
    for name in expected.keys() - unreadable:
        found = as_numpy(bundle[name])
        assert (found.dtype, found.shape) == (expected[name].dtype, expected[name].shape), name
        assert found.tobytes() == expected[name].tobytes(), name


def test_the_checkpoint_in_shards_has_tensors_of_many_types_in_each() -> None:
    bundle = TensorBundle(SHARDS)
    assert {entry.shard for entry in bundle.entries.values() if entry.size} == {0, 1, 2}
    assert {bundle[name].dtype for name in bundle.keys() - UNREADABLE} == {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
    }


def test_an_index_that_snappy_compressed_in_two_blocks_says_what_the_plain_one_says() -> None:
    plain, packed = Path(f"{SHARDS}.index"), Path(f"{SNAPPY}.index")
    assert packed.stat().st_size < plain.stat().st_size
    assert list(read_table(packed).items()) == list(read_table(plain).items())


def test_writing_to_a_tensor_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    prefix = copy_of(BERT, tmp_path)
    before = Path(f"{prefix}.data-00000-of-00001").read_bytes()
    TensorBundle(prefix)["bert/pooler/dense/bias"].zero_()
    assert Path(f"{prefix}.data-00000-of-00001").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sliced", r"sliced in .*sharded\.ckpt is a partitioned variable, expected numbers in one piece"),
        ("text", r"text in .*sharded\.ckpt is of TensorFlow's type 7, expected numbers"),
    ],
)
def test_what_is_no_array_in_one_piece_is_named(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TensorBundle(SHARDS)[name]


def test_a_missing_or_short_data_file_is_named(tmp_path: Path) -> None:
    prefix = copy_of(SHARDS, tmp_path)
    path = Path(f"{prefix}.data-00001-of-00003")
    entry = TensorBundle(prefix).entries["first"]
    assert entry.shard == 1
    path.write_bytes(path.read_bytes()[: entry.offset + entry.size - 1])
    with pytest.raises(CheckpointError, match=rf"{path} is cut off: expected at least {entry.offset + entry.size} "):
        TensorBundle(prefix)["first"]
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path} cannot be read: .*No such file"):
        TensorBundle(prefix)["first"]
    assert TensorBundle(prefix)["second/kernel"].shape == (2, 3)


def test_one_wrong_bit_of_a_tensor_is_found_and_others_are_still_read(tmp_path: Path) -> None:
    prefix = copy_of(BERT, tmp_path)
    path = Path(f"{prefix}.data-00000-of-00001")
    content = bytearray(path.read_bytes())
    entry = TensorBundle(prefix).entries["bert/pooler/dense/kernel"]
    content[entry.offset + 7] ^= 16
    path.write_bytes(content)
    bundle = TensorBundle(prefix)
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: the checksum of bert/pooler/dense/kernel is wrong"):
        bundle["bert/pooler/dense/kernel"]
    assert bundle["bert/pooler/dense/bias"].shape == (8,)


@pytest.mark.parametrize("place", [*range(0, 4621, 330), 4668])
def test_each_damaged_byte_of_the_index_is_found(tmp_path: Path, place: int) -> None:
    """The last 48 bytes are the footer, padded with zeros that have no meaning."""
    prefix = copy_of(BERT, tmp_path)
    index = Path(f"{prefix}.index")
    content = bytearray(index.read_bytes())
    content[place] ^= 4
    index.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{index} is not a whole index .* copy it again"):
        TensorBundle(prefix)


@pytest.mark.parametrize("size", [0, 10, 47, 300, 4000, 4668])
def test_an_index_that_is_cut_off_is_named(tmp_path: Path, size: int) -> None:
    prefix = copy_of(BERT, tmp_path)
    index = Path(f"{prefix}.index")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=rf"{index} is not a whole index of a TensorFlow checkpoint"):
        TensorBundle(prefix)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.index cannot be read: .*No such file"):
        TensorBundle(tmp_path / "model")
