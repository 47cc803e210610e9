"""Starting what an earlier process compiled: AOTAutograd traces nothing, and no stage of the compiler runs.

Dynamo captures a graph and guards it, as always. Under the graph's key the store may then have what it was compiled
to: pickled programs with the text of their kernels, which the store has built, and what AOTAutograd found out.

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

from pellucid.background import in_the_end, when_made
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
# What compiled programs don't depend on.
_ELSEWHERE = ("kit", "cli")
_SOURCES = "Pellucid"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """How a Dynamo graph was started. outcome: `found`, `missed` or `bypassed`. key: of the store, if it has one."""

    outcome: str
    reason: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.reason}"

    @property
    def decision(self) -> Decision:
        """The same as the compiler's rules say it."""
        return Decision("reuse", ("graph",), self.outcome == "found", self.reason)


_starts: deque[Start] = deque(maxlen=1000)
_numbers = itertools.count()


def last_starts() -> list[Start]:
    """How the Dynamo graphs of this process were started, oldest first (the last 1000)."""
    return list(_starts)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a Dynamo graph was compiled to, written after what is `Captured`. notes: what users are told of that."""

    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]] | None
    notes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """run: to be called with the graph's arguments. notes: as in `Kept`."""

    run: Callable[..., Any]
    notes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Missed:
    """key: under which the store keeps what the graph is compiled to now. about: what it is to say of that."""

    key: str
    about: Mapping[str, Any]


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector: graphs live until the end, so that walking them again finds little."""
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
    """What an earlier process compiled of a Dynamo graph, and how that was found or why not; None: it was bypassed."""
    if _is_traced(options):
        otherwise = consult(graph, inputs, replace(options, trace=""))
        start, found = Start("bypassed", f"a trace shows every stage; without one, {otherwise}"), None
    else:
        start, found = _find(graph, inputs, options, partial(_started, graph, inputs))
    _tell(start)
    return start, found


def consult(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> Start:
    """How `look_up` would start a graph."""
    return _find(graph, inputs, options, lambda *_: None)[0]


def _find(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options, use: Callable[[_Reader, Captured], Any]
) -> tuple[Start, Any]:
    """Use the first entry of the store that is whole and holds for the sizes of now."""
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
        except Exception as error:  # whatever a pickle that we did not write may raise
            reasons.append(f"the program in the store cannot be read: {type(error).__name__}: {error}")
    about = _about(graph, parts)
    return Start("missed", "; ".join(reasons) or _nearest(about["line"], about["parts"]), key), Missed(key, about)


def _about(graph: torch.fx.GraphModule, parts: Mapping[str, str]) -> dict[str, Any]:
    """What the store says of a program beside its graphs: each part as a few letters, to tell whether it is another."""
    short = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in parts.items()}
    line, threads = first_line(graph.graph), torch.get_num_threads()
    calls = first_calls(graph.graph)
    return {"line": line, "calls": calls, "threads": threads, "versions": _versions(), "parts": short}


def _nearest(line: str, short: Mapping[str, str]) -> str:
    """Why nothing was found: in what the graph differs from the most similar one that begins at the same line.

    A graph of PyTorch's own modules has no line of the user's: there it is one with the same calls.
    """
    told = [about["parts"] for about in default_store().headers() if about.get("line") == line and "parts" in about]
    if not line:
        told = [each for each in told if each.get("graph") == short["graph"]]
    changed = [[name for name in short if each.get(name) != short[name]] for each in told]
    nearest = min(filter(None, changed), key=len, default=None)
    if nearest is None:
        return "nothing like it was compiled before"
    return f"what was compiled before differs in {', '.join(nearest)}"


def witness(missed: Missed, inputs: Sequence[Any], notes: list[Any]) -> Witness:
    """Keeps what a Dynamo graph is compiled to, for later processes. notes: is filled meanwhile."""
    return Witness(partial(_keep, missed.key, missed.about, notes), shares_memory(inputs))


def parts_of(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> dict[str, str]:
    """All that decides what a graph is compiled to, by what it is called, but the toolchain, PyTorch's release and the
    CPU: these name the store. Raises NotResumable.
    """
    if not options.reuse:
        raise NotResumable("the option `reuse` is off")
    return identity(graph, inputs) | _surroundings(options)


def _key(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def _is_traced(options: Options) -> bool:
    logs = any(artifact_logger(name).isEnabledFor(logging.DEBUG) for name in ARTIFACTS)
    return bool(options.trace) or traces() or logs


def _surroundings(options: Options) -> dict[str, str]:
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
    """Identity of the compiler's own text."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        where = path.relative_to(_PACKAGE)
        if path.suffix in (".py", ".h", ".cpp") and where.parts[0] not in _ELSEWHERE:
            digest.update(f"{where} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _started(graph: torch.fx.GraphModule, inputs: Sequence[Any], reader: _Reader, captured: Captured) -> Found:
    with uncollected():
        kept: Kept = reader.load()
    adopt(captured.guards)
    return Found(resume(graph, inputs, captured, kept.forward, kept.backward), kept.notes)


def stale(about: Mapping[str, Any]) -> str:
    """Why no process finds a program of the store any more, whatever it captures; empty if one may.

    about: what the store says of it.
    """
    made = about.get("versions") or {}
    for name, here in _versions().items():
        if made.get(name) != here:
            which = "" if name == _SOURCES else f" ({made.get(name)}; here it is {here})"
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
    """Write down what a Dynamo graph was compiled to, once it is built."""
    if isinstance(captured, NotResumable):
        _tell(Start("bypassed", str(captured), key))
        return
    graphs = [{"kind": each.kind, "nodes": each.nodes, "kernels": each.kernels} for each in notes]
    data = io.BytesIO()
    writer = _Writer(data)

    def finish() -> None:
        if _written(writer, key, lambda: Kept(in_the_end(forward), in_the_end(backward), tuple(notes))):
            default_store().add_program(key, data.getvalue(), {**about, "graphs": graphs})

    if _written(writer, key, lambda: captured):  # at once: AOTAutograd goes on with it
        when_made((forward, backward), finish)


def _written(writer: _Writer, key: str, part: Callable[[], object]) -> bool:
    """Whether a part of an entry could be written down; what cannot is compiled again by the next process."""
    try:
        made = part()
        with uncollected():
            writer.dump(made)
        return True
    except Exception as why:  # as many as there are types that cannot be pickled
        _tell(Start("bypassed", f"it cannot be written down: {why}", key))
        return False


class _Writer(pickle.Pickler):
    """Operators are written by their names. Names of programs are told apart from other texts."""

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
    """The arguments that make one of our frozen dataclasses; calling these is twice as fast as setting each field."""
    ours = is_dataclass(cls) and cls.__module__.startswith("pellucid.") and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return tuple(field.name for field in fields(cls) if field.init) if ours else ()


class _Reader(pickle.Unpickler):
    """Gives programs names that are new in this process."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._names: dict[str, Name] = {}

    def persistent_load(self, pid: Any) -> Name:
        kind, number, *part = pid.split("_")
        if number not in self._names:
            self._names[number] = new_name(kind)
        return Name("_".join((self._names[number], *part)))


def _tell(start: Start) -> None:
    """Note how a graph was started, for Python, for logs and for `TORCH_TRACE`."""
    _starts.append(start)
    counted(start.outcome)
    log.info("%s %s: %s", start.outcome, start.key, start.reason)
    structured_artifact(f"pellucid_start_{next(_numbers)}_reuse", "json", lambda: json.dumps(asdict(start)))
