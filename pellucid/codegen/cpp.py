"""Print a loop nest as C++. All choices were made in the plan; `native/kernel/` implements the operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import assert_never

from pellucid.codegen.linemap import Writer
from pellucid.codegen.names import symbols_of
from pellucid.codegen.nest import (
    BLOCK,
    Accumulate,
    Advance,
    Call,
    CloseBlock,
    Counter,
    Define,
    FillTile,
    Finish,
    Item,
    Keep,
    Kind,
    Loop,
    Nest,
    Parallel,
    Part,
    Put,
    Recall,
    Scratch,
    Start,
    StartBlocks,
    StartTile,
    WriteTile,
    steps_of,
)
from pellucid.codegen.operands import Operands
from pellucid.codegen.plan import Plan
from pellucid.codegen.text import CPP_TYPE, flag_text, index_text, scalar_text
from pellucid.codegen.vector import Access, access
from pellucid.ir.index import ONE, Expr, Sym, Val, Var, const, val, var
from pellucid.ir.nodes import CheckIndex, Compute, Const, IndexValue, Line, Load, Reduce, Store, axes_of
from pellucid.ir.origin import Origin, merge
from pellucid.ir.types import DType
from pellucid.machine.tiles import interleaved_axis, interleaved_stores, touches

FARTHEST = 1 << 48
"""A bound on constants such that subtracting a position from one does not overflow."""
REDUCTION = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "any": "Any", "all": "Every"}


def print_kernel(plan: Plan, nest: Nest, name: str) -> Writer:
    """The function `name`, with the origin of each of its lines. nest: the nest of `plan`."""
    return _Printer(plan).function(nest.body, name)


class _Printer:
    """Prints one kernel. In a vector loop `n` are the lanes in use, and the loop counter is that of lane 0."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.out = Writer()
        self.depends = axes_of(plan.kernel)
        self.lines = {line.out: line for line in plan.kernel.body}
        self.params = {param.name: param for param in plan.kernel.params}
        self.dtypes = {BLOCK: DType.F32} | {param.name: param.dtype for param in plan.kernel.params}
        self.checks = [line.out for line in plan.kernel.body if isinstance(line.rhs, CheckIndex)]
        self.needs_lanes = self._values_in_indices()
        self.counters: set[str] = set()
        self.interleaved: dict[str, str] = {}

    def _values_in_indices(self) -> set[str]:
        """Vector values that an index uses, whose lanes must be available one by one."""
        found: set[str] = set()
        for line in self.plan.kernel.body:
            if isinstance(line.rhs, Load | Store | IndexValue):
                found |= line.rhs.index.vals() & self.plan.wide
        return found

    # ------------------------------------------------------------------------------------------ function

    def function(self, items: Iterable[Item], name: str) -> Writer:
        out = self.out
        out.line(f'extern "C" int64_t {name}(void* const* p, const int64_t* s, int64_t begin, int64_t end) {{')
        out.depth += 1
        stored = {store.buffer for _, store in self.plan.kernel.stores()}
        for k, param in enumerate(self.plan.kernel.params):
            qualifier = "" if param.name in stored else "const "
            users = (line.origin for line in self.plan.kernel.body if touches(line, param.name))
            kind = f"{qualifier}{CPP_TYPE[param.dtype]}*"
            out.line(f"{kind} {param.name} = static_cast<{kind}>(p[{k}]);", merge(users))
        for name in self._symbols():
            out.line(f"const int64_t {name} = s[{name[1:]}];")
        if self.checks:
            out.line("int64_t status = 0;")
        self.items(items)
        if self.plan.streamed:
            out.line("pv::stream_end();")
        out.line("return status;" if self.checks else "return 0;")
        out.depth -= 1
        out.line("}")
        return out

    def _symbols(self) -> list[str]:
        """The size symbols in use; canonical names end with the position in `s`."""
        names = {*symbols_of(self.plan.kernel), *(self.plan.blocks.syms() if self.plan.blocks else ())}
        return sorted(names, key=lambda name: int(name[1:]))

    def items(self, items: Iterable[Item]) -> None:
        items = list(items)
        groups = self.interleaved_groups([item.line for item in items if isinstance(item, Put) and not item.once])
        for item in items:
            if isinstance(item, Put) and item.line.out in groups:
                self.put_interleaved(groups[item.line.out])
            else:
                self.item(item)

    def interleaved_groups(self, puts: list[Line]) -> dict[str, tuple[Line, ...]]:
        """Stores that together fill the gaps between their lanes: all of them for the last one, none for the others."""
        found: dict[str, tuple[Line, ...]] = {}
        strided = [line for line in puts if line.out in self.plan.gathered and line.out not in self.plan.tiled]
        for line in strided:
            lines = interleaved_stores(self.plan.kernel, line, str(self.plan.vector))
            if lines and set(lines) <= set(strided):
                last = max(lines, key=strided.index)
                found[line.out] = lines if line == last else ()
        return found

    def put_interleaved(self, lines: tuple[Line, ...]) -> None:
        if not lines:
            return
        first = lines[0].rhs
        assert isinstance(first, Store)
        name = f"w{lines[0].out[1:]}"
        self.out.line(
            f"pv::Interleaved<{len(lines)}, {CPP_TYPE[self.dtypes[first.buffer]]}, {self.plan.width}> {name};"
        )
        for position, line in enumerate(lines):
            assert isinstance(line.rhs, Store)
            self.out.line(f"{name}.put({position}, {self.arg(line.rhs.arg, True)});", line.origin)
        self.out.line(f"{self.guard(first)}{name}.write({self.pointer(first.buffer, first.index)}, n);")

    def item(self, item: Item) -> None:
        match item:
            case Parallel():
                self.parallel(item)
            case Loop():
                self.loop(item)
            case Define(line):
                self.prefetch(line)
                self.out.line(f"const auto {line.out} = {self.value(line)};", line.origin)
                self.lanes(line)
            case Put(line, once):
                self.put(line, once)
            case Call():
                self.call(item)
            case FillTile(line):
                self.fill_tile(line)
            case StartTile(line):
                self.out.line(f"{self.square(line)} y{line.out[1:]};", line.origin)
            case WriteTile(line):
                self.write_tile(line)
            case Start(line):
                self.start(line)
            case StartBlocks(line, abreast):
                levels, many = (f", {self.plan.levels}", f"[{abreast}]") if abreast else ("", "")
                self.out.line(f"pv::Blocks<{self.reduce_type(line)}{levels}> b{line.out[1:]}{many};", line.origin)
            case Accumulate(line):
                self.accumulate(line)
            case CloseBlock(line):
                self.out.line(f"{self.blocks(line)}.close(a{line.out[1:]});", line.origin)
            case Advance(line):
                self.accumulate(line)
                self.finish(line)
            case Finish(line):
                self.finish(line)
            case Scratch(line):
                size = f"{self.scratch_size(line)}"
                self.out.line(f"alignas(64) {CPP_TYPE[line.dtype]} k{line.out[1:]}[{size}];", line.origin)
            case Keep(line):
                self.keep(line)
            case Recall(line):
                self.recall(line)
                self.lanes(line)
            case _:
                assert_never(item)

    # ------------------------------------------------------------------------------------------ loops

    def parallel(self, loop: Parallel) -> None:
        if self.plan.blocks is not None and self.plan.blocks.reuses_weights:
            self.out.line(self.operands().kept_tiles(self.plan.blocks))
        self.open("for (int64_t t = begin; t < end; t++) {", merge(_origins(loop.body)))
        self.decode(loop.counters)
        self.items(loop.body)
        self.close("}")

    def loop(self, loop: Loop) -> None:
        origin = merge(_origins(loop.body))
        match loop.kind:
            case Kind.SERIAL:
                lo, hi = self.range(loop)
                i = loop.axis
                interleaved = self.interleaved_in(loop)
                for line, store in interleaved:
                    kind, number = CPP_TYPE[self.dtypes[store.buffer]], line.out[1:]
                    self.out.line(f"pv::Interleaved<{hi}, {kind}, {self.plan.width}> w{number};", line.origin)
                    self.interleaved[line.out] = i
                self.open(f"for (int64_t {i} = {lo}; {i} < {hi}; {i}++) {{", origin)
                self.inside(loop)
                self.close("}")
                for line, store in interleaved:
                    begin = self.pointer(store.buffer, store.index.substitute({Var(i): const(0)}))
                    self.out.line(f"{self.guard(store)}w{line.out[1:]}.write({begin}, n);", line.origin)
            case Kind.VECTOR:
                lo, hi = self.range(loop)
                steps = "whole_steps" if self.exact(loop) else "steps"
                head = f"pv::{steps}<{self.plan.width}>({lo}, {hi}, [&](auto n, int64_t {loop.axis}) PV_INLINE {{"
                self.open(head, origin)
                self.inside(loop)
                self.close("});")
            case Kind.BLOCKS:
                extent = self.text(self.plan.extent_of(loop.axis))
                self.open(f"for (int64_t from = 0; from < {extent}; from += {loop.step}) {{", origin)
                self.out.line(f"const int64_t to = pv::least(from + {loop.step}, {extent});", origin)
                self.items(loop.body)
                self.close("}")
            case _:
                assert_never(loop.kind)

    def interleaved_in(self, loop: Loop) -> list[tuple[Line, Store]]:
        """The strided stores that fill the gaps between their lanes over the points of this loop."""
        if loop.part is not Part.WHOLE:
            return []
        stores = [item.line for item in loop.body if isinstance(item, Put) and not item.once]
        kernel, vector = self.plan.kernel, str(self.plan.vector)
        strided = [line for line in stores if line.out in self.plan.gathered]
        found = [line for line in strided if interleaved_axis(kernel, line, vector) == loop.axis]
        return [(line, line.rhs) for line in found if isinstance(line.rhs, Store)]

    def open(self, text: str, origin: Origin) -> None:
        self.out.line(text, origin)
        self.out.depth += 1

    def close(self, text: str) -> None:
        self.out.depth -= 1
        self.out.line(text)

    def inside(self, loop: Loop) -> None:
        self.counters.add(loop.axis)
        self.items(loop.body)
        self.counters.discard(loop.axis)

    def range(self, loop: Loop) -> tuple[str, str]:
        if loop.part is Part.WHOLE:
            return "0", self.text(self.plan.extent_of(loop.axis))
        return loop.part.first, loop.part.last

    def exact(self, loop: Loop) -> bool:
        """True if every step of a vector loop has all its lanes."""
        extent, width = self.plan.extent_of(loop.axis).value, self.plan.width
        even = loop.axis != self.plan.tile or self.plan.tile_step % width == 0
        return even and extent is not None and extent % width == 0

    def decode(self, counters: Sequence[Counter]) -> None:
        """Compute the counters of the flattened axes from that of the parallel loop; the last axis runs fastest."""
        rest = "t"
        for position in range(len(counters) - 1, -1, -1):
            counter = counters[position]
            count = self.factor(counter.count)
            mine = f"{rest} % {count}" if position else rest
            scale = "" if counter.part is Part.WHOLE else f" * {self.factor(counter.step)}"
            self.out.line(f"const int64_t {counter.part.first or counter.axis} = {mine}{scale};")
            if position:
                self.out.line(f"const int64_t t{position} = {rest} / {count};")
                rest = f"t{position}"
        for counter in counters:
            if counter.part is not Part.WHOLE:
                end = f"pv::least({counter.part.first} + {self.factor(counter.step)}, {self.text(counter.extent)})"
                self.out.line(f"const int64_t {counter.part.last} = {end};")

    def factor(self, expr: Expr) -> str:
        """An expression as an operand of a product."""
        text = self.text(expr)
        return text if expr.value is not None or text.isidentifier() else f"({text})"

    # ------------------------------------------------------------------------------------------ values

    def text(self, index: Expr) -> str:
        return index_text(index, self.plan.kernel.ranges, lambda atom: atom.name)

    def lane_text(self, index: Expr) -> str:
        """The index of lane k."""

        def atom(each: Sym | Var | Val) -> str:
            match each:
                case Var(name):
                    return f"({name} + k)" if name == self.plan.vector else name
                case Val(name):
                    return f"l{name[1:]}[k]" if name in self.plan.wide else name
                case Sym(name):
                    return name

        return index_text(index, self.plan.kernel.ranges, atom)

    def at(self, index: Expr) -> str:
        return f"[&](int k) PV_INLINE {{ return {self.lane_text(index)}; }}"

    def is_wide(self, name: str) -> bool:
        return name in self.plan.wide

    def arg(self, name: str, wide: bool) -> str:
        """A value as an operand; scalars are broadcast to all lanes if the other operands are vectors."""
        return f"pv::splat<{self.plan.width}>({name})" if wide and not self.is_wide(name) else name

    def value(self, line: Line) -> str:
        wide = self.is_wide(line.out)
        match line.rhs:
            case Const(value):
                return scalar_text(value, line.dtype)
            case IndexValue(index):
                return self.index_value(index) if wide else f"int64_t({self.text(index)})"
            case CheckIndex(arg, size, wrap):
                lanes = ", n" if wide else ""
                check = self.checks.index(line.out)
                return f"pv::check_index({arg}, {self.text(size)}, {flag_text(wrap)}, status, {check}{lanes})"
            case Load():
                return self.load(line, line.rhs)
            case Compute("cast", (arg,)):
                return f"pv::cast<{CPP_TYPE[line.dtype]}>({self.arg(arg, wide)})"
            case Compute(op, args):
                compared = self.compared_position(op, args) if wide else None
                return compared or f"pv::{op}({', '.join(self.arg(arg, wide) for arg in args)})"
            case Reduce() | Store():
                raise AssertionError(line)
            case _:
                assert_never(line.rhs)

    def index_value(self, index: Expr) -> str:
        vector, width = str(self.plan.vector), self.plan.width
        step = None if index.vals() & self.plan.wide else index.coefficient(vector)
        if step is None:
            return f"pv::indices<{width}>({self.at(index)})"
        return f"pv::iota<{width}>({self.text(index)}, {self.text(step)})"

    def compared_position(self, op: str, args: tuple[str, ...]) -> str | None:
        """A comparison of consecutive positions with a constant, as a number of lanes; None for any other."""
        left, right = (self.lines[arg].rhs for arg in args[:2]) if op in ("lt", "ge") else (None, None)
        if not isinstance(left, IndexValue) or not isinstance(right, Const) or abs(int(right.value)) > FARTHEST:
            return None
        if left.index.vals() & self.plan.wide or left.index.coefficient(str(self.plan.vector)) != ONE:
            return None
        below = f"pv::below<{self.plan.width}>({self.text(left.index)}, {args[1]})"
        return below if op == "lt" else f"pv::bitwise_not({below})"

    def call(self, call: Call) -> None:
        if call.size:
            self.out.line(f"alignas(64) float {BLOCK}[{call.size}];", call.line.origin)
        operands, plan = self.operands(), self.plan
        if plan.rows is not None:
            self.out.line(operands.attend(plan.rows), call.line.origin)
        elif plan.blocks is not None:
            self.out.line(operands.contract(plan.blocks), call.line.origin)

    def operands(self) -> Operands:
        return Operands(self.pointer, self.text, self.plan.kernel.ranges, self.plan.streamed)

    def fill_tile(self, line: Line) -> None:
        assert isinstance(line.rhs, Load)
        corner, step = self.corner(line.rhs.index)
        numel = self.params[line.rhs.buffer].numel.value
        known = -1 if numel is None else numel
        arguments = f"{line.rhs.buffer}, {corner}, {step}, to - from, n, {known}"
        self.out.line(f"const {self.square(line)} x{line.out[1:]}({arguments});", line.origin)

    def write_tile(self, line: Line) -> None:
        assert isinstance(line.rhs, Store)
        corner, step = self.corner(line.rhs.index)
        past = flag_text(line.rhs.buffer in self.plan.streamed)
        address = line.rhs.buffer if corner == "0" else f"{line.rhs.buffer} + {corner}"
        self.out.line(
            f"{self.guard(line.rhs)}y{line.out[1:]}.write<{past}>({address}, {step}, to - from, n);", line.origin
        )

    def corner(self, index: Expr) -> tuple[str, str]:
        """The index at which a square starts, and the stride of its rows."""
        step = index.coefficient(str(self.plan.vector))
        assert step is not None
        return self.text(index.substitute({Var(str(self.plan.tile)): var("from")})), self.text(step)

    def square(self, line: Line) -> str:
        assert isinstance(line.rhs, Load | Store)
        return f"pv::Tile<{CPP_TYPE[self.params[line.rhs.buffer].dtype]}, {self.plan.width}>"

    def load(self, line: Line, load: Load) -> str:
        if line.out in self.plan.tiled:
            row = f"x{line.out[1:]}.row({self.plan.tile} - from)"
            if load.mask is None:
                return row
            other = f"pv::splat<{self.plan.width}>({scalar_text(load.other, line.dtype)})"
            return f"pv::where({self.arg(load.mask, True)}, {row}, {other})"
        wide = self.is_wide(line.out)
        other = "" if load.mask is None else f", {scalar_text(load.other, line.dtype)}"
        if not wide:
            mask = "" if load.mask is None else f", {load.mask}{other}"
            return f"pv::load({self.pointer(load.buffer, load.index)}{mask})"
        mask = "" if load.mask is None else f", {self.arg(load.mask, True)}{other}"
        if line.out not in self.plan.gathered:
            return f"pv::load<{CPP_TYPE[self.dtypes[load.buffer]]}>({self.pointer(load.buffer, load.index)}, n{mask})"
        if load.mask is None or not self.is_wide(load.mask):
            text = self.strided_load(load)
            other = f"pv::splat<{self.plan.width}>({scalar_text(load.other, line.dtype)})"
            return text if load.mask is None else f"{load.mask} ? {text} : {other}"
        if self.is_uniform(load.index):
            return f"pv::load_one<{self.plan.width}>({self.pointer(load.buffer, load.index)}, n{mask})"
        return f"pv::gather<{self.plan.width}>({load.buffer}, n, {self.at(load.index)}{mask})"

    def is_uniform(self, index: Expr) -> bool:
        """Whether all lanes access the same element."""
        return access(index, str(self.plan.vector), self.plan.wide) is Access.UNIFORM

    def strided_load(self, load: Load) -> str:
        """An unmasked load of elements that are not adjacent."""
        kind, width = CPP_TYPE[self.dtypes[load.buffer]], self.plan.width
        if stride := self.short_stride(load.index):
            return f"pv::load_every<{stride}, {kind}>({self.pointer(load.buffer, load.index)}, n)"
        wide = sorted(load.index.vals() & self.plan.wide)
        numel = self.params[load.buffer].numel.value if load.buffer in self.params else None
        rest = load.index - val(wide[0]) if len(wide) == 1 else None
        if numel is not None and rest is not None and self.is_uniform(rest):
            left = self.text(const(numel) - rest)
            return f"pv::gather_from<{kind}>({self.pointer(load.buffer, rest)}, n, {wide[0]}, {left})"
        return f"pv::gather<{width}>({load.buffer}, n, {self.at(load.index)})"

    def short_stride(self, index: Expr) -> int:
        """The elements from one lane to the next if they are few; else 0."""
        near = access(index, str(self.plan.vector), self.plan.wide) is Access.NEAR
        step = index.coefficient(str(self.plan.vector)) if near else None
        return int(step.value or 0) if step is not None else 0

    def prefetch(self, line: Line) -> None:
        if line.out in self.plan.ahead:
            assert isinstance(line.rhs, Load)
            later = self.pointer(line.rhs.buffer, self.plan.ahead[line.out])
            self.out.line(f"pv::prefetch<{self.plan.width}>({later});", line.origin)

    def pointer(self, buffer: str, index: Expr) -> str:
        return buffer if index == const(0) else f"{buffer} + {self.text(index)}"

    def lanes(self, line: Line) -> None:
        if line.out in self.needs_lanes:
            self.out.line(f"const auto l{line.out[1:]} = pv::lanes({line.out});", line.origin)

    def put(self, line: Line, once: tuple[str, ...]) -> None:
        assert isinstance(line.rhs, Store)
        store, wide = line.rhs, self.is_wide(line.out)
        value = self.arg(store.arg, wide)
        kind = CPP_TYPE[self.dtypes[store.buffer]]
        join = f", [](auto a, auto b) PV_INLINE {{ return pv::{store.join}(a, b); }}" if store.join else ""
        if line.out in self.plan.tiled:
            text = f"y{line.out[1:]}.put({self.plan.tile} - from, {value});"
        elif line.out in self.interleaved:
            text = f"w{line.out[1:]}.put({self.interleaved[line.out]}, {value});"
        elif not wide:
            function = "update" if join else "store"
            text = f"pv::{function}({self.pointer(store.buffer, store.index)}, {value}{join});"
        elif line.out not in self.plan.gathered:
            function = "update" if join else "stream" if store.buffer in self.plan.streamed else "store"
            text = f"pv::{function}<{kind}>({self.pointer(store.buffer, store.index)}, {value}, n{join});"
        elif (stride := self.short_stride(store.index)) and not join:
            text = f"pv::store_every<{stride}, {kind}>({self.pointer(store.buffer, store.index)}, {value}, n);"
        else:
            text = f"pv::scatter<{kind}>({store.buffer}, {value}, n, {self.at(store.index)}{join});"
        starts = {self.plan.tile: "from"} | {axis: part.first for part, (axis, _) in self.plan.pieces.items()}
        first = [f"{axis if axis in self.counters else starts.get(axis, axis)} == 0" for axis in once]
        collected = line.out in self.plan.tiled or line.out in self.interleaved
        guard = "" if collected else self.guard(store)
        self.out.line(guard + (f"if ({' && '.join(first)}) {text}" if first else text), line.origin)

    def guard(self, store: Store) -> str:
        """The condition of a store to the caller's memory: nothing is stored after an index check has failed."""
        return "if (status == 0) " if self.checks and store.buffer in self.plan.guarded else ""

    # ------------------------------------------------------------------------------------------ reductions

    def reduce_type(self, line: Line) -> str:
        kind = CPP_TYPE[line.dtype]
        return f"pv::Vec<{kind}, {self.plan.width}>" if self.has_lanes(line) else kind

    def has_lanes(self, line: Line) -> bool:
        """Whether the accumulator of a reduction is a vector."""
        return self.plan.vector_is_reduced or self.is_wide(line.out)

    def start(self, line: Line) -> None:
        assert isinstance(line.rhs, Reduce)
        number, kind = line.out[1:], self.reduce_type(line)
        if line.rhs.op in ("argmax", "argmin"):
            arg = CPP_TYPE[self.lines[line.rhs.arg].dtype]
            if self.has_lanes(line):
                which = REDUCTION[line.rhs.op[3:]]
                name = f"pv::Arg<pv::{which}, {arg}, {self.plan.width}, {CPP_TYPE[self.plan.positions]}>"
            else:
                name = f"pv::{line.rhs.op.capitalize()}<{arg}>"
            self.out.line(f"{name} a{number};", line.origin)
            return
        self.out.line(f"pv::Acc<pv::{REDUCTION[line.rhs.op]}, {kind}> a{number};", line.origin)

    def blocks(self, line: Line) -> str:
        """The object that adds up the blocks of a pairwise sum, at this point of the kept axes."""
        element = f"[({self.plan.inner} - lo) / {self.plan.width}]" if self.plan.abreast else ""
        return f"b{line.out[1:]}{element}"

    def accumulate(self, line: Line) -> None:
        assert isinstance(line.rhs, Reduce)
        number = line.out[1:]
        lanes = ", n" if self.plan.vector_is_reduced else ""
        if line.rhs.op in ("argmax", "argmin"):
            value = self.arg(line.rhs.arg, self.has_lanes(line))
            self.out.line(f"a{number}.add({value}, {self.text(self.position())}{lanes});", line.origin)
            return
        wide = self.has_lanes(line)
        self.out.line(f"a{number}.add({self.arg(line.rhs.arg, wide)}{lanes});", line.origin)

    def position(self) -> Expr:
        """The linear position in the flattened reduced axes, in space order."""
        position = const(0)
        for axis in self.plan.kernel.space:
            if axis.name in self.plan.reduced:
                position = position * axis.extent + var(axis.name)
        return position

    def finish(self, line: Line) -> None:
        assert isinstance(line.rhs, Reduce)
        number = line.out[1:]
        value = f"{self.blocks(line) if line.out in self.plan.pairwise else f'a{number}'}.value()"
        if self.plan.vector_is_reduced:
            position = line.rhs.op in ("argmax", "argmin")
            value = f"a{number}.first()" if position else f"pv::total<pv::{REDUCTION[line.rhs.op]}>({value})"
        self.out.line(f"const auto {line.out} = {value};", line.origin)
        self.lanes(line)

    # ------------------------------------------------------------------------------------------ scratch

    def scratch_axes(self, line: Line) -> list[str]:
        return [axis for axis in self.plan.reduced if axis in self.depends[line.out]]

    def scratch_size(self, line: Line) -> int:
        size = self.scratch_lanes(line)
        for axis in self.scratch_axes(line):
            extent = self.plan.extent_of(axis).value
            assert extent is not None
            size *= extent
        return size

    def scratch_lanes(self, line: Line) -> int:
        return self.plan.width if self.is_wide(line.out) and not self.plan.vector_is_reduced else 1

    def scratch_address(self, line: Line) -> str:
        offset = const(0)
        for axis in self.scratch_axes(line):
            offset = offset * self.plan.extent_of(axis) + var(axis)
        return f"k{line.out[1:]} + {self.text(offset * self.scratch_lanes(line))}"

    def scratch_use(self, line: Line) -> str:
        """The argument for the lanes in use; a scratch row over a kept vector axis has room for all lanes."""
        if not self.is_wide(line.out):
            return ""
        return ", n" if self.plan.vector_is_reduced else f", pv::All<{self.plan.width}>()"

    def keep(self, line: Line) -> None:
        use = self.scratch_use(line)
        self.out.line(f"pv::store<{CPP_TYPE[line.dtype]}>({self.scratch_address(line)}, {line.out}{use});", line.origin)

    def recall(self, line: Line) -> None:
        kind = f"<{CPP_TYPE[line.dtype]}>"
        self.out.line(
            f"const auto {line.out} = pv::load{kind}({self.scratch_address(line)}{self.scratch_use(line)});",
            line.origin,
        )


def _origins(items: Iterable[Item]) -> list[Origin]:
    return [item.line.origin for item in steps_of(items)]
