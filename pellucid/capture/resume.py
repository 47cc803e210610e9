"""Resuming a graph that was compiled before: the uses of PyTorch's private API for that.

A `Witness` records how AOTAutograd captures a Dynamo graph; from its record, `resume` builds a function that calls the
compiled graphs in another process. The other functions return what determines whether a graph is the same one.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.utils import counters
from torch._functorch import config as aot_settings
from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult, SerializedGraphModule
from torch._functorch._aot_autograd.graph_compile import _compute_indices_of_inps_to_detach
from torch._functorch._aot_autograd.runtime_wrappers import EffectTokensWrapper
from torch._functorch._aot_autograd.schemas import PlainTensorMeta
from torch._functorch.aot_autograd import prepare_aot_config
from torch._guards import TracingContext
from torch.fx.experimental import _config as symbol_settings
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from pellucid.capture.torch_compat import Compiler, hidden_from_dynamo


@dataclass(frozen=True, slots=True)
class Captured:
    """AOTAutograd's facts about a Dynamo graph that are needed to call the compiled graphs.

    metadata: of its arguments and results. detached: arguments that get no gradient. guards: on its sizes.
    traced: the backward graph, pickled, which compiled autograd traces again; empty without one.
    """

    metadata: Any
    detached: tuple[int, ...]
    guards: tuple[Any, ...]
    traced: bytes


class NotResumable(Exception):
    """A graph cannot be resumed without compiling it; the message is the reason."""


@dataclass(slots=True)
class Witness:
    """Records the compilation of a Dynamo graph, and reports, once it is complete, what `resume` needs.

    It is complete at the end of capture, or, if there is a backward graph, at the first backward pass.
    report: is passed the facts, and what the compilers of the forward and the backward graph returned; or the reason
    why the graph cannot be resumed. shared: whether some of the arguments share memory.
    """

    report: Callable[[Captured | NotResumable, Any, Any], None]
    shared: bool
    _metadata: Any = None
    _forwards: list[Any] = field(default_factory=list)
    _trains: bool = False
    _backward: Any = None
    _detached: tuple[int, ...] = ()
    _traced: bytes = b""
    _guards: tuple[Any, ...] | None = None
    _failed: str = ""

    def compilers(self, forward: Compiler, backward: Compiler, inference: Compiler) -> dict[str, Compiler]:
        """These compilers, wrapped to be recorded: arguments of `capture_with_aot`; call `captured` after it."""
        return {
            "forward": self._recorded_forward(forward),
            "backward": self._recorded_backward(backward),
            "inference": self._recorded_forward(inference),
        }

    def captured(self) -> None:
        """Record that AOTAutograd is done."""
        env = _tracing_env()
        self._guards = () if env is None else tuple(guard.expr for guard in env.guards)
        self._report()

    def _recorded_forward(self, compiler: Compiler) -> Compiler:
        def compile_recorded(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            run = compiler(graph, inputs)
            self._metadata = TracingContext.get().fw_metadata
            self._trains = self._metadata.num_symints_saved_for_bw is not None
            self._forwards.append(run)
            return run

        return compile_recorded

    def _recorded_backward(self, compiler: Compiler) -> Compiler:
        def compile_recorded(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            self._backward = compiler(graph, inputs)
            try:
                self._detached = tuple(_compute_indices_of_inps_to_detach(graph, None, self._metadata, self._metadata))
                self._traced = _pickled(graph)
            except Exception as error:
                self._failed = f"its backward graph cannot be serialised: {error}"
            self._report()
            return self._backward

        return compile_recorded

    def _report(self) -> None:
        if self._guards is None or (self._trains and self._backward is None):
            return
        reason = self._failed or self._why_not()
        if reason:
            return self.report(NotResumable(reason), None, None)
        metadata = copy.copy(self._metadata)
        metadata.bw_donated_idxs = []  # the compiled graphs overwrite no donated buffers
        metadata.tokens = dict.fromkeys(range(len(metadata.tokens)))  # only their number matters
        found = Captured(metadata, self._detached, self._guards, self._traced)
        self.report(found, self._forwards[0], self._backward)

    def _why_not(self) -> str:
        if len(self._forwards) != 1:
            return "it was compiled in parts"
        metadata = self._metadata
        tensors = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
        if not all(isinstance(each, PlainTensorMeta) for each in tensors):
            return "its arguments or results are of a subclass of torch.Tensor"
        if metadata.num_backward_tokens or metadata.num_graphsafe_rng_states:
            return "its backward graph calls operators with effects"
        changed = any(each.mutates_data or each.mutates_metadata for each in metadata.input_info)
        return "it changes arguments, and some share memory" if self.shared and changed else ""


def resume(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    captured: Captured,
    forward: Callable[[list[Any]], list[Any]],
    backward: Callable[[list[Any]], list[Any]] | None,
) -> Callable[..., Any]:
    """The function that `capture_with_aot` would return, from graphs compiled before; nothing is traced."""
    counters["aot_autograd"]["total"] += 1
    metadata = captured.metadata
    config = prepare_aot_config(graph_module, example_inputs, None, True, False)[-1]
    forward = EffectTokensWrapper().post_compile(forward, config, runtime_metadata=metadata)
    run = GenericAOTAutogradResult(
        compiled_fw=cast(Any, _Resumed(forward)),
        compiled_bw=cast(Any, backward and _Resumed(hidden_from_dynamo(backward), metadata.num_symints_saved_for_bw)),
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
    """A compiled graph with the interface that AOTAutograd's results expect."""

    run: Any
    num_symints_saved_for_bw_: int | None = None
    backward_state_indices: list[int] = field(default_factory=list)

    def load(self, _inputs: Sequence[Any]) -> Any:
        return self.run

    def post_compile(self, run: Any, _settings: object) -> Any:
        return run


