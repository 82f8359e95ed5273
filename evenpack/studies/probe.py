"""The isolation probe for models and stacks of others: what a token of one sequence of a pack changes in another one.

    MODEL          a model of transformers, or a function that takes a batch with explicit boundaries
      -> subject   what can be asked of it: attention backend x cache x mask x training or evaluation
      -> changes   of states after each layer, of outputs and of gradients, when another sequence is replaced
      -> verdict   by a control in which all sequences are one; if nothing leaks there, the probe cannot tell

Each sequence is replaced in turn. The states of all others must stay as they were, and the gradients of their outputs
with respect to its embeddings must be zero, as in `kernels.isolation`. Boundaries are given (positions that restart,
`cu_seqlens`, a mask) and never read from tokens.
"""

import contextlib
import difflib
import importlib
import inspect
import itertools
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int32, Int64
from torch import Tensor, nn

from evenpack import console
from evenpack.adapters.huggingface import ModelInputs
from evenpack.adapters.isolation import first_position
from evenpack.console import Report
from evenpack.errors import BackendError, ConfigError
from evenpack.files import read_json
from evenpack.kernels.isolation import IsolationResult, Verdict, relative_change
from evenpack.studies.columns import Column, table_of
from evenpack.studies.tiny_copies import TOKENS, text_configuration, tiny_model

EXIT_NOT_PROVED = 1
"""Exit code unless at least one combination is isolated and none leaks or cannot be told."""

BACKENDS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
"""Attention backends, and their names in transformers."""

MASKS = ("none", "ones", "block")
"""No mask; a 2-D mask of ones, as tokenizers return it; a 4-D mask of the blocks of sequences."""

Mode = Literal["eval", "train"]

_SEQUENCE_LENGTHS = (17, 1, 9, 5)
_SEED = 0
_TOLERATED_EPSILONS = 16.0
"""Tolerance for changes, in epsilons of the dtype.

It is more than `kernels.isolation` grants one kernel. An expert multiplies as many rows as it has tokens, which other
sequences change, and products of other shapes round otherwise: states of a tiny Mixtral change by 4.1 epsilons.
"""

_ALONE_EPSILONS = 100.0
"""Tolerance between a sequence in a pack and alone, in epsilons of the dtype: other shapes round otherwise."""

_SHOWN_CHARACTERS = 250
"""Characters of others' errors."""

_NO_POSITIONS = (
    "{name} takes no position_ids, which tell a model of transformers where a sequence begins: expected a forward with "
    "them, so that only a mask can bound the sequences of this one"
)

_EXPECTED = "expected a Hugging Face directory, a config.json, a model type of transformers or module:function"

