"""Every lowering rule against eager, through the whole compiler. Cases are compiled many at a time: one graph each chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.operator_cases import Case, all_cases
from tests.support import assert_matches, widened

CHUNK = 24
CASES = all_cases()
CHUNKS = [CASES[start : start + CHUNK] for start in range(0, len(CASES), CHUNK)]


def run(chunk: list[Case], arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for (_, function, _), args in zip(chunk, arguments, strict=True)]


@pytest.mark.parametrize("chunk", CHUNKS, ids=[f"{chunk[0][0]}..{chunk[-1][0]}" for chunk in CHUNKS])
def test_native_matches_eager(chunk: list[Case]) -> None:
    torch._dynamo.reset()
    arguments = [case[2] for case in chunk]
    ours, eagers, wide = copy.deepcopy(arguments), copy.deepcopy(arguments), widened(copy.deepcopy(arguments))
    compiled = torch.compile(lambda args: run(chunk, args), backend="pellucid", options={"verify": True}, fullgraph=True)
    with torch.no_grad():
        actual, eager, exact = compiled(ours), run(chunk, eagers), run(chunk, wide)
    for position, (name, _, _) in enumerate(chunk):
        try:
            assert_matches(
                (actual[position], ours[position]), (eager[position], eagers[position]), (exact[position], wide[position])
            )
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from None
