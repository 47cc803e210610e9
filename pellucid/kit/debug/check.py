"""Compare a compiled program with eager: each output, gradient, and input that it changes in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pellucid.capture.fx import origin_of
from pellucid.errors import NotJudged, StoreError, ToolchainError
from pellucid.kit.debug.fusion import Fused
from pellucid.kit.debug.zoom import Inner
from pellucid.kit.judge.expected import Expected
from pellucid.kit.judge.graph import judge_graph
from pellucid.kit.judge.judge import ORDER, Judgement, Output, Verdict, close, kind_of, near, worst
from pellucid.kit.judge.vary import InPlace, change_in_place, variations, zeros_of
from pellucid.kit.process.child import (
    SECONDS,
    Failure,
    Worker,
    failure_of,
    not_judged,
    pass_on,
    raise_if_nothing_compiles,
)
from pellucid.kit.process.forks import Forks
from pellucid.kit.process.sanitizer import Place, places_in
from pellucid.kit.programs.calls import Call, Calls
from pellucid.kit.programs.case import Case, copied, load_case
from pellucid.kit.programs.graphs import Graph, InFloat64, case_in
from pellucid.kit.runs.run import split_run
from pellucid.kit.runs.target import Request, graphs_for, subject_for
from pellucid.kit.shown import Shown
from pellucid.kit.subjects.base import Probe, Step, Subject, loss_of
from pellucid.kit.subjects.marker import Marker
from pellucid.kit.subjects.refusals import origin_at, start_of
from pellucid.kit.subjects.registry import subject_of

EAGER = "eager"
AGAIN = " (again)"
_NOTHING = nullcontext()
Zeros: TypeAlias = Sequence[torch.Tensor | None] | None
ABOUT_AGAIN = "a second call, after its floats were changed in place"


@dataclass(frozen=True, slots=True)
class Culprit:
    """A step of a compiled graph.

    op: of a library call; empty for a generated kernel. fx_nodes: in graph order. user_lines: `file:line`.
    line: number and text of the line of its C++ at fault; empty where it is unknown. inside: the faulty operator inside
    the kernel, if one was found; then fx_nodes and user_lines are that operator's. fused: the fusion that causes the
    fault, if one does.
    """

    graph: str
    kernel: str
    op: str
    fx_nodes: tuple[str, ...]
    user_lines: tuple[str, ...]
    line: str = ""
    inside: Inner | None = None
    fused: Fused | None = None

    @classmethod
    def of(cls, graph: str, op: str, node: torch.fx.Node) -> Culprit:
        """One operator of a graph."""
        return cls(graph, "", op, (node.name,), tuple(map(str, origin_of(node).users)))

    @classmethod
    def called(cls, op: str, user_line: str) -> Culprit:
        """An operator that eager called, before any graph was captured."""
        return cls(EAGER, "", f"aten::{op}", (op,), (user_line,) if user_line else ())


@dataclass(frozen=True, slots=True)
class Checked(Shown):
    """The result of checking one program under one backend.

    variation: how the inputs differ from the given ones; empty for the given ones. tried: the number of variations
    checked, including the given inputs. failure: how it ended, when it did not return. step: the step that was running
    then; or the operator that computes the first misplaced output, where only strides or shared memory are wrong.
    """

    backend: str
    verdict: Verdict
    outputs: tuple[Output, ...] = ()
    failure: Failure | None = None
    variation: str = ""
    tried: int = 1
    step: Culprit | None = None

    @property
    def good(self) -> bool:
        return self.verdict.good


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effects of one run: tensors by name, the strides of results, and the pairs of tensors that share memory.

    calls: the number of calls. Names of the second call's tensors end with `AGAIN`. zeros: where its arguments and
    parameters were 0 when they were changed for the second call.
    """

    tensors: dict[str, torch.Tensor]
    strides: dict[str, tuple[int, ...]]
    shared: frozenset[tuple[str, str]]
    calls: int = 1
    zeros: Zeros = None


