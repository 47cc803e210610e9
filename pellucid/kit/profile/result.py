"""What a profile says."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.kit.shown import Paged
from pellucid.kit.stats import geometric_mean

BLOCK = "block"
"""The target of a profile that was taken around a block of code: it ran once."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Calls of one kernel, or of one operator of a library, at one set of sizes.

    name: a kernel's in its graph, or the operator's. kind: `kernel` or `call`. group: what it counts as in comparisons.
    symbol: the function. calls: in one call of the program. microseconds: of one call, the mean; spread: half the
    distance between the quartiles, as a share of the median. total_microseconds: of all calls in one call of the
    program; share: of its time. shapes: of what it reads; results: of what it writes. bytes, flops: of one call; None
    where nobody knows.
    limit: what binds it (`memory`, `l2`, `compute`, `overhead`), percent_of_limit: how much of that it reaches, and
    estimate_microseconds: what the machine model expects; empty and None where they cannot be told. why_below: of a
    row below 70% of that limit, where the rest of its time goes, `14% fetching from memory`; see `limits.why_below`.
    line_calls: of an operator of eager mode, how many of the calls come from each of its user_lines.
    threads: that worked on it, the most seen; None where the library decides. imbalance: how much of the time of these
    threads was spent waiting for the last of them, from 0 to 1. fx_nodes, user_lines: behind all of its calls.
    cycles, instructions, cache_misses: of one call, in the thread that calls; None where nothing counts them.
    steps: the calls in their graphs, `inference_0/mm_3`. dtype: in which it computes floats, `f32`. fetched: bytes of
    the lines of the cache that a call touches; None where nobody knows. scalar: why a kernel has no vectors, reason:
    why a library call is none; empty where it has, or nobody says. packed: elements of a parameter that each call packs
    anew, which freezing spares.
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
        """`why_below` as a sentence, or why it is beyond its limit; empty where neither is to be explained."""
        if self.why_below:
            return f"the rest: {'; '.join(self.why_below)}"
        beyond = self.group == "attention" and (self.percent_of_limit or 0) > 100
        return "scores that a mask hides count as work, and are left out" if beyond else ""

    @property
    def estimate_factor(self) -> float | None:
        """How far the estimate is from the time, in either direction: 2.0 for half of it, and for twice."""
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
    """What is left of a call of the program beside kernels and library calls, in microseconds.

    python: outside compiled graphs: Python, Dynamo's guards, AOTAutograd's wrappers, operators that were not compiled.
    launch: inside them, between their steps: the plan, memory for results.
    """

    python_microseconds: float
    launch_microseconds: float

    @property
    def microseconds(self) -> float:
        return self.python_microseconds + self.launch_microseconds


@dataclass(frozen=True, slots=True)
class PythonPart:
    """A part of the time outside compiled graphs: `your program`, `Dynamo`, `AOTAutograd`, ... Its microseconds are
    those of a call without cProfile, so the parts add up to `Overhead.python_microseconds`.
    """

    name: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function, in one call of the program under cProfile. where: `file:line`, empty for what is not Python. part:
    whose it is. own_microseconds: without what it calls."""

    name: str
    where: str
    part: str
    calls: float
    own_microseconds: float
    total_microseconds: float


@dataclass(frozen=True, slots=True)
class PythonCall:
    """That a function calls another, by their numbers among the functions. calls: in one call of the program;
    microseconds: that these take."""

    caller: int
    callee: int
    calls: float
    microseconds: float


@dataclass(frozen=True, slots=True)
class PythonSide:
    """Where in Python the time goes.

    slower: how many times as long a call takes under cProfile. guards_microseconds: of Dynamo's guards, as
    torch.profiler sees them; they count for the functions that call compiled ones. parts: the longest first.
    functions: that take most with what they call first, and calls: among these. why_not: why it could not be looked at.
    """

    slower: float
    guards_microseconds: float
    parts: tuple[PythonPart, ...]
    functions: tuple[PythonFunction, ...]
    calls: tuple[PythonCall, ...]
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that Dynamo did, why, and the user's line; that is empty where nobody knows."""

    why: str
    line: str


