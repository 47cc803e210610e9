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
from pellucid.native.sources import KERNEL_FLAGS, SOURCES, prelude_hash, shared_name

INSTALL_HINT = (
    "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora, RHEL), zypper install gcc-c++ (SUSE), "
    "apk add g++ (Alpine), pacman -S gcc (Arch); or set CXX to a compiler"
)
MINIMUM_GCC = 12
MINIMUM_CLANG = 14

_NOTE = "toolchain.json"
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
    absent: why there is no such compiler here; then only what the store already has can be used. Empty: there is.
    """

    compiler: tuple[str, ...]
    kind: str
    version: str
    flags: tuple[str, ...]
    isa: str
    key: str
    absent: str = ""


@lru_cache(maxsize=8)
def detect(root: Path | None = None) -> Toolchain:
    """The toolchain of this process, found once: `$CXX`, else g++, c++ or clang++.

    `$PELLUCID_CXXFLAGS` adds flags. root: of the kernel store. There the compiler's version is remembered between
    processes, by its path, mtime and size; and where there is no compiler, one whose kernels the store holds is taken,
    if they run here as they are. Raises ToolchainError when there is no compiler or it is too old, UnsupportedError
    when the CPU is.
    """
    isa = choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
    flags = _flags(isa)
    try:
        compiler = _find_compiler(os.environ)
        kind, version = _identify(compiler, root / "compilers.json" if root else None)
        _check_version(compiler, kind, version)
    except ToolchainError as error:
        recalled = _recall(root, flags, isa, error.message) if root else None
        if recalled is None:
            raise
        return recalled
    facts = _facts(compiler, kind, version, flags, isa)
    return Toolchain(compiler, kind, version, flags, isa, _key(facts))


def remember(toolchain: Toolchain, directory: Path) -> None:
    """Note in a directory of the store whose kernels lie there, for machines that have no compiler."""
    t = toolchain
    if not t.absent and not (directory / _NOTE).exists():
        write_note(directory, _facts(t.compiler, t.kind, t.version, t.flags, t.isa))


def write_note(directory: Path, facts: Mapping[str, object]) -> None:
    """Note what kernels in a directory of the store were built for."""
    _write_json(directory / _NOTE, facts)


def _facts(compiler: tuple[str, ...], kind: str, version: str, flags: tuple[str, ...], isa: str) -> dict[str, object]:
    """All that the machine code of a kernel depends on, its text aside."""
    return {
        "compiler": list(compiler),
        "kind": kind,
        "version": version,
        "flags": list(flags),
        "isa": isa,
        "cpu": cpu().name,
        "cpu_flags": sorted(cpu().flags),
        "torch": torch.__version__,
    }


def _key(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def misfit(key: str, facts: Mapping[str, object]) -> str:
    """Why a process on this machine does not use what a store has under a key; empty if it does.

    facts: see `note_of`. Raises UnsupportedError on a machine that can run no kernels at all.
    """
    prelude = key.rpartition("-")[2]
    if not facts:
        return "nothing says what it was built for"
    if prelude != prelude_hash():
        return "it was built by another version of Pellucid, with another header"
    if key != f"v1-{_key(facts)}-{prelude}":
        return "what it says it was built for does not yield its name"
    try:
        here = detect()
    except ToolchainError:
        isa = choose_isa(cpu(), torch.backends.cpu.get_cpu_capability())
        return _lacking(facts, _flags(isa), isa)
    return _difference(facts, _facts(here.compiler, here.kind, here.version, here.flags, here.isa))


def note_of(folder: Path) -> dict[str, object]:
    """What `remember` noted in a directory of a store; empty if it did not."""
    return _read_json(folder / _NOTE)


def shipped(toolchain: Toolchain) -> Path | None:
    """The object file of what kernels share that came with the package; None if there is none for this toolchain."""
    level = "avx512_bf16" if _has_pairs(toolchain.isa) else toolchain.isa.lower()
    path = SOURCES / shared_name(level)
    return path if toolchain.flags == _own_flags(toolchain.isa) and path.exists() else None


def _flags(isa: str) -> tuple[str, ...]:
    return (*_own_flags(isa), *_words(os.environ, "PELLUCID_CXXFLAGS"))


def _own_flags(isa: str) -> tuple[str, ...]:
    return (*KERNEL_FLAGS, *_isa_flags(isa))


_FACTS = {
    "torch": "PyTorch",
    "cpu": "the processor",
    "cpu_flags": "the processor's features",
    "isa": "the instruction set",
    "flags": "the compiler's flags",
    "kind": "the compiler",
    "version": "the compiler",
    "compiler": "the compiler",
}


def _difference(facts: Mapping[str, object], here: Mapping[str, object]) -> str:
    """The first difference between what something was built for and what is here."""
    for name, label in _FACTS.items():
        theirs, ours = facts.get(name), here[name]
        if theirs == ours:
            continue
        if name in ("cpu_flags", "flags") and isinstance(theirs, list) and isinstance(ours, list):
            only, lack = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
            what = (("there with " + " ".join(only)) if only else "", ("here with " + " ".join(lack)) if lack else "")
            return f"it was built for other values of {label}: {', '.join(filter(None, what)) or 'in another order'}"
        if name in ("kind", "version"):
            theirs, ours = (f"{each.get('kind')} {each.get('version')}" for each in (facts, here))
        if name == "compiler":
            theirs, ours = (shlex.join(map(str, each)) if isinstance(each, list) else each for each in (theirs, ours))
        return f"it was built for another value of {label}: {theirs}; here it is {ours}"
    return ""


def _lacking(facts: Mapping[str, object], flags: tuple[str, ...], isa: str) -> str:
    """Why a machine without a compiler cannot run kernels built as `facts` say; empty if it can.

    All that matters has to be as here, and the CPU must have what theirs had.
    """
    try:
        compiler = tuple(map(str, facts["compiler"]))  # type: ignore[arg-type]
        known = _facts(compiler, str(facts["kind"]), str(facts["version"]), flags, isa)
        had = set(map(str, facts["cpu_flags"]))  # type: ignore[call-overload]
    except (KeyError, TypeError):
        return "what it says it was built for cannot be read"
    known |= {"cpu": facts.get("cpu"), "cpu_flags": facts["cpu_flags"]}
    asked = _words(os.environ, "CXX")
    if asked and [os.path.basename(asked[0]), *asked[1:]] != [os.path.basename(compiler[0]), *compiler[1:]]:
        return f"it was built by {shlex.join(compiler)}, and CXX names {shlex.join(asked)}"
    if not had <= cpu().flags:
        return f"the processor lacks features of the one that it was built on: {' '.join(sorted(had - cpu().flags))}"
    return _difference(facts, known)


def _recall(root: Path, flags: tuple[str, ...], isa: str, absent: str) -> Toolchain | None:
    """A toolchain whose kernels this machine can run.

    The note must yield the key under which it was found: a damaged one never does. The header is part of the
    directory's name, and checked when the store is opened.
    """
    suffix = f"-{prelude_hash()}"
    for path in sorted(root.glob(f"v1-*{suffix}/{_NOTE}"), reverse=True):
        facts = _read_json(path)
        if path.parent.name == f"v1-{_key(facts)}{suffix}" and not _lacking(facts, flags, isa):
            compiler = tuple(map(str, facts["compiler"]))  # type: ignore[arg-type]
            return Toolchain(compiler, str(facts["kind"]), str(facts["version"]), flags, isa, _key(facts), absent)
    return None


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


def has_tiles(isa: str) -> bool:
    """True if kernels use units that multiply whole tiles of bf16 (AMX)."""
    return _has_pairs(isa) and cpu().flags >= {"amx_tile", "amx_bf16"}


def _has_pairs(isa: str) -> bool:
    """True if kernels use instructions that multiply pairs of bf16."""
    return isa == "AVX512" and "avx512_bf16" in cpu().flags


def _isa_flags(isa: str) -> tuple[str, ...]:
    # The key records the CPU model and its features, so what "native" means is part of it.
    used = {"avx512f": isa == "AVX512", "avx512bf16": _has_pairs(isa), "amx-bf16": has_tiles(isa)}
    return ("-march=native", *(f"-mno-{name}" for name, there in used.items() if not there))


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
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return (path,)
    raise ToolchainError(
        "no C++ compiler found: neither g++, c++ nor clang++ is on PATH, and CXX is not set",
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
        done = subprocess.run(command, input=probe, capture_output=True, text=True, errors="replace", timeout=60)
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
        with temporary.open("x") as file:  # never through a link that another user has put there
            file.write(json.dumps(value))
        temporary.replace(path)
