"""Token files are written correctly across kills, full disks and torn writes, and wrong input is refused."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from token_files import all_documents, append_documents, hashes_of, make_documents, write

from evenpack.data.tokens.file import TokenFile
from evenpack.data.tokens.writer import TokenFileWriter, hashes_path, read_journal
from evenpack.errors import DataError, RunError


@pytest.mark.parametrize(
    ("vocabulary_size", "dtype"), [(2, "uint16"), (65_535, "uint16"), (65_536, "int32"), (200_000, "int32")]
)
def test_the_narrowest_type_that_holds_the_vocabulary_is_written(
    tmp_path: Path, vocabulary_size: int, dtype: str
) -> None:
    highest = vocabulary_size - 1
    tokens = write(tmp_path / "tokens", [np.array([0, highest])], vocabulary_size=vocabulary_size)

    assert tokens.dtype == np.dtype(dtype)
    assert all_documents(tokens) == [[0, highest]]


@pytest.mark.parametrize(("token", "place"), [(50_257, 0), (-1, 1), (70_000, 2)])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path, token: int, place: int) -> None:
    good = make_documents(4, vocabulary_size=50_257)
    bad = [document.copy() for document in good[:3]]
    bad[place][-1] = token
    with TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257) as writer:
        append_documents(writer, good, hashes_of(good))
        with pytest.raises(DataError, match=rf"document {4 + place} .* token id {token}, .* 50257 entries"):
            append_documents(writer, bad, hashes_of(bad))
        writer.finish()

    assert all_documents(TokenFile(tmp_path / "tokens")) == [document.tolist() for document in good]


@pytest.mark.parametrize("lengths", [[2, 2], [2, 4], [5, 0], [6, -1]])
def test_lengths_that_do_not_cover_the_tokens_are_refused(tmp_path: Path, lengths: list[int]) -> None:
    with (
        TokenFileWriter(tmp_path / "tokens", vocabulary_size=10) as writer,
        pytest.raises(ValueError, match="5 tokens came for 2 documents"),
    ):
        writer.append(np.arange(5), np.array(lengths), {"document_hashes": np.zeros(2, dtype=np.uint64)})


def test_the_record_of_a_finished_file_has_documents_checksums_and_state(tmp_path: Path) -> None:
    documents = make_documents(30, vocabulary_size=50_257)
    with TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257) as writer:
        append_documents(writer, documents, hashes_of(documents))
        record = writer.finish({"skipped": [1, 2]})

    assert record == read_journal(tmp_path / "tokens")
    assert (record.complete, record.documents, record.state) == (True, 30, {"skipped": [1, 2]})
    assert record.tokens == sum(len(document) for document in documents)
    for name, checksums in record.checksums.items():
        content = (tmp_path / name).read_bytes()
        assert (checksums.whole, checksums.bytes) == (xxhash.xxh3_128(content).hexdigest(), len(content))
    assert sorted(record.checksums) == ["document_hashes.npy", "tokens.bin", "tokens.idx"]
    assert {path.name for path in tmp_path.iterdir()} == {*record.checksums, "tokens.journal.json"}
    np.testing.assert_array_equal(np.load(hashes_path(tmp_path / "tokens")), hashes_of(documents))


DOCUMENTS = make_documents(30, vocabulary_size=50_257, seed=5)


def write_in_batches(writer: TokenFileWriter) -> None:
    """Writes ten documents per batch, from the document in the writer's state on."""
    with writer:
        for start in range(writer.state.get("next", 0), len(DOCUMENTS), 10):
            batch = DOCUMENTS[start : start + 10]
            append_documents(writer, batch, hashes_of(batch))
            writer.commit({"next": start + 10})
        writer.finish()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    write_in_batches(TokenFileWriter(directory / "tokens", vocabulary_size=50_257))
    return contents(directory)


class Killed(BaseException):
    """An exception that no code catches."""


@dataclass
class KillSwitch:
    """Lets `left` changes of the file system happen, then ends everything."""

    left: int
    done: int = 0

    def guard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if self.done == self.left:
                raise Killed
            self.done += 1
            return original(*arguments, **options)

        return guarded


