"""Checks each line of Pellucid's kernels: stores of the values are added to a kernel, and each is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pellucid.codegen import generate
from pellucid.executable import Executable, LazyProgram
from pellucid.execution_plan import plan_execution
from pellucid.ir.attention import mixes_reduction_axes
from pellucid.ir.index import ZERO, Expr, const, product, total, var
from pellucid.ir.interp import line_values
from pellucid.ir.nodes import Buffer, Compute, Const, Kernel, Line, Param, Program, Reduce, Store, View, axes_of
from pellucid.kit.programs.case import copied
from pellucid.kit.subjects.base import Near
from pellucid.native.build import build
from pellucid.native.machine import machine_for
from pellucid.options import Options


def wrong_scalar(
    program: Program,
    constants: Sequence[torch.Tensor],
    inputs: Sequence[Any],
    node: str,
    options: Options,
    near: Near,
) -> str:
    """The operator of the first line of an FX node's lowering whose value is wrong for its operands; empty for none.

    program: of static sizes, as it was compiled. Native code computes every line, and the interpreter computes each
    again from the native values of its operands, except in attention kernels, whose lines cannot be run separately.
    """
    if program.symbols:
        return ""
    checked = {
        kernel.name: [] if mixes_reduction_axes(kernel) else [line for line in kernel.body if _is_made_for(line, node)]
        for kernel in _kernels(program)
    }
    memory = _run(_storing(program, checked), constants, inputs, options)
    for kernel in _kernels(program):
        loaded, stored = ({each.buffer for _, each in sites} for sites in (kernel.loads(), kernel.stores()))
        if not checked[kernel.name] or loaded & stored:
            continue  # what it loaded may be gone
        given = {line.out: _shaped(kernel, line, memory[_name(kernel, line)]) for line in checked[kernel.name]}
        again = line_values(kernel, {param.name: memory[param.name] for param in kernel.params}, {}, given)
        wrong = next((line for line in checked[kernel.name] if _differs(line, given, again, near)), None)
        if wrong is not None:
            return wrong.rhs.op if isinstance(wrong.rhs, Compute | Reduce) else type(wrong.rhs).__name__.lower()
    return ""


def _differs(line: Line, native: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor], near: Near) -> bool:
    """Whether two values differ; sums relative to the magnitude of their terms, which may cancel."""
    ours, theirs = native[line.out], again[line.out]
    if isinstance(line.rhs, Reduce) and line.rhs.op == "sum" and theirs.is_floating_point():
        added = again[line.rhs.arg].abs().sum() / theirs.numel()
        ours, theirs = ours + added, theirs + added
    return not near(ours, theirs)


def _kernels(program: Program) -> Iterator[Kernel]:
    return (node for node in program.nodes if isinstance(node, Kernel))


def _is_made_for(line: Line, node: str) -> bool:
    return node in line.origin.nodes and not isinstance(line.rhs, Store | Const)


def _name(kernel: Kernel, line: Line) -> str:
    return f"{kernel.name}_{line.out}"


def _storing(program: Program, checked: Mapping[str, Sequence[Line]]) -> Program:
    """The program with stores of the values of these lines, by kernel, which returns all buffers that it writes."""
    nodes, fresh = [], []
    for node in program.nodes:
        if not isinstance(node, Kernel):
            nodes.append(node)
            continue
        body, params = list(node.body), list(node.params)
        for line in checked[node.name]:
            index, numel = _place(node, line)
            fresh.append(Buffer(_name(node, line), line.dtype, numel, "output"))
            params.append(Param(fresh[-1].name, line.dtype, numel))
            body.append(Line(f"kept_{line.out}", Store(fresh[-1].name, index, line.out), line.dtype, line.origin))
        nodes.append(replace(node, params=tuple(params), body=tuple(body)))
    kept = [each if each.role == "input" else replace(each, role="output") for each in program.buffers]
    buffers = (*kept, *fresh)
    outputs = tuple(View(b.name, (b.numel,), (const(1),), ZERO) for b in buffers if b.role == "output")
    return replace(program, buffers=buffers, nodes=tuple(nodes), outputs=outputs)


def _place(kernel: Kernel, line: Line) -> tuple[Expr, Expr]:
    """The offset of a line's value in a buffer with the axes that it varies along, and the size of that buffer."""
    axes = [axis for axis in kernel.space if axis.name in axes_of(kernel)[line.out]]
    strides = [product(inner.extent for inner in axes[at + 1 :]) for at in range(len(axes))]
    index = total(var(axis.name) * stride for axis, stride in zip(axes, strides, strict=True))
    return index, product(axis.extent for axis in axes)


def _run(
    program: Program, constants: Sequence[torch.Tensor], inputs: Sequence[Any], options: Options
) -> dict[str, torch.Tensor]:
    """The memory of each buffer after native code ran."""
    machine = machine_for(options.machine)
    kernels = {kernel.name: generate(kernel, options, machine) for kernel in _kernels(program)}
    addresses, _ = build({kernel.name: kernel.source for kernel in kernels.values()})
    given = list(copied(inputs))
    memory = {
        name: _flat(value)
        for name, value in zip(program.inputs, [*given, *constants], strict=True)
        if isinstance(value, torch.Tensor) and name is not None
    }
    with torch.no_grad():
        plan = plan_execution(program, kernels)
        results = Executable(plan, LazyProgram((program, kernels)), addresses, tuple(constants))(given)
    written = (buffer.name for buffer in program.buffers if buffer.role == "output")
    return memory | dict(zip(written, results, strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first element on."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach if tensor.numel() else 0,), (1,), tensor.storage_offset())


def _shaped(kernel: Kernel, line: Line, value: torch.Tensor) -> torch.Tensor:
    """A stored value in the interpreter's shape: one dimension per axis."""
    axes = axes_of(kernel)[line.out]
    return value.reshape([int(axis.extent.value or 0) if axis.name in axes else 1 for axis in kernel.space])
