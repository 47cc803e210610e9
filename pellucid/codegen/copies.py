"""Values that are only copied need no conversion: bf16 and f16 pass through a kernel as 16-bit integers."""

from __future__ import annotations

from dataclasses import replace

from pellucid.ir.nodes import Kernel, Line, Load, Store, operands
from pellucid.ir.types import DType

NARROW = frozenset({DType.BF16, DType.F16})


def raw_copies(kernel: Kernel) -> Kernel:
    """`kernel` with narrow buffers retyped as integers, if their elements are only copied between such buffers.

    before: `x: bf16`, `y: bf16`, `a: f32 = load x[i]; store y[2*i], a`
    after:  `x: i16`, `y: i16`, `a: i16 = load x[i]; store y[2*i], a`
    """
    dtypes = {param.name: param.dtype for param in kernel.params}
    raw = {name for name, dtype in dtypes.items() if dtype in NARROW}
    users: dict[str, list[Line]] = {}
    for line in kernel.body:
        for name in operands(line.rhs):
            users.setdefault(name, []).append(line)
    loads = {line.out: load for line, load in kernel.loads()}
    while raw:
        converted = {buffer for buffer in raw if not _all_copied(kernel, buffer, raw, dtypes, users, loads)}
        if not converted:
            break
        raw -= converted
    if not raw:
        return kernel
    moved = {name for name, load in loads.items() if load.buffer in raw}
    params = tuple(replace(param, dtype=DType.I16) if param.name in raw else param for param in kernel.params)
    body = tuple(
        replace(line, dtype=DType.I16)
        if line.out in moved or (isinstance(line.rhs, Store) and line.rhs.buffer in raw)
        else line
        for line in kernel.body
    )
    return replace(kernel, params=params, body=body)


def _all_copied(
    kernel: Kernel,
    buffer: str,
    raw: set[str],
    dtypes: dict[str, DType],
    users: dict[str, list[Line]],
    loads: dict[str, Load],
) -> bool:
    """Whether all loads of `buffer` are stored to raw buffers of its type, and all its stores come from such."""

    def copies(line: Line, value: str) -> bool:
        rhs = line.rhs
        if not isinstance(rhs, Store) or rhs.join or rhs.arg != value or value in rhs.index.vals():
            return False
        return rhs.buffer in raw and dtypes[rhs.buffer] is dtypes[buffer]

    for name, load in loads.items():
        blank = load.mask is None or repr(load.other) in ("0", "0.0")
        if load.buffer == buffer and not (blank and all(copies(line, name) for line in users.get(name, []))):
            return False
    for _, store in kernel.stores():
        if store.buffer == buffer:
            source = loads.get(store.arg)
            if store.join or source is None or source.buffer not in raw or dtypes[source.buffer] is not dtypes[buffer]:
                return False
    return True
