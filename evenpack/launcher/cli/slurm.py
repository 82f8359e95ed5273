"""The command `evenpack slurm`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def slurm(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    time: Annotated[
        str | None, typer.Option(help="Time limit, as 1-12:00:00. Default: the partition's.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.", show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="Account.", show_default=False)] = None,
    seconds_to_save: Annotated[int, typer.Option(min=1, help="Seconds for a save before the time is up.")] = 300,
    output: Annotated[Path | None, typer.Option(help="The script. Default: RUN.sbatch.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Write the batch script that trains on several nodes of a Slurm cluster.

    The run must be prepared. A job that runs out of time saves, queues itself again and resumes.

    \b
    Examples:
      evenpack slurm gpt2_xl --nodes 4 --time 12:00:00
      evenpack slurm RUN.yaml --nodes 2 --gpus-per-node 4 --partition gpu --output night.sbatch
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.errors import ConfigError
        from evenpack.files import write_text
        from evenpack.launcher.slurm import SlurmJob, slurm_script
        from evenpack.launcher.training import plan_training

        job = SlurmJob(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            time=time,
            partition=partition,
            account=account,
            seconds_to_save=seconds_to_save,
        )
        script = output or Path(f"{run_file.stem}.sbatch")
        if script.exists():
            raise ConfigError(f"{script} exists already: remove it, or choose another name with --output")
        plan_training(config, ranks=job.ranks)
        text = slurm_script(
            job,
            name=config.run.name,
            run_file=run_file,
            overrides=overrides or [],
            output_dir=config.run.output_dir,
            script=script,
            directory=Path.cwd(),
        )
        try:
            config.run.output_dir.mkdir(parents=True, exist_ok=True)  # Slurm writes its log there, and makes no folder
        except OSError as error:
            raise ConfigError(f"run.output_dir {config.run.output_dir} cannot be made: {error.strerror}") from error
        try:
            write_text(script, text)
        except OSError as error:
            raise ConfigError(f"--output {script} cannot be written: {error.strerror}") from error
        report.value = {"script": script, "ranks": job.ranks}
        report.shown = [
            console.text(f"Wrote {script} for {job.ranks} ranks. Submit it: sbatch {shlex.quote(str(script))}")
        ]
