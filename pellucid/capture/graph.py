"""Reading FX graphs: element types, sizes and strides of fake tensors, and where a node comes from."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import torch

from pellucid.capture.torch_compat import expr_of, user_frames
from pellucid.ir.index import Expr
from pellucid.ir.origin import Origin, UserLine, merge
from pellucid.ir.types import DType

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: DType.F64,
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.int64: DType.I64,
    torch.int32: DType.I32,
    torch.int16: DType.I16,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
    torch.complex64: DType.C64,
    torch.complex128: DType.C128,
}
TORCH_DTYPES: dict[DType, torch.dtype] = {ours: theirs for theirs, ours in DTYPES.items()}

# Key in a node's meta: origins of the nodes that it replaced.
_MERGED = "pellucid_merged_origins"

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n?\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)


def shape_of(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """The sizes of a (fake) tensor as index expressions."""
    return tuple(expr_of(size) for size in tensor.shape)


def strides_of(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """The strides of a (fake) tensor, in elements."""
    return tuple(expr_of(stride) for stride in tensor.stride())


def origin_of(node: torch.fx.Node) -> Origin:
    """The FX node itself and the line of the user's program that made it.

    The line is the innermost one outside PyTorch; a module of a library counts as the user's program.
    """
    line = _innermost_line(user_frames(node))
    own = Origin((node.name,), () if line is None else (line,))
    return merge((own, *node.meta.get(_MERGED, ())))


def merge_origin(kept: torch.fx.Node, dropped: torch.fx.Node) -> None:
    """`kept` now stands for `dropped` as well."""
    kept.meta[_MERGED] = (*kept.meta.get(_MERGED, ()), origin_of(dropped))


@lru_cache(maxsize=65536)
def _innermost_line(trace: str) -> UserLine | None:
    frames = [UserLine(m["file"], int(m["line"]), m["code"].strip()) for m in _FRAME.finditer(trace)]
    outside = [frame for frame in frames if not frame.file.startswith(_TORCH)]
    return (outside or frames or [None])[-1]
