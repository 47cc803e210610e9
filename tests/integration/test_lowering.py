"""Every lowering rule against eager, executed by the interpreter: no C++ takes part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pellucid.ir.nodes import Program
from tests.operator_cases import all_cases
from tests.support import assert_matches, interpreted, widened

CASES = all_cases()


@pytest.mark.parametrize(("function", "args"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
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
