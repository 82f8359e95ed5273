"""What a model does and holds in a forward and a backward pass, found by running it on fake tensors.

    count_products    meta device, forward               ->  `Products`: matrix products and attention
    trace_passes      fake tensors, forward and backward ->  `Moments`: what is alive after each operator
    moments_of        passes of two depths               ->  the same for a whole model, without the phases of blocks

Sizes of the batch are three primes that no size of a model reaches, so a number of bytes or operations that one of
them divides grows with it: a pass gives not numbers for one batch but factors for every batch (`AXES`). Layers repeat,
so passes of two depths give the counts of any.

The model runs on the CPU of a fake mode, and does there what it does on CUDA: where the two differ, `_Substitutes` puts
CUDA's operator. Attention and the loss are one operator each, whose cost `kernels/costs.py` states.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
from evenpack.kernels.attention import packed_attention
from evenpack.kernels.costs import attention_buffers, attention_products
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.kernels.segments import Segments
from evenpack.losses import NEXT_TOKEN, StepCounts
from evenpack.models.build import Model, new_model
from evenpack.models.common.section import TransformerConfig
from evenpack.units import FP32_BYTES

aten = torch.ops.aten

AXES = ("constant", "slots", "head_slots", "sequences")
"""What a quantity of a pass is multiplied with: 1, and the sizes of a micro-batch."""

_SIZES = (16_777_259, 16_777_289, 16_777_291)
"""Slots, rows of the head and sequences of the batch that is passed through: primes above every size of a model."""

Phase = Literal["forward", "loss", "head", "last block", "between", "first block", "embedding"]

LIVE = ("cast weights", "gradients", "activations", "head", "arrived")
"""What is alive at a moment: copies of weights in half precision; gradients of parameters; what blocks and norms keep,
or hold for a while; logits, with the gradients of the output matrix and of what it reads. And, counted again, the
gradients of parameters that this pass has completed."""
_CAST_WEIGHTS, _GRADIENTS, _ACTIVATIONS, _HEAD, _ARRIVED = range(len(LIVE))

Factors = np.ndarray[Any, np.dtype[np.int64]]
"""A quantity for each of `AXES`."""

CountT = TypeVar("CountT")


@dataclass(frozen=True, kw_only=True)
class Products:
    """The matrix products of one forward pass, with multiplications and additions counted each."""

    linear: tuple[int, ...]
    """Operations outside attention for each of `AXES`."""
    attention: Mapping[tuple[bool, int | None], int]
    """Operations for each pair of slots that attend, in all layers of one causality and window."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """What a model holds at each moment of a forward and a backward pass."""

    alive: Mapping[Phase, Factors]
    """[moments, LIVE, AXES]: bytes alive after each operator of a phase."""
    loss_moment: int
    """The moment of the phase `loss` in which the loss is computed."""


def count_products(config: TransformerConfig, *, vocabulary_size: int) -> Products:
    """Counts the products of a model's forward pass."""
    with torch.device("meta"):
        model = new_model(config, vocabulary_size=vocabulary_size, max_positions=1)
        batch = _batch(config)
    recorder = _Recorder(model, vocabulary_size=vocabulary_size)
    with torch.no_grad(), _Substitutes(recorder), _Products(recorder):
        model.train()(batch)
    return Products(linear=tuple(int(one) for one in recorder.operations), attention=dict(recorder.attention))


def trace_passes(
    config: TransformerConfig,
    *,
    vocabulary_size: int,
    max_positions: int,
    number_bytes: int,
    accumulates: bool,
) -> Moments:
    """Traces a forward and a backward pass.

    Args:
        number_bytes: of the type of products: 2 under bf16 autocast, 4 in FP32.
        accumulates: whether gradients of an earlier micro-batch are there, to which these are added.
    """
    autocast = torch.autocast("cpu", torch.bfloat16) if number_bytes != FP32_BYTES else nullcontext()
    with torch.device("meta"):
        model = new_model(config, vocabulary_size=vocabulary_size, max_positions=max_positions)
    with FakeTensorMode():
        place_parameters(model)
        batch = _batch(config)
        recorder = _Recorder(model, vocabulary_size=vocabulary_size)
        with recorder.following(), _Substitutes(recorder), _Operators(recorder):
            if accumulates:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                    recorder.count_gradient(parameter)
            recorder.phase = "forward" if len(model.blocks) else "loss"
            with autocast:
                losses = _losses(model.train()(batch))
            recorder.phase = "head"
            _run_backward(losses)
    return Moments(
        alive={phase: np.stack(found) for phase, found in recorder.moments.items()},
        loss_moment=recorder.loss_moment,
    )


