"""The parts that all models share: construction, initialisation, and the pass through the blocks.

Shapes: T = slots of the micro-batch, C = hidden size. There is no batch dimension: `cu_seqlens` says where each segment
ends, and nothing else in a model mixes slots.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from evenpack.batch import PackedBatch
from evenpack.kernels.segments import Segments
from evenpack.models.common.layers import PreNormBlock
from evenpack.models.common.loss_sums import LossOutputs
from evenpack.models.common.positions import Rotation
from evenpack.models.common.section import TransformerConfig

INITIAL_DEVIATION = 0.02
"""Standard deviation of initial weights in GPT-2, BERT and Llama."""

_INITIALISED = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)

ConfigT = TypeVar("ConfigT", bound=TransformerConfig)

OnLayer = Callable[[nn.Module], None]


class PackedTransformer(nn.Module, ABC, Generic[ConfigT]):
    """A stack of blocks over packs.

    Args:
        config: shape, dropout, activation checkpointing, and the family's own keys.
        vocabulary_size: rows of the token embedding, and of the output head.
        max_positions: rows of the learned position table; other kinds of positions have none and ignore it.
        attention_backend: `auto` or a name of `evenpack.kernels`; matched to the device and dtype when called.
        seed: of the initial weights, which depend on nothing else: each rank and each device gets the same.

    Built under `torch.device("meta")` it has only shapes and uses no memory; call `to_empty` and `initialize` next,
    or load weights.
    """

    token_embedding: nn.Embedding
    blocks: nn.ModuleList

    initial_cutoff: ClassVar[float | None] = None
    """Standard deviations at which the distribution of initial weights is cut; None: they have any size."""

    def __init__(
        self,
        config: ConfigT,
        *,
        vocabulary_size: int,
        max_positions: int,
        attention_backend: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocabulary_size = vocabulary_size
        self.max_positions = max_positions
        self.is_compiled = False
        self.residual_dtype: torch.dtype | None = None
        """Type of what goes from block to block; None: that of the embedding."""
        self._embed: Callable[..., Tensor] = type(self)._embedded
        self._normalise: Callable[[nn.Module, Tensor], Tensor] = _normalised
        device = torch.get_default_device()
        with torch.device("meta"), _WithoutInitialValues():
            self._build(attention_backend)
        if device.type != "meta":
            self.to_empty(device=device)
            self.initialize(seed)

    @abstractmethod
    def _build(self, attention_backend: str) -> None:
        """Makes all layers, `token_embedding` and `blocks` among them."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> LossOutputs:
        """Returns the losses over the batch's targets, by name; the logits never exist as a whole."""

    def _initial_deviation(self, layer: nn.Module) -> float:
        """Returns the standard deviation of the initial weights of a linear layer or an embedding."""
        return INITIAL_DEVIATION

    def _adds_to_stream(self, layer: nn.Module) -> bool:
        """Returns whether a layer's results are added to the residual stream of pre-norm blocks."""
        blocks = (block for block in self.blocks if isinstance(block, PreNormBlock))
        return any(layer is output for block in blocks for output in block.residual_outputs)

    @torch.no_grad()
    def initialize(self, seed: int, *, before: OnLayer | None = None, after: OnLayer | None = None) -> None:
        """Draws all weights again from `seed`: weights from a normal distribution, biases zero, norms one.

        Numbers are drawn on the CPU and copied, because devices draw differently from one seed.

        Args:
            before: is called with each layer that has parameters of its own; it may give them a place.
            after: is called with it once they have their values; it may divide them among ranks.

        Raises: TypeError for a weight of another kind of layer: a model that has some must override this.
        """
        self._require_known_layers()
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for layer in self.modules():
            if next(layer.parameters(recurse=False), None) is None:
                continue
            if before is not None:
                before(layer)
            for name, parameter in layer.named_parameters(recurse=False):
                if name.endswith("bias"):
                    parameter.zero_()
            if isinstance(layer, nn.Linear | nn.Embedding):
                is_here = layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
                drawn = layer.weight if is_here else torch.empty(layer.weight.shape, device="cpu", dtype=torch.float32)
                self._draw(drawn, self._initial_deviation(layer), generator)
                if not is_here:
                    layer.weight.copy_(drawn)
            if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
                layer.weight.fill_(1.0)
            if after is not None:
                after(layer)

    def _require_known_layers(self) -> None:
        known = {id(module.weight) for module in self.modules() if isinstance(module, _INITIALISED)}
        for name, parameter in self.named_parameters():
            if not name.endswith("bias") and id(parameter) not in known:
                raise TypeError(f"{type(self).__name__} defines no initial values for {name}: override initialize")

    def _draw(self, weights: Tensor, deviation: float, generator: torch.Generator) -> None:
        """Fills `weights` from a normal distribution, cut at `initial_cutoff`."""
        if self.initial_cutoff is None:
            weights.normal_(0.0, deviation, generator=generator)
            return
        share = math.erf(self.initial_cutoff / math.sqrt(2))  # of a normal distribution that is within the cutoff
        weights.uniform_(-share, share, generator=generator).erfinv_().mul_(math.sqrt(2))
        weights.clamp_(-self.initial_cutoff, self.initial_cutoff).mul_(deviation)

    def _embedded(self, *vectors: Any) -> Float[Tensor, " T C"]:
        """Returns what the first block reads, from rows of tables; called as `self._embed(self, ...)`.

        A family that defines it has it compiled. Rows are looked up outside: compiled code would add their gradients in
        any order, so that no run could be repeated to the bit.
        """
        raise NotImplementedError(f"{type(self).__name__} embeds in its forward pass")

    def compile_parts(self, *, varying_slots: bool) -> None:
        """Lets torch.compile make one graph for all blocks, and one each for embedding, final norm and a chunk's loss.

        Names of parameters stay as they are. Graphs are made when they are first called.

        Args:
            varying_slots: whether batches differ in their number of slots: the graphs are then for any number.
        """
        self.is_compiled = True
        dynamic = True if varying_slots else None
        self._embed = torch.compile(type(self)._embedded, dynamic=dynamic)
        self._normalise = torch.compile(_normalised, dynamic=dynamic)
        for block in self.blocks:
            block.compile(dynamic=dynamic)

    def _through_blocks(
        self, hidden: Float[Tensor, " T C"], segments: Segments, rotations: Sequence[Rotation | None]
    ) -> Float[Tensor, " T C"]:
        """Returns the output of all blocks; activation checkpointing keeps only their inputs for the backward pass.

        Args:
            rotations: of queries and keys in each block; None for other positions.
        """
        recompute = self.config.activation_checkpointing and self.training and torch.is_grad_enabled()
        if self.is_compiled:  # micro-batches differ in their number of segments, which no graph is made for
            torch._dynamo.maybe_mark_dynamic(segments.cu_seqlens, 0)
        hidden = hidden.to(self.residual_dtype or hidden.dtype)
        for block, rotation in zip(self.blocks, rotations, strict=True):
            if recompute:
                # Saving the random state makes the device wait; only dropout needs it.
                keeps_random_state = max(self.config.dropout, self.config.dropout_of_attention) > 0.0
                hidden = checkpoint(
                    block, hidden, segments, rotation, use_reentrant=False, preserve_rng_state=keeps_random_state
                )
            else:
                hidden = block(hidden, segments, rotation)
            if self.residual_dtype not in (None, hidden.dtype):
                raise TypeError(
                    f"{type(block).__name__} was given {self.residual_dtype} and returned {hidden.dtype}, so the "
                    "residual stream is not what training.residual_dtype says: return the type of the input, or set "
                    "training.residual_dtype=fp32"
                )
        return hidden


def _normalised(norm: nn.Module, hidden: Float[Tensor, " T C"]) -> Float[Tensor, " T C"]:
    """Returns the result of a norm; its own `compile` does nothing, because torch.compile skips torch's modules."""
    return norm(hidden)


class _WithoutInitialValues(TorchFunctionMode):
    """Leaves out torch's own initial values, which `initialize` replaces.

    On the meta device they would load a compiler; elsewhere they would draw from torch's global random state.
    """

    _NAMES = ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_", "fill_", "zero_")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in self._NAMES:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
