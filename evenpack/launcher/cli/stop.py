"""The command `evenpack stop`."""

from evenpack.launcher.cli.arguments import AsJson, Overrides, RunFile, load, reporting


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
        from evenpack import console
        from evenpack.launcher.processes.heartbeat import silent_seconds
        from evenpack.launcher.processes.ranks import RankFolder, running_run
        from evenpack.launcher.processes.stop import StopRequest, write_stop_request
        from evenpack.progress import format_duration

        output_dir = config.run.output_dir
        run_id = running_run(output_dir)
        request = write_stop_request(output_dir, StopRequest(run_id=run_id, at_once=False))
        silent = silent_seconds(RankFolder(output_dir, run_id).path, 0, run_id=run_id, now=request)
        report.value = {"output_dir": output_dir, "silent_seconds": silent}
        report.shown = [console.text(f"Asked the run in {output_dir} to save and end at the end of its step")]
        if silent is not None:
            report.shown.append(
                console.text(
                    f"Its rank 0 has written no heartbeat for {format_duration(silent)}: it was stopped, its machine "
                    "is down, or it was killed, and then nothing is left to stop"
                )
            )
