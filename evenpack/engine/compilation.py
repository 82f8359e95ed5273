"""Compiles a model's parts by torch.compile, and says what it could not do."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters

from evenpack.engine.activity import doing
from evenpack.engine.config import RunConfig
from evenpack.errors import RunError
from evenpack.models.common.transformer import PackedTransformer

log = logging.getLogger(__name__)

_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "triton")
"""Packages whose errors say that code could not be made."""

_LINES_OF_CAUSE = 3

_MOST_VARIANTS = 64
"""Variants of one function before torch.compile gives it up; its own limit is 8. ModernBERT's blocks have six: three
kinds, in training and in evaluation."""


class Compilation:
    """Says what torch.compile could not do for a run's model, and how to train without it.

    Code is made in the first steps that call it, so this is where it fails.
    """

    def __init__(self, *, is_asked: bool) -> None:
        """Watches a run. `is_asked`: whether the run file compiles; else nothing here has an effect."""
        self.is_asked = is_asked
        self._given_up_before = _given_up()
        self._has_updated = False

    @property
    def left_eager(self) -> int | None:
        """Functions that torch.compile has given up, which run as they are written; None if nothing is compiled."""
        return _given_up() - self._given_up_before if self.is_asked else None

    def note_update(self) -> None:
        """Notes an update of the weights; from the first one on, a function that is given up no longer ends the run."""
        self._has_updated = True

    def _slower(self) -> str:
        reason = str(next(reversed(counters["unimplemented"]))).partition("\n  Hint")[0]
        return (
            f"training.compile: torch.compile has given up {self.left_eager} functions, which run uncompiled and "
            f"slower: {' '.join(reason.split())}"
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explains a compilation that fails within the block.

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
            if not self._has_updated:
                raise RunError(
                    f"{self._slower()}\nSet training.compile=false to train without it; checkpoints stay valid"
                )
            log.warning("%s", self._slower())


def _given_up() -> int:
    """Returns how many functions of this process torch.compile has given up."""
    return sum(counters["unimplemented"].values())


def compile_if_asked(model: nn.Module, config: RunConfig) -> Compilation:
    """Compiles the blocks and the loss of a family's model, in place, if the run file says so."""
    training = config.training
    if training.compile:
        assert isinstance(model, PackedTransformer), "the model of a family"
        torch._dynamo.config.recompile_limit = max(_MOST_VARIANTS, torch._dynamo.config.recompile_limit)
        model.compile_parts(varying_slots=training.has_varying_slots)
    return Compilation(is_asked=training.compile)


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
