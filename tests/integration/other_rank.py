"""A rank of a real run that, as rank 1, has another seed and another version of DeepSpeed than rank 0."""

import importlib.metadata
import os
import sys

from evenpack.launch_environment import RANK
from evenpack.launcher.worker import main

if __name__ == "__main__":
    overrides = []
    if RANK.read(os.environ) == 1:
        overrides = ["run.seed=6"]
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "0.0.0" if name == "deepspeed" else version(name)
    sys.exit(main([*sys.argv[1:], *overrides]))
