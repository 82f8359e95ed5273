"""What a family says about checkpoints that carry weights and no description of the model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForeignNames:
    """How one kind of model is stored by TensorFlow and by NVIDIA's code for PyTorch, beside transformers' names."""

    vocabulary: tuple[str, ...]
    """Tensors with a row for each entry of the vocabulary, by transformers' names. The first one tells the kind."""
    config_file: str
    """With keys of transformers' config.json; it may lie beside the checkpoint."""
    tensorflow_name: Callable[[str], str]
    """(transformers' name): the variable's name. Those that end in `/kernel` are stored as input x output."""
    from_nvidia: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """(weights by NVIDIA's names): each trained tensor once, by transformers' names. Raises CheckpointError if one is
    there twice, or tied ones differ."""
    nvidia_vocabulary_multiple: int
    """NVIDIA fills the vocabulary's rows up to a multiple of this."""
