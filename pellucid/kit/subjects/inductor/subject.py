"""Inductor as a `Subject`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config, cpp_builder
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor

from pellucid.capture.fx import origin_of
from pellucid.errors import UserError, near
from pellucid.ir.origin import merge
from pellucid.kit.process.child import chain_of
from pellucid.kit.process.sanitizer import FLAGS
from pellucid.kit.programs.graphs import Graph, GraphCompiler, interpret, twin
from pellucid.kit.subjects.base import (
    Captured,
    Compiled,
    Fusion,
    Interpreted,
    Partial,
    Passed,
    Probe,
    Rung,
    Subject,
    Undecomposed,
    refusal,
)
from pellucid.kit.subjects.inductor.loops import Loops
from pellucid.kit.subjects.inductor.made import Made, holds_of, listening
from pellucid.kit.subjects.inductor.text import Instrumented, as_program, refused_kernel
from pellucid.kit.subjects.inductor.timing import timed_module
from pellucid.kit.subjects.plain import front_rungs
from pellucid.kit.subjects.refusals import Refusal, Refused
from pellucid.trace.fx_programs import Constants

# A cache could return code that another version of the compiler generated, for example a patched one.
_SETTINGS: dict[str, Any] = {
    "force_disable_caches": True,
    "fallback_random": True,  # eager's random numbers, so that runs can be compared
    "comment_origin": False,
    "trace.provenance_tracking_level": 1,
}
_MADE = "_pellucid_made"
# A kernel that compiles quickly; it has vector code, because that needs other compiler flags.
_SMALLEST = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(0.0f).store(out); }
"""


