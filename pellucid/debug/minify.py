"""The smallest graph that still fails in the same way.

A candidate is a set of calls of an FX graph. What they need from outside becomes an input, with the value that eager
gives it; what others need of them, or nobody, is returned. So any set is a graph that runs, and cutting off a suffix,
dead code and unused inputs need no steps of their own. Where a kernel is suspected (by cosimulation, or because the
process died in it), the search begins at the calls that the kernel implements.

Calls are removed by delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002);
then the inputs' dimensions are halved and their values simplified, as long as the failure stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from pellucid.debug.check import Request
from pellucid.debug.child import SECONDS, Failure, Marker, Worker, failure_of, pass_on
from pellucid.debug.cosim import COMPLETE, LIVE, cosim_graphs
from pellucid.debug.graphs import calls_of
from pellucid.debug.judge import Verdict
from pellucid.debug.subgraph import NotAGraph, Subgraph, compare, simpler, workshop
from pellucid.errors import UserError


@dataclass(frozen=True, slots=True)
class Kind:
    """How something fails: what a smaller graph has to have in common with the original.

    verdict: as `check` has it. what: the exception's type or the signal; empty for wrong numbers.
    """

    verdict: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.verdict} ({self.what})" if self.what else self.verdict


GOOD = Kind("good")


@dataclass(frozen=True, slots=True)
class Minified:
    """kind: of failure. graph: its text. repro: the standalone program. others: failures of another kind
    that were met on the way, and not followed.
    """

    backend: str
    kind: Kind
    nodes_before: int
    nodes_after: int
    queries: int
    seconds: float
    graph: str
    repro: str
    others: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there was nothing to minify."""
        return self.kind == GOOD


@dataclass(slots=True)
class _Search:
    """The candidates that were tried, by what they are. workers: processes that are free."""

    request: Request
    seconds: float
    deadline: float
    tell: Callable[[str], None]
    workers: SimpleQueue[Worker]
    jobs: int
    known: dict[Subgraph, Kind] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)

    def kind_of(self, candidate: Subgraph) -> Kind:
        """How a candidate fails, from memory if it was tried before."""
        if candidate not in self.known:
            answer = self.call("pellucid.debug.minify:try_part", candidate)
            self.known[candidate] = Kind(answer.kind, answer.what) if isinstance(answer, Failure) else answer
        return self.known[candidate]

    def call(self, function: str, *args: Any) -> Any:
        """What a function says of the request, in a process that is free; or how it ended."""
        worker = self.workers.get()
        try:
            return worker.call(function, self.request, *args, seconds=self.seconds)
        finally:
            self.workers.put(worker)

    def ask(self, function: str, *args: Any) -> Any:
        """The same for what should not fail. Raises UserError if it does."""
        answer = self.call(function, *args)
        if isinstance(answer, Failure):
            pass_on(answer)
            raise UserError(
                f"{self.request.target} cannot be minified: {answer.text or answer}", hint="see `pellucid bisect`"
            )
        return answer

    def first(self, candidates: Sequence[Subgraph], wanted: Kind) -> Subgraph | None:
        """The first candidate that fails as wanted; as many are tried at once as there are processes."""
        with ThreadPoolExecutor(self.jobs) as pool:
            for start in range(0, len(candidates), self.jobs):
                if time.monotonic() > self.deadline:
                    return None
                some = candidates[start : start + self.jobs]
                kinds = list(pool.map(self.kind_of, some))
                self.others |= {str(kind) for kind in kinds if kind not in (wanted, GOOD)}
                found = next((each for each, kind in zip(some, kinds, strict=True) if kind == wanted), None)
                if found is not None:
                    return found
        return None


def minify(
    request: Request,
    folder: Path,
    *,
    jobs: int = 1,
    budget: float = 600.0,
    seconds: float = SECONDS,
    memory: int = 0,
    tell: Callable[[str], None] = print,
) -> Minified:
    """Shrink the failing graph of a program and write a standalone program that shows it into `folder`.

    jobs: candidates that are tried at once. budget: seconds for the whole search. seconds, memory: what one candidate
    may take. Raises UserError when the program cannot be captured, or when no single graph fails.
    """
    started = time.monotonic()
    every = [Worker(memory) for _ in range(max(1, jobs))]
    workers: SimpleQueue[Worker] = SimpleQueue()
    for worker in every:
        workers.put(worker)
    search = _Search(request, seconds, started + budget, tell, workers, len(every))
    try:
        found = _start(search)
        if found is None:
            return Minified(request.backend, GOOD, 0, 0, len(search.known), time.monotonic() - started, "", "")
        before, part, wanted = found
        tell(f"{wanted}: {before} nodes, begin with {len(part.names)}")
        part = _simpler_inputs(search, _fewer_calls(search, part, wanted), wanted)
        text = search.ask("pellucid.debug.subgraph:write_repro", part, str(folder), f"A graph that fails: {wanted}.")
    finally:
        for worker in every:
            worker.close()
    return Minified(
        backend=request.backend,
        kind=wanted,
        nodes_before=before,
        nodes_after=len(part.names),
        queries=len(search.known),
        seconds=time.monotonic() - started,
        graph=text,
        repro=str(Path(folder) / "repro.py"),
        others=tuple(sorted(search.others)),
    )


