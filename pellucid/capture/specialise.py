"""Compiles an exported program for the sizes that it is called with, as Dynamo does with graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, tracing
from torch.fx.experimental.sym_node import SymNode

from pellucid.capture.exported import Exported
from pellucid.capture.inputs import ConstantInput, Input, Size, TensorInput, symbols_in
from pellucid.capture.torch_compat import fake_symbols


@dataclass(frozen=True, slots=True)
class Specialised:
    """An exported program compiled for some sizes. run: called like the graph. guards: conditions on symbols."""

    run: Callable[..., Any]
    guards: tuple[sympy.Basic, ...]

    def holds(self, values: Mapping[sympy.Symbol, int]) -> bool:
        """Whether all guards hold for these values of the symbols."""
        return all(guard.xreplace(values) == True for guard in self.guards)  # noqa: E712 (SymPy's)


def specialise(
    exported: Exported,
    values: Mapping[sympy.Symbol, int],
    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Specialised:
    """Compile an exported program for inference, as Dynamo compiles a graph for these sizes.

    Sizes of 0 and 1 become constants, as under Dynamo. compile_graph: is passed the graph and fake arguments.
    """
    mode, made = fake_symbols({str(symbol): value for symbol, value in values.items() if value > 1})
    symbols = {
        symbol: made[str(symbol)].node.expr if value > 1 else sympy.Integer(value) for symbol, value in values.items()
    }

    def fake_size(size: Size) -> int | torch.SymInt:
        expression = size.xreplace(symbols)
        return (
            torch.SymInt(SymNode(expression, mode.shape_env, int, None)) if symbols_in(expression) else int(expression)
        )

    def fake(each: Input) -> Any:
        if not isinstance(each, TensorInput):
            return fake_size(*each.sizes)
        with mode:
            sizes, strides = ([*map(fake_size, numbers)] for numbers in (each.sizes, each.strides))
            return torch.empty_strided(sizes, strides, dtype=each.dtype, device="cpu")

    arguments = [
        *map(fake_size, exported.symbols),
        *(mode.from_tensor(tensor, static_shapes=True) for tensor in exported.fixed),
        *(fake(each) for each in exported.inputs.each if not isinstance(each, ConstantInput)),
    ]
    with tracing(TracingContext(mode)), torch.no_grad(), torch.autocast("cpu", enabled=False):
        run = compile_graph(exported.graph, arguments)
    back = {replaced: symbol for symbol, replaced in symbols.items() if isinstance(replaced, sympy.Symbol)}
    known = [sympy.Eq(each, value) if value < 2 else sympy.Ge(each, 2) for each, value in values.items()]
    found = [guard.expr.xreplace(back) for guard in mode.shape_env.guards] if mode.shape_env else []
    return Specialised(run, (*known, *found))
