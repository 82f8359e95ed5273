"""Tiny copies of models of transformers: the code of a family, in sizes that any machine runs in a second.

Copies have the same kinds of layers, as few as have them all. Their heads are fewer and smaller, and widths are divided
by both numbers, so that what must be a product of others stays one. The first copy is taken that is small enough, as
counted without memory on the meta device, and that runs.
"""

import contextlib
import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from evenpack.errors import ConfigError

MOST_PARAMETERS = 100_000_000
"""A copy with more, its buffers counted too, is refused before anything is allocated."""

TOKENS = (10, 60)
"""Range of token ids for probes: above the special tokens of all families, and inside of a copy's vocabulary."""

_VOCABULARY = 128
_HEAD_SIZE = 16
_MOST_COPIES = 40
_INITIALIZER_RANGE = 0.2
"""Standard deviation of a copy's weights: large enough that what attention adds is no small part of a state."""

_LAYERS = "(^|_)layers?$|^num_blocks$|layers_per_stack$"
_HEADS = "(num|decoder)_attention_heads$|^n_heads?$|^num_heads$|^attention_heads$"
_HEAD_SIZES = "head_?dim|dim_head|d_head|head_size|kv_channels|rotary_dim|section"
_LIMITS: tuple[tuple[str, float], ...] = (
    ("vocab", _VOCABULARY),
    ("dense_replace|groups?$|parts$", 1),
    ("position|distance|bucket|length|(max|context)_.*len|kernel|conv|channels|pos_shape", math.inf),
    ("period|interval|offset|index$|label|seed|rope", math.inf),
    ("window|chunk|^local_attention$|index_topk|landmarks|segment_means|floor_scale|n_floor", 8),
    ("block_size$", 4),
    ("per_tok|top_?k|moe_k$", 2),
    ("experts?(_num)?$", 4),
)
"""Integers that are neither widths nor of heads, by their names, and the most that a copy has."""

_LARGEST_COUNT = 16
"""An integer up to this is no width."""

_WIDTHS = 8
"""Widths are multiples of this; kernels for experts refuse others."""

_OPEN: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "vocab_size": lambda _: _VOCABULARY,
    "pad_token_id": lambda _: 0,
    "head_dim": lambda values: values["hidden_size"] // values["num_attention_heads"],
    "num_key_value_heads": lambda values: values["num_attention_heads"],
    "n_shared_experts": lambda _: 1,
    "n_routed_experts": lambda _: 4,
    "num_experts_per_tok": lambda _: 2,
    "default_language": lambda values: values["languages"][0],
    "layer_types": lambda values: ["full_attention"] * values["num_hidden_layers"],
}
"""What some families leave open, though their models cannot be built or run without it."""


def text_configuration(config: Any, known: Mapping[Any, Any]) -> Any:
    """Returns the configuration of the text model nested in one for images or sound too, if `known` has its class."""
    with contextlib.suppress(ValueError):  # nested are an encoder's and a decoder's
        text = config.get_text_config(decoder=True)
        return text if type(text) in known and type(text) is not type(config) else config
    return config


def tiny_model(build: Callable[[Any], Any], config: Any) -> Any:
    """Returns the model of the first copy that runs; else of the first that can be built, whose error its caller meets.

    Raises: ConfigError if none can be built with at most `MOST_PARAMETERS`.
    """
    built, reason = None, "it has no sizes"
    for values in itertools.islice(copies(config), _MOST_COPIES):
        try:
            smaller = type(config).from_dict(values)
            with torch.device("meta"):
                counted = build(smaller)
                numbers = sum(one.numel() for one in itertools.chain(counted.parameters(), counted.buffers()))
            if numbers > MOST_PARAMETERS:
                raise ConfigError(f"a copy has {numbers:,} parameters, above {MOST_PARAMETERS:,}")
            model = build(smaller)
            for parameter in model.parameters():
                if not parameter.any():  # gates and projections that begin at zero would hide what they let through
                    torch.nn.init.normal_(parameter, std=_INITIALIZER_RANGE)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        built = built or model
        with contextlib.suppress(Exception), torch.no_grad():
            trial = copy.deepcopy(model)  # a run may leave something, as BigBird's attention to short rows
            trial(input_ids=torch.arange(*TOKENS)[None, :32], **without_cache(model))
            return model
    if built is None:
        raise ConfigError(f"no tiny copy of {type(config).__name__} can be built: {reason}")
    return built


def without_cache(model: Any) -> dict[str, bool]:
    """Returns the argument without which decoders make a cache of keys and values, which some cannot by themselves."""
    parameters = inspect.signature(model.forward).parameters
    is_open = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {"use_cache": False} if is_open or "use_cache" in parameters else {}


