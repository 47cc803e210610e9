"""TorchInductor as a subject: with `inductor_loops`, all of the kit that knows its insides.

Inductor writes a Python module whose function `call` allocates buffers and calls kernels and library operators. The
hooks around its calls are put into that text, so what is observed is what runs: same kernels, same reuse of memory.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.debug
from torch._inductor import config
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.common import CSE
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import WhyNoFuse
from torch._inductor.virtualized import V

from pellucid.capture.graph import origin_of
from pellucid.debug.child import chain_of
from pellucid.debug.explain import CPP_NAMES, DEFINITION, Refusal, Refused, Value
from pellucid.debug.graphs import Graph, GraphCompiler, interpret, twin
from pellucid.debug.inductor_loops import Loops
from pellucid.debug.plain import front_rungs
from pellucid.debug.subject import (
    Captured,
    Compiled,
    Interpreted,
    Partial,
    Passed,
    Probe,
    Rung,
    Step,
    Subject,
    Undecomposed,
    refusal,
)
from pellucid.errors import UserError
from pellucid.ir.origin import GLUE, Origin, merge

# A cache would serve code that another version of the compiler made, a patched one for example.
_SETTINGS: dict[str, Any] = {
    "force_disable_caches": True,
    "fallback_random": True,  # eager's random numbers, or no two runs could be compared
    "comment_origin": False,
    "trace.provenance_tracking_level": 1,
}
_MADE = "_pellucid_made"
# The kernel that is soonest compiled; with vector code, because that takes other flags of the compiler.
_SMALLEST = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(0.0f).store(out); }
"""
_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):\d+: (?:fatal )?error: (?P<message>.*)$", re.MULTILINE)
_HANDLE = re.compile(r"# \[Provenance debug handles\] (\S+)")


