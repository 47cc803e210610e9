"""What a kernel that Inductor generated moves and computes, from the loops that it implements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
from torch._inductor.codegen.common import KernelArgs, RemovedArg
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V

from pellucid.ir.traffic import Access, distinct_elements, fetched_bytes
from pellucid.kit.subjects.facts import widest_float

_NO_OPERATIONS = frozenset(
    """load store store_reduction output constant to_dtype to_dtype_bitcast index_expr indirect_indexing check_bounds
    where masked eq ne lt le gt ge isnan isinf bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or
    logical_not logical_xor and_ or_ xor invert lshift rshift identity get_index set_indirect""".split()
)


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a kernel. loaded, stored: bytes of distinct elements. flops: operations on floats; dtype: the widest
    float type among its buffers.

    fetched: bytes of the cache lines that it touches. scalar: why it is not vectorised; empty if it is.
    loads, stores: the number of operations in the loops.
    """

    loaded: int
    stored: int
    flops: int
    dtype: str
    fetched: int
    scalar: str
    loads: int = 0
    stores: int = 0

    @property
    def row(self) -> dict[str, int]:
        """The facts by column of `kernels.csv`."""
        return {
            "loads": self.loads,
            "stores": self.stores,
            "bytes_loaded": self.loaded,
            "bytes_stored": self.stored,
            "flops": self.flops,
            "vectorized": int(not self.scalar),
        }


def loops_of(nodes: Sequence[BaseSchedulerNode], args: KernelArgs, scalar: str) -> Loops:
    """The facts of a kernel with these arguments, while its graph is compiled. scalar: why it is not vectorised, if so.

    A size that is only known when the graph is called has the value of Inductor's hint.
    """
    parts = [node for node in nodes if isinstance(node, SchedulerNode)]
    made = {name for node in parts for name in node.get_buffer_names()}
    written = _accesses(parts, "writes", args)
    read = _accesses(parts, "reads", args, made)
    flops = sum(_flops(node) for node in parts)
    dtypes = [V.graph.get_dtype(name) for name in (*read, *written)]
    ops = Counter[str]()
    for node in parts:
        ops.update(node._body.op_counts)
    loads, stores = ops["load"], ops["store"] + ops["store_reduction"]
    loaded, stored = _bytes(read), _bytes(written)
    fetched = sum(
        fetched_bytes(each, moved[name], _number(V.graph.get_numel(name)), V.graph.get_dtype(name).itemsize)
        for found, moved in ((read, loaded), (written, stored))
        for name, each in found.items()
    )
    dtype = widest_float(dtypes) if flops else ""
    return Loops(sum(loaded.values()), sum(stored.values()), flops, dtype, fetched, scalar, loads, stores)


def _accesses(
    nodes: Iterable[SchedulerNode], which: str, args: KernelArgs, made_here: Collection[str] = ()
) -> dict[str, list[Access]]:
    """The accesses by buffer. made_here: buffers that the kernel computes itself, and so does not read from memory."""
    found: dict[str, dict[Any, Access]] = {}
    for node in nodes:
        for dep in getattr(node.read_writes, which):
            name = V.graph.scheduler.mutation_real_name.get(dep.name, dep.name)
            if isinstance(dep, MemoryDep) and _is_argument(name, args) and dep.name not in made_here:
                found.setdefault(name, {})[dep.index, dep.size] = _access(dep)
    return {name: list(each.values()) for name, each in found.items()}


def _is_argument(name: str, args: KernelArgs) -> bool:
    places = {**args.input_buffers, **args.output_buffers, **args.inplace_buffers}
    return name in places and not isinstance(places[name], RemovedArg)


def _access(dep: MemoryDep) -> Access:
    sizes = [_number(size) for size in dep.size]
    strides, rest = [], dep.index
    for variable, size in zip(dep.var_names, sizes, strict=True):
        stride = dep.index.coeff(variable)
        rest -= stride * variable
        strides.append((stride, size))
    if any(stride.free_symbols & set(dep.var_names) for stride, _ in strides) or not _is_known(rest):
        return Access(0, None, prod(sizes))
    steps = tuple((_number(stride), size) for stride, size in strides if stride != 0)
    return Access(_number(rest) + sum(min(0, stride * (size - 1)) for stride, size in steps), steps, prod(sizes))


def _is_known(expression: sympy.Expr) -> bool:
    """Whether all its symbols are known sizes."""
    return all(symbol in V.graph.sizevars.shape_env.backed_var_to_val for symbol in expression.free_symbols)


def _number(expression: Any) -> int:
    return int(V.graph.sizevars.optimization_hint(expression))


def _bytes(accesses: dict[str, list[Access]]) -> dict[str, int]:
    """The bytes accessed by buffer."""
    return {
        name: distinct_elements(found, _number(V.graph.get_numel(name))) * V.graph.get_dtype(name).itemsize
        for name, found in accesses.items()
    }


def _flops(node: SchedulerNode) -> int:
    """The FLOPs of one loop nest: each operation at each point; 0 if it computes integers."""
    if not any(V.graph.get_dtype(name).is_floating_point for name in node.get_buffer_names()):
        return 0
    operations = sum(count for op, count in node._body.op_counts.items() if op not in _NO_OPERATIONS)
    return operations * prod(_number(size) for sizes in node._body.sizes for size in sizes)
