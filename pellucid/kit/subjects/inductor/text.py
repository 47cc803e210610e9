"""The module that Inductor generated: the steps in its text, the hooks around them, the kernels and their lines."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._inductor.exc import CppCompileError

from pellucid.capture.fx import origin_of
from pellucid.ir.origin import GLUE, Origin, merge
from pellucid.kit.subjects.base import Probe, Step
from pellucid.kit.subjects.inductor.made import Made, Variables
from pellucid.kit.subjects.refusals import DEFINITION, Refused, Value, start_of
from pellucid.trace.fx_programs import Constants

BEFORE, AFTER = "__before__", "__after__"
_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<message>.*)$", re.MULTILINE)
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+)")


class Instrumented:
    """The module that Inductor generated, with a hook before and after each of its calls."""

    def __init__(self, made: Made) -> None:
        tree, _, self.steps = hooked(made)
        self._probe = Probe()
        self._code, self._space = loadable(made, tree, {BEFORE: self._before, AFTER: self._after})
        self._loaded = False

    def run(self, inputs: list[Any], probe: Probe) -> Sequence[Any]:
        if not self._loaded:
            exec(self._code, self._space)
            self._loaded = True
        self._probe = probe
        return self._space["call"](inputs)

    def _before(self, position: int) -> None:
        self._probe.before(self.steps[position])

    def _after(self, position: int, *tensors: torch.Tensor) -> None:
        step = self.steps[position]
        self._probe.after(step, dict(zip(step.values, tensors, strict=True)))


def hooked(made: Made) -> tuple[ast.Module, ast.FunctionDef, list[Step]]:
    """The module with hooks, `BEFORE(number)` and `AFTER(number, *results)`, around the calls of its function; that
    function; and its calls by number. A result that is named after the call has an additional `AFTER`."""
    tree = ast.parse(made.text)
    reader = _Reader(made, tree)
    function = _call_function(tree)
    function.body = list(reader.instrument(function.body))
    return tree, function, reader.steps


def loadable(made: Made, tree: ast.Module, names: Mapping[str, Any]) -> tuple[CodeType, dict[str, Any]]:
    """The compiled code of a module, and the namespace to run it in: that of Inductor's module with its compiled
    kernels, and `names`."""
    ast.fix_missing_locations(tree)
    if made.loaded:
        tree.body = [each for each in tree.body if not _compiles(each)]
    space = {**made.loaded, "__name__": "pellucid_instrumented", **names, **made.constants}
    return compile(tree, "<instrumented>", "exec"), space


def _compiles(statement: ast.stmt) -> bool:
    """Whether a statement of the module concerns the compilation of its kernels."""
    return any(
        isinstance(node, ast.Name) and node.id in ("async_compile", "AsyncCompile") for node in ast.walk(statement)
    )


def _call_function(tree: ast.Module) -> ast.FunctionDef:
    """The function `call` that runs the graph: of the module, or of its class `Runner`."""
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")


@dataclass(slots=True)
class _Reader:
    """Finds the steps in the text of `call`."""

    made: Made
    tree: ast.Module
    steps: list[Step] = field(default_factory=list)
    _kernels: dict[str, tuple[str, tuple[bool, ...]]] = field(default_factory=dict)
    _roots: dict[str, str] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)

    def instrument(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements with hooks between them."""
        self._kernels = dict(kernels_of(self.tree))
        found = [self._step(statement) for statement in body]
        last = {buffer: at for at, step in enumerate(found) if step for buffer in step.writes}
        names = self._names_of_results(body, found)
        nodes = {node.name: node for node in self.made.graph.graph.nodes}
        for at, (statement, step) in enumerate(zip(body, found, strict=True)):
            if step is None:
                yield statement
                yield from self._late(names.get(at, ()))
                continue
            held = [b for b in step.writes if last[b] == at and b in self.made.holds and self._lives(b, body, at)]
            origin = merge(origin_of(nodes[n]) for n in self._nodes_of(statement, step) if n in nodes)
            values = tuple(self.made.holds[b] for b in held)
            number = len(self.steps)
            self.steps.append(_replaced(step, self._unique(step.name), origin, values))
            yield _hook(BEFORE, number)
            yield statement
            yield _hook(AFTER, number, *held)

    def _late(self, results: Sequence[str]) -> Iterator[ast.stmt]:
        """A hook for results of the last step that have just been named."""
        held = [name for name in results if name in self.made.holds]
        if held and self.steps:
            number = len(self.steps) - 1
            step = self.steps[number]
            fresh = [name for name in held if self.made.holds[name] not in step.values]
            if fresh:
                self.steps.append(_replaced(step, step.name, step.origin, tuple(self.made.holds[n] for n in fresh)))
                yield _hook(AFTER, len(self.steps) - 1, *fresh)

    def _step(self, statement: ast.stmt) -> Step | None:
        call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        if isinstance(statement, ast.Assign):
            self._note_alias(statement)
        if not isinstance(call, ast.Call):
            return None
        name = ast.unparse(call.func)
        if name in self._kernels:
            source, written = self._kernels[name]
            arguments = [_base(arg) for arg in call.args]
            writes = [a for a, w in zip(arguments, written, strict=False) if a and w]
            reads = [a for a, w in zip(arguments, written, strict=False) if a and not w]
            lines, ops = self._annotations(source, self._variables(name))
            loops = self.made.loops.get(name)
            facts = loops.row if loops is not None else {}
            written = self._with_roots(writes)
            return Step(name, "", GLUE, tuple(reads), written, (), name, source, lines, ops=ops, facts=facts)
        if not name.startswith(("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.")):
            return None
        out = [_base(keyword.value) for keyword in call.keywords if keyword.arg == "out"]
        targets = (
            [t.id for t in statement.targets if isinstance(t, ast.Name)] if isinstance(statement, ast.Assign) else []
        )
        reads = [buffer for arg in call.args if (buffer := _base(arg))]
        if not out and not targets:
            out = reads[:1]  # an operator that works in place
        operator = name.removeprefix("torch.ops.").removeprefix("extern_kernels.")
        return Step(operator, operator, GLUE, tuple(reads), self._with_roots([*filter(None, out), *targets]))

    def _variables(self, kernel: str) -> Variables:
        """The variables of the next call of a kernel."""
        number, calls = self._calls[kernel], self.made.values.get(kernel, ())
        self._calls[kernel] += 1
        return calls[min(number, len(calls) - 1)] if calls else {}

    def _annotations(self, source: str, variables: Variables) -> tuple[tuple[Origin, ...], tuple[str, ...]]:
        """The origin of each line of a kernel, and its operators in order; lines that define no value are glue."""
        origins: list[Origin] = []
        ops: list[str] = []
        matches = [DEFINITION.match(line) for line in source.splitlines()]
        texts = [f"{found['name']} = {found['value']}" if found else "" for found in matches]
        often, seen = Counter(texts), Counter[str]()
        for text in texts:
            values = variables.get(text, ())
            value = values[seen[text]] if len(values) == often[text] else _merged(values)
            seen[text] += 1
            origins.append(value.origin if value else GLUE)
            ops += [value.op] if value else []
        return tuple(origins), tuple(ops)

    def _note_alias(self, statement: ast.Assign) -> None:
        """`buf2 = reinterpret_tensor(buf1, ...)  # alias`: writes to buf2 are writes to buf1."""
        target, value = statement.targets[0], statement.value
        if (
            isinstance(target, ast.Name)
            and isinstance(value, ast.Call)
            and ast.unparse(value.func) == "reinterpret_tensor"
        ):
            base = _base(value)
            if base:
                self._roots[target.id] = base

    def _with_roots(self, names: Sequence[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for name in names:
            found[name] = None
            while name in self._roots:
                name = self._roots[name]
                found[name] = None
        return tuple(found)

    def _names_of_results(self, body: list[ast.stmt], found: list[Step | None]) -> dict[int, list[str]]:
        """The names that a statement assigns to (parts of) the result of a library call, by statement:
        `buf2 = buf1[0]`."""
        lines = self.made.text.splitlines()
        results: set[str] = set()
        names: dict[int, list[str]] = {}
        for at, (statement, step) in enumerate(zip(body, found, strict=True)):
            if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                continue
            if step is not None:
                results.update(name.id for name in statement.targets if isinstance(name, ast.Name))
            elif lines[statement.lineno - 1].endswith("# reuse"):
                continue  # reuses the memory of a result for a later one
            elif isinstance(statement.value, ast.Subscript | ast.Name) and _base(statement.value) in results:
                names.setdefault(at, []).append(statement.targets[0].id)
        return names

    def _lives(self, name: str, body: list[ast.stmt], at: int) -> bool:
        """Whether a name is bound after a statement."""
        known = False
        for statement in body[: at + 1]:
            if isinstance(statement, ast.Assign):
                known |= any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
            if isinstance(statement, ast.Delete) and any(
                isinstance(t, ast.Name) and t.id == name for t in statement.targets
            ):
                known = False
        return known

    def _nodes_of(self, statement: ast.stmt, step: Step) -> Sequence[str]:
        """The FX nodes of a call, from the comment above it, else from the contents of its buffers."""
        lines = self.made.text.splitlines()
        for line in reversed(lines[max(0, statement.lineno - 3) : statement.lineno - 1]):
            handle = _HANDLE.search(line)
            if handle and handle.group(1) in self.made.nodes:
                return self.made.nodes[handle.group(1)]
        return [self.made.holds[b] for b in step.writes if b in self.made.holds]

    def _unique(self, name: str) -> str:
        count = sum(step.name.partition("#")[0] == name for step in self.steps)
        return f"{name}#{count + 1}" if count else name


def _merged(values: Sequence[Value]) -> Value | None:
    """One value for several with the same defining text."""
    return replace(values[0], origin=merge(value.origin for value in values)) if values else None


def _replaced(step: Step, name: str, origin: Origin, values: tuple[str, ...]) -> Step:
    return replace(step, name=name, origin=origin, values=values)


def _hook(name: str, number: int, *arguments: str) -> ast.stmt:
    text = ", ".join((str(number), *arguments))
    return ast.parse(f"{name}({text})").body[0]


def _base(node: ast.expr) -> str:
    """The buffer that an argument is, or is a view of; empty if it is neither."""
    match node:
        case ast.Name(name):
            return name
        case ast.Subscript(value):
            return _base(value)
        case ast.Call(func=ast.Name("reinterpret_tensor"), args=[first, *_]):
            return _base(first)
        case _:
            return ""


def kernels_of(tree: ast.Module) -> Iterator[tuple[str, tuple[str, tuple[bool, ...]]]]:
    """The C++ of each kernel and, by parameter, whether it may write to it, as to a pointer to non-const."""
    for statement in tree.body:
        match statement:
            case ast.Assign(
                [ast.Name(name)], ast.Call(ast.Attribute(attr="cpp_pybinding"), [types, ast.Constant(text)])
            ):
                declared = ast.literal_eval(types)
                yield name, (str(text), tuple("*" in each and not each.startswith("const") for each in declared))


_MAIN = re.compile(r"\n\ndef get_args\(\):.*|\nif __name__ == .*", re.DOTALL)


def as_program(made: Made, constants: Constants) -> str:
    """The module as a program in a run folder, which runs it on the graph's saved inputs and judges the results."""
    named = "".join(f"{name} = {constants.text(each)}\n" for name, each in made.constants.items())
    needed = "from pellucid.runnable import compare_called, saved\n\n"
    values = f"VALUES = saved(__file__)\n{named}" if named else ""
    call = 'if __name__ == "__main__":\n    raise SystemExit(compare_called(call, __file__))\n'
    return f"{_MAIN.sub('', made.text).rstrip()}\n\n\n{needed}{values}\n\n{call}"


def refused_kernel(failed: CppCompileError, made: Made) -> Refused | None:
    """The kernel that the C++ compiler rejected, if the error names a line of one."""
    found = _ERROR.search(failed.output)
    if found is None:
        return None
    file, number, message = found["file"], int(found["line"]), found["message"]
    for name, (source, _) in kernels_of(ast.parse(made.text)):
        start = start_of(source, Path(file))
        if start is not None:
            calls = made.values.get(name, ())
            values = {text: _merged(each) for text, each in calls[0].items()} if calls else {}
            known = {text: value for text, value in values.items() if value is not None}
            return Refused(name, source, number - start, message, failed.output, known)
    return None
