"""Seconds of the kernels of a step by category, from torch's profiler.

python benchmarks/gpu_day/profile_step.py RUN.yaml --out FILE.json [--steps N] [section.key=value ...]
"""

import re
from collections.abc import Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from evenpack.files import write_json
from gpu_day.stepping import device_name, micro_batches, read_arguments, stepping, synchronise

CATEGORIES = (
    ("communication", r"nccl|all_?reduce|allgather"),
    ("attention", r"flash|fmha|flex_attention|varlen_attn|scaled_dot_product|sdpa"),
    ("memory copies", r"memcpy|memset"),
    ("optimizer", r"adam|lamb|multi_tensor_apply|_foreach"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|(^|::)(addmm|mm|bmm|matmul|linear)"),
)
"""The first category whose pattern occurs in a kernel's name, in lower case; everything else is element-wise."""

_WARMUP = 3
_LONGEST_LISTED = 12


def category_of(kernel: str) -> str:
    """Returns what a kernel does, by its name."""
    name = kernel.lower()
    return next((category for category, pattern in CATEGORIES if re.search(pattern, name)), "elementwise")


def by_category(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Adds up the seconds of (kernel, seconds); every category is there."""
    found = dict.fromkeys([*(name for name, _ in CATEGORIES), "elementwise"], 0.0)
    for kernel, seconds in kernels:
        found[category_of(kernel)] += seconds
    return found


def kernels_of(events: Iterable[Any], is_cuda: bool) -> list[tuple[str, float]]:
    """Returns (name, seconds) of what ran on the device: on a GPU its kernels, on a CPU the operators.

    On a GPU an operator has the seconds of its kernels too, and so has a region that torch or DeepSpeed names, such as
    `Optimizer.step`; they would count twice.
    """
    if not is_cuda:
        return [(event.key, 1e-6 * event.self_cpu_time_total) for event in events]
    return [
        (event.key, 1e-6 * event.self_device_time_total)
        for event in events
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation
    ]


def main() -> None:
    """Profiles some steps after a warm-up."""
    given = read_arguments(__doc__, steps=3)
    with stepping(given.config, "packed") as (timer, (packed,)):
        is_cuda = timer.world.device.type == "cuda"
        steps = [micro_batches(packed, number) for number in range(_WARMUP + given.steps)]
        for number in range(_WARMUP):
            timer.engine.train_step(number, steps[number])
        synchronise(timer.world)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
            for number in range(_WARMUP, len(steps)):
                timer.engine.train_step(number, steps[number])
            synchronise(timer.world)
        kernels = [(name, seconds / given.steps) for name, seconds in kernels_of(profiler.key_averages(), is_cuda)]
        longest = sorted(kernels, key=lambda one: -one[1])[:_LONGEST_LISTED]
        value = {
            "device": device_name(timer.world),
            "steps": given.steps,
            "seconds_per_step": by_category(kernels),
            "longest": [
                {"kernel": name, "seconds": seconds, "category": category_of(name)} for name, seconds in longest
            ],
        }
    write_json(given.out, value)
    print(value)


if __name__ == "__main__":
    main()
