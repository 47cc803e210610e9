"""Everything that is taken from PyTorch's private API, so that a new release touches one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import sympy
import torch
from torch._decomp import get_decompositions
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch._logging._internal import getArtifactLogger
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Mod, PythonMod

from pellucid.errors import UnsupportedError
from pellucid.ir.index import Expr, as_expr, const, floordiv, mod, sym

__all__ = [
    "artifact_logger",
    "capture_with_aot",
    "current_graph_name",
    "decomposition_table",
    "expr_of",
    "is_symbolic",
    "size_hint",
    "stride_of",
    "symbol_of",
    "user_frames",
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
) -> Callable[..., Any]:
    """Functionalise, decompose and (for training) differentiate a Dynamo graph, compiling each resulting graph.

    The compilers return functions in the boxed calling convention: one list of arguments, which they may empty.
    Mutations of inputs stay in the graph as `copy_` at its end.
    """
    return aot_module_simplified(
        graph_module,
        example_inputs,
        fw_compiler=cast(Any, forward),
        bw_compiler=cast(Any, backward),
        inference_compiler=cast(Any, inference),
        decompositions=decompositions,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def decomposition_table(names: Sequence[str]) -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of the operators with these names (`native_batch_norm`, `addcmul`, ...)."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return get_decompositions(packets)


def size_hint(value: int | torch.SymInt) -> int:
    """The size that `value` had when the graph was captured."""
    return cast(int, value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def is_symbolic(value: object) -> bool:
    """True for SymInt, SymFloat and SymBool."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbol_of(value: torch.SymInt) -> str | None:
    """The name of the symbol that `value` is, or None when it is a compound expression."""
    expression = value.node.expr
    return str(expression) if isinstance(expression, sympy.Symbol) else None


def stride_of(value: int | torch.SymInt) -> Expr:
    """A stride in the project's own index algebra.

    PyTorch writes `max(1, size)` for the sizes that a stride is a product of, so that strides of empty tensors are not
    0. Here the 1 is dropped: where it matters there is no element to address.
    """
    if isinstance(value, torch.SymInt) and value.node.maybe_as_int() is None:
        return _from_sympy(value.node.expr.replace(_is_size_or_one, _without_one))
    return expr_of(value)


def _is_size_or_one(expression: sympy.Basic) -> bool:
    return isinstance(expression, Max | sympy.Max) and len(expression.args) == 2 and sympy.S.One in expression.args


def _without_one(expression: sympy.Basic) -> sympy.Basic:
    return next(argument for argument in expression.args if argument != sympy.S.One)


def expr_of(value: int | torch.SymInt) -> Expr:
    """A size of Dynamo's shape environment in the project's own index algebra.

    Raises `UnsupportedError` for functions that index arithmetic does not know (for example a minimum).
    """
    if not isinstance(value, torch.SymInt):
        return const(int(value))
    hint = value.node.maybe_as_int()
    return const(hint) if hint is not None else _from_sympy(value.node.expr)


def _from_sympy(expression: sympy.Basic) -> Expr:
    match expression:
        case sympy.Integer():
            return const(int(expression))
        case sympy.Symbol():
            return sym(str(expression))
        case sympy.Add():
            return sum((_from_sympy(term) for term in expression.args), start=const(0))
        case sympy.Mul():
            result = const(1)
            for factor in expression.args:
                result = result * _from_sympy(factor)
            return result
        case sympy.Pow(base=base, exp=exponent) if exponent.is_Integer and exponent > 0:
            result = const(1)
            for _ in range(int(exponent)):
                result = result * _from_sympy(base)
            return result
        case FloorDiv() | CleanDiv():
            numerator, denominator = expression.args
            return floordiv(_from_sympy(numerator), as_expr(_from_sympy(denominator)))
        case Mod() | PythonMod():
            numerator, denominator = expression.args
            return mod(_from_sympy(numerator), as_expr(_from_sympy(denominator)))
        case _:
            raise UnsupportedError(
                f"the size expression {expression} uses {type(expression).__name__}",
                hint="compile with dynamic=False, or mark this dimension static with torch._dynamo.mark_static",
            )


def user_frames(node: torch.fx.Node) -> str:
    """The stack trace of the user's code that made `node`, outermost frame first; empty if unknown."""
    return node.meta.get("stack_trace") or ""


def artifact_logger(name: str) -> Any:
    """The logger of one of TorchInductor's artifact names (`ir_pre_fusion`, `output_code`, ...).

    These names are registered with `TORCH_LOGS` by PyTorch itself, and mean the same things here. The logger lies
    below `torch`, because PyTorch attaches its handlers there.
    """
    return getArtifactLogger("torch.pellucid", name)


def current_graph_name() -> str:
    """Dynamo's identifier of the frame being compiled (`0/1`: frame and recompilation), or empty."""
    compile_id = CompileContext.current_compile_id()
    return str(compile_id) if compile_id is not None else ""
