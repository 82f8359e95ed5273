"""Damage that keeps a file's size is found in every file, by every kind of check, and reported with its place."""

import shutil
from pathlib import Path

import pytest
from prepared_files import Recorder, contents, flip, interrupt, two_sources
from slow_cases import slow_but

from evenpack.data import checksums
from evenpack.data.checksums import ChunkReader, Digest, digest_of, find_first_damage
from evenpack.data.manifest import Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.tokens.file import TokenFile
from evenpack.data.verification import Verifier
from evenpack.errors import DataError


@pytest.fixture
def own_finished(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "finished"))


def verifier(directory: Path) -> Verifier:
    return Verifier(directory, Manifest.read(directory))


def never() -> bool:
    return False


def test_a_sound_set_is_sound_and_every_byte_was_read(finished: Path) -> None:
    recorder = Recorder()
    found = verifier(finished).verify_all(recorder)
    files = [path for path in finished.rglob("*") if path.is_file()]
    kept_apart = {"manifest.json", "tokens.journal.json", "tokenizer.trained_on.json"}
    assert found.damages == ()
    assert found.bytes == sum(path.stat().st_size for path in files if path.name not in kept_apart)
    assert recorder.states[-1].bytes_read == recorder.states[-1].total_bytes == found.bytes
    assert found.bytes_per_second > 0


def test_one_bit_of_any_file_is_found_by_all_and_by_the_share_that_reads_it(own_finished: Path) -> None:
    manifest = Manifest.read(own_finished)
    assert len(manifest.files) > 15
    for record in manifest.files.values():
        path = own_finished / record.path
        flip(path)
        found = verifier(own_finished).verify_all(Recorder()).damages
        assert [damage.path for damage in found] == [path]
        shares = [verifier(own_finished).verify_share(rank, 3, is_cancelled=never).damages for rank in range(3)]
        assert [damage.path for damages in shares for damage in damages] == [path]
        flip(path)
    assert verifier(own_finished).verify_all(Recorder()).damages == ()


def test_the_shares_of_all_ranks_are_the_whole(finished: Path) -> None:
    total = verifier(finished).total_bytes
    for ranks in (1, 2, 7, 100):
        read = [verifier(finished).verify_share(rank, ranks, is_cancelled=never).bytes for rank in range(ranks)]
        assert sum(read) == total


def test_a_share_can_be_ended_early(finished: Path) -> None:
    assert verifier(finished).verify_share(0, 1, is_cancelled=lambda: True).bytes == 0


def test_the_first_bad_byte_is_known_to_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 64)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    expected = digest_of(path).checksums()
    assert len(expected.chunks) == 4
    assert find_first_damage(path, expected) is None
    for byte, place in ((0, (0, 63)), (64, (64, 127)), (199, (192, 199))):
        flip(path, byte)
        damage = find_first_damage(path, expected)
        assert damage is not None
        assert damage.first_bad_byte == place
        flip(path, byte)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 200])
def test_a_digest_does_not_depend_on_how_the_bytes_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 64)
    content = bytes(n * 7 % 256 for n in range(size))
    (tmp_path / "file").write_bytes(content)
    expected = digest_of(tmp_path / "file").checksums()
    for step in (1, 5, 64, 130):
        digest = Digest()
        for start in range(0, size, step):
            digest.update(memoryview(content)[start : start + step])
        assert digest.checksums() == expected
    assert len(expected.chunks) == -(-size // 64)
    assert b"".join(bytes(ChunkReader().read(tmp_path / "file", chunk)) for chunk in range(4)) == content


def test_missing_shorter_and_longer_files_are_damage_too(own_finished: Path) -> None:
    folder = own_finished / "sources" / "wiki"
    (folder / "tokens.idx").unlink()
    size = (folder / "tokens.bin").stat().st_size
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(size - 10)
    with (folder / "document_hashes.npy").open("ab") as file:
        file.write(b"more")
    damages = verifier(own_finished).verify_all(Recorder()).damages
    found = {damage.path.name: damage.describe() for damage in damages}
    assert found["tokens.idx"].endswith("tokens.idx cannot be found (No such file or directory)")
    assert f"has {size - 10:,} bytes, expected {size:,}" in found["tokens.bin"]
    assert found["tokens.bin"].endswith(f"the first bad byte is byte {size - 10:,}")
    assert "document_hashes.npy" in found
    assert len(found) == 3


def test_a_file_that_cannot_be_read_is_listed_and_not_called_damaged(
    own_finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reader: ChunkReader, path: Path, chunk: int) -> memoryview:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ChunkReader, "read", fail)
    found = verifier(own_finished).verify_all(Recorder()).damages
    assert len(found) == len(Manifest.read(own_finished).files)
    assert "cannot be read from byte 0 on: Input/output error" in found[0].describe()
    with pytest.raises(DataError, match="cannot be read:\n") as caught:
        verifier(own_finished).refuse(found)
    assert str(caught.value).endswith("Nothing shows that these files are damaged: keep them")


def test_a_damaged_manifest_is_not_believed(own_finished: Path) -> None:
    path = own_finished / "manifest.json"
    path.write_text(path.read_text().replace('"unknown_tokens": 0', '"unknown_tokens": 1', 1))
    with pytest.raises(DataError, match=r"manifest\.json is damaged or .*: its content does not have its checksum"):
        Manifest.read(own_finished)


# --- prepare ------------------------------------------------------------------------------------------------------


def test_prepare_does_not_call_a_damaged_set_prepared(corpus: Path, own_finished: Path) -> None:
    path = own_finished / "sources" / "code" / "train" / "sorted_sequences.npy"
    flip(path)
    with pytest.raises(DataError, match=r"is damaged:\n  .*sorted_sequences\.npy is not as it was written") as caught:
        prepare(two_sources(corpus), own_finished)
    assert "Copy these files again from an intact copy, or remove" in str(caught.value)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "document_hashes.npy"])
def test_prepare_does_not_certify_damaged_files_once_the_manifest_is_gone(
    corpus: Path, own_finished: Path, name: str
) -> None:
    (own_finished / "manifest.json").unlink()
    prepare(two_sources(corpus), own_finished)  # it takes sound files over
    (own_finished / "manifest.json").unlink()
    path = own_finished / "sources" / "code" / name
    flip(path, byte=-3)
    with pytest.raises(DataError, match=rf"{path} is not as it was written.*journal.*prepare again"):
        prepare(two_sources(corpus), own_finished)
    assert not (own_finished / "manifest.json").exists()


@pytest.mark.parametrize("kind", slow_but(["bin"], ["bin", "sizes", "document_hashes"]))
def test_a_half_written_file_that_was_damaged_is_not_gone_on_with(
    corpus: Path, tmp_path: Path, small_batches: None, kind: str
) -> None:
    directory = tmp_path / "data"
    interrupt(two_sources(corpus), directory, 5)
    path = directory / "sources" / "wiki" / f"tokens.{kind}.partial"
    flip(path, byte=40)
    before = contents(directory)
    with pytest.raises(DataError, match=rf"tokens\.{kind}\.partial is not as it was written.*remove the folder"):
        prepare(two_sources(corpus), directory)
    flip(path, byte=40)
    assert before.keys() == contents(directory).keys()
    prepare(two_sources(corpus), directory)
    assert TokenFile(directory / "sources" / "wiki" / "tokens").documents == 451
