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
        str, typer.Option(help="Options of `deepspeed`, in one string; it starts the ranks then.", show_default=False)
    ] = "",
    profile: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Sets run.profile_steps: a trace of so many steps, and a table."),
    ] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Prepare missing data first; also for --dry-run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and stop.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="For --dry-run: so many ranks, without their machines.", show_default=False),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="For --dry-run: this rank's first step is collated and faked.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="For --dry-run: the GPU, as h100. Default: this machine's.", show_default=False
        ),
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
    from evenpack.launcher.processes.launch import plan_launch
    from evenpack.launcher.processes.streams import survive_readers
    from evenpack.launcher.rehearsed_ranks import RehearsedRanks

    if not dry_run:
        survive_readers()
    if profile is not None:
        overrides = [*(overrides or []), f"run.profile_steps={profile}"]
    config = load(run_file, overrides)
    rehearsed = RehearsedRanks(ranks=ranks, rank=rank, device=device)
    rehearsed.require_valid(dry_run=dry_run, places_given=(num_gpus, cpu_ranks, hostfile) != (None, None, None))
    exit_code = 0
    with reporting(as_json) as report:
        from evenpack.launcher.start import describe_result, describe_run, run_training
        from evenpack.launcher.training import check_training, plan_training

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
        if dry_run:
            plan = plan_training(config, ranks=ranks, device=rehearsed.known_device())
            report.value, report.shown = describe_run(launch, plan)
            if rank is not None:
                report.value["rehearsal"], shown = rehearsed.rehearse(config, ranks=ranks)
                report.shown.append(shown)
        else:
            assert launch is not None, "there are ranks to start"
            result = run_training(launch, check_training(config, ranks=ranks))
            report.value, report.shown = describe_result(config.run.name, result)
            exit_code = result.exit_code
    raise typer.Exit(exit_code)
