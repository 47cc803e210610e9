"""Find the smallest program that fails although its graphs are right: the fault is before the graphs.

The program itself is shrunk: optional arguments are removed, dimensions shortened, and modules replaced by one that
returns its first argument. A candidate is a list of such changes. It is judged as by `check`; if the graphs that the
backend captures already fail when run eagerly, nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pellucid.errors import NotJudged, PellucidError
from pellucid.kit.debug.check import check_case
from pellucid.kit.debug.user_program import Faulty, first_before_graphs
from pellucid.kit.judge.judge import Judgement, Verdict
from pellucid.kit.minify.repro import write_program_repro
from pellucid.kit.minify.subgraph import narrowed
from pellucid.kit.minify.trial import GOOD, Kind, found_of
from pellucid.kit.process.child import Failure, pass_on, raise_if_nothing_compiles
from pellucid.kit.programs.case import Case, load_case
from pellucid.kit.runs.target import Request, subject_for
from pellucid.kit.subjects.base import Captured, Subject

_SIZES = (1, 2, 5, 17)
# For a program that is wrong although none of its operators is.
UNKNOWN = Faulty("", "", "", Judgement(Verdict.OK))


class First(torch.nn.Module):
    """Replaces a module, and returns its first argument."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


def changed(case: Case, changes: Sequence[str]) -> Case:
    """A program, on copies of its tensors, after changes: `without NAME`, `size 8 to 2`, `first of PATH`."""
    fresh = case.fresh()
    fn, args, kwargs = fresh.fn, fresh.args, dict(fresh.kwargs)
    for change in changes:
        kind, *words = change.split()
        match kind:
            case "without":
                kwargs.pop(words[0])
            case "size":
                old, new = int(words[0]), int(words[2])
                args, kwargs = pytree.tree_map(lambda leaf, o=old, n=new: _narrowed(leaf, o, n), (args, kwargs))
            case _:
                owner, _, name = words[1].rpartition(".")
                assert isinstance(fn, torch.nn.Module)
                setattr(fn.get_submodule(owner), name, First())
    return Case(case.name, fn, args, kwargs)


