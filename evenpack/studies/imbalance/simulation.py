"""Simulates clusters of any size on given lengths, step by step for each layout and policy.

StepTimes   the steps of a scheme: rates with intervals, waiting, efficiency, crossings with packs, histograms
simulate    every scheme at every number of devices
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from jaxtyping import Float64
from scipy.optimize import brentq
from scipy.special import stdtrit

from evenpack import console
from evenpack.data.packing import LengthHistogram, Packing
from evenpack.errors import ConfigError, RunError
from evenpack.progress import Progress
from evenpack.studies.imbalance.cluster import (
    BALANCED_PACKS,
    BASELINE,
    DENSE_PACKS,
    MOST_NOISE,
    SCHEMES,
    UNPADDED_ARRIVAL,
    Cluster,
    ClusterOptions,
    ItemKinds,
    Scheme,
    pack_kinds,
    sequence_kinds,
)
from evenpack.studies.imbalance.step_cost import StepCost
from evenpack.studies.shared_options import parse_list, whole_number
from evenpack.studies.statistics.fits import ks_distance
from evenpack.studies.statistics.laws import Gumbel
from evenpack.worker_pool import worker_pool

STEPS_WITHIN = (5.0, 95.0)
"""Percentiles between which single steps are shown."""

_SCALE = np.array([1e3, 1e6])
"""Scale that brings tokens and squared lengths to one order of magnitude, for the regression."""
Verdict = Literal["ahead everywhere", "behind everywhere", "falls behind", "gets ahead", "undecided"]
"""The verdict over the simulated counts. Undecided: at each of them the difference is below the 95 % interval."""
_MOST_BARS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimes:
    """The steps of one scheme on a number of devices, in seconds."""

    step: Float64[np.ndarray, " steps"]
    """Seconds from one update to the next: until the slowest device has finished, and the all-reduce."""
    slowest: Float64[np.ndarray, " steps"]
    """Computing seconds of the slowest device."""
    mean: Float64[np.ndarray, " steps"]
    """Computing seconds of the mean device."""
    as_expected: Float64[np.ndarray, " steps"]
    """Seconds of each step, corrected for having drawn more or less work than expected."""
    sequences: float
    """Expected sequences of a step."""

    @classmethod
    def of_columns(cls, columns: Float64[np.ndarray, "steps 5"], kinds: ItemKinds, *, items: int) -> "StepTimes":
        """Makes the times from the columns of `Cluster.steps`, of `items` per step that are drawn from `kinds`.

        Drawn work is corrected for by control variates: the expected work is known exactly, so the part of the seconds
        that depends on it by linear regression needs no estimate, which reduces the variance of the mean.
        """
        step, slowest, mean = np.ascontiguousarray(columns[:, :3].T)
        excess_work = columns[:, 3:] - kinds.probabilities @ kinds.work
        return cls(
            step=step,
            slowest=slowest,
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
    step_low: float
    """5 % of single steps are slower than this speed-up."""
    step_high: float
    """5 % of single steps are faster."""
    sequences_per_second: float
    slowest_over_mean: float
    """Seconds of the slowest device over the mean device's, mean over steps."""
    worst_slowest_over_mean: float
    """Seconds of the slowest device over the mean device's, in the most uneven step."""
    wait_share: float
    """Fraction of all devices' time spent waiting for the slowest."""
    efficiency: float
    """Sequences/s per device, divided by the sequences/s of a single device."""

    def is_of(self, scheme: Scheme) -> bool:
        """Whether these are steps of a scheme."""
        return (self.layout, self.policy, self.dense) == astuple(scheme)


def summarise(scheme: Scheme, times: Mapping[tuple[Scheme, int], StepTimes]) -> list[SchemeRow]:
    """Returns a row for each number of devices, ascending; `times` has one device and the baseline too."""
    alone = times[scheme, 1].rate
    counts = sorted(devices for one, devices in times if one == scheme)
    return [_row(scheme, devices, times[scheme, devices], times[BASELINE, devices], alone) for devices in counts]


def step_speed_ups(
    scheme: Scheme, times: Mapping[tuple[Scheme, int], StepTimes], devices: int
) -> Float64[np.ndarray, " steps"]:
    """Returns the speed-up of each step: its rate over the rate of padding by arrival in the long run."""
    own = times[scheme, devices]
    speed_ups: Float64[np.ndarray, " steps"] = own.sequences / own.step / times[BASELINE, devices].rate
    return speed_ups


