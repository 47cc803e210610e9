"""Where the time outside compiled graphs goes in Python: calls of the program under cProfile.

cProfile slows down Python functions but hardly C++, so the parts are scaled to the total measured without it. It does
not see an operator written as `a + b` as a call: its time belongs to the enclosing function.
"""

from __future__ import annotations

import cProfile
import importlib.util
import pstats
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import pellucid
from pellucid.errors import UserError
from pellucid.kit.profile.result import PythonCall, PythonFunction, PythonPart, PythonSide

GRAPHS, OPERATORS, YOURS = "compiled graphs", "operators that were not compiled", "your program"
_OTHER = "other libraries"
_SECONDS, _MAX_CALLS = 0.3, 200
_FORMATS = (".pstats", ".dot", ".svg", ".png", ".pdf")
_GUARDS = "TorchDynamo Cache Lookup"
_FUNCTION_SHARE, _CALL_SHARE = 0.005, 0.001  # gprof2dot omits functions and calls below these too

_LIBRARIES = tuple(sysconfig.get_paths()[each] for each in ("purelib", "stdlib"))
_TORCH = Path(torch.__file__).parent
_FOLDERS = {
    **dict.fromkeys((f"{_TORCH}/_dynamo", f"{_TORCH}/_guards", f"{_TORCH}/_compile", f"{_TORCH}/compiler"), "Dynamo"),
    f"{_TORCH}/_functorch": "AOTAutograd",
    f"{_TORCH}/": "PyTorch's Python",
    f"{Path(pellucid.__file__).parent}/": "Pellucid",
    **dict.fromkeys((*_LIBRARIES, "<"), _OTHER),
}
"""The part that a file belongs to, by its folder; files in no listed folder are the user's."""


class _Function(NamedTuple):
    """A function as pstats names it. file: `~` for native functions."""

    file: str
    line: int
    name: str


