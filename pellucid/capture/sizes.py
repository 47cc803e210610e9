"""Symbolic sizes of a graph's inputs, as JSON and back, so that graphs in a run are compiled as they were captured.

A size is a formula of the project's index algebra, `2*s0 + 1`, whose parser accepts nothing else. What the algebra
cannot express becomes a symbol of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pellucid.capture.torch_compat import expr_of, fake_symbols, is_symbolic, needed_by, plain_name, size_hint
from pellucid.errors import UserError
from pellucid.ir.index import text
from pellucid.ir.parser import parse_expr


def sizes_to_json(module: torch.fx.GraphModule) -> dict[str, Any] | None:
    """The values of the symbols, and for each input its formula, the formulas of a tensor, or None if it is static.

    None for a graph that has no symbols.
    """
    inputs = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    symbols: dict[str, int] = {}
    for number in itertools.chain.from_iterable(map(_numbers, inputs)):
        symbols.update({name: size_hint(each) for name, each in needed_by(number).items()})
        own = plain_name(expr_of(number))
        if own is not None:
            symbols[own] = size_hint(number)

    def formula(number: int | torch.SymInt) -> str | int:
        if not is_symbolic(number):
            return size_hint(number)
        found = expr_of(number)
        return text(found) if found.syms() and found.syms() <= symbols.keys() else size_hint(number)

    return {"symbols": symbols, "inputs": [_formulas(value, formula) for value in inputs]} if symbols else None


def fake_inputs(saved: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A fake tensor mode whose symbols have the saved names, and fake inputs of it that replace the real ones.

    Raises UserError for formulas that do not match the sizes of the inputs.
    """
    symbols = saved["symbols"]
    if not all(isinstance(name, str) and name.isidentifier() and type(v) is int for name, v in symbols.items()):
        raise UserError("the run has an invalid symbol for a size")
    mode, numbers = fake_symbols(symbols)

    def number(formula: str | int) -> int | torch.SymInt:
        if isinstance(formula, int):
            return formula
        return parse_expr(formula, symbols=numbers).evaluate(lambda atom: numbers[atom.name])  # type: ignore[return-value]

    with mode:
        made = [_fake(mode, form, value, number) for form, value in zip(saved["inputs"], inputs, strict=True)]
    for position, (fake, value) in enumerate(zip(made, inputs, strict=True)):
        if [*map(size_hint, _all_numbers(fake))] != _all_numbers(value):
            raise UserError(f"the run's sizes are not those of its input {position}", hint="copy the run again")
    return mode, made


def _formulas(value: Any, formula: Callable[[int | torch.SymInt], str | int]) -> Any:
    if isinstance(value, torch.SymInt):
        return formula(value) if is_symbolic(value) else None
    if next(_numbers(value), None) is None:  # testing whether a symbol is true would add a guard
        return None
    return {
        "size": [formula(n) for n in value.shape],
        "stride": [formula(n) for n in value.stride()],
        "offset": formula(value.storage_offset()),
    }


def _fake(mode: Any, form: Any, value: Any, number: Callable[[str | int], int | torch.SymInt]) -> Any:
    if not isinstance(form, dict):
        if isinstance(value, torch.Tensor):
            return mode.from_tensor(value, static_shapes=True)
        return value if form is None else number(form)
    size, stride = ([number(each) for each in form[part]] for part in ("size", "stride"))
    offset = number(form["offset"])
    length = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    return value.new_empty(length, device=value.device).as_strided(size, stride, offset)


def _numbers(value: Any) -> Iterator[torch.SymInt]:
    return (n for n in _all_numbers(value) if isinstance(n, torch.SymInt) and is_symbolic(n))


def _all_numbers(value: Any) -> list[int | torch.SymInt]:
    """An integer; or the sizes, strides and offset of a tensor."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return [*value.shape, *value.stride(), value.storage_offset()]
    return [value] if isinstance(value, int | torch.SymInt) else []
