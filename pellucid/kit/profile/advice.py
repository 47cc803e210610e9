"""Advice on how to make a program faster: one rule for each kind of advice, over its profile and the machine.

A rule estimates the maximum saving, in microseconds per call; advice that saves less than `MIN_SAVING` of a call is
dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pellucid.codegen.block_sizes import PACK, ROWS
from pellucid.ir.types import DType
from pellucid.kit.debug.doctor import KEEP_PAGES
from pellucid.kit.profile.result import Advice, Event, KernelTime, Profile
from pellucid.kit.profile.rows import GROUPS
from pellucid.machine import Machine

MIN_SAVING = 0.05
"""Share of a call's time."""

_MAX_SAVING = 0.9  # share of a call's time: larger estimates are too uncertain
_LINES = 3  # user lines listed in `where`
_ORDINARY = frozenset((GROUPS["kernel"], GROUPS["call"], GROUPS["layout"]))
_COPIES = (
    "clone",
    "copy",
    "contiguous",
    "_to_copy",
)  # not `copy_`, which writes in-place changes back
_SAVED_GUARDS = 0.5  # share measured for MobileNetV2 and for 52 sequential blocks, with PyTorch 2.13
_HUGE = 512  # pages in a huge page
_SMALL = 5  # times the expected time of a call: a kernel that takes longer does more than call overhead


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule found. saved: microseconds per call of the program. environment, options: of the command that checks
    it. certain: reported whatever it saves."""

    category: str
    what: str
    where: tuple[str, ...]
    evidence: str
    saved: float
    environment: str = ""
    options: str = ""
    certain: bool = False


Rule: TypeAlias = Callable[[Profile, Machine], Iterator[Found]]


def advise(profile: Profile, machine: Machine) -> tuple[Advice, ...]:
    """Advice, the largest gain first."""
    whole = profile.microseconds
    if whole <= 0:
        return ()
    every = (each for rule in RULES for each in rule(profile, machine))
    found = [each for each in every if each.certain or each.saved >= MIN_SAVING * whole]
    found.sort(key=lambda each: -each.saved)
    return tuple(
        Advice(
            each.category,
            each.what,
            each.where,
            each.evidence,
            round(whole / (whole - min(max(each.saved, 0.0), _MAX_SAVING * whole)), 3),
            _command(profile, each),
        )
        for each in found
    )


def _command(profile: Profile, found: Found) -> str:
    """The command that shows whether it helped: the same profile again."""
    if profile.target == "block":
        command = "the same program with pellucid.profile()"
    else:
        backend = "" if profile.backend == "pellucid" else f"--backend {profile.backend}"
        command = " ".join(filter(None, ("pellucid profile", profile.target, backend, found.options)))
    return " ".join(filter(None, (found.environment, command)))


# ------------------------------------------------------------------------------------------------ the process


def _oversubscription(profile: Profile, machine: Machine) -> Iterator[Found]:
    """More threads than cores: they share cores, and wait for each other at the end of every kernel."""
    process = profile.process
    if 0 < process.cores < profile.threads:
        yield Found(
            "oversubscription",
            f"use {process.cores} threads: torch.set_num_threads({process.cores})",
            (),
            f"{profile.threads} threads share {process.cores} cores, and were ready to run but waited for a core "
            f"{process.waited:.0%} of the time",
            process.waited * profile.microseconds,
            environment=f"OMP_NUM_THREADS={process.cores}",
            options=f"--threads {process.cores}",
        )


def _threads(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Fewer threads than cores, and kernels that are long enough to be run in parallel."""
    cores, threads = profile.process.cores, profile.threads
    if threads < cores:
        parallel = [row for row in profile.kernels if row.microseconds * 1e3 > 2 * machine.barrier]
        saved = sum(row.total_microseconds for row in parallel) * (1 - threads / cores)
        yield Found(
            "threads",
            f"use {cores} threads: torch.set_num_threads({cores})",
            (),
            f"{threads} of {cores} cores {'is' if threads == 1 else 'are'} used, and {len(parallel)} kernels and calls "
            "are long enough to run in parallel",
            saved,
            environment=f"OMP_NUM_THREADS={cores}",
            options=f"--threads {cores}",
        )