@dataclass(frozen=True, slots=True)
class Process:
    """What was seen of the process beside times.

    page_faults: in a call of the program without timers. system: microseconds of all threads in the system's kernel in
    such a call. waited: the share of the time in which its threads could run and had no core. cores: that it may use; 0
    where nobody looked. openmp: the OpenMP runtimes in it, as paths.
    keeps_memory: whether its allocator keeps large blocks that were freed. graph_breaks, recompilations: those while
    the program was compiled, and those after it had run.
    flushed: how many times as fast it is while denormal numbers count as zeros. denormals: calls of operators of eager
    mode whose results hold some; looked for where that is faster.
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
    """Something to do about the time of a program.

    category: `page-faults`, `allocator`, `oversubscription`, `threads`, `openmp-runtimes`, `denormals`, `layout`,
    `scalar-kernel`, `fallback`, `recompilation`, `graph-break`, `imbalance`, `small-kernels` or `dtype`.
    what: to do, a sentence. where: the kernel or operator, then the user's lines; empty for the process as a whole.
    evidence: the figures that it follows from, a sentence. gain: how many times as fast the program gets at the most
    (1.5 for two thirds of its time). check: the command that shows whether it helped.
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

    backend: that compiled it, or `eager`. calls: of the program that were timed. microseconds: of one, the mean of the
    middle half; the totals of `kernels` and `overhead` add up to it. spread: half the distance between the quartiles,
    as a share of the median. plain_microseconds: of a call without timers, measured in turn with these; None where
    there was none.
    graph_runs: in one call. threads: torch's. kernels: the longest first. lost: runs of graphs that are not counted.
    notes: what makes the numbers say less. failure: how the program ended, if by an exception. advice: what to do,
    what gains most first.
    machine: whose limits count, and where its figures are from; empty where nothing is held against them. process: what
    was seen beside times. python: where the time outside compiled graphs goes; None where nobody looked. counters: why
    the rows have no cycles, instructions and misses; empty where they have, and of a block that ran once.
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
        """Of a call as it is without timers, as far as that was measured."""
        return self.microseconds if self.plain_microseconds is None else self.plain_microseconds

    @property
    def estimate_factor(self) -> float | None:
        """How far estimates are from times: the geometric mean of all rows that have both; None without any."""
        factors = [row.estimate_factor for row in self.kernels]
        known = [factor for factor in factors if factor is not None]
        return geometric_mean(known) if known else None

    @property
    def good(self) -> bool:
        return not self.failure


def is_block(found: Profile) -> bool:
    """Whether it was taken around a block. A function may have that name too, but is called without timers as well."""
    return found.target == BLOCK and found.plain_microseconds is None


def what_was_timed(found: Profile) -> tuple[str, str]:
    """What the time is of, and how well it is known: `a call`, `±8% of 32 calls, 2 threads`."""
    threads = f"{found.threads} {'thread' if found.threads == 1 else 'threads'}"
    if is_block(found):
        return "for the block", threads
    return "a call", f"{'1 call' if found.calls == 1 else f'±{found.spread:.0%} of {found.calls} calls'}, {threads}"


@dataclass(frozen=True, slots=True)
class Explained:
    """A group of work, in microseconds of one call of the program: of what it is compared with, and its own."""

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
    """A kernel or library call beside the operators of eager mode that it replaced, the longest first.

    name: empty for operators that nothing replaced, such as views and what was computed at compile time. title: a name
    in any case.
    """

    name: str
    theirs_microseconds: float
    ours_microseconds: float
    operators: tuple[OperatorTime, ...]

    @property
    def title(self) -> str:
        return self.name or "nothing: views, and what no graph holds"


@dataclass(frozen=True, slots=True)
class Comparison(Paged):
    """A profile beside another one. explained: the groups, that with the greatest difference first.

    replaced: what of eager mode each kernel replaced, that which took longest first; only beside eager mode.
    run: the name of the folder that the other one was read from; empty where it was taken now. against: its name.

    difference_microseconds: how much longer a call of the other takes, without timers; unexplained_microseconds: what
    of it stands in no group: steps that took longer, while they were timed, than the call without timers.
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
