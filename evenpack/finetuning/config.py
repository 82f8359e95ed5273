"""The run file of `evenpack finetune`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section, UserPath, nearest
from evenpack.data.limits import MOST_PACKS_A_STEP
from evenpack.data.order.step_shape import Batching, Layout
from evenpack.data.tokenizers.config import EncoderTokenizer
from evenpack.finetuning.tasks import TASKS, AnyTask
from evenpack.kernels.config import AttentionConfig
from evenpack.units import Packs, Passes, Sequences, Share, Tokens


class FinetuneRunSection(Section):
    """Name, place and seeds."""

    name: str = Field(min_length=1)
    """Name of the run, as it stands in messages and results."""
    output_dir: UserPath
    """Folder for settings.json, a result for each seed (where an interrupted command goes on), and results.json."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    """Seeds, with one training each, one after another: of the order of sequences, the new head's weights and
    dropout."""
    save_models: Literal["median", "all"] | None = None
    """Whose models are written for transformers, to seed_N/ in output_dir: that of the median, or every one.
    Until the median is known, all of them take up room."""

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
            raise ValueError(f"expected different whole numbers from 0 to 2**63 - 1, found {list(seeds)}")
        return seeds


class FinetuneDataSection(Section):
    """The task and how its texts become sequences."""

    task: str
    """Name of the task, of docs/finetuning.md's table."""
    folder: UserPath | None = None
    """Folder of the task's files, by the names that its publisher gave them."""
    tokenizer: EncoderTokenizer | None = None
    """The tokenizer. Null: the one that the weights were trained with, from where they lie."""
    max_sequence_length: Tokens = Field(default=128, ge=8, le=1 << 16)
    """Most tokens of a sequence, special ones included; longer sentences are cut, longer contexts become several
    windows. Slots of a pack and columns of a padded row, too."""
    max_question_length: Tokens = Field(default=64, ge=1, le=1 << 15)
    """Most tokens of a question, where spans are predicted; longer ones are cut."""
    window_stride: Tokens = Field(default=128, ge=1, le=1 << 15)
    """Where spans are predicted, tokens from the start of one window of a context to the start of the next."""
    max_answer_length: Tokens = Field(default=30, ge=1, le=1 << 15)
    """Most tokens of an answer that is given, where spans are predicted."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, name: str) -> str:
        if name not in TASKS:
            raise ValueError(f"there is no task '{name}'; {nearest(name, tuple(TASKS))}")
        return name

    @model_validator(mode="after")
    def _check_lengths(self) -> "FinetuneDataSection":
        room = self.max_sequence_length - self.max_question_length - 3
        if self.definition.predicts == "span" and room < self.window_stride:
            raise ValueError(
                f"max_sequence_length {self.max_sequence_length} leaves {room} tokens for a context beside a question "
                f"of max_question_length ({self.max_question_length}) and three special tokens: window_stride "
                f"({self.window_stride}) would leave out what lies between two windows"
            )
        return self

    @property
    def definition(self) -> AnyTask:
        """What the task is."""
        return TASKS[self.task]


class FinetuneTrainingSection(Section):
    """The step, the optimizer (AdamW, betas 0.9 and 0.999, epsilon 1e-8) and how long to go on."""

    initialize_from: UserPath | None = None
    """Pretrained weights: a run's output_dir (the newest whole checkpoint), one checkpoint, or a folder of
    transformers."""
    layout: Layout = "packed"
    """How a micro-batch is laid out: packed, un-padded (sequences concatenated) or padded (each a row of
    max_sequence_length)."""
    packs_per_step: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs of one update, packed once for all epochs. Either this or sequences_per_step."""
    sequences_per_step: Sequences | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences of one update; the packed layout packs those of each step."""
    packs_per_micro_batch: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs (of steps of sequences that are not packed: sequences) computed at once; null: the whole step."""
    epochs: Passes = Field(default=3, ge=1, le=1000)
    """Passes over the task's training set."""
    learning_rate: float = Field(default=5e-5, gt=0.0)
    """Learning rate at the end of warm-up; it falls linearly to 0 from there."""
    warmup_fraction: Share = Field(default=0.1, ge=0.0, lt=1.0)
    """Steps of warm-up among all steps."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; it spares biases and norms."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Norm of all gradients together at which they are clipped; null: they are not."""
    dropout: Share = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in the encoder, whatever it was pretrained with, and before the new head."""
    precision: Literal["fp32", "bf16_autocast"] = "fp32"
    """Number formats; bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""

    @model_validator(mode="after")
    def _check_step(self) -> "FinetuneTrainingSection":
        if (self.packs_per_step is None) == (self.sequences_per_step is None):
            raise ValueError(
                f"give either packs_per_step ({self.packs_per_step}) or sequences_per_step ({self.sequences_per_step})"
            )
        return self

    @property
    def batching(self) -> Batching:
        """What a step counts."""
        return "sequences" if self.packs_per_step is None else "packs"

    @property
    def items_per_step(self) -> int:
        """Packs or sequences, whichever a step counts."""
        count = self.sequences_per_step if self.packs_per_step is None else self.packs_per_step
        assert count is not None, "checked when the section was made"
        return count


class FinetuneConfig(Section):
    """The whole run file."""

    run: FinetuneRunSection
    data: FinetuneDataSection
    training: FinetuneTrainingSection
    attention: AttentionConfig = AttentionConfig()

    @field_validator("attention")
    @classmethod
    def _check_isolation(cls, attention: AttentionConfig) -> AttentionConfig:
        if not attention.isolate:
            raise ValueError("isolate: false is for pretraining: a head here reads sequences that see no other")
        return attention

    @property
    def folder(self) -> Path:
        """Where the task's files lie; the current directory where none is named."""
        return self.data.folder or Path()
