"""The words that describe an instance to the native runtime (`Reader` in instance.h), and the enumerations in them.

Their values are defined only here: `pytest tests/golden --bless` generates the header `words.h` from them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from pellucid.ir.types import ALIGNMENT

RUN_HEAD = 8
"""Words of a run in a timeline before the ends of its calls."""


class Place(IntEnum):
    """Where the memory of a slot is."""

    ARENA = 0
    INPUT = 1
    OUTPUT = 2
    EXTERN = 3


class CallKind(IntEnum):
    """How a call is made."""

    KERNEL = 0
    SHIM = 1
    DISPATCHER = 2
    PYTHON = 3


class Shim(IntEnum):
    """An operator with its own C function."""

    MM = 0
    BMM = 1
    ADDMM = 2
    BADDBMM = 3


class ArgKind(IntEnum):
    """Kind of an operator's argument."""

    VIEW = 0
    BITS = 1
    NONE = 2
    SOME = 3
    LIST = 4
    TEXT = 5


class Returned(IntEnum):
    """Kind of a value that the dispatcher returns."""

    TENSOR = 0
    TENSOR_LIST = 1
    OTHER = 2


class ResultKind(IntEnum):
    """Kind of a result of a graph."""

    VIEW = 0
    INTEGER = 1
    NOTHING = 2


@dataclass(slots=True)
class Writer:
    """Writes 64-bit words: a list is its length and its items, a text its bytes padded to words.

    words: integers, and objects as placeholders for those that are not known yet.
    """

    words: list[Any] = field(default_factory=list[Any])

    def word(self, *values: Any) -> None:
        self.words.extend(values)

    def list(self, values: Sequence[Any]) -> None:
        self.words.append(len(values))
        self.words.extend(values)

    def text(self, text: str) -> None:
        data = text.encode()
        self.words.append(len(data))
        self.words.extend(array("q", data + b"\0" * (-len(data) % 8)))


def double_bits(value: float) -> int:
    """A double as the integer of the same bits."""
    return struct.unpack("q", struct.pack("d", value))[0]


def words_header() -> str:
    """The text of `words.h`: `TENSOR_LIST` is `kTensorList` there."""
    enums = (_enum_text(each) for each in (Place, CallKind, Shim, ArgKind, Returned, ResultKind))
    numbers = f"constexpr int64_t kAlignment = {ALIGNMENT}, kRunHead = {RUN_HEAD};\n"
    return "#pragma once\n\n#include <cstdint>\n\nnamespace pellucid {\n\n" + "".join((numbers, *enums)) + "\n}\n"


def _enum_text(enum: type[IntEnum]) -> str:
    members = ", ".join(f"k{each.name.title().replace('_', '')} = {each.value}" for each in enum)
    return f"enum class {enum.__name__} : int64_t {{ {members} }};  // {enum.__doc__}\n"
