"""Lists the packers that are compared, and the largest input of each.

Each starts with its own input, built in advance: lengths, the begin and end of each document (OLMo-core), or rows of
tokens (TRL, Grain, torchtune), of which it writes packs, with more work and memory than the others need. A packer
without a limit of depth is run without one only.

Left out: TRL's `bfd_split` (the same if no sequence is longer than a pack) and `wrapped` (cuts sequences);
LightBinPack's `ffd` and `bfd` (the packs of `obfd`); OR-Tools (its vector bin packing cannot be called from Python);
`seqpacker` (its Rust crates are not on PyPI); LLM Foundry's collator (packs within a batch, and needs Composer).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import adapters
from task import Attempt, Task

import evenpack

_ALONE = "--no-deps --ignore-requires-python "
"""Installation command for frameworks of which one module is imported."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One packer, which has a row in the table for each limit of depth that it supports."""

    name: str
    load: Callable[[Task], Attempt]
    distribution: str | None
    """Name of the package in pip; None for evenpack itself."""
    pip_options: str = ""
    limits_depth: bool = False
    moves_tokens: bool = False
    """Whether its packs consist of tokens; other packers use numbers of sequences or lengths."""
    most_sequences: int | None = None
    """Most sequences that it can pack in less than hours."""

    @property
    def version(self) -> str | None:
        """Returns the installed version; None if it is not installed."""
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
