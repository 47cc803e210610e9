"""What several tests share: running functions through parts of the compiler, and judging results by float64."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from pellucid import pipeline
from pellucid.capture.decompositions import decompositions
from pellucid.capture.torch_compat import capture_with_aot
from pellucid.capture.transform import transform
from pellucid.codegen import CppKernel
from pellucid.codegen.run_nest import run_nest
from pellucid.ir.interp import run_program
from pellucid.ir.nodes import Extern, Program
from pellucid.ir.types import TORCH_DTYPES
from pellucid.ir.verify import verify_program
from pellucid.lower import lower
from pellucid.native.function import SIGNATURE
from pellucid.options import Options
from pellucid.trace.record import GraphRecord


def interpreted(
    function: Callable[..., Any], programs: list[Program], *, dynamic: bool = False, fullgraph: bool = True
) -> Callable[..., Any]:
    """`function` captured and lowered like any compiled one, and executed by the interpreter. Programs are appended."""

    def compile_graph(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        lowered = lower(transform(graph)[0])
        verify_program(lowered.program)
        programs.append(lowered.program)

        def run(args: list[Any]) -> list[Any]:
            return run_program(lowered.program, [*args, *lowered.constants])

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture_with_aot(
            graph,
            inputs,
            forward=compile_graph,
            backward=compile_graph,
            inference=compile_graph,
            decompositions=decompositions(),
            joint=partial(pipeline.joint_passes, options=Options()),
        )

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


@contextmanager
def recorded() -> Iterator[list[GraphRecord]]:
    """The records of all graphs that are compiled meanwhile."""
    found: list[GraphRecord] = []

    def recording(*args: Any) -> Any:
        executable, record = pipeline.compile_graph(*args)
        found.append(record)
        return executable, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.backend.compile_graph", recording)
        yield found


@contextmanager
def recorded_fallbacks() -> Iterator[Counter[str]]:
    """How often each ATen operator stands in the programs that are compiled meanwhile."""
    found: Counter[str] = Counter()

    def recording(*args: Any) -> Any:
        executable, record = pipeline.compile_graph(*args)
        nodes = (node for program in record.programs for node in program.scheduled.nodes)
        found.update(node.op for node in nodes if isinstance(node, Extern))
        return executable, record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pellucid.backend.compile_graph", recording)
        yield found


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def widened(tree: Any) -> Any:
    """The same arguments with every float tensor, and the parameters of every module, in float64."""

    def widen(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(widen, tree)


def error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest distance from the float64 reference where both are finite, relative to the reference's largest value.

    Infinite when NaN or infinity stand in different places.
    """
    actual, reference = actual.double(), reference.double()
    finite = reference.isfinite()
    same_special = torch.equal(
        torch.nan_to_num(actual[~finite], 0, 1, -1), torch.nan_to_num(reference[~finite], 0, 1, -1)
    )
    if not same_special or not torch.equal(actual.isnan(), reference.isnan()):
        return float("inf")
    if not finite.any():
        return 0.0
    distance = (actual[finite] - reference[finite]).abs().max().item()
    return distance / max(reference[finite].abs().max().item(), 1e-30)


# Below this relative error nobody can tell rounding from a better algorithm.
FLOORS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def assert_matches(compiled: Any, eager: Any, reference: Any, errors: Sequence[float] = ()) -> None:
    """Same structure, dtypes and strides as eager; floats at most twice as far from float64 as eager, plus a floor.

    errors: eager's error for each tensor, where more is known of it than this one result shows.
    """
    ours, theirs, exact = tensors(compiled), tensors(eager), tensors(reference)
    assert len(ours) == len(theirs) == len(exact)
    for position, (a, b, r) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"output {position}: {a.dtype} {a.shape}, eager {b.dtype} {b.shape}"
        )
        if a.numel() and b._is_view() == a._is_view():
            ours_strides, eager_strides = (meaningful_strides(tensor) for tensor in (a, b))
            assert ours_strides == eager_strides, f"output {position}: strides {a.stride()}, eager {b.stride()}"
        if not a.is_floating_point():
            assert torch.equal(a, b), f"output {position} differs from eager: {a} instead of {b}"
            continue
        ours_error, eager_error = error(a, r.to(torch.float64)), error(b, r.to(torch.float64))
        eager_error = max(eager_error, errors[position]) if errors else eager_error
        limit = 2 * eager_error + FLOORS[a.dtype]
        assert ours_error <= limit or _equal(a, b), (
            f"output {position}: error {ours_error:.3g} against float64, eager has {eager_error:.3g}"
        )


