"""Rules that express operators on complex tensors by their real and imaginary parts, with eager's formulas."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from pellucid.capture.fx import order_in_memory, shape_of, strides_of
from pellucid.capture.transform import aliases, may_write
from pellucid.ir.index import ONE, product, total

aten = torch.ops.aten

REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}

Number: TypeAlias = bool | int | float
Real: TypeAlias = Node | Number


class Parts(NamedTuple):
    """The real and the imaginary part of a tensor, of one shape and dtype; or of a number."""

    real: Any
    imag: Any


class Call(Protocol):
    """Inserts a call into the graph; returns its node, with the fake result."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node: ...


Rule: TypeAlias = Callable[..., Any]
"""Inserts the calls that replace one, by a `Call`; complex arguments are `Parts`. Returns None if it cannot."""


def from_pairs(call: Call, pairs: Node) -> Parts:
    """The parts of a tensor stored as pairs along its last dimension."""
    return Parts(*(call(aten.select.int, pairs, -1, index) for index in (0, 1)))


def paired(call: Call, parts: Parts, like: Tensor) -> Node:
    """Both parts, joined along a new last dimension; the other dimensions have the memory order of `like`."""
    order, back = order_in_memory(like)
    in_order = [call(aten.unsqueeze.default, call(aten.permute.default, part, order), -1) for part in parts]
    return call(aten.permute.default, call(aten.cat.default, in_order, -1), [*back, like.dim()])


def laid_out(call: Call, part: Node, like: Tensor) -> Node:
    """A part with the strides of another tensor."""
    strides = zip(shape_of(like), strides_of(part.meta["val"]), strides_of(like), strict=True)
    if all(size == ONE or one == other for size, one, other in strides):
        return part
    order, back = order_in_memory(like)
    in_order = call(aten.clone.default, call(aten.permute.default, part, order), memory_format=torch.contiguous_format)
    return call(aten.permute.default, in_order, back)


# Arithmetic on parts, either of which may be a number.


def _times(call: Call, a: Real, b: Real) -> Real:
    if isinstance(a, Node):
        return call(aten.mul.Tensor, a, b)
    return call(aten.mul.Tensor, b, a) if isinstance(b, Node) else a * b


def _plus(call: Call, a: Real, b: Real) -> Real:
    if isinstance(a, Node):
        return call(aten.add.Tensor, a, b)
    return call(aten.add.Tensor, b, a) if isinstance(b, Node) else a + b


def _minus(call: Call, a: Real, b: Real) -> Real:
    if isinstance(a, Node):
        return call(aten.sub.Tensor, a, b)
    return call(aten.add.Tensor, call(aten.neg.default, b), a) if isinstance(b, Node) else a - b


def _as_parts(call: Call, value: Parts | Real | complex) -> Parts:
    """An operand, which may be real: then its imaginary part is 0, as in eager mode."""
    if isinstance(value, Parts):
        return value
    return Parts(value.real, value.imag) if isinstance(value, complex) else Parts(_without_symbol(call, value), 0.0)


def _without_symbol(call: Call, value: Real) -> Real:
    """A real operand; a symbolic number becomes a tensor."""
    if not isinstance(value, Node) or isinstance(value.meta["val"], Tensor):
        return value
    return call(aten.scalar_tensor.default, value, dtype=torch.float64)


# Rules.


def _mul(call: Call, a: Any, b: Any) -> Parts:
    a, b = _as_parts(call, a), _as_parts(call, b)
    real = _minus(call, _times(call, a.real, b.real), _times(call, a.imag, b.imag))
    return Parts(real, _plus(call, _times(call, a.real, b.imag), _times(call, a.imag, b.real)))


def _add(call: Call, a: Any, b: Any, alpha: Any = 1) -> Parts:
    a, b = _as_parts(call, a), _as_parts(call, b) if alpha == 1 else _mul(call, b, alpha)
    return _tensors(call, Parts(_plus(call, a.real, b.real), _plus(call, a.imag, b.imag)))


def _sub(call: Call, a: Any, b: Any, alpha: Any = 1) -> Parts:
    a, b = _as_parts(call, a), _as_parts(call, b) if alpha == 1 else _mul(call, b, alpha)
    return _tensors(call, Parts(_minus(call, a.real, b.real), _minus(call, a.imag, b.imag)))


def _tensors(call: Call, value: Parts | Real | complex) -> Parts:
    """The parts of an operand, both of them tensors; those of a number unchanged."""
    parts = _as_parts(call, value)
    one = next((part for part in parts if isinstance(part, Node)), None)
    if one is None:
        return parts
    return Parts(*(part if isinstance(part, Node) else call(aten.full_like.default, one, part) for part in parts))


