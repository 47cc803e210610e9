"""Every lowering rule against eager, executed by the interpreter: no C++ takes part."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid.ir.nodes import Program
from tests.operator_cases import all_cases
from tests.support import assert_matches, interpreted, widened

CASES = all_cases()


def in_short_runs(name: str) -> bool:
    """Half of the cases, chosen by their names; `make test-models` runs the others."""
    return zlib.crc32(name.encode()) % 2 == 0


@pytest.mark.parametrize(("function", "args"), [
    pytest.param(function, args, id=name, marks=() if in_short_runs(name) else pytest.mark.slow)
    for name, function, args in CASES
])  # fmt: skip
def test_matches_eager(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    programs: list[Program] = []
    compiled_args, eager_args, wide_args = (
        copy.deepcopy(args),
        copy.deepcopy(args),
        widened(copy.deepcopy(args)),
    )
    with torch.no_grad():
        compiled = interpreted(function, programs)(*compiled_args)
        eager = function(*eager_args)
        reference = function(*wide_args)
    assert programs
    assert_matches((compiled, compiled_args), (eager, eager_args), (reference, wide_args))


def test_results_of_roll_lie_as_eagers_do() -> None:
    def rolled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = x.roll(1, -1), x.roll((1, 2), (1, 2)), x.roll(3), x.int().roll(1, 1), torch.flip(x.roll(1, 0), (1,))
        return *turned, x.roll(0, 1), x.roll(-6, 2), x.roll((0, 0), (1, 2)), x.roll((1, 1), (3, 3))

    torch._dynamo.reset()
    compiled = torch.compile(rolled, backend="pellucid", dynamic=False)
    x = torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    for each in (x, x[:, ::2], x.contiguous(), x.permute(0, 3, 1, 2), x[:, :1].expand(2, 4, 6, 5)):
        for ours, eagers in zip(compiled(each), rolled(each), strict=True):
            assert torch.equal(ours, eagers) and ours.stride() == eagers.stride()
