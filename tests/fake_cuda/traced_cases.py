"""The steps that are traced: one of each family and positions, and few that hold all other settings. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, get_args

from slow_cases import slow_but

from evenpack.models.families import find_family, known_families

PRECISIONS = ("fp32", "bf16_autocast")
LAYOUTS = ("packed", "unpadded", "padded")
UPDATES = ("adamw", "lamb", "adamw_zero1")
BACKENDS = ("reference", "sdpa", "varlen", "flash", "flex")

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
    """One traced step; `positions` is the family's way to tell them."""

    family: str
    positions: str
    backend: str
    layout: str
    precision: str
    update: str
    dropout: float
    checkpointing: bool
    micro_batches: int
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

    @property
    def drops_in_varlen(self) -> bool:
        """Whether attention is the operator for dropout, which has cases of its own."""
        return self.backend == "varlen" and self.dropout > 0

    @property
    def can_be(self) -> bool:
        """Whether the backend serves it, by the table of `kernels/capabilities.py`."""
        return can_serve(self.backend, precision=self.precision, positions=self.positions, dropout=self.dropout)


def can_serve(backend: str, *, precision: str, positions: str, dropout: float) -> bool:
    if backend == "varlen" and positions == "alibi":
        return False
    if backend == "flex" and dropout:
        return False
    return backend not in ("varlen", "flash") or precision == "bf16_autocast"


def is_estimated(case):
    """Whether the formula of `engine/memory/phases.py` is for such a step."""
    return case.backend in ("varlen", "flash", "flash4", "flex")


def has_estimated_blocks(case):
    """Whether each block keeps its activations, by the formula of its family."""
    return case.backend in ("varlen", "flash", "flex") and case.precision == "bf16_autocast" and not case.checkpointing


def whole_presets():
    """Returns the names of the largest model of each family."""
    return [f"{name}:{[*find_family(name).config.presets][-1]}" for name in known_families()]


def families() -> list[tuple[str, str]]:
    """Each family with each kind of its positions."""
    return [
        (name, positions)
        for name in known_families()
        for positions in get_args(find_family(name).config.model_fields["positions"].annotation)
    ]


def all_cases() -> list[Case]:
    choices = product(families(), BACKENDS, LAYOUTS, PRECISIONS, UPDATES, (0.0, 0.1), (False, True), (1, 2))
    cases = [
        Case(
            family=family,
            positions=positions,
            backend=backend,
            layout=layout,
            precision=precision,
            update=update,
            dropout=dropout,
            checkpointing=checkpointing,
            micro_batches=micro_batches,
        )
        for (family, positions), backend, layout, precision, update, dropout, checkpointing, micro_batches in choices
    ]
    return [case for case in cases if case.can_be and not case.drops_in_varlen]


def settings_of(case: Case) -> set[tuple[Any, ...]]:
    """Returns each setting of a case with its value; a family and its positions are one."""
    return {(field.name, getattr(case, field.name)) for field in fields(case)[2:-5]} | {(case.family, case.positions)}


def covering(cases: Sequence[Case]) -> list[Case]:
    """Returns cases that hold every setting that any of `cases` holds: each time the one with most new."""
    settings = {case: settings_of(case) for case in cases}
    missing = set().union(*settings.values())
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & settings[case])))
        missing -= settings[chosen[-1]]
    return chosen


def of_family(family: str, positions: str) -> Case:
    """Returns the step whose memory and operations the formulas have, of a family."""
    backend = "flash" if positions == "alibi" else "varlen"
    training = {"layout": "packed", "precision": "bf16_autocast", "update": "adamw", "checkpointing": False}
    return Case(family=family, positions=positions, backend=backend, dropout=0.0, micro_batches=1, **training)


_DROPPING = {
    "positions": "learned",
    "backend": "varlen",
    "precision": "bf16_autocast",
    "dropout": 0.1,
    "micro_batches": 1,
}
DROPPING = (
    Case(family="bert", layout="packed", update="lamb", checkpointing=True, **_DROPPING),
    Case(family="gpt2", layout="unpadded", update="adamw", checkpointing=False, **_DROPPING),
)

_FOURTH = {
    "backend": "flash4",
    "layout": "packed",
    "precision": "bf16_autocast",
    "update": "adamw",
    "dropout": 0.0,
    "micro_batches": 1,
}
FOURTH = (
    Case(family="bert", positions="learned", checkpointing=False, **_FOURTH),
    Case(family="gpt2", positions="learned", checkpointing=True, **_FOURTH),
    Case(family="llama", positions="rotary", checkpointing=False, **_FOURTH),
    Case(family="modernbert", positions="rotary", checkpointing=False, **_FOURTH),
)

MUON = Case(
    family="gpt2",
    positions="learned",
    backend="varlen",
    layout="packed",
    precision="bf16_autocast",
    update="muon",
    dropout=0.0,
    checkpointing=False,
    micro_batches=1,
)

CASES = {
    case.name: case
    for case in [*(of_family(*one) for one in families()), *covering(all_cases()), *DROPPING, *FOURTH, MUON]
}


QUICK = (
    "bert-learned-varlen-packed-bf16_autocast-adamw",
    "llama-rotary-varlen-packed-bf16_autocast-adamw",
    "modernbert-rotary-varlen-packed-bf16_autocast-adamw",
    "gpt2-learned-sdpa-unpadded-bf16_autocast-lamb-dropout-checkpointing-2_micro_batches",
    "gpt2-alibi-flash-padded-bf16_autocast-adamw_zero1",
    "llama-rotary-flex-packed-fp32-adamw",
    "gpt2-learned-flash4-packed-bf16_autocast-adamw-checkpointing",
    "gpt2-learned-varlen-packed-bf16_autocast-muon",
)
"""One of each family, kind of positions, layout, precision, update and operator; the others are slow."""


def cases(is_wanted=lambda _: True):
    """Returns the values of a parametrised test: the names of the cases that are wanted."""
    names = [name for name, case in CASES.items() if is_wanted(case)]
    return slow_but([name for name in QUICK if name in names], names)


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
        backend="varlen",
        layout="packed",
        precision="bf16_autocast",
        update="adamw_zero1" if "zero1" in words else "adamw",
        dropout=0.0,
        checkpointing="checkpointing" in words,
        micro_batches=max(1, len(rooms)),
        rooms=rooms,
        layers=counts.get("layers"),
        preset=preset,
        times=counts.get("times", 1),
        residual="bf16" if "bf16" in words else "fp32",
    )