@dataclass(frozen=True, slots=True)
class _Timed:
    """The times of a function. own, total: seconds. callers: by caller, the calls that it makes, own and total."""

    calls: int
    own: float
    total: float
    callers: Mapping[_Function, tuple[int, float, float]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What cProfile and torch.profiler measured of a program. stats: None if cProfile could not run.

    seconds: of a call under cProfile. guards: the share of a call that Dynamo's guards take.
    """

    stats: pstats.Stats | None
    calls: int
    seconds: float
    guards: float
    why_not: str = ""


def look_at_python(call: Callable[[], Any]) -> Seen:
    """Run some calls of a program under torch.profiler, which times guards, then under cProfile."""
    begin = perf_counter()
    call()
    count = max(1, min(_MAX_CALLS, round(_SECONDS / max(perf_counter() - begin, 1e-6))))
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        begin = perf_counter()
        for _ in range(count):
            call()
        taken = (perf_counter() - begin) * 1e6
    guards = sum(each.self_cpu_time_total for each in profiler.key_averages() if each.key == _GUARDS) / taken
    python = cProfile.Profile()
    try:
        python.enable()
    except ValueError as error:  # another profiling tool is active
        return Seen(None, count, 0.0, guards, str(error))
    begin = perf_counter()
    try:
        for _ in range(count):
            call()
    finally:
        seconds = perf_counter() - begin
        python.disable()
    return Seen(pstats.Stats(python), count, seconds / count, guards)


def python_side(seen: Seen, python: float, plain: float, compiled: bool) -> PythonSide:
    """The result of a measurement. python: microseconds of a call outside kernels and library calls, without cProfile;
    plain: of a whole call. compiled: whether operators called from Python are part of `python`; in an eager profile
    they have rows of their own.
    """
    if seen.stats is None:
        return PythonSide(0.0, seen.guards * plain, (), (), (), seen.why_not)
    timed = dict(_timed(seen.stats))
    parts = _parts(timed)
    shares = Counter[str]()
    for split in parts.values():
        for part, own in split.items():
            shares[part] += own  # type: ignore[assignment]
    outside = {part: own for part, own in shares.items() if part != GRAPHS and (compiled or part != OPERATORS)}
    scale = max(0.0, python) / (sum(outside.values()) or 1.0)
    made = tuple(PythonPart(part, own * scale) for part, own in sorted(outside.items(), key=lambda each: -each[1]))
    whole = seen.seconds * seen.calls or 1.0
    kept = sorted(
        (each for each in timed if timed[each].total / whole >= _FUNCTION_SHARE), key=lambda each: -timed[each].total
    )
    functions = tuple(_function(each, timed[each], parts[each], seen.calls) for each in kept)
    number = {each: n for n, each in enumerate(kept)}
    calls = tuple(
        PythonCall(number[caller], number[callee], count / seen.calls, total / seen.calls * 1e6)
        for callee in kept
        for caller, (count, _, total) in timed[callee].callers.items()
        if caller in number and total / whole >= _CALL_SHARE
    )
    return PythonSide(seen.seconds * 1e6 / plain if plain else 0.0, seen.guards * plain, made, functions, calls)


def _timed(stats: pstats.Stats) -> Iterator[tuple[_Function, _Timed]]:
    found: Mapping[Any, Any] = stats.stats  # type: ignore[attr-defined]
    for key, (_, calls, own, total, callers) in found.items():
        yield (
            _Function(*key),
            _Timed(calls, own, total, {_Function(*each): (n, tt, ct) for each, (_, n, tt, ct) in callers.items()}),
        )


def _function(function: _Function, timed: _Timed, split: Mapping[str, float], calls: int) -> PythonFunction:
    part = max(split, key=lambda each: split[each])
    where = "" if function.file == "~" else f"{_short(function.file)}:{function.line}"
    return PythonFunction(
        function.name.removeprefix("<").removesuffix(">") if function.file == "~" else function.name,
        where,
        part,
        timed.calls / calls,
        timed.own / calls * 1e6,
        timed.total / calls * 1e6,
    )


# ------------------------------------------------------------------------------------------------ as a picture


def check_callgraph(file: Path) -> None:
    """Raise UserError if a call graph cannot be written: the format is unknown, or a tool is not installed."""
    if file.suffix not in _FORMATS:
        raise UserError(f"{file} has an unknown call graph format", hint=f"use one of {', '.join(_FORMATS)}")
    if file.suffix != ".pstats" and importlib.util.find_spec("gprof2dot") is None:
        hint = "pip install 'pellucid[callgraph]'; or write FILE.pstats, which needs no tool"
        raise UserError("gprof2dot, which draws call graphs, is not installed", hint=hint)
    if file.suffix not in (".pstats", ".dot") and shutil.which("dot") is None:
        hint = "apt-get install graphviz; or write FILE.dot, which needs gprof2dot only"
        raise UserError("Graphviz, which lays call graphs out, is not installed", hint=hint)


def write_callgraph(seen: Seen, file: Path) -> None:
    """Write cProfile's data as `.pstats`, or as the call graph that gprof2dot draws of it: `.dot`, or an image.

    Raises UserError if cProfile could not run, and if the file cannot be written.
    """
    if seen.stats is None:
        raise UserError(f"there is no call graph: {seen.why_not}", hint="stop the other profiling tool")
    with TemporaryDirectory() as folder:
        raw = file if file.suffix == ".pstats" else Path(folder, "python.pstats")
        try:
            seen.stats.dump_stats(raw)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error}", hint="give a writable file") from error
        if raw is file:
            return
        dot = file if file.suffix == ".dot" else Path(folder, "python.dot")
        subprocess.run([sys.executable, "-m", "gprof2dot", "-f", "pstats", "-o", dot, raw], check=True)
        if dot is not file:
            subprocess.run(["dot", f"-T{file.suffix[1:]}", "-o", file, dot], check=True)


# ------------------------------------------------------------------------------------------------ the parts of the time


def _parts(timed: Mapping[_Function, _Timed]) -> dict[_Function, dict[str, float]]:
    """Each function's own seconds by part. The time of a native function belongs to the parts of its callers."""
    inside = _inside(timed)
    found: dict[_Function, dict[str, float]] = {}
    for function, each in timed.items():
        if function in inside:
            found[function] = {GRAPHS: each.own}
        elif function.file != "~":
            found[function] = {_part(function.file): each.own}
        else:
            split = Counter[str]()
            for caller, (_, own, _) in each.callers.items():
                split[_of_builtin(function, caller, inside)] += own  # type: ignore[assignment]
            found[function] = dict(split) or {_OTHER: each.own}
    return found


def _of_builtin(function: _Function, caller: _Function, inside: Mapping[_Function, None]) -> str:
    if caller in inside:
        return GRAPHS
    part = _part(caller.file) if caller.file != "~" else _OTHER
    calls_torch = "torch" in function.name and "torch._C._dynamo" not in function.name
    return OPERATORS if calls_torch and part in (YOURS, "PyTorch's Python") else part


def _part(file: str) -> str:
    return next((part for folder, part in _FOLDERS.items() if file.startswith(folder)), YOURS)


def _short(file: str) -> str:
    """A path relative to the folders of Python and its packages."""
    return next((file.removeprefix(f"{each}/") for each in _LIBRARIES if file.startswith(f"{each}/")), file)


def _inside(timed: Mapping[_Function, _Timed]) -> dict[_Function, None]:
    """The functions that run compiled graphs, and those that only these call."""
    found = {each: None for each in timed if _runs_graph(each)}
    grown = bool(found)
    while grown:
        more = [
            each
            for each, of in timed.items()
            if each not in found and of.callers and all(c in found for c in of.callers)
        ]
        found.update(dict.fromkeys(more))
        grown = bool(more)
    return found


def _runs_graph(function: _Function) -> bool:
    """Whether a function runs a graph: Pellucid's native `run` of an instance, or the call that times Inductor's."""
    if function.file == "~":
        return function.name == "<built-in method run>"
    return function.name == "__call__" and function.file.endswith("pellucid/kit/subjects/inductor/timing.py")
