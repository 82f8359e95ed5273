"""Errors of the system in reading prepared data are reported as what they are, without the remedy to remove it."""

import builtins
import errno
import gc
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared_files import two_sources
from slow_cases import slow_but

from evenpack.data import verification
from evenpack.data.manifest import MANIFEST, Manifest
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData, packed_sources
from evenpack.errors import DataError

ERRORS = {
    errno.EACCES: "Permission denied; give this user access to it",
    errno.EIO: "Input/output error; the file may be intact: look at its disk or mount",
    errno.EMFILE: r"Too many open files; this process may open [\d,]+ files at once: raise the limit \(`ulimit -n`",
    errno.ENFILE: "Too many open files in system; .*ulimit",
    errno.ESTALE: "Stale file handle; the file may be intact",
    errno.ENOMEM: "Cannot allocate memory; the file may be intact",
}


def read_all(prepared: PreparedData) -> None:
    """Opens everything of both splits, and reads all tokens."""
    for split in ("train", "validation"):
        for source in packed_sources(prepared, split, seed=1):  # type: ignore[arg-type]
            source.view.read(np.arange(source.view.count))


@contextmanager
def failing(path: Path, code: int, *calls: str) -> Iterator[None]:
    """Lets calls of the system fail for one path."""
    with pytest.MonkeyPatch.context() as patch:
        for call in calls:
            place, name = {"open": (builtins, "open"), "os.open": (os, "open"), "stat": (os, "stat")}[call]
            original = getattr(place, name)

            def fail(file: Any, *given: Any, _original: Callable[..., Any] = original, **options: Any) -> Any:
                if isinstance(file, str | Path) and Path(file) == path:
                    raise OSError(code, os.strerror(code), str(path))
                return _original(file, *given, **options)

            patch.setattr(place, name, fail)
            if call == "open":
                patch.setattr(io, "open", fail)
        yield


@pytest.mark.parametrize("code", slow_but([errno.EMFILE], ERRORS), ids=errno.errorcode.get)
def test_a_file_of_a_prepared_set_that_the_system_cannot_read_is_not_called_damaged(
    corpus: Path, finished: Path, code: int
) -> None:
    config = two_sources(corpus)
    manifest = Manifest.read(finished)
    names = [record.path for record in manifest.files.values()]
    uses: tuple[Callable[[], object], ...] = (
        lambda: read_all(PreparedData.open(finished, config, verify="later")),
        lambda: PreparedData.open(finished, config),
        lambda: prepare(config, finished),
    )
    for path in (finished / name for name in [MANIFEST, *names]):
        for calls in (("open", "os.open"), ("stat",)):
            for number, use in enumerate(uses):
                verification._verified.clear()
                with failing(path, code, *calls):
                    try:
                        use()
                    except DataError as error:
                        assert_named(str(error), path, code)
                    else:
                        is_not_read = path.name == "document_hashes.npy" or path.parent.name == "tokenizer"
                        assert (number == 0 and is_not_read) or (calls, path.name) == (("stat",), MANIFEST), path


def assert_named(said: str, path: Path, code: int) -> None:
    (line,) = [line for line in said.splitlines() if str(path) in line]
    found = pytest.raises(DataError, match=ERRORS[code])
    assert found.matches(DataError(line)), line
    for word in ("damaged;", "is damaged", "remove", "again from an intact copy", "not been prepared", "not whole"):
        assert word not in said, said


def test_a_set_of_more_files_than_may_be_open_raises_the_soft_limit(corpus: Path, finished: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # files that only garbage of other tests holds would be closed in between
    opened = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 10, hard))
    try:
        prepared = PreparedData.open(finished, two_sources(corpus), verify="later")
        kept = [packed_sources(prepared, split, seed=1) for split in ("train", "validation")]  # type: ignore[arg-type]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert open_files() > opened + 10
        del kept
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
