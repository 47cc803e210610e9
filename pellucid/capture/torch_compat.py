"""Everything that is taken from PyTorch's private API, so that a new release touches one file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import flatten_graph_inputs, get_debug_dir, get_metrics_context
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, detect_fake_mode
from torch._logging._internal import getArtifactLogger, trace_structured_artifact
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import CallMethodKey, DimDynamic, ShapeEnv, resolve_unbacked_bindings
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import (
    KeyPath,
    SequenceKey,
    key_get,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_unflatten,
)
from typing_extensions import TypeIs

from pellucid.capture.symbolic import Symbolic
from pellucid.ir.derived import Derived, Float, Term
from pellucid.ir.index import Expr, const, sym

__all__ = [
    "KeyPath",
    "artifact_logger",
    "capture_with_aot",
    "current_graph_name",
    "debug_folder",
    "decomposition_table",
    "depends_on_floats",
    "derived_in",
    "dynamo_seconds",
    "expr_of",
    "fake_graph",
    "fake_mode_of",
    "fake_result",
    "fake_symbols",
    "is_symbolic",
    "key_get",
    "keystr",
    "needed_by",
    "plain_name",
    "profiling",
    "quiet_fake_tensors",
    "repro_after",
    "size_hint",
    "stride_of",
    "structured_artifact",
    "symbol_paths",
    "symbolic_of",
    "term_of",
    "traced_anew",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unbacked_bindings",
    "user_frames",
]

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list[Any]], list[Any]]]


def capture_with_aot(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    decompositions: dict[Any, Callable[..., Any]],
    joint: Callable[[torch.fx.GraphModule], torch.fx.GraphModule],
) -> Callable[..., Any]:
    """Functionalise, decompose and (for training) differentiate a Dynamo graph, compiling each resulting graph.

    joint: a pass on forward and backward as one graph, before it is cut in two.
    The compilers return functions in the boxed calling convention: one list of arguments, which they may empty.
    Mutations of inputs stay in the graph as `copy_` at its end. Compiled autograd puts a list among the inputs.
    """
    if any(isinstance(each, list | tuple | dict) for each in example_inputs):
        again = partial(capture_with_aot, forward=forward, backward=backward, inference=inference,
                        decompositions=decompositions, joint=joint)  # fmt: skip
        return flatten_graph_inputs(graph_module, example_inputs, again)

    def partition(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(joint(graph), *args, **kwargs)

    return aot_module_simplified(
        graph_module,
        example_inputs,
        fw_compiler=cast(Any, forward),
        bw_compiler=cast(Any, _out_of_sight(backward)),
        inference_compiler=cast(Any, inference),
        decompositions=decompositions,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def _out_of_sight(backward: Compiler) -> Compiler:
    """A compiler that Dynamo does not capture: who calls `loss.backward()` in a compiled function calls it there."""
    unseen = cast(Any, partial(torch.compiler.disable, reason="Pellucid compiles and runs a backward graph"))

    def compile_unseen(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        run = unseen(backward)(graph, inputs)

        def run_unseen(args: list[Any]) -> list[Any]:
            return run(args)

        run_unseen._boxed_call = True  # type: ignore[attr-defined]
        return unseen(run_unseen)

    return compile_unseen


def decomposition_table(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of the operators with these names (`native_batch_norm`, `addcmul`, ...)."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return get_decompositions(packets)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """For calls that may fail: fake tensors log the error that they raise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


# Stands for a size that depends on data, where an example is needed.
_DATA_DEPENDENT = 8


def size_hint(value: int | torch.SymInt) -> int:
    """The size that `value` had when the graph was captured, or an example where it depends on data."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    if value.node.has_hint():
        return cast(int, value.node.hint)
    unknown = dict.fromkeys(value.node.expr.free_symbols, _DATA_DEPENDENT)
    return int(value.node.expr.xreplace({**unknown, **value.node.shape_env.backed_var_to_val}))


def is_symbolic(value: object) -> TypeIs[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """True for SymInt, SymFloat and SymBool, but not for a jagged dimension: a name of its offsets, not a number."""
    if isinstance(value, torch.SymInt) and isinstance(value.node.hint if value.node.has_hint() else 0, torch.SymInt):
        return False
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def stride_of(value: int | torch.SymInt) -> Expr:
    """A stride in the project's own index algebra, see `Symbolic.stride`."""
    return expr_of(value, stride=True)


