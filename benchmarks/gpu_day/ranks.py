"""Starts ranks on this machine by `deepspeed`, on its GPUs, or with DS_ACCELERATOR=cpu on its CPU.

python benchmarks/gpu_day/ranks.py RANKS PROGRAM.py [ARGUMENT ...]
python benchmarks/gpu_day/ranks.py RANKS --module MODULE [ARGUMENT ...]
"""

import os
import sys

from evenpack.launch_environment import free_port


def deepspeed_command(ranks: int) -> list[str]:
    """Returns `deepspeed` with its options, at an unused port."""
    options = ["--log_level=critical", "--no_local_rank", f"--num_gpus={ranks}", f"--master_port={free_port()}"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *options]
    return [*command, f"--hostfile={os.devnull}"]  # else it reads that of /job, if there is one


def main() -> None:
    """Becomes `deepspeed`, so that signals reach it."""
    ranks, *words = sys.argv[1:]
    command = deepspeed_command(int(ranks))
    os.execv(command[0], [*command, *words])


if __name__ == "__main__":
    main()
