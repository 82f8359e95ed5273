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


class FinetuneRunSection(Section):
    """Name, place and seeds."""

    name: str = Field(min_length=1)
    output_dir: UserPath
    """settings.json, a result for each seed (where an interrupted command goes on), and results.json."""
    seeds: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    """One training each, one after another: of the order of sequences, the new head's weights and dropout."""
    save_models: Literal["median", "all"] | None = None
    """Which seeds' models are written for transformers, to seed_N/ in output_dir: that of the median, or every one.
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
    """A name of docs/finetuning.md's table."""
    folder: UserPath | None = None
    """Where the task's files lie, by the names that its publisher gave them."""
    tokenizer: EncoderTokenizer | None = None
    """Null: the one that the weights were trained with, from where they lie."""
    max_sequence_length: int = Field(default=128, ge=8, le=1 << 16)
    """Tokens, special ones included; longer sentences are cut, longer contexts become several windows. Slots of a pack
    and columns of a padded row, too."""
    max_question_length: int = Field(default=64, ge=1, le=1 << 15)
    """Of spans: tokens of a question; longer ones are cut."""
    window_stride: int = Field(default=128, ge=1, le=1 << 15)
    """Of spans: tokens from the start of one window of a context to the start of the next."""
    max_answer_length: int = Field(default=30, ge=1, le=1 << 15)
    """Of spans: tokens of an answer that is given."""

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
    """packed, un-padded (sequences one behind another) or padded (each a row of max_sequence_length)."""
    packs_per_step: int | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs of one update, packed once for all epochs. Either this or sequences_per_step."""
    sequences_per_step: int | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Sequences of one update; the packed layout packs those of each step."""
    packs_per_micro_batch: int | None = Field(default=None, ge=1, le=MOST_PACKS_A_STEP)
    """Packs (of steps of sequences that are not packed: sequences) computed at once; null: the whole step."""
    epochs: int = Field(default=3, ge=1, le=1000)
    learning_rate: float = Field(default=5e-5, gt=0.0)
    """At the end of warm-up; falls linearly to 0 from there."""
    warmup_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Of all steps."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Spares biases and norms."""
    gradient_clipping: float | None = Field(default=1.0, gt=0.0)
    """Largest global gradient norm; null: off."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """In the encoder, whatever it was pretrained with, and before the new head."""
    precision: Literal["fp32", "bf16_autocast"] = "fp32"
    """bf16_autocast keeps FP32 parameters and computes matrix products in bfloat16."""

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
