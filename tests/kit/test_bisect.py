"""`bisect`: each planted fault ends at its component and its operator."""

from __future__ import annotations

from typing import Any

import pytest

from pellucid.kit.debug.bisect import NOTHING, bisect, narrowed
from pellucid.kit.debug.check import Culprit
from pellucid.kit.debug.culprit import operators_in
from pellucid.kit.process.child import Failure, Worker
from pellucid.kit.runs.target import Request
from tests.kit.faults import FAULTS
from tests.kit.planted import mixed
from tests.kit.score import MEMORY, names_it, reads_it, request_of, seconds_of

QUICK = {"pellucid_decomposition"}
FAULTY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAULTS]


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAULTY)
def test_planted_faults_are_named(name):
    fault = FAULTS[name]
    found = bisect(request_of(fault), seconds_of(fault), MEMORY)
    assert found.checked.verdict.value == fault.verdict
    assert found.component == fault.component, found.tried
    if fault.culprit:
        assert found.culprit is not None, found.tried
        assert names_it(fault, found.culprit.fx_nodes)
        assert reads_it(fault, found.culprit.user_lines)


def healthy():
    return mixed()


@pytest.mark.sampled
def test_a_healthy_program_has_nothing_to_blame():
    found = bisect(Request(f"{__file__}:healthy"))
    assert found.component == NOTHING and len(found.tried) == 1


class Crashing(Worker):
    """One in which the operators of a kernel are `a` to `e`; what computes one from `first` on crashes."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def call(self, function: Any, *args: Any, seconds: float = 0.0) -> Any:
        if function is operators_in:
            return [Culprit("graph", "", "", (name,), (f"file:{name}",)) for name in "abcde"]
        return Failure("crash", "SIGSEGV") if args[-1] >= self.first else None


@pytest.mark.parametrize("first", range(6))
def test_a_kernel_that_crashes_is_narrowed_to_an_operator(first):
    whole = Culprit("graph", "kernel", "", tuple("abcde"), ())
    found = narrowed(Crashing(first), Request("f"), 0, whole, "crash", 1.0)
    if first == 5:  # not by itself
        assert found == whole
    else:
        assert found.fx_nodes == ("abcde"[first],) and found.user_lines == (f"file:{'abcde'[first]}",)
    assert narrowed(Crashing(first), Request("f"), 0, whole, "hang", 1.0) == whole
