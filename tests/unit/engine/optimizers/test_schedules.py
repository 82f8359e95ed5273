"""The learning rate of each update."""

import math

import pytest
from pydantic import ValidationError

from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.optimizers.schedules import learning_rate


def rates(kind: str, *, steps: int, warmup_steps: int, final_fraction: float, peak: float = 2.0) -> list[float]:
    schedule = ScheduleSection.model_validate(
        {"kind": kind, "warmup_steps": warmup_steps, "final_fraction": final_fraction}
    )
    return [learning_rate(update, peak=peak, steps=steps, schedule=schedule) for update in range(1, steps + 1)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warmup_rises_linearly_from_zero_to_the_peak(kind: str):
    assert rates(kind, steps=20, warmup_steps=4, final_fraction=0.1)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_cosine_falls_by_half_a_wave_to_the_final_fraction():
    fall = rates("cosine", steps=24, warmup_steps=4, final_fraction=0.1)[3:]
    assert fall[0] == 2.0
    assert fall[10] == pytest.approx((2.0 + 0.2) / 2), "half-way in steps is half-way in rate"
    assert fall[5] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert fall[20] == pytest.approx(0.2)
    assert fall == sorted(fall, reverse=True)


def test_linear_falls_by_equal_amounts_to_the_final_fraction():
    fall = rates("linear", steps=14, warmup_steps=4, final_fraction=0.5)[3:]
    assert fall == pytest.approx([2.0 - 0.1 * step for step in range(11)])


def test_constant_stays_at_the_peak():
    assert rates("constant", steps=9, warmup_steps=2, final_fraction=0.1)[1:] == [2.0] * 8


def test_without_warmup_the_first_update_is_already_on_the_way_down():
    assert rates("linear", steps=4, warmup_steps=0, final_fraction=0.0) == pytest.approx([1.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_a_run_that_is_all_warmup_ends_at_the_peak(kind: str):
    assert rates(kind, steps=5, warmup_steps=5, final_fraction=0.1) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_rate_stays_at_its_end_after_the_last_step(kind: str):
    schedule = ScheduleSection.model_validate({"kind": kind, "final_fraction": 0.25})
    assert learning_rate(100, peak=2.0, steps=10, schedule=schedule) == pytest.approx(0.5)


def test_updates_are_counted_from_one():
    with pytest.raises(ValueError, match="counted from 1"):
        learning_rate(0, peak=1.0, steps=10, schedule=ScheduleSection())


def mlperf_rates(*, steps: int, warmup_steps: int, degree: float, final_fraction: float, peak: float) -> list[float]:
    """Returns rates by NVIDIA's scheduler, for updates counted from 1, a start of warm-up at 0 and an offset of 1."""
    rates, end = [], peak * final_fraction
    for update in range(1, steps + 1):
        if update - 1 < warmup_steps:
            rates.append(peak * (update - 1) / warmup_steps)
        else:
            rates.append((peak - end) * (1 - (update - 1) / steps) ** degree + end)
    return rates


@pytest.mark.parametrize(("warmup_steps", "degree", "final_fraction"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (4, 0.5, 0.2)])
def test_polynomial_is_mlperfs(warmup_steps: int, degree: float, final_fraction: float):
    schedule = ScheduleSection(
        kind="polynomial", warmup_steps=warmup_steps, degree=degree, final_fraction=final_fraction
    )
    ours = [learning_rate(update, peak=2.0, steps=12, schedule=schedule) for update in range(1, 13)]
    assert ours == pytest.approx(
        mlperf_rates(steps=12, warmup_steps=warmup_steps, degree=degree, final_fraction=final_fraction, peak=2.0)
    )
    assert learning_rate(13, peak=2.0, steps=12, schedule=schedule) == pytest.approx(2.0 * final_fraction)


def test_polynomial_to_zero_by_hand():
    assert rates("polynomial", steps=5, warmup_steps=2, final_fraction=0.0) == pytest.approx([0, 1, 1.2, 0.8, 0.4])


def test_a_degree_that_nothing_reads_is_refused():
    with pytest.raises(ValidationError, match=r"degree \(2\) is for kind polynomial, found kind linear"):
        ScheduleSection(kind="linear", degree=2.0)
