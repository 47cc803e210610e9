"""The results of profiling."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.kit.shown import Paged
from pellucid.kit.stats import geometric_mean

BLOCK = "block"
"""The target of a profile that was taken around a block of code: it ran once."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Calls of one kernel, or of one library operator, at one set of sizes.

    name: of the kernel in its graph, or of the operator. kind: `kernel` or `call`. group: its group in comparisons.
    symbol: the function. calls: per call of the program. microseconds: of one call, the mean; spread: half the
    interquartile range, as a share of the median. total_microseconds: of all calls in one call of the program; share:
    of its time. shapes: of the inputs; results: shapes of the outputs. bytes, flops: of one call; None if unknown.
    limit: what binds it (`memory`, `l2`, `compute`, `overhead`), percent_of_limit: how much of that it reaches, and
    estimate_microseconds: what the machine model predicts; empty and None if unknown. why_below: for a row below 70% of
    that limit, where the rest of its time goes, `14% fetching from memory`; see `limits.why_below`.
    line_calls: for an operator of eager mode, how many of the calls come from each of its user_lines.
    threads: the maximum number that worked on it; None where the library decides. imbalance: the share of these
    threads' time that was spent waiting for the slowest one, from 0 to 1. fx_nodes, user_lines: of all its calls.
    cycles, instructions, cache_misses: of one call, in the calling thread; None where they were not counted.
    steps: the calls in their graphs, `inference_0/mm_3`. dtype: in which it computes floats, `f32`. fetched: bytes of
    the cache lines that a call touches; None if unknown. scalar: why a kernel is not vectorised, reason: why a library
    call is not compiled; empty where it is, or if unknown. packed: elements of a parameter that each call packs again,
    which freezing avoids.
    """

    name: str
    kind: str
    group: str
    symbol: str
    calls: float
    microseconds: float
    spread: float
    total_microseconds: float
    share: float
    shapes: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    bytes: int | None = None
    flops: int | None = None
    limit: str = ""
    percent_of_limit: float | None = None
    estimate_microseconds: float | None = None
    threads: int | None = None
    imbalance: float = 0.0
    fx_nodes: tuple[str, ...] = ()
    user_lines: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    dtype: str = ""
    fetched: int | None = None
    scalar: str = ""
    reason: str = ""
    cycles: float | None = None
    instructions: float | None = None
    cache_misses: float | None = None
    line_calls: tuple[float, ...] = ()
    packed: int = 0
    why_below: tuple[str, ...] = ()

    @property
    def cycles_per_instruction(self) -> float | None:
        return self.cycles / self.instructions if self.cycles is not None and self.instructions else None

    @property
    def because(self) -> str:
        """`why_below` as a sentence, or why it exceeds its limit; empty where neither applies."""
        if self.why_below:
            return f"the rest: {'; '.join(self.why_below)}"
        above = self.group == "attention" and (self.percent_of_limit or 0) > 100
        return "masked-out scores are counted as work, but not computed" if above else ""

    @property
    def estimate_factor(self) -> float | None:
        """The ratio of estimate and time, inverted if below 1: 2.0 both for half and for twice the time."""
        if not self.estimate_microseconds or not self.microseconds:
            return None
        ratio = self.estimate_microseconds / self.microseconds
        return max(ratio, 1 / ratio)

    @property
    def gigabytes_per_second(self) -> float | None:
        return self._rate(self.bytes)

    @property
    def gigaflops_per_second(self) -> float | None:
        return self._rate(self.flops)

    def _rate(self, amount: int | None) -> float | None:
        return amount / self.microseconds * 1e-3 if amount is not None and self.microseconds else None


@dataclass(frozen=True, slots=True)
class Overhead:
    """The time of a call of the program outside kernels and library calls, in microseconds.

    python: outside compiled graphs: Python, Dynamo's guards, AOTAutograd's wrappers, operators that were not compiled.
    launch: inside compiled graphs, between their steps: the plan, allocation of results.
    """

    python_microseconds: float
    launch_microseconds: float

    @property
    def microseconds(self) -> float:
        return self.python_microseconds + self.launch_microseconds


@dataclass(frozen=True, slots=True)
class PythonPart:
    """A part of the time outside compiled graphs: `your program`, `Dynamo`, `AOTAutograd`, ... Its microseconds are
    scaled to a call without cProfile, so the parts add up to `Overhead.python_microseconds`.
    """

    name: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function, in one call of the program under cProfile. where: `file:line`, empty for native functions. part: the
    `PythonPart` that it belongs to. own_microseconds: without its callees."""

    name: str
    where: str
    part: str
    calls: float
    own_microseconds: float
    total_microseconds: float


@dataclass(frozen=True, slots=True)
class PythonCall:
    """An edge of the call graph; caller and callee are indices into the functions. calls: per call of the program;
    microseconds: of these calls."""

    caller: int
    callee: int
    calls: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class PythonSide:
    """Where the time goes in Python.

    slower: how many times as long a call takes under cProfile. guards_microseconds: of Dynamo's guards, as measured by
    torch.profiler; in `functions` they are part of the functions that call compiled ones. parts: the longest first.
    functions: by total time, the longest first. calls: among these. why_not: why there is no cProfile data.
    """

    slower: float
    guards_microseconds: float
    parts: tuple[PythonPart, ...]
    functions: tuple[PythonFunction, ...]
    calls: tuple[PythonCall, ...]
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that Dynamo did: why, and the user's line, empty if unknown."""

    why: str
    line: str


