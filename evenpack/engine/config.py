"""The whole run file."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section, UserPath
from evenpack.data.config import DataConfig, MaskingConfig
from evenpack.data.limits import MOST_PACKS_A_STEP
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, Batching, Layout, default_policy
from evenpack.engine.config_checks import check_named_steps, check_validation_weights
from evenpack.engine.optimizers.config import OptimizerSection, ScheduleSection
from evenpack.engine.reporting.config import MetricsSection, MlperfSection
from evenpack.engine.run_length import RunLengthSection
from evenpack.engine.sharding import SHARDINGS
from evenpack.kernels.config import AttentionConfig
from evenpack.models.config import ModelConfig
from evenpack.models.families import family_of
from evenpack.units import Checkpoints, Packs, Processes, Sequences, Steps, Tokens


class RunSection(Section):
    """Name, place and seed."""

    name: str = Field(min_length=1)
    """Name of the run, as it stands in messages and on plots."""
    output_dir: UserPath
    """Folder for metrics, summary and checkpoints; on several nodes a folder that all of them see."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Seed of the order of packs, the initial weights and dropout."""


class DeepSpeedSection(Section):
    """What goes to DeepSpeed beyond what is derived from the rest."""

    zero_stage: int = 0
    """ZeRO stage. 0: every rank holds everything; 1: the optimizer's state is split over the ranks."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys that are passed to DeepSpeed as they are; a key that evenpack derives itself is refused."""

    @field_validator("zero_stage")
    @classmethod
    def _check_stage(cls, stage: int) -> int:
        if stage not in SHARDINGS:
            raise ValueError(f"expected a ZeRO stage of {', '.join(map(str, SHARDINGS))}, found {stage}")
        return stage


