"""Weights of TensorFlow's and NVIDIA's checkpoints, matched with a model.

    file  ->  tensor_bundle.py or torch_file.py: tensors by their names there  ->  FAMILY/foreign.py: names  ->  here

Such a checkpoint does not describe its model, so the model to be filled is what it is compared with.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from evenpack.errors import CheckpointError
from evenpack.models.build import Model
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.tensors import ForeignNames, NamedWeights, TensorName
from evenpack.models.families import find_family, known_families
from evenpack.models.foreign.tensor_bundle import BundleEntry, TensorBundle
from evenpack.models.foreign.torch_file import read_state_dict
from evenpack.models.huggingface import mapping_of, read_description


def read_tensorflow(prefix: Path, like: Model) -> NamedWeights:
    """Reads a checkpoint of TensorFlow's graph mode, without optimizer moments and single numbers such as the step.

    Args:
        prefix: path without `.index`.
        like: the model that is to be filled.

    Raises: CheckpointError if it cannot be read or belongs to another family.
    """
    bundle = TensorBundle(prefix)
    foreign = _names_for(like, bundle.keys(), prefix, lambda foreign: foreign.tensorflow_name(foreign.vocabulary[0]))
    slots, numbers = _slots(bundle.entries), [name for name, entry in bundle.entries.items() if not entry.shape]
    tensors = {name: bundle[name] for name in bundle if name not in slots and name not in numbers}
    aside = [f"optimizer state ({', '.join(sorted(set(slots.values())))})"] if slots else []
    config, notes = _section(prefix.parent / foreign.config_file, like)
    return NamedWeights(
        config=config,
        names=[_in_tensorflow(name, foreign) for name in mapping_of(like.config).tensor_names(like)],
        tensors=tensors,
        notes=(_account(tensors, len(slots) + len(numbers), [*aside, *numbers]), *notes),
    )


def read_nvidia(path: Path, like: Model) -> NamedWeights:
    """Reads a state dict that torch saved, and leaves out the optimizer's state if the file has it.

    Rows beyond the vocabulary are ignored where NVIDIA's code adds them: up to the next multiple, and no further.

    Args:
        like: the model that is to be filled.

    Raises: CheckpointError if it cannot be read or belongs to another family.
    """
    state = read_state_dict(path)
    foreign = _names_for(like, state.tensors, path, lambda foreign: foreign.vocabulary[0])
    # A separate object for each name shows which ones were left out.
    apart = {name: tensor.detach() for name, tensor in state.tensors.items()}
    tensors = foreign.from_nvidia(apart)
    kept = {id(tensor) for tensor in tensors.values()}
    copies = [name for name, tensor in apart.items() if id(tensor) not in kept]
    config, notes = _section(path.parent / foreign.config_file, like)
    tensors, padded = _without_padding(tensors, foreign, like.vocabulary_size)
    return NamedWeights(
        config=config,
        names=mapping_of(like.config).tensor_names(like),
        tensors=tensors,
        notes=(_account(tensors, len(copies) + len(state.beside), [*copies, *state.beside]), *padded, *notes),
    )


def _names_for(
    like: Model, names: Collection[str], path: Path, first_name: Callable[[ForeignNames], str]
) -> ForeignNames:
    """Returns the names of the family to which the tensors belong, which must be the model's family."""
    expected = []
    for kind, foreign in _known_names():
        if first_name(foreign) in names:
            if kind != like.config.kind:
                raise CheckpointError(
                    f"{path} is of a model with kind {kind}, this run has model.kind {like.config.kind}: make them "
                    "alike, or name other weights"
                )
            return foreign
        expected.append(first_name(foreign))
    raise CheckpointError(
        f"{path} has no {' or '.join(expected)}, by which its kind of model would be known; it has "
        f"{', '.join(sorted(names)[:3])} and such"
    )


def _known_names() -> Iterator[tuple[str, ForeignNames]]:
    for kind in known_families():
        foreign = find_family(kind).load_foreign()
        if foreign is not None:
            yield kind, foreign


def _slots(entries: Mapping[str, BundleEntry]) -> dict[str, str]:
    """Returns the optimizer state of each weight, with the optimizer's name for it."""
    found = {}
    for name, entry in entries.items():
        weight, _, slot = name.rpartition("/")
        if weight in entries and entries[weight].shape == entry.shape:
            found[name] = slot
    return found


def _in_tensorflow(name: TensorName, foreign: ForeignNames) -> TensorName:
    theirs = tuple(foreign.tensorflow_name(each) for each in name.theirs)
    return replace(name, theirs=theirs, is_transposed=theirs[0].endswith("/kernel"))


def _without_padding(
    tensors: dict[str, Tensor], foreign: ForeignNames, vocabulary_size: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the weights without rows that only pad the vocabulary, and a note that names these rows."""
    filled_up = vocabulary_size + -vocabulary_size % foreign.nvidia_vocabulary_multiple
    padded = [name for name in foreign.vocabulary if name in tensors and len(tensors[name]) == filled_up]
    if filled_up == vocabulary_size or not padded:
        return tensors, []
    note = (
        f"rows {vocabulary_size} to {filled_up - 1} of {' and '.join(padded)} taken for padding up to a multiple of "
        f"{foreign.nvidia_vocabulary_multiple} and ignored"
    )
    return tensors | {name: tensors[name][:vocabulary_size] for name in padded}, [note]


def _account(tensors: Mapping[str, Tensor], count: int, aside: Sequence[str]) -> str:
    left = f", {count} ignored: {', '.join(aside)}" if aside else ""
    return f"{len(tensors)} tensors used{left}"


def _section(config_file: Path, like: Model) -> tuple[TransformerConfig, list[str]]:
    """Returns the `model:` section of the file beside the checkpoint, or the model's own with a note that says so."""
    if not config_file.is_file():
        heads = like.config.shape["heads"]
        return like.config, [f"neither a tensor nor a {config_file.name} gives the number of heads: {heads}, as here"]
    return mapping_of(like.config).read_config(read_description(config_file), str(config_file))[0], []
