"""Samples and special values that do not match eager, each with the reason. The tests fail on any other, and on entries
that are not true any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from tests.operators.cases import Task


@dataclass(frozen=True, slots=True)
class Known:
    """Tasks of which at least one sample does not match. Each part is a shell pattern, or several between commas.

    somewhere: eager has other code for other processors, and all samples may match with this one.
    """

    name: str
    reason: str
    database: str = "*"
    dtype: str = "*"
    direction: str = "*"
    engine: str = "*"
    somewhere: bool = False

    def covers(self, task: Task, engine: str) -> bool:
        pairs = (
            (task.name, self.name),
            (task.database, self.database),
            (task.dtype, self.dtype),
            (task.direction, self.direction),
            (engine, self.engine),
        )
        return all(any(fnmatchcase(value, one) for one in pattern.split(",")) for value, pattern in pairs)


KNOWN: tuple[Known, ...] = (
    Known(
        "arange",
        "eager's vectors count in bf16: from 4113 on its result is the whole number beside the nearest one",
        database="large",
        dtype="bf16",
        somewhere=True,
    ),
    Known(
        "nn.functional.one_hot",
        "PyTorch captures it as a comparison, whose result follows its argument's layout, under 'aot_eager' too",
        database="large",
    ),
    Known(
        "masked.prod",
        "the product of a million numbers is infinite, and so are gradients; eager has NaN, not so 'aot_eager'",
        database="large",
        direction="training",
    ),
    Known(
        "tensor_split,hsplit,vsplit,unflatten,view_as",
        "behind a graph break in a longer program AOTAutograd gives wrong gradients of views, under 'aot_eager' too",
        database="large",
        direction="training",
        somewhere=True,
    ),
    Known(
        "sinh,cosh",
        "eager's vectors without AVX-512 overflow early, from 88.73 on; the functions themselves do so from 89.42 on",
        database="large",
        dtype="u16",
        somewhere=True,
    ),
    Known(
        "index_copy",
        "the longer index names places several times, and which source stays in eager depends on its threads",
        database="large",
    ),
    Known(
        "nn.functional.conv3d",
        "a gradient of one channel's weight is a sum of 34,000 products, off by 4e-6 of it in f32; eager's by 4e-7",
        database="large",
        dtype="c64",
        direction="training",
        somewhere=True,
    ),
    Known(
        "istft",
        "PyTorch fails to make a fake result of long spectra, under backend='eager' too",
        database="large",
        dtype="c64",
    ),
    Known(
        "nn.functional.embedding",
        "AOTAutograd copies a table that max_norm changed back to expanded memory and fails, under 'aot_eager' too",
        database="large",
        direction="forward",
    ),
    Known(
        "_batch_norm_with_update",
        "RuntimeError: PyTorch's fake result has the saved statistics in f32, eager returns them in the input's type",
        dtype="bf16,f16",
    ),
    Known(
        "linalg.pinv,linalg.pinv.singular,pinverse",
        "wrong at a first call, while AOTAutograd watches ATen's (pytorch/pytorch#198118), under 'aot_eager' too",
        dtype="c64,c128",
    ),
    Known(
        "cov",
        "Dynamo itself fails on weights of dynamic sizes, under backend='eager' too",
        engine="dynamic",
    ),
    Known(
        "nn.functional.hardsigmoid",
        "eager's gradient in f64 multiplies by a sixth in f32, and so does the judge, which is eager in f64",
        dtype="f64",
        direction="training",
    ),
    Known(
        "nn.functional.cross_entropy",
        "a loss of 0.0155 is the difference of numbers near 1: it is off by 2e-16, which is 1.4e-14 of it",
        dtype="f64",
        engine="dynamic",
    ),
    Known(
        "cauchy,exponential,geometric,log_normal,normal.in_place,uniform,nn.functional.embedding,nn.functional.embedding_bag",
        "it changes its argument, the result of a convolution, and the sweep compares what went into that",
        direction="forward",
        engine="convolved",
    ),
    Known(
        "unfold",
        "AOTAutograd copies the gradient of a returned view with overlapping windows to overlapping strides",
        direction="training",
        engine="convolved",
    ),
)


@dataclass(frozen=True, slots=True)
class Special:
    """Special values for which an operator does not match. `where` gives them: (arguments, eager's result) -> mask.

    somewhere: eager has other code for other processors, and may match with this one.
    """

    names: str
    reason: str
    where: Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    somewhere: bool = False


_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64, torch.bfloat16)  # in range

SPECIAL: tuple[Special, ...] = (
    Special(
        "gelu",
        "oneDNN, which eager calls, gives NaN for infinity and infinity for the largest numbers; of results near 0 "
        "neither has many digits right, as 1 + erf(x) cancels",
        lambda args, eager: (args[0].double() > 1e38) | (args[0] < -1.9) | (eager == 0),
        (torch.float32, *_NARROW),
        somewhere=True,
    ),
    Special(
        "remainder,fmod",
        "eager's vectors give NaN where the quotient is huge, its scalars and we the rest",
        lambda args, eager: eager.isnan() & (args[0].double() / args[1].double()).abs().gt(1e6),
        _WIDE,
    ),
    Special(
        "relu,clamp_min,softshrink",
        "of two zeros that are equal eager chooses the other: the sign differs",
        lambda args, eager: eager == 0,
    ),
    Special(
        "div_trunc",
        "eager rounds the quotient before it is cut to a whole number; 9.99 is cut to 9 and not to 10",
        lambda args, eager: eager == (args[0] / args[1]).trunc(),
        _NARROW,
    ),
    Special(
        "isclose",
        "eager rounds both sides of the comparison",
        lambda args, eager: torch.ones_like(eager),
        (torch.float16,),
    ),
    Special(
        "lerp",
        "PyTorch breaks it up into operators of which the first may overflow, or cancel otherwise",
        lambda args, eager: (args[1] - args[0]).isinf() | (eager.abs() < 1e-3 * args[0].abs()),
        _WIDE,
    ),
)


def reason(task: Task, engine: str) -> str | None:
    """Why a sample of this task may fail, or None."""
    return next((known.reason for known in KNOWN if known.covers(task, engine)), None)
