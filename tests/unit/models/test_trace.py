"""What is traced at two depths is what a model of any depth does, and torch is loaded where something is counted."""

import subprocess
import sys

import numpy as np
import pytest

from evenpack.models.cost import parameter_count
from evenpack.models.families import find_family
from evenpack.models.trace import AXES, LIVE, factors_of, moments_of, trace_passes

SIZES = {"vocabulary_size": 1000, "max_positions": 64, "number_bytes": 2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"dropout": 0.1}),
        ("bert", {"activation_checkpointing": True}),
        ("llama", {}),
    ],
)
def test_moments_of_a_deep_model_are_those_that_are_traced_in_it(kind: str, changes: dict[str, object]) -> None:
    config = find_family(kind).config.model_validate({"kind": kind, "preset": "tiny", "layers": 6, **changes})
    extended = moments_of(config, **SIZES, accumulates=False)
    traced = trace_passes(config, **SIZES, accumulates=False)
    assert extended.loss_moment == traced.loss_moment
    for phase, found in extended.alive.items():
        np.testing.assert_array_equal(found, traced.alive[phase], err_msg=phase)


def test_only_gradients_of_earlier_micro_batches_are_alive_at_the_end() -> None:
    config = find_family("llama").config.model_validate({"kind": "llama", "preset": "tiny"})
    parameters = parameter_count(config, vocabulary_size=1000, max_positions=64)
    gradients = LIVE.index("gradients")
    first, later = (trace_passes(config, **SIZES, accumulates=accumulates).alive for accumulates in (False, True))
    passed = (moment for phase, found in later.items() if phase != "forward" for moment in found)
    assert {int(moment[gradients, 0]) for moment in passed} == {4 * parameters}
    assert not first["forward"][:, gradients].any()
    last = first["embedding"][-1]
    assert (last[gradients, 0], last[LIVE.index("arrived"), 0]) == (4 * parameters, 4 * parameters)


def test_a_number_grows_with_the_size_that_divides_it() -> None:
    assert factors_of(16_777_259 * 12).tolist() == [0, 12, 0, 0]
    assert factors_of(16_777_291 * 7).tolist() == [0, 0, 0, 7]
    assert factors_of(50_257 * 1_600).tolist() == [50_257 * 1_600, 0, 0, 0]
    assert len(AXES) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("done", "left_out"),
    [
        ("from evenpack.models import cost; section = find_family('gpt2').config(kind='gpt2')", "torch"),
        (
            "from evenpack.models.cost import parameter_count; section = find_family('gpt2').config(kind='gpt2');"
            "parameter_count(section, vocabulary_size=300, max_positions=10)",
            "torch._dynamo",
        ),
    ],
)
def test_planning_loads_no_torch_and_counting_parameters_no_compiler(done: str, left_out: str) -> None:
    script = f"import sys; from evenpack.models.families import find_family; {done}; print({left_out!r} in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
