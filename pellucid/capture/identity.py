"""The identity of a Dynamo graph as text: graphs with the same text are compiled to the same code.

Everything that AOTAutograd or the compiler may read of a graph, of its arguments, or of PyTorch's settings belongs
here. A graph with contents that no text describes completely is not resumable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pellucid.capture.fx import attribute_of
from pellucid.capture.resume import (
    NotResumable,
    asserts_gradients,
    dynamo_argument,
    front_end_settings,
    holds_subclass,
    is_traced_by_dynamo,
    known_sizes,
    range_of,
)
from pellucid.capture.torch_compat import is_fake, is_symbolic, user_frames

_PLAIN = (bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout)
_ARGUMENTS = (bool, int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)
# Namespaces of PyTorch's own operators: others may contain operators defined in Python code that no key covers.
_NAMESPACES = ("aten", "prims", "prim")
# Packages whose operators are identified by the package's version.
_LIBRARIES = ("transformers", "torchvision")


def identity(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[str, str]:
    """The identity of a graph, in parts: its calls, its arguments, their sizes, and the state of the compiling thread.

    Raises NotResumable.
    """
    if not isinstance(graph_module, torch.fx.GraphModule) or not is_traced_by_dynamo():
        raise NotResumable("it was not captured by Dynamo, or captured inside a functorch transform")
    if asserts_gradients():
        raise NotResumable("AOTAutograd checks its assumptions at run time (debug_assert)")
    if any(name.startswith("saved_tensors_hooks") for name in dir(graph_module)):
        raise NotResumable("it has hooks on saved tensors")
    if any(map(holds_subclass, graph_module.graph.nodes)):
        raise NotResumable("it computes with a subclass of torch.Tensor")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return {
        "graph": _graph_text(graph_module),
        "arguments": "\n".join(_arguments(placeholders, inputs)),
        "sizes": known_sizes(),
        "settings": front_end_settings(),
        **{name: str(value) for name, value in _modes().items()},
    }


def shares_memory(inputs: Sequence[Any]) -> bool:
    """Whether two arguments share memory."""
    memory = [each.untyped_storage()._cdata for each in inputs if isinstance(each, torch.Tensor)]
    return len(set(memory)) < len(memory)


def _graph_text(graph_module: torch.fx.GraphModule) -> str:
    nodes = (node for node in graph_module.graph.nodes if node.op != "placeholder")
    return "\n".join(_node_text(graph_module, node) for node in nodes)


def _inner_text(graph_module: torch.fx.GraphModule) -> str:
    """The text of a graph that an operator takes as an argument; raises unless its arguments have known types."""
    given = [(node.name, node.meta.get("example_value")) for node in graph_module.graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, torch.Tensor | torch.SymInt) for _, value in given):
        raise NotResumable("it holds a graph whose arguments are not known")
    kinds = (
        f"{name}: {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{name}: {value}"
        for name, value in given
    )
    return f"({', '.join(kinds)}) {{\n{_graph_text(graph_module)}\n}}"


def _node_text(owner: torch.fx.GraphModule, node: torch.fx.Node) -> str:
    match node.op:
        case "call_function":
            target = _function_text(node.target)
        case "call_method" | "output":
            target = str(node.target)
        case "get_attr" if isinstance(inner := attribute_of(owner, node), torch.fx.GraphModule):
            return f"{node.name} = graph {_inner_text(inner)}"
        case "get_attr":
            raise NotResumable(f"it holds {node.target}, whose content no key describes")
        case _:
            raise NotResumable(f"it calls the module {node.target}")
    args, kwargs = _argument_text(node.args), _argument_text(dict(node.kwargs))
    notes = [f"{name}={node.meta[name]!r}" for name in ("custom", "recompute", "partitioner_tag") if name in node.meta]
    return f"{node.name} = {node.op} {target} {args} {kwargs} {notes} {user_frames(node)}"


def _function_text(function: Any) -> str:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    if isinstance(function, torch._ops.HigherOrderOperator) and function.name() != "flex_attention":
        raise NotResumable(f"it calls {function.name()}, an operator on graphs")
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        namespace = str(function).partition(".")[0]
        if namespace in _NAMESPACES:
            return str(function)
        version = getattr(sys.modules.get(namespace), "__version__", None) if namespace in _LIBRARIES else None
        if version is None:
            raise NotResumable(f"it calls {function}, an operator that is not PyTorch's")
        return f"{function} of {namespace} {version}"
    if name.split(".")[0] not in ("torch", "math", "builtins", "_operator"):
        raise NotResumable(f"it calls {name}, a function that is not PyTorch's")
    return name


def _argument_text(value: Any) -> str:
    """An argument of a call; unlike `repr`, it is complete or raises."""
    match value:
        case torch.fx.Node():
            return f"%{value.name}"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_argument_text(item)}' for key, item in value.items())}}}"
        case slice():
            return f"slice{_argument_text((value.start, value.stop, value.step))}"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(_argument_text, value))})"
        case torch.memory_format():
            return str(value)
        case _ if isinstance(value, _PLAIN):
            return repr(value)
        case _ if is_symbolic(value):
            return str(value)
        case _:
            raise NotResumable(f"a call has an argument of type {type(value).__qualname__}")


def _arguments(placeholders: Sequence[torch.fx.Node], inputs: Sequence[Any]) -> Iterator[str]:
    """The texts of arguments, with symbolic sizes; those that share memory have the same memory number."""
    memory: dict[int, int] = {}
    for node, given in zip(placeholders, inputs, strict=True):
        value, origin = dynamo_argument(node, given)
        if isinstance(value, torch.Tensor):
            text = _tensor_text(value, given, memory)
        elif isinstance(value, _ARGUMENTS):
            text = f"{type(value).__name__} {value} {range_of(value) if is_symbolic(value) else ''}"
        else:
            raise NotResumable(f"it takes an argument of type {type(value).__qualname__}")
        yield f"{node.name}: {text} of {origin}"


def _tensor_text(fake: torch.Tensor, given: torch.Tensor, memory: dict[int, int]) -> str:
    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(given) not in kinds and not is_fake(given):
        raise NotResumable(f"it takes a tensor of type {type(given).__qualname__}")
    if fake.layout is not torch.strided or fake.device.type != "cpu":
        raise NotResumable(f"it takes a tensor on {fake.device} of layout {fake.layout}")
    number = memory.setdefault(given.untyped_storage()._cdata, len(memory))
    facts = (fake.requires_grad, fake.is_leaf, fake.is_conj(), fake.is_neg(), fake.is_inference(), given._is_view())
    place = f"{fake.storage_offset()} of {fake.untyped_storage().nbytes()} bytes"
    sizes = f"{tuple(fake.shape)} {tuple(fake.stride())} at {place}"
    symbols = {range_of(size) for size in (*fake.shape, *fake.stride(), fake.storage_offset()) if is_symbolic(size)}
    return f"{type(given).__name__} {fake.dtype} {sizes} in memory {number} {facts} {sorted(symbols)}"


def _modes() -> dict[str, object]:
    """The state of the thread or the process that affects calls. Dynamo has turned inference mode off."""
    return {
        "gradients": torch.is_grad_enabled(),
        "autocast": [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills memory": getattr(torch.utils.deterministic, "fill_uninitialized_memory"),  # noqa: B009 (typed as missing)
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),  # layouts depend on measurements
        "precision": torch.get_float32_matmul_precision(),
        "onednn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "einsum": (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
    }
