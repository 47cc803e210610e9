"""One call in a fresh process that reports its progress. This module is small, so that the process starts quickly."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pellucid.errors import InternalError, NotJudged, StoreError, ToolchainError, UserError

_PR_SET_PDEATHSIG = 1
_PROGRESS, _DONE, _REFUSED, _BROKE = "progress", "done", "refused", "broke"


class Died(Exception):
    """The process ended without an answer, or was killed. text: the tail of its stderr."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(why)
        self.text = text


def died(target: str, death: Died) -> UserError:
    """The error for a target that ends the process that captures it."""
    lines = death.text.strip().splitlines()
    return NotJudged(
        f"{target} cannot be inspected, {death}{': ' + lines[-1] if lines else ''}",
        hint="see `pellucid check`, which runs it in eager mode too",
    )


def begin(popen: Any, function: str, handle: int, output: Path, *, stdin: int, **variables: str) -> Any:
    """Start a fresh Python process, in its own session and with these environment variables, that calls
    `module:function` with an open file.

    popen: the class that starts it. output: the file for its stdout and stderr.
    """
    module, _, name = function.partition(":")
    with output.open("wb") as file:
        return popen(
            [sys.executable, "-c", f"from {module} import {name}; {name}({handle})"],
            pass_fds=(handle,),
            stdin=stdin,
            stdout=file,
            stderr=file,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )


class Apart:
    """One call of `package.module:function` in a separate process, which is started at once."""

    def __init__(self, function: str, *args: Any) -> None:
        read, write = os.pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-apart-")
        self._errors = Path(self._folder.name) / "stderr"
        self._process = begin(subprocess.Popen, f"{__name__}:serve", write, self._errors, stdin=subprocess.PIPE)
        os.close(write)
        self._from = Connection(read, writable=False)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(pickle.dumps((function, args)))

    def result(self, hear: Callable[[Any], None], seconds: float) -> Any:
        """The function's result. hear: called with each progress report.

        Raises the function's UserError, ToolchainError or StoreError, InternalError for any other exception of it, or
        Died, also after `seconds`.
        """
        deadline = time.monotonic() + seconds
        try:
            while self._from.poll(max(0.0, deadline - time.monotonic())):
                kind, what = pickle.loads(self._from.recv_bytes())
                if kind == _DONE:
                    return what
                if kind == _REFUSED:
                    kind_of_error, message, hint, context = what
                    raise kind_of_error(message, hint=hint, context=context)
                if kind == _BROKE:
                    raise InternalError(what)
                hear(what)
            raise Died(f"it did not end in {seconds:g} s", self._output())
        except EOFError:
            status = self._process.wait()
            how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
            raise Died(f"its process ended {how}", self._output()) from None
        finally:
            self.close()

    def _output(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:]

    def close(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._from.close()
        self._folder.cleanup()


# ------------------------------------------------------------------------------------------------ in the process

_answers: Connection | None = None


def die_with_parent() -> None:
    """Have this process killed when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def say(what: Any) -> None:
    """Report progress to the process that waits for this one, if there is one."""
    if _answers is not None:
        _answers.send_bytes(pickle.dumps((_PROGRESS, what)))


def serve(write: int) -> None:
    """Make the call that is pickled on standard input, and exit without waiting for other threads."""
    global _answers
    die_with_parent()
    _answers = Connection(write, readable=False)
    try:
        name, args = pickle.loads(sys.stdin.buffer.read())
        module, _, function = name.partition(":")
        message = pickle.dumps((_DONE, getattr(importlib.import_module(module), function)(*args)))
    except (UserError, ToolchainError, StoreError) as error:
        context = {key: str(value) for key, value in error.context.items()}
        message = pickle.dumps((_REFUSED, (type(error), error.message, error.hint, context)))
    except Exception:
        message = pickle.dumps((_BROKE, traceback.format_exc()))
    _answers.send_bytes(message)
    os._exit(0)
