"""What the system reads from disk around a page of a mapped array."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prepared_files import two_sources

import evenpack
from evenpack.data import mapped_pages
from evenpack.data.mapped_pages import _limits_of_group, memory_bytes
from evenpack.data.prepare.prepare import prepare
from evenpack.data.prepared import PreparedData
from evenpack.data.tokens.file import TokenFile, expect_random_reads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the flags of mappings in /proc")


def are_read_alone(path: Path) -> list[bool]:
    """Returns of each mapping of a file by this process whether its pages are read without those around them."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [place for place, line in enumerate(lines) if line.endswith(str(path))]
    flags = [next(line for line in lines[begin:] if line.startswith("VmFlags:")) for begin in begins]
    return ["rr" in line.split() for line in flags]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        pytest.param({"shuffle": {"kind": "blocks", "block_tokens": 2000}}, False, marks=pytest.mark.slow),
        ({"recipe": {"kind": "concat", "max_sequence_length": 64, "atom": 64}, "pack_length": 64}, False),
    ],
    ids=["permutation", "blocks", "rows in their order"],
)
def test_a_permutation_reads_pages_alone_where_memory_does_not_hold_the_file(
    changes: dict[str, Any], expected: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = two_sources(corpus, **changes)
    prepare(config, tmp_path)
    for memory, alone in ((1000, expected), (1 << 40, False)):
        monkeypatch.setattr(mapped_pages, "memory_bytes", lambda memory=memory: memory)
        prepared = PreparedData.open(tmp_path, config)
        sources = prepared.training_sources(seed=1, batching="packs")
        for name, source in zip(prepared.source_names, sources, strict=True):
            path = prepared.token_file_prefix(name).with_suffix(".bin")
            assert are_read_alone(path) == [alone]
            sent = pickle.loads(pickle.dumps(source.view))  # as to a worker, which maps the file again
            assert are_read_alone(path) == [alone] * 2
            assert (sent.lengths() == source.view.lengths()).all()
        del sources, source, sent


@pytest.mark.parametrize("memory", [1000, 1 << 40])
def test_a_loader_reads_pages_of_own_arrays_alone_where_memory_does_not_hold_them(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pages, "memory_bytes", lambda: memory)
    np.save(tmp_path / "tokens.npy", np.arange(4096, dtype=np.uint16))
    tokens = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    documents = evenpack.TokenArrays(tokens, np.arange(0, 4097, 32))
    loader = evenpack.Loader(documents, pack_length=64, packs_per_step=4, arrays="numpy")
    next(iter(loader))
    assert set(are_read_alone(tmp_path / "tokens.npy")) == {memory == 1000}


def test_files_are_counted_together(corpus: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources of a mixture share the page cache: each may fit into it where all do not."""
    prepared = PreparedData.open(finished, two_sources(corpus))
    files = [TokenFile(prepared.token_file_prefix(name)) for name in prepared.source_names]
    sizes = [sum(array.nbytes for array in file.mapped_arrays()) for file in files]
    monkeypatch.setattr(mapped_pages, "memory_bytes", lambda: 2 * (sum(sizes) - 1))
    assert max(sizes) < sum(sizes) - 1
    expect_random_reads(files)
    assert all(file.reads_alone for file in files)
    assert not TokenFile(files[0].prefix).reads_alone


@pytest.mark.parametrize(("limits", "expected"), [((), None), ((1 << 60,), None), ((5000, 4096), 4096)])
def test_the_memory_is_the_machines_unless_a_control_group_has_less(
    limits: tuple[int, ...], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_pages, "_limits_of_group", lambda: iter(limits))
    assert memory_bytes() == (expected or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": "5000\n", "job/step/memory.max": "max\n"}, [5000]),
        ("0::/\n", {"memory.max": "4096\n"}, [4096]),
        ("1:cpu:/a\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "77\n", "memory.max": "1\n"}, [77]),
        ("5:cpu,memory:/a\n", {"cpu,memory/a/memory.limit_in_bytes": "77\n"}, [77]),
    ],
    ids=["a job of version 2", "a container", "version 1", "version 1, with others"],
)
def test_the_limits_of_control_groups_are_found(
    lines: str, files: dict[str, str], expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text(lines)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(_limits_of_group(tmp_path / "groups", tmp_path / "root")) == expected
