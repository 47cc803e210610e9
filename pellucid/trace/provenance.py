"""Maps C++ lines to IR lines, FX nodes and user lines, and back."""

from __future__ import annotations

from typing import Any

from pellucid.codegen import CppKernel
from pellucid.ir.nodes import Extern, Kernel
from pellucid.ir.origin import Origin
from pellucid.trace.record import GraphRecord


def provenance(record: GraphRecord) -> dict[str, Any]:
    """`kernels`: per kernel call, its C++ lines with their origins; `fx_nodes`: per FX node, the nodes that compute it.

    A C++ line with `glue` true belongs to no operator: braces, loop headers, pointer set-up.
    """
    kernels: dict[str, Any] = {}
    nodes: dict[str, list[str]] = {}
    for node in record.scheduled.nodes:
        match node:
            case Kernel():
                compiled = record.kernels.get(node.name)
                if compiled is not None:
                    kernels[node.name] = {"symbol": compiled.name, "lines": _lines(compiled)}
                origins = [line.origin for line in node.body]
            case Extern():
                origins = [node.origin]
        for origin in origins:
            for name in origin.nodes:
                implementing = nodes.setdefault(name, [])
                if node.name not in implementing:
                    implementing.append(node.name)
    return {"kernels": kernels, "fx_nodes": nodes}


def _lines(kernel: CppKernel) -> list[dict[str, Any]]:
    texts = kernel.source.splitlines()
    return [
        {"line": number, "code": code.strip(), **_origin(origin)}
        for number, (code, origin) in enumerate(zip(texts, kernel.line_map, strict=True), start=1)
    ]


def _origin(origin: Origin) -> dict[str, Any]:
    if origin.is_glue:
        return {"glue": True}
    return {
        "fx_nodes": list(origin.nodes),
        "user_lines": [user._asdict() for user in origin.users],
        "steps": list(origin.steps),
    }
