"""Compares the weights of a checkpoint, and the section of their model, with a model."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from evenpack.config import validate
from evenpack.engine.checkpoints.files import Checkpoint
from evenpack.errors import CheckpointError
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import config_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""

_MOST_LINES = 24
"""Lines of differences to show; a model of other layers differs in hundreds of tensors."""


def saved_model_section(checkpoint: Checkpoint) -> TransformerConfig:
    """Returns the `model:` section with which it was trained. Raises: ConfigError for a section of another version."""
    section = dict(checkpoint.state.config["model"])
    for stage in checkpoint.state.config.get("stages", ()):
        if stage["step"] <= checkpoint.step:
            section |= {key.removeprefix("model."): new for key, new in stage.items() if key.startswith("model.")}
    return validate(section, config_of(section["kind"]), origin=str(checkpoint.path))


def require_same_network(expected: TransformerConfig, found: TransformerConfig, *, origin: str, remedy: str) -> None:
    """Compares properties that the shapes of tensors do not show: `unseen_in_weights` of the two sections.

    Raises: CheckpointError that names the first key that differs; `origin` opens the message, `remedy` ends it.
    """
    keys, other_keys = expected.unseen_in_weights, found.unseen_in_weights
    for key in keys | other_keys:
        here, there = keys.get(key), other_keys.get(key)
        if here != there:
            raise CheckpointError(
                f"{origin} is of a model with {key} {there}, this run has model.{key} {here}: {remedy}"
            )


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Returns the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_fitting(expected: Shapes, found: Shapes, *, origin: str, remedy: str) -> None:
    """Compares names and shapes.

    Raises: CheckpointError that names each tensor which is missing, of another shape or surplus, with what was expected
    and found. `origin` opens the message, `remedy` ends it.
    """
    lines = [f"  {line}" for line in _differences(expected, found)]
    if lines:
        more = [f"  and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        raise CheckpointError(
            "\n".join([f"{origin} is of another model than the run file's:", *lines[:_MOST_LINES], *more, remedy])
        )


def _differences(expected: Shapes, found: Shapes) -> Iterator[str]:
    """Yields the differences, other shapes first, because they show most of the cause."""
    for name, shape in expected.items():
        if name in found and found[name] != shape:
            yield f"{name}: expected shape {shape}, found {found[name]}"
    yield from (f"{name}: expected shape {expected[name]}, missing" for name in expected if name not in found)
    yield from (f"{name}: unknown here, found shape {found[name]}" for name in found if name not in expected)
