"""The study's claims about un-padding, assignment and packs, at fewer steps."""

import pytest
from simulated_clusters import ARRIVAL

from evenpack.data.order.step_shape import POLICIES
from evenpack.data.packing import pack
from evenpack.studies.imbalance.cluster import BALANCED_PACKS, DENSE_PACKS, ClusterOptions, Scheme
from evenpack.studies.imbalance.simulation import Simulation, simulate
from evenpack.studies.imbalance.step_cost import find_cost
from evenpack.studies.lengths.reading import published_histogram


@pytest.fixture(scope="module")
def wikipedia() -> Simulation:
    """Returns the study's own setting with fewer steps."""
    histogram = published_histogram("wikipedia_512")
    return simulate(
        histogram,
        pack(histogram, pack_length=512),
        devices=(1, 2, 8, 64, 512),
        cost=find_cost("bert_large_estimate"),
        options=ClusterOptions(steps=30),
        processes=1,
    )


@pytest.mark.slow
def test_un_padding_by_arrival_beats_masked_packs_on_one_device_only(wikipedia: Simulation) -> None:
    """PackedBERT's packs compute whole squares: it says the same (section 4.4)."""
    speed_ups = {row.devices: row.speed_up for row in wikipedia.of(ARRIVAL)}
    for alone, row in zip(wikipedia.of(DENSE_PACKS), wikipedia.of(ARRIVAL), strict=True):
        is_ahead, is_behind = row.speed_up_low > alone.speed_up_high, row.speed_up_high < alone.speed_up_low
        assert is_ahead if row.devices == 1 else is_behind
    assert 1.6 < speed_ups[1] < 1.8
    assert list(speed_ups.values()) == sorted(speed_ups.values(), reverse=True)
    assert speed_ups[512] < 1.5


@pytest.mark.slow
def test_better_assignment_keeps_un_padding_fast(wikipedia: Simulation) -> None:
    last = {(row.layout, row.policy): row for row in wikipedia.rows if row.devices == 512 and not row.dense}
    assigned = [last["unpadded", policy].speed_up for policy in POLICIES["sequences", "unpadded"]]
    arrival, serpentine, balanced, max_tokens = assigned
    assert arrival < max_tokens < serpentine
    assert serpentine == pytest.approx(balanced, rel=0.01)
    assert last["packed", "cost_balanced"].speed_up == pytest.approx(balanced, rel=0.01)
    assert last["padded", "sorted"].wait_share > 0.4
    assert arrival < last["padded", "max_tokens"].speed_up < serpentine


@pytest.mark.slow
@pytest.mark.parametrize(("packs", "allowed"), [(8, 1.01), (2, 1.02)])
def test_balanced_packs_hardly_wait_up_to_two_thousand_devices(packs: int, allowed: float) -> None:
    histogram = published_histogram("wikipedia_512")
    found = simulate(
        histogram,
        pack(histogram, pack_length=512),
        devices=(2048,),
        cost=find_cost("bert_large_estimate"),
        options=ClusterOptions(steps=30, packs=packs, batch=2 * packs),
        processes=1,
    )
    balanced = found.of(BALANCED_PACKS)[0].slowest_over_mean
    assert balanced <= allowed
    assert found.of(Scheme(layout="packed", policy="arrival"))[0].slowest_over_mean > balanced
