"""What the device does in some steps of a run: torch's trace, and the seconds of its kernels by category."""

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from evenpack.engine.activity import own_work
from evenpack.engine.world.distributed import World
from evenpack.files import write_json

log = logging.getLogger(__name__)

CATEGORIES = (
    ("communication", r"nccl|all_?reduce|allgather"),
    ("attention", r"flash|fmha|flex_attention|varlen_attn|scaled_dot_product|sdpa"),
    ("memory copies", r"memcpy|memset"),
    ("optimizer", r"adam|lamb|multi_tensor_apply|_foreach"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|(^|::)(addmm|mm|bmm|matmul|linear)"),
)
"""The first category whose pattern occurs in a kernel's name, in lower case; everything else is element-wise."""

PROFILE = "profile"
"""Folder in the output directory."""

_WARMUP = 3
_LONGEST_LISTED = 12


class StepProfile:
    """Profiles some steps of this start of a run, after a warm-up, on rank 0 alone."""

    def __init__(self, output_dir: Path, world: World, steps: int | None) -> None:
        """Is entered around the loop. steps: how many to profile; None: none."""
        self._folder = output_dir / PROFILE
        self._world = world
        self._left = steps if world.is_main and steps is not None else 0
        self._warmup = _WARMUP
        self._profiler: Any = None
        self._done: list[int] = []
        self._seconds = 0.0

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._profiler is not None and error is None:
            self._write()
        if self._left and not self._done and error is None:
            log.warning("nothing was profiled: the run ended within %d steps of warm-up", _WARMUP)

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Is entered around the work of each step, at whose end the host has waited for the device."""
        if not self._left or self._warmup:
            self._warmup -= bool(self._left)
            yield
            return
        if self._profiler is None:
            on_gpu = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profiler.start()
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started
        self._done.append(step)
        self._left -= 1
        if not self._left:
            self._write()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        with own_work("writing the profile"):
            profiler.stop()
            steps = len(self._done)
            name = f"steps_{self._done[0]}_to_{self._done[-1]}"
            value = {
                "device": self._world.device_name,
                "steps": [self._done[0], self._done[-1]],
                "step_seconds": self._seconds / steps,
                **summary_of(profiler.key_averages(), self._world.device.type == "cuda", steps=steps),
            }
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"{name}.trace.json.gz"
            unfinished = trace.with_name(f".{trace.name}")
            profiler.export_chrome_trace(str(unfinished))  # compressed, by its name
            unfinished.replace(trace)
            write_json(self._folder / f"{name}.json", value)
        log.info("%s\ntrace for https://ui.perfetto.dev or chrome://tracing: %s", table_of(value), trace)


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


def summary_of(events: Iterable[Any], is_cuda: bool, *, steps: int) -> dict[str, Any]:
    """Returns the seconds of a mean step by category, and its longest kernels."""
    kernels = [(name, seconds / steps) for name, seconds in kernels_of(events, is_cuda)]
    longest = sorted(kernels, key=lambda one: -one[1])[:_LONGEST_LISTED]
    return {
        "seconds_per_step": by_category(kernels),
        "longest": [{"kernel": name, "seconds": seconds, "category": category_of(name)} for name, seconds in longest],
    }


def table_of(value: dict[str, Any]) -> str:
    """Returns the table of a summary with its steps.

    Kernels of several streams may run at once, so that categories may add up to more than the step.
    """
    whole = value["step_seconds"]
    rows = [*value["seconds_per_step"].items(), ("the whole step", whole)]
    first, last = value["steps"]
    lines = [f"profile of steps {first} to {last} on rank 0, seconds of a mean step:"]
    lines += [f"  {name:<15} {seconds:9.4f}  {seconds / whole:6.1%}" for name, seconds in rows]
    return "\n".join(lines)
