"""Lowers pointwise operators: each has a formula, and a rule how its arguments are promoted."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from pellucid.ir.derived import Float
from pellucid.ir.index import Expr
from pellucid.ir.types import DType
from pellucid.lower.kernel_builder import KernelBuilder, Value, broadcast_index, wrap
from pellucid.lower.program_builder import ProgramBuilder, Result, TensorRef, arguments, op_name
from pellucid.lower.registry import NotLowered, rule
from pellucid.lower.unsigned import common_type


class Promote(Enum):
    """The type in which the formula is computed. Narrow floats are computed in f32 and rounded once, when stored.

    Arguments that are promoted to a narrow float are rounded to it, as in any conversion.
    """

    RESULT = "the type of the result"
    ARGUMENTS = "the type that eager promotes the arguments to (comparisons)"
    NONE = "every argument keeps its own type"


Formula = Callable[..., Value]


def pointwise(*names: str, promote: Promote = Promote.RESULT) -> Callable[[Formula], Formula]:
    """Register a formula: it is passed tensor and number arguments as `Value`s, all others unchanged."""

    def register(formula: Formula) -> Formula:
        floats = promote is not Promote.NONE
        rule(*names, floats=floats)(lambda graph, node: lower_pointwise(graph, node, formula, promote))
        return formula

    return register


def lower_pointwise(graph: ProgramBuilder, node: torch.fx.Node, formula: Formula, promote: Promote) -> Result:
    """One kernel over the shape of the result."""
    given = arguments(node, graph)
    meta = node.meta["val"]
    result = graph.new(meta, op_name(node))
    kernel = graph.kernel(node, result.shape)
    dtype = _promoted(node, promote, result)
    kinds = {argument.name: str(argument.type) for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    operands: dict[str, Any] = {}
    for name, value in given.items():
        exact = _is_exact(op_name(node), name, value)
        value = graph.float_ref(value) if isinstance(value, Float) else value
        operands[name] = _operand(kernel, value, kinds[name], dtype if name != "condition" else None, exact)
    value = formula(*operands.values())
    kernel.store(result.view, result.dtype, kernel.index, value)
    graph.emit(kernel)
    return result


def _is_exact(op: str, name: str, value: Any) -> bool:
    """Whether an argument that is promoted to a narrow float is not rounded to it: a parameter that is no operand (a
    slope), and a scalar factor or divisor."""
    if isinstance(value, TensorRef) and value.shape:
        return False
    parameter = not isinstance(value, TensorRef) and name not in ("self", "other", "alpha", "exponent", "min", "max")
    return parameter or op in ("mul", "div", "floor_divide")


def load_broadcast(kernel: KernelBuilder, tensor: TensorRef) -> Value:
    """The element of `tensor`, broadcast to the kernel's shape, at the current point."""
    return kernel.load(tensor.view, tensor.dtype, broadcast_index(tensor.shape, kernel.index))


def _promoted(node: torch.fx.Node, promote: Promote, result: TensorRef) -> DType | None:
    match promote:
        case Promote.RESULT:
            return result.dtype
        case Promote.ARGUMENTS:
            first, second = (_example(arg) for arg in node.args[:2])
            return common_type(first, second)
        case Promote.NONE:
            return None


def _example(arg: Any) -> Any:
    """An argument for `torch.result_type`; for a number that depends on sizes, only its kind matters."""
    value = arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg
    return 1 if isinstance(value, torch.SymInt) else 1.0 if isinstance(value, torch.SymFloat) else value


def _operand(kernel: KernelBuilder, value: Any, kind: str, dtype: DType | None, exact: bool) -> Any:
    """A tensor or number argument as a `Value` for `dtype`, rounded to it unless `exact`; other arguments unchanged."""
    if isinstance(value, TensorRef):
        if not _is_numeric(kind):
            raise NotLowered("its formula does not support floats that depend on sizes")
        if value.dtype.is_opaque:
            raise NotLowered(f"{value.dtype} is left to ATen")
        loaded = load_broadcast(kernel, value)
        if dtype is None or dtype is value.dtype:
            return loaded
        return loaded.to(dtype) if exact else kernel.convert(loaded, dtype)
    if isinstance(value, Expr):
        return kernel.size_value(value, dtype or DType.I64)
    if isinstance(value, bool | int | float) and _is_numeric(kind):
        check_fits(value, dtype)
        number = kernel.const(value, dtype or _natural(value))
        return number if dtype is None or exact else kernel.convert(number, dtype)
    return value


def _is_numeric(kind: str) -> bool:
    return any(name in kind for name in ("number", "Scalar", "Tensor"))


def check_fits(value: bool | int | float | Expr, dtype: DType | None) -> None:
    """Refuse a number that the type cannot represent: eager raises an error, IR constants would wrap around."""
    if dtype is not None and dtype.is_int and not isinstance(value, Expr) and wrap(value, dtype) != int(value):
        raise NotLowered(f"the number {value} does not fit into {dtype}: ATen reports the error")


