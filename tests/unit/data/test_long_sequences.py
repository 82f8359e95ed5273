"""Sequences longer than a pack are refused, truncated, dropped or split, to the last token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenpack.data.packing import LengthHistogram
from evenpack.errors import PackingError

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def histogram(lengths: list[int]) -> LengthHistogram:
    return LengthHistogram.from_lengths(lengths, longest=max(lengths))


def in_order(found: LengthHistogram) -> list[int]:
    return np.repeat(np.arange(1, len(found.counts) + 1), found.counts).tolist()


def pieces(length: int, pack_length: int) -> list[int]:
    whole, rest = divmod(length, pack_length)
    return [pack_length] * whole + [rest] * (rest > 0)


@given(some_lengths, st.integers(1, 70))
def test_each_policy_does_to_the_histogram_what_it_does_to_each_sequence(lengths: list[int], pack_length: int) -> None:
    expected = {
        "truncate": [min(length, pack_length) for length in lengths],
        "drop": [length for length in lengths if length <= pack_length],
        "split": [piece for length in lengths for piece in pieces(length, pack_length)],
    }
    for policy, after in expected.items():
        if not after:
            with pytest.raises(PackingError, match="without them none is left"):
                histogram(lengths).fitted(pack_length, policy)
            continue
        found = histogram(lengths).fitted(pack_length, policy)
        assert in_order(found.histogram) == sorted(after)
        assert found.long_sequences == sum(length > pack_length for length in lengths)
        assert found.tokens_lost == sum(lengths) - sum(after)
        assert found.policy == policy


def test_counts_stay_exact_beyond_what_a_float_can_hold() -> None:
    many = (1 << 59) + 1  # 2**53 is where floats begin to skip integers
    start = LengthHistogram(counts=np.array([1, 0, 0, 0, many]))
    split = start.fitted(2, "split")
    assert split.histogram.counts.tolist() == [many + 1, 2 * many]
    assert (split.long_sequences, split.tokens_lost) == (many, 0)
    assert start.fitted(2, "truncate").histogram.counts.tolist() == [1, many]
    assert start.fitted(2, "truncate").tokens_lost == 3 * many
    assert start.fitted(2, "drop").tokens_lost == 5 * many


def test_error_refuses_with_the_figures_and_keeps_what_fits() -> None:
    with pytest.raises(PackingError, match=r"2 of 3 sequences, the longest of 9 tokens, do not fit into a pack of 4"):
        histogram([3, 7, 9]).fitted(4, "error")
    fitting = histogram([3, 7, 9]).fitted(9, "error")
    assert in_order(fitting.histogram) == [3, 7, 9]
    assert (fitting.long_sequences, fitting.tokens_lost) == (0, 0)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PackingError, match=r"no policy 'cut' .* known: error, truncate, drop, split"):
        histogram([3]).fitted(4, "cut")
