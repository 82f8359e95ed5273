"""The split of a model's training state over the ranks (ZeRO), and everything that depends on it.

    stage   split over the ranks                    here
    0       nothing                                 `Replicated`
    1       the optimizer's state                   `ShardedOptimizer`

A stage is one class and one line of `SHARDINGS`. It decides how gradients are reduced, their norm and clipping, where
ranks synchronise, whether an optimizer sees whole tensors, where a checkpoint stores the weights, and what may change
on resume.

The run file is checked against this module, so torch is imported only where it is used.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evenpack.errors import CheckpointError
from evenpack.models.common.memory import FP32_BYTES, StateBytes, StateSizes

if TYPE_CHECKING:
    from torch import Tensor, nn

_WEIGHTS = "mp_rank_00_model_states.pt"

REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed reduces at once, as a number: the default of `zero_optimization.reduce_bucket_size`."""

_FP64_BYTES = 8


class Sharding(ABC):
    """One ZeRO stage; holds no state."""

    stage: ClassVar[int]
    splits: ClassVar[str]
    """The split state, for messages."""
    balances_each_micro_batch: ClassVar[bool]
    """Whether ranks synchronise in each micro-batch (parameters or gradients are gathered there)."""
    updates_whole_tensors: ClassVar[bool]
    """Whether the optimizer sees the model's whole tensors: LAMB's trust ratios are norms of whole tensors."""
    clips: ClassVar[Literal["evenpack", "DeepSpeed"]]
    """The program that clips the gradients."""

    @abstractmethod
    def reduction_traffic(self, *, tensors: int, ranks: int) -> tuple[int, float]:
        """Returns kernels, and bytes per parameter that they move, of what stands between gradients and update.

        That is the rank's own norm, the copies into and out of the buffer of the all-reduce, the norm and the
        clipping, without the communication itself; counted in traced steps.
        """

    @abstractmethod
    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        """Returns the keys of DeepSpeed's configuration that this stage decides."""

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
        """Returns what the optimizer's state and DeepSpeed's buffers take on a GPU under DeepSpeed's `settings`."""

    @abstractmethod
    def require_resumable(self, *, saved_ranks: int, ranks: int, checkpoint: Path) -> None:
        """Checks ranks.

        Raises: CheckpointError if another number of ranks cannot resume from a checkpoint of this stage.
        """

    def require_same_stage(self, saved_stage: int, checkpoint: Path) -> None:
        """Checks the stage. Raises: CheckpointError for a checkpoint of another stage."""
        if saved_stage != self.stage:
            raise CheckpointError(
                f"checkpoint {checkpoint} was saved at ZeRO stage {saved_stage}, this run has stage {self.stage}: "
                f"the optimizer's state is laid out differently. Set deepspeed.zero_stage={saved_stage}, "
                "or choose another run.output_dir to start again."
            )

    def weight_file(self, checkpoint: Path) -> Path:
        """Returns the file of a checkpoint that holds the module's whole weights, under `module`."""
        return checkpoint / _WEIGHTS


