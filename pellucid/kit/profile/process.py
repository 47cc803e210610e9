"""Observations of the process while a program runs, which advice is based on in addition to times."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.kit.debug.doctor import faults_per_page, openmp_runtimes
from pellucid.kit.debug.frontend import GRAPH_BREAK, listening
from pellucid.kit.profile.result import Event, Process
from pellucid.kit.programs.calls import Observed, op_of
from pellucid.kit.stats import summarise
from pellucid.kit.subjects.refusals import Refusal
from pellucid.native.cpu import scheduled, usable_cores
from pellucid.native.runtime import flushed_denormals

_FAULTS = 1 / 16  # share of a large tensor's pages that fault, from which on the allocator returns memory to the system
_PAIRS, _PAIR_SECONDS = 50, 0.6
_FASTER = 1.05  # speedup from which on denormal numbers are searched for


@dataclass
class Watch:
    """Accumulates observations. faults: page faults per call, system: microseconds of system time per call, one value
    for each `counting`. ran, waited: nanoseconds of all threads."""

    faults: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    ran: int = 0
    waited: int = 0
    breaks: list[Event] = field(default_factory=list)
    recompilations: list[Event] = field(default_factory=list)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """While the program is compiled: record its graph breaks."""
        with listening() as heard:
            yield
        self.breaks += [_event(each) for each in heard if each.kind == GRAPH_BREAK]

    @contextmanager
    def calling(self) -> Iterator[None]:
        """While the compiled program is called: record recompilations."""
        with listening() as heard:
            yield
        self.recompilations += [_event(each) for each in heard if each.kind != GRAPH_BREAK]

    @contextmanager
    def counting(self, calls: int) -> Iterator[None]:
        """While `calls` calls run without timers: record page faults, and how long threads wait for a core."""
        ran, waited = scheduled()
        before = resource.getrusage(resource.RUSAGE_SELF)
        yield
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.faults.append((after.ru_minflt - before.ru_minflt) / calls)
        self.system.append((after.ru_stime - before.ru_stime) * 1e6 / calls)
        now_ran, now_waited = scheduled()
        self.ran, self.waited = self.ran + max(0, now_ran - ran), self.waited + max(0, now_waited - waited)

    def seen(self, flushed: float = 1.0, denormals: tuple[Event, ...] = ()) -> Process:
        return Process(
            page_faults=summarise(self.faults).median if self.faults else 0.0,
            system=summarise(self.system).median if self.system else 0.0,
            waited=self.waited / max(1, self.ran + self.waited),
            cores=usable_cores(),
            openmp=openmp_runtimes(),
            keeps_memory=faults_per_page() < _FAULTS,
            graph_breaks=tuple(dict.fromkeys(self.breaks)),
            recompilations=tuple(self.recompilations),
            flushed=flushed,
            denormals=denormals,
        )


def _event(heard: Refusal) -> Event:
    return Event(heard.cause, heard.user_line)


# ------------------------------------------------------------------------------------------------ denormal numbers


def faster_flushed(call: Callable[[], Any]) -> float:
    """How many times as fast the fastest call is when denormal numbers are flushed to zero; 1 if hardly faster.

    Both kinds of calls alternate, and the fastest of each are compared, so that interference by others does not matter.
    """
    kept, flushed = [], []
    began = perf_counter()
    while len(kept) < _PAIRS and (len(kept) < 5 or perf_counter() - began < _PAIR_SECONDS):
        kept.append(_seconds(call))
        with flushed_denormals():
            flushed.append(_seconds(call))
    ratio = min(kept) / min(flushed)
    return ratio if ratio > _FASTER else 1.0


def _seconds(call: Callable[[], Any]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def denormals_in(eager: Callable[[], Any]) -> tuple[Event, ...]:
    """The operator calls that return denormal numbers when a program runs eagerly, the largest share first."""
    with _Denormals() as found:
        eager()
    return tuple(
        Event(f"{op} returns {share:.0%} denormal numbers", line)
        for (op, line), share in sorted(found.shares.items(), key=lambda each: -each[1])
    )


class _Denormals(Observed):
    """shares: by operator and line, the share of denormal numbers in its results."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[tuple[str, str], float] = {}

    def after(self, func: Any, line: str, made: Any, result: Any) -> None:
        count: Counter[bool] = Counter()
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.numel():
                tiny = torch.finfo(leaf.dtype).tiny
                count[True] += int(((leaf != 0) & (leaf.abs() < tiny)).sum())
                count[False] += leaf.numel()
        if count[True]:
            key = op_of(func), line
            self.shares[key] = max(self.shares.get(key, 0.0), count[True] / count[False])
