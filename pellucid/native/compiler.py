"""Running the C++ compiler: precompiled header, kernels, runtime; and finding out which kernel an error belongs to."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from pellucid.errors import ToolchainError
from pellucid.native.store import KernelStore
from pellucid.native.toolchain import Toolchain, include_dir

SOURCES = Path(__file__).parent
_TIMEOUT_S = 900
_STUB = "libtorch_cpu.so"
_PCH = "prelude.h.gch"


class CompilerFailed(Exception):
    """The compiler returned an error: what it ran and what it said."""

    def __init__(self, command: tuple[str, ...], output: str) -> None:
        super().__init__(output)
        self.command = command
        self.output = output

    @property
    def out_of_space(self) -> bool:
        return "No space left on device" in self.output or "Disk quota exceeded" in self.output


@lru_cache(maxsize=1)
def prelude_hash() -> str:
    """Identity of the header that every kernel includes."""
    return hashlib.sha256((SOURCES / "prelude.h").read_bytes()).hexdigest()[:12]


@dataclass(slots=True)
class Compiler:
    """A toolchain at work for one store. Any number of threads may use it.

    pch_s: seconds that this process spent on the precompiled header.
    """

    toolchain: Toolchain
    store: KernelStore
    pch_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _headers: Path | None = None

    def compile(self, source: Path, output: Path) -> None:
        """Compile kernels to an object file. Raises CompilerFailed."""
        headers = self.prepare_headers()
        includes = ("-I", str(headers), "-I", str(include_dir()))
        self.run((*self.toolchain.flags, *includes, "-c", str(source), "-o", str(output)))

    def link(self, source: Path, output: Path, *flags: str) -> None:
        """Make a shared library, from an object file or from source. Raises CompilerFailed.

        It is linked against an empty library with the name of libtorch_cpu: the symbols of that (and of what it in
        turn needs: Sleef's, OpenMP's) are found when the library is loaded into a process that has torch. The real
        one would cost a third of a second of the linker's time.
        """
        stub = self.prepare_stub()
        self.run(("-shared", *flags, str(source), "-Wl,--no-as-needed", str(stub), "-o", str(output)))

    def prepare_stub(self) -> Path:
        """The empty library that stands for libtorch_cpu."""
        stub = self.store.file(_STUB)
        if stub:
            return stub
        with self.store.workspace() as work:
            self.run(("-shared", "-nostdlib", f"-Wl,-soname,{_STUB}", "-x", "c++", os.devnull, "-o", str(work / _STUB)))
            return self.store.add_file(_STUB, work / _STUB)

    def prepare_headers(self) -> Path:
        """The directory to include `prelude.h` from; with GCC a precompiled header lies there."""
        with self._lock:
            if self._headers is None:
                started = time.perf_counter()
                self._headers = self._precompile() if self.toolchain.kind == "gcc" else SOURCES
                self.pch_s += time.perf_counter() - started
            return self._headers

    def _precompile(self) -> Path:
        with self.store.lock(_PCH):
            header, made = self.store.file("prelude.h"), self.store.file(_PCH)
            if header and made:
                return header.parent
            with self.store.workspace() as work:
                shutil.copyfile(SOURCES / "prelude.h", work / "prelude.h")
                command = (*self.toolchain.flags, "-I", str(include_dir()), "-x", "c++-header")
                try:
                    self.run((*command, str(work / "prelude.h"), "-o", str(work / _PCH)))
                except CompilerFailed as error:
                    if error.out_of_space:  # 50 MB that only save time
                        return SOURCES
                    raise ToolchainError(
                        "the header of all kernels does not compile",
                        hint="try another compiler: set CXX; GCC 12 and 13 are the best tested",
                        context={"command": shlex.join(error.command), "output": error.output[:2000]},
                    ) from error
                # The precompiled header first: a header without it is only slow, the reverse is an error.
                self.store.add_file(_PCH, work / _PCH)
                return self.store.add_file("prelude.h", work / "prelude.h").parent

    def run(self, arguments: tuple[str, ...]) -> None:
        """Run the compiler. Raises CompilerFailed, or ToolchainError when it cannot be run at all."""
        command = (*self.toolchain.compiler, *arguments)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ToolchainError(
                f"the C++ compiler did not finish in {_TIMEOUT_S} s", context={"command": shlex.join(command)}
            ) from error
        except OSError as error:
            raise ToolchainError(
                f"the C++ compiler cannot be run: {error}", context={"command": shlex.join(command)}
            ) from error
        if done.returncode < 0:
            raise ToolchainError(
                f"the C++ compiler was killed by signal {-done.returncode}",
                hint="most often the machine has run out of memory",
                context={"command": shlex.join(command), "output": done.stdout[-2000:]},
            )
        if done.returncode != 0:
            raise CompilerFailed(command, done.stdout)


def source_text(kernels: Mapping[str, str]) -> str:
    """The C++ file of a batch. Compiler messages name the kernel as the file, and lines of its own text."""
    parts = ['#include "prelude.h"\n']
    for name, text in kernels.items():
        parts.append(f'#line 1 "{name}"\n{text.rstrip()}\n')
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class Blame:
    """Where the first error of a kernel lies: `line` counts from 1 in its text; 0 if the compiler does not say."""

    kernel: str
    line: int
    message: str


_PLACE = re.compile(r"^\s*(?:In file included from |from )?([A-Za-z_]\w*):(\d+)")
_ERROR = re.compile(r"^(\S+?):(\d+)(?::\d+)?: (?:fatal )?error: (.*)")
_INTERNAL = re.compile(r"internal compiler error: (.*)")


def blame(output: str, kernels: Mapping[str, str]) -> Blame | None:
    """The kernel that the compiler's first error belongs to.

    An error inside the header is the kernel's whose line, by the compiler's account ("required from"), led there.
    """
    place: tuple[str, int] | None = None
    for text in output.splitlines():
        error = _ERROR.match(text) or _INTERNAL.search(text)
        at = _PLACE.match(text)
        if at and at[1] in kernels:
            place = (at[1], int(at[2]))
        if error:
            message = error[error.re.groups]
            return Blame(*place, message) if place else None
    return None
