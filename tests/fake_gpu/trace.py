"""Whole optimizer steps on fake tensors of `cuda:0`, through the engine and DeepSpeed as they are.

    RunConfig, micro-batches on the CPU  ->  trace_steps  ->  StepTrace

The process must have called `pretend_cuda` before it imported torch.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from evenpack.batch import PackedBatch
from evenpack.engine.config import RunConfig
from evenpack.engine.engine import LocalStep, Phase, TrainingEngine
from evenpack.engine.world.distributed import World, quiet_deepspeed
from evenpack.errors import EvenpackError
from evenpack.kernels.capabilities import FUSED
from evenpack.kernels.sdpa import plan_groups
from evenpack.models.build import Model, new_model
from evenpack.models.common.loss_sums import exact_denominators
from fake_gpu.attention_operators import provide_flash_attn
from fake_gpu.counting import flop_formulas, is_attention
from fake_gpu.flex_operator import provide_flex_attention
from fake_gpu.memory import MemoryMeter
from fake_gpu.watch import Fault, Watch

DEVICE = torch.device("cuda:0")

_PRODUCT_DTYPES = {"fp32": torch.float32, "bf16_autocast": torch.bfloat16}
"""Types of the factors of matrix products by `training.precision`."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one step would do on a GPU, once the optimizer has its state."""

    faults: tuple[Fault, ...]
    expected_waits: Mapping[str, int]
    """Number of waits in the step by each function that may wait."""
    product_flops: int
    """Operations of matrix products, forward and backward, by the formulas of `FlopCounterMode`."""
    attention_flops: int
    """Operations of attention operators over segments; 0 if attention is made of matrix products."""
    resident_bytes: int
    """Parameters, optimizer's state and what else lives between steps; gradients are freed there."""
    block_bytes: int
    """What the last but one block of the first forward pass leaves alive when the last one begins, without the weights
    that autocast has cast."""
    peak_bytes: int
    phase_bytes: Mapping[Phase, int]
    """The peak in each phase of the step, of the micro-batch that needs most."""


class StepStopped(EvenpackError):  # noqa: N818 - reads as what happened
    """The step cannot be traced to its end."""


class FakeCudaMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that never touches the device, whatever `torch.cuda.is_available` says."""

    avoid_device_init = True  # a property there


def trace_steps(
    config: RunConfig,
    micro_batches: Sequence[PackedBatch],
    *,
    vocabulary_size: int,
    max_positions: int,
    world_size: int = 1,
    expected_waits: Mapping[str, float] | None = None,
    spoil: Callable[[Model], None] | None = None,
    beside: Callable[[TrainingEngine], AbstractContextManager[Any]] | None = None,
) -> StepTrace:
    """Returns what the second of two steps does; faults are found in both, operations counted in the first.

    Args:
        micro_batches: micro-batches of one rank, on the CPU; as many as the run's step has.
        world_size: ranks that are pretended; collectives take no time and change nothing.
        expected_waits: functions (`module.function`) that may wait for the device, with the number that they read there
            where the trace does not know it.
        spoil: changes the model before its steps, to see that a fault is found.
        beside: makes a context that is entered around the second step as well.

    Raises: StepStopped if an operator cannot be traced, with the faults until then.
    """
    join_fake_ranks(world_size)
    provide_flash_attn()
    provide_flex_attention()
    provide_gpu_kernels()
    plan_groups.cache_clear()  # its masks would be fake tensors of an earlier trace
    watch = Watch(
        product_dtype=_PRODUCT_DTYPES[config.training.precision],
        wide_products=() if config.attention.backend in FUSED else ("bmm",),
        expected_waits=expected_waits,
    )
    meter = MemoryMeter()
    with FakeCudaMode() as fake, modules_move_to_new_tensors():
        with DEVICE:
            model = new_model(
                config.model,
                vocabulary_size=vocabulary_size,
                max_positions=max_positions,
                attention_backend=config.attention.backend,
                seed=config.run.seed,
            )
        if config.training.residual_dtype == "bf16":
            model.residual_dtype = torch.bfloat16
        if spoil is not None:
            spoil(model)
        engine = _engine(model, config, meter)
        batches = [faked_batch(batch, fake, watch) for batch in micro_batches]
        try:
            return _traced(engine, batches, watch, meter, beside or _nothing)
        except Exception as error:
            found = "".join(f"\n  {fault}" for fault in watch.faults) or " none"
            raise StepStopped(
                f"the step stopped: {type(error).__name__}: {error}\nfaults until then:{found}"
            ) from error


def _engine(model: Model, config: RunConfig, meter: MemoryMeter) -> TrainingEngine:
    quiet_deepspeed()
    world = World(rank=0, size=dist.get_world_size(), local_rank=0, device=DEVICE)
    with meter:
        engine = TrainingEngine(model, config, world, denominators=partial(exact_denominators, config.model.losses))
    meter.count([*model.parameters(), *model.buffers()])
    return engine


def _traced(
    engine: TrainingEngine,
    batches: list[PackedBatch],
    watch: Watch,
    meter: MemoryMeter,
    beside: Callable[[TrainingEngine], AbstractContextManager[Any]],
) -> StepTrace:
    counter = FlopCounterMode(display=False, custom_mapping=flop_formulas(partial(_lengths, watch)))
    with watch.watching(), meter, counter:  # not beside the meter's step: it keeps recomputed tensors alive
        engine.train_step(0, batches)
    watch.waits.clear()
    gc.collect()
    meter.restart()
    second = beside(engine)
    notes = _Notes(engine, meter)
    with watch.watching(), meter, second:
        local = engine.train_step(1, batches)
    _check_results(engine, local, watch)
    operations = counter.get_flop_counts()["Global"]
    attention = sum(count for packet, count in operations.items() if is_attention(packet))
    return StepTrace(
        faults=tuple(watch.faults),
        expected_waits=dict(watch.waits),
        product_flops=counter.get_total_flops() - attention,
        attention_flops=attention,
        resident_bytes=notes.resident_bytes,
        block_bytes=notes.kept_by_a_block() - _cast_bytes(engine, notes.blocks[-2]),
        peak_bytes=meter.peak_bytes,
        phase_bytes=notes.phase_bytes,
    )


class _Notes:
    """The bytes alive at moments of a step, from now on."""

    def __init__(self, engine: TrainingEngine, meter: MemoryMeter) -> None:
        self.resident_bytes = meter.current_bytes
        self.at_blocks: list[int] = []
        self.phase_bytes: dict[Phase, int] = {}
        blocks: Any = engine.model.blocks
        self.blocks = tuple(blocks)
        observer = engine.observer

        def note(phase: Phase) -> None:
            observer(phase)
            self.phase_bytes[phase] = max(self.phase_bytes.get(phase, 0), meter.recent_peak())

        engine.observer = note
        for block in self.blocks:
            block.register_forward_pre_hook(lambda *_: self.at_blocks.append(meter.current_bytes))

    def kept_by_a_block(self) -> int:
        """Returns what the last but one block of the first forward pass leaves alive when the next begins."""
        return self.at_blocks[len(self.blocks) - 1] - self.at_blocks[len(self.blocks) - 2]


def _cast_bytes(engine: TrainingEngine, block: nn.Module) -> int:
    """Returns the bytes of a block's matrices and biases that autocast has cast and keeps for the backward pass."""
    if engine.config.training.precision == "fp32" or engine.config.model.activation_checkpointing:
        return 0
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
    return sum(2 * parameter.numel() for layer in layers for parameter in layer.parameters())


