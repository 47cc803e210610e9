"""Reuse of graphs that an earlier process compiled: AOTAutograd does not trace, and no stage of the compiler runs.

Dynamo captures a graph and guards it, as always. The store may then have, under the graph's key, its compiled form:
pickled programs with the text of their kernels, which the store has built, and the results of AOTAutograd.

    look_up ─► found: call it
        └────► missed: capture, compile; `Witness` ─► keep ─► store
"""

from __future__ import annotations

import gc
import hashlib
import io
import itertools
import json
import logging
import pickle
import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from pellucid.background import finished, when_finished
from pellucid.capture.fx import first_calls, first_line
from pellucid.capture.identity import identity, shares_memory
from pellucid.capture.resume import Captured, NotResumable, Witness, adopt, counted, resume, traces, unmet
from pellucid.capture.torch_compat import artifact_logger, structured_artifact
from pellucid.description import operator_of
from pellucid.executable import Name
from pellucid.ir.decision import Decision
from pellucid.native.build import default_store
from pellucid.native.machine import machine_for
from pellucid.options import Options
from pellucid.pipeline import ARTIFACTS, new_name

_PACKAGE = Path(__file__).parent
# Packages that compiled programs don't depend on.
_IRRELEVANT = ("kit", "cli")
_SOURCES = "Pellucid"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Result of a graph's lookup. outcome: `found`, `missed` or `bypassed`. key: in the store, if it has one."""

    outcome: str
    reason: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    @property
    def decision(self) -> Decision:
        """The result in the form of the compiler's decisions."""
        return Decision("reuse", ("graph",), self.outcome == "found", self.reason)


_starts: deque[Start] = deque(maxlen=1000)
_numbers = itertools.count()


def last_starts() -> list[Start]:
    """The lookups of the Dynamo graphs of this process, oldest first (the last 1000)."""
    return list(_starts)


@dataclass(frozen=True, slots=True)
class Kept:
    """The compiled form of a Dynamo graph, written after its `Captured`. notes: its `Compilation`s, for users."""

    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]] | None
    notes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """run: the compiled graph, called with its arguments. notes: as in `Kept`."""

    run: Callable[..., Any]
    notes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """key: under which the store saves the graph once it is compiled. about: the header to save with it."""

    key: str
    about: Mapping[str, Any]


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector: graphs live until the end, so that collections would free little."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def look_up(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options
) -> tuple[Start, Found | Missed | None]:
    """The compiled form of a Dynamo graph from an earlier process, and why it was found or not; None if bypassed."""
    if _is_traced(options):
        untraced = consult(graph, inputs, replace(options, trace=""))
        start, found = Start("bypassed", f"a trace shows every stage; without one, {untraced}"), None
    else:
        start, found = _find(graph, inputs, options, partial(_start, graph, inputs))
    _report(start)
    return start, found


def consult(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> Start:
    """The result that `look_up` would have for a graph."""
    return _find(graph, inputs, options, lambda *_: None)[0]


def _find(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, use: Callable[[_Reader, Captured], Any]
) -> tuple[Start, Any]:
    """Use the first entry of the store that is intact and whose guards hold for the current sizes."""
    try:
        parts = parts_of(graph, inputs, options)
    except NotResumable as why:
        return Start("bypassed", str(why)), None
    key = _key(parts)
    reasons: list[str] = []
    for data in default_store().programs(key):
        if isinstance(data, str):
            reasons.append(data)
            continue
        try:
            reader = _Reader(io.BytesIO(data))
            captured: Captured = reader.load()
            guard = unmet(captured.guards)
            if not guard:
                return Start("found", "an earlier process compiled it", key), use(reader, captured)
            reasons.append(f"it was compiled for sizes with {guard}")
        except Exception as error:  # a damaged pickle may raise any exception
            reasons.append(f"the program in the store cannot be read: {type(error).__name__}: {error}")
    about = _about(graph, parts)
    return Start("missed", "; ".join(reasons) or _nearest(about["line"], about["parts"]), key), Missed(key, about)


def _about(graph: torch.fx.GraphModule, parts: Mapping[str, str]) -> dict[str, Any]:
    """The header of a program in the store, except its graphs. parts: as short hashes, to find which of them differ."""
    short = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in parts.items()}
    line, threads = first_line(graph.graph), torch.get_num_threads()
    calls = first_calls(graph.graph)
    return {"line": line, "calls": calls, "threads": threads, "versions": _versions(), "parts": short}


def _nearest(line: str, short: Mapping[str, str]) -> str:
    """Why nothing was found: how the graph differs from the most similar one that begins at the same line.

    A graph of PyTorch's own modules has no line of the user's: it is compared with graphs of the same calls.
    """
    known = [about["parts"] for about in default_store().headers() if about.get("line") == line and "parts" in about]
    if not line:
        known = [each for each in known if each.get("graph") == short["graph"]]
    changed = [[name for name in short if each.get(name) != short[name]] for each in known]
    nearest = min(filter(None, changed), key=len, default=None)
    if nearest is None:
        return "nothing like it was compiled before"
    return f"what was compiled before differs in {', '.join(nearest)}"