def _start(search: _Search) -> tuple[int, Subgraph, Kind] | None:
    """How many calls the failing graph has, the part to begin with, and how it fails; None when nothing fails.

    The part is what the suspected kernel implements if that alone fails in the same way, else the whole graph.
    """
    for name, calls in search.ask("pellucid.debug.minify:graphs_of"):
        answer = search.call("pellucid.debug.minify:suspect", name)
        wanted, step = (Kind(answer.kind, answer.what), answer.step) if isinstance(answer, Failure) else answer
        if wanted == GOOD:
            continue
        few = search.ask("pellucid.debug.minify:calls_of_step", name, step) if step else ()
        if few and search.kind_of(Subgraph(name, tuple(few))) == wanted:
            return len(calls), Subgraph(name, tuple(few)), wanted
        return len(calls), Subgraph(name, tuple(calls)), wanted
    return None


def _fewer_calls(search: _Search, candidate: Subgraph, wanted: Kind) -> Subgraph:
    """Delta debugging over the calls: drop one of n parts, or all but one, until no single call can be dropped."""
    parts = 2
    while len(candidate.names) > 1 and time.monotonic() < search.deadline:
        names = candidate.names
        size = -(-len(names) // parts)
        chunks = [names[at : at + size] for at in range(0, len(names), size)]
        rest = [tuple(name for name in names if name not in set(chunk)) for chunk in chunks]
        tries = [
            replace(candidate, names=some) for some in (*(chunks if parts > 1 else ()), *(rest if parts > 2 else ()))
        ]
        smaller = search.first([each for each in tries if 0 < len(each.names) < len(names)], wanted)
        if smaller is not None:
            search.tell(f"{len(names)} -> {len(smaller.names)} nodes, {len(search.known)} queries")
            parts = 2 if len(smaller.names) <= size else max(2, parts - 1)
            candidate = smaller
        elif size == 1:
            break
        else:
            parts = min(len(names), 2 * parts)
    return candidate


def _simpler_inputs(search: _Search, candidate: Subgraph, wanted: Kind) -> Subgraph:
    """Smaller dimensions and plainer numbers, each kept if the failure stays."""
    changed = True
    while changed and time.monotonic() < search.deadline:
        changed = False
        described = search.ask("pellucid.debug.minify:describe_inputs", candidate)
        for smaller in simpler(candidate, *described):
            if search.first([smaller], wanted) is not None:
                candidate, changed = smaller, True
                search.tell(f"inputs: {smaller.changes[-1]}, {len(search.known)} queries")
                break
    return candidate


# ------------------------------------------------------------------------------------------------ in the worker


def graphs_of(request: Request) -> list[tuple[str, list[str]]]:
    """The graphs of a program and their calls."""
    graphs = workshop(request).graphs.values()
    return [(graph.name, [node.name for node in calls_of(graph.module)]) for graph in graphs]


def suspect(request: Request, name: str) -> tuple[Kind, str]:
    """How a whole graph fails, and in which step; dies of it where that is how it fails."""
    shop = workshop(request)
    for mode in (COMPLETE, LIVE):
        try:
            found = cosim_graphs([shop.graphs[name]], shop.subject, mode, Marker()).first_divergence
        except Exception as error:
            failure = failure_of(error)
            refused = shop.subject.refused(error)
            return Kind(failure.kind, failure.what), refused.kernel if refused is not None else ""
        if found is not None:
            return Kind(Verdict.WRONG.value), found.kernel
    return GOOD, ""


def calls_of_step(request: Request, name: str, step: str) -> list[str]:
    """The calls of a graph that a step (or kernels of that symbol) implements, in graph order."""
    shop = workshop(request)
    graph = shop.graphs[name]
    try:
        steps = shop.subject.compile(graph).steps
    except Exception as error:
        refused = shop.subject.refused(error)
        nodes = {node for value in refused.values.values() for node in value.origin.nodes} if refused else set()
    else:
        nodes = {node for each in steps if step in (each.name, each.symbol) for node in each.origin.nodes}
    return [node.name for node in calls_of(graph.module) if node.name in nodes]


def try_part(request: Request, part: Subgraph) -> Kind:
    """How a part of a graph fails."""
    shop = workshop(request)
    try:
        return Kind(Verdict.WRONG.value) if compare(shop.cut(part), shop.subject) is Verdict.WRONG else GOOD
    except NotAGraph:
        return GOOD
    except Exception as error:
        failure = failure_of(error)
        return Kind(failure.kind, failure.what)


def describe_inputs(request: Request, part: Subgraph) -> tuple[list[tuple[int, ...] | None], list[bool]]:
    """The shapes of the inputs of a part, and which of them are all ones or zeros."""
    inputs = workshop(request).cut(part).inputs
    tensors = [each if isinstance(each, torch.Tensor) else None for each in inputs]
    plain = [each is None or not each.numel() or bool((each == each.flatten()[0]).all()) for each in tensors]
    return [None if each is None else tuple(each.shape) for each in tensors], plain
