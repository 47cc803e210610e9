"""`bisect`: each planted fault ends at its component and its operator."""

from __future__ import annotations

from pathlib import Path

import pytest

from pellucid.debug.bisect import NOTHING, bisect
from pellucid.debug.check import Request
from tests.kit.planted import FAULTS, mixed

HERE = Path(__file__).parent
QUICK = {"pellucid_decomposition", "inductor_neg_wrong"}
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("name", FAULTY)
def test_planted_faults_are_named(name):
    fault = FAULTS[name]
    seconds = 60.0 if fault.verdict == "hang" else 300.0
    found = bisect(Request(f"{HERE}/planted.py:{name}", fault.subject), seconds, memory=4 << 30)
    assert found.checked.verdict.value == fault.verdict
    assert found.component == fault.component, found.tried
    if fault.culprit:
        assert found.culprit is not None, found.tried
        assert any(fault.culprit in node for node in found.culprit.fx_nodes)
        assert any("planted.py:" in line for line in found.culprit.user_lines)


def healthy():
    return mixed()


def test_a_healthy_program_has_nothing_to_blame():
    found = bisect(Request(f"{__file__}:healthy"))
    assert found.component == NOTHING and len(found.tried) == 1
