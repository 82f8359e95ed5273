"""Reads complete tensors from a checkpoint's files, for any ZeRO stage and number of ranks, without DeepSpeed.

    stage   file of the weights           masters and moments
    0       mp_rank_00_model_states.pt    in the same file, by the number of the parameter
    1, 2    the same                      zero_pp_rank_N_mp_rank_00_optim_states.pt: the parameters of a group follow
                                          one another, and each rank has a slice of this one vector
    3       none                          the same: each parameter is divided among the ranks, and the parts that a
                                          rank has of a sub-group follow one another

The layouts are DeepSpeed 0.19's; a test compares what is read here with DeepSpeed's own conversion.
"""

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from evenpack.engine.checkpoints.files import Checkpoint, leaving_alone
from evenpack.engine.checkpoints.pickles import ALLOWED, forbidding_code
from evenpack.engine.optimizers.build import decays
from evenpack.errors import CheckpointError
from evenpack.units import counted

State = Literal["fp32", "exp_avg", "exp_avg_sq"]
"""What AdamW needs of a parameter, by DeepSpeed's names: the parameter itself and its two moments."""

WHOLE_WEIGHTS = "mp_rank_00_model_states.pt"
"""Name of the file that holds the model's weights up to ZeRO 2, under `module`."""

STATES: tuple[State, ...] = ("fp32", "exp_avg", "exp_avg_sq")


class SavedTensors(ABC):
    """The tensors of a checkpoint of one kind of layout; files are memory-mapped, and read where they are asked for."""

    _model_file: ClassVar[str] = WHOLE_WEIGHTS
    """Name of DeepSpeed's file of the model on rank 0."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the parameters by name."""

    @property
    @abstractmethod
    def _optimizers(self) -> list[dict[str, Any]]:
        """Torch's own states of the optimizer, of each rank that has one of its own."""

    @abstractmethod
    def _parts(self, name: str, state: State) -> Iterator[Tensor]:
        """Yields the flattened parts of a tensor, in order."""

    @property
    def steps(self) -> frozenset[int]:
        """The optimizer's counts of updates; more than one is wrong, and none means that there was no update."""
        with self._explained():
            return frozenset(int(state["step"]) for one in self._optimizers for state in one["state"].values())

    @property
    def group_count(self) -> int:
        """Number of the optimizer's groups of parameters."""
        with self._explained():
            return len(self._optimizers[0]["param_groups"])

    @cached_property
    def model_states(self) -> dict[str, Any]:
        """DeepSpeed's file of the model on rank 0."""
        return self._load(self._model_file)

    @property
    def module(self) -> dict[str, Tensor]:
        """The module's state dict on rank 0; at ZeRO 3 its parameters are empty."""
        with self._explained(self._model_file):
            return self.model_states["module"]

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of all that the module saves, by name, in the module's precision; complete on every rank.

        Up to ZeRO 2 one file holds all weights. At ZeRO 0 it holds the optimizer's state as well, twice the size of the
        weights, which is never read, as the file is memory-mapped. At ZeRO 3 weights are put together from the files of
        all ranks.

        Raises: CheckpointError if a file is missing or was not written by DeepSpeed.
        """
        with self._explained(self._model_file):
            return {name: tensor.clone() for name, tensor in self.module.items()}

    def read(self, name: str, state: State) -> Tensor:
        """Returns a complete tensor, FP32 on the CPU; moments of an optimizer that has made no update are zero.

        Raises: CheckpointError if the ranks' parts are not as many numbers as the parameter has.
        """
        shape = self.shapes[name]
        if state != "fp32" and not self.steps:
            return torch.zeros(shape)
        with self._explained():
            parts = list(self._parts(name, state))
        found = sum(part.numel() for part in parts)
        if found != shape.numel():
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path}: {state} of {name} has {found} numbers in the files of all ranks, "
                f"expected {shape.numel()}; restore it from a copy, or continue from an older one"
            )
        return torch.cat(parts).detach().view(shape)

    def _load(self, name: str, *, classes: Iterable[str] = ()) -> dict[str, Any]:
        """Returns a file's content; `classes`, which it may hold, are imported with DeepSpeed."""
        path = self.checkpoint.path / name
        with self._explained(name), forbidding_code(classes):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if not isinstance(loaded, dict):
                raise TypeError(f"it holds a {type(loaded).__name__} where DeepSpeed saves a dict")
            return loaded

    @contextmanager
    def _explained(self, name: str = "") -> Iterator[None]:
        """Explains errors of the files; `name`: the one that is read."""
        try:
            with leaving_alone(self.checkpoint.path / name):
                yield
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} does not exist, and no other file of the checkpoint holds the same (it was saved by "
                f"{counted(self.checkpoint.state.world_size, 'rank')} at ZeRO stage "
                f"{self.checkpoint.state.zero_stage}): restore the file from a copy, or name another checkpoint"
            ) from error
        except (pickle.UnpicklingError, RuntimeError, LookupError, TypeError, AttributeError, EOFError) as error:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path / name} is not in the form of DeepSpeed 0.19 at ZeRO stage "
                f"{self.checkpoint.state.zero_stage}: {error}"
            ) from error


