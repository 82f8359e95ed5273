"""The command `evenpack train`."""

from pathlib import Path
from typing import Annotated

import typer

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
    hostfile: Annotated[
        Path | None, typer.Option(help="Machines to run on, in lines 'NAME slots=N'.", show_default=False)
    ] = None,
    deepspeed_options: Annotated[
        str, typer.Option(help="Further options of `deepspeed`, in one string.", show_default=False)
    ] = "",
    prepare: Annotated[bool, typer.Option("--prepare", help="Prepare missing data first; also for --dry-run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a prepared run under `deepspeed`.

    Continues from the newest checkpoint in run.output_dir. Ctrl-C or SIGTERM saves at the end of the step and ends
    with exit code 75; run the same command again to continue. A second Ctrl-C ends immediately.

    \b
    Examples:
      evenpack train gpt2_small --num-gpus 8 training.steps=5000
      evenpack train demo --cpu-ranks 4
    """
    from evenpack.launcher.processes.launch import plan_launch
    from evenpack.launcher.processes.streams import survive_hang_up

    survive_hang_up()
    config = load(run_file, overrides)
    exit_code = 0
    with reporting(as_json) as report:
        from evenpack.launcher.start import describe_result, describe_run, run_training
        from evenpack.launcher.training import plan_training

        launch = plan_launch(
            run_file,
            overrides or [],
            num_gpus=num_gpus,
            cpu_ranks=cpu_ranks,
            hostfile=hostfile,
            deepspeed_options=deepspeed_options,
        )
        if prepare:
            from evenpack.launcher.preparing import prepare_run

            prepare_run(config)
        plan = plan_training(config, ranks=launch.devices.ranks)
        if dry_run:
            report.value, report.shown = describe_run(launch, plan)
        else:
            result = run_training(config.run, launch, plan)
            report.value, report.shown = describe_result(config.run.name, result)
            exit_code = result.exit_code
    raise typer.Exit(exit_code)
