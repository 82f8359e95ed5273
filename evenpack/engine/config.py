"""The run file: its sections, and the checks between them. Sections of other packages are defined there."""

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from evenpack.config import Section, UserPath, nearest, validate
from evenpack.data.config import DataConfig
from evenpack.data.limits import MOST_PACKS_A_STEP, MOST_STEPS
from evenpack.data.order.skipped_steps import SkippedSteps
from evenpack.data.order.step_shape import POLICIES, AssignmentPolicy, Batching, Layout, default_policy, micro_batches
from evenpack.data.recipes import MaskedPairsRecipe, MaskingConfig
from evenpack.engine.optimizers.config import OptimizerSection, ScheduleSection
from evenpack.engine.sharding import SHARDINGS, Sharding
from evenpack.errors import ConfigError
from evenpack.kernels.config import AttentionConfig
from evenpack.models.config import ModelConfig
from evenpack.models.families import family_of
from evenpack.units import (
    Checkpoints,
    Epochs,
    Medians,
    Packs,
    Processes,
    Seconds,
    Sequences,
    Share,
    StepNumber,
    Steps,
    Tokens,
    TokensPerParameter,
)

LENGTHS = ("steps", "epochs", "max_samples", "tokens", "chinchilla_ratio")
"""Keys of `training:` that give the length of a run; a run file has exactly one of them."""

StepSpan = int | tuple[int, int]
"""A step, counted from 1, or a first and a last step."""


class ParentSection(Section):
    """The run from which this one is forked, and where."""

    run: UserPath
    """Its output folder. It is read until this run has a checkpoint, and never again."""
    step: StepNumber = Field(ge=1, le=MOST_STEPS)
    """The step of its checkpoint with which this run begins: weights, optimizer and order. Steps count on from it."""


class RunSection(Section):
    """Name, output folder and seed of the run."""

    name: str = Field(min_length=1)
    """Name of the run, shown in messages and on plots."""
    output_dir: UserPath
    """Folder for metrics, summary and checkpoints; on several nodes, a folder that all of them share."""
    seed: int = Field(default=42, ge=0, lt=1 << 63)
    """Seed of the order of packs, the initial weights and dropout."""
    parent: ParentSection | None = None
    """The run that this one continues from one of its steps; `evenpack fork` writes it. Null: it begins at step 1."""
    hang_timeout_seconds: Seconds | None = Field(default=900.0, ge=2.0)
    """Seconds without progress on any rank after which the run ends with an error that names the rank which blocks it;
    after half of them there is a warning. They must exceed the longest step, the longest wait for a batch, and the
    longest write of one file of a checkpoint. Null: a run may hang for ever."""
    start_timeout_seconds: Seconds = Field(default=1800.0, ge=2.0)
    """The same, if it is longer, until the first step of every rank has ended, and while one compiles: in imports, the
    start of DeepSpeed and the load of a checkpoint nothing shows whether they move."""
    profile_steps: Steps | None = Field(default=None, ge=1, le=100)
    """Number of steps that rank 0 profiles, after the first three of each start: OUTPUT_DIR/profile gets a trace of
    each step and their seconds by category, which are logged as a table, too. Null: none."""


class DeepSpeedSection(Section):
    """Settings of DeepSpeed that are not derived from other sections."""

    zero_stage: int = 0
    """ZeRO stage: what is divided among the ranks. 0: nothing; 1: the optimizer's state; 2: the gradients, too; 3: the
    parameters, too. It may change when a run is resumed."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys that are passed to DeepSpeed unchanged; a key that evenpack derives itself is refused."""

    @field_validator("zero_stage")
    @classmethod
    def _check_stage(cls, stage: int) -> int:
        if stage not in SHARDINGS:
            raise ValueError(f"expected a ZeRO stage of {', '.join(map(str, SHARDINGS))}, found {stage}")
        return stage

    @property
    def sharding(self) -> Sharding:
        """All that follows from the ZeRO stage."""
        return SHARDINGS[self.zero_stage]


