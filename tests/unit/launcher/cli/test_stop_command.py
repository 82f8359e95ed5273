"""`evenpack stop` asks the run that goes on."""

from pathlib import Path

from command_line import evenpack
from run_files import run_values, text_sources, write_run_file

from evenpack.launcher.processes.identities import RankPlace
from evenpack.launcher.processes.ranks import RankFolder, RankStatus
from evenpack.launcher.processes.stop import read_stop_request


def test_a_run_that_goes_on_is_asked_to_stop(tmp_path: Path) -> None:
    values = run_values("gpt2", tmp_path, data={"sources": text_sources(tmp_path, {"lines": ["some text"]})})
    run_file, output_dir = write_run_file(tmp_path / "run.yaml", values), tmp_path / "out"
    folder = RankFolder(output_dir, "now")
    folder.path.mkdir(parents=True)
    status = RankStatus.starting("now", RankPlace.of_environment({}))
    folder.write_status(status)
    assert evenpack("stop", run_file).code == 0
    request = read_stop_request(output_dir, "now")
    assert request is not None
    assert not request.at_once
    folder.write_status(status.ended("finished", exit_code=0, step=6))
    code, _, message = evenpack("stop", run_file)
    assert code == 2
    assert "no run is going on" in " ".join(message.split())
