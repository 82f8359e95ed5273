"""The learning rate as a pure function of the update's number: a resumed run needs no state for it."""

import math

from evenpack.engine.optimizers.config import ScheduleSection


def learning_rate(update: int, *, peak: float, steps: int, schedule: ScheduleSection) -> float:
    """Returns the rate of update `update`, counted from 1 to `steps`.

    It rises linearly from 0 (before the first update) to `peak` at update `warmup_steps`, then decays to
    `final_fraction` of it at update `steps`: by half a cosine (Loshchilov and Hutter 2017, SGDR, equation 5, one
    cycle), linearly, or not at all. It stays there after `steps`. `polynomial` has rules of its own, see
    `_polynomial_rate`.

    Raises: ValueError for an update below 1.
    """
    if update < 1:
        raise ValueError(f"updates are counted from 1, got {update}")
    if schedule.kind == "polynomial":
        return _polynomial_rate(update - 1, peak=peak, steps=steps, schedule=schedule)
    if update <= schedule.warmup_steps:
        return peak * update / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (update - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1.0 - progress
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * remaining)


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