def copies(config: Any) -> Iterator[dict[str, Any]]:
    """Yields values of configurations of the same kinds of layers in small sizes; not all are valid for their family.

    First are two heads, each shape also with more layers and with what the family leaves open.
    """
    values = config.to_dict()
    heads = _heads(values)
    counts, size = sorted({count for count, _ in heads}, reverse=True), max((size for _, size in heads), default=0)
    shapes = [(count // few, max(size // _HEAD_SIZE, 1)) for few in (2, 4, 1) for count in counts if count % few == 0]
    shapes += [(64, 1), (8, 1), *((fewer, 1) for fewer, _ in shapes)]
    for (fewer, smaller), times, opens in itertools.product(dict.fromkeys(shapes), (1, 3), (False, True)):
        reduced = _smaller(values, fewer, smaller, times)
        yield _opened(reduced, config.attribute_map) if opens else reduced


def _heads(values: Mapping[Any, Any]) -> list[tuple[int, int]]:
    """Returns numbers of heads and their sizes, of a configuration and of those nested in it."""
    found = [head for value in values.values() if isinstance(value, dict) for head in _heads(value)]
    width = next((values[name] for name in ("hidden_size", "d_model", "n_embd", "dim") if values.get(name)), 0)
    for name, value in values.items():
        if isinstance(name, str) and re.search(_HEADS, name) and isinstance(value, int) and value:
            found.append((value, values.get("head_dim") or width // value))
    return found


def _smaller(values: Mapping[str, Any], fewer: int, smaller: int, times: int) -> dict[str, Any]:
    """Returns the values of a configuration, and of those nested in it, in small sizes.

    Args:
        fewer: divides numbers of heads, and widths.
        smaller: divides sizes of heads, and widths too.
        times: how often the first layers are kept that are of all kinds.
    """
    counts = {name: value for name, value in values.items() if type(value) is int and re.search(_LAYERS, name)}
    layers = max((value for name, value in counts.items() if "window" not in name), default=0)
    kept = min(times * _layers_of_all_kinds(values, layers), max(layers, 1))

    def reduced(name: str, value: Any) -> Any:
        if isinstance(value, dict) and "model_type" in value:
            return _smaller(value, fewer, smaller, times)
        if isinstance(value, dict):
            inside = {key: one for key, one in value.items() if name != "per_layer_config" or int(key) < kept}
            return {key: reduced(str(key), one) for key, one in inside.items()}
        if isinstance(value, list | tuple):
            if _are_layer_numbers(name, value, layers):
                return [one for one in value if one < kept]
            return [reduced(name, one) for one in (value[:kept] if len(value) == layers else value)]
        if name in ("initializer_range", "init_std"):
            return _INITIALIZER_RANGE
        return _reduced(name, value, fewer, smaller, kept) if type(value) is int else value

    return {name: reduced(name, value) for name, value in values.items()}


def _reduced(name: str, value: int, fewer: int, smaller: int, layers: int) -> int:
    if name.endswith("_token_id"):
        return value if value < _VOCABULARY else 0
    if re.search(_LAYERS, name):
        return min(value, 1 if "dense" in name else layers // 2 if "shared" in name else layers)
    if re.search(_HEAD_SIZES, name):
        return max(value // smaller, min(value, 2))
    if "head" in name:
        return max(value // fewer, 1)
    limits = [limit for pattern, limit in _LIMITS if re.search(pattern, name)]
    if limits or value <= _LARGEST_COUNT or fewer * smaller == 1:
        return int(min([value, *limits[:1]]))
    return max(value // (fewer * smaller) // _WIDTHS * _WIDTHS, _WIDTHS)


def _layers_of_all_kinds(values: Mapping[str, Any], layers: int) -> int:
    """Returns how many of the first layers have every kind of layer, at least two."""
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple) and value}
    numbers = [value for name, value in lists.items() if _are_layer_numbers(name, value, layers)]
    by_layer = [
        value
        for value in lists.values()
        if len(value) == layers and value not in numbers and not isinstance(value[0], float)
    ]
    own = {int(key): value for key, value in (values.get("per_layer_config") or {}).items()}
    kinds = [
        repr(([one[layer] for one in by_layer], [layer in one for one in numbers], own.get(layer)))
        for layer in range(layers)
    ]
    periods = [value for name, value in values.items() if re.search("period|interval", name) and type(value) is int]
    periods += [len(value) for name, value in lists.items() if name == "block_types"]
    return max([2, *(kinds.index(kind) + 1 for kind in kinds), *(period for period in periods if period <= 12)])


def _are_layer_numbers(name: str, value: Any, layers: int) -> bool:
    ints = all(type(one) is int for one in value)
    return bool(re.search("layer|idx", name)) and ints and (len(value) != layers or list(value) == list(range(layers)))


def _opened(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values with what is open filled; `names` has a family's own by those of other families."""
    by_common_names = values | {name: values[own] for name, own in names.items() if own in values}
    for name, fill in _OPEN.items():
        own = names.get(name, name)
        if own in values and values[own] is None:
            values[own] = fill(by_common_names)
    return values