@dataclass(frozen=True, slots=True)
class Inductor(Subject):
    """Stock TorchInductor of the installed torch; `options` are settings of `torch._inductor.config` by their names.

    most_fusions: the maximum per graph that `compile` is given; None for no limit.
    """

    most_fusions: int | None = None

    demands = 2  # graphs without operators that it decomposes

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
        return _InductorCompiled(graph, self.options, self.most_fusions)

    def fusing(self, most: int) -> Inductor:
        return replace(self, most_fusions=most)

    def timed(self, graph: Graph) -> Callable[[list[Any]], Sequence[Any]]:
        return _InductorCompiled(graph, self.options, self.most_fusions).timed(graph.name)

    def clocked(self, fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
        numbers = itertools.count()

        def compiler(kind: str) -> GraphCompiler:
            def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
                return self.timed(Graph(f"{kind}_{next(numbers)}", kind, module, tuple(inputs)))

            return compile_graph

        return torch.compile(fn, backend=self.capturing(compiler), dynamic=dynamic)

    def warm_up(self) -> None:
        """Detect the vector instructions and precompile the headers, which takes a second and more in each process."""
        with suppress(Exception):  # the first graph raises the same error, and reports it
            valid_vec_isa_list()
            CppPythonBindingsCodeCache.load_pybinding(["float*"], _SMALLEST)

    def keep_kernels(self, folder: Path) -> None:
        """Inductor names a kernel's file by a hash of its text, so only caches of whole graphs could hide a change."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        _SETTINGS.update(force_disable_caches=False, fx_graph_cache=False, fx_graph_remote_cache=False)

    def sanitized(self) -> Subject:
        valid_vec_isa_list()  # now, because it tests them in a subprocess without the sanitizers' libraries
        flags = cpp_builder._get_optimization_cflags

        def with_sanitizers(*given: Any) -> tuple[list[str], list[str]]:
            compiling, linking = flags(*given)
            return [*compiling, *(flag.removeprefix("-") for flag in FLAGS)], linking

        cpp_builder._get_optimization_cflags = with_sanitizers
        return Inductor({**self.options, "allow_buffer_reuse": False, "inplace_buffers": False})

    def refused(self, error: BaseException) -> Refused | None:
        failed = next((each for each in chain_of(error) if isinstance(each, CppCompileError)), None)
        made: Made | None = getattr(error, _MADE, None)
        return refused_kernel(failed, made) if failed is not None and made is not None else None

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        with config.patch({**_SETTINGS, **self.options}):  # they determine how random numbers are decomposed
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
    """Graphs whose operators are evaluated by the loops that Inductor lowers them to; all others run eagerly."""

    def compile(self, graph: Graph) -> Compiled:
        lowering = lowering_of(graph, self.base.options, "codegen")
        return Interpreted(graph.module) if lowering is None else _LoweredCompiled(lowering)


class _LoweredCompiled(Compiled):
    def __init__(self, lowering: GraphLowering) -> None:
        self.graph, self.steps = _module_of(lowering), ()
        self._lowering = lowering
        self._buffers = {node: buffer for buffer, node in holds_of(lowering).items()}

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        loops = Loops(self._lowering, inputs)

        def see(node: torch.fx.Node, value: Any) -> Any:
            buffer = self._buffers.get(node.name)
            return loops.value(buffer, value) if buffer and isinstance(value, torch.Tensor) else value

        return interpret(self.graph, inputs, see)


class _InductorCompiled(Compiled):
    """A graph that Inductor compiled."""

    def __init__(self, graph: Graph, options: Mapping[str, Any], most: int | None) -> None:
        made: list[Made] = []
        try:
            with listening(made, most):
                self._call = _compiled(graph, options)
        except Exception as error:
            if made:
                setattr(error, _MADE, made[-1])  # the generated code, for `refused`
            raise
        if not made:  # Inductor returns an empty graph unchanged
            made.append(Made("def call(args):\n    return list(args)\n", graph.module, {}, {}, {}))
        self._made = made[-1]
        self.graph, self.seconds = self._made.graph, self._made.seconds
        self._module = Instrumented(self._made)
        self.steps = tuple(self._module.steps)

    def texts(self, constants: Constants) -> Mapping[str, str]:
        return {
            "ir_pre_fusion.txt": self._made.before_fusion,
            "ir_post_fusion.txt": self._made.after_fusion,
            "output_code.py": as_program(self._made, constants),
        }

    def fusions(self) -> Sequence[Fusion]:
        return self._made.fused

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        nodes = {node.name: node for node in self.graph.graph.nodes}
        for undone in self._made.undone:
            # The names of fused loops consist of the names of all their buffers.
            held = [self._made.holds.get(name) for names in undone.buffers for name in names.split("_")]
            origin = merge(origin_of(nodes[name]) for name in held if name in nodes)
            yield refusal(undone.kind, undone.buffers, undone.why, origin, undone.category)

    def timed(self, name: str) -> Callable[[list[Any]], Any]:
        """The graph as it runs without probes, recording its times while a clock is on."""
        return timed_module(name, self._made, self._call)

    def run(self, inputs: Sequence[Any], probe: Probe | None = None) -> Sequence[Any]:
        with torch.no_grad():
            return self._call(list(inputs)) if probe is None else self._module.run(list(inputs), probe)


def _compiled(graph: Graph, options: Mapping[str, Any]) -> Any:
    """A graph compiled by Inductor; `graph` stays unchanged."""
    about: dict[str, Any] = {"is_inference": graph.kind == "inference", "is_backward": graph.kind == "backward"}
    with config.patch({**_SETTINGS, **options}), torch.no_grad():
        return compile_fx_inner(twin(graph.module), _examples(graph), **about)


class _Reached(BaseException):
    """Stops compilation; a BaseException, so that nothing in between handles it."""

    def __init__(self, lowering: GraphLowering) -> None:
        super().__init__()
        self.lowering = lowering


def lowering_of(graph: Graph, options: Mapping[str, Any], method: str) -> GraphLowering | None:
    """Inductor's lowering of a graph just before the call of one of its methods: `run`, which lowers the graph after
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
    """The fake inputs that the graph is compiled for. Inputs of a graph that is being captured have the real strides
    of what the forward graph saves; all others are taken from the metadata of placeholders.
    """
    nodes = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    pairs = zip(nodes, graph.inputs, strict=True)
    return [value if isinstance(value, FakeTensor) else node.meta.get("val", value) for node, value in pairs]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UserError for a setting that Inductor does not have."""
    known = config.get_config_copy()
    for name in options:
        if name not in known:
            hint = near(name, known) or "see torch._inductor.config"
            raise UserError(f"Inductor has no setting {name!r}", hint=hint)