class _WholeState(SavedTensors):
    """ZeRO 0: one file, and torch's own state of the optimizer."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        with self._explained():
            return {name: tensor.shape for name, tensor in self.module.items()}

    @property
    def _optimizers(self) -> list[dict[str, Any]]:
        return [self.model_states["optimizer"]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Numbers by which the optimizer knows the parameters: group after group, as `parameter_groups` makes them."""
        ordered = sorted(self.shapes, key=lambda name: not decays(self.shapes[name]))  # stable: else the model's order
        return {name: number for number, name in enumerate(ordered)}

    def _parts(self, name: str, state: State) -> Iterator[Tensor]:
        tensor = self.module[name]
        if state != "fp32":
            tensor = self._optimizers[0]["state"][self._numbers[name]][state]
        if tensor.shape != self.shapes[name]:
            raise RuntimeError(f"{state} of {name} has shape {tuple(tensor.shape)}")
        yield tensor.float().flatten()


class _Partitioned(SavedTensors):
    """A file of each rank."""

    _masters_key: ClassVar[str]
    """The key of a rank's FP32 parameters, a vector for each group."""
    _optimizer_key: ClassVar[str]
    """The key of its part of torch's own state of the optimizer."""

    @property
    def _optimizers(self) -> list[dict[str, Any]]:
        return [rank[self._optimizer_key] for rank in self._ranks]

    def _flat(self, rank: dict[str, Any], group: int, state: State) -> Tensor:
        """Returns a rank's vector of the masters, or of a moment, of all parameters of a group."""
        if state == "fp32":
            return cast(Tensor, rank[self._masters_key][group])
        return cast(Tensor, rank[self._optimizer_key]["state"][group][state])

    @cached_property
    def _ranks(self) -> list[dict[str, Any]]:
        """Each rank's state of the optimizer."""
        names = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(self.checkpoint.state.world_size))
        loaded = [self._load(name, classes=ALLOWED) for name in names]
        with self._explained():
            return [one["optimizer_state_dict"] for one in loaded]

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        with self._explained():
            return {name: shape for group in self.model_states["param_shapes"] for name, shape in group.items()}


class _FlatGroups(_Partitioned):
    """ZeRO 1 and 2: each rank has a slice of every group, and a table of what lies where in it."""

    _masters_key = "single_partition_of_fp32_groups"
    _optimizer_key = "base_optimizer_state"

    def read(self, name: str, state: State) -> Tensor:
        """Returns a complete tensor; masters are compared with the model's weights, because a table can be wrong.

        Raises: CheckpointError as above, or if the two differ: they are equal at every precision of evenpack.
        """
        tensor = super().read(name, state)
        if state != "fp32":
            return tensor
        with self._explained():
            is_equal = torch.allclose(tensor, self.module[name], rtol=0.0, atol=0.0, equal_nan=True)
        if not is_equal:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path}: the optimizer's FP32 copy of {name} is not equal to the model's "
                "weights, so its files do not belong together, or it was saved with "
                "zero_optimization.round_robin_gradients. Restore it from a copy, move it away to continue from an "
                f"older one, or start a new run from the weights, which {WHOLE_WEIGHTS} holds "
                "(training.initialize_from)"
            )
        return tensor

    def _parts(self, name: str, state: State) -> Iterator[Tensor]:
        for rank in self._ranks:
            for group, table in enumerate(rank["param_slice_mappings"]):
                if name in table:
                    yield self._flat(rank, group, state).narrow(0, table[name].start, table[name].numel)


class _DividedParameters(_Partitioned):
    """ZeRO 3: every parameter is padded to a multiple of the ranks and divided among them."""

    _model_file = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    _masters_key = "fp32_flat_groups"
    _optimizer_key = "optimizer_state_dict"

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of all that the module saves, its parameters from the masters in FP32.

        Raises: CheckpointError if a parameter has two names, or is frozen: its values are in no file.
        """
        weights = {name: self.read(name, "fp32") for name in self.shapes}
        with self._explained():  # persistent buffers, which no stage divides
            weights |= {name: self.module[name].clone() for name in self.model_states["buffer_names"]}
        others = sorted(self.module.keys() - weights.keys())
        if others:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path} was saved at ZeRO stage {self.checkpoint.state.zero_stage} and "
                f"does not hold the values of {', '.join(others)}: second names of parameters, or frozen parameters, "
                "are read up to ZeRO 2 only. Train the model at deepspeed.zero_stage=2"
            )
        return weights

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Sub-group of each parameter, and where a rank's part of it begins there."""
        places = {}
        for number, group in enumerate(self.model_states["param_shapes"]):
            offset = 0
            for name, shape in group.items():
                places[name] = (number, offset)
                offset += self._part_size(shape)
        return places

    def _part_size(self, shape: torch.Size) -> int:
        return math.ceil(shape.numel() / self.checkpoint.state.world_size)

    def _parts(self, name: str, state: State) -> Iterator[Tensor]:
        group, offset = self._places[name]
        size, left = self._part_size(self.shapes[name]), self.shapes[name].numel()
        for rank in self._ranks:
            # The last ranks' parts may be padding.
            part = self._flat(rank, group, state).narrow(0, offset, min(size, left))
            left -= part.numel()
            yield part


_LAYOUTS: dict[int, type[SavedTensors]] = {0: _WholeState, 1: _FlatGroups, 2: _FlatGroups, 3: _DividedParameters}


def saved_tensors(checkpoint: Checkpoint) -> SavedTensors:
    """Returns the tensors of a checkpoint; nothing is read yet. Raises: CheckpointError for an unknown ZeRO stage."""
    stage = checkpoint.state.zero_stage
    if stage not in _LAYOUTS:
        raise CheckpointError(f"checkpoint {checkpoint.path} has ZeRO stage {stage}; known: {sorted(_LAYOUTS)}")
    return _LAYOUTS[stage](checkpoint)
