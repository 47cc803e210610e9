"""Errors for people: each says what happened, why, and what to do about it."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent) + os.sep


class PellucidError(Exception):
    """Base of all errors of this package.

    code: a stable short name, for scripts and documentation.
    message: what happened and where.
    hint: what the user can do.
    context: named facts (kernel, buffer, user line) about the cause.
    record: of the graph that was being compiled (`pellucid.trace.record.GraphRecord`), for the kit; None elsewhere.
    """

    code = "internal"
    record: Any = None

    def __init__(self, message: str, *, hint: str = "", context: dict[str, object] | None = None) -> None:
        self.message = message
        self.hint = hint
        self.context = dict(context or {})
        lines = [f"[{self.code}] {message}"]
        lines += [f"  {name}: {value}" for name, value in self.context.items()]
        if hint:
            lines.append(f"  hint: {hint}")
        super().__init__("\n".join(lines))


class UserError(PellucidError):
    """An invalid request of the user: an unknown option, a bad value."""

    code = "user"


class NotJudged(UserError):
    """The user's program cannot be judged: it fails without a compiler, or is not deterministic."""

    code = "not judged"


class UnsupportedError(PellucidError):
    """The request makes sense but Pellucid, this torch or this machine does not support it."""

    code = "unsupported"


class ToolchainError(PellucidError):
    """There is no usable C++ compiler, or it failed."""

    code = "toolchain"


class StoreError(PellucidError):
    """The kernel store cannot be used."""

    code = "store"


class InternalError(PellucidError):
    """A bug in Pellucid: an invariant of the compiler does not hold."""

    code = "internal"


BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, StopIteration, TypeError, ValueError)
"""Exceptions of Python that indicate a bug in our code; PyTorch reports errors of its caller by other ones."""


def bug(where: str, error: BaseException, context: dict[str, object] | None = None) -> InternalError:
    """One of `BUGS` as an InternalError that names where it happened."""
    hint = "this is a bug in Pellucid: please report it with what `pellucid capture` writes"
    return InternalError(f"{where}: {type(error).__name__}: {error}".rstrip(": "), hint=hint, context=context)


def near(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """`did you mean inductor?` if a known name is similar; else empty. similarity: minimum, from 0 to 1."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f"did you mean {matches[0]}?" if matches else ""


def warn(message: str) -> None:
    """Warn the user, at the line of their program that led here if there is one (our own threads have none)."""
    torch = getattr(sys.modules.get("torch"), "__file__", None) or _OURS
    inner = (_OURS, os.path.dirname(torch) + os.sep, threading.__file__, contextlib.__file__, "<frozen importlib")
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level if frame is not None else 2)
