"""The `masking:` section of a run file."""

from pydantic import Field, model_validator

from evenpack.config import Section


class MaskingConfig(Section):
    """How many tokens are masked, and what becomes of them."""

    share: float = Field(default=0.15, gt=0.0, le=1.0)
    """Of a sequence's tokens, special ones counted."""
    max_predictions: int = Field(default=76, ge=1)
    """Most masked tokens of a sequence."""
    mask_share: float = Field(default=0.8, ge=0.0, le=1.0)
    """Of the masked tokens, how many become [MASK]."""
    random_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """How many become a random token; the rest stay as they are."""
    whole_words: bool = False
    """Mask the pieces of a word together, as far as the count allows."""

    @model_validator(mode="after")
    def _check(self) -> "MaskingConfig":
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share ({self.mask_share}) and random_share ({self.random_share}) exceed 1 together")
        return self