@dataclass(frozen=True, slots=True)
class Inductor(Subject):
    """Stock TorchInductor of the installed torch; `options` are settings of `torch._inductor.config` by their names."""

    demands = 2  # operators that it decomposes must not be left

    @property
    def name(self) -> str:
        return "inductor"

    def wrap(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        patches = {**_SETTINGS, **self.options}
        return torch.compile(fn, backend=partial(compile_fx, config_patches=patches), dynamic=dynamic)

    def capturing(self, compiler: Callable[[str], GraphCompiler], decompose: bool = True) -> Callable[..., Any]:
        def inner(module: torch.fx.GraphModule, inputs: Sequence[Any], **about: Any) -> Any:
            kind = "backward" if about.get("is_backward") else "inference" if about.get("is_inference") else "forward"
            return compiler(kind)(module, inputs)

        table = None if decompose else {}
        patches = {**_SETTINGS, **self.options}
        return partial(compile_fx, inner_compile=inner, config_patches=patches, decompositions=table)

    def compile(self, graph: Graph) -> Compiled:
        return _InductorCompiled(graph, self.options)

    def warm_up(self) -> None:
        """Find the vector instructions and precompile the headers: a second and more in each process."""
        with suppress(Exception):  # the first graph meets the same error, and says what is wrong
            valid_vec_isa_list()
            CppPythonBindingsCodeCache.load_pybinding(["float*"], _SMALLEST)

    def keep_kernels(self, folder: Path) -> None:
        """Inductor names a kernel's file by its text, so only the caches of whole graphs could hide a change of it."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        _SETTINGS.update(force_disable_caches=False, fx_graph_cache=False, fx_graph_remote_cache=False)

    def refused(self, error: BaseException) -> Refused | None:
        failed = next((each for each in chain_of(error) if isinstance(each, CppCompileError)), None)
        made: _Made | None = getattr(error, _MADE, None)
        return _refused(failed, made) if failed is not None and made is not None else None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return select_decomp_table()

    def passed(self, graph: Graph) -> torch.fx.GraphModule:
        lowering = lowering_of(graph, self.options, "run")
        return graph.module if lowering is None else _module_of(lowering)

    def ladder(self) -> tuple[Rung, ...]:
        simplest: dict[str, Any] = {
            **self.options,
            "max_fusion_size": 1,
            "epilogue_fusion": False,
            "cpp.simdlen": 1,
            "allow_buffer_reuse": False,
            "inplace_buffers": False,
            "cpp.enable_unsafe_math_opt_flag": False,
            "cpp.enable_floating_point_contract_flag": "off",
        }
        steps: list[Rung] = []
        for component, given in (
            ("codegen", ()),
            ("compiler flags", ("cpp.enable_unsafe_math_opt_flag", "cpp.enable_floating_point_contract_flag")),
            ("memory plan", ("allow_buffer_reuse", "inplace_buffers")),
            ("vectorisation", ("cpp.simdlen",)),
            ("fusion", ("max_fusion_size", "epilogue_fusion")),
        ):
            kept = {name: value for name, value in simplest.items() if name not in given}
            simplest = {**kept, **{name: self.options[name] for name in given if name in self.options}}
            steps.append(Rung(component, Inductor(simplest), threads=1))
        return (
            *front_rungs(),
            Rung("joint graph", Undecomposed({}, self)),
            Rung("decompositions", Captured({}, self)),
            Rung("graph passes", Passed({}, self)),
            Rung("lowering", Lowered({}, self)),
            *steps,
            Rung("threads", self),
        )


@dataclass(frozen=True, slots=True)
class Lowered(Partial):
    """Graphs whose operators give what the loops say that Inductor lowers them to; all else in them runs eagerly."""

    def compile(self, graph: Graph) -> Compiled:
        lowering = lowering_of(graph, self.base.options, "codegen")
        return Interpreted(graph.module) if lowering is None else _LoweredCompiled(lowering)


class _LoweredCompiled(Compiled):
    def __init__(self, lowering: GraphLowering) -> None:
        self.graph, self.steps = _module_of(lowering), ()
        self._lowering = lowering
        self._buffers = {node: buffer for buffer, node in _holds(lowering).items()}

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        loops = Loops(self._lowering, inputs)

        def see(node: torch.fx.Node, value: Any) -> Any:
            buffer = self._buffers.get(node.name)
            return loops.value(buffer, value) if buffer and isinstance(value, torch.Tensor) else value

        return interpret(self.graph, inputs, see)


class _InductorCompiled(Compiled):
    """A graph that Inductor compiled."""

    def __init__(self, graph: Graph, options: Mapping[str, Any]) -> None:
        made: list[_Made] = []
        try:
            with _listening(made):
                self._call = _compiled(graph, options)
        except Exception as error:
            if made:
                setattr(error, _MADE, made[-1])  # what there was to compile, for `refused`
            raise
        if not made:  # an empty graph is returned as it is
            made.append(_Made("def call(args):\n    return list(args)\n", graph.module, {}, {}, {}))
        self._made = made[-1]
        self.graph, self.plan = self._made.graph, self._made.text
        self._module = _Instrumented(self._made)
        self.steps = tuple(self._module.steps)

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        nodes = {node.name: node for node in self.graph.graph.nodes}
        for names, why in self._made.unfused:
            held = [nodes[self._made.holds[name]] for name in names if self._made.holds.get(name) in nodes]
            yield refusal("fusion", names, why, merge(map(origin_of, held)))

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        with torch.no_grad():
            return self._call(list(inputs)) if probe is None else self._module.run(list(inputs), probe)


def _compiled(graph: Graph, options: Mapping[str, Any]) -> Any:
    """Inductor's compiled form of a graph, which stays as it is."""
    about: dict[str, Any] = {"is_inference": graph.kind == "inference", "is_backward": graph.kind == "backward"}
    with config.patch({**_SETTINGS, **options}), torch.no_grad():
        return compile_fx_inner(twin(graph.module), _examples(graph), **about)


class _Reached(BaseException):
    """Where compilation shall stop; nothing in between takes it for an error."""

    def __init__(self, lowering: GraphLowering) -> None:
        super().__init__()
        self.lowering = lowering


def lowering_of(graph: Graph, options: Mapping[str, Any], method: str) -> GraphLowering | None:
    """Inductor's lowering of a graph when it is about to call one of its methods: `run`, which lowers the graph after
    its passes, or `codegen`. None for an empty graph, which is not lowered."""

    def stop(self: GraphLowering, *_: Any, **__: Any) -> None:
        raise _Reached(self)

    with mock.patch.object(GraphLowering, method, stop):
        try:
            _compiled(graph, options)
        except _Reached as reached:
            return reached.lowering
    return None


def _module_of(lowering: GraphLowering) -> torch.fx.GraphModule:
    assert isinstance(lowering.module, torch.fx.GraphModule)
    return lowering.module


def _examples(graph: Graph) -> list[Any]:
    """The fake inputs that the graph was captured with."""
    nodes = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    return [node.meta.get("val", value) for node, value in zip(nodes, graph.inputs, strict=True)]


@dataclass(frozen=True, slots=True)
class _Made:
    """What Inductor made of a graph.

    text: its Python module. graph: the FX graph after its passes. holds: by buffer, the FX node whose result it is.
    constants: what the text names beside its arguments. nodes: by provenance handle, names of FX nodes. values: the
    variables of kernels by the text that defines them. unfused: buffers whose kernels were not fused, and why.
    loaded: the names of the module that it became, with its kernels; empty before.
    """

    text: str
    graph: torch.fx.GraphModule
    holds: Mapping[str, str]
    constants: Mapping[str, Any]
    nodes: Mapping[str, Sequence[str]]
    values: Mapping[str, Value] = field(default_factory=dict)
    unfused: Sequence[tuple[tuple[str, ...], str]] = ()
    loaded: dict[str, Any] = field(default_factory=dict)


@contextmanager
def _listening(made: list[_Made]) -> Iterator[None]:
    codegen, load, generate = GraphLowering.codegen, GraphLowering.compile_to_module, CSE.generate
    values: dict[str, Value] = {}

    unfused: dict[tuple[tuple[str, ...], str], None] = {}
    refuse = WhyNoFuse.__call__

    def hear(self: Any, reason: str, *args: Any) -> None:
        refuse(self, reason, *args)
        unfused[(self.name1.replace("op", "buf"), self.name2.replace("op", "buf")), reason % args] = None

    def note(self: Any, buffer: Any, expression: Any, **about: Any) -> Any:
        made = generate(self, buffer, expression, **about)
        node = getattr(V.interpreter, "current_node", None)
        if isinstance(expression, str) and node is not None:
            values[f"{made} = {expression}"] = _value(str(node.target), about.get("dtype"))
        return made

    def listen(self: Any) -> Any:
        result = codegen(self)
        handles = torch._inductor.debug._inductor_triton_kernel_to_post_grad_node_info
        nodes = {key: list(names) for key, names in handles.items()}
        made.append(
            _Made(result[0].value, self.module, _holds(self), dict(self.constants), nodes, dict(values), tuple(unfused))
        )
        return result

    def keep(self: Any) -> Any:
        module = load(self)
        if made:
            made[-1].loaded.update(vars(module))
        return module

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", listen))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", keep))
        stack.enter_context(mock.patch.object(CSE, "generate", note))
        stack.enter_context(mock.patch.object(WhyNoFuse, "__call__", hear))
        yield


