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
    update_bytes: ClassVar[int]
    """Bytes per parameter that an update reads and writes, of weight, gradient and states, by fused kernels."""

    kind: str
    """The optimizer's name."""
    learning_rate: float = Field(gt=0.0)
    """Learning rate at the end of warm-up, the highest of the run."""
    weight_decay: float = Field(ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; not applied to biases and norms."""


class AdamWSection(OptimizerBase):
    """AdamW (Loshchilov and Hutter 2019); weight decay is not applied to biases and norms."""

    reason_for_whole_tensors = None
    fp32_states = 2
    fp32_temporaries = 0
    update_bytes = 4 * (4 + 3)  # weight, gradient and two moments are read, all but the gradient written

    kind: Literal["adamw"] = "adamw"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the mean of gradients, from one step to the next."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the mean of squared gradients, from one step to the next."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """What is added to the denominator of an update, so that it is never zero."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; not applied to biases and norms."""


class LambSection(OptimizerBase):
    """LAMB (You et al. 2020); weight decay and trust ratios are not applied to biases and norms."""

    reason_for_whole_tensors = "its trust ratios are norms of whole tensors"
    fp32_states = 2
    fp32_temporaries = 1
    update_bytes = 4 * (2 + 7 + 2 + 3)  # the decay, the moments and the change, two norms, the weight

    kind: Literal["lamb"]
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the mean of gradients, from one step to the next."""
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


_AnyOptimizer = Annotated[AdamWSection, Tag("adamw")] | Annotated[LambSection, Tag("lamb")]
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
    """Linear warm-up from zero, then a decay to `final_fraction` of the learning rate."""

    kind: Literal["cosine", "linear", "constant", "polynomial"] = "cosine"
    """Form of the decay after warm-up; `polynomial` is MLPerf's for BERT."""
    warmup_steps: Steps = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    final_fraction: Share = Field(default=0.1, ge=0.0, le=1.0)
    """Learning rate at the last step, as a share of the highest one."""
    degree: float = Field(default=1.0, gt=0.0)
    """Degree of the polynomial; for kind polynomial alone."""

    @model_validator(mode="after")
    def _check(self) -> "ScheduleSection":
        if self.kind != "polynomial" and self.degree != 1.0:
            raise ValueError(
                f"degree ({self.degree:g}) is for kind polynomial, found kind {self.kind}: leave it out, or set "
                "degree=1"
            )
        return self
