"""Checks, once over all ranks, that a host hands the model what the loaders made: no pack lost, repeated or reshaped.

A host that shards batches which are shares already loses most packs without an error. What arrived is compared with
what this rank's loader makes; the sum of order hashes over ranks is compared with the plan of the step.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenpack.batch import PackedBatch
from evenpack.data.loader import Loader
from evenpack.data.order.selection import order_hash
from evenpack.errors import ConfigError
from evenpack.extras import require

_HASHES = 1 << 64
_OTHER_LOADERS = "the ranks' loaders have different documents, seeds or packs: "
_BORDERS = (
    "position_ids",
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "use_cache",
    "past_key_values",
)
"""Arguments of a model by which it tells sequences apart, or no longer does."""


def require_whole_step(
    loader: Loader,
    step: int,
    found: Sequence[Any],
    form: Callable[[PackedBatch], Any],
    *,
    accumulation: int | None = None,
) -> None:
    """Checks what the host gives the model as this rank's micro-batches of a step; all ranks call it.

    It uses torch.distributed if that has been initialised. One step is enough: the first one that is trained on.

    Args:
        step: the step, counted from 0.
        found: the micro-batches that the host gives the model, before or after they are moved to a device.
        form: makes of a batch what was given to the host.
        accumulation: micro-batches after which the host takes an update; None: the loop decides that.

    Raises: ConfigError on every rank, if it is not the loaders' step on any of them.
    """
    require("torch", "require_whole_step")
    if not loader.has_equal_steps:
        raise ConfigError(
            "the loader's stages change packs_per_step, and a host's batches, logs and epochs count steps of one size: "
            "let stages change weights alone, or read the loader in a loop of your own"
        )
    expected = loader.batches_of(step)
    problem = _difference(found, [form(batch) for batch in expected])
    if accumulation is not None and accumulation != loader.micro_batches:
        problem = f"the host accumulates {accumulation} micro-batches, the loader makes {loader.micro_batches} a step"
    here = (loader.rank, loader.ranks, loader.fingerprint, problem, sum(batch.order_hash for batch in expected))
    reports = all_gathered(here)
    problems = [f"rank {rank}: {report[3]}" for rank, report in enumerate(reports) if report[3]]
    places = [report[:2] for report in reports]
    if places != [(rank, len(reports)) for rank in range(len(reports))]:
        problems = [_misplaced(places)]
    elif len({report[2] for report in reports}) > 1:
        problems = [_OTHER_LOADERS + _counted(report[2] for report in reports)]
    whole = order_hash(loader.plan(step).packs)
    if not problems and sum(report[4] for report in reports) % _HASHES != whole:
        problems = ["the ranks together do not hold each pack of the plan once"]
    if problems:
        raise ConfigError(
            f"step {step} is not what evenpack's loader made: {'; '.join(problems)}. The host must take the loader's "
            "batches as they are: it may not shard, dispatch, concatenate, drop or reshape them (docs/adapters.md)"
        )


def require_shares(loader: Loader) -> None:
    """Checks that the loaders of all ranks make shares of the same steps; all ranks call it.

    Several ranks may have the same share, as often as others have theirs: those that hold parts of one model.

    Raises: ConfigError on every rank, if documents, seeds, packs or steps differ, or if a share is missing.
    """
    reports = all_gathered((loader.rank, loader.ranks, loader.fingerprint, loader.step))
    places = [report[:2] for report in reports]
    each_share = [(rank, loader.ranks) for rank in range(loader.ranks)]
    problem = None
    if len({report[2] for report in reports}) > 1:
        problem = _OTHER_LOADERS + _counted(report[2] for report in reports)
    elif len({report[3] for report in reports}) > 1:
        problem = "they are at different steps: " + _counted(report[3] for report in reports)
    elif sorted(places) != sorted(each_share * (len(places) // len(each_share))):
        problem = _misplaced(places)
    if problem is not None:
        raise ConfigError(f"the ranks' loaders do not make shares of the same step: {problem}")


def _misplaced(places: Sequence[tuple[int, int]]) -> str:
    """Returns what is wrong with the places (rank, ranks) of loaders, in words."""
    return (
        f"{len(places)} processes train, and their loaders were made with (rank, ranks) = "
        f"{', '.join(map(str, places))}: make each with the rank of its process, and ranks={len(places)}"
    )


class HandOver:
    """Sees, in its first step, that a model is called with the borders that the adapter made.

    A host's own code may lie between: a `training_step`, or a `compute_loss`, that passes a mask of ones or leaves out
    `position_ids` trains a model on mixed sequences, whatever was proved of it.
    """

    def __init__(self, model: Any, calls: int) -> None:
        """Watches as many calls for training, until `end`; a model that compiles its own calls is not watched.

        A call of the model without its head counts too, where it is neither the model's own nor compiled with it.
        """
        self._made: list[Mapping[str, Any]] = []
        self._left = calls
        self._hooks: list[Any] = []
        self._is_within = False
        called = _called(model)
        if getattr(called, "_compiled_call_impl", None) is not None:
            return
        self._hooks.append(called.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        self._hooks.append(called.register_forward_hook(self._leave, always_call=True))
        body = None if hasattr(called, "_orig_mod") else getattr(called, "base_model", None)
        if body is not None and body is not called and getattr(body, "_compiled_call_impl", None) is None:
            self._hooks.append(body.register_forward_pre_hook(self._see, prepend=True, with_kwargs=True))

    def expect(self, inputs: Mapping[str, Any]) -> None:
        """Takes the inputs that the adapter made of one more micro-batch."""
        self._made.append(dict(inputs))  # which the host may change

    def end(self) -> None:
        """Ends the watch."""
        self._made = []
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._see(module, arguments, keywords)
        self._is_within = True

    def _leave(self, *_: Any) -> None:
        self._is_within = False

    def _see(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compares a call. Raises: ConfigError for other borders."""
        import torch

        if self._is_within or not (module.training or torch.is_grad_enabled()):
            return
        names = inspect.signature(getattr(module, "_orig_mod", module).forward).parameters
        given = {**dict(zip(names, arguments, strict=False)), **keywords}
        ids, embedded = given.get("input_ids"), given.get("inputs_embeds")
        made = [one for one in self._made if _unlike(ids, one["input_ids"]) is None]
        if not made:  # of tokens that the host changed or embedded itself, unless it is of another size
            shape = getattr(ids if embedded is None else embedded, "shape", ())[:2]
            made = [one for one in self._made if one["input_ids"].shape == shape]
        if not made:
            return
        problem = min((_other_borders(given, one) for one in made), key=bool)
        self._left -= 1
        if problem or self._left == 0:
            self.end()
        if problem:
            raise ConfigError(
                f"{type(module).__name__} is called with other borders than those with which it was proved isolated: "
                f"{problem}. Pass what the adapter makes as it is, model(**inputs), without a mask or cache of your "
                "own (docs/adapters.md)"
            )


