"""`Machine`: the figures of a machine. Rates are per nanosecond: bytes/ns are GB/s."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import gcd
from typing import Any, TypeVar

from pellucid.errors import UserError
from pellucid.ir.traffic import LINE
from pellucid.ir.types import DType

VERSION = 6
"""Version of the file format and of the measurements; if a file has another one, the machine is measured again."""

WAYS = 8
"""The associativity assumed for a cache that does not report it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Isa:
    """A vector instruction set: bytes of a vector register, and the number of registers.

    pairs: it has an instruction that adds the products of two bf16 pairs to each f32 sum. tiles: it also has units that
    multiply whole tiles of such pairs (AMX).
    """

    name: str
    register_bytes: int
    registers: int
    pairs: bool = False
    tiles: bool = False

    def terms(self, dtype: DType) -> int:
        """Products that one instruction adds per lane of four bytes: the terms of a unit."""
        return 2 if self.pairs and dtype is DType.BF16 else 1

    def uses_tiles(self, dtype: DType) -> bool:
        """True if products of this type are computed by AMX tiles."""
        return self.tiles and dtype is DType.BF16

    def products(self, dtype: DType) -> int:
        """Like `terms`, also for AMX tiles: products added per lane in the time of one instruction."""
        return _BY_TILES if self.uses_tiles(dtype) else self.terms(dtype)


_BY_TILES = 16
"""A tile has 256 sums of 32 products each, and takes as long as 32 instructions of 16 lanes."""

ISAS = {isa.name: isa for isa in (Isa("AVX512", 64, 32), Isa("AVX2", 32, 16))}


@dataclass(frozen=True, slots=True)
class Rate:
    """Units per nanosecond on one thread, and on all cores of this process together."""

    one: float
    all: float

    def of(self, threads: int) -> float:
        """The rate of `threads` threads: proportional to their number, up to the rate of all cores."""
        return self.one if threads <= 1 else max(self.one, min(self.one * threads, self.all))


