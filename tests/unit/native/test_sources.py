"""What native code is built of, with the package or at its first use."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.machine.kernels import sizes_text
from pellucid.native import loader, sources, toolchain
from pellucid.native.build import build, default_store, default_toolchain
from pellucid.native.compiler import Compiler
from pellucid.native.sources import FILES, LEVELS, SOURCES, library_name, shared_name
from pellucid.native.store import KernelStore
from tests.support import native_function
from tests.unit.native.support import product

ROOT = Path(__file__).parents[3]
HEADERS = (
    "torch/csrc/inductor/aoti_torch/c/shim.h",
    "torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h",
    "torch/csrc/stable/c/shim.h",
)


def test_pytorchs_own_headers_declare_the_same(tmp_path: Path) -> None:
    source = tmp_path / "both.cpp"
    includes = [f"#include <{name}>" for name in HEADERS]
    source.write_text("\n".join([*includes, '#include "torch_abi.h"', "static_assert(AOTI_TORCH_SUCCESS == 0);"]))
    command = (
        *default_toolchain().compiler,
        "-std=c++20",
        "-w",
        "-fsyntax-only",
        "-DTORCH_TARGET_VERSION=0x020d000000000000",
    )
    subprocess.run([*command, "-I", Path(torch.__file__).parent / "include", "-I", SOURCES, source], check=True)


def test_the_name_tells_what_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((SOURCES / name).read_bytes())
    before = library_name("runtime", FILES)
    monkeypatch.setattr(sources, "SOURCES", tmp_path)
    assert library_name("runtime", FILES) == before
    (tmp_path / "run.h").write_text("// changed\n")
    assert library_name("runtime", FILES) != before


def test_every_header_that_the_runtime_includes_is_among_its_files() -> None:
    included = {
        line.split('"')[1]
        for name in FILES
        for line in (SOURCES / name).read_text().splitlines()
        if line.startswith('#include "')
    }
    assert included == set(FILES[1:])


def package(target: Path, compiler: str) -> Path:
    """Where native code of the package lies, built there by that compiler."""
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", target / "base", "--build-lib", target]
    environment = {**os.environ, "CXX": compiler}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert ("native code is not built" in done.stderr) == (compiler == "no-such-compiler"), done.stderr
    return target / "pellucid" / "native"


def made_in(native: Path) -> set[str]:
    return {path.name for path in native.iterdir() if path.suffix in (".so", ".o")}


def test_the_package_brings_nothing_along_without_a_compiler(tmp_path: Path) -> None:
    assert made_in(package(tmp_path, "no-such-compiler")) == set()


@pytest.mark.sampled
def test_the_package_brings_native_code_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = package(tmp_path, default_toolchain().compiler[0])
    runtime = library_name("runtime", FILES)
    assert made_in(native) == {runtime, *map(shared_name, LEVELS)}
    assert ctypes.PyDLL(str(native / runtime)).pellucid_contended() in (0, 1)

    monkeypatch.setattr(toolchain, "SOURCES", native)
    monkeypatch.setattr(Compiler, "prepare_shared", lambda *_: pytest.fail("it came with the package"))
    store = KernelStore("key", tmp_path / "store")
    kernels = {f"came_{element}": product(f"came_{element}", element, 20) for element in ("float", "bf16", "f16")}
    addresses, _ = build(kernels, store=store)
    assert [native_function(address)(None, None, 0, 0) for address in addresses.values()] == [3, 3, 3]
    (library,) = set(store.find(kernels).values())
    came = toolchain.shipped(default_toolchain())
    assert came and library.stat().st_size < came.stat().st_size / 2  # without what is not called


def test_compilers_agree_on_the_names_of_shared_functions() -> None:
    """GCC and Clang mangle conditions of types differently, and either may link what the other compiled."""
    compiler = Compiler(default_toolchain(), default_store())
    for part in ("products_bf16", "windows_bf16", "windows_float"):
        names = subprocess.run(["nm", compiler.prepare_shared(part)], capture_output=True, text=True, check=True).stdout
        assert "_ZN2pv" in names and "conditional" not in names and "is_same" not in names


@pytest.mark.sampled
@pytest.mark.parametrize("content", [b"", b"no object file"])
def test_a_damaged_object_file_of_the_package_is_told_and_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    damaged, name = tmp_path / "shared-here.o", f"aside_{len(content)}"
    damaged.write_bytes(content)
    monkeypatch.setattr("pellucid.native.compiler.shipped", lambda _: damaged)
    store = KernelStore("key", tmp_path / "store")
    with pytest.warns(UserWarning, match=r"shared-here\.o cannot be linked.*reinstall Pellucid"):
        addresses, _ = build({name: product(name, "float", 20)}, store=store)
    assert native_function(addresses[name])(None, None, 0, 0) == 3
    assert store.file("shared-products_float.o")


def test_flags_of_the_users_own_leave_aside_what_came_with_the_package() -> None:
    own = default_toolchain()
    assert toolchain.shipped(dataclasses.replace(own, flags=(*own.flags, "-O1"))) is None


def test_the_name_tells_what_kernels_share_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = shared_name.__wrapped__
    before = set(map(name, LEVELS))
    assert len(before) == len(LEVELS)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "KERNEL_FLAGS", (*sources.KERNEL_FLAGS, "-O1"))
        assert before.isdisjoint(map(name, LEVELS))
    shutil.copytree(SOURCES, tmp_path / "native")
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "native")
    assert set(map(name, LEVELS)) == before
    (tmp_path / "native/sizes.h").write_text(sizes_text() + "// changed\n")
    assert before.isdisjoint(map(name, LEVELS))


def test_one_that_cannot_be_loaded_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("words.h", "sizes.h"):
        (tmp_path / name).write_bytes((SOURCES / name).read_bytes())
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    own = ctypes.PyDLL(None)

    def load(path: Path) -> ctypes.PyDLL:
        if path.parent == tmp_path:
            raise loader.ToolchainError("it was made for another system")
        return own

    monkeypatch.setattr(loader, "_load", load)
    monkeypatch.setattr(loader, "built", lambda *_: Path("/in/the/store"))
    assert loader._open() is own
    (tmp_path / library_name("runtime", FILES)).write_bytes(b"")
    assert loader._open() is own
    monkeypatch.setattr(loader, "_load", lambda path: pytest.fail("built") if path.parent != tmp_path else own)
    assert loader._open() is own
