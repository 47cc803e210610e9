"""Build kernels: look them up in the store, compile what is missing, load, return addresses."""

from __future__ import annotations

import ctypes
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from pellucid.errors import InternalError, ToolchainError
from pellucid.native.children import Children
from pellucid.native.compiler import Blame, Compiler, CompilerFailed, blame, explain, shared_parts, source_text
from pellucid.native.cpu import usable_cores
from pellucid.native.library import open_library
from pellucid.native.locks import Lock
from pellucid.native.session import SESSION
from pellucid.native.sources import prelude_hash
from pellucid.native.store import KernelStore, batch_id, default_root, text_hash
from pellucid.native.toolchain import Toolchain, detect, remember

_SHARD_CHARS = 8_000
"""Characters that justify another compiler process: starting one costs as much as compiling about this many."""

_TEMPLATE_CHARS = 2_000
"""Characters that take as long to compile as the templates of one product, convolution or attention."""


class KernelCompileError(ToolchainError):
    """The compiler rejected a kernel.

    kernel: its name. line: of the first error, from 1, in its text (0: unknown). detail: the compiler's message.
    command: the one that failed.
    """

    code = "kernel-compile"

    def __init__(self, fault: Blame, text: str, failed: CompilerFailed) -> None:
        lines = text.splitlines()
        context: dict[str, object] = {"message": fault.message}
        if 0 < fault.line <= len(lines):
            context["source"] = lines[fault.line - 1].strip()
        context["command"] = shlex.join(failed.command)
        where = f", line {fault.line}" if fault.line else ""
        super().__init__(f"the compiler refused kernel {fault.kernel}{where}", context=context)
        self.kernel = fault.kernel
        self.line = fault.line
        self.detail = fault.message
        self.command = failed.command
        self.output = failed.output


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of one `build`: names found in the store, names compiled, and seconds of each step.

    compile_s, link_s: summed over the compiler processes, which run in parallel. pch_s: spent waiting for the
    precompiled header. total_s: wall time of the whole.
    """

    found: tuple[str, ...]
    built: tuple[str, ...]
    pch_s: float
    compile_s: float
    link_s: float
    total_s: float


def build(
    sources: Mapping[str, str],
    toolchain: Toolchain | None = None,
    store: KernelStore | None = None,
    *,
    yielding: bool = False,
) -> tuple[dict[str, int], BuildReport]:
    """Address of each kernel, by name.

    sources: C++ text by kernel name, which is its C symbol: the text after `#include "prelude.h"`.
    yielding: the compilers run at a lower priority.
    Raises KernelCompileError; ToolchainError or StoreError if no kernel can be built.
    """
    started = time.perf_counter()
    for name in sources:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise InternalError(f"{name!r} cannot be the name of a kernel: it is not a C identifier")
    toolchain = toolchain or default_toolchain()
    store = store or default_store(toolchain)
    compiler = Compiler(toolchain, store, Children(yielding))
    addresses = _loaded(sources, store)
    wanted = {name: text for name, text in sources.items() if name not in addresses}
    found = store.find(wanted)
    addresses |= _load(found, wanted, store)
    missing = {name: text for name, text in wanted.items() if name not in addresses}
    times = _Times()
    if missing:
        with store.lock(batch_id(missing)):  # another process may be building the same ones
            addresses |= _load(store.find(missing), missing, store)
            missing = {name: text for name, text in missing.items() if name not in addresses}
            addresses |= _build_missing(missing, compiler, times)
    report = BuildReport(
        found=tuple(name for name in sources if name not in missing),
        built=tuple(missing),
        pch_s=compiler.pch_s,
        compile_s=times.compile,
        link_s=times.link,
        total_s=time.perf_counter() - started,
    )
    return addresses, report


def is_built(sources: Mapping[str, str]) -> bool:
    """Whether `build` would compile none of these kernels."""
    store = default_store()
    loaded = _loaded(sources, store)
    wanted = {name: text for name, text in sources.items() if name not in loaded}
    return len(store.find(wanted)) == len(wanted)


def default_toolchain() -> Toolchain:
    """The toolchain of this process; the compiler's version is cached in the store's root."""
    return detect(default_root())


def default_store(toolchain: Toolchain | None = None) -> KernelStore:
    """The store of this process for a toolchain and the current header."""
    toolchain = toolchain or default_toolchain()
    store = _store(f"v1-{toolchain.key}-{prelude_hash()}", default_root())
    remember(toolchain, store.directory)
    return store


# ----------------------------------------------------------------------------------------------- private


@lru_cache(maxsize=8)
def _store(key: str, _root: Path) -> KernelStore:
    return KernelStore(key)


@dataclass(slots=True)
class _Times:
    compile: float = 0.0
    link: float = 0.0
    lock: Lock = field(default_factory=Lock)


def _identity(name: str, text: str, store: KernelStore) -> tuple[str, str, str]:
    return store.key, name, text_hash(text)


def _loaded(sources: Mapping[str, str], store: KernelStore) -> dict[str, int]:
    """Addresses of the kernels that this process has loaded already."""
    known = {name: SESSION.addresses.get(_identity(name, text, store)) for name, text in sources.items()}
    return {name: address for name, address in known.items() if address is not None}


def _load(paths: Mapping[str, Path], sources: Mapping[str, str], store: KernelStore) -> dict[str, int]:
    """Load libraries from the store; a kernel whose library cannot be loaded is left out, to be built again."""
    addresses: dict[str, int] = {}
    for name, path in paths.items():
        try:
            addresses[name] = _address(path, name)
        except (OSError, AttributeError):
            store.forget(path)
            continue
        SESSION.addresses[_identity(name, sources[name], store)] = addresses[name]
    return addresses


def _address(path: Path, name: str) -> int:
    """Address of a symbol. Raises OSError or AttributeError. Libraries stay loaded for the life of the process."""
    library = SESSION.libraries.get(path)
    if library is None:
        library = SESSION.libraries[path] = open_library(path, ctypes.CDLL)
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _build_missing(kernels: Mapping[str, str], compiler: Compiler, times: _Times) -> dict[str, int]:
    if not kernels:
        return {}
    compiler.prepare_headers()
    compiler.prepare_stub()
    shards, parts = _shards(kernels), compiler.parts_to_make(source_text(kernels))
    tasks = [partial(compiler.prepare_shared, part) for part in parts]
    tasks += [partial(_build_shard, shard, compiler, times) for shard in shards]
    paths = compiler.children.each(lambda task: task(), tasks)[len(parts) :]
    addresses: dict[str, int] = {}
    for path, shard in zip(paths, shards, strict=True):
        if not path.exists():  # removed from the store meanwhile
            path = _build_shard(shard, compiler, times)
        for name, text in shard.items():
            try:
                address = _address(path, name)
            except (OSError, AttributeError) as error:
                raise ToolchainError(
                    f"kernel {name} was built but cannot be loaded: {error}",
                    hint=f"the compiler, {shlex.join(compiler.toolchain.compiler)}, may be broken: set CXX to another",
                    context={"library": path},
                ) from error
            addresses[name] = SESSION.addresses[_identity(name, text, compiler.store)] = address
    return addresses


def _shards(kernels: Mapping[str, str]) -> list[dict[str, str]]:
    """Split into batches of about equal cost, at most one for each core: longest first, each to the smallest batch."""
    costs = {name: len(text) + _TEMPLATE_CHARS * bool(shared_parts(text)) for name, text in kernels.items()}
    count = max(1, min(len(kernels), usable_cores(), -(-sum(costs.values()) // _SHARD_CHARS)))
    shards: list[dict[str, str]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(kernels, key=lambda name: (-costs[name], name)):
        smallest = sizes.index(min(sizes))
        shards[smallest][name] = kernels[name]
        sizes[smallest] += costs[name]
    return shards


def _build_shard(kernels: Mapping[str, str], compiler: Compiler, times: _Times) -> Path:
    """Compile and link a batch into the store."""
    try:
        return compiler.twice(lambda: _try_shard(kernels, compiler, times))
    except CompilerFailed as failed:
        raise _explain(failed, kernels, compiler) from None


def _try_shard(kernels: Mapping[str, str], compiler: Compiler, times: _Times) -> Path:
    text = source_text(kernels)
    with compiler.store.workspace() as work:
        source, objects, library = work / "kernels.cpp", work / "kernels.o", work / "kernels.so"
        try:
            source.write_text(text)
        except OSError as error:
            raise CompilerFailed(("write", str(source)), str(error.strerror)) from error
        started = time.perf_counter()
        compiler.compile(source, objects)
        compiled = time.perf_counter()
        compiler.link_kernels(text, objects, library)
        with times.lock:
            times.compile += compiled - started
            times.link += time.perf_counter() - compiled
        return compiler.store.add(kernels, library, text)


def _explain(failed: CompilerFailed, kernels: Mapping[str, str], compiler: Compiler) -> ToolchainError:
    """The error to raise for a failed batch: it names the faulty kernel."""
    if failed.killed:
        return explain(failed, f"it was compiling {', '.join(kernels)}", "")
    fault = blame(failed.output, kernels)
    if fault is None:
        fault, failed = _try_each(failed, kernels, compiler)
    if fault is None:
        what = "the compiler failed on a batch of kernels, though on none of them alone"
        return explain(failed, what, "run the program again; the machine may be out of memory or disk space")
    return KernelCompileError(fault, kernels[fault.kernel], failed)


def _try_each(
    failed: CompilerFailed, kernels: Mapping[str, str], compiler: Compiler
) -> tuple[Blame | None, CompilerFailed]:
    """Compile the kernels of a failed batch one by one, if the compiler's messages name none of them."""
    for name, text in kernels.items():
        with compiler.store.workspace() as work:
            source = work / "kernel.cpp"
            source.write_text(source_text({name: text}))
            try:
                compiler.compile(source, work / "kernel.o")
            except CompilerFailed as alone:
                fault = blame(alone.output, {name: text}) or Blame(name, 0, _first_error(alone.output.splitlines()))
                return fault, alone
    return None, failed


def _first_error(lines: Iterable[str]) -> str:
    return next((line.strip() for line in lines if "error" in line), "no message")
