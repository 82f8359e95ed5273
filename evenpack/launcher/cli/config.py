"""The commands `evenpack config ...`."""

from typing import Annotated

import typer

from evenpack.launcher.cli.arguments import SETTINGS, AsJson, Overrides, RunFile, load, reporting

config_app = typer.Typer(help="Look at run files and their keys.", no_args_is_help=True, context_settings=SETTINGS)

FileKind = Annotated[
    str, typer.Option("--file", metavar="KIND", help="run, finetune, or a study: equivalence, chunking, shuffle.")
]


@config_app.command("show")
def show_config(run_file: RunFile, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Print the whole run file, including defaults.

    \b
    Example:
      evenpack config show demo training.steps=10
    """
    config = load(run_file, overrides)
    with reporting(as_json) as report:
        import yaml

        from evenpack import console

        report.value = config.model_dump(mode="json")
        report.shown.append(console.text(yaml.safe_dump(report.value, sort_keys=False, width=100).rstrip()))


@config_app.command("list")
def list_configs(*, as_json: AsJson = False) -> None:
    """List the run files that come with evenpack.

    Every command takes their names in place of a path.

    \b
    Example:
      evenpack config list
    """
    with reporting(as_json) as report:
        from evenpack import console
        from evenpack.shipped import first_comment, shipped_run_files

        report.value = [
            {"name": name, "about": first_comment(path), "path": path} for name, path in shipped_run_files().items()
        ]
        report.shown.append(console.table([{key: row[key] for key in ("name", "about")} for row in report.value]))


@config_app.command("explain")
def explain(
    key: Annotated[
        str | None,
        typer.Argument(metavar="[section.key]", help="A key or a section. Default: all keys.", show_default=False),
    ] = None,
    *,
    file: FileKind = "run",
    as_json: AsJson = False,
) -> None:
    """Say what the keys of a run file mean: type, unit, default.

    \b
    Examples:
      evenpack config explain
      evenpack config explain data.recipe
      evenpack config explain training.packs_per_step
      evenpack config explain equivalence.margin --file equivalence
    """
    with reporting(as_json) as report:
        from evenpack.launcher.reference import views
        from evenpack.launcher.reference.files import schema_of
        from evenpack.launcher.reference.keys import keys_of
        from evenpack.launcher.reference.lookup import keys_at

        keys = keys_of(schema_of(file))
        report.value = keys_at(keys, key)
        report.shown += [views.outline(keys)] if key is None else views.explained(keys, key)


@config_app.command("schema")
def schema(*, file: FileKind = "run", as_json: AsJson = False) -> None:
    """Print the JSON schema of run files, by which editors complete and check keys.

    It is one JSON document, with --json and without.

    \b
    Example:
      evenpack config schema > run_file.schema.json
    """
    with reporting(as_json) as report:
        import json

        from evenpack import console
        from evenpack.launcher.reference.files import json_schema

        report.value = json_schema(file)
        report.shown.append(console.text(json.dumps(report.value, indent=2)))
