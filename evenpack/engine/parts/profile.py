"""What the device does in some steps of a run: torch's trace, and the seconds of its kernels by category."""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from evenpack.engine.parts.part import Part, Step
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

_STEPS_BEFORE = 3
_LONGEST_LISTED = 12


class StepProfile(Part):
    """Profiles some steps of this start of a run, after a few others, on rank 0 alone.

    Each step has a profiler of its own, so that evaluations and saves between them do not count.
    """

    is_for_main_alone = True

    def __init__(self, output_dir: Path, world: World, steps: int | None) -> None:
        """Takes how many steps to profile; None: none."""
        self._folder = output_dir / PROFILE
        self._world = world
        self._left = steps or 0
        self._before = _STEPS_BEFORE
        self._done: list[int] = []
        self._profiler: Any = None
        """The profiler of the step that is being computed."""
        self._started = 0.0
        self._seconds = 0.0
        self._kernels: Counter[str] = Counter()

    def before_step(self, step: Step) -> None:
        if step.is_skipped or not self._left:
            return
        if self._before:
            self._before -= 1
            return
        on_gpu = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
        # One cycle each, so nothing accumulates; without acc_events, torch 2.11 warns of events lost between cycles.
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu], acc_events=True)
        self._profiler.start()
        self._started = time.perf_counter()

    def after_step(self, step: Step) -> None:
        """Ends the profile of the step, for whose totals the host has waited for the device."""
        if self._profiler is None:
            return
        self._seconds += time.perf_counter() - self._started
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._kernels.update(dict(kernels_of(profiler.key_averages(), self._world.device.type == "cuda")))
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"step_{step.steps_done}.trace.json.gz"
        unfinished = trace.with_name(f".{trace.name}")
        profiler.export_chrome_trace(str(unfinished))  # compressed, by its name
        unfinished.replace(trace)
        self._done.append(step.steps_done)
        self._left -= 1
        if not self._left:
            self._summarise()

    def ending(self, step: Step) -> None:
        if self._left and self._done:
            self._summarise()
        elif self._left:
            log.warning("nothing was profiled: the run ended within the %d steps before the profile", _STEPS_BEFORE)

    def _summarise(self) -> None:
        value = {
            "device": self._world.device_name,
            "steps": self._done,
            "step_seconds": self._seconds / len(self._done),
            **summary_of(self._kernels.items(), steps=len(self._done)),
        }
        write_json(self._folder / f"steps_{self._done[0]}_to_{self._done[-1]}.json", value)
        log.info("%s\ntraces for https://ui.perfetto.dev or chrome://tracing: %s", table_of(value), self._folder)


def category_of(kernel: str) -> str:
    """Returns what a kernel does, by its name."""
    name = kernel.lower()
    return next((category for category, pattern in CATEGORIES if re.search(pattern, name)), "elementwise")


def kernels_of(events: Iterable[Any], is_cuda: bool) -> list[tuple[str, float]]:
    """Returns (name, seconds) of what ran on the device: on a GPU its kernels, on a CPU the operators.

    On a GPU an operator has the seconds of its kernels too, and so has a region that torch or DeepSpeed names, such as
    `Optimizer.step`; they would count twice.
    """
    found: Counter[str] = Counter()
    for event in events:
        if not is_cuda:
            found[event.key] += 1e-6 * event.self_cpu_time_total
        elif str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            found[event.key] += 1e-6 * event.self_device_time_total
    return list(found.items())


def summary_of(kernels: Iterable[tuple[str, float]], *, steps: int) -> dict[str, Any]:
    """Returns the seconds of a mean step by category, every one of them, and its longest kernels, from all steps."""
    each = [(name, seconds / steps) for name, seconds in kernels]
    by_category = dict.fromkeys([*(name for name, _ in CATEGORIES), "elementwise"], 0.0)
    for name, seconds in each:
        by_category[category_of(name)] += seconds
    longest = sorted(each, key=lambda one: -one[1])[:_LONGEST_LISTED]
    return {
        "seconds_per_step": by_category,
        "longest": [{"kernel": name, "seconds": seconds, "category": category_of(name)} for name, seconds in longest],
    }


def table_of(value: dict[str, Any]) -> str:
    """Returns the table of a summary with its steps.

    On a GPU kernels of several streams may run at once; what they take together may then be more than the step.
    """
    whole, seconds = value["step_seconds"], value["seconds_per_step"]
    rows = [*seconds.items(), ("nothing runs", max(0.0, whole - sum(seconds.values()))), ("the whole step", whole)]
    first, last = value["steps"][0], value["steps"][-1]
    lines = [f"profile of steps {first} to {last} on rank 0, seconds of a mean step:"]
    lines += [f"  {name:<15} {taken:9.4f}  {taken / whole:6.1%}" for name, taken in rows]
    return "\n".join(lines)
