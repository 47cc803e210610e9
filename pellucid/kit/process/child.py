"""Running code that may crash, hang or exhaust memory in a separate process, whose death is a result.

A `Child` is a monitored process that answers calls. A `Worker` uses a fresh one, which keeps the modules that it has
imported, and is restarted when a call has killed it; `forks.Forks` are copies of this process.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import re
import resource
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import torch

import pellucid
from pellucid.errors import BUGS, InternalError, NotJudged, PellucidError, StoreError, ToolchainError, UserError
from pellucid.kit.process.apart import begin, die_with_parent
from pellucid.kit.process.sanitizer import report_in
from pellucid.native.toolchain import INSTALL_HINT

SECONDS = 300.0
POLL_S = 0.02
PENDING = object()
NOTE_BYTES = 4096
_MAX_OUTPUT = 4000
_END_S = 1.0
_NO_COMPILER = "InvalidCxxCompiler"  # Inductor's
_WARNING = re.compile(r"^(?:\S.*:\d+: \w*Warning: .*\n(?:  .*\n)?|\[W\d{3,} .*\n)", re.MULTILINE)  # Python's, PyTorch's
NOTE = "NOTE_OF_PELLUCID_DEBUG"  # without the prefix PELLUCID_ of the compiler's options
NOT_THE_USERS = (str(Path(pellucid.__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call failed.

    kind: `error` (an exception), `crash` (a signal, an abort, out of memory) or `hang`.
    what: the exception's type, the signal's name, or the exceeded limit. text: the message, or the tail of stderr.
    step: the step of a compiled graph that was running, if any. trace: the user's frames of the exception.
    context: the exception's context, and its hint.
    """

    kind: str
    what: str
    text: str = ""
    step: str = ""
    trace: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        during = f" during {self.step}" if self.step else ""
        message = f": {gist(self.text)}" if self.text.strip() else ""
        return f"{self.what}{during}{message}"


def gist(text: str) -> str:
    """A message in one line: its first line, joined with the next one if it ends with a colon.

    >>> gist("backend='inductor' raised:\\nValueError: no\\n\\nSet TORCHDYNAMO_VERBOSE=1")
    "backend='inductor' raised: ValueError: no"
    """
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{first} {rest[0]}" if rest and first.endswith(":") else first


def not_judged(what: str, failure: Failure) -> NotJudged:
    """The error to raise where compiled code is not at fault. what: what failed. It includes the user's frames."""
    context: dict[str, object] = {"in your code": "\n" + failure.trace} if failure.trace else {}
    return NotJudged(f"{what}: {failure}", hint="fix that first", context=context)


def pass_on(failure: Failure) -> None:
    """Raise the error behind a failure if it is no verdict on compiled code but an error of the user or the machine."""
    kind = next(
        (each for each in (UserError, NotJudged, ToolchainError, StoreError) if each.__name__ == failure.what), None
    )
    if kind is not None:
        context = {name: value for name, value in failure.context.items() if name != "hint"}
        raise kind(failure.text, hint=failure.context["hint"], context=context)


