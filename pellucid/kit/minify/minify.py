"""Find the smallest graph that still fails in the same way.

A candidate is a set of calls of an FX graph. Values that they need from outside become inputs, with eager's values;
values that other calls read, or that are unused, are returned. So any set is a graph that runs, and removing a suffix,
dead code and unused inputs needs no extra steps.

Compilation dominates the time, so the search compiles rarely. The whole graph is compiled once, and cosimulation (or
the step in which the process died, or the compiler's message) names the suspect calls. Each of them alone is a
candidate, and all of these are compiled side by side, as one graph: wrong results show at once which of them fail, and
if the graph fails to compile or crashes, bisection finds the first. Where no single call fails, calls are removed by
delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002), starting near the
suspects. Then the inputs are simplified, and the written program is run to verify that it fails.

The search runs in a separate process that captures the graphs, and in forks of it that compile and run them.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pellucid.errors import UserError
from pellucid.kit.judge.judge import Verdict
from pellucid.kit.minify import program
from pellucid.kit.minify.predicate import Predicate
from pellucid.kit.minify.repro import How, write_repro
from pellucid.kit.minify.result import Minified, Shrunk
from pellucid.kit.minify.subgraph import (
    CapturedGraphs,
    Subgraph,
    merged_inputs,
    simpler_types,
    single_sizes,
    smaller_sizes,
)
from pellucid.kit.minify.trial import GOOD, Found, Kind, capture_graphs, found_of, run_program, try_parts, try_whole
from pellucid.kit.process.apart import Apart, Died, died, say
from pellucid.kit.process.child import SECONDS, Failure
from pellucid.kit.process.forks import Forks
from pellucid.kit.runs.literal import NotWritable
from pellucid.kit.runs.run import split_run
from pellucid.kit.runs.target import Request
from pellucid.kit.subjects.registry import subject_of

__all__ = ["GOOD", "Kind", "Minified", "Settings", "Shrunk", "minify", "search"]

# Limit for candidates when the failure is a hang; the original program has the limit in the settings.
_HANG_SECONDS = 30.0
# Dimensions that are tried first: one, a vector and its remainder, several of each.
_SIZES = (1, 2, 17, 67)
# How many steps before the suspects the cause is searched for, when it is none of them.
_STEPS_BEFORE = 8
# Numbers of calls before and after the suspects that are tried before the whole graph.
_REACH = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Settings:
    """jobs: candidates tried in parallel. budget: seconds for the whole search. seconds, memory (bytes; 0: three
    quarters of what is available): limits of one candidate. command: a user's predicate, see `predicate.Predicate`.
    """

    jobs: int = 1
    budget: float = 600.0
    seconds: float = SECONDS
    memory: int = 0
    command: str = ""

    @property
    def limit(self) -> float:
        """Seconds for everything: capturing, and running the final program, may each take as long as a candidate."""
        return self.budget + 2 * self.seconds


def minify(
    request: Request,
    folder: Path,
    *,
    jobs: int = 1,
    budget: float = 600.0,
    seconds: float = SECONDS,
    memory: int = 0,
    command: str = "",
    tell: Callable[[Shrunk], None] = lambda progress: None,
) -> Minified:
    """Shrink the failing graph of a program and write a standalone program that reproduces the failure into `folder`.

    See `Settings`. tell: is called with the progress. Raises UserError when the program cannot be captured.
    """
    settings = Settings(jobs, budget, seconds, memory, command)
    work = Apart("pellucid.kit.minify.minify:search", request, str(Path(folder).absolute()), settings)
    try:
        return work.result(tell, settings.limit)
    except Died as death:
        raise died(request.target, death) from None


# ------------------------------------------------------------------------------------------------ in the process


def search(request: Request, folder: str, settings: Settings, text: bool = False) -> Minified:
    """Minify, in a process that has no threads yet, see `forks`. text: report the progress as text."""
    threads = request.threads or torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.monotonic()
    warming = threading.Thread(target=subject_of(request.backend, request.options).warm_up)
    warming.start()
    captured = capture_graphs(replace(request, threads=0))
    warming.join()
    captured_in = time.monotonic() - started
    with (
        tempfile.TemporaryDirectory(prefix="pellucid-minify-") as kernels,
        Forks(settings.jobs, threads, settings.memory) as forks,
    ):
        captured.subject.keep_kernels(Path(kernels))
        work = _Search(captured, forks, settings, started, request, text)
        work.times["capture"] = captured_in
        for name in captured.graphs:
            found = _minify_graph(work, name, Path(folder))
            if found is not None:
                return found
        return _before_graphs(work, Path(folder))


@dataclass(slots=True)
class _Search:
    """The state of a search. known: results of candidates tried alone. grouped: results of candidates tried together
    with others, which are only hints. queries: the number of compiled graphs.
    """

    captured: CapturedGraphs
    forks: Forks
    settings: Settings
    started: float
    request: Request
    text: bool = False
    known: dict[Subgraph, Found] = field(default_factory=dict)
    grouped: dict[Subgraph, Found] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    times: dict[str, float] = field(default_factory=dict)
    queries: int = 0
    nodes_before: int = 0
    predicate: Predicate | None = None

    def result(self, kind: Kind, after: int, **more: Any) -> Minified:
        """The result of the search."""
        more = {"graph": "", "repro": "", **more}
        seconds = time.monotonic() - self.started
        others = tuple(sorted(self.others))
        times = {name: round(each, 3) for name, each in self.times.items()}
        return Minified(
            self.request.backend, kind, self.nodes_before, after, self.queries, seconds, others=others,
            finished=not self.out_of_time(), times=times, **more,
        )  # fmt: skip

    def how(self, part: Subgraph, tolerance: float = 0.0) -> How:
        """How a part is compiled and compared; symbolic sizes, for example of a run, stay symbolic."""
        request = self.request
        dynamic = (self.captured.symbolic(part) or None) if request.dynamic is None else request.dynamic
        return How(request.backend, request.options, dynamic, tolerance)

    def tell(self, part: Subgraph, step: str) -> None:
        """Report the progress."""
        seconds = time.monotonic() - self.started
        progress = Shrunk(part.graph, step, self.nodes_before, len(part.names), self.queries, seconds)
        say(str(progress) if self.text else progress)

    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.started + self.settings.budget

    def capped(self, limit: float) -> float:
        """The limit for a candidate in seconds, capped by the rest of the budget."""
        return max(1.0, min(limit, self.started + self.settings.budget - time.monotonic()))

    def alone(self, part: Subgraph, wanted: Kind) -> bool:
        """Whether a part fails as wanted."""
        if part not in self.known:
            self._ask([part], wanted)
        return wanted.same(self.known[part].kind)

    def first(self, candidates: Sequence[Subgraph], wanted: Kind) -> Subgraph | None:
        """The first of several candidates that fails as wanted when it is tried alone."""
        fresh = [each for each in candidates if each not in self.known and each not in self.grouped]
        if len(fresh) > 1 and self._can_be_grouped(fresh):
            self._try_groups(fresh, self.settings.jobs, wanted)
        tried = [each for each in candidates if each in self.known or each in self.grouped]
        order = [each for each in (*tried, *candidates) if self._may_fail(each, wanted)]
        for at in range(0, len(order), self.settings.jobs):
            if self.out_of_time():
                return None
            some = order[at : at + self.settings.jobs]
            self._ask([each for each in some if each not in self.known], wanted)
            found = next((each for each in some if wanted.same(self.known[each].kind)), None)
            if found is not None:
                return found
        return None

    def _can_be_grouped(self, parts: Sequence[Subgraph]) -> bool:
        """Whether parts can be one graph: not with a predicate, nor if a symbol would have several sizes."""
        same = len({each.changes for each in parts}) == 1
        return self.predicate is None and (same or not self.captured.symbolic(parts[0]))

    def _may_fail(self, part: Subgraph, wanted: Kind) -> bool:
        """Whether a part may fail as wanted, according to the results so far."""
        found = self.known.get(part) or self.grouped.get(part)
        return found is None or wanted.same(found.kind)

    def _ask(self, parts: Sequence[Subgraph], wanted: Kind) -> None:
        """Try parts, each alone."""
        for part, found in zip(parts, self._try([(part,) for part in parts], wanted), strict=True):
            self._note(found, (part,), wanted)

    def _try_groups(self, candidates: Sequence[Subgraph], groups: int, wanted: Kind) -> bool:
        """Try candidates in groups, each compiled as one graph; a group that fails as a whole is divided further.

        Returns whether one was found that fails as wanted; the others need not be tried then.
        """
        size = -(-len(candidates) // groups)
        several = [tuple(candidates[at : at + size]) for at in range(0, len(candidates), size)]
        for at in range(0, len(several), self.settings.jobs):
            if self.out_of_time():
                return False
            some = several[at : at + self.settings.jobs]
            answers = self._try(some, wanted)
            for group, found in zip(some, answers, strict=True):
                if isinstance(found, tuple) or len(group) == 1:
                    self._note(found, group, wanted)
            for group, found in zip(some, answers, strict=True):
                if isinstance(found, tuple) or len(group) == 1:
                    if any(self._may_fail(each, wanted) for each in group):
                        return True
                elif self._divide(group, found, wanted):
                    return True
        return False

    def _divide(self, group: Sequence[Subgraph], found: Found, wanted: Kind) -> bool:
        """Divide a group that failed as a whole, and try its suspects first."""
        suspects = [each for each in group if set(each.names) & set(found.nodes)]
        if 0 < len(suspects) < len(group):
            rest = [each for each in group if each not in suspects]
            return self._try_groups(suspects, 1, wanted) or self._try_groups(rest, 1, wanted)
        return self._try_groups(group, max(2, self.settings.jobs), wanted)

    def _try(self, parts: Sequence[tuple[Subgraph, ...]], wanted: Kind) -> list[Found | tuple[Found, ...]]:
        """The results of groups of parts: one for each part, or a single one for a group that failed as a whole."""
        if not parts:
            return []
        self.queries += len(parts)
        if self.predicate is not None:
            with ThreadPoolExecutor(self.settings.jobs) as pool:
                return list(pool.map(self.predicate.found, (group[0] for group in parts)))
        limit = self.capped(_HANG_SECONDS if wanted.verdict == Verdict.HANG.value else self.settings.seconds)
        answers = self.forks.map(try_parts, [(group,) for group in parts], limit)
        return [found_of(answer) if isinstance(answer, Failure) else answer for answer in answers]

    def _note(self, found: Found | tuple[Found, ...], parts: Sequence[Subgraph], wanted: Kind) -> None:
        each = found if isinstance(found, tuple) else (found,)
        for part, one in zip(parts, each, strict=True):
            (self.known if len(parts) == 1 else self.grouped)[part] = one
            if one.kind != GOOD and not wanted.same(one.kind):
                self.others.add(str(one.kind))


def _minify_graph(work: _Search, name: str, folder: Path) -> Minified | None:
    """Minify one graph; None when it does not fail."""
    whole = Subgraph(name, work.captured.names(name))
    work.nodes_before = len(whole.names)
    work.tell(whole, "the whole graph")
    found = _timed(work, "whole graph", lambda: _whole(work, whole))
    if found.kind == GOOD:
        return None
    work.tell(whole, str(found.kind))
    part, wanted = _timed(work, "calls", lambda: _fewer_calls(work, whole, found))
    simple = _timed(work, "inputs", lambda: _simplify_inputs(work, part, wanted))
    return _write_program(work, simple, part, wanted, folder)


def _timed(work: _Search, step: str, do: Callable[[], Any]) -> Any:
    began = time.monotonic()
    try:
        return do()
    finally:
        work.times[step] = work.times.get(step, 0.0) + time.monotonic() - began


def _whole(work: _Search, whole: Subgraph) -> Found:
    """How a whole graph fails, and the suspect calls; none with a predicate."""
    if work.settings.command:
        work.predicate = Predicate(work.settings.command, work.captured, work.how(whole), work.settings.seconds)
        work.queries += 1
        work.known[whole] = work.predicate.found(whole)
        return work.known[whole]
    answer = work.forks.call(try_whole, whole.graph, seconds=work.capped(work.settings.seconds))
    work.queries += 1
    found = found_of(answer) if isinstance(answer, Failure) else answer
    work.known[whole] = Found(found.kind)
    return found


def _fewer_calls(work: _Search, whole: Subgraph, found: Found) -> tuple[Subgraph, Kind]:
    """The fewest calls that fail in the same way: a single one if possible, else those that delta debugging leaves.

    Also returns the kind of failure, without the suspect operators if none of them fails alone: the first wrong result
    that was observed may come from a wrong one that was not.
    """
    captured, name, wanted = work.captured, whole.graph, found.kind
    suspects = captured.units(name, found.nodes)
    if suspects:
        if wanted.verdict == Verdict.ERROR.value and work.alone(suspects[0], wanted):  # named by the message
            return suspects[0], wanted
        single = work.first(suspects, wanted)
        if single is not None:
            return single, wanted
        wanted = replace(wanted, operators=())
        single = work.first(
            captured.units(name, captured.before(name, found.nodes, _STEPS_BEFORE), duplicates=False), wanted
        )
        if single is not None:
            return single, wanted
    single = work.first(captured.units(name, whole.names, duplicates=False), wanted)
    if single is not None:
        return single, wanted
    tries = [Subgraph(name, tuple(each for each in whole.names if each in set(found.nodes)))]
    tries += [captured.around(name, found.nodes, reach) for reach in _REACH]
    for part in dict.fromkeys(each for each in tries if 0 < len(each.names) < len(whole.names)):
        if not work.out_of_time() and work.alone(part, wanted):
            return _delta(work, part, wanted), wanted
    return _delta(work, whole, wanted), wanted


def _delta(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    """Delta debugging over the calls: drop one of n parts, or all but one, until no single call can be dropped."""
    parts = 2
    while len(part.names) > 1 and not work.out_of_time():
        names = part.names
        work.tell(part, f"dropping {-(-len(names) // parts)} calls at a time")
        size = -(-len(names) // parts)
        chunks = [names[at : at + size] for at in range(0, len(names), size)]
        rest = [tuple(name for name in names if name not in set(chunk)) for chunk in chunks] if parts > 2 else []
        smaller = work.first([Subgraph(part.graph, chunk) for chunk in chunks], wanted)
        for each in rest if smaller is None else ():
            if not work.out_of_time() and work.alone(Subgraph(part.graph, each), wanted):
                smaller = Subgraph(part.graph, each)
                break
        if smaller is not None:
            parts = 2 if len(smaller.names) <= size else max(2, parts - 1)
            part = smaller
        elif size == 1:
            break
        else:
            parts = min(len(names), 2 * parts)
    return part


# ------------------------------------------------------------------------------------------------ the program


def _before_graphs(work: _Search, folder: Path) -> Minified:
    """Minify the program when all its graphs are right but differ from the program.

    Not for a run, which begins with its graphs, nor with a predicate, which judges graphs.
    """
    request = work.request
    if split_run(request.target) is not None or work.settings.command:
        return work.result(GOOD, 0)

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        work.queries += 1
        return work.forks.call(function, *args, seconds=work.capped(work.settings.seconds))

    def tell(step: str) -> None:
        work.tell(Subgraph("before the graphs", ("",) * work.nodes_before), step)

    found = _timed(work, "program", lambda: program.smallest(request, folder, ask, work.out_of_time, tell))
    if found is None:
        return work.result(GOOD, 0)
    work.nodes_before = found.nodes_before
    shown = _timed(work, "program", partial(_reproduces, work, Path(found.repro), found.kind))
    result = work.result(found.kind, found.nodes_after, repro=found.repro, shown=shown, changes=found.changes)
    return replace(result, before=found.fault)


# ------------------------------------------------------------------------------------------------ inputs


def _simplify_inputs(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    """Try fewer inputs, smaller dimensions, simpler types and values; keep each change that preserves the failure."""
    steps = (
        ("fewer inputs", _merge_inputs),
        ("sizes", _shrink_sizes),
        ("types", _simplify_types),
        ("numbers", _simplify_numbers),
    )
    for step, simplify in steps:
        if work.out_of_time():
            break
        work.tell(part, step)
        part = simplify(work, part, wanted)
    return part


def _all_or_each(work: _Search, part: Subgraph, changes: Sequence[str], wanted: Kind) -> Subgraph:
    """The part with all changes if it still fails; else with those that preserve the failure one after the other."""
    if changes and work.alone(part.changed(*changes), wanted):
        return part.changed(*changes)
    for change in changes if len(changes) > 1 else ():
        if not work.out_of_time() and work.alone(part.changed(change), wanted):
            part = part.changed(change)
    return part


def _merge_inputs(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    return _all_or_each(work, part, merged_inputs(work.captured.inputs(part)), wanted)


def _shrink_sizes(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    inputs = work.captured.inputs(part)
    symbolic = work.captured.symbolic(part)
    limits = [limit for limit in _SIZES if limit > 1 or not symbolic]  # a dimension of 1 is never dynamic
    tries = list(smaller_sizes(part, inputs, limits))
    if wanted.verdict == Verdict.WRONG.value:
        found = work.first(tries, wanted)
    else:  # compiled as one graph they would only fail together
        found = next((each for each in tries if not work.out_of_time() and work.alone(each, wanted)), None)
    if found is None:
        return part
    singles = [] if symbolic else single_sizes(found, work.captured.inputs(found))
    if len({size for each in inputs for size in each.shape}) > 1 and len(singles) > 1:
        found = _all_or_each(work, found, singles, wanted)
    return found


def _simplify_types(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    return _all_or_each(work, part, simpler_types(work.captured.inputs(part)), wanted)


def _simplify_numbers(work: _Search, part: Subgraph, wanted: Kind) -> Subgraph:
    """Simplify all inputs at once, else one by one. The compiled code stays the same, so these queries are cheap."""
    numbers = [each.number for each in work.captured.inputs(part) if not each.plain]
    for kind in ("ones", "integers"):
        changed = part.changed(*(f"{kind} in {number}" for number in numbers))
        if numbers and work.alone(changed, wanted):
            return changed
    for number in numbers if len(numbers) > 1 else ():
        for kind in ("ones", "zeros", "integers"):
            if not work.out_of_time() and work.alone(part.changed(f"{kind} in {number}"), wanted):
                part = part.changed(f"{kind} in {number}")
                break
    return part


# ------------------------------------------------------------------------------------------------ writing it


def _write_program(work: _Search, simple: Subgraph, part: Subgraph, wanted: Kind, folder: Path) -> Minified:
    """Write the program and run it; if it does not fail with the simplified inputs, use the original ones."""
    work.tell(simple, "the program")
    shown, path, text = False, folder, ""
    for each in dict.fromkeys((simple, part)):
        how = work.how(each, work.known[each].tolerance)
        try:
            path, text = write_repro(work.captured.cut(each), how, folder, f"A graph that fails: {wanted}.")
        except NotWritable as error:
            raise UserError(f"the inputs of the failing graph cannot be written to a file: {error}") from error
        shown = _timed(work, "program", partial(_reproduces, work, path, wanted))
        simple = each
        if shown:
            break
    return work.result(wanted, len(simple.names), graph=text, repro=str(path), shown=shown, changes=simple.changes)


def _reproduces(work: _Search, path: Path, wanted: Kind) -> bool:
    """Whether a program fails as wanted when run in a fork, which inherits patches made in this process."""
    if work.predicate is not None:
        return work.predicate.holds(path)
    limit = _HANG_SECONDS if wanted.verdict == Verdict.HANG.value else work.settings.seconds
    answer = work.forks.call(run_program, str(path), seconds=min(limit, work.settings.seconds))
    found = found_of(answer) if isinstance(answer, Failure) else answer
    return found.kind.verdict == wanted.verdict and found.kind.what == wanted.what
