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
    context: named facts (kernel, buffer, user line) that help to find the cause.
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
    """The user asked for something that cannot be: an unknown option, a bad value."""

    code = "user"


class NotJudged(UserError):
    """Nothing can be said of the user's program: it fails without a compiler, or does not repeat itself."""

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
"""What Python raises where code of ours is wrong; what PyTorch asks of its caller by raising it is none of these."""


def bug(where: str, error: BaseException, context: dict[str, object] | None = None) -> InternalError:
    """One of `BUGS` as an error that says where it happened."""
    hint = "this is a bug in Pellucid: please report it with what `pellucid capture` writes"
    return InternalError(f"{where}: {type(error).__name__}: {error}".rstrip(": "), hint=hint, context=context)


def near(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """`did you mean inductor?` where a known name is like this one; else empty. alike: at least, from 0 to 1."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=alike)
    return f"did you mean {found[0]}?" if found else ""


def warn(message: str) -> None:
    """Warn the user, at the line of theirs that led here if there is one (a thread of ours has none)."""
    torch = getattr(sys.modules.get("torch"), "__file__", None) or _OURS
    inner = (_OURS, os.path.dirname(torch) + os.sep, threading.__file__, contextlib.__file__, "<frozen importlib")
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level if frame is not None else 2)
