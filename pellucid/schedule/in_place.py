"""Inputs that a program changes are changed where they lie.

Graphs have no side effects: what changes an input makes a new tensor of it, others read that, and it is copied into the
input at the end. A model that adds a token to its cache of keys and values would copy all of the cache twice:

    before: `y[i] = x[i]` for all i    `y[64*[p] + j] = key[j]`    ... reads y ...    `x[i] = y[i]` for all i
    after:                             `x[64*[p] + j] = key[j]`    ... reads x ...

The same holds for part of an input, and for temporaries that nobody reads once they are copied: a chain of changes has
no copy between two links.
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

    values: where it puts what, by name; they are returned as they lie afterwards, without what is changed later.
    """
    decisions: list[Decision] = []
    for kernel in reversed(_kernels(program)):  # the last link of a chain first: the others find their copy back then
        copy = _copy_of(kernel, program)
        if copy is None or not any(copy.target in writes(node) for node in program.nodes if node.name != kernel.name):
            continue
        back = copy.back(program)
        refusal = copy.refusal(program, back)
        if not refusal:
            program, values = copy.removed(program, back), copy.moved(values, given=bool(back))
        why = refusal or f"nobody needs {copy.source} as it was: it is changed where it lies"
        decisions.append(Decision("schedule.in_place", (kernel.name, copy.source), not refusal, why))
    return program, values, decisions[::-1]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A kernel that makes a temporary, `target`, of the elements of `source` that lie side by side from `offset` on."""

    kernel: Kernel
    source: str
    target: str
    offset: Expr

    def back(self, program: Program) -> str:
        """The kernel that puts all of `target` where it came from; empty if there is none."""
        numel = program.buffer(self.target).numel
        for kernel in _kernels(program):
            match _moved(kernel):
                case Load(self.target, loaded), Store(self.source, stored) if stored - loaded == self.offset:
                    if radix(kernel, loaded, numel) is not None:
                        return kernel.name
                case _:
                    pass
        return ""

    def refusal(self, program: Program, back: str) -> str:
        """Why `source` cannot hold what `target` does; empty if it can. back: the kernel that puts it there."""
        names = [node.name for node in program.nodes]
        start, end = names.index(self.kernel.name), names.index(back) if back else len(names)
        given = program.buffer(self.source).role != "temp"
        returned = {view.buffer for view in program.outputs if isinstance(view, View)}
        if given and not back:
            return f"{self.source} is the caller's, and is to stay as it is"
        if self.source in returned or (given and self.target in returned):
            return f"the caller gets {self.source} and {self.target}, which may not share memory"
        changed = False
        for position, node in enumerate(program.nodes):
            if start < position < end and self.source in (*reads(node), *writes(node)):
                return f"{node.name} needs {self.source} as it was"
            if self.target in writes(node) and (position > end or isinstance(node, Extern)):
                return f"{node.name} changes {self.target} by itself"
            changed |= position > end and self.source in writes(node)
            if changed and self.target in reads(node):
                return f"{node.name} needs {self.target}, and {self.source} is changed before"
        return ""

    def removed(self, program: Program, back: str) -> Program:
        """The program with `source` for `target`, without this copy and the one back."""
        buffer = program.buffer(self.source)
        return replace(
            program,
            buffers=tuple(each for each in program.buffers if each.name != self.target),
            nodes=tuple(
                self._node(node, buffer) for node in program.nodes if node.name not in (self.kernel.name, back)
            ),
            outputs=tuple(self._view(each) if isinstance(each, View) else each for each in program.outputs),
        )

    def moved(self, values: Mapping[str, View], *, given: bool) -> Mapping[str, View]:
        """The values, those of `target` in `source`; what a temporary held before is nowhere in the end."""
        return {name: self._view(view) for name, view in values.items() if given or view.buffer != self.source}

    def _node(self, node: Node, buffer: Buffer) -> Node:
        if self.target not in (*reads(node), *writes(node)):
            return node
        match node:
            case Extern():
                args = tuple(self._argument(each) for each in node.args)
                kwargs = tuple((name, self._argument(each)) for name, each in node.kwargs)
                return replace(node, args=args, kwargs=kwargs)
            case Kernel():
                lines = [replace(line, rhs=self._rhs(line.rhs)) for line in node.body]
                params = {each.name: each for each in (*node.params, Param(buffer.name, buffer.dtype, buffer.numel))}
                return make_kernel(node.name, node.space, lines, params)

    def _rhs(self, rhs: Rhs) -> Rhs:
        if not isinstance(rhs, Load | Store) or rhs.buffer != self.target:
            return rhs
        return replace(rhs, buffer=self.source, index=rhs.index + self.offset)

    def _argument(self, argument: Arg) -> Arg:
        if isinstance(argument, tuple):
            return tuple(self._argument(each) for each in argument)
        return self._view(argument) if isinstance(argument, View) else argument

    def _view(self, view: View) -> View:
        if view.buffer != self.target:
            return view
        return replace(view, buffer=self.source, offset=view.offset + self.offset)


def _kernels(program: Program) -> list[Kernel]:
    return [node for node in program.nodes if isinstance(node, Kernel)]


def _copy_of(kernel: Kernel, program: Program) -> _Copy | None:
    """The copy that a kernel is, if it makes a whole temporary, in which the elements lie as they do in their own."""
    found = _moved(kernel)
    if found is None:
        return None
    load, store = found
    target, offset = program.buffer(store.buffer), load.index - store.index
    if target.role != "temp" or offset.vars() or radix(kernel, store.index, target.numel) is None:
        return None
    return _Copy(kernel, load.buffer, store.buffer, offset)


def _moved(kernel: Kernel) -> tuple[Load, Store] | None:
    """What a kernel loads and stores that does nothing else with it."""
    match [line.rhs for line in kernel.body]:
        case [Load(source, _, None) as load, Store(target, _, _, "") as store] if source != target:
            same = len({param.dtype for param in kernel.params}) == 1
            return None if load.index.vals() or store.index.vals() or not same else (load, store)
        case _:
            return None
