"""Taking profiles of programs that are called repeatedly, with and without timers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from pellucid.errors import PellucidError, UserError
from pellucid.kit.process.child import chain_of, failure_of, gist, not_judged
from pellucid.kit.profile.advice import advise
from pellucid.kit.profile.eager import eager_profile
from pellucid.kit.profile.limits import known_machine
from pellucid.kit.profile.process import Watch, denormals_in, faster_flushed
from pellucid.kit.profile.python import Seen, look_at_python, python_side
from pellucid.kit.profile.result import Process, Profile
from pellucid.kit.profile.rows import Call, profile_of
from pellucid.kit.programs.case import Case, copied
from pellucid.kit.programs.graphs import Graph, interpret
from pellucid.kit.stats import uncollected
from pellucid.kit.subjects.base import Subject
from pellucid.kit.subjects.clock import Clock, clock
from pellucid.native.counters import HARDWARE, refused

EAGER = "eager"
BUDGET = 10.0
_COUNTED_CALLS = 5
_WARM_CALLS = 3  # to compile, to resolve the shapes, and to run as all later calls do
_MIN_ROUNDS, _MAX_ROUNDS = 5, 200
_WAITED = 0.1  # share of the threads' runnable time from which on waiting for a core is reported
_BLOCK_SECONDS = 0.02  # of consecutive calls, first without timers and then with them


@dataclass
class Program:
    """A program under one backend. call: runs it once. eager: runs it once in eager mode. backend: its name, or
    `eager`."""

    backend: str
    call: Callable[[], Any]
    eager: Callable[[], Any]
    plain: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    watch: Watch = field(default_factory=Watch)
    process: Process = field(default_factory=Process)
    python: Seen | None = None
    counted: Clock = field(default_factory=Clock)
    uncounted: str = ""


def program_of(case: Case, subject: Subject | None, backward: bool = False, dynamic: bool | None = None) -> Program:
    """A program compiled by a subject, or in eager mode. backward: also compute gradients, with fixed weights."""
    fresh = case.fresh()
    torch._dynamo.reset()
    step = _training_step if backward else _inference
    eager = step(fresh, fresh.fn)
    if subject is None:
        return Program(EAGER, eager, eager)
    return Program(subject.name, step(fresh, subject.clocked(fresh.fn, dynamic)), eager)


def program_of_graphs(graphs: Sequence[Graph], subject: Subject | None) -> Program:
    """The graphs of a run as a program that runs one after the other on their saved inputs."""
    inputs = [list(copied(graph.inputs)) for graph in graphs]

    def running(runs: Sequence[Callable[[list[Any]], Any]]) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                for run, given in zip(runs, inputs, strict=True):
                    run(list(given))

        return call

    eager = running([partial(interpret, graph.module) for graph in graphs])
    if subject is None:
        return Program(EAGER, eager, eager)
    return Program(subject.name, running([subject.timed(graph) for graph in graphs]), eager)


def take(programs: Sequence[Program], target: str, budget: float = BUDGET) -> list[Profile]:
    """Profile programs that are called in turn for about `budget` seconds, in blocks without timers and with them.

    The profile of a program that raises covers the calls before. Raises UserError for one that fails in the first
    calls, and NotJudged if it fails in eager mode too.
    """
    for program in programs:
        _warm(program, target)
    graphs = counters["stats"]["unique_graphs"]
    with uncollected():
        _measure([each for each in programs if each.backend != EAGER or len(programs) > 1] or programs, budget)
        for program in programs:
            _inspect(program)
    if counters["stats"]["unique_graphs"] > graphs:
        for program in programs:
            program.notes.append("graphs were compiled while it was measured: the program recompiles between calls")
    return [_profile(program, target) for program in programs]


def _inspect(program: Program) -> None:
    """Record the process's state, and call the program with denormals flushed, under cProfile and with counters."""
    flushed, denormals = 1.0, ()
    if not program.failure:
        try:
            flushed = faster_flushed(program.call)
            denormals = denormals_in(program.eager) if flushed > 1 else ()
            program.python = look_at_python(program.call)
            program.uncounted = _count(program)
        except Exception as error:
            program.failure = _cause(error)
    program.process = program.watch.seen(flushed, denormals)


def _count(program: Program) -> str:
    """Call a program with hardware counters. Returns why they cannot be read; empty if they were."""
    if program.backend == EAGER:
        return ""
    if program.backend != "pellucid":
        return "counters are read around calls of Pellucid's graphs only"
    refusal = refused(HARDWARE)
    if refusal is not None:
        return str(refusal)
    with clock(program.counted, HARDWARE):
        for _ in range(_COUNTED_CALLS):
            program.call()
    return ""


