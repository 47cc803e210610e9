"""Parameters begin at the first element that a kernel touches, so kernels over equal parts of a tensor are equal."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pellucid.codegen.names import map_indices
from pellucid.ir.index import Expr, bounds, const
from pellucid.ir.nodes import Kernel, Load, Param, Rhs, Store


def from_first_touched(kernel: Kernel, whole: Collection[str]) -> tuple[Kernel, tuple[int, ...]]:
    """The kernel with parameters that begin at their first touched element, and the offset of each in its buffer.

    Before: `v0 = load p0[4096 + i0]`, of `i0: 1024`. After: `v0 = load p0[i0]`, and 4096 for `p0`, of 1024 elements.
    whole: parameters that stay unchanged.
    """
    spans = {param.name: None if param.name in whole else _touched(kernel, param.name) for param in kernel.params}
    firsts = {name: span[0] for name, span in spans.items() if span}

    def moved(rhs: Rhs) -> Rhs:
        first = firsts.get(rhs.buffer, 0) if isinstance(rhs, Load | Store) else 0
        return map_indices(rhs, lambda index: index - first) if first else rhs

    body = tuple(replace(line, rhs=moved(line.rhs)) for line in kernel.body)
    params = tuple(_part(param, spans[param.name]) for param in kernel.params)
    return replace(kernel, params=params, body=body), tuple(firsts.get(param.name, 0) for param in kernel.params)


def _part(param: Param, span: tuple[int, int] | None) -> Param:
    if span is None:
        return param
    after = param.numel - span[0]  # the index of a masked load may be out of bounds
    touched = span[1] - span[0] + 1
    return replace(param, numel=after if after.value is None else const(min(after.value, touched)))


def _touched(kernel: Kernel, buffer: str) -> tuple[int, int] | None:
    """The first and the last element of a buffer that a kernel may touch; None if that is not known."""
    spans: list[tuple[int, int]] = []
    for line in kernel.body:
        if isinstance(line.rhs, Load | Store) and line.rhs.buffer == buffer:
            span = _span(line.rhs.index, kernel)
            if span is None:
                return None
            spans.append(span)
    low, high = min(first for first, _ in spans), max(last for _, last in spans)
    return (low, high) if 0 <= low <= high else None


def _span(index: Expr, kernel: Kernel) -> tuple[int, int] | None:
    found = bounds(index, kernel.ranges)
    if found is None or found[0].value is None or found[1].value is None:
        return None
    return found[0].value, found[1].value
