"""Files appear whole and on disk, or not at all; lines that are not JSON are refused with the reason."""

import os
import re
from pathlib import Path

import pytest

from evenpack.errors import ConfigError, RunError
from evenpack.files import (
    atomic_directory,
    atomic_open,
    read_json_object,
    read_kept,
    require_new_folder,
    write_text,
    write_text_once,
)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the names of files flushed to disk, in order, with renames as '-> NAME'."""
    events: list[str] = []
    replace = os.replace

    def watched_replace(source: Path, target: Path) -> None:
        replace(source, target)
        events.append(f"-> {target.name}")

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(Path(f"/dev/fd/{descriptor}").readlink().name))
    monkeypatch.setattr(os, "replace", watched_replace)
    return events


def write_half(folder: Path) -> None:
    (folder / "new").touch()
    raise ZeroDivisionError


def write_two(path: Path, ours: Path) -> None:
    with atomic_directory(path) as theirs:
        (theirs / "exported").touch()
    (ours / "exported too").touch()


class TestAtomicDirectory:
    def test_all_in_it_is_on_disk_before_it_has_its_name(self, tmp_path: Path, flushed: list[str]) -> None:
        with atomic_directory(tmp_path / "whole") as folder:
            (folder / "inner").mkdir()
            for name in ("a", "inner/b"):
                (folder / name).write_text(name)
            unfinished = folder.name
            assert not (tmp_path / "whole").exists()
        assert flushed == ["a", "inner", "b", unfinished, "-> whole", tmp_path.name]
        assert (tmp_path / "whole" / "inner" / "b").read_text() == "inner/b"

    def test_it_takes_the_place_of_an_earlier_one_where_it_may(self, tmp_path: Path) -> None:
        for name in ("old", "new"):
            with atomic_directory(tmp_path / "whole", replaces=True) as folder:
                (folder / name).touch()
        assert [path.name for path in (tmp_path / "whole").iterdir()] == ["new"]
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]

    def test_what_another_process_has_put_there_meanwhile_stays(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="not empty"), atomic_directory(tmp_path / "whole") as ours:
            write_two(tmp_path / "whole", ours)
        assert [path.name for path in tmp_path.rglob("*")] == ["whole", "exported"]

    def test_an_error_leaves_the_earlier_one_and_nothing_else(self, tmp_path: Path) -> None:
        with atomic_directory(tmp_path / "whole") as folder:
            (folder / "old").touch()
        with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "whole") as folder:
            write_half(folder)
        assert [path.name for path in tmp_path.rglob("*")] == ["whole", "old"]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, flushed: list[str]) -> None:
    write_text(tmp_path / "a.json", "{}")
    assert re.fullmatch(r"\.a\.json\.[0-9a-f]{32}\.partial -> a\.json", " ".join(flushed[:2]))
    assert flushed[2:] == [tmp_path.name]


def test_writers_with_one_process_id_as_in_two_containers_do_not_meet(tmp_path: Path) -> None:
    with atomic_open(tmp_path / "a.json") as ours:
        write_text(tmp_path / "a.json", "theirs")
        ours.write(b"ours")
    assert (tmp_path / "a.json").read_text() == "ours"


def test_of_several_writers_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    assert [write_text_once(path, text) for text in ("one", "two")] == [True, False]
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_an_object_is_read_and_anything_else_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "a.json") == {"a": 1}
    for content in (b"[1]", b'{"a": ', b"\xff{}"):
        (tmp_path / "a.json").write_bytes(content)
        assert read_json_object(tmp_path / "a.json") is None
    for missing in (tmp_path / "b.json", tmp_path):
        assert read_json_object(missing) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is the current directory"),
        ("..", "is not an empty directory"),
        ("../file", "is not an empty directory"),
        ("../file/new", "where this command would write, is not a folder"),
    ],
)
def test_a_place_where_no_new_folder_can_be_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=message):
        require_new_folder(Path(name))
    require_new_folder(Path("some/new"))


def test_a_result_that_cannot_be_read_now_is_neither_missing_nor_damaged(tmp_path: Path) -> None:
    (tmp_path / "result.json").symlink_to("result.json")
    assert read_kept(tmp_path / "none.json") is None
    with pytest.raises(RunError, match=r"result\.json cannot be read: .*symbolic links; the file may be intact"):
        read_kept(tmp_path / "result.json")
