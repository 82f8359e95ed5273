"""Defines the `model:` section of a run file, for all families."""

from typing import Annotated

from pydantic import SerializeAsAny

from evenpack.config import SectionByKind
from evenpack.kernels.config import AttentionConfig
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import config_of, known_families

ModelConfig = Annotated[SerializeAsAny[TransformerConfig], SectionByKind(find=config_of, known=known_families)]
"""Section of the family that `kind` names, which validates it."""


def study_switches(model: TransformerConfig, attention: AttentionConfig) -> dict[str, str]:
    """Returns the keys of a run file, with their values, that are for study only, each with its meaning."""
    isolation = (
        {} if attention.isolate else {"attention.isolate is false": "sequences of one pack attend to each other"}
    )
    return isolation | model.study_switches
