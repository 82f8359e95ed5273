"""The wheel without extras: it packs, plans and reads, and names the extra that brings what it lacks."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

from evenpack.version import VERSION

HEAVY = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "pyarrow", "typer", "rich", "psutil")

READS = """
import sys
import evenpack
packing = evenpack.pack([512, 130, 87, 300], pack_length=512)
documents = [list(range(1, length)) for length in (50, 30, 90, 20, 64, 2, 77)]
loader = evenpack.Loader(documents, pack_length=128, packs_per_step=2, rank=1, ranks=2, arrays="numpy")
batch = next(iter(loader))
print(packing.packs, batch.tokens.shape, int(batch.cu_seqlens[-1]))
print(loader.plan(0).counts.packs, loader.state_dict()["step"])
print([name for name in {heavy!r} if name in sys.modules])
"""


def without_extras(requirements: list[str]) -> set[str]:
    """Returns the distributions that these requirements, without extras, bring."""
    found: set[str] = set()
    while requirements:
        name, _, marker = requirements.pop().partition(";")
        distribution = re.split(r"[^\w.-]", name.strip())[0]
        if "extra ==" in marker or distribution in found:
            continue
        try:
            requirements += importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform or Python
        found.add(distribution)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    hatchling = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(hatchling, cwd=ROOT, check=True, capture_output=True, timeout=900)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the wheel's files and those of its plain requirements, as `pip install WHEEL` leaves it."""
    folder = tmp_path_factory.mktemp("bare")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        metadata = archive.read(f"evenpack-{VERSION}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, flags=re.MULTILINE)
    for distribution in without_extras(required):
        for file in importlib.metadata.files(distribution) or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                link = folder / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    return folder


def run_in(bare: Path, script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script that can import nothing but the folder and Python's own modules."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(bare)}
    starting = f"import sys; sys.path.insert(0, {str(bare)!r})\n{script}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", starting],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_the_wheel_alone_packs_plans_and_reads(bare: Path) -> None:
    done = run_in(bare, READS.format(heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 (128,) 128", "2 1", "[]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ("trl", "transformers"),  # which TRL needs, too
        ("torchtitan", "torchtitan"),
        ("isolation", "torch"),
    ],
)
def test_an_adapter_without_its_trainer_says_how_to_install_it(bare: Path, module: str, trainer: str) -> None:
    done = run_in(bare, f"import evenpack.adapters.{module}")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("evenpack.errors.MissingExtraError: evenpack.adapters.")
    assert message.endswith(
        f"needs {trainer}, which this installation lacks: pip install 'evenpack[adapters]' {trainer}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "lacking", "extra"),
    [
        ("evenpack.open('demo')", "deepspeed", "train"),
        ("evenpack.study('packing', 'glue:rte')", "rich", "train"),
        ("evenpack.Loader([[1, 2]], pack_length=4, packs_per_step=1)", "torch", "torch"),
        ("from evenpack.adapters.first_step import require_whole_step as r; r(None, 0, [], None)", "torch", "torch"),
    ],
)
def test_what_is_missing_names_its_extra(bare: Path, call: str, lacking: str, extra: str) -> None:
    done = run_in(bare, f"import evenpack\n{call}")
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("evenpack.errors.MissingExtraError: ")
    assert lacking in message
    assert message.endswith(f"pip install 'evenpack[{extra}]'")


@pytest.mark.slow
def test_the_command_line_names_its_extra(bare: Path) -> None:
    done = run_in(bare, "from evenpack.launcher.cli.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr == "the command line needs typer, which this installation lacks: pip install 'evenpack[train]'\n"


def test_a_checkout_that_is_not_installed_names_the_missing_module() -> None:
    """As on the GPU day, whose packages are installed one by one."""
    done = run_in(ROOT, "from evenpack.launcher.cli.__main__ import main; main()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: No module named ")
