"""The `model:` section of a run file, of any family."""

from typing import Annotated

from pydantic import SerializeAsAny

from evenpack.config import SectionByKind
from evenpack.kernels.config import AttentionConfig
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import config_of, known_families

ModelConfig = Annotated[SerializeAsAny[TransformerConfig], SectionByKind(find=config_of, known=known_families)]
"""Checked against the section of the family that `kind` names."""


def study_switches(model: TransformerConfig, attention: AttentionConfig) -> dict[str, str]:
    """Returns the keys of a run file, with their values, that make it one for study alone, each with its meaning."""
    isolation = (
        {} if attention.isolate else {"attention.isolate is false": "sequences of one pack attend to one another"}
    )
    return isolation | model.study_switches
