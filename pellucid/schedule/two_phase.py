"""Reductions in two phases: a partial result for each chunk, then the reduction of these.

A kernel is parallel over its kept axes only, so the sum of a whole tensor, or a statistic of few channels, would run
on one thread or few. Such a kernel is split into several ordinary kernels:

    before: `s = sum x[i] over i < 1048576; y[i] = x[i] / s`
    after:  `part[c] = sum x[16384*c + j] over j < 16384`    for each of 64 chunks c
            `all[0] = sum part[c] over c`
            `y[i] = x[i] / all[0]`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pellucid.ir.analysis import depth_of
from pellucid.ir.decision import Decision
from pellucid.ir.index import ONE, Expr, product, val, var
from pellucid.ir.nodes import (
    Axis,
    Buffer,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Kernel,
    Line,
    Load,
    Node,
    Param,
    Program,
    Reduce,
    Scalar,
    Store,
    axes_of,
    operands,
)
from pellucid.ir.ops import REDUCTIONS, identity_of
from pellucid.ir.origin import merge
from pellucid.ir.types import DType
from pellucid.options import Options
from pellucid.schedule.cleanup import clean_kernel
from pellucid.schedule.cut import Cut, choose_cuts
from pellucid.schedule.rewrite import Rewrite, make_kernel, row_major, unique_name

STEP = "two phases"


def split_reductions(program: Program, options: Options) -> tuple[Program, list[Decision]]:
    """`program` with its long reductions in two phases, and a decision for each reduction."""
    nodes: list[Node] = []
    buffers = list(program.buffers)
    decisions: list[Decision] = []
    taken = {*program.symbols, *(buffer.name for buffer in buffers), *(node.name for node in program.nodes)}
    for node in program.nodes:
        cuts: tuple[Cut, ...] = ()
        if isinstance(node, Kernel) and node.reduced:
            cuts, decision = choose_cuts(node, options)
            decisions.append(decision)
        if isinstance(node, Kernel) and cuts:
            split = _Split(node, cuts, taken)
            nodes += map(clean_kernel, split.kernels())
            buffers += split.buffers
        else:
            nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=tuple(buffers)), decisions


def split_kernel(kernel: Kernel, cuts: Sequence[Cut]) -> tuple[tuple[Kernel, ...], tuple[Buffer, ...]]:
    """The kernels that together replace `kernel`, in order, and the buffers between them."""
    split = _Split(kernel, tuple(cuts), {kernel.name, *(param.name for param in kernel.params)})
    return tuple(split.kernels()), tuple(split.buffers)


@dataclass(slots=True)
class _Split:
    """Splits one kernel.

    kernel: the original. chunked: the same over the axes `chunks` (which chunk) and `inside` (position in a chunk).
    parts, totals: for each reduction the buffer of its partial results and of its result.
    """

    kernel: Kernel
    cuts: tuple[Cut, ...]
    taken: set[str]
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    chunked: Kernel = field(init=False)
    chunks: tuple[Axis, ...] = field(init=False)
    inside: tuple[str, ...] = field(init=False)
    stage: Mapping[str, int] = field(init=False)
    depends: Mapping[str, frozenset[str]] = field(init=False)
    lines: dict[str, Line] = field(init=False)
    params: dict[str, Param] = field(init=False)
    parts: dict[str, str] = field(default_factory=dict[str, str])
    totals: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self.chunked, self.chunks, self.inside = chunk_axes(self.kernel, self.cuts)
        self.stage = depth_of(self.kernel)
        self.depends = axes_of(self.kernel)
        self.lines = {line.out: line for line in self.chunked.body}
        self.params = {param.name: param for param in self.kernel.params}

    def kernels(self) -> list[Kernel]:
        """First and second phase of each stage, then what remains."""
        reduced = frozenset(self.kernel.reduced)
        loaded = {load.buffer for _, load in self.kernel.loads()}
        last = max(self.stage.values())
        exact = all(cut.exact for cut in self.cuts)
        early: dict[int, list[Line]] = {}  # stores that the first phase of a stage also executes
        late: list[Line] = []  # other stores along the reduced axes
        kept: list[Line] = []  # stores that do not vary along the reduced axes
        for line, store in self.kernel.stores():
            if not self.depends[line.out] & reduced:
                kept.append(line)
            elif exact and self.stage[line.out] < last and store.buffer not in loaded:
                early.setdefault(self.stage[line.out] + 1, []).append(line)
            else:
                late.append(line)
        # A store in place must follow the last load of its buffer.
        separate = bool(late) and any(isinstance(line.rhs, Store) and line.rhs.buffer in loaded for line in kept)
        kernels: list[Kernel] = []
        for now in range(1, last + 1):
            joins = [line for line in self.kernel.body if isinstance(line.rhs, Reduce) and self.stage[line.out] == now]
            kernels.append(self._first(now, joins, early.get(now, [])))
            final = now == last
            results = kept if final and not separate else []
            kernels.append(self._second(now, joins, results, needed=not final or bool(late) or separate))
        names = (f"{self.kernel.name}_rest", f"{self.kernel.name}_last")
        for name, stores in zip(names, (late, kept if separate else []), strict=True):
            if stores:
                kernels.append(self._pointwise(name, stores))
        return kernels

    # ------------------------------------------------------------------------------------------ phases

    def _first(self, now: int, joins: Sequence[Line], stores: Sequence[Line]) -> Kernel:
        """Partial results of each chunk."""
        body = self._closure([self.lines[line.out] for line in (*joins, *stores)], self.lines, keep=joins)
        for line in joins:
            chunked = self.lines[line.out]
            assert isinstance(chunked.rhs, Reduce)
            for what, op in self._partial(chunked.rhs.op).items():
                value, kind = f"{line.out}.{what}", self._dtype(chunked, op)
                partial = Reduce(op, chunked.rhs.arg, self.inside)
                body.append(Line(value, partial, kind, chunked.origin.step(STEP)))
                name = self.parts[value] = self._buffer(
                    "part", kind, product(a.extent for a in self._partial_axes(line))
                )
                body.append(self._store(name, row_major(self._partial_axes(line)), value, body[-1]))
        return self._kernel(f"{self.kernel.name}_part{now}", self.chunked.space, body)

    def _second(self, now: int, joins: Sequence[Line], results: Sequence[Line], needed: bool) -> Kernel:
        """The combined results of all chunks, and the lines that depend only on them."""
        body: list[Line] = []
        for line in joins:
            body += self._join(line)
        known = {line.out for line in joins}
        rest = self._closure(results, {line.out: line for line in self.kernel.body}, keep=(), known=known)
        for line in joins if needed else ():
            kept = self._kept(line)
            name = self.totals[line.out] = self._buffer("all", line.dtype, product(a.extent for a in kept))
            rest.append(self._store(name, row_major(kept), line.out, line))
        axes = (*(axis for axis in self.kernel.space if axis.name not in self.kernel.reduced), *self.chunks)
        return self._kernel(f"{self.kernel.name}_all{now}", axes, [*body, *rest])

    def _join(self, line: Line) -> list[Line]:
        """The lines that compute a reduction from its partial results."""
        assert isinstance(line.rhs, Reduce)
        op, names = line.rhs.op, tuple(axis.name for axis in self.chunks)
        origin, axes = line.origin.step(STEP), self._partial_axes(line)

        def load(what: str, index: Expr, kind: DType) -> Line:
            return Line(f"{line.out}.{what}.of", Load(self.parts[f"{line.out}.{what}"], index), kind, origin)

        if op not in ("argmax", "argmin"):
            partial = load("value", row_major(axes), line.dtype)
            return [partial, Line(line.out, Reduce(op, partial.out, names), line.dtype, origin)]
        # The chunk with the best value, the first of equal ones, then the position inside it.
        best = load("value", row_major(axes), self.lines[line.rhs.arg].dtype)
        chunk = Line(f"{line.out}.chunk", Reduce(op, best.out, names), line.dtype, origin)
        kept = self._kept(line)
        index = val(chunk.out) * product(axis.extent for axis in kept) + row_major(kept)
        within = load("position", index, line.dtype)
        size = product(self.chunked.ranges[name] for name in self.inside)
        before = Line(f"{line.out}.before", IndexValue(val(chunk.out) * size), line.dtype, origin)
        answer = Line(line.out, Compute("add", (before.out, within.out)), line.dtype, origin)
        return [best, chunk, within, before, answer]

    def _pointwise(self, name: str, stores: Sequence[Line]) -> Kernel:
        """The stores that need all results."""
        body = self._closure(stores, {line.out: line for line in self.kernel.body}, keep=())
        return self._kernel(name, self.kernel.space, body)

    # ------------------------------------------------------------------------------------------ lines

    def _closure(
        self, roots: Sequence[Line], lines: dict[str, Line], keep: Sequence[Line], known: Iterable[str] = ()
    ) -> list[Line]:
        """The lines that `roots` need, in order, without `keep` and `known`; results of earlier stages are loaded."""
        left_out = {line.out for line in keep} | set(known)
        needed: set[str] = set()
        stack = [line.out for line in roots]
        while stack:
            name = stack.pop()
            if name in needed or name in known:
                continue
            needed.add(name)
            if name in left_out or not isinstance(lines[name].rhs, Reduce):
                stack += operands(lines[name].rhs)
        body: list[Line] = []
        for line in lines.values():
            if line.out in needed and line.out not in left_out:
                body.append(self._loaded(line) if isinstance(line.rhs, Reduce) else line)
        return body

    def _loaded(self, line: Line) -> Line:
        """A reduction of an earlier stage, from memory."""
        return replace(line, rhs=Load(self.totals[line.out], row_major(self._kept(line))))

    def _partial(self, op: str) -> dict[str, str]:
        """The partial results of each chunk, and the reduction that computes each."""
        return {"value": op[3:], "position": op} if op in ("argmax", "argmin") else {"value": op}

    def _dtype(self, line: Line, op: str) -> DType:
        assert isinstance(line.rhs, Reduce)
        return line.dtype if op == line.rhs.op else self.lines[line.rhs.arg].dtype

    def _store(self, buffer: str, index: Expr, value: str, line: Line) -> Line:
        return Line(f"{value}.store", Store(buffer, index, value), line.dtype, line.origin.step(STEP))

    def _kept(self, line: Line) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.kernel.space if axis.name in self.depends[line.out])

    def _partial_axes(self, line: Line) -> tuple[Axis, ...]:
        return (*self.chunks, *self._kept(line))

    def _buffer(self, stem: str, dtype: DType, numel: Expr) -> str:
        name = unique_name(f"{self.kernel.name}_{stem}", self.taken)
        self.buffers.append(Buffer(name, dtype, numel, "temp"))
        self.params[name] = Param(name, dtype, numel)
        return name

    def _kernel(self, name: str, space: Iterable[Axis], body: Sequence[Line]) -> Kernel:
        """A kernel over those axes that its lines use."""
        kernel = make_kernel(unique_name(name, self.taken), space, body, self.params)
        used = set(kernel.reduced).union(*axes_of(kernel).values())
        return replace(kernel, space=tuple(axis for axis in kernel.space if axis.name in used))


def chunk_axes(kernel: Kernel, cuts: Sequence[Cut]) -> tuple[Kernel, tuple[Axis, ...], tuple[str, ...]]:
    """The kernel over cut axes, the axes that number the chunks, and the reduced axes inside a chunk.

    Where chunks are not exact, points past the end of an axis load nothing and contribute nothing.
    """
    names = {axis.name for axis in kernel.space}
    pieces: dict[str, tuple[Axis, ...]] = {}
    for cut in cuts:
        outer, inner = (_fresh(f"{cut.axis}.{side}", names) for side in ("chunk", "in"))
        both = (Axis(outer, cut.count), Axis(inner, cut.size))
        pieces[cut.axis] = both[:1] if cut.size == ONE else both
    space = tuple(piece for axis in kernel.space for piece in pieces.get(axis.name, (axis,)))
    sizes = {cut.axis: cut.size for cut in cuts}
    positions = {old: _position(new, sizes[old]) for old, new in pieces.items()}
    rewrite = Rewrite(
        axes=positions,
        pieces={old: tuple(axis.name for axis in new) for old, new in pieces.items()},
        ranges={axis.name: axis.extent for axis in space},
    )
    body = rewrite.lines(kernel.body)
    limits = {cut.axis: kernel.ranges[cut.axis] for cut in cuts if not cut.exact}
    if limits:
        body = _masked(kernel, body, {axis: (positions[axis], limit) for axis, limit in limits.items()})
    chunked = replace(kernel, space=space, body=body)
    first = {new[0].name for new in pieces.values()}
    chunks = tuple(axis for axis in space if axis.name in first)
    return chunked, chunks, tuple(name for name in chunked.reduced if name not in first)


def _position(pieces: tuple[Axis, ...], size: Expr) -> Expr:
    outer = var(pieces[0].name)
    return outer * size + var(pieces[1].name) if len(pieces) > 1 else outer


def _masked(kernel: Kernel, body: Sequence[Line], limits: dict[str, tuple[Expr, Expr]]) -> tuple[Line, ...]:
    """`body` with loads and reduced values masked past the end of a cut axis."""
    depends = axes_of(kernel)
    origin = merge(line.origin for line in body if isinstance(line.rhs, Reduce)).step(STEP)
    result: list[Line] = []

    def line(name: str, rhs: Const | IndexValue | Compute, dtype: DType) -> str:
        result.append(Line(name, rhs, dtype, origin))
        return name

    mask = ""
    for axis, (position, limit) in limits.items():
        at = line(f"{axis}.at", IndexValue(position), DType.I64)
        end = line(f"{axis}.end", IndexValue(limit), DType.I64)
        inside = line(f"{axis}.inside", Compute("lt", (at, end)), DType.BOOL)
        mask = line(f"{axis}.both", Compute("bitwise_and", (mask, inside)), DType.BOOL) if mask else inside

    def chosen(name: str, value: str, other: Scalar, dtype: DType) -> str:
        otherwise = line(f"{name}.other", Const(other), dtype)
        return line(f"{name}.chosen", Compute("where", (mask, value, otherwise)), dtype)

    dtypes = {each.out: each.dtype for each in body}
    for each in body:
        varies = bool(depends[each.out] & limits.keys())
        match each.rhs:
            case Load(buffer, index, old, other) if varies:
                both = mask
                if old is not None:
                    both = line(f"{each.out}.mask", Compute("bitwise_and", (old, mask)), DType.BOOL)
                result.append(replace(each, rhs=Load(buffer, index, both, other)))
            case CheckIndex(arg) if varies:
                result.append(replace(each, rhs=replace(each.rhs, arg=chosen(each.out, arg, 0, DType.I64))))
            case Reduce(op, arg, axes):
                join = REDUCTIONS[op.removeprefix("arg")].combine
                value = chosen(each.out, arg, identity_of(join, dtypes[arg]), dtypes[arg])
                result.append(replace(each, rhs=Reduce(op, value, axes)))
            case _:
                result.append(each)
    return tuple(result)


def _fresh(stem: str, names: set[str]) -> str:
    name = stem
    while name in names:
        name += "'"
    names.add(name)
    return name