def _row(scheme: Scheme, devices: int, times: StepTimes, baseline: StepTimes, alone: float) -> SchemeRow:
    low, high = log_ratio(times, baseline).interval
    single = np.percentile(times.sequences / times.step, STEPS_WITHIN) / baseline.rate
    uneven = times.slowest / times.mean
    return SchemeRow(
        layout=scheme.layout,
        policy=scheme.policy,
        dense=scheme.dense,
        devices=devices,
        steps=len(times.step),
        speed_up=times.rate / baseline.rate,
        speed_up_low=low,
        speed_up_high=high,
        step_low=float(single[0]),
        step_high=float(single[1]),
        sequences_per_second=times.rate,
        slowest_over_mean=float(uneven.mean()),
        worst_slowest_over_mean=float(uneven.max()),
        wait_share=max(0.0, float((times.slowest - times.mean).sum() / times.step.sum())),  # not -1e-17
        efficiency=times.rate / (devices * alone),
    )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A scheme compared with a way to pack."""

    layout: str
    policy: str
    against: str
    """`Scheme.label` of the packs."""
    verdict: Verdict
    last_before: int | None
    """Largest simulated number of devices before the change at which the difference exceeds its 95 % interval; None if
    the two do not cross. What happens between simulated counts is not interpolated."""
    first_after: int | None
    """Smallest simulated number of devices after the change at which it does."""


def find_crossings(times: Mapping[tuple[Scheme, int], StepTimes]) -> tuple[Crossing, ...]:
    """Compares every scheme without packs with packs assigned by cost, and with packs with dense attention."""
    counts = sorted({devices for _, devices in times})
    return tuple(
        _crossing(scheme, packs, counts, times)
        for packs in (BALANCED_PACKS, DENSE_PACKS)
        for scheme in SCHEMES
        if scheme.batching != "packs" and scheme != BASELINE
    )


def _crossing(
    scheme: Scheme, packs: Scheme, counts: Sequence[int], times: Mapping[tuple[Scheme, int], StepTimes]
) -> Crossing:
    ratios = [log_ratio(times[scheme, devices], times[packs, devices]) for devices in counts]
    signs = [0 if abs(ratio.value) <= ratio.reach else int(np.sign(ratio.value)) for ratio in ratios]
    decided = [(sign, devices) for sign, devices in zip(signs, counts, strict=True) if sign]
    change = next((index for index, (sign, _) in enumerate(decided) if sign != decided[0][0]), None)
    return Crossing(
        layout=scheme.layout,
        policy=scheme.policy,
        against=packs.label,
        verdict=_verdict([sign for sign, _ in decided]),
        last_before=None if change is None else decided[change - 1][1],
        first_after=None if change is None else decided[change][1],
    )


def _verdict(decided: Sequence[int]) -> Verdict:
    if not decided:
        return "undecided"
    if len(set(decided)) == 1:
        return "ahead everywhere" if decided[0] > 0 else "behind everywhere"
    return "falls behind" if decided[0] > 0 else "gets ahead"


@dataclass(frozen=True, kw_only=True)
class StepHistogram:
    """Speed-ups of single steps on one number of devices."""

    devices: int
    steps: int
    speed_up: float
    """Speed-up of a long run: the ratio of the mean rates, as in the tables."""
    mean: float
    """Mean of the steps' own speed-ups, which is above `speed_up` where steps scatter."""
    deviation: float
    edges: tuple[float, ...]
    """Edges of the bars, of equal width."""
    counts: tuple[int, ...]
    """Steps in each bar; one fewer than there are edges."""
    fitted: Gumbel | None
    """Gumbel fitted to these steps by maximum likelihood; None if they are all equally fast."""
    fitted_distance: float | None
    """Largest difference between its distribution function and the steps' (Kolmogorov and Smirnov's)."""
    beside: Gumbel | None
    """The law with which the steps are compared, if there is one."""
    beside_distance: float | None


def step_histogram(
    speed_ups: Float64[np.ndarray, " steps"], *, speed_up: float, devices: int, beside: Gumbel | None = None
) -> StepHistogram:
    """Makes a histogram of finite speed-ups, one for each step; `beside` is the law to compare them with.

    `speed_up` is the speed-up of a long run of such steps.
    """
    counts, edges = np.histogram(speed_ups, bins=min(_MOST_BARS, math.ceil(len(speed_ups) ** 0.5)))
    fitted = Gumbel.fit(speed_ups) if np.ptp(speed_ups) > 0 else None
    return StepHistogram(
        devices=devices,
        steps=len(speed_ups),
        speed_up=speed_up,
        mean=float(speed_ups.mean()),
        deviation=float(speed_ups.std(ddof=1)),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        fitted=fitted,
        fitted_distance=None if fitted is None else ks_distance(fitted, speed_ups),
        beside=beside,
        beside_distance=None if beside is None else ks_distance(beside, speed_ups),
    )


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
        """Returns a row for each number of devices, ascending."""
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
    progress: Progress | None = None,
) -> Simulation:
    """Simulates every scheme at every number of devices, and one device too, which is the baseline of efficiency.

    Args:
        packing: of `histogram`; packs are drawn by how often each strategy is used.
        causal: None: as the cost model's model is.
        laws: by device count, laws of the speed-up of an un-padded step: the steps of these counts are kept in
            `step_histograms`, whether or not `devices` has them, and compared with the law unless it is None.
        processes: None: one for each core, where there is enough work. The result does not depend on it.
        progress: shows the share of the work that is done, of which small clusters are more than of the sequences,
            and the rate of the sequences drawn; None: nothing is shown.

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
    times = _run(
        cluster, sorted({1, *devices, *laws}), processes, progress or Progress(console.messages(), silent=True)
    )
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
    steps = {devices: np.empty((len(SCHEMES), every, 5)) for devices in counts}
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
