"""The machine that kernels are compiled for: as it was measured, of a file, or a reference. This measures nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from pellucid.errors import UserError, warn
from pellucid.machine.model import ISAS, VERSION, Isa, Machine, from_text, rounded, steadied, to_text, with_cores
from pellucid.machine.reference import REFERENCES, with_tiles
from pellucid.native.cpu import cpu, usable_cores
from pellucid.native.store import default_root
from pellucid.native.toolchain import choose_isa, has_tiles

REFERENCE = "reference"
"""The option `machine` that asks for the reference, whatever was measured."""


def machine_for(file: str = "") -> Machine:
    """The machine as the compiler sees it, rounded. file: the option `machine`: a file, `reference` or nothing.

    Without either it is what `pellucid doctor` measured on this machine, or else the reference of its instruction set
    with the caches that are here and, unless it is asked for by name, with as many cores. Read once per process. Raises
    UserError for a file that describes no machine.
    """
    return _machine_for(file, default_root())


def machine_here(file: str = "") -> tuple[Machine, bool]:
    """The same with the figures as they were measured, for comparing with times; and whether they were measured."""
    found = None if file == REFERENCE else _given(file) if file else measured()
    machine = found or (_reference() if file == REFERENCE else with_cores(_reference(), usable_cores()))
    return replace(machine, isa=_instructions()), found is not None


def machine_file() -> Path:
    """Where the measurements of this machine are kept: beside the kernel store, which other machines may share."""
    about = f"{cpu().name} {_isa()} {usable_cores()} {torch.__version__} {VERSION}"
    return default_root() / f"machine-{hashlib.sha256(about.encode()).hexdigest()[:12]}.json"


def measured() -> Machine | None:
    """What was measured on this machine; None if nothing was, or if the file is damaged, with a warning."""
    return _read(machine_file())


def keep(machine: Machine) -> Machine:
    """Keep measurements, but for what differs from earlier ones by less than the rounding; returns what is kept.

    Raises OSError where the file cannot be written.
    """
    path, before = machine_file(), measured()
    kept = steadied(machine, before) if before is not None else machine
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with temporary.open("x") as file:  # never through a link that another user has put there
            file.write(to_text(kept))
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _machine_for.cache_clear()
    return kept


@lru_cache(maxsize=8)
def _machine_for(file: str, _root: Path) -> Machine:
    return rounded(machine_here(file)[0])


def _given(file: str) -> Machine:
    try:
        return from_text(Path(file).read_text(), file)
    except (OSError, UnicodeDecodeError) as error:
        hint = "`pellucid doctor -o FILE` writes such a file; `reference` stands for the built-in machine"
        raise UserError(f"the machine {file} cannot be read: {error}", hint=hint) from error


def _read(path: Path) -> Machine | None:
    try:
        return from_text(path.read_text(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, UserError) as error:
        warn(f"Pellucid does not know this machine: {error}")
        return None


def _reference() -> Machine:
    """The reference with the units that are here, and with the sizes of the caches where the system tells them."""
    machine = REFERENCES[_isa()]
    if has_tiles(machine.isa.name):
        machine = with_tiles(machine)
    sizes, ways = {"l1": cpu().l1, "l2": cpu().l2, "l3": cpu().l3}, dict(cpu().ways)
    levels = (
        replace(level, size=sizes.get(level.name) or level.size, ways=ways.get(level.name, level.ways))
        for level in machine.levels
    )
    return replace(machine, levels=tuple(levels))


def _instructions() -> Isa:
    """What the compiler's flags allow."""
    isa = ISAS[_isa()]
    pairs = isa.name == "AVX512" and "avx512_bf16" in cpu().flags
    return replace(isa, pairs=pairs, tiles=has_tiles(isa.name))


def _isa() -> str:
    return choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
