"""The subjects of a benchmark, which run a program: eager, a backend of `torch.compile`, or another engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile

from pellucid.errors import UserError
from pellucid.exported import compile_exported
from pellucid.kit.bench.models import UnknownName
from pellucid.kit.bench.peers import PEERS, Positional, check_installed, peer
from pellucid.kit.bench.programs import literal, pieces
from pellucid.kit.bench.results import FallbackTime
from pellucid.kit.judge.accuracy import tensors
from pellucid.kit.programs.case import Case
from pellucid.kit.subjects.registry import subject_of

EAGER = "eager"
PELLUCID = "pellucid"
GUARD_FILTER = "guard_filter_fn"
EXPORTED = "exported"  # export the program first, as for other engines
DEFAULT_SUBJECTS = (EAGER, "inductor", PELLUCID)


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of kernels that a backend generated for a program, and of operators that it left to ATen."""

    kernels: int
    fallbacks: int


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend with its options, written `NAME` or `NAME:KEY=VALUE,KEY=VALUE`.

    >>> Subject.of("inductor:freezing=True").options
    {'freezing': True}
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Subject:
        """Parse a subject. Raises UserError for options that are not `KEY=VALUE`."""
        backend, _, settings = text.partition(":")
        pairs = [each.partition("=") for each in pieces(settings)]
        wrong = next((key for key, equals, _ in pairs if not key or not equals), None)
        if wrong is not None:
            raise UserError(f"{text}: {wrong!r} is not KEY=VALUE", hint="write NAME:KEY=VALUE,KEY=VALUE")
        return cls(backend, {key: literal(value) for key, _, value in pairs})


def known_subjects(debug: bool = False) -> list[str]:
    """`eager`, which compiles nothing, the installed torch.compile backends, and the engines, installed or not.

    `debug` adds the dozen backends that PyTorch has for debugging its own parts.
    """
    from torch._dynamo import list_backends

    return sorted({EAGER, "aot_eager", *PEERS, *list_backends(**({"exclude_tags": ()} if debug else {}))})


def check_subject(text: str, train: bool = False) -> None:
    """Raises `UnknownName` or UserError for a subject that is unknown, not installed, or cannot train with `train`."""
    subject = Subject.of(text)
    if subject.backend not in known_subjects(debug=True):
        raise UnknownName("backend", subject.backend, known_subjects())
    if subject.backend == EAGER and subject.options:
        raise UserError(f"{text}: eager takes no options")
    if subject.backend in PEERS:
        check_installed(subject.backend)
        if train:
            raise UserError(f"{subject.backend} cannot train", hint="leave it out, or do not use --train")
    elif subject.backend != EAGER:
        options = _options(subject)
        options.pop(GUARD_FILTER, None)  # torch.compile handles it itself
        if options.pop(EXPORTED, False):
            _check_exported(text, subject, train)
        subject_of(subject.backend, options)  # checks the options of some backends


def _check_exported(text: str, subject: Subject, train: bool) -> None:
    if subject.backend not in _EXPORTED:
        raise UserError(f"{text}: only {' and '.join(_EXPORTED)} support exported programs here")
    if train or GUARD_FILTER in subject.options:
        why = "it cannot be trained" if train else "it has no guards to filter"
        raise UserError(f"{text}: the program is exported, so {why}")


def compiled(case: Case, text: str, train: bool = False, dynamic: bool | None = None) -> Callable[[], object]:
    """A call of a program under a subject, compiled when it is first called.

    The call returns what the program returns, or, for a training step, the gradients by parameter name. `dynamic` is
    passed to torch.compile.
    """
    subject = Subject.of(text)
    if subject.backend in PEERS:
        return peer(subject.backend, case, subject.options)
    fn, args, kwargs = case.fn, case.args, dict(case.kwargs)
    if subject.backend != EAGER:
        options = _options(subject)
        if options.pop(EXPORTED, False):
            return _exported(subject.backend, case, options)
        target = _with_own_code(case.fn) if GUARD_FILTER in options else case.fn
        fn = torch.compile(target, backend=subject.backend, dynamic=dynamic, options=options or None)

    def call() -> object:
        return fn(*args, **kwargs)

    def step() -> dict[str, Tensor]:
        assert isinstance(case.fn, nn.Module)
        case.fn.zero_grad(set_to_none=True)
        _loss(fn(*args, **kwargs)).backward()
        return {name: p.grad for name, p in case.fn.named_parameters() if p.grad is not None}

    return step if train else call


