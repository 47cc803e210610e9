"""Everything that is taken from PyTorch's private API, so that a new release touches one file."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters, flatten_graph_inputs, get_debug_dir, get_metrics_context
from torch._functorch import config as aot_settings
from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult, SerializedGraphModule
from torch._functorch._aot_autograd.descriptors import (
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch._aot_autograd.graph_compile import _compute_indices_of_inps_to_detach
from torch._functorch._aot_autograd.runtime_wrappers import EffectTokensWrapper
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._functorch.aot_autograd import aot_module_simplified, prepare_aot_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._logging._internal import getArtifactLogger, trace_structured_artifact
from torch._prims_common import compute_elementwise_output_strides, make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as symbol_settings
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import CallMethodKey, DimDynamic, ShapeEnv, resolve_unbacked_bindings
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
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
    "compute_again",
    "contiguous_strides",
    "current_graph_name",
    "debug_folder",
    "decomposed_call",
    "decomposition_table",
    "depends_on_floats",
    "derived_in",
    "dynamo_seconds",
    "elementwise_strides",
    "expr_of",
    "fake_graph",
    "fake_mode_of",
    "fake_result",
    "fake_symbols",
    "is_fake",
    "is_symbolic",
    "kept_results",
    "key_get",
    "keystr",
    "needed_by",
    "next_autograd_number",
    "parameters_of",
    "plain_name",
    "profiling",
    "quiet_fake_tensors",
    "real_tensors",
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
    "users_results",
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
    witness: Witness | None = None,
) -> Callable[..., Any]:
    """Functionalise, decompose and (for training) differentiate a Dynamo graph, compiling each resulting graph.

    joint: a pass on forward and backward as one graph, before it is cut in two. witness: is told what `resume` needs.
    The compilers return functions in the boxed calling convention: one list of arguments, which they may empty.
    Mutations of inputs stay in the graph as `copy_` at its end. Compiled autograd puts a list among the inputs.
    """
    if any(isinstance(each, list | tuple | dict) for each in example_inputs):
        again = partial(capture_with_aot, forward=forward, backward=backward, inference=inference,
                        decompositions=decompositions, joint=joint)  # fmt: skip
        return flatten_graph_inputs(graph_module, example_inputs, again)

    # Where DDP has a graph cut into parts, PyTorch tells by this count that AOTAutograd has compiled one.
    counters["aot_autograd"]["total"] += 1

    def partition(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return min_cut_rematerialization_partition(joint(graph), *args, **kwargs)

    if witness is not None:
        forward, inference = (witness.forward(each) for each in (forward, inference))
        backward = witness.backward(backward)
    run = aot_module_simplified(
        graph_module,
        example_inputs,
        fw_compiler=cast(Any, forward),
        bw_compiler=cast(Any, _out_of_sight(backward)),
        inference_compiler=cast(Any, _with_parameters(inference)),
        decompositions=decompositions,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    if witness is not None:
        witness.captured()
    return run


@dataclass(frozen=True, slots=True)
class Captured:
    """What AOTAutograd found out about a Dynamo graph, as far as the compiled graphs need it to be called.

    metadata: of its arguments and results. detached: arguments that get no gradient. guards: all that is known of its
    sizes. traced: the backward graph, pickled, which compiled autograd traces again; empty without one.
    """

    metadata: Any
    detached: tuple[int, ...]
    guards: tuple[Any, ...]
    traced: bytes


class NotResumable(Exception):
    """A graph cannot start without being compiled; the message says why."""


@dataclass(slots=True)
class Witness:
    """Sees a Dynamo graph being compiled, and tells, once all is there, what `resume` takes to start it again.

    That is at the end of capture, or where there is a backward graph at the first backward pass.
    tell: gets what was found out, and what the compilers of the forward and the backward graph returned; or why such a
    graph cannot be resumed. shared: whether some of the arguments share memory.
    """

    tell: Callable[[Captured | NotResumable, Any, Any], None]
    shared: bool
    _metadata: Any = None
    _forward: list[Any] = field(default_factory=list)
    _trains: bool = False
    _backward: Any = None
    _detached: tuple[int, ...] = ()
    _traced: bytes = b""
    _guards: tuple[Any, ...] | None = None
    _failed: str = ""

    def forward(self, compiler: Compiler) -> Compiler:
        def compile_seen(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            run = compiler(graph, inputs)
            self._metadata = TracingContext.get().fw_metadata
            self._trains = self._metadata.num_symints_saved_for_bw is not None
            self._forward.append(run)
            return run

        return compile_seen

    def backward(self, compiler: Compiler) -> Compiler:
        def compile_seen(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            self._backward = compiler(graph, inputs)
            try:
                self._detached = tuple(_compute_indices_of_inps_to_detach(graph, None, self._metadata, self._metadata))
                self._traced = _pickled(graph)
            except Exception as error:
                self._failed = f"its backward graph cannot be written down: {error}"
            self._tell()
            return self._backward

        return compile_seen

    def captured(self) -> None:
        env = _tracing_env()
        self._guards = () if env is None else tuple(guard.expr for guard in env.guards)
        self._tell()

    def _tell(self) -> None:
        if self._guards is None or (self._trains and self._backward is None):
            return
        reason = self._failed or self._why_not()
        if reason:
            return self.tell(NotResumable(reason), None, None)
        metadata = copy.copy(self._metadata)
        metadata.bw_donated_idxs = []  # the compiled graphs take over no buffers
        metadata.tokens = dict.fromkeys(range(len(metadata.tokens)))  # their number counts
        found = Captured(metadata, self._detached, self._guards, self._traced)
        self.tell(found, self._forward[0], self._backward)

    def _why_not(self) -> str:
        if len(self._forward) != 1:
            return "it was compiled in parts"
        seen = self._metadata
        tensors = (*seen.subclass_inp_meta, *seen.subclass_fw_graph_out_meta, *seen.subclass_tangent_meta)
        if not all(isinstance(each, PlainTensorMeta) for each in tensors):
            return "its arguments or results are of a subclass of torch.Tensor"
        if seen.num_backward_tokens or seen.num_graphsafe_rng_states:
            return "its backward graph calls operators with effects"
        changed = any(each.mutates_data or each.mutates_metadata for each in seen.input_info)
        return "it changes arguments, and some share memory" if self.shared and changed else ""


def resume(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    captured: Captured,
    forward: Callable[[list[Any]], list[Any]],
    backward: Callable[[list[Any]], list[Any]] | None,
) -> Callable[..., Any]:
    """What `capture_with_aot` would return, from graphs that were compiled before; nothing is traced."""
    counters["aot_autograd"]["total"] += 1
    metadata = captured.metadata
    config = prepare_aot_config(graph_module, example_inputs, None, True, False)[-1]
    forward = EffectTokensWrapper().post_compile(forward, config, runtime_metadata=metadata)
    run = GenericAOTAutogradResult(
        compiled_fw=cast(Any, _Resumed(forward)),
        compiled_bw=cast(Any, backward and _Resumed(_unseen(backward), metadata.num_symints_saved_for_bw)),
        aot_joint_graph_str=None,
        aot_forward_graph_str=None,
        aot_backward_graph_str=None,
        min_cut_info_str=None,
        runtime_metadata=metadata,
        dispatch_wrappers=[],
        maybe_subclass_meta=None,
        num_fw_outs_saved_for_bw=None,
        indices_of_inps_to_detach=list(captured.detached),
        forward_time_taken_ns=0,
        backward_time_taken_ns=0,
        sanitized_aot_config=config.to_cacheable(),
        guards_expr=None,
        serialized_bw_module=cast(Any, _Traced(captured.traced)) if backward else None,
    ).wrap_post_compile([], config, cast(Any, {}))

    def call(*args: Any) -> Any:
        return run(list(args))

    return call


@dataclass(slots=True)
class _Resumed:
    """A compiled graph as AOTAutograd's results have them."""

    run: Any
    num_symints_saved_for_bw_: int | None = None
    backward_state_indices: list[int] = field(default_factory=list)

    def load(self, _inputs: Sequence[Any]) -> Any:
        return self.run

    def post_compile(self, run: Any, _settings: object) -> Any:
        return run


