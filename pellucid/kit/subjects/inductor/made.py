"""What Inductor generates for a graph, recorded while it compiles: its module, its variables, and its refusals."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch._inductor.debug
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor.codegen.common import CSE
from torch._inductor.codegen.cpp import (
    VECTORIZABLE_DTYPES,
    CppKernelProxy,
    CppScheduling,
    CppVecKernel,
    KernelOpStats,
    TilingSelect,
)
from torch._inductor.codegen.cpp_utils import _get_dtype_from_loopbodies, _get_loop_body
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler, SchedulerNode, WhyNoFuse
from torch._inductor.virtualized import V

from pellucid.capture.fx import origin_of
from pellucid.ir.origin import Origin, merge
from pellucid.kit.subjects.base import Fusion
from pellucid.kit.subjects.inductor.facts import Loops, loops_of
from pellucid.kit.subjects.inductor.unfused import category_of
from pellucid.kit.subjects.refusals import CPP_NAMES, Value

# The number of non-contiguous accesses from which on `TilingSelect` does not vectorise.
_STRIDED_LIMIT = 35
# Occurs in C++ that computes the elements of a vector one by one.
_ELEMENT_BY_ELEMENT = "tmpbuf_out"


Variables: TypeAlias = "Mapping[str, Sequence[Value]]"


@dataclass(frozen=True, slots=True)
class Undone:
    """A refusal: its kind (see `refusals.Refusal`), its buffers, why, and for a fusion its category."""

    kind: str
    buffers: tuple[str, ...]
    why: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The criteria by which Inductor chose the vector loops of a kernel."""

    dtypes: set[torch.dtype]
    stats: KernelOpStats


@dataclass(frozen=True, slots=True)
class Made:
    """What Inductor generated for a graph.

    text: its Python module. graph: the FX graph after its passes. holds: by buffer, the FX node whose result it is.
    constants: the constants that the text refers to, by name. nodes: by provenance handle, names of FX nodes. values:
    by kernel, for each of its calls, its variables by their defining text; loops of one kernel may define several
    variables by the same text, in order. undone: what was not fused or vectorised. fused: the fusions, in order.
    loops: what each kernel moves and computes, by its name. before_fusion, after_fusion: the loops as Inductor prints
    them. seconds: of each stage. loaded: the namespace of the loaded module, with its kernels; empty before.
    """

    text: str
    graph: torch.fx.GraphModule
    holds: Mapping[str, str]
    constants: Mapping[str, Any]
    nodes: Mapping[str, Sequence[str]]
    values: Mapping[str, Sequence[Variables]] = field(default_factory=dict)
    undone: Sequence[Undone] = ()
    loops: Mapping[str, Loops] = field(default_factory=dict)
    before_fusion: str = ""
    after_fusion: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    fused: Sequence[Fusion] = ()
    loaded: dict[str, Any] = field(default_factory=dict)


# PyTorch's names of the times of each stage.
_TIMERS = {
    "transform": ("_recursive_post_grad_passes",),
    "lower": ("GraphLowering.run",),
    "schedule": ("Scheduler.__init__",),
    "codegen": ("Scheduler.codegen", "PythonWrapperCodegen.generate"),
    "build": ("PyCodeCache.load_by_key_path",),
}


@contextmanager
def listening(made: list[Made], most: int | None = None) -> Iterator[None]:
    """Append to `made` what Inductor generates for each graph that it compiles in this context.

    most: the maximum number of fusions; None for no limit.
    """
    before = _times()
    with ExitStack() as stack:
        for owner, name, replacement in _Listener(made, most).hooks():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
    if made:
        made[-1].seconds.update({stage: seconds - before[stage] for stage, seconds in _times().items()})


def _times() -> dict[str, float]:
    """Seconds in each stage since the process began."""
    known = compilation_time_metrics
    return {stage: sum(sum(known.get(name, ())) for name in names) for stage, names in _TIMERS.items()}


