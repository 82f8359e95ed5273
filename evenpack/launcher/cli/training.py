"""Commands on training and its machines: `evenpack train`, `stop`, `slurm` and `doctor`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from evenpack import console
from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    num_gpus: Annotated[
        int | None,
        typer.Option("--num-gpus", "-n", help="GPUs of this machine (or of each in a hostfile). Default: all."),
    ] = None,
    cpu_ranks: Annotated[
        int | None, typer.Option("--cpu-ranks", help="Ranks on this machine's CPU. Default: 2 if it has no GPU.")
    ] = None,
    hostfile: Annotated[Path | None, typer.Option(help="Machines to run on, in lines 'NAME slots=N'.")] = None,
    deepspeed_options: Annotated[
        str, typer.Option(help="Options of `deepspeed`, in one string; it starts the ranks then.")
    ] = "",
    profile: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Sets run.profile_steps: a trace of so many steps, and a table."),
    ] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Prepare missing data first; also for --dry-run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and stop.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="For --dry-run: so many ranks, without their machines.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="For --dry-run: rehearse the first step of this rank.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="For --dry-run: the GPU, as h100. Default: this machine's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a prepared run by DeepSpeed.

    Continues from the newest checkpoint in run.output_dir. Ctrl-C or SIGTERM saves at the end of the step and ends
    with exit code 75; run the same command again to continue. A second Ctrl-C ends immediately.

    \b
    Examples:
      evenpack train gpt2_small --num-gpus 8 training.steps=5000
      evenpack train demo --cpu-ranks 4
      evenpack train gpt2_xl --dry-run --ranks 2048 --rank 1777 --device h100
    """
    from evenpack.launcher.processes.start import plan_launch
    from evenpack.launcher.processes.stop import survive_readers
    from evenpack.launcher.training import RehearsedRanks

    if not dry_run:
        survive_readers()
    if profile is not None:
        overrides = [*(overrides or []), f"run.profile_steps={profile}"]
    config = load(run_file, overrides)
    rehearsed = RehearsedRanks(ranks=ranks, rank=rank, device=device)
    rehearsed.require_valid(dry_run=dry_run, places_given=(num_gpus, cpu_ranks, hostfile) != (None, None, None))
    with reporting(as_json) as report:
        from evenpack.launcher.training import (
            check_training,
            describe_result,
            describe_run,
            plan_checked,
            run_training,
        )

        launch = None
        if ranks is None:
            launch = plan_launch(
                run_file,
                overrides or [],
                config=None if dry_run else config,
                num_gpus=num_gpus,
                cpu_ranks=cpu_ranks,
                hostfile=hostfile,
                deepspeed_options=deepspeed_options,
            )
            ranks = launch.devices.ranks
        if prepare:
            from evenpack.launcher.preparing import prepare_run

            prepare_run(config)
        device_of_plan = rehearsed.known_device() if dry_run else None
        checked = check_training(config, ranks=ranks)
        if dry_run:
            report.take(describe_run(launch, plan_checked(checked, ranks=ranks, device=device_of_plan)))
            if rank is not None:
                report.value["rehearsal"], shown = rehearsed.rehearse(checked, ranks=ranks)
                report.shown.append(shown)
        else:
            assert launch is not None, "there are ranks to start"
            report.take(describe_result(config.run.name, run_training(launch, checked)))


def stop(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Ask a run that is going on to save at the end of its step and end.

    On any machine that sees run.output_dir, whatever has started the run. It ends with exit code 75; the command that
    started it continues it.

    \b
    Example:
      evenpack stop RUN.yaml
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        from evenpack.launcher.processes.hangs import silent_seconds
        from evenpack.launcher.processes.ranks import RankFolder, running_run
        from evenpack.launcher.processes.stop import StopRequest, write_stop_request
        from evenpack.progress import format_duration

        output_dir = config.run.output_dir
        run_id = running_run(output_dir)
        request = write_stop_request(output_dir, StopRequest(run_id=run_id, at_once=False))
        silent = silent_seconds(RankFolder(output_dir, run_id), 0, now=request)
        report.value = {"output_dir": output_dir, "silent_seconds": silent}
        report.shown = [console.text(f"Asked the run in {output_dir} to save and end at the end of its step")]
        if silent is not None:
            report.shown.append(
                console.text(
                    f"Its rank 0 has written no heartbeat for {format_duration(silent)}: it was stopped, its machine "
                    "is down, or it was killed, and then nothing is left to stop"
                )
            )


def slurm(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 8,
    time: Annotated[str | None, typer.Option(help="Time limit, as 1-12:00:00. Default: the partition's.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    seconds_to_save: Annotated[int, typer.Option(min=1, help="Seconds for a save before the time is up.")] = 300,
    output: Annotated[Path | None, typer.Option(help="The script. Default: RUN.sbatch.")] = None,
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
        script = output or Path(f"{run_file.name.removesuffix('.yaml').removesuffix('.yml')}.sbatch")
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


EXIT_PROBE_FAILED = 1
"""Exit code if a probe has failed, or there is no `deepspeed`."""


def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine and its attention backends.

    Shows versions, devices, the requests that each backend can serve, and a probe that each isolates sequences. Exit
    code 1 if a probe fails or there is no `deepspeed`.

    \b
    Example:
      evenpack doctor --json
    """
    with reporting(as_json) as report:
        from evenpack.launcher.doctor import examine, tables

        found = examine()
        report.value, report.shown = found, tables(found)
        report.exit_code = 0 if found.ok else EXIT_PROBE_FAILED
