"""The operations of a step on paper, and its seconds at rates that the test sets."""

import pytest

from evenpack.config import validate
from evenpack.engine.optimizers.config import AdamWSection
from evenpack.models.cost import Work
from evenpack.models.families import find_family
from evenpack.models.traffic import Operation, accumulation_operations, gradient_operations
from evenpack.studies.roofline.estimate import PaperStep, paper_step, step_seconds
from evenpack.studies.roofline.rates import Rates

WORK = Work(slots=512, squared_lengths=512 * 128, head_slots=512, sequences=0)
MODEL = validate({"kind": "gpt2", "preset": "tiny"}, find_family("gpt2").config, origin="test")
SIZES = {"vocabulary_size": 1000, "max_positions": 64}
RATES = {"device": "some", "products": 1e12, "bandwidth": 1e11, "attention_per_slot": 0.0, "attention_per_pair": 0.0}


def step_of(micro_batches: int) -> PaperStep:
    return paper_step(
        MODEL,
        WORK,
        **SIZES,
        micro_batches=micro_batches,
        optimizer=AdamWSection(learning_rate=1e-3),
        zero_stage=0,
        ranks=1,
    )


def total(operations: list[Operation] | tuple[Operation, ...], name: str) -> int:
    return sum(getattr(one, name) for one in operations)


@pytest.mark.parametrize("name", ["flops", "bytes", "kernels"])
def test_a_step_has_each_micro_batch_once_and_adds_all_but_the_first(name: str) -> None:
    gradients = total(gradient_operations(MODEL, vocabulary_size=1000, work=WORK), name)
    added = total(accumulation_operations(MODEL, **SIZES), name)
    one, three = (total(step_of(count).operations, name) for count in (1, 3))
    update = one - gradients
    assert three == 3 * gradients + 2 * added + update
    assert update == (0 if name == "flops" else total(step_of(1).operations[-1:], name))


def test_seconds_are_the_slower_of_products_and_bytes_plus_kernel_starts() -> None:
    step = step_of(2)
    kernels = total(step.operations, "kernels")
    busy = sum(max(one.flops / 1e12, one.bytes / 1e11) for one in step.operations)
    gaps = step_seconds(step, Rates(**RATES, kernel_gap=3e-6, issue=0.0))
    assert gaps.launches == pytest.approx(kernels * 3e-6)
    assert gaps.total == pytest.approx(busy + kernels * 3e-6)
    assert not gaps.is_host_bound
    issued = step_seconds(step, Rates(**RATES, kernel_gap=0.0, issue=1e-3))
    assert issued.total == pytest.approx(kernels * 1e-3), "the device waits for its host"
    assert issued.is_host_bound
