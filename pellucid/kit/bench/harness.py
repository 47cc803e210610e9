"""Run a program under several backends, side by side in one process, and report the time and accuracy of each.

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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from pellucid.background import wait_for_builds
from pellucid.errors import NotJudged, UserError
from pellucid.kit.bench.interleave import Runner, interleave, run_slot
from pellucid.kit.bench.models import DTYPES, MODELS, DoesNotFit, Size, UnknownName
from pellucid.kit.bench.peers import PEERS, Engine, EngineError
from pellucid.kit.bench.programs import is_sized, is_trainable, programs_of
from pellucid.kit.bench.results import SCHEMA, Environment, ModelResult, Report, SubjectResult
from pellucid.kit.bench.startup import Request, cold_and_warm
from pellucid.kit.bench.subjects import DEFAULT_SUBJECTS, EAGER, Counter, Subject, check_subject, compiled
from pellucid.kit.judge.accuracy import error, floating_type, gradient_error, is_accurate, tensors
from pellucid.kit.process.apart import Apart, Died, died, say
from pellucid.kit.process.child import failure_of, gist, not_judged
from pellucid.kit.programs.case import Case, copied
from pellucid.kit.programs.graphs import case_in
from pellucid.kit.stats import pairwise_ratio, summarise
from pellucid.trace.environment import environment

Judge = Callable[[Any], float | None]
Progress = Callable[[str, float], None]
"""Called with the current activity, and the fraction of the whole run that is done."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure, and how.

    `subjects` are backends of torch.compile and other engines, each `NAME` or `NAME:KEY=VALUE,...` with its options;
    eager is always measured, first, as the baseline. `budget` is the time in seconds for the timed rounds of one
    program, without start-up and compilation. `threads` of 0 keeps torch's default. `cold` also measures the time to
    the first result in fresh processes. `train` measures training steps (forward, loss and backward; dropout is off),
    `dynamic` compiles with symbolic sizes. `fallbacks` lists the operators that Pellucid leaves to ATen, with their
    share of the time.
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
        """Batch, sequence length, dtype and mode for building models."""
        return Size(self.batch, self.seq, DTYPES[self.dtype], self.train)

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct subjects in the order of measurement, eager first."""
        return tuple(dict.fromkeys((EAGER, *self.subjects)))


def bench(
    words: Sequence[str],
    settings: Settings | None = None,
    progress: Progress = lambda doing, done: None,
    measured: Callable[[ModelResult], None] = lambda result: None,
) -> Report:
    """Measure each of the programs that `words` name (see `programs`) under each subject of `settings`.

    measured: is called with each program's result as soon as it is available.

    With several words each has its own process, so that none is affected by fragmented memory or compiled code of
    others.

    A failure of a subject (an exception, a crash, wrong results) is reported in its `SubjectResult`.
    Raises `UnknownName` and UserError for a program, backend or dtype that does not exist, before anything is run.
    """
    settings = settings or Settings()
    _check(words, settings)
    for word in words if len(words) > 1 else ():
        if word not in MODELS:  # building it shows whether it exists
            _programs(word, settings)
    described = describe_environment()
    results: list[ModelResult] = []
    measure = _bench_word if len(words) == 1 else _bench_isolated
    for i, word in enumerate(words):
        found = measure(word, settings, _Part(progress, word, i / len(words), (i + 1) / len(words)))
        results += found
        for result in found:
            measured(result)
    return Report(SCHEMA, described, tuple(results))


def compare(case: Case, settings: Settings, progress: Progress = lambda doing, done: None) -> ModelResult:
    """Measure a program in this process; `settings.cold` does not apply. Raises as `bench` for what does not exist.

    >>> own = Case("double", lambda x: x + x, (torch.ones(4),))
    >>> result = compare(own, Settings(subjects=("aot_eager",), budget=0.1))
    >>> [(s.name, s.error, s.accurate) for s in result.subjects]
    [('eager', 0.0, True), ('aot_eager', 0.0, True)]
    """
    _check_settings(settings)
    gc.collect()  # free objects that Dynamo watches before Dynamo is reset
    torch._dynamo.reset()  # so that compilations of other subjects do not count towards the recompilation limit
    with torch.set_grad_enabled(settings.train), ExitStack() as engines:
        judge = _judge(case, settings.train)
        trials: list[_Trial] = []
        for i, name in enumerate(settings.names):
            progress(f"{name}, first call", 0.5 * i / len(settings.names))
            trials.append(_try(case, name, settings, judge, engines))
        return _time(case, trials, settings, lambda done: progress("timing", 0.5 + 0.5 * done))


# Seconds, more than any benchmark takes: each part of it has its own limit.
_FOREVER = 1e6
# Relative difference of repeated calls in eager mode that is allowed, for sums added up in another order.
_REPEAT_TOLERANCE = 0.02

# ------------------------------------------------------------------------------------------------ one program


def _bench_word(word: str, settings: Settings, part: _Part) -> list[ModelResult]:
    part("building", 0.0)
    with _threads(settings.threads):
        cases = _programs(word, settings)
        parts = [part.of(case.name, n / len(cases), (n + 1) / len(cases)) for n, case in enumerate(cases)]
        return [_bench_one(case, settings, each) for case, each in zip(cases, parts, strict=True)]


def _bench_isolated(word: str, settings: Settings, part: _Part) -> list[ModelResult]:
    try:
        work = Apart(f"{__name__}:bench_here", word, settings, part.begin, part.end)
        found = work.result(lambda said: part.progress(*said), _FOREVER)
    except Died as death:
        raise died(word, death) from None
    if isinstance(found, DoesNotFit):
        raise found
    return found


def bench_here(word: str, settings: Settings, begin: float, end: float) -> list[ModelResult] | DoesNotFit:
    """The function that the process of `_bench_isolated` runs; it reports its progress between `begin` and `end`."""
    try:
        return _bench_word(word, settings, _Part(lambda doing, done: say((doing, done)), word, begin, end))
    except DoesNotFit as error:
        return error


def _bench_one(case: Case, settings: Settings, part: _Part) -> ModelResult:
    if case.name not in MODELS:
        _call_eagerly(case, settings.train)
    share = 0.6 if settings.cold else 0.0  # an estimate of the share of time that the fresh processes take
    starts = {}
    for i, name in enumerate(settings.names if settings.cold else ()):
        part(f"first result of {name}, cold and warm", share * i / len(settings.names))
        starts[name] = cold_and_warm(_request(case.name, name, settings))
    result = compare(case, settings, lambda doing, done: part(doing, share + (1 - share) * done))
    subjects = tuple(replace(s, cold=c, warm=w) for s in result.subjects for c, w in [_of(starts, s.name)])
    return replace(result, subjects=subjects)


def _request(program: str, subject: str, settings: Settings) -> Request:
    s = settings
    return Request(program, subject, s.batch, s.seq, s.dtype, s.threads, s.train, s.dynamic)


def _of(starts: dict, name: str) -> tuple:
    return starts.get(name, (None, None))


@dataclass(slots=True)
class _Trial:
    """A subject that was compiled and called once: its result so far, and its call unless it failed."""

    result: SubjectResult
    call: Callable[[], object] | None = field(default=None)
    counter: Counter | None = field(default=None)


def _judge(case: Case, train: bool) -> Judge:
    """The error of a subject's output against float64; None for a program that does not run in float64."""
    try:
        exact: Any = compiled(case_in(case, torch.float64), EAGER, train)()
    except Exception:
        compiled(case.fresh(), EAGER, train)()  # fails too, unless the program only supports its own types
        return lambda output: None
    if train:
        return lambda gradients: gradient_error(gradients, exact)
    reference = [t.detach() for t in tensors(exact)]
    return lambda output: error(tensors(output), reference)


