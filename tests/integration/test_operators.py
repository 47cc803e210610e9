"""Every lowering rule against eager, through the whole compiler; many cases make one graph."""

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


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", CHUNKS, ids=[f"{chunk[0][0]}..{chunk[-1][0]}" for chunk in CHUNKS])
def test_native_matches_eager(chunk: list[Case]) -> None:
    torch._dynamo.reset()
    arguments = [case[2] for case in chunk]
    ours, eagers, wide = copy.deepcopy(arguments), copy.deepcopy(arguments), widened(copy.deepcopy(arguments))
    options = {"verify": True}
    compiled = torch.compile(lambda args: run(chunk, args), backend="pellucid", options=options, fullgraph=True)
    with torch.no_grad():
        actual, eager, exact = compiled(ours), run(chunk, eagers), run(chunk, wide)
    for position, (name, _, _) in enumerate(chunk):
        pairs = ((actual, ours), (eager, eagers), (exact, wide))
        try:
            assert_matches(*((results[position], inputs[position]) for results, inputs in pairs))
        except AssertionError as failure:
            raise AssertionError(f"{name}: {failure}") from None
