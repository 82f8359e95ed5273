"""ZeRO 0: every rank holds everything."""

from typing import TYPE_CHECKING, Any

from evenpack.engine.sharding.base import GradientReduction, Sharding

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

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        # Without the key DeepSpeed would clip at 1.0; its own clipping makes the host wait for the device.
        return {"gradient_clipping": 0.0, "zero_optimization": {"stage": self.stage}}

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        from evenpack.engine.sharding.buckets import BucketedReduction

        overlaps = world.size > 1 and world.device.type == "cuda"
        return BucketedReduction(deepspeed, model, bucket_size=BUCKET_SIZE, device=world.device, overlaps=overlaps)

    def update(
        self, deepspeed: Any, limit: float | None, *, norm: "Tensor | None", leaves_out: bool
    ) -> "Tensor | float":
        from evenpack.engine.optimizers.norms import clip_gradients

        norm = clip_gradients(deepspeed.module, limit, norm=norm, optimizer=deepspeed.optimizer)
        if leaves_out and not norm.isfinite():
            for parameter in deepspeed.module.parameters():  # without a gradient an optimizer changes no moments either
                parameter.grad = None
        deepspeed.step()
        deepspeed.optimizer.grad_scale = None  # of this update alone
        return norm