def _call_eagerly(case: Case, train: bool) -> None:
    """Raises NotJudged for a program that cannot be measured, before fresh processes are started for it.

    That is one that fails without a compiler too, or whose results differ between calls with the same random seed.
    """
    found: list[Any] = []
    try:
        for _ in range(2):
            with torch.set_grad_enabled(train), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                found.append(compiled(case.fresh(), EAGER, train)())
    except Exception as failed:
        raise not_judged(f"{case.name} fails in eager mode", failure_of(failed)) from failed
    once, again = found
    difference = gradient_error(again, once) if train else error(tensors(again), tensors(once))
    if difference > _REPEAT_TOLERANCE:
        raise NotJudged(
            f"{case.name} is not deterministic: two calls in eager mode have a relative difference of {difference:.1g}",
            hint="draw random numbers from torch's generator, and keep no state between calls",
        )


def _try(case: Case, name: str, settings: Settings, judge: Judge, engines: ExitStack) -> _Trial:
    """Compile a program, call it once and judge its results. It works on copies of the inputs."""
    subject = Subject.of(name)
    case = Case(case.name, case.fn, *copied((case.args, dict(case.kwargs))))
    try:
        counter = Counter(name)
        start = time.perf_counter()
        if subject.backend in PEERS:
            call = engines.enter_context(closing(Engine(subject.backend, case, subject.options)))
        else:
            call = compiled(case, name, settings.train, settings.dynamic or None)
        output = call()
        seconds = time.perf_counter() - start
        if wait_for_builds():
            output = call()
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


