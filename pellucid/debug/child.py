"""Running what may crash, hang or eat all memory, in a process of its own whose end is a result.

A `Worker` is a Python process that runs functions of this package by name, one after the other, and remembers the
modules that it has imported. When one of them kills it, the next call starts a new one.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

import pellucid
from pellucid.apart import die_with_parent
from pellucid.debug.subject import Probe, Step
from pellucid.errors import InternalError, PellucidError, UserError

SECONDS = 300.0
_POLL_S = 0.02
NOTE_BYTES = 4096
NOTE = "NOTE_OF_PELLUCID_DEBUG"  # a name that does not begin like those of the compiler's options
NOT_THE_USERS = (str(Path(pellucid.__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call ended that did not return.

    kind: `error` (an exception), `crash` (a signal, an abort, no memory left) or `hang`.
    what: the exception's type, the signal's name, or the limit. text: the message, or the end of stderr.
    step: the step of a compiled graph that was running, if any was. trace: the user's frames of the exception.
    context: what the exception carries to explain it.
    """

    kind: str
    what: str
    text: str = ""
    step: str = ""
    trace: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        during = f" during {self.step}" if self.step else ""
        said = f": {self.text.strip().splitlines()[0]}" if self.text.strip() else ""
        return f"{self.what}{during}{said}"


def pass_on(failure: Failure) -> None:
    """Raise the UserError that a call ended with, if it did."""
    if failure.what == UserError.__name__:
        raise UserError(failure.text, hint=failure.context["hint"])


class Worker:
    """A process to call functions in. Close it, or use it as a context manager.

    memory: bytes that its memory may grow to; by default three quarters of what is available now.
    """

    def __init__(self, memory: int = 0) -> None:
        self._memory = memory or psutil.virtual_memory().available * 3 // 4
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-debug-")
        self._note = Path(self._folder.name) / "note"
        self._note.write_bytes(bytes(NOTE_BYTES))
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, *args: Any, seconds: float = SECONDS) -> Any:
        """What `package.module:function` returns for these arguments (pickled on the way); else a `Failure`."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        self._note.write_bytes(bytes(NOTE_BYTES))
        try:
            self._to.send_bytes(pickle.dumps((function, args)))
        except (BrokenPipeError, OSError):
            return self._ended()
        return self._wait(time.monotonic() + seconds, seconds)

    def ask(self, function: str, *args: Any, seconds: float, refused: str, hint: str) -> Any:
        """The same for what should not fail. Raises UserError if it does: its own, else `refused` with how it ended."""
        found = self.call(function, *args, seconds=seconds)
        if not isinstance(found, Failure):
            return found
        pass_on(found)
        raise UserError(f"{refused}: {found}", hint=hint)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            _kill(self._process)
        self._folder.cleanup()

    def _start(self) -> None:
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        code = f"from pellucid.debug.child import serve; serve({down_read}, {up_write})"
        environment = {**os.environ, NOTE: str(self._note), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(down_read, up_write),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        os.close(down_read)
        os.close(up_write)
        self._to, self._from = Connection(down_write, readable=False), Connection(up_read, writable=False)

    def _wait(self, deadline: float, seconds: float) -> Any:
        assert self._process is not None
        watched = psutil.Process(self._process.pid)
        while not self._from.poll(_POLL_S):
            if self._process.poll() is not None and not self._from.poll(0):
                return self._ended()
            if time.monotonic() > deadline:
                return self._stopped("hang", f"no end after {seconds:g} s")
            if resident(watched) > self._memory:
                return self._stopped("crash", f"out of memory: it used more than {self._memory >> 20} MB")
        try:
            return pickle.loads(self._from.recv_bytes())
        except EOFError:
            return self._ended()

    def _stopped(self, kind: str, what: str) -> Failure:
        assert self._process is not None
        step = self._step()
        _kill(self._process)
        return Failure(kind, what, self._said(), step)

    def _ended(self) -> Failure:
        assert self._process is not None
        status = self._process.wait()
        _kill(self._process)
        what = f"exit status {status}" if status >= 0 else signal_name(-status)
        return Failure("crash", what, self._said(), self._step())

    def _step(self) -> str:
        return self._note.read_bytes().rstrip(b"\0").decode(errors="replace")

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]


def resident(process: psutil.Process) -> int:
    """Bytes of memory that a process holds; 0 when it is gone."""
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def signal_name(number: int) -> str:
    """The name of a signal, also of one that Python does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ------------------------------------------------------------------------------------------------ in the worker


class Marker(Probe):
    """Notes the step that runs where the parent process finds it when this one is dead."""

    def __init__(self) -> None:
        path = os.environ.get(NOTE)
        if path is None:
            raise InternalError("a marker outside a worker process")
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), NOTE_BYTES)

    def before(self, step: Step) -> None:
        self.note(step.name)

    def after(self, step: Step, values: Mapping[str, Any]) -> None:
        self.note("")

    def note(self, text: str) -> None:
        raw = text.encode()[:NOTE_BYTES]
        self._memory[:] = raw + bytes(NOTE_BYTES - len(raw))


def serve(read: int, write: int) -> None:
    """Answer calls until the pipe closes."""
    die_with_parent()  # an endless loop would outlive a parent that is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls, answers = Connection(read, writable=False), Connection(write, readable=False)
    while True:
        try:
            name, args = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        answers.send_bytes(pickled(_answer(name, args)))


def _answer(name: str, args: tuple[Any, ...]) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(*args)
    except Exception as error:
        return failure_of(error)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those behind it."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def failure_of(error: BaseException) -> Failure:
    """An exception as a failure: that of the backend itself where Dynamo has wrapped it."""
    inner = getattr(error, "inner_exception", None) or error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_USERS)]
    trace = "".join(traceback.format_list(frames)).rstrip()
    text, context = str(inner), {}
    if isinstance(inner, PellucidError):
        text, context = inner.message, {**inner.context, "hint": inner.hint}
    return Failure("error", type(inner).__name__, text, "", trace, {key: str(value) for key, value in context.items()})


def pickled(answer: Any) -> bytes:
    """An answer as bytes; as a failure where it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        pickle.dump(answer, buffer)
    except Exception as error:
        return pickle.dumps(failure_of(error))
    return buffer.getvalue()