class TrainingSection(Section):
    """The size of a step and how it is divided, the length of the run, its evaluations and its checkpoints."""

    layout: Layout = "packed"
    """Layout of a micro-batch; all three hold the same sequences and give the same loss."""
    batching: Batching = "packs"
    """The unit in which a step is counted. `sequences`, un-padded or padded, is training without packing."""
    assignment: AssignmentPolicy | None = None
    """How the packs or sequences of a step are assigned to ranks and micro-batches; the contents of a step do not
    depend on it. Null: cost_balanced, or arrival for padded sequences."""
    packs_per_step: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs of one optimizer update over all ranks; independent of the world size."""
    packs_per_micro_batch: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs that a rank computes at once; it sets the memory needed. Gradient accumulation is derived from it. It must
    divide packs_per_step, after the adjustment by fewer_accumulations."""
    sequences_per_step: Sequences | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences of one optimizer update over all ranks, in place of packs_per_step where batching is sequences."""
    sequences_per_micro_batch: Sequences | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences that a rank computes at once, in place of packs_per_micro_batch where batching is sequences; on
    average, where assignment is max_tokens."""
    tokens_per_step: Tokens | None = Field(default=None, ge=1)
    """Real tokens of one optimizer update over all ranks, on average, in place of packs_per_step (or
    sequences_per_step): rounded to whole micro-batches, as `evenpack plan` shows."""
    packing_adjustment: Literal["none", "fewer_accumulations", "lamb_betas"] = "none"
    """How to adjust hyperparameters chosen for steps of single sequences: a step of as many packs holds more sequences,
    by the packing factor (PackedBERT, section 3.3). fewer_accumulations: packs_per_step is divided by that factor.
    lamb_betas: steps and warm-up are divided by it, and LAMB's betas are raised to its power."""

    steps: Steps | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Length of the learning-rate schedule, in optimizer updates. Exactly one of steps, epochs, max_samples, tokens and
    chinchilla_ratio is given; steps are computed from the others and the prepared data, and `plan` shows them."""
    epochs: Epochs | None = Field(default=None, gt=0.0, le=MOST_STEPS)
    """Passes over all sources together; the last step is filled from the next pass. With several sources, the number
    of passes over each depends on their weights; `evenpack plan` shows it."""
    max_samples: Sequences | None = Field(default=None, ge=1)
    """Sequences to train on, on average at most: steps are rounded down."""
    tokens: Tokens | None = Field(default=None, ge=1)
    """Real tokens to train on, on average at least: steps are rounded up."""
    chinchilla_ratio: TokensPerParameter | None = Field(default=None, gt=0.0, le=1e9)
    """Real tokens to train on for each parameter of the model, all parameters counted. About 20 give the lowest loss
    at a given number of operations (Hoffmann et al. 2022, arXiv:2203.15556)."""
    stop_after_steps: Steps | None = Field(default=None, ge=1)
    """Stop after this absolute step, with exit code 0; the run can be resumed later. Null: stop at the schedule's end.
    There is no additional evaluation at such a stop."""
    skip_steps: tuple[StepSpan, ...] = ()
    """Steps that are skipped because their batches are bad: single steps and spans [first, last], numbered from 1 as in
    metrics.jsonl. A skipped step advances the step number and the learning-rate schedule and leaves weights and
    optimizer unchanged; its packs are counted as skipped. Steps already done can be neither added nor removed."""
    target_accuracy: Share | None = Field(default=None, gt=0.0, le=1.0)
    """Stop as soon as this share of all held-out targets is predicted correctly in an evaluation; null: never."""

    evaluate_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one evaluation to the next; null: the model is never evaluated. Ignored where evaluate_every_samples
    is given."""
    evaluate_every_samples: Annotated[Sequences, Field(strict=True, ge=1)] | Literal["mlperf"] | None = None
    """Sequences from one evaluation to the next; evaluation follows the step that reaches the number. `mlperf`: by
    MLPerf's rule for BERT, from the samples of a step. Null: by evaluate_every_steps."""
    evaluation_packs: Packs | None = Field(default=None, ge=1)
    """Most validation packs of each source in an evaluation; null: all."""

    precision: Literal["fp32", "bf16_autocast"] = "bf16_autocast"
    """Number formats; bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of the sums that go from block to block, and of their gradients. bf16 halves their bytes, as in
    llm.c and nanochat, and rounds each sum to 8 bits; it needs precision bf16_autocast."""
    compile: bool = False
    """Compile the blocks and the loss by torch.compile, which fuses the operators between matrix products and
    attention. The first step takes up to minutes longer. Results are the same to rounding; dropout draws other
    numbers."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Norm of all gradients together at which they are clipped; null: no clipping."""

    cost_model: UserPath | None = None
    """File written by `study throughput --cost-model`, with the measured cost of a token, a squared length and a
    segment on the device, which cost_balanced uses. Null: costs are the model's floating-point operations. A checkpoint
    fixes the weights for its layout."""
    initialize_from: UserPath | None = None
    """Initial weights: the output_dir of another run (its newest complete checkpoint), one checkpoint (step_...), a
    folder of transformers, or a checkpoint of TensorFlow (model.ckpt-28252); docs/starting_weights.md. Nothing but the
    weights is read. Ignored once the run has a checkpoint."""
    loader_workers: Processes = Field(default=1, ge=0, le=64)
    """Processes of each rank that prepare batches ahead; 0: batches are made in the training process."""
    log_rank_times_every_steps: Steps | None = Field(default=100, ge=1)
    """Steps between records of each rank's times and work in metrics.jsonl; the last step has one, too. Null: none."""

    checkpoint_every_steps: Steps | None = Field(default=200, ge=1)
    """Steps from one checkpoint to the next. Null: a checkpoint is saved only at the end or when stopped."""
    checkpoint_in_background: bool = True
    """Copy what is saved to host memory and write it while training goes on; the copy is as large as the files that a
    rank writes: 12 bytes per parameter on rank 0 with AdamW at ZeRO 0. False: training waits until the checkpoint is on
    disk. The last checkpoint is always waited for."""
    keep_checkpoints: Checkpoints = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept; older ones are removed, unless keep_checkpoint_steps names them."""
    keep_checkpoint_steps: tuple[Annotated[StepNumber, Field(ge=1, le=MOST_STEPS)], ...] = ()
    """Steps after which a checkpoint is saved, whether one is due or not, and never removed: to fork runs from them."""

    on_nan: Literal["stop", "skip"] = "stop"
    """What to do with a step whose gradient norm is not finite: end the run, or leave the update out and go on; step
    number and learning rate advance then, weights and optimizer do not. With `skip` the host waits for the norm before
    each update, and leaves out 5 in a row at most. What was in it is written to OUTPUT_DIR/bad_steps in both cases."""
    report_spikes_above: Medians | None = Field(default=None, gt=1.0)
    """A step whose gradient norm is more than this many times the median of the last 100 steps is written to
    OUTPUT_DIR/bad_steps, too, with a warning; the step is trained on like any other. Null: off."""

    @property
    def items_per_step(self) -> int:
        """Packs or sequences of a step, by `batching`; `settle` computes them if the run file gives tokens."""
        assert self.stated_items_per_step is not None, "a settled run has the packs or sequences of its steps"
        return self.stated_items_per_step

    @property
    def stated_items_per_step(self) -> int | None:
        """Packs or sequences of a step as given in the run file; None if it gives tokens."""
        return getattr(self, f"{self.batching}_per_step")

    @property
    def items_per_micro_batch(self) -> int:
        """Packs or sequences that a rank computes at once; on average, where assignment is max_tokens."""
        return getattr(self, f"{self.batching}_per_micro_batch")

    def micro_batches(self, ranks: int) -> int:
        """Returns the micro-batches of each rank in each step, whose items must be stated, or settled.

        Raises: ConfigError with valid values, if the items cannot be divided evenly.
        """
        return micro_batches(self.batching, self.items_per_step, self.items_per_micro_batch, ranks=ranks)

    @property
    def policy(self) -> AssignmentPolicy:
        """The assignment policy, with the default for null."""
        return self.assignment or default_policy(self.batching, self.layout)

    @property
    def has_varying_slots(self) -> bool:
        """Whether micro-batches differ in their number of slots; packs are always complete rows."""
        return self.layout != "packed" and (self.batching, self.layout, self.policy) != (
            "sequences",
            "padded",
            "arrival",
        )

    @property
    def skipped(self) -> SkippedSteps:
        """The skipped steps."""
        return SkippedSteps.named(self.skip_steps)

    @property
    def is_evaluated(self) -> bool:
        """Whether the model is ever evaluated."""
        return self.evaluate_every_steps is not None or self.evaluate_every_samples is not None

    @property
    def planned_steps(self) -> int:
        """The length of the schedule; `settle` computes it if the run file gives it in another unit."""
        assert self.steps is not None, "a settled run has its steps"
        return self.steps

    @property
    def stop_step(self) -> int:
        """The step before which this start of the run ends at the latest."""
        return self.stop_after_steps or self.planned_steps

    @field_validator("skip_steps", mode="before")
    @classmethod
    def _check_spans(cls, spans: Any) -> Any:
        """Checks the spans with a single error message, where pydantic would give one for each possible form."""
        example = "give steps and [first, last], from 1 on: [[400, 420], 1234]"
        if not isinstance(spans, list | tuple):
            raise ValueError(f"expected a list, found {spans!r}: {example}")
        for span in spans:
            ends = span if isinstance(span, list | tuple) and len(span) == 2 else [span, span]
            if any(type(end) is not int or not 1 <= end <= MOST_STEPS for end in ends) or ends[0] > ends[1]:
                raise ValueError(f"{span!r} is neither a step nor a span of steps: {example}")
        return spans

    @model_validator(mode="after")
    def _check_length(self) -> "TrainingSection":
        given = [f"{name}={value}" for name in LENGTHS if (value := getattr(self, name)) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(LENGTHS)}, found {' and '.join(given) or 'none'}: give one, and "
                "set the others to null or leave them out"
            )
        if self.target_accuracy is not None and not self.is_evaluated:
            raise ValueError(
                "target_accuracy is compared with evaluations, and there are none: set evaluate_every_steps or "
                "evaluate_every_samples"
            )
        return self

    @model_validator(mode="after")
    def _check_residual(self) -> "TrainingSection":
        if self.residual_dtype == "bf16" and self.precision == "fp32":
            raise ValueError(
                "residual_dtype is bf16, and precision fp32 keeps every number in FP32: set precision=bf16_autocast, "
                "or residual_dtype=fp32"
            )
        return self

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
                f"assignment {self.assignment} is not available for batching {self.batching} in layout {self.layout}: "
                f"choose {', '.join(policies)}"
            )
        if self.batching == "sequences" and self.packing_adjustment != "none":
            raise ValueError(
                f"packing_adjustment {self.packing_adjustment} requires batching packs, and batching is sequences: set "
                "packing_adjustment=none"
            )
        if self.tokens_per_step is not None and self.packing_adjustment == "fewer_accumulations":
            raise ValueError(
                "packing_adjustment fewer_accumulations adjusts a packs_per_step that was chosen as a number of single "
                "sequences, and tokens_per_step counts tokens, which packing does not change: set "
                "packing_adjustment=none"
            )
        return self


class WandbSection(Section):
    """Says where Weights & Biases puts the run; this needs the extra `evenpack[wandb]`."""

    project: str = Field(default="evenpack", min_length=1)
    """Project in which the run appears."""
    entity: str | None = Field(default=None, min_length=1)
    """Team or user that owns the project; null: the default of the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`online` sends each step at once and needs a login; `offline` writes to OUTPUT_DIR/wandb, from where `wandb sync`
    sends it later."""


class MetricsSection(Section):
    """Trackers that receive the metrics of each step. OUTPUT_DIR/metrics.jsonl is always written."""

    csv: bool = False
    """Write OUTPUT_DIR/metrics.csv: a line for each step."""
    tensorboard: bool = False
    """Write event files to OUTPUT_DIR/tensorboard. Needs the extra `evenpack[tensorboard]`."""
    wandb: WandbSection | None = None
    """Log to Weights & Biases; null: do not."""


class MlperfSection(Section):
    """Write OUTPUT_DIR/mlperf.log, as MLPerf Training's rules require. Needs the extra `evenpack[mlperf]`."""

    submission_org: str | None = Field(default=None, min_length=1)
    """The submitting organization; null can be read, but training requires a name."""
    submission_platform: str = Field(min_length=1)
    """The system, for example `8xH100`."""
    submission_division: Literal["closed", "open"] = "open"
    """Whose rules the run follows: the closed division prescribes model, data and target."""
    submission_benchmark: str = Field(min_length=1)
    """The benchmark's name in MLPerf's rules, for example `bert`."""
    cache_cleared: bool = False
    """Whether the caches of the file system were dropped just before the start, which the rules require and a training
    process cannot do; the value is logged as it is given."""


