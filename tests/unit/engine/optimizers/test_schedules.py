"""The learning rate of each update."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.optimization import get_inverse_sqrt_schedule, get_wsd_schedule

from evenpack.engine.optimizers.config import ScheduleSection
from evenpack.engine.optimizers.schedules import learning_rate


def rates(kind: str, *, steps: int, warmup_steps: int, final_fraction: float, peak: float = 2.0) -> list[float]:
    schedule = ScheduleSection.model_validate(
        {"kind": kind, "warmup_steps": warmup_steps, "final_fraction": final_fraction}
    )
    return [learning_rate(step, peak=peak, steps=steps, schedule=schedule) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warmup_rises_linearly_from_zero_to_the_peak(kind: str):
    assert rates(kind, steps=20, warmup_steps=4, final_fraction=0.1)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    whole = rates(kind, steps=5, warmup_steps=5, final_fraction=0.1)
    assert whole == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0]), "a run that is all warm-up ends at the peak"


def test_cosine_falls_by_half_a_wave_to_the_final_fraction():
    fall = rates("cosine", steps=24, warmup_steps=4, final_fraction=0.1)[3:]
    assert fall[0] == 2.0
    assert fall[10] == pytest.approx((2.0 + 0.2) / 2), "half-way in steps is half-way in rate"
    assert fall[5] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert fall[20] == pytest.approx(0.2)
    assert fall == sorted(fall, reverse=True)


def test_linear_falls_by_equal_amounts_to_the_final_fraction_and_constant_stays():
    fall = rates("linear", steps=14, warmup_steps=4, final_fraction=0.5)[3:]
    assert fall == pytest.approx([2.0 - 0.1 * step for step in range(11)])
    assert rates("linear", steps=4, warmup_steps=0, final_fraction=0.0) == pytest.approx([1.5, 1.0, 0.5, 0.0])
    assert rates("constant", steps=9, warmup_steps=2, final_fraction=0.1)[1:] == [2.0] * 8


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_rate_stays_at_its_end_after_the_last_step(kind: str):
    schedule = ScheduleSection.model_validate({"kind": kind, "final_fraction": 0.25})
    assert learning_rate(99, peak=2.0, steps=10, schedule=schedule) == pytest.approx(0.5)


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
    ours = [learning_rate(step, peak=2.0, steps=12, schedule=schedule) for step in range(12)]
    assert ours == pytest.approx(
        mlperf_rates(steps=12, warmup_steps=warmup_steps, degree=degree, final_fraction=final_fraction, peak=2.0)
    )
    assert learning_rate(12, peak=2.0, steps=12, schedule=schedule) == pytest.approx(2.0 * final_fraction)


@pytest.mark.parametrize(
    ("decay", "warmup_steps", "decay_steps"), [("linear", 3, 5), ("cosine", 4, 8), ("1-sqrt", 0, 20)]
)
def test_wsd_is_that_of_transformers_after_warmup(decay: str, warmup_steps: int, decay_steps: int):
    schedule = ScheduleSection.model_validate(
        {"kind": "wsd", "warmup_steps": warmup_steps, "decay_steps": decay_steps, "decay": decay, "final_fraction": 0.2}
    )
    theirs = rates_of(
        get_wsd_schedule,
        num_warmup_steps=warmup_steps,
        num_training_steps=20,
        num_decay_steps=decay_steps,
        decay_type=decay,
        min_lr_ratio=0.2,
    )
    ours = [learning_rate(step, peak=2.0, steps=20, schedule=schedule) for step in range(24)]
    after = max(0, warmup_steps - 1)  # theirs rises from min_lr_ratio
    assert ours[after:] == pytest.approx(theirs[after:], rel=1e-12)


def test_inverse_square_root_is_that_of_transformers():
    theirs = rates_of(get_inverse_sqrt_schedule, num_warmup_steps=5)
    assert rates("inverse_sqrt", steps=24, warmup_steps=5, final_fraction=0.1) == pytest.approx(theirs, rel=1e-12)


@given(kind=st.sampled_from(["constant", "inverse_sqrt", "wsd"]), steps=st.integers(8, 500), step=st.integers(0, 7))
def test_the_rate_of_a_trunk_does_not_depend_on_its_length(kind: str, steps: int, step: int):
    values = {"kind": kind, "warmup_steps": 3} | ({"decay_steps": 0} if kind == "wsd" else {})
    trunk = ScheduleSection.model_validate(values)
    expected = learning_rate(step, peak=2.0, steps=8, schedule=trunk)
    assert learning_rate(step, peak=2.0, steps=steps, schedule=trunk) == expected
    decays = ScheduleSection(kind="wsd", warmup_steps=3, decay_steps=steps - 4)  # begins after step 4
    if kind != "inverse_sqrt" and step < 4:
        assert learning_rate(step, peak=2.0, steps=steps, schedule=decays) == expected


def rates_of(schedule: Callable[..., Any], **settings: Any) -> list[float]:
    """Returns the rates of 24 updates by a schedule of transformers, which counts those that are done."""
    scheduler = schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0), **settings)
    return [2.0 * scheduler.lr_lambdas[0](done) for done in range(1, 25)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear", "degree": 2.0}, r"degree \(2\.0\) is for kind polynomial"),
        ({"kind": "wsd"}, "kind wsd needs decay_steps"),
        ({"kind": "cosine", "decay_steps": 5}, r"decay_steps \(5\) is for kind wsd"),
        ({"kind": "constant", "decay": "cosine"}, r"decay \(cosine\) is for kind wsd"),
        ({"kind": "inverse_sqrt"}, "give warmup_steps"),
    ],
)
def test_a_schedule_that_lacks_its_steps_or_has_another_kinds_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        ScheduleSection.model_validate(values)
