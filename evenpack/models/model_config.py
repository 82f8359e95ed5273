"""The `model:` section of a run file."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from evenpack.config import Section
from evenpack.kernels.config import AttentionConfig


class TransformerConfig(Section):
    """What every model has: a preset, each of whose numbers may be overridden."""

    presets: ClassVar[dict[str, dict[str, int]]]

    kind: str
    preset: str
    positions: str
    max_positions: int | None = Field(default=None, ge=1, le=1 << 24)
    """Rows of the learned position table; null: as many as the data needs (`positions_needed`). At most as many as the
    longest sequence there can be has tokens."""
    layers: int | None = Field(default=None, ge=1, le=1 << 12)
    hidden_size: int | None = Field(default=None, ge=8, le=1 << 17)
    heads: int | None = Field(default=None, ge=1, le=1 << 12)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """After embeddings, attention probabilities, and each residual branch."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more work."""

    @model_validator(mode="after")
    def _check(self) -> "TransformerConfig":
        if self.shape["hidden_size"] % self.shape["heads"]:
            raise ValueError(
                f"hidden_size ({self.shape['hidden_size']}) must be a multiple of heads ({self.shape['heads']})"
            )
        return self

    @property
    def shape(self) -> dict[str, int]:
        """layers, hidden_size and heads with the overrides applied."""
        preset = self.presets[self.preset]
        return {name: getattr(self, name) or preset[name] for name in preset}

    def positions_needed(self, *, max_sequence_length: int, pack_length: int) -> int:
        """Rows that a learned position table must have for such data, packed."""
        return max_sequence_length


class Gpt2Config(TransformerConfig):
    """GPT-2."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 2, "hidden_size": 128, "heads": 2},
        "mini": {"layers": 4, "hidden_size": 256, "heads": 4},
        "small": {"layers": 12, "hidden_size": 768, "heads": 12},
        "medium": {"layers": 24, "hidden_size": 1024, "heads": 16},
        "large": {"layers": 36, "hidden_size": 1280, "heads": 20},
        "xl": {"layers": 48, "hidden_size": 1600, "heads": 25},
    }
    """Radford et al. 2019, table 2; tiny and mini are ours, for CPUs."""

    kind: Literal["gpt2"]
    preset: Literal["tiny", "mini", "small", "medium", "large", "xl"] = "small"
    positions: Literal["learned", "alibi"] = "learned"


class BertConfig(TransformerConfig):
    """BERT, pretrained on masked tokens and next sentences."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 2, "hidden_size": 128, "heads": 2},
        "mini": {"layers": 4, "hidden_size": 256, "heads": 4},
        "base": {"layers": 12, "hidden_size": 768, "heads": 12},
        "large": {"layers": 24, "hidden_size": 1024, "heads": 16},
    }
    """Devlin et al. 2019, section 3; tiny and mini are of Turc et al. 2019 (Well-Read Students Learn Better)."""

    kind: Literal["bert"]
    preset: Literal["tiny", "mini", "base", "large"] = "base"
    positions: Literal["learned"] = "learned"
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """After embeddings, attention probabilities, and each residual branch."""
    token_types: int = Field(default=2, ge=2, le=1 << 16)
    """Rows of the token-type table: the first and the second half of a pair."""
    mlm_reduction: Literal["token", "sequence"] = "token"
    """token: mean over all masked tokens; sequence: mean over each sequence's masked tokens, then over sequences."""
    loss_balancing: Literal["exact", "expected"] = "exact"
    """exact: losses are divided by what a step holds; expected: by what a step holds on average, the same each time."""
    next_sentence: bool = True
    """For study: false leaves out the pooler, the next-sentence head and its loss."""
    reset_positions: bool = True
    """For study: false counts positions through the pack instead of from 0 in each sequence; packed layout only."""

    def positions_needed(self, *, max_sequence_length: int, pack_length: int) -> int:
        """As many as the longest sequence, or as a pack where positions run through it."""
        return max_sequence_length if self.reset_positions else pack_length


ModelConfig = Annotated[Gpt2Config | BertConfig, Field(discriminator="kind")]


def asks_next_sentence(config: ModelConfig) -> bool:
    """Whether the model predicts next sentences."""
    return isinstance(config, BertConfig) and config.next_sentence


def study_switches(model: ModelConfig, attention: AttentionConfig) -> dict[str, str]:
    """The keys of a run file that are false and make it one for study alone, each with what that means."""
    found = {}
    if not attention.isolate:
        found["attention.isolate"] = "sequences of one pack attend to one another"
    if isinstance(model, BertConfig) and not model.reset_positions:
        found["model.reset_positions"] = "positions run on from one sequence of a pack to the next"
    if isinstance(model, BertConfig) and not model.next_sentence:
        found["model.next_sentence"] = "BERT learns from masked tokens alone"
    return found
