"""What a subject did not do: kernels that the C++ compiler refused, with their variables; all else, with its cause."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.ir.origin import GLUE, Origin, merge

BY_PYTHON = "call by Python"  # between the programs that a graph was split into

# The rules of the compiler's decisions that tell of something not done, by how they begin, and its kind.
_KINDS = (("fuse.", "fusion"), ("codegen.vectorize", "vectorisation"), ("lower.fallback", "fallback"))

# As compilers write the types of values in their messages.
CPP_NAMES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}


@dataclass(frozen=True, slots=True)
class Value:
    """A variable of a kernel: what it should be. op: of the loop language. dtype: as C++ writes it; empty: unknown."""

    op: str
    dtype: str = ""
    origin: Origin = GLUE


@dataclass(frozen=True, slots=True)
class Refused:
    """A kernel that the C++ compiler refused.

    source: its text; line: of the first error in it, from 1. message: the compiler's first error; output: all it said.
    values: the variables of the kernel by the text that defines them (`v2 = pv::neg(v1)`), without type and semicolon.
    """

    kernel: str
    source: str
    line: int
    message: str
    output: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that a backend did not do.

    kind: of `reasons.KINDS`. subject: kernels, buffers, FX nodes, an operator or a function. category: of a fusion,
    what was in the way: `broadcast`, `different-loop-orders`, ...; empty for other kinds.
    """

    kind: str
    subject: tuple[str, ...]
    cause: str
    fx_nodes: tuple[str, ...] = ()
    user_line: str = ""
    category: str = ""


# A line of C++ that defines a variable, and the names of variables in one.
DEFINITION = re.compile(r"^\s*(?:const\s+)?(?:auto|[\w:<>, ]+?)\s+(?P<name>[a-z]+\d+)\s*=\s*(?P<value>.+?);\s*$")
NAME = re.compile(r"\b[a-z]+\d+\b")


def kind_of(rule: str) -> str:
    """What was not done when a rule says no, as `reasons.KINDS` has it; empty for a choice, such as of threads."""
    return next((kind for start, kind in _KINDS if rule.startswith(start) or rule == kind), "")


def start_of(source: str, file: Path) -> int | None:
    """How many lines of a file stand before the text of a kernel; None where it is not in there."""
    lines = source.splitlines()
    compiled = file.read_text().splitlines() if file.is_file() else []
    starts = range(len(compiled) - len(lines) + 1)
    return next((start for start in starts if compiled[start : start + len(lines)] == lines), None)


def origin_at(source: str, origins: Sequence[Origin], line: int) -> Origin:
    """Where a line (from 1) of a kernel comes from; of one that defines nothing, where the values that it uses do."""
    if not origins[line - 1].is_glue:
        return origins[line - 1]
    lines = source.splitlines()
    defined = (defined_at(lines, name, line) for name in NAME.findall(lines[line - 1]))
    return merge(origins[number - 1] for number in defined if number)


def defined_at(lines: list[str], name: str, before: int) -> int:
    """The number of the last line before one that defines a name; 0 when none does."""
    for number in range(before - 1, 0, -1):
        found = DEFINITION.match(lines[number - 1])
        if found and found["name"] == name:
            return number
    return 0