def check(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str = "pellucid",
    options: Mapping[str, Any] | None = None,
    backward: bool = False,
    dynamic: bool | None = None,
    fuzz: int = 0,
) -> Checked:
    """Compare `fn(*args, **kwargs)` compiled by `backend` with eager, with float64 as the reference.

    backward: compare gradients as well, of a fixed weighting of the results. fuzz: the number of variations of the
    inputs to try in addition to the given ones; the first bad one is returned. Runs in this process: a crash of
    compiled code ends it. Raises what `fn` raises in eager mode.
    """
    case = Case.of(fn, args, kwargs)
    return check_case(case, subject_of(backend, options), backward=backward, dynamic=dynamic, fuzz=fuzz)


def check_isolated(request: Request, seconds: float = SECONDS, memory: int = 0) -> Checked:
    """`check` in a separate process: a crash, a hang or running out of memory is a verdict that names the kernel.

    seconds, memory (bytes): limits of the process. Raises UserError for a target that does not exist, or fails in
    eager mode.
    """
    with request.worker(memory) as worker:
        return isolated(worker, check_request, request, seconds=seconds, backend=request.backend)


def isolated(
    worker: Worker | Forks,
    function: Callable[..., Any],
    request: Request,
    *rung: int | None,
    seconds: float,
    backend: str,
) -> Checked:
    """Call `function` on a request, and a rung of its backend's ladder, in a worker; a failure becomes a `Checked`."""
    found = worker.call(function, request, *rung, seconds=seconds)
    if not isinstance(found, Failure):
        return found
    pass_on(found)
    if found.kind == "error" or found.step == EAGER:
        raise not_judged(f"{request.target} fails in eager mode", found)
    find = "pellucid.kit.debug.culprit:find_step"
    arguments = (request, found.step, found.text, *rung)
    step = worker.call(find, *arguments, seconds=seconds) if found.step else None
    return Checked(backend, Verdict(found.kind), (), found, step=step if isinstance(step, Culprit) else None)


def check_request(request: Request) -> Checked:
    """Check a request in a worker process; the running step is noted, to be read if the process dies."""
    return check_target(request, subject_for(request))


def check_target(request: Request, subject: Subject) -> Checked:
    """Check the program of a request, or each graph of its run, under a subject."""
    marker = Marker()
    marker.note(EAGER)
    if split_run(request.target) is None:
        case = load_case(request.target)
        return check_case(case, subject, request.backward, request.dynamic, request.fuzz, marker)
    outputs: list[Output] = []
    for graph in graphs_for(request, subject):
        try:
            outputs += judge_graph(graph, subject, marker)
        except Exception as error:
            raise_if_nothing_compiles(error)
            return Checked(subject.name, Verdict.ERROR, tuple(outputs), failure_of(error))
    return Checked(subject.name, worst([output.verdict for output in outputs]), tuple(outputs))


def step_of(subject: Subject, graph: Graph, name: str, report: str = "") -> Culprit | None:
    """The step of this name in a graph compiled by a subject. report: of a sanitizer, which may name a line."""
    for step in subject.compile(graph).steps:
        if step.name == name:
            line = line_in(step, places_in(report))
            origin = origin_at(step.source, step.lines, line) if line else step.origin
            origin = step.origin if origin.is_glue else origin
            text = f"{line}: {step.source.splitlines()[line - 1].strip()}" if line else ""
            return Culprit(graph.name, step.name, step.op, origin.nodes, tuple(map(str, origin.users)), text)
    return None


def line_in(step: Step, places: Iterable[Place]) -> int:
    """The line of a kernel, from 1, that a compiler or a sanitizer refers to; 0 if none.

    Its file is named by the kernel's symbol, or contains the text of several kernels.
    """
    lines = step.source.splitlines()
    for place in places:
        path = Path(place.file)
        if path.name == step.symbol:
            return place.line if place.line <= len(lines) else 0
        start = start_of(step.source, path)
        if start is not None and start < place.line <= start + len(lines):
            return place.line - start
    return 0


