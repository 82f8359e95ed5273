"""A CUDA device that this process can name and not compute on, for fake tensors on a machine without a GPU.

PyTorch's CPU build traces operators of `cuda:0` under `FakeTensorMode`, but autograd asks the backend for devices and
streams, which `hooks.cpp` answers, and Python code asks `torch.cuda`, whose functions are replaced here by constants.
Both are for the whole process and for ever: trace in a process that does nothing else.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evenpack.errors import EvenpackError

CAPABILITY = (9, 0)
"""Compute capability of the device that is pretended."""

DEVICE_NAME = "NVIDIA H100 80GB HBM3"

DEVICE_BYTES = 80 << 30

_SOURCE = Path(__file__).with_name("hooks.cpp")

_wait_listeners: list[Callable[[str], None]] = []


def why_not_here() -> str | None:
    """Returns the reason why no fake device can be made on this machine; None if one can."""
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler '{_compiler()}' (set CXX to name another)"
    if "+cpu" not in importlib.metadata.version("torch"):
        return "the hooks are for a CPU build of PyTorch, and this one has an accelerator's own"
    return None


def compile_hooks(folder: Path) -> Path:
    """Compiles the hooks for the installed PyTorch into `folder`, unless they are there, and returns the library.

    Raises: EvenpackError with the compiler's message.
    """
    key = hashlib.sha256(_SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    library = folder / f"hooks-{key}.so"
    if library.exists():
        return library
    specification = importlib.util.find_spec("torch")
    assert specification is not None, "a dependency of this package"
    root = Path(str(specification.origin)).parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    command = [_compiler(), "-O1", "-shared", "-fPIC", "-std=c++20", str(_SOURCE), "-o", str(temporary)]
    command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    command += [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EvenpackError(f"{' '.join(command)} failed:\n{result.stderr}")
    temporary.replace(library)
    return library


def pretend_cuda(library: Path) -> None:
    """Makes `cuda:0` nameable in this process, by a library of `compile_hooks`.

    Raises: EvenpackError if PyTorch has been imported already, since it asks for its hooks only once.
    """
    if "torch" in sys.modules:
        raise EvenpackError("pretend_cuda must come before the first import of torch in its process")
    hooks = ctypes.CDLL(str(library))
    import torch

    if not hooks.evenpack_install_fake_cuda():
        raise EvenpackError(f"PyTorch {torch.__version__} does not use the hooks of {library}")
    os.environ["DS_ACCELERATOR"] = "cuda"
    _replace_questions(torch)
    _replace_memory(torch)
    _replace_streams(torch)
    _replace_random_numbers(torch)


@contextmanager
def listening_to_waits(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with the name of each function of `torch.cuda` that would make the host wait."""
    _wait_listeners.append(listener)
    try:
        yield
    finally:
        _wait_listeners.remove(listener)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _waits(name: str) -> Callable[..., None]:
    def wait(*_: Any, **__: Any) -> None:
        for listener in _wait_listeners:
            listener(name)

    return wait


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _replace(module: Any, **values: Any) -> None:
    for name, value in values.items():
        if not hasattr(module, name):
            raise EvenpackError(f"{module.__name__} has no '{name}' to replace: this is for another PyTorch")
        setattr(module, name, value)


def _replace_questions(torch: Any) -> None:
    major, minor = CAPABILITY
    properties = SimpleNamespace(
        name=DEVICE_NAME, major=major, minor=minor, total_memory=DEVICE_BYTES, multi_processor_count=132
    )
    _replace(
        torch.cuda,
        is_available=_constant(True),
        is_initialized=_constant(True),
        _initialized=True,
        _lazy_init=_constant(None),
        device_count=_constant(1),
        current_device=_constant(0),
        set_device=_constant(None),
        device=lambda _: nullcontext(),
        get_device_name=_constant(DEVICE_NAME),
        get_device_capability=_constant(CAPABILITY),
        get_device_properties=_constant(properties),
        is_bf16_supported=_constant(True),
    )
    _replace(torch.cuda.amp.common, amp_definitely_not_available=_constant(False))  # else autocast switches itself off
    _replace(torch.backends.cuda, is_flash_attention_available=_constant(True))


def _replace_memory(torch: Any) -> None:
    for name in ("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated"):
        _replace(torch.cuda, **{name: _constant(None)})
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        _replace(torch.cuda, **{name: _constant(0)})


def _replace_streams(torch: Any) -> None:
    _replace(
        torch.cuda,
        synchronize=_waits("torch.cuda.synchronize"),
        Event=_Event,
        Stream=_Stream,
        stream=_in_stream,
        current_stream=lambda *_: getattr(_thread, "stream", _DEFAULT_STREAM),
        default_stream=lambda *_: _DEFAULT_STREAM,
    )
    _replace(torch.Tensor, record_stream=_constant(None))
    _replace(torch.cuda.nvtx, range_push=_constant(0), range_pop=_constant(0))


def _replace_random_numbers(torch: Any) -> None:
    generator = SimpleNamespace(manual_seed=_constant(None), initial_seed=_constant(0))
    _replace(
        torch.cuda,
        default_generators=(generator,),
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),  # seed and offset lie on the host: no wait
        set_rng_state=_constant(None),
    )


class _Event:
    """Marks a moment that never comes."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Event") -> float:
        return 0.0

    synchronize = staticmethod(_waits("torch.cuda.Event.synchronize"))


class _Stream:
    """Takes work that is never done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: "_Stream") -> None: ...

    def wait_event(self, _: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    synchronize = staticmethod(_waits("torch.cuda.Stream.synchronize"))


_DEFAULT_STREAM = _Stream()

_thread = threading.local()
"""Holds the stream that the thread has entered, as `stream`."""


@contextmanager
def _in_stream(stream: _Stream | None) -> Iterator[None]:
    before = getattr(_thread, "stream", _DEFAULT_STREAM)
    _thread.stream = stream or before
    try:
        yield
    finally:
        _thread.stream = before
