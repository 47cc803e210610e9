"""The operands of products, convolutions and attention as C++: the matrices and windows that `native/kernel/` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pellucid.codegen.blocks import MATRIX, Blocks, Edge, Groups, Operand, Packing, Taps, Window
from pellucid.codegen.nest import BLOCK
from pellucid.codegen.rows import Rows
from pellucid.codegen.text import CPP_TYPE, flag_text, index_text, scalar_text
from pellucid.ir.attention import Attention, AttentionBackward
from pellucid.ir.contraction import stride_along
from pellucid.ir.index import Expr, var
from pellucid.ir.nodes import Load, Store
from pellucid.ir.types import DType

KEPT = "kept"
"""The C++ name of the transformed weights that the blocks of a loop share."""


def print_packing(packing: Packing, numel: int, name: str) -> str:
    """The function `name` that packs an operand, see `CppPacking`."""
    operand = packing.operand
    start, row, column = (index_text(each, {}, repr) for each in (operand.start, operand.row, operand.column))
    pointer = f"static_cast<const {CPP_TYPE[packing.cast or packing.dtype]}*>(p[0])"
    matrix = _matrix(f"{{{pointer} + {start}, {row}, {column}}}", packing.dtype, packing.cast)
    function = "pack_tiles" if packing.tiles else "pack_panels"
    sizes, several = f"{packing.columns}, {packing.terms}, {numel}", ""
    if packing.groups:
        function, taps = "pack_all_groups", packing.terms // packing.groups.channels
        sizes = f"{_groups(packing.groups, packing.dtype)}, {packing.columns}, {taps}, {numel}"
    elif not packing.tiles:
        sizes += f", {_factor(packing)}"
    if packing.stack.count > 1:
        function, several = "pack_matrices", f"{packing.stack.count}, {index_text(packing.stack.stride, {}, repr)}, "
    return (
        f'extern "C" int64_t {name}(void* const* p, const int64_t*, int64_t, int64_t) {{\n'
        f"  pv::{function}<{sizes}>({several}{packing.area}, {matrix}, static_cast<float*>(p[1]));\n"
        "  return 0;\n"
        "}\n"
    )


def _matrix(fields: str, dtype: DType, cast: DType | None) -> str:
    """A `pv::Matrix` of `dtype`, cast from the type `cast` on reading if that is given."""
    if cast is None:
        return f"pv::Matrix<{CPP_TYPE[dtype]}>{fields}"
    return f"pv::casting<{CPP_TYPE[dtype]}>(pv::Matrix<{CPP_TYPE[cast]}>{fields})"


def _factor(packing: Packing) -> str:
    """The C++ type of the units of panels."""
    return "float" if packing.single or packing.dtype is DType.F32 else f"pv::Factor<{CPP_TYPE[packing.dtype]}>"


def _groups(groups: Groups, dtype: DType) -> str:
    """The C++ type that describes how groups fill registers."""
    return f"pv::Groups<{CPP_TYPE[dtype]}, {groups.outputs}, {groups.channels}, {groups.together}>"


@dataclass(frozen=True)
class Operands:
    """Prints calls of `native/kernel/`.

    pointer: prints an element's address. text: prints an index. ranges: extents of axes. streamed: see `Plan`.
    """

    pointer: Callable[[str, Expr], str]
    text: Callable[[Expr], str]
    ranges: Mapping[str, Expr]
    streamed: frozenset[str]

    def contract(self, blocks: Blocks) -> str:
        """The sums of one block of the result."""
        if blocks.pixels:
            return self.contract_pixels(blocks)
        left, right = blocks.operands()
        sizes = f"to - from, {self.text(blocks.terms)}"
        if isinstance(left, Window):
            first = self.window(left, blocks.contraction.dtype)
        else:
            sizes, first = f"hi - lo, {sizes}", self.matrix(left, blocks.contraction.dtype)
        packing, chosen = blocks.packing(), blocks.chosen()
        if chosen and not packing:
            right = replace(right, start=right.start + chosen.choice.stride * var(MATRIX))
        found = blocks.contraction
        second = self.panels(packing) if packing else self.matrix(right, found.dtype, found.cast)
        function, known = "contract", self.sizes(blocks)
        if blocks.spread:
            function, known = "contract_spread", str(blocks.columns)
        if blocks.by_channel:
            sharing, width = blocks.sharing(), blocks.ranges[blocks.column].value or 0
            known = f"{blocks.columns}, {width}, {blocks.pixels_of_line}, {sharing.taps}, {sharing.step}"
            function = "contract_channels"
        if chosen:
            choices = f"pv::Choices{{{self.pointer(chosen.buffer, chosen.start)}, {self.text(chosen.step)}}}"
            if chosen.choice.batch:
                function, second = "contract_some", f"{second}, {choices}, {self.text(var(chosen.choice.batch))}"
            else:
                second = f"[&](int64_t {MATRIX}) PV_INLINE {{ return {second}; }}"
                function, second = "contract_chosen", f"{second}, {choices}, {chosen.choice.count}"
        if blocks.tiles:
            known = f"{blocks.tiles}, {blocks.columns}, {blocks.ranges[blocks.column]}, {blocks.channels}"
            function = "contract_tiles"
        if blocks.groups:
            function, known, sizes = "contract_groups", self.sizes_of_groups(blocks, blocks.groups), "to - from, from"
        kept = f", {KEPT if blocks.reuses_weights else 'pv::NoTiles{}'}" if blocks.tiles else ""
        return f"pv::{function}<{known}>({sizes}, {first}, {second}, {self.sums(blocks)}{kept});"

    def kept_tiles(self, blocks: Blocks) -> str:
        """The declaration of the transformed weights that successive blocks share."""
        return f"pv::KeptTiles<{blocks.channels}, {blocks.columns}> {KEPT};"

    def contract_pixels(self, blocks: Blocks) -> str:
        """The sums of one block, over pixels."""
        pixels = blocks.terms_by_pixel()
        first, second = (self.pointer(operand.buffer, operand.start) for operand in (pixels.left, pixels.right))
        axes = [f"{{{', '.join(map(self.text, axis))}}}" for axis in pixels.axes]
        axes = ["{1, 0, 0}"] * (3 - len(axes)) + axes
        terms = f"pv::Pixels{{{{{', '.join(axes)}}}, {self.edges(pixels.edges)}}}"
        if blocks.by_channel or blocks.groups:
            return self.tap_gradients(blocks, first, second, terms)
        function, operands = "contract_pixels", f"{first}, {second}, {terms}"
        if blocks.taps:
            function, operands = "contract_taps", f"{operands}, {self.taps(blocks.window_of_taps())}"
        return f"pv::{function}<{self.sizes(blocks)}>(hi - lo, to - from, {operands}, {self.sums(blocks)});"

    def taps(self, taps: Taps) -> str:
        """The taps that share packed pixels."""
        extents = [*map(self.text, taps.extents)]
        return f"pv::Taps{{{', '.join((*extents, self.text(taps.down)))}, {taps.right}, {taps.pixel}, {taps.unit}}}"

    def tap_gradients(self, blocks: Blocks, image: str, gradient: str, terms: str) -> str:
        """The sums over pixels for the taps of some channels, also of several groups."""
        moves = blocks.contraction.loads[0].index
        sizes = ["1"] * (2 - len(blocks.taps)) + [str(blocks.ranges[name].value) for name in blocks.taps]
        steps = ["0"] * (2 - len(blocks.taps)) + [self.text(stride_along(moves, name)) for name in blocks.taps]
        operands = f"{image}, {gradient}, {terms}, {', '.join(steps)}, {self.sums(blocks)}"
        if groups := blocks.groups:
            sizes += map(str, (groups.count, groups.outputs, groups.channels, groups.together))
            return f"pv::contract_group_gradients<{', '.join(sizes)}>(hi - lo, to - from, from, {operands});"
        return f"pv::contract_tap_gradients<{', '.join(sizes)}>(to - from, {operands});"

    def sizes(self, blocks: Blocks) -> str:
        """The sizes known at compile time: rows and columns of a block, and all columns (0: not known)."""
        rows = blocks.rows if blocks.pixels else blocks.height
        return f"{rows}, {blocks.columns}, {blocks.ranges[blocks.column].value or 0}"

    def sizes_of_groups(self, blocks: Blocks, groups: Groups) -> str:
        """Like `sizes`, for groups: columns of a block, the fields of `Groups`, taps, and the pixels of a line."""
        terms, pixels = blocks.terms.value, blocks.pixels_of_line
        assert terms is not None
        sizes = (blocks.columns, groups.count, groups.outputs, groups.channels, groups.together)
        return ", ".join(map(str, (*sizes, terms // groups.channels, groups.neighbours, pixels)))

    def edges(self, edges: Iterable[Edge]) -> str:
        """An array of two `pv::Edge`, padded with edges that exclude nothing."""

        def steps(found: Iterable[Expr], count: int) -> str:
            given = [self.text(step) for step in found]
            return "{" + ", ".join(["0"] * (count - len(given)) + given) + "}"

        given = [
            f"{{{self.text(edge.first)}, {self.text(edge.extent)}, {steps(edge.rows, 3)}, {steps(edge.taps, 2)}}}"
            for edge in edges
        ]
        return "{" + ", ".join([*given, *["{0, 1, {}, {}}"] * (2 - len(given))]) + "}"

    def sums(self, blocks: Blocks) -> str:
        """The destination of a block's sums."""
        result = blocks.result()
        if result is None:
            return f"pv::Sums{{{BLOCK}, {blocks.stride}, false}}"
        past = flag_text(result.buffer in self.streamed)
        return f"pv::Sums{{{self.pointer(result.buffer, result.start)}, {self.text(result.row)}, false, {past}}}"

    def attend(self, rows: Rows) -> str:
        """The attention of a range of queries, or the gradients of all queries that share keys."""
        found = rows.attention
        kinds = f"{CPP_TYPE[found.scores.dtype]}, {CPP_TYPE[found.scores.added]}"
        sizes, keys = f"{rows.size}, {rows.height}, {rows.block}", self.text(rows.keys)
        if isinstance(found, AttentionBackward):
            heads, count = (self.text(self.ranges[name]) if name else "1" for name in (rows.head, rows.row))
            parts = f"pv::AttentionBackward<{kinds}>{{{', '.join(self.backward_parts(rows, found))}}}"
            return f"pv::attend_backward<{sizes}>({heads}, {count}, {keys}, {parts});"
        if rows.visible is not None and not rows.triangular:
            keys = f"pv::least({keys}, {self.text(rows.visible)})"
        count = "hi - lo" if rows.row else "1"
        parts = f"pv::Attention<{kinds}>{{{', '.join(self.forward_parts(rows, found))}}}"
        return f"pv::attend<{sizes}>({count}, {keys}, {parts});"

    def forward_parts(self, rows: Rows, found: Attention) -> list[str]:
        """The fields of `pv::Attention`."""
        scores, row, key = found.scores, rows.row, found.scores.key
        operands = [
            rows.operand(scores.query, row, scores.term),
            rows.operand(scores.keys, key, scores.term),
            rows.operand(found.values, key, found.column),
            rows.operand(scores.mask, row, key) if scores.mask else None,
        ]
        cap = scalar_text(scores.cap or 0.0, DType.F32)
        sinks = rows.operand(found.sinks, row, None) if found.sinks else None
        results = [
            rows.operand(found.out, row, found.column),
            rows.operand(found.logsumexp, row, None) if found.logsumexp else None,
            rows.operand(found.logarithm, row, None) if found.logarithm else None,
        ]
        zero = flag_text(found.zero)
        return [
            *map(self.strided, operands),
            *self.scaling(rows),
            zero,
            cap,
            self.strided(sinks),
            *map(self.strided, results),
        ]

    def backward_parts(self, rows: Rows, found: AttentionBackward) -> list[str]:
        """The fields of `pv::AttentionBackward`."""
        scores, row, key = found.scores, rows.row, found.scores.key

        def of_heads(access: Load | Store | None, column: str | None) -> str:
            if access is None:
                return "{}"
            return f"{{{self.strided(rows.operand(access, row, column))}, {self.text(rows.step(access))}}}"

        return [
            of_heads(scores.query, scores.term),
            self.strided(rows.operand(scores.keys, key, scores.term)),
            self.strided(rows.operand(found.values, key, found.column)),
            of_heads(scores.mask, key),
            *self.scaling(rows),
            of_heads(found.out, found.column),
            of_heads(found.grad_out, found.column),
            of_heads(found.logsumexp, None),
            of_heads(found.logarithm, None),
            of_heads(found.grad_query, scores.term),
            self.strided(rows.operand(found.grad_key, key, scores.term)),
            self.strided(rows.operand(found.grad_value, key, found.column)),
        ]

    def scaling(self, rows: Rows) -> list[str]:
        """How a mask applies to scores, their scale, whether visibility is triangular, and the visible keys."""
        scores, visible = rows.attention.scores, "0" if rows.visible is None else self.text(rows.visible)
        masking = f"pv::Masking::{scores.masking.upper()}"
        return [masking, scalar_text(scores.scale, DType.F32), flag_text(rows.triangular), visible]

    def strided(self, operand: Operand | None) -> str:
        """An operand as the fields of a matrix; `{}` for None."""
        if operand is None:
            return "{}"
        start = self.pointer(operand.buffer, operand.start)
        return f"{{{start}, {self.text(operand.row)}, {self.text(operand.column)}}}"

    def matrix(self, operand: Operand, dtype: DType, cast: DType | None = None) -> str:
        """A `pv::Matrix`."""
        return _matrix(self.strided(operand), dtype, cast)

    def panels(self, packing: Packing) -> str:
        """The panels of an operand that was packed."""
        if packing.groups:
            groups = _groups(packing.groups, packing.dtype)
            sizes = f"{groups}::packed({packing.columns}), {packing.terms}, {groups}::packed(from)"
            return f"pv::panels_from<{groups}::F>({packing.operand.buffer}, {sizes})"
        function = "tile_panels_from" if packing.tiles else f"panels_from<{_factor(packing)}>"
        sizes = f"{packing.columns}, {packing.terms}, from"
        if packing.stack.count > 1:
            function, sizes = f"stacked_{function}", f"{sizes}, {self.text(packing.stack.number)}"
        return f"pv::{function}({packing.operand.buffer}, {sizes})"

    def window(self, window: Window, dtype: DType) -> str:
        """A `pv::Window`, padded with axes of extent 1 and edges that exclude nothing."""

        def axes(found: Iterable[tuple[Expr, Expr]], count: int) -> str:
            given = [f"{{{self.text(extent)}, {self.text(stride)}}}" for extent, stride in found]
            return "{" + ", ".join(["{1, 0}"] * (count - len(given)) + given) + "}"

        flags = map(flag_text, (window.planes, bool(window.edges), window.zeros))
        channels = map(self.text, (window.channels, window.channel_stride))
        parts = [axes(window.rows, 3), axes(window.taps, 2), *channels, *flags]
        parts.append(self.edges(window.edges))
        return f"pv::Window<{CPP_TYPE[dtype]}>{{{self.pointer(window.buffer, window.start)}, {', '.join(parts)}}}"
