"""Everything a user can set: `torch.compile(..., options={...})`, or `PELLUCID_<NAME>` in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

from pellucid.errors import UserError, near, warn


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one compilation. An option given to `torch.compile` wins over the environment.

    trace: folder in which a run folder is written for every compiled graph; empty for no trace.
    verify: check every invariant of the IR after every stage (slow; on in the project's own tests).
    fusion: fuse kernels; without it each operator is one kernel.
    loop_orders: fuse kernels that go through what they share in different orders.
    vectorize: write vector code; without it every kernel is scalar.
    contract: compile matrix products and attention forward in f32, bf16 and f16, and convolutions in f32, like all
        else; without it ATen computes them.
    freeze: prepare parameters and buffers once, for inference: what depends on them alone is computed and matrices are
        packed before the first call, and again when they have changed.
    recompute: let backward compute again what is cheaper than keeping it, where PyTorch's partitioner would keep it.
    chunk: compute a huge matrix that a product makes, such as logits, and what is made of it, some rows at a time.
    strips: run chains of kernels some iterations of each in turn where what they hand on would leave the near caches.
    reuse: start what an earlier process compiled, without compiling it again.
    background: let PyTorch's operators compute calls while kernels are being built, instead of waiting for them.
    reuse_memory: let temporaries that are not alive at the same time share memory.
    pad: let rows of temporaries have room between them where they would meet in few sets of a cache.
    variants: `on`: kernels whose plans are close by price are built in several ways, of which the first calls find the
        fastest, once for each machine; `off`: the cheapest by price; True and False say the same. A number or names of
        kernels, with commas between them, force one: 0 is the cheapest, 1 the next.
    max_fused_lines: largest body, in IR lines, that fusion may make.
    max_fused_buffers: largest number of buffers of a fused kernel.
    max_fusions: how many fusions of a graph are made, in their order: to find the one that makes a fault.
    machine: file of the machine that rules ask, as `pellucid doctor -o FILE` writes it; `reference` for the
        built-in one; empty for what `pellucid doctor` measured here, or else the reference.
    min_work_per_thread: estimated nanoseconds of work that justify one more thread; 0 for a few barriers.
    """

    trace: str = ""
    verify: bool = False
    fusion: bool = True
    loop_orders: bool = True
    vectorize: bool = True
    contract: bool = True
    freeze: bool = False
    recompute: bool = True
    chunk: bool = True
    strips: bool = True
    reuse: bool = True
    background: bool = False
    reuse_memory: bool = True
    pad: bool = True
    variants: str = "off"
    max_fused_lines: int = 256
    max_fused_buffers: int = 48
    max_fusions: int = 1 << 30
    machine: str = ""
    min_work_per_thread: int = 0


VARIABLES = ("PELLUCID_CACHE_DIR", "PELLUCID_CXXFLAGS")
"""What the environment can set beside options: the store's directory, and more flags for the compiler."""

_ALIKE = 0.87
"""Of names of variables, which all begin alike."""

_VARIANTS = re.compile(r"on|off|\d+|k_\w+(,k_\w+)*", re.ASCII)
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def make_options(given: Mapping[str, object] | None = None) -> Options:
    """Options from the environment and from `given`; raises `UserError` for an unknown name or a bad value."""
    check_environment()
    known = {field.name: field.default for field in fields(Options)}
    values: dict[str, object] = {}
    for name in known:
        text = os.environ.get(f"PELLUCID_{name.upper()}")
        if text is not None:
            values[name] = _convert(f"PELLUCID_{name.upper()}", text, known[name])
    if given is not None and not isinstance(given, Mapping):
        raise UserError(f"options are {given!r}", hint="give a dictionary, as {'freeze': True}")
    for name, value in (given or {}).items():
        if name not in known:
            hint = near(str(name), known) or f"known options: {', '.join(known)}"
            raise UserError(f"unknown option {name!r}", hint=hint)
        if name == "variants" and isinstance(value, int):
            value = str(value) if not isinstance(value, bool) else "on" if value else "off"
        values[name] = _convert(f"option {name!r}", value, known[name])
    if not _VARIANTS.fullmatch(str(values.get("variants", "off"))):
        hint = "give on, off, a number, or names of kernels with commas between them"
        raise UserError(f"option 'variants' cannot be {values['variants']!r}", hint=hint)
    return Options(**values)  # type: ignore[arg-type]


@cache
def check_environment() -> None:
    """Warn, once, of variables that mean nothing: most often a name misspelt."""
    known = (*(f"PELLUCID_{field.name.upper()}" for field in fields(Options)), *VARIABLES)
    for name in sorted(os.environ):
        if name.startswith("PELLUCID_") and name not in known:
            hint = near(name, known, _ALIKE) or f"known are {', '.join(known)}"
            warn(f"the environment variable {name} means nothing to Pellucid: {hint}")


def _convert(name: str, value: object, default: object) -> object:
    """`value` as the type of `default`; text comes from the environment."""
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
    elif isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if isinstance(value, str) and value.isdigit() and int(value) > 0:
            return int(value)
    elif isinstance(value, str | os.PathLike):
        return os.fspath(value)
    wanted = {bool: "true or false", int: "a positive integer", str: "text"}[type(default)]
    raise UserError(f"{name} cannot be {value!r}", hint=f"give {wanted}")
