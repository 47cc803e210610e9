"""The native runtime: what it is built of, with the package or at its first use."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pellucid.native import loader, runtime_source
from pellucid.native.build import default_toolchain
from pellucid.native.runtime_source import FILES, SOURCES, library_name

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
    monkeypatch.setattr(runtime_source, "SOURCES", tmp_path)
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


def test_the_package_brings_it_along_if_there_is_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")

    def build(compiler: str) -> list[Path]:
        target = tmp_path / Path(compiler).name
        command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", tmp_path, "--build-lib", target]
        environment = {**os.environ, "CXX": compiler}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert ("the native runtime is not built" in done.stderr) == (compiler == "no-such-compiler"), done.stderr
        return list(target.rglob("runtime-*.so"))

    assert build("no-such-compiler") == []
    (made,) = build(default_toolchain().compiler[0])
    assert made.parts[-3:] == ("pellucid", "native", library_name("runtime", FILES))
    assert ctypes.PyDLL(str(made)).pellucid_contended() in (0, 1)


def test_one_that_cannot_be_loaded_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words.h").write_bytes((SOURCES / "words.h").read_bytes())
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