REBUILT = (
    "data.pack_length",
    "data.recipe.max_sequence_length",
    "model.rotary_base",
    "model.local_rotary_base",
    "model.rotary_scaling",
)
"""Keys that a stage may change and with which data and model are built again."""
_STAGED = re.compile(
    r"data\.sources\.(?P<source>[^.]+)\.weight|training\.(packs|sequences)_per_(step|micro_batch)|"
    rf"optimizer\.learning_rate|{'|'.join(map(re.escape, REBUILT))}"
)
"""Keys that a stage may change."""
_OF_STAGES = (
    "data.sources.NAME.weight, training.packs_per_step and packs_per_micro_batch (or sequences_per_...), "
    "optimizer.learning_rate, data.pack_length, data.recipe.max_sequence_length, and model.rotary_base, "
    "local_rotary_base and rotary_scaling"
)


class StageSection(Section):
    """A change of the run at a step: that step, and keys of the run file with their new values."""

    model_config = ConfigDict(extra="allow")

    step: StepNumber = Field(ge=2, le=MOST_STEPS)
    """The first step of the stage; steps count from 1, as in metrics.jsonl."""
    restart: bool = False
    """Whether packs of another form begin with a new epoch of each source at once, and what the old one has left is
    counted and not read; false: it goes on in packs of the old form, as many of them together as fill a new one."""

    @property
    def changes(self) -> dict[str, Any]:
        """The new values by their dotted keys."""
        return dict(self.model_extra or {})