def witness(missed: Missed, inputs: Sequence[Any], notes: list[Any]) -> Witness:
    """Saves the compiled form of a Dynamo graph for later processes. notes: filled during compilation."""
    return Witness(partial(_keep, missed.key, missed.about, notes), shares_memory(inputs))


def parts_of(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> dict[str, str]:
    """Everything that determines the compiled form of a graph, by name, except the toolchain, PyTorch's release and the
    CPU, which are in the name of the store. Raises NotResumable.
    """
    if not options.reuse:
        raise NotResumable("the option `reuse` is off")
    return identity(graph, inputs) | _environment(options)


def _key(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def _is_traced(options: Options) -> bool:
    logs = any(artifact_logger(name).isEnabledFor(logging.DEBUG) for name in ARTIFACTS)
    return bool(options.trace) or traces() or logs


def _environment(options: Options) -> dict[str, str]:
    return {
        "options": repr(sorted(asdict(replace(options, background=False)).items())),
        "machine": repr(machine_for(options.machine)),
        **_versions(),
    }


def _versions() -> dict[str, str]:
    return {
        _SOURCES: _own_sources(),
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__} {torch.version.git_version}",
    }


@lru_cache(maxsize=1)
def _own_sources() -> str:
    """A hash of the compiler's own sources."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        where = path.relative_to(_PACKAGE)
        if path.suffix in (".py", ".h", ".cpp") and where.parts[0] not in _IRRELEVANT:
            digest.update(f"{where} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _start(graph: torch.fx.GraphModule, inputs: Sequence[Any], reader: _Reader, captured: Captured) -> Found:
    with uncollected():
        kept: Kept = reader.load()
    adopt(captured.guards)
    return Found(resume(graph, inputs, captured, kept.forward, kept.backward), kept.notes)


def stale(about: Mapping[str, Any]) -> str:
    """Why no process can find a program of the store any more, whatever it captures; empty if one may.

    about: its header in the store.
    """
    versions = about.get("versions") or {}
    for name, here in _versions().items():
        if versions.get(name) != here:
            which = "" if name == _SOURCES else f" ({versions.get(name)}; here it is {here})"
            return f"it was compiled by another version of {name}{which}"
    return ""


def _keep(
    key: str,
    about: Mapping[str, Any],
    notes: Sequence[Any],
    captured: Captured | NotResumable,
    forward: Any,
    backward: Any,
) -> None:
    """Save the compiled form of a Dynamo graph, once it is built."""
    if isinstance(captured, NotResumable):
        _report(Start("bypassed", str(captured), key))
        return
    graphs = [{"kind": each.kind, "nodes": each.nodes, "kernels": each.kernels} for each in notes]
    data = io.BytesIO()
    writer = _Writer(data)

    def finish() -> None:
        if _written(writer, key, lambda: Kept(finished(forward), finished(backward), tuple(notes))):
            default_store().add_program(key, data.getvalue(), {**about, "graphs": graphs})

    if _written(writer, key, lambda: captured):  # now, because AOTAutograd continues to use it
        when_finished((forward, backward), finish)


def _written(writer: _Writer, key: str, part: Callable[[], object]) -> bool:
    """Whether a part of an entry could be pickled; otherwise the next process compiles the graph again."""
    try:
        value = part()
        with uncollected():
            writer.dump(value)
        return True
    except Exception as why:  # each type that cannot be pickled raises its own
        _report(Start("bypassed", f"it cannot be written down: {why}", key))
        return False


class _Writer(pickle.Pickler):
    """Pickles operators by their names, and names of programs by persistent ids."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, obj: Any) -> str | None:
        return str(obj) if isinstance(obj, Name) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return operator_of, (obj.name(),)
        if isinstance(obj, torch._ops.OperatorBase):
            raise NotResumable(f"it calls {obj.name()} between its programs")
        names = _fields_of(type(obj))
        return (type(obj), tuple([getattr(obj, name) for name in names])) if names else NotImplemented


@lru_cache(maxsize=256)
def _fields_of(cls: type) -> tuple[str, ...]:
    """The constructor arguments of one of our frozen dataclasses: twice as fast as setting each field."""
    ours = is_dataclass(cls) and cls.__module__.startswith("pellucid.") and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return tuple(field.name for field in fields(cls) if field.init) if ours else ()


class _Reader(pickle.Unpickler):
    """Unpickles programs under names that are new in this process."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._names: dict[str, Name] = {}

    def persistent_load(self, pid: Any) -> Name:
        kind, number, *part = pid.split("_")
        if number not in self._names:
            self._names[number] = new_name(kind)
        return Name("_".join((self._names[number], *part)))


def _report(start: Start) -> None:
    """Record the result of a lookup, for Python, for logs and for `TORCH_TRACE`."""
    _starts.append(start)
    counted(start.outcome)
    log.info("%s %s: %s", start.outcome, start.key, start.reason)
    structured_artifact(f"pellucid_start_{next(_numbers)}_reuse", "json", lambda: json.dumps(asdict(start)))
