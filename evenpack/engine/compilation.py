"""Compiles a model's parts by torch.compile, or says before the first step why it cannot."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters

from evenpack.engine.activity import doing
from evenpack.engine.config import RunConfig
from evenpack.engine.resolving.attention_choice import attention_request
from evenpack.errors import ConfigError, RunError
from evenpack.kernels import capabilities
from evenpack.models.common.transformer import PackedTransformer

log = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "triton")
"""Packages whose errors say that code could not be made."""

_LINES_OF_CAUSE = 3

_MOST_VARIANTS = 64
"""Variants of one function before torch.compile gives it up; its own limit is 8. ModernBERT's blocks have six: three
kinds, in training and in evaluation."""

_REMINDER_STEPS = 100


class Compilation:
    """Says what torch.compile could not do for a run's model, and how to train without it.

    Code is made in the first steps that call it, so this is where it fails.
    """

    def __init__(self, *, is_asked: bool, warns_of_cuts: bool) -> None:
        """Watches a run.

        Args:
            is_asked: whether the run file compiles; else nothing here has an effect.
            warns_of_cuts: whether a graph that is cut is worth a warning.
        """
        self.is_asked = is_asked
        self._warns_of_cuts = warns_of_cuts
        self._known = set(counters["graph_break"])
        self._given_up_before = _given_up()
        self._updates = 0

    @property
    def left_eager(self) -> int | None:
        """Functions that torch.compile has given up, which run as they are written; None if nothing is compiled."""
        return _given_up() - self._given_up_before if self.is_asked else None

    def count_update(self) -> None:
        """Counts an update of the weights; from the first one on, a function that is given up no longer ends the run.

        A warning is repeated as long as there are such functions.
        """
        if self.left_eager and self._updates % _REMINDER_STEPS == 0:
            log.warning("%s", self._slower())
        self._updates += 1

    def _slower(self) -> str:
        reason = str(next(reversed(counters["unimplemented"]))).partition("\n  Hint")[0]
        return (
            f"training.compile: torch.compile has given up {self.left_eager} functions, which run uncompiled and "
            f"slower: {' '.join(reason.split())}"
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explains a compilation that fails within the block, and warns once for each reason that cuts a graph.

        Raises: RunError with the way back; before the first update also for a function that is given up, where torch
        would run it uncompiled to the end.
        """
        given_up = self.left_eager
        try:
            yield
        except Exception as error:
            if not self.is_asked or not type(error).__module__.startswith(_COMPILERS):
                raise
            cause = getattr(error, "inner_exception", error)
            lines = [line.strip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
            raise RunError(
                "training.compile is true, and torch.compile cannot make code for this model: "
                f"{' '.join(lines[:_LINES_OF_CAUSE])}\n"
                "Set training.compile=false to train without it; checkpoints stay valid"
            ) from error
        if self.left_eager != given_up:
            if not self._updates:
                raise RunError(
                    f"{self._slower()}\nSet training.compile=false to train without it; checkpoints stay valid"
                )
            log.warning("%s", self._slower())
        if not self._warns_of_cuts:
            return
        for reason in counters["graph_break"].keys() - self._known:
            self._known.add(reason)
            log.warning(
                "training.compile: a graph is cut, so less is fused: %s; training.compile=false trains without it",
                reason.partition("\n")[0],
            )


def _given_up() -> int:
    """Returns how many functions of this process torch.compile has given up."""
    return sum(counters["unimplemented"].values())


def compile_if_asked(model: nn.Module, config: RunConfig, device_type: str) -> Compilation:
    """Compiles the blocks and the loss of a family's model, in place, if the run file says so.

    A layout whose batches differ in size gets a warning, because its code is more general. So does attention on a GPU
    that is left to Python, because it cuts each block into several graphs.

    Raises: ConfigError if nothing on this machine compiles for the device.
    """
    training = config.training
    if not training.compile:
        return Compilation(is_asked=False, warns_of_cuts=False)
    reason = why_not_compiled(device_type)
    if reason is not None:
        raise ConfigError(f"training.compile is true, and {reason}, or set training.compile=false")
    if training.has_varying_slots:
        log.warning(
            "training.compile: with layout %s and batching %s micro-batches differ in their number of slots, so the "
            "code is made for any number; with layout packed it is made for exactly one",
            training.layout,
            training.batching,
        )
    request = attention_request(config.model, training.precision, device_type)
    backend = capabilities.resolve_backend(config.attention.backend, request)
    is_cut = backend in capabilities.LEFT_TO_PYTHON
    if is_cut and device_type == "cuda":
        log.warning(
            "training.compile: attention by %s is left to Python, which cuts each block into several graphs; varlen, "
            "flash and flash4 are in the graph. Choose one by attention.backend, or set training.compile=false",
            backend,
        )
    assert isinstance(model, PackedTransformer), "the model of a family"
    torch._dynamo.config.recompile_limit = max(_MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    model.compile_parts(varying_slots=training.has_varying_slots)
    return Compilation(is_asked=True, warns_of_cuts=not is_cut)


@contextmanager
def announced_compilations() -> Iterator[None]:
    """Announces each compilation within the block, also of an attention kernel, as a black box: it does not tick.

    A compilation begins within a step, where nothing else says so.
    """

    def begin(_: CallbackArgs) -> None:
        doing.begin_black_box("compiling")

    def end(_: CallbackArgs) -> None:
        doing.end_black_box("compiling")

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
