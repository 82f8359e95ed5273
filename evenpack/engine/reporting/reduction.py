"""Reduces named values over the ranks, by one sum of a vector and one maximum.

A name that begins with an underscore is a sum from which other values are computed; it is not a metric of its own.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from evenpack.engine.reporting.definitions import Reduction, find_metric
from evenpack.engine.world.distributed import World

RankValue = int | float | Tensor
"""One measured number; a tensor is on the rank's device, with which the host synchronises once."""


def reduce_over_ranks(world: World, values: Mapping[str, RankValue]) -> dict[str, int | float]:
    """Returns the reduced values by name; every rank calls it with the same names. Whole numbers stay whole.

    Raises: ValueError for a name that is not a metric, or is not measured on the ranks.
    """
    reductions = {name: reduction_of(name) for name in values}
    sums = [name for name in values if reductions[name] != "max"]
    maxima = [name for name in values if reductions[name] == "max"]
    names = [*_tensors_first(sums, values), *_tensors_first(maxima, values)]
    shares = {name: _share(values[name], reductions[name], world) for name in names}
    reduced = world.all_sum(_vector(list(shares.values()), world), maxima=len(maxima)).tolist()
    found = dict(zip(names, reduced, strict=True))
    return {name: round(found[name]) if _is_whole(shares[name]) else found[name] for name in values}


def reduction_of(name: str) -> Reduction:
    """Returns the reduction of a name. Raises: ValueError; see `reduce_over_ranks`."""
    if name.startswith("_"):
        return "sum"
    reduction = find_metric(tuple(name.split("/"))).over_ranks
    if reduction is None:
        raise ValueError(f"'{name}' is computed from other metrics: give it a reduction to measure it on the ranks")
    return reduction


def _tensors_first(names: Sequence[str], values: Mapping[str, RankValue]) -> list[str]:
    return sorted(names, key=lambda name: not isinstance(values[name], Tensor))


def _share(value: RankValue, reduction: Reduction, world: World) -> RankValue:
    """Returns this rank's summand; for a maximum, its value."""
    if reduction == "mean":
        return value / world.size
    if reduction == "same" and not world.is_main:
        return torch.zeros_like(value) if isinstance(value, Tensor) else 0  # no product: infinity times 0 is NaN
    return value


def _vector(shares: Sequence[RankValue], world: World) -> Float64[Tensor, " n"]:
    """Returns the shares in the given order; the values on the host are copied to the device together."""
    on_host = torch.tensor([one for one in shares if not isinstance(one, Tensor)], dtype=torch.float64)
    moved = iter(on_host.to(world.device, non_blocking=True).unbind())
    return torch.stack([one.double() if isinstance(one, Tensor) else next(moved) for one in shares])


def _is_whole(share: RankValue) -> bool:
    return not share.is_floating_point() if isinstance(share, Tensor) else isinstance(share, int)