@dataclass(frozen=True, slots=True)
class _Traced:
    """A backward graph that is read when compiled autograd asks for it."""

    data: bytes

    def deserialize(self) -> torch.fx.GraphModule:
        return pickle.loads(self.data).deserialize()


def _pickled(graph: torch.fx.GraphModule) -> bytes:
    written = SerializedGraphModule(graph)
    attributes, *rest = written.args
    written.args = ({**attributes, "meta": {}}, *rest)
    return pickle.dumps(written)


def _tracing_env() -> ShapeEnv | None:
    """The shape environment of the Dynamo graph that is being compiled."""
    context = TracingContext.try_get()
    return context.fake_mode.shape_env if context and context.fake_mode else None


def unmet(guards: Sequence[Any]) -> str:
    """The first of the `Captured.guards` that does not hold for the sizes of now; empty where all hold."""
    env = _tracing_env()
    known = env.backed_var_to_val if env else {}
    return next((str(guard) for guard in guards if guard.xreplace(known) != True), "")  # noqa: E712 (SymPy's)


def adopt(guards: Sequence[Any]) -> None:
    """Have Dynamo guard what was known when a graph was compiled."""
    env = _tracing_env()
    if env is None:
        return
    present = {guard.expr for guard in env.guards}
    for guard in guards:
        if guard not in present and not bool(torch.SymBool(SymNode(guard, env, bool, True))):
            raise NotResumable(f"{guard} does not hold")