def _profile(program: Program, target: str) -> Profile:
    found = _times(program, target)
    if program.python is not None:
        outside, compiled = found.overhead.python_microseconds, program.backend != EAGER
        found = replace(found, python=python_side(program.python, outside, found.real_microseconds, compiled))
    return advised(replace(found, process=program.process, counters=program.uncounted))


def advised(found: Profile) -> Profile:
    """A profile with advice for this machine, and a note if other processes took the cores."""
    process, notes = found.process, found.notes
    if process.waited >= _WAITED and found.threads <= process.cores:
        notes = (
            *notes,
            f"other processes took the cores for {process.waited:.0%} of the time: without them it is faster",
        )
    return replace(found, notes=notes, advice=advise(found, known_machine()[0]))


def _times(program: Program, target: str) -> Profile:
    if program.backend == EAGER:
        return eager_profile(program.call, program.plain, target)
    return profile_of(
        program.clock,
        program.calls,
        backend=program.backend,
        target=target,
        plain=program.plain,
        notes=program.notes,
        failure=program.failure,
        counted=program.counted,
    )


def _measure(programs: Sequence[Program], budget: float) -> None:
    counts = {id(program): _calls_per_block(program) for program in programs}
    start = perf_counter()
    for turn in range(_MAX_ROUNDS):
        for program in programs[turn % len(programs) :] + programs[: turn % len(programs)]:  # type: ignore[operator]
            if not program.failure:
                _block(program, counts[id(program)])
        if turn + 1 >= _MIN_ROUNDS and perf_counter() - start >= budget:
            return


def _block(program: Program, count: int) -> None:
    """Calls without timers, then with; the first of each is discarded, as the caches hold another program's data."""
    try:
        with program.watch.calling():
            _calls(program, count)
    except Exception as error:
        program.failure = _cause(error)


def _calls(program: Program, count: int) -> None:
    program.call()
    with program.watch.counting(count):
        for _ in range(count):
            begin = perf_counter()
            program.call()
            program.plain.append(perf_counter() - begin)
    if program.backend == EAGER:
        return
    with clock(program.clock):
        program.call()
        for _ in range(count):
            since = perf_counter_ns()
            program.call()
            program.calls.append(Call(since, perf_counter_ns()))


def _warm(program: Program, target: str) -> None:
    try:
        with program.watch.warming():
            for _ in range(_WARM_CALLS):
                program.call()
    except Exception as error:
        _call_eagerly(program, target)
        raise UserError(
            f"{target} fails under {program.backend}: {_cause(error)}", hint="see `pellucid check` and `explain`"
        ) from error


def _call_eagerly(program: Program, target: str) -> None:
    """Raise NotJudged for a program that fails without a compiler too."""
    try:
        program.eager()
    except PellucidError:
        raise
    except Exception as error:
        raise not_judged(f"{target} fails in eager mode", failure_of(error)) from error


def _cause(error: BaseException) -> str:
    """The cause in one line, unwrapped: Dynamo wraps exceptions of backends, and of operators while it traces them."""
    if isinstance(error, ShortenTraceback | TorchRuntimeError):
        error = next((each for each in chain_of(error) if not isinstance(each, TorchDynamoException)), error)
    return f"{type(error).__name__}: {gist(error.message if isinstance(error, PellucidError) else str(error))}"


def _calls_per_block(program: Program) -> int:
    begin = perf_counter()
    with suppress(Exception):  # `_block` will report it
        program.call()
    return max(1, min(1000, round(_BLOCK_SECONDS / max(perf_counter() - begin, 1e-6))))


def _inference(case: Case, fn: Callable[..., Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return fn(*case.args, **case.kwargs)

    return call


def _training_step(case: Case, fn: Callable[..., Any]) -> Callable[[], None]:
    """Forward and backward, from the loss that a model returns, else from every result that requires a gradient."""
    leaves = [
        *_leaves((case.args, dict(case.kwargs))),
        *(case.fn.parameters() if isinstance(case.fn, torch.nn.Module) else ()),
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    weights: dict[int, torch.Tensor] = {}

    def call() -> None:
        for leaf in wanted:
            leaf.grad = None
        result = fn(*case.args, **case.kwargs)
        loss = getattr(result, "loss", None)
        roots = [loss] if isinstance(loss, torch.Tensor) else [each for each in _leaves(result) if each.requires_grad]
        if not roots:
            raise UserError("nothing that the program returns requires a gradient")
        for number, root in enumerate(roots):
            if number not in weights:
                weights[number] = torch.ones_like(root)
        torch.autograd.backward(roots, [weights[number] for number in range(len(roots))])

    return call


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, Mapping):
        tree = dict(tree)
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