def _narrowed(leaf: Any, old: int, new: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch.no_grad():
        return narrowed(leaf, old, new).detach().requires_grad_(leaf.requires_grad)


@dataclass(frozen=True, slots=True)
class Smallest:
    """A program that fails. kind: of failure. nodes_before, nodes_after: calls in its graphs. changes: made to the
    original program. repro: its path. fault: the wrong operator in its graphs, if there is one."""

    kind: Kind
    nodes_before: int
    nodes_after: int
    changes: tuple[str, ...]
    repro: str
    fault: Faulty


def smallest(
    request: Request,
    folder: Path,
    ask: Callable[..., Any],
    out_of_time: Callable[[], bool],
    tell: Callable[[str], None],
) -> Smallest | None:
    """Shrink the program of a request and write it into a folder; None for one that does not fail.

    ask: calls a function in a fork, and returns its result or the `Failure` that it ended with.
    """
    captured = has_captured(request)

    def tried(changes: Sequence[str]) -> Kind:
        answer = ask(try_program, request, tuple(changes), captured)
        return found_of(answer).kind if isinstance(answer, Failure) else answer

    def run_in_fork(function: Callable[..., Any], *args: Any) -> Any:
        answer = ask(function, request, *args)
        if isinstance(answer, Failure):
            pass_on(answer)
            raise NotJudged(f"{request.target} cannot be minified: {answer}", hint="see `pellucid check`")
        return answer

    tell("the whole program")
    kind = tried(())
    if kind == GOOD and captured:
        captured = False
        kind = tried(())
    if kind == GOOD:
        return None
    changes = shrink(load_case(request.target), lambda changes: kind.same(tried(changes)), out_of_time, tell)
    tell("the program")
    fault = run_in_fork(fault_of, changes) or UNKNOWN
    counts = [run_in_fork(calls_of_program, each) for each in ((), changes)]
    repro = run_in_fork(write_program, changes, folder, f"A program that fails before its graphs: {kind}.")
    return Smallest(kind, counts[0], counts[1], changes, repro, fault)


def shrink(
    case: Case, fails: Callable[[Sequence[str]], bool], out_of_time: Callable[[], bool], tell: Callable[[str], None]
) -> tuple[str, ...]:
    """The changes with which a program still fails: fewer inputs, smaller sizes, fewer modules."""
    accepted: tuple[str, ...] = ()

    def keep(changes: Sequence[str]) -> bool:
        """Keep all changes if the program still fails with them; else try each half."""
        nonlocal accepted
        if not changes or out_of_time():
            return False
        if fails((*accepted, *changes)):
            accepted = (*accepted, *changes)
            return True
        half = len(changes) // 2
        return len(changes) > 1 and any([keep(changes[:half]), keep(changes[half:])])

    tell("fewer inputs")
    keep([f"without {name}" for name in case.kwargs])
    tell("sizes")
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    sizes = sorted({size for each in leaves if isinstance(each, torch.Tensor) for size in each.shape}, reverse=True)
    for size in sizes:
        any(keep([f"size {size} to {limit}"]) for limit in _SIZES if limit < size)
    tell("modules")
    pending = [_children(case.fn, "")]
    while pending:
        paths = pending.pop(0)
        keep([f"first of {path}" for path in paths])
        left = [path for path in paths if f"first of {path}" not in accepted]
        pending += [children for path in left if (children := _children(case.fn, path))]
    return accepted


def _children(fn: Any, path: str) -> list[str]:
    if not isinstance(fn, torch.nn.Module):
        return []
    return [f"{path}.{name}".lstrip(".") for name, _ in fn.get_submodule(path).named_children()]


# ------------------------------------------------------------------------------------------------ in a fork


def try_program(request: Request, changes: Sequence[str], captured: bool) -> Kind:
    """How the program of a request fails after changes. captured: run its captured graphs eagerly instead of compiling.

    A program that cannot be changed in this way, or that fails in eager mode, is good.
    """
    subject = subject_for(request)
    if captured:
        subject = _as_captured(subject)
    try:
        found = check_case(changed(load_case(request.target), changes), subject, request.backward, request.dynamic)
    except PellucidError:
        raise
    except Exception as error:
        raise_if_nothing_compiles(error)
        return GOOD
    if not found.verdict.bad:
        return GOOD
    return Kind(found.verdict.value, found.failure.what if found.failure else "")


def _as_captured(subject: Subject) -> Subject:
    """The backend up to the capture of graphs."""
    return [rung.subject for rung in subject.ladder() if isinstance(rung.subject, Captured)][-1]


def has_captured(request: Request) -> bool:
    """Whether the graphs that a backend captures can be run without it."""
    return any(isinstance(rung.subject, Captured) for rung in subject_for(request).ladder())


def fault_of(request: Request, changes: Sequence[str]) -> Faulty | None:
    """The wrong operator in the graphs of the program after changes."""
    case = changed(load_case(request.target), changes)
    return first_before_graphs(case, subject_for(request), request.backward, request.dynamic)


def calls_of_program(request: Request, changes: Sequence[str]) -> int:
    """The number of operator calls in the graphs of the program after changes."""
    case = changed(load_case(request.target), changes)
    graphs = subject_for(request).graphs(case, backward=request.backward, dynamic=request.dynamic)
    return sum(graph.calls for graph in graphs)


def write_program(request: Request, changes: Sequence[str], folder: Path, title: str) -> str:
    """Write the program after changes; returns its path."""
    case = changed(load_case(request.target), changes)
    modules = tuple(words[2] for words in (change.split() for change in changes) if words[0] == "first")
    return str(write_program_repro(request, case.args, case.kwargs, modules, folder, title))