def _time(case: Case, trials: list[_Trial], settings: Settings, on_round: Callable[[float], None]) -> ModelResult:
    eager = trials[0]
    if eager.call is None:
        raise RuntimeError(f"{case.name} fails in eager mode: {eager.result.failure}")
    runners = {t.result.name: _runner(t.call) for t in trials if t.call is not None}
    slots = interleave(runners, settings.budget, baseline=EAGER, on_round=on_round)
    baseline, floating = [s.seconds for s in slots[EAGER]], floating_type(case)

    def finish(result: SubjectResult) -> SubjectResult:
        if result.name not in slots:
            return result
        error, eagers = result.error, eager.result.error
        seconds = [s.seconds for s in slots[result.name]]
        return replace(
            result,
            seconds=summarise(seconds),
            speedup=pairwise_ratio(baseline, seconds),
            faults=summarise([s.faults for s in slots[result.name]]),
            accurate=None if error is None or eagers is None else is_accurate(error, eagers, floating),
        )

    if settings.fallbacks:
        for trial in trials:
            if trial.call is not None and trial.counter is not None:
                trial.result = replace(trial.result, fallback_times=trial.counter.fallback_times(trial.call))
    subjects = tuple(finish(t.result) for t in trials)
    s = settings
    return ModelResult(case.name, s.batch, s.seq, s.dtype, len(baseline), subjects, s.train, s.dynamic)


def _runner(call: Callable[[], object]) -> Runner:
    return call.slot if isinstance(call, Engine) else partial(run_slot, call)


def _one_line(e: Exception) -> str:
    cause = getattr(e, "inner_exception", e)  # what Dynamo's BackendCompilerFailed wraps
    if isinstance(cause, EngineError):
        return cause.message
    text = gist(str(cause))
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


# ------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True, slots=True)
class _Part:
    """Progress of one program as a part of the whole run's."""

    progress: Progress
    program: str
    begin: float
    end: float

    def __call__(self, doing: str, done: float) -> None:
        self.progress(f"{self.program}: {doing}", self.begin + (self.end - self.begin) * done)

    def of(self, program: str, begin: float, end: float) -> _Part:
        """The part of this one between two fractions."""
        length = self.end - self.begin
        return _Part(self.progress, program, self.begin + length * begin, self.begin + length * end)


def _check_settings(settings: Settings) -> None:
    if settings.dtype not in DTYPES:
        raise UnknownName("dtype", settings.dtype, sorted(DTYPES))
    for subject in settings.names:
        check_subject(subject, settings.train)


def _check(words: Sequence[str], settings: Settings) -> None:
    _check_settings(settings)
    for word in words:
        if settings.train and word in MODELS and not MODELS[word].sized:
            raise UnknownName("model with parameters to train", word, sorted(name for name in MODELS if is_sized(name)))
        if word not in MODELS and replace(settings, batch=1, seq=128, dtype="f32") != settings:
            raise UserError(f"{word} has its own sizes and types", hint="batch, seq and dtype are for named models")


def _programs(word: str, settings: Settings) -> list[Case]:
    cases = programs_of(word, settings.size)
    if word not in MODELS and settings.train and not all(map(is_trainable, cases)):
        raise UserError(f"{word} has no parameters to train", hint="use an nn.Module")
    return cases


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
