"""Which operators kernels compute for `u16`, `u32` and `u64`: the few that ATen computes for them.

All others are left to ATen, so that they fail as in eager mode. Also accepted are operators that PyTorch's
decompositions call: `arange` and `iota` (of `eye`), `index_select` (of `roll`), `logical_not` (of `all`). So these
work, and operators that decompose into operators of ATen, although eager refuses them: `eye`, `masked_fill`, `tril`,
`triu`, `trace`, `count_nonzero`, `linspace` and `lerp`.
"""

from __future__ import annotations

from typing import Any

import torch

from pellucid.capture.fx import DTYPES
from pellucid.ir.types import DType
from pellucid.lower.program_builder import op_name
from pellucid.lower.registry import NotLowered

# Operators that promote their arguments, and whose results may have these types.
_PROMOTE = frozenset(
    """
    mul.Tensor mul.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
    bitwise_xor.Scalar cat.default where.self where.ScalarSelf where.ScalarOther where.Scalar
    """.split()
)

# Other operators whose results may have these types.
_RESULTS = frozenset(
    """
    ceil.default floor.default trunc.default round.default
    clone.default lift_fresh_copy.default alias_copy.default contiguous.default _to_copy.default
    convert_element_type.default copy.default copy_.default full.default full_like.default scalar_tensor.default
    empty.memory_format empty_strided.default empty_like.default empty_permuted.default arange.default arange.start
    arange.start_step iota.default constant_pad_nd.default repeat.default embedding.default index_select.default
    index.Tensor slice_scatter.default select_scatter.default diagonal_scatter.default
    """.split()
)

# Operators that return bool or positions; ATen lacks them too for arguments that promote to one of these types.
_COMPARE = frozenset(
    """
    lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_and.default
    logical_or.default logical_xor.default argmax.default argmin.default
    """.split()
)


def common_type(first: Any, second: Any) -> DType:
    """The type that eager promotes two arguments to; a wide unsigned integer has none with other integers."""
    try:
        return DTYPES[torch.result_type(first, second)]
    except RuntimeError:
        raise NotLowered("the arguments have no common type: ATen reports the error") from None


def check_unsigned(name: str, node: torch.fx.Node) -> None:
    """Leave `node`, a call of the overload `name`, to ATen if ATen lacks it for the type that it is computed in."""
    meta = node.meta.get("val")
    results = meta if isinstance(meta, list | tuple) else [meta]
    types = {DTYPES[result.dtype] for result in results if isinstance(result, torch.Tensor)}
    if name in _PROMOTE or name in _COMPARE:
        types = _promoted(node)
    missing = [each.value for each in types if each.is_wide_unsigned] if name not in _PROMOTE | _RESULTS else []
    if missing:
        raise NotLowered(f"ATen has no {name} of {missing[0]}: it reports the error")


def _promoted(node: torch.fx.Node) -> set[DType]:
    """The types that the first argument, or the first of a list, is promoted to with each of the others."""
    start = int(op_name(node) == "where")  # after the condition
    given = node.args[0] if isinstance(node.args[0], list | tuple) else node.args[start : start + 2]
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in given]
    first, *others = (value for value in values if isinstance(value, torch.Tensor | bool | int | float))
    return {common_type(first, other) for other in others or [first]}