def _other_borders(given: Mapping[str, Any], made: Mapping[str, Any]) -> str:
    """Returns the first argument that bounds sequences otherwise than the adapter made it, in words; else nothing."""
    texts = ((name, _unlike_border(given.get(name), made.get(name))) for name in _BORDERS)
    return next((f"{name} {text}" for name, text in texts if text), "")


def _unlike_border(found: Any, expected: Any) -> str | None:
    if (found is None) != (expected is None):
        return "is left out" if found is None else "is added"
    return None if expected is None else _unlike(found, expected)


def _called(model: Any) -> Any:
    """Returns the module that a host's call reaches first, outside compiled code."""
    while getattr(model, "_orig_mod", None) is None:
        if not {kind.__name__ for kind in type(model).__mro__} & {"DistributedDataParallel", "DeepSpeedEngine"}:
            break
        model = model.module
    return model


def _counted(values: Any) -> str:
    return ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values))


def all_gathered(value: Any) -> list[Any]:
    """Returns the value of each rank, on all of them; all ranks call it."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _difference(found: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Returns the first difference of two lists of micro-batches, in words; None if there is none."""
    if len(found) != len(expected):
        return f"{len(found)} micro-batches arrived, the loader makes {len(expected)} a step"
    differences = (_unlike(here, made) for here, made in zip(found, expected, strict=True))
    return next((f"micro-batch {index}: {text}" for index, text in enumerate(differences) if text), None)


def _unlike(found: Any, expected: Any) -> str | None:
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or set(found) != set(expected):
            keys = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            return f"expected {', '.join(map(str, expected))}, found {keys}"
        texts = ((key, _unlike(found[key], value)) for key, value in expected.items())
        return next((f"{key} {text}" for key, text in texts if text), None)
    if isinstance(expected, tuple):
        if not isinstance(found, tuple) or len(found) != len(expected):
            return f"expected a tuple of {len(expected)} values, found {type(found).__name__}"
        return next((text for text in map(_unlike, found, expected) if text), None)
    return _unlike_leaf(found, expected)


def _unlike_leaf(found: Any, expected: Any) -> str | None:
    import torch

    if not isinstance(expected, torch.Tensor):
        return None if found == expected else f"is {found!r:.80}, expected {expected!r:.80}"
    if not isinstance(found, torch.Tensor):
        return f"is a {type(found).__name__}, expected a tensor"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
    return None if torch.equal(found.cpu(), expected.cpu()) else "has other values"
