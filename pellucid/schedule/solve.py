"""Solve for the point of a producer that stores the element that a consumer loads.

The producer stores every element of its buffer once, at `24*i + 4*j + k`, a number in mixed radix. The digits of
the consumer's index are the point: `i = index // 24`, `j = index // 4 % 6`, `k = index % 4`. With the ranges of the
consumer's axes most of the divisions are exact and vanish; others vanish when an axis of the consumer is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pellucid.ir.index import ONE, ZERO, Atom, Expr, Val, Var, bounds, floordiv, mod, of_atom, var
from pellucid.ir.nodes import CheckIndex, Compute, Const, IndexValue, Kernel, Line
from pellucid.schedule.match_axes import Mismatch


def solve(
    producer: Kernel, stored: Expr, numel: Expr, consumer: Kernel, loaded: Expr, mask: str | None
) -> dict[str, Expr] | Mismatch:
    """The axes of `producer` in terms of those of `consumer`, such that `stored` becomes `loaded`.

    mask: the mask of the load, a value of `consumer`, if it has one; the solution holds where it is true.
    """
    digits = radix(producer, stored, numel)
    if digits is None:
        return Mismatch("different-loop-orders", f"{stored} does not enumerate the whole buffer")
    ranges = consumer.ranges
    extended, forth, back = dict(ranges), dict[Atom, Expr](), dict[Atom, Expr]()
    for line in consumer.body if loaded.vals() else ():
        # A checked value is in a known range: use a counter over this range as an axis.
        if line.out in loaded.vals() and isinstance(line.rhs, CheckIndex):
            counter = f"{line.out} in range"
            extended[counter] = line.rhs.size
            forth[Val(line.out)] = var(counter)
            back[Var(counter)] = of_atom(Val(line.out))
    if any(Val(name) not in forth for name in loaded.vals()):
        return Mismatch("indirect", f"{loaded} is computed from a value of unknown range")
    for position, low, high in [] if mask is None else intervals(consumer.body, mask, ranges):
        # Where the mask holds, `position` is `low` plus a counter that starts at 0: use the counter as an axis.
        name = next((name for name in sorted(position.vars()) if position.coefficient(name) == ONE), None)
        if name is not None and Var(name) not in forth:
            counter = f"{name} from {low}"
            extended[counter] = high - low
            forth[Var(name)] = var(counter) + low - position.without(name)
            back[Var(counter)] = position - low
    index = loaded.substitute(forth, extended)
    solution: dict[str, Expr] = {}
    for number, (name, weight) in enumerate(digits):
        digit = floordiv(index, weight, extended)
        if number < len(digits) - 1:
            digit = mod(digit, producer.ranges[name], extended)
        solution[name] = digit.substitute(back, ranges)
    return solution


def radix(kernel: Kernel, stored: Expr, numel: Expr) -> list[tuple[str, Expr]] | None:
    """The axes of `stored` and their weights, innermost first; None unless it enumerates 0 to `numel` without gaps."""
    left = {name: stored.coefficient(name) for name in stored.vars()}
    ranges = kernel.ranges
    found: list[tuple[str, Expr]] = []
    weight, form = ONE, ZERO
    while left:
        name = next((name for name in sorted(left) if left[name] == weight), None)
        if name is None:
            return None
        del left[name]
        found.append((name, weight))
        form, weight = form + weight * var(name), weight * ranges[name]
    return found if form == stored and weight == numel else None


def intervals(body: Iterable[Line], mask: str, ranges: Mapping[str, Expr]) -> list[tuple[Expr, Expr, Expr]]:
    """The bounds that the bool value `mask` implies: `(position, low, high)` for `low <= position < high`.

    Comparisons of a position with a size, combined by `bitwise_and`, are recognised.
    """
    lines = {line.out: line for line in body}
    low: dict[Expr, Expr] = {}
    high: dict[Expr, Expr] = {}
    stack = [mask]
    while stack:
        match lines[stack.pop()].rhs:
            case Compute("bitwise_and", (left, right)):
                stack += [left, right]
            case Compute("ge" | "lt" as op, (left, right)):
                position, bound = _size_of(lines[left]), _size_of(lines[right])
                if position is not None and bound is not None and position.vars() and not bound.vars():
                    base = position.at_zero
                    (low if op == "ge" else high)[position - base] = bound - base
            case _:
                pass
    found: list[tuple[Expr, Expr, Expr]] = []
    for position in dict.fromkeys((*low, *high)):
        span = bounds(position, ranges)
        if span is not None:
            found.append((position, low.get(position, span[0]), high.get(position, span[1] + 1)))
    return found


def _size_of(line: Line) -> Expr | None:
    """The value of a line that is an index expression or an integer constant."""
    match line.rhs:
        case IndexValue(index):
            return None if index.vals() else index
        case Const(int() as value):
            return ZERO + value
        case _:
            return None