@dataclass(frozen=True, slots=True)
class Level:
    """A level of cache, or memory, and the bytes that it moves per nanosecond.

    size: bytes of one such cache; 0 for memory. shared: all cores share it; otherwise each has its own.
    write: such that copying n bytes takes n / read + n / write. ways: associativity.
    """

    name: str
    size: int
    shared: bool
    read: Rate
    write: Rate
    ways: int = WAYS

    def holds(self, stride: int) -> int:
        """The number of lines `stride` bytes apart that it can hold: they map to only some of its sets."""
        span = max(LINE, self.size // self.ways)
        return self.ways * span // gcd(stride, span)


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating point operations per nanosecond, by type. A multiply-add counts as two."""

    f32: Rate
    f64: Rate
    bf16: Rate
    f16: Rate

    def of(self, dtype: DType) -> Rate:
        return {DType.F64: self.f64, DType.BF16: self.bf16, DType.F16: self.f16}.get(dtype, self.f32)


@dataclass(frozen=True, slots=True)
class Machine:
    """The figures of one machine.

    name: the processor's. cores: the cores available to the measuring process.
    levels: from the nearest cache to memory.
    flops: the peak, of multiply-adds in registers. product: the rate of ATen's matrix products; attention: of the
    products in its attention; convolution: of its f32 convolutions of one tap.
    latency: nanoseconds of a load from memory that no earlier load or prefetch has touched.
    barrier: nanoseconds from the start to the end of an empty parallel region of all threads. call: of an empty kernel
    in a plan. dispatch: of an ATen operator that does nearly nothing. page: to obtain a fresh page from the system and
    write to it.
    spread: the interquartile range of the measurements, as a fraction of the median, by the figure's name.
    """

    name: str
    isa: Isa
    cores: int
    levels: tuple[Level, ...]
    flops: Flops
    product: Flops
    attention: Flops
    convolution: Rate
    latency: float
    barrier: float
    call: float
    dispatch: float
    page: float
    spread: Mapping[str, float] = field(default_factory=dict[str, float], compare=False, hash=False)

    @property
    def memory(self) -> Level:
        return self.levels[-1]

    @property
    def own_level(self) -> Level:
        """The L2 cache, the last level that each core has for itself."""
        return self.levels[min(1, len(self.levels) - 2)]

    @property
    def own_cache(self) -> int:
        """Bytes of the L2 cache of one core."""
        return self.own_level.size

    @property
    def own_caches(self) -> int:
        """Bytes of the L2 caches of all cores."""
        return self.cores * self.own_cache

    @property
    def last_cache(self) -> int:
        """Bytes of the last level of cache."""
        return self.levels[-2].size

    @property
    def instructions(self) -> float:
        """Vector instructions that one thread finishes per nanosecond."""
        return self.flops.f32.one / (2 * self.lanes)

    @property
    def lanes(self) -> int:
        """Values of four bytes in a vector register."""
        return self.isa.register_bytes // 4

    def level(self, working_set: float, threads: int = 1) -> Level:
        """The nearest level that holds `working_set` bytes, distributed over `threads` threads."""
        for level in self.levels[:-1]:
            if working_set <= level.size * (1 if level.shared else threads):
                return level
        return self.memory

    @property
    def figures(self) -> dict[str, float]:
        """All measured figures, by name: `memory.read.one`, `flops.f32.all`, `barrier`."""
        found: dict[str, float] = {}

        def note(name: str, value: float) -> float:
            found[name] = value
            return value

        _mapped(self, note, "")
        return found


def rounded(machine: Machine) -> Machine:
    """The machine as the compiler sees it: figures rounded to ten steps per decade, which removes most of the noise.

    Estimates that are compared with measured times use the exact figures.
    """
    return _mapped(machine, lambda _, value: float(f"{10 ** (round(10 * math.log10(value)) / 10):.3g}"), "")


def steadied(new: Machine, old: Machine) -> Machine:
    """`new`, with the figures of `old` where they differ by less than one rounding step, so that they stay stable."""
    before = old.figures
    step = 10**0.1

    def keep(name: str, value: float) -> float:
        known = before.get(name, value)
        return known if 1 / step < value / known < step else value

    return _mapped(new, keep, "")


def with_cores(machine: Machine, cores: int) -> Machine:
    """The machine with `cores` cores: memory bandwidth stays the same, all other rates are scaled."""
    alone = machine.figures

    def of_all(name: str, value: float) -> float:
        what, _, who = name.rpartition(".")
        if who != "all":
            return value
        more = 1.0 if what.startswith("memory.") else cores / machine.cores
        return alone[f"{what}.one"] if cores == 1 else max(alone[f"{what}.one"], value * more)

    return replace(_mapped(machine, of_all, ""), cores=cores) if cores != machine.cores else machine


def _mapped(value: _T, change: Callable[[str, float], float], prefix: str) -> _T:
    """A dataclass with `change` applied to each of its floats, also in nested dataclasses."""
    changed: dict[str, Any] = {}
    for each in fields(value):  # type: ignore[arg-type]
        item, name = getattr(value, each.name), f"{prefix}{each.name}"
        if isinstance(item, float):
            changed[each.name] = change(name, item)
        elif each.name == "levels":
            levels: tuple[Level, ...] = item
            changed[each.name] = tuple(_mapped(level, change, f"{level.name}.") for level in levels)
        elif is_dataclass(item):
            changed[each.name] = _mapped(item, change, f"{name}.")
    return replace(value, **changed)  # type: ignore[type-var]


# ---------------------------------------------------------------------------------------------- as a file


def make_machine(
    name: str,
    isa: str,
    cores: int,
    caches: Mapping[str, int],
    figures: Mapping[str, float],
    ways: Mapping[str, int] | None = None,
) -> Machine:
    """A machine with these figures. caches: bytes of `l1`, `l2` and `l3`, those that exist; ways: their associativity.

    Raises KeyError for a missing figure.
    """

    def rate(what: str) -> Rate:
        return Rate(float(figures[f"{what}.one"]), float(figures[f"{what}.all"]))

    def flops(what: str) -> Flops:
        return Flops(rate(f"{what}.f32"), rate(f"{what}.f64"), rate(f"{what}.bf16"), rate(f"{what}.f16"))

    levels = tuple(
        Level(
            level,
            size,
            level in ("l3", "memory"),
            rate(f"{level}.read"),
            rate(f"{level}.write"),
            (ways or {}).get(level, WAYS),
        )
        for level, size in (*caches.items(), ("memory", 0))
    )
    return Machine(
        name=name,
        isa=ISAS[isa],
        cores=cores,
        levels=levels,
        flops=flops("flops"),
        product=flops("product"),
        attention=flops("attention"),
        convolution=rate("convolution"),
        latency=float(figures["latency"]),
        barrier=float(figures["barrier"]),
        call=float(figures["call"]),
        dispatch=float(figures["dispatch"]),
        page=float(figures["page"]),
    )


def to_text(machine: Machine) -> str:
    """The machine as JSON."""
    about = {
        "version": VERSION,
        "name": machine.name,
        "isa": machine.isa.name,
        "cores": machine.cores,
        "caches": {level.name: level.size for level in machine.levels[:-1]},
        "ways": {level.name: level.ways for level in machine.levels[:-1]},
        "figures": {name: float(f"{value:.4g}") for name, value in machine.figures.items()},
        "spread": {name: round(share, 4) for name, share in machine.spread.items()},
    }
    return json.dumps(about, indent=1) + "\n"


def from_text(text: str, source: str) -> Machine:
    """The machine that `to_text` wrote. source: the origin of the text, for messages. Raises UserError for others."""
    try:
        about = json.loads(text)
        if about["version"] != VERSION:
            raise ValueError(f"it has version {about['version']}, this Pellucid reads version {VERSION}")
        caches = {str(name): int(size) for name, size in about["caches"].items()}
        if not caches or any(name not in ("l1", "l2", "l3") or size <= 0 for name, size in caches.items()):
            raise ValueError("it names no caches")
        ways = {str(name): int(count) for name, count in about.get("ways", {}).items()}
        if any(count <= 0 for count in ways.values()):
            raise ValueError("a cache has no ways")
        machine = make_machine(str(about["name"]), about["isa"], int(about["cores"]), caches, about["figures"], ways)
        spread = {str(name): float(share) for name, share in about.get("spread", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{source} describes no machine: {said}", hint="`pellucid doctor -o FILE` writes such a file"
        ) from error
    bad = [name for name, value in machine.figures.items() if not (math.isfinite(value) and value > 0)]
    if bad or machine.cores < 1:
        raise UserError(f"{source} describes no machine: {', '.join(bad) or 'cores'} must be more than 0")
    return replace(machine, spread=spread)
