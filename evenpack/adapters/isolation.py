"""Proves on a user's model, before the first step, that no document of a pack sees another.

    documents alone       the model by itself, as it counts positions
      -> packs            of the same documents, in the adapter's own inputs; with one replaced or cut, then the others
      -> attempts         without a mask, then with a block mask; the first that is isolated is taken
      -> real documents   of the first micro-batch, in it and alone, if there is a loader
      -> `ModelInputs`    or a `ConfigError` that names the model, what leaked and what would do

The model is in the mode in which it is trained, with dropout at 0. Weights, buffers, gradients, random state and mode
are as before. Every rank runs the same forward passes, as FSDP and ZeRO 3
need, and takes the same decision.
"""

import contextlib
import inspect
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from evenpack.adapters.first_step import all_gathered, require_shares
from evenpack.adapters.huggingface import Mask, ModelInputs, attention_of, segment_starts, text_config
from evenpack.batch import ChosenTargets, PackedBatch, SlotTargets
from evenpack.data.loader import Loader
from evenpack.differences import flatten
from evenpack.errors import ConfigError
from evenpack.extras import missing_host
from evenpack.losses import MASKED_TOKEN, NEXT_TOKEN, StepCounts

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from evenpack.kernels.isolation import IsolationResult, Verdict, relative_changes
except ModuleNotFoundError as error:
    raise missing_host(error, "evenpack.adapters.isolation") from error

log = logging.getLogger(__name__)

CHANGED_EPSILONS, CHANGED_EPSILONS_OF_16_BITS = 16.0, 1 / 32
"""Tolerance for changes when another document is replaced, in epsilons of the dtype; FP32: 1.9e-6.

It is more than `kernels.isolation` grants one kernel. An expert multiplies as many rows as it has tokens, which other
documents change, and products of other shapes round otherwise: states of a tiny Mixtral change by 4.1 epsilons of FP32.
Without experts nothing changes by any bit, and in 16 bits a larger tolerance would hide leaks.
"""

ALONE_EPSILONS, ALONE_EPSILONS_OF_16_BITS = 1000.0, 8.0
"""Tolerance between a document in a pack and alone, in epsilons: other shapes round otherwise. FP32: 1.2e-4.

Fifteen layers of a tiny Gemma 3n round to 1.8e-5; the smallest real difference in all families is 2.5e-3.
"""

_LENGTHS = (11, 17, 7)
"""Tokens of the three documents, of which the middle one is replaced, and then the others."""

_PADDING = 5
_BEYOND = 9
"""Slots by which the middle document reaches beyond each window of the configuration."""

_FIRST_TOKENS, _DISTINCT = 4096, 16
"""Documents are drawn from the last few of these, or of the vocabulary: special tokens come first.

Tokens repeat, as in text: where a model takes the most-seen keys of a row, ties show.
"""

_ROWS = 1024
"""Slots whose logits are in FP32 at once."""

_COLUMNS = 256
"""Logits that are compared of each token; its loss is of all."""

_SPAN = re.compile("window|chunk|local_attention|block_size|max_position|n_positions|max_seq_len|topk|floor")
"""Names of numbers in configurations at which what a token sees, or how positions are counted, may change."""

_ALONG_THE_ROW = re.compile("chunk|block_size|floor")
"""Those that a model may count along the row, whatever the length of documents."""

_BLOCKS = 12
"""Blocks of a row from which on a model attends to some of them alone: BigBird does with eleven, and not with fewer."""

_RANDOM = re.compile("drop|jitter")
"""Names of numbers of modules and configurations that make a forward pass random."""

_KEPT = 1 << 24
"""Elements up to which a tensor in a plain attribute is copied, and put back where a forward pass writes into it."""