@dataclass(frozen=True, slots=True)
class _Traced:
    """A backward graph that is deserialised when compiled autograd needs it."""

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
    """The first of the `Captured.guards` that does not hold for the current sizes; empty if all hold."""
    env = _tracing_env()
    known = env.backed_var_to_val if env else {}
    return next((str(guard) for guard in guards if guard.xreplace(known) != True), "")  # noqa: E712 (SymPy's)


def adopt(guards: Sequence[Any]) -> None:
    """Add the guards of a compiled graph to Dynamo's; raises `NotResumable` if one does not hold."""
    env = _tracing_env()
    if env is None:
        return
    present = {guard.expr for guard in env.guards}
    for guard in guards:
        if guard not in present and not bool(torch.SymBool(SymNode(guard, env, bool, True))):
            raise NotResumable(f"{guard} does not hold")


def is_traced_by_dynamo() -> bool:
    """Whether Dynamo is compiling a frame outside of functorch transforms: only then do guards take effect."""
    return TracingContext.try_get() is not None and peek_interpreter_stack() is None


def dynamo_argument(node: torch.fx.Node, given: Any) -> tuple[Any, str]:
    """An argument of a Dynamo graph with symbolic sizes, and its source in the user's program."""
    marks = sorted(node.meta.get("tensor_dict") or ())
    return node.meta.get("example_value", given), f"{getattr(node, '_dynamo_source', None)!r} {marks}"


def holds_subclass(node: torch.fx.Node) -> bool:
    """Whether the value of a node of a Dynamo graph is, or contains, a wrapper subclass of tensors."""
    return any(is_traceable_wrapper_subclass(each) for each in tree_leaves(node.meta.get("example_value")))


def known_sizes() -> str:
    """The shape environment's initial assumptions about symbols, before any guards."""
    env = _tracing_env()
    return "" if env is None else f"{env.settings} {sorted(map(str, env.unbacked_inputs))}"


def range_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
    """The range of a symbol's values."""
    ranges = value.node.shape_env.var_to_range
    return ", ".join(f"{each} in {ranges.get(each)}" for each in sorted(value.node.expr.free_symbols, key=str))


def front_end_settings() -> str:
    """PyTorch's settings that affect how AOTAutograd captures a graph."""
    plain = (bool, int, float, str, type(None))
    return "; ".join(
        f"{name}={value if isinstance(value, plain) else type(value).__qualname__}"
        for settings in (aot_settings, symbol_settings)
        for name, value in sorted(settings.get_config_copy().items())
    )


def asserts_gradients() -> bool:
    """Whether AOTAutograd checks its assumptions at run time."""
    return aot_settings.debug_assert


def traces() -> bool:
    """Whether `TORCH_TRACE` is set."""
    return bool(os.environ.get("TORCH_TRACE"))


def counted(outcome: str) -> None:
    """Count an outcome of `reuse` in PyTorch's counters, as its own caches do."""
    counters["pellucid"][outcome] += 1
