"""Places of ranks on machines that have equally many."""

from evenpack.launcher.processes.identities import RankPlace


def place_of(rank: int, *, ranks: int, each: int) -> RankPlace:
    """Returns the place of a rank; `each`: the ranks of each machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
    return RankPlace.of_environment({name: str(number) for name, number in numbers.items()})
