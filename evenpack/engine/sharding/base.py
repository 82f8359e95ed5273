"""What a ZeRO stage decides."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evenpack.models.common.memory import StateBytes, StateSizes

if TYPE_CHECKING:
    from torch import Tensor, nn

REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed reduces at once, as a number: the default of `zero_optimization.reduce_bucket_size`."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """What a rank writes of a checkpoint, in bytes; a background save first copies it to host memory."""

    first_rank: int
    other_rank: int


class Sharding(ABC):
    """One ZeRO stage; holds no state."""

    stage: ClassVar[int]
    splits: ClassVar[str]
    """The split state, for messages."""
    balances_each_micro_batch: ClassVar[bool]
    """Whether ranks synchronise in each micro-batch: gradients are reduced there, and perhaps parameters gathered. A
    rank then never has a gradient of its own, only its part of the mean."""
    gathers_parameters: ClassVar[bool]
    """Whether a forward pass gathers parameters, so that it must be called on every rank equally often."""
    updates_whole_tensors: ClassVar[bool]
    """Whether the optimizer sees the model's whole tensors: LAMB's trust ratios are norms of whole tensors."""
    clips: ClassVar[Literal["evenpack", "DeepSpeed"]]
    """The program that clips the gradients."""

    @abstractmethod
    def reduction_traffic(self, *, tensors: int, ranks: int) -> tuple[int, float]:
        """Returns kernels, and bytes per parameter that they move, of what stands between gradients and update.

        That is the rank's own norm, the copies into and out of the buffer of the all-reduce, the norm and the
        clipping, without the communication itself, in a step of one micro-batch. Counted in traced steps at ZeRO 0 and
        1; read from DeepSpeed's source at 2 and 3.
        """

    @abstractmethod
    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        """Returns the keys of DeepSpeed's configuration that this stage decides."""

    def hooking_into(self, model: "nn.Module") -> AbstractContextManager[None]:
        """Prepares a model whose forward returns `LossSums`; DeepSpeed takes it over within the block."""
        return nullcontext()

    @abstractmethod
    def reduce_gradients(
        self, deepspeed: Any, model: "nn.Module", *, gradient_clipping: float | None
    ) -> "Tensor | None":
        """Averages the gradients over the ranks and clips them; does not wait for the device.

        Returns: their norm before clipping, or None if only the update computes it (`norm_of_update`).
        """

    @abstractmethod
    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Makes the next update change nothing if the norm of `reduce_gradients` is not finite.

        It may wait for the device.
        """

    @abstractmethod
    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        """Returns the global L2 norm of the gradients of the last update, where `reduce_gradients` gave None.

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
