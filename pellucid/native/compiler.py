"""Runs the C++ compiler: for shared code, kernels and the runtime; and finds the kernel that caused an error."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pellucid.errors import ToolchainError, warn
from pellucid.native.children import Children
from pellucid.native.sources import SOURCES, STUB, STUB_FLAGS, linked_to, prelude_text, shared_source
from pellucid.native.store import KernelStore
from pellucid.native.toolchain import INSTALL_HINT, Toolchain, shipped

_TIMEOUT_S = 600
_OTHER = "try another compiler: set CXX; GCC 12 and 13 are the best tested"
_KILLED = "the compiler was ended by signal"
_PCH = "prelude.h.gch"
_WIDTH = re.compile(r"\bpv::(?:attend\w*<|contract\w*<\d+, \d+, )(\d+)")


def _has_halves(text: str) -> bool:
    """Whether a kernel may have a remainder of columns that fits into one register, of 8 or 16 lanes."""
    return any((width - 1) % 32 < 16 or (width - 1) % 16 < 8 for width in map(int, _WIDTH.findall(text)))


_PARTS = {
    "products": re.compile(r"\bpv::\w*(?:contract|attend|pack)\w*<").search,
    "dots": re.compile(r"\bpv::(?:contract|attend)\w*<").search,
    "halves": _has_halves,
    "casts": re.compile(r"\bpv::casting<").search,
    "windows": re.compile(r"\bpv::(?:Window|contract_pixels)<").search,
    "taps": re.compile(r"\bpv::contract_taps<").search,
    "attention": re.compile(r"\bpv::attend\w*<").search,
    "spread": re.compile(r"\bpv::contract_spread<").search,
}
"""The parts of kernel/shared.h, each with a test of whether the text of a kernel uses it."""

_ELEMENTS = ("float", "bf16", "f16")


class CompilerFailed(Exception):
    """The compiler returned an error: the command and its output."""

    def __init__(self, command: tuple[str, ...], output: str) -> None:
        super().__init__(output)
        self.command = command
        self.output = output

    @property
    def out_of_space(self) -> bool:
        return any(text in self.output for text in ("No space left on device", "Disk quota exceeded", "File too large"))

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, as when the system runs out of memory; or it could not allocate memory."""
        return any(text in self.output for text in (_KILLED, "terminated program", "out of memory", "bad_alloc"))


