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
    dtype: str = "*"
    direction: str = "*"
    engine: str = "*"

    def covers(self, task: Task, engine: str) -> bool:
        pairs = (
            (task.name, self.name),
            (task.dtype, self.dtype),
            (task.direction, self.direction),
            (engine, self.engine),
        )
        return all(any(fnmatchcase(value, one) for one in pattern.split(",")) for value, pattern in pairs)


KNOWN: tuple[Known, ...] = (
    Known(
        "as_strided.partial_views",
        "UnsupportedError: the view begins before the first element of the input that it is made from",
    ),
    Known(
        "nn.functional.max_unpool2d,nn.functional.max_unpool2d.grad",
        "PyTorch's fake result of a channels-last input is contiguous, eager's is channels-last",
    ),
    Known(
        "nn.functional.interpolate.bilinear",
        "eager computes bytes in fixed point; PyTorch breaks the operator up into floats when it captures a graph",
        dtype="u8",
    ),
)


def reason(task: Task, engine: str) -> str | None:
    """Why a sample of this task may fail, or None."""
    return next((known.reason for known in KNOWN if known.covers(task, engine)), None)