class _Listener:
    """Wraps functions of Inductor, and records their arguments and results."""

    def __init__(self, made: list[Made], most: int | None = None) -> None:
        self.made, self.most = made, most
        self.variables: dict[str, list[Value]] = {}  # of the kernel that is being written
        self.values: dict[str, list[Variables]] = {}
        self.fusions: list[Fusion] = []
        self.undone: dict[Undone, None] = {}
        self.loops: dict[str, Loops] = {}
        self.tiling: _Tiling | None = None  # of the kernel that is being written
        self.scalar: list[str] = []  # why each of its loops is not vectorised
        self.before_fusion = ""
        self.fused_loops: Sequence[tuple[str, str]] = ()  # after fusion: the first loop of each, and the text
        self.kernels: dict[str, str] = {}  # the kernel of each loop

    def hooks(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """The classes and methods to replace, each with its replacement, whose first argument is the method."""
        for owner, name, hear in (
            (torch._inductor.debug, "log_ir_pre_fusion", self.scheduled),
            (torch._inductor.debug, "log_ir_post_fusion", self.fused),
            (GraphLowering, "codegen", self.wrote),
            (GraphLowering, "compile_to_module", self.loaded),
            (CSE, "generate", self.defined),
            (WhyNoFuse, "__call__", self.unfused),
            (TilingSelect, "select_tiling", self.tiled),
            (CppKernelProxy, "codegen_nodes", self.looped),
            (CppScheduling, "define_kernel", self.kernel),
            (Scheduler, "can_fuse", self.may_fuse),
            (Scheduler, "fuse_two_nodes", self.fuse),
        ):
            yield owner, name, _method(hear, getattr(owner, name))

    def scheduled(self, log: Callable[..., Any], nodes: Sequence[BaseSchedulerNode]) -> None:
        """The graph was lowered to loops."""
        log(nodes)
        self.before_fusion = _printed(nodes)

    def fused(self, log: Callable[..., Any], nodes: Sequence[BaseSchedulerNode]) -> None:
        """The loops were fused."""
        log(nodes)
        self.fused_loops = tuple((node.get_first_name(), node.debug_str()) for node in nodes)

    def wrote(self, codegen: Callable[..., Any], lowering: GraphLowering) -> Any:
        """Inductor generated the module of a graph."""
        result = codegen(lowering)
        handles = torch._inductor.debug._inductor_triton_kernel_to_post_grad_node_info
        made = Made(
            result[0].value,
            lowering.module,  # type: ignore[arg-type]
            holds_of(lowering),
            dict(lowering.constants),
            {key: list(names) for key, names in handles.items()},
            dict(self.values),
            tuple(self.undone),
            dict(self.loops),
            self.before_fusion,
            _by_kernel(self.fused_loops, self.kernels),
            fused=tuple(self.fusions),
        )
        self.made.append(made)
        return result

    def loaded(self, load: Callable[..., Any], lowering: GraphLowering) -> Any:
        """The module was imported."""
        module = load(lowering)
        if self.made:
            self.made[-1].loaded.update(vars(module))
        return module

    def defined(self, generate: Callable[..., Any], cse: CSE, buffer: Any, expression: Any, **about: Any) -> Any:
        """A variable was defined in a kernel."""
        made = generate(cse, buffer, expression, **about)
        node = getattr(V.interpreter, "current_node", None)
        if node is None:
            return made
        if isinstance(expression, str):
            value = _value(str(node.target), about.get("dtype"))
            self.variables.setdefault(f"{made} = {expression}", []).append(value)
        elif _ELEMENT_BY_ELEMENT in getattr(expression, "getvalue", str)():
            why = f"ops.{node.target} has no vector form: it is computed one element at a time"
            self.undone[Undone("vectorisation", _buffers(_current()), why)] = None
        return made

    def kernel(
        self, define: Callable[..., str], scheduling: CppScheduling, text: str, nodes: Any, args: Any = None
    ) -> str:
        """A kernel was written; the name of an equal earlier kernel is reused."""
        name = define(scheduling, text, nodes, args)
        scalar = self.scalar[0] if self.scalar and all(self.scalar) else ""
        self.loops[name] = loops_of(nodes, scheduling.kernel_group.args if args is None else args, scalar)
        self.values.setdefault(name, []).append(self.variables)
        self.kernels.update((node.get_name(), name) for each in nodes for node in each.get_nodes())
        self.variables, self.scalar = {}, []
        return name

    def may_fuse(self, can_fuse: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Whether two loops may be fused."""
        return (self.most is None or len(self.fusions) < self.most) and can_fuse(*args, **kwargs)

    def fuse(self, fuse: Callable[..., Any], scheduler: Scheduler, first: Any, second: Any, *args: Any) -> Any:
        """Two loops are fused."""
        self.fusions.append(Fusion(_results(first.get_nodes()), _results(second.get_nodes())))
        return fuse(scheduler, first, second, *args)

    def unfused(self, refuse: Callable[..., Any], pair: WhyNoFuse, reason: str, *args: Any) -> None:
        """Two loops were not fused."""
        refuse(pair, reason, *args)
        names = tuple(name.replace("op", "buf") for name in (pair.name1, pair.name2))
        self.undone[Undone("fusion", names, reason % args, category_of(pair.name1, pair.name2, reason))] = None

    def tiled(self, select: Callable[..., Any], tiling: TilingSelect, functions: Sequence[Any], sizes: Any) -> Any:
        """The loops of a kernel to vectorise were chosen."""
        factors, indices, stats = select(tiling, functions, sizes)
        self.tiling = _Tiling(_dtypes(functions), stats)
        return factors, indices, stats

    def looped(self, codegen: Callable[..., Any], proxy: CppKernelProxy, nodes: Sequence[SchedulerNode]) -> None:
        """The loops of a kernel were written, with vectors or without."""
        self.tiling = None
        codegen(proxy, nodes)
        vectors = any(isinstance(kernel, CppVecKernel) for kernel in proxy.kernels)
        self.scalar.append("" if vectors else _why_scalar(proxy, self.tiling))
        if not vectors:
            self.undone[Undone("vectorisation", _buffers(nodes), self.scalar[-1])] = None


def _method(hear: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hear(method, *args, **kwargs)


def _by_kernel(loops: Sequence[tuple[str, str]], kernels: Mapping[str, str]) -> str:
    """The text of loops, in one named block per kernel, as Pellucid prints its own."""
    parts: list[str] = []
    for kernel, some in itertools.groupby(loops, lambda each: kernels.get(each[0], "")):
        text = textwrap.indent("\n\n".join(text for _, text in some), "    " if kernel else "  ")
        parts.append(f"  kernel {kernel} {{\n{text}\n  }}" if kernel else text)
    return "program {\n" + "\n\n".join(parts) + "\n}\n"


def _printed(nodes: Iterable[BaseSchedulerNode]) -> str:
    return "\n\n".join(node.debug_str() for node in nodes) + "\n"


def _buffers(nodes: Iterable[SchedulerNode]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for node in nodes for name in node.get_buffer_names()))


def _dtypes(functions: Sequence[Any]) -> set[torch.dtype]:
    return set(_get_dtype_from_loopbodies(_get_loop_body(functions)))


def _why_scalar(proxy: CppKernelProxy, tiling: _Tiling | None) -> str:
    """Why a kernel is not vectorised, by the rules of `TilingSelect`."""
    if not proxy.picked_vec_isa:
        return "no vector instructions: cpp.simdlen forbids them, or none of this processor are supported"
    if tiling is None:
        return "a single element: there is no loop"
    narrow = [str(dtype).removeprefix("torch.") for dtype in tiling.dtypes if dtype not in VECTORIZABLE_DTYPES]
    if narrow:
        return f"no vectors of {', '.join(sorted(narrow))}"
    strided, ops = (sum(c.values()) for c in (tiling.stats.non_contig_indexing_op_counter, tiling.stats.op_counter))
    if strided >= _STRIDED_LIMIT or (strided > 0 and strided / ops >= KernelOpStats.OVERHEAD_RATIO_THRESHOLD):
        return f"{strided} of {ops} operations access memory with a stride or through an index: vectors would not pay"
    return "the inner loop is shorter than a quarter of a vector, and does little work"


def _current() -> list[SchedulerNode]:
    """The part of a kernel that is being written; empty if there is none."""
    current = getattr(V.kernel, "current_node", None)
    return [] if current is None else [current]


def _origins(nodes: Iterable[Any]) -> list[torch.fx.Node]:
    """The FX nodes behind loops, in graph order."""
    return sorted({node for each in nodes if each.node is not None for node in each.node.get_origins()})


def _origin(nodes: Iterable[Any]) -> Origin:
    return merge(map(origin_of, _origins(nodes)))


def _results(nodes: Sequence[Any]) -> Origin:
    """The nodes that loops compute, without the views that they read through if Inductor knows them."""
    whole = [each.node.get_origin_node() for each in nodes if each.node is not None]
    return merge(origin_of(node) for node in whole) if whole and all(whole) else _origin(nodes)


def _value(op: str, dtype: torch.dtype | None) -> Value:
    """A variable of the kernel that is being written; its origin is the FX node of this operator, if there is one."""
    origins = _origins(_current())
    named = [node for node in origins if op in str(node.target)]
    origin = merge(map(origin_of, named or origins))
    return Value(op, CPP_NAMES.get(dtype, "") if dtype is not None else "", origin)


def holds_of(lowering: Any) -> dict[str, str]:
    """By buffer, the FX node whose whole result it is. Buffers that no kernel stores any more are omitted, even if they
    still have memory, that of the buffer that they were to reuse.
    """
    found: dict[str, str] = {}
    unstored = lowering.removed_buffers | lowering.inplaced_to_remove
    for name, buffer in lowering.name_to_buffer.items():
        node = buffer.get_origin_node()
        if node is None or name in unstored:
            continue
        value = node.meta.get("val")
        try:
            size = tuple(buffer.get_size())
        except (NotImplementedError, AttributeError, AssertionError):
            continue
        if isinstance(value, torch.Tensor) and tuple(map(str, value.shape)) == tuple(map(str, size)):
            found[name] = node.name
    return found
