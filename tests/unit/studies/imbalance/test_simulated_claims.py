"""The study's claims about un-padding, assignment and packs, at fewer steps."""

import pytest

from evenpack.data.packing import pack
from evenpack.studies.imbalance.cluster import BALANCED_PACKS, ClusterOptions, Scheme
from evenpack.studies.imbalance.simulation import simulate
from evenpack.studies.imbalance.step_cost import find_cost
from evenpack.studies.lengths.reading import published_histogram


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
