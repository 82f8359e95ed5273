"""The choice of cases: every pair of settings that go together is in one of them."""

from dataclasses import asdict
from itertools import combinations

from traced_cases import CASES, all_cases

from evenpack.kernels.attention import BACKENDS


def pairs(cases):
    return {pair for case in cases for pair in combinations(sorted(asdict(case).items()), 2)}


def test_every_pair_of_settings_is_traced_in_far_fewer_cases():
    assert pairs(all_cases()) <= pairs(CASES.values())
    assert len(CASES) < len(all_cases()) / 20


def test_every_backend_is_traced():
    assert {case.backend for case in CASES.values()} == set(BACKENDS)