@dataclass(slots=True)
class Compiler:
    """Runs a toolchain for one store, during one build. Any number of threads may use it.

    children: the compiler processes. pch_s: seconds spent waiting for the precompiled header.
    """

    toolchain: Toolchain
    store: KernelStore
    children: Children = field(default_factory=Children)
    pch_s: float = 0.0
    _headers: Path | None = None

    def compile(self, source: Path, output: Path) -> None:
        """Compile kernels to an object file. Raises CompilerFailed."""
        headers = self.prepare_headers()
        self.run((*self.toolchain.flags, "-I", str(headers), "-c", str(source)), output)

    def link(self, source: Path, output: Path, *others: str) -> None:
        """Link a shared library, from an object file or from source. others: object files and flags.

        Raises CompilerFailed.

        It is linked against an empty library with the name of libtorch_cpu: its symbols (and those of its dependencies:
        Sleef, OpenMP) are resolved when the library is loaded into a process with torch. Linking against the real one
        would take a third of a second more.
        """
        stub = self.prepare_stub()
        self.run(("-shared", *others, str(source), *linked_to(str(stub))), output)

    def twice(self, make: Callable[[], Path]) -> Path:
        """`make()`, and a second time if the disk was full, in another directory, or the compiler was killed, alone.

        The system kills compilers when memory runs out. Raises CompilerFailed.
        """
        directory = self.store.directory
        alone: AbstractContextManager[None] = nullcontext()
        try:
            return make()
        except CompilerFailed as failed:
            if failed.out_of_space:
                self.store.out_of_space(directory)
            elif failed.killed:
                alone = self.store.lock("memory")
            else:
                raise
        with alone:
            return make()

    def provide(self, name: str, make: Callable[[Path], None], what: str, hint: str = _OTHER) -> Path:
        """The auxiliary file of that name in the store; `make` writes it if it is missing.

        what, hint: message and hint of the error if the compiler fails. Raises ToolchainError.
        """

        def add() -> Path:
            with self.store.workspace() as work:
                make(work / name)
                return self.store.add_file(name, work / name)

        if found := self.store.file(name):
            return found
        try:
            with self.store.lock(name):  # another process may be writing it too
                return self.store.file(name) or self.twice(add)
        except CompilerFailed as failed:
            raise explain(failed, what, hint) from failed

    def prepare_stub(self) -> Path:
        """The empty library that replaces libtorch_cpu. Raises ToolchainError."""
        return self.provide(STUB, lambda path: self.run(STUB_FLAGS, path), "an empty library cannot be linked")

    def prepare_headers(self) -> Path:
        """The directory of `prelude.h`; with GCC it also has the precompiled header."""
        if self._headers is None:
            started = time.perf_counter()
            self._headers = self._precompile() if self.toolchain.kind == "gcc" else SOURCES
            self.pch_s += time.perf_counter() - started
        return self._headers

    def _precompile(self) -> Path:
        with self.store.lock(_PCH):
            header, precompiled = self.store.file("prelude.h"), self.store.file(_PCH)
            if header and precompiled:
                return header.parent
            with self.store.workspace() as work:
                (work / "prelude.h").write_text(prelude_text(SOURCES), encoding="utf-8")
                try:
                    self.run((*self.toolchain.flags, "-x", "c++-header", str(work / "prelude.h")), work / _PCH)
                except CompilerFailed as error:
                    if error.out_of_space or error.killed:  # precompiling only saves time
                        return SOURCES
                    raise explain(error, "the header of all kernels does not compile", _OTHER) from error
                # The precompiled header first: a header without it is only slow, the opposite is an error.
                self.store.add_file(_PCH, work / _PCH)
                return self.store.add_file("prelude.h", work / "prelude.h").parent

    def link_kernels(self, text: str, source: Path, output: Path) -> None:
        """Link a shared library from the kernels in `text`, compiled to `source`, and the shared code that they use.

        Uses the shared code of the package, unless that is damaged and cannot be linked. Raises CompilerFailed;
        ToolchainError if the shared code cannot be compiled.
        """
        packaged = shipped(self.toolchain)
        if packaged:
            try:
                return self.link(source, output, "-Wl,--gc-sections", str(packaged))
            except CompilerFailed as failed:
                if failed.out_of_space or failed.killed:
                    raise
        shared = [str(self.prepare_shared(part)) for part in shared_parts(text)]
        self.link(source, output, "-Wl,--gc-sections", *shared)
        if packaged:  # it failed, and not the kernels
            warn(f"{packaged} cannot be linked, so it is compiled again into the store: reinstall Pellucid")

    def parts_to_make(self, text: str) -> tuple[str, ...]:
        """The parts of kernel/shared.h that the kernels in `text` use and that are not in the package."""
        return () if shipped(self.toolchain) else shared_parts(text)

    def prepare_shared(self, part: str) -> Path:
        """The object file of a part of kernel/shared.h, such as `dots_float`. Raises ToolchainError."""
        make = partial(self._compile_shared, part)
        return self.provide(f"shared-{part}.o", make, f"the shared code of kernels, {part}, does not compile")

    def _compile_shared(self, part: str, output: Path) -> None:
        source = output.with_name("shared.cpp")
        source.write_text(shared_source(part))
        self.compile(source, output)

    def run(self, arguments: tuple[str, ...], output: Path) -> None:
        """Run the compiler to write `output`. Raises CompilerFailed, or ToolchainError if it cannot be run."""
        if self.toolchain.absent:
            raise ToolchainError(
                f"{self.toolchain.absent}; and the kernel store, made elsewhere, lacks something that is needed",
                hint=f"run the same program, with the same sizes, where the store is filled; or install a compiler: "
                f"{INSTALL_HINT}",
                context={"store": self.store.root, "file": output.name},
            )
        command = (*self.toolchain.compiler, *arguments, "-o", str(output))
        try:
            status, text = self.children.run(command, self.store, _TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ToolchainError(
                f"the C++ compiler did not finish in {_TIMEOUT_S} s and was ended",
                hint="try another compiler (set CXX), or find out what it waits for",
                context={"command": shlex.join(command)},
            ) from error
        except OSError as error:
            raise ToolchainError(
                f"the C++ compiler cannot be run: {error}", context={"command": shlex.join(command)}
            ) from error
        if status < 0:
            raise CompilerFailed(command, f"{text}\n{_KILLED} {-status}")
        # In a program that ignores SIGCHLD, or waits for all its children, the exit status is lost.
        if status != 0 or not output.exists():
            raise CompilerFailed(command, text)


def explain(failed: CompilerFailed, what: str, hint: str) -> ToolchainError:
    """The error to raise for a failure that no kernel caused. what: the message."""
    if failed.killed:
        what = f"the C++ compiler was killed, twice: {what}"
        hint = "most often the machine, or the container, has run out of memory: give it more, or run less beside"
    elif flags := os.environ.get("PELLUCID_CXXFLAGS"):
        hint = f"PELLUCID_CXXFLAGS is {flags!r}: try without it; else {hint}"
    return ToolchainError(
        what, hint=hint, context={"command": shlex.join(failed.command), "output": failed.output[-2000:].strip()}
    )


def shared_parts(text: str) -> tuple[str, ...]:
    """The parts of kernel/shared.h that the kernels in `text` use."""
    parts = [part for part, use in _PARTS.items() if use(text)]
    elements = [element for element in _ELEMENTS if element == "float" or f"pv::{element}" in text]
    return tuple(f"{part}_{each}" for part in parts for each in elements if part != "spread" or each == "float")


def source_text(kernels: Mapping[str, str]) -> str:
    """The C++ file of a batch. Compiler messages name the kernel as the file, and lines of its own text."""
    parts = ['#include "prelude.h"\n']
    for name, text in kernels.items():
        parts.append(f'#line 1 "{name}"\n{text.rstrip()}\n')
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Blame:
    """The first error of a kernel: `line` counts from 1 in its text; 0 if unknown."""

    kernel: str
    line: int
    message: str


_LOCATION = re.compile(r"^\s*(?:In file included from |from )?([A-Za-z_]\w*):(\d+)")
_ERROR = re.compile(r"^(\S+?):(\d+)(?::\d+)?: (?:fatal )?error: (.*)")
_INTERNAL = re.compile(r"internal compiler error: (.*)")


def blame(output: str, kernels: Mapping[str, str]) -> Blame | None:
    """The kernel that caused the compiler's first error.

    An error inside the header is attributed to the kernel whose line, by the compiler's notes ("required from"), led
    there: the innermost one, which is listed first.
    """
    location: tuple[str, int] | None = None
    for text in output.splitlines():
        error = _ERROR.match(text) or _INTERNAL.search(text)
        at = _LOCATION.match(text)
        if at and at[1] in kernels and (error or location is None):
            location = (at[1], int(at[2]))
        if error:
            message = error[error.re.groups]
            return Blame(*location, message) if location else None
        if " warning: " in text:  # the location was that of the warning
            location = None
    return None
