"""The model's weights alone, out of a checkpoint, with neither DeepSpeed nor its process group."""

import pickle

import torch
from torch import Tensor

from evenpack.engine.checkpoint_files import Checkpoint
from evenpack.errors import CheckpointError

_MODEL_STATES = "mp_rank_00_model_states.pt"


def load_model_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The module's state dict on the CPU, by parameter name; whole on every rank.

    Up to ZeRO 1 one file holds all weights. At ZeRO 0 it holds the optimizer's state as well, twice the size of the
    weights: the file is memory-mapped, so that it is never read. No code in the file is run.

    Raises: CheckpointError if the file is missing or was not written by DeepSpeed.
    """
    path = checkpoint.path / _MODEL_STATES
    try:
        states = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # Copied, so that the tensors outlive the checkpoint.
        return {name: tensor.clone() for name, tensor in states["module"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist, and only it holds whole weights: the checkpoint was saved at ZeRO stage "
            f"{checkpoint.state.zero_stage}, expected 0 or 1"
        ) from error
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path} is not a file of weights as DeepSpeed writes it: {error}") from error
