"""The facts of the calls of Pellucid's instances, from their programs and sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from pellucid.codegen import CppKernel
from pellucid.codegen.blocks import Blocks
from pellucid.description import operator_of, plain_argument
from pellucid.executable import Sized
from pellucid.execution_plan import Place
from pellucid.ir.analysis import arguments_of
from pellucid.ir.index import ONE, product
from pellucid.ir.nodes import Arg, Extern, Kernel, Node, Reduce, View
from pellucid.ir.origin import merge
from pellucid.ir.traffic import Traffic, tensor_bytes, traffic
from pellucid.ir.types import TORCH_DTYPES
from pellucid.kit.subjects.facts import StepFacts, library_facts, shape_text
from pellucid.machine import Part
from pellucid.machine.kernels import FEW_COLUMNS, FEW_ROWS
from pellucid.machine.work import computed_in, estimate

_Touched: TypeAlias = "dict[str, tuple[int, int, int]]"
"""By buffer: bytes read, bytes written, and the number of contiguous runs."""


def facts_of(sized: Sized) -> tuple[StepFacts | None, ...]:
    """The facts of each call of an instance's plan, None for the calls of probes."""
    facts = _Facts(sized)
    kept = frozenset(each.name for each in sized.plan.buffers if each.place in (Place.ARGUMENT, Place.POOL))
    parts = iter(_parts([facts.touched(node) for node in sized.calls if node is not None], kept))
    return tuple(None if node is None else replace(facts.of(node), parts=next(parts)) for node in sized.calls)


def _parts(steps: Sequence[_Touched], kept: Collection[str]) -> list[tuple[Part, ...]]:
    """The bytes that each step moves by buffer, with their reuse distances in a steady state of repeated runs: buffers
    in `kept` stay cached from the previous run, temporaries reuse memory that others have just used."""
    sizes: dict[str, int] = {}
    for step in steps:
        sizes |= {name: max(sizes.get(name, 0), *touched[:2]) for name, touched in step.items()}
    whole, passed, last = sum(sizes.values()), 0, dict[str, int]()
    made: list[tuple[Part, ...]] = []
    for _ in range(2):
        made.clear()
        last = {name: at for name, at in last.items() if name in kept}
        for step in steps:
            own = sum(max(touched[:2]) for touched in step.values())
            made.append(
                tuple(
                    Part(*touched, min(whole, own + (passed - last[name] if name in last else 0)))
                    for name, touched in step.items()
                )
            )
            last |= dict.fromkeys(step, passed)  # without this step's own bytes, as it touches its buffers in turn
            passed += own
    return made


