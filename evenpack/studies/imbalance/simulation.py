"""Simulates clusters of any size on given lengths, step by step for each layout and policy."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq

from evenpack.data.packing import LengthHistogram, Packing
from evenpack.errors import ConfigError, RunError
from evenpack.studies.imbalance.cluster import (
    BASELINE,
    MOST_NOISE,
    SCHEMES,
    UNPADDED_ARRIVAL,
    Cluster,
    ClusterOptions,
    Scheme,
    pack_kinds,
    sequence_kinds,
)
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.imbalance.step_times import (
    Crossing,
    SchemeRow,
    StepHistogram,
    StepTimes,
    find_crossings,
    step_histogram,
    step_speed_ups,
    summarise,
)
from evenpack.studies.shared_options import parse_list, whole_number
from evenpack.studies.statistics.laws import Gumbel
from evenpack.worker_pool import worker_pool

MOST_DEVICES = 1 << 17
"""More devices than any cluster has, and 1 GB for a step at 32 sequences per device."""

MOST_SEQUENCES = 32 * MOST_DEVICES
"""Sequences of a step."""

_NOISE_TOLERANCE = 1e-4
_ITEMS_OF_A_TASK = 1 << 20
_OVERHEAD_ITEMS = 4000
"""Overhead of a step in items: a step costs that much in addition to its items."""
_ITEMS_FOR_PROCESSES = 3 * _ITEMS_OF_A_TASK


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All rows, and their crossings."""

    options: ClusterOptions
    cost: StepCost
    causal: bool
    pack_length: int
    max_sequence_length: int
    packing_algorithm: str
    packing_factor: float
    packs_per_micro_batch: int
    rows: tuple[SchemeRow, ...]
    crossings: tuple[Crossing, ...]
    step_histograms: tuple[StepHistogram, ...]
    """Histograms of un-padding by arrival, for the device counts whose laws `simulate` was given; ascending."""

    def of(self, scheme: Scheme) -> tuple[SchemeRow, ...]:
        """Summarises steps, with a row for each number of devices, ascending."""
        return tuple(row for row in self.rows if row.is_of(scheme))


@dataclass(frozen=True, kw_only=True)
class FittedNoise:
    """The noise with which single un-padded steps vary as much as a law says."""

    share: float
    """Deviation of a micro-batch's seconds, as a share of them; 0 if lengths alone make steps vary as much."""
    devices: int
    deviation_of_law: float
    """Standard deviation of the speed-up of a step on `devices` devices by the law."""
    deviation_of_lengths: float
    """The same of the simulated steps without noise."""


def parse_devices(given: str, *, option: str = "--devices") -> tuple[int, ...]:
    """Parses `1..2048` as both ends and the powers of two between, and `1,8,24` as these; ascending, without repeats.

    Raises: ConfigError for anything but positive integers.
    """
    return tuple(sorted(set().union(*parse_list(given, option, _counts_of))))


def _counts_of(word: str) -> set[int]:
    """Returns the numbers that a word of a list stands for. Raises: ValueError, as `parse_list` expects."""
    first, dots, last = (part.strip() for part in word.partition(".."))
    numbers = [
        whole_number(number, problem="is not a positive integer", example="1..2048 (powers of two) or a list: 1,8,24")
        for number in ([first, last] if dots else [first])
    ]
    low, high = numbers[0], numbers[-1]
    if high > MOST_DEVICES:
        raise ValueError(f"clusters of up to {MOST_DEVICES:,} devices are simulated, not {high}")
    if low > high:
        raise ValueError(f"{word} is descending; give the smaller number first")
    return {low, high, *(1 << bit for bit in range(high.bit_length()) if low <= 1 << bit <= high)} if dots else {low}


def make_cluster(
    histogram: LengthHistogram,
    packing: Packing,
    *,
    cost: StepCost,
    options: ClusterOptions,
    causal: bool | None = None,
) -> Cluster:
    """Makes a cluster of any number of devices; the arguments are as in `simulate`."""
    packs = pack_kinds(packing, cost, max_sequence_length=histogram.longest)
    return Cluster(
        sequences=sequence_kinds(histogram, cost),
        packs=packs,
        pack_length=packing.pack_length,
        max_sequence_length=histogram.longest,
        packs_per_micro_batch=options.packs_with(packs.mean_sequences),
        causal=cost.causal if causal is None else causal,
        cost=cost,
        options=options,
    )


