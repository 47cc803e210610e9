"""Cleaning up kernel bodies after fusion: no repeated and no dead lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pellucid.ir.nodes import Compute, Const, Kernel, Line, Load, Program, Rhs, Store, operands
from pellucid.ir.ops import ROUNDING
from pellucid.ir.origin import Origin, merge
from pellucid.ir.types import TORCH_DTYPES, DType
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.rewrite import Rewrite, live_lines, make_kernel

_ROUNDINGS = {op: TORCH_DTYPES[dtype] for dtype, op in ROUNDING.items()}


def clean_up(program: Program) -> Program:
    """Every kernel without repeated or dead lines, in canonical form.

    Before: `v0 = load A[i]`, `v1 = load A[i]`, `v2 = cast v1` (to its own type), `v3 = add v0, v2`.
    After: `v0 = load A[i]`, `v1 = add v0, v0`.
    """
    nodes = tuple(clean_kernel(node) if isinstance(node, Kernel) else node for node in program.nodes)
    return replace(program, nodes=nodes)


def clean_kernel(kernel: Kernel) -> Kernel:
    """One kernel without repeated or dead lines, in canonical form."""
    body = live_lines(share_lines(round_once(kernel)))
    return canonical_kernel(make_kernel(kernel.name, kernel.space, body, {p.name: p for p in kernel.params}))


def round_once(kernel: Kernel) -> tuple[Line, ...]:
    """The body without roundings to a narrow type that a store, or another rounding, repeats.

    Maxima and minima with constants of that type may be in between: rounding is monotonic, so it commutes with them.
    Before: `v1 = round_bf16 v0`, `v2 = maximum v1, 0.0`, `store A[i], v2` with A in bf16.
    After: `v2 = maximum v0, 0.0`, `store A[i], v2`.
    """
    if not any(isinstance(line.rhs, Compute) and line.rhs.op in _ROUNDINGS for line in kernel.body):
        return kernel.body
    dtypes = {param.name: param.dtype for param in kernel.params}
    values = {line.out: line.rhs for line in kernel.body}
    # The roundings in which the uses of a value end; the empty name for any other use.
    rounded: dict[str, set[str]] = {}
    for line in reversed(kernel.body):
        after = _roundings(line, dtypes, rounded)
        for name in operands(line.rhs):
            kept = all(_keeps(values[other], after) for other in operands(line.rhs) if other != name)
            rounded.setdefault(name, set()).update(after if kept else {""})
    renamed: dict[str, str] = {}
    rewrite = Rewrite(values=renamed)
    body: list[Line] = []
    for line in kernel.body:
        line = rewrite.line(line)
        match line.rhs:
            case Compute(op, (x,)) if op in _ROUNDINGS and rounded.get(line.out) == {op}:
                renamed[line.out] = x
            case _:
                body.append(line)
    return tuple(body)


def _roundings(line: Line, dtypes: Mapping[str, DType], rounded: Mapping[str, set[str]]) -> set[str]:
    """The roundings that the arguments of `line` go through, with only maxima and minima in between."""
    match line.rhs:
        case Store(buffer, _, _, ""):
            return {ROUNDING.get(dtypes[buffer], "")}
        case Compute(op, _) if op in _ROUNDINGS:
            return {op}
        case Compute("maximum" | "minimum", _):
            return rounded.get(line.out, {""})
        case _:
            return {""}


def _keeps(rhs: Rhs, roundings: set[str]) -> bool:
    """True if `rhs` is a constant that none of the roundings changes."""
    if not isinstance(rhs, Const) or not roundings <= _ROUNDINGS.keys():
        return False
    number = torch.tensor(rhs.value, dtype=torch.float64)
    return all(torch.equal(number.to(_ROUNDINGS[op]).double(), number) for op in roundings)


def share_lines(body: tuple[Line, ...]) -> tuple[Line, ...]:
    """Common subexpression elimination; lines that do not change their argument are removed.

    All loads of a point precede its stores, so equal loads are equal values.
    """
    values: dict[str, Line] = {}  # lines kept so far, by name
    first: dict[object, str] = {}
    renamed: dict[str, str] = {}
    heirs: dict[str, list[Origin]] = {}
    rewrite = Rewrite(values=renamed)
    for line in body:
        line = _shortened(rewrite.line(line) if renamed else line, values)
        same = None
        if not isinstance(line.rhs, Store):
            same = _unchanged(line, values) or first.setdefault(_key(line), line.out)
        if same is None or same == line.out:
            values[line.out] = line
        else:
            renamed[line.out] = same
            heirs.setdefault(same, []).append(line.origin)
    return tuple(
        replace(line, origin=merge([line.origin, *heirs[name]])) if name in heirs else line
        for name, line in values.items()
    )


def _key(line: Line) -> object:
    """A key that is equal for lines of equal value. Python's 0.0 == -0.0, so scalars are compared by their text."""
    return (line.rhs, line.dtype, repr(line.rhs.other) if isinstance(line.rhs, Load) else "")


def _unchanged(line: Line, values: Mapping[str, Line]) -> str | None:
    """The argument that `line` returns bit for bit, or None.

    `x + 0.0` is excluded: it turns -0.0 into 0.0.
    """
    match line.rhs:
        case Compute("cast", (arg,)) if values[arg].dtype is line.dtype:
            return arg
        case Compute("mul", (x, y)) if _is_number(values[y].rhs, 1):
            return x
        case Compute("mul", (x, y)) if _is_number(values[x].rhs, 1):
            return y
        case Compute("div", (x, y)) if _is_number(values[y].rhs, 1):
            return x
        case Compute("add" | "sub", (x, y)) if line.dtype.is_int and _is_number(values[y].rhs, 0):
            return x
        case Compute("where", (_, x, y)) if x == y:
            return x
        case _:
            return None


def _shortened(line: Line, values: Mapping[str, Line]) -> Line:
    """`line` without a repeated `where` on the same condition: `where c, (where c, x, y), z` is `where c, x, z`."""
    match line.rhs:
        case Compute("where", (condition, x, y)):
            match values[x].rhs, values[y].rhs:
                case Compute("where", (again, chosen, _)), _ if again == condition:
                    return replace(line, rhs=Compute("where", (condition, chosen, y)))
                case _, Compute("where", (again, _, chosen)) if again == condition:
                    return replace(line, rhs=Compute("where", (condition, x, chosen)))
                case _:
                    return line
        case _:
            return line


def _is_number(rhs: Rhs, number: int) -> bool:
    return isinstance(rhs, Const) and not isinstance(rhs.value, bool) and rhs.value == number