def _div(call: Call, a: Any, b: Any) -> Parts | None:
    """By Smith's method: the smaller part of the divisor is divided by the larger one, so that no square overflows."""
    if not isinstance(b, Parts):
        return _div_by_real(call, _as_parts(call, a), b)
    (ar, ai), (br, bi) = _as_parts(call, a), b
    mostly_real = call(aten.ge.Tensor, call(aten.abs.default, br), call(aten.abs.default, bi))
    large, small = (call(aten.where.self, mostly_real, *each) for each in ((br, bi), (bi, br)))
    share = call(aten.div.Tensor, small, large)
    scale = call(aten.reciprocal.default, call(aten.add.Tensor, large, call(aten.mul.Tensor, small, share)))
    ar_share, ai_share = _times(call, ar, share), _times(call, ai, share)
    real = call(aten.where.self, mostly_real, _plus(call, ai_share, ar), _plus(call, ar_share, ai))
    imag = call(aten.where.self, mostly_real, _minus(call, ai, ar_share), _minus(call, ai_share, ar))
    by_zero = call(aten.bitwise_and.Tensor, call(aten.eq.Scalar, large, 0), call(aten.eq.Scalar, small, 0))
    inverse = call(aten.reciprocal.default, call(aten.abs.default, large))
    quotients = ((_times(call, inverse, ar), real), (_times(call, inverse, ai), imag))
    return Parts(*(call(aten.where.self, by_zero, at, call(aten.mul.Tensor, part, scale)) for at, part in quotients))


def _div_by_real(call: Call, a: Parts, b: Real | complex) -> Parts | None:
    """Smith's method with an imaginary part of 0, which matters for values that are not finite."""
    if isinstance(b, complex) or (not isinstance(b, Node) and b == 0):
        return None
    if isinstance(b, Node):
        b = _without_symbol(call, b)
        scale = call(aten.reciprocal.default, call(aten._to_copy.default, b, dtype=a.real.meta["val"].dtype))
        share: Real = call(aten.mul.Tensor, scale, 0.0)
    else:
        scale, share = 1 / b, 0.0 / b
    real, imag = _plus(call, a.real, _times(call, a.imag, share)), _minus(call, a.imag, _times(call, a.real, share))
    return Parts(_times(call, real, scale), _times(call, imag, scale))


def _exp(call: Call, a: Parts) -> Parts:
    """As in C, also for infinite parts: with an angle that is not finite, e^inf is infinite and e^-inf is zero."""
    size, angle = call(aten.exp.default, a.real), a.imag
    finite = [call(aten.lt.Scalar, call(aten.abs.default, part), math.inf) for part in a]
    cosine = call(aten.where.ScalarOther, call(aten.bitwise_or.Tensor, *finite), call(aten.cos.default, angle), 1.0)
    imag = call(aten.mul.Tensor, size, call(aten.sin.default, angle))
    imag = call(aten.where.self, call(aten.eq.Scalar, size, 0), size, imag)
    return Parts(
        call(aten.mul.Tensor, size, cosine), call(aten.where.self, call(aten.eq.Scalar, angle, 0), angle, imag)
    )


def _matrices(target: Any) -> Rule:
    """A matrix product as four real ones, of dense operands."""

    def rule(call: Call, a: Parts, b: Parts) -> Parts:
        (ar, ai), (br, bi) = (Parts(*(_dense(call, part) for part in each)) for each in (a, b))
        real = call(aten.sub.Tensor, call(target, ar, br), call(target, ai, bi))
        return Parts(real, call(aten.add.Tensor, call(target, ar, bi), call(target, ai, br)))

    return rule


