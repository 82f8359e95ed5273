"""Seconds of the kernels of a step by category, from torch's profiler.

python benchmarks/gpu_day/profile_step.py RUN.yaml --out FILE.json [--steps N] [section.key=value ...]
"""

from torch.profiler import ProfilerActivity, profile

from evenpack.engine.parts.profile import kernels_of, summary_of
from evenpack.files import write_json
from evenpack.studies.throughput.measure import micro_batches_of
from gpu_day.stepping import device_name, read_arguments, stepping, synchronise

_WARMUP = 3


def main() -> None:
    """Profiles some steps after a warm-up."""
    given = read_arguments(__doc__, steps=3)
    with stepping(given.config, "packed") as (timer, (packed,)):
        is_cuda = timer.world.device.type == "cuda"
        steps = [micro_batches_of(packed, number) for number in range(_WARMUP + given.steps)]
        for number in range(_WARMUP):
            timer.engine.train_step(number, steps[number])
        synchronise(timer.world)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
            for number in range(_WARMUP, len(steps)):
                timer.engine.train_step(number, steps[number])
            synchronise(timer.world)
        found = summary_of(kernels_of(profiler.key_averages(), is_cuda), steps=given.steps)
        value = {"device": device_name(timer.world), "steps": given.steps, **found}
    write_json(given.out, value)
    print(value)


if __name__ == "__main__":
    main()
