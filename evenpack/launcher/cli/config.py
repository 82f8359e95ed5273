"""`evenpack config ...`."""

import typer

from evenpack.launcher.cli.arguments import SETTINGS, AsJson, Overrides, RunFile, load, reporting

config_app = typer.Typer(help="Look at run files.", no_args_is_help=True, context_settings=SETTINGS)


@config_app.command("show")
def show_config(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the whole run, defaults included.

    \b
    Example:
      evenpack config show configs/demo.yaml training.steps=10
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        import yaml

        from evenpack import console

        report.value = config.model_dump(mode="json")
        report.shown.append(console.text(yaml.safe_dump(report.value, sort_keys=False, width=100).rstrip()))
