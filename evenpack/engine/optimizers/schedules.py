"""The learning rate as a pure function of the step: a resumed run needs no state for it."""

import math
from collections.abc import Callable

from evenpack.engine.optimizers.config import ScheduleSection


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleSection) -> float:
    """Returns the rate of a step's update.

    After so many steps as `warmup_steps` it has risen linearly from 0 to `peak`. Then it

    cosine, linear  decays to `final_fraction` of it after `steps`, by half a cosine (Loshchilov and Hutter 2017, SGDR,
                    equation 5, one cycle) or linearly, and stays there
    constant        stays
    wsd             stays until `decay_steps` steps are left, in which it decays to `final_fraction` of it (Hu et al.
                    2024, MiniCPM) in the form `decay`; `1-sqrt` is of Hägele et al. 2024, equation 2
    inverse_sqrt    falls with the inverse square root of the number of steps (Vaswani et al. 2017, equation 3)
    polynomial      has rules of its own, see `_polynomial_rate`

    Raises: ValueError for a step below 0.
    """
    if step < 0:
        raise ValueError(f"steps are counted from 0, got {step}")
    if schedule.kind == "polynomial":
        return _polynomial_rate(step, peak=peak, steps=steps, schedule=schedule)
    update, warmup = step + 1, schedule.warmup_steps  # the rate is that at the step's end
    if update <= warmup:
        return peak * update / warmup
    if schedule.kind == "inverse_sqrt":
        return peak * math.sqrt(warmup / update)
    if schedule.kind == "constant" or schedule.decay_steps == 0:
        return peak
    begin = warmup if schedule.decay_steps is None else steps - schedule.decay_steps
    progress = min(1.0, max(0, update - begin) / max(1, steps - begin))
    remaining = _REMAINING[schedule.decay if schedule.kind == "wsd" else schedule.kind](progress)
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining)


_REMAINING: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""What is left of a decay from 1 to 0, by the part of it that is done."""


def _polynomial_rate(done: int, *, peak: float, steps: int, schedule: ScheduleSection) -> float:
    """Returns the rate of MLPerf's BERT, after `done` updates.

    The decay counts from the first update, not from the end of warm-up, where there is a small jump. The first update
    of a warm-up has a rate of 0, and the last of all one above the end. Source: BERT's `optimization.py`
    (TensorFlow's polynomial decay under a linear warm-up), and NVIDIA's LinearWarmupPolyDecayScheduler after it.
    """
    if done < schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    remaining = math.pow(1.0 - min(1.0, done / steps), schedule.degree)
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining)
