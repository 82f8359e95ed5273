"""ZeRO 0: every rank holds everything."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenpack.engine.sharding.base import GradientReduction, SavedBytes, Sharding, StateBytes, StateSizes
from evenpack.units import FP32_BYTES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World

BUCKET_SIZE = 32 * 2**20
"""Gradients that are reduced at once, as a number: 128 MB, so that a ring's latency is small beside its transfer."""


class Replicated(Sharding):
    """ZeRO 0: every rank holds everything, and gradients are all-reduced once per step, while they are computed."""

    stage = 0
    balances_each_micro_batch = False
    gathers_parameters = False
    updates_whole_tensors = True
    clips = "evenpack"

    def reduction_traffic(
        self, *, tensors: int, ranks: int, parameters: int, tables: Sequence[int]
    ) -> tuple[int, float]:
        joined = 8.0 * (1 - sum(table for table in tables if table >= BUCKET_SIZE) / parameters)
        averaged = joined + 8 + 8 if ranks > 1 else 0.0  # scaled, copied back
        return tensors + 30, 4.0 + averaged + 4 + 8  # own norm; norm, clipping

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        # Without the key DeepSpeed would clip at 1.0; its own clipping makes the host wait for the device.
        return {"gradient_clipping": 0.0, "zero_optimization": {"stage": self.stage}}

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        from evenpack.engine.sharding.buckets import BucketedReduction

        overlaps = world.size > 1 and world.device.type == "cuda"
        return BucketedReduction(deepspeed, model, bucket_size=BUCKET_SIZE, device=world.device, overlaps=overlaps)

    def clip(self, model: "nn.Module", limit: float | None) -> "Tensor | None":
        import torch

        from evenpack.engine.optimizers.norms import gradient_norm_of

        norm = gradient_norm_of(model)
        if limit is not None:
            together = True if norm.is_cuda else None  # torch's choice there, which it does not make for fake tensors
            torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), limit, norm, foreach=together)
        return norm

    def leave_out_unless_finite(self, model: "nn.Module", norm: "Tensor | None") -> None:
        """Removes the gradients: an optimizer leaves parameters without one as they are, and their moments too."""
        assert norm is not None, "at ZeRO 0 `clip` gives the norm"
        if not norm.isfinite():
            for parameter in model.parameters():
                parameter.grad = None

    def norm_of_update(self, deepspeed: Any) -> "Tensor | float":
        raise RuntimeError("at ZeRO 0 the norm is known before the update")

    def state_bytes(self, sizes: StateSizes, settings: Mapping[str, Any]) -> StateBytes:
        """Among several ranks a bucket is copied, which may have up to twice `BUCKET_SIZE`; one is counted."""
        gradients = FP32_BYTES * sizes.parameters
        return StateBytes(
            parameters=gradients,
            gradients=gradients,
            optimizer=sizes.states * gradients,
            bucket=0,
            copies=FP32_BYTES * BUCKET_SIZE if sizes.ranks > 1 else 0,
            reduction=0,
            update_gradients=gradients,
            update=FP32_BYTES * sizes.temporaries * sizes.largest_group,
        )

    def saved_bytes(self, sizes: StateSizes) -> SavedBytes:
        """Rank 0 has everything, and writes it."""
        return SavedBytes(first_rank=FP32_BYTES * (1 + sizes.states) * sizes.parameters, other_rank=0)
