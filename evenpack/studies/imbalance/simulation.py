"""Simulates clusters of any size on given lengths, step by step for each layout and policy.

StepTimes   the steps of a scheme: rates with intervals, and waiting
simulate    every scheme at every number of devices
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import Float64
from scipy.special import stdtrit

from evenpack import console
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.errors import ConfigError, RunError
from evenpack.progress import Progress
from evenpack.studies.imbalance.cluster import (
    BASELINE,
    SCHEMES,
    Cluster,
    ClusterOptions,
    ItemKinds,
    Scheme,
    pack_kinds,
    sequence_kinds,
)
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.shared_options import parse_list, whole_number
from evenpack.worker_pool import worker_pool

_SCALE = np.array([1e3, 1e6])
"""Scale that brings tokens and squared lengths to one order of magnitude, for the regression."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """The steps of one scheme on a number of devices, in seconds."""

    step: Float64[np.ndarray, " steps"]
    """Seconds from one update to the next: until the slowest device has finished."""
    mean: Float64[np.ndarray, " steps"]
    """Computing seconds of the mean device."""
    as_expected: Float64[np.ndarray, " steps"]
    """Seconds of each step, corrected for having drawn more or less work than expected."""
    sequences: float
    """Expected sequences of a step."""

    @classmethod
    def of_columns(cls, columns: Float64[np.ndarray, "steps 4"], kinds: ItemKinds, *, items: int) -> "StepTimes":
        """Makes the times from the columns of `Cluster.steps`, of `items` per step that are drawn from `kinds`.

        Drawn work is corrected for by control variates: the expected work is known exactly, so the part of the seconds
        that depends on it by linear regression needs no estimate, which reduces the variance of the mean.
        """
        step, mean = np.ascontiguousarray(columns[:, :2].T)
        excess_work = columns[:, 2:] - kinds.probabilities @ kinds.work
        return cls(
            step=step,
            mean=mean,
            as_expected=step - excess_work @ _seconds_by_work(excess_work, step),
            sequences=items * kinds.mean_sequences,
        )

    @property
    def rate(self) -> float:
        """Returns the expected sequences of a step over its expected seconds: the sequences/s of a long run."""
        return self.sequences / float(self.as_expected.mean())


def _seconds_by_work(work: Float64[np.ndarray, "n 2"], seconds: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, "2"]:
    """Returns the slopes of the linear regression of seconds on tokens and squared lengths."""
    centred = work - work.mean(axis=0)
    slopes, *_ = np.linalg.lstsq(centred / _SCALE, seconds - seconds.mean(), rcond=1e-9)
    return np.asarray(slopes / _SCALE)


@dataclass(frozen=True, kw_only=True)
class LogRatio:
    """ln(rate / other rate) of some steps, with its standard error."""

    value: float
    error: float
    steps: int

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval, by Student's law."""
        return float(stdtrit(self.steps - 1, 0.975)) * self.error

    @property
    def interval(self) -> tuple[float, float]:
        """Returns the 95 % interval, as ratios."""
        return float(np.exp(self.value - self.reach)), float(np.exp(self.value + self.reach))


def log_ratio(times: StepTimes, other: StepTimes) -> LogRatio:
    """Returns the log ratio of two schemes on as many devices, paired by step, because equal draws are correlated."""
    # To first order ln of a mean errs by the mean of (value / mean - 1): the delta method for a ratio of means.
    errors = other.as_expected / other.as_expected.mean() - times.as_expected / times.as_expected.mean()
    error = float(errors.std(ddof=1)) / len(errors) ** 0.5
    return LogRatio(value=float(np.log(times.rate / other.rate)), error=error, steps=len(errors))


@dataclass(frozen=True, kw_only=True)
class SchemeRow:
    """The results of a scheme on a number of devices."""

    layout: str
    policy: str
    dense: bool
    devices: int
    steps: int
    speed_up: float
    """Speed-up in sequences/s over padding by arrival on as many devices, in the long run (a ratio of means)."""
    speed_up_low: float
    """Start of its 95 % interval over steps: by the delta method, paired by step."""
    speed_up_high: float
    sequences_per_second: float
    slowest_over_mean: float
    """Seconds of the slowest device over the mean device's, mean over steps."""
    wait_share: float
    """Fraction of all devices' time spent waiting for the slowest."""

    def is_of(self, scheme: Scheme) -> bool:
        """Whether these are steps of a scheme."""
        return (self.layout, self.policy, self.dense) == astuple(scheme)


def summarise(scheme: Scheme, times: Mapping[tuple[Scheme, int], StepTimes]) -> list[SchemeRow]:
    """Returns a row for each number of devices, ascending; `times` has the baseline too."""
    counts = sorted(devices for one, devices in times if one == scheme)
    return [_row(scheme, devices, times[scheme, devices], times[BASELINE, devices]) for devices in counts]


