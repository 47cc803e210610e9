"""Run models under several backends, side by side in one process, and report what each cost and got.

>>> from pellucid.bench import Settings, bench
>>> report = bench(["pointwise_small"], Settings(subjects=("aot_eager",), cold=False, budget=0.2))
>>> [s.name for s in report.models[0].subjects]
['eager', 'aot_eager']
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from pellucid.kit.bench.interleave import interleave
from pellucid.kit.bench.models import DTYPES, MODELS, Size, UnknownName, Workload, build
from pellucid.kit.bench.results import SCHEMA, Environment, ModelResult, Report, SubjectResult
from pellucid.kit.bench.startup import Request, cold_and_warm
from pellucid.kit.bench.stats import pairwise_ratio, summarise
from pellucid.kit.bench.subjects import DEFAULT_SUBJECTS, EAGER, Counter, check_subject, compiled
from pellucid.kit.judge.accuracy import error, gradient_error, is_accurate, tensors
from pellucid.trace.environment import environment

Progress = Callable[[str, float], None]
"""Hears what is being done now, and which fraction of the whole run is behind it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    `subjects` are torch.compile backend names; eager is always measured, first, as the baseline. `budget` is
    the time in seconds for the timed rounds of one model, start-up and compilation not counted. `threads` of
    0 leaves torch's own choice. `cold` asks for fresh processes that measure the time to the first result.
    `train` measures training steps (forward, loss and backward; dropout is off), `dynamic` compiles with
    symbolic sizes. `fallbacks` asks for the operators that Pellucid leaves to ATen, with their share of the time.
    """

    subjects: tuple[str, ...] = DEFAULT_SUBJECTS
    batch: int = 1
    seq: int = 128
    dtype: str = "f32"
    threads: int = 0
    budget: float = 20.0
    cold: bool = True
    train: bool = False
    dynamic: bool = False
    fallbacks: bool = False

    @property
    def size(self) -> Size:
        """Batch, sequence length and dtype, as the models want them."""
        return Size(self.batch, self.seq, DTYPES[self.dtype], self.train)

    @property
    def names(self) -> tuple[str, ...]:
        """The subjects in the order of measurement: eager first, each one once."""
        return tuple(dict.fromkeys((EAGER, *self.subjects)))


def bench(
    models: Sequence[str], settings: Settings | None = None, progress: Progress = lambda doing, done: None
) -> Report:
    """Measure each of `models` under each subject of `settings`.

    What a subject does wrong (an exception, a crash, wrong numbers) is a finding in its `SubjectResult`.
    Raises `UnknownName` for a model, backend or dtype that does not exist, before anything is run.
    """
    settings = settings or Settings()
    _check_names(models, settings)
    with _threads(settings.threads):
        described = describe_environment()
        results = []
        for i, model in enumerate(models):
            part = _Part(progress, model, i / len(models), (i + 1) / len(models))
            results.append(_bench_model(model, settings, part))
    return Report(SCHEMA, described, tuple(results))


def compare(workload: Workload, settings: Settings, progress: Progress = lambda doing, done: None) -> ModelResult:
    """Measure a workload of your own in this process; `settings.cold` does not apply, for it has no name.

    >>> own = Workload("double", lambda x: x + x, {"x": torch.ones(4)})
    >>> result = compare(own, Settings(subjects=("aot_eager",), budget=0.1))
    >>> [(s.name, s.error, s.accurate) for s in result.subjects]
    [('eager', 0.0, True), ('aot_eager', 0.0, True)]
    """
    gc.collect()  # what Dynamo watches should die before Dynamo forgets it
    torch._dynamo.reset()  # so that no subject meets the limit on recompilations for what others left
    with torch.set_grad_enabled(workload.train):
        judge = _judge(workload)
        trials: list[_Trial] = []
        for i, name in enumerate(settings.names):
            progress(f"{name}, first call", 0.5 * i / len(settings.names))
            trials.append(_try(workload, name, settings.dynamic, judge))
        return _time(workload, trials, settings, lambda done: progress("timing", 0.5 + 0.5 * done))


# ------------------------------------------------------------------------------------------------ one model


def _bench_model(model: str, settings: Settings, part: _Part) -> ModelResult:
    part("building", 0.0)
    workload = build(model, settings.size)
    share = 0.6 if settings.cold else 0.0  # a guess at which part of the time the fresh processes take
    starts = {}
    for i, name in enumerate(settings.names if settings.cold else ()):
        part(f"first result of {name}, cold and warm", share * i / len(settings.names))
        starts[name] = cold_and_warm(_request(model, name, settings))
    result = compare(workload, settings, lambda doing, done: part(doing, share + (1 - share) * done))
    subjects = tuple(replace(s, cold=c, warm=w) for s in result.subjects for c, w in [_of(starts, s.name)])
    return replace(result, subjects=subjects)


def _request(model: str, subject: str, settings: Settings) -> Request:
    s = settings
    return Request(model, subject, s.batch, s.seq, s.dtype, s.threads, s.train, s.dynamic)


def _of(starts: dict, name: str) -> tuple:
    return starts.get(name, (None, None))


@dataclass(slots=True)
class _Trial:
    """A subject that was compiled and called once: its result so far, and its call unless that failed."""

    result: SubjectResult
    call: Callable[[], object] | None = field(default=None)
    counter: Counter | None = field(default=None)


def _judge(workload: Workload) -> Callable[[Any], float]:
    """How far what a subject returns is from what float64 returns."""
    exact: Any = compiled(workload.as_float64(), EAGER)()
    if workload.train:
        return lambda gradients: gradient_error(gradients, exact)
    reference = [t.detach() for t in tensors(exact)]
    return lambda output: error(tensors(output), reference)


def _try(workload: Workload, name: str, dynamic: bool, judge: Callable[[Any], float]) -> _Trial:
    """Compile, make the first call and judge its numbers."""
    try:
        counter = Counter(name)
        start = time.perf_counter()
        call = compiled(workload, name, dynamic or None)
        output = call()
        seconds = time.perf_counter() - start
        counts = counter.counts()
        result = SubjectResult(
            name,
            first_seconds=seconds,
            error=judge(output),
            kernels=counts.kernels if counts else None,
            fallbacks=counts.fallbacks if counts else None,
        )
        return _Trial(result, call, counter)
    except Exception as e:
        return _Trial(SubjectResult(name, failure=_one_line(e)))


def _time(
    workload: Workload, trials: list[_Trial], settings: Settings, on_round: Callable[[float], None]
) -> ModelResult:
    eager = trials[0]
    if eager.call is None:
        raise RuntimeError(f"{workload.name} fails in eager mode: {eager.result.failure}")
    calls = {t.result.name: t.call for t in trials if t.call is not None}
    slots = interleave(calls, settings.budget, baseline=EAGER, on_round=on_round)
    baseline = [s.seconds for s in slots[EAGER]]

    def finish(result: SubjectResult) -> SubjectResult:
        if result.name not in slots or result.error is None or eager.result.error is None:
            return result
        seconds = [s.seconds for s in slots[result.name]]
        return replace(
            result,
            seconds=summarise(seconds),
            speedup=pairwise_ratio(baseline, seconds),
            faults=summarise([s.faults for s in slots[result.name]]),
            accurate=is_accurate(result.error, eager.result.error, workload.floating),
        )

    if settings.fallbacks:
        for trial in trials:
            if trial.call is not None and trial.counter is not None:
                trial.result = replace(trial.result, fallback_times=trial.counter.fallback_times(trial.call))
    subjects = tuple(finish(t.result) for t in trials)
    s = settings
    return ModelResult(workload.name, s.batch, s.seq, s.dtype, len(baseline), subjects, s.train, s.dynamic)


def _one_line(e: Exception) -> str:
    cause = getattr(e, "inner_exception", e)  # what Dynamo's BackendCompilerFailed wraps
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0]}" if text else type(cause).__name__


# ------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True, slots=True)
class _Part:
    """Progress of one model as a stretch of the whole run's."""

    progress: Progress
    model: str
    begin: float
    end: float

    def __call__(self, doing: str, done: float) -> None:
        self.progress(f"{self.model}: {doing}", self.begin + (self.end - self.begin) * done)


def _check_names(models: Sequence[str], settings: Settings) -> None:
    for model in models:
        if model not in MODELS:
            raise UnknownName("model", model, sorted(MODELS))
        if settings.train and not MODELS[model].sized:
            trainable = sorted(name for name, known in MODELS.items() if known.sized)
            raise UnknownName("model with parameters to train", model, trainable)
    if settings.dtype not in DTYPES:
        raise UnknownName("dtype", settings.dtype, sorted(DTYPES))
    for subject in settings.names:
        check_subject(subject)


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_environment() -> Environment:
    """The machine and the versions in use now."""
    known = environment()
    shown = {each.name: known[each.name] for each in fields(Environment) if each.name in known}
    return Environment(load=os.getloadavg()[0], **shown)
