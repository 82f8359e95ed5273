"""The possible origins of a run's initial weights, and how each kind is read."""

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from evenpack.data.manifest import TOKENIZER_FOLDER, Manifest
from evenpack.data.verification import require_verified
from evenpack.engine.checkpoints.files import CHECKPOINTS, MANIFEST, Checkpoint
from evenpack.engine.checkpoints.loading import newest_whole, whole
from evenpack.engine.checkpoints.shards import saved_tensors
from evenpack.engine.checkpoints.weights import saved_model_section
from evenpack.engine.world.distributed import World
from evenpack.errors import CheckpointError, NotPreparedError
from evenpack.models.build import Model
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.tensors import NamedWeights, TensorName
from evenpack.models.foreign.tensor_bundle import INDEX
from evenpack.models.foreign.weights import read_tensorflow
from evenpack.models.huggingface import from_huggingface, mapping_of, read_huggingface

_CONFIG_FILE = "config.json"
_ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))

_STATE_DICTS = (".pt", ".pth", ".bin")


class WeightSource(ABC):
    """Weights that have been found, and not yet read. As text it names them."""

    path: Path

    @property
    @abstractmethod
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer with which they were trained."""

    @abstractmethod
    def read(self, model: Model) -> NamedWeights:
        """Reads the weights for a model that is to be filled with them.

        Raises: CheckpointError if they cannot be read; ConfigError for a section of another version.
        """


class DescribedWeights(WeightSource):
    """Weights with a description of the model that computes with them."""

    @abstractmethod
    def read_described(self) -> tuple[TransformerConfig, dict[str, Tensor]]:
        """Returns the `model:` section, and the weights by our parameters' names, on the CPU.

        Raises: as `read`.
        """

    def read(self, model: Model) -> NamedWeights:
        config, tensors = self.read_described()
        names = [TensorName(ours=name, theirs=(name,)) for name, _ in model.named_parameters()]
        return NamedWeights(config=config, tensors=tensors, names=names, notes=())


@dataclass(frozen=True, kw_only=True)
class OwnCheckpoint(DescribedWeights):
    """A checkpoint of a run."""

    path: Path
    checkpoint: Checkpoint

    def __str__(self) -> str:
        name = self.checkpoint.state.config["run"]["name"]
        return f"{self.path} after step {self.checkpoint.step} of run '{name}'"

    @property
    def tokenizer_dir(self) -> Path:
        config = self.checkpoint.state.config
        prepared = Path(config["data"]["prepared_dir"] or Path(config["run"]["output_dir"]) / "data").absolute()
        with suppress(NotPreparedError):  # whoever reads the vocabulary says that it is gone
            require_verified(prepared, Manifest.read(prepared), "tokenizer")
        return prepared / TOKENIZER_FOLDER

    def read_described(self) -> tuple[TransformerConfig, dict[str, Tensor]]:
        return saved_model_section(self.checkpoint), saved_tensors(self.checkpoint).weights()


@dataclass(frozen=True, kw_only=True)
class TransformersFolder(DescribedWeights):
    """A folder that transformers reads."""

    path: Path

    def __str__(self) -> str:
        return f"{self.path} (transformers)"

    @property
    def tokenizer_dir(self) -> Path:
        return self.path

    def read_described(self) -> tuple[TransformerConfig, dict[str, Tensor]]:
        model = from_huggingface(self.path)
        return model.config, model.state_dict()

    def read(self, model: Model) -> NamedWeights:
        """Returns the tensors of the files, which are copied into the model without another model between."""
        found, weights = read_huggingface(self.path)
        if found.config.kind != model.config.kind:
            return weights
        return replace(weights, names=mapping_of(model.config).tensor_names(model))


@dataclass(frozen=True, kw_only=True)
class TensorFlowCheckpoint(WeightSource):
    """A checkpoint of TensorFlow, with weights alone."""

    path: Path
    """Path without `.index`."""

    def __str__(self) -> str:
        return f"{self.path} (TensorFlow)"

    @property
    def tokenizer_dir(self) -> Path:
        return self.path.parent

    def read(self, model: Model) -> NamedWeights:
        return read_tensorflow(self.path, model)


def find_weights(path: Path) -> WeightSource:
    """Detects the kind of weights from the files at the path.

    Raises: CheckpointError if it holds no weights, or an incomplete checkpoint.
    """
    if (path / CHECKPOINTS).is_dir():
        checkpoint = newest_whole(path / CHECKPOINTS, _ALONE)
        if checkpoint is None:
            raise CheckpointError(f"the run in {path} has no checkpoint yet: train it first, or name another")
        return OwnCheckpoint(path=checkpoint.path, checkpoint=checkpoint)
    if (path / MANIFEST).is_file():
        return OwnCheckpoint(path=path, checkpoint=whole(path, _ALONE))
    if (path / _CONFIG_FILE).is_file():
        return TransformersFolder(path=path)
    prefix = path.with_suffix("") if path.suffix == INDEX else path
    if Path(f"{prefix}{INDEX}").is_file():
        return TensorFlowCheckpoint(path=prefix)
    raise CheckpointError(
        f"expected a run's output_dir (with {CHECKPOINTS}/), one checkpoint (step_..., with {MANIFEST}), a folder of "
        f"transformers (with {_CONFIG_FILE} and model.safetensors) or a checkpoint of TensorFlow (a path to which "
        f"{INDEX} is added); {path} {_describe_path(path)}"
    )


def _describe_path(path: Path) -> str:
    if path.suffix in _STATE_DICTS and path.is_file():
        return "is a state dict of PyTorch: load it with transformers and save the model (docs/starting_weights.md)"
    return "holds none of these" if path.exists() else "does not exist"
