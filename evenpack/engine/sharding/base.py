"""The interface of a ZeRO stage: everything that a stage decides of a run."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenpack.engine.world.distributed import World
    from evenpack.models.build import Model
    from evenpack.models.common.tensors import NamedWeights


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