def _natural(value: bool | int | float) -> DType:
    return DType.BOOL if isinstance(value, bool) else DType.I64 if isinstance(value, int) else DType.F32


def _register(name: str, *overloads: str, promote: Promote = Promote.RESULT) -> None:
    """Register operators that are a single scalar operator of the IR."""
    pointwise(*overloads, promote=promote)(lambda x, *rest: x.op(name, *rest))


for _name in (
    "neg sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "sigmoid erf erfc reciprocal lgamma bitwise_not atan2 hypot maximum minimum"
).split():
    _register(_name, f"{_name}.default")
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _register(_name, f"{_name}.Tensor", f"{_name}.Scalar", f"{_name}.Scalar_Tensor")
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register(_name, f"{_name}.Tensor", f"{_name}.Scalar", promote=Promote.ARGUMENTS)
for _name, _word, _operator in (("shl", "left", "__lshift__"), ("shr", "right", "__rshift__")):
    _shift = f"bitwise_{_word}_shift"
    _register(_name, *(f"{_shift}.{each}" for each in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")))
    _register(_name, f"{_operator}.Tensor", f"{_operator}.Scalar")


def _unless_identity(name: str, changes: Callable[[DType], bool]) -> None:
    """Register operators that leave values of some types unchanged: an integer is its own ceiling."""
    pointwise(f"{name}.default")(lambda x: x.op(name) if changes(x.dtype) else x)


for _name in ("ceil", "floor", "trunc", "round"):
    _unless_identity(_name, lambda dtype: dtype.is_float)
for _name in ("abs", "sign"):
    _unless_identity(_name, lambda dtype: dtype is not DType.BOOL)


def _is_one(value: Value) -> bool:
    return value.const == 1


def _scaled(value: Value, alpha: Value) -> Value:
    """`alpha * value`; for bool, PyTorch's alpha is a bool as well."""
    if _is_one(alpha):
        return value
    return value & alpha if value.dtype is DType.BOOL else value * alpha


@pointwise("add.Tensor", "add.Scalar")
def add(x: Value, y: Value, alpha: Value) -> Value:
    if x.dtype.is_float and not _is_one(alpha):
        return y.op("fma", alpha, x)
    return x | _scaled(y, alpha) if x.dtype is DType.BOOL else x + _scaled(y, alpha)


@pointwise("mul.Tensor", "mul.Scalar")
def mul(x: Value, y: Value) -> Value:
    return x & y if x.dtype is DType.BOOL else x * y


@pointwise("sub.Tensor", "sub.Scalar")
def sub(x: Value, y: Value, alpha: Value) -> Value:
    if x.dtype.is_float and not _is_one(alpha):
        return y.op("fma", -alpha, x)
    return x - _scaled(y, alpha)


@pointwise("div.Tensor", "div.Scalar")
def div(x: Value, y: Value) -> Value:
    return x / y


def _division(*names: str) -> Callable[[Formula], Formula]:
    """Register the formula of a division. Integers are divided by numbers only: a tensor may contain a 0, for which
    eager raises an error that kernels cannot raise."""

    def register(formula: Formula) -> Formula:
        def lowered(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
            meta, divisor = node.meta["val"], graph.value(node.args[1])
            if not meta.dtype.is_floating_point and (isinstance(divisor, TensorRef) or divisor == 0):
                raise NotLowered("an integer division whose divisor may be 0: ATen reports the error")
            return lower_pointwise(graph, node, formula, Promote.RESULT)

        rule(*names, floats=True)(lowered)
        return formula

    return register


@_division("remainder.Tensor", "remainder.Scalar")
def remainder(x: Value, y: Value) -> Value:
    return x.op("remainder", y)


@_division("fmod.Tensor", "fmod.Scalar")
def fmod(x: Value, y: Value) -> Value:
    return x.op("fmod", y)


@pointwise("addcmul.default")
def addcmul(x: Value, a: Value, b: Value, value: Value) -> Value:
    scaled = a if _is_one(value) else a * value
    return scaled.op("fma", b, x) if x.dtype.is_float else x + scaled * b


@pointwise("addcdiv.default")
def addcdiv(x: Value, a: Value, b: Value, value: Value) -> Value:
    return x + (a if _is_one(value) else a * value) / b


@_division("floor_divide.default", "floor_divide.Scalar")
def floor_divide(x: Value, y: Value) -> Value:
    return x.op("floordiv", y)


@_division("div.Tensor_mode", "div.Scalar_mode")
def div_mode(x: Value, y: Value, rounding_mode: str | None) -> Value:
    return x / y if rounding_mode is None else x.op({"floor": "floordiv", "trunc": "truncdiv"}[rounding_mode], y)


@rule("pow.Tensor_Scalar", floats=True)
def pow_scalar(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """In f16 eager uses no square root for the exponents 0.5 and -0.5: the results differ at -inf and -0.0."""
    formula = _power if node.meta["val"].dtype is torch.float16 else _power_or_root
    return lower_pointwise(graph, node, formula, Promote.RESULT)


def _power_or_root(x: Value, exponent: Value) -> Value:
    if x.dtype.is_float and exponent.const in (0.5, -0.5):
        return x.op("sqrt" if exponent.const == 0.5 else "rsqrt")
    return _power(x, exponent)


def _power(x: Value, exponent: Value) -> Value:
    """Eager's special cases of exponents, with the same formulas."""
    if not x.dtype.is_float:
        if exponent.const is not None and exponent.const < 0:
            raise NotLowered("an integer to a negative power: ATen reports the error")
        return x.op("pow", exponent)
    match exponent.const:
        case 1:
            return x
        case 2:
            return x * x
        case 3:
            return x * x * x
        case -1:
            return x.op("reciprocal")
        case -2:
            return (x * x).op("reciprocal")
        case _:
            return x.op("pow", exponent)


@pointwise("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(x: Value, exponent: Value) -> Value:
    return x.op("pow", exponent)


@pointwise("isnan.default", promote=Promote.NONE)
def isnan(x: Value) -> Value:
    return x.op("isnan") if x.dtype.is_float else x.builder.const(False, DType.BOOL)


@pointwise("isinf.default", promote=Promote.NONE)
def isinf(x: Value) -> Value:
    return x.op("isinf") if x.dtype.is_float else x.builder.const(False, DType.BOOL)


@pointwise("signbit.default", promote=Promote.NONE)
def signbit(x: Value) -> Value:
    if x.dtype.is_float:
        raise NotLowered("the sign of a zero or NaN is not visible to the IR's comparisons")
    return x < 0 if x.dtype is not DType.BOOL else x.builder.const(False, DType.BOOL)


def _logical(name: str) -> None:
    def formula(x: Value, y: Value) -> Value:
        return x.to(DType.BOOL).op(f"bitwise_{name}", y.to(DType.BOOL))

    pointwise(f"logical_{name}.default", promote=Promote.NONE)(formula)


for _name in ("and", "or", "xor"):
    _logical(_name)


@pointwise("logical_not.default", promote=Promote.NONE)
def logical_not(x: Value) -> Value:
    return ~x.to(DType.BOOL)


@pointwise("_neg_view.default")
def neg_view(x: Value) -> Value:
    return -x


@pointwise("relu.default")
def relu(x: Value) -> Value:
    return x.op("maximum", 0)


@pointwise("leaky_relu.default")
def leaky_relu(x: Value, slope: Value) -> Value:
    return x.builder.where(x > 0, x, x * slope)


@pointwise("elu.default")
def elu(x: Value, alpha: Value, scale: Value, input_scale: Value) -> Value:
    return x.builder.where(x > 0, x * scale, (x * input_scale).op("expm1") * (alpha * scale))


@pointwise("gelu.default")
def gelu(x: Value, approximate: str) -> Value:
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * 0.5 * (inner.op("tanh") + 1)
    return x * 0.5 * ((x * math.sqrt(0.5)).op("erf") + 1)


@pointwise("silu.default")
def silu(x: Value) -> Value:
    return x / ((-x).op("exp") + 1)


@pointwise("soft_margin_loss_backward.default")
def soft_margin_loss_backward(grad: Value, x: Value, target: Value, reduction: int) -> Value:
    """Without the sigmoid minus 1 of PyTorch's decomposition, which cancels to zero where the loss is small."""
    z = (-target * x).op("exp")
    slope = -(target * z) / (z + 1) * grad
    kernel = x.builder
    mean = reduction == 1
    return slope / kernel.size_value(kernel.count(range(len(kernel.shape))), x.dtype) if mean else slope


@pointwise("hardtanh.default", "clamp.default", "clamp.Tensor")
def clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    x = x if low is None else x.op("maximum", low)
    return x if high is None else x.op("minimum", high)


@pointwise("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(condition: Value, a: Value, b: Value) -> Value:
    return a.builder.where(condition.to(DType.BOOL), a, b)


@pointwise("clone.default", "lift_fresh_copy.default", "alias_copy.default", "contiguous.default")
def clone(x: Value, *_: object) -> Value:
    return x


@rule("_to_copy.default", "convert_element_type.default")
def to_copy(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """A conversion in the user's program: unlike a narrow result, it is rounded immediately."""
    device = node.kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":  # type: ignore[arg-type]
        raise NotLowered(f"conversion to the device {device}")
    return lower_pointwise(graph, node, lambda x, *_: x, Promote.RESULT)


@pointwise("copy.default")
def copy(x: Value, source: Value, *_: object) -> Value:
    """The functional copy: `source`, broadcast to the shape of `x` and converted to its type."""
    return source


@rule("copy_.default")
def copy_(graph: ProgramBuilder, node: torch.fx.Node) -> Result:
    """The write-back of a mutated input."""
    target, source = graph.value(node.args[0]), graph.value(node.args[1])
    kernel = graph.kernel(node, target.shape)
    kernel.store(target.view, target.dtype, kernel.index, load_broadcast(kernel, source))
    graph.emit(kernel)
    return target
