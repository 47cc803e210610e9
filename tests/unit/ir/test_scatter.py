"""Stores that join, and stores at indices that depend on values: text, checks, meaning."""

from __future__ import annotations

import pytest
import torch

from pellucid.errors import InternalError
from pellucid.ir.interp import run_kernel
from pellucid.ir.nodes import Store
from pellucid.ir.parser import parse_kernel
from pellucid.ir.printer import print_kernel
from pellucid.ir.verify_kernel import verify_kernel

SCATTER = """
kernel scatter(at: i64[5], x: f32[5], y: {dtype}[3]) {{
  axes i0: 5
  v0: i64 = load at[i0]
  v1: i64 = check v0, 3
  v2: f32 = load x[i0]
  s0: f32 = store {join}y[[v1]], v2
}}
"""


def scattered(join: str, dtype: str = "f32") -> torch.Tensor:
    kernel = parse_kernel(SCATTER.format(join=join, dtype=dtype))
    verify_kernel(kernel)
    y = torch.tensor([10.0, 20.0, 30.0], dtype={"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    run_kernel(kernel, {"at": torch.tensor([2, 0, 2, -1, 0]), "x": torch.tensor([1.0, 2, 3, 4, 0.125]), "y": y}, {})
    return y


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        ("", [0.125, 20, 4]),  # the last of the points that meet stays
        ("add ", [12.125, 20, 38]),
        ("mul ", [2.5, 20, 360]),
        ("maximum ", [10, 20, 30]),
        ("minimum ", [0.125, 20, 1]),
    ],
)
def test_points_that_meet_are_stored_in_order(join: str, expected: list[float]) -> None:
    assert scattered(join).tolist() == expected


def test_each_join_is_narrowed() -> None:
    assert scattered("add ", "bf16").tolist() == [12.125, 20, 38]
    kernel = parse_kernel(SCATTER.format(join="add ", dtype="bf16"))
    y = torch.tensor([256.0, 0, 0], dtype=torch.bfloat16)
    run_kernel(kernel, {"at": torch.zeros(5, dtype=torch.int64), "x": torch.ones(5), "y": y}, {})
    assert y[0] == 256  # 257 rounds to 256, five times


def test_a_join_reads_back_even_where_a_buffer_has_its_name() -> None:
    text = SCATTER.format(join="add ", dtype="f32")
    for source in (text, text.replace("y", "add"), text.replace("y", "add").replace("store add ", "store ")):
        kernel = parse_kernel(source)
        assert parse_kernel(print_kernel(kernel)) == kernel
    joins = [line.rhs.join for line in parse_kernel(text).body if isinstance(line.rhs, Store)]
    assert joins == ["add"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("store add y", "store sub y", "unknown operator"),
        ("v2: f32 = load x[i0]", "v2: f32 = load y[[v1]]", "which it scatters into"),
        ("v2: f32 = load x[i0]", "v3: f32 = load x[i0]\n  v2: f32 = sum v3 over i0", "both scatter and reduce"),
    ],
)
def test_broken_scatters_are_found(old: str, new: str, problem: str) -> None:
    text = SCATTER.format(join="add ", dtype="f32").replace(old, new)
    if "load y" in new:
        text = text.replace("x: f32[5], ", "")
    with pytest.raises(Exception, match=problem) as failure:
        verify_kernel(parse_kernel(text))
    assert problem.startswith("unknown") or isinstance(failure.value, InternalError)


def test_bool_cannot_be_added() -> None:
    text = SCATTER.format(join="add ", dtype="bool").replace("x: f32", "x: bool").replace("f32 =", "bool =")
    with pytest.raises(InternalError, match="cannot join"):
        verify_kernel(parse_kernel(text))
