"""Running cases through the compiler: many in one program, because most of a compilation's cost does not depend on
what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from pellucid.capture import layout
from tests.operators.cases import Case
from tests.operators.judge import Expected, expect, outcomes, verdict
from tests.support import interpreted

Program = Callable[[list[list[Any]]], list[Any]]


def _native(program: Program) -> Program:
    return torch.compile(program, backend="pellucid", options={"verify": True})


def _dynamic(program: Program) -> Program:
    return torch.compile(program, backend="pellucid", dynamic=True, options={"verify": True})


def _interpreter(program: Program) -> Program:
    return interpreted(program, [], fullgraph=False)


def _convolved(program: Program) -> Program:
    """Every tensor comes out of convolutions, whose results are laid out channels-last whatever that costs."""
    compiled = _native(lambda states: program([[_carried(item) for item in state] for state in states]))

    def run(states: list[list[Any]]) -> list[Any]:
        with mock.patch.object(layout, "_worth", return_value=-1.0):
            return compiled(states)

    return run


def _carried(item: Any) -> Any:
    """A tensor as it is, through two convolutions that change nothing, if it can come out of one."""
    if not isinstance(item, torch.Tensor) or not item.is_floating_point() or not item.is_contiguous():
        return item
    if item.dim() not in (2, 3, 4) or item.numel() == 0:
        return item
    rows, columns = item.shape[0], item.shape[-1]
    planar = item.reshape({2: (1, rows, 1, columns), 3: (1, *item.shape), 4: item.shape}[item.dim()])
    channels = planar.shape[1]
    for _ in range(2):
        planar = torch.nn.functional.conv2d(planar, planar.new_ones(channels, 1, 1, 1), groups=channels)
    return planar.reshape(item.shape)


ENGINES: dict[str, Callable[[Program], Program]] = {
    "native": _native,
    "dynamic": _dynamic,
    "convolved": _convolved,
    "interpreter": _interpreter,
}


def check(cases: Sequence[Case], engine: str) -> dict[Case, str]:
    """A verdict on each case: `ok`, `skip: ...` where eager itself fails or is random, or what went wrong."""
    expected = {case: expect(case) for case in cases}
    found = {case: why for case, why in expected.items() if isinstance(why, str)}
    wanted = {case: what for case, what in expected.items() if isinstance(what, Expected)}
    together = [case for case, what in wanted.items() if not what.random]
    found |= _check_program(together, wanted, engine)
    for case, what in wanted.items():
        if what.random:
            found |= _check_program([case], wanted, engine)
    return {case: found[case] for case in cases}


def _check_program(cases: list[Case], expected: dict[Case, Expected], engine: str) -> dict[Case, str]:
    """Compile the cases as one program. If that fails each half is tried alone, so that a failure has one culprit."""
    if not cases:
        return {}
    try:
        actual = _run(cases, engine)
    except Exception as failure:
        if len(cases) == 1:
            return {cases[0]: _failed(failure)}
        middle = len(cases) // 2
        halves = (cases[:middle], cases[middle:])
        return {case: found for half in halves for case, found in _check_program(half, expected, engine).items()}
    found = {case: verdict(case, expected[case], actual[case]) for case in cases}
    wrong = [case for case in cases if found[case] != "ok"]
    if len(cases) > 1:
        for case in wrong:
            if _check_program([case], expected, engine)[case] == "ok":
                found[case] += f" (only together with {len(cases) - 1} others, from {cases[0]} on)"
    return found


def _run(cases: list[Case], engine: str) -> dict[Case, list[torch.Tensor]]:
    states = [case.fresh() for case in cases]
    training = cases[0].task.direction == "training"
    torch._dynamo.reset()
    compiled = ENGINES[engine](_program(cases))
    torch.manual_seed(0)
    with torch.set_grad_enabled(training):
        results = compiled(states)
        return dict(zip(cases, outcomes(cases, states, results), strict=True))


def _program(cases: list[Case]) -> Program:
    """One function that makes every call, line by line: a graph break in one of them leaves the others as they are."""
    names = {f"f{position}": case.function for position, case in enumerate(cases)}
    calls = [f"    r{position} = f{position}(s[{position}])" for position in range(len(cases))]
    results = ", ".join(f"r{position}" for position in range(len(cases)))
    scope: dict[str, Any] = dict(names)
    exec("\n".join(["def program(s):", *calls, f"    return [{results}]"]), scope)
    return scope["program"]


def _failed(failure: Exception) -> str:
    """The failure in one line."""
    cause = getattr(failure, "inner_exception", None) or failure
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:200] if lines else ''}"
