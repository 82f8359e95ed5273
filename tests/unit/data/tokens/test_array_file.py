"""Arrays in files are whole or absent, and a full disk is a readable error, not a killed process."""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from evenpack.data.tokens.array_file import mapped_array, write_array

OLD = np.array([7, 8, 9])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns the path of an older array."""
    write_array(tmp_path / "ids.npy", OLD)
    return tmp_path / "ids.npy"


def only_the_old(path: Path) -> bool:
    return [found.name for found in path.parent.iterdir()] == [path.name] and np.load(path).tolist() == OLD.tolist()


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_what_is_assigned_in_any_order_is_in_the_file(path: Path, kind: type) -> None:
    with mapped_array(path, 100_000, np.dtype(kind)) as array:
        assert np.load(path).tolist() == OLD.tolist()
        assert not array.any()
        array[50_000:] = np.arange(50_000, 100_000)
        array[:50_000] = np.arange(50_000)
    stored = np.load(path, mmap_mode="r")
    assert stored.dtype == kind
    np.testing.assert_array_equal(stored, np.arange(100_000).astype(kind))
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_the_blocks_are_there_before_they_are_written(path: Path) -> None:
    with mapped_array(path, 1_000_000, np.dtype(np.int32)):
        (partial,) = path.parent.glob(".*.partial")
        assert partial.stat().st_blocks * 512 >= 4_000_000


@pytest.mark.skipif(sys.platform == "darwin", reason="has no posix_fallocate")
def test_a_full_disk_is_reported_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="No space left"), mapped_array(path, 1_000, np.dtype(np.int32)):
        pytest.fail("the array was mapped")
    assert only_the_old(path)


def test_an_error_on_the_way_leaves_the_old_file(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), mapped_array(path, 1_000, np.dtype(np.int32)) as array:
        array[:] = 1 // 0
    assert only_the_old(path)
