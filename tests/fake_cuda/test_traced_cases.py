"""The choice of cases: every setting is in one of them."""

from traced_cases import CASES, all_cases, settings_of

from evenpack.kernels.attention import BACKENDS


def test_every_setting_and_every_backend_is_traced():
    assert set().union(*map(settings_of, all_cases())) <= set().union(*map(settings_of, CASES.values()))
    assert {case.backend for case in CASES.values()} == set(BACKENDS)