CONVENTION = (
    "a function(batch) of a mapping with input_ids, position_ids, labels (int64 [1, T]), cu_seqlens (int32 [S + 1]), "
    "max_seqlen (int) and train (bool); it returns outputs [1, T, ...], or a mapping with 'outputs' and, if it has "
    "them, 'hidden_states' (of embeddings and of each layer), 'embeddings' ([1, T, D]) and 'loss' (a scalar)"
)


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One way to run a model; None where there is no choice."""

    backend: str | None = None
    cache: bool | None = None
    """Whether the model makes a cache of keys and values."""
    mask: str | None = None
    """One of `MASKS`."""
    mode: Mode


@dataclass(frozen=True, kw_only=True)
class ProbedCombination:
    """What the probe has found in one combination. Deviations are relative to the largest value of their kind."""

    combination: Combination
    verdict: Verdict | Literal["not served"]
    reason: str | None = None
    """Why the model does not run, or the probe cannot tell."""
    isolation: IsolationResult | None = None
    states: tuple[float, ...] = ()
    """Largest change of the other sequences' states: of embeddings, after each layer, and of outputs."""
    gradients: float | None = None
    """Largest gradient of the other sequences' outputs with respect to a sequence's embeddings."""
    alone: float | None = None
    """Largest difference of outputs between the sequences in the pack and each alone; None in training."""
    positions_restart: bool | None = None
    """Whether each sequence has the positions that it has alone; None if that cannot be told."""
    targets_cross: bool | None = None
    """Whether a label at the first token of a sequence trains a token of the one before; None without a loss."""

    @property
    def first_leak(self) -> str | None:
        """The place at which a token first reaches another sequence; None if none does."""
        if self.isolation is None or self.verdict != "leaks":
            return None
        layers = [f"layer {number}" for number in range(1, len(self.states) - 1)]
        names = ["embeddings", *layers, "outputs"] if len(self.states) > 1 else ["outputs"]
        changes = zip(names, self.states, strict=True)
        return next((name for name, change in changes if change > self.isolation.tolerance), "gradients")


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The result of `evenpack probe`."""

    model: str
    kind: str
    """What was probed: a tiny copy, a model with its weights, or a function."""
    versions: dict[str, str]
    device: str
    sequence_lengths: tuple[int, ...]
    notes: tuple[str, ...]
    combinations: tuple[ProbedCombination, ...]
    isolated: bool
    """Whether at least one combination is isolated, and none leaks or cannot be told."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Concatenated sequences and their boundaries."""

    tokens: Int64[Tensor, " T"]
    borders: tuple[int, ...]

    @property
    def spans(self) -> list[slice]:
        return [slice(*border) for border in pairwise(self.borders)]

    @property
    def position_ids(self) -> Int64[Tensor, "1 T"]:
        """Positions from 0 in each sequence."""
        each = [torch.arange(stop - start) for start, stop in pairwise(self.borders)]
        return torch.cat(each)[None].to(self.tokens.device)

    @property
    def cu_seqlens(self) -> Int32[Tensor, " S_plus_1"]:
        return torch.tensor(self.borders, dtype=torch.int32, device=self.tokens.device)

    @property
    def max_seqlen(self) -> int:
        return max(stop - start for start, stop in pairwise(self.borders))

    def as_one(self) -> "Pack":
        """Returns the same tokens as a single sequence: the control."""
        return replace(self, borders=(0, len(self.tokens)))

    def replaced(self, span: slice) -> "Pack":
        """Returns a pack with other tokens in this span."""
        low, high = TOKENS
        tokens = self.tokens.clone()
        tokens[span] = (tokens[span] - low + 1 + torch.arange(len(tokens[span])).to(tokens)) % (high - low) + low
        return replace(self, tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a model returned for a pack."""

    states: tuple[Tensor, ...]
    """States [1, T, ...] of the embeddings and after each layer, as far as the model tells; last the outputs."""
    embeddings: Tensor | None
    """Input embeddings [1, T, D] for gradients; None if there are none."""
    loss: Tensor | None


class Subject(ABC):
    """What is probed."""

    name: str
    kind: str
    """A function, a model with its weights, or a tiny copy."""
    device = torch.device("cpu")
    refusals: tuple[type[Exception], ...] = ()
    """Errors by which it refuses a combination; others end the probe."""
    notes: tuple[str, ...] = ()

    @abstractmethod
    def combinations(self) -> list[Combination]:
        """Returns the ways to run it."""

    def dtype(self, combination: Combination) -> torch.dtype:
        """Returns the precision of its outputs."""
        return torch.float32

    @abstractmethod
    def see(self, pack: Pack, combination: Combination, *, alone: bool, labels: Tensor | None) -> Seen:
        """Runs the model on a pack; `alone`: on a single sequence, as the model runs by itself."""


def probe(
    model: str,
    *,
    backend: str | None = None,
    cache: bool | None = None,
    mask: str | None = None,
    mode: str | None = None,
) -> Report:
    """Probes each combination of `model`, or those that the other arguments leave.

    Raises: ConfigError if it is no model that can be probed, or has no such combination; BackendError if the backend
    cannot run on this machine.
    """
    asked = {"backend": backend, "cache": cache, "mask": mask, "mode": mode}
    with _settled():
        is_function = ":" in model and not Path(model).exists()
        subject = _function(model) if is_function else _transformer(model)
        combinations = _asked(subject, {name: value for name, value in asked.items() if value is not None})
        rows = tuple(probe_combination(subject, combination) for combination in combinations)
    verdicts = {row.verdict for row in rows}
    report = ProbeReport(
        model=subject.name,
        kind=subject.kind,
        versions=_versions(),
        device=subject.device.type,
        sequence_lengths=_SEQUENCE_LENGTHS,
        notes=subject.notes,
        combinations=rows,
        isolated="isolated" in verdicts and not verdicts & {"leaks", "cannot tell"},
    )
    return Report(value=report, shown=_shown(report), exit_code=0 if report.isolated else EXIT_NOT_PROVED)


def probe_combination(subject: Subject, combination: Combination) -> ProbedCombination:
    """Probes one combination. Raises: ConfigError if the subject breaks its convention."""
    low, high = TOKENS
    borders = (0, *itertools.accumulate(_SEQUENCE_LENGTHS))
    tokens = torch.randint(low, high, (borders[-1],), generator=_generator())
    pack = Pack(tokens=tokens.to(subject.device), borders=borders)
    try:
        states, gradients = _changes(subject, combination, pack, pack.spans)
        controls, control_gradients = _changes(subject, combination, pack.as_one(), pack.spans)
        is_repeatable = _is_repeatable(subject, combination, pack)
        isolation = IsolationResult(
            max_deviation=torch.stack([*states, *gradients]).max().item(),
            control_deviation=torch.stack([*controls, *control_gradients]).max().item(),
            tolerance=_TOLERATED_EPSILONS * torch.finfo(subject.dtype(combination)).eps,
        )
        verdict: Verdict = isolation.verdict if is_repeatable else "cannot tell"
        alone, positions_restart = _compare_alone(subject, combination, pack, is_isolated=verdict == "isolated")
        targets_cross = _targets_cross(subject, combination, pack)
    except subject.refusals as error:
        return ProbedCombination(combination=combination, verdict="not served", reason=_in_a_line(error))
    if verdict != "cannot tell":
        reason = None
    elif not is_repeatable:
        reason = "two calls with the same tokens and seed differ"
    elif isolation.control_leaks:
        reason = "a state or a gradient is not a number"
    else:
        reason = "the control does not leak: where all sequences are one, none reaches another either"
    return ProbedCombination(
        combination=combination,
        verdict=verdict,
        reason=reason,
        isolation=isolation,
        states=tuple(state.item() for state in states),
        gradients=torch.stack(gradients).max().item() if gradients else None,
        alone=alone,
        positions_restart=positions_restart,
        targets_cross=targets_cross,
    )


def _see(
    subject: Subject, combination: Combination, pack: Pack, *, alone: bool = False, labels: Tensor | None = None
) -> Seen:
    torch.manual_seed(_SEED)  # so that dropout drops the same
    return subject.see(pack, combination, alone=alone, labels=labels)


def _changes(
    subject: Subject, combination: Combination, pack: Pack, spans: list[slice]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the largest change of each state outside of a replaced span, and the gradients that cross, by span."""
    before = _see(subject, combination, pack)
    weights = torch.randn(before.states[-1].shape, generator=_generator()).to(before.states[-1])
    changes, gradients = [], []
    for span in spans:
        others = torch.ones(len(pack.tokens), dtype=torch.bool)
        others[span] = False
        after = _see(subject, combination, pack.replaced(span))
        pairs = zip(before.states, after.states, strict=True)
        changes.append(torch.stack([relative_change(_plain(old), _plain(new), others) for old, new in pairs]))
        if before.embeddings is not None and before.embeddings.requires_grad and before.states[-1].requires_grad:
            weighted = (before.states[-1] * weights)[0, others.to(weights.device)].sum()
            gradient: Any = torch.autograd.grad(weighted, before.embeddings, retain_graph=True, allow_unused=True)[0]
            if gradient is not None:
                gradients.append(_plain(gradient)[span].abs().max() / _plain(gradient).abs().max())
    return list(torch.stack(changes).amax(0)), gradients


def _is_repeatable(subject: Subject, combination: Combination, pack: Pack) -> bool:
    first, second = (_plain(_see(subject, combination, pack).states[-1]) for _ in range(2))
    tolerance = _TOLERATED_EPSILONS * torch.finfo(subject.dtype(combination)).eps
    return not (relative_change(first, second, slice(None)) > tolerance)  # what is not a number has its own verdict


def _compare_alone(
    subject: Subject, combination: Combination, pack: Pack, *, is_isolated: bool
) -> tuple[float | None, bool | None]:
    """Returns how far outputs are from those of the sequences alone, and whether positions are theirs.

    Absolute positions show in the embeddings, whatever attention does. Rotary ones show only in an isolated pack, as
    equal outputs. Either way the control must show that running positions would have been seen.
    """
    if combination.mode == "train":
        return None, None  # dropout draws other numbers for other shapes
    each = [
        _see(subject, combination, Pack(tokens=pack.tokens[span], borders=(0, len(pack.tokens[span]))), alone=True)
        for span in pack.spans
    ]
    alone = [
        torch.cat([_plain(state) for state in states]) for states in zip(*(one.states for one in each), strict=True)
    ]

    def deviations(seen: Seen) -> list[float]:
        pairs = zip(alone, seen.states, strict=True)
        return [relative_change(old, _plain(new), slice(None)).item() for old, new in pairs]

    packed = deviations(_see(subject, combination, pack))
    control = deviations(_see(subject, combination, pack.as_one()))
    tolerance = _ALONE_EPSILONS * torch.finfo(subject.dtype(combination)).eps
    restart = None
    if len(packed) > 1 and control[0] > 10 * tolerance:
        restart = packed[0] <= tolerance
    elif is_isolated and control[-1] > 10 * tolerance:
        restart = packed[-1] <= tolerance
    return packed[-1], restart


def _targets_cross(subject: Subject, combination: Combination, pack: Pack) -> bool | None:
    """Returns whether a label at a sequence's first token has gradients outside of it; the next one is the control."""
    span = max(pack.spans[1:], key=lambda span: span.stop - span.start)
    crossing = []
    for labelled in (span.start, span.start + 1):
        labels = torch.full_like(pack.tokens, -100)
        labels[labelled] = pack.tokens[labelled]
        seen = _see(subject, combination, pack, labels=labels)
        if seen.loss is None or not seen.loss.requires_grad:
            crossing.append((False, False))
            continue
        (gradient,) = torch.autograd.grad(seen.loss, seen.states[-1], allow_unused=True)
        touched = (
            torch.zeros(len(pack.tokens)) if gradient is None else _plain(gradient).nan_to_num().flatten(1).abs().sum(1)
        )
        outside = touched[: span.start].any() or touched[span.stop :].any()
        crossing.append((bool(outside), bool(touched.any())))
    (crosses, _), (_, is_seen) = crossing
    return crosses if is_seen else None


def _plain(tensor: Tensor) -> Tensor:
    """Returns [T, ...] of [1, T, ...], for comparison."""
    return tensor[0].detach().cpu().double()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN_CHARACTERS]}"