class RunConfig(Section):
    """A run file."""

    run: RunSection
    data: DataConfig
    model: ModelConfig
    """The model: its family, a preset of sizes, and changes to the preset."""
    attention: AttentionConfig = AttentionConfig()
    masking: MaskingConfig = MaskingConfig()
    """Masking for a model of masked tokens, where masks are drawn again in each epoch."""
    training: TrainingSection
    optimizer: OptimizerSection
    """The optimizer and its learning rate."""
    schedule: ScheduleSection = ScheduleSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    metrics: MetricsSection = MetricsSection()
    mlperf: MlperfSection | None = None
    """Details of the submission in an MLPerf log; null: no MLPerf log is written."""
    stages: tuple[StageSection, ...] = ()
    """Changes of the run at given steps, each a step and dotted keys with new values, which hold until a later stage
    changes them: weights of sources (0: not drawn), packs_per_step, packs_per_micro_batch, learning_rate, pack_length,
    max_sequence_length, and the base and scaling of rotary positions. Stages of future steps may be edited."""

    _span: range | None = PrivateAttr(None)
    """The steps of a part of a run."""

    def staged(self) -> tuple[tuple[int, "RunConfig"], ...]:
        """Returns the first step of each stage, counted from 0, and the run file as it applies to the stage's steps.

        Raises: ConfigError for a value of a stage that the run file could not have.
        """
        if not self.stages:
            return ((0, self),)
        values = self.model_dump(exclude={"stages"})
        if self.model.positions == "learned":  # one table for all stages
            values["model"]["max_positions"] = self.max_positions
        found = [(0, self.model_copy(update={"stages": ()}))]
        for stage in self.stages:
            for key, value in stage.changes.items():
                *sections, name = key.split(".")
                place = values
                for section in sections:
                    place = place[section]
                place[name] = value
            config = validate(values, RunConfig, origin=f"the stage of step {stage.step}")
            # Checked alone, a stage without an earlier source would have that one last.
            sources = {name: config.data.sources[name] for name in self.data.sources}
            folder = self._folder_of(config.data)
            data = config.data.model_copy(update={"sources": sources, "prepared_dir": folder})
            found.append((stage.step - 1, config.model_copy(update={"data": data})))
        return tuple(found)

    def _folder_of(self, data: DataConfig) -> Path | None:
        """Returns `data.prepared_dir` of a stage: packs of other lengths are prepared beside those of the first."""
        lengths = (data.pack_length, data.recipe.max_sequence_length)
        if lengths == (self.data.pack_length, self.data.recipe.max_sequence_length):
            return self.data.prepared_dir
        return self.prepared_dir.with_name("_".join(map(str, (self.prepared_dir.name, *lengths))))

    @property
    def parts(self) -> tuple[tuple[int, "RunConfig"], ...]:
        """The first step, from 0, and the run file of each part of the run that data and model are built for once.

        A part has the stages within it, and ends as by `training.stop_after_steps` with the last step before the next.
        """
        staged = self.staged()
        built = [[one.at(key) for key in REBUILT] for _, one in staged]
        begins = [0, *(at for at in range(1, len(staged)) if built[at] != built[at - 1])]
        if len(begins) == 1:
            return ((0, self),)
        found = []
        for begin, end in pairwise([*begins, len(staged)]):
            first, config = staged[begin]
            last = min(self.training.stop_step, staged[end][0] if end < len(staged) else MOST_STEPS)
            training = config.training.model_copy(update={"stop_after_steps": last})
            part = config.model_copy(update={"training": training, "stages": self.stages[begin : end - 1]})
            part._span = range(first, staged[end][0] if end < len(staged) else self.training.planned_steps)
            found.append((first, part))
        return tuple(found)

    @property
    def span(self) -> range:
        """The steps, from 0, that a settled run does itself: from its parent's on, or those of a part."""
        first = 0 if self.run.parent is None else self.run.parent.step
        return self._span or range(first, self.training.planned_steps)

    def at(self, key: str) -> Any:
        """Returns the value of a dotted key; None for one that sections of this kind do not have."""
        found: Any = self
        for name in key.split("."):
            found = getattr(found, name, None)
        return found

    @property
    def forms(self) -> tuple[DataConfig, ...]:
        """The data section of each form of the packs, of which there is one for each pair of lengths in the stages.

        Several share the tokens of text, in a folder beside those of the packs unless `tokens_dir` names one.
        """
        found = {one.prepared_dir: one.data for _, one in reversed(self.parts)}
        if len(found) == 1:
            return (self.data,)
        shared = self.data.tokens_dir or self.prepared_dir.with_name(f"{self.prepared_dir.name}_tokens")
        return tuple(
            data.model_copy(update={"prepared_dir": folder, "tokens_dir": shared})
            for folder, data in reversed(found.items())
        )

    @model_validator(mode="after")
    def _check_step(self) -> "RunConfig":
        training = self.training
        # With fewer_accumulations only the adjusted packs_per_step must be divisible (`settle`).
        items = training.stated_items_per_step
        is_final = training.packing_adjustment != "fewer_accumulations"
        if is_final and items is not None and items % training.items_per_micro_batch:
            raise ValueError(
                f"training.{training.batching}_per_micro_batch ({training.items_per_micro_batch}) must divide "
                f"training.{training.batching}_per_step ({items})"
            )
        return self

    @model_validator(mode="after")
    def _check_length(self) -> "RunConfig":
        """Checks numbers of steps, for runs whose length is in steps; for other runs `settle` computes them."""
        training, steps = self.training, self.training.steps
        if self.stages:
            self._check_length_is_in_steps()
        if steps is None:
            return self
        schedule = self.schedule
        if schedule.warmup_steps > steps:
            raise ValueError(
                f"schedule.warmup_steps ({schedule.warmup_steps}) is above training.steps ({steps}): for so short "
                f"a run set it too, for example schedule.warmup_steps={steps // 10}"
            )
        if schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
            raise ValueError(
                f"schedule.warmup_steps ({schedule.warmup_steps}) and decay_steps ({schedule.decay_steps}) are more "
                f"than training.steps ({steps}): the decay would begin before the warm-up ends"
            )
        last_named = {
            "training.stop_after_steps": training.stop_after_steps or 0,
            "training.skip_steps": training.skipped.spans[-1][1] if training.skipped else 0,
            "training.keep_checkpoint_steps": max(training.keep_checkpoint_steps, default=0),
            "stages": self.stages[-1].step if self.stages else 0,
        }
        for key, step in last_named.items():
            if step > steps:
                raise ValueError(f"{key} names step {step}, above training.steps ({steps})")
        if next(training.skipped.gaps(0, steps), None) is None:
            raise ValueError(f"training.skip_steps leaves none of the {steps} steps to be trained")
        return self

    def _check_length_is_in_steps(self) -> None:
        """Refuses values that depend on the average step of a run, which stages change."""
        if self.training.steps is None:
            raise ValueError(
                "stages are by steps, and the number of steps in epochs, samples or tokens depends on them: give "
                "training.steps"
            )
        off = {"tokens_per_step": None, "packing_adjustment": "none", "evaluate_every_samples": None}
        for key, value in off.items():
            found = getattr(self.training, key)
            if found != value:
                raise ValueError(
                    f"stages are by steps, and training.{key} ({found}) depends on the average step, which they "
                    f"change: set training.{key}={'null' if value is None else value}"
                )
        if self.model.denominators == "expected":
            raise ValueError(
                "model.loss_balancing expected divides by the average of a step, which stages change: set "
                "model.loss_balancing=exact"
            )
        if self.mlperf is not None:
            raise ValueError("the section mlperf: logs one batch size and rate, which stages change: leave one out")

    @model_validator(mode="after")
    def _check_optimizer(self) -> "RunConfig":
        optimizer, training, stage = self.optimizer, self.training, self.deepspeed.zero_stage
        if optimizer.reason_for_whole_tensors and not self.deepspeed.sharding.updates_whole_tensors:
            raise ValueError(
                f"optimizer.kind {optimizer.kind} needs deepspeed.zero_stage=0, found {stage}: "
                f"{optimizer.reason_for_whole_tensors}, and ZeRO cuts them up. Set deepspeed.zero_stage=0 or "
                "optimizer.kind=adamw"
            )
        if training.compile and self.deepspeed.sharding.gathers_parameters:
            raise ValueError(
                f"training.compile is true at deepspeed.zero_stage={stage}, where DeepSpeed gathers the parameters of "
                "each layer by hooks, which torch.compile cuts out of a block: set training.compile=false, or "
                "deepspeed.zero_stage=2"
            )
        if self.mlperf is not None and (optimizer.kind != "lamb" or training.target_accuracy is None):
            raise ValueError(
                "the section mlperf: requires optimizer.kind=lamb and a training.target_accuracy, because its log must "
                f"hold their values; found {optimizer.kind} and {training.target_accuracy}: set both, or leave mlperf "
                "out"
            )
        if training.packing_adjustment == "lamb_betas" and optimizer.kind != "lamb":
            raise ValueError(
                f"training.packing_adjustment lamb_betas needs optimizer.kind=lamb, found {optimizer.kind}: set that, "
                "or training.packing_adjustment=fewer_accumulations, which works with any optimizer"
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
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> "RunConfig":
        layout, attention = self.training.layout, self.attention
        of_packs = {"attention.isolate": attention.isolate, "model.reset_positions": self.model.reset_positions}
        switched_off = [key for key, is_on in of_packs.items() if not is_on]
        if switched_off and layout != "packed":
            raise ValueError(
                f"{switched_off[0]}: false applies to packs alone; training.layout must be packed, found {layout}"
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
        ends = getattr(self.data.recipe, "end_of_text_in_loss", "all")
        if family.objective == "masked_tokens" and ends != "all":
            raise ValueError(
                f"data.recipe.end_of_text_in_loss {ends} is for models of next tokens, and model.kind "
                f"{self.model.kind} predicts masked tokens: set data.recipe.end_of_text_in_loss=all, or choose another "
                "model.kind"
            )
        if self.model.predicts_next_sentence and not self.data.has_pairs:
            raise ValueError(
                f"model.kind {self.model.kind} predicts next sentences, and data.recipe.kind {self.data.recipe.kind} "
                "has no pairs of them: set model.next_sentence=false to learn from masked tokens alone, or choose the "
                "recipe sentence_pairs or masked_pairs"
            )
        # Compared with the default, because a run file written by `config show` or a checkpoint has all sections.
        if family.objective != "masked_tokens" and self.masking != MaskingConfig():
            raise ValueError(
                f"masking is for models of masked tokens, and model.kind {self.model.kind} learns from next tokens: "
                "leave it out"
            )
        if self.data.has_stored_masks and self.masking != MaskingConfig():
            is_static = self.data.static_masks is not None
            origin = "data.recipe.static_masks" if is_static else "data.recipe.kind masked_pairs"
            other = ", or set data.recipe.static_masks=null (which changes the data)" if is_static else ""
            raise ValueError(
                f"masking is for masks drawn in each epoch, and with {origin} they are drawn once: leave masking "
                f"out{other}"
            )
        longest = self.data.recipe.max_sequence_length
        promised = math.floor(self.masking.share * longest)
        draws_masks = family.objective == "masked_tokens" and not self.data.has_stored_masks
        if draws_masks and self.masking.max_predictions < promised:
            raise ValueError(
                f"masking.max_predictions={self.masking.max_predictions} is less than masking.share of the longest "
                f"sequence ({self.masking.share} x {longest:,} tokens), of which fewer would be masked: set "
                f"masking.max_predictions={promised} or more, or "
                f"masking.share={math.floor(1e4 * self.masking.max_predictions / longest) / 1e4}"
            )
        return self

    @model_validator(mode="after")
    def _check_stages(self) -> "RunConfig":
        """Checks each stage as a run file, and orders the sources by their first stage: no step depends on later ones.

        A source that is not drawn in the first steps is numbered when a stage first draws it.
        """
        names = list(self.data.sources)
        for stage in self.stages:
            place = f"stages, step {stage.step}"
            if not stage.changes:
                raise ValueError(f"{place}: it changes nothing: give it one of {_OF_STAGES}")
            for key in stage.changes:
                match = _STAGED.fullmatch(key)
                if match is None:
                    raise ValueError(
                        f"{place}: {key} cannot change within a run; a stage may have {_OF_STAGES}, as dotted keys"
                    )
                if match["source"] not in (None, *names):
                    raise ValueError(
                        f"{place}: there is no source '{match['source']}'; {nearest(match['source'], names)}"
                    )
        for one, other in pairwise(self.stages):
            if one.step >= other.step:
                raise ValueError(
                    f"stages: that of step {other.step} comes after that of step {one.step}: give one for each "
                    "step, in the order of steps"
                )
        try:
            staged = self.staged()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for stage, ((_, before), (_, after)) in zip(self.stages, pairwise(staged), strict=True):
            if problem := _problem_of_form(before, after, restart=stage.restart):
                raise ValueError(f"stages, step {stage.step}: {problem}")
        if self.stages and self.deepspeed.zero_stage == 3 and len(self.parts) > 1:
            raise ValueError(
                f"stages, step {self.parts[1][0] + 1}: the model would be rebuilt, and DeepSpeed's ZeRO 3 keeps the "
                "memory of the one before: set deepspeed.zero_stage to 2 or less"
            )
        stages = [one.data.sources for _, one in staged]
        first = {name: next((at for at, one in enumerate(stages) if one[name].weight), len(stages)) for name in names}
        ordered = sorted(names, key=first.__getitem__)
        if ordered == names:
            return self
        data = self.data.model_copy(update={"sources": {name: self.data.sources[name] for name in ordered}})
        return self.model_copy(update={"data": data})

    @property
    def mask_limits(self) -> MaskingConfig:
        """Settings by which this run's tokens are masked; of pairs that came with masks only the limit is known."""
        recipe = self.data.recipe
        if isinstance(recipe, MaskedPairsRecipe):
            return self.masking.model_copy(update={"max_predictions": recipe.max_predictions})
        return self.data.static_masks or self.masking

    @property
    def evaluation_packs_per_micro_batch(self) -> int:
        """Packs of a validation micro-batch; validation always uses packs, so that runs over the same data compare."""
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
    def max_positions(self) -> int:
        """Rows of the model's table of positions, if it has one."""
        return self.model.max_positions or self.positions_needed

    @property
    def prepared_dir(self) -> Path:
        """Folder of this run's prepared data."""
        return self.data.prepared_dir or self.run.output_dir / "data"


def _problem_of_form(before: RunConfig, after: RunConfig, *, restart: bool) -> str | None:
    """Returns why what an epoch has left cannot go on in a next stage, and what would do; None if all is well."""
    old, new = (one.data.pack_length for one in (before, after))
    longest = [one.data.recipe.max_sequence_length for one in (before, after)]
    if restart:
        is_same = old == new and longest[0] == longest[1]
        return "restart is for another pack_length or max_sequence_length: leave it out" if is_same else None
    limit, is_packed = after.data.packing.max_sequences_per_pack, before.training.batching == "packs"
    if longest[1] < longest[0]:
        problem = (
            f"has sequences of up to {longest[0]} tokens left, above max_sequence_length ({longest[1]}): give more"
        )
    elif is_packed and new % old:
        sizes = dict.fromkeys((max(1, new // old) * old, (new // old + 1) * old))
        problem = (
            f"has packs of {old} slots left, of which data.pack_length ({new}) is no multiple: give "
            f"{' or '.join(map(str, sizes))}"
        )
    elif is_packed and new > old and limit is not None:
        problem = (
            f"has packs left, of which {new // old} together may hold more sequences than "
            f"data.packing.max_sequences_per_pack ({limit}): leave that out"
        )
    else:
        return None
    return (
        f"the epoch before {problem}, or set restart: true in the stage, with which new epochs begin at once and the "
        "rest is counted and not read"
    )