def _row(scheme: Scheme, devices: int, times: StepTimes, baseline: StepTimes) -> SchemeRow:
    low, high = log_ratio(times, baseline).interval
    uneven = times.step / times.mean
    return SchemeRow(
        layout=scheme.layout,
        policy=scheme.policy,
        dense=scheme.dense,
        devices=devices,
        steps=len(times.step),
        speed_up=times.rate / baseline.rate,
        speed_up_low=low,
        speed_up_high=high,
        sequences_per_second=times.rate,
        slowest_over_mean=float(uneven.mean()),
        wait_share=max(0.0, float((times.step - times.mean).sum() / times.step.sum())),  # not -1e-17
    )


MOST_DEVICES = 1 << 17
"""More devices than any cluster has, and 1 GB for a step at 32 sequences per device."""

MOST_SEQUENCES = 32 * MOST_DEVICES
"""Sequences of a step."""

_ITEMS_OF_A_TASK = 1 << 20
_OVERHEAD_ITEMS = 4000
"""Overhead of a step in items: a step costs that much in addition to its items."""
_ITEMS_FOR_PROCESSES = 3 * _ITEMS_OF_A_TASK


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All rows, and what they are of."""

    options: ClusterOptions
    cost: StepCost
    pack_length: int
    max_sequence_length: int
    packing_algorithm: str
    packing_factor: float
    packs_per_micro_batch: int
    rows: tuple[SchemeRow, ...]

    def of(self, scheme: Scheme) -> tuple[SchemeRow, ...]:
        """Returns a row for each number of devices, ascending."""
        return tuple(row for row in self.rows if row.is_of(scheme))


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
) -> Cluster:
    """Makes a cluster of any number of devices; the arguments are as in `simulate`."""
    packs = pack_kinds(packing, cost, max_sequence_length=histogram.longest)
    return Cluster(
        sequences=sequence_kinds(histogram, cost),
        packs=packs,
        pack_length=packing.pack_length,
        max_sequence_length=histogram.longest,
        packs_per_micro_batch=options.packs_with(packs.mean_sequences),
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
    processes: int | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Simulates every scheme at every number of devices.

    Args:
        packing: of `histogram`; packs are drawn by how often each strategy is used.
        processes: None: one for each core, where there is enough work. The result does not depend on it.
        progress: shows the share of the work that is done, of which small clusters are more than of the sequences,
            and the rate of the sequences drawn; None: nothing is shown.

    Raises: ConfigError for steps of too many sequences; RunError if a process dies.
    """
    cluster = make_cluster(histogram, packing, cost=cost, options=options)
    most_devices = max(devices)
    largest = max(cluster.items_per_step(batching, most_devices) for batching in ("sequences", "packs"))
    if largest > MOST_SEQUENCES:
        raise ConfigError(
            f"a step of {most_devices:,} devices would assign {largest:,} sequences or packs, and up to "
            f"{MOST_SEQUENCES:,} are simulated: lower --devices, --batch, --packs or --accumulation"
        )
    times = _run(cluster, sorted(set(devices)), processes, progress or Progress(console.messages(), silent=True))
    rows = [row for scheme in SCHEMES for row in summarise(scheme, times)]
    return Simulation(
        options=options,
        cost=cost,
        pack_length=packing.pack_length,
        max_sequence_length=cluster.max_sequence_length,
        packing_algorithm=packing.algorithm,
        packing_factor=packing.packing_factor,
        packs_per_micro_batch=cluster.packs_per_micro_batch,
        rows=tuple(rows),
    )


_Task = tuple[int, int, int]
"""Devices, the first step, and the number of steps."""


def _run(
    cluster: Cluster, counts: Sequence[int], processes: int | None, progress: Progress
) -> dict[tuple[Scheme, int], StepTimes]:
    """Simulates all steps in pieces of nearly equal work, the largest clusters first, so the last pieces are small."""
    every = cluster.options.steps
    of_step = {devices: cluster.items_per_step("sequences", devices) for devices in sorted(counts, reverse=True)}
    sizes = {devices: max(1, _ITEMS_OF_A_TASK // (items + _OVERHEAD_ITEMS)) for devices, items in of_step.items()}
    tasks = [
        (devices, first, min(size, every - first)) for devices, size in sizes.items() for first in range(0, every, size)
    ]
    total = every * sum(items + _OVERHEAD_ITEMS for items in of_step.values())
    steps = {devices: np.empty((len(SCHEMES), every, 4)) for devices in counts}
    done = sequences = 0
    shown = progress.begin("simulating", unit="sequences", starts_processes=True)
    wanted = processes or (len(os.sched_getaffinity(0)) if total > _ITEMS_FOR_PROCESSES else 1)
    with _results(cluster, tasks, wanted) as results:
        for (devices, first, count), found in results:
            steps[devices][:, first : first + count] = found
            done += count * (of_step[devices] + _OVERHEAD_ITEMS)
            sequences += count * of_step[devices]
            shown.update(done / total, 1.0, amount=sequences)
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
) -> Iterator[Iterator[tuple[_Task, Float64[np.ndarray, "schemes count 4"]]]]:
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
