"""The backends under test, by name, and what can be learnt from one after it compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import profile

from pellucid.kit.bench.models import UnknownName, Workload
from pellucid.kit.bench.results import FallbackTime
from pellucid.kit.judge.accuracy import tensors

EAGER = "eager"
PELLUCID = "pellucid"
DEFAULT_SUBJECTS = (EAGER, "inductor", PELLUCID)


@dataclass(frozen=True, slots=True)
class Counts:
    """Kernels that a backend generated for a program, and operators that it left to ATen."""

    kernels: int
    fallbacks: int


def known_subjects(debug: bool = False) -> list[str]:
    """`eager`, which compiles nothing, and the torch.compile backends that are installed.

    PyTorch keeps a dozen backends for debugging its own parts; `debug` lists those too.
    """
    from torch._dynamo import list_backends

    return sorted({EAGER, "aot_eager", *list_backends(**({"exclude_tags": ()} if debug else {}))})


def check_subject(name: str) -> None:
    """Raises `UnknownName` unless `name` is `eager` or an installed backend, be it for debugging."""
    if name not in known_subjects(debug=True):
        raise UnknownName("backend", name, known_subjects())


def compiled(workload: Workload, subject: str, dynamic: bool | None = None) -> Callable[[], object]:
    """A call of the workload under `subject`; what there is to compile compiles when it is first called.

    It returns what the program returns, or, for a training step, the gradients by parameter name. `dynamic` is
    torch.compile's.
    """
    fn = workload.fn if subject == EAGER else torch.compile(workload.fn, backend=subject, dynamic=dynamic)
    inputs = dict(workload.inputs)

    def call() -> object:
        return fn(**inputs)

    def step() -> dict[str, Tensor]:
        assert isinstance(workload.fn, nn.Module)
        workload.fn.zero_grad(set_to_none=True)
        _loss(fn(**inputs)).backward()
        return {name: p.grad for name, p in workload.fn.named_parameters() if p.grad is not None}

    return step if workload.train else call


def _loss(output: object) -> Tensor:
    """The loss that a model computed from its labels, or the mean square of the first thing it returns."""
    loss = getattr(output, "loss", None)
    return tensors(output)[0].square().mean() if loss is None else loss


class Counter:
    """Knows what Pellucid compiles between its making and a question."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._before = self._compilations()

    def counts(self) -> Counts | None:
        """The sums over all graphs compiled since; None for a subject that does not tell."""
        if self._subject != PELLUCID:
            return None
        new = self._new()
        return Counts(sum(int(c.kernels) for c in new), sum(int(c.fallbacks) for c in new))

    def fallback_times(self, call: Callable[[], object], calls: int = 3) -> tuple[FallbackTime, ...]:
        """What the graphs compiled since leave to ATen or Python, by its share of the time of `call`."""
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
