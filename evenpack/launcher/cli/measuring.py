"""The common part of commands that time this machine."""

import os


def settle_rank() -> None:
    """Divides this machine's cores among its ranks and chooses the accelerator, before torch is imported."""
    from evenpack.launcher.processes.devices import settle_accelerator
    from evenpack.launcher.processes.ranks import RankPlace
    from evenpack.launcher.worker import share_cores

    share_cores(RankPlace.of_environment(os.environ))
    settle_accelerator()
