"""Tidying kernel bodies after fusion: the same line once, no line in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pellucid.ir.nodes import Compute, Const, Kernel, Line, Load, Program, Rhs, Store
from pellucid.ir.origin import Origin, merge
from pellucid.schedule.canonical import canonical_kernel
from pellucid.schedule.rewrite import Rewrite, live_lines, make_kernel


def clean_up(program: Program) -> Program:
    """Every kernel without repeated or dead lines, in canonical form.

    Before: `v0 = load A[i]`, `v1 = load A[i]`, `v2 = cast v1` (to its own type), `v3 = add v0, v2`.
    After: `v0 = load A[i]`, `v1 = add v0, v0`.
    """
    nodes = tuple(clean_kernel(node) if isinstance(node, Kernel) else node for node in program.nodes)
    return replace(program, nodes=nodes)


def clean_kernel(kernel: Kernel) -> Kernel:
    """One kernel without repeated or dead lines, in canonical form."""
    body = live_lines(share_lines(kernel.body))
    return canonical_kernel(make_kernel(kernel.name, kernel.space, body, {p.name: p for p in kernel.params}))


def share_lines(body: tuple[Line, ...]) -> tuple[Line, ...]:
    """Compute everything once: equal lines become one, and what would not change a value is left out.

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
    """What two lines of equal value have in common. 0.0 and -0.0 are equal in Python, so scalars go by their text."""
    return (line.rhs, line.dtype, repr(line.rhs.other) if isinstance(line.rhs, Load) else "")


def _unchanged(line: Line, values: Mapping[str, Line]) -> str | None:
    """The argument that `line` gives back bit by bit, if it does.

    `x + 0.0` is not among the forms: it turns -0.0 into 0.0.
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
    """`line` without a choice that was made before: `where c, (where c, x, y), z` is `where c, x, z`."""
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
