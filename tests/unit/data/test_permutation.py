"""Permutations are bijective at every size, exactly inverted, and as even as shuffles."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evenpack.data.keys import derive_key, hash64
from evenpack.data.permutation import permute

WORD = 2**64
LEAST_P = 1e-4
"""Keys are fixed, so a test that passes once passes always; 1e-4 is far below what chance gives in so few tests."""


def constant(value: int, count: int, dtype: type = np.int64) -> np.ndarray:
    return np.full(count, value, dtype=dtype)


def whole(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), constant(size, size), constant(key, size, np.uint64))


def images(index: int, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the image of `index` under each key's permutation."""
    return permute(constant(index, len(keys)), constant(size, len(keys)), keys)


def many_keys(seed: int, count: int) -> np.ndarray:
    return derive_key(seed, np.arange(count, dtype=np.uint64))


@pytest.mark.parametrize("key", [0, 1, WORD - 1, 0x123456789ABCDEF])
@pytest.mark.parametrize("inverse", [False, True])
def test_every_size_is_permuted_without_gap_and_exactly_inverted(key, inverse):
    sizes = np.concatenate([np.arange(1, 140), [255, 256, 257, 511, 512, 513, 1000, 4096, 4097, 65_537]])
    elements = np.concatenate([np.arange(size) for size in sizes])
    element_sizes = np.repeat(sizes, sizes)
    keys = constant(key, len(elements), np.uint64)
    result = permute(elements, element_sizes, keys, inverse=inverse)
    np.testing.assert_array_equal(result[np.lexsort((result, element_sizes))], elements)
    np.testing.assert_array_equal(permute(result, element_sizes, keys, inverse=not inverse), elements)


@given(data=st.data())
@settings(max_examples=60)
def test_elements_of_any_sizes_and_keys_stand_beside_each_other(data):
    sizes = data.draw(st.lists(st.one_of(st.integers(1, 70), st.integers(1, 2**53)), min_size=1, max_size=20))
    indices = np.array([data.draw(st.integers(0, size - 1)) for size in sizes])
    keys = np.array([data.draw(st.integers(0, WORD - 1)) for _ in sizes], dtype=np.uint64)
    result = permute(indices, np.array(sizes), keys)
    assert ((result >= 0) & (result < sizes)).all()
    np.testing.assert_array_equal(permute(result, np.array(sizes), keys, inverse=True), indices)
    for place, size in enumerate(sizes):
        alone = permute(indices[place : place + 1], np.array([size]), keys[place : place + 1])
        assert alone[0] == result[place]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_permutations_are_all_equally_frequent(size):
    keys = many_keys(7, 150_000)
    numbers = sum(images(index, size, keys) * size**index for index in range(size))
    _, counts = np.unique(numbers, return_counts=True)
    assert len(counts) == math.factorial(size)
    assert stats.chisquare(counts).pvalue > LEAST_P


@pytest.mark.parametrize("size", [6, 17, 32, 33, 48, 64, 65])
@pytest.mark.parametrize("indices", [(0, 1), (0, -1), (3, 5)])
def test_any_two_elements_go_to_any_two_places_equally_often(size, indices):
    """Neighbours are the hard case: they differ in one half of a Feistel network only."""
    keys = many_keys(11, 250_000)
    first, second = (images(index % size, size, keys) for index in indices)
    counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)
    assert counts.trace() == 0
    assert stats.chisquare(counts[~np.eye(size, dtype=bool)]).pvalue > LEAST_P


def test_permutations_of_neighbouring_keys_agree_no_more_than_by_chance():
    keys, size = 1_001, 200
    sizes = constant(size, keys * size)
    result = permute(np.tile(np.arange(size), keys), sizes, np.repeat(np.arange(keys, dtype=np.uint64), size))
    by_key = result.reshape(keys, size)
    agreements = (by_key[1:] == by_key[:-1]).sum(axis=1)
    assert np.mean(agreements) == pytest.approx(1.0, abs=0.15)  # a Poisson mean of 1, its error 0.03


def test_a_billion_elements_are_spread_without_an_array():
    count = 100_000
    indices = np.arange(count)
    result = permute(indices, constant(10**9, count), constant(5, count, np.uint64))
    assert len(np.unique(result)) == count
    assert stats.kstest(result / 10**9, "uniform").pvalue > LEAST_P
    assert abs(stats.spearmanr(indices, result).statistic) < 0.02
    assert stats.kstest(np.diff(result) % 10**9 / 10**9, "uniform").pvalue > LEAST_P


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0), (0, 2**53 + 1)])
def test_an_index_outside_its_permutation_is_refused(index, size):
    for inverse in (False, True):
        with pytest.raises(ValueError, match=f"element 1: index {index} is outside a permutation of size {size}"):
            permute(np.array([0, index]), np.array([1, size]), np.zeros(2, dtype=np.uint64), inverse=inverse)


def test_the_order_is_the_same_on_every_platform_and_in_every_version():
    """A changed value would change the order of every run that is resumed."""
    assert hash64(np.array([0, 1234567], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]
    assert int(derive_key(42, 3, 1)) == 6717522985872898827
    assert whole(7, 42).tolist() == [4, 6, 1, 0, 2, 5, 3]
    assert whole(20, 42).tolist()[:8] == [4, 18, 10, 15, 2, 11, 12, 13]
    assert whole(40, 42).tolist()[:8] == [22, 0, 31, 24, 23, 29, 37, 9]
    assert images(12_345, 10**9, many_keys(1, 3)).tolist() == [101089908, 142871854, 314305687]


def test_a_key_depends_on_every_part_and_its_place():
    parts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (WORD - 2,), (0, 0, 0)]
    keys = [int(derive_key(*part)) for part in parts]
    assert len(set(keys)) == len(parts)
    assert int(derive_key(-1)) == int(derive_key(WORD - 1))