def _dense(call: Call, part: Node) -> Node:
    """A tensor without gaps between its elements, dimensions in the same order."""
    shape, strides = shape_of(part.meta["val"]), strides_of(part.meta["val"])
    span = total((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return part if span == product(shape) else call(aten.clone.default, part)


def _by_parts(target: Any) -> Rule:
    """The rule of an operator that applies to each part separately, with the same other arguments."""

    def rule(call: Call, *args: Any, **kwargs: Any) -> Any:
        def of(index: int) -> Any:
            chosen = pytree.tree_map(
                lambda leaf: leaf[index] if isinstance(leaf, Parts) else leaf,
                (args, kwargs),
                is_leaf=lambda leaf: isinstance(leaf, Parts),
            )
            return call(target, *chosen[0], **chosen[1])

        real, imag = of(0), of(1)
        if not isinstance(real.meta["val"], list | tuple):
            return Parts(real, imag)
        return [
            Parts(*(call(operator.getitem, each, i) for each in (real, imag))) for i in range(len(real.meta["val"]))
        ]

    return rule


def _combining(target: Any, values: Collection[int]) -> Rule:
    """Like `_by_parts`, with tensors or lists of tensors at these positions, each of which may be real."""
    by_parts = _by_parts(target)

    def rule(call: Call, *args: Any) -> Parts:
        def lifted(value: Any) -> Any:
            if isinstance(value, list | tuple) and not isinstance(value, Parts):
                return [lifted(each) for each in value]
            return _tensors(call, value)

        return by_parts(call, *(lifted(arg) if position in values else arg for position, arg in enumerate(args)))

    return rule


def _to_copy(call: Call, a: Parts | Node, dtype: torch.dtype | None = None, **kwargs: Any) -> Parts | None:
    if kwargs or dtype not in REAL:
        return None
    parts = _as_parts(call, a)
    copies = [call(aten._to_copy.default, x, dtype=REAL[dtype]) if isinstance(x, Node) else x for x in parts]
    return _tensors(call, Parts(*copies))


def _full(
    call: Call, size: Any, value: Number | complex, dtype: torch.dtype | None = None, **kwargs: Any
) -> Parts | None:
    if dtype not in REAL:
        return None
    parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0.0)
    return Parts(*(call(aten.full.default, size, part, dtype=REAL[dtype], **kwargs) for part in parts))


def _where(call: Call, condition: Node, a: Any, b: Any) -> Parts:
    chosen = zip(_tensors(call, a), _tensors(call, b), strict=True)
    return Parts(*(call(aten.where.self, condition, *each) for each in chosen))


def _equal(call: Call, a: Any, b: Any) -> Node:
    pairs = zip(_tensors(call, a), _tensors(call, b), strict=True)
    return call(aten.bitwise_and.Tensor, *(call(aten.eq.Tensor, *pair) for pair in pairs))


def _conjugate(call: Call, a: Parts | complex) -> Parts:
    if isinstance(a, Parts):
        return Parts(a.real, call(aten.neg.default, a.imag))
    return Parts(*(call(aten.full.default, [], x, dtype=torch.get_default_dtype()) for x in (a.real, -a.imag)))


def _polar(call: Call, size: Node, angle: Node) -> Parts:
    return Parts(*(call(aten.mul.Tensor, size, call(turn, angle)) for turn in (aten.cos.default, aten.sin.default)))


def _square(call: Call, a: Parts, exponent: Any) -> Parts | None:
    return _mul(call, a, a) if exponent == 2 else None


_RULES: Mapping[Any, Rule] = {
    aten.view_as_complex.default: from_pairs,
    aten.complex.default: lambda call, real, imag: Parts(real, imag),
    aten.polar.default: _polar,
    aten._conj.default: _conjugate,
    aten.conj_physical.default: _conjugate,
    aten.resolve_conj.default: lambda call, a: a,
    aten.abs.default: lambda call, a: call(aten.hypot.default, *a),
    aten.angle.default: lambda call, a: call(aten.atan2.default, a.imag, a.real),
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.reciprocal.default: lambda call, a: _div(call, 1.0, a),
    aten.exp.default: _exp,
    aten.pow.Tensor_Scalar: _square,
    aten.mm.default: _matrices(aten.mm.default),
    aten.bmm.default: _matrices(aten.bmm.default),
    aten.where.self: _where,
    aten.eq.Tensor: _equal,
    aten.ne.Tensor: lambda call, a, b: call(aten.logical_not.default, _equal(call, a, b)),
    aten.full.default: _full,
    aten._to_copy.default: _to_copy,
}

# Operators that combine tensors into one, and the positions of these among the arguments.
_COMBINING: Mapping[Any, tuple[int, ...]] = {
    aten.cat.default: (0,),
    aten.copy.default: (0, 1),
    aten.slice_scatter.default: (0, 1),
    aten.select_scatter.default: (0, 1),
    aten.index_put.default: (0, 2),
    aten.scatter.src: (0, 3),
}

# Linear operators: each part of the result is the operator applied to that part of the operands.
_LINEAR = """
    neg.default clone.default sum.default sum.dim_IntList mean.default mean.dim cumsum.default flip.default roll.default
    repeat.default tril.default triu.default index.Tensor index_select.default gather.default
"""
_BY_PARTS = {getattr(getattr(aten, name), overload) for name, overload in (each.split(".") for each in _LINEAR.split())}


def rule_of(node: Node) -> Rule | None:
    """The rule that replaces a call by calls on parts; None if it reads whole tensors."""
    target = node.target
    if target in _RULES:
        return _RULES[target]
    if target in _COMBINING:
        return _combining(target, _COMBINING[target])
    if target in _BY_PARTS:
        return _by_parts(target)
    if target in (aten.view.default, aten._unsafe_view.default):
        return _by_parts(aten.view.default)
    is_view = aliases(node) and not may_write(node) and target not in (aten.as_strided.default, aten.view.dtype)
    return _by_parts(target) if is_view else None
