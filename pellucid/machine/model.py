"""`Machine`: one value that says what this machine can do. Rates are per nanosecond: bytes/ns are GB/s."""

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
"""Of the file format and of how the figures are measured: a file of another version is measured again."""

WAYS = 8
"""Of a cache that does not tell."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Isa:
    """A vector instruction set: bytes of a vector register, and how many registers there are.

    pairs: there is an instruction that adds the products of two pairs in bf16 to each sum in f32. tiles: and units that
    multiply whole tiles of such pairs (AMX).
    """

    name: str
    register_bytes: int
    registers: int
    pairs: bool = False
    tiles: bool = False

    def terms(self, dtype: DType) -> int:
        """Products that each lane of four bytes adds in one instruction: terms of a unit."""
        return 2 if self.pairs and dtype is DType.BF16 else 1

    def by_tiles(self, dtype: DType) -> bool:
        """True if products of this type are computed by units for tiles."""
        return self.tiles and dtype is DType.BF16

    def products(self, dtype: DType) -> int:
        """The same, with units for tiles: products that they add, for each lane, in the time of one instruction."""
        return _BY_TILES if self.by_tiles(dtype) else self.terms(dtype)


_BY_TILES = 16
"""A tile has 256 sums of 32 products each, and takes as long as 32 instructions of 16 lanes."""

ISAS = {isa.name: isa for isa in (Isa("AVX512", 64, 32), Isa("AVX2", 32, 16))}


@dataclass(frozen=True, slots=True)
class Rate:
    """Units per nanosecond of one thread, and of all cores of this process together."""

    one: float
    all: float

    def of(self, threads: int) -> float:
        """The rate of so many threads: each adds its own until the whole is reached."""
        return self.one if threads <= 1 else max(self.one, min(self.one * threads, self.all))


@dataclass(frozen=True, slots=True)
class Level:
    """A level of cache, or memory, and the bytes that it moves per nanosecond.

    size: bytes of one such cache; 0 for memory. shared: by the cores, each of which has its own otherwise.
    write: such that copying n bytes takes n / read + n / write. ways: lines that each of its sets holds.
    """

    name: str
    size: int
    shared: bool
    read: Rate
    write: Rate
    ways: int = WAYS

    def holds(self, stride: int) -> int:
        """Lines of so many bytes apart that it holds at once: only some sets come in question for them."""
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
    """What one machine can do.

    name: the processor's. cores: that the measuring process could use.
    levels: from the nearest cache to memory.
    flops: the peak, of multiply-adds in registers. product: what ATen's matrix products reach of it; attention: what
    the products of its attention reach; convolution: what its convolutions of one tap reach in f32.
    latency: nanoseconds to load from memory what nothing was loaded near of.
    barrier: nanoseconds from the start to the end of an empty parallel region of all threads. call: of a kernel that
    does nothing, in a plan. dispatch: of an ATen operator that does nearly nothing. page: to get a fresh page from
    the system, and to write to it.
    spread: how far apart the middle half of the measurements lay, as a share of the median, by the figure's name.
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
        """The second level of cache, the last that a core has for itself."""
        return self.levels[min(1, len(self.levels) - 2)]

    @property
    def own_cache(self) -> int:
        """Bytes of the second level of cache."""
        return self.own_level.size

    @property
    def own_caches(self) -> int:
        """Bytes of the second level of cache of all cores."""
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
        """The nearest level that holds so many bytes when so many threads work on them, each on its part."""
        for level in self.levels[:-1]:
            if working_set <= level.size * (1 if level.shared else threads):
                return level
        return self.memory

    @property
    def figures(self) -> dict[str, float]:
        """All that is measured, by name: `memory.read.one`, `flops.f32.all`, `barrier`."""
        found: dict[str, float] = {}

        def note(name: str, value: float) -> float:
            found[name] = value
            return value

        _mapped(self, note, "")
        return found


def rounded(machine: Machine) -> Machine:
    """The machine as the compiler sees it: ten steps to the power of ten, so that few digits of noise are left.

    What is compared with measured times takes the figures as they were measured.
    """
    return _mapped(machine, lambda _, value: float(f"{10 ** (round(10 * math.log10(value)) / 10):.3g}"), "")


def steadied(new: Machine, old: Machine) -> Machine:
    """`new`, with the figures of `old` where they differ by less than such a step: measuring again changes nothing."""
    before = old.figures
    step = 10**0.1

    def keep(name: str, value: float) -> float:
        known = before.get(name, value)
        return known if 1 / step < value / known < step else value

    return _mapped(new, keep, "")


def with_cores(machine: Machine, cores: int) -> Machine:
    """The machine with so many cores of its kind: memory moves no more bytes for them, all else does more."""
    alone = machine.figures

    def of_all(name: str, value: float) -> float:
        what, _, who = name.rpartition(".")
        if who != "all":
            return value
        more = 1.0 if what.startswith("memory.") else cores / machine.cores
        return alone[f"{what}.one"] if cores == 1 else max(alone[f"{what}.one"], value * more)

    return replace(_mapped(machine, of_all, ""), cores=cores) if cores != machine.cores else machine


def _mapped(value: _T, change: Callable[[str, float], float], prefix: str) -> _T:
    """A dataclass with each of its floats changed, those of the dataclasses in it as well."""
    made: dict[str, Any] = {}
    for each in fields(value):  # type: ignore[arg-type]
        item, name = getattr(value, each.name), f"{prefix}{each.name}"
        if isinstance(item, float):
            made[each.name] = change(name, item)
        elif each.name == "levels":
            levels: tuple[Level, ...] = item
            made[each.name] = tuple(_mapped(level, change, f"{level.name}.") for level in levels)
        elif is_dataclass(item):
            made[each.name] = _mapped(item, change, f"{name}.")
    return replace(value, **made)  # type: ignore[type-var]


# ---------------------------------------------------------------------------------------------- as a file


def make_machine(
    name: str,
    isa: str,
    cores: int,
    caches: Mapping[str, int],
    figures: Mapping[str, float],
    ways: Mapping[str, int] | None = None,
) -> Machine:
    """A machine of its figures. caches: bytes of `l1`, `l2` and `l3`, as far as there are such; ways: of these.

    Raises KeyError for a figure that is missing.
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
    """The machine that `to_text` wrote. source: where the text is from. Raises UserError for anything else."""
    try:
        about = json.loads(text)
        if about["version"] != VERSION:
            raise ValueError(f"it is of version {about['version']}, this Pellucid's is {VERSION}")
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