def expr_of(value: int | torch.SymInt, *, stride: bool = False) -> Expr:
    """A size of Dynamo's shape environment in the project's own index algebra.

    What the algebra has no form for becomes a symbol, whose meaning `derived_in` tells.
    """
    if not isinstance(value, torch.SymInt):
        return const(int(value))
    number = value.node.maybe_as_int()
    if number is not None:
        return const(number)
    symbolic = symbolic_of(value.node.shape_env)
    return symbolic.stride(value.node.expr) if stride else symbolic.integer(value.node.expr)


def term_of(value: Any) -> Term:
    """How a SymInt, SymFloat, SymBool or number is computed from the symbols of its shape environment."""
    if not is_symbolic(value):
        return const(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return symbolic_of(value.node.shape_env).term(value.node.expr)


def derived_in(value: Any, *, stride: bool = False) -> dict[str, Derived]:
    """The derived integers that `expr_of` or `term_of` names in `value`, each after those that it is made of."""
    if not is_symbolic(value):
        return {}
    symbolic, expression = symbolic_of(value.node.shape_env), value.node.expr
    return symbolic.derived(symbolic.plain_stride(expression) if stride else expression)


def needed_by(value: Any, *, stride: bool = False) -> dict[str, torch.SymInt]:
    """The integers that a program must be told to know `value`, see `Symbolic.needed`."""
    if not is_symbolic(value):
        return {}
    shape_env, expression = value.node.shape_env, value.node.expr
    symbolic = symbolic_of(shape_env)
    needed = symbolic.needed(symbolic.plain_stride(expression) if stride else expression)
    return {name: torch.SymInt(SymNode(each, shape_env, int, None)) for name, each in needed.items()}


def depends_on_floats(value: Any) -> bool:
    """Whether a float that is no function of sizes is part of the SymInt, SymFloat or SymBool `value`."""
    return is_symbolic(value) and symbolic_of(value.node.shape_env).depends_on_floats(term_of(value))


def unbacked_bindings(node: torch.fx.Node) -> dict[str, KeyPath]:
    """The symbols whose values come to light with the result of `node`, and where in it."""
    bindings: dict[Any, KeyPath] = node.meta.get("unbacked_bindings") or {}
    shape_env = next(map(_shape_env, tree_leaves(node.meta.get("val"))), None) if bindings else None
    if shape_env is None:
        return {}
    found: dict[str, KeyPath] = {}
    for symbol, path in (resolve_unbacked_bindings(shape_env, bindings) or {}).items():
        term = symbolic_of(shape_env).term(shape_env.replace(symbol))
        name = plain_name(term)
        if name is not None:
            found[name] = path
    return found


def fake_result(node: torch.fx.Node) -> Any:
    """The fake result of `node` for the fake values of its arguments."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    modes = [value.fake_mode for value in tree_leaves((args, kwargs)) if isinstance(value, FakeTensor)]
    if not modes:
        return node.meta.get("val")
    with modes[0]:
        return cast(Any, node.target)(*args, **kwargs)


def fake_graph(
    module: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode | None = None
) -> torch.fx.GraphModule:
    """The graph, each of whose nodes now carries the fake tensor that it makes of (static) inputs like these.

    mode: the inputs are fake tensors of this one already.
    """
    made = mode or FakeTensorMode(allow_non_fake_inputs=True)
    propagation = FakeTensorProp(module, made)
    with enable_python_dispatcher():  # without it operators made of others take no symbols
        (propagation.propagate if mode is None else propagation.propagate_dont_convert_inputs)(*inputs)
    return module


def traced_anew(function: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode) -> torch.fx.GraphModule:
    """The graph of the operators that a function calls on these inputs, fake tensors of `mode`."""
    with mode, torch.no_grad():
        return make_fx(function)(*inputs)


def fake_symbols(values: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A mode for fake tensors, with symbols of these names that had these values when they were captured."""
    shape_env = ShapeEnv()
    symbols: dict[str, torch.SymInt] = {}
    for name, value in values.items():
        source, size = ConstantSource(name), value > 1  # a size of 0 or 1 would be taken for a constant
        symbol = shape_env.create_symbol(
            value, source, DimDynamic.DYNAMIC, None, positive=size or None, do_not_specialize_zero_one=not size
        )
        symbols[name] = cast(torch.SymInt, shape_env.create_symintnode(symbol, hint=value, source=source))
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True), symbols