def is_traced_by_dynamo() -> bool:
    """Whether Dynamo is compiling a frame, and no transform of functions is at work: only then are guards heard."""
    return TracingContext.try_get() is not None and peek_interpreter_stack() is None


def dynamo_argument(node: torch.fx.Node, given: Any) -> tuple[Any, str]:
    """An argument of a Dynamo graph with symbolic sizes, and where in the user's program it comes from."""
    marks = sorted(node.meta.get("tensor_dict") or ())
    return node.meta.get("example_value", given), f"{getattr(node, '_dynamo_source', None)!r} {marks}"


def holds_subclass(node: torch.fx.Node) -> bool:
    """Whether the value of a node of a Dynamo graph is, or holds, a tensor that stands for others."""
    return any(is_traceable_wrapper_subclass(each) for each in tree_leaves(node.meta.get("example_value")))


def known_sizes() -> str:
    """What the shape environment assumes of symbols from the start; guards come later."""
    env = _tracing_env()
    return "" if env is None else f"{env.settings} {sorted(map(str, env.unbacked_inputs))}"


def range_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
    """The range of a symbol's values."""
    ranges = value.node.shape_env.var_to_range
    return ", ".join(f"{each} in {ranges.get(each)}" for each in sorted(value.node.expr.free_symbols, key=str))


def front_end_settings() -> str:
    """PyTorch's settings that decide what AOTAutograd makes of a graph."""
    plain = (bool, int, float, str, type(None))
    return "; ".join(
        f"{name}={value if isinstance(value, plain) else type(value).__qualname__}"
        for settings in (aot_settings, symbol_settings)
        for name, value in sorted(settings.get_config_copy().items())
    )


def asserts_gradients() -> bool:
    """Whether AOTAutograd is asked to check its promises at run time."""
    return aot_settings.debug_assert


def traces() -> bool:
    """Whether `TORCH_TRACE` listens."""
    return bool(os.environ.get("TORCH_TRACE"))


def counted(outcome: str) -> None:
    """Count an outcome of `reuse` where PyTorch counts those of its own caches."""
    counters["pellucid"][outcome] += 1