_PLAIN = (bool, int, float, str, type(None), Tensor)
"""What a forward pass may leave in a module, and what is put back."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of packs with one mask. Deviations are relative to the largest value of their kind."""

    mask: Mask
    verdict: Verdict | Literal["not served"]
    problem: str | None = None
    """What differs, by how much, or the model's error."""
    changed: float | None = None
    """Largest change of the other documents' logits and losses when one is replaced or cut, or of its own."""
    alone: float | None = None
    """Largest difference of logits and losses between the pack and each document alone."""
    control: float | None = None
    """The same as `changed` within a document: it must be seen, or nothing is proved."""
    loss: float | None = None
    """Difference between the model's own loss and the sum over its targets / those of the step; None: not asked."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """Whether a model keeps the sequences of packs apart, and the inputs with which it does."""

    model: str
    isolated: bool
    inputs: ModelInputs | None
    """The inputs of the isolated attempt, or of the one that leaks least; None if the model cannot take packs."""
    attempts: tuple[Attempt, ...]
    reason: str
    """What was chosen and why, or what leaked and what would do."""

    @property
    def summary(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        mask = None if self.inputs is None else self.inputs.mask
        return {"isolated": self.isolated, "mask": mask, "reason": self.reason}


def prove_isolation(model: Any, loader: Loader, *, own_loss: bool = True, allow_leaks: bool = False) -> ModelInputs:
    """Returns what makes a model's inputs of the loader's batches, after a proof that its sequences stay apart.

    For loops of one's own: all ranks call it once, before the first step, after the model was moved and wrapped.

    Args:
        own_loss: whether the loop takes the model's own loss, `model(**inputs, num_items_in_batch=targets).loss`, and
            not one of its logits, as `token_loss` of `evenpack.adapters.trainer`.
        allow_leaks: whether to train a model that is not proved to keep sequences apart; it is logged as a warning.

    Raises: ConfigError if the model is not isolated, its own loss is no share of the step's mean, it has no embedding
        of a token of the next step, or it is in evaluation mode; or if the ranks' loaders make no shares of one step.
    """
    require_shares(loader)
    found = isolation_on(model, loader[loader.step * loader.micro_batches], own_loss=own_loss)
    inputs = required(found, allow_leaks=allow_leaks, rank=loader.rank)
    for each in loader.batches_of(loader.step):
        inputs.require_embeddings(each)
    return inputs


def isolation_on(model: Any, batch: PackedBatch, *, own_loss: bool, device: torch.device | None = None) -> Isolation:
    """Returns `find_isolation` for a loader whose first micro-batch this is."""
    if not {NEXT_TOKEN.name, MASKED_TOKEN.name} & set(batch.targets):
        raise ConfigError(
            f"language models predict {NEXT_TOKEN.name} or {MASKED_TOKEN.name}, this batch has "
            f"{', '.join(batch.targets)}: give the loader documents, or evenpack.RandomMasks"
        )
    if not bare(model).training:
        raise ConfigError(
            f"{type(bare(model)).__name__} is in evaluation mode, as from_pretrained leaves it, and is proved in the "
            "mode in which it is trained: call model.train() first"
        )
    router = getattr(text_config(_config(_innermost(bare(model)))), "output_router_logits", False)
    if own_loss and router and batch.local_counts != batch.step_counts:
        raise ConfigError(
            f"{type(bare(model)).__name__} adds the router's auxiliary loss of each micro-batch whole to its own loss "
            "(config.output_router_logits=True), so a step would add it once for each: set it to False, or take "
            "own_loss=False, and a loss of the logits (docs/adapters.md)"
        )
    return find_isolation(
        model,
        causal=NEXT_TOKEN.name in batch.targets,
        max_sequence_length=batch.max_sequence_length,
        slots=batch.slots,
        own_loss=own_loss,
        device=device,
        batch=batch,
    )


def required(found: Isolation, *, allow_leaks: bool, rank: int) -> ModelInputs:
    """Returns the inputs of a proof. Raises: ConfigError for a model that leaks, unless that is allowed."""
    if found.inputs is None or not (found.isolated or allow_leaks):
        raise ConfigError(found.reason)
    if rank == 0:
        log.log(logging.INFO if found.isolated else logging.WARNING, found.reason)
    return found.inputs


def find_isolation(
    model: Any,
    *,
    causal: bool,
    max_sequence_length: int,
    slots: int | None = None,
    own_loss: bool = True,
    device: torch.device | None = None,
    batch: PackedBatch | None = None,
) -> Isolation:
    """Returns whether a model of transformers keeps sequences apart, and with which inputs; all ranks call it.

    The pack has three short documents and padding. Where a window of the configuration is shorter than a sequence may
    be, the middle document is longer than the window; where a chunk is shorter than a micro-batch, it lies across the
    chunk's border. So it is never longer than a micro-batch, and five passes over it, without gradients, are all. What
    only real data meets (special tokens, lengths that no configuration names) is left to the first micro-batch.

    Args:
        causal: whether it predicts next tokens, otherwise masked ones.
        max_sequence_length: the longest sequence of the packs.
        slots: of a micro-batch; None: four such sequences.
        own_loss: whether the model's own loss is asked too.
        device: of the inputs; None: that of the parameters.
        batch: the first micro-batch, which is run once, and four of its documents alone; None: not run.
    """
    longest, slots = max_sequence_length, slots or 4 * max_sequence_length
    subject = _Subject(bare(model), causal=causal, longest=longest, slots=slots, device=device)
    versions = [(name, one, one._version) for name, one in subject.model.named_parameters()]
    with undisturbed(subject.model):
        problem = subject.run_alone()
    changed = [name for name, one, version in versions if one._version != version]
    if changed:
        problem = f"its forward pass writes into its parameters ({changed[0]}), which the proof cannot put back: make "
        problem += "them buffers, and load the weights again"
    if batch is not None and problem is None:
        problem = _beyond_the_table(subject.inputs("none"), batch)
    problem = next((each for each in all_gathered(problem) if each is not None), None)
    if problem is not None:
        reason = f"{subject.name} cannot be proved isolated: {problem}"
        return Isolation(model=subject.name, isolated=False, inputs=None, attempts=(), reason=reason)
    attempts: list[Attempt] = []
    for mask in subject.masks:
        with undisturbed(subject.model):  # each begins again: after a short row BigBird attends to all of long ones
            here = _agreed(subject.attempt(mask, own_loss=own_loss))
        if batch is not None and here.verdict == "isolated":
            with undisturbed(subject.model):
                here = _agreed(subject.on_data(here, batch))
        attempts.append(here)
        if attempts[-1].verdict == "isolated":
            break
    served = [attempt for attempt in attempts if attempt.changed is not None]
    chosen = min(served, key=lambda one: (one.verdict != "isolated", one.changed), default=None)
    return Isolation(
        model=subject.name,
        isolated=attempts[-1].verdict == "isolated",
        inputs=None if chosen is None else subject.inputs(chosen.mask),
        attempts=tuple(attempts),
        reason=_reason(subject, attempts),
    )


def _agreed(here: Attempt) -> Attempt:
    """Returns the attempt of a rank on which it failed, if there is one."""
    return next((each for each in all_gathered(here) if each.verdict != "isolated"), here)


def _beyond_the_table(inputs: ModelInputs, batch: PackedBatch) -> str | None:
    try:
        inputs.require_embeddings(batch)
    except ConfigError as error:
        return str(error)
    return None


def first_position(model: Any) -> int:
    """Returns the position that the model gives the first token of a document alone, seen by running one."""
    subject = _Subject(bare(model), causal=True, longest=max(_LENGTHS), slots=sum(_LENGTHS))
    with undisturbed(subject.model):
        subject.run_alone()
    return subject.first_position


def bare(model: Any) -> Any:
    """Returns the module within torch.compile, DDP and DeepSpeed's engine. FSDP must run its own forward pass."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if inner is None and kinds & {"DistributedDataParallel", "DeepSpeedEngine"}:
            inner = model.module
        if inner is None:
            return model
        model = inner


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In its mode, without dropout, gradients and compiled code; afterwards everything is as before."""
    modules = list(model.modules())
    holders = {
        id(one): one
        for module in modules
        if not type(module).__module__.startswith("torch.distributed")  # FSDP 1 keeps there what it begins once
        for one in (module, getattr(module, "config", None))
        if hasattr(one, "__dict__")
    }
    plain = [(vars(one), _plain_values(vars(one))) for one in holders.values()]
    registers: list[tuple[Any, dict[str, Any]]] = [
        (held, dict(held)) for module in modules for held in (module._buffers, module._modules)
    ]
    written = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    written += [one for _, values in plain for one in values.values() if isinstance(one, Tensor) and _is_own(one)]
    contents = [(one, one.clone()) for one in written]
    device = _device(model)
    python, numpy = random.getstate(), np.random.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:  # nothing is compiled otherwise, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for values, _ in plain:
                for name, value in values.items():
                    if isinstance(value, float) and _RANDOM.search(name):
                        values[name] = 0.0
            for module in modules:
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
            yield
        finally:
            for values, before in plain:
                for name in _plain_values(values).keys() - before.keys():
                    del values[name]
                values.update(before)
            for held, named in registers:
                held.clear()
                held.update(named)
            for one, content in contents:
                if not torch.equal(one, content):
                    one.copy_(content)
            random.setstate(python)
            np.random.set_state(numpy)


def _is_own(tensor: Tensor) -> bool:
    """Returns whether a tensor in an attribute has memory: FSDP 1 keeps views of weights there, which it frees."""
    return tensor.numel() <= _KEPT and tensor.untyped_storage().nbytes() > 0


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a forward pass may change of an object, without what DeepSpeed keeps in it."""
    return {name: one for name, one in values.items() if isinstance(one, _PLAIN) and not name.startswith("ds_")}


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class _Subject:
    """A model, its documents, and what it returned for them."""

    def __init__(
        self, model: Any, *, causal: bool, longest: int, slots: int, device: torch.device | None = None
    ) -> None:
        self.model, self.causal, self.longest, self.slots = model, causal, longest, slots
        self.core, self.device = _innermost(model), device or _device(model)
        self.name = type(self.core).__name__
        self.config = _config(self.core)
        self.first_position = 0
        self.positions: int | None = None
        self.dtype = next((one.dtype for one in model.parameters()), torch.float32)
        rows = getattr(_table(self.core), "num_embeddings", None)
        self.table = rows if isinstance(rows, int) else None
        parameters = inspect.signature(type(self.core).forward).parameters
        is_open = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self.takes = None if is_open else frozenset(parameters)
        self.plain = {"use_cache": False} if causal and (is_open or "use_cache" in parameters) else {}
        self.lengths = _lengths(_spans(self.config), longest, slots)
        self.has_experts = any("expert" in name for name in _values(self.config))
        self.tokens, self.others = (self._drawn(sum(self.lengths) + _PADDING, seed) for seed in range(2))
        self.alone: list[tuple[Tensor, Tensor]] = []

    @property
    def masks(self) -> list[Mask]:
        is_masked = "flash" not in attention_of(self.config) and "flex" not in attention_of(self.config)
        return ["none", "block"] if is_masked and (not self.takes or "attention_mask" in self.takes) else ["none"]

    def inputs(self, mask: Mask) -> ModelInputs:
        return ModelInputs(
            config=self.config,
            causal=self.causal,
            mask=mask,
            first_position=self.first_position,
            dtype=self.dtype,
            embeddings=self.table,
            takes=self.takes,
        )

    def run_alone(self) -> str | None:
        """Runs the last three documents by themselves, and sees what the model counts and computes in.

        Returns: why it cannot be asked, in words.
        """
        if "flex" in attention_of(self.config) and self.device.type == "cpu":
            return "flex_attention has no backward pass on a CPU: take attn_implementation='sdpa'"
        problem = None
        try:
            with _watched(self):
                for span in self._spans[-4:-1]:
                    tokens = self.tokens[span]
                    self.alone.append(self._run({"input_ids": tokens[None], **self.plain}, tokens, [0, len(tokens)]))
        except Exception as error:
            problem = f"a document alone fails with {_in_a_line(error)}"
        scale = _spans(self.config).get("floor_scale", self.slots)
        if scale < self.slots and torch.finfo(self.dtype).bits == 16:
            return (
                f"from slot {scale} of a micro-batch on it scales queries by their place in the row (floor_scale), "
                f"which 16 bits hide from a proof: give micro-batches of at most {scale} slots"
            )
        needed = self.first_position + self.longest
        if self.positions is not None and needed > self.positions:
            return (
                f"its table of positions has {self.positions} rows, of which the first is number "
                f"{self.first_position}, and sequences have up to {self.longest} tokens: give the loader a shorter "
                "pack_length, or the model more positions"
            )
        return problem

    def attempt(self, mask: Mask, *, own_loss: bool) -> Attempt:
        """Returns what becomes of packs with this mask."""
        inputs = self.inputs(mask)
        try:
            middle = self._spans[-3]
            others = [span for span in self._spans if span != middle]
            cut = self._packed(inputs, self.tokens, self._cut)  # first, lest borders are kept by shape
            before = self._packed(inputs, self.tokens)
            after = self._packed(inputs, self._replaced(self.tokens, [middle]))
            around = self._packed(inputs, self._replaced(self.tokens, others))
            pairs = ((cut, others), (after, others), (around, [middle]))
            changed = float(np.max([self._difference(before, one, spans) for one, spans in pairs]))  # NaN, if one is
            documents = zip(self._spans[-4:-1], self.alone, strict=True)
            away = [
                self._difference(expected, [one[span] for one in before], [slice(None)]) for span, expected in documents
            ]
            alone = float(np.max(away))
            loss = self._own_loss(inputs, before[1]) if own_loss else None
            control = self._control
        except Exception as error:
            return Attempt(mask=mask, verdict="not served", problem=f"it fails with {_in_a_line(error)}")
        epsilon, is_short = self._epsilon, torch.finfo(self.dtype).bits == 16
        tolerance = epsilon * (CHANGED_EPSILONS_OF_16_BITS if is_short else CHANGED_EPSILONS)
        result = IsolationResult(max_deviation=changed, control_deviation=control, tolerance=tolerance)
        verdict, problem = result.verdict, None
        if verdict == "leaks":
            problem = f"the other documents' logits and losses change by {changed:.1e} of the largest when one is "
            problem += f"replaced or cut (tolerance {tolerance:.1e})"
        elif verdict == "cannot tell":
            problem = f"tokens are not seen to reach each other within a document either ({control:.1e})"
        elif not alone <= self._apart:
            verdict, problem = "leaks", f"logits and losses are {alone:.1e} of the largest away from those of each "
            problem += f"document alone (tolerance {self._apart:.1e})"
        elif loss is not None and not loss <= min(epsilon * (8.0 if is_short else 100.0), _LOSS_TOLERANCE):
            return Attempt(mask=mask, verdict="not served", problem=_NO_SHARE.format(loss), loss=loss)
        return Attempt(
            mask=mask, verdict=verdict, problem=problem, changed=changed, alone=alone, control=control, loss=loss
        )

    def on_data(self, attempt: Attempt, batch: PackedBatch) -> Attempt:
        """Returns the attempt, or a leak if four documents of this micro-batch are not in it what they are alone."""
        try:
            batch = batch.to(self.device)
            given = self.inputs(attempt.mask)(batch)
            found = self._run(given, batch.tokens, segment_starts(batch).tolist())
            alone: list[Any] = []
            spans = _documents(batch)
            for span in spans:
                one = {"input_ids": batch.tokens[None, span], **self.plain}
                if self.first_position:  # such a model would not count a document's tokens that are padding's
                    one["position_ids"] = batch.position_ids[None, span] + self.first_position
                alone.append(self._run(one, batch.tokens[span], [0, span.stop - span.start]))
            here: list[Any] = [[kind[span] for kind in found] for span in spans]
            if self._may_flip:  # of a short document, the few tokens that may are more than a tenth
                alone, here = ([[torch.cat(kind) for kind in zip(*each, strict=True)]] for each in (alone, here))
            pairs = zip(alone, here, strict=True)
            largest = float(np.max([self._difference(*pair, [slice(None)]) for pair in pairs]))  # NaN, if one is
        except Exception as error:
            return Attempt(
                mask=attempt.mask, verdict="not served", problem=f"the first micro-batch fails with {_in_a_line(error)}"
            )
        if largest <= self._apart:
            return attempt
        problem = f"logits and losses of documents of the first micro-batch are {largest:.1e} of the largest away "
        problem += f"from those of each document alone (tolerance {self._apart:.1e})"
        return replace(attempt, verdict="leaks", problem=problem, alone=largest)

    @property
    def _may_flip(self) -> bool:
        return self.has_experts and torch.finfo(self.dtype).bits == 16

    @property
    def _epsilon(self) -> float:
        """The one of the dtype; in FP64 that of FP32, in which losses are taken here and by transformers."""
        return max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)

    @property
    def _apart(self) -> float:
        is_short = torch.finfo(self.dtype).bits == 16
        return self._epsilon * (ALONE_EPSILONS_OF_16_BITS if is_short else ALONE_EPSILONS)

    @property
    def _cut(self) -> list[int]:
        """The lengths, with two documents in place of the middle one."""
        *before, middle, last = self.lengths
        return [*before, middle // 2, middle - middle // 2, last]

    @cached_property
    def _control(self) -> float:
        """The change of the first document alone where a part of it is replaced, from which nothing keeps the rest."""
        first = self._spans[-4]
        tokens = self.tokens[first]
        middle = slice(len(tokens) // 4, max(len(tokens) // 2, 1))
        given = tokens.clone()
        given[middle] = self.others[first][middle]
        after = self._run({"input_ids": given[None], **self.plain}, tokens, [0, len(tokens)])  # with equal labels
        rest = [slice(middle.stop, len(tokens)), slice(0, middle.start)][: 2 - self.causal]
        return self._difference(self.alone[0], after, rest)

    def _replaced(self, tokens: Tensor, spans: Sequence[slice]) -> Tensor:
        found = tokens.clone()
        for span in spans:
            found[span] = self.others[span]
        return found

    def _packed(
        self, inputs: ModelInputs, tokens: Tensor, lengths: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        batch = self._batch(tokens, lengths)
        return self._run(inputs(batch), tokens, segment_starts(batch).tolist())

    def _run(self, given: dict[str, Any], tokens: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
        for name in ("labels", "shift_labels"):  # with labels, some kernels return no logits
            given.pop(name, None)
        return self._kept(self._logits(given), tokens, borders)

    def _own_loss(self, inputs: ModelInputs, losses: Tensor) -> float:
        batch = self._batch(self.tokens)
        given = inputs(batch)
        count = batch.step_counts.targets
        if getattr(text_config(self.config), "output_router_logits", False):
            given["output_router_logits"] = False
        output = self._output({**given, "num_items_in_batch": count})
        found = (output[0] if isinstance(output, tuple) else output["loss"]).double()
        (targets,) = batch.targets.values()
        chosen = targets.positions if isinstance(targets, ChosenTargets) else targets.weights > 0
        expected = losses[chosen].sum() / count
        return float((found - expected).abs() / expected.abs())

    def _output(self, given: Mapping[str, Any]) -> Any:
        torch.default_generator.manual_seed(0)  # of the CPU alone: other devices may be others' business
        if self.tokens.device.type == "cuda":
            torch.cuda.manual_seed(0)
        return self.model(**given)

    def _logits(self, given: Mapping[str, Any]) -> Tensor:
        output = self._output(given)
        logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
        logits = logits[0] if isinstance(logits, tuple) else logits
        slots = given["input_ids"].shape[1]
        if not isinstance(logits, Tensor) or logits.shape[:2] != (1, slots) or logits.dim() != 3:
            raise TypeError(f"expected logits [1, {slots}, vocabulary], found {getattr(logits, 'shape', type(logits))}")
        return logits[0]

    def _kept(self, logits: Tensor, tokens: Tensor, borders: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the first logits of each slot, and its loss at its own or the next token of its document, in FP32."""
        ahead = tokens.roll(-self.causal)
        if self.causal:
            ahead[[stop - 1 for stop in borders[1:]]] = tokens[list(borders[:-1])]
        parts = zip(torch.split(logits, _ROWS), torch.split(ahead, _ROWS), strict=True)
        losses = torch.cat([_losses(one.float(), labels) for one, labels in parts])
        kept = logits[:, :_COLUMNS].float()
        return torch.where(kept.abs() < _NO_LOGIT, kept, 0.0), losses.double()

    def _difference(self, before: Sequence[Tensor], after: Sequence[Tensor], spans: Sequence[slice]) -> float:
        """Returns the largest difference in any of the documents, relative to the largest value.

        With experts in 16 bits it is that of most tokens: at a near tie, rounding chooses another expert for a few. A
        median would hide what only tokens behind a window, a chunk or the most-seen keys of a document meet.
        """
        may_flip, found = self._may_flip, []
        for old, new in zip(before, after, strict=True):
            for span in spans:
                changes = relative_changes(old, new, span).double()
                found.append(changes.quantile(_MOST_TOKENS) if may_flip else changes.max())
        return float(torch.stack(found).max())

    @property
    def _spans(self) -> list[slice]:
        """The slots of the documents and of the padding, in their order."""
        return _slices([0, *accumulate(self.lengths), len(self.tokens)])

    def _drawn(self, count: int, seed: int) -> Tensor:
        """Returns tokens that the model has, without the special ones of its configuration."""
        sizes = (self.table, getattr(text_config(self.config), "vocab_size", None))
        size = min([one for one in sizes if isinstance(one, int)], default=2)  # a table may have rows beyond the logits
        values = _named(text_config(self.config)) | _named(self.config)
        special = {one for name, value in values.items() if name.endswith("_token_id") for one in np.atleast_1d(value)}
        plain = [one for one in range(min(size, _FIRST_TOKENS)) if one not in special]
        allowed = torch.tensor(plain[-_DISTINCT:] or [0])
        generator = torch.Generator().manual_seed(seed)
        return allowed[torch.randint(len(allowed), (count,), generator=generator)].to(self.device)

    def _batch(self, tokens: Tensor, arranged: Sequence[int] | None = None) -> PackedBatch:
        """Returns the documents and the padding as the loader would give them."""
        borders = [0, *accumulate(arranged or self.lengths), len(tokens)]
        lengths = torch.tensor([stop - start for start, stop in pairwise(borders)])
        positions = torch.cat([torch.arange(length) for length in lengths]).to(tokens.device)
        cu_seqlens = torch.tensor([*borders, borders[-1]], dtype=torch.int32, device=tokens.device)
        weights = torch.ones(len(tokens), device=tokens.device)
        weights[borders[-2] :] = 0
        if self.causal:
            weights[[stop - 1 for stop in borders[1:]]] = 0
            ahead = torch.where(weights > 0, tokens.roll(-1), 0)
            targets: dict[str, Any] = {NEXT_TOKEN.name: SlotTargets(labels=ahead, weights=weights)}
        else:
            chosen = torch.arange(0, borders[-2], 3, device=tokens.device)
            targets = {
                MASKED_TOKEN.name: ChosenTargets(positions=chosen, labels=tokens[chosen], weights=weights[chosen])
            }
        counts = StepCounts(packs=2, sequences=6, tokens=2 * borders[-2], targets=2 * int(weights.sum()) + 1)
        return PackedBatch(
            tokens=tokens,
            position_ids=positions,
            token_type_ids=torch.zeros_like(tokens),
            cu_seqlens=cu_seqlens,
            max_sequence_length=max(*self.lengths, _PADDING),
            row_slots=len(tokens),
            position_rows=self.longest,
            targets=targets,
            step_counts=counts,
            local_counts=counts,
            sequence_ids=torch.arange(len(lengths)),
            source_tokens=(borders[-2],),
            squared_lengths=0,
            pairs_within={},
            cost=0.0,
            order_hash=0,
        )


def _documents(batch: PackedBatch) -> list[slice]:
    """Returns the longest document with targets, the last and two between, at any number of them: ranks run as many."""
    targets: Any = next(iter(batch.targets.values()))
    used = targets.positions[targets.weights > 0] if isinstance(targets, ChosenTargets) else targets.weights.nonzero()
    slots = set(used.flatten().tolist())
    spans = _slices(segment_starts(batch).tolist())
    spans = [span for span in spans if not slots.isdisjoint(range(span.start, span.stop))] or spans
    longest = max(spans, key=lambda span: span.stop - span.start)
    return [longest, spans[-1], spans[len(spans) // 3], spans[2 * len(spans) // 3]]


def _slices(borders: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(borders)]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss at each label; where a model has more tokens than logits, at the last logit."""
    return F.cross_entropy(logits, labels.clamp(max=logits.shape[1] - 1), reduction="none")


_MOST_TOKENS = 0.9

_NO_LOGIT = 1e4
"""What models set logits to that cannot be predicted is larger."""

_NO_SHARE = (
    "its own loss is {:.1e} away from the sum over targets divided by num_items_in_batch: take own_loss=False, and "
    "token_loss of its logits (docs/adapters.md)"
)

_LOSS_TOLERANCE = 0.01
"""Between a model's own loss and that of its logits: in 16 bits some sum losses in these."""


def _innermost(model: Any) -> Any:
    """Returns the module whose forward takes the arguments: within FSDP 1 and PEFT."""
    while type(model).__name__ == "FullyShardedDataParallel":
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _config(core: Any) -> Any:
    """Returns the configuration of a model, or of the first within a wrapper that has none; None if there is none."""
    return next((one.config for one in core.modules() if getattr(one, "config", None) is not None), None)


def _table(core: Any) -> Any:
    """Returns the module that embeds tokens; None if it is not known."""
    try:
        return core.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _values(config: Any) -> dict[str, Any]:
    """Returns all values of the language model's configuration by their names."""
    return flatten(json.loads(json.dumps(_named(text_config(config)), default=str)))  # whose keys are text


def _named(config: Any) -> dict[str, Any]:
    """Returns what a configuration of transformers, a dictionary, or any object holds, by its names."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return dict(config)
    return {name: getattr(config, name, None) for name in dir(config) if not name.startswith("_")}


def _spans(config: Any) -> dict[str, int]:
    """Returns the numbers of a configuration at which attention may be cut, by their names."""
    found = {}
    for name, value in _values(config).items():
        numbers = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one > 0]
        if numbers and _SPAN.search(name):
            found[name] = max(numbers) * (_BLOCKS if "block_size" in name else 1)
    return found


def _lengths(spans: Mapping[str, int], longest: int, slots: int) -> list[int]:
    """Returns the lengths of the documents; those before the last three only fill slots."""
    windows = [span for span in spans.values() if span < longest]
    first, middle, last = _LENGTHS
    lengths = [min(one, longest) for one in (first, max(middle, max(windows, default=0) + _BEYOND), last)]
    chunks = [span for name, span in spans.items() if _ALONG_THE_ROW.search(name) and longest <= span < slots]
    fill = max(chunks, default=0) - lengths[0] - lengths[1] // 2
    if fill > 0:
        lengths = [*[longest] * (fill // longest), *([fill % longest] if fill % longest else []), *lengths]
    return lengths


@contextlib.contextmanager
def _watched(subject: _Subject) -> Iterator[None]:
    """Sees from which position a document alone is counted, and what the model computes in."""
    core = subject.core

    def see_positions(module: nn.Module, given: tuple[Any, ...]) -> None:
        ids = given[0] if given else None
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() == 0 or ids.numel() != ids.shape[-1]:
            return
        row = ids.flatten().tolist()
        if len(row) > 1 and row == list(range(row[0], row[0] + len(row))):
            subject.first_position = row[0]
            subject.positions = getattr(module, "num_embeddings", None)

    def see_dtype(_module: nn.Module, _given: Any, output: Any) -> None:
        kind = subject.tokens.device.type
        if isinstance(output, Tensor) and output.is_floating_point():
            subject.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else output.dtype

    tokens = _table(core)
    with contextlib.ExitStack() as stack:
        for module in core.modules():
            if module is tokens:
                stack.callback(module.register_forward_hook(see_dtype).remove)
            elif "Embedding" in type(module).__name__:
                stack.callback(module.register_forward_pre_hook(see_positions).remove)
        yield


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"


_NAMES = {"none": "without a mask", "block": "with a block mask"}


def _reason(subject: _Subject, attempts: Sequence[Attempt]) -> str:
    told = "; ".join(f"{_NAMES[one.mask]}, {one.problem}" for one in attempts if one.problem is not None)
    if attempts[-1].verdict == "isolated":
        chosen = f"{subject.name} keeps the sequences of a pack apart {_NAMES[attempts[-1].mask]}"
        return f"{chosen} ({told})" if told else chosen
    if all(one.loss is not None and one.changed is None for one in attempts):
        return f"{subject.name} keeps the sequences of a pack apart, and is refused for its loss: {told}"
    attention = attention_of(subject.config)
    other = "" if "block" in subject.masks else f" attn_implementation='sdpa' in place of '{attention}', or"
    return (
        f"{subject.name} is not proved to keep the sequences of a pack apart: {told}. Take{other} another model: "
        "layers with a state (Mamba, linear attention) carry it over borders, whatever the mask. allow_leaks=True "
        "trains it all the same, and is recorded"
    )
