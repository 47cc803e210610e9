"""Capture an unmodified script: it runs with `torch.compile` capturing into a run instead of compiling.

The graphs run eagerly, so the script behaves as without compilation, and the fault to be found cannot crash it.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from pellucid.errors import NotJudged, UserError
from pellucid.kit.debug.frontend import listening, starting
from pellucid.kit.process.child import NOT_THE_USERS
from pellucid.kit.programs.graphs import Recorder
from pellucid.kit.runs.run import open_run, save_graph
from pellucid.kit.subjects.registry import subject_of
from pellucid.trace.folder import RunWriter, check_free
from pellucid.trace.schema import RUN

_EXIT = "exit"  # in `run.json`: the argument of the script's `sys.exit`


def capture_script(
    command: Sequence[str], folder: Path, backend: str, options: Mapping[str, Any], seconds: float
) -> None:
    """Run `python [-m MODULE | SCRIPT.py] ...` and write each graph that it compiles, with its first inputs, into a new
    run.

    backend, options: for which graphs are captured. The script's output goes to stderr. Raises UserError when the
    command is not Python, takes longer than `seconds`, or compiles nothing; NotJudged when it fails.
    """
    subject_of(backend, options)
    check_free(folder)
    python, flags, rest = _split(command)
    about = json.dumps(
        {"folder": str(folder), "backend": backend, "options": dict(options), "target": " ".join(command)}
    )
    search = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))))
    call = [python, *flags, "-m", "pellucid.kit.debug.script", about, *rest]
    try:
        ended = subprocess.run(call, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": search}, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"the script did not end within {seconds:g} s", hint="raise the limit with --timeout") from None
    if ended.returncode:
        raise NotJudged(
            f"the script {_how_it_ended(folder, ended.returncode)} while its graphs ran eagerly",
            hint=f"its output is above; it ran under {shutil.which(python)}, which needs torch and pellucid",
        )
    if not open_run(folder).names:
        raise UserError("the script compiled nothing", hint="only functions compiled with torch.compile are captured")


def _how_it_ended(folder: Path, status: int) -> str:
    itself = (folder / RUN).is_file() and _EXIT in open_run(folder).about
    return f"called sys.exit with status {status}" if itself else f"ended with {status}"


def _split(command: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The interpreter, its flags, and what it runs."""
    python, *rest = command
    if not Path(python).name.startswith("python"):
        raise UserError(f"{python} is not Python", hint="give -- python SCRIPT.py ...")
    if shutil.which(python) is None:
        raise UserError(f"there is no program {python}", hint="give -- python SCRIPT.py ...")
    flags: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        flags += [rest.pop(0)] if rest[0] not in ("-X", "-W") else [rest.pop(0), rest.pop(0)]
    if not rest or "-c" in flags or rest == ["-m"]:
        raise UserError("the command names no script", hint="give -- python SCRIPT.py ... or -- python -m MODULE ...")
    if rest[0] != "-m" and not Path(rest[0]).exists():
        raise UserError(f"there is no file {rest[0]}", hint="give -- python SCRIPT.py ...")
    return python, flags, rest


# ------------------------------------------------------------------------------------------------ in its process


def main(arguments: Sequence[str]) -> None:
    """Run a script with `torch.compile` replaced."""
    about, *command = json.loads(arguments[0]), *arguments[1:]
    folder = Path(about.pop("folder"))
    writer = RunWriter.create(folder, **about)
    recorder = Recorder(partial(save_graph, writer))
    _replace_compile(subject_of(about["backend"], about["options"]).capturing(recorder.compiler))
    ended: SystemExit | None = None
    with listening() as refusals, starting(about["backend"], about["options"]) as starts:
        try:
            _run(command)
        except SystemExit as end:  # many scripts end with it, also without an error
            ended = end
        except Exception as error:
            sys.exit(_own_lines(traceback.TracebackException.from_exception(error)))
    writer.note(refusals=[asdict(each) for each in refusals], starts=[asdict(each) for each in starts])
    if ended is not None:
        if ended.code:
            writer.note(**{_EXIT: str(ended.code)})
        raise ended


def _own_lines(error: traceback.TracebackException) -> str:
    """A traceback without the frames of PyTorch and Pellucid, and without exceptions that have no other frames."""
    _remove_frames(error)
    return re.sub(r"^Set TORCHDYNAMO_VERBOSE.*\n+", "", "".join(error.format()), flags=re.MULTILINE).rstrip()


def _remove_frames(error: traceback.TracebackException) -> bool:
    """Remove the frames of PyTorch and Pellucid. False if none is left."""
    left = [frame for frame in error.stack if not frame.filename.startswith(NOT_THE_USERS)]
    error.stack = traceback.StackSummary.from_list(left)
    for name in ("__cause__", "__context__"):
        inner = getattr(error, name)
        if inner is not None and not _remove_frames(inner):
            setattr(error, name, None)
    return bool(left)


def _replace_compile(backend: Callable[..., Any]) -> None:
    """Make every later `torch.compile` use this backend, whatever backend, mode and options it is passed."""
    original = torch.compile

    def compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda fn: compile(fn, **kwargs)
        passed = {name: kwargs[name] for name in ("fullgraph", "dynamic", "disable") if name in kwargs}
        return original(model, backend=backend, **passed)

    torch.compile = compile  # type: ignore[assignment]


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