def _with_parameters(compiler: Compiler) -> Compiler:
    """A compiler whose graph says which of its arguments are parameters and buffers, for `parameters_of`."""

    def compile_marked(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context else None
        given = graph.graph.find_nodes(op="placeholder")
        for position in metadata.static_input_indices if metadata else ():
            given[position].meta["pellucid_parameter"] = True
        return compiler(graph, inputs)

    return compile_marked


def parameters_of(graph_module: torch.fx.GraphModule) -> tuple[str, ...]:
    """The names of a graph's arguments that are parameters or buffers: the same tensors at each call, as a rule."""
    given = graph_module.graph.find_nodes(op="placeholder")
    return tuple(node.name for node in given if node.meta.get("pellucid_parameter"))


def users_results(graph_module: torch.fx.GraphModule) -> list[int]:
    """Which of a graph's results AOTAutograd hands to the user as they are: not those that backward gets, for example.

    None of a graph that does not say so.
    """
    described = graph_module.graph.output_node().meta.get("desc") or ()
    return [position for position, each in enumerate(described) if isinstance(each, PlainAOTOutput)]


def compute_again(node: torch.fx.Node) -> None:
    """Have the partitioner put a call of a joint graph into backward too, rather than keep its result."""
    node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


def kept_results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Those of a forward graph's results that are there for backward."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]
    saved = SavedForBackwardsAOTOutput | SavedForBackwardsNoVcCheckAOTOutput
    return [node for node, each in described if isinstance(each, saved)]


def _out_of_sight(backward: Compiler) -> Compiler:
    """A compiler that Dynamo does not capture: who calls `loss.backward()` in a compiled function calls it there."""

    def compile_unseen(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        return _unseen(_disabled(backward)(graph, inputs))

    return compile_unseen


def _unseen(run: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    def run_unseen(args: list[Any]) -> list[Any]:
        return run(args)

    run_unseen._boxed_call = True  # type: ignore[attr-defined]
    return _disabled(run_unseen)


def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    disable = cast(Any, torch.compiler.disable)
    return disable(function, reason="Pellucid compiles and runs a backward graph")


def decomposition_table(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of the operators with these names (`native_batch_norm`, `addcmul`, ...)."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return get_decompositions(packets)


def suggested_format(x: torch.Tensor) -> torch.memory_format:
    """The memory format in which ATen makes a result that follows the layout of `x`."""
    return suggest_memory_format(x)


def elementwise_strides(first: torch.Tensor, second: torch.Tensor) -> tuple[int, ...]:
    """The strides of what ATen makes of two tensors element by element; either has the shape of the result, or none."""
    return compute_elementwise_output_strides(first, second)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return make_contiguous_strides_for(shape)


@contextmanager
def real_tensors() -> Iterator[None]:
    """For work on tensors with elements while a graph is compiled: without fake tensors, gradients or autocast."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def decomposed_call(node: torch.fx.Node, table: Mapping[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """What a call becomes under a table of decompositions: a graph of its `all_input_nodes`, with fake results."""
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


def module_of(node: torch.fx.Node) -> tuple[str, str]:
    """The `nn.Module` whose `forward` made `node`, or the forward node of its gradient: its path, `blocks.1.norm`, and
    its class, `LayerNorm`.

    The path is empty for the compiled module itself and where there is none. The roots `self`, and `fn` where PyTorch
    calls a module of its own (`nn.Sequential`), are the compiled module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ("", None)}
    path, kind = list(stack.values())[-1]
    kind = kind.__name__ if isinstance(kind, type) else str(kind or "").rpartition(".")[2]  # a text in `torch.export`
    name = re.sub(r"^[LG]\['(\w+)'\]", lambda root: "" if root[1] in ("self", "fn") else root[1], str(path))
    return re.sub(r"\._modules\['([^']*)'\]|\['?([^']*?)'?\]", r".\1\2", name).strip("."), kind


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


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without elements, with which graphs are traced."""
    return isinstance(value, FakeTensor)


def autograd_number() -> int | None:
    """The number of the node whose gradient autograd computes at the moment; None outside a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_autograd_number() -> int:
    """The number of the next node that autograd makes in this thread."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


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
