"""The split of a model's training state over the ranks (ZeRO): everything that a stage decides of a run.

    stage   split over the ranks                                         here
    0       nothing                                                      `Replicated`
    1       the optimizer's state                                        `PartitionedOptimizer`
    2       the optimizer's state and the gradients                      `PartitionedGradients`
    3       the optimizer's state, the gradients and the parameters      `PartitionedParameters`

A stage is one class and one line of `SHARDINGS`. It decides how gradients are reduced, their norm and clipping, where
ranks synchronise, and whether an optimizer sees whole tensors.

The run file is checked against this package, so torch is imported only where it is used.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World
    from evenpack.models.build import Model
    from evenpack.models.common.tensors import NamedWeights

BUCKET_SIZE = 32 * 2**20
"""Gradients that are reduced at once, as a number: 128 MB, so that a ring's latency is small beside its transfer."""


class GradientReduction(ABC):
    """The mean of a model's gradients over the ranks, once a step; nothing here waits for the device."""

    def begin(self) -> None:  # noqa: B027 - only some stages have something to do
        """Is called before the last backward pass of a step: a gradient that it has computed is the rank's own part."""

    @abstractmethod
    def finish(self) -> "Tensor | None":
        """Replaces the gradients by their mean over ranks, for what is computed afterwards.

        Returns: the norm of this rank's own part before that, or None if it never has one.
        """


@dataclass(frozen=True)
class _AfterBackward(GradientReduction):
    """DeepSpeed reduces when the backward pass is over; its own overlap doubles the bucket and waits for the device."""

    deepspeed: Any
    model: "nn.Module"

    def finish(self) -> "Tensor | None":
        from evenpack.engine.optimizers.norms import gradient_norm_of

        norm = gradient_norm_of(self.model)
        self.deepspeed.allreduce_gradients()
        return norm


class _WithinBackward(GradientReduction):
    """DeepSpeed reduces in each backward pass."""

    def finish(self) -> "Tensor | None":
        return None


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
    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        """Returns the keys of DeepSpeed's configuration that this stage decides."""

    def place(self, model: "Model", seed: int, world: "World", settings: dict[str, Any]) -> None:
        """Gives a model that has only shapes its place on this rank, with the initial weights of `seed`.

        Args:
            settings: DeepSpeed's configuration.
        """
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
            load_tensors(model, weights.names, weights.tensors)

    @abstractmethod
    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        """Returns what averages the gradients of the model, which `deepspeed` has taken over."""

    @abstractmethod
    def update(
        self, deepspeed: Any, limit: float | None, *, norm: "Tensor | None", leaves_out: bool
    ) -> "Tensor | float":
        """Clips the averaged gradients and updates the model by them.

        Nothing here waits for the device, except to check the norm: from ZeRO 1 on DeepSpeed checks it (at ZeRO 1 by
        three reads and two blocking copies), and at ZeRO 0 this does with `leaves_out`. Where it is checked, an update
        whose norm is not finite changes nothing; elsewhere such an update is made and is invalid.

        Args:
            limit: norm to which the gradients are clipped; None: they are not.
            norm: their norm, where it is known: on one rank it is that of its own gradients.

        Returns: the global L2 norm of the gradients before clipping. A number instead of a tensor means that it was not
        finite and DeepSpeed has left the update out.
        """


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


class PartitionedOptimizer(Sharding):
    """ZeRO 1: every rank holds a part of the optimizer's state, flattened over tensors; weights are whole."""

    stage = 1
    balances_each_micro_batch = False
    gathers_parameters = False
    updates_whole_tensors = False
    clips = "DeepSpeed"

    def deepspeed_settings(self, gradient_clipping: float | None) -> dict[str, Any]:
        return {"gradient_clipping": gradient_clipping or 0.0, "zero_optimization": {"stage": self.stage}}

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _AfterBackward(deepspeed, model)

    def update(
        self, deepspeed: Any, limit: float | None, *, norm: "Tensor | None", leaves_out: bool
    ) -> "Tensor | float":
        deepspeed.step()  # takes the norm and clips
        return deepspeed.get_global_grad_norm()


class PartitionedGradients(PartitionedOptimizer):
    """ZeRO 2: a rank keeps its part of the gradients alone; each backward pass reduces them as they come."""

    stage = 2
    balances_each_micro_batch = True

    def reduction(self, deepspeed: Any, model: "nn.Module", world: "World") -> GradientReduction:
        return _WithinBackward()


class PartitionedParameters(PartitionedGradients):
    """ZeRO 3: a rank keeps its part of each parameter, and gathers a layer's parameters while it computes with them."""

    stage = 3
    gathers_parameters = True

    def place(self, model: "Model", seed: int, world: "World", settings: dict[str, Any]) -> None:
        """Divides each layer as soon as it has its weights, so that no rank ever holds more than one as a whole."""
        import torch

        from evenpack.engine.world.distributed import quiet_deepspeed

        zero: Any = quiet_deepspeed().zero
        divided: list[Any] = []

        def divide(layer: "nn.Module") -> None:
            parameters = list(layer.parameters(recurse=False))
            if divided:  # as DeepSpeed converts further parameters: reading its configuration again takes longer
                divided[0].convert_to_zero_parameters(param_list=parameters)
            else:
                zero.Init(module=layer, config_dict_or_path=settings, dtype=torch.float32)
            divided.extend(parameters)

        model.initialize(seed, before=lambda layer: _make_room(layer, world), after=divide)

    def fill(self, model: "Model", weights: "NamedWeights | None", world: "World") -> None:
        """Gathers one parameter after the other; rank 0 fills it, and each rank keeps its part."""
        from evenpack.engine.world.distributed import quiet_deepspeed
        from evenpack.models.common.tensors import fill_parameter

        zero: Any = quiet_deepspeed().zero
        names = {} if weights is None else {name.ours: name for name in weights.names}
        for name, parameter in model.named_parameters():
            with zero.GatheredParameters([parameter], modifier_rank=0):
                if weights is not None:
                    fill_parameter(parameter, names[name], weights.tensors)


def _make_room(layer: "nn.Module", world: "World") -> None:
    layer.to_empty(device=world.device, recurse=False)


SHARDINGS: dict[int, Sharding] = {
    one.stage: one for one in (Replicated(), PartitionedOptimizer(), PartitionedGradients(), PartitionedParameters())
}
"""The stages by their numbers."""
