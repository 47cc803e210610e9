"""Errors for people: each says what happened, why, and what to do about it."""

from __future__ import annotations


class PellucidError(Exception):
    """Base of all errors of this package.

    code: a stable short name, for scripts and documentation.
    message: what happened and where.
    hint: what the user can do.
    context: named facts (kernel, buffer, user line) that help to find the cause.
    """

    code = "internal"

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
