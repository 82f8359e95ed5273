"""The interface of a ZeRO stage: everything that a stage decides."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evenpack.engine.activity import own_work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World
    from evenpack.models.build import Model
    from evenpack.models.common.tensors import NamedWeights

REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed reduces at once, as a number: the default of `zero_optimization.reduce_bucket_size`."""


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The numbers from which the memory of a training state follows."""

    parameters: int
    largest_tensor: int
    """Elements of the largest parameter."""
    states: int
    """FP32 numbers that the optimizer holds for each parameter."""
    temporaries: int
    """FP32 numbers for each parameter that it holds during an update of the largest group."""
    largest_group: int
    """Elements of the parameters that are updated together, at the most."""
    ranks: int


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What optimizer and sharding hold on one rank, in bytes, by `engine/sharding/`."""

    parameters: int
    """FP32 parameters during a step."""
    gradients: int
    """Gradients of parameters, at most: of a rank's part where each backward pass reduces them."""
    optimizer: int
    """The optimizer's state, between steps."""
    bucket: int
    """Buffers from a step's first gradient until the gradients are reduced."""
    copies: int
    """Copies of gradients that are reduced during the rest of the backward pass through the blocks."""
    reduction: int
    """Further buffers of the reduction."""
    update_gradients: int
    """Gradients at the update."""
    update: int
    """Temporary numbers of the update."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What a rank writes of a checkpoint, in bytes; a background save first copies it to host memory."""

    first_rank: int
    other_rank: int


class GradientReduction(ABC):
    """The mean of a model's gradients over the ranks, once a step; nothing here waits for the device."""

    def begin(self) -> None:  # noqa: B027 - only some stages have something to do
        """Is called before the last backward pass of a step: a gradient that it has computed is the rank's own part."""

    @abstractmethod
    def finish(self) -> "Tensor | None":
        """Replaces the gradients by their mean over ranks, for what is computed afterwards.

        Returns: the norm of this rank's own part before that, or None if it never has one.
        """


class Sharding(ABC):
    """One ZeRO stage; holds no state."""

    stage: ClassVar[int]
    balances_each_micro_batch: ClassVar[bool]
    """Whether ranks synchronise in each micro-batch: gradients are reduced there, and perhaps parameters gathered. A
    rank then never has a gradient of its own, only its part of the mean."""
    gathers_parameters: ClassVar[bool]
    """Whether a forward pass gathers parameters, so that it must be called on every rank equally often."""
    updates_whole_tensors: ClassVar[bool]
    """Whether the optimizer has the model's complete tensors: LAMB's trust ratios are norms of complete tensors."""
    clips: ClassVar[Literal["evenpack", "DeepSpeed"]]
    """The program that clips the gradients."""

    @abstractmethod
    def reduction_traffic(
        self, *, tensors: int, ranks: int, parameters: int, tables: Sequence[int]
    ) -> tuple[int, float]:
        """Returns kernels, and bytes per parameter that they move, of the work between gradients and update.

        That is the rank's own norm, the copies into and out of the buffer of the all-reduce, the norm and the
        clipping, without the communication itself, in a step of one micro-batch. Counted in traced steps at ZeRO 0 and
        1; read from DeepSpeed's source at 2 and 3.

        Args:
            tables: elements of the token embedding, and of an output matrix of its own.
        """

    @abstractmethod
    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        """Returns the keys of DeepSpeed's configuration that this stage decides."""

    def place(self, model: "Model", seed: int, world: "World", settings: dict[str, Any]) -> None:
        """Gives a model that has only shapes its place on this rank, with the initial weights of `seed`.

        Args:
            settings: DeepSpeed's configuration.
        """
        with own_work():
            model.to_empty(device=world.device)
            model.initialize(seed)

    def fill(self, model: "Model", weights: "NamedWeights | None", world: "World") -> None:
        """Fills a model that was placed, before the engine is made; every rank calls it.

        Here the engine then gives all ranks what rank 0 has.

        Args:
            weights: those of the model; None on ranks other than 0.
        """
        from evenpack.models.common.tensors import load_tensors

        if weights is not None:
            with own_work():
                load_tensors(model, weights.names, weights.tensors)

    @abstractmethod
    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        """Returns what averages the gradients of the model, which `deepspeed` has taken over."""

    @abstractmethod
    def clip(self, model: "nn.Module", limit: float | None) -> "Tensor | None":
        """Clips the averaged gradients; does not wait for the device.

        Returns: their norm before clipping, or None if only the update computes it (`norm_of_update`).
        """

    @abstractmethod
    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Makes the next update change nothing if the norm of `clip` is not finite.

        It may wait for the device.
        """

    @abstractmethod
    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        """Returns the global L2 norm of the gradients of the last update, where `clip` gave None.

        A number instead of a tensor means that the norm was not finite and the update was left out.
        """

    @abstractmethod
    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """Returns what parameters, gradients, the optimizer's state and DeepSpeed's buffers take on a GPU.

        Args:
            settings: DeepSpeed's configuration.
        """

    @abstractmethod
    def saved_bytes(self, sizes: StateSizes) -> SavedBytes:
        """Returns what ranks write of a checkpoint: the tensors of DeepSpeed's files, without their names."""