class TrainingSection(RunLengthSection):
    """The step and how long to go on."""

    layout: Layout = "packed"
    """How a micro-batch is laid out; the three hold the same sequences and give the same loss."""
    batching: Batching = "packs"
    """What a step counts. `sequences`, un-padded or padded, is what training without packing does."""
    assignment: AssignmentPolicy | None = None
    """How a step's packs or sequences are divided among ranks and micro-batches: it says who computes what, and
    changes no step. Null: cost_balanced, or arrival for padded sequences."""
    packs_per_step: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs of one optimizer update over all ranks; never changes with the world size."""
    packs_per_micro_batch: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs that a rank computes at once: the memory knob. Accumulation is derived. Divides packs_per_step, or what
    fewer_accumulations makes of it."""
    sequences_per_step: Sequences | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences of one optimizer update over all ranks, in place of packs_per_step where batching is sequences."""
    sequences_per_micro_batch: Sequences | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences that a rank computes at once, in place of packs_per_micro_batch where batching is sequences; on
    average, where assignment is max_tokens."""
    tokens_per_step: Tokens | None = Field(default=None, ge=1)
    """Real tokens of one optimizer update over all ranks, on average, in place of packs_per_step (or
    sequences_per_step): rounded to whole micro-batches, as `--dry-run` shows."""
    evaluation_packs: Packs | None = Field(default=None, ge=1)
    """How many validation packs of each source an evaluation takes at most; null: all."""
    validation_weights: dict[str, Annotated[float, Field(gt=0.0)]] | None = None
    """Weights, by the source's name, with which the validation losses of sources are averaged into one, whatever the
    mixture that is trained on; sources that are not named do not count. Null: each source's loss stands alone."""
    checkpoint_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one checkpoint to the next. Null: a checkpoint is saved only at the end or when stopped."""
    keep_checkpoints: Checkpoints = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept; older ones are removed."""
    precision: Literal["fp32", "bf16_autocast"] = "bf16_autocast"
    """Number formats; bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Norm of all gradients together at which they are clipped; null: they are not."""
    packing_adjustment: Literal["none", "fewer_accumulations", "lamb_betas"] = "none"
    """What is done about a step of packs holding more sequences than one of single sequences, for which packs_per_step,
    steps, warm-up and betas were chosen (PackedBERT, section 3.3). fewer_accumulations: packs_per_step falls by the
    packing factor. lamb_betas: steps and warm-up fall by it, and LAMB's betas are raised to its power."""
    cost_model: UserPath | None = None
    """A file of `study throughput --cost-model`: what a token, a squared length and a segment cost on the device, by
    which cost_balanced assigns. Null: by the model's floating-point operations. A checkpoint fixes the weights for its
    layout."""
    cost_model_of_another: Literal["refuse", "use"] = "refuse"
    """What to do with a cost model that was measured on another model or layout: refuse it, or use it with a warning.
    Another device or hidden size is always a warning."""
    initialize_from: UserPath | None = None
    """Weights to begin with, and nothing else of the run that trained them: its output_dir (the newest whole
    checkpoint), one checkpoint (step_...), a folder of transformers, a checkpoint of TensorFlow (model.ckpt-28252) or a
    state dict of PyTorch (.pt); docs/starting_weights.md. Of no effect once the run has a checkpoint."""
    loader_workers: Processes = Field(default=1, ge=0, le=64)
    """Processes of each rank that prepare batches ahead; 0: batches are made in the training process."""
    log_rank_times_every_steps: Steps | None = Field(default=100, ge=1)
    """How often, and at the end, the ranks' own times and work since the last time go to metrics.jsonl; null: never."""

    @property
    def items_per_step(self) -> int:
        """Packs or sequences, whatever a step counts; `resolve` settles them where the run file gives tokens."""
        assert self.stated_items_per_step is not None, "a resolved run has the packs or sequences of its steps"
        return self.stated_items_per_step

    @property
    def stated_items_per_step(self) -> int | None:
        """The same as far as the run file says it; None where it gives tokens."""
        count: int | None = getattr(self, f"{self.batching}_per_step")
        return count

    @property
    def items_per_micro_batch(self) -> int:
        """Packs or sequences that a rank computes at once; on average, where assignment is max_tokens."""
        count: int = getattr(self, f"{self.batching}_per_micro_batch")
        return count

    @property
    def policy(self) -> AssignmentPolicy:
        """The assignment that is asked for, or what null stands for."""
        return self.assignment or default_policy(self.batching, self.layout)

    @model_validator(mode="after")
    def _check_counts(self) -> "TrainingSection":
        other = "sequences" if self.batching == "packs" else "packs"
        if self.tokens_per_step is not None and self.stated_items_per_step is not None:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) and {self.batching}_per_step ({self.stated_items_per_step}) "
                "both give the size of a step: set one of them to null"
            )
        for part in ("step", "micro_batch"):
            in_tokens = part == "step" and self.tokens_per_step is not None
            if getattr(self, f"{self.batching}_per_{part}") is None and not in_tokens:
                instead = ", or tokens_per_step" if part == "step" else ""
                raise ValueError(f"batching is {self.batching}: {self.batching}_per_{part} is required{instead}")
            surplus = getattr(self, f"{other}_per_{part}")
            if surplus is not None:
                raise ValueError(
                    f"batching is {self.batching}: leave {other}_per_{part} out, or null (found {surplus}), and give "
                    f"{self.batching}_per_{part}"
                )
        return self

    @model_validator(mode="after")
    def _check_assignment(self) -> "TrainingSection":
        policies = POLICIES.get((self.batching, self.layout))
        if policies is None:
            raise ValueError(
                f"batching {self.batching} has no layout {self.layout}: single sequences are unpadded or padded"
            )
        if self.policy not in policies:
            raise ValueError(
                f"assignment {self.assignment} is not for batching {self.batching} in layout {self.layout}: that can "
                f"have {', '.join(policies)}"
            )
        if self.batching == "sequences" and self.packing_adjustment != "none":
            raise ValueError(
                f"packing_adjustment {self.packing_adjustment} is for packs that take the place of sequences, and "
                "batching is sequences: set packing_adjustment=none"
            )
        if self.tokens_per_step is not None and self.packing_adjustment == "fewer_accumulations":
            raise ValueError(
                "packing_adjustment fewer_accumulations is for a packs_per_step that was chosen as a number of single "
                "sequences, and tokens_per_step counts tokens, which packing leaves alone: set packing_adjustment=none"
            )
        return self