def check_case(
    case: Case,
    subject: Subject,
    backward: bool = False,
    dynamic: bool | None = None,
    fuzz: int = 0,
    probe: Probe | None = None,
) -> Checked:
    """Like `check`. probe: is called before and after each step of the compiled graphs."""
    found = _check_inputs(case, subject, backward, dynamic, probe)
    variation, tried = "", 1
    for what, other in variations(case, fuzz) if fuzz and not found.verdict.bad else ():
        try:
            varied = _check_inputs(other, subject, backward, dynamic, probe)
        except (ToolchainError, StoreError):
            raise
        except Exception:  # eager does not accept these inputs: there is nothing to compare with
            continue
        tried += 1
        if ORDER.index(varied.verdict) > ORDER.index(found.verdict) and not varied.good:
            found, variation = varied, what
        if found.verdict.bad:
            break
    return replace(found, variation=variation, tried=tried)


def _check_inputs(case: Case, subject: Subject, backward: bool, dynamic: bool | None, probe: Probe | None) -> Checked:
    if isinstance(probe, Marker):
        probe.note(EAGER)
    eager = _eager_outcome(case, backward)
    first = {name: tensor for name, tensor in eager.tensors.items() if not name.endswith(AGAIN)}
    check_repeatable(first, _outcome(case.fresh(), backward, 1).tensors)
    if not eager.tensors:
        raise NotJudged("the program has no results to compare", hint="return the tensors that it computes")
    expected = expected_outcome(case, backward, first, 1).compute()
    try:
        fresh = case.fresh()
        torch._dynamo.reset()
        if isinstance(probe, Marker):
            probe.note("")
        compiled = subject.wrap(fresh.fn, dynamic) if probe is None else subject.watched(fresh.fn, probe, dynamic)
        actual = _outcome(fresh, backward, eager.calls, compiled, eager.zeros)
    except Exception as error:
        raise_if_nothing_compiles(error)
        return Checked(subject.name, Verdict.ERROR, (), failure_of(error))
    finally:
        torch._dynamo.reset()
    seconds = ((tensor, actual.tensors.get(name)) for name, tensor in eager.tensors.items() if name not in first)
    if any(other is None or close(other, tensor) is None for tensor, other in seconds):
        expected = expected_outcome(case, backward, eager.tensors, 2, eager.zeros)
    outputs = tuple(compare(actual, eager, expected))
    bad = [output for output in outputs if not output.verdict.good]
    step = producer_of(case, backward, bad) if bad and all(each.judgement.misplaced for each in bad) else None
    return Checked(subject.name, worst([output.verdict for output in outputs]), outputs, step=step)


def producer_of(case: Case, backward: bool, outputs: Sequence[Output]) -> Culprit | None:
    """The operator that computes the first of these outputs in eager mode, see `call_producing`."""
    calls, fresh = Calls(), case.fresh()
    with torch.set_grad_enabled(backward), calls:
        tensors = dict(named_tensors(fresh(), "output"))
    call = next(filter(None, (call_producing(each, tensors, calls) for each in outputs)), None)
    return None if call is None else Culprit.called(call.op, call.line)


def call_producing(output: Output, tensors: Mapping[str, torch.Tensor], calls: Calls) -> Call | None:
    """Eager's call that computed an output. For an output about two tensors the second is looked up first."""
    names = (part.removesuffix(AGAIN) for part in reversed(output.name.split(" and ")))
    return next(filter(None, (calls.maker(tensors[name]) for name in names if name in tensors)), None)


def expected_outcome(
    case: Case, backward: bool, eager: Mapping[str, torch.Tensor], calls: int, zeros: Zeros = None
) -> Expected:
    """The expected results of a program. eager: its tensors in eager mode after this number of calls."""
    return Expected(
        eager,
        lambda change: _exactly(_changed(case, change), backward, eager, calls, zeros),
        lambda change: _outcome(_changed(case, change), backward, calls, zeros=zeros).tensors,
    )