def _value(op: str, dtype: torch.dtype | None) -> Value:
    """A variable of the kernel that is being written; of the FX nodes behind it, the one that is this operator."""
    current = getattr(V.kernel, "current_node", None)
    origins = current.node.get_origins() if current is not None and current.node is not None else ()
    named = [node for node in origins if op in str(node.target)]
    origin = merge(map(origin_of, named or origins))
    return Value(op, CPP_NAMES.get(dtype, "") if dtype is not None else "", origin)


def _refused(failed: CppCompileError, made: _Made) -> Refused | None:
    found = _ERROR.search(failed.output)
    if found is None:
        return None
    file, number, message = found["file"], int(found["line"]), found["message"]
    compiled = Path(file).read_text().splitlines() if Path(file).is_file() else []
    for name, (source, _) in _kernels(ast.parse(made.text)):
        lines = source.splitlines()
        for start in range(len(compiled) - len(lines) + 1):
            if compiled[start : start + len(lines)] == lines:
                return Refused(name, source, number - start, message, failed.output, made.values)
    return None


def _holds(lowering: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, buffer in lowering.name_to_buffer.items():
        node = buffer.get_origin_node()
        if node is None:
            continue
        value = node.meta.get("val")
        try:
            size = tuple(buffer.get_size())
        except (NotImplementedError, AttributeError, AssertionError):
            continue
        if isinstance(value, torch.Tensor) and tuple(map(str, value.shape)) == tuple(map(str, size)):
            found[name] = node.name
    return found


# ------------------------------------------------------------------------------------------------ instrumenting


class _Instrumented:
    """The module that Inductor wrote, with a hook before and after each call it makes."""

    def __init__(self, made: _Made) -> None:
        tree = ast.parse(made.text)
        self._reader = _Reader(made, tree)
        call = _call_function(tree)
        call.body = list(self._reader.instrument(call.body))
        ast.fix_missing_locations(tree)
        self.steps = self._reader.steps
        self._probe = Probe()
        self._space: dict[str, Any] = {
            **made.loaded,
            "__name__": "pellucid_instrumented",
            "__before__": self._before,
            "__after__": self._after,
            **made.constants,
        }
        if made.loaded:  # its kernels are there
            tree.body = [each for each in tree.body if not _compiles(each)]
        self._code = compile(tree, "<instrumented>", "exec")
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


def _compiles(statement: ast.stmt) -> bool:
    """Whether a statement of the module has to do with compiling its kernels."""
    return any(
        isinstance(node, ast.Name) and node.id in ("async_compile", "AsyncCompile") for node in ast.walk(statement)
    )


def _call_function(tree: ast.Module) -> ast.FunctionDef:
    """The function that runs the graph: of the module, or of its class `Runner`."""
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")


@dataclass(slots=True)
class _Reader:
    """Finds the steps in the text of `call`."""

    made: _Made
    tree: ast.Module
    steps: list[Step] = field(default_factory=list)
    _kernels: dict[str, tuple[str, tuple[bool, ...]]] = field(default_factory=dict)
    _roots: dict[str, str] = field(default_factory=dict)

    def instrument(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """The statements with hooks between them."""
        self._kernels = dict(_kernels(self.tree))
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
            yield _hook("__before__", number)
            yield statement
            yield _hook("__after__", number, *held)

    def _late(self, results: Sequence[str]) -> Iterator[ast.stmt]:
        """A name given to a result of the last step."""
        held = [name for name in results if name in self.made.holds]
        if held and self.steps:
            number = len(self.steps) - 1
            step = self.steps[number]
            fresh = [name for name in held if self.made.holds[name] not in step.values]
            if fresh:
                self.steps.append(_replaced(step, step.name, step.origin, tuple(self.made.holds[n] for n in fresh)))
                yield _hook("__after__", len(self.steps) - 1, *fresh)

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
            lines, ops = self._annotations(source)
            return Step(name, "", GLUE, tuple(reads), self._with_roots(writes), (), name, source, lines, ops=ops)
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

    def _annotations(self, source: str) -> tuple[tuple[Origin, ...], tuple[str, ...]]:
        """Where each line of a kernel comes from, and its operators in order; lines that define no value are glue."""
        origins: list[Origin] = []
        ops: list[str] = []
        for line in source.splitlines():
            found = DEFINITION.match(line)
            value = self.made.values.get(f"{found['name']} = {found['value']}") if found else None
            origins.append(value.origin if value else GLUE)
            ops += [value.op] if value else []
        return tuple(origins), tuple(ops)

    def _note_alias(self, statement: ast.Assign) -> None:
        """`buf2 = reinterpret_tensor(buf1, ...)  # alias`: what is written to buf2 is written to buf1."""
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
        """By statement, the names that it gives to (parts of) what a library call returned: `buf2 = buf1[0]`."""
        lines = self.made.text.splitlines()
        results: set[str] = set()
        names: dict[int, list[str]] = {}
        for at, (statement, step) in enumerate(zip(body, found, strict=True)):
            if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
                continue
            if step is not None:
                results.update(name.id for name in statement.targets if isinstance(name, ast.Name))
            elif lines[statement.lineno - 1].endswith("# reuse"):
                continue  # the memory of a result, for another one that is still to come
            elif isinstance(statement.value, ast.Subscript | ast.Name) and _base(statement.value) in results:
                names.setdefault(at, []).append(statement.targets[0].id)
        return names

    def _lives(self, name: str, body: list[ast.stmt], at: int) -> bool:
        """Whether a name means something after a statement."""
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
        """From the comment that stands above a call, else from what its buffers hold."""
        lines = self.made.text.splitlines()
        for line in reversed(lines[max(0, statement.lineno - 3) : statement.lineno - 1]):
            handle = _HANDLE.search(line)
            if handle and handle.group(1) in self.made.nodes:
                return self.made.nodes[handle.group(1)]
        return [self.made.holds[b] for b in step.writes if b in self.made.holds]

    def _unique(self, name: str) -> str:
        count = sum(step.name.partition("#")[0] == name for step in self.steps)
        return f"{name}#{count + 1}" if count else name


def _replaced(step: Step, name: str, origin: Origin, values: tuple[str, ...]) -> Step:
    return replace(step, name=name, origin=origin, values=values)


def _hook(name: str, number: int, *arguments: str) -> ast.stmt:
    text = ", ".join((str(number), *arguments))
    return ast.parse(f"{name}({text})").body[0]


def _base(node: ast.expr) -> str:
    """The buffer that an argument is, or is a view of; empty for what is no buffer."""
    match node:
        case ast.Name(name):
            return name
        case ast.Subscript(value):
            return _base(value)
        case ast.Call(func=ast.Name("reinterpret_tensor"), args=[first, *_]):
            return _base(first)
        case _:
            return ""


def _kernels(tree: ast.Module) -> Iterator[tuple[str, tuple[str, tuple[bool, ...]]]]:
    """The C++ of each kernel and, by parameter, whether it may write to it: a pointer to what is not const."""
    for statement in tree.body:
        match statement:
            case ast.Assign(
                [ast.Name(name)], ast.Call(ast.Attribute(attr="cpp_pybinding"), [types, ast.Constant(text)])
            ):
                declared = ast.literal_eval(types)
                yield name, (str(text), tuple("*" in each and not each.startswith("const") for each in declared))


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for a setting that Inductor does not have."""
    known = config.get_config_copy()
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            guess = f"did you mean {near[0]!r}?" if near else "see torch._inductor.config"
            raise UserError(f"Inductor has no setting {name!r}", hint=guess)