class RunConfig(Section):
    """One run."""

    run: RunSection
    data: DataConfig
    model: ModelConfig
    """The model: its family, a preset of sizes, and what differs from it."""
    attention: AttentionConfig = AttentionConfig()
    masking: MaskingConfig = MaskingConfig()
    """Masking for a model that learns from masked tokens, where masks are drawn again in each epoch."""
    training: TrainingSection
    optimizer: OptimizerSection
    """The optimizer and its learning rate."""
    schedule: ScheduleSection = ScheduleSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    metrics: MetricsSection = MetricsSection()
    mlperf: MlperfSection | None = None
    """What the log of an MLPerf run says of it; null: no log for MLPerf is written."""

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        training = self.training
        # Where packs_per_step is going to be cut, only the number after it must be divided (`micro_batches_per_step`).
        items = training.stated_items_per_step
        is_final = training.packing_adjustment != "fewer_accumulations"
        if is_final and items is not None and items % training.items_per_micro_batch:
            raise ValueError(
                f"training.{training.batching}_per_micro_batch ({training.items_per_micro_batch}) must divide "
                f"training.{training.batching}_per_step ({items})"
            )
        steps = training.steps
        if steps is None:
            return self  # `resolve` validates the run again with its steps
        if self.schedule.warmup_steps > steps:
            raise ValueError(f"schedule.warmup_steps ({self.schedule.warmup_steps}) is above training.steps ({steps})")
        if training.stop_after_steps is not None and training.stop_after_steps > steps:
            raise ValueError(
                f"training.stop_after_steps ({training.stop_after_steps}) is above training.steps ({steps})"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> "RunConfig":
        check_named_steps(self.training, self.data, self.model.denominators)
        check_validation_weights(self.training.validation_weights, self.data)
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> "RunConfig":
        kind, adjustment, stage = self.optimizer.kind, self.training.packing_adjustment, self.deepspeed.zero_stage
        if self.optimizer.needs_whole_tensors and not SHARDINGS[stage].updates_whole_tensors:
            raise ValueError(
                f"optimizer.kind {kind} needs deepspeed.zero_stage=0, found {stage}: its trust ratios are norms of "
                "whole tensors, and ZeRO cuts them up. Set deepspeed.zero_stage=0 or optimizer.kind=adamw"
            )
        if self.mlperf is not None and (kind != "lamb" or self.training.target_accuracy is None):
            raise ValueError(
                "the section mlperf: is for runs with optimizer.kind=lamb and a training.target_accuracy, whose values "
                f"its log must hold; found {kind} and {self.training.target_accuracy}: set both, or leave mlperf out"
            )
        if adjustment == "lamb_betas" and kind != "lamb":
            raise ValueError(
                f"training.packing_adjustment lamb_betas needs optimizer.kind=lamb, found {kind}: set that, or "
                "training.packing_adjustment=fewer_accumulations, which suits any optimizer"
            )
        return self

    @model_validator(mode="after")
    def _check_model(self) -> "RunConfig":
        rows = self.model.max_positions
        if self.model.positions == "learned" and rows is not None and rows < self.positions_needed:
            raise ValueError(
                f"model.max_positions ({rows}) is below what the data needs ({self.positions_needed}): "
                "data.recipe.max_sequence_length, or data.pack_length where model.reset_positions is false"
            )
        about_packs = {
            "attention.isolate": self.attention.isolate,
            "model.reset_positions": self.model.reset_positions,
        }
        switched_off = [key for key, is_on in about_packs.items() if not is_on]
        if switched_off and self.training.layout != "packed":
            raise ValueError(
                f"{switched_off[0]}: false is about packs; training.layout must be packed, found {self.training.layout}"
            )
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> "RunConfig":
        family = family_of(self.model)
        if self.data.recipe.kind not in family.recipes:
            raise ValueError(
                f"model.kind {self.model.kind} and data.recipe.kind {self.data.recipe.kind} do not go together: "
                f"{self.model.kind} learns from {' or '.join(family.recipes)}"
            )
        # Not merely given: a run file that was written out whole, by `config show` or a checkpoint, names all sections.
        if family.objective != "masked_tokens" and self.masking != MaskingConfig():
            raise ValueError(
                f"masking is for models that learn from masked tokens, and model.kind {self.model.kind} is none: "
                "leave it out"
            )
        if self.data.has_stored_masks and self.masking != MaskingConfig():
            is_static = self.data.static_masks is not None
            origin = "data.recipe.static_masks" if is_static else "data.recipe.kind masked_pairs"
            other = ", or set data.recipe.static_masks=null (which is other data)" if is_static else ""
            raise ValueError(
                f"masking is for masks drawn in each epoch, and {origin} has them drawn once: leave masking out{other}"
            )
        return self

    @property
    def evaluation_packs_per_micro_batch(self) -> int:
        """Validation is always of packs, so that every run over the same data is judged by the same ones."""
        training = self.training
        if training.batching == "packs":
            return training.items_per_micro_batch
        return max(1, training.items_per_micro_batch * self.data.recipe.max_sequence_length // self.data.pack_length)

    @property
    def positions_needed(self) -> int:
        """Rows that a learned position table must have."""
        return self.model.positions_needed(
            max_sequence_length=self.data.recipe.max_sequence_length, pack_length=self.data.pack_length
        )

    @property
    def prepared_dir(self) -> Path:
        """Where this run's data is prepared."""
        return self.data.prepared_dir or self.run.output_dir / "data"