def _asked(subject: Subject, asked: Mapping[str, Any]) -> list[Combination]:
    """Returns the combinations with these values. Raises: ConfigError if there are none."""
    combinations = subject.combinations()
    for name, value in asked.items():
        known = {getattr(combination, name) for combination in combinations}
        if value in BACKENDS and value not in known and known != {None}:
            raise BackendError(f"{value} needs a CUDA device and the package flash-attn; choose another --backend")
        if value not in known:
            choices = ", ".join(sorted(str(one) for one in known - {None}))
            had = f"has {choices}" if choices else f"has no choice of {name}"
            raise ConfigError(f"{subject.name} {had}, and was asked for {name} {value}; leave this option out")
        combinations = [combination for combination in combinations if getattr(combination, name) == value]
    return combinations


class _Function(Subject):
    """A function of the user's that takes a batch; see `CONVENTION`."""

    kind = "a function"

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name, self.call = name, call

    def combinations(self) -> list[Combination]:
        return [Combination(mode="eval"), Combination(mode="train")]

    def see(self, pack: Pack, combination: Combination, *, alone: bool, labels: Tensor | None) -> Seen:
        batch = {
            "input_ids": pack.tokens[None].clone(),  # the function may write into it
            "position_ids": pack.position_ids,
            "cu_seqlens": pack.cu_seqlens,
            "max_seqlen": pack.max_seqlen,
            "labels": (torch.full_like(pack.tokens, -100) if labels is None else labels)[None],
            "train": combination.mode == "train",
        }
        try:
            found = self.call(batch)
        except Exception as error:
            raise ConfigError(f"{self.name} failed with {_in_a_line(error)}; expected {CONVENTION}") from error
        found = found if isinstance(found, Mapping) else {"outputs": found}
        states = [*(found.get("hidden_states") or ()), found.get("outputs")]
        for state in states:
            if not isinstance(state, Tensor) or state.shape[:2] != (1, len(pack.tokens)):
                shown = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
                raise ConfigError(f"{self.name} returned {shown} for {len(pack.tokens)} tokens; expected {CONVENTION}")
            if not state.is_floating_point():
                raise ConfigError(
                    f"{self.name} returned {state.dtype}, in which a small change is lost: return states in "
                    f"floating point, such as logits; expected {CONVENTION}"
                )
        return Seen(states=tuple(states), embeddings=found.get("embeddings"), loss=found.get("loss"))


