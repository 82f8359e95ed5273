"""The packers that take part, and how far each can go."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import adapters
from task import Attempt, Task

import evenpack

_ALONE = "--no-deps --ignore-requires-python "
"""How frameworks are installed of which one module is imported."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row of the table, for each limit of depth that it knows."""

    name: str
    load: Callable[[Task], Attempt]
    distribution: str | None
    """As pip knows it; None for evenpack itself."""
    pip_options: str = ""
    limits_depth: bool = False
    moves_tokens: bool = False
    """Its packs are made of tokens; the others assign with numbers of sequences or with lengths."""
    most_sequences: int | None = None
    """More would take it hours."""

    @property
    def version(self) -> str | None:
        """None where it is not installed."""
        if self.distribution is None:
            return evenpack.__version__
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    @property
    def how_to_install(self) -> str:
        return f"pip install {self.pip_options}{self.distribution}"


CONTENDERS = (
    *(
        Contender(
            name=f"evenpack {algorithm}",
            load=partial(adapters.evenpack, algorithm=algorithm),
            distribution=None,
            limits_depth=True,
        )
        for algorithm in (
            "longest_pack_first",
            "cutting_stock",
            "shortest_pack_first",
            "first_fit_decreasing",
            "next_fit",
        )
    ),
    *(
        Contender(
            name=f"LightBinPack {algorithm}",
            load=partial(adapters.lightbinpack, algorithm=algorithm),
            distribution="lightbinpack",
        )
        for algorithm in ("obfd", "nf")
    ),
    Contender(
        name="Megatron-Bridge first_fit_decreasing",
        load=adapters.megatron_bridge,
        distribution="megatron-bridge",
        pip_options=_ALONE,
    ),
    Contender(
        name="OLMo-core InstancePacker",
        load=adapters.olmo_core,
        distribution="ai2-olmo-core",
        pip_options=_ALONE,
    ),
    Contender(
        name="LLaMA-Factory greedy_knapsack, all at once",
        load=partial(adapters.llama_factory, group=None),
        distribution="llamafactory",
        pip_options=_ALONE,
    ),
    Contender(
        name="LLaMA-Factory greedy_knapsack, by 1000 as shipped",
        load=partial(adapters.llama_factory, group=adapters.GROUP_OF_DATASETS_MAP),
        distribution="llamafactory",
        pip_options=_ALONE,
    ),
    Contender(
        name="axolotl multipack",
        load=adapters.axolotl,
        distribution="axolotl",
        pip_options=_ALONE,
        limits_depth=True,
    ),
    Contender(
        name="ms-swift binpack, by 1000 as shipped",
        load=adapters.ms_swift,
        distribution="ms-swift",
        pip_options=_ALONE,
    ),
    Contender(
        name="TRL bfd, all at once",
        load=partial(adapters.trl, group=None),
        distribution="trl",
        moves_tokens=True,
    ),
    Contender(
        name="TRL bfd, by 1000 as shipped",
        load=partial(adapters.trl, group=adapters.GROUP_OF_DATASETS_MAP),
        distribution="trl",
        moves_tokens=True,
    ),
    Contender(
        name="Grain best fit, 64 packs open",
        load=partial(adapters.grain, bins=64),
        distribution="grain",
        limits_depth=True,
        moves_tokens=True,
        most_sequences=100_000,
    ),
    Contender(
        name="torchtune PackedDataset",
        load=adapters.torchtune,
        distribution="torchtune",
        pip_options=_ALONE,
        moves_tokens=True,
        most_sequences=100_000,
    ),
    Contender(
        name="binpacking to_constant_volume",
        load=adapters.binpacking,
        distribution="binpacking",
        most_sequences=10_000,
    ),
    Contender(
        name="prtpy first_fit_decreasing",
        load=adapters.prtpy,
        distribution="prtpy",
        most_sequences=10_000,
    ),
)
