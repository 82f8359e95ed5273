"""How fast a run would be: the useful operations that a device performs in a second, as they were measured."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from evenpack.data.batches.pipeline import MicroBatchDataset
from evenpack.engine.build import build_model
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.cost_model import CostModel
from evenpack.engine.resolving.resolve import ResolvedRun
from evenpack.engine.world.distributed import World
from evenpack.models.common.device_peaks import DevicePeak
from evenpack.models.common.loss_sums import scaled_loss
from evenpack.models.cost import Work, step_flops, useful_work

MEASURED_MFU = {"gpt2_small": 0.338, "bert_large_phase2_sprint": 0.346, "gpt2_xl": 0.372}
"""Shares of an H100's dense bfloat16 peak that useful operations reached, by run file: one GPU, packed, compiled.

Source: benchmarks/results/h100_2026-11-27_A_whole_tiles.json for GPT-2 124M; h100_2026-11-27_A.json there for the
others, which were measured before the head became faster.
"""
_MEASURED_ON = "h100"

_LEAST_SECONDS = 1.0
"""Seconds for which micro-batches are timed."""
_LEAST_REPEATS = 3
_MOST_FLOPS = 4e11
"""Operations of a micro-batch above which it is not timed: it would take longer than a few seconds on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Useful operations per second of one device, and how far off they may be."""

    device: str
    expected: float
    least: float
    most: float
    basis: str
    """The origin of the numbers, for people."""


def rate_of_device(config: RunConfig, device: DevicePeak, *, mfu: float | None, padding: float) -> Rate | None:
    """Returns the rate of a run on a GPU; None for FP32 without `mfu`, since it was not measured.

    Args:
        mfu: share of the peak that useful operations reach; None: as measured on an H100.
        padding: operations that the layout performs on padding, over the useful ones.

    Raises: ConfigError for a device without the run's precision.
    """
    is_half = config.training.precision != "fp32"
    peak = device.require_flops(torch.bfloat16 if is_half else torch.float32)
    if mfu is not None:
        basis = f"{100 * mfu:g} % of the dense peak, {peak / 1e12:,.1f} TFLOP/s, as --mfu says"
        return Rate(device=device.name, expected=mfu * peak, least=mfu * peak, most=mfu * peak, basis=basis)
    if not is_half:
        return None
    shares = [share / (1.0 + padding) for share in MEASURED_MFU.values()]
    elsewhere = "" if device.name == _MEASURED_ON else f"; not measured on {device.name}, whose share may differ"
    return Rate(
        device=device.name,
        expected=statistics.fmean(shares) * peak,
        least=min(shares) * peak,
        most=max(shares) * peak,
        basis=f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of the dense peak, {peak / 1e12:,.1f} TFLOP/s, as "
        f"{len(shares)} models reach it on one H100{elsewhere}. Waiting for other GPUs is left out",
    )


def rate_of_cost_model(found: CostModel, work: Work, *, flops: int, micro_batches: int, updates: int) -> Rate:
    """Returns the rate at which a measured cost model predicts a run.

    Args:
        work: what all ranks compute in all steps, on padding too.
        flops: the useful operations of it.
        micro_batches: of all ranks in all steps, as are the updates.
    """
    slots, squared_lengths, sequences = np.array([[work.slots], [work.squared_lengths], [work.sequences]])
    pairs_within = {window: np.array([pairs]) for window, pairs in work.pairs_within.items()}
    together = found.seconds(slots, squared_lengths, sequences, pairs_within)  # as if it were one micro-batch
    seconds = float(together[0]) + found.constant * (micro_batches - 1) + found.per_step * updates
    expected, error = flops / seconds, min(found.held_out_95_percent_error, 0.99)
    return Rate(
        device=found.measured_on.device,
        expected=expected,
        least=expected / (1 + error),
        most=expected / (1 - error),
        basis=f"training.cost_model, measured on {found.measured_on.date[:10]}: 95 % of micro-batches that it was not "
        f"fitted to are within {100 * error:.1f} %. Waiting for other ranks is left out",
    )


def timed_rate(run: ResolvedRun, *, ranks: int) -> Rate | None:
    """Times forward and backward of the run's first micro-batch for a second or more, on a rank's share of the cores.

    Returns None if one would take longer than a few seconds.
    """
    cpu = torch.device("cpu")
    world = World(rank=0, size=1, local_rank=0, device=cpu)
    dataset = MicroBatchDataset(run.prepared, run.pipeline_settings(world))
    batch = dataset[dataset.planner.micro_batches.before(run.config.span.start)]
    flops = step_flops(run.config.model, vocabulary_size=run.prepared.vocabulary_size, work=useful_work(batch))
    if flops > _MOST_FLOPS:
        return None
    model = build_model(run, cpu).train()
    seconds: list[float] = []
    all_threads = torch.get_num_threads()
    threads = max(1, all_threads // ranks)
    torch.set_num_threads(threads)
    while len(seconds) <= _LEAST_REPEATS or sum(seconds) < _LEAST_SECONDS:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=run.config.training.precision == "bf16_autocast"):
            outputs = model(batch)
        loss = scaled_loss(outputs, run.denominators(batch.step_counts), world_size=1, accumulation=1)
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(all_threads)
    timed = seconds[1:]  # the first one allocates
    return Rate(
        device="CPU core" if threads == 1 else f"{threads} CPU cores",
        expected=flops / statistics.median(timed),
        least=flops / max(timed),
        most=flops / min(timed),
        basis=f"forward and backward of {len(timed)} micro-batches, timed here. The optimizer, waiting for others, "
        "evaluation and saves are left out",
    )
