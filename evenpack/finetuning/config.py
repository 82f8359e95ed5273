"""Defines the run file of `evenpack finetune`."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from evenpack.config import Section, UserPath, nearest
from evenpack.data.limits import MOST_PACKS_A_STEP
from evenpack.data.order.step_shape import Layout
from evenpack.data.tokenizers.config import EncoderTokenizer
from evenpack.engine.optimizers.config import AdamWSection
from evenpack.finetuning.tasks import TASKS, AnyTask
from evenpack.kernels.config import AttentionConfig
from evenpack.units import Packs, Passes, Sequences, Share, Tokens


class FinetuneRunSection(Section):
    """Name, output folder and seeds of the fine-tuning."""

    name: str = Field(min_length=1)
    """Name of the run, shown in messages and results."""
    output_dir: UserPath
    """Folder for settings.json, results.json and a result for each seed, from which an interrupted command resumes."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    """Seeds of the order of sequences, the new head's weights and dropout; one training for each, one after
    another."""
    save_models: bool = False
    """Save the model of each seed for transformers, in output_dir/seed_N/. A seed that was trained without is trained
    again."""

    @field_validator("seeds")
    @classmethod
    def _check_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
            raise ValueError(f"expected different whole numbers from 0 to 2**63 - 1, found {list(seeds)}")
        return seeds


class FinetuneDataSection(Section):
    """The task and how its texts become sequences."""

    task: str
    """Name of the task, from the table in docs/finetuning.md."""
    folder: UserPath | None = None
    """Folder with the task's files under their publisher's names."""
    tokenizer: EncoderTokenizer | None = None
    """The tokenizer. Null: the one that the weights were trained with, read from their folder."""
    max_sequence_length: Tokens = Field(default=128, ge=8, le=1 << 16)
    """Most tokens of a sequence, special ones included; longer sentences are truncated, longer contexts become several
    windows. Also the slots of a pack and the columns of a padded row."""
    max_question_length: Tokens = Field(default=64, ge=1, le=1 << 15)
    """For span prediction: most tokens of a question; longer ones are truncated."""
    window_stride: Tokens = Field(default=128, ge=1, le=1 << 15)
    """For span prediction: tokens from the start of one window of a context to the start of the next."""
    max_answer_length: Tokens = Field(default=30, ge=1, le=1 << 15)
    """For span prediction: most tokens of a predicted answer."""

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
                f"({self.window_stride}) would leave out tokens between two windows"
            )
        return self

    @property
    def task_folder(self) -> Path:
        """Folder of the task's files; the current directory by default."""
        return self.folder or Path()

    @property
    def definition(self) -> AnyTask:
        """The definition of the task."""
        return TASKS[self.task]


class FinetuneTrainingSection(Section):
    """The step, the optimizer (AdamW, betas 0.9 and 0.999, epsilon 1e-8) and the length of training."""

    initialize_from: UserPath | None = None
    """Pretrained weights: a run's output_dir (the newest complete checkpoint), one checkpoint, or a folder of
    transformers."""
    layout: Layout = "packed"
    """Layout of a micro-batch: packed, un-padded (sequences concatenated) or padded (each sequence is a row of
    max_sequence_length)."""
    sequences_per_step: Sequences = Field(ge=1, le=MOST_PACKS_A_STEP)
    """Sequences of one update; the packed layout packs the sequences of each step separately."""
    packs_per_micro_batch: Packs | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs that are computed at once (sequences, if they are not packed); null: all packs of the step."""
    epochs: Passes = Field(default=3, ge=1, le=1000)
    """Passes over the task's training set."""
    learning_rate: float = Field(default=5e-5, gt=0.0)
    """Learning rate at the end of warm-up; it falls linearly to 0 from there."""
    warmup_fraction: Share = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of all steps that is warm-up."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Weight decay, multiplied by the learning rate of the step; not applied to biases and norms."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Norm of all gradients together at which they are clipped; null: no clipping."""
    dropout: Share = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout in the encoder and before the new head; it replaces the dropout of pretraining."""
    precision: Literal["fp32", "bf16_autocast"] = "fp32"
    """Number formats; bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""

    @property
    def optimizer(self) -> AdamWSection:
        """The section of the optimizer."""
        return AdamWSection(learning_rate=self.learning_rate, beta2=0.999, weight_decay=self.weight_decay)


class FinetuneConfig(Section):
    """A run file of `evenpack finetune`."""

    run: FinetuneRunSection
    data: FinetuneDataSection
    training: FinetuneTrainingSection
    attention: AttentionConfig = AttentionConfig()

    @field_validator("attention")
    @classmethod
    def _check_isolation(cls, attention: AttentionConfig) -> AttentionConfig:
        if not attention.isolate:
            raise ValueError("isolate: false is for pretraining only: in fine-tuning, sequences must be isolated")
        return attention
