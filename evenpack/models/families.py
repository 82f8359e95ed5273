"""The registry of model families: which families there are, and how each describes itself.

A family is a folder here and a line in `_FAMILIES`. It is imported when its name is first used; its model and
weights, which need torch, are imported when a model is built.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args

from evenpack.config import nearest
from evenpack.errors import ConfigError
from evenpack.models.common.section import TransformerConfig

if TYPE_CHECKING:
    from evenpack.models.common.tensors import HuggingFaceMapping

_FAMILIES = {
    "bert": "evenpack.models.bert.config:BERT",
    "gpt2": "evenpack.models.gpt2.config:GPT2",
    "llama": "evenpack.models.llama.config:LLAMA",
    "modernbert": "evenpack.models.modernbert.config:MODERNBERT",
}

ObjectiveKind = Literal["next_tokens", "masked_tokens"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The description of one kind of model, through which all other code uses it.

    Properties that depend on a run's values (the loss's denominators, next-sentence prediction, switches for study)
    belong to the section: `TransformerConfig`.
    """

    config: type[TransformerConfig]
    """Schema of the `model:` section, whose `kind` accepts only the family's name."""
    causal: bool
    """Whether a token sees only itself and those before it."""
    objective: ObjectiveKind
    """The quantity that the model learns to predict."""
    recipes: tuple[str, ...]
    """Values of `data.recipe.kind` whose data it can learn from."""
    model: str
    """The model's class, a `PackedTransformer`, as `module:name`; imported when a model is built."""
    huggingface: str | None
    """A `HuggingFaceMapping`, imported when weights are read or written; None: transformers has no such model."""

    @property
    def name(self) -> str:
        """`model.kind` in a run file."""
        (name,) = get_args(self.config.model_fields["kind"].annotation)
        return str(name)

    def load_model(self) -> type[Any]:
        """Imports the model's class."""
        return resolve_name(self.model)

    def load_huggingface(self) -> "HuggingFaceMapping | None":
        """Imports the mapping of transformers; None if there is none."""
        return None if self.huggingface is None else resolve_name(self.huggingface)


def family_of(config: TransformerConfig) -> ModelFamily:
    """Returns the family of a `model:` section."""
    return find_family(config.kind)


def config_of(name: str) -> type[TransformerConfig]:
    """Returns the schema of the `model:` section of the family called `name`. Raises: as `find_family`."""
    return find_family(name).config


def find_family(name: str) -> ModelFamily:
    """Returns the family called `name`. Raises: ConfigError if there is none."""
    if name not in _FAMILIES:
        problem = f"there is no model family '{name}'" if name else "kind is required"
        raise ConfigError(f"{problem}; {nearest(name, known_families())}")
    return resolve_name(_FAMILIES[name])


def known_families() -> tuple[str, ...]:
    """Returns the names of all families, without loading them."""
    return tuple(sorted(_FAMILIES))
