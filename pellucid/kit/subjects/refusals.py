"""What a subject did not do: kernels that the C++ compiler rejected, with their variables, and missed optimisations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pellucid.ir.origin import GLUE, Origin, merge

BY_PYTHON = "call by Python"  # between the programs that a graph was split into

# The kind of refusal that a negative decision of the compiler reports, by the prefix of its rule.
_KINDS = (("fuse.", "fusion"), ("codegen.vectorize", "vectorisation"), ("lower.fallback", "fallback"))

# The names of types in compiler messages.
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
    """The expected value of a kernel's variable. op: of the loop language. dtype: its C++ name; empty if unknown."""

    op: str
    dtype: str = ""
    origin: Origin = GLUE


@dataclass(frozen=True, slots=True)
class Refused:
    """A kernel that the C++ compiler rejected.

    source: its text; line: of the first error in it, from 1. message: the compiler's first error; output: all of its
    output. values: the kernel's variables by their defining text (`v2 = pv::neg(v1)`), without type and semicolon.
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

    kind: one of `reasons.KINDS`. subject: kernels, buffers, FX nodes, an operator or a function. category: what
    prevented a fusion: `broadcast`, `different-loop-orders`, ...; empty for other kinds.
    """

    kind: str
    subject: tuple[str, ...]
    cause: str
    fx_nodes: tuple[str, ...] = ()
    user_line: str = ""
    category: str = ""


# A line of C++ that defines a variable; the names of variables in a line.
DEFINITION = re.compile(r"^\s*(?:const\s+)?(?:auto|[\w:<>, ]+?)\s+(?P<name>[a-z]+\d+)\s*=\s*(?P<value>.+?);\s*$")
NAME = re.compile(r"\b[a-z]+\d+\b")


def kind_of(rule: str) -> str:
    """The kind (of `reasons.KINDS`) of a rule's negative decisions; empty for a choice, such as of threads."""
    return next((kind for start, kind in _KINDS if rule.startswith(start) or rule == kind), "")


def start_of(source: str, file: Path) -> int | None:
    """The number of lines of a file before the text of a kernel; None if it is not in the file."""
    lines = source.splitlines()
    compiled = file.read_text().splitlines() if file.is_file() else []
    starts = range(len(compiled) - len(lines) + 1)
    return next((start for start in starts if compiled[start : start + len(lines)] == lines), None)


def origin_at(source: str, origins: Sequence[Origin], line: int) -> Origin:
    """The origin of a line (from 1) of a kernel; if it defines nothing, the origin of the values that it uses."""
    if not origins[line - 1].is_glue:
        return origins[line - 1]
    lines = source.splitlines()
    defined = (defined_at(lines, name, line) for name in NAME.findall(lines[line - 1]))
    return merge(origins[number - 1] for number in defined if number)


def defined_at(lines: list[str], name: str, before: int) -> int:
    """The number of the last line before line `before` that defines a name; 0 if there is none."""
    for number in range(before - 1, 0, -1):
        found = DEFINITION.match(lines[number - 1])
        if found and found["name"] == name:
            return number
    return 0
