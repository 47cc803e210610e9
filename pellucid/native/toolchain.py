"""The C++ compiler and how kernels are compiled with it.

A `Toolchain` says everything that affects the machine code of a kernel, and its `key` names that: kernels built under
one key are never loaded under another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from pellucid.errors import ToolchainError, UnsupportedError
from pellucid.native.cpu import Cpu, cpu

INSTALL_HINT = "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), or set CXX to a compiler"
MINIMUM_GCC = 12
MINIMUM_CLANG = 14

# Rounding is eager's: no -ffast-math, no contraction of a * b + c. Eager has neither errno nor floating-point traps.
_OPTIMIZE = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_SHARED = ("-std=c++20", "-fPIC", "-fvisibility-inlines-hidden", "-fno-semantic-interposition", "-w")

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = frozenset({"avx512f", "avx512dq", "avx512vl", "avx512bw"})


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler, its flags and the instruction set.

    compiler: the command, for example ("/usr/bin/g++",) or ("ccache", "g++").
    kind: "gcc" or "clang". version: as `-dumpfullversion` prints it.
    flags: all that go to every compilation of a kernel, include directories left out.
    isa: "AVX512" or "AVX2".
    key: a hash of all of this, of the CPU model and of the torch release; it is part of the store's layout.
    """

    compiler: tuple[str, ...]
    kind: str
    version: str
    flags: tuple[str, ...]
    isa: str
    key: str


def include_dir() -> Path:
    """Directory of PyTorch's headers (Sleef's among them)."""
    return Path(torch.__file__).parent / "include"


@lru_cache(maxsize=8)
def detect(cache_file: Path | None = None) -> Toolchain:
    """The toolchain of this process, found once: `$CXX`, else g++, else c++; `$PELLUCID_CXXFLAGS` adds flags.

    cache_file: where the compiler's version is remembered between processes, by its path, mtime and size.
    Raises ToolchainError when there is no compiler or it is too old, UnsupportedError when the CPU is.
    """
    compiler = _find_compiler(os.environ)
    kind, version = _identify(compiler, cache_file)
    _check_version(compiler, kind, version)
    isa = choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
    extra = _words(os.environ, "PELLUCID_CXXFLAGS")
    flags = (*_SHARED, *_OPTIMIZE, *_isa_flags(isa), *extra)
    facts = (compiler, kind, version, flags, isa, cpu().name, sorted(cpu().flags), torch.__version__)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Toolchain(compiler, kind, version, flags, isa, key)


def choose_isa(machine: Cpu, capability: str) -> str:
    """The instruction set for kernels: AVX-512 where the CPU has it and PyTorch (`capability`) uses it, else AVX2.

    PyTorch's own choice counts because `ATEN_CPU_CAPABILITY` is how users pin it down.
    """
    if capability.startswith("AVX512") and machine.flags >= _AVX512:
        return "AVX512"
    if machine.flags >= _AVX2:
        return "AVX2"
    missing = ", ".join(sorted(_AVX2 - machine.flags))
    raise UnsupportedError(
        f"this CPU ({machine.name}, {machine.machine}) cannot run Pellucid's kernels: it lacks {missing}",
        hint="Pellucid needs an x86-64 CPU with AVX2, FMA and F16C (Intel since 2013, AMD since 2015)",
    )


def _isa_flags(isa: str) -> tuple[str, ...]:
    # The key records the CPU model and its features, so what "native" means is part of it.
    return ("-march=native",) if isa == "AVX512" else ("-march=native", "-mno-avx512f")


def _words(environ: Mapping[str, str], variable: str) -> list[str]:
    """The words of an environment variable, split as a shell splits them."""
    try:
        return shlex.split(environ.get(variable, ""))
    except ValueError as error:
        raise ToolchainError(f"{variable} cannot be read: {error}", context={variable: environ[variable]}) from error


def _find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = _words(environ, "CXX")
    if named:
        if not shutil.which(named[0]):
            raise ToolchainError(f"CXX names {named[0]!r}, which is not an executable", hint=INSTALL_HINT)
        return (shutil.which(named[0]) or named[0], *named[1:])
    for name in ("g++", "c++"):
        path = shutil.which(name)
        if path:
            return (path,)
    raise ToolchainError(
        "no C++ compiler found: neither g++ nor c++ is on PATH, and CXX is not set",
        hint=INSTALL_HINT,
        context={"PATH": environ.get("PATH", "")},
    )


def _identify(compiler: tuple[str, ...], cache_file: Path | None) -> tuple[str, str]:
    """Kind and version of a compiler, from the cache file if the executables have not changed."""
    fingerprint = _fingerprint(compiler)
    known = _read_json(cache_file)
    entry = known.get(fingerprint)
    if isinstance(entry, list) and len(entry) == 2:
        return str(entry[0]), str(entry[1])
    kind, version = _ask(compiler)
    if cache_file:
        _write_json(cache_file, {fingerprint: [kind, version]})
    return kind, version


def _fingerprint(compiler: tuple[str, ...]) -> str:
    parts: list[object] = [*compiler]
    for word in compiler:
        path = shutil.which(word)
        if path:
            real = os.path.realpath(path)
            stat = os.stat(real)
            parts += [real, stat.st_mtime_ns, stat.st_size]
    return json.dumps(parts)


def _ask(compiler: tuple[str, ...]) -> tuple[str, str]:
    """Kind and version, from the macros that the compiler predefines."""
    command = [*compiler, "-E", "-P", "-x", "c++", "-"]
    probe = "__clang_major__ __clang_minor__ __GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__"
    try:
        done = subprocess.run(command, input=probe, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(
            f"the C++ compiler cannot be run: {error}", hint=INSTALL_HINT, context={"command": shlex.join(command)}
        ) from error
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 5:
        raise ToolchainError(
            f"{compiler[0]} does not work as a C++ compiler",
            hint=INSTALL_HINT,
            context={"command": shlex.join(command), "output": (done.stderr or done.stdout).strip()[:500]},
        )
    if words[0].isdigit():
        return "clang", ".".join(words[:2])
    return ("gcc", ".".join(words[2:])) if words[2].isdigit() else ("unknown", "0")


def _check_version(compiler: tuple[str, ...], kind: str, version: str) -> None:
    minimum = {"gcc": MINIMUM_GCC, "clang": MINIMUM_CLANG}.get(kind)
    major = re.match(r"\d+", version)
    if minimum is None or major is None:
        raise ToolchainError(f"{compiler[0]} is neither GCC nor Clang", hint=INSTALL_HINT)
    if int(major[0]) < minimum:
        raise ToolchainError(
            f"{compiler[0]} is {kind} {version}; Pellucid needs GCC {MINIMUM_GCC} or Clang {MINIMUM_CLANG}, or later",
            hint=INSTALL_HINT,
        )


def _read_json(path: Path | None) -> dict[str, object]:
    try:
        value = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    """Best effort: without it, the next process asks the compiler again."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
