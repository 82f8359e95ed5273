"""A family's description of checkpoints that carry weights and no description of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForeignNames:
    """The tensor names of one kind of model in TensorFlow and in NVIDIA's code for PyTorch, by transformers' names."""

    vocabulary: tuple[str, ...]
    """Tensors with a row for each vocabulary entry, by transformers' names. The first one identifies the kind."""
    config_file: str
    """Name of a file with the keys of transformers' config.json, which may be next to the checkpoint."""
    tensorflow_name: Callable[[str], str]
    """(transformers' name): the variable's name. Variables that end in `/kernel` are stored as input x output."""
    from_nvidia: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """(weights by NVIDIA's names): each trained tensor once, by transformers' names. Raises CheckpointError if one
    occurs twice or tied ones differ."""
    nvidia_vocabulary_multiple: int
    """Multiple to which NVIDIA pads the rows of the vocabulary."""
