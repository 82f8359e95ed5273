"""The sections `optimizer:` and `schedule:` of a run file."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from evenpack.config import Section


class OptimizerBase(Section):
    """What the rest asks of every optimizer's section."""

    needs_whole_tensors: ClassVar[bool]
    """Whether an update needs tensors as the model has them, which not every sharding leaves whole."""
    fp32_states: ClassVar[int]
    """FP32 numbers a parameter beside weight and gradient, those of a moment included: for estimates of memory."""

    kind: str
    learning_rate: float = Field(gt=0.0)
    """At the end of warm-up."""
    weight_decay: float = Field(ge=0.0)


class AdamWSection(OptimizerBase):
    """AdamW; decay spares biases and norms."""

    needs_whole_tensors = False
    fp32_states = 2

    kind: Literal["adamw"] = "adamw"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)


class LambSection(OptimizerBase):
    """LAMB; decay and trust ratios spare biases and norms."""

    needs_whole_tensors = True
    fp32_states = 3

    kind: Literal["lamb"]
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    epsilon: float = Field(default=1e-6, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    bias_correction: bool = True
    """Divide the moments by 1 - beta**t, as MLPerf's submissions do."""


def _optimizer_kind(section: Any) -> Any:
    """AdamW where a run file names none."""
    return section.get("kind", "adamw") if isinstance(section, dict) else getattr(section, "kind", None)


OptimizerSection = Annotated[
    Annotated[AdamWSection, Tag("adamw")] | Annotated[LambSection, Tag("lamb")],
    Discriminator(
        _optimizer_kind,
        custom_error_type="optimizer_kind",
        custom_error_message="expected a section whose kind is adamw or lamb",
    ),
]


class ScheduleSection(Section):
    """Linear warm-up from zero, then a fall to `final_fraction` of the learning rate."""

    kind: Literal["cosine", "linear", "constant", "polynomial"] = "cosine"
    """`polynomial` is MLPerf's for BERT."""
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)
    degree: float = Field(default=1.0, gt=0.0)
    """Of `polynomial`; the others have none."""

    @model_validator(mode="after")
    def _check(self) -> "ScheduleSection":
        if self.kind != "polynomial" and self.degree != 1.0:
            raise ValueError(f"degree ({self.degree:g}) is polynomial's, and kind is {self.kind}: leave it out")
        return self
