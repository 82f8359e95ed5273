"""Keys of the section `training:` about steps that go wrong; `bad_steps.py` acts on them."""

from typing import Literal

from pydantic import Field

from evenpack.config import Section
from evenpack.units import Medians, Steps


class BadStepsSection(Section):
    """What to do with a step whose loss or gradient is not finite, or much larger than those before it."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do with a step whose gradient norm is not finite: end the run, or leave the update out and go on; step
    number and learning rate advance then, weights and optimizer do not. With `skip` the host waits for the norm before
    each update. What was in the step is written to OUTPUT_DIR/bad_steps in both cases."""
    nan_steps_in_a_row: Steps = Field(default=5, ge=1)
    """Most steps in a row that `on_nan: skip` leaves out; one more ends the run."""
    report_spikes_above: Medians | None = Field(default=None, gt=1.0)
    """A step whose gradient norm is more than this many times the median of the last 100 steps is written to
    OUTPUT_DIR/bad_steps, too, with a warning; it is trained on all the same. Null: none is."""
