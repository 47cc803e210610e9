"""`bisect`: each planted fault ends at its component and its operator."""

from __future__ import annotations

import pytest

from pellucid.kit.debug.bisect import NOTHING, bisect
from pellucid.kit.debug.check import Request
from tests.kit.planted import FAULTS, mixed
from tests.kit.score import MEMORY, names_it, request_of, seconds_of

QUICK = {"pellucid_decomposition"}
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("name", FAULTY)
def test_planted_faults_are_named(name):
    fault = FAULTS[name]
    found = bisect(request_of(fault), seconds_of(fault), MEMORY)
    assert found.checked.verdict.value == fault.verdict
    assert found.component == fault.component, found.tried
    if fault.culprit:
        assert found.culprit is not None, found.tried
        assert names_it(fault, found.culprit.fx_nodes)
        assert any("planted.py:" in line for line in found.culprit.user_lines)


def healthy():
    return mixed()


def test_a_healthy_program_has_nothing_to_blame():
    found = bisect(Request(f"{__file__}:healthy"))
    assert found.component == NOTHING and len(found.tried) == 1
