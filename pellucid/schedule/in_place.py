"""Inputs that a program changes are changed in place.

Graphs are functional: a change of an input creates a new tensor, later operators read that, and it is copied back to
the input at the end. A model that adds a token to its cache of keys and values would copy the whole cache twice:

    before: `y[i] = x[i]` for all i    `y[64*[p] + j] = key[j]`    ... reads y ...    `x[i] = y[i]` for all i
    after:                             `x[64*[p] + j] = key[j]`    ... reads x ...

This also applies to part of an input, and to temporaries that are not read after they are copied: a chain of changes
needs no copy between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pellucid.ir.analysis import reads, writes
from pellucid.ir.decision import Decision
from pellucid.ir.index import Expr
from pellucid.ir.nodes import Arg, Buffer, Extern, Kernel, Load, Node, Param, Program, Rhs, Store, View
from pellucid.schedule.rewrite import make_kernel
from pellucid.schedule.solve import radix


def change_in_place(program: Program, values: Mapping[str, View]) -> tuple[Program, Mapping[str, View], list[Decision]]:
    """`program`, one kernel for each operator, without the copies that its changes do not need.

    values: where the program stores values, by name; they are returned for the new program, without those that are
    overwritten.
    """
    editor, decisions = _Editor(program), list[Decision]()
    for position in sorted(editor.copies, reverse=True):  # backwards, for chains of changes
        copy = editor.copy_at(position) if position in editor.copies else None
        if copy is None or len(editor.writers[copy.target]) == 1:
            continue
        name, refusal = program.nodes[position].name, editor.refusal(copy)
        if not refusal:
            editor.remove(copy)
            values = copy.moved(values)
        why = refusal or f"no node needs the old contents of {copy.source}: it is changed in place"
        decisions.append(Decision("schedule.in_place", (name, copy.source), not refusal, why))
    return editor.program(), values, decisions[::-1]


class _Editor:
    """The remaining nodes of a program by position, and the readers and writers of each buffer.

    copies: the load and the store of kernels that only copy.
    """

    def __init__(self, program: Program) -> None:
        self._original = program
        self.nodes: dict[int, Node] = dict(enumerate(program.nodes))
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self.returned = {view.buffer for view in program.outputs if isinstance(view, View)}
        self._renamed: list[_Copy] = []
        self.readers: dict[str, set[int]] = {name: set() for name in self.buffers}
        self.writers: dict[str, set[int]] = {name: set() for name in self.buffers}
        self.copies: dict[int, tuple[Load, Store]] = {}
        for position, node in self.nodes.items():
            self._enter(position, node)

    def _enter(self, position: int, node: Node) -> None:
        for name in reads(node):
            self.readers[name].add(position)
        for name in writes(node):
            self.writers[name].add(position)
        found = _copied(node) if isinstance(node, Kernel) else None
        if found is not None:
            self.copies[position] = found

    def copy_at(self, position: int) -> _Copy | None:
        """The copy at a position, if it fills a whole temporary with elements in the order of their own buffer."""
        load, store = self.copies[position]
        offset = load.index - store.index
        if self.buffers[store.buffer].role != "temp" or offset.vars() or not self._is_all(position, store):
            return None
        return _Copy(position, self._copy_back(load.buffer, store.buffer, offset), load.buffer, store.buffer, offset)

    def _copy_back(self, source: str, target: str, offset: Expr) -> int | None:
        """The position of the kernel that copies all of `target` back to `source`."""
        for position in sorted(self.writers[source] & self.readers[target] & self.copies.keys()):
            load, store = self.copies[position]
            if store.index - load.index == offset and self._is_all(position, load):
                return position
        return None

    def _is_all(self, position: int, access: Load | Store) -> bool:
        kernel = self.nodes[position]
        return isinstance(kernel, Kernel) and radix(kernel, access.index, self.buffers[access.buffer].numel) is not None

    def refusal(self, copy: _Copy) -> str:
        """Why the source of a copy cannot replace its target; empty if it can."""
        source, target, start = copy.source, copy.target, copy.start
        given, end = self.buffers[source].role != "temp", len(self._original.nodes) if copy.back is None else copy.back
        if given and copy.back is None:
            return f"{source} belongs to the caller and must not change"
        if source in self.returned or (given and target in self.returned):
            return f"the caller receives {source} and {target}, which must not share memory"
        for position in sorted(self.readers[source] | self.writers[source]):
            if start < position < end:
                return f"{self.nodes[position].name} needs the old contents of {source}"
        for position in sorted(self.writers[target]):
            if not start <= position <= end or isinstance(self.nodes[position], Extern):
                return f"{self.nodes[position].name} also writes {target}"
        later = min((position for position in self.writers[source] if position > end), default=None)
        for position in sorted(self.readers[target]):
            if later is not None and position >= later:
                return f"{self.nodes[position].name} reads {target} after {source} is changed"
        return ""

    def remove(self, copy: _Copy) -> None:
        """Replace `target` by `source`, and remove this copy and the copy back."""
        for position in (copy.start, *(() if copy.back is None else (copy.back,))):
            del self.nodes[position], self.copies[position]
            for name in (copy.source, copy.target):
                self.readers[name].discard(position)
                self.writers[name].discard(position)
        for position in self.readers.pop(copy.target) | self.writers.pop(copy.target):
            self.nodes[position] = copy.node(self.nodes[position], self.buffers[copy.source])
            self.copies.pop(position, None)
            self._enter(position, self.nodes[position])
        del self.buffers[copy.target]
        self.returned = {copy.source if name == copy.target else name for name in self.returned}
        self._renamed.append(copy)

    def program(self) -> Program:
        """The program without the removed copies."""
        outputs = self._original.outputs
        for copy in self._renamed:
            outputs = tuple(copy.view(each) if isinstance(each, View) else each for each in outputs)
        nodes = tuple(self.nodes[position] for position in sorted(self.nodes))
        return replace(self._original, buffers=tuple(self.buffers.values()), nodes=nodes, outputs=outputs)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A kernel that copies the contiguous elements of `source` from `offset` on to a temporary, `target`.

    start: its position. back: the position of the kernel that copies all of `target` back, if there is one.
    """

    start: int
    back: int | None
    source: str
    target: str
    offset: Expr

    def moved(self, values: Mapping[str, View]) -> Mapping[str, View]:
        """The values, those of `target` in `source`, without the overwritten values of a temporary `source`."""
        given = self.back is not None
        return {name: self.view(view) for name, view in values.items() if given or view.buffer != self.source}

    def node(self, node: Node, buffer: Buffer) -> Node:
        """A node with `source`, which is `buffer`, in place of `target`."""
        match node:
            case Extern():
                args = tuple(self.argument(each) for each in node.args)
                kwargs = tuple((name, self.argument(each)) for name, each in node.kwargs)
                return replace(node, args=args, kwargs=kwargs)
            case Kernel():
                lines = [replace(line, rhs=self.rhs(line.rhs)) for line in node.body]
                params = {each.name: each for each in (*node.params, Param(buffer.name, buffer.dtype, buffer.numel))}
                return make_kernel(node.name, node.space, lines, params)

    def rhs(self, rhs: Rhs) -> Rhs:
        if not isinstance(rhs, Load | Store) or rhs.buffer != self.target:
            return rhs
        return replace(rhs, buffer=self.source, index=rhs.index + self.offset)

    def argument(self, argument: Arg) -> Arg:
        if isinstance(argument, tuple):
            return tuple(self.argument(each) for each in argument)
        return self.view(argument) if isinstance(argument, View) else argument

    def view(self, view: View) -> View:
        if view.buffer != self.target:
            return view
        return replace(view, buffer=self.source, offset=view.offset + self.offset)


def _copied(kernel: Kernel) -> tuple[Load, Store] | None:
    """The load and the store of a kernel that only copies, else None."""
    match [line.rhs for line in kernel.body]:
        case [Load(source, _, None) as load, Store(target, _, _, "") as store] if source != target:
            same = len({param.dtype for param in kernel.params}) == 1
            return None if load.index.vals() or store.index.vals() or not same else (load, store)
        case _:
            return None
