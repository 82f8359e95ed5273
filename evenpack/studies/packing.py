"""Packing algorithms side by side, over limits of depth."""

from collections.abc import Callable, Sequence

from evenpack.data.packing import LengthHistogram
from evenpack.errors import PackingError
from evenpack.studies.inspect import PackingRow, packing_row, with_best_bound

STUDY_DEPTHS: tuple[int | None, ...] = (1, 2, 3, 4, 8, 16, None)
"""Most sequences a pack may hold; None: no limit. Those of the published tables."""

_ALL_DEPTHS = ("shortest_pack_first", "longest_pack_first", "cutting_stock")
_SLOTS_OF_LEAST_SQUARES = 512
_SLOTS_OF_ANY_CUT = 512
_DEEPEST_LONG_CUT = 4


def study_packing(
    histogram: LengthHistogram,
    *,
    pack_length: int,
    depths: Sequence[int | None] = STUDY_DEPTHS,
    algorithms: Sequence[str] | None = None,
    begin: Callable[[str, int | None], None] = lambda algorithm, depth: None,
) -> tuple[PackingRow, ...]:
    """Packs by each of `algorithms` at each of `depths`; `begin` hears of each before it starts.

    Without `algorithms` every one is taken at the depths where it is of use and a matter of seconds: least squares at 3
    and up to 512 slots, next fit without a limit, cutting_stock beyond 512 slots up to a depth of 4 or without a limit.

    Raises: PackingError for an unknown algorithm or depth, or what an algorithm cannot do.
    """
    for depth in depths:
        if depth is not None and depth < 1:
            raise PackingError(f"a depth is 1 sequence a pack or more, found {depth}")
    rows: list[PackingRow] = []
    for depth in depths:
        of_depth = []
        names = _of_use(depth, pack_length) if algorithms is None else algorithms
        for name in names:
            begin(name, depth)
            of_depth.append(packing_row(histogram, name, depth, pack_length))
        rows += with_best_bound(of_depth)
    return tuple(rows)


def _of_use(depth: int | None, pack_length: int) -> tuple[str, ...]:
    if depth == 1:
        return ("none",)
    names = list(_ALL_DEPTHS)
    if depth is not None and depth > _DEEPEST_LONG_CUT and pack_length > _SLOTS_OF_ANY_CUT:
        names.remove("cutting_stock")
    if depth == 3 and pack_length <= _SLOTS_OF_LEAST_SQUARES:
        names.insert(0, "least_squares")
    if depth is None:
        names.insert(0, "next_fit")
    return tuple(names)