def _aot_inductor(program: torch.export.ExportedProgram, *, options: Mapping[str, Any]) -> Callable[..., object]:
    from pellucid.kit.subjects.inductor.exported import compile_exported  # imports all of Inductor

    return compile_exported(program, options)


_EXPORTED = {PELLUCID: compile_exported, "inductor": _aot_inductor}


def _exported(backend: str, case: Case, options: Mapping[str, Any]) -> Callable[[], object]:
    """A call of the exported program, with its tensors by position, as for other engines."""
    program = Positional(case).eval()
    run: list[Callable[..., object]] = []

    def call() -> object:
        if not run:
            with torch.no_grad():
                exported = torch.export.export(program, program.inputs)
                run.append(_EXPORTED[backend](exported, options=options))
        return run[0](*program.inputs)

    return call


def _options(subject: Subject) -> dict[str, Any]:
    """torch.compile's options, with the named guard filter as a function. Raises UserError for an unknown filter."""
    options = dict(subject.options)
    if GUARD_FILTER in options:
        known = sorted(name for name in torch.compiler.__all__ if name.endswith("_unsafe"))
        if options[GUARD_FILTER] not in known:
            what = f"{subject.backend}: torch.compiler has no guard filter {options[GUARD_FILTER]!r}"
            raise UserError(what, hint=f"choose {GUARD_FILTER} from {', '.join(known)}")
        options[GUARD_FILTER] = getattr(torch.compiler, options[GUARD_FILTER])
    return options


def _with_own_code(fn: Callable[..., object]) -> Callable[..., object]:
    """The function behind a new code object: Dynamo caches compiled code there, and reuses it for any guard filter."""

    def call(*args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _loss(output: object) -> Tensor:
    """The loss that a model computed from its labels, or the mean square of its first output."""
    loss = getattr(output, "loss", None)
    return tensors(output)[0].square().mean() if loss is None else loss


class Counter:
    """Counts what Pellucid compiles after the counter's creation."""

    def __init__(self, subject: str) -> None:
        self._subject = Subject.of(subject).backend
        self._before = self._compilations()

    def counts(self) -> Counts | None:
        """The sums over all graphs compiled since; None for a subject that does not report them."""
        if self._subject != PELLUCID:
            return None
        new = self._new()
        return Counts(sum(int(c.kernels) for c in new), sum(int(c.fallbacks) for c in new))

    def fallback_times(self, call: Callable[[], object], calls: int = 3) -> tuple[FallbackTime, ...] | None:
        """Operators that the graphs compiled since leave to ATen or Python, by their share of the time of `call`.

        None for a subject that does not report them.
        """
        if self._subject != PELLUCID:
            return None
        with profile() as profiler:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = time.perf_counter() - start
        spent = {event.key: event.cpu_time_total * 1e-6 for event in profiler.key_averages()}
        shares: dict[tuple[str, str], list[float]] = {}
        for fallback in (f for compilation in self._new() for f in compilation.calls):
            shares.setdefault((fallback.op, fallback.reason), []).append(spent.get(fallback.name, 0.0) / seconds)
        found = [FallbackTime(*key, calls=len(each), share=sum(each)) for key, each in shares.items()]
        return tuple(sorted(found, key=lambda row: -row.share))

    def _new(self) -> list:
        seen = {id(c) for c in self._before}
        return [c for c in self._compilations() if id(c) not in seen]

    def _compilations(self) -> list:
        if self._subject != PELLUCID:
            return []
        from pellucid.backend import last_compilations

        return list(last_compilations())
