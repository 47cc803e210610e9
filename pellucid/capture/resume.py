"""Starting a graph that was compiled before: what is taken from PyTorch's private API for that.

A `Witness` sees AOTAutograd capture a Dynamo graph; from what it tells `resume` makes a function that calls the
compiled graphs, in another process. The rest says all that decides whether a graph is the same one.
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

from pellucid.capture.torch_compat import Compiler, unseen


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
    _forwards: list[Any] = field(default_factory=list)
    _trains: bool = False
    _backward: Any = None
    _detached: tuple[int, ...] = ()
    _traced: bytes = b""
    _guards: tuple[Any, ...] | None = None
    _failed: str = ""

    def compilers(self, forward: Compiler, backward: Compiler, inference: Compiler) -> dict[str, Compiler]:
        """These compilers, seen at work: arguments of `capture_with_aot`, after which `captured` is to be called."""
        return {
            "forward": self._forward_seen(forward),
            "backward": self._backward_seen(backward),
            "inference": self._forward_seen(inference),
        }

    def captured(self) -> None:
        """AOTAutograd is done."""
        env = _tracing_env()
        self._guards = () if env is None else tuple(guard.expr for guard in env.guards)
        self._tell()

    def _forward_seen(self, compiler: Compiler) -> Compiler:
        def compile_seen(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
            run = compiler(graph, inputs)
            self._metadata = TracingContext.get().fw_metadata
            self._trains = self._metadata.num_symints_saved_for_bw is not None
            self._forwards.append(run)
            return run

        return compile_seen

    def _backward_seen(self, compiler: Compiler) -> Compiler:
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
        self.tell(found, self._forwards[0], self._backward)

    def _why_not(self) -> str:
        if len(self._forwards) != 1:
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
        compiled_bw=cast(Any, backward and _Resumed(unseen(backward), metadata.num_symints_saved_for_bw)),
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
