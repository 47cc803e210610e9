"""Types, indices and constants as C++."""

from __future__ import annotations

import math
from collections.abc import Callable

from pellucid.ir.index import Expr, FloorDiv, Mod, Sym, Val, Var, bounds, nonnegative
from pellucid.ir.nodes import Scalar
from pellucid.ir.types import DType

CPP_TYPE = {
    DType.F64: "double",
    DType.F32: "float",
    DType.BF16: "pv::bf16",
    DType.F16: "pv::f16",
    DType.I64: "int64_t",
    DType.I32: "int32_t",
    DType.I16: "int16_t",
    DType.I8: "int8_t",
    DType.U64: "uint64_t",
    DType.U32: "uint32_t",
    DType.U16: "uint16_t",
    DType.U8: "uint8_t",
    DType.BOOL: "bool",
}


def index_text(index: Expr, ranges: dict[str, Expr], atom: Callable[[Sym | Var | Val], str]) -> str:
    """An index expression as C++ on `int64_t`, with `atom` naming its variables."""

    def factor(each: object) -> str:
        match each:
            case FloorDiv(num, den):
                return division("/", "floordiv", num, den)
            case Mod(num, den):
                return division("%", "remainder", num, den)
            case Sym() | Var() | Val():
                return atom(each)
            case _:
                raise AssertionError(each)

    def division(operator: str, function: str, num: Expr, den: Expr) -> str:
        left, right = index_text(num, ranges, atom), index_text(den, ranges, atom)
        span = bounds(num, ranges)
        if span is not None and nonnegative(span[0]):
            left, right = (each if each.isalnum() else f"({each})" for each in (left, right))
            return f"({left} {operator} {right})"
        return f"pv::{function}<int64_t>({left}, {right})"

    text = ""
    for monomial, coefficient in index.terms:
        factors = [factor(each) for each in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
        text += sign + " * ".join(factors)
    return text or "0"


def flag_text(value: bool) -> str:
    """A flag as C++."""
    return "true" if value else "false"


def scalar_text(value: Scalar, dtype: DType) -> str:
    """A constant of type `dtype`; floats are printed so that they round-trip."""
    kind = CPP_TYPE[dtype]
    if dtype is DType.BOOL:
        return flag_text(bool(value))
    if dtype.is_float:
        number = float(value)
        if math.isnan(number):
            return f"pv::nan<{kind}>"
        if math.isinf(number):
            return f"{'-' if number < 0 else ''}pv::inf<{kind}>"
        return f"{kind}({number!r})"
    number = dtype.wrap(int(value))
    if number == DType.I64.limits[0]:
        return "INT64_MIN"
    return f"{kind}({number}{'u' if number > DType.I64.limits[1] else ''})"