@pytest.mark.parametrize("older_file_there", [False, True])
def test_a_kill_between_any_two_file_operations_is_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: dict[str, bytes], older_file_there: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a place to be killed at; slow, and not needed here
    older, newer = [[1, 2, 3]], [document.tolist() for document in DOCUMENTS]
    readable, operations, finished = set(), 0, False
    while not finished:
        prefix = tmp_path / str(operations) / "tokens"
        if older_file_there:
            write(prefix, [np.array(older[0])])
        switch = KillSwitch(left=operations)
        with pytest.MonkeyPatch.context() as patcher:
            for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "fsync"), (os, "truncate")):
                patcher.setattr(owner, name, switch.guard(getattr(owner, name)))
            try:
                write_in_batches(TokenFileWriter(prefix, vocabulary_size=50_257))
                finished = True
            except Killed:
                operations += 1

        if prefix.with_name("tokens.idx").exists():
            found = all_documents(TokenFile(prefix))
            assert found in (older, newer)
            readable.add("older" if found == older else "newer")
        else:
            readable.add("none")
        tear_what_is_not_committed(prefix)
        writer = TokenFileWriter.resume(prefix, vocabulary_size=50_257)
        if writer.complete and writer.documents == len(older):  # killed before anything was done
            assert (operations, found) == (1, older)
            writer = TokenFileWriter(prefix, vocabulary_size=50_257)
        write_in_batches(writer)
        assert contents(prefix.parent) == uninterrupted

    assert operations > 30
    assert readable == {"none", "newer", *(["older"] if older_file_there else [])}


def tear_what_is_not_committed(prefix: Path) -> None:
    """Leaves the files in the state of an interrupted write."""
    journal = read_journal(prefix)
    if journal is None or not journal.complete:
        for path in prefix.parent.glob("*.partial"):
            with path.open("ab") as file:
                file.write(b"torn!")


def test_everything_is_on_disk_before_a_journal_or_a_name_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: dict[int, int] = {}
    vouched: list[str] = []
    replace = Path.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        flushed[status.st_ino] = status.st_size

    def replace_checked(path: Path, target: Path) -> Path:
        journal = target.name == "tokens.journal.json"
        for file in [path, *(path.parent.glob("tokens.*.partial") if journal else [])]:
            assert flushed.get(file.stat().st_ino) == file.stat().st_size, f"{file.name} before {target.name}"
        vouched.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace_checked)
    write_in_batches(TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257))

    assert vouched == ["tokens.journal.json"] * 5 + ["tokens.bin", "document_hashes.npy", "tokens.idx"]


def test_a_full_disk_is_an_error_after_which_the_write_can_be_resumed(
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    files_of_at_most: Callable[[int], AbstractContextManager[None]],
) -> None:
    writer = TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257)
    with files_of_at_most(900), pytest.raises(RunError, match="tokens cannot be written: File too large; make room"):
        write_in_batches(writer)
    assert not (tmp_path / "tokens.idx").exists()
    assert not (tmp_path / "tokens.bin").exists()

    resumed = TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=50_257)
    assert resumed.documents == 20
    write_in_batches(resumed)
    assert contents(tmp_path) == uninterrupted


def test_a_write_that_takes_a_few_bytes_at_a_time_continues_until_all_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hesitant(io.FileIO):
        def write(self, content: Any, /) -> int:
            return super().write(content[:7])

    monkeypatch.setattr("evenpack.data.tokens.writer.io.FileIO", Hesitant)
    tokens = write(tmp_path / "tokens", DOCUMENTS)

    assert all_documents(tokens) == [document.tolist() for document in DOCUMENTS]


def test_a_new_writer_begins_again_and_an_abandoned_one_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        writer = TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257)
        assert (writer.documents, writer.state) == (0, {})
        append_documents(writer, DOCUMENTS, hashes_of(DOCUMENTS))
        writer.commit({"next": 30})
        writer.close()
    (tmp_path / ".tokens.journal.json.123.partial").touch()  # of a process killed while it noted something

    resumed = TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=50_257)
    assert (resumed.documents, resumed.state, resumed.complete) == (30, {"next": 30}, False)
    resumed.abandon()

    assert list(tmp_path.iterdir()) == []


