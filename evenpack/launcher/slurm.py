"""The batch script that runs a run file on several nodes of a Slurm cluster."""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenpack.errors import EXIT_STOPPED, ConfigError
from evenpack.launcher.processes.start import WORKER_MODULE

_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}", re.ASCII)
"""A time in Slurm's forms: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
_DIRECTIVE = re.compile(r"[^\s\"'\\]+")

_TEMPLATE = """\
#!/usr/bin/env bash
# {run_comment} on {nodes} nodes x {gpus} GPUs, written by `evenpack slurm`. Submit it by: sbatch {script_comment}
#
# Slurm starts this script on the first node; srun starts `deepspeed` once on every node, and that a rank for each GPU.
# Before the time is up Slurm sends USR1: the run saves at the end of its step, the job is queued again and resumes.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
{directives}
#SBATCH --signal=B:USR1@{seconds_to_save}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output_dir}/slurm_%j.log
set -uo pipefail

out_of_time=0 step=
save_and_stop() {{  # asks until the run has ended: before it has begun, the status of an earlier one may be there
    while kill -0 "$step" 2> /dev/null; do "$python" -m evenpack.launcher.cli stop "${{run[@]}}"; sleep 5; done
}}
trap 'out_of_time=1; [ -z "$step" ] || save_and_stop' USR1
cd {directory} || exit 1

python={python}
run=({arguments})
output_dir={output_dir_quoted}

# Ranks meet at the first node. Each job has its own port, because jobs may share a node.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hostfile="$output_dir/hosts_$SLURM_JOB_ID"
export hostfile python MASTER_ADDR="${{hosts[0]}}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000)) PYTHONUNBUFFERED=1
mkdir -p "$output_dir" && printf '%s slots={gpus}\\n' "${{hosts[@]}}" > "$hostfile" || exit 1

# A node that ends must not end the others at once: all end by themselves, after a failure within a minute.
# shellcheck disable=SC2016  # each node puts in its own number
srun --cpu-bind=none --kill-on-bad-exit=0 --wait=120 bash -c '
    exec "$python" -m deepspeed.launcher.runner --log_level=critical --no_ssh --node_rank="$SLURM_NODEID" \\
        --hostfile="$hostfile" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --module {module} "$@"
' bash "${{run[@]}}" &
step=$!
[ "$out_of_time" -eq 0 ] || save_and_stop  # USR1 came before there was a step
while kill -0 "$step" 2> /dev/null; do  # USR1 ends a wait, and not the run
    wait "$step"
done
code=0
wait "$step" || code=$?  # bash keeps it, also if the run has ended during the trap
rm -f "$hostfile"

if [ "$code" -eq {stopped} ] && [ "$out_of_time" -eq 1 ]; then
    echo "saved before the time was up: queueing the job again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The job's requests to Slurm."""

    nodes: int
    gpus_per_node: int
    time: str | None
    partition: str | None
    account: str | None
    seconds_to_save: int
    """Seconds from Slurm's signal to the end of the time: a step, an evaluation and a save must fit."""

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time}: Slurm takes minutes, HH:MM:SS or D-HH:MM:SS, as 1-12:00:00")
        limit = None if self.time is None else _limit_seconds(self.time)
        if limit is not None and limit <= self.seconds_to_save:
            raise ConfigError(
                f"--time {self.time} is {limit} s, and must be longer than --seconds-to-save, which is "
                f"{self.seconds_to_save} s: the run would be asked to save before it has begun. Give a longer --time, "
                "or fewer --seconds-to-save"
            )
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value is not None and not _DIRECTIVE.fullmatch(value):
                raise ConfigError(f"{option} {value!r}: expected a name without spaces and quotes")

    @property
    def ranks(self) -> int:
        """Number of ranks, one for each GPU."""
        return self.nodes * self.gpus_per_node

    def directives(self) -> list[str]:
        """Returns the lines of the script for Slurm that depend on the job."""
        values = {
            "--gpus-per-node": str(self.gpus_per_node),
            "--time": self.time,
            "--partition": self.partition,
            "--account": self.account,
        }
        return [f"#SBATCH {name}={value}" for name, value in values.items() if value is not None]


def _limit_seconds(time: str) -> int | None:
    """Returns the time limit of a job in seconds, which Slurm rounds up to minutes; None: no limit, which is its 0."""
    days, _, rest = time.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if days or len(fields) == 3:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    else:
        hours, minutes, seconds = 0, *(*fields, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return math.ceil(total / 60) * 60 or None


def _in_comment(path: Path) -> str:
    """Returns a path as a word of bash, in one line whatever is in it: Slurm obeys lines that begin with #SBATCH."""
    text = str(path)
    return shlex.quote(text) if text.isprintable() else f"$'{ascii(text)[1:-1]}'"


def slurm_script(
    job: SlurmJob,
    *,
    name: str,
    run_file: Path,
    overrides: Sequence[str],
    output_dir: Path,
    script: Path,
    directory: Path,
    python: str = sys.executable,
    module: str = WORKER_MODULE,
) -> str:
    """Returns the batch script, to be written to `script`; relative paths start from `directory`.

    Raises: ConfigError if the path of the output directory has a character that Slurm would interpret.
    """
    absolute = directory / output_dir
    if not re.fullmatch(r"[\w@+=:,./-]+", str(absolute)):
        raise ConfigError(f"run.output_dir {absolute}: Slurm writes its log there, and takes no spaces and no signs")
    return _TEMPLATE.format(
        run_comment=_in_comment(run_file),
        script_comment=_in_comment(script),
        name=re.sub(r"[^\w.-]", "_", name),
        nodes=job.nodes,
        gpus=job.gpus_per_node,
        directives="\n".join(job.directives()),
        seconds_to_save=job.seconds_to_save,
        directory=shlex.quote(str(directory)),
        python=shlex.quote(python),
        arguments=shlex.join([str(run_file), *overrides]),
        output_dir=absolute,
        output_dir_quoted=shlex.quote(str(absolute)),
        module=module,
        stopped=EXIT_STOPPED,
    )
