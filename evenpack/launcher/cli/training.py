"""Commands on training and its machines: `evenpack plan`, `train`, `stop` and `doctor`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from evenpack import console
from evenpack.console import Report
from evenpack.launcher.cli.arguments import Overrides, RunFile, load, takes
from evenpack.studies.plan.options import PlanOptions

NumGpus = Annotated[
    int | None,
    typer.Option("--num-gpus", "-n", help="GPUs of this machine (or of each in a hostfile). Default: all."),
]
CpuRanks = Annotated[
    int | None, typer.Option("--cpu-ranks", help="Ranks on this machine's CPU. Default: 2 if it has no GPU.")
]
Hostfile = Annotated[Path | None, typer.Option("--hostfile", help="Machines to run on, in lines 'NAME slots=N'.")]
Prepare = Annotated[bool, typer.Option("--prepare", help="Prepare missing data first.")]


@takes("options", PlanOptions)
def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    num_gpus: NumGpus = None,
    cpu_ranks: CpuRanks = None,
    hostfile: Hostfile = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="So many ranks, without their machines. Default: those of this one; with --device 1."),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Rehearse the first step of this rank.")] = None,
    options: PlanOptions,
    prepare: Prepare = False,
) -> Report:
    """Show what a run is before it starts: its data, a step, memory, cost, and what would be started.

    It is exact over prepared data; otherwise it is estimated from --corpus-tokens, or from the run file alone.
    docs/plan.md explains how each figure is computed.

    \b
    Examples:
      evenpack plan demo
      evenpack plan gpt2_small --ranks 8 --device h100
      evenpack plan RUN.yaml --corpus-tokens 114400095 --corpus-documents 799439 training.steps=null training.epochs=2
      evenpack plan gpt2_xl --ranks 2048 --rank 1777 --device h100
    """
    config = load(run_file, overrides)
    from evenpack.errors import ConfigError
    from evenpack.launcher.planning import describe_plan
    from evenpack.launcher.processes.start import plan_launch

    options.require_valid()
    has_places = (num_gpus, cpu_ranks, hostfile) != (None, None, None)
    if ranks is not None and has_places:
        raise ConfigError(
            "--ranks is for ranks without machines: leave --num-gpus, --cpu-ranks and --hostfile out, or leave "
            "--ranks out"
        )
    launch = None
    if ranks is None and (has_places or options.device is None):
        launch = plan_launch(
            run_file,
            overrides or [],
            num_gpus=num_gpus,
            cpu_ranks=cpu_ranks,
            hostfile=hostfile,
        )
        ranks = launch.devices.ranks
    if prepare:
        from evenpack.launcher.preparing import prepare_run

        prepare_run(config)
    return describe_plan(config, options, launch=launch, ranks=ranks or 1, rank=rank)


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    *,
    num_gpus: NumGpus = None,
    cpu_ranks: CpuRanks = None,
    hostfile: Hostfile = None,
    profile: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Sets run.profile_steps: a trace of so many steps, and a table."),
    ] = None,
    prepare: Prepare = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan (evenpack plan), and stop.")] = False,
) -> Report:
    """Train a prepared run by DeepSpeed.

    Continues from the newest checkpoint in run.output_dir. Ctrl-C or SIGTERM saves at the end of the step and ends
    with exit code 75; run the same command again to continue. A second Ctrl-C ends immediately.

    \b
    Examples:
      evenpack train gpt2_small --num-gpus 8 training.steps=5000
      evenpack train demo --cpu-ranks 4
    """
    if profile is not None:
        overrides = [*(overrides or []), f"run.profile_steps={profile}"]
    places: dict[str, Any] = {"num_gpus": num_gpus, "cpu_ranks": cpu_ranks, "hostfile": hostfile}
    if dry_run:
        of_plan = {field.name: None for field in dataclasses.fields(PlanOptions)}
        return plan(run_file=run_file, overrides=overrides, **places, **of_plan, prepare=prepare)
    from evenpack.launcher.processes.start import plan_launch

    config = load(run_file, overrides)
    from evenpack.launcher.training import check_training, describe_result, run_training

    launch = plan_launch(run_file, overrides or [], config=config, **places)
    if prepare:
        from evenpack.launcher.preparing import prepare_run

        prepare_run(config)
    checked = check_training(config, ranks=launch.devices.ranks)
    return describe_result(config.run.name, run_training(launch, checked))


def stop(run_file: RunFile, overrides: Overrides = None) -> Report:
    """Ask a run that is going on to save at the end of its step and end.

    On any machine that sees run.output_dir, whatever has started the run. It ends with exit code 75; the command that
    started it continues it.

    \b
    Example:
      evenpack stop RUN.yaml
    """
    config = load(run_file, overrides)
    from evenpack.launcher.processes.ranks import running_run
    from evenpack.launcher.processes.stop import StopRequest, write_stop_request

    output_dir = config.run.output_dir
    write_stop_request(output_dir, StopRequest(run_id=running_run(output_dir), at_once=False))
    done = f"Asked the run in {output_dir} to save and end at the end of its step"
    return Report(value={"output_dir": output_dir}, shown=[console.text(done)])


EXIT_PROBE_FAILED = 1
"""Exit code if a probe has failed, or there is no `deepspeed`."""


def doctor() -> Report:
    """Check this machine and its attention backends.

    Shows versions, devices, the requests that each backend can serve, and a probe that each isolates sequences. Exit
    code 1 if a probe fails or there is no `deepspeed`.

    \b
    Example:
      evenpack doctor --json
    """
    from evenpack.launcher.doctor import examine, tables

    found = examine()
    return Report(value=found, shown=tables(found), exit_code=0 if found.ok else EXIT_PROBE_FAILED)
