"""Checks of this machine: versions, devices, attention backends, and whether these isolate sequences."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from rich.table import Table
from rich.text import Text

from evenpack.console import pairs, table, text
from evenpack.kernels.attention import BACKENDS
from evenpack.kernels.capabilities import AttentionRequest, able_backends, unavailable_reason
from evenpack.kernels.isolation import probe_isolation
from evenpack.kernels.varlen import DROPPING, cudnn_failure, dropout_failure
from evenpack.launch_environment import check_ranks
from evenpack.launcher.processes.devices import cpu_cores
from evenpack.studies.columns import Column, table_of

_MISSING = "not installed"
_PACKAGES = ("evenpack", "torch", "deepspeed", "transformers", "flash-attn", "flash-attn-4")

_PROBED = (
    Column("backend"),
    Column("request"),
    Column("isolated", "max_deviation", ".1e"),
    Column("tolerance", form=".1e"),
    Column("control", "control_deviation", ".1e"),
    Column("verdict", lambda probe: "passed" if probe.passed else f"FAILED {probe.error or ''}".strip()),
)
_EXPLANATIONS = {
    "isolated": (
        "the most that outputs and gradients of the other sequences change, relative to the largest value, when one "
        "sequence of a pack is replaced: it must not exceed the tolerance"
    ),
    "tolerance": "what rounding can explain in this precision",
    "control": (
        "the same change where all sequences of the pack attend to each other: it must be above 10 times the "
        "tolerance, since a probe that misses this leak would prove nothing"
    ),
}

_HEAD_DIM = 64
"""Head size of nearly every model in use."""

_WINDOW = 64
"""Tokens on each side that a probed window holds, as ModernBERT's: fewer than the longest segment of the probe has."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that can run models."""

    name: str
    memory_bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class RequestReport:
    """One kind of attention, and each backend's reason why it cannot serve it; None if it can."""

    request: str
    backends: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class IsolationReport:
    """The isolation probe of one backend."""

    backend: str
    request: str
    max_deviation: float | None
    """Relative deviation with isolation. None if the backend raised an error."""
    control_deviation: float | None
    """Relative deviation without isolation, which must be large."""
    tolerance: float | None
    passed: bool
    error: str | None
    """The error that the backend raised."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """All results of `evenpack doctor`."""

    versions: dict[str, str]
    devices: tuple[Device, ...]
    attention: tuple[RequestReport, ...]
    isolation: tuple[IsolationReport, ...]
    free_memory_bytes: int
    free_disk_bytes: int
    """Free bytes of the current directory."""
    ok: bool
    """Whether all probes have passed and DeepSpeed is installed."""


def examine() -> DoctorReport:
    """Runs all checks and probes, which takes some seconds. Raises: ConfigError for a wrong environment variable."""
    check_ranks(os.environ)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    requests = attention_requests(device_type)
    probes = tuple(probe for request in requests for probe in probe_all(request))
    versions = _versions()
    return DoctorReport(
        versions=versions,
        devices=_devices(),
        attention=tuple(
            RequestReport(request=str(request), backends={name: unavailable_reason(name, request) for name in BACKENDS})
            for request in requests
        ),
        isolation=probes,
        free_memory_bytes=int(psutil.virtual_memory().available),
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        ok=versions["deepspeed"] != _MISSING and all(probe.passed for probe in probes),
    )


def attention_requests(device_type: str) -> tuple[AttentionRequest, ...]:
    """Returns the requests that models make: both precisions and directions, ALiBi, windows, dropout."""
    plain = AttentionRequest(
        device_type=device_type, dtype=torch.float32, head_dim=_HEAD_DIM, causal=True, alibi=False, dropout=False
    )
    of_both_precisions = (
        plain,
        replace(plain, causal=False),
        replace(plain, alibi=True),
        replace(plain, causal=False, window=True),
    )
    half = replace(plain, dtype=torch.bfloat16)
    return (
        *(replace(one, dtype=dtype) for one in of_both_precisions for dtype in (torch.float32, torch.bfloat16)),
        replace(half, dropout=True),
        replace(half, alibi=True, dropout=True),
    )


def tables(report: DoctorReport) -> list[Table | Text]:
    """Returns the results, section by section."""
    memory = f"{report.free_memory_bytes / 1e9:.1f} GB of memory, {report.free_disk_bytes / 1e9:.1f} GB of disk"
    machine = {device.name: f"{device.memory_bytes / 1e9:.1f} GB, {device.detail}" for device in report.devices}
    return [
        pairs(report.versions, title="Versions"),
        pairs({**machine, "free": memory}, title="Machine"),
        *_attention_tables(report.attention),
        table_of(report.isolation, _PROBED, title="Isolation of sequences in a pack"),
        pairs(_EXPLANATIONS),
        text("Everything is in order." if report.ok else "Something is wrong: see above.", bold=True),
    ]


def _attention_tables(requests: Sequence[RequestReport]) -> list[Table]:
    """Returns the requests that each backend can serve; reasons are numbered, because few recur often."""
    reasons: dict[str, int] = {}
    rows = []
    for report in requests:
        row = {"request": report.request}
        for backend, reason in report.backends.items():
            row[backend] = "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"
        rows.append(row)
    notes = {f"({number})": reason for reason, number in reasons.items()}
    return [table(rows, title="Attention backends"), *([pairs(notes)] if notes else [])]


def probe_all(request: AttentionRequest) -> list[IsolationReport]:
    """Probes each backend that can serve, on the current device; none with dropout, where outputs differ anyway."""
    if request.dropout:
        return []
    return [_probe(backend, request) for backend in able_backends(request)]


def _probe(backend: str, request: AttentionRequest) -> IsolationReport:
    result, error = None, None
    try:
        result = probe_isolation(
            backend,
            device=request.device_type,
            dtype=request.dtype,
            causal=request.causal,
            alibi=request.alibi,
            head_dim=request.head_dim,
            window=_WINDOW if request.window else None,
        )
    except RuntimeError as failure:  # a kernel that does not run here is shown with those that do
        error = f"{type(failure).__name__}: {failure}"
    return IsolationReport(
        backend=backend,
        request=str(request),
        max_deviation=result.max_deviation if result else None,
        control_deviation=result.control_deviation if result else None,
        tolerance=result.tolerance if result else None,
        passed=result is not None and result.passed,
        error=error,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = _MISSING
    versions["cuda"] = torch.version.cuda or "none: this build of PyTorch runs on the CPU only"
    by_torch = f"FlashAttention 2, by varlen_attn of torch {torch.__version__}"
    versions["varlen"] = (cudnn_failure() if torch.cuda.is_available() else None) or by_torch
    found = f"aten.{next(iter(DROPPING))} of torch {torch.__version__}"
    versions["varlen with dropout"] = dropout_failure() or found
    return versions


def _devices() -> tuple[Device, ...]:
    cpu = Device(
        name=platform.processor() or platform.machine(),
        memory_bytes=int(psutil.virtual_memory().total),
        detail=f"{cpu_cores()} cores, {torch.get_num_threads()} threads",
    )
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return (
        cpu,
        *(
            Device(name=gpu.name, memory_bytes=gpu.total_memory, detail=f"compute capability {gpu.major}.{gpu.minor}")
            for gpu in gpus
        ),
    )