@cache
def moments_of(
    config: TransformerConfig, *, vocabulary_size: int, max_positions: int, number_bytes: int, accumulates: bool
) -> Moments:
    """Returns what is alive in each phase of a model's passes, phase by phase extended from two depths."""
    trace = partial(
        trace_passes,
        vocabulary_size=vocabulary_size,
        max_positions=max_positions,
        number_bytes=number_bytes,
        accumulates=accumulates,
    )
    first, second, further = at_two_depths(config, trace, periods=2)
    return Moments(
        alive={
            phase: found + further * (second.alive[phase] - found)
            for phase, found in first.alive.items()
            if phase not in ("forward", "between")
        },
        loss_moment=first.loss_moment,
    )


def place_parameters(model: nn.Module) -> None:
    """Gives parameters that have only shapes a place on the CPU; one that two modules share stays one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                new = made.setdefault(id(parameter), nn.Parameter(torch.empty(parameter.shape, device="cpu")))
                module._parameters[name] = new


def _batch(config: TransformerConfig) -> PackedBatch:
    """Returns a batch of the three sizes on the default device."""
    slots, rows, sequences = _SIZES

    def labels(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    targets: dict[str, SlotTargets | ChosenTargets] = {}
    for loss in config.losses:
        size = slots if loss.name == NEXT_TOKEN.name else rows if loss.counted_by == "targets" else sequences
        wanted, weights = labels(size), torch.empty(size)
        targets[loss.name] = SlotTargets(labels=wanted, weights=weights)
        if size != slots:
            targets[loss.name] = ChosenTargets(positions=labels(size), labels=wanted, weights=weights)
    counts = StepCounts(packs=1, sequences=sequences, tokens=slots, targets=rows)
    return PackedBatch(
        tokens=labels(slots),
        position_ids=labels(slots),
        token_type_ids=labels(slots),
        cu_seqlens=torch.empty(2, dtype=torch.int32),
        max_sequence_length=1,
        row_slots=slots,
        position_rows=1,
        targets=targets,
        step_counts=counts,
        local_counts=counts,
        sequence_ids=labels(sequences),
        source_tokens=(slots,),
        squared_lengths=slots,
        pairs_within={},
        cost=0.0,
        order_hash=0,
    )


def _losses(result: Any) -> list[Tensor]:
    """Returns the numbers of a model's result that gradients flow from."""
    return [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _run_backward(losses: list[Tensor]) -> None:
    """Calls the engine as `torch.autograd.backward` does, which would leave the mode of substitutes before."""
    engine: Any = torch.autograd.Variable._execution_engine
    ones = tuple(torch.ones_like(loss) for loss in losses)
    engine.run_backward(tuple(losses), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def factors_of(number: int) -> Factors:
    """Returns a number of bytes or operations as a factor of the size with which it grows, or as a constant."""
    found = np.zeros(len(AXES), dtype=np.int64)
    for axis, size in enumerate(_SIZES, start=1):
        if number % size == 0:
            found[axis] = number // size
            return found
    found[0] = number
    return found


@dataclass(eq=False)
class _Recorder:
    """Notes what the two modes see."""

    model: Model
    vocabulary_size: int
    attention: dict[tuple[bool, int | None], int] = field(default_factory=dict)
    moments: dict[Phase, list[Factors]] = field(default_factory=dict)
    loss_moment: int = 0
    operations: Factors = field(default_factory=lambda: np.zeros(len(AXES), dtype=np.int64))
    """Operations of products outside attention."""
    phase: Phase = "forward"
    in_loss: bool = False

    def __post_init__(self) -> None:
        self.parameters = {id(parameter.untyped_storage()) for parameter in self.model.parameters()}
        self.output_shape = (self.vocabulary_size, self.model.token_embedding.embedding_dim)
        self.live: Factors = np.zeros((len(LIVE), len(AXES)), dtype=np.int64)
        self._kinds: Any = WeakIdKeyDictionary()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the phases of the passes."""
        blocks = tuple(self.model.blocks)
        layers = {id(block) for block in blocks}

        def enter(phase: Phase) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                self.phase = phase

            return hook

        def before(module: nn.Module, arguments: Any) -> None:
            if self.phase == "forward" and blocks:
                if module is blocks[0]:
                    arguments[0].register_hook(enter("embedding"))
                if module is blocks[-1]:
                    self.phase = "loss"

        def after(module: nn.Module, _: Any, result: Any) -> None:
            if self.phase in ("forward", "loss") and id(module) in layers:
                is_last, is_first = module is blocks[-1], module is blocks[0]
                result.register_hook(enter("last block" if is_last else "first block" if is_first else "between"))

        handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        for parameter in self.model.parameters():
            hooked: Any = parameter  # the method has no annotations
            handles.append(hooked.register_post_accumulate_grad_hook(self._completed))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def hold(self, tensor: Tensor, kind: int) -> None:
        """Counts the storage of a new tensor as alive."""
        storage = tensor.untyped_storage()
        if storage in self._kinds or id(storage) in self.parameters:
            return
        held = [kind, factors_of(storage.nbytes())]
        self._kinds[storage] = held
        self.live[kind] += held[1]
        weakref.finalize(storage, self._release, held).atexit = False

    def _release(self, held: list[Any]) -> None:
        self.live[held[0]] -= held[1]

    def count_gradient(self, parameter: Tensor) -> None:
        """Counts what has become the gradient of a parameter as one."""
        assert parameter.grad is not None
        held = self._kinds.get(parameter.grad.untyped_storage())
        if held is not None and held[0] != _GRADIENTS:
            self.live[held[0]] -= held[1]
            held[0] = _GRADIENTS
            self.live[_GRADIENTS] += held[1]

    def _completed(self, parameter: Tensor) -> None:
        self.count_gradient(parameter)
        self.live[_ARRIVED, 0] += FP32_BYTES * parameter.numel()
        self.note()

    def note(self, buffers: int = 0) -> None:
        """Records what is alive now, in addition to buffers that a kernel takes for itself."""
        found = self.live.copy()
        found[_ACTIVATIONS] += factors_of(buffers)
        self.moments.setdefault(self.phase, []).append(found)

    def kind_of(self, operator: Any, arguments: Sequence[Any], result: Tensor) -> int:
        """Returns which of `LIVE` a new tensor belongs to."""
        if self.in_loss or tuple(result.shape) == self.output_shape:
            return _HEAD
        if operator.overloadpacket is aten._to_copy and id(arguments[0].untyped_storage()) in self.parameters:
            return _CAST_WEIGHTS
        return _ACTIVATIONS


class _Substitutes(TorchFunctionMode):
    """Replaces operators of the CPU by CUDA's, and attention and the loss by single operators."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = _SUBSTITUTES.get(func)
        return func(*args, **kwargs) if substitute is None else substitute(self.recorder, *args, **kwargs)


def _dropped(_: _Recorder, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's dropout keeps a flag of a byte for each number, where the CPU's keeps factors."""
    return torch.native_dropout(values, p, training)[0] if training and p > 0.0 else values


def _layer_norm(
    _: _Recorder, values: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Autocast on CUDA computes norms in FP32."""
    wide = values.float() if torch.is_autocast_enabled("cpu") else values
    return torch.layer_norm(wide, list(shape), weight, bias, eps)


def _rms_norm(
    recorder: _Recorder, values: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Tensor:
    """CUDA has a kernel that keeps what a LayerNorm without bias keeps, where the CPU has several."""
    return _layer_norm(recorder, values, shape, weight, None, eps or 0.0)


def _attend(
    recorder: _Recorder, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, window: int | None, **_: Any
) -> Tensor:
    kind = segments.causal, window
    products = attention_products(heads=q.shape[1], head_dim=q.shape[2])
    recorder.attention[kind] = recorder.attention.get(kind, 0) + products
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (one.to(torch.bfloat16) for one in (q, k, v))
    return _Attention.apply(q, k, v, recorder)  # type: ignore[no-untyped-call]


def _loss(
    recorder: _Recorder, hidden: Tensor, weight: Tensor, labels: Tensor, _: Tensor, *, bias: Any = None, **__: Any
) -> tuple[Tensor, Tensor]:
    recorder.operations[AXES.index("head_slots")] += 2 * weight.numel()
    return _Loss.apply(hidden, weight, bias, recorder)  # type: ignore[no-untyped-call]


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropped,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    packed_attention: _attend,
    linear_cross_entropy: _loss,
}


class _Attention(torch.autograd.Function):
    """Keeps what a kernel keeps: queries, keys, values, the result and the logarithms of the sums."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, recorder: _Recorder) -> Tensor:
        result = torch.empty_like(q)
        logarithms = q.new_empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, result, logarithms)
        ctx.recorder = recorder
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors  # once: recomputed tensors can be taken but once
        gradients = [torch.empty_like(one) for one in (q, k, v)]
        slots, heads, head_dim = q.shape
        buffers = attention_buffers(
            slots=slots,
            heads=heads,
            key_value_heads=k.shape[1],
            head_dim=head_dim,
            number_bytes=q.element_size(),
        )
        ctx.recorder.note(buffers)
        return *gradients, None


class _Loss(torch.autograd.Function):
    """Holds what `linear_cross_entropy` holds: gradients of its forward pass, which its backward pass scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, recorder: _Recorder
    ) -> tuple[Tensor, Tensor]:
        recorder.in_loss = True
        gradients = [None if one is None else torch.empty_like(one) for one in (hidden, weight, bias)]
        ctx.save_for_backward(*gradients)
        ctx.recorder = recorder
        loss, correct = hidden.new_empty(()), torch.empty((), dtype=torch.int64)
        ctx.mark_non_differentiable(correct)
        recorder.loss_moment = len(recorder.moments.get(recorder.phase, ()))
        recorder.note()
        recorder.in_loss = False
        return loss, correct

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        ctx.recorder.in_loss = True
        scaled = [None if one is None else one * loss_gradient for one in ctx.saved_tensors]
        ctx.recorder.in_loss = False
        return *scaled, None


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is alive after each operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = operator(*arguments, **named)
        if not isinstance(operator, OpOverload) or operator.is_view or operator.namespace in ("prim", "profiler"):
            return result
        recorder = self.recorder
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                recorder.hold(leaf, recorder.kind_of(operator, arguments, leaf))
        recorder.note()
        return result


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of products outside attention."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = operator(*arguments, **named)
        formula = flop_registry.get(operator.overloadpacket) if isinstance(operator, OpOverload) else None
        if formula is not None:
            self.recorder.operations += factors_of(formula(*arguments, **named, out_val=result))
        return result


def at_two_depths(
    config: TransformerConfig, count: Callable[[TransformerConfig], CountT], *, periods: int
) -> tuple[CountT, CountT, int]:
    """Returns what is counted of two models with few layers, and how often their difference makes the whole model.

    The first has at least so many periods of the pattern of layers, the second a period more, and the model as many
    periods more than the first, or less, as the last result says.
    """
    windows = config.attention_windows
    period = next(
        (length for length in range(1, len(windows)) if windows[length:] == windows[:-length]), max(1, len(windows))
    )
    few = periods * period + len(windows) % period
    first, second = (count(config.model_copy(update={"layers": layers})) for layers in (few, few + period))
    return first, second, (config.shape["layers"] - few) // period
