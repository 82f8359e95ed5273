"""The whole run file."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.data.data_config import DataConfig
from evenpack.kernels.attention_config import AttentionConfig
from evenpack.models.model_config import Gpt2Config


class RunSection(Section):
    """Name, place and seed."""

    name: str = Field(min_length=1)
    output_dir: Path
    """Metrics, summary and checkpoints; on several nodes a folder that all of them see."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Of the order of packs, the weights and dropout."""


class TrainingSection(Section):
    """The step and how long to go on."""

    layout: Literal["packed", "unpadded", "padded"] = "packed"
    """How a micro-batch is laid out; the three hold the same sequences and give the same loss."""
    packs_per_step: int = Field(ge=1)
    """Packs of one optimizer update over all ranks; never changes with the world size."""
    packs_per_micro_batch: int = Field(ge=1)
    """Packs that a rank computes at once: the memory knob. Accumulation is derived."""
    steps: int = Field(ge=1)
    """Length of the learning-rate schedule, in optimizer updates."""
    stop_after_steps: int | None = Field(default=None, ge=1)
    """Stop at this absolute step and go on later; null: `steps`."""
    evaluate_every_steps: int | None = Field(default=200, ge=1)
    """Null: never."""
    evaluation_packs: int | None = Field(default=None, ge=1)
    """At most this many validation packs of each source; null: all."""
    checkpoint_every_steps: int | None = Field(default=200, ge=1)
    """Null: only at the end or when stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    precision: Literal["fp32", "bf16_autocast"] = "bf16_autocast"
    """bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; null: off."""
    loader_workers: int = Field(default=1, ge=0, le=64)
    """Processes a rank that prepare batches ahead; 0: in the training process."""


class AdamWSection(Section):
    """AdamW; decay spares biases and norms."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(gt=0.0)
    """At the end of warm-up."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)


class ScheduleSection(Section):
    """Linear warm-up from zero, then a fall to `final_fraction` of the learning rate."""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)


class DeepSpeedSection(Section):
    """What goes to DeepSpeed beyond what is derived from the rest."""

    zero_stage: Literal[0, 1] = 0
    extra: dict[str, Any] = Field(default_factory=dict)
    """Passed through; a key that evenpack derives itself is refused."""


class RunConfig(Section):
    """One run."""

    run: RunSection
    data: DataConfig
    model: Gpt2Config
    attention: AttentionConfig = AttentionConfig()
    training: TrainingSection
    optimizer: AdamWSection
    schedule: ScheduleSection = ScheduleSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        training = self.training
        if training.packs_per_step % training.packs_per_micro_batch:
            raise ValueError(
                f"training.packs_per_micro_batch ({training.packs_per_micro_batch}) must divide "
                f"training.packs_per_step ({training.packs_per_step})"
            )
        if self.schedule.warmup_steps > training.steps:
            raise ValueError(
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) is above training.steps ({training.steps})"
            )
        if training.stop_after_steps is not None and training.stop_after_steps > training.steps:
            raise ValueError(
                f"training.stop_after_steps ({training.stop_after_steps}) is above training.steps ({training.steps})"
            )
        rows = self.model.max_positions
        longest = self.data.recipe.max_sequence_length
        if self.model.positions == "learned" and rows is not None and rows < longest:
            raise ValueError(f"model.max_positions ({rows}) is below data.recipe.max_sequence_length ({longest})")
        return self

    @property
    def prepared_dir(self) -> Path:
        """Where this run's data is prepared."""
        return self.data.prepared_dir or self.run.output_dir / "data"