class Child:
    """A process that answers calls, one at a time, and may die of one. It leads a session, which is killed as a whole.

    start: starts it, given this end of a pipe, the end that it serves, and the files for notes and for its output.
    memory: bytes that it may use.
    """

    def __init__(
        self, start: Callable[[Connection, Connection, Path, Path], psutil.Process], folder: Path, memory: int
    ) -> None:
        self._memory = memory
        name = uuid4().hex
        self._note, self._errors = folder / f"{name}.note", folder / f"{name}.stderr"
        self._note.write_bytes(bytes(NOTE_BYTES))
        self.pipe, theirs = Pipe()
        self._process = start(self.pipe, theirs, self._note, self._errors)
        theirs.close()
        self._seconds = self._deadline = 0.0

    @property
    def alive(self) -> bool:
        return self._status() is None

    def ask(self, function: str | Callable[..., Any], args: Sequence[Any], seconds: float) -> None:
        """Have it call a function (sent pickled, or given as `package.module:name`); `answer` returns the result."""
        self._note.write_bytes(bytes(NOTE_BYTES))
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        with suppress(OSError):  # it is dead, as `answer` will find out
            self.pipe.send_bytes(pickle.dumps((function, tuple(args))))

    def pause(self) -> None:
        """Stop it and the processes that it started until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it after `pause`."""
        self._signal(signal.SIGCONT)

    def answer(self, wait: float = 0.0) -> Any:
        """The function's result, or the `Failure` that it ended with; `PENDING` if neither comes in `wait` seconds.

        A failure may have ended the process.
        """
        if self.pipe.poll(wait):
            try:
                return pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                return self._ended()
            except Exception as error:  # an answer that cannot be unpickled here
                return failure_of(error)
        if not self.alive and not self.pipe.poll(0):
            return self._ended()
        if time.monotonic() > self._deadline:
            return self._stopped("hang", f"no end after {self._seconds:g} s")
        if self._resident() > self._memory:
            return self._stopped("crash", f"out of memory: it used more than {self._memory >> 20} MB")
        return PENDING

    def end(self) -> None:
        """Kill it and the processes that it started, once."""
        if self.pipe.closed:
            return
        self._signal(signal.SIGKILL)
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            self._process.kill()  # in case it has no session of its own yet
        self._process.wait()
        self.pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _status(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        try:
            return self._process.wait(timeout=0)
        except psutil.TimeoutExpired:
            return None

    def _resident(self) -> int:
        try:
            return self._process.memory_info().rss
        except psutil.Error:
            return 0

    def _ended(self) -> Failure:
        try:
            status = self._process.wait(timeout=max(_END_S, self._deadline - time.monotonic())) or 0
        except psutil.TimeoutExpired:
            return self._stopped("hang", f"no end after {self._seconds:g} s, and no answer to come")
        how = f"it ended itself with exit status {status}" if status >= 0 else _signal_name(-status)
        return self._stopped("crash", how)

    def _stopped(self, kind: str, what: str) -> Failure:
        step = self._note.read_bytes().rstrip(b"\0").decode(errors="replace")
        self.end()
        output = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        return Failure(kind, what, report_in(output) or _WARNING.sub("", output)[-_MAX_OUTPUT:], step)


class Worker:
    """A fresh Python process to call functions in, replaced when it dies. Use it as a context manager.

    memory: bytes that it may use; by default three quarters of what is available now.
    variables: environment variables, in addition to those of this process.
    """

    def __init__(self, memory: int = 0, variables: Mapping[str, str] | None = None) -> None:
        self._memory = memory or most_memory()
        self._variables = dict(variables or {})
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-debug-")
        self._child: Child | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str | Callable[..., Any], *args: Any, seconds: float = SECONDS) -> Any:
        """The result of a module-level function, or of `package.module:name`, for these arguments; else a `Failure`."""
        if self._child is not None and not self._child.alive:
            self._child.end()
            self._child = None
        child = self._child = self._child or Child(self._spawn, Path(self._folder.name), self._memory)
        child.go_on()
        try:
            child.ask(function, args, seconds)
            while (found := child.answer(POLL_S)) is PENDING:
                pass
        except BaseException:  # interrupted: a late answer would be taken for that of the next call
            child.end()
            raise
        return found

    def ask(self, function: str | Callable[..., Any], *args: Any, seconds: float, refused: str, hint: str) -> Any:
        """Like `call`, for a call that should not fail. Raises what `pass_on` does, else NotJudged: `refused` and how
        it failed."""
        found = self.call(function, *args, seconds=seconds)
        if not isinstance(found, Failure):
            return found
        pass_on(found)
        raise NotJudged(f"{refused}: {found}", hint=hint)

    def pause(self) -> None:
        """Stop it until the next call: idle threads of its libraries may spin, and take cores away."""
        if self._child is not None:
            self._child.pause()

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
        self._folder.cleanup()

    def _spawn(self, _ours: Connection, theirs: Connection, note: Path, errors: Path) -> psutil.Process:
        variables = {**self._variables, NOTE: str(note)}
        return begin(psutil.Popen, f"{__name__}:serve", theirs.fileno(), errors, stdin=subprocess.DEVNULL, **variables)


def most_memory() -> int:
    """The bytes that a process may use by default."""
    return psutil.virtual_memory().available * 3 // 4


def _signal_name(number: int) -> str:
    """The name of a signal, even if Python does not know it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ------------------------------------------------------------------------------------------------ in the worker


class Note:
    """A few bytes that the parent process reads when this one is dead: what it was doing."""

    def __init__(self) -> None:
        path = os.environ.get(NOTE)
        if path is None:
            raise InternalError("a marker outside a worker process")
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOTE_BYTES)

    def write(self, text: str) -> None:
        raw = text.encode()[:NOTE_BYTES]
        self._memory[:] = raw + bytes(NOTE_BYTES - len(raw))


def serve(handle: int) -> None:
    """Answer the calls received through a pipe, until it is closed."""
    die_with_parent()  # an endless loop would outlive a killed parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Connection(handle)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(_pickled(_answer(function, args)))


def _answer(function: str | Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        return function(*args)  # type: ignore[operator]
    except Exception as error:
        try:
            raise_if_nothing_compiles(error)
        except PellucidError as ours:
            error = ours
        return failure_of(error)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception followed by its causes."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def raise_if_nothing_compiles(error: BaseException) -> None:
    """Raise the ToolchainError or StoreError that caused an exception of a backend: it is no verdict on a program."""
    for each in chain_of(error):
        if type(each) in (ToolchainError, StoreError):
            raise each
        if type(each).__name__ == _NO_COMPILER:
            raise ToolchainError(str(each), hint=INSTALL_HINT) from error


def failure_of(error: BaseException) -> Failure:
    """An exception as a failure; of one that Dynamo has wrapped, the backend's own exception."""
    inner = getattr(error, "inner_exception", None) or error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_USERS)]
    trace = "".join(traceback.format_list(frames)).rstrip()
    text, context, what = str(inner), {}, type(inner).__name__
    if isinstance(inner, PellucidError):
        text, context = inner.message, {**inner.context, "hint": inner.hint}
    if isinstance(inner, InternalError) and isinstance(inner.__cause__, BUGS):
        what = f"{what} ({type(inner.__cause__).__name__})"  # bugs of different types are different failures
    return Failure("error", what, text, "", trace, {key: str(value) for key, value in context.items()})


def _pickled(answer: Any) -> bytes:
    """An answer as bytes, or a failure if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        pickle.dump(answer, buffer)
    except Exception as error:
        return pickle.dumps(failure_of(error))
    return buffer.getvalue()
