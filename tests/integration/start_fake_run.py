"""Runs `evenpack train` without data and model: launches fake ranks and prints the outcome as JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from evenpack.config import load_run_file
from evenpack.engine.config import RunConfig
from evenpack.launcher.processes.hangs import HangLimits
from evenpack.launcher.processes.start import plan_launch
from evenpack.launcher.processes.stop import say, survive_readers
from evenpack.launcher.processes.supervise import supervise


def main(run_file: str, output_dir: str, ranks: str, hostfile: str, *overrides: str) -> int:
    survive_readers()
    plan = plan_launch(
        Path(run_file),
        overrides,
        num_gpus=None,
        cpu_ranks=None if hostfile else int(ranks),
        hostfile=Path(hostfile) if hostfile else None,
        module="fake_worker",
    )
    limits = HangLimits.of(load_run_file(Path(run_file), RunConfig, overrides).run)
    result = supervise(plan, Path(output_dir), say=say, limits=limits)
    (Path(output_dir) / "result.json").write_text(json.dumps(asdict(result)))
    say(result.message)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
