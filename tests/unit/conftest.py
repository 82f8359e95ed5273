"""Defines fixtures that several files of unit tests share."""

import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from drawn_figures import drawn  # noqa: F401  # a fixture
from hypothesis import settings
from prepared_files import sentences, two_sources, write_jsonl

from evenpack.data.prepare import tokenising
from evenpack.data.prepare.prepare import prepare
from evenpack.data.tokens import writer

if TYPE_CHECKING:
    from evenpack.engine.world.distributed import World

# No test times its examples: on a busy machine any of them may take long.
settings.register_profile("evenpack", deadline=None)
settings.load_profile("evenpack")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes two jsonl files; the first holds each of its first fifty documents twice, and one empty document."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = sentences(400, seed=1)
    write_jsonl(folder / "wiki.jsonl", [*texts, *texts[:50], ""])
    write_jsonl(folder / "code.jsonl", sentences(150, seed=2))
    return folder


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares the two sources without interruption; tests must not change them."""
    directory = tmp_path_factory.mktemp("finished") / "data"
    prepare(two_sources(corpus), directory)
    return directory


@pytest.fixture
def own_corpus(corpus: Path, tmp_path: Path) -> Path:
    """Returns a copy of the corpus that a test may change."""
    return Path(shutil.copytree(corpus, tmp_path / "own"))


@pytest.fixture(scope="module")
def world() -> "Iterator[World]":
    """Provides this process as the only rank of a run, on the CPU."""
    from tiny_run import lone_world  # imports torch, which many tests do without

    with lone_world() as alone:
        yield alone


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes batches small, so that there are many commits."""
    monkeypatch.setattr(tokenising, "BATCH_TEXT_BYTES", 4000)
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., None]]":
    """Makes the rules of attention see an H100 without flash-attn, and on each call a GPU of another capability."""
    import torch

    from evenpack.kernels import capabilities

    def pretend(major: int = 9, minor: int = 0, *, has_triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(capabilities, "has_triton", lambda: has_triton)
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        capabilities.resolve_backend.cache_clear()

    pretend()
    yield pretend
    capabilities.resolve_backend.cache_clear()


@pytest.fixture
def files_of_at_most() -> Callable[[int], AbstractContextManager[None]]:
    """Makes writes beyond so many bytes of a file fail, as on a full disk: a disk can only be filled by root."""

    @contextmanager
    def limited(most_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limited
