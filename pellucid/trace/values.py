"""Plain values as JSON and back: non-tensor parts of the arguments of an FX node, or of a tree of inputs.

Numbers, strings, None and lists are themselves; everything else is an object with one key that names its kind. Reading
creates only values: it imports nothing and calls nothing that the file names.
"""

# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from pellucid.errors import UserError

_ENUMERATED: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encode(
    value: Any, tensor: Callable[[torch.Tensor], Any], node: Callable[[torch.fx.Node], Any] | None = None
) -> Any:
    """A value as JSON; `tensor` and `node` encode tensors and nodes. Raises UserError for a value of another kind."""

    def inner(item: Any) -> Any:
        return encode(item, tensor, node)

    match value:
        case None | bool() | str():
            return value
        case torch.SymInt() | torch.SymBool():
            return int(value)
        case torch.SymFloat():
            return inner(float(value))
        case int():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [inner(value.real), inner(value.imag)]}
        case torch.Tensor():
            return {"tensor": tensor(value)}
        case torch.fx.Node() if node is not None:
            return {"node": node(value)}
        case torch.device():
            return {"device": str(value)}
        case tuple():
            return {"tuple": [inner(item) for item in value]}
        case list():
            return [inner(item) for item in value]
        case slice():
            return {"slice": [inner(item) for item in (value.start, value.stop, value.step)]}
        case _ if value is Ellipsis:
            return {"ellipsis": True}
        case Mapping():
            return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    for name, kind in _ENUMERATED.items():
        if isinstance(value, kind):
            return {name: str(value).removeprefix("torch.")}
    raise UserError(f"a value of type {type(value).__name__} cannot be saved: {value!r:.80}")


def decode(value: Any, tensor: Callable[[Mapping[str, Any]], Any], node: Callable[[str], Any] | None = None) -> Any:
    """The value from JSON that `encode` wrote. Raises UserError for other JSON."""

    def inner(item: Any) -> Any:
        return decode(item, tensor, node)

    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = cast("tuple[str, Any]", next(iter(value.items())) if len(value) == 1 else ("", ""))
    match kind:
        case "float":
            return float(content)
        case "complex":
            return complex(*map(inner, content))
        case "tensor":
            return tensor(content)
        case "node" if node is not None:
            return node(content)
        case "device":
            return torch.device(content)
        case "tuple":
            return tuple(inner(item) for item in content)
        case "slice":
            return slice(*map(inner, content))
        case "ellipsis":
            return ...
        case "dict":
            return {inner(key): inner(item) for key, item in content}
    named = getattr(torch, str(content), None)
    if kind in _ENUMERATED and isinstance(named, _ENUMERATED[kind]):
        return named
    raise UserError(f"the run contains a value of unknown kind: {value!r:.80}")