def _nothing(_: TrainingEngine) -> AbstractContextManager[Any]:
    return nullcontext()


def _lengths(watch: Watch, boundaries: Tensor) -> list[int]:
    known = watch.values.of(boundaries)
    assert known is not None, "boundaries come from the batch, whose numbers the trace knows"
    with torch._C._DisableTorchDispatch():
        is_boundaries = known.dtype == torch.int32
        lengths = known.diff() if is_boundaries else torch.unique_consecutive(known, return_counts=True)[1]
        numbers: list[int] = lengths.tolist()
    return numbers


def _check_results(engine: TrainingEngine, local: LocalStep, watch: Watch) -> None:
    """Records parameters, states and results that are not on the device, or not in FP32."""
    for name, parameter in engine.model.named_parameters():
        _check(watch, f"parameter {name}", parameter, torch.float32)
    for state in engine.deepspeed.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                _check(watch, f"the optimizer's {name}", value, torch.float32)
    for name, sums in local.loss_sums.items():
        _check(watch, f"the sums of the loss {name}", sums, torch.float32)
    _check(watch, "the gradient norm", local.gradient_norm, torch.float32)
    for name, correct in local.correct.items():
        _check(watch, f"the count of correct predictions of {name}", correct, torch.int64)


def _check(watch: Watch, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.device != DEVICE:
        watch.faults.append(Fault(kind="device", operator=name, place="the step", problem=f"it is on {tensor.device}"))
    if tensor.dtype != dtype:
        watch.faults.append(Fault(kind="dtype", operator=name, place="the step", problem=f"it is {tensor.dtype}"))


def faked_batch(batch: PackedBatch, fake: FakeTensorMode, watch: Watch) -> PackedBatch:
    """Returns the batch as fake CPU tensors, whose numbers the trace knows where they are few."""

    def faked(tensor: Tensor) -> Tensor:
        stand_in: Tensor = fake.from_tensor(tensor)
        watch.values.learn(stand_in, tensor)
        return stand_in

    return batch.with_tensors(faked)


def join_fake_ranks(size: int) -> None:
    """Makes this process rank 0 of a process group whose other ranks do not exist; DeepSpeed keeps it to the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        os.environ.update(RANK="0", WORLD_SIZE=str(size), LOCAL_RANK="0")  # DeepSpeed asks for a launcher's environment
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    elif dist.get_world_size() != size:
        raise EvenpackError(f"this process has traced {dist.get_world_size()} ranks and cannot trace {size} as well")


@contextmanager
def modules_move_to_new_tensors() -> Iterator[None]:
    """Lets modules move to another device by new parameters: torch would swap tensors, which fake ones refuse."""
    original = nn.Module._apply
    moved: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            apply(child, change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    new = change(parameter)
                if new is not parameter:  # a parameter that two modules share stays one
                    pair = (parameter, nn.Parameter(new, parameter.requires_grad))
                    module._parameters[name] = moved.setdefault(id(parameter), pair)[1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


_KERNELS = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")

_library: list[Any] = []
"""PyTorch forgets kernels with the library that holds them."""


def provide_gpu_kernels() -> None:
    """Registers kernels for operators that are one on a GPU and several in PyTorch's CPU build, once in a process.

    They are then traced as on a GPU, where they keep and hold less. A fake mode never calls the kernels: they only make
    PyTorch take the operators as they are.
    """
    if _library:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _KERNELS:
        library.impl(name, _never_called(name), "CUDA")
    _library.append(library)


def _never_called(name: str) -> Callable[..., Any]:
    def kernel(*_: Any) -> Any:
        raise AssertionError(f"{name} was computed, though nothing on a fake device is")

    return kernel