def symbol_paths(value: Any) -> dict[str, KeyPath]:
    """The symbols that a (fake) value tells: it is one, or a size, a stride or the offset of a tensor in it is."""
    found: dict[str, KeyPath] = {}

    def note(term: Term, *path: Any) -> None:
        name = plain_name(term)
        if name is not None:
            found.setdefault(name, path)

    for path, leaf in tree_leaves_with_path(value):
        if is_symbolic(leaf):
            note(term_of(leaf), *path)
        elif isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            for k, size in enumerate(leaf.shape):
                note(term_of(size), *path, CallMethodKey("size"), SequenceKey(k))
            for k, stride in enumerate(leaf.stride()):
                note(term_of(stride), *path, CallMethodKey("stride"), SequenceKey(k))
            note(term_of(leaf.storage_offset()), *path, CallMethodKey("storage_offset"))
    return found


def plain_name(term: Term) -> str | None:
    """The name of the symbol that `term` is, or None when it is more than that."""
    if isinstance(term, Float):
        return term.name
    names = list(term.syms()) if isinstance(term, Expr) else []
    return names[0] if names and term == sym(names[0]) else None


def _shape_env(value: Any) -> Any:
    """The shape environment of a symbolic number, or of the sizes of a fake tensor."""
    if is_symbolic(value):
        return value.node.shape_env
    return value.fake_mode.shape_env if isinstance(value, FakeTensor) else None


_SYMBOLIC: WeakKeyDictionary[Any, Symbolic] = WeakKeyDictionary()


def symbolic_of(shape_env: Any) -> Symbolic:
    """The one `Symbolic` of a shape environment."""
    if shape_env not in _SYMBOLIC:
        _SYMBOLIC[shape_env] = Symbolic(shape_env)
    return _SYMBOLIC[shape_env]


def fake_mode_of(graph: torch.fx.Graph) -> Any:
    """The mode under which the tensors that the nodes of a captured graph carry were made: operators run on them."""
    return detect_fake_mode([node.meta["val"] for node in graph.nodes if node.op == "placeholder"])


def user_frames(node: torch.fx.Node) -> str:
    """The stack trace of the user's code that made `node`, outermost frame first; empty if unknown."""
    return node.meta.get("stack_trace") or ""


def artifact_logger(name: str) -> Any:
    """The logger of one of TorchInductor's artifact names (`ir_pre_fusion`, `output_code`, ...).

    These names are registered with `TORCH_LOGS` by PyTorch itself, and mean the same things here. The logger lies
    below `torch`, because PyTorch attaches its handlers there.
    """
    return getArtifactLogger("torch.pellucid", name)


def structured_artifact(name: str, encoding: str, make: Callable[[], str]) -> None:
    """Give a text to `TORCH_TRACE`, for `tlparse`; without that nothing is made. encoding: `string` or `json`."""
    trace_structured_artifact(name, encoding, make)


def debug_folder() -> Path | None:
    """Where `TORCH_COMPILE_DEBUG=1` has this process write, if it is set."""
    return Path(get_debug_dir()) if os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1" else None


def repro_after() -> str | None:
    """What `TORCHDYNAMO_REPRO_AFTER` asks for: `dynamo`, `aot` or nothing."""
    return dynamo_config.repro_after


def profiling() -> bool:
    """Whether torch.profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


def dynamo_seconds() -> float | None:
    """How long Dynamo has been at work on the frame that is being compiled; None where there is none."""
    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) * 1e-9 if context.in_progress() else None


def current_graph_name() -> str:
    """Dynamo's identifier of the frame being compiled (`0/1`: frame and recompilation), or empty."""
    compile_id = CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else ""