class _Facts:
    def __init__(self, sized: Sized) -> None:
        self._sized = sized
        self._tensors: dict[View, torch.Tensor] = {}
        self._moved: dict[str, Traffic] = {}
        self._buffers = {buffer.name: buffer for buffer in sized.plan.buffers}

    def of(self, node: Node) -> StepFacts:
        return self.kernel(node) if isinstance(node, Kernel) else self.library(node)

    def touched(self, node: Node) -> _Touched:
        """The bytes of each buffer that a call touches."""
        if isinstance(node, Kernel):
            moved = self._traffic(node)
            return {
                name: (moved.loaded.get(name, 0), moved.stored.get(name, 0), moved.rows.get(name, 1))
                for name in {**moved.loaded, **moved.stored}
            }
        found: _Touched = {}
        made = [view for view in node.outputs if view is not None]
        given = [each for each in arguments_of(node) if isinstance(each, View)]
        for view in (*given, *made):
            read, written, _ = found.get(view.buffer, (0, 0, 1))
            nbytes = self._nbytes(view)
            found[view.buffer] = (read, max(written, nbytes), 1) if view in made else (max(read, nbytes), written, 1)
        return found

    def _nbytes(self, view: View) -> int:
        tensor = self._tensor(view)
        return tensor_bytes(tensor.shape, tensor.stride(), tensor.dtype.itemsize)

    def _traffic(self, kernel: Kernel) -> Traffic:
        if kernel.name not in self._moved:
            self._moved[kernel.name] = traffic(kernel, self._sized.size)
        return self._moved[kernel.name]

    def kernel(self, kernel: Kernel) -> StepFacts:
        compiled, size = self._sized.kernels[kernel.name], self._sized.size
        moved = self._traffic(kernel)
        buffers = {**moved.loaded, **moved.stored}
        shares = size(compiled.extent) // compiled.grain
        blocks, packed = compiled.plan.blocks, self._packed(compiled)
        flops = int(moved.flops * blocks.share) if blocks else moved.flops
        return StepFacts(
            self._sized.plan.name,
            kernel.name,
            compiled.name,
            "kernel",
            reads=self._shapes(moved.loaded),
            writes=self._shapes(moved.stored),
            loaded=sum(moved.loaded.values()),
            stored=sum(moved.stored.values()),
            flops=flops,
            touched=sum(max(moved.loaded.get(name, 0), moved.stored.get(name, 0)) for name in buffers),
            instructions=self._instructions(kernel),
            dtype=computed_in(kernel).value if flops else "",
            threads=max(1, min(torch.get_num_threads(), shares)),
            counts_as=_group(kernel, compiled),
            fetched=moved.fetched,
            scalar=_why_scalar(compiled),
            packed=packed,
            uncounted=tuple(_uncounted(blocks, packed)) if blocks else (),
            origin=merge(line.origin for line in kernel.body),
        )

    def _packed(self, compiled: CppKernel) -> int:
        """Elements of a parameter that a kernel packs in each call."""
        blocks = compiled.plan.blocks
        if blocks is None or not _packs(blocks):
            return 0
        position = int(blocks.contraction.loads[1].buffer.removeprefix("p"))  # plans name buffers by their positions
        buffer = compiled.params[position]
        return self._sized.size(product(self._buffers[buffer].whole.shape)) if buffer in self._sized.parameters else 0

    def _instructions(self, kernel: Kernel) -> float:
        """The plan's count, which is for typical sizes, scaled to the points at these sizes."""
        points = product(axis.extent for axis in kernel.space)
        plan = self._sized.kernels[kernel.name].plan
        return plan.steps * self._sized.size(points) / max(1, estimate(points))

    def library(self, call: Extern) -> StepFacts:
        step = StepFacts(self._sized.plan.name, call.name, call.op, "call", origin=call.origin, reason=call.reason)
        results = [self._tensor(view) for view in call.outputs if view is not None]
        kwargs = {name: self._value(value) for name, value in call.kwargs}
        if call.out:
            kwargs, results = {**kwargs, "out": results[0]}, []
        args = [self._value(arg) for arg in call.args]
        return library_facts(step, operator_of(call.op), args, kwargs, results)

    def _shapes(self, buffers: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            shape_text(self._dtype(name), tuple(map(self._sized.size, self._buffers[name].whole.shape)))
            for name in buffers
        )

    def _dtype(self, buffer: str) -> torch.dtype:
        return TORCH_DTYPES[self._buffers[buffer].dtype]

    def _tensor(self, view: View) -> torch.Tensor:
        """A meta tensor; the same for the same view."""
        if view not in self._tensors:
            shape, strides = (tuple(map(self._sized.size, each)) for each in (view.shape, view.strides))
            dtype = self._dtype(view.buffer)
            self._tensors[view] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return self._tensors[view]

    def _value(self, arg: Arg) -> Any:
        """An argument, with meta tensors for views."""
        match arg:
            case View():
                return self._tensor(arg)
            case tuple():
                return tuple(self._value(item) for item in arg)
            case _:
                return plain_argument(arg, self._sized.size)


def _uncounted(blocks: Blocks, packed: int) -> Iterator[str]:
    """The work of a contraction in addition to its products. packed: elements of a parameter that it packs."""
    if packed:
        yield "packing a parameter (`freeze` avoids it)"
    elif _packs(blocks):
        yield "packing an operand"
    if blocks.tiles:
        yield "transforming input and output tiles"
    elif blocks.window:
        yield "copying windows"


def _packs(blocks: Blocks) -> bool:
    """Whether a contraction packs its right operand; not with few rows, or for dot products with few columns."""
    if blocks.packed or blocks.by_channel or blocks.height <= FEW_ROWS:
        return False
    found, columns = blocks.contraction, blocks.ranges[blocks.column].value
    dots = len(found.inner) == 1 and all(load.index.coefficient(found.inner[0]) == ONE for load in found.loads)
    return not (dots and columns is not None and columns <= FEW_COLUMNS)


def _group(kernel: Kernel, compiled: CppKernel) -> str:
    """The group of a kernel's work, by its operators; empty for element-wise operators and reductions."""
    if compiled.plan.rows:
        return "attention"
    if not compiled.plan.blocks:
        return ""
    sums = merge(line.origin for line in kernel.body if isinstance(line.rhs, Reduce)).nodes
    return "convolution" if any(node.startswith("convolution") for node in sums) else "product"


def _why_scalar(compiled: CppKernel) -> str:
    """Why a kernel is not vectorised; empty if it is, or if it multiplies matrices."""
    plan = compiled.plan
    if plan.vector is not None or plan.blocks is not None:
        return ""
    return next((each.why for each in plan.decisions if each.rule == "codegen.vectorize" and not each.ok), "")