@dataclass(frozen=True, slots=True)
class Process:
    """What was observed of the process in addition to times.

    page_faults: per call of the program without timers. system: microseconds of system time of all threads in such a
    call. waited: the share of time in which its threads were ready to run but had no core. cores: usable ones; 0 if not
    measured. openmp: paths of the OpenMP runtimes in the process.
    keeps_memory: whether its allocator retains large freed blocks. graph_breaks: while the program was compiled.
    recompilations: after it had run.
    flushed: the speedup when denormal numbers are flushed to zero. denormals: calls of operators of eager mode whose
    results contain some; only searched for where flushing is faster.
    """

    page_faults: float = 0.0
    system: float = 0.0
    waited: float = 0.0
    cores: int = 0
    openmp: tuple[str, ...] = ()
    keeps_memory: bool = True
    graph_breaks: tuple[Event, ...] = ()
    recompilations: tuple[Event, ...] = ()
    flushed: float = 1.0
    denormals: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """A way to make a program faster.

    category: `page-faults`, `allocator`, `oversubscription`, `threads`, `openmp-runtimes`, `denormals`, `layout`,
    `scalar-kernel`, `fallback`, `recompilation`, `graph-break`, `guards`, `unfrozen`, `imbalance`, `small-kernels` or
    `dtype`. what: what to do, a sentence. where: the kernel or operator, then the user's lines; empty for the whole
    process. evidence: the figures that it follows from, a sentence. gain: the maximum speedup (1.5 for two thirds of
    the time). check: the command that shows whether it helped.
    """

    category: str
    what: str
    where: tuple[str, ...]
    evidence: str
    gain: float
    check: str


@dataclass(frozen=True, slots=True)
class Profile(Paged):
    """Where the time of a program went. Times are microseconds of one call of the program.

    backend: the one that compiled it, or `eager`. calls: timed calls of the program. microseconds: of one call, the
    mean of the middle half; the totals of `kernels` and `overhead` add up to it. spread: half the interquartile range,
    as a share of the median. plain_microseconds: of a call without timers, measured alternately with these; None if
    there was none.
    graph_runs: per call. threads: torch's. kernels: the longest first. lost: runs of graphs that are not counted.
    notes: what limits the validity of the numbers. failure: the exception that ended the program, if any. advice: the
    largest gain first.
    machine: the machine whose limits are used, and the source of its figures; empty if none are used. process: what was
    observed in addition to times. python: where the time outside compiled graphs goes; None if not measured. counters:
    why the rows have no cycles, instructions and misses; empty where they have, and for a block that ran once.
    """

    backend: str
    target: str
    calls: int
    microseconds: float
    spread: float
    plain_microseconds: float | None
    graph_runs: float
    threads: int
    kernels: tuple[KernelTime, ...]
    overhead: Overhead
    lost: int = 0
    notes: tuple[str, ...] = ()
    failure: str = ""
    advice: tuple[Advice, ...] = ()
    machine: str = ""
    process: Process = Process()
    python: PythonSide | None = None
    counters: str = ""

    @property
    def real_microseconds(self) -> float:
        """Microseconds of a call without timers, or with them if that was not measured."""
        return self.microseconds if self.plain_microseconds is None else self.plain_microseconds

    @property
    def estimate_factor(self) -> float | None:
        """The geometric mean of `estimate_factor` of the rows that have one; None without any."""
        factors = [row.estimate_factor for row in self.kernels]
        known = [factor for factor in factors if factor is not None]
        return geometric_mean(known) if known else None

    @property
    def good(self) -> bool:
        return not self.failure


def is_block(found: Profile) -> bool:
    """Whether a profile was taken around a block. A target named `block` differs by its calls without timers."""
    return found.target == BLOCK and found.plain_microseconds is None


def what_was_timed(found: Profile) -> tuple[str, str]:
    """What was timed, and how accurately: `a call`, `±8% of 32 calls, 2 threads`."""
    threads = f"{found.threads} {'thread' if found.threads == 1 else 'threads'}"
    if is_block(found):
        return "for the block", threads
    return "a call", f"{'1 call' if found.calls == 1 else f'±{found.spread:.0%} of {found.calls} calls'}, {threads}"


@dataclass(frozen=True, slots=True)
class Explained:
    """The time of a group of kernels and calls in two profiles, in microseconds of one call of the program."""

    group: str
    theirs_microseconds: float
    ours_microseconds: float

    @property
    def difference_microseconds(self) -> float:
        return self.theirs_microseconds - self.ours_microseconds


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator of eager mode, in microseconds of one call of the program."""

    name: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class Replaced:
    """A kernel or library call with the operators of eager mode that it replaced, the longest first.

    name: empty for operators that nothing replaced, such as views and what was computed at compile time. title: the
    name, never empty.
    """

    name: str
    theirs_microseconds: float
    ours_microseconds: float
    operators: tuple[OperatorTime, ...]

    @property
    def title(self) -> str:
        return self.name or "no kernel: views, and operators outside graphs"


@dataclass(frozen=True, slots=True)
class Comparison(Paged):
    """A profile compared with another one. explained: the groups, the largest difference first.

    replaced: the operators of eager mode that each kernel replaced, the longest first; only against eager mode.
    run: the name of the folder that the other profile was read from; empty if it was just taken. against: its name.

    difference_microseconds: how much longer a call of the other takes, without timers; unexplained_microseconds: the
    part of it that is in no group: timed steps that took longer than the call without timers.
    """

    ours: Profile
    theirs: Profile
    explained: tuple[Explained, ...]
    replaced: tuple[Replaced, ...] = ()
    run: str = ""

    @property
    def against(self) -> str:
        return self.run or self.theirs.backend

    @property
    def difference_microseconds(self) -> float:
        return self.theirs.real_microseconds - self.ours.real_microseconds

    @property
    def unexplained_microseconds(self) -> float:
        return self.difference_microseconds - sum(each.difference_microseconds for each in self.explained)

    @property
    def good(self) -> bool:
        return self.ours.good and self.theirs.good
