"""Defines the sections `optimizer:` and `schedule:` of a run file."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from evenpack.config import Section
from evenpack.units import Share, Steps


class OptimizerBase(Section):
    """Base of every optimizer's section."""

    reason_for_whole_tensors: ClassVar[str | None]
    """Why an update needs the model's whole tensors, which some shardings divide; None: it does not."""
    fp32_states: ClassVar[int]
    """FP32 numbers that are kept for each parameter in addition to it; for estimates of memory."""
    fp32_temporaries: ClassVar[int]
    """FP32 numbers that an update on a GPU needs for each parameter while it lasts."""

    kind: str
    """The optimizer's name."""
    learning_rate: float = Field(gt=0.0)
    """Learning rate at the end of warm-up, the highest of the run."""
    weight_decay: float = Field(ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; not applied to biases and norms."""


class AdamWKeys(OptimizerBase):
    """The keys of AdamW, for the sections of optimizers that update by it or have the same."""

    fp32_states = 2

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the mean of gradients, from one step to the next."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the mean of squared gradients, from one step to the next."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """What is added to the denominator of an update, so that it is never zero."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; not applied to biases and norms."""


class AdamWSection(AdamWKeys):
    """AdamW (Loshchilov and Hutter 2019); weight decay is not applied to biases and norms."""

    reason_for_whole_tensors = None
    fp32_temporaries = 0

    kind: Literal["adamw"] = "adamw"


class MuonSection(AdamWKeys):
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for all else, at one learning rate."""

    reason_for_whole_tensors = "it orthogonalises whole matrices"
    fp32_temporaries = 2  # four numbers in BF16: the direction, its iterate, the next one and their products

    kind: Literal["muon"]
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the mean of gradients of matrices, from one step to the next; Nesterov's."""


class LambSection(AdamWKeys):
    """LAMB (You et al. 2020); weight decay and trust ratios are not applied to biases and norms."""

    reason_for_whole_tensors = "its trust ratios are norms of whole tensors"
    fp32_temporaries = 1

    kind: Literal["lamb"]
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the mean of squared gradients, from one step to the next."""
    epsilon: float = Field(default=1e-6, gt=0.0)
    """What is added to the denominator of an update, so that it is never zero."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay, added to the update before the trust ratio; not applied to biases and norms."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta**t, as MLPerf's submissions do."""


def _optimizer_kind(section: Any) -> Any:
    """Returns the `kind` of a section; AdamW by default."""
    return section.get("kind", "adamw") if isinstance(section, dict) else getattr(section, "kind", None)


_AnyOptimizer = (
    Annotated[AdamWSection, Tag("adamw")] | Annotated[LambSection, Tag("lamb")] | Annotated[MuonSection, Tag("muon")]
)
_KINDS = [tag.tag for _, tag in map(get_args, get_args(_AnyOptimizer))]

OptimizerSection = Annotated[
    _AnyOptimizer,
    Discriminator(
        _optimizer_kind,
        custom_error_type="optimizer_kind",
        custom_error_message=f"expected a section whose kind is {' or '.join(_KINDS)}",
    ),
]


class ScheduleSection(Section):
    """Linear warm-up from zero to the learning rate, and what follows it."""

    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "polynomial"] = "cosine"
    """Form after warm-up; `wsd` is constant before its decay; `polynomial` is MLPerf's for BERT. The rate of a step of
    `constant`, `inverse_sqrt`, and `wsd` before its decay, does not depend on the length of the run."""
    warmup_steps: Steps = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    final_fraction: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate at the last step of a decay, as a share of the highest one."""
    decay_steps: Steps | None = Field(default=None, ge=0)
    """Last steps of the run, over which the learning rate of `wsd` decays; for this kind alone. 0: it stays."""
    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Form of the decay of `wsd`; for this kind alone."""
    degree: float = Field(default=1.0, gt=0.0)
    """Degree of the polynomial; for kind polynomial alone."""

    @model_validator(mode="after")
    def _check(self) -> "ScheduleSection":
        for key, kind in {"decay_steps": "wsd", "decay": "wsd", "degree": "polynomial"}.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if self.kind != kind and value != default:
                raise ValueError(f"{key} ({value}) is for kind {kind}, found kind {self.kind}: leave it out")
        if self.kind == "wsd" and self.decay_steps is None:
            raise ValueError("kind wsd needs decay_steps: the last steps of the run, or 0 for a trunk that stays")
        if self.kind == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("kind inverse_sqrt falls from the end of warm-up: give warmup_steps")
        return self
