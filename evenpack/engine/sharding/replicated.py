"""ZeRO 0: every rank holds everything."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evenpack.engine.sharding.base import REDUCE_BUCKET_SIZE, SavedBytes, Sharding
from evenpack.models.common.memory import FP32_BYTES, StateBytes, StateSizes

if TYPE_CHECKING:
    from torch import Tensor, nn


class Replicated(Sharding):
    """ZeRO 0: every rank holds everything, and gradients are all-reduced once per step."""

    stage = 0
    splits = "nothing"
    balances_each_micro_batch = False
    gathers_parameters = False
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
            parameters=gradients,
            gradients=gradients,
            optimizer=sizes.states * gradients,
            bucket=0,
            reduction=min(gradients, FP32_BYTES * REDUCE_BUCKET_SIZE),
            update_gradients=gradients,
            update=FP32_BYTES * sizes.temporaries * sizes.largest_group,
        )

    def saved_bytes(self, sizes: StateSizes) -> SavedBytes:
        """Rank 0 has everything, and writes it."""
        return SavedBytes(first_rank=FP32_BYTES * (1 + sizes.states) * sizes.parameters, other_rank=0)