def _openmp_runtimes(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Each runtime has its own thread pool, which spins while it waits for work."""
    runtimes = profile.process.openmp
    if len(runtimes) > 1:
        yield Found(
            "openmp-runtimes",
            "load PyTorch's OpenMP runtime only: remove the others from LD_PRELOAD, or the packages that load them",
            (),
            f"{len(runtimes)} OpenMP runtimes in the process: {', '.join(runtimes)}; threads were ready to run but "
            f"waited for a core {profile.process.waited:.0%} of the time",
            profile.process.waited * profile.microseconds if profile.threads <= profile.process.cores else 0.0,
            certain=True,
        )


def _pages(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Memory that is requested from the system in every call: each page costs a page fault, which zeroes it. A huge
    page is one fault but costs many times as much, as the system time shows."""
    process = profile.process
    minimum = process.page_faults * machine.page * 1e-3
    saved = min(max(minimum, process.system / max(1, profile.threads)), minimum * _HUGE)
    evidence = f"{process.page_faults:.0f} page faults in each call take {saved:.0f} of {profile.microseconds:.0f} µs"
    if process.keeps_memory:
        what = "let the program reuse the memory that it maps in each call, instead of mapping it again"
        yield Found("page-faults", what, (), evidence, saved)
    else:
        what = f"let the allocator keep memory: set {KEEP_PAGES}, or LD_PRELOAD jemalloc or tcmalloc"
        evidence += "; the allocator returns the memory of freed tensors to the system"
        yield Found("allocator", what, (), evidence, saved, environment=KEEP_PAGES)


def _denormals(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Some instructions are many times slower on denormal numbers."""
    process = profile.process
    if process.denormals and process.flushed > 1:
        yield Found(
            "denormals",
            "call torch.set_flush_denormal(True) in each thread, if values below 1e-38 do not matter; or avoid them",
            (*_kernels_at(process.denormals[0].line, profile), *_lines(process.denormals)),
            f"a call is {process.flushed:.2f} times as fast when denormal numbers are flushed to zero; "
            f"{process.denormals[0].why}",
            profile.microseconds * (1 - 1 / process.flushed),
        )


# ------------------------------------------------------------------------------------------------ Dynamo


def _recompilation(profile: Profile, machine: Machine) -> Iterator[Found]:
    events = profile.process.recompilations
    if events:
        yield Found(
            "recompilation",
            "keep what the guards check unchanged from call to call, or mark it as dynamic",
            _lines(events),
            f"recompilations while it was measured: {len(events)}, the last one because: {_brief(events[-1])}",
            profile.overhead.python_microseconds,
            options="--dynamic",
        )


def _graph_break(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Python between graphs, and small kernels in them; a single graph would be entered only once."""
    events = profile.process.graph_breaks
    if events:
        runs = profile.graph_runs
        between = profile.overhead.microseconds + sum(row.total_microseconds for row in _small(profile))
        yield Found(
            "graph-break",
            "move what breaks the graph out of the compiled function",
            _lines(events),
            f"{len(events)} graph {'break' if len(events) == 1 else 'breaks'}, {runs:g} graphs run in "
            f"a call, and {profile.overhead.python_microseconds / profile.microseconds:.0%} of it is Python: "
            f"{_brief(events[0])}",
            between * (1 - 1 / max(runs, 1) if runs else 1.0),
        )


def _guards(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Dynamo's guards, checked for each parameter before each call; dictionary tags can replace most of the checks."""
    guards = profile.python.guards_microseconds if profile.python else 0.0
    exported = "; for inference, `pellucid.compile_exported` needs none" if profile.backend == "pellucid" else ""
    if guards:
        yield Found(
            "guards",
            "set torch._dynamo.config.use_recursive_dict_tags_for_guards = True before the program is compiled",
            (),
            f"Dynamo's guards take {guards:.0f} of {profile.microseconds:.0f} µs of each call; with this setting "
            "changes of a hook's closure or a module's class are not detected" + exported,
            guards * _SAVED_GUARDS,
        )


# ------------------------------------------------------------------------------------------------ rows


def _layout(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Copies from one memory layout to another, and strided accesses that waste cache lines."""
    for row in profile.kernels:
        if row.group == GROUPS["layout"] or _only_copies(row):
            yield Found(
                "layout",
                "create the tensor in the layout that its readers need, so that it need not be copied",
                _where(row),
                f"{_time_of(row, profile)} and computes nothing: it only moves {_size(row.bytes)}",
                row.total_microseconds,
            )
        elif _overfetch(row) > 1:
            yield Found(
                "layout",
                "make its inputs and outputs contiguous: each strided element takes a whole cache line",
                _where(row),
                f"{_time_of(row, profile)} and uses {_size(row.bytes)}, but the cache lines that it touches are "
                f"{_size(row.fetched)}",
                row.total_microseconds * (1 - 1 / _overfetch(row)),
            )


def _overfetch(row: KernelTime) -> float:
    """Bytes of the cache lines that a row touches per byte that it uses, where it is bound by memory; else 1."""
    if not row.fetched or not row.bytes or row.limit in ("compute", "overhead"):
        return 1.0
    return max(1.0, row.fetched / row.bytes)


def _only_copies(row: KernelTime) -> bool:
    return row.kind == "kernel" and row.flops == 0 and bool(row.fx_nodes) and all(map(_copies, row.fx_nodes))


def _copies(node: str) -> bool:
    return re.sub(r"_\d+$", "", node) in _COPIES


def _scalar_kernel(profile: Profile, machine: Machine) -> Iterator[Found]:
    """A vectorised kernel takes at least the time of its limit, and at least 1 / lanes of its scalar time.

    It fetches as many cache lines as scalar code does.
    """
    for row in profile.kernels:
        if row.scalar:
            remaining = max((row.percent_of_limit or 0.0) / 100 * _overfetch(row), 1 / machine.lanes)
            yield Found(
                "scalar-kernel",
                "rewrite it so that it can be vectorised",
                _where(row),
                f"{_time_of(row, profile)}{_reached(row)}, scalar because {row.scalar}",
                row.total_microseconds * (1 - min(1.0, remaining)),
            )


def _fallback(profile: Profile, machine: Machine) -> Iterator[Found]:
    """An operator that is not compiled; the saving assumes that a compiled one would reach its limit."""
    for row in profile.kernels:
        if row.kind == "call" and row.group == GROUPS["call"] and profile.backend != "eager":
            why = f": {row.reason}" if row.reason else ""
            yield Found(
                "fallback",
                "rewrite it with operators that are compiled",
                _where(row),
                f"{_time_of(row, profile)} and is a call of PyTorch's library{why}",
                row.total_microseconds * (1 - min(1.0, (row.percent_of_limit or 0.0) / 100)),
            )


def _unfrozen(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Parameters that are packed at each call. Packing costs as much as `PACK` rows of the product."""
    rows = [row for row in profile.kernels if row.packed and row.flops]
    saved = {row.name: row.total_microseconds * PACK / (PACK + min(_rows(row), ROWS)) for row in rows}
    if rows:
        longest = max(rows, key=lambda row: saved[row.name])
        yield Found(
            "unfrozen",
            'pass options={"freeze": True} to torch.compile, if the parameters do not change',
            _where(longest),
            f"kernels that pack a parameter at each call: {len(rows)}, which take "
            f"{sum(row.total_microseconds for row in rows):.0f} of {profile.microseconds:.0f} µs",
            sum(saved.values()),
            options="--option freeze=True",
        )


def _rows(row: KernelTime) -> float:
    """The rows of the product that a kernel computes with its packed parameter."""
    return (row.flops or 0) / (2 * row.packed)


def _imbalance(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Not reported where other processes take the cores: then any kernel waits for a descheduled thread."""
    if profile.process.waited >= MIN_SAVING:
        return
    for row in profile.kernels:
        if row.imbalance:
            yield Found(
                "imbalance",
                "give its threads equal shares: use sizes that are a multiple of their number, or fewer threads",
                _where(row),
                f"{_time_of(row, profile)}; its {row.threads} threads wait {row.imbalance:.0%} of their time for the "
                "slowest one",
                row.total_microseconds * row.imbalance,
            )


def _small_kernels(profile: Profile, machine: Machine) -> Iterator[Found]:
    """Kernels whose call overhead exceeds their work."""
    rows = _small(profile)
    if rows:
        calls = sum(row.calls for row in rows)
        longest = max(rows, key=lambda row: row.total_microseconds)
        spent = sum(row.total_microseconds for row in rows) + profile.overhead.launch_microseconds
        yield Found(
            "small-kernels",
            "give each kernel more to do: larger batches, or several inputs in one tensor",
            _where(longest),
            f"calls whose overhead exceeds their work: {calls:.0f}; with the time between them they take "
            f"{spent:.0f} of {profile.microseconds:.0f} µs",
            spent,
        )


def _small(profile: Profile) -> list[KernelTime]:
    return [
        row
        for row in profile.kernels
        if row.limit == "overhead" and row.microseconds <= _SMALL * (row.estimate_microseconds or row.microseconds)
    ]


def _dtype(profile: Profile, machine: Machine) -> Iterator[Found]:
    """A dtype in which this machine multiplies or moves fewer elements per second than in f32."""
    for row in profile.kernels:
        dtype = next((each for each in DType if each.value == row.dtype and each is not DType.F32), None)
        if dtype is None:
            continue
        moves = row.group in _ORDINARY
        reached = machine.flops if row.kind == "kernel" else machine.product
        rate = 4 / dtype.itemsize if moves else reached.of(dtype).all / reached.f32.all
        yield Found(
            "dtype",
            f"compute in f32 instead of {dtype.value}, where its precision is enough",
            _where(row),
            f"{_time_of(row, profile)}; this machine {'moves' if moves else 'multiplies'} {rate:.2g} times as many "
            f"elements per second in {dtype.value} as in f32",
            row.total_microseconds * (1 - min(1.0, rate)),
        )


RULES: tuple[Rule, ...] = (
    _oversubscription,
    _threads,
    _openmp_runtimes,
    _pages,
    _denormals,
    _recompilation,
    _graph_break,
    _guards,
    _layout,
    _scalar_kernel,
    _fallback,
    _unfrozen,
    _imbalance,
    _small_kernels,
    _dtype,
)


# ------------------------------------------------------------------------------------------------ sentences


def _time_of(row: KernelTime, profile: Profile) -> str:
    calls = f" in {row.calls:g} calls" if row.calls != 1 else ""
    return f"{row.name} takes {row.total_microseconds / profile.microseconds:.0%} of the time{calls}"


def _reached(row: KernelTime) -> str:
    return f" at {row.percent_of_limit:.0f}% of the {row.limit} limit" if row.percent_of_limit is not None else ""


def _where(row: KernelTime) -> tuple[str, ...]:
    return (row.name, *row.user_lines[:_LINES])


def _lines(events: Iterable[Event]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.line for each in events if each.line))[:_LINES]


def _kernels_at(line: str, profile: Profile) -> tuple[str, ...]:
    """The longest kernel that implements this line."""
    return tuple(row.name for row in profile.kernels if line in row.user_lines)[:1]


def _brief(event: Event) -> str:
    """The reason without the hints and stacks that Dynamo adds."""
    return re.split(r" (?:Explanation|Hint|User stack trace):", event.why)[0]


def _size(nbytes: int | None) -> str:
    value = float(nbytes or 0)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
