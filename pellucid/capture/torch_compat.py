"""All uses of PyTorch's private API, so that a new release affects one file; those for resuming are in `resume.py`."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, flatten_graph_inputs, get_debug_dir, get_metrics_context
from torch._functorch._aot_autograd.descriptors import (
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._logging._internal import getArtifactLogger, trace_structured_artifact
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    DimDynamic,
    ShapeEnv,
    resolve_unbacked_bindings,
    statically_known_true,
)
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
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
from torch.utils.checkpoint import CheckpointPolicy
from typing_extensions import TypeIs

from pellucid.capture.symbolic import Symbolic
from pellucid.ir.derived import Derived, Float, Term
from pellucid.ir.index import Expr, const, sym

__all__ = [
    "KeyPath",
    "artifact_logger",
    "autograd_number",
    "capture_with_aot",
    "contiguous_strides",
    "current_graph_name",
    "debug_folder",
    "decomposed_call",
    "decomposition_table",
    "depends_on_floats",
    "derived_in",
    "donated_of",
    "dynamo_seconds",
    "elementwise_strides",
    "expr_of",
    "fake_graph",
    "fake_mode_of",
    "fake_result",
    "fake_symbols",
    "graph_module_of",
    "is_fake",
    "is_known",
    "is_symbolic",
    "is_unshared",
    "key_get",
    "keystr",
    "needed_by",
    "next_autograd_number",
    "parameters_of",
    "plain_name",
    "prefer_recompute",
    "profiling",
    "quiet_fake_tensors",
    "real_tensors",
    "repro_after",
    "resized_shape",
    "results_of_user",
    "saved_results",
    "size_hint",
    "stride_of",
    "structured_artifact",
    "symbol_paths",
    "symbolic_of",
    "term_of",
    "trace_function",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "unbacked_bindings",
    "user_frames",
]

# Keys in `Node.meta` that mark arguments.
_PARAMETER, _DONATED = "pellucid_parameter", "pellucid_donated"

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

    joint: a pass on the joint graph, before it is partitioned.
    The compilers return functions in the boxed calling convention: one list of arguments, which they may empty.
    Mutations of inputs stay in the graph as `copy_` at its end. Compiled autograd puts a list among the inputs.
    """
    if any(isinstance(each, list | tuple | dict) for each in example_inputs):
        again = partial(capture_with_aot, forward=forward, backward=backward, inference=inference,
                        decompositions=decompositions, joint=joint)  # fmt: skip
        return flatten_graph_inputs(graph_module, example_inputs, again)

    # Where DDP has split a graph, PyTorch reads from this counter whether AOTAutograd has compiled a part.
    counters["aot_autograd"]["total"] += 1

    def partition(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(joint(graph), *args, **kwargs)

    with _undecomposed_before_autograd(decompositions):
        return aot_module_simplified(
            graph_module,
            example_inputs,
            fw_compiler=cast(Any, forward),
            bw_compiler=cast(Any, _hidden_from_dynamo(backward)),
            inference_compiler=cast(Any, _with_parameters(inference)),
            decompositions=decompositions,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )


@contextmanager
def _undecomposed_before_autograd(decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Have autograd see the operators of `interpolate` whose gradients the table decomposes as single operators.

    Otherwise PyTorch would decompose them before autograd, and gradients would be those of their parts. `.vec`, the
    overload that `interpolate` calls, is decomposed by the table.
    """
    forms = [form for form in decompositions if form.__name__.endswith(".vec") and _has_gradient(form, decompositions)]
    operators = [operator for form in forms for operator in (form, form.overloadpacket.default)]
    saved = [(operator, dict(operator.py_kernels)) for operator in operators]
    try:
        for operator, kernels in saved:
            for key in _BEFORE_GRADIENTS & kernels.keys():
                del operator.py_kernels[key]
                if operator in forms:
                    operator.py_kernels[key] = decompositions[operator]
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in saved:
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


_BEFORE_GRADIENTS = {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd}


def _has_gradient(operator: Any, decompositions: Mapping[Any, object]) -> bool:
    packet = getattr(torch.ops.aten, f"{operator.overloadpacket.__name__}_backward", None)
    return packet is not None and packet.default in decompositions


def _with_parameters(compiler: Compiler) -> Compiler:
    """Wrap a compiler so that arguments that are parameters or buffers are marked, for `parameters_of`."""

    def compile_marked(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        metadata = _metadata()
        given = graph.graph.find_nodes(op="placeholder")
        for position in metadata.static_input_indices if metadata else ():
            given[position].meta[_PARAMETER] = True
        return compiler(graph, inputs)

    return compile_marked


def parameters_of(graph_module: torch.fx.GraphModule) -> tuple[str, ...]:
    """The names of a graph's arguments that are parameters or buffers: usually the same tensors at every call."""
    return _marked(graph_module, _PARAMETER)


def donated_of(graph_module: torch.fx.GraphModule) -> tuple[str, ...]:
    """The names of a backward graph's arguments that are not read after it, see `is_unshared`."""
    return _marked(graph_module, _DONATED)


def _marked(graph_module: torch.fx.GraphModule, mark: str) -> tuple[str, ...]:
    given = graph_module.graph.find_nodes(op="placeholder")
    return tuple(node.name for node in given if node.meta.get(mark))


def _metadata() -> Any:
    """AOTAutograd's metadata of the graph that is being compiled, or None."""
    context = TracingContext.try_get()
    return context.fw_metadata if context else None


def is_unshared(args: list[Any], position: int) -> bool:
    """Whether an argument of backward that forward saved may be overwritten: nothing else holds a reference to it.

    Other references exist if the graph is retained for another backward pass, or if a hook on saved tensors kept one.
    """
    native, tensor = cast(Any, torch._C), args[position]
    if native._autograd._get_current_graph_task_keep_graph():
        return False
    storage = tensor.untyped_storage()  # is one of the references counted
    counts = tensor._use_count(), native._storage_Use_Count(storage._cdata)
    del tensor, storage
    return counts == (1, 2) and _references(args, position) == _ALONE


def _references(args: list[Any], position: int) -> int:
    return sys.getrefcount(args[position])


_ALONE = _references([object()], 0)  # the count for an object that only a list refers to


def results_of_user(graph_module: torch.fx.GraphModule) -> list[int]:
    """The positions of a graph's results that AOTAutograd returns to the user unchanged: not those saved for backward.

    Empty for a graph without that information.
    """
    described = graph_module.graph.output_node().meta.get("desc") or ()
    return [position for position, each in enumerate(described) if isinstance(each, PlainAOTOutput)]


def prefer_recompute(node: torch.fx.Node) -> None:
    """Have the partitioner recompute a call of a joint graph in backward, rather than save its result."""
    node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def must_save(node: torch.fx.Node) -> None:
    """Have the partitioner compute a call of a joint graph in forward and save its result for backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def saved_results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The results of a forward graph that are saved for backward."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]
    saved = SavedForBackwardsAOTOutput | SavedForBackwardsNoVcCheckAOTOutput
    return [node for node, each in described if isinstance(each, saved)]


def _hidden_from_dynamo(backward: Compiler) -> Compiler:
    """Wrap a compiler so that Dynamo does not capture it: `loss.backward()` in a compiled function may call it."""

    def compile_hidden(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        _mark_donated(graph)
        return hidden_from_dynamo(_disabled(backward)(graph, inputs))

    return compile_hidden


def _mark_donated(graph: torch.fx.GraphModule) -> None:
    """Mark the arguments that AOTAutograd donates to backward, for `donated_of`, except those that share memory.

    If AOTAutograd still listed them as donated, it would refuse to run backward again over a retained graph.
    """
    metadata = _metadata()
    if metadata is None or not metadata.bw_donated_idxs:
        return
    given = graph.graph.find_nodes(op="placeholder")
    tensors = {node: node.meta["val"] for node in given if is_fake(node.meta["val"])}
    storages = {node: StorageWeakRef(tensor.untyped_storage()) for node, tensor in tensors.items()}
    holders = Counter(storages.values())
    for node in (given[position] for position in metadata.bw_donated_idxs):
        node.meta[_DONATED] = node in storages and holders[storages[node]] == 1
    metadata.bw_donated_idxs = []


def hidden_from_dynamo(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """Wrap a compiled graph so that Dynamo does not capture its calls."""

    def run_hidden(args: list[Any]) -> list[Any]:
        return run(args)

    run_hidden._boxed_call = True  # type: ignore[attr-defined]
    return _disabled(run_hidden)


def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disable = cast(Any, torch.compiler.disable)
    return disable(function, reason="Pellucid compiles and runs a backward graph")


def decomposition_table(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of the operators with these names (`native_batch_norm`, `addcmul`, ...)."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return get_decompositions(packets)


def resized_shape(before: Sequence[Any], after: Sequence[Any] | None, scales: Sequence[float] | None) -> Sequence[Any]:
    """The sizes to which `interpolate` resizes an image of shape `before`; either sizes or scales are None."""
    return cast(Sequence[Any], upsample_compute_output_size(before, after, scales))


def suggested_format(x: torch.Tensor) -> torch.memory_format:
    """The memory format of an ATen result that follows the layout of `x`."""
    return suggest_memory_format(x)


def convolution_format(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *steps: Any
) -> torch.memory_format:
    """The memory format of a convolution's result and of the gradients of `x` and `weight`. steps: as in ATen."""
    backend = torch._C._select_conv_backend(x, weight, bias, *steps)
    return torch._C._conv_determine_backend_memory_format(x, weight, backend)


def elementwise_strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """The strides of ATen's result of an element-wise operator. tensors: of its shape or without dimensions."""
    return compute_elementwise_output_strides(*tensors)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return make_contiguous_strides_for(shape)


@contextmanager
def real_tensors() -> Iterator[None]:
    """For computing on real tensors while a graph is compiled: without fake tensors, gradients or autocast."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def decomposed_call(node: torch.fx.Node, table: Mapping[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """A call decomposed by a table: a graph of its `all_input_nodes`, with fake results."""
    operands = node.all_input_nodes

    def call(*values: Any) -> Any:
        given = dict(zip(operands, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return cast(Any, node.target)(*args, **kwargs)

    examples = [operand.meta["val"] for operand in operands]
    mode = detect_fake_mode([leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)])
    with mode or nullcontext(), enable_python_dispatcher():
        return make_fx(call, decomposition_table=dict(table))(*examples)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """For calls that may fail: fake tensors log the error that they raise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


# The example value for a size that depends on data.
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


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether the condition holds for all sizes; adds no guard."""
    return statically_known_true(condition)


def depends_on_data(value: object) -> bool:
    """True for a number that depends on the data of tensors: it had no value when the graph was captured."""
    return is_symbolic(value) and not value.node.has_hint()


def stride_of(value: int | torch.SymInt) -> Expr:
    """A stride in the project's own index algebra, see `Symbolic.stride`."""
    return expr_of(value, stride=True)


def expr_of(value: int | torch.SymInt, *, stride: bool = False) -> Expr:
    """A size of Dynamo's shape environment in the project's own index algebra.

    What the algebra cannot express becomes a symbol, which `derived_in` defines.
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
    """The derived integers that `expr_of` or `term_of` names in `value`, each after those that it is computed from."""
    if not is_symbolic(value):
        return {}
    symbolic, expression = symbolic_of(value.node.shape_env), value.node.expr
    return symbolic.derived(symbolic.plain_stride(expression) if stride else expression)


def needed_by(value: Any, *, stride: bool = False) -> dict[str, torch.SymInt]:
    """The integers that a program needs as arguments to compute `value`, see `Symbolic.needed`."""
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
    """The symbols whose values the result of `node` determines, and the path of each in it."""
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


def call_in(graph: torch.fx.Graph, source: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """Add a call to `graph`, with its fake result; it has the origin of `source`, a node of another graph."""
    mode = detect_fake_mode([leaf for leaf in tree_leaves(source.meta["val"]) if isinstance(leaf, torch.Tensor)])
    fakes = torch.fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    with mode or nullcontext(), enable_python_dispatcher():
        made = cast(Any, target)(*fakes[0], **fakes[1])
    node = graph.call_function(target, args, kwargs)
    node.meta = {**source.meta, "val": made}
    return node


def fake_graph(
    module: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode | None = None
) -> torch.fx.GraphModule:
    """The graph, each of whose nodes now carries its fake result for (static) inputs like these.

    mode: that of the inputs, if they are fake tensors already.
    """
    made = mode or FakeTensorMode(allow_non_fake_inputs=True)
    propagation = FakeTensorProp(module, made)
    with enable_python_dispatcher():  # without it composite operators accept no symbols
        (propagation.propagate if mode is None else propagation.propagate_dont_convert_inputs)(*inputs)
    return module


def trace_function(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mode: FakeTensorMode | None = None,
    table: Mapping[Any, Callable[..., Any]] | None = None,
) -> torch.fx.GraphModule:
    """The graph of the operators that a function calls on these inputs, which are fake tensors.

    mode: that of the fake tensors, needed if there may be none. table: of decompositions.
    """
    with mode or detect_fake_mode(inputs), torch.no_grad():  # type: ignore[union-attr]
        return make_fx(function, decomposition_table=dict(table or {}))(*inputs)


def fake_symbols(values: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A mode for fake tensors, with symbols of these names whose hints are these values."""
    shape_env = ShapeEnv()
    symbols: dict[str, torch.SymInt] = {}
    for name, value in values.items():
        source, size = ConstantSource(name), value > 1  # a size of 0 or 1 would become a constant
        symbol = shape_env.create_symbol(
            value, source, DimDynamic.DYNAMIC, None, positive=size or None, do_not_specialize_zero_one=not size
        )
        symbols[name] = cast(torch.SymInt, shape_env.create_symintnode(symbol, hint=value, source=source))
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True), symbols


def symbol_paths(value: Any) -> dict[str, KeyPath]:
    """The symbols that a (fake) value determines: it is one, or a size, a stride or the offset of a tensor in it is."""
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
    """The name of the symbol that `term` is; None if it is not just a symbol."""
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


def graph_module_of(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """`graph` with the attributes of `root` that it names; its Python code is generated on first use."""
    return _LazyGraphModule(root, graph)


def fake_mode_of(graph: torch.fx.Graph) -> Any:
    """The mode of the fake tensors that the nodes of a captured graph carry: operators on them run under it."""
    return detect_fake_mode([node.meta.get("val") for node in graph.find_nodes(op="placeholder")])


@contextmanager
def without_guards(graph: torch.fx.Graph) -> Iterator[None]:
    """For code that compares sizes by their values at capture, without adding guards on the outcome."""
    shape_env = getattr(fake_mode_of(graph), "shape_env", None)
    with nullcontext() if shape_env is None else shape_env.suppress_guards():
        yield


def user_frames(node: torch.fx.Node) -> str:
    """The stack trace of the user's code that made `node`, outermost frame first; empty if unknown."""
    return node.meta.get("stack_trace") or ""


def module_of(node: torch.fx.Node) -> tuple[str, str]:
    """The `nn.Module` whose `forward` created `node`, or the forward node of its gradient: its path, `blocks.1.norm`,
    and its class, `LayerNorm`.

    The path is empty for the compiled module itself and where there is no module. The compiled module is the root
    `self`, or `fn` where PyTorch calls a module of its own (`nn.Sequential`).
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ("", None)}
    path, kind = list(stack.values())[-1]
    kind = kind.__name__ if isinstance(kind, type) else str(kind or "").rpartition(".")[2]  # a string in `torch.export`
    name = re.sub(r"^[LG]\['(\w+)'\]", lambda root: "" if root[1] in ("self", "fn") else root[1], str(path))
    return re.sub(r"\._modules\['([^']*)'\]|\['?([^']*?)'?\]", r".\1\2", name).strip("."), kind


def artifact_logger(name: str) -> Any:
    """The logger of one of TorchInductor's artifact names (`ir_pre_fusion`, `output_code`, ...).

    These names are registered with `TORCH_LOGS` by PyTorch itself, and mean the same here. The logger is a child of
    `torch`, because PyTorch attaches its handlers there.
    """
    return getArtifactLogger("torch.pellucid", name)


def structured_artifact(name: str, encoding: str, make: Callable[[], str]) -> None:
    """Write a text to `TORCH_TRACE`, for `tlparse`; without that `make` is not called. encoding: `string` or `json`."""
    trace_structured_artifact(name, encoding, make)


def debug_folder() -> Path | None:
    """The folder that `TORCH_COMPILE_DEBUG=1` has this process write to, None if it is not set."""
    return Path(get_debug_dir()) if os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1" else None


def repro_after() -> str | None:
    """The value of `TORCHDYNAMO_REPRO_AFTER`: `dynamo`, `aot` or None."""
    return dynamo_config.repro_after


def is_fake(value: Any) -> bool:
    """Whether a value is a fake tensor, with which graphs are traced."""
    return isinstance(value, FakeTensor)


def autograd_number() -> int | None:
    """The sequence number of the autograd node that is being computed; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_autograd_number() -> int:
    """The sequence number of the next autograd node created in this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def profiling() -> bool:
    """Whether torch.profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


def dynamo_seconds() -> float | None:
    """The seconds that Dynamo has spent so far on the frame that is being compiled; None if there is none."""
    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) * 1e-9 if context.in_progress() else None


def current_graph_name() -> str:
    """Dynamo's identifier of the frame being compiled (`0/1`: frame and recompilation), or empty."""
    compile_id = CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else ""
