"""Processes that run the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

The sanitizers' libraries are preloaded, as Python itself is not built with them; the kernels are compiled with `FLAGS`.
An error ends the process, and the report on stderr says where: a `Place` is a frame of it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pellucid.errors import ToolchainError
from pellucid.native.build import default_toolchain

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
_LIBRARIES = ("libasan.so", "libubsan.so", "libstdc++.so")
_COMMON = "abort_on_error=1:halt_on_error=1:print_stacktrace=1"
# Python and torch leak memory until the process ends; torch frees in one library what it allocated in another.
_ADDRESS = f"{_COMMON}:detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:allocator_may_return_null=1"
_REPORT = re.compile(r"^(?:==\d+==ERROR: |\S+ (?=runtime error: ))(?P<what>.*)", re.MULTILINE)
_FRAME = re.compile(r"^ +#\d+ 0x[0-9a-f]+ in .+? (?P<file>\S+?):(?P<line>\d+)(?::\d+)?$", re.MULTILINE)
_ACCESS = re.compile(r"^(?:READ|WRITE) of size \d+", re.MULTILINE)
_MAX_REPORT = 16_000


@dataclass(frozen=True, slots=True)
class Place:
    """A source line that was executing. file: the path given to the compiler."""

    file: str
    line: int


def variables() -> dict[str, str]:
    """The environment variables of such a process. Raises ToolchainError if the compiler has no sanitizers."""
    toolchain = default_toolchain()
    if toolchain.kind != "gcc" or toolchain.absent:
        raise ToolchainError("the sanitizers require GCC, which is not the compiler in use", hint="set CXX to g++")
    found = [_library(toolchain.compiler, name) for name in _LIBRARIES]
    flags = " ".join(filter(None, (os.environ.get("PELLUCID_CXXFLAGS"), *FLAGS)))
    preload = ":".join(filter(None, (*found, os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preload, "ASAN_OPTIONS": _ADDRESS, "UBSAN_OPTIONS": _COMMON, "PELLUCID_CXXFLAGS": flags}


def _library(compiler: tuple[str, ...], name: str) -> str:
    path = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        raise ToolchainError(f"{compiler[0]} has no {name}", hint="install GCC's sanitizers: libasan, libubsan")
    return path


def report_in(output: str) -> str:
    """The sanitizer report in the stderr of a process, with its headline first; empty if there is none."""
    found = _REPORT.search(output)
    if found is None:
        return ""
    rest = output[found.end() : found.end() + _MAX_REPORT].partition("SUMMARY: ")[0]
    access = _ACCESS.search(rest)
    return found["what"].partition(" on address ")[0] + (f", {access[0]}" if access else "") + rest


def places_in(report: str) -> Iterator[Place]:
    """The stack frames of a report, the innermost first."""
    for found in _FRAME.finditer(report):
        yield Place(found["file"], int(found["line"]))
