"""Which cases run at a commit."""

from __future__ import annotations

from tests.commit import other_thirds, third_of_commit


def test_thirds_make_a_whole_and_each_has_cases_of_every_test() -> None:
    cases = [*(f"a.py::one[{number}-x[1]]" for number in range(7)), *(f"a.py::two[{number}]" for number in range(3))]
    thirds = [{*cases} - other_thirds(cases, third) for third in range(3)]
    assert sorted(case for third in thirds for case in third) == sorted(cases)
    assert all(any(name in case for case in third) for third in thirds for name in ("one", "two"))


def test_tests_with_one_case_are_shared_out_too() -> None:
    tests = [f"a.py::test_{number}" for number in range(300)]
    assert all(80 <= len({*tests} - other_thirds(tests, third)) <= 120 for third in range(3))


def test_the_commit_has_one_of_them() -> None:
    assert third_of_commit() in range(3)
