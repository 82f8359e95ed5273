"""The registry of model families: which families there are, and how each describes itself.

A family is a folder here and a line in `_SHIPPED`, or a third-party package with an entry point in the group
`evenpack.model_families`, which has the same form. A family is imported when its name is first used; its
model and weights, which need torch, are imported when a model is built.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args

from evenpack.config import nearest
from evenpack.errors import ConfigError
from evenpack.models.common.section import TransformerConfig

if TYPE_CHECKING:
    from evenpack.models.common.tensors import HuggingFaceMapping

ENTRY_POINTS = "evenpack.model_families"

_SHIPPED = {
    "bert": "evenpack.models.bert.config:BERT",
    "gpt2": "evenpack.models.gpt2.config:GPT2",
    "llama": "evenpack.models.llama.config:LLAMA",
    "modernbert": "evenpack.models.modernbert.config:MODERNBERT",
}

ObjectiveKind = Literal["next_tokens", "masked_tokens"]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """The description of one kind of model, through which other packages use it.

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

    def __post_init__(self) -> None:
        """Checks the parts. Raises: ConfigError for parts that are missing or do not fit together."""
        if not (isinstance(self.config, type) and issubclass(self.config, TransformerConfig)):
            raise ConfigError(f"a model family's config must be a TransformerConfig, found {self.config!r}")
        kind = get_args(self.config.model_fields["kind"].annotation)
        if len(kind) != 1:
            raise ConfigError(
                f"a model family's config must have its name as kind: {self.config.__name__}.kind must be "
                f"Literal['NAME'], found {self.config.model_fields['kind'].annotation}"
            )
        missing = [field.name for field in fields(self) if _is_missing(field.name, getattr(self, field.name))]
        if missing:
            raise ConfigError(f"model family '{self.name}' lacks {', '.join(missing)}")
        if self.objective not in get_args(ObjectiveKind):
            raise ConfigError(
                f"model family '{self.name}' has no known objective; {nearest(self.objective, get_args(ObjectiveKind))}"
            )

    @property
    def name(self) -> str:
        """`model.kind` in a run file."""
        (name,) = get_args(self.config.model_fields["kind"].annotation)
        return str(name)

    def load_model(self) -> type[Any]:
        """Imports the model's class."""
        loaded: type[Any] = resolve_name(self.model)
        return loaded

    def load_huggingface(self) -> "HuggingFaceMapping | None":
        """Imports the mapping of transformers; None if there is none."""
        return None if self.huggingface is None else resolve_name(self.huggingface)


def family_of(config: TransformerConfig) -> ModelFamily:
    """Returns the family of a `model:` section."""
    return find_family(config.kind)


def config_of(name: str) -> type[TransformerConfig]:
    """Returns the schema of the `model:` section of the family called `name`. Raises: as `find_family`."""
    return find_family(name).config


@cache
def find_family(name: str) -> ModelFamily:
    """Returns the family called `name`.

    Raises: ConfigError if there is none, if two packages register one of this name, or if it cannot be loaded or lacks
    a part.
    """
    entries = _entry_points()
    if name not in entries:
        problem = f"there is no model family '{name}'" if name else "kind is required"
        raise ConfigError(f"{problem}; {nearest(name, tuple(entries))}")
    return load_family(entries[name])


def known_families() -> tuple[str, ...]:
    """Returns the names of all families, both shipped and third-party, without loading them."""
    return tuple(sorted(_entry_points()))


def register(entries: Iterable[EntryPoint]) -> Mapping[str, EntryPoint]:
    """Returns the entry points by name. Raises: ConfigError if two have the same name."""
    found: dict[str, EntryPoint] = {}
    for entry in entries:
        if entry.name in found:
            raise ConfigError(
                f"model family '{entry.name}' is registered twice: as {_origin(found[entry.name])} and as "
                f"{_origin(entry)}; uninstall one package or rename its family"
            )
        found[entry.name] = entry
    return found


def load_family(entry: EntryPoint) -> ModelFamily:
    """Imports the family of an entry point. Raises: ConfigError if that fails or its family is incomplete."""
    try:
        family = entry.load()
    except Exception as error:  # a third-party module may raise anything when it is imported
        known = isinstance(error, ImportError | AttributeError | TypeError | ConfigError)
        problem = str(error) if known else f"{type(error).__name__}: {error}"
        raise ConfigError(f"model family '{entry.name}' ({_origin(entry)}) cannot be loaded: {problem}") from error
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"model family '{entry.name}' ({_origin(entry)}) must be a ModelFamily, found {type(family).__name__}"
        )
    if family.name != entry.name:
        raise ConfigError(
            f"model family '{entry.name}' ({_origin(entry)}) calls itself '{family.name}': give both the same name"
        )
    return family


@cache
def _entry_points() -> Mapping[str, EntryPoint]:
    shipped = [EntryPoint(name=name, value=value, group=ENTRY_POINTS) for name, value in _SHIPPED.items()]
    return register([*shipped, *importlib.metadata.entry_points(group=ENTRY_POINTS)])


def _is_missing(field: str, value: object) -> bool:
    return value in (None, (), "") and field != "huggingface"


def _origin(entry: EntryPoint) -> str:
    package = "evenpack" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"{entry.value} of {package}"