def simulate(
    histogram: LengthHistogram,
    packing: Packing,
    *,
    devices: Sequence[int],
    cost: StepCost,
    options: ClusterOptions,
    causal: bool | None = None,
    laws: Mapping[int, Gumbel | None] = MappingProxyType({}),
    processes: int | None = None,
    progress: Callable[[float, int], None] = lambda share, sequences: None,
) -> Simulation:
    """Simulates every scheme at every number of devices, and one device too, which is the baseline of efficiency.

    Args:
        packing: of `histogram`; packs are drawn by how often each strategy is used.
        causal: None: as the cost model's model is.
        laws: by device count, laws of the speed-up of an un-padded step: the steps of these counts are kept in
            `step_histograms`, whether or not `devices` has them, and compared with the law unless it is None.
        processes: None: one for each core, where there is enough work. The result does not depend on it.
        progress: called with the share of the work that is done, of which small clusters are more than of the
            sequences, and the sequences drawn.

    Raises: ConfigError for steps of too many sequences; RunError if a process dies.
    """
    cluster = make_cluster(histogram, packing, cost=cost, options=options, causal=causal)
    most_devices = max((*devices, *laws))
    largest = max(cluster.items_per_step(batching, most_devices) for batching in ("sequences", "packs"))
    if largest > MOST_SEQUENCES:
        raise ConfigError(
            f"a step of {most_devices:,} devices would assign {largest:,} sequences or packs, and up to "
            f"{MOST_SEQUENCES:,} are simulated: lower --devices, --batch, --packs or --accumulation"
        )
    times = _run(cluster, sorted({1, *devices, *laws}), processes, progress)
    rows = [row for scheme in SCHEMES for row in summarise(scheme, times) if row.devices in devices]
    return Simulation(
        options=options,
        cost=cost,
        causal=cluster.causal,
        pack_length=packing.pack_length,
        max_sequence_length=cluster.max_sequence_length,
        packing_algorithm=packing.algorithm,
        packing_factor=packing.packing_factor,
        packs_per_micro_batch=cluster.packs_per_micro_batch,
        rows=tuple(rows),
        crossings=find_crossings({key: value for key, value in times.items() if key[1] in devices}),
        step_histograms=tuple(
            step_histogram(
                step_speed_ups(UNPADDED_ARRIVAL, times, one),
                speed_up=times[UNPADDED_ARRIVAL, one].rate / times[BASELINE, one].rate,
                devices=one,
                beside=laws[one],
            )
            for one in sorted(laws)
        ),
    )


def fit_noise(cluster: Cluster, law: Gumbel, *, devices: int) -> FittedNoise:
    """Fits the noise of micro-batches to the standard deviation of the speed-up of an un-padded step, by arrival.

    Args:
        cluster: its own noise does not matter.
        law: of that speed-up on `devices` devices.

    Raises: ConfigError if no noise makes steps vary so much.
    """
    wanted = float(law.frozen.std())

    def deviation(share: float) -> float:
        noisy = replace(cluster, options=replace(cluster.options, noise=share))
        schemes = (UNPADDED_ARRIVAL, BASELINE)
        found = noisy.steps(devices, 0, noisy.options.steps, schemes)
        items = noisy.items_per_step("sequences", devices)
        times = {
            (scheme, devices): StepTimes.of_columns(found[index], noisy.sequences, items=items)
            for index, scheme in enumerate(schemes)
        }
        return float(step_speed_ups(UNPADDED_ARRIVAL, times, devices).std(ddof=1))

    alone = deviation(0.0)
    share = 0.0
    if alone < wanted:
        most = deviation(MOST_NOISE)
        if most < wanted:
            raise ConfigError(
                f"--noise published: with a noise of {MOST_NOISE} single steps on {devices} devices have a deviation "
                f"of {most:.3g}, below the law's {wanted:.3g}: give a share as --noise, or another law by "
                "--reference-scale"
            )
        share = float(brentq(lambda one: deviation(one) - wanted, 0.0, MOST_NOISE, xtol=_NOISE_TOLERANCE))
    return FittedNoise(share=share, devices=devices, deviation_of_law=wanted, deviation_of_lengths=alone)


_Task = tuple[int, int, int]
"""Devices, the first step, and the number of steps."""


def _run(
    cluster: Cluster, counts: Sequence[int], processes: int | None, progress: Callable[[float, int], None]
) -> dict[tuple[Scheme, int], StepTimes]:
    """Simulates all steps in pieces of nearly equal work, the largest clusters first, so the last pieces are small."""
    every = cluster.options.steps
    of_step = {devices: cluster.items_per_step("sequences", devices) for devices in sorted(counts, reverse=True)}
    sizes = {devices: max(1, _ITEMS_OF_A_TASK // (items + _OVERHEAD_ITEMS)) for devices, items in of_step.items()}
    tasks = [
        (devices, first, min(size, every - first)) for devices, size in sizes.items() for first in range(0, every, size)
    ]
    total = every * sum(items + _OVERHEAD_ITEMS for items in of_step.values())
    steps = {devices: np.empty((len(SCHEMES), every, 5)) for devices in counts}
    done = sequences = 0
    wanted = processes or (len(os.sched_getaffinity(0)) if total > _ITEMS_FOR_PROCESSES else 1)
    with _results(cluster, tasks, wanted) as results:
        for (devices, first, count), found in results:
            steps[devices][:, first : first + count] = found
            done += count * (of_step[devices] + _OVERHEAD_ITEMS)
            sequences += count * of_step[devices]
            progress(done / total, sequences)
    return {
        (scheme, devices): StepTimes.of_columns(
            steps[devices][index],
            cluster.kinds(scheme.batching),
            items=cluster.items_per_step(scheme.batching, devices),
        )
        for devices in counts
        for index, scheme in enumerate(SCHEMES)
    }


@contextmanager
def _results(
    cluster: Cluster, tasks: Sequence[_Task], processes: int
) -> Iterator[Iterator[tuple[_Task, Float64[np.ndarray, "schemes count 5"]]]]:
    if processes == 1:
        yield ((task, cluster.steps(*task)) for task in tasks)
        return
    with worker_pool(processes, preloaded=[__name__]) as pool:
        futures = {pool.submit(cluster.steps, *task): task for task in tasks}
        try:
            yield ((futures[future], future.result()) for future in as_completed(futures))
        except BrokenExecutor as error:
            raise RunError(
                f"one of {processes} processes that simulate has died. The kernel kills one when memory runs out, or "
                "someone did: look at `dmesg`, take fewer of them, and start the same command again"
            ) from error
