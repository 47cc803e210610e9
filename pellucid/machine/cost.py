"""The cost function: the nanoseconds that work takes on a machine, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass

from pellucid.ir.types import DType
from pellucid.machine.model import Machine, Rate
from pellucid.machine.work import Part, Work


@dataclass(frozen=True, slots=True)
class Estimate:
    """Nanoseconds of one call.

    moving: to move its bytes from `level`, the nearest level that holds its working set.
    least: a lower bound of that: each level supplies as many bytes as it can hold.
    fetching: to move its bytes, each from the level that still holds it after what other calls have touched.
    computing: to execute its instructions, if known, or a library's operations at the rate that it reaches.
    peak: to execute its floating point operations at the machine's peak, a lower bound.
    overhead: of the call, and of the barrier at its end.
    """

    moving: float
    least: float
    fetching: float
    computing: float
    peak: float
    overhead: float
    level: str

    @property
    def nanoseconds(self) -> float:
        """The time of the call."""
        return max(self.fetching, self.computing) + self.overhead

    @property
    def bound(self) -> float:
        """The lower bound of the time: by this machine's bandwidth or peak, or the overhead of a call."""
        return max(self.least, self.peak, self.overhead)

    @property
    def limit(self) -> str:
        """What determines `bound`: the name of the level, `compute` or `overhead`."""
        if self.overhead > max(self.least, self.peak):
            return "overhead"
        return self.level if self.least >= self.peak else "compute"


def time(work: Work, machine: Machine, threads: int = 1) -> Estimate:
    """The time of one call on `threads` threads: the longer of moving its bytes and computing, plus the overhead."""
    moved = moving(machine, work.read, work.written, work.working_set, threads)
    peak = work.flops / machine.flops.of(work.dtype).of(threads)
    if work.kind == "kernel":
        computed, overhead = max(peak, issuing(machine, work.steps, threads)), starting(machine, threads)
    else:
        computed, overhead = work.flops / _reached(work, machine).of(threads), machine.dispatch
    fetched = sum(_fetching(machine, part, work.working_set, threads) for part in work.parts)
    least = _least(machine, work, threads)
    return Estimate(
        moved, least, max(moved, fetched), computed, peak, overhead, machine.level(work.working_set, threads).name
    )


def moving(machine: Machine, read: float, written: float, working_set: float, threads: int = 1) -> float:
    """Nanoseconds to read and write these bytes, for a kernel that touches `working_set` bytes in all."""
    level = machine.level(working_set, threads)
    return read / level.read.of(threads) + written / level.write.of(threads)


def _least(machine: Machine, work: Work, threads: int) -> float:
    """Nanoseconds to move all bytes if each level supplies as many as it can hold, and farther ones only the rest."""
    held, taken, whole = 0.0, 0.0, max(1, work.working_set)
    for level in machine.levels:
        room = level.size * (1 if level.shared else max(1, threads)) or whole
        here = max(0.0, min(whole, room) - held)
        taken += here / whole * (work.read / level.read.of(threads) + work.written / level.write.of(threads))
        held += here
    return taken


def _fetching(machine: Machine, part: Part, working_set: int, threads: int) -> float:
    """Nanoseconds to move a part: from memory, each run of it begins with a load whose latency is not hidden."""
    reach = max(part.distance, working_set)
    begun = part.runs * machine.latency / threads if machine.level(reach, threads) is machine.memory else 0.0
    return moving(machine, part.read, part.written, reach, threads) + begun


def issuing(machine: Machine, steps: float, threads: int = 1) -> float:
    """Nanoseconds to issue `steps` vector instructions; callers that count points divide by `machine.lanes`."""
    return steps / (machine.instructions * max(1, threads))


def starting(machine: Machine, threads: int = 1) -> float:
    """Nanoseconds to call a kernel, including the barrier if several threads run it."""
    return machine.call + (machine.barrier if threads > 1 else 0.0)


def _reached(work: Work, machine: Machine) -> Rate:
    """The rate that the library reaches."""
    if work.kind == "convolution" and work.dtype is DType.F32:
        return machine.convolution
    return (machine.attention if work.kind == "attention" else machine.product).of(work.dtype)