class Replicated(Sharding):
    """ZeRO 0: every rank holds everything, and gradients are all-reduced once per step."""

    stage = 0
    splits = "nothing"
    balances_each_micro_batch = False
    updates_whole_tensors = True
    clips = "evenpack"

    def reduction_traffic(self, *, tensors: int, ranks: int) -> tuple[int, float]:
        scaled = 8.0 if ranks > 1 else 0.0
        return tensors + 30, 4.0 + 8 + scaled + 8 + 4 + 8  # own norm; joined, scaled, copied back; norm, clipping

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        # Without the key DeepSpeed would clip at 1.0; its own clipping makes the host wait for the device.
        return {"gradient_clipping": 0.0, "zero_optimization": {"stage": self.stage}}

    def reduce_gradients(
        self, deepspeed: Any, model: "nn.Module", *, gradient_clipping: float | None
    ) -> "Tensor | None":
        import torch

        from evenpack.engine.optimizers.norms import gradient_norm_of

        deepspeed.allreduce_gradients()
        norm = gradient_norm_of(model)
        if gradient_clipping is not None:
            together = True if norm.is_cuda else None  # torch's choice there, which it does not make for fake tensors
            torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), gradient_clipping, norm, foreach=together)
        return norm

    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Removes the gradients: an optimizer leaves parameters without one as they are, and their moments too."""
        assert norm is not None, "at ZeRO 0 `reduce_gradients` gives the norm"
        if not norm.isfinite():
            for parameter in model.parameters():
                parameter.grad = None

    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        raise RuntimeError("at ZeRO 0 the norm is known before the update")

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """DeepSpeed reduces copies of so many gradients at once, whatever its `reduce_bucket_size`."""
        gradients = FP32_BYTES * sizes.parameters
        return StateBytes(
            optimizer=sizes.states * gradients,
            bucket=0,
            reduction=min(gradients, FP32_BYTES * REDUCE_BUCKET_SIZE),
            update_gradients=gradients,
            update=FP32_BYTES * sizes.temporaries * sizes.largest_group,
        )

    def require_resumable(self, *, saved_ranks: int, ranks: int, checkpoint: Path) -> None:
        """Accepts any number of ranks, because each holds everything."""


class ShardedOptimizer(Sharding):
    """ZeRO 1: every rank holds a part of the optimizer's state, flattened over tensors; weights are whole."""

    stage = 1
    splits = "the optimizer's state"
    balances_each_micro_batch = False
    updates_whole_tensors = False
    clips = "DeepSpeed"

    def reduction_traffic(self, *, tensors: int, ranks: int) -> tuple[int, float]:
        norm = 12 + 8  # each gradient is cast to FP64
        of_a_part = norm + 8 + 8  # clipped, and copied into the weights' buffer, by the rank that updates it
        whole = 4 + 8 + 8 + 8 + 8  # own norm; into the buffer, scaled, joined; weights copied back
        return 4 * tensors + 60, whole + of_a_part / ranks

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        return {"gradient_clipping": gradient_clipping or 0.0, "zero_optimization": {"stage": self.stage}}

    def reduce_gradients(
        self, deepspeed: Any, model: "nn.Module", *, gradient_clipping: float | None
    ) -> "Tensor | None":
        deepspeed.allreduce_gradients()  # DeepSpeed takes the norm and clips in its step
        return None

    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Does nothing: DeepSpeed checks the norm in its step, and leaves the update out."""

    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        norm: Tensor | float = deepspeed.get_global_grad_norm()
        return norm

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """A rank has its part of FP32 masters, a second copy of the parameters, and of the states.

        DeepSpeed makes the bucket at the first gradient of a step, in full size, however small the model is, and moves
        the gradients into it when they are reduced; those of the rank's part then move to a buffer of their own. The
        norm is taken in FP64, tensor by tensor.
        """
        zero = settings["zero_optimization"]
        size = zero.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)
        part = -(-sizes.parameters // sizes.ranks)
        return StateBytes(
            optimizer=(1 + sizes.states) * FP32_BYTES * part,
            bucket=FP32_BYTES * size * (2 if zero.get("overlap_comm", False) else 1),
            reduction=FP32_BYTES * max(0, part - size),
            update_gradients=FP32_BYTES * part,
            update=max(FP32_BYTES * (1 + sizes.temporaries) * part, _FP64_BYTES * min(part, sizes.largest_tensor)),
        )

    def require_resumable(self, *, saved_ranks: int, ranks: int, checkpoint: Path) -> None:
        if saved_ranks != ranks:
            raise CheckpointError(
                f"checkpoint {checkpoint} was saved by {saved_ranks} ranks and this run has {ranks}: at ZeRO stage "
                f"{self.stage} each rank's file holds its part of the optimizer's state. Continue with {saved_ranks} "
                "ranks, or choose another run.output_dir to start again; evaluate and export read it with any number "
                "of ranks."
            )


SHARDINGS: dict[int, Sharding] = {0: Replicated(), 1: ShardedOptimizer()}


def sharding_at(stage: int) -> Sharding:
    """Returns the sharding of a ZeRO stage. Raises: CheckpointError for an unknown stage (of a checkpoint)."""
    if stage not in SHARDINGS:
        raise CheckpointError(f"ZeRO stage {stage} is unknown; known: {', '.join(map(str, SHARDINGS))}")
    return SHARDINGS[stage]
