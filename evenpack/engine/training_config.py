"""The `training:` section of a run file."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section
from evenpack.data.batch_form import Layout
from evenpack.data.dealing_config import POLICIES, Batching, DealingPolicy, default_policy


class TrainingSection(Section):
    """The step and how long to go on."""

    layout: Layout = "packed"
    """How a micro-batch is laid out; the three hold the same sequences and give the same loss."""
    batching: Batching = "packs"
    """What a step counts. `sequences`, un-padded or padded, is what training without packing does."""
    dealing: DealingPolicy | None = None
    """How a step's packs or sequences are divided among ranks and micro-batches: it says who computes what, and
    changes no step. Null: cost_balanced, or arrival for padded sequences."""
    packs_per_step: int | None = Field(default=None, ge=1)
    """Packs of one optimizer update over all ranks; never changes with the world size."""
    packs_per_micro_batch: int | None = Field(default=None, ge=1)
    """Packs that a rank computes at once: the memory knob. Accumulation is derived. Divides packs_per_step, or what
    fewer_accumulations makes of it."""
    sequences_per_step: int | None = Field(default=None, ge=1)
    """The same where batching is sequences."""
    sequences_per_micro_batch: int | None = Field(default=None, ge=1)
    """The same where batching is sequences; on average, where dealing is max_tokens."""
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
    packing_adjustment: Literal["none", "fewer_accumulations", "lamb_betas"] = "none"
    """What is done about a step of packs holding more sequences than one of single sequences, for which packs_per_step,
    steps, warm-up and betas were chosen (PackedBERT, section 3.3). fewer_accumulations: packs_per_step falls by the
    packing factor. lamb_betas: steps and warm-up fall by it, and LAMB's betas are raised to its power."""
    cost_weights: tuple[float, float] | None = None
    """a and b of the cost of a pack or a sequence, a · tokens + b · Σ length², in any one unit, by which cost_balanced
    deals: `study throughput` measures them. Null: by the model's floating-point operations. A checkpoint fixes them for
    its layout."""
    initialize_from: Path | None = None
    """Weights to begin with, and nothing else of the run that trained them: its output_dir (the newest whole
    checkpoint), one checkpoint (step_...), or a folder of transformers. Of no effect once the run has a checkpoint."""
    loader_workers: int = Field(default=1, ge=0, le=64)
    """Processes a rank that prepare batches ahead; 0: in the training process."""
    log_rank_times_every_steps: int | None = Field(default=100, ge=1)
    """How often, and at the end, the ranks' own times and work since the last time go to metrics.jsonl; null: never."""

    @property
    def items_per_step(self) -> int:
        """Packs or sequences, whatever a step counts."""
        count: int = getattr(self, f"{self.batching}_per_step")
        return count

    @property
    def items_per_micro_batch(self) -> int:
        """Packs or sequences that a rank computes at once; on average, where dealing is max_tokens."""
        count: int = getattr(self, f"{self.batching}_per_micro_batch")
        return count

    @property
    def policy(self) -> DealingPolicy:
        """The dealing that is asked for, or what null stands for."""
        return self.dealing or default_policy(self.batching, self.layout)

    @model_validator(mode="after")
    def _check_counts(self) -> "TrainingSection":
        other = "sequences" if self.batching == "packs" else "packs"
        for part in ("step", "micro_batch"):
            if getattr(self, f"{self.batching}_per_{part}") is None:
                raise ValueError(f"batching is {self.batching}: {self.batching}_per_{part} is required")
            surplus = getattr(self, f"{other}_per_{part}")
            if surplus is not None:
                raise ValueError(
                    f"batching is {self.batching}: leave {other}_per_{part} out, or null (found {surplus}), and give "
                    f"{self.batching}_per_{part}"
                )
        return self

    @model_validator(mode="after")
    def _check_dealing(self) -> "TrainingSection":
        policies = POLICIES.get((self.batching, self.layout))
        if policies is None:
            raise ValueError(
                f"batching {self.batching} has no layout {self.layout}: single sequences are unpadded or padded"
            )
        if self.policy not in policies:
            raise ValueError(
                f"dealing {self.dealing} is not for batching {self.batching} in layout {self.layout}: that can have "
                f"{', '.join(policies)}"
            )
        if self.batching == "sequences" and self.packing_adjustment != "none":
            raise ValueError(
                f"packing_adjustment {self.packing_adjustment} is for packs that take the place of sequences, and "
                "batching is sequences: set packing_adjustment=none"
            )
        return self

    @field_validator("cost_weights")
    @classmethod
    def _check_cost_weights(cls, weights: tuple[float, float] | None) -> tuple[float, float] | None:
        if weights is not None and (min(weights) < 0.0 or max(weights) == 0.0):
            raise ValueError(f"expected two numbers of 0 or more, one of them above it, found {list(weights)}")
        return weights
