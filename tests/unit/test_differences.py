"""Run files are compared key by key."""

from hypothesis import given
from hypothesis import strategies as st

from evenpack.differences import as_text, differences, flatten

VALUES = st.recursive(
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=1),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def test_changed_keys_of_a_run_file_are_named_with_both_values() -> None:
    saved = {"model": {"layers": 2, "positions": "learned"}, "steps": 10, "deepspeed": {"extra": {"a": 1}}}
    present = {"model": {"layers": 4, "positions": "learned"}, "steps": 10, "deepspeed": {"extra": {}}, "new": [1]}
    assert differences(saved, present) == {
        "deepspeed.extra.a": (1, None),
        "model.layers": (2, 4),
        "new": (None, [1]),
    }
    assert differences({"mlperf": None}, {"mlperf": {"org": "x", "notes": None}}, absent="nothing") == {
        "mlperf.org": ("nothing", "x"),
    }
    assert [as_text(value) for value in (None, 1.5, True, [2])] == ["null", "1.5", "True", "[2]"]


@given(one=SECTIONS, other=SECTIONS)
def test_what_differs_is_all_that_differs(one: dict[str, object], other: dict[str, object]) -> None:
    first, second = flatten(one), flatten(other)
    found = differences(one, other)
    for key in first.keys() | second.keys():
        pair = first.get(key), second.get(key)
        assert found.get(key, pair) == pair
        assert (key in found) == (pair[0] != pair[1])
    assert differences(other, one) == {key: (theirs, ours) for key, (ours, theirs) in found.items()}
