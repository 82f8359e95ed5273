"""Defines small simulated clusters whose results can be computed by hand."""

import dataclasses

import numpy as np

from evenpack.data.packing import LengthHistogram, pack
from evenpack.studies.imbalance.cluster import BASELINE, ClusterOptions, Scheme
from evenpack.studies.imbalance.simulation import SchemeRow, Simulation, StepTimes, make_cluster, simulate, summarise
from evenpack.studies.imbalance.step_cost import StepCost

ARRIVAL = Scheme(layout="unpadded", policy="arrival")


PER_SLOT = StepCost(
    name="slots",
    origin="a test",
    estimated=True,
    device="a test",
    causal=True,
    constant=0.0,
    per_slot=1.0,
    per_squared_length=0.0,
    window_shares={},
    per_segment=0.0,
    per_step=0.0,
)


def cost(**changes: float | bool) -> StepCost:
    return dataclasses.replace(PER_SLOT, **changes)


def histogram_of(counts: dict[int, int]) -> LengthHistogram:
    return LengthHistogram(counts=np.array([counts.get(length, 0) for length in range(1, max(counts) + 1)]))


def run(
    counts: dict[int, int],
    *,
    devices: tuple[int, ...],
    model: StepCost = PER_SLOT,
    pack_length: int | None = None,
    processes: int = 1,
    **options: float | bool | None,
) -> Simulation:
    """Returns a histogram with the given number of sequences of each length."""
    histogram = histogram_of(counts)
    return simulate(
        histogram,
        pack(histogram, "longest_pack_first", pack_length=pack_length or histogram.longest),
        devices=devices,
        cost=model,
        options=ClusterOptions(**options),
        processes=processes,
    )


def some_steps(
    counts: dict[int, int],
    *,
    devices: int,
    steps: int,
    model: StepCost = PER_SLOT,
    scheme: Scheme = ARRIVAL,
    pieces: int = 1,
    **options: float | bool | None,
) -> list[SchemeRow]:
    """Simulates one scheme on one number of devices, which costs a tenth; yields a row for each of `pieces`."""
    histogram = histogram_of(counts)
    packing = pack(histogram, "longest_pack_first", pack_length=histogram.longest)
    cluster = make_cluster(histogram, packing, cost=model, options=ClusterOptions(**options))
    both = [cluster.steps(devices, 0, steps, (one,))[0] for one in (BASELINE, scheme)]
    rows = []
    for piece in range(pieces):
        times = {
            (one, devices): StepTimes.of_columns(
                columns[piece::pieces], cluster.kinds(one.batching), items=cluster.items_per_step(one.batching, devices)
            )
            for one, columns in zip((BASELINE, scheme), both, strict=True)
        }
        rows.append(summarise(scheme, times)[-1])
    return rows
