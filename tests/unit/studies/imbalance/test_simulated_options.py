"""Options of simulations: numbers of devices, sizes of steps, and their ranges."""

import pytest

from evenpack.data.packing import pack
from evenpack.errors import ConfigError
from evenpack.studies.imbalance.cluster import ClusterOptions
from evenpack.studies.imbalance.simulation import parse_devices, simulate
from evenpack.studies.imbalance.step_cost import find_cost
from evenpack.studies.lengths.reading import published_histogram


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("3..20", [3, 4, 8, 16, 20]),
        ("8, 1,24,8", [1, 8, 24]),
        ("5..5", [5]),
        ("1..4,100", [1, 2, 4, 100]),
    ],
)
def test_devices_are_a_range_of_powers_of_two_or_a_list(given: str, expected: list[int]) -> None:
    assert list(parse_devices(given)) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((given, "is not a positive integer") for given in ("0", "1..", "1.5", "", "²")),
        ("8..2", "is descending"),
        ("1..1000000000", "up to 131,072 devices"),
    ],
)
def test_devices_that_are_no_numbers_or_beyond_reason_are_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_devices(given)


@pytest.mark.parametrize("options", [{"batch": 1 << 21}, {"batch": 1, "packs": 1 << 21}, {"accumulation": 1 << 16}])
def test_a_step_that_no_memory_would_hold_is_refused(options: dict[str, int]) -> None:
    histogram = published_histogram("squad_1_1_384")
    packing = pack(histogram, pack_length=384)
    with pytest.raises(ConfigError, match=r"a step of 4 devices would assign 8,388,608 sequences or packs"):
        simulate(
            histogram,
            packing,
            devices=[1, 4],
            cost=find_cost("bert_large_estimate"),
            options=ClusterOptions(**{"batch": 32, **options}),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch must be 1 or more, not 0"),
        ({"steps": 29}, "--steps must be 30 or more, not 29"),
        ({"seed": -1}, "--seed"),
        ({"zero_stage": 4}, "--zero-stage is 0, 1, 2 or 3"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterOptions(**options)
