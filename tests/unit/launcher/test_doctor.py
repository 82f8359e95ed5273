"""`evenpack doctor` reports versions, devices and backends."""

from typing import Any

import pytest
import torch

from evenpack.kernels.isolation import IsolationResult
from evenpack.launcher import doctor


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces probes by ones that pass at once."""
    passed = IsolationResult(max_deviation=0.0, control_deviation=1.0, tolerance=1e-6)
    monkeypatch.setattr(doctor, "probe_isolation", lambda backend, **request: passed)


def test_every_backend_that_can_serve_is_probed_and_the_others_say_why_not(quick_probes: None) -> None:
    report = doctor.examine()
    assert report.ok
    for answer in report.attention:
        able = {backend for backend, reason in answer.backends.items() if reason is None}
        probed = {probe.backend for probe in report.isolation if probe.request == answer.request}
        assert probed == (set() if "dropout" in answer.request else able)
    assert {"reference", "sdpa"} <= {probe.backend for probe in report.isolation}
    assert report.versions["torch"].startswith("2.")


def test_the_kernel_that_answers_varlen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> str:
        return doctor._versions()["varlen"]

    assert answers() == f"FlashAttention 2, by varlen_attn of torch {torch.__version__}"
    monkeypatch.setattr("torch.nn.attention.varlen._should_use_cudnn", lambda _: True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "runs cuDNN in place of FlashAttention: install torch<2.14" in answers()


def test_windows_are_probed_where_a_family_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def probe(backend: str, **request: Any) -> IsolationResult:
        asked.append((request["causal"], request["dtype"], request["window"]))
        return IsolationResult(max_deviation=0.0, control_deviation=1.0, tolerance=1e-6)

    monkeypatch.setattr(doctor, "probe_isolation", probe)
    doctor.examine()
    windowed = {one for one in asked if one[2] is not None}
    assert windowed == {(False, torch.float32, 64), (False, torch.bfloat16, 64)}
    assert windowed != set(asked)


def test_the_real_probe_passes_with_its_control_seen_to_leak() -> None:
    first, *others = doctor.attention_requests("cpu")
    requests = [first, *(other for other in others if other.window)]
    for probe in [probe for request in requests for probe in doctor.probe_all(request)]:
        assert probe.passed
        assert probe.control_deviation is not None
        assert probe.tolerance is not None
        assert probe.control_deviation > 10 * probe.tolerance


@pytest.mark.parametrize(("deviation", "control"), [(0.1, 1.0), (0.0, 0.0)])
def test_a_leak_or_a_control_that_sees_none_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, deviation: float, control: float
) -> None:
    result = IsolationResult(max_deviation=deviation, control_deviation=control, tolerance=1e-6)
    monkeypatch.setattr(doctor, "probe_isolation", lambda backend, **request: result)
    assert not doctor.examine().ok


def test_a_kernel_that_does_not_run_is_shown_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, **request: object) -> IsolationResult:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor, "probe_isolation", fail)
    report = doctor.examine()
    assert not report.ok
    assert report.isolation[0].error == "RuntimeError: no kernel image is available"


def test_a_missing_deepspeed_is_a_failure(quick_probes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor._versions()
    monkeypatch.setattr(doctor, "_versions", lambda: {**installed, "deepspeed": "not installed"})
    assert not doctor.examine().ok