def _function(model: str) -> _Function:
    """Imports `module:function`, also from the current folder. Raises: ConfigError."""
    module, _, name = model.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{model}: {module} cannot be imported: {_in_a_line(error)}; expected {CONVENTION}"
        ) from error
    finally:
        sys.path.pop(0)
    call = getattr(found, name, None)
    if not callable(call):
        raise ConfigError(f"{model}: {module} has no function {name!r}; expected {CONVENTION}")
    return _Function(model, call)


class _Transformer(Subject):
    """A model of transformers, given what its `forward` takes."""

    refusals = (Exception,)

    def __init__(self, name: str, kind: str, model: Any, *, causal: bool) -> None:
        self.name, self.kind, self.causal = name, kind, causal
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        forwards = (model.forward, model.base_model.forward)
        self._takes = {name for forward in forwards for name in inspect.signature(forward).parameters}
        self._embedded: list[Tensor] = []
        self._states: list[Any] = []
        with contextlib.suppress(NotImplementedError):
            model.get_input_embeddings().register_forward_hook(lambda _, __, output: self._embedded.append(output))
        for number, layer in enumerate(_layers(model)):
            if number == 0:
                layer.register_forward_pre_hook(lambda _, given, named: self._keep(given, named), with_kwargs=True)
            layer.register_forward_hook(lambda _, __, output: self._keep(output, {}))
        self.notes = () if "position_ids" in self._takes else (_NO_POSITIONS.format(name=name),)

    def _keep(self, given: Any, named: Mapping[str, Any]) -> None:
        """Keeps what goes into or comes out of a layer: its states are the first, or have a name."""
        first = next(iter(given), None) if isinstance(given, tuple) else given
        self._states.append(named.get("hidden_states") if first is None else first)

    def combinations(self) -> list[Combination]:
        from transformers.utils import is_flash_attn_2_available

        has_flash = torch.cuda.is_available() and is_flash_attn_2_available()
        backends = [name for name in BACKENDS if name != "flash" or has_flash]
        caches = (False, True) if "use_cache" in self._takes and self.causal else (None,)
        masks = MASKS if "attention_mask" in self._takes else MASKS[:1]
        chosen = itertools.product(backends, caches, masks, ("eval", "train"))
        return [
            Combination(backend=backend, cache=cache, mask=mask, mode=mode) for backend, cache, mask, mode in chosen
        ]

    def dtype(self, combination: Combination) -> torch.dtype:
        return torch.float16 if combination.backend == "flash" else torch.float32

    def see(self, pack: Pack, combination: Combination, *, alone: bool, labels: Tensor | None) -> Seen:
        model = self.model.to(self.dtype(combination))
        implementation = BACKENDS[combination.backend or "eager"]
        if model.config._attn_implementation != implementation:
            model.set_attn_implementation(implementation)
        model.train(combination.mode == "train")
        arguments = {"input_ids": pack.tokens[None], "return_dict": True}
        if combination.cache is not None:
            arguments["use_cache"] = combination.cache
        if not alone:
            arguments |= self._boundaries(pack, combination)
        if labels is not None:
            arguments["labels"] = labels[None]
        self._embedded.clear()
        self._states.clear()
        with self._supported(combination):
            output = model(**arguments)
        return Seen(
            states=(*self._states, output["logits"]),
            embeddings=self._embedded[0] if len(self._embedded) == 1 else None,
            loss=output.get("loss"),
        )

    @contextlib.contextmanager
    def _supported(self, combination: Combination) -> Iterator[None]:
        """On a CPU flex runs as PyTorch's formula, and without gradients, which neither it nor its kernel has there."""
        if self.device.type != "cpu" or combination.backend != "flex":
            yield
            return
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield

    def _boundaries(self, pack: Pack, combination: Combination) -> dict[str, Any]:
        inputs = ModelInputs(
            config=self.model.config,
            causal=self.causal,
            mask="block" if combination.mask == "block" else "none",
            first_position=self._first_position,
            dtype=self.dtype(combination),
            embeddings=None,
        )
        given = inputs.boundaries(pack.position_ids[0], pack.cu_seqlens, pack.max_seqlen)
        if combination.mask == "ones":
            given = {"position_ids": given["position_ids"], "attention_mask": torch.ones_like(pack.tokens)[None]}
        if "position_ids" not in self._takes:
            del given["position_ids"]
        return given

    @cached_property
    def _first_position(self) -> int:
        return first_position(self.model)