def check_repeatable(once: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> None:
    """Raises NotJudged when eager's results differ from call to call: compiled code cannot be judged then."""
    for name, tensor in once.items():
        other = again.get(name)
        if other is None or not near(other, tensor):  # threads may add up a sum in any order
            raise NotJudged(
                f"the program is not deterministic: {name} differs between two calls in eager mode",
                hint="make every call start from the same state; torch's random numbers are seeded already",
            )


def _eager_outcome(case: Case, backward: bool) -> Outcome:
    """The outcome of two calls; of one, where eager does not accept the changed values."""
    try:
        return _outcome(case.fresh(), backward, 2)
    except Exception:
        return _outcome(case.fresh(), backward, 1)


def _outcome(
    case: Case, backward: bool, calls: int, call: Callable[..., Any] | None = None, zeros: Zeros = None
) -> Outcome:
    """Run a program, then again on the same tensors with other values: compiled code must not have cached the old ones.

    zeros: from eager's outcome, so that the values are changed in the same way.
    """
    result = called(case, backward, call)
    first = Outcome(copied(result.tensors), result.strides, result.shared)  # results may be views of changed tensors
    tensors = _tensors_of(case)
    if calls < 2:
        return first
    zeros = zeros_of(tensors) if zeros is None else zeros
    if not change_in_place(tensors, zeros):
        return first
    for tensor in tensors:
        tensor.grad = None
    again = called(case, backward, call)
    return Outcome(
        {**first.tensors, **{name + AGAIN: tensor for name, tensor in again.tensors.items()}},
        {**first.strides, **{name + AGAIN: strides for name, strides in again.strides.items()}},
        first.shared | {(a + AGAIN, b + AGAIN) for a, b in again.shared},
        calls,
        zeros,
    )


def called(
    case: Case,
    backward: bool,
    call: Callable[..., Any] | None = None,
    around_backward: AbstractContextManager[Any] = _NOTHING,
) -> Outcome:
    """The outcome of one call; its random numbers start from the same seed every time."""
    torch.manual_seed(0)
    before = {name: copied(tensor) for name, tensor in named_tensors((case.args, dict(case.kwargs)), "input")}
    with torch.set_grad_enabled(backward):
        result = (case.fn if call is None else call)(*case.args, **case.kwargs)
        found = dict(named_tensors(result, "output"))
        inputs = dict(named_tensors((case.args, dict(case.kwargs)), "input"))
        if backward:
            loss = loss_of(result)
            with around_backward:
                loss.backward()
    sharing = _sharing({**found, **inputs})
    strides = {name: meaningful_strides(tensor) for name, tensor in found.items()}
    tensors = {name: tensor.detach() for name, tensor in found.items()}
    for name, tensor in inputs.items():
        if not _same(tensor, before[name]):
            tensors[f"{name} (changed)"] = tensor.detach()
        if backward and tensor.is_leaf and tensor.grad is not None:
            tensors[f"gradient of {name}"] = tensor.grad
    if isinstance(case.fn, torch.nn.Module):
        tensors.update({f"buffer {name}": buffer for name, buffer in case.fn.named_buffers()})
        if backward:
            parameters = case.fn.named_parameters()
            tensors.update({f"gradient of {name}": p.grad for name, p in parameters if p.grad is not None})
    return Outcome(tensors, strides, sharing)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())


def named_tensors(tree: Any, what: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree with names like `output 0` or `output logits`."""
    for path, leaf in pytree.tree_leaves_with_path(tree):
        name = f"{what} {_path(path[1:] if what == 'input' else path) or '0'}"
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield name, leaf
        elif what == "output" and isinstance(leaf, float):
            yield name, torch.tensor(leaf, dtype=torch.float64)
        elif what == "output" and isinstance(leaf, int) and abs(leaf) < 2**63:
            yield name, torch.tensor(leaf)
        elif any(isinstance(value, torch.Tensor) for value in getattr(leaf, "__dict__", {}).values()):
            raise NotJudged(
                f"{name} is a {type(leaf).__name__}: the tensors in it cannot be found",
                hint="use tuples and dicts, or register the class with torch.export.register_dataclass",
            )


def _path(path: Sequence[Any]) -> str:
    parts = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path]
    return ".".join(str(part) for part in parts)


def meaningful_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's strides, 0 where a size of 1 makes them irrelevant; none for a tensor without elements."""
    return (
        tuple(s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True)) if tensor.numel() else ()
    )