def test_a_write_continues_only_with_the_same_vocabulary_and_whole_partial_files(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "tokens", vocabulary_size=50_257) as writer:
        append_documents(writer, DOCUMENTS, hashes_of(DOCUMENTS))
        writer.commit({})

    with pytest.raises(DataError, match="vocabulary of 50257, now it is 70000"):
        TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=70_000)

    os.truncate(tmp_path / "tokens.sizes.partial", 119)
    with pytest.raises(DataError, match=r"tokens.sizes.partial has 119 bytes, but .* recorded 120; remove the folder"):
        TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=50_257)

    (tmp_path / "tokens.sizes.partial").unlink()
    with pytest.raises(DataError, match="has 0 bytes"):
        TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=50_257)

    with pytest.raises(DataError, match="with the columns document_hashes, now they are document_hashes, marks"):
        TokenFileWriter.resume(
            tmp_path / "tokens", vocabulary_size=50_257, columns={"document_hashes": "<u8", "marks": "<i4"}
        )

    for text in ("{", "[]", '{"complete": true}'):
        (tmp_path / "tokens.journal.json").write_text(text)
        with pytest.raises(DataError, match="is damaged, or no journal of a token file"):
            TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=50_257)


def test_a_journal_of_which_one_bit_changed_or_without_its_checksum_is_refused(tmp_path: Path) -> None:
    prefix, path = tmp_path / "tokens", tmp_path / "tokens.journal.json"
    with TokenFileWriter(prefix, vocabulary_size=50_257) as writer:
        append_documents(writer, [np.arange(1, 30)], np.array([7], dtype=np.uint64))
        writer.commit({"bytes_read": 128})
    sound = path.read_bytes()
    written = read_journal(prefix)
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with contextlib.suppress(DataError):
            assert read_journal(prefix) == written, f"byte {place} of {sound!r} changes what is read"
    incomplete = json.loads(sound)
    del incomplete["checksum"]
    path.write_text(json.dumps(incomplete))
    with pytest.raises(DataError, match="does not have its checksum None"):
        read_journal(prefix)


def test_columns_of_any_width_grow_with_the_documents_and_are_cut_to_the_journal(tmp_path: Path) -> None:
    columns = {"marks": "<i4", "flags": "|u1"}

    def batch(number: int) -> dict[str, np.ndarray]:
        return {"flags": np.array([number, 255], dtype=np.uint8), "marks": np.arange(number, dtype=np.int64)}

    with TokenFileWriter(tmp_path / "tokens", vocabulary_size=100, columns=columns) as writer:
        for number in (1, 2, 3):
            writer.append(np.array([7, 8, 9]), np.array([1, 2]), batch(number))
            if number == 2:
                writer.commit({})
        with pytest.raises(ValueError, match=r"columns \['flags', 'marks'\], got \['marks'\]"):
            writer.append(np.array([7]), np.array([1]), {"marks": np.zeros(1, dtype=np.int64)})
    with TokenFileWriter.resume(tmp_path / "tokens", vocabulary_size=100, columns=columns) as writer:
        writer.append(np.array([7, 8, 9]), np.array([1, 2]), batch(4))
        record = writer.finish()

    assert record.column_values == {"marks": 7, "flags": 6}
    assert sorted(record.checksums) == ["flags.npy", "marks.npy", "tokens.bin", "tokens.idx"]
    marks, flags = np.load(tmp_path / "marks.npy"), np.load(tmp_path / "flags.npy")
    assert (marks.tolist(), marks.dtype) == ([0, 0, 1, 0, 1, 2, 3], np.int32)
    assert (flags.tolist(), flags.dtype) == ([1, 255, 2, 255, 4, 255], np.uint8)
    assert all_documents(TokenFile(tmp_path / "tokens")) == [[7], [8, 9]] * 3
