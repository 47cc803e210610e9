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
    loop_orders: fuse kernels that traverse a shared buffer in different orders.
    vectorize: generate vector code; without it every kernel is scalar.
    contract: compile matrix products and forward attention in f32, bf16 and f16, and convolutions in f32, to kernels;
        without it ATen computes them.
    freeze: prepare parameters and buffers once, for inference: values that depend on them alone are computed, and
        matrices are packed, before the first call, and again when they have changed.
    recompute: recompute in backward what is cheaper to recompute than to save, though PyTorch's partitioner saves it.
    chunk: compute a huge result of a matrix product, such as logits, and values that depend on it, some rows at a time.
    strips: run chains of kernels strip by strip, some iterations of each in turn, where their intermediate results
        would be evicted from the near caches.
    reuse: reuse graphs that an earlier process compiled.
    background: let PyTorch's operators compute calls while kernels are being built, instead of waiting for them.
    reuse_memory: let temporaries that are not live at the same time share memory.
    pad: pad rows of temporaries that would otherwise map to few sets of a cache.
    variants: `on`: kernels with several plans of similar estimated cost are built in several variants, of which the
        first calls find the fastest, once for each machine; `off`: the cheapest by estimate; also True and False. A
        number (0: the cheapest, 1: the next) or comma-separated names of kernels select one.
    max_fused_lines: maximum size, in IR lines, of the body of a fused kernel.
    max_fused_buffers: maximum number of buffers of a fused kernel.
    max_fusions: maximum number of fusions of a graph, to find the one that causes a fault.
    machine: file of the machine model, as `pellucid doctor -o FILE` writes it; `reference` for the built-in one; empty
        for the one that `pellucid doctor` measured here, or else the reference.
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
"""Environment variables in addition to options: the store's directory, and more flags for the compiler."""

_SIMILARITY = 0.87
"""For names of variables, which all have the same prefix."""

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
    """Warn, once, of unknown variables, which are usually misspelt."""
    known = (*(f"PELLUCID_{field.name.upper()}" for field in fields(Options)), *VARIABLES)
    for name in sorted(os.environ):
        if name.startswith("PELLUCID_") and name not in known:
            hint = near(name, known, _SIMILARITY) or f"known are {', '.join(known)}"
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