def _sharing(tensors: Mapping[str, torch.Tensor]) -> frozenset[tuple[str, str]]:
    """Pairs of two outputs, or of an output and an input, that share memory."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    groups = [sorted(names) for names in by_storage.values()]
    return frozenset(
        (a, b)
        for names in groups
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if not a.startswith("input") or not b.startswith("input")
    )


def _exactly(
    case: Case, backward: bool, eager: Mapping[str, torch.Tensor], calls: int, zeros: Zeros
) -> Mapping[str, torch.Tensor] | None:
    """The outcome in float64; None for a program that does not run in float64, or has other results then.

    Conversions to narrower types are ignored if the program runs so: compiled code may omit such roundings.
    """
    for mode in (InFloat64, nullcontext):
        wide = case_in(case, torch.float64)
        try:
            found = _outcome(wide, backward, calls, partial(_within, mode, wide.fn), zeros).tensors
        except Exception:
            continue
        if all(name in found and found[name].shape == tensor.shape for name, tensor in eager.items()):
            return found
    return None


def _within(context: Callable[[], AbstractContextManager[Any]], fn: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    with context():
        return fn(*args, **kw)


def _changed(case: Case, change: InPlace) -> Case:
    """The program on other values of its inputs and parameters."""
    fresh = case.fresh()
    change(_tensors_of(fresh))
    return fresh


def _tensors_of(case: Case) -> list[torch.Tensor]:
    """The tensors that the results of a program depend on: its inputs, parameters and buffers."""
    inputs = pytree.tree_leaves((case.args, dict(case.kwargs)))
    own = [*case.fn.parameters(), *case.fn.buffers()] if isinstance(case.fn, torch.nn.Module) else []
    return [*(leaf for leaf in inputs if isinstance(leaf, torch.Tensor)), *own]


def compare(actual: Outcome, eager: Outcome, expected: Expected) -> Iterator[Output]:
    """Judge an outcome against eager's: its tensors, their strides, and which of them share memory."""
    for name, tensor in eager.tensors.items():
        shape, dtype = kind_of(tensor)
        if name not in actual.tensors:
            yield Output(name, shape, dtype, Judgement(Verdict.WRONG, "missing from the compiled program's results"))
            continue
        value = actual.tensors[name]
        # A name that `expected` lacks was close to eager's, and not computed in float64.
        found = (None if name in expected.eager else close(value, tensor)) or expected.judge(name, value)
        if found.verdict.good and actual.strides.get(name) != eager.strides.get(name):
            why = f"strides {actual.tensors[name].stride()}, eager's are {tensor.stride()}"
            found = Judgement(Verdict.WRONG, why, misplaced=True)
        yield Output(name, shape, dtype, found)
    for name, tensor in actual.tensors.items():
        if name not in eager.tensors and (not name.startswith("gradient") or tensor.any()):
            shape, dtype = kind_of(tensor)
            yield Output(name, shape, dtype, Judgement(Verdict.WRONG, "eager has no such result"))
    for a, b in sorted(actual.shared ^ eager.shared):
        what = "share memory, but not in eager" if (a, b) in actual.shared else "share memory in eager only"
        tensor = actual.tensors.get(a, eager.tensors.get(a))
        shape, dtype = kind_of(tensor) if tensor is not None else ((), "")
        yield Output(f"{a} and {b}", shape, dtype, Judgement(Verdict.WRONG, what, misplaced=True))
