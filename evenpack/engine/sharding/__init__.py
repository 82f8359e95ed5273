"""The split of a model's training state over the ranks (ZeRO), and what a run needs of it; see `stages.py`."""

from evenpack.engine.sharding.stages import SHARDINGS, Sharding

__all__ = ["SHARDINGS", "Sharding"]