def _layers(model: Any) -> Sequence[nn.Module]:
    """Returns the model's layers; none if it has no list of them, or shares them."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    return list(next(lists, ()))


def _transformer(model: str) -> _Transformer:
    """Loads a directory with weights, or makes a tiny copy of a configuration or of a type. Raises: ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES} & {*CONFIG_MAPPING}
    path = Path(model)
    model_type = _model_type(path) if path.exists() else model
    if model_type not in CONFIG_MAPPING:
        what = f"{model}: type {model_type} is unknown" if path.exists() else f"{model} is no path and no model type"
        raise ConfigError(f"{what}; {_EXPECTED}{_near(model_type, known)}")
    try:
        config = AutoConfig.from_pretrained(path) if path.exists() else CONFIG_MAPPING[model_type]()
        if model_type not in known or config.is_encoder_decoder:
            raise ConfigError(
                f"{model} is no decoder or encoder of text alone, as a pack needs{_near(model_type, known)}"
            )
        causal = model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or bool(getattr(config, "is_decoder", False))
        auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
        if path.is_dir() and any(itertools.chain(path.glob("*.safetensors*"), path.glob("pytorch_model*.bin*"))):
            loaded = auto.from_pretrained(path, config=config, dtype=torch.float32)
            return _Transformer(model, "with its weights", loaded, causal=causal)
        made = tiny_model(auto.from_config, text_configuration(config, auto._model_mapping))
        return _Transformer(model, f"a tiny {type(made).__name__} with random weights", made, causal=causal)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{model} cannot be loaded: {_in_a_line(error)}; {_EXPECTED}") from error


