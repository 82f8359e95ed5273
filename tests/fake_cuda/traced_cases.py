"""The steps that are traced: few that hold each family, layout, precision, update and operator. Needs no torch."""

from dataclasses import dataclass

import pytest

from evenpack.models.families import find_family

EXPECTED_WAITS = {
    "evenpack.kernels.sdpa.attend": 1.0,
    "evenpack.kernels.sdpa._group_mask": 1.0,
    "evenpack.kernels.sdpa._alibi_bias": 1.0,
    "deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace": 0.0,
    "deepspeed.runtime.utils.is_invalid_grad_norm": 0.0,
}
"""Functions that may wait for the device, and what they read."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One traced step."""

    family: str
    positions: str
    backend: str = "varlen"
    layout: str = "packed"
    precision: str = "bf16_autocast"
    update: str = "adamw"
    dropout: float = 0.0
    checkpointing: bool = False
    micro_batches: int = 1
    layers: int | None = 2
    preset: str | None = None
    times: int = 1
    """How often the micro-batch has each of its packs."""
    residual: str = "fp32"
    rooms: tuple[int, ...] = ()
    """Empty segments at the end of each micro-batch; (): none."""

    @property
    def name(self) -> str:
        words = [self.family, self.positions, self.backend, self.layout, self.precision, self.update]
        words += ["dropout"] if self.dropout else []
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"{self.micro_batches}_micro_batches"] if self.micro_batches > 1 else []
        return "-".join(words)


_QUICK = (
    Case(family="bert", positions="learned"),
    Case(family="llama", positions="rotary"),
    Case(family="modernbert", positions="rotary"),
    Case(family="bert", positions="learned", update="lamb", dropout=0.1, checkpointing=True, micro_batches=2),
    Case(family="gpt2", positions="alibi", backend="flash", layout="padded", update="adamw_zero1"),
    Case(family="llama", positions="rotary", backend="flex", precision="fp32"),
    Case(family="gpt2", positions="learned", backend="flash4", checkpointing=True),
    Case(family="gpt2", positions="learned", update="muon"),
)
_SLOW = (
    Case(
        family="gpt2",
        positions="learned",
        backend="sdpa",
        layout="unpadded",
        update="lamb",
        dropout=0.1,
        checkpointing=True,
        micro_batches=2,
    ),
    Case(family="gpt2", positions="rotary", backend="reference", precision="fp32"),
    Case(family="llama", positions="rotary", backend="flash4"),
)

CASES = {case.name: case for case in (*_QUICK, *_SLOW)}


def is_estimated(case):
    """Whether the formula of `engine/memory/phases.py` is for such a step."""
    return case.backend in ("varlen", "flash", "flash4", "flex")


def has_estimated_blocks(case):
    """Whether each block keeps its activations, by the formula of its family."""
    return case.backend in ("varlen", "flash", "flex") and case.precision == "bf16_autocast" and not case.checkpointing


def cases(is_wanted=lambda _: True):
    """Returns the values of a parametrised test: the names of the cases that are wanted."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if case in _SLOW else [])
        for name, case in CASES.items()
        if is_wanted(case)
    ]


def whole_preset(name):
    """Returns the step of a whole model, `FAMILY:PRESET`, or of another as words after that say.

    These are `+checkpointing`, `+zero1`, `+bf16`, `+2_layers`, and `+16_times` for a larger micro-batch. `+bf16` is the
    residual stream's type; with `+rooms` three micro-batches differ in their number of segments, as those of a run do.
    """
    model, *words = name.split("+")
    family, preset = model.split(":")
    rooms = (64, 0, 192) if "rooms" in words else ()
    counts = {unit: int(number) for number, _, unit in (word.partition("_") for word in words) if unit}
    return Case(
        family=family,
        positions=find_family(family).config.model_fields["positions"].default,
        update="adamw_zero1" if "zero1" in words else "adamw",
        checkpointing="checkpointing" in words,
        micro_batches=max(1, len(rooms)),
        rooms=rooms,
        layers=counts.get("layers"),
        preset=preset,
        times=counts.get("times", 1),
        residual="bf16" if "bf16" in words else "fp32",
    )
