"""Nodes that depend only on frozen arguments become a separate program, which runs before the first call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pellucid.ir.analysis import arguments_of, reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.derived import Float
from pellucid.ir.index import ONE, ZERO, Expr, const
from pellucid.ir.nodes import Arg, Buffer, Extern, Kernel, Node, Program, View
from pellucid.ir.printer import kernel_symbols
from pellucid.ir.types import DType

# Precomputed results stay in memory, so they may be at most this many times as large as the inputs of their node.
_GROWTH = 2


@dataclass(frozen=True, slots=True)
class FrozenSplit:
    """A program split in two.

    before: has the same arguments; its results depend only on the frozen ones.
    main: the rest; its arguments are those of the program, then `made`, the results of `before`.
    """

    before: Program
    main: Program
    made: tuple[str, ...]


def split_frozen(program: Program, frozen: Collection[str], constants: int) -> tuple[FrozenSplit, tuple[Decision, ...]]:
    """Split off the nodes that the frozen inputs determine.

    constants: the number of inputs, at the end, that are tensors of the program itself.

    before: `program(x, w): t = w * 2; return x + t`, frozen: w
    after:  `before(x, w): t = w * 2; return t` and `main(x, w, t): return x + t`
    """
    sizes = {buffer.name: buffer for buffer in program.buffers}
    written = Counter(name for node in program.nodes for name in writes(node))
    still = {name for name in frozen if name not in written}
    own = {name for name in program.inputs[len(program.inputs) - constants :] if name and name not in written}
    returned = {view.buffer for view in program.outputs if isinstance(view, View)}
    moved: list[Node] = []
    shared: list[Node] = []  # nodes that need no argument: each program that needs them computes them
    decisions: list[Decision] = []
    for node in program.nodes:
        read, made = set(reads(node)), set(writes(node))
        if not read <= still | own or made & returned or any(written[name] > 1 for name in made):
            continue
        if not _repeatable(node, [sizes[name] for name in read | made]):
            continue
        if not read & still:
            shared.append(node)
            own |= made
            continue
        grown = _bytes(sizes, made) > _GROWTH * _bytes(sizes, read)
        why = "its result is much larger than its inputs" if grown else "it depends only on frozen values"
        decisions.append(Decision("freeze.before", (node.name,), not grown, why))
        if not grown:
            moved.append(node)
            still |= made
    return _split(program, moved, shared, constants), tuple(decisions)


def with_inputs(program: Program, sizes: Mapping[str, int], constants: int) -> Program:
    """`program` with more f32 arguments, of the sizes that `sizes` lists by name, before its own tensors."""
    if not sizes:
        return program
    buffers = tuple(Buffer(name, DType.F32, const(numel), "input") for name, numel in sizes.items())
    return replace(program, buffers=(*program.buffers, *buffers), inputs=_inputs(program, sizes, constants))


def _inputs(program: Program, more: Collection[str], constants: int) -> tuple[str | None, ...]:
    """The arguments of `program`, `more` of them, then its own tensors."""
    at = len(program.inputs) - constants
    return (*program.inputs[:at], *more, *program.inputs[at:])


def _split(program: Program, moved: list[Node], shared: list[Node], constants: int) -> FrozenSplit:
    moved_names, shared_names = {node.name for node in moved}, {node.name for node in shared}
    rest = tuple(node for node in program.nodes if node.name not in moved_names)
    first = tuple(node for node in program.nodes if node.name in moved_names | shared_names)
    computed = {name for node in moved for name in writes(node)}
    needed = {name for node in rest for name in reads(node)}
    made = tuple(buffer.name for buffer in program.buffers if buffer.name in computed & needed)
    touched = {name for node in first for name in (*reads(node), *writes(node))}
    buffers = {buffer.name: buffer for buffer in program.buffers}
    results = {name: replace(buffers[name], role="output") for name in made}
    given = {name: replace(buffers[name], role="input") for name in made}
    before = Program(
        symbols=(),
        buffers=tuple(results.get(name, buffer) for name, buffer in buffers.items() if name in touched),
        inputs=tuple(name if name in touched else None for name in program.inputs),
        nodes=first,
        outputs=tuple(View(name, (buffer.numel,), (ONE,), ZERO) for name, buffer in results.items()),
    )
    gone = computed - set(made)
    main = replace(
        program,
        buffers=tuple(given.get(name, buffer) for name, buffer in buffers.items() if name not in gone),
        inputs=_inputs(program, made, constants),
        nodes=rest,
    )
    return FrozenSplit(before, main, made)


def _bytes(sizes: dict[str, Buffer], names: Collection[str]) -> int:
    return sum((sizes[name].numel.value or 0) * sizes[name].dtype.itemsize for name in names)


def _repeatable(node: Node, buffers: Collection[Buffer]) -> bool:
    """True if all executions of `node` do the same: it uses no symbols or random numbers and mutates nothing."""
    if any(buffer.numel.value is None for buffer in buffers):
        return False
    match node:
        case Kernel():
            return not kernel_symbols(node)
        case Extern():
            return not node.ordered and not node.mutates and all(map(_is_known, (*arguments_of(node), *node.outputs)))


def _is_known(argument: Arg) -> bool:
    match argument:
        case Float():
            return False
        case Expr():
            return not argument.syms()
        case View(_, shape, strides, offset):
            return not any(each.syms() for each in (*shape, *strides, offset))
        case _:
            return True