def _near(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known - {word}), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _model_type(path: Path) -> str:
    """Returns the type that a config names. Raises: ConfigError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; {_EXPECTED}") from error
    if "auto_map" in values:
        raise ConfigError(
            f"{file} names code of its own (auto_map), which is never run; expected a model of the installed "
            "transformers: remove auto_map if it is one, or load it in a function of yours and probe module:function"
        )
    return str(values.get("model_type"))


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Seeds, and keeps the remarks of other packages away, since all ways to run a model are tried on purpose.

    One thread: products of 32 tokens take longer on several.
    """
    from transformers.utils import logging

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(_SEED)
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


COLUMNS = (
    Column("backend", "combination.backend"),
    Column("cache", lambda row: {None: None, False: "off", True: "on"}[row.combination.cache]),
    Column("mask", "combination.mask"),
    Column("mode", "combination.mode"),
    Column("states", lambda row: max(row.states, default=None), form=".1e"),
    Column("gradients", form=".1e"),
    Column("control", "isolation.control_deviation", form=".1e"),
    Column("first leak", "first_leak"),
    Column("alone", form=".1e"),
    Column("positions restart", "positions_restart"),
    Column("targets cross", "targets_cross"),
    Column("verdict"),
)

_EXPLANATIONS = {
    "states": "the most that states and outputs of the other sequences change when one sequence is replaced",
    "gradients": "the largest gradient of the other sequences' outputs with respect to a sequence's embeddings",
    "control": "the same where all sequences are one: it must leak, or the probe has proved nothing",
    "first leak": "where a token first reaches another sequence",
    "alone": "the largest difference between outputs in the pack and of each sequence alone",
    "positions restart": "whether each sequence has the positions that it has alone",
    "targets cross": "whether a label at a sequence's first token, if it is not -100, trains the one before",
}


def _shown(report: ProbeReport) -> list[Any]:
    lengths = ", ".join(map(str, report.sequence_lengths))
    reasons: dict[str, list[ProbedCombination]] = {}
    for row in report.combinations:
        if row.reason is not None:
            reasons.setdefault(row.reason, []).append(row)
    notes = [
        *report.notes,
        *(f"{rows[0].verdict} ({len(rows)} of the rows): {reason}" for reason, rows in reasons.items()),
    ]
    verdict = "Isolated in each of these." if report.isolated else "Not isolated in each of these: see the verdicts."
    title = f"{report.model}, {report.kind}: sequences of {lengths} tokens in a pack"
    return [
        table_of(report.combinations, COLUMNS, title=title),
        console.pairs(_EXPLANATIONS),
        *(console.text(note) for note in notes),
        console.text(verdict, bold=True),
    ]
