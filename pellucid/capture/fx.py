"""Reading FX graphs: element types, sizes and strides of fake tensors, and where a node comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from pellucid.capture.torch_compat import (
    derived_in,
    expr_of,
    is_symbolic,
    module_of,
    size_hint,
    stride_of,
    tree_leaves,
    user_frames,
)
from pellucid.errors import UnsupportedError
from pellucid.ir.decision import Decision
from pellucid.ir.derived import Derived
from pellucid.ir.index import ZERO, Expr
from pellucid.ir.nodes import View
from pellucid.ir.origin import Origin, UserLine, merge
from pellucid.ir.types import TORCH_DTYPES, DType

DTYPES: dict[torch.dtype, DType] = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

# Key in a node's meta: origins of the nodes that it replaced.
_MERGED = "pellucid_merged_origins"
# Key in a node's meta: decisions made on the joint graph.
_DECIDED = "pellucid_decisions"

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n?\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)


def dtype_of(tensor: torch.Tensor) -> DType:
    """The element type of a (fake) tensor; raises `UnsupportedError` for one that the IR has no name for."""
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(f"tensors of {tensor.dtype}", hint="keep them out with torch.compiler.disable")
    return DTYPES[tensor.dtype]


def computed(dtype: torch.dtype) -> torch.dtype:
    """The type that elements of a type are computed in."""
    return TORCH_DTYPES[DTYPES[dtype].compute]


def shape_of(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """The sizes of a (fake) tensor as index expressions."""
    return tuple(expr_of(size) for size in tensor.shape)


def strides_of(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """The strides of a (fake) tensor, in elements."""
    return tuple(stride_of(stride) for stride in tensor.stride())


def order_in_memory(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """The dimensions of a (fake) tensor from the outermost in memory to the innermost one, and back."""
    order = sorted(range(tensor.dim()), key=lambda dim: size_hint(tensor.stride(dim)), reverse=True)
    return order, [order.index(dim) for dim in range(tensor.dim())]


def whole(buffer: str, tensor: torch.Tensor) -> View:
    """The view of a whole buffer that has the shape and strides of `tensor`."""
    return View(buffer, shape_of(tensor), strides_of(tensor), ZERO)


def bytes_of(node: torch.fx.Node) -> int:
    """The size in bytes of the tensors that a node returns, by the sizes at capture."""
    tensors = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, torch.Tensor)]
    return sum(math.prod(map(size_hint, each.shape)) * each.itemsize for each in tensors)


def elements_of(node: torch.fx.Node) -> int:
    """The number of elements of the tensor that a node returns, by its sizes at capture."""
    return math.prod(map(size_hint, node.meta["val"].shape))


def reachable(
    start: Iterable[torch.fx.Node], following: Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
) -> set[torch.fx.Node]:
    """`start` and all nodes reachable from it by `following`."""
    found: set[torch.fx.Node] = set()
    pending = list(start)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += following(node)
    return found


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a node of a joint or backward graph is a tangent, a gradient passed to backward."""
    return node.op == "placeholder" and "tangents" in node.name


def dependent_on_tangents(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The tangents, and all nodes that depend on them."""
    return reachable(filter(is_tangent, graph.nodes), lambda node: node.users)


def attribute_of(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """The value of a `get_attr` node: a tensor or a graph, of the module or of a submodule."""
    value: Any = graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def derived_sizes(graph_module: torch.fx.GraphModule) -> dict[str, Derived]:
    """The derived integers that the sizes of a graph name, each after those that it is computed from."""
    found: dict[str, Derived] = {}
    for node in graph_module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for size in (*value.shape, value.storage_offset()):
                    found |= derived_in(size)
                for stride in value.stride():
                    found |= derived_in(stride, stride=True)
            elif is_symbolic(value):
                found |= derived_in(value)
    return found


def origin_of(node: torch.fx.Node) -> Origin:
    """The name of the FX node and the line of the user's program that created it.

    The line is the innermost one outside PyTorch; a module of a library counts as the user's program. Where all lines
    are PyTorch's, as in an `nn.Sequential`, there is only the path and the class of the module.
    """
    line, (module, kind) = _innermost_line(user_frames(node)), module_of(node)
    known = [UserLine("", 0, kind, module) if line is None else line._replace(module=module)] if line or module else []
    return merge((Origin((node.name,), tuple(known)), *node.meta.get(_MERGED, ())))


def first_line(graph: torch.fx.Graph) -> str:
    """Where in the user's program a Dynamo graph begins, `FILE:LINE`; empty if unknown."""
    for node in graph.nodes:
        for frame in _FRAME.finditer(user_frames(node)):
            if not frame["file"].startswith(_TORCH):
                return f"{frame['file']}:{frame['line']}"
    return ""


def first_calls(graph: torch.fx.Graph, count: int = 3) -> str:
    """The names of the first calls of a graph, `linear, relu, linear`."""
    targets = (node.target for node in graph.nodes if node.op.startswith("call"))
    names = (getattr(each, "_opname", "") or getattr(each, "__name__", str(each)) for each in targets)
    return ", ".join(islice(names, count))


def merge_origin(kept: torch.fx.Node, dropped: torch.fx.Node) -> None:
    """Record that `kept` replaces `dropped` too: its origins include those of `dropped`."""
    kept.meta[_MERGED] = (*kept.meta.get(_MERGED, ()), origin_of(dropped))


def decide(node: torch.fx.Node, *decisions: Decision) -> None:
    """Attach decisions about a joint graph to a node of its forward half, for `decided_jointly`."""
    node.meta[_DECIDED] = (*node.meta.get(_DECIDED, ()), *decisions)


def decided_jointly(forward: torch.fx.Graph) -> tuple[Decision, ...]:
    """The decisions about a joint graph that were attached before it was partitioned."""
    calls = (node for node in forward.nodes if node.op == "call_function")  # placeholders carry their source's meta
    return tuple(dict.fromkeys(decision for node in calls for decision in node.meta.get(_DECIDED, ())))


@lru_cache(maxsize=65536)
def _innermost_line(trace: str) -> UserLine | None:
    frames = [UserLine(m["file"], int(m["line"]), m["code"].strip()) for m in _FRAME.finditer(trace)]
    outside = [frame for frame in frames if not frame.file.startswith(_TORCH)]
    return (outside or frames or [None])[-1]
