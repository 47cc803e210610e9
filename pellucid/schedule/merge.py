"""Two kernels become one: the consumer's loads of what the producer stores become the stored values themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from pellucid.ir.index import Expr
from pellucid.ir.nodes import Compute, Const, Kernel, Line, Load, Reduce, Scalar, Store, operands
from pellucid.ir.origin import Origin, merge
from pellucid.ir.types import DType
from pellucid.schedule.match_axes import Match, Mismatch
from pellucid.schedule.rewrite import Rewrite, make_kernel


def merge_kernels(
    first: Kernel, second: Kernel, match: Match, dead: Collection[str] = (), partitioned: Collection[str] = ()
) -> Kernel | Mismatch:
    """One kernel that does the work of `first` and then of `second`, over the space of `match`.

    Values and lines of the two must have different names.

    dead: buffers that `first` stores and only `second` loads. partitioned: buffers that both may store, each its own
    elements.

    Before: `first` stores `B[i] = v`, `second` loads `w = B[i]` and stores `C[i] = w + w`.
    After: `C[i] = v + v`, and before that `B[i] = v` unless B is dead.
    """
    head, tail = match.first.lines(first.body), match.second.lines(second.body)
    lines, loaded, stored = _contents(head)
    refusal = _check_forwarding(stored, tail, partitioned)
    if refusal is not None:
        return refusal
    values: dict[str, Line] = {}
    for line in tail:
        if isinstance(line.rhs, Load):
            store = stored.get(line.rhs.buffer)
            same = lines[store.arg] if store else loaded.get((line.rhs.buffer, line.rhs.index))
            if same is not None and (store or line.rhs.mask is None):
                values[line.out] = same
    body = (*_without_stores(head, dead), *forward(tail, values))
    params = {param.name: param for param in (*first.params, *second.params)}
    return _check_mutation(body) or make_kernel(second.name, match.space, body, params)


def _contents(
    body: Iterable[Line],
) -> tuple[dict[str, Line], dict[tuple[str, Expr], Line], dict[str, Store]]:
    """The lines of `body` by name, its unmasked loads by element, and its stores by buffer."""
    lines: dict[str, Line] = {}
    loaded: dict[tuple[str, Expr], Line] = {}
    stored: dict[str, Store] = {}
    for line in body:
        lines[line.out] = line
        rhs = line.rhs
        if isinstance(rhs, Load):
            if rhs.mask is None:
                loaded[rhs.buffer, rhs.index] = line
        elif isinstance(rhs, Store):
            stored[rhs.buffer] = rhs
    return lines, loaded, stored


def _without_stores(body: tuple[Line, ...], buffers: Collection[str]) -> tuple[Line, ...]:
    """`body` without its stores to `buffers`; their origins are added to the stored values."""
    if not buffers:
        return body
    heirs: dict[str, list[Origin]] = {}
    kept: list[Line] = []
    for line in body:
        if isinstance(line.rhs, Store) and line.rhs.buffer in buffers:
            heirs.setdefault(line.rhs.arg, []).append(line.origin)
        else:
            kept.append(line)
    return tuple([_inherit(line, heirs[line.out]) if line.out in heirs else line for line in kept])


def forward(
    body: Iterable[Line], values: Mapping[str, Line], before: Mapping[str, Iterable[Line]] | None = None
) -> list[Line]:
    """`body` with each load named in `values` replaced by the value of that line.

    The mask or conversion of a load becomes separate lines. The origin of a removed load is added to its users.

    before: lines to insert in place of a load, which compute the value.
    """
    renamed: dict[str, str] = {}
    inherited: dict[str, Origin] = {}
    result: list[Line] = []
    for line in body:
        if line.out in values:
            value = values[line.out]
            result += before.get(line.out, ()) if before else ()
            lines = _as_load(line, value)
            result += lines
            if not lines:
                renamed[line.out], inherited[line.out] = value.out, line.origin
            continue
        heirs = [inherited[name] for name in operands(line.rhs) if name in inherited] if inherited else []
        if heirs:
            line = _inherit(Rewrite(values=renamed).line(line), heirs)
        result.append(line)
    return result


def _as_load(line: Line, value: Line) -> list[Line]:
    """The lines that convert `value` to the value of the load `line`; none if they are equal."""
    assert isinstance(line.rhs, Load)
    name, lines = value.out, list[Line]()
    if value.dtype is not line.dtype:
        lines.append(replace(line, out=f"{line.out}.cast", rhs=Compute("cast", (name,))))
        name = lines[-1].out
    if line.rhs.mask is not None:
        other = replace(line, out=f"{line.out}.other", rhs=Const(scalar_of(line.rhs.other, line.dtype)))
        lines += [
            other,
            replace(line, out=f"{line.out}.where", rhs=Compute("where", (line.rhs.mask, name, other.out))),
        ]
    if lines:
        lines[-1] = replace(lines[-1], out=line.out)
    return lines


def scalar_of(value: Scalar, dtype: DType) -> Scalar:
    """`value` as a constant of type `dtype`."""
    return float(value) if dtype.is_float else value


def _inherit(line: Line, heirs: list[Origin]) -> Line:
    if all(set(origin.nodes) <= set(line.origin.nodes) for origin in heirs):
        return line
    return replace(line, origin=merge([line.origin, *heirs]))


def _check_forwarding(
    stored: Mapping[str, Store], tail: Iterable[Line], partitioned: Collection[str]
) -> Mismatch | None:
    """Every load of a stored buffer must read the element that is stored at the same point."""
    for line in tail:
        match line.rhs:
            case Load(buffer, index) if buffer in stored and index != stored[buffer].index:
                where = f"{buffer} is stored at {stored[buffer].index} and loaded at {index}"
                if index.vals():
                    return Mismatch("indirect", where)
                same = index.vars() == stored[buffer].index.vars()
                constant = (index - stored[buffer].index).value
                return Mismatch("different-offset" if same and constant is not None else "different-loop-orders", where)
            case Store(buffer) if buffer in stored and buffer not in partitioned:
                return Mismatch("mutation", f"both write {buffer}")
            case _:
                pass
    return None


def _check_mutation(body: tuple[Line, ...]) -> Mismatch | None:
    """A buffer that is read and then overwritten must be read at the same element by the same point, once."""
    written = {line.rhs.buffer: line.rhs.index for line in body if isinstance(line.rhs, Store)}
    loads = [line.rhs for line in body if isinstance(line.rhs, Load) and line.rhs.buffer in written]
    if not loads:
        return None
    reduced = {axis for line in body if isinstance(line.rhs, Reduce) for axis in line.rhs.axes}
    for load in loads:
        if load.index != written[load.buffer]:
            return Mismatch("mutation", f"{load.buffer} is overwritten while other points still read it")
        if not reduced.isdisjoint(load.index.vars()):
            return Mismatch("mutation", f"{load.buffer} would be overwritten between two sweeps that read it")
    return None
