"""Compiles a model's parts by torch.compile, or says before the first step why it cannot."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler

from evenpack.engine.activity import begin_own_work, end_own_work
from evenpack.engine.config import TrainingSection
from evenpack.errors import ConfigError
from evenpack.kernels import capabilities
from evenpack.models.common.transformer import PackedTransformer

log = logging.getLogger(__name__)


def compile_if_asked(model: nn.Module, training: TrainingSection, device_type: str) -> None:
    """Compiles the blocks and the loss of a family's model, in place, if the run file says so.

    A layout whose batches differ in size gets a warning, because its code is more general.

    Raises: ConfigError if nothing on this machine compiles for the device.
    """
    if not training.compile:
        return
    reason = why_not_compiled(device_type)
    if reason is not None:
        raise ConfigError(f"training.compile is true, and {reason}, or set training.compile=false")
    if training.has_varying_slots:
        log.warning(
            "training.compile: with layout %s and batching %s micro-batches differ in their number of slots, so the "
            "code is made for any number; that of layout packed is for exactly one",
            training.layout,
            training.batching,
        )
    assert isinstance(model, PackedTransformer), "the model of a family"
    model.compile_parts(varying_slots=training.has_varying_slots)


@contextmanager
def compiling_as_own_work() -> Iterator[None]:
    """Marks each compilation within the block as work without the other ranks, also that of an attention kernel.

    A compilation begins within a step, where nothing else says so. It takes processor time of this process, or of the
    compilers that it starts.
    """

    def begin(_: CallbackArgs) -> None:
        begin_own_work("compiling")

    def end(_: CallbackArgs) -> None:
        end_own_work("compiling")

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() removes both
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)


def why_not_compiled(device_type: str) -> str | None:
    """Returns the reason why torch.compile cannot make code for a device here, with the remedy; None if it can."""
    if device_type == "cuda":
        return (
            None if capabilities.has_triton() else "Triton, which compiles for GPUs, is not installed: install triton"
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile finds no C++ compiler: install g++, or name another one in CXX"
    return None
