"""The command line: `evenpack COMMAND RUN.yaml [section.key=value ...]`.

Commands are in files by subject. Each reads its arguments, calls the code that does the work, and shows the result; it
imports heavy modules itself.
"""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from evenpack.console import Report
from evenpack.errors import EvenpackError
from evenpack.files import is_of_the_system, system_error
from evenpack.launch_environment import refuse_other_options
from evenpack.launcher.cli.arguments import SETTINGS, fail, onto_stdout, reporting
from evenpack.launcher.cli.data import prepare, shards_app, verify, where
from evenpack.launcher.cli.results import evaluate, export, finetune, report, waits
from evenpack.launcher.cli.run_files import config_app, fork, new
from evenpack.launcher.cli.studies import STUDIES, probe
from evenpack.launcher.cli.training import doctor, plan, stop, train
from evenpack.launcher.processes.stop import end_with_starter, open_closed_streams, survive_readers
from evenpack.version import VERSION

COMMANDS: tuple[Callable[..., Report], ...] = (
    new,
    prepare,
    verify,
    plan,
    train,
    stop,
    fork,
    evaluate,
    report,
    waits,
    where,
    export,
    finetune,
    probe,
    doctor,
)
"""The commands in the order in which `--help` lists them; each has the name of its function."""

SAVING = (plan, evaluate, report, waits, where, probe, *STUDIES.values())
"""The commands whose JSON can be written into a file as well, by --save."""

GONE = {
    "budget": "plan",
    "inspect": "plan for a run, study packing for lengths",
    "plan --devices": "--ranks",
    "train --deepspeed-options": "deepspeed or mpirun with evenpack.launcher.worker; docs/running.md has the commands",
    "plan --deepspeed-options": "deepspeed itself; docs/running.md has the commands",
    "train --ranks": "plan --ranks",
    "train --rank": "plan --rank",
    "train --device": "plan --device",
    "mlperf": "python -m mlperf_logging.compliance_checker; docs/bert.md has the line",
    "study imbalance --padded-baseline": "--baseline-run",
    "study imbalance --shard-spread": "docs/imbalance.md, which has what logs show of such loaders",
    "study imbalance --all-reduce-bytes": "a constant, to be added to each step",
    "study imbalance --bandwidth": "a constant, to be added to each step",
    "study imbalance --causal": "causal in the file of --cost-model",
    "study imbalance --bidirectional": "causal in the file of --cost-model",
    "prepare --part-bytes": "nothing: the size of parts follows from the source",
    "slurm": "sbatch examples/train.sbatch RUN.yaml; docs/running.md explains it",
    "shards export": "evenpack.Loader, which feeds other trainers",
    "study evenness": "study imbalance; docs/imbalance.md has its result",
    "study shuffle": "study equivalence with arms that set data.shuffle; docs/studies/shuffle_mini.md has its result",
    "study packing --residuals": "--depths 3 --algorithms least_squares:weight=0.09:weight_up_to=8, a call for each",
    "study packing --residuals-up-to": "weight_up_to of --algorithms least_squares",
    "study packing --beside": "a call for each input",
    "study imbalance --published": "nothing: wikipedia_512 has it",
    "study imbalance --no-published": "nothing: only wikipedia_512 has it",
    "shards pick --layout": "nothing: it is that of the shards",
    "study packing --split": "a file of the split's lengths, or evenpack prepare",
    "study chunking --device": "the evenpack plan that --dry-run shows",
    "study chunking --mfu": "the evenpack plan that --dry-run shows",
    "study chunking --corpus-tokens": "the evenpack plan that --dry-run shows",
    "study roofline": "study throughput; docs/gpu.md has measured steps",
}
"""Commands and options that there were, and what to use."""

app = typer.Typer(
    help="Distributed pretraining on DeepSpeed: equal packs for every GPU, nearly no padding, no attention "
    "between sequences.\n\n\b\nA first run:\n  evenpack prepare demo\n  evenpack train demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings=SETTINGS,
)
study_app = typer.Typer(help="Measure, simulate and compare.", no_args_is_help=True, context_settings=SETTINGS)
for command in COMMANDS:
    app.command()(command)
for name, study in STUDIES.items():
    study_app.command(name)(study)


def _show_version(is_asked: bool | None) -> None:
    if is_asked:
        with onto_stdout():
            typer.echo(f"evenpack {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool | None, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = None,
) -> None:
    """The options of evenpack itself; its commands have their own."""


app.add_typer(config_app, name="config")
app.add_typer(shards_app, name="shards")
app.add_typer(study_app, name="study")


for group in (app, *(added.typer_instance for added in app.registered_groups)):
    assert group is not None, "each was added above"
    for registered in group.registered_commands:
        assert registered.callback is not None, "each has a function"
        registered.callback = reporting(registered.callback, saves=registered.callback in SAVING)


def main() -> None:
    """Runs the command line. An error that the user can correct becomes a message and exit code 2."""
    open_closed_streams()
    try:
        _run()
    finally:
        with onto_stdout():  # what Python would only write at its end
            pass


def _run() -> None:
    end_with_starter()
    if sys.argv[1:2] == [train.__name__]:
        survive_readers()
    try:
        refuse_other_options(sys.argv[1:])
        _refuse_what_is_gone(sys.argv[1:])
        app()
    except EvenpackError as error:
        fail(str(error))
    except Exception as error:
        if is_of_the_system(error):
            fail(system_error(error))
        raise


def _refuse_what_is_gone(arguments: list[str]) -> None:
    for gone, instead in GONE.items():
        *command, name = gone.split()
        words = arguments[len(command) :] if arguments[: len(command)] == command else []
        is_option = name.startswith("-")
        if name in [word.partition("=")[0] for word in (words if is_option else words[:1])]:
            fail(f"No such {'option' if is_option else 'command'} '{name}': use {instead}")