def compiled(function: Any, **how: Any) -> Any:
    """One graph, whose programs are verified, if nothing else is asked for."""
    how = {"fullgraph": True, "options": {"verify": True}, **how}
    return torch.compile(function, backend="pellucid", **how)


def check(function: Callable[..., Any], *calls: tuple[Any, ...], **how: Any) -> Any:
    """Compile once, call with each of the argument lists, and compare results and arguments."""
    run = compiled(function, **how)
    for args in calls:
        results: list[Any] = []
        for call, given in ((run, args), (function, args), (function, widened(args))):
            own = copy.deepcopy(given)
            results.append((call(*own), own))
        assert_matches(*results)
    return run


def meaningful_strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions along which one can step."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


def run_loops(
    kernel: CppKernel, buffers: Mapping[str, torch.Tensor], symbols: Mapping[str, int], *, backwards: bool = False
) -> dict[str, torch.Tensor]:
    """The buffers after the loop nest of a kernel ran on them, from its last iteration to its first if `backwards`."""
    memory = {name: tensor.clone() for name, tensor in buffers.items()}
    nest = kernel.nest_of("k")
    typed = {param.name: memory[param.name].view(TORCH_DTYPES[param.dtype]) for param in nest.params}
    run_nest(nest, typed, symbols, backwards=backwards)
    return memory


def pointers_of(kernel: CppKernel, buffers: Mapping[str, torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """What a kernel is called with for its parameters."""
    begins = zip(kernel.params, kernel.offsets, strict=True)
    found = [buffers[name].data_ptr() + first * buffers[name].element_size() for name, first in begins]
    return (ctypes.c_void_p * len(found))(*found)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same random numbers for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same, channels-last."""
    return randn(*shape, dtype=dtype).to(memory_format=torch.channels_last)


def native_function(address: int) -> Callable[..., int]:
    """A kernel's function: of its pointers, its sizes, and the iterations from and to which it runs."""
    return SIGNATURE(address)


def some_iterations(extent: int) -> set[tuple[int, int]]:
    """From and to which a kernel runs on its own: single ones and many, at both ends and in the middle."""
    return {(0, 1), (extent // 3, extent // 3 + 1), (extent // 2, extent), (extent - 1, extent)}


def assert_touches_no_more(kernel: CppKernel, address: int, buffers: Mapping[str, torch.Tensor]) -> bool:
    """Iterations of a kernel of known sizes write nothing but what its reaches say, whatever they do not say it reads.

    False where it has no reaches.
    """
    reaches = kernel.reaches
    extent = kernel.extent.value
    if reaches is None or not extent:
        return False
    function = native_function(address)
    for begin, end in some_iterations(extent):
        read, written = (
            {kernel.params[k]: _between(reach.over(begin, end), buffers[kernel.params[k]]) for k, reach in each.items()}
            for each in (reaches.loads, reaches.stores)
        )
        plain = {name: tensor.clone() for name, tensor in buffers.items()}
        other = {name: tensor.clone() for name, tensor in buffers.items()}
        for name, tensor in other.items():
            if name in read:
                _spoil(tensor, ~(read[name] | written.get(name, torch.zeros((), dtype=torch.bool))))
        before = {name: tensor.clone() for name, tensor in other.items()}
        for memory in (plain, other):
            assert function(pointers_of(kernel, memory), None, begin, end) == 0
        for name, inside in written.items():
            assert _equal(plain[name][inside], other[name][inside]), f"{name} of {begin} to {end} depends on more"
            assert _equal(other[name][~inside], before[name][~inside]), f"{begin} to {end} write more of {name}"
    return True


# PyTorch fills none of those on the left.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _between(ends: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
    """Which elements of a flat tensor lie from the first to the second of `ends`."""
    places = torch.arange(tensor.numel())
    return (places >= ends[0]) & (places <= ends[1])


def _spoil(tensor: torch.Tensor, where: torch.Tensor) -> None:
    """Other values there."""
    if tensor.dtype is torch.bool:
        tensor[where] = ~tensor[where]
    else:
        signed = tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))
        signed[where] = torch.nan if tensor.dtype.is_floating_point else 77
