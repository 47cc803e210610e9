"""Samples that do not match eager, each with the reason. The sweep fails on any other, and on entries that are not
true any more."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.operators.cases import Task


@dataclass(frozen=True, slots=True)
class Known:
    """Tasks of which at least one sample does not match. Each part is a shell pattern, or several between commas."""

    name: str
    reason: str
    database: str = "*"
    dtype: str = "*"
    direction: str = "*"
    engine: str = "*"

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
        "nn.functional.max_unpool2d,nn.functional.max_unpool2d.grad",
        "PyTorch's fake result of a channels-last input is contiguous, eager's is channels-last",
    ),
    Known(
        "nn.functional.pad.reflect,nn.functional.pad.replicate",
        "PyTorch's fake result of a channels-last volume is contiguous, eager's is channels-last",
        database="large",
    ),
    Known(
        "div.floor_rounding,floor_divide,__rfloordiv__",
        "PyTorch's fake result of a float tensor in another layout is contiguous, eager's keeps the layout",
        database="large",
        dtype="f32,bf16",
    ),
    Known(
        "nn.functional.batch_norm",
        "PyTorch's fake result of transposed rows is transposed, eager's is contiguous",
        database="large",
    ),
    Known(
        "nn.functional.interpolate.bilinear,nn.functional.interpolate.bicubic,nn.functional.upsample_bilinear",
        "eager computes bytes in fixed point; PyTorch breaks the operator up into floats when it captures a graph",
        dtype="u8",
    ),
    Known(
        "_batch_norm_with_update",
        "RuntimeError: PyTorch's fake result has the saved statistics in f32, eager returns them in the input's type",
        dtype="bf16,f16",
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


def reason(task: Task, engine: str) -> str | None:
    """Why a sample of this task may fail, or None."""
    return next((known.reason for known in KNOWN if known.covers(task, engine)), None)
